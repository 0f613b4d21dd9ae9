"""Dispatch and combine as plain torch operators, which `torch.compile`, FakeTensorMode and graph tools can look at.

    name = register(dispatcher)
    plan, counts_E, offsets_E, overflow = torch.ops.moe_comm.plan(ids_TK, num_experts, name)
    rows_RD, probs_R = torch.ops.moe_comm.dispatch(x_TD, probs_TK, plan, name)
    y_TD = torch.ops.moe_comm.combine(rows_RD * probs_R[:, None], plan, name, len(x_TD))

Operators take tensors, numbers and text, so a plan is passed on as an int64 scalar that stands for it: it is kept as
long as that tensor is, by whoever holds it, the autograd graph too. Each operator waits for its communication.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from moe_comm.dispatcher import Plan, Sizing, TokenDispatcher, combine, dispatch
from moe_comm.errors import MoeCommError
from moe_kernels import Routing, internal_dtype

_numbers = itertools.count(1)
_plans: dict[int, Plan] = {}
_dispatchers: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


@runtime_checkable
class Transposable(Protocol):
    """What a dispatcher has beside the seam so that the backward of its operators is one too.

    Neither method is differentiable; they communicate as the backward of the exchanges does.
    """

    def dispatch_backward(self, plan: Any, grad_RD: Tensor, grad_R: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of tokens [T, D] and probabilities [T, K] from those of rows and their probabilities."""

    def combine_backward(self, plan: Any, grad_TD: Tensor) -> Tensor:
        """Gradients of rows [R, D] from those of the combined tokens."""


def register(dispatcher: TokenDispatcher[Any]) -> str:
    """Name a dispatcher for the operators. The caller keeps the dispatcher; with it the name goes.

    Raises:
        MoeCommError: the dispatcher is not `Transposable`.
    """
    if not isinstance(dispatcher, Transposable):
        raise MoeCommError(
            f"{type(dispatcher).__name__} cannot be used through operators: it has no dispatch_backward and "
            "combine_backward (Transposable)"
        )
    name = f"{type(dispatcher).__name__}-{next(_numbers)}"
    _dispatchers[name] = dispatcher
    return name


def live_plans() -> int:
    """How many plans are kept for operators."""
    return len(_plans)


def _dispatcher(name: str) -> Any:
    found = _dispatchers.get(name)
    if found is None:
        raise MoeCommError(f"no dispatcher is registered as {name!r}, or it is gone; keep what you gave to `register`")
    return found


def _plan_of(handle: Tensor) -> Plan:
    found = _plans.get(int(handle))
    if found is None:
        raise MoeCommError("this is no plan of `torch.ops.moe_comm.plan`, or it is gone; pass on the tensor itself")
    return found


