"""`AllToAllDispatcher`: every choice of a token travels as a row of its own, straight to the rank of its expert.

Rows leave sorted by global expert, so that what a rank gets is sorted by (source rank, local expert, token, choice);
`arrange` turns the first two around. Portable: gloo, NCCL and the threaded group of `run_threads`.

Where experts are split over `etp` ranks, a row goes to one of them, that with the sender's own place among them, which
then shares it with the others: so it crosses the expert-parallel axis once, and the copies stay on the axis whose ranks
are neighbours.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, S ranks that share an expert
(etp), W expert-parallel ranks (ep), B = W * S of the block in rank order (S fastest), E experts on this rank.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.checks import check_routing, check_tokens, id_out_of_range, words_for_id
from moe_comm.config import AllToAllConfig
from moe_comm.dispatcher import EXACT, Capabilities, Dispatched, DispatcherPlugin, Parcel, Plan, Sizing
from moe_comm.errors import MoeCommError
from moe_comm.exchange import Move, Splits, exchange, in_turn
from moe_comm.reorder import Reorder, arrange_rows, by_expert, return_rows
from moe_comm.sharing import gather, scatter_sum
from moe_comm.traffic import TrafficEntry, note_traffic
from moe_kernels import Routing
from moe_kernels.permute import RowMap, permute, permute_probs, row_map, unpermute
from moe_parallel import Groups, Pending, all_to_all

N = TypeVar("N", int, Tensor)


@dataclass(frozen=True, kw_only=True)
class AllToAllPlan(Plan):
    """Plan of the all-to-all dispatcher.

    Attributes:
        map: which choice of which token is which row on its way, sorted by global expert.
        splits: rows to and from each expert-parallel rank; None where there is one.
        shared: what has arrived here, to each rank that shares its experts, and from each; None where there is one.
        order: received to arranged rows; None where they are arranged as they come.
    """

    map: RowMap
    splits: Splits | None
    shared: Splits | None
    order: Reorder | None


class AllToAllDispatcher:
    """Dispatcher over one all-to-all-v per tensor; a `TokenDispatcher[AllToAllPlan]`.

    Args:
        groups: the axes `ep` and `etp` are used, and the group of both.
        num_experts: experts over all ranks, a multiple of `ep`.
    """

    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}), largest_etp=None
    )

    def __init__(self, groups: Groups, num_experts: int) -> None:
        self.num_experts = num_experts
        self._group, self._world = groups.group("ep"), groups.size("ep")
        self._sharers, self._etp, self._shard = groups.group("etp"), groups.size("etp"), groups.rank("etp")
        self._block = groups.group("etp", "ep")

    def plan(self, routing: Routing, sizing: Sizing = EXACT) -> AllToAllPlan:
        """Tell every rank how many rows its experts get from here, and whether the ids here are in order.

        One all-to-all of a count per expert and a word of health. The host is synchronised once, for what arrives.

        Raises:
            MoeCommError: the routing or the sizing does not fit; an id out of range is raised on every rank and names
                the rank that has it.
        """
        check_routing(routing, sizing, num_experts=self.num_experts, capabilities=self.capabilities)
        # Ids out of range are clamped for the layout's sake; the exchange below ends in an error then.
        bad_id = id_out_of_range(routing.ids_TK, self.num_experts)
        routing = replace(routing, ids_TK=routing.ids_TK.clamp(-1, self.num_experts - 1))
        to_BE = routing.counts_E().view(self._world, -1).repeat_interleave(self._etp, 0)
        health_and_from = self._exchange_counts(torch.cat((bad_id.expand(len(to_BE), 1), to_BE), 1)).wait()
        counts_SWE = health_and_from[:, 1:].view(self._world, self._etp, -1).transpose(0, 1)

        columns = torch.cat((health_and_from, to_BE.sum(1, keepdim=True)), 1).t().tolist()
        bad_ids, from_experts, send_rows = columns[0], columns[1:-1], columns[-1][:: self._etp]
        self._refuse(bad_ids)
        rows = row_map(routing.ids_TK, self.num_experts, num_rows=sum(send_rows))
        counts = [sum(from_ranks) for from_ranks in from_experts]
        num_received, num_rows = sum(counts), sum(_padded(count, sizing.row_multiple) for count in counts)
        counts_E = counts_SWE.sum((0, 1))
        ends_E = _padded(counts_E, sizing.row_multiple).cumsum(0)
        order = None  # rows arrive in order where only one axis has more than one
        if num_rows > num_received or sum(size > 1 for size in counts_SWE.shape) > 1:
            order = by_expert(counts_SWE, ends_E, num_received=num_received, num_rows=num_rows)
        splits, shared = self._splits(send_rows, [sum(from_rank) for from_rank in zip(*from_experts, strict=True)])
        return AllToAllPlan(
            num_tokens=rows.num_tokens,
            num_choices=rows.num_choices,
            num_local_experts=len(counts),
            num_rows=num_rows,
            counts_E=counts_E,
            offsets_E=ends_E.to(torch.int32),
            overflow=counts_E.new_zeros(()),
            map=rows,
            splits=splits,
            shared=shared,
            order=order,
        )

    def prepare(self, plan: AllToAllPlan, x_TD: Tensor, probs_TK: Tensor) -> Parcel:
        """Copy each token to one row per choice, sorted by global expert.

        Raises:
            MoeCommError: tokens or probabilities do not fit the plan.
        """
        check_tokens(plan, x_TD, probs_TK, self.capabilities)
        return Parcel(rows=permute(x_TD, plan.map), probs=permute_probs(probs_TK, plan.map))

    def exchange(self, plan: AllToAllPlan, parcel: Parcel) -> Pending[Parcel]:
        """Two all-to-alls, rows and probabilities; where experts are split, two more among their ranks."""
        moves: list[Move] = []
        if plan.splits is not None:
            moves.append(partial(exchange, splits=plan.splits, leg="dispatch"))
        if plan.shared is not None:
            moves.append(partial(gather, splits=plan.shared))
        return in_turn(parcel, moves)

    def arrange(self, plan: AllToAllPlan, received: Parcel) -> Dispatched:
        """Order the rows by (local expert, source rank) and pad each expert's."""
        if received.probs is None:
            raise MoeCommError("a parcel on the way to the experts carries probabilities, this one has none")
        rows_RD, probs_R = received.rows, received.probs
        if plan.order is not None:
            rows_RD, probs_R = arrange_rows(rows_RD, plan.order), arrange_rows(probs_R, plan.order)
        return Dispatched(rows_RD=rows_RD, probs_R=probs_R, counts_E=plan.counts_E, offsets_E=plan.offsets_E, plan=plan)

    def prepare_return(self, plan: AllToAllPlan, rows_RD: Tensor) -> Parcel:
        """Order the rows by (source rank, local expert) again, without padding.

        Raises:
            MoeCommError: the rows are not those of the plan.
        """
        if rows_RD.dim() != 2 or rows_RD.shape[0] != plan.num_rows:
            raise MoeCommError(f"the plan has {plan.num_rows} rows [rows, features], not {tuple(rows_RD.shape)}")
        return Parcel(rows=rows_RD if plan.order is None else return_rows(rows_RD, plan.order))

    def exchange_return(self, plan: AllToAllPlan, parcel: Parcel) -> Pending[Parcel]:
        """Where experts are split, one all-to-all among their ranks, of parts that are added up; then one back home."""
        moves: list[Move] = []
        if plan.shared is not None:
            moves.append(partial(scatter_sum, splits=plan.shared))
        if plan.splits is not None:
            moves.append(partial(exchange, splits=plan.splits.reversed(), leg="combine"))
        return in_turn(parcel, moves)

    def merge(self, plan: AllToAllPlan, received: Parcel) -> Tensor:
        """Sum the rows of each token in the order of its choices."""
        return unpermute(received.rows, plan.map)

    def _exchange_counts(self, health_and_to: Tensor) -> Pending[Tensor]:
        """Send row b to rank b of the block; one row comes from each rank."""
        if self._block is None:
            return Pending.completed(health_and_to)
        ones = [1] * len(health_and_to)
        row_bytes = health_and_to.shape[1] * health_and_to.itemsize
        note_traffic(TrafficEntry.between(self._block, "metadata", [row_bytes for _ in ones]))
        return all_to_all(health_and_to, self._block, send_rows=ones, receive_rows=ones)

    def _splits(self, send_rows: list[int], receive_rows: list[int]) -> tuple[Splits | None, Splits | None]:
        """Along `ep` and along `etp`, from rows to each expert-parallel rank and rows from each rank of the block."""
        splits, shared = None, None
        if self._group is not None:
            here = tuple(receive_rows[self._shard :: self._etp])
            splits = Splits(group=self._group, send_rows=tuple(send_rows), receive_rows=here)
        if self._sharers is not None:
            by_shard = tuple(sum(receive_rows[shard :: self._etp]) for shard in range(self._etp))
            mine = (by_shard[self._shard],) * self._etp
            shared = Splits(group=self._sharers, send_rows=mine, receive_rows=by_shard)
        return splits, shared

    def _refuse(self, bad_ids: list[int]) -> None:
        """Raise if a rank of the block reported an id; `bad_ids` is in the order of the block."""
        ranks = [""] if self._block is None else [f"rank {r}: " for r in dist.get_process_group_ranks(self._block)]
        found = [
            rank + words_for_id(bad_id, self.num_experts)
            for rank, bad_id in zip(ranks, bad_ids, strict=True)
            if bad_id != -1
        ]
        if found:
            raise MoeCommError("; ".join(found))


def _padded(count: N, multiple: int) -> N:
    return (count + multiple - 1) // multiple * multiple


def _build(config: AllToAllConfig, groups: Groups, num_experts: int) -> AllToAllDispatcher:
    return AllToAllDispatcher(groups, num_experts)


PLUGIN = DispatcherPlugin(
    name="alltoall", interface_version=1, config=AllToAllConfig, available=lambda: None, build=_build
)
