"""What all Triton kernels without matrix products must do: norm, activation, rotary positions and cross-entropy.

Sizes are those where a program meets its limits: several programs, several rows in one, several blocks of a row, and a
remainder everywhere. What both implementations promise is in the tests of the operation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_kernels import apply_rope, gated_activation, rms_norm, rms_norm_residual, rope_tables
from moe_kernels.cross_entropy import cross_entropy
from moe_kernels.implementation import implementation, triton_unavailable
from moe_kernels.testing import rounding_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(triton_unavailable(DEVICE) is not None, reason="Triton cannot run here")
EPS = 1e-5


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 64 features are long for the norm; the real limit takes the interpreter seconds."""
    monkeypatch.setattr("moe_kernels.triton_kernels.norm._WIDEST", 64)


@dataclass(frozen=True)
class Case:
    """An operation, and shapes of the tensors that it is differentiated by; the first size is of rows."""

    name: str
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]

    def leaves(self, dtype: torch.dtype, rows: int | None = None) -> list[Tensor]:
        old = self.shapes[0][0]
        shapes = [shape if rows is None or shape[0] != old else (rows, *shape[1:]) for shape in self.shapes]
        return [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]


def rotated(x_BSHD: Tensor, features: int) -> Tensor:
    position_BS = torch.arange(x_BSHD.shape[0] * x_BSHD.shape[1], device=x_BSHD.device).view(x_BSHD.shape[:2])
    return apply_rope(x_BSHD, *rope_tables(position_BS, features, 100.0, x_BSHD.dtype))


def targets(logits_TV: Tensor) -> Tensor:
    return torch.arange(logits_TV.shape[0], device=logits_TV.device) * 2400


def masked_loss(logits_TV: Tensor) -> Tensor:
    return cross_entropy(logits_TV, targets(logits_TV), valid_T=targets(logits_TV) != 2400)


