"""The kernels of the router against their plain twins. Shape legend: T tokens, K choices, E experts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from moe_kernels import MoeKernelsError, RouterConfig, Routing, route, stable_top_k
from moe_kernels.implementation import implementation, triton_unavailable
from moe_kernels.testing import rounding_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")

pytestmark = [
    pytest.mark.skipif(triton_unavailable(DEVICE) is not None, reason=str(triton_unavailable(DEVICE))),
    # Of the arithmetic of NaN that a bad row is made of, in the interpreter.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning"),
]


@dataclass(frozen=True)
class Case:
    """A rule, a number of experts, and whether a bias steers the choice."""

    experts: int
    config: RouterConfig
    bias: bool = False

    def __str__(self) -> str:
        config = self.config
        rule = f"{config.score} K{config.top_k} of {self.experts}"
        groups = f", groups {config.group_top_k}/{config.groups}" * (config.groups > 1)
        return f"{rule}{groups}{', bias' * self.bias}{', not normalised' * (not config.normalize)}"

    def bias_E(self) -> Tensor | None:
        # Negative sums of score and bias would lose against closed groups that were filled with zero.
        return torch.randn(self.experts, device=DEVICE) - 1 if self.bias else None


CASES = (
    Case(8, RouterConfig(top_k=2)),
    Case(7, RouterConfig(top_k=7, softmax_order="after_topk", normalize=False, scale=2.0)),
    Case(20, RouterConfig(top_k=5, normalize=False, scale=0.5)),
    Case(20, RouterConfig(top_k=3), bias=True),
    Case(12, RouterConfig(top_k=4, score="sigmoid", scale=2.5, groups=3, group_top_k=2), bias=True),
    Case(40, RouterConfig(top_k=6, score="softmax", normalize=False, groups=8, group_top_k=3)),
    Case(9, RouterConfig(top_k=3, score="sigmoid", normalize=False, groups=3, group_top_k=1)),
    Case(1, RouterConfig(top_k=1)),
    Case(130, RouterConfig(top_k=8, score="sigmoid"), bias=True),
)
cases = pytest.mark.parametrize("case", CASES, ids=str)


def by(name: Any, call: Callable[..., Routing], *arguments: Any, **options: Any) -> Routing:
    with implementation(name):
        return call(*arguments, **options)


def both(logits_TE: Tensor, config: RouterConfig, **options: Any) -> tuple[Routing, Routing]:
    return by("triton", route, logits_TE, config, **options), by("plain", route, logits_TE, config, **options)


def assert_as_good(got: Tensor, twin: Tensor, exact: Tensor) -> None:
    """Twice the error of the twin, and a rounding more where the twin is exact by luck."""
    scale = float(exact.norm())
    limit = 2 * float((twin.double() - exact).norm()) + 2 * torch.finfo(got.dtype).eps * scale
    error = float((got.double() - exact).norm())
    assert error <= limit, f"error {error:.3g} of {scale:.3g}, the limit is {limit:.3g}"


def weights_and_gradients(case: Case) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """By Triton, by the plain twin, and in fp64; ids are those of the first."""
    tokens = 11 if case.experts > 32 else 37
    logits_TE, valid_T = 2 * torch.randn(tokens, case.experts, device=DEVICE), torch.rand(tokens, device=DEVICE) < 0.8
    grad_TK = torch.randn(tokens, case.config.top_k, device=DEVICE)
    bias_E = case.bias_E()
    got, twin = both(logits_TE, case.config, bias_E=bias_E, valid_T=valid_T)
    assert torch.equal(got.ids_TK, twin.ids_TK)
    assert torch.equal(got.counts_E(), twin.counts_E())
    results = []
    for name, dtype in (("triton", torch.float32), ("plain", torch.float32), ("plain", torch.float64)):
        leaf_TE = logits_TE.to(dtype, copy=True).requires_grad_()
        options = {"bias_E": bias_E} if name == "triton" else {"ids_TK": got.ids_TK}
        probs_TK = by(name, route, leaf_TE, case.config, valid_T=valid_T, **options).probs_TK
        probs_TK.backward(grad_TK.to(dtype))
        results.append([probs_TK.detach(), leaf_TE.grad])
    return tuple(results)


@cases
def test_weights_and_gradients_are_as_exact_as_those_of_the_twin(case: Case) -> None:
    for got, twin, exact in zip(*weights_and_gradients(case), strict=True):
        assert_as_good(got, twin, exact)


@pytest.mark.parametrize("mutate", [lambda x: x / 2, torch.zeros_like, lambda x: x.roll(1, 0), lambda x: x.flip(1)])
@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=str)
def test_the_comparison_sees_a_wrong_result(case: Case, mutate: Callable[[Tensor], Tensor]) -> None:
    for got, twin, exact in zip(*weights_and_gradients(case), strict=True):
        with pytest.raises(AssertionError, match="the limit is"):
            assert_as_good(mutate(got), twin, exact)


@cases
def test_ties_go_to_the_lower_id(case: Case) -> None:
    logits_TE = torch.randint(-1, 2, (16, case.experts), device=DEVICE).float()
    logits_TE[:3] = 0
    bias_E = torch.randint(-2, 2, (case.experts,), device=DEVICE).float() if case.bias else None
    got, twin = both(logits_TE, case.config, bias_E=bias_E)
    assert torch.equal(got.ids_TK, twin.ids_TK)


ADVERSARIAL = {
    "all equal": torch.ones_like,
    "huge": lambda x: 1e30 * x,
    "largest": lambda x: torch.finfo(torch.float32).max * x.sign(),
    "denormal": lambda x: 1e-42 * x,
    "two left": lambda x: torch.where(torch.arange(x.shape[1], device=DEVICE) < x.shape[1] - 2, -INF, x),
    "a NaN": lambda x: torch.where(torch.arange(x.shape[1], device=DEVICE) == 1, NAN, x),
    "infinities": lambda x: torch.where(torch.arange(x.shape[1], device=DEVICE) % 3 == 0, INF, x),
    "minus infinity": lambda x: torch.full_like(x, -INF),
    "only NaN": lambda x: torch.full_like(x, NAN),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4], CASES[5]], ids=str)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_adversarial_rows_choose_as_the_twin_does(case: Case, name: str) -> None:
    torch.manual_seed(5)  # scores that saturate differ by less than a rounding from their neighbours
    logits_TE = torch.randn(10, case.experts, device=DEVICE)
    logits_TE[5:] = ADVERSARIAL[name](logits_TE[5:])
    got, twin = both(logits_TE, case.config, bias_E=case.bias_E() if case.bias and name != "denormal" else None)
    ordered_TK = got.ids_TK.sort(-1).values
    assert ((ordered_TK >= 0) & (ordered_TK < case.experts)).all()
    assert (ordered_TK.diff(dim=-1) > 0).all()
    assert torch.equal(got.bad_rows, twin.bad_rows)
    assert torch.equal(got.ids_TK, twin.ids_TK)
    torch.testing.assert_close(got.probs_TK, twin.probs_TK, equal_nan=True)


@cases
def test_given_choices_with_holes_and_repetitions(case: Case) -> None:
    logits_TE = torch.randn(19, case.experts, device=DEVICE)
    ids_TK = torch.randint(-1, case.experts, (19, case.config.top_k), device=DEVICE)
    ids_TK[0] = -1
    ids_TK[1] = 0
    grad_TK = torch.randn(ids_TK.shape, device=DEVICE)
    leaves = [logits_TE.clone().requires_grad_() for _ in range(2)]
    routings = [
        by(name, route, x, case.config, ids_TK=ids_TK) for name, x in zip(("triton", "plain"), leaves, strict=True)
    ]
    got, twin = routings
    assert torch.equal(got.ids_TK, ids_TK)
    assert torch.equal(got.counts_E(), twin.counts_E())
    torch.testing.assert_close(got.probs_TK, twin.probs_TK)
    assert not got.probs_TK[ids_TK < 0].any()
    grads = torch.autograd.grad([r.probs_TK for r in routings], leaves, [grad_TK, grad_TK])
    torch.testing.assert_close(*grads)


def test_a_given_id_that_does_not_exist_weighs_nan() -> None:
    ids_TK = torch.tensor([[0, 1], [0, 8]], device=DEVICE)
    routing = by("triton", route, torch.randn(2, 8, device=DEVICE), RouterConfig(), ids_TK=ids_TK)
    assert routing.probs_TK.isnan().any(-1).tolist() == [False, True]
    assert routing.counts_E().tolist() == [2, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=str)
def test_gradients_in_low_precision_are_rounded_once(case: Case, dtype: torch.dtype) -> None:
    logits_TE = torch.randn(21, case.experts, device=DEVICE).to(dtype)
    grad_TK = torch.randn(21, case.config.top_k, device=DEVICE)
    leaves = [logits_TE.clone().requires_grad_(), logits_TE.double().requires_grad_()]
    got = by("triton", route, leaves[0], case.config)
    exact = by("plain", route, leaves[1], case.config, ids_TK=got.ids_TK)
    grad_TE, exact_TE = torch.autograd.grad((got.probs_TK, exact.probs_TK), leaves, (grad_TK, grad_TK.double()))
    assert grad_TE.dtype == dtype
    limit_TE = exact_TE.abs() * rounding_error(dtype, "triton") + torch.finfo(dtype).smallest_normal + 1e-6
    assert ((grad_TE.double() - exact_TE).abs() <= limit_TE).all()


@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=str)
def test_a_second_call_gives_the_same_bits_and_strides_do_not_matter(case: Case) -> None:
    wide_TE = torch.randn(21, 2 * case.experts, device=DEVICE)
    bias_E = case.bias_E()
    results = []
    for x in (wide_TE[:, ::2], wide_TE[:, ::2].contiguous(), wide_TE[:, ::2].t().contiguous().t()):
        leaf_TE = x.detach().requires_grad_()
        routing = by("triton", route, leaf_TE, case.config, bias_E=bias_E)
        (grad_TE,) = torch.autograd.grad(routing.probs_TK.square().sum(), leaf_TE)
        results.append((routing.ids_TK, routing.probs_TK, grad_TE, routing.counts_E()))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize(("tokens", "experts", "k"), [(40, 9, 4), (3, 200, 8), (5, 6, 6), (0, 5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_equals_its_twin(tokens: int, experts: int, k: int, dtype: torch.dtype) -> None:
    x_TE = torch.randint(-3, 4, (tokens, experts), device=DEVICE).to(dtype)
    x_TE[x_TE == 3] = NAN
    x_TE[x_TE == -3] = -INF
    x_TE[x_TE == 2] = INF
    got, twin = (by(name, stable_top_k, x_TE, k) for name in ("triton", "plain"))
    assert torch.equal(got, twin)


def test_counts_follow_the_ids_and_not_the_call() -> None:
    routing = by("triton", route, torch.randn(9, 4, device=DEVICE), RouterConfig())
    assert int(routing.counts_E().sum()) == 18
    dropped = replace(routing, ids_TK=torch.full_like(routing.ids_TK, -1))
    assert not dropped.counts_E().any()


def operators() -> list[tuple[Any, tuple[Any, ...]]]:
    from moe_kernels.triton_kernels import routing as kernels

    logits_TE, bias_E = torch.randn(5, 12, device=DEVICE), torch.randn(12, device=DEVICE)
    valid_T = torch.tensor([True, False, True, True, True], device=DEVICE)
    ids_TK, probs_TK, _ = kernels.route(logits_TE, bias_E, valid_T, None, 4, 3, 2, True, True, 2.5)
    return [
        (kernels.route, (logits_TE, bias_E, valid_T, None, 4, 3, 2, True, True, 2.5)),
        (kernels.route, (logits_TE, None, None, ids_TK, 4, 1, 1, False, False, 1.0)),
        (kernels.route_backward, (probs_TK, logits_TE, ids_TK, probs_TK, True, True, 2.5)),
        (kernels.top_k, (logits_TE, 3)),
    ]


def test_operators_are_what_their_schemas_and_fakes_say() -> None:
    for call, arguments in operators():
        torch.library.opcheck(call, arguments, test_utils=("test_schema", "test_faketensor"))


def test_routing_is_traced_without_values() -> None:
    def weights(logits_TE: Tensor) -> Tensor:
        routing = route(logits_TE, RouterConfig())
        return torch.autograd.grad(routing.probs_TK.square().sum() + routing.counts_E().sum(), logits_TE)[0]

    logits_TE = torch.randn(6, 8, device=DEVICE, requires_grad=True)
    with implementation("triton"):
        graph = make_fx(weights, tracing_mode="symbolic")(logits_TE)
        torch.testing.assert_close(graph(logits_TE), weights(logits_TE))
    called = [str(node.target) for node in graph.graph.nodes if "moe_kernels" in str(node.target)]
    assert called == ["moe_kernels.route.default", "moe_kernels.route_backward.default"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("the expert bias", {"bias_E": torch.zeros(3)}),
        ("the validity of tokens", {"valid_T": torch.ones(5, dtype=torch.bool)}),
        ("earlier choices", {"ids_TK": torch.zeros(4, 3, dtype=torch.int64)}),
    ],
)
def test_tensors_that_do_not_fit_the_logits_are_refused(name: str, options: dict[str, Tensor]) -> None:
    with pytest.raises(MoeKernelsError, match=f"{name} must have the shape"):
        route(torch.zeros(4, 8), RouterConfig(), **options)
