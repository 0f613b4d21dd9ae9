"""Shape legend: R rows, E experts, K and N features."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from moe_kernels import GROUPED_GEMM, MoeKernelsError, PluginError, select_grouped_gemm
from moe_kernels.grouped_gemm import GroupedGemm, KernelSpec, grouped_gemm, torch_backend
from moe_kernels.grouped_gemm.loop_backend import LoopGroupedGemm
from moe_kernels.grouped_gemm.torch_backend import TorchGroupedGemm, aligned_mm, aligned_wgrad
from moe_kernels.grouped_gemm.triton_backend import TritonGroupedGemm
from moe_kernels.implementation import triton_unavailable
from moe_kernels.testing import FEW_RAGGED_CASES, GroupedGemmConformance, RaggedCase

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF)
needs_interpreter = pytest.mark.skipif(
    triton_unavailable("cpu") is not None, reason="Triton computes with CPU tensors in its interpreter alone"
)
on_host = pytest.mark.parametrize("backend", [LoopGroupedGemm(), TorchGroupedGemm()], ids=["loop", "torch"])
offsets = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(LoopGroupedGemm(), id="loop"),
        pytest.param(TorchGroupedGemm(), id="torch"),
        pytest.param(TritonGroupedGemm(), id="triton", marks=needs_interpreter),
    ],
)


class TestLoop(GroupedGemmConformance):
    backend = LoopGroupedGemm()
    dtypes = (torch.float64, *FLOATS)


class TestTorch(GroupedGemmConformance):
    backend = TorchGroupedGemm()


class TestTorchOnAnotherCPU(GroupedGemmConformance):
    """The products in low precision as they run where the CPU is of the other kind."""

    backend = TorchGroupedGemm()
    dtypes = HALF

    @pytest.fixture(autouse=True)
    def other_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wide = torch_backend._wide_cpu()
        monkeypatch.setattr(torch_backend, "_wide_cpu", lambda: not wide)


class AlignedGroupedGemm(TorchGroupedGemm):
    """What runs on an accelerator: F.grouped_mm with padding in every dtype."""

    def forward(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        return aligned_mm(x_RK, w_EKN, offsets_E)

    def wgrad(self, x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor, **main_grad: Any) -> Tensor:
        return (
            super().wgrad(x_RK, grad_RN, offsets_E, **main_grad)
            if main_grad
            else aligned_wgrad(x_RK, grad_RN, offsets_E)
        )


class TestAligned(GroupedGemmConformance):
    backend = AlignedGroupedGemm()


# Case R128: the kit must fail for every one of these.


class Damaged(LoopGroupedGemm):
    """The loop with one method's result, or its arguments, damaged."""

    def __init__(self, method: str, damage: Callable[..., Tensor]) -> None:
        self.damage = {method: damage}

    def forward(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        return self._call("forward", super().forward, x_RK, w_EKN, offsets_E)

    def dgrad(self, grad_RN: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        return self._call("dgrad", super().dgrad, grad_RN, w_EKN, offsets_E)

    def wgrad(self, x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor, **main_grad: Any) -> Tensor:
        return self._call("wgrad", super().wgrad, x_RK, grad_RN, offsets_E, **main_grad)

    def _call(self, method: str, function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
        damage = self.damage.get(method)
        return function(*args, **options) if damage is None else damage(function, *args, **options)


def zeros(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    return function(*args, **options).zero_()


def halves(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    return function(*args, **options).div_(2)


def slightly_off(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    return function(*args, **options).mul_(1.02)


def swaps_experts(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    x, other, offsets_E = args
    if other.dim() == 3:
        return function(x, other.roll(1, 0), offsets_E)
    return function(*args, **options).roll(1, 0)


def nan_after_the_end(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    y = function(*args, **options)
    y[int(args[2][-1]) :] = float("nan")
    return y


def empty_experts_unwritten(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    dw_EKN = function(*args, **options)
    sizes_E = torch.diff(args[2], prepend=torch.zeros(1, dtype=torch.int32))
    dw_EKN[sizes_E == 0] = torch.empty_like(dw_EKN[sizes_E == 0])
    return dw_EKN


def mask_ignored(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    return function(*args, **{**options, "accumulate_E": None})


def main_grad_overwritten(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    main_grad_EKN = options.get("main_grad_EKN")
    if main_grad_EKN is None:
        return function(*args)
    return main_grad_EKN.copy_(function(*args))


def input_scaled_in_place(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    y = function(*args, **options)
    args[0].mul_(2)
    return y


MUTANTS = [
    *((method, damage) for method in ("forward", "dgrad", "wgrad") for damage in (zeros, halves, slightly_off)),
    *((method, swaps_experts) for method in ("forward", "dgrad", "wgrad")),
    ("forward", nan_after_the_end),
    ("dgrad", nan_after_the_end),
    ("wgrad", empty_experts_unwritten),
    ("wgrad", mask_ignored),
    ("wgrad", main_grad_overwritten),
    ("forward", input_scaled_in_place),
]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(("method", "damage"), MUTANTS)
def test_r128_the_kit_fails_for_a_damaged_backend(method: str, damage: Callable[..., Tensor], few: bool) -> None:
    kit = GroupedGemmConformance()
    if few:
        kit.features, kit.cases = ((31, 17),), FEW_RAGGED_CASES
    kit.backend = Damaged(method, damage)
    tests = [test for name, test in inspect.getmembers(kit, inspect.ismethod) if name.startswith("test_")]
    assert len(tests) == 6
    assert any(fails(test) for test in tests)


def fails(test: Callable[[], None]) -> bool:
    try:
        test()
    except AssertionError:
        return True
    return False


# The differentiable function.


def drawn(case: RaggedCase, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x_RK = torch.randn(case.num_rows, k).to(dtype).requires_grad_()
    w_EKN = torch.randn(len(case.counts), k, n).to(dtype).requires_grad_()
    return x_RK, w_EKN, case.offsets_E()


@pytest.mark.parametrize("case", [RaggedCase("mixed", (2, 0, 3), rows_after=2), RaggedCase("none", (0, 0))])
def test_gradcheck_through_the_loop(case: RaggedCase) -> None:
    x_RK, w_EKN, offsets_E = drawn(case, 3, 4, torch.float64)
    backend = LoopGroupedGemm()
    assert torch.autograd.gradcheck(lambda x, w: grouped_gemm(x, w, offsets_E, backend), (x_RK, w_EKN))


@offsets
def test_gradients_match_autograd_of_separate_products(backend: GroupedGemm) -> None:
    x_RK, w_EKN, offsets_E = drawn(RaggedCase("mixed", (5, 0, 9, 1)), 24, 20, torch.float32)
    grads = torch.autograd.grad(grouped_gemm(x_RK, w_EKN, offsets_E, backend).square().sum(), (x_RK, w_EKN))
    groups = x_RK.double().split((5, 0, 9, 1))
    y_RN = torch.cat([group @ w_KN for group, w_KN in zip(groups, w_EKN.double(), strict=True)])
    expected = torch.autograd.grad(y_RN.square().sum(), (x_RK, w_EKN))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@offsets
@pytest.mark.parametrize("rows_after", [0, 3])
@pytest.mark.parametrize("features", [5, 16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_r053_no_rows_at_all(backend: GroupedGemm, rows_after: int, features: int, dtype: torch.dtype) -> None:
    x_RK, w_EKN, offsets_E = drawn(RaggedCase("empty", (0, 0, 0), rows_after=rows_after), 8, features, dtype)
    w_EKN.grad = torch.ones_like(w_EKN)  # accumulation leaves an existing gradient as it is
    y_RN = grouped_gemm(x_RK, w_EKN, offsets_E, backend)
    assert y_RN.shape == (rows_after, features)
    assert y_RN.dtype == dtype
    assert y_RN.requires_grad
    assert not y_RN.any()
    y_RN.sum().backward()
    assert x_RK.grad is not None
    assert x_RK.grad.shape == x_RK.shape
    assert x_RK.grad.dtype == dtype
    assert not x_RK.grad.any()
    assert torch.equal(w_EKN.grad, torch.ones_like(w_EKN))


@offsets
@pytest.mark.parametrize("needed", ["x", "w", "none"])
def test_r053_only_the_gradients_that_are_needed(backend: GroupedGemm, needed: str) -> None:
    calls: list[str] = []

    class Recording(LoopGroupedGemm):
        def forward(self, *args: Tensor) -> Tensor:
            return backend.forward(*args)

        def dgrad(self, *args: Tensor) -> Tensor:
            calls.append("x")
            return backend.dgrad(*args)

        def wgrad(self, *args: Tensor, **_: Any) -> Tensor:
            calls.append("w")
            return backend.wgrad(*args)

    x_RK, w_EKN, offsets_E = drawn(RaggedCase("mixed", (2, 3)), 8, 8, torch.float32)
    x_RK.requires_grad_(needed == "x")
    w_EKN.requires_grad_(needed == "w")
    y_RN = grouped_gemm(x_RK, w_EKN, offsets_E, Recording())
    assert y_RN.requires_grad == (needed != "none")
    if needed != "none":
        y_RN.sum().backward()
        assert calls == [needed]


@on_host
def test_offsets_beyond_the_rows_are_refused(backend: GroupedGemm) -> None:
    x_RK, w_EKN, _ = drawn(RaggedCase("mixed", (4, 4)), 8, 8, torch.float32)
    beyond_E = torch.tensor([4, 9], dtype=torch.int32)
    with pytest.raises(MoeKernelsError, match="8 rows"):
        backend.forward(x_RK.detach(), w_EKN.detach(), beyond_E)
    with pytest.raises(MoeKernelsError, match="8 rows"):
        backend.wgrad(x_RK.detach(), x_RK.detach(), beyond_E)


# The operators of the torch backend.


MIXED = RaggedCase("mixed", (3, 0, 5), rows_after=1)
X, W, GRAD, MAIN = torch.randn(9, 8), torch.randn(3, 8, 12), torch.randn(9, 12), torch.zeros(3, 8, 12)


@pytest.mark.parametrize("method", ["forward", "wgrad"])
def test_without_autograd_a_mode_sees_the_operator_and_nobody_else_pays_for_it(method: str) -> None:
    backend = TorchGroupedGemm()
    x_RK, w_EKN, offsets_E = torch.randn(30, 8), torch.randn(3, 8, 12), torch.tensor([4, 20, 30], dtype=torch.int32)
    second = w_EKN if method == "forward" else torch.randn(30, 12)
    with torch.no_grad():
        direct = getattr(backend, method)(x_RK, second, offsets_E)
        with FlopCounterMode(display=False) as counter:
            seen = getattr(backend, method)(x_RK, second, offsets_E)
        with torch.profiler.profile() as profile:
            getattr(backend, method)(x_RK, second, offsets_E)
    assert torch.equal(direct, seen)
    assert counter.get_total_flops() == 2 * 30 * 8 * 12
    assert not any("moe_kernels::" in event.key for event in profile.key_averages())


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("grouped_mm", (X, W, MIXED.offsets_E())),
        ("grouped_mm_wgrad", (X, GRAD, MIXED.offsets_E())),
        ("grouped_mm_wgrad_add_", (MAIN, X, GRAD, MIXED.offsets_E(), torch.tensor([True, False, True]))),
        ("grouped_mm_wgrad_add_", (MAIN, X, GRAD, MIXED.offsets_E(), None)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_pass_opcheck_and_count_flops(name: str, args: tuple[Tensor | None, ...], dtype: torch.dtype) -> None:
    operator = getattr(torch.ops.moe_kernels, name).default
    args = tuple(arg.to(dtype) if arg is not None and arg.is_floating_point() else arg for arg in args)
    with FlopCounterMode(display=False) as counter:
        operator(*args)
    assert counter.get_total_flops() == 2 * 9 * 8 * 12
    torch.library.opcheck(operator, args)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fake_tensors_pass_forward_and_backward(dtype: torch.dtype) -> None:
    backend = TorchGroupedGemm()
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x_RK = torch.empty(64, 31, dtype=dtype, requires_grad=True)
        w_EKN = torch.empty(4, 31, 17, dtype=dtype, requires_grad=True)
        grouped_gemm(x_RK, w_EKN, torch.empty(4, dtype=torch.int32), backend).sum().backward()
    assert x_RK.grad is not None
    assert w_EKN.grad is not None
    assert (x_RK.grad.shape, w_EKN.grad.shape) == (x_RK.shape, w_EKN.shape)
    assert w_EKN.grad.dtype == dtype
    assert counter.get_total_flops() == 3 * 2 * 64 * 31 * 17


# The choice.


def test_both_built_ins_are_installed_and_can_run() -> None:
    assert {"loop", "torch"} <= set(GROUPED_GEMM.names())
    for name in ("loop", "torch"):
        spec = GROUPED_GEMM.get_available(name)
        assert isinstance(spec, KernelSpec)
        assert type(spec.build()) is type(select_grouped_gemm(name, torch.float32, "cpu"))


@pytest.mark.parametrize(
    ("dtype", "chosen", "reason"),
    [(torch.float32, TorchGroupedGemm, ""), (torch.float64, LoopGroupedGemm, "not torch: .*float64")],
)
def test_auto_logs_one_line_with_the_reason(
    dtype: torch.dtype, chosen: type, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="moe_kernels"):
        assert type(select_grouped_gemm("auto", dtype, "cpu")) is chosen
    [record] = caplog.records
    assert record.getMessage().startswith("grouped GEMM backend: ")
    assert bool(reason) == ("not torch" in record.getMessage())
    if reason:
        assert "float64" in record.getMessage()


def test_an_explicit_name_never_falls_back() -> None:
    with pytest.raises(PluginError, match=r"'torch' cannot compute in torch.float64 on cpu: .*float32, bfloat16"):
        select_grouped_gemm("torch", torch.float64, "cpu")
    with pytest.raises(PluginError, match=r"unknown grouped GEMM backend 'torhc'; .*did you mean 'torch'\?"):
        select_grouped_gemm("torhc", torch.float32, "cpu")
    with pytest.raises(PluginError, match="not mps"):
        select_grouped_gemm("torch", torch.float32, "mps")
    with pytest.raises(PluginError, match="no grouped GEMM backend can run here"):
        select_grouped_gemm("auto", torch.int64, "cpu")