CASES = (
    Case("norm", lambda x, w: rms_norm(x, w, EPS), ((200, 20), (20,))),
    Case("norm of long rows", lambda x, w: rms_norm(x, w, EPS), ((3, 150), (150,))),
    Case("norm of a sum", lambda x, r, w: rms_norm_residual(x, r, w, EPS), ((200, 20), (200, 20), (20,))),
    Case("norm of long sums", lambda x, r, w: rms_norm_residual(x, r, w, EPS), ((3, 150), (3, 150), (150,))),
    Case("silu", lambda h, p: gated_activation(h, p, "silu"), ((4, 2200), (4,))),
    Case("gelu of short rows", lambda h, p: gated_activation(h, p, "gelu"), ((200, 14), (200,))),
    Case("silu without probabilities", lambda h: gated_activation(h, None, "silu"), ((2, 2200),)),
    Case("rotary positions", lambda x: rotated(x, 128), ((1, 9, 3, 128),)),
    Case("rotary positions in a part of a head", lambda x: rotated(x, 6), ((2, 70, 5, 11),)),
    Case("cross-entropy of a part", masked_loss, ((3, 5000),)),
    Case("smoothed cross-entropy", lambda x: cross_entropy(x, targets(x), label_smoothing=0.1), ((3, 5000),)),
)
cases = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def results(case: Case, leaves: list[Tensor], chosen: Any, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients; what comes back to the outputs is always the same, and exact in the dtype."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    with implementation(chosen):
        outputs = case.run(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        grads = [
            torch.randn(y.shape, generator=generator, device=DEVICE).to(dtype).to(y.dtype) if y.numel() else y.detach()
            for y in outputs
        ]
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def judge(got: list[Tensor], plain: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    """No error is more than twice the plain twin's, beyond what it owes to luck and what the interpreter truncates."""
    by_luck = 4 * torch.finfo(torch.float32).eps
    allowed = by_luck + 2 * (rounding_error(dtype, "triton") - rounding_error(dtype, "plain"))
    for mine, twins, truth in zip(got, plain, exact, strict=True):
        assert (mine.shape, mine.dtype) == (twins.shape, twins.dtype)
        limit = 2 * (twins.double() - truth).norm() + allowed * truth.norm()
        # Not `error > limit`: an error of NaN must fail.
        assert (mine.double() - truth).norm() <= limit


def doubled(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_are_at_most_twice_those_of_the_plain_twin(case: Case, dtype: torch.dtype) -> None:
    leaves = case.leaves(dtype)
    exact = results(case, doubled(leaves), "plain", dtype)
    judge(results(case, leaves, "triton", dtype), results(case, leaves, "plain", dtype), exact, dtype)


@cases
def test_r128_the_judge_sees_faults(case: Case) -> None:
    dtype = torch.float32
    leaves = case.leaves(dtype)
    exact = results(case, doubled(leaves), "plain", dtype)
    plain = results(case, leaves, "plain", dtype)
    mutations: list[Callable[[Tensor], Tensor]] = [
        lambda x: x / 2,
        torch.zeros_like,
        lambda x: x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1).roll(1, 0).view(x.shape),
    ]
    for index in range(len(plain)):
        for mutate in mutations:
            got = list(plain)
            got[index] = mutate(got[index])
            with pytest.raises(AssertionError):
                judge(got, plain, exact, dtype)


@cases
def test_bits_depend_neither_on_the_call_nor_on_strides(case: Case) -> None:
    """Neighbours in memory that belong to nobody are NaN: of features, and of rows."""
    leaves = case.leaves(torch.float32)
    before = [leaf.detach().clone() for leaf in leaves]
    expected = results(case, leaves, "triton", torch.float32)
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(leaves, before, strict=True))
    for dim in (-1, 1):
        apart = [torch.stack((leaf, torch.full_like(leaf, float("nan"))), dim).detach() for leaf in leaves]
        views = [x.select(dim, 0).requires_grad_() for x in apart]
        for one, other in zip(results(case, views, "triton", torch.float32), expected, strict=True):
            assert torch.equal(one, other)


@cases
def test_without_rows_the_gradient_of_a_weight_is_zero(case: Case) -> None:
    leaves = case.leaves(torch.float32, rows=0)
    got, plain = (results(case, leaves, chosen, torch.float32) for chosen in ("triton", "plain"))
    for one, other in zip(got, plain, strict=True):
        assert torch.equal(one, other)


@cases
def test_what_is_traced_has_the_shapes_and_strides_of_what_runs(case: Case) -> None:
    leaves = case.leaves(torch.bfloat16)
    with implementation("triton"), FakeTensorMode() as mode:
        fakes = [mode.from_tensor(leaf) for leaf in leaves]
        outputs = case.run(*fakes)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        traced = [*outputs, *torch.autograd.grad(outputs, fakes, [torch.ones_like(y) for y in outputs])]
    for fake, real in zip(traced, results(case, leaves, "triton", torch.bfloat16), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


class Recorder(TorchDispatchMode):
    """Calls of the operators of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "moe_kernels":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


@cases
def test_operators_are_what_they_say(case: Case) -> None:
    leaves = case.leaves(torch.float32)
    with Recorder() as recorder:
        results(case, leaves, "triton", torch.float32)
    assert len(recorder.calls) == 2
    for function, args in recorder.calls:
        torch.library.opcheck(function, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", [case for case in CASES if case.name.startswith("norm")], ids=lambda case: case.name)
def test_programs_of_the_backward_norm_take_turns(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("moe_kernels.triton_kernels.norm")
    monkeypatch.setattr(kernels, "_PROGRAMS", 2)
    leaves = case.leaves(torch.float32)
    exact = results(case, doubled(leaves), "plain", torch.float32)
    plain = results(case, leaves, "plain", torch.float32)
    judge(results(case, leaves, "triton", torch.float32), plain, exact, torch.float32)


def test_logits_of_minus_infinity_have_no_part_in_the_loss() -> None:
    logits_TV = torch.randn(3, 5000, device=DEVICE)
    logits_TV[:, :4500] = float("-inf")
    targets_T = torch.tensor([4500, 4999, 4700], device=DEVICE)
    with implementation("triton"):
        got = cross_entropy(logits_TV, targets_T)
    torch.testing.assert_close(got, F.cross_entropy(logits_TV, targets_T, reduction="none"))


@pytest.mark.parametrize("target", [-1, 30, 10**9])
def test_a_target_outside_the_vocabulary_shows(target: int) -> None:
    logits_TV = torch.randn(3, 30, device=DEVICE, requires_grad=True)
    with implementation("triton"):
        loss_T = cross_entropy(logits_TV, torch.tensor([4, target, 5], device=DEVICE))
        (grad_TV,) = torch.autograd.grad(loss_T.sum(), logits_TV)
    assert loss_T.isnan().tolist() == [False, True, False]
    assert grad_TV.isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's own tracer warns of what it does itself
def test_compiles_in_one_graph() -> None:
    leaves = [leaf for case in CASES for leaf in case.leaves(torch.float32)]

    def all_at_once(*leaves: Tensor) -> Tensor:
        total, rest = leaves[0].new_zeros(()), list(leaves)
        for case in CASES:
            mine, rest = rest[: len(case.shapes)], rest[len(case.shapes) :]
            outputs = case.run(*mine)
            total = total + sum(y.sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
        return total

    with implementation("triton"):
        expected = all_at_once(*leaves)
        got = torch.compile(all_at_once, backend="aot_eager", fullgraph=True)(*leaves)
        for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
            torch.testing.assert_close(one, other)
    torch.testing.assert_close(got, expected)
