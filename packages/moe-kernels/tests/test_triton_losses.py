"""The kernels of scores and balance losses against their plain twins.

Shape legend: T tokens, K choices, E experts, G segments.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from moe_kernels import MoeKernelsError, balance_loss, global_balance_loss, scores, z_loss
from moe_kernels.implementation import implementation, triton_unavailable
from moe_kernels.testing import rounding_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")

pytestmark = pytest.mark.skipif(triton_unavailable(DEVICE) is not None, reason=str(triton_unavailable(DEVICE)))


def inputs(tokens: int, experts: int, segments: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, ids with some choices missing, segments in no order of which the last has no token, validity."""
    logits_TE = 2 * torch.randn(tokens, experts, device=DEVICE)
    ids_TK = torch.randint(-1, experts, (tokens, min(experts, 3)), device=DEVICE)
    segment_T = torch.randint(0, max(segments - 1, 1), (tokens,), device=DEVICE)
    return logits_TE, ids_TK, segment_T, torch.rand(tokens, device=DEVICE) < 0.7


def score_part(score: Any) -> Callable[..., Tensor]:
    return lambda logits_TE, ids_TK, segment_T, valid_T: scores(logits_TE, score)


def balance_part(logits_TE: Tensor, ids_TK: Tensor, segment_T: Tensor, valid_T: Tensor) -> Tensor:
    return balance_loss(torch.sigmoid(logits_TE), ids_TK, segment_T, 9, valid_T=valid_T)


def whole_part(logits_TE: Tensor, ids_TK: Tensor, segment_T: Tensor, valid_T: Tensor) -> Tensor:
    return balance_loss(torch.sigmoid(logits_TE), ids_TK, torch.zeros_like(segment_T), 1)


def global_part(logits_TE: Tensor, ids_TK: Tensor, segment_T: Tensor, valid_T: Tensor) -> Tensor:
    counts_E = torch.arange(logits_TE.shape[1], device=DEVICE)
    return global_balance_loss(torch.sigmoid(logits_TE), counts_E, 50, 40, 2, valid_T=valid_T)


def window_part(logits_TE: Tensor, ids_TK: Tensor, segment_T: Tensor, valid_T: Tensor) -> Tensor:
    counts_E = torch.arange(logits_TE.shape[1], device=DEVICE)
    return global_balance_loss(torch.sigmoid(logits_TE), counts_E, torch.tensor(50, device=DEVICE), 40, 2)


def z_part(logits_TE: Tensor, ids_TK: Tensor, segment_T: Tensor, valid_T: Tensor) -> Tensor:
    return z_loss(logits_TE)


PARTS = {
    "softmax": score_part("softmax"),
    "sigmoid": score_part("sigmoid"),
    "balance": balance_part,
    "one segment": whole_part,
    "global": global_part,
    "window": window_part,
    "z": z_part,
}
parts = pytest.mark.parametrize("part", PARTS)


def value_and_gradient(name: Any, dtype: torch.dtype, part: str, given: tuple[Tensor, ...]) -> list[Tensor]:
    leaf_TE = given[0].to(dtype, copy=True).requires_grad_()
    with implementation(name):
        value = PARTS[part](leaf_TE, *given[1:])
        slope = torch.linspace(-1, 2, value.numel(), dtype=value.dtype, device=DEVICE).view(value.shape)
        (grad_TE,) = torch.autograd.grad(value, leaf_TE, slope)
    return [value.detach(), grad_TE]


def assert_as_good(got: Tensor, twin: Tensor, exact: Tensor) -> None:
    scale = float(exact.norm())
    # Where sums are added up in another order the twin may be exact by luck.
    limit = 2 * float((twin.double() - exact).norm()) + 4 * torch.finfo(got.dtype).eps * scale
    error = float((got.double() - exact).norm())
    assert error <= limit, f"error {error:.3g} of {scale:.3g}, the limit is {limit:.3g}"