def _plan(
    ids_TK: Tensor,
    num_experts: int,
    dispatcher: str,
    row_multiple: int = 1,
    capacity_rows: int | None = None,
    most_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizing = Sizing(row_multiple=row_multiple, capacity_rows=capacity_rows, overflow="drop", most_tokens=most_tokens)
    # A plan looks at the form of probabilities alone.
    unused = torch.empty(ids_TK.shape, dtype=internal_dtype(torch.get_default_dtype()), device=ids_TK.device)
    made = _dispatcher(dispatcher).plan(Routing(ids_TK=ids_TK, probs_TK=unused, num_experts=num_experts), sizing)
    number = next(_numbers)
    handle = torch.tensor(number)
    _plans[number] = made
    weakref.finalize(handle, _plans.pop, number, None)
    return handle, made.counts_E.clone(), made.offsets_E.clone(), made.overflow.clone()


def _fake_plan(
    ids_TK: Tensor,
    num_experts: int,
    dispatcher: str,
    row_multiple: int = 1,
    capacity_rows: int | None = None,
    most_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    experts = _dispatcher(dispatcher).num_local_experts
    handle = torch.empty((), dtype=torch.int64, device="cpu")
    counts_E = ids_TK.new_empty(experts)
    return handle, counts_E, ids_TK.new_empty(experts, dtype=torch.int32), ids_TK.new_empty(())


def _dispatch(
    x_TD: Tensor, probs_TK: Tensor, plan: Tensor, dispatcher: str, capacity_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    made = _plan_of(plan)
    if capacity_rows is not None and made.num_rows != capacity_rows:
        raise MoeCommError(f"the plan was made for {made.num_rows} rows, not for capacity_rows = {capacity_rows}")
    with torch.no_grad():
        sent = dispatch(_dispatcher(dispatcher), made, x_TD, probs_TK)
    return sent.rows_RD, sent.probs_R


def _fake_dispatch(
    x_TD: Tensor, probs_TK: Tensor, plan: Tensor, dispatcher: str, capacity_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size() if capacity_rows is None else capacity_rows
    return x_TD.new_empty(rows, x_TD.shape[1]), probs_TK.new_empty(rows)


def _dispatch_backward(
    grad_RD: Tensor, grad_R: Tensor, plan: Tensor, dispatcher: str, num_tokens: int, num_choices: int
) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = _dispatcher(dispatcher).dispatch_backward(_plan_of(plan), grad_RD, grad_R)
    return grads


def _fake_dispatch_backward(
    grad_RD: Tensor, grad_R: Tensor, plan: Tensor, dispatcher: str, num_tokens: int, num_choices: int
) -> tuple[Tensor, Tensor]:
    return grad_RD.new_empty(num_tokens, grad_RD.shape[1]), grad_R.new_empty(num_tokens, num_choices)


def _combine(rows_RD: Tensor, plan: Tensor, dispatcher: str, num_tokens: int) -> Tensor:
    with torch.no_grad():
        y_TD = combine(_dispatcher(dispatcher), _plan_of(plan), rows_RD)
    # Where nothing travels and each token has one row, an operator must not give back its input.
    return y_TD.clone() if y_TD.data_ptr() == rows_RD.data_ptr() else y_TD


def _fake_combine(rows_RD: Tensor, plan: Tensor, dispatcher: str, num_tokens: int) -> Tensor:
    return rows_RD.new_empty(num_tokens, rows_RD.shape[1])


def _combine_backward(grad_TD: Tensor, plan: Tensor, dispatcher: str, num_rows: int) -> Tensor:
    grad_RD: Tensor = _dispatcher(dispatcher).combine_backward(_plan_of(plan), grad_TD)
    return grad_RD


def _fake_combine_backward(grad_TD: Tensor, plan: Tensor, dispatcher: str, num_rows: int) -> Tensor:
    return grad_TD.new_empty(num_rows, grad_TD.shape[1])


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = f"moe_comm::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, fake)
    return getattr(torch.ops.moe_comm, name.partition("::")[2]).default


_define(
    "plan(Tensor ids, SymInt num_experts, str dispatcher, SymInt row_multiple=1, SymInt? capacity_rows=None, "
    "SymInt? most_tokens=None) -> (Tensor plan, Tensor counts, Tensor offsets, Tensor overflow)",
    _plan,
    _fake_plan,
)
_define(
    "dispatch(Tensor x, Tensor probs, Tensor plan, str dispatcher, SymInt? capacity_rows=None) -> (Tensor, Tensor)",
    _dispatch,
    _fake_dispatch,
)
_back_of_dispatch = _define(
    "dispatch_backward(Tensor grad_rows, Tensor grad_probs, Tensor plan, str dispatcher, SymInt num_tokens, "
    "SymInt num_choices) -> (Tensor, Tensor)",
    _dispatch_backward,
    _fake_dispatch_backward,
)
_define("combine(Tensor rows, Tensor plan, str dispatcher, SymInt num_tokens) -> Tensor", _combine, _fake_combine)
_back_of_combine = _define(
    "combine_backward(Tensor grad, Tensor plan, str dispatcher, SymInt num_rows) -> Tensor",
    _combine_backward,
    _fake_combine_backward,
)


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, probs_TK, plan, ctx.dispatcher, _ = inputs
    ctx.save_for_backward(plan)
    ctx.shape = probs_TK.shape


def _grad_of_dispatch(ctx: Any, grad_RD: Tensor, grad_R: Tensor) -> tuple[Tensor | None, ...]:
    (plan,) = ctx.saved_tensors
    return *_back_of_dispatch(grad_RD, grad_R, plan, ctx.dispatcher, *ctx.shape), None, None, None


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows_RD, plan, ctx.dispatcher, _ = inputs
    ctx.save_for_backward(plan)
    ctx.num_rows = rows_RD.shape[0]


def _grad_of_combine(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    (plan,) = ctx.saved_tensors
    return _back_of_combine(grad_TD, plan, ctx.dispatcher, ctx.num_rows), None, None, None


torch.library.register_autograd("moe_comm::dispatch", _grad_of_dispatch, setup_context=_keep_for_dispatch)
torch.library.register_autograd("moe_comm::combine", _grad_of_combine, setup_context=_keep_for_combine)
