"""The Mixture-of-Experts layer: where router, dispatcher, experts and shared expert meet, each behind its Protocol.

The layer is a list of steps over an explicit state, tagged by what they occupy; `forward` runs the list. It names no
backend. Shape legend: T tokens, D model, L latent (equal to D unless the routed experts work at another width), K
choices, R rows after dispatch, E experts.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm import EXACT, Parcel, Plan, Sizing, TokenDispatcher
from moe_kernels import CapacityConfig, Routing, keep_choices, kept_choices
from moe_kernels.experts import ExpertCompute
from moe_memory.recompute import KEPT_UNITS, LayerUnits, Replay
from moe_parallel import Pending, SequenceInfo, Step, StepKind, run_steps
from moe_train.data.tokens import MicrobatchInfo
from moe_train.models.router import Router
from moe_train.models.statistics import RouterStatistics
from moe_train.scale import RoutingScale


@dataclass(frozen=True, kw_only=True)
class Routed:
    """What the router of a layer found for some tokens.

    Attributes:
        routing: their choices.
        probs_TK: the weights of these, with the gradients of the balance losses attached.
        losses: values of the balance losses.
    """

    routing: Routing
    probs_TK: Tensor
    losses: dict[str, Tensor]


@dataclass
class MoEState:
    """What the steps of one layer hand to each other. A step deletes what no later step needs.

    Attributes:
        x_TD: tokens.
        valid_T: bool, False for padding, which is routed nowhere.
        scale: weights of the balance losses; None in evaluation.
        replay: remembers choices and plan, so that a recomputed forward repeats them.
        info: of the microbatch, where the layer was told.
        routed: what `MoELayer.route` returned, if that was called before the layer.
        routing: all choices, those beyond the capacity of their expert too.
        kept: without these; None where nothing is limited.
    """

    x_TD: Tensor
    valid_T: Tensor
    scale: RoutingScale | None
    replay: Replay
    info: SequenceInfo | None = None
    routed: Routed | None = None
    routing: Routing = field(init=False)
    kept: Routing | None = field(init=False, default=None)
    probs_TK: Tensor = field(init=False)
    losses: dict[str, Tensor] = field(init=False)
    plan: Plan = field(init=False)
    parcel: Parcel = field(init=False)
    in_flight: Pending[Parcel] = field(init=False)
    shared_TD: Tensor = field(init=False)
    y_TD: Tensor = field(init=False)


class SharedExpert(nn.Module):
    """The expert that every token meets.

    Args:
        mlp: computes it.
        gate: [1, D], whose sigmoid weighs it for each token; None weighs it by one.
    """

    def __init__(self, mlp: nn.Module, gate: nn.Linear | None) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate = gate

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.mlp(x_TD)
        return y_TD if self.gate is None else torch.sigmoid(self.gate(x_TD)) * y_TD


class MoELayer(nn.Module):
    """y_t = sum over the chosen experts e of p_te * expert_e(x_t), plus shared(x_t) (numerics §5).

    Args:
        router: chooses experts.
        dispatcher: moves tokens to the ranks of their experts and back.
        experts: computes on rows that are grouped by local expert.
        shared: the shared expert; None leaves it out.
        latent_down, latent_up: projections [L, D] before dispatch and [D, L] after combine, between which the routed
            experts work at the width L; None where that is D.
        capacity: how many choices an expert takes at most, of this rank's tokens or of those of a microbatch; None
            limits nothing.
        sizing: of the rows that experts get in training; in evaluation they get what they need.
        units: of the layer.
    """

    def __init__(
        self,
        router: Router,
        dispatcher: TokenDispatcher[Any],
        experts: ExpertCompute,
        *,
        shared: SharedExpert | None = None,
        latent_down: nn.Linear | None = None,
        latent_up: nn.Linear | None = None,
        capacity: CapacityConfig | None = None,
        sizing: Sizing = EXACT,
        units: LayerUnits = KEPT_UNITS,
    ) -> None:
        super().__init__()
        self.router = router
        self.capacity = None if capacity is None or capacity.factor is None else capacity
        self.dispatcher = dispatcher
        self.sizing = sizing
        self.units = units
        self.experts = experts
        self.shared = shared
        self.latent_down = latent_down
        self.latent_up = latent_up
        self.steps = (
            Step("route", StepKind.COMPUTE, self._route),
            *(() if self.capacity is None else (Step("limit", StepKind.COMPUTE, self._limit),)),
            Step("plan", StepKind.EXCHANGE, self._plan),
            Step("prepare", StepKind.COMPUTE, self._prepare),
            Step("exchange", StepKind.EXCHANGE, self._exchange),
            *(() if shared is None else (Step("shared", StepKind.COMPUTE, self._shared),)),
            Step("experts", StepKind.COMPUTE, self._experts),
            Step("exchange_return", StepKind.EXCHANGE, self._exchange_return),
            Step("merge", StepKind.COMPUTE, self._merge),
        )

    def forward(
        self,
        x_TD: Tensor,
        valid_T: Tensor,
        scale: RoutingScale | None,
        replay: Replay,
        info: SequenceInfo | None = None,
        routed: Routed | None = None,
    ) -> tuple[Tensor, RouterStatistics]:
        """Output [T, D] and what the router did; padding tokens meet no routed expert.

        Whose tokens share a capacity over a microbatch says `info`, if it is the trainer's (`MicrobatchInfo`). Tokens
        that are `routed` already are not routed again.
        """
        state = MoEState(x_TD=x_TD, valid_T=valid_T, scale=scale, replay=replay, info=info, routed=routed)
        run_steps(self.steps, state)
        return state.y_TD, _statistics(state)

    def route(self, x_TD: Tensor, valid_T: Tensor, scale: RoutingScale | None, replay: Replay) -> Routed:
        """The first step of the layer, for who calls it apart; arguments are those of the forward."""
        ids_TK = replay.recall("ids")
        choices = None if ids_TK is not None or scale is None else scale.choices
        if choices is not None:
            ids_TK = choices.recall(self.router.name, self.router.config.top_k, x_TD.device)
        routing, logits_TE = self.router(x_TD, valid_T, ids_TK, scale)
        if choices is not None:
            choices.remember(self.router.name, routing.ids_TK)
        replay.remember("ids", routing.ids_TK)
        if scale is None:
            return Routed(routing=routing, probs_TK=routing.probs_TK, losses={})
        probs_TK, losses = self.router.balanced(routing, logits_TE, scale)
        return Routed(routing=routing, probs_TK=probs_TK, losses=losses)

    def _route(self, state: MoEState) -> None:
        with self.units.within("router"):
            routed = state.routed or self.route(state.x_TD, state.valid_T, state.scale, state.replay)
        state.routing, state.probs_TK, state.losses = routed.routing, routed.probs_TK, routed.losses
        state.routed = None

    def _limit(self, state: MoEState) -> None:
        assert self.capacity is not None
        group = state.info.part.capacity_group() if isinstance(state.info, MicrobatchInfo) else None
        kept_TK = state.replay.once("kept", partial(kept_choices, state.routing, self.capacity, group=group))
        state.kept = keep_choices(replace(state.routing, probs_TK=state.probs_TK), kept_TK)
        state.probs_TK = state.kept.probs_TK

    def _plan(self, state: MoEState) -> None:
        plan = state.replay.recall("plan")
        if plan is None:
            with self._dispatching():
                plan = self.dispatcher.plan(state.kept or state.routing, EXACT if state.scale is None else self.sizing)
        state.plan = plan
        state.replay.remember("plan", state.plan)

    def _prepare(self, state: MoEState) -> None:
        x_TL = state.x_TD if self.latent_down is None else self.latent_down(state.x_TD)
        with self._dispatching():
            state.parcel = self.dispatcher.prepare(state.plan, x_TL, state.probs_TK)
        del state.probs_TK
        if self.shared is None:
            del state.x_TD

    def _exchange(self, state: MoEState) -> None:
        with self._dispatching():
            state.in_flight = self.dispatcher.exchange(state.plan, state.parcel)
        del state.parcel

    def _shared(self, state: MoEState) -> None:
        shared = self.shared
        assert shared is not None
        state.shared_TD = self.units.run("shared_experts", lambda _, x_TD: shared(x_TD), state.x_TD)
        del state.x_TD

    def _experts(self, state: MoEState) -> None:
        with self._dispatching():
            dispatched = self.dispatcher.arrange(state.plan, state.in_flight.wait())
        del state.in_flight  # what arrived is not kept while experts compute
        with self.units.within("experts"):
            rows_RD = self.experts(dispatched.rows_RD, dispatched.probs_R, dispatched.offsets_E)
        with self._dispatching():
            state.parcel = self.dispatcher.prepare_return(state.plan, rows_RD)

    def _exchange_return(self, state: MoEState) -> None:
        with self._dispatching():
            state.in_flight = self.dispatcher.exchange_return(state.plan, state.parcel)
        del state.parcel

    def _dispatching(self) -> AbstractContextManager[None]:
        return self.units.within("dispatch", "dispatch")

    def _merge(self, state: MoEState) -> None:
        with self._dispatching():
            y_TL = self.dispatcher.merge(state.plan, state.in_flight.wait())
        del state.in_flight
        state.y_TD = y_TL if self.latent_up is None else self.latent_up(y_TL)
        if self.shared is not None:
            state.y_TD = state.y_TD + state.shared_TD
            del state.shared_TD


def _statistics(state: MoEState) -> RouterStatistics:
    routing = state.routing
    zero = routing.probs_TK.new_zeros(())
    # What the router wants is the load that losses and bias act on; what reached an expert is counted apart.
    counts = routing.counts_E()
    reached = counts if state.kept is None else state.kept.counts_E()
    return RouterStatistics(
        counts=counts,
        dropped=state.valid_T.sum() * routing.ids_TK.shape[1] - reached.sum() + state.plan.overflow,
        overflow=state.plan.overflow,
        bad_rows=routing.bad_rows,
        **{name: state.losses.get(name, zero) for name in ("aux", "seq", "glob", "z")},
    )
