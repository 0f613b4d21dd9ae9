"""Tests with a fixture `dtype` are in fp64 of the plain implementation, and in fp32 of Triton's.

Shape legend: T tokens, K choices, E experts, G segments.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import (
    MoeKernelsError,
    RouterConfig,
    balance_loss,
    global_balance_loss,
    inject_gradient,
    plain_choices,
    route,
    scores,
    z_loss,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative error of a few sums.
ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6}


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.fixture
def dtype(implementation: str) -> torch.dtype:
    return torch.float64 if implementation == "plain" else torch.float32


def one_segment(scores_TE: Tensor, ids_TK: Tensor, valid_T: Tensor | None = None) -> Tensor:
    segment_T = torch.zeros(scores_TE.shape[0], dtype=torch.int64)
    return balance_loss(scores_TE, ids_TK, segment_T, 1, valid_T=valid_T)[0]


def reference(scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """numerics §2 of one segment, written out with autograd."""
    tokens, experts = scores_TE.shape
    one_hot_TKE = F.one_hot(ids_TK, experts + 1)[..., :experts] if (ids_TK < 0).any() else F.one_hot(ids_TK, experts)
    counts_E = one_hot_TKE.sum((0, 1)).to(scores_TE.dtype)
    return experts / (ids_TK.shape[1] * tokens**2) * (counts_E * scores_TE.sum(0)).sum()


def drawn(dtype: torch.dtype, tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    scores_TE = torch.randn(tokens, experts, dtype=dtype).softmax(-1)
    return scores_TE, scores_TE.topk(k).indices


def test_value_and_gradient_of_every_segment_match_the_formula(dtype: torch.dtype) -> None:
    scores_TE, ids_TK = drawn(dtype, 30, 5, 2)
    scores_TE.requires_grad_()
    segment_T = torch.randint(0, 3, (30,))
    segment_T[:3] = torch.arange(3)
    valid_T = torch.rand(30) < 0.7
    valid_T[:3] = True
    loss_G = balance_loss(scores_TE, ids_TK, segment_T, 3, valid_T=valid_T)
    weight_G = torch.randn(3, dtype=dtype)
    (grad_TE,) = torch.autograd.grad((loss_G * weight_G).sum(), scores_TE)
    members = [(segment_T == g) & valid_T for g in range(3)]
    expected_G = torch.stack([reference(scores_TE[member], ids_TK[member]) for member in members])
    (expected_TE,) = torch.autograd.grad((expected_G * weight_G).sum(), scores_TE)
    torch.testing.assert_close(loss_G, expected_G)
    torch.testing.assert_close(grad_TE, expected_TE)


def test_gradcheck_of_the_balance_loss() -> None:
    scores_TE, ids_TK = drawn(torch.float64, 6, 4, 2)
    segment_T = torch.tensor([0, 0, 2, 2, 2, 0])
    valid_T = torch.tensor([True, False, True, True, True, True])
    assert torch.autograd.gradcheck(
        lambda a: balance_loss(a, ids_TK, segment_T, 3, valid_T=valid_T), scores_TE.requires_grad_()
    )


def test_segments_without_a_valid_token_give_zero(dtype: torch.dtype) -> None:
    scores_TE, ids_TK = drawn(dtype, 4, 3, 1)
    scores_TE.requires_grad_()
    valid_T = torch.tensor([True, True, False, False])
    loss_G = balance_loss(scores_TE, ids_TK, torch.tensor([0, 0, 1, 1]), 3, valid_T=valid_T)
    assert loss_G[1:].tolist() == [0, 0]
    (grad_TE,) = torch.autograd.grad(loss_G.sum(), scores_TE)
    assert grad_TE.isfinite().all()
    assert not grad_TE[2:].any()


@pytest.mark.usefixtures("implementation")
def test_r003_padding_is_in_no_statistic() -> None:
    torch.manual_seed(0)
    real_TE = torch.randn(6, 4, device="cpu").to(DEVICE)
    padded_TE = torch.cat((real_TE, torch.tensor([[9.0, 0.0, 0.0, 0.0]]).expand(6, 4)))
    valid_T = torch.arange(12) < 6
    config = RouterConfig()

    def aux(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
        return one_segment(scores(logits_TE, "softmax"), route(logits_TE, config).ids_TK, valid_T)

    assert f"{aux(real_TE, None):.4f}" == "1.1011"
    # The second choice of a pad is a tie; the number of the case has expert 2 there.
    leaked_TK = torch.cat((route(real_TE, config).ids_TK, torch.tensor([[0, 2]]).expand(6, 2)))
    assert f"{one_segment(scores(padded_TE, 'softmax'), leaked_TK):.4f}" == "1.4146"
    assert f"{aux(padded_TE, valid_T):.4f}" == "1.1011"

    alone_TE, masked_TE = real_TE.clone().requires_grad_(), padded_TE.clone().requires_grad_()
    (alone_grad_TE,) = torch.autograd.grad(aux(alone_TE, None) + z_loss(alone_TE).mean(), alone_TE)
    z_T = z_loss(masked_TE) * valid_T
    (masked_grad_TE,) = torch.autograd.grad(aux(masked_TE, valid_T) + z_T.sum() / 6, masked_TE)
    torch.testing.assert_close(masked_grad_TE[:6], alone_grad_TE)
    assert not masked_grad_TE[6:].any()
    padded = route(padded_TE, config, valid_T=valid_T)
    assert torch.equal(padded.counts_E(), route(real_TE, config).counts_E())


def test_r003_padding_with_nan_scores_is_in_no_statistic_either(dtype: torch.dtype) -> None:
    scores_TE, ids_TK = drawn(dtype, 8, 4, 2)
    valid_T = torch.arange(8) < 5
    dirty_TE = torch.where(valid_T[:, None], scores_TE, float("nan"))
    torch.testing.assert_close(one_segment(dirty_TE, ids_TK, valid_T), one_segment(scores_TE[:5], ids_TK[:5]))


def test_r008_statistics_are_reduced_on_a_tensor_of_their_own(dtype: torch.dtype) -> None:
    """Two ranks with 3 and 1 valid tokens of one segment against the dense loss over all tokens."""
    scores_TE, ids_TK = drawn(dtype, 6, 4, 2)
    valid_T = torch.tensor([True, True, True, False, True, False])
    segment_T = torch.zeros(6, dtype=torch.int64)
    whole_TE = scores_TE.clone().requires_grad_()
    whole = balance_loss(whole_TE, ids_TK, segment_T, 1, valid_T=valid_T)
    (whole_grad_TE,) = torch.autograd.grad(whole.sum(), whole_TE)
    shards = [slice(0, 3), slice(3, 6)]

    mine: list[Tensor] = []

    def collect(statistics: Tensor) -> Tensor:
        mine.append(statistics.clone())
        return statistics

    for shard in shards:
        balance_loss(scores_TE[shard], ids_TK[shard], segment_T[shard], 1, valid_T=valid_T[shard], reduce=collect)

    def reduce_in_place(statistics: Tensor) -> Tensor:
        return statistics.copy_(mine[0] + mine[1])

    total = torch.zeros_like(whole)
    for shard in shards:
        arguments = (scores_TE[shard].clone().requires_grad_(), ids_TK[shard], segment_T[shard])
        before = [tensor.clone() for tensor in (*arguments, valid_T[shard])]
        loss = balance_loss(*arguments, 1, valid_T=valid_T[shard], reduce=reduce_in_place)
        (grad_TE,) = torch.autograd.grad(loss.sum(), arguments[0])
        for tensor, copy in zip((*arguments, valid_T[shard]), before, strict=True):
            assert torch.equal(tensor, copy)
        torch.testing.assert_close(grad_TE, whole_grad_TE[shard])
        total += loss.detach()
    torch.testing.assert_close(total, whole.detach())  # each rank has its part of the value
    assert valid_T[shards[0]].sum() == 3
    assert valid_T[shards[1]].sum() == 1


@pytest.mark.usefixtures("implementation")
def test_r014_balanced_routing_is_one_in_the_convention_per_choice() -> None:
    ids_TK = torch.tensor([[0, 1], [2, 3]])
    loss = one_segment(torch.full((2, 4), 0.25), ids_TK)
    assert loss == 1.0
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits_TE = torch.randn(40, 4)
    theirs = mixtral.load_balancing_loss_func((logits_TE,), num_experts=4, top_k=2)
    scores_TE = scores(logits_TE, "softmax")
    ours = one_segment(scores_TE, plain_choices(scores_TE, 2))
    torch.testing.assert_close(2 * ours, theirs)  # transformers does not divide by k: 2.0 when balanced


def test_r015_the_loss_depends_on_the_assignment_and_is_largest_for_collapse(dtype: torch.dtype) -> None:
    scores_TE, _ = drawn(dtype, 12, 4, 1)
    best = int(scores_TE.mean(0).argmax())
    collapsed = one_segment(scores_TE, torch.full((12, 1), best))
    values = [one_segment(scores_TE, torch.randint(0, 4, (12, 1))) for _ in range(20)]
    assert len({f"{value:.9f}" for value in values}) > 1
    assert all(0 < value <= collapsed + 1e-12 for value in values)
    assert collapsed <= 4
    certain_TE = F.one_hot(torch.zeros(12, dtype=torch.int64), 4).to(dtype)
    assert one_segment(certain_TE, torch.zeros(12, 1, dtype=torch.int64)) == 4  # collapse with K = 1 is E


@pytest.mark.usefixtures("implementation")
def test_dropped_choices_are_not_counted() -> None:
    scores_TE = torch.full((2, 4), 0.25)
    loss = one_segment(scores_TE, torch.tensor([[0, -1], [-1, -1]]))
    assert loss == 0.25  # one choice of four


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 1.0])
def test_r001_injected_gradient_is_that_of_the_coefficient_times_the_loss(
    coefficient: float, dtype: torch.dtype
) -> None:
    x_TD = torch.randn(20, 6, dtype=dtype)
    weight_ED = torch.randn(4, 6, dtype=dtype, requires_grad=True)

    def parts() -> tuple[Tensor, Tensor]:
        logits_TE = F.linear(x_TD, weight_ED)
        routing = route(logits_TE, RouterConfig())
        return routing.probs_TK, one_segment(scores(logits_TE, "softmax"), routing.ids_TK)

    probs_TK, loss = parts()
    objective = 0 * inject_gradient(probs_TK, loss, coefficient).sum()
    (grad_ED,) = torch.autograd.grad(objective, weight_ED)
    (expected_ED,) = torch.autograd.grad(coefficient * parts()[1], weight_ED)
    torch.testing.assert_close(grad_ED, expected_ED, rtol=ROUNDING[dtype], atol=0)
    assert bool(grad_ED.any()) == (coefficient != 0)


def test_injection_passes_value_and_gradient_through() -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    loss_G = torch.randn(3, dtype=torch.float64, requires_grad=True)
    scale_G = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    y = inject_gradient(x, loss_G * 2, scale_G)
    assert torch.equal(y, x)
    weight = torch.randn(5, dtype=torch.float64)
    grad, loss_grad = torch.autograd.grad((y * weight).sum(), (x, loss_G))
    assert torch.equal(grad, weight)
    assert torch.equal(loss_grad, 2 * scale_G)


@pytest.mark.parametrize("splits", [(4, 4, 4), (6, 2, 4)])
def test_r005_running_window_does_not_depend_on_the_split(splits: tuple[int, ...], dtype: torch.dtype) -> None:
    """Constant routing frequencies: counts over cumulative tokens are the same whatever the microbatches hold."""
    scores_TE = torch.randn(12, 4, dtype=dtype).softmax(-1).requires_grad_()
    per_token_E = torch.tensor([1.0, 0.5, 0.5, 0.0], dtype=dtype)

    def window() -> Tensor:
        total = torch.zeros((), dtype=dtype)
        tokens = 0
        for part_TE in scores_TE.split(splits):
            tokens += part_TE.shape[0]
            total = total + global_balance_loss(part_TE, per_token_E * tokens, tokens, 12, 2)
        return total

    (grad_TE,) = torch.autograd.grad(window(), scores_TE)
    expected_TE = (4 / (2 * 12) * per_token_E).expand(12, 4)
    torch.testing.assert_close(grad_TE, expected_TE)
    torch.testing.assert_close(*(torch.autograd.grad(window(), scores_TE)[0] for _ in range(2)))  # after a reset


@pytest.mark.parametrize("splits", [(8,), (2, 2, 2, 2), (4, 4), (1, 7)])
def test_r002_r009_parts_of_the_global_loss_add_up_over_any_microbatches(
    splits: tuple[int, ...], dtype: torch.dtype
) -> None:
    scores_TE, ids_TK = drawn(dtype, 8, 4, 2)
    scores_TE.requires_grad_()
    counts_E = torch.bincount(ids_TK.view(-1), minlength=4)
    valid_T = torch.tensor([True] * 7 + [False])
    parts = zip(scores_TE.split(splits), valid_T.split(splits), strict=True)
    total = sum(global_balance_loss(part, counts_E, 8, 7, 2, valid_T=valid) for part, valid in parts)
    expected = 4 / (2 * 8 * 7) * (counts_E * scores_TE[:7].sum(0)).sum()
    torch.testing.assert_close(total, expected)
    grads = [torch.autograd.grad(loss, scores_TE)[0] for loss in (total, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("tokens", [7, 10**6 + 3])
def test_the_global_loss_of_counts_that_are_tensors_has_the_same_bits(tokens: int, dtype: torch.dtype) -> None:
    """Graphs read them anew."""
    scores_TE, ids_TK = drawn(dtype, 8, 3, 2)
    scores_TE.requires_grad_()
    counts_E = torch.bincount(ids_TK.view(-1), minlength=3)
    losses = [
        global_balance_loss(scores_TE, counts_E, *counts, 2) for counts in ((9, tokens), map(torch.tensor, (9, tokens)))
    ]
    assert torch.equal(*losses)
    assert torch.equal(*(torch.autograd.grad(loss, scores_TE)[0] for loss in losses))


@pytest.mark.parametrize(("window", "step"), [(0, 4), (4, 0)])
def test_the_global_loss_refuses_to_divide_by_zero(window: int, step: int) -> None:
    with pytest.raises(MoeKernelsError, match=f"{window} and {step}"):
        global_balance_loss(torch.rand(4, 2), torch.ones(2), window, step, 1)


def test_z_loss_is_the_squared_log_partition(dtype: torch.dtype) -> None:
    logits_TE = torch.randn(7, 5, dtype=dtype)
    torch.testing.assert_close(z_loss(logits_TE), logits_TE.exp().sum(-1).log() ** 2)
    assert z_loss(logits_TE.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("loss_of", ["balance", "z"])
def test_r002_the_gradient_is_linear_in_the_coefficient(loss_of: str, dtype: torch.dtype) -> None:
    logits_TE = torch.randn(16, 4, dtype=dtype, requires_grad=True)

    def grad(coefficient: float) -> Tensor:
        scores_TE = scores(logits_TE, "softmax")
        loss = one_segment(scores_TE, plain_choices(scores_TE, 2)) if loss_of == "balance" else z_loss(logits_TE).sum()
        (grad_TE,) = torch.autograd.grad(inject_gradient(logits_TE.sum() * 0, loss, coefficient), logits_TE)
        return grad_TE

    torch.testing.assert_close(grad(2.0), 2 * grad(1.0), rtol=ROUNDING[dtype], atol=0)
    assert grad(1.0).any()


def test_r092_packed_documents_have_the_losses_and_gradients_of_rows_of_their_own(dtype: torch.dtype) -> None:
    # Each of two documents prefers two experts, so that both are unbalanced and together they are not.
    logits_TE = torch.randn(8, 4, dtype=dtype)
    logits_TE[:5, :2] += 8
    logits_TE[5:, 2:] += 8
    scores_TE = scores(logits_TE, "softmax")
    ids_TK = plain_choices(scores_TE, 2)
    packed_TE = scores_TE.clone().requires_grad_()
    segment_T = torch.tensor([0] * 5 + [1] * 3)
    packed_G = balance_loss(packed_TE, ids_TK, segment_T, 2)
    (packed_grad_TE,) = torch.autograd.grad(packed_G.sum(), packed_TE)
    for segment, rows in enumerate((slice(0, 5), slice(5, 8))):
        alone_TE = scores_TE[rows].clone().requires_grad_()
        alone = reference(alone_TE, ids_TK[rows])
        (alone_grad_TE,) = torch.autograd.grad(alone, alone_TE)
        torch.testing.assert_close(packed_G[segment], alone, rtol=ROUNDING[dtype], atol=0)
        torch.testing.assert_close(
            packed_grad_TE[rows], alone_grad_TE, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * 1e-3
        )
    assert float(packed_G.detach().mean() - reference(scores_TE, ids_TK)) > 0.5
