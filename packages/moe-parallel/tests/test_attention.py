"""LocalAttention against softmax written out with loops over heads and documents."""

import math

import pytest
import torch

from moe_parallel import ContextSplit, LocalAttention, MoeParallelError, SequenceInfo


def info(batch, slots, document_BS=None, context=None, valid=None):
    position = torch.arange(slots).expand(batch, slots)
    return SequenceInfo(
        position_BS=position,
        token_index_BS=torch.arange(batch * slots).view(batch, slots),
        valid_BS=torch.ones(batch, slots, dtype=torch.bool) if valid is None else valid,
        document_BS=document_BS,
        context=context,
    )


def reference(q, k, v, document, scale, window=99):
    """Written out: for every row, head and query slot a softmax over the visible slots."""
    batch, slots, heads, _ = q.shape
    share = heads // k.shape[2]
    rows = []
    for b in range(batch):
        for s in range(slots):
            visible = [t for t in range(s + 1) if document is None or document[b, t] == document[b, s]]
            visible = [t for t in visible if s - t < window]
            for h in range(heads):
                scores = torch.stack([q[b, s, h] @ k[b, t, h // share] for t in visible]) * scale
                weights = torch.exp(scores - scores.max())
                weights = weights / weights.sum()
                rows.append(sum(w * v[b, t, h // share] for w, t in zip(weights, visible, strict=True)))
    return torch.stack(rows).view(batch, slots, heads, -1)


def tensors(seed, batch=2, slots=5, heads=4, kv_heads=2, dim=3):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, slots, heads, dim), (batch, slots, kv_heads, dim), (batch, slots, kv_heads, dim))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("document", [None, DOCUMENTS])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_equals_softmax_written_out_with_gradients(kv_heads, document, scale):
    q, k, v = tensors(kv_heads, kv_heads=kv_heads)
    out = LocalAttention()(q, k, v, info(2, 5, document), scale=scale)
    expected = reference(q, k, v, document, scale or 1 / math.sqrt(3))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    got = torch.autograd.grad((out * weight).sum(), (q, k, v))
    want = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("document", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 8])
def test_a_window_and_values_of_another_width(document, window):
    q, k, _ = tensors(window, dim=4)
    for width in (2, 4, 7):
        values = torch.randn(2, 5, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
        values.requires_grad_()
        out = LocalAttention()(q, k, values, info(2, 5, document), window=window)
        expected = reference(q, k, values, document, 0.5, window)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        got = torch.autograd.grad((out * weight).sum(), (q, k, values))
        want = torch.autograd.grad((expected * weight).sum(), (q, k, values))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=0, atol=1e-12)


def test_a_window_without_the_token_itself_is_refused():
    with pytest.raises(MoeParallelError, match="window of 0 hides a token from itself"):
        LocalAttention()(*tensors(1), info(2, 5), window=0)


def test_nothing_leaks_from_another_document():
    q, k, v = tensors(3)
    attention = LocalAttention()
    before = attention(q, k, v, info(2, 5, DOCUMENTS))
    with torch.no_grad():
        k[0, :2] += 5.0
        v[0, :2] -= 5.0
    after = attention(q, k, v, info(2, 5, DOCUMENTS))
    torch.testing.assert_close(after[0, 2:], before[0, 2:], rtol=0, atol=0)
    assert (after[0, :2] - before[0, :2]).abs().max() > 1


def test_padding_at_the_end_of_a_row_changes_no_real_token():
    q, k, v = tensors(4)
    valid = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    out = LocalAttention()(q, k, v, info(2, 5, valid=valid))
    short = LocalAttention()(q[:1, :3], k[:1, :3], v[:1, :3], info(1, 3))
    torch.testing.assert_close(out[:1, :3], short, rtol=0, atol=1e-14)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_good_as_its_rounding(dtype):
    q, k, v = (tensor.detach() for tensor in tensors(5, slots=9, dim=8))
    expected = reference(q, k, v, None, 8**-0.5)
    out = LocalAttention()(q.to(dtype), k.to(dtype), v.to(dtype), info(2, 9))
    assert out.dtype == dtype
    rounded = reference(*(t.to(dtype).double() for t in (q, k, v)), None, 8**-0.5)
    plain = (rounded - expected).abs().max() + torch.finfo(dtype).eps * expected.abs().max()
    assert (out.double() - expected).abs().max() <= 2 * plain


class GroupOfFour:
    def size(self):
        return 4


def test_split_sequences_are_refused():
    q, k, v = tensors(6)
    split = ContextSplit(group=GroupOfFour(), slot_CBS=torch.arange(20).view(4, 1, 5).expand(-1, 2, -1))
    with pytest.raises(MoeParallelError, match=r"split over 4 ranks; .*parallel\.cp = 1"):
        LocalAttention()(q, k, v, info(2, 5, context=split))


def test_heads_that_do_not_divide_are_refused():
    q, k, v = tensors(7, heads=3, kv_heads=2)
    with pytest.raises(MoeParallelError, match="3 query heads cannot be shared evenly by 2"):
        LocalAttention()(q, k, v, info(2, 5))
