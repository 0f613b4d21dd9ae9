"""`LocalDispatcher`: all experts on one rank. Nothing travels; dispatch is the permutation alone.

Shape legend: T tokens here, K choices per token, D model, R rows after dispatch, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.checks import check_most_tokens, check_routing, check_rows, check_tokens, probs_of
from moe_comm.config import LocalConfig
from moe_comm.dispatcher import EXACT, Capabilities, Dispatched, DispatcherPlugin, Parcel, Plan, Sizing
from moe_comm.errors import MoeCommError
from moe_comm.traffic import note_host_sync
from moe_kernels import MoeKernelsError, Routing
from moe_kernels.permute import RowMap, permute, permute_with_probs, row_map, unpermute, unpermute_with_probs
from moe_parallel import Groups, Pending


@dataclass(frozen=True, kw_only=True)
class LocalPlan(Plan):
    """Plan of the local dispatcher.

    Attributes:
        map: which choice of which token becomes which row.
    """

    map: RowMap


class LocalDispatcher:
    """Dispatcher for one expert-parallel rank; a `TokenDispatcher[LocalPlan]`.

    Args:
        num_experts: E.
    """

    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
        largest_ep=1,
        static_shapes=True,
    )

    def __init__(self, num_experts: int) -> None:
        self.num_experts = self.num_local_experts = num_experts

    def plan(self, routing: Routing, sizing: Sizing = EXACT) -> LocalPlan:
        """Lay out the rows; the host is synchronised once, for the number of rows and the check of the ids.

        With `sizing.capacity_rows` it is not; ids out of range are then an overflow.

        Raises:
            MoeCommError: the routing or the sizing does not fit.
        """
        check_routing(routing, sizing, num_experts=self.num_experts, capabilities=self.capabilities)
        check_most_tokens(routing, sizing)
        if sizing.capacity_rows is None:
            note_host_sync()
        try:
            rows = row_map(
                routing.ids_TK,
                self.num_experts,
                row_multiple=sizing.row_multiple,
                capacity_rows=sizing.capacity_rows,
            )
        except MoeKernelsError as error:  # an id out of range, found by the synchronisation that row_map needs anyway
            raise MoeCommError(str(error)) from error
        return LocalPlan(
            num_tokens=routing.ids_TK.shape[0],
            num_choices=routing.ids_TK.shape[1],
            num_local_experts=self.num_experts,
            num_rows=rows.num_rows,
            counts_E=rows.counts_E,
            offsets_E=rows.offsets_E,
            overflow=rows.counts_E.new_zeros(()) if rows.overflow is None else rows.overflow,
            map=rows,
        )

    def prepare(self, plan: LocalPlan, x_TD: Tensor, probs_TK: Tensor) -> Parcel:
        """The tokens as they are.

        Raises:
            MoeCommError: tokens or probabilities do not fit the plan.
        """
        check_tokens(plan, x_TD, probs_TK, self.capabilities)
        return Parcel(rows=x_TD, probs=probs_TK)

    def exchange(self, plan: LocalPlan, parcel: Parcel) -> Pending[Parcel]:
        """Nothing travels."""
        return Pending.completed(parcel)

    def arrange(self, plan: LocalPlan, received: Parcel) -> Dispatched:
        """Copy each token to the rows of its experts."""
        rows_RD, probs_R = permute_with_probs(received.rows, probs_of(received), plan.map)
        return Dispatched(rows_RD=rows_RD, probs_R=probs_R, counts_E=plan.counts_E, offsets_E=plan.offsets_E, plan=plan)

    def prepare_return(self, plan: LocalPlan, rows_RD: Tensor) -> Parcel:
        """The expert outputs as they are.

        Raises:
            MoeCommError: the rows are not those of the plan.
        """
        check_rows(plan, rows_RD)
        return Parcel(rows=rows_RD)

    def exchange_return(self, plan: LocalPlan, parcel: Parcel) -> Pending[Parcel]:
        """Nothing travels."""
        return Pending.completed(parcel)

    def merge(self, plan: LocalPlan, received: Parcel) -> Tensor:
        """Sum the rows of each token in the order of its choices."""
        return unpermute(received.rows, plan.map)

    def dispatch_backward(self, plan: LocalPlan, grad_RD: Tensor, grad_R: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of tokens [T, D] and probabilities [T, K] from those of dispatched rows; not differentiable."""
        with torch.no_grad():
            return unpermute_with_probs(grad_RD, grad_R, plan.map)

    def combine_backward(self, plan: LocalPlan, grad_TD: Tensor) -> Tensor:
        """Gradients of expert outputs [R, D] from those of tokens; not differentiable."""
        with torch.no_grad():
            return permute(grad_TD, plan.map)


def _build(config: LocalConfig, groups: Groups, num_experts: int) -> LocalDispatcher:
    for axis, ranks in (("ep", groups.size("ep")), ("etp", groups.size("etp"))):
        if ranks != 1:
            raise MoeCommError(
                f"dispatcher 'local' keeps all experts whole on one rank, but {axis} = {ranks}; "
                f"choose a dispatcher that communicates (comm.kind), or parallel.{axis} = 1"
            )
    return LocalDispatcher(num_experts)


PLUGIN = DispatcherPlugin(name="local", interface_version=1, config=LocalConfig, available=lambda: None, build=_build)
