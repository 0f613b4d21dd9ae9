"""A vocabulary that is split: embedding and cross-entropy against torch over the whole table."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_parallel.vocabulary
from moe_parallel import (
    MoeParallelError,
    ParallelLayout,
    VocabularyEmbedding,
    run_distributed,
    sum_outputs,
    vocabulary_cross_entropy,
)
from moe_parallel.plan import part_of
from moe_parallel.testing import count_collectives, run_threads

# Parts differ wherever the ranks do not divide it.
VOCABULARY = 257
RANKS = [1, 2, 3, 4]
SMOOTHING = [0.0, 0.1, 1.0]


def split_loss(logits_TV, targets_T, ranks, *, valid_T=None, label_smoothing=0.0, grad_T=None):
    """Losses of every rank, and the gradient of the whole logits."""
    vocabulary = logits_TV.shape[1]

    def on_rank(rank, groups):
        start, stop = part_of(vocabulary, ranks, rank)
        part = logits_TV[:, start:stop].detach().requires_grad_()
        before = part.detach().clone()
        loss_T = vocabulary_cross_entropy(
            part,
            targets_T,
            groups.group("world"),
            first=start,
            vocab_size=vocabulary,
            valid_T=valid_T,
            label_smoothing=label_smoothing,
        )
        weight_T = torch.ones_like(loss_T) if grad_T is None else grad_T.to(loss_T.dtype)
        with count_collectives() as back:
            (grad,) = torch.autograd.grad(loss_T, part, weight_T)
        assert not back
        assert torch.equal(part.detach().nan_to_num(9), before.nan_to_num(9)), "logits are overwritten"
        return loss_T.detach(), grad

    losses, grads = zip(*run_threads(ranks, on_rank), strict=True)
    for loss_T in losses:
        assert torch.equal(loss_T.view(torch.uint8), losses[0].view(torch.uint8)), "not the same bits on every rank"
    return losses[0], torch.cat(grads, 1)


def torch_loss(logits_TV, targets_T, grad_T, label_smoothing=0.0):
    logits_TV = logits_TV.detach().requires_grad_()
    loss_T = F.cross_entropy(logits_TV, targets_T, reduction="none", label_smoothing=label_smoothing)
    return loss_T.detach(), torch.autograd.grad(loss_T, logits_TV, grad_T.to(loss_T.dtype))[0]


def data(tokens=23, vocabulary=VOCABULARY, dtype=torch.float64):
    logits_TV = 3 * torch.randn(tokens, vocabulary, dtype=dtype)
    targets_T = torch.randint(vocabulary, (tokens,))
    targets_T[0], targets_T[1] = 0, vocabulary - 1
    return logits_TV, targets_T, torch.randn(tokens, dtype=torch.float64)


@pytest.mark.parametrize("label_smoothing", SMOOTHING)
@pytest.mark.parametrize("ranks", RANKS)
def test_cross_entropy_is_that_of_torch(ranks, label_smoothing):
    logits_TV, targets_T, grad_T = data()
    loss_T, dlogits_TV = split_loss(logits_TV, targets_T, ranks, label_smoothing=label_smoothing, grad_T=grad_T)
    wanted = torch_loss(logits_TV, targets_T, grad_T, label_smoothing)
    torch.testing.assert_close((loss_T, dlogits_TV), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_lose_nothing_beside_one_rank(dtype, label_smoothing):
    """Losses are FP32 whatever the logits; gradients are off by one rounding to the dtype of the logits."""
    logits_TV, targets_T, grad_T = data()
    narrow_TV = logits_TV.to(dtype)
    exact, dexact = torch_loss(narrow_TV.double(), targets_T, grad_T, label_smoothing)
    loss_T, dlogits_TV = split_loss(narrow_TV, targets_T, 3, label_smoothing=label_smoothing, grad_T=grad_T)
    assert loss_T.dtype == torch.float32
    assert dlogits_TV.dtype == dtype
    torch.testing.assert_close(loss_T.double(), exact, rtol=1e-5, atol=1e-5)
    plain_loss_T, plain_TV = torch_loss(narrow_TV, targets_T, grad_T, label_smoothing)
    assert (loss_T.double() - exact).abs().max() <= (plain_loss_T.double() - exact).abs().max()
    rounding = torch.finfo(dtype).eps * dexact.abs() + torch.finfo(dtype).smallest_normal
    # The softmax and what smoothing takes from it are rounded to FP32 before they cancel.
    rounding = rounding + 4 * torch.finfo(torch.float32).eps * grad_T.abs().unsqueeze(1)
    assert ((dlogits_TV.double() - dexact).abs() <= rounding).all()
    assert (dlogits_TV.double() - dexact).norm() <= (plain_TV.double() - dexact).norm() * (1 + 1e-3)


@pytest.mark.parametrize("ranks", RANKS)
def test_tokens_without_target_have_no_loss_and_no_gradient_whatever_is_there(ranks):
    logits_TV, targets_T, grad_T = data()
    valid_T = torch.arange(len(targets_T)) % 3 != 1
    wanted, dwanted = torch_loss(logits_TV, targets_T, grad_T)
    logits_TV[~valid_T] = torch.nan
    targets_T[~valid_T] = torch.tensor([-100, 10**9]).repeat(99)[: (~valid_T).sum()]
    for grad in (grad_T, grad_T.masked_fill(~valid_T, torch.nan)):
        loss_T, dlogits_TV = split_loss(logits_TV, targets_T, ranks, valid_T=valid_T, grad_T=grad, label_smoothing=0.0)
        torch.testing.assert_close(loss_T, wanted.masked_fill(~valid_T, 0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dlogits_TV, dwanted.masked_fill(~valid_T[:, None], 0), rtol=1e-12, atol=1e-12)
    nothing = split_loss(logits_TV, targets_T, ranks, valid_T=torch.zeros_like(valid_T))
    assert all(not x.any() for x in nothing)


@pytest.mark.parametrize("label_smoothing", SMOOTHING)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("target", [-1, -100, VOCABULARY, 10**12])
def test_a_target_outside_the_vocabulary_has_an_infinite_loss(target, ranks, label_smoothing):
    logits_TV, targets_T, _ = data(tokens=3)
    targets_T[1] = target
    loss_T, dlogits_TV = split_loss(logits_TV, targets_T, ranks, label_smoothing=label_smoothing)
    assert loss_T[1] == torch.inf
    assert loss_T[[0, 2]].isfinite().all()
    assert dlogits_TV.isfinite().all()


@pytest.mark.parametrize("ranks", RANKS)
def test_logits_that_exclude_entries_or_whole_parts(ranks):
    logits_TV, targets_T, grad_T = data()
    logits_TV[:, 5:200] = -torch.inf  # every entry of some ranks
    logits_TV[::2, :5] = -torch.inf
    targets_T.fill_(230)
    torch.testing.assert_close(
        split_loss(logits_TV, targets_T, ranks, grad_T=grad_T),
        torch_loss(logits_TV, targets_T, grad_T),
        rtol=1e-12,
        atol=1e-12,
    )
    targets_T.fill_(7)
    loss_T, dlogits_TV = split_loss(logits_TV, targets_T, ranks)
    assert (loss_T == torch.inf).all()
    assert dlogits_TV.isfinite().all()
    smoothed, _ = split_loss(logits_TV, targets_T, ranks, label_smoothing=0.1)
    assert torch.equal(smoothed, torch_loss(logits_TV, targets_T, grad_T, 0.1)[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [3, 200])
def test_logits_that_are_no_numbers_show_in_the_loss_of_their_token_alone(bad, place):
    logits_TV, targets_T, _ = data()
    logits_TV[2, place] = bad
    loss_T, _ = split_loss(logits_TV, targets_T, 3)
    assert loss_T[2].isnan() or loss_T[2] == torch.inf
    assert loss_T[[0, 1, *range(3, 23)]].isfinite().all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_logits_do_not_overflow(ranks):
    logits_TV, targets_T, grad_T = data()
    logits_TV += 1e5 * torch.randn(len(targets_T), 1, dtype=torch.float64)
    torch.testing.assert_close(
        split_loss(logits_TV, targets_T, ranks, grad_T=grad_T),
        torch_loss(logits_TV, targets_T, grad_T),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_no_tokens(ranks):
    loss_T, dlogits_TV = split_loss(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), ranks)
    assert loss_T.shape == (0,)
    assert dlogits_TV.shape == (0, 8)


def test_rows_in_pieces_and_strided_logits_are_the_same_numbers(monkeypatch):
    logits_TV, targets_T, grad_T = data()
    wanted = split_loss(logits_TV, targets_T, 2, grad_T=grad_T, label_smoothing=0.1)
    monkeypatch.setattr(moe_parallel.vocabulary, "_PASS_ELEMENTS", 5 * 129)  # 23 tokens in pieces of 5
    strided_TV = logits_TV.t().contiguous().t()
    for logits in (logits_TV, strided_TV):
        found = split_loss(logits, targets_T, 2, grad_T=grad_T, label_smoothing=0.1)
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_label_smoothing_is_a_share(share):
    with pytest.raises(MoeParallelError, match=rf"a share between 0 and 1, not {share}"):
        vocabulary_cross_entropy(
            torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), None, first=0, vocab_size=2, label_smoothing=share
        )


def embedded(table_VD, token, ranks, grad, vocabulary=VOCABULARY):
    """Values of every rank and the gradient of the whole table."""

    def on_rank(rank, groups):
        start, stop = part_of(vocabulary, ranks, rank)
        part = nn.Parameter(table_VD[start:stop].clone())
        module = VocabularyEmbedding(part, first=start, rows=stop - start, vocab_size=vocabulary)
        x = sum_outputs(module(token), groups.group("world"))
        x.backward(grad)
        return x.detach(), part.grad

    values, grads = zip(*run_threads(ranks, on_rank), strict=True)
    assert all(torch.equal(value.nan_to_num(9), values[0].nan_to_num(9)) for value in values)
    return values[0], torch.cat(grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", RANKS)
def test_the_embedding_is_that_of_torch(ranks, dtype):
    table_VD = nn.Parameter(torch.randn(VOCABULARY, 6, dtype=dtype))
    token = torch.randint(VOCABULARY, (4, 9))
    token[0, :4] = torch.tensor([0, VOCABULARY - 1, 128, 129])
    grad = torch.randn(4, 9, 6, dtype=dtype)
    found = embedded(table_VD.detach(), token, ranks, grad)
    wanted = F.embedding(token, table_VD)
    wanted.backward(grad)
    assert torch.equal(found[0], wanted), "every token is added to zeros"
    torch.testing.assert_close(found[1], table_VD.grad, rtol=1e-14 if dtype == torch.float64 else 2**-7, atol=0)


def test_a_row_that_is_not_finite_reaches_only_its_own_token():
    table_VD = torch.randn(6, 2, dtype=torch.float64)
    table_VD[3] = torch.nan  # first row of the second rank, which reads it for tokens of the first
    token = torch.tensor([0, 1, 3])
    grad = torch.ones(3, 2, dtype=torch.float64)
    grad[0] = torch.inf
    values, dtable_VD = embedded(table_VD, token, 2, grad, vocabulary=6)
    assert torch.equal(values[:2], table_VD[:2])
    assert values[2].isnan().all()
    assert torch.equal(dtable_VD[1:].double(), torch.tensor([1, 0, 1, 0, 0.0]).double()[:, None].expand(5, 2))


@pytest.mark.parametrize("token", [-1, -VOCABULARY, VOCABULARY, 10**12])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_id_outside_the_table_is_refused_on_every_rank_as_by_torch(token, ranks):
    ids = torch.tensor([5, token])
    with pytest.raises(IndexError) as by_torch:
        F.embedding(ids, torch.randn(VOCABULARY, 2))
    for rank in range(ranks):
        start, stop = part_of(VOCABULARY, ranks, rank)
        part = torch.randn(stop - start, 2)
        module = VocabularyEmbedding(nn.Parameter(part), first=start, rows=stop - start, vocab_size=VOCABULARY)
        with pytest.raises(IndexError) as caught:
            module(ids)
        assert str(caught.value) == str(by_torch.value)


def test_a_weight_that_is_not_the_part_is_refused():
    module = VocabularyEmbedding(nn.Parameter(torch.randn(7, 2)), first=0, rows=4, vocab_size=7)
    with pytest.raises(MoeParallelError, match="weight has 7 rows, but this rank's part of the vocabulary 4; the plan"):
        module(torch.tensor([1]))
    assert repr(module) == "VocabularyEmbedding(4 of 7, 2, first=0)"


@pytest.mark.dist
def test_cross_entropy_on_processes():
    logits_TV, targets_T, grad_T = data()
    wanted = torch_loss(logits_TV, targets_T, grad_T)

    def on_rank(mesh):
        start, stop = part_of(VOCABULARY, mesh.size("tp"), mesh.rank("tp"))
        part = logits_TV[:, start:stop].detach().requires_grad_()
        loss_T = vocabulary_cross_entropy(part, targets_T, mesh.group("tp"), first=start, vocab_size=VOCABULARY)
        return loss_T.detach(), torch.autograd.grad(loss_T, part, grad_T)[0]

    losses, grads = zip(*run_distributed(ParallelLayout(world=3, tp=3), on_rank), strict=True)
    assert all(torch.equal(loss_T, losses[0]) for loss_T in losses)
    torch.testing.assert_close((losses[0], torch.cat(grads, 1)), wanted, rtol=1e-12, atol=1e-12)
