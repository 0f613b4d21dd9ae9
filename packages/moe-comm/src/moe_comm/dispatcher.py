"""`TokenDispatcher`: tokens to the ranks of their experts and back, as one plan and six steps.

    plan -> prepare -> exchange -> arrange -> (experts) -> prepare_return -> exchange_return -> merge

`plan` does the metadata exchange; the forward pass, its recompute and both backward passes reuse the plan, so row
counts cannot drift between them. Only `plan`, `exchange` and `exchange_return` communicate. Combine is an unweighted
sum, so that dispatch and combine are each other's backward; probabilities travel with the rows and experts apply them.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from moe_kernels import Routing
from moe_parallel import Groups, Pending

DISPATCHER_INTERFACE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a dispatcher can do; checked when it is built, so that a limit is an early error that names it.

    Attributes:
        dtypes: dtypes of token rows.
        largest_ep: largest number of expert-parallel ranks; None is no limit.
        largest_etp: largest number of ranks that an expert may be split over; None is no limit. A dispatcher that does
            not state it keeps whole experts.
        largest_top_k: largest K; None is no limit.
        hidden_multiple: D must be a multiple of this.
        static_shapes: supports `Sizing.capacity_rows`.
        deterministic: the same inputs give the same bits.
        fuses_permutation: `arrange` and `prepare_return` do nothing, the exchange already permutes.
    """

    dtypes: frozenset[torch.dtype]
    largest_ep: int | None = None
    largest_etp: int | None = 1
    largest_top_k: int | None = None
    hidden_multiple: int = 1
    static_shapes: bool = False
    deterministic: bool = True
    fuses_permutation: bool = False


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """How many rows a dispatch may produce.

    Attributes:
        row_multiple: every expert's rows are padded with zero rows to a multiple of this; an empty expert stays empty.
        capacity_rows: None sizes the result exactly (one host synchronisation in `plan` where ranks exchange). A
            number fixes the shape of the result, and of everything on the way; the host is not synchronised. Choices
            whose row would lie beyond it are an overflow: they get no row. The same number on every rank.
        overflow: what an overflow is: an error, which `refuse_overflow` raises where the host reads anyway (`raise`),
            or meant (`drop`), and counted.
        most_tokens: with `capacity_rows`, tokens of any rank at most, by which the way is sized; None where all ranks
            have equally many, which is checked the first time, and by a rank whose number is not that of its last plan.
    """

    row_multiple: int = 1
    capacity_rows: int | None = None
    overflow: Literal["raise", "drop"] = "raise"
    most_tokens: int | None = None


EXACT = Sizing()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The metadata of one dispatch. Backends subclass it and keep their own fields; it holds no token data.

    What a backend learns only as rows arrive, it may add with the first dispatch; combine comes after one.

    Attributes:
        num_tokens: T, tokens of this rank.
        num_choices: K.
        num_local_experts: E on this rank.
        num_rows: R, rows that `arrange` returns, padding included.
        counts_E: int64, rows per local expert without padding, on the device.
        offsets_E: int32, inclusive end of each local expert's rows, padding included, on the device.
        overflow: int64 scalar on the device, choices that found no row; of the ranks that share experts the first
            counts them.
    """

    num_tokens: int
    num_choices: int
    num_local_experts: int
    num_rows: int
    counts_E: Tensor
    offsets_E: Tensor
    overflow: Tensor


P = TypeVar("P", bound=Plan)


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """Rows ready for the wire, or just received; their order is the backend's own affair.

    Attributes:
        rows: token rows, first dim is the row.
        probs: probabilities that travel with the rows on the way to the experts; None on the way back.
        extra: further tensors a backend sends along, by name.
    """

    rows: Tensor
    probs: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Rows at their experts, grouped by local expert; inside a group by (source rank, source token, choice).

    Source ranks are those of the `etp` x `ep` block, etp fastest.

    Attributes:
        rows_RD: token rows; padding rows are zero.
        probs_R: probability of each row in the internal dtype; zero for padding rows.
        counts_E: int64, rows per local expert without padding.
        offsets_E: int32, inclusive end of each local expert's rows, padding included.
        plan: the plan that `combine` needs.
    """

    rows_RD: Tensor
    probs_R: Tensor
    counts_E: Tensor
    offsets_E: Tensor
    plan: Plan


class TokenDispatcher(Protocol[P]):
    """The seam. Every rank of the `etp` x `ep` block calls every step, also with zero tokens, also in backward.

    Where experts are split over `etp` ranks, all of them get the same rows, bit for bit, and the rows that each gives
    back are its part of a sum; gradients of rows and probabilities are parts of sums in the same way.
    """

    capabilities: Capabilities

    def plan(self, routing: Routing, sizing: Sizing = EXACT) -> P:
        """Exchange the metadata of one dispatch.

        Raises:
            MoeCommError: the routing does not fit (ids out of range, wrong number of experts, more choices or another
                sizing than `capabilities` allow); raised on every rank before any token moves.
        """

    def prepare(self, plan: P, x_TD: Tensor, probs_TK: Tensor) -> Parcel:
        """Gather rows for the wire. No communication."""

    def exchange(self, plan: P, parcel: Parcel) -> Pending[Parcel]:
        """Move the rows. Communication only; differentiable.

        Exchanges are waited for in the same order on every rank: a wait may start what has to follow.
        """

    def arrange(self, plan: P, received: Parcel) -> Dispatched:
        """Order received rows by local expert. No communication."""

    def prepare_return(self, plan: P, rows_RD: Tensor) -> Parcel:
        """Undo `arrange` on expert outputs. No communication."""

    def exchange_return(self, plan: P, parcel: Parcel) -> Pending[Parcel]:
        """Move the rows back, and add up the parts of split experts. Communication only; differentiable."""

    def merge(self, plan: P, received: Parcel) -> Tensor:
        """Sum each token's rows in a fixed order in the internal dtype: y_TD, in the dtype of the rows."""


def dispatch(dispatcher: TokenDispatcher[P], plan: P, x_TD: Tensor, probs_TK: Tensor) -> Dispatched:
    """Send tokens to their experts: `prepare`, `exchange`, `arrange`."""
    parcel = dispatcher.prepare(plan, x_TD, probs_TK)
    return dispatcher.arrange(plan, dispatcher.exchange(plan, parcel).wait())


def combine(dispatcher: TokenDispatcher[P], plan: P, rows_RD: Tensor) -> Tensor:
    """Bring expert outputs home and add them up: `prepare_return`, `exchange_return`, `merge`."""
    parcel = dispatcher.prepare_return(plan, rows_RD)
    return dispatcher.merge(plan, dispatcher.exchange_return(plan, parcel).wait())


C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class DispatcherPlugin(Generic[C]):
    """Plug-in record of a dispatcher (entry-point group `moe_comm.dispatchers`).

    Attributes:
        name: the value of `comm.kind` that selects it.
        interface_version: the version of this seam that it was written for.
        config: frozen keyword-only dataclass of its options, with a field `kind: Literal[name] = name`.
        available: None if it can run on this machine, else the reason.
        build: (config, groups, number of experts over all ranks) to the dispatcher; `groups` has the axes `ep` and
            `etp`, and the group of both.
    """

    name: str
    interface_version: int
    config: type[C]
    available: Callable[[], str | None]
    build: Callable[[C, Groups, int], TokenDispatcher[Any]]
