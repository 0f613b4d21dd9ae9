"""What is particular to the kernels: tiles, strides, many experts, descriptors, and bits equal to the loop's.

Shape legend: R rows, E experts, K and N features.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from moe_kernels import PluginError, select_grouped_gemm
from moe_kernels.grouped_gemm import grouped_gemm, triton_backend
from moe_kernels.grouped_gemm.loop_backend import LoopGroupedGemm
from moe_kernels.grouped_gemm.torch_backend import TorchGroupedGemm
from moe_kernels.grouped_gemm.triton_backend import TritonGroupedGemm
from moe_kernels.implementation import triton_unavailable
from moe_kernels.testing import FEW_RAGGED_CASES, GroupedGemmConformance, RaggedCase
from moe_kernels.triton_kernels.grouped_gemm_configs import INTERPRETED, TUNED, TileConfig, tile_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(bool(triton_unavailable(DEVICE)), reason=str(triton_unavailable(DEVICE)))

TRITON, LOOP = TritonGroupedGemm(), LoopGroupedGemm()


class TestTriton(GroupedGemmConformance):
    backend = TRITON
    device = DEVICE
    dtypes = (torch.float32,)
    features = ((31, 17),)


class TestTritonHalf(GroupedGemmConformance):
    """The interpreter gets bf16 as fp32: see the backend."""

    backend = TRITON
    device = DEVICE
    dtypes = (torch.bfloat16, torch.float16)
    features = ((16, 24),)
    cases = FEW_RAGGED_CASES


def integers(*shape: int) -> Tensor:
    """Of which sums are exact in fp32, so that every order of summation gives the same bits."""
    return torch.randint(-4, 5, shape, device=DEVICE).to(torch.float32)


def drawn(counts: tuple[int, ...], rows_after: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weights, gradients of rows, offsets."""
    case = RaggedCase("drawn", counts, rows_after)
    return integers(case.num_rows, k), integers(len(counts), k, n), integers(case.num_rows, n), case.offsets_E(DEVICE)


def check_all(x_RK: Tensor, w_EKN: Tensor, grad_RN: Tensor, offsets_E: Tensor, wanted_E: Tensor | None = None) -> None:
    """Every product has the bits of the loop's."""
    assert torch.equal(TRITON.forward(x_RK, w_EKN, offsets_E), LOOP.forward(x_RK, w_EKN, offsets_E))
    assert torch.equal(TRITON.dgrad(grad_RN, w_EKN, offsets_E), LOOP.dgrad(grad_RN, w_EKN, offsets_E))
    assert torch.equal(TRITON.wgrad(x_RK, grad_RN, offsets_E), LOOP.wgrad(x_RK, grad_RN, offsets_E))
    start_EKN = integers(*w_EKN.shape)
    mine, theirs = start_EKN.clone(), start_EKN.clone()
    TRITON.wgrad(x_RK, grad_RN, offsets_E, main_grad_EKN=mine, accumulate_E=wanted_E)
    LOOP.wgrad(x_RK, grad_RN, offsets_E, main_grad_EKN=theirs, accumulate_E=wanted_E)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_groups_have_the_bits_of_the_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def up_to(limit: int) -> int:
        return int(torch.randint(limit + 1, (), generator=generator))

    counts = tuple(up_to(40) if up_to(2) else 0 for _ in range(1 + up_to(5)))
    x_RK, w_EKN, grad_RN, offsets_E = drawn(counts, up_to(20), 1 + up_to(40), 1 + up_to(70))
    wanted_E = torch.rand(len(counts), generator=generator).to(DEVICE) < 0.5
    check_all(x_RK, w_EKN, grad_RN, offsets_E, wanted_E)


def test_a_row_goes_to_its_expert_among_many() -> None:
    counts = tuple((0, 0, 3, 0, 1)[expert % 5] if 90 < expert < 130 else 0 for expert in range(256))
    x_RK, w_EKN, _, offsets_E = drawn(counts, 2, 4, 5)
    assert torch.equal(TRITON.forward(x_RK, w_EKN, offsets_E), LOOP.forward(x_RK, w_EKN, offsets_E))


