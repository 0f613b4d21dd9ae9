"""`AllToAllDispatcher`: every choice of a token travels as a row of its own, straight to the rank of its expert.

Rows leave sorted by global expert, so that what a rank gets is sorted by (source rank, local expert, token, choice);
`arrange` turns the first two around. Portable: gloo, NCCL and the threaded group of `run_threads`.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, W ranks, E experts on this rank.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.checks import check_routing, check_tokens, id_out_of_range, words_for_id
from moe_comm.config import AllToAllConfig
from moe_comm.dispatcher import EXACT, Capabilities, Dispatched, DispatcherPlugin, Parcel, Plan, Sizing
from moe_comm.errors import MoeCommError
from moe_comm.exchange import Splits, exchange
from moe_comm.reorder import Reorder, arrange_rows, by_expert, return_rows
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
        splits: rows to and from each rank; None where there is one rank.
        order: received to arranged rows; None where they are arranged as they come.
    """

    map: RowMap
    splits: Splits | None
    order: Reorder | None


class AllToAllDispatcher:
    """Dispatcher over one all-to-all-v per tensor; a `TokenDispatcher[AllToAllPlan]`.

    Args:
        groups: the axis `ep` is used.
        num_experts: experts over all ranks, a multiple of their number.
    """

    capabilities = Capabilities(dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}))

    def __init__(self, groups: Groups, num_experts: int) -> None:
        self.num_experts = num_experts
        self._group = groups.group("ep")
        self._world = groups.size("ep")

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
        to_WE = routing.counts_E().view(self._world, -1)
        health_and_from = self._exchange_counts(torch.cat((bad_id.expand(self._world, 1), to_WE), 1)).wait()
        from_WE = health_and_from[:, 1:]

        columns = torch.cat((health_and_from, to_WE.sum(1, keepdim=True)), 1).t().tolist()
        bad_ids, from_experts, send_rows = columns[0], columns[1:-1], columns[-1]
        self._refuse(bad_ids)
        rows = row_map(routing.ids_TK, self.num_experts, num_rows=sum(send_rows))
        counts = [sum(from_ranks) for from_ranks in from_experts]
        num_received, num_rows = sum(counts), sum(_padded(count, sizing.row_multiple) for count in counts)
        counts_E = from_WE.sum(0)
        ends_E = _padded(counts_E, sizing.row_multiple).cumsum(0)
        order = None  # rows from one rank, or for one expert, arrive in order
        if num_rows > num_received or min(from_WE.shape) > 1:
            order = by_expert(from_WE, ends_E, num_received=num_received, num_rows=num_rows)
        splits = None
        if self._group is not None:
            receive_rows = tuple(map(sum, zip(*from_experts, strict=True)))
            splits = Splits(group=self._group, send_rows=tuple(send_rows), receive_rows=receive_rows)
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
        """Two all-to-alls, rows and probabilities."""
        return Pending.completed(parcel) if plan.splits is None else exchange(parcel, plan.splits, "dispatch")

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
        """One all-to-all."""
        return Pending.completed(parcel) if plan.splits is None else exchange(parcel, plan.splits.reversed(), "combine")

    def merge(self, plan: AllToAllPlan, received: Parcel) -> Tensor:
        """Sum the rows of each token in the order of its choices."""
        return unpermute(received.rows, plan.map)

    def _exchange_counts(self, health_and_to: Tensor) -> Pending[Tensor]:
        """Send row r to rank r; one row comes from each rank."""
        if self._group is None:
            return Pending.completed(health_and_to)
        row_bytes = health_and_to.shape[1] * health_and_to.itemsize
        sent_bytes = (row_bytes,) * self._world
        note_traffic(TrafficEntry(leg="metadata", rank=self._group.rank(), sent_bytes=sent_bytes))
        ones = [1] * self._world
        return all_to_all(health_and_to, self._group, send_rows=ones, receive_rows=ones)

    def _refuse(self, bad_ids: list[int]) -> None:
        """Raise if a rank of the group reported an id; `bad_ids` is in the order of the group."""
        ranks = [""] if self._group is None else [f"rank {r}: " for r in dist.get_process_group_ranks(self._group)]
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
    etp = groups.size("etp")
    if etp != 1:
        raise MoeCommError(
            f"dispatcher 'alltoall' sends a row to one rank, but with etp = {etp} every expert is split over {etp}; "
            "set parallel.etp = 1"
        )
    return AllToAllDispatcher(groups, num_experts)


PLUGIN = DispatcherPlugin(
    name="alltoall", interface_version=1, config=AllToAllConfig, available=lambda: None, build=_build
)