def compared(part: str, given: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return zip(
        value_and_gradient("triton", torch.float32, part, given),
        value_and_gradient("plain", torch.float32, part, given),
        value_and_gradient("plain", torch.float64, part, given),
        strict=True,
    )


@parts
@pytest.mark.parametrize(("tokens", "experts", "segments"), [(21, 8, 3), (7, 20, 2), (3, 130, 9), (40, 1, 4)])
def test_value_and_gradient_are_as_exact_as_those_of_the_twin(
    part: str, tokens: int, experts: int, segments: int
) -> None:
    for got, twin, exact in compared(part, inputs(tokens, experts, segments)):
        assert_as_good(got, twin, exact)


@pytest.mark.parametrize("part", ["balance", "global"])
def test_more_tokens_than_a_program_adds_up_at_a_time(part: str) -> None:
    for got, twin, exact in compared(part, inputs(2500, 4, 3)):
        assert_as_good(got, twin, exact)


@parts
@pytest.mark.parametrize("mutate", [lambda x: x / 2, torch.zeros_like, lambda x: x + x.abs().max() * 1e-4])
def test_the_comparison_sees_a_wrong_result(part: str, mutate: Callable[[Tensor], Tensor]) -> None:
    for got, twin, exact in compared(part, inputs(21, 8, 3)):
        with pytest.raises(AssertionError, match="the limit is"):
            assert_as_good(mutate(got), twin, exact)


@pytest.mark.parametrize("part", ["balance", "global"])
def test_tokens_that_do_not_count_may_hold_anything(part: str) -> None:
    logits_TE, ids_TK, segment_T, valid_T = inputs(19, 6, 3)
    clean = value_and_gradient("triton", torch.float32, part, (logits_TE, ids_TK, segment_T, valid_T))
    dirty_TE = torch.where(valid_T[:, None], logits_TE, NAN)
    leaf_TE = torch.sigmoid(dirty_TE).requires_grad_()
    with implementation("triton"):
        if part == "balance":
            loss = balance_loss(leaf_TE, ids_TK, segment_T, 9, valid_T=valid_T)
        else:
            loss = global_balance_loss(leaf_TE, torch.arange(6, device=DEVICE), 50, 40, 2, valid_T=valid_T)
        (grad_TE,) = torch.autograd.grad(loss.sum(), leaf_TE)
    assert torch.equal(loss.detach(), clean[0])
    assert not grad_TE[~valid_T].any()


@parts
def test_a_second_call_gives_the_same_bits(part: str) -> None:
    given = inputs(21, 8, 3)
    results = [value_and_gradient("triton", torch.float32, part, given) for _ in range(2)]
    assert all(map(torch.equal, *results))


def test_strides_do_not_matter() -> None:
    wide_TE = torch.randn(13, 12, device=DEVICE)
    for call in (z_loss, lambda x: scores(x, "sigmoid")):
        for x in (wide_TE[:, ::2], wide_TE.t().contiguous().t()):
            leaf_TE, dense_TE = x.detach().requires_grad_(), x.detach().contiguous().requires_grad_()
            with implementation("triton"):
                values = call(leaf_TE), call(dense_TE)
            assert torch.equal(*values)
            grads = [
                torch.autograd.grad(v.square().sum(), y)[0] for v, y in zip(values, (leaf_TE, dense_TE), strict=True)
            ]
            assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", ["softmax", "sigmoid", "z"])
def test_gradients_in_low_precision_are_rounded_once(part: str, dtype: torch.dtype) -> None:
    given = inputs(21, 8, 3)
    given = (given[0].to(dtype), *given[1:])
    value, grad_TE = value_and_gradient("triton", dtype, part, given)
    exact, exact_TE = value_and_gradient("plain", torch.float64, part, given)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    assert grad_TE.dtype == dtype
    limit_TE = exact_TE.abs() * rounding_error(dtype, "triton") + torch.finfo(dtype).smallest_normal + 1e-5
    assert ((grad_TE.double() - exact_TE).abs() <= limit_TE).all()


@parts
def test_no_tokens_are_an_ordinary_case(part: str) -> None:
    logits_TE, ids_TK, segment_T, valid_T = inputs(0, 5, 1)
    value, grad_TE = value_and_gradient("triton", torch.float32, part, (logits_TE, ids_TK, segment_T, valid_T))
    assert not value.any()
    assert grad_TE.shape == (0, 5)


def test_operators_are_what_their_schemas_and_fakes_say() -> None:
    from moe_kernels.triton_kernels import losses as kernels

    logits_TE, ids_TK, segment_T, valid_T = inputs(6, 5, 3)
    scores_TE = kernels.scores(logits_TE, True)
    loss_T, lse_T = kernels.z_loss(logits_TE)
    counts = kernels.segment_counts(ids_TK, segment_T, valid_T, 3, 5)
    slope_GE = kernels.balance_slope(counts, 2.5)
    loss_G = kernels.weighted_scores(scores_TE, slope_GE, segment_T, valid_T)
    for call, arguments in (
        (kernels.scores, (logits_TE, True)),
        (kernels.scores_backward, (scores_TE, logits_TE, scores_TE, True)),
        (kernels.z_loss, (logits_TE,)),
        (kernels.z_loss_backward, (loss_T, logits_TE, lse_T)),
        (kernels.segment_counts, (ids_TK, segment_T, valid_T, 3, 5)),
        (kernels.balance_slope, (counts, 2.5)),
        (kernels.weighted_scores, (scores_TE, slope_GE, segment_T, valid_T)),
        (kernels.weighted_scores_backward, (loss_G, slope_GE, segment_T, None, 6)),
    ):
        torch.library.opcheck(call, arguments, test_utils=("test_schema", "test_faketensor"))


def test_losses_are_traced_without_values() -> None:
    def gradient(logits_TE: Tensor, ids_TK: Tensor, segment_T: Tensor, valid_T: Tensor, counts_E: Tensor) -> Tensor:
        scores_TE = scores(logits_TE, "sigmoid")
        loss_G = balance_loss(scores_TE, ids_TK, segment_T, 3, valid_T=valid_T)
        total = loss_G.sum() + z_loss(logits_TE).sum() + global_balance_loss(scores_TE, counts_E, 9, 9, 2)
        return torch.autograd.grad(total, logits_TE)[0]

    logits_TE, *rest = *inputs(6, 5, 3), torch.arange(5, device=DEVICE)
    arguments = (logits_TE.requires_grad_(), *rest)
    with implementation("triton"):
        graph = make_fx(gradient, tracing_mode="fake")(*arguments)
        torch.testing.assert_close(graph(*arguments), gradient(*arguments))
    called = {str(node.target) for node in graph.graph.nodes if "moe_kernels" in str(node.target)}
    assert len(called) == 8


def test_tensors_that_do_not_fit_the_scores_are_refused() -> None:
    scores_TE, ids_TK, segment_T = torch.rand(4, 3), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4).long()
    with pytest.raises(MoeKernelsError, match="4 tokens have scores, and 2 have segment_T"):
        balance_loss(scores_TE, ids_TK, segment_T[:2], 1)
    with pytest.raises(MoeKernelsError, match="4 tokens have scores, and 5 have valid_T"):
        global_balance_loss(scores_TE, torch.ones(3), 1, 1, 1, valid_T=torch.ones(5, dtype=torch.bool))
    with pytest.raises(MoeKernelsError, match="3 experts have as many counts"):
        global_balance_loss(scores_TE, torch.ones(4), 1, 1, 1)