@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("n", [1, 32])
def test_the_smallest_sizes(k: int, n: int) -> None:
    check_all(*drawn((1, 0, 2), 1, k, n))


@pytest.mark.parametrize(
    "view",
    [
        lambda w_EKN: w_EKN.transpose(1, 2).contiguous().transpose(1, 2),
        lambda w_EKN: torch.cat([w_EKN, w_EKN], 2)[:, :, ::2],
        lambda w_EKN: torch.stack([w_EKN, w_EKN], 1)[:, 1],
        lambda w_EKN: w_EKN.reshape(*w_EKN.shape[:2], 2, -1).flatten(2),
    ],
    ids=["transposed", "every second column", "experts apart", "gate and up"],
)
def test_weights_and_rows_of_any_strides_are_not_copied_wrongly(view: Callable[[Tensor], Tensor]) -> None:
    x_RK, w_EKN, grad_RN, offsets_E = drawn((7, 0, 18), 3, 20, 34)
    check_all(torch.cat([x_RK, x_RK], 1)[:, 20:], view(w_EKN), grad_RN, offsets_E)
    check_all(x_RK.t().contiguous().t(), view(w_EKN), grad_RN.t().contiguous().t(), offsets_E)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_gradients_of_lower_precision_are_added_in_fp32_and_rounded_once(
    dtype: torch.dtype, main_dtype: torch.dtype
) -> None:
    x_RK, w_EKN, grad_RN, offsets_E = drawn((9, 0, 20), 0, 8, 33)
    start_EKN = torch.randn(w_EKN.shape, device=DEVICE).to(main_dtype)
    main_EKN = start_EKN.clone()
    TRITON.wgrad(x_RK.to(dtype), grad_RN.to(dtype), offsets_E, main_grad_EKN=main_EKN)
    exact = LOOP.wgrad(x_RK, grad_RN, offsets_E) + start_EKN.to(torch.float32)
    assert torch.equal(main_EKN, exact.to(main_dtype))


def test_a_main_gradient_may_be_a_transposed_view() -> None:
    x_RK, _, grad_RN, offsets_E = drawn((9, 0, 20), 0, 18, 33)
    main_ENK = integers(3, 33, 18)
    expected = LOOP.wgrad(x_RK, grad_RN, offsets_E) + main_ENK.transpose(1, 2)
    TRITON.wgrad(x_RK, grad_RN, offsets_E, main_grad_EKN=main_ENK.transpose(1, 2))
    assert torch.equal(main_ENK.transpose(1, 2), expected)


def test_offsets_beyond_the_rows_touch_nothing_that_is_not_there() -> None:
    x_RK, w_EKN, grad_RN, offsets_E = drawn((4, 4, 0), 0, 8, 8)
    beyond_E = torch.tensor([4, 20, 30], dtype=torch.int32, device=DEVICE)
    assert torch.equal(TRITON.forward(x_RK, w_EKN, beyond_E), TRITON.forward(x_RK, w_EKN, offsets_E))
    assert torch.equal(TRITON.wgrad(x_RK, grad_RN, beyond_E), TRITON.wgrad(x_RK, grad_RN, offsets_E))


# Tiles as data.


@pytest.fixture
def use_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[TileConfig], None]:
    return lambda tiles: monkeypatch.setattr(triton_backend, "_tiles", lambda *_: tiles)


@pytest.mark.parametrize("tiles", sorted(set(TUNED.values()), key=str), ids=lambda tiles: f"N{tiles.block_n}")
def test_the_tiles_of_a_device_give_the_same_bits(tiles: TileConfig, use_tiles: Callable[[TileConfig], None]) -> None:
    use_tiles(tiles)
    check_all(*drawn((130, 0, 3), 1, 66, 40))


