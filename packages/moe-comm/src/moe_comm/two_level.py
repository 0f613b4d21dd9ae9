"""`TwoLevelDispatcher`: one copy of a token to every node that has an expert of it, and from there to its ranks.

The dispatchers `alltoall`, `allgather` and `hybrid` are this one with other groups: all ranks in one node, every rank a
node of its own, and as the machines are.

    there:  rail (same place in every node) -> node -> ranks that share experts (etp) -> experts
    back:   sums of a rank, then of its node, then of all nodes: each before the bytes leave

The ids of a token's choices ride with its row, so that who receives it knows where it goes next: one all-gather of
sizes is all the metadata there is. A plan is used again without them.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank, B ranks
of the block in rank order, W of them with other experts, N nodes; l lanes.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.checks import check_most_tokens, check_routing, check_rows, check_tokens, id_out_of_range, probs_of
from moe_comm.dispatcher import EXACT, Capabilities, Dispatched, Parcel, Plan, Sizing
from moe_comm.errors import MoeCommError
from moe_comm.hops import Lane, Reach, ids_of_rows
from moe_comm.journey import Journey
from moe_comm.landing import Arrivals, land
from moe_comm.metadata import announce, common_sizes, refuse_bad_ids, refuse_different_sizes, rows_by_member
from moe_comm.traffic import note_host_sync
from moe_comm.way import Level, Way
from moe_kernels import Routing
from moe_kernels.permute import RowMap, permute, permute_with_probs, row_map, unpermute, unpermute_with_probs
from moe_parallel import Groups, Pending


@dataclass
class Landing:
    """Where arrived rows go, once their ids are here."""

    map: RowMap | None = None


@dataclass(frozen=True, kw_only=True)
class TwoLevelPlan(Plan):
    """Plan of a dispatch over two levels.

    Attributes:
        ids_TK: int32 choices of the tokens here.
        first: which tokens go where with the first hop; None where all go to all, or nowhere.
        padded_tokens: rows that tokens are padded to before the first hop; T where they are not.
        arrivals: how many rows arrive from whom; None where nothing travels.
        row_multiple: every expert's rows are padded to a multiple of this.
        is_fixed: sizes are those of the worst case, and rows may not suffice.
        journey: the hops; without lanes where nothing travels.
        landing: the map of what arrives, filled by the first dispatch.
    """

    ids_TK: Tensor
    first: RowMap | None
    padded_tokens: int
    arrivals: Arrivals | None
    row_multiple: int
    is_fixed: bool
    journey: Journey
    landing: Landing = field(default_factory=Landing)

    @property
    def arrived(self) -> RowMap:
        """The map of what arrived.

        Raises:
            MoeCommError: nothing was dispatched with this plan yet.
        """
        if self.landing.map is None:
            raise MoeCommError("rows can return only after a dispatch with the same plan")
        return self.landing.map


class TwoLevelDispatcher:
    """Dispatcher over the rails and nodes of the expert-parallel ranks; a `TokenDispatcher[TwoLevelPlan]`.

    Args:
        groups: the axis `etp` is used, and its group with `ep`.
        num_experts: over all ranks, a multiple of their number.
        rail: ranks at the same place of every node.
        node: ranks of a node.
        copies_to_all: send every token to every node, whoever needs it: sizes are known without asking.
        row_per_choice: a row of its own for every choice of a token, instead of one for each receiver.
        lanes: consecutive parts of the tokens, whose hops overlap.
    """

    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
        largest_etp=None,
        static_shapes=True,
    )

    def __init__(
        self,
        groups: Groups,
        num_experts: int,
        *,
        rail: Level,
        node: Level,
        copies_to_all: bool = False,
        row_per_choice: bool = False,
        lanes: int = 1,
    ) -> None:
        self.num_experts = num_experts
        self.num_local_experts = num_experts // (rail.size * node.size)
        self._block = groups.group("etp", "ep")
        self._way = Way(
            rail=rail,
            node=node,
            sharers=Level.of(groups, "etp", "gather", "scatter"),
            local_experts=self.num_local_experts,
            copies_to_all=copies_to_all,
            row_per_choice=row_per_choice,
            lanes=lanes,
        )
        first = self._way.place * self.num_local_experts
        self._local = slice(first, first + self.num_local_experts)
        # The sizes that all ranks were last seen to share, by sizing and choices per token. With the last alone, a rank
        # that comes with another number of tokens compares, even if all ranks had that number once.
        self._agreed: dict[tuple[Sizing, int], dict[str, int]] = {}

    def plan(self, routing: Routing, sizing: Sizing = EXACT) -> TwoLevelPlan:
        """Tell every rank the sizes of this one's routing, and lay out the way.

        One all-gather. The host is synchronised once, for the sizes; with `sizing.capacity_rows` only when it is new.

        Raises:
            MoeCommError: the routing or the sizing does not fit; an id out of range is raised on every rank and names
                the rank that has it. With `sizing.capacity_rows` such an id is an overflow instead.
        """
        check_routing(routing, sizing, num_experts=self.num_experts, capabilities=self.capabilities)
        num_tokens, num_choices = routing.ids_TK.shape
        is_fixed = sizing.capacity_rows is not None
        sizes = common_sizes(sizing, num_tokens, num_choices)
        is_known = is_fixed and self._agreed.get((sizing, num_choices)) == sizes
        if is_known:
            check_most_tokens(routing, sizing)
        # Where there are too many tokens here, all ranks have to hear of it first.
        padded_tokens = max(num_tokens, sizes["most_tokens"])
        lane_size = max(1, -(-padded_tokens // self._way.lanes))
        if is_fixed:
            padded_tokens = lane_size * self._way.lanes

        bad_id = id_out_of_range(routing.ids_TK, self.num_experts)
        is_bad_TK = (routing.ids_TK < -1) | (routing.ids_TK >= self.num_experts)
        ids_TK = routing.ids_TK.masked_fill(is_bad_TK, -1)
        rows_lw = self._rows_by(self._way.ranks, ids_TK, lane_size)
        rows_ln = self._rows_by(self._way.nodes, ids_TK, lane_size) if self._way.asks_nodes else rows_lw[:, :0]
        chosen = replace(routing, ids_TK=ids_TK).counts_E()
        told = announce(self._block, bad_id, chosen, rows_lw, rows_ln, num_tokens, sizes)
        if not is_known:
            note_host_sync()
            on_host = told.on_host()
            refuse_different_sizes(on_host, self._block, sizes)
            if is_fixed:
                self._agreed[sizing, num_choices] = sizes

        chosen_E = told.counts_BE[:, self._local].sum(0)
        if sizing.capacity_rows is None:
            refuse_bad_ids(on_host.bad_id_B.tolist(), self._block, self.num_experts)
            lanes = self._way.exact_lanes(on_host)
            here = on_host.counts_BE[:, self._local].sum(0)
            num_rows = int(_rounded_up(here, sizing.row_multiple).sum())
            counts_E, ends_E = chosen_E, _rounded_up(chosen_E, sizing.row_multiple).cumsum(0)
            overflow = chosen_E.new_zeros(())
        else:
            lanes = self._way.fixed_lanes(lane_size, num_choices)
            num_rows = sizing.capacity_rows
            counts_E, ends_E = _within(chosen_E, sizing.row_multiple, num_rows)
            overflow = is_bad_TK.sum()
            if self._way.sharers.rank == 0:
                overflow = overflow + (chosen_E - counts_E).sum()
        first = self._first_map(ids_TK, lanes, lane_size)
        plan = TwoLevelPlan(
            num_tokens=num_tokens,
            num_choices=num_choices,
            num_local_experts=self.num_local_experts,
            num_rows=num_rows,
            counts_E=counts_E,
            offsets_E=ends_E.to(torch.int32),
            overflow=overflow,
            ids_TK=ids_TK.to(torch.int32),
            first=first,
            padded_tokens=padded_tokens,
            arrivals=self._way.arrivals(told, lanes, lane_size if is_fixed else None) if lanes else None,
            row_multiple=sizing.row_multiple,
            is_fixed=is_fixed,
            journey=Journey(lanes),
        )
        if not lanes:
            self._land(plan, _padded(plan.ids_TK, padded_tokens, -1))
        return plan

    def prepare(self, plan: TwoLevelPlan, x_TD: Tensor, probs_TK: Tensor) -> Parcel:
        """Copy each token to one row for every receiver of the first hop.

        Raises:
            MoeCommError: tokens or probabilities do not fit the plan.
        """
        check_tokens(plan, x_TD, probs_TK, self.capabilities)
        if plan.first is None:
            rows, probs = _padded(x_TD, plan.padded_tokens, 0), _padded(probs_TK, plan.padded_tokens, 0)
        elif self._way.row_per_choice:
            rows, probs = permute_with_probs(x_TD, probs_TK, plan.first)
            probs = probs.unsqueeze(1)
        else:
            rows, probs = permute(x_TD, plan.first), permute(probs_TK, plan.first)
        if plan.landing.map is not None:
            return Parcel(rows=rows, probs=probs)
        return Parcel(rows=rows, probs=probs, extra={"ids": self._first_ids(plan)})

    def exchange(self, plan: TwoLevelPlan, parcel: Parcel) -> Pending[Parcel]:
        """Rows, and their choices beside them: two collectives for every hop."""
        if not plan.journey.lanes:
            return Pending.completed(parcel)
        return plan.journey.there(parcel, lambda ids_CK: self._land(plan, ids_CK))

    def arrange(self, plan: TwoLevelPlan, received: Parcel) -> Dispatched:
        """Copy each row that arrived to the rows of its experts here."""
        rows_RD, probs_R = permute_with_probs(received.rows, probs_of(received), plan.arrived)
        return Dispatched(rows_RD=rows_RD, probs_R=probs_R, counts_E=plan.counts_E, offsets_E=plan.offsets_E, plan=plan)

    def prepare_return(self, plan: TwoLevelPlan, rows_RD: Tensor) -> Parcel:
        """Add up the rows of each row that arrived.

        Raises:
            MoeCommError: the rows are not those of the plan, or nothing was dispatched with it.
        """
        check_rows(plan, rows_RD)
        return Parcel(rows=unpermute(rows_RD, plan.arrived))

    def exchange_return(self, plan: TwoLevelPlan, parcel: Parcel) -> Pending[Parcel]:
        """One collective for every hop, and sums between them."""
        if not plan.journey.lanes:
            return Pending.completed(parcel)
        return plan.journey.back(parcel)

    def merge(self, plan: TwoLevelPlan, received: Parcel) -> Tensor:
        """Sum what came back for each token, in the order of the receivers."""
        if plan.first is not None:
            return unpermute(received.rows, plan.first)
        return received.rows[: plan.num_tokens] if plan.padded_tokens > plan.num_tokens else received.rows

    def dispatch_backward(self, plan: TwoLevelPlan, grad_RD: Tensor, grad_R: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of tokens [T, D] and probabilities [T, K] from those of dispatched rows; not differentiable."""
        with torch.no_grad():
            grad_rows, grad_probs = unpermute_with_probs(grad_RD, grad_R, plan.arrived)
            if plan.journey.lanes:
                grad_rows, grad_probs = plan.journey.there_backward(grad_rows, grad_probs)
            if plan.first is None:
                return grad_rows[: plan.num_tokens], grad_probs[: plan.num_tokens]
            if self._way.row_per_choice:
                return unpermute_with_probs(grad_rows, grad_probs[:, 0], plan.first)
            return unpermute(grad_rows, plan.first), unpermute(grad_probs, plan.first)

    def combine_backward(self, plan: TwoLevelPlan, grad_TD: Tensor) -> Tensor:
        """Gradients of expert outputs [R, D] from those of tokens; not differentiable."""
        with torch.no_grad():
            rows = _padded(grad_TD, plan.padded_tokens, 0) if plan.first is None else permute(grad_TD, plan.first)
            if plan.journey.lanes:
                rows = plan.journey.back_backward(rows)
            return permute(rows, plan.arrived)

    def _members(self, reach: Reach, ids_TK: Tensor) -> Tensor:
        return reach.member_of(ids_TK) if self._way.row_per_choice else reach.members_once(ids_TK)

    def _rows_by(self, reach: Reach, ids_TK: Tensor, lane_size: int) -> Tensor:
        return rows_by_member(self._members(reach, ids_TK), reach, lane_size, self._way.lanes)

    def _first_map(self, ids_TK: Tensor, lanes: tuple[Lane, ...], lane_size: int) -> RowMap | None:
        """Which tokens go where with the first hop, lane after lane."""
        if not lanes or lanes[0][0].reach is None:
            return None
        reach = lanes[0][0].reach
        members_TK = self._members(reach, ids_TK)
        if self._way.lanes > 1:
            lane_T = torch.arange(len(ids_TK), device=ids_TK.device) // lane_size
            members_TK = torch.where(members_TK >= 0, members_TK + lane_T.unsqueeze(1) * reach.members, -1)
        slots = self._way.lanes * reach.members
        if lanes[0][0].is_fixed:
            return row_map(members_TK, slots, rows_per_expert=lanes[0][0].send_rows[0])
        return row_map(members_TK, slots, num_rows=sum(lane[0].rows_at_hand for lane in lanes))

    def _first_ids(self, plan: TwoLevelPlan) -> Tensor:
        """The choices that ride with the rows of the first hop."""
        if plan.first is None:
            return _padded(plan.ids_TK, plan.padded_tokens, -1)
        if not self._way.row_per_choice:
            return ids_of_rows(plan.ids_TK, plan.first)
        choice_C = plan.first.choice_R
        if plan.ids_TK.numel() == 0:
            return plan.ids_TK.new_full((len(choice_C), 1), -1)
        ids_C = plan.ids_TK.flatten().index_select(0, choice_C.clamp(min=0)).masked_fill(choice_C < 0, -1)
        return ids_C.unsqueeze(1)

    def _land(self, plan: TwoLevelPlan, ids_CK: Tensor) -> None:
        plan.landing.map = land(
            ids_CK,
            plan.arrivals,
            first_expert=self._local.start,
            experts=self.num_local_experts,
            row_multiple=plan.row_multiple,
            num_rows=plan.num_rows,
            exact=not plan.is_fixed,
        )


def _rounded_up(counts: Tensor, multiple: int) -> Tensor:
    return (counts + multiple - 1) // multiple * multiple


def _within(chosen_E: Tensor, row_multiple: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Choices of each expert that find a row among `num_rows`, and the end of each expert's rows."""
    padded_E = _rounded_up(chosen_E, row_multiple)
    end_E = padded_E.cumsum(0)
    begin_E = end_E - padded_E
    end_E = end_E.clamp(max=num_rows)
    return (end_E - begin_E).clamp(min=0).minimum(chosen_E), end_E


def _padded(rows: Tensor, num_rows: int, value: int) -> Tensor:
    missing = num_rows - len(rows)
    return F.pad(rows, (0, 0, 0, missing), value=value) if missing else rows
