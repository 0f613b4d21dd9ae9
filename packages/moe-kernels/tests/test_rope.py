"""Tests in fp64 are of the plain implementation; those with a fixture `implementation` are of both.

Shape legend: B sequences, S slots, H heads, D features of a head, F rotated features.
"""

import pytest
import torch
from torch import Tensor

from moe_kernels import MoeKernelsError, YarnConfig, apply_rope, rope_tables, yarn_softmax_factor
from moe_kernels.testing import rounding_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rotated_by_complex_numbers(x_BSHD: Tensor, position_BS: Tensor, features: int, base: float) -> Tensor:
    """Pair (i, i + F/2) as a complex number times exp(i angle)."""
    pairs = torch.complex(x_BSHD[..., : features // 2], x_BSHD[..., features // 2 : features])
    frequency = base ** (-2 * torch.arange(features // 2, dtype=torch.float64) / features)
    angle = position_BS[..., None].double() * frequency
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    return torch.cat((turned.real, turned.imag, x_BSHD[..., features:]), -1)


@pytest.mark.parametrize("features", [4, 8])
@pytest.mark.usefixtures("pass_size")
def test_value_and_gradient_are_a_rotation_of_pairs(features: int) -> None:
    x_BSHD = torch.randn(2, 9, 3, 8, dtype=torch.float64, requires_grad=True)
    position_BS = torch.randint(0, 50, (2, 9))
    tables = rope_tables(position_BS, features, 100.0, torch.float64)
    assert tables[0].shape == tables[1].shape == (2, 9, features)
    got = apply_rope(x_BSHD, *tables)
    expected = rotated_by_complex_numbers(x_BSHD, position_BS, features, 100.0)
    torch.testing.assert_close(got, expected)
    grad = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad(got, x_BSHD, grad)[0], torch.autograd.grad(expected, x_BSHD, grad)[0]
    )


@pytest.mark.usefixtures("pass_size")
def test_gradcheck() -> None:
    x_BSHD = torch.randn(1, 5, 2, 6, dtype=torch.float64, requires_grad=True)
    tables = rope_tables(torch.arange(5)[None], 4, 10.0, torch.float64)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, *tables), x_BSHD)


@pytest.mark.usefixtures("implementation")
def test_strides_of_any_kind_are_taken() -> None:
    """Attention kernels return gradients with heads before slots."""
    x_BSHD = torch.randn(2, 3, 5, 4, device=DEVICE).transpose(1, 2)
    position_BS = torch.arange(5, device=DEVICE).expand(2, 5)
    tables = rope_tables(position_BS, 4, 10.0, torch.float32)
    expected = rotated_by_complex_numbers(x_BSHD.double(), position_BS, 4, 10.0).float()
    torch.testing.assert_close(apply_rope(x_BSHD, *tables), expected)
    every_other_feature = torch.stack((x_BSHD, torch.full_like(x_BSHD, float("nan"))), -1)[..., 0]
    torch.testing.assert_close(apply_rope(every_other_feature, *tables), expected)
    one_head = x_BSHD[:, :, :1].expand(-1, -1, 3, -1)
    torch.testing.assert_close(apply_rope(one_head, *tables), expected[:, :, :1].expand(-1, -1, 3, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype, implementation: str) -> None:
    x_BSHD = torch.randn(2, 64, 3, 8, device=DEVICE).to(dtype)
    position_BS = torch.arange(64, device=DEVICE).expand(2, 64)
    tables = rope_tables(position_BS, 8, 1e4, dtype)
    assert tables[0].dtype == torch.float32
    got = apply_rope(x_BSHD, *tables)
    exact = rotated_by_complex_numbers(x_BSHD.double(), position_BS, 8, 1e4)
    assert got.dtype == dtype
    # Cancellation leaves the error of the fp32 products, so the size of the pair counts.
    limit = exact.abs() * rounding_error(dtype, implementation) + 1e-5
    assert ((got.double() - exact).abs() <= limit).all()


@pytest.mark.usefixtures("implementation")
def test_equals_llama_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    import transformers

    rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    hf_config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope_parameters
    )
    q_BHSD, k_BHSD = torch.randn(2, 4, 12, 16), torch.randn(2, 2, 12, 16)
    position_BS = torch.stack((torch.arange(12), torch.arange(100, 112)))
    cos, sin = llama.LlamaRotaryEmbedding(hf_config)(q_BHSD, position_BS)
    expected = llama.apply_rotary_pos_emb(q_BHSD, k_BHSD, cos, sin)
    tables = rope_tables(position_BS.to(DEVICE), 16, 5e5, torch.float32)
    for x_BHSD, want_BHSD in zip((q_BHSD, k_BHSD), expected, strict=True):
        y_BHSD = apply_rope(x_BHSD.to(DEVICE).transpose(1, 2), *tables).transpose(1, 2)
        torch.testing.assert_close(y_BHSD.cpu(), want_BHSD)


def test_what_cannot_be_rotated_is_refused() -> None:
    with pytest.raises(MoeKernelsError, match="7 of them"):
        rope_tables(torch.arange(3)[None], 7, 10.0, torch.float32)
    with pytest.raises(MoeKernelsError, match="4 features cannot rotate 6"):
        apply_rope(torch.zeros(1, 3, 2, 4), *rope_tables(torch.arange(3)[None], 6, 10.0, torch.float32))
    with pytest.raises(MoeKernelsError, match=r"tables for \(1, 3\) positions cannot rotate \(2, 3\)"):
        apply_rope(torch.zeros(2, 3, 2, 6), *rope_tables(torch.arange(3)[None], 6, 10.0, torch.float32))


@pytest.mark.parametrize(("all_dim", "factor"), [(0.707, 1.5896), (1.0, 1.8739), (0.0, 1.0)])
def test_r108_the_softmax_takes_the_square_of_mscale_all_dim(all_dim: float, factor: float) -> None:
    assert yarn_softmax_factor(YarnConfig(factor=40.0, mscale_all_dim=all_dim)) == pytest.approx(factor, abs=5e-5)
    assert yarn_softmax_factor(YarnConfig(factor=1.0, mscale_all_dim=all_dim)) == 1.0


@pytest.mark.parametrize(("mscale", "all_dim", "factor"), [(1.0, 1.0, 1.0), (1.0, 0.0, 1.3689), (1.0, 0.707, 1.0857)])
def test_r108_the_tables_take_the_ratio_of_both(mscale: float, all_dim: float, factor: float) -> None:
    yarn = YarnConfig(factor=40.0, mscale=mscale, mscale_all_dim=all_dim)
    cos, sin = rope_tables(torch.arange(20)[None], 8, 1e4, torch.float64, yarn)
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, factor), rtol=0, atol=5e-5)


def test_yarn_keeps_fast_pairs_and_slows_down_slow_ones() -> None:
    yarn = YarnConfig(factor=4.0, original_tokens=64, beta_fast=4.0, beta_slow=1.0, mscale=0.0)
    position = torch.ones(1, 1, dtype=torch.int64)
    plain, stretched = (rope_tables(position, 16, 100.0, torch.float64, y)[1][0, 0, 8:].asin() for y in (None, yarn))
    # Turns in 64 tokens are 64 / (2 pi 100^(i/8)): 10.2, 5.7, 3.2, 1.8, 1.02, 0.6, ...; the ramp is from pair 1 to 5.
    expected = torch.tensor([1, 1, 0.8125, 0.625, 0.4375, 0.25, 0.25, 0.25], dtype=torch.float64)
    torch.testing.assert_close(stretched / plain, expected)


def test_yarn_without_a_factor_changes_nothing() -> None:
    position = torch.arange(9)[None]
    plain = rope_tables(position, 8, 1e4, torch.float32)
    for mine, other in zip(plain, rope_tables(position, 8, 1e4, torch.float32, YarnConfig()), strict=True):
        assert torch.equal(mine, other)
