"""Fused softmax with its denominator against the plain twin and autograd; parts against the whole."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_parallel._torch_compat import fused_attention, fused_attention_backward
from moe_parallel.attention.blocks import (
    Attended,
    PartialAttention,
    attend,
    attend_backward,
    plain_softmax_backward,
    plain_softmax_with_lse,
    softmax_backward,
    softmax_with_lse,
)
from moe_parallel.attention.tiles import Tile

SCALE = 0.4


def tensors(seed, queries=5, keys=7, heads=4, kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, queries, heads, 6), (2, keys, kv_heads, 6), (2, keys, kv_heads, 6))
    # As the kernels get them: [B, heads, slots, features], strided.
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


def mask(seed, queries=5, keys=7, rows=2):
    visible = torch.rand(rows, queries, keys, generator=torch.Generator().manual_seed(seed)) > 0.5
    visible[0, 1] = False  # a query that sees nothing
    visible[:, 2] = True
    return visible


CASES = {
    "all": (None, False, 7),
    "causal": (None, True, 5),
    "mask": (mask(1), False, 7),
    "one mask for all rows": (mask(2, rows=1), False, 7),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_fused_equals_plain_and_autograd(case, kv_heads, dtype):
    visible, causal, keys = CASES[case]
    q, k, v = tensors(3, keys=keys, kv_heads=kv_heads, dtype=dtype)
    limit = {"rtol": 0, "atol": 1e-13 if dtype == torch.float64 else 40 * torch.finfo(dtype).eps}
    out, lse = softmax_with_lse(q, k, v, visible, causal, SCALE)
    plain_out, plain_lse = plain_softmax_with_lse(q, k, v, visible, causal, SCALE)
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(out, plain_out, **limit)
    torch.testing.assert_close(lse, plain_lse, **limit)
    if visible is not None:
        assert (lse[0, :, 1] == -torch.inf).all()
        assert (out[0, :, 1] == 0).all()

    exact = [x.double().contiguous().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].repeat_interleave(4 // kv_heads, 1).transpose(2, 3) * SCALE
    seen = torch.ones(1, 5, keys, dtype=torch.bool).tril() if causal else visible
    if seen is not None:
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    expected = scores.softmax(3).nan_to_num(0) @ exact[2].repeat_interleave(4 // kv_heads, 1)
    torch.testing.assert_close(out.double(), expected, **limit)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    wanted = [x.nan_to_num(0) for x in torch.autograd.grad((expected * grad).sum(), exact)]
    for backward in (softmax_backward, plain_softmax_backward):
        got = backward(grad.to(dtype), q, k, v, out, lse, visible, causal, SCALE)
        assert [g.dtype for g in got] == [dtype] * 3
        if visible is not None:
            assert (got[0][0, :, 1] == 0).all(), "no gradient for who saw nothing"
        if visible is None:  # torch's own softmax has NaN gradients where nothing is seen
            for g, w in zip(got, wanted, strict=True):
                torch.testing.assert_close(g.double(), w, **limit)
        assert all(g.isfinite().all() for g in got)
    for g, w in zip(
        softmax_backward(grad.to(dtype), q, k, v, out, lse, visible, causal, SCALE),
        plain_softmax_backward(grad.to(dtype), q, k, v, out, lse, visible, causal, SCALE),
        strict=True,
    ):
        torch.testing.assert_close(g, w, **limit)


@pytest.mark.parametrize("value_features", [2, 6, 9])
def test_parts_add_up_to_the_whole(value_features):
    """Keys in three tiles, of which one is seen by some queries only and one leaves some without any key."""
    generator = torch.Generator().manual_seed(5)
    q, k = (
        torch.randn(2, slots, heads, 6, dtype=torch.float64, generator=generator) for slots, heads in ((5, 4), (7, 2))
    )
    v = torch.randn(2, 7, 2, value_features, dtype=torch.float64, generator=generator)
    grad = torch.randn(2, 5, 4, value_features, dtype=torch.float64, generator=generator)
    visible = mask(6)
    visible[:, :2] = False
    visible[:, 3:, :3] = True
    rows, some = slice(None), slice(2, 5)
    tiles = [
        Tile(rows=rows, queries=slice(3, 5), keys=slice(0, 3)),
        Tile(rows=rows, queries=slice(2, 3), keys=slice(0, 3), visible_BQK=visible[:, 2:3, :3]),
        Tile(rows=slice(0, 1), queries=some, keys=slice(3, 7), visible_BQK=visible[:1, some, 3:]),
        Tile(rows=slice(1, 2), queries=slice(0, 5), keys=slice(3, 7), visible_BQK=visible[1:, :, 3:]),
    ]
    partial = PartialAttention(q, value_features)
    for part in (tiles[:1], [], tiles[1:]):
        attend(q, k, v, part, SCALE, partial)
    qkv = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = [x.transpose(1, 2) for x in qkv]
    out, lse = plain_softmax_with_lse(*plain, visible, False, SCALE)
    torch.testing.assert_close(partial.out_BSHV, out.transpose(1, 2), rtol=0, atol=1e-14)
    torch.testing.assert_close(partial.lse_BHS, lse, rtol=0, atol=1e-14)
    assert (partial.lse_BHS[:, :, :2] == -torch.inf).all()

    wanted = plain_softmax_backward(grad.transpose(1, 2), *(x.detach() for x in plain), out, lse, visible, False, SCALE)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    attended = Attended(grad_BSHV=grad, q_BSHD=q, out_BSHV=partial.out_BSHV, lse_BHS=partial.lse_BHS, dq_BSHD=dq)
    for part in (tiles[:1], [], tiles[1:]):
        attend_backward(attended, k, v, part, SCALE, dk, dv)
    for got, want in zip((dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(got, want.transpose(1, 2), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [True, False])
def test_kernels_on_cuda_take_what_they_are_given_and_give_the_same_shapes(dtype, masked):
    """By fake tensors, since there need be no such device: signatures and shapes, not values."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 5, 8, dtype=dtype, device="cuda")
        k, v = (torch.empty(2, 2, 7, 8, dtype=dtype, device="cuda") for _ in range(2))
        bias = torch.empty(2, 1, 5, 7, dtype=dtype, device="cuda") if masked else None
        out, lse = fused_attention(q, k, v, bias, False, SCALE)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
        grads = fused_attention_backward(out, q, k, v, out, lse, bias, False, SCALE)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