def test_descriptors_give_the_same_bits(
    use_tiles: Callable[[TileConfig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []
    make = triton_backend._descriptor
    monkeypatch.setattr(triton_backend, "_descriptor", lambda x, block: (made.append(x), make(x, block))[1])
    use_tiles(replace(INTERPRETED, loads="descriptors"))
    check_all(*drawn((17, 0, 30, 1), 4, 20, 36))
    assert len(made) == 4
    check_all(*drawn((17, 0), 1, 21, 37))
    assert len(made) == 4, "rows that are not aligned to 16 bytes have no descriptor"


def test_tiles_follow_the_shape() -> None:
    assert tile_config("forward", 16, 7168, 4096, 512) is TUNED["forward", 16, 7168, 4096]
    assert tile_config("forward", 16, 7168, 4096, 8).block_m < tile_config("forward", 16, 7168, 4096, 512).block_m
    assert tile_config("dgrad", 16, 64, 4096, 512).block_n < tile_config("forward", 16, 64, 4096, 512).block_n
    assert tile_config("wgrad", 16, 999, 4096, 512).num_stages == 2


# Operators.


CASE = RaggedCase("mixed", (3, 0, 5), rows_after=1)
X, W, GRAD, MAIN = torch.randn(9, 8), torch.randn(3, 8, 12), torch.randn(9, 12), torch.zeros(3, 8, 12)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("triton_grouped_mm", (X, W, CASE.offsets_E())),
        ("triton_grouped_mm_wgrad", (X, GRAD, CASE.offsets_E())),
        ("triton_grouped_mm_wgrad_add_", (MAIN, X, GRAD, CASE.offsets_E(), torch.tensor([True, False, True]))),
    ],
)
def test_operators_pass_opcheck_and_count_flops(name: str, args: tuple[Tensor, ...]) -> None:
    operator = getattr(torch.ops.moe_kernels, name).default
    args = tuple(arg.to(DEVICE) for arg in args)
    with FlopCounterMode(display=False) as counter:
        operator(*args)
    assert counter.get_total_flops() == 2 * 9 * 8 * 12
    torch.library.opcheck(operator, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_pass_forward_and_backward(dtype: torch.dtype) -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x_RK = torch.empty(64, 31, dtype=dtype, requires_grad=True)
        w_EKN = torch.empty(4, 31, 17, dtype=dtype, requires_grad=True)
        grouped_gemm(x_RK, w_EKN, torch.empty(4, dtype=torch.int32), TRITON).sum().backward()
    assert x_RK.grad is not None
    assert w_EKN.grad is not None
    assert (x_RK.grad.shape, w_EKN.grad.shape) == (x_RK.shape, w_EKN.shape)
    assert counter.get_total_flops() == 3 * 2 * 64 * 31 * 17


def test_a_trace_has_the_operators() -> None:
    def gradients(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> tuple[Tensor, ...]:
        x_RK, w_EKN = x_RK.detach().requires_grad_(), w_EKN.detach().requires_grad_()
        return torch.autograd.grad(grouped_gemm(x_RK, w_EKN, offsets_E, TRITON).sum(), (x_RK, w_EKN))

    graph = make_fx(gradients, tracing_mode="fake")(X.to(DEVICE), W.to(DEVICE), CASE.offsets_E(DEVICE))
    names = [str(node.target) for node in graph.graph.nodes if "triton_grouped_mm" in str(node.target)]
    assert sorted(names) == [
        "moe_kernels.triton_grouped_mm.default",
        "moe_kernels.triton_grouped_mm.default",
        "moe_kernels.triton_grouped_mm_wgrad.default",
    ]


# The choice.


def test_it_is_chosen_by_name_and_never_by_auto() -> None:
    assert type(select_grouped_gemm("triton", torch.bfloat16, DEVICE)) is TritonGroupedGemm
    assert type(select_grouped_gemm("auto", torch.bfloat16, DEVICE)) is TorchGroupedGemm
    with pytest.raises(PluginError, match=r"'triton' cannot compute in torch.float64 on .*: .*float32, bfloat16"):
        select_grouped_gemm("triton", torch.float64, DEVICE)
    with pytest.raises(PluginError, match="not for mps"):
        select_grouped_gemm("triton", torch.float32, "mps")
