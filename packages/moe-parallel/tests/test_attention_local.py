"""LocalAttention against softmax written out with loops over heads and documents, and long rows against a mask."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F

from moe_parallel import ContextSplit, LocalAttention, MoeParallelError, SequenceInfo
from moe_parallel._torch_compat import operator_mode
from moe_parallel.attention import whole_rows


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


def masked(q, k, v, info, *, scale=None, window=None):
    """The same by a mask over whole rows; every score is computed."""
    slots = q.shape[1]
    distance = torch.arange(slots).unsqueeze(1) - torch.arange(slots)
    visible = (distance >= 0) & (distance < (window or slots))
    if info.document_BS is not None:
        visible = visible & (info.document_BS.unsqueeze(2) == info.document_BS.unsqueeze(1))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = visible.expand(q.shape[0], slots, slots).unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


def packed(seed, batch, slots, mean):
    """Other documents in every row, of so many slots on average."""
    begins = torch.rand(batch, slots, generator=torch.Generator().manual_seed(seed)) < 1 / mean
    return begins.cumsum(1)


def with_gradients(core, tensors, grad, info, **options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = core(*leaves, info, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


LONG_ROWS = {
    "documents": (packed(1, 3, 200, 30), None),
    "one row": (packed(2, 1, 333, 90), None),
    "one slot each": (torch.arange(150).expand(2, -1), None),
    "alike": (packed(3, 1, 200, 30).expand(3, -1), None),
    "window": (None, 20),
    "documents and a window": (packed(4, 3, 200, 60), 25),
    "a window as long as the row": (packed(5, 2, 200, 60), 200),
}


@pytest.mark.parametrize("rows", LONG_ROWS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_long_rows_equal_those_under_a_mask(rows, kv_heads):
    document, window = LONG_ROWS[rows]
    batch, slots = (2, 200) if document is None else document.shape
    *qkv, grad = [x.detach() for x in (*tensors(6, batch, slots, 4, kv_heads, 6), tensors(7, batch, slots, dim=6)[0])]
    for scale in (None, 0.7):
        options = {"scale": scale, "window": window}
        got, wanted = (
            with_gradients(core, qkv, grad, info(batch, slots, document), **options)
            for core in (LocalAttention(), masked)
        )
        for g, w in zip(got, wanted, strict=True):
            assert g.dtype == w.dtype
            torch.testing.assert_close(g, w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ["documents", "window"])
def test_long_rows_in_low_precision_are_as_good_as_under_a_mask(rows, dtype):
    document, window = LONG_ROWS[rows]
    batch, slots = (3, 200) if document is None else document.shape
    *qkv, grad = [x.detach() for x in (*tensors(8, batch, slots, dim=16), tensors(9, batch, slots, dim=16)[0])]
    seen = info(batch, slots, document)
    exact = with_gradients(masked, qkv, grad, seen, window=window)
    low = [x.to(dtype) for x in (*qkv, grad)]
    got, under_mask = (
        with_gradients(core, low[:3], low[3], seen, window=window) for core in (LocalAttention(), masked)
    )
    for g, m, e in zip(got, under_mask, exact, strict=True):
        assert g.dtype == dtype
        assert (g.double() - e).norm() <= 1.1 * (m.double() - e).norm()


@pytest.mark.parametrize(
    ("device", "dtype", "known"),
    [
        ("cpu", torch.float32, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float32, False),
        ("cuda", torch.float64, False),
    ],
)
def test_heads_are_grouped_in_a_kernel_that_holds_no_scores(device, dtype, known):
    assert whole_rows._kernel_knows_groups(torch.device(device), dtype) is known


def test_heads_that_a_kernel_cannot_group_are_repeated(monkeypatch):
    q, k, v = tensors(7)
    found, torchs = [], F.scaled_dot_product_attention

    def attention(*args, **options):
        found.append(options["enable_gqa"])
        return torchs(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    results = []
    for knows in (True, False):
        monkeypatch.setattr(whole_rows, "_kernel_knows_groups", lambda device, dtype, knows=knows: knows)
        out = LocalAttention()(q, k, v, info(2, 5))
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert found == [True, False]
    for grouped, repeated in zip(*results, strict=True):
        torch.testing.assert_close(repeated, grouped)


def test_nothing_as_large_as_a_mask_is_held():
    slots = 640
    *qkv, grad = [x.detach() for x in (*tensors(10, 1, slots, 1, 1, 4), tensors(11, 1, slots, 1, 1, 4)[0])]
    largest = {}

    def call(operator, args, kwargs):
        result = operator(*args, **kwargs)
        sizes = [x.numel() for x in (result if isinstance(result, (tuple, list)) else [result]) if torch.is_tensor(x)]
        largest[core] = max(largest.get(core, 0), *sizes, 0)
        return result

    for core in (LocalAttention(), masked):
        with operator_mode(call):
            with_gradients(core, qkv, grad, info(1, slots, packed(12, 1, slots, 50)))
    of_tiles, of_mask = largest.values()
    assert of_mask >= slots**2
    assert of_tiles <= slots**2 // 10


def test_the_first_layer_decides_for_all_and_the_others_do_not_read_the_host():
    qkv, document = tensors(13, 2, 100), packed(14, 2, 100, 20)
    reads = []

    def call(operator, args, kwargs):
        if "_local_scalar_dense" in str(operator) or "nonzero" in str(operator):
            reads[-1] += 1
        return operator(*args, **kwargs)

    def layer(info, **options):
        reads.append(0)
        with operator_mode(call):
            LocalAttention()(*qkv, info, **options).sum().backward()

    one, other = info(2, 100, document), info(2, 100, document)
    for seen, window in ((one, None), (one, None), (one, 7), (one, 7), (one, None), (other, None)):
        layer(seen, window=window)
    first, again, window, window_again, once_more, of_other = reads
    assert min(first, window, of_other) > 0
    assert again == window_again == once_more == 0
    layer(info(2, 100))
    assert reads[-1] == 0, "rows of one document need no decision"


def test_what_was_decided_ends_with_the_microbatch(monkeypatch):
    made = []

    class Watched(whole_rows.RowTiles):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(whole_rows, "RowTiles", Watched)
    seen = info(2, 5, DOCUMENTS)
    for _ in range(2):
        LocalAttention()(*tensors(15), seen)
    (tiles,) = made
    assert tiles() is not None
    del seen
    assert tiles() is None


def test_rows_that_grow_without_gradients():
    """As when tokens are generated: each length has an `info` of its own; keys and values may need no gradient."""
    q, k, v = tensors(16, 2, 90)
    whole = LocalAttention()(q, k.detach(), v.detach(), info(2, 90), window=8)
    with torch.no_grad():
        for slots in (1, 7, 8, 9, 89):
            out = LocalAttention()(*(x[:, :slots] for x in (q, k, v)), info(2, slots), window=8)
            torch.testing.assert_close(out, whole[:, :slots], rtol=0, atol=1e-12)


def test_one_info_serves_rows_of_other_shapes():
    """The tiles are those of the rows, whatever rows `info` was first seen with."""
    seen = info(2, 90)
    for batch, slots in ((2, 90), (1, 40), (2, 90)):
        qkv = tensors(17, batch, slots)
        out, wanted = (core(*qkv, seen, window=9) for core in (LocalAttention(), masked))
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("slots", [12, 120])
def test_padding_in_the_last_document_sees_itself_and_what_precedes_it(slots):
    """What padding holds reaches no real token, nor a gradient; its own output is that of a longer document."""
    real = slots - 5
    document = packed(18, 2, slots, slots // 3)
    document[:, real:] = document[:, real - 1 :][:, :1]
    *qkv, grad = [x.detach() for x in (*tensors(19, 2, slots), tensors(20, 2, slots)[0])]
    grad[:, real:] = 0
    garbage = [x.clone() for x in qkv]
    for x in garbage:
        x[:, real:] = 1e3
    seen = info(2, slots, document, valid=torch.arange(slots).expand(2, -1) < real)
    wanted, got = (with_gradients(LocalAttention(), x, grad, seen) for x in (qkv, garbage))
    for g, w in zip(got, wanted, strict=True):
        assert g.isfinite().all()
        torch.testing.assert_close(g[:, :real], w[:, :real], rtol=0, atol=1e-12)
    torch.testing.assert_close(wanted[0], masked(*qkv, seen), rtol=0, atol=1e-12)


def test_documents_in_pieces_are_refused():
    with pytest.raises(MoeParallelError, match="row 1 has 2 documents in 3 pieces"):
        LocalAttention()(*tensors(21), info(2, 5, torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])))


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
