"""Tests with a fixture `dtype` are in fp64 of the plain implementation, and in fp32 of Triton's.

Shape legend: T tokens, K choices, E experts.
"""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from moe_kernels import MoeKernelsError, RouterConfig, Routing, route, scores, stable_top_k

INF = float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Of the arithmetic of NaN that a bad row is made of, in Triton's interpreter.
bad_rows = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.fixture
def dtype(implementation: str) -> torch.dtype:
    return torch.float64 if implementation == "plain" else torch.float32


def logits(dtype: torch.dtype, tokens: int = 64, experts: int = 8) -> Tensor:
    return torch.randn(tokens, experts, dtype=dtype)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_stable_top_k_is_the_head_of_a_stable_sort(dtype: torch.dtype, k: int) -> None:
    x = torch.randint(-2, 3, (200, 8)).to(dtype)  # many ties
    x[:50] = torch.randn(50, 8, dtype=dtype)
    x[0] = -INF
    x[1, 3:] = -INF
    x[2, 4] = INF
    before = x.clone()
    expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(stable_top_k(x, k), expected)
    assert torch.equal(x, before)


@pytest.mark.usefixtures("implementation")
def test_stable_top_k_gives_distinct_valid_ids_for_nan() -> None:
    x = torch.tensor([[float("nan")] * 4, [1.0, float("nan"), 2.0, float("nan")]])
    assert stable_top_k(x, 3).tolist() == [[0, 1, 2], [2, 0, 1]]


@pytest.mark.parametrize("k", [0, 5])
def test_stable_top_k_refuses_more_than_there_is(k: int) -> None:
    with pytest.raises(MoeKernelsError, match=f"{k} of 4"):
        stable_top_k(torch.zeros(2, 4), k)


def test_softmax_before_top_k_without_normalisation(dtype: torch.dtype) -> None:
    logits_TE = logits(dtype)
    routing = route(logits_TE, RouterConfig(top_k=3, normalize=False))
    values, ids = logits_TE.softmax(-1).topk(3)
    assert torch.equal(routing.ids_TK, ids)
    torch.testing.assert_close(routing.probs_TK, values)
    assert (routing.probs_TK.sum(-1) < 1).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_r031_softmax_after_top_k_equals_before_with_normalisation(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    logits_TE = logits(dtype).requires_grad_()
    weight_TK = torch.randn(64, 2, dtype=dtype)
    results = []
    for config in (RouterConfig(softmax_order="before_topk"), RouterConfig(softmax_order="after_topk")):
        probs_TK = route(logits_TE, config).probs_TK
        results.append((probs_TK, *torch.autograd.grad((probs_TK * weight_TK).sum(), logits_TE)))
    values_TK, ids_TK = logits_TE.softmax(-1).topk(2)
    expected_TK = values_TK / values_TK.sum(-1, keepdim=True)
    (expected_grad_TE,) = torch.autograd.grad((expected_TK * weight_TK).sum(), logits_TE)
    for probs_TK, grad_TE in results:
        torch.testing.assert_close(probs_TK, expected_TK)
        torch.testing.assert_close(grad_TE, expected_grad_TE)
    assert torch.equal(route(logits_TE, RouterConfig()).ids_TK, ids_TK)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("normalize", [False, True])
def test_r030_scale_applies_with_and_without_normalisation(
    score: Literal["softmax", "sigmoid"], scale: float, normalize: bool, dtype: torch.dtype
) -> None:
    logits_TE = logits(dtype)
    raw_TE = logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()
    probs_TK = route(logits_TE, RouterConfig(score=score, scale=scale, normalize=normalize)).probs_TK
    expected_T = torch.ones(64, dtype=dtype) if normalize else raw_TE.topk(2).values.sum(-1)
    torch.testing.assert_close(probs_TK.sum(-1), scale * expected_T)


def test_r025_bias_steers_selection_only(dtype: torch.dtype) -> None:
    logits_TE = logits(dtype, 16, 4).requires_grad_()
    bias_E = torch.tensor([0.0, 0.0, 5.0, 5.0], dtype=dtype, requires_grad=True)
    routing = route(logits_TE, RouterConfig(score="sigmoid"), bias_E=bias_E)
    assert {tuple(sorted(ids)) for ids in routing.ids_TK.tolist()} == {(2, 3)}
    chosen_TK = logits_TE.sigmoid().gather(-1, routing.ids_TK)
    torch.testing.assert_close(routing.probs_TK, chosen_TK / chosen_TK.sum(-1, keepdim=True))
    grads = torch.autograd.grad(routing.probs_TK[:, 0].sum(), (logits_TE, bias_E), allow_unused=True)
    assert grads[0] is not None
    assert grads[0].any()
    assert grads[1] is None


def test_r026_closed_groups_are_minus_infinity_not_zero(dtype: torch.dtype) -> None:
    score_E = torch.tensor([-0.1, -0.2, -0.5, -0.6], dtype=dtype)
    logits_TE = torch.zeros(1, 4, dtype=dtype)
    config = RouterConfig(score="sigmoid", groups=2, group_top_k=1)
    # With equal scores of 1/2 this bias makes the biased scores those of the case.
    assert sorted(route(logits_TE, config, bias_E=score_E - 0.5).ids_TK[0].tolist()) == [0, 1]
    filled_with_zero = score_E.masked_fill(torch.tensor([False, False, True, True]), 0)
    assert sorted(filled_with_zero.topk(2).indices.tolist()) == [2, 3]  # what a zero would choose


def test_r033_groups_of_one_restrict_to_the_best_experts(dtype: torch.dtype) -> None:
    logits_TE = logits(dtype)
    grouped = route(logits_TE, RouterConfig(top_k=3, groups=8, group_top_k=3))
    plain = route(logits_TE, RouterConfig(top_k=3))
    assert torch.equal(grouped.ids_TK, plain.ids_TK)
    torch.testing.assert_close(grouped.probs_TK, plain.probs_TK)


def test_r033_groups_are_judged_by_their_best_scores(dtype: torch.dtype) -> None:
    # Group 0 has the single best expert, group 1 the best pair.
    score_E = torch.tensor([[0.9, 0.1, 0.6, 0.7, 0.2, 0.3]], dtype=dtype)
    config = RouterConfig(top_k=2, groups=3, group_top_k=1, score="sigmoid")
    assert route(score_E.logit(), config).ids_TK.tolist() == [[3, 2]]


def test_a_config_that_does_not_fit_is_refused_with_its_numbers() -> None:
    with pytest.raises(MoeKernelsError, match=r"groups = 3: .*divide the 8 experts: 1, 2, 4, 8"):
        route(logits(torch.float64), RouterConfig(groups=3))


def test_r029_one_normalised_choice_weighs_one_and_tokens_do_not_mix(dtype: torch.dtype) -> None:
    logits_TE = logits(dtype)
    config = RouterConfig(top_k=1, allow_constant_weight=True)
    routing = route(logits_TE, config)
    assert torch.equal(routing.probs_TK, torch.ones(64, 1, dtype=dtype))
    order_T = torch.randperm(64)
    permuted = route(logits_TE[order_T], config)
    assert torch.equal(permuted.ids_TK, routing.ids_TK[order_T])


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "normalize": False},
        {"top_k": 1, "normalize": False, "score": "sigmoid"},
        {"top_k": 2},
        {"top_k": 2, "softmax_order": "after_topk"},
        {"top_k": 2, "score": "sigmoid"},
    ],
)
def test_r028_accepted_configs_give_the_gate_a_gradient(options: dict[str, Any], dtype: torch.dtype) -> None:
    config = RouterConfig(**options)
    assert config.problems(8) == []
    logits_TE = logits(dtype).requires_grad_()
    probs_TK = route(logits_TE, config).probs_TK
    (grad_TE,) = torch.autograd.grad((probs_TK * torch.randn_like(probs_TK)).sum(), logits_TE)
    assert grad_TE.norm() > 1e-3


def test_r028_softmax_after_one_choice_starves_the_gate(dtype: torch.dtype) -> None:
    logits_TE = logits(dtype).requires_grad_()
    config = RouterConfig(top_k=1, softmax_order="after_topk", allow_constant_weight=True)
    (grad_TE,) = torch.autograd.grad(route(logits_TE, config).probs_TK.sum(), logits_TE)
    assert not grad_TE.any()


def test_sigmoid_normalisation_survives_total_underflow(dtype: torch.dtype) -> None:
    logits_TE = torch.full((1, 6), -2000.0, dtype=dtype, requires_grad=True)
    routing = route(logits_TE, RouterConfig(top_k=3, score="sigmoid"))
    torch.testing.assert_close(routing.probs_TK, torch.full((1, 3), 1 / 3, dtype=dtype))
    torch.testing.assert_close(scores(logits_TE, "sigmoid"), torch.full((1, 6), 1 / 6, dtype=dtype))
    (grad_TE,) = torch.autograd.grad(routing.probs_TK[0, 0], logits_TE)
    assert grad_TE.isfinite().all()
    # The limit of sigma(a) / (sigma(a) + sigma(b)) is the softmax of the logits.
    far_TE = torch.tensor([[-1000.0, -1001.0]], dtype=dtype)
    torch.testing.assert_close(route(far_TE, RouterConfig(score="sigmoid")).probs_TK, far_TE.softmax(-1))


def test_scores_sum_to_one_and_match_their_definition(dtype: torch.dtype) -> None:
    logits_TE = logits(dtype)
    torch.testing.assert_close(scores(logits_TE, "softmax"), logits_TE.softmax(-1))
    sigmoid_TE = logits_TE.sigmoid()
    torch.testing.assert_close(scores(logits_TE, "sigmoid"), sigmoid_TE / sigmoid_TE.sum(-1, keepdim=True))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("implementation")
def test_low_precision_logits_are_routed_in_the_internal_dtype(low: torch.dtype) -> None:
    logits_TE = logits(low)
    routing = route(logits_TE, RouterConfig())
    expected = route(logits_TE.to(torch.float32), RouterConfig())
    assert routing.probs_TK.dtype == torch.float32
    assert torch.equal(routing.probs_TK, expected.probs_TK)


def test_padding_tokens_choose_nobody_whatever_their_logits(dtype: torch.dtype) -> None:
    clean_TE = logits(dtype, 10).requires_grad_()
    valid_T = torch.arange(10) < 6
    dirty_TE = torch.where(valid_T[:, None], clean_TE, float("nan")).detach().requires_grad_()
    routing = route(dirty_TE, RouterConfig(), valid_T=valid_T)
    alone = route(clean_TE[:6], RouterConfig())
    assert torch.equal(routing.ids_TK[:6], alone.ids_TK)
    assert torch.equal(routing.probs_TK[:6], alone.probs_TK)
    assert (routing.ids_TK[6:] == -1).all()
    assert not routing.probs_TK[6:].any()
    assert torch.equal(routing.counts_E(), alone.counts_E())
    assert routing.bad_rows == 0
    (grad_TE,) = torch.autograd.grad(routing.probs_TK.square().sum(), dirty_TE)
    (alone_TE,) = torch.autograd.grad(alone.probs_TK.square().sum(), clean_TE)
    assert torch.equal(grad_TE, alone_TE)


@bad_rows
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_bad_rows_are_counted_and_their_ids_stay_valid(
    score: Literal["softmax", "sigmoid"], dtype: torch.dtype
) -> None:
    logits_TE = logits(dtype, 6)
    logits_TE[0, 2] = float("nan")
    logits_TE[1] = -INF
    logits_TE[2, 0] = INF
    logits_TE[3, :6] = -INF  # two experts left: an ordinary row
    routing = route(logits_TE, RouterConfig(score=score))
    assert routing.bad_rows == 3
    assert routing.bad_rows.dtype == torch.int64
    assert sorted(routing.ids_TK[3].tolist()) == [6, 7]
    assert ((routing.ids_TK >= 0) & (routing.ids_TK < 8)).all()
    assert (routing.ids_TK[:, 0] != routing.ids_TK[:, 1]).all()


@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"score": "sigmoid"}, {"softmax_order": "after_topk"}])
def test_forced_ids_repeat_choices_with_probabilities_of_the_new_logits(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    config = RouterConfig(**options)
    first_TE, second_TE = logits(dtype, 20), logits(dtype, 20).requires_grad_()
    valid_T = torch.arange(20) < 15
    earlier = route(first_TE, config, valid_T=valid_T)
    forced = route(second_TE, config, ids_TK=earlier.ids_TK)
    assert torch.equal(forced.ids_TK, earlier.ids_TK)
    full_TE = second_TE.sigmoid() if config.score == "sigmoid" else second_TE.softmax(-1)
    expected_TK = full_TE.gather(-1, earlier.ids_TK.clamp(min=0))
    if config.normalize:
        expected_TK = expected_TK / expected_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(forced.probs_TK, expected_TK * valid_T[:, None])
    again = route(first_TE, config, valid_T=valid_T, ids_TK=earlier.ids_TK)
    assert torch.equal(again.probs_TK, earlier.probs_TK)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_an_absent_choice_takes_no_part_in_the_sum(score: Literal["softmax", "sigmoid"], dtype: torch.dtype) -> None:
    logits_TE = logits(dtype, 3).requires_grad_()
    config = RouterConfig(top_k=3, score=score)
    probs_TK = route(logits_TE, config, ids_TK=torch.tensor([[2, -1, 5], [-1, -1, 7], [-1, -1, -1]])).probs_TK
    pair_TK = route(logits_TE, RouterConfig(score=score), ids_TK=torch.tensor([[2, 5]] * 3)).probs_TK
    torch.testing.assert_close(probs_TK[0, [0, 2]], pair_TK[0])
    assert probs_TK[1:].tolist() == [[0, 0, 1], [0, 0, 0]]
    grads = [torch.autograd.grad(x, logits_TE, retain_graph=True)[0] for x in (probs_TK[0, 0], pair_TK[0, 0])]
    torch.testing.assert_close(*grads)


def test_counts_leave_out_what_is_not_an_expert() -> None:
    ids_TK = torch.tensor([[0, 2], [2, -1], [-1, -1], [2, 2]])
    routing = Routing(ids_TK=ids_TK, probs_TK=torch.zeros(4, 2), num_experts=4)
    assert routing.counts_E().tolist() == [1, 0, 4, 0]
    assert routing.bad_rows == 0


def test_no_tokens_are_an_ordinary_case(dtype: torch.dtype) -> None:
    routing = route(torch.zeros(0, 8), RouterConfig(), valid_T=torch.zeros(0, dtype=torch.bool))
    assert routing.ids_TK.shape == routing.probs_TK.shape == (0, 2)
    assert routing.bad_rows == 0
    assert not routing.counts_E().any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradcheck_of_the_weights(score: Literal["softmax", "sigmoid"], normalize: bool) -> None:
    config = RouterConfig(top_k=2, score=score, normalize=normalize, scale=1.5)
    logits_TE = logits(torch.float64, 5, 4).requires_grad_()
    ids_TK = route(logits_TE, config).ids_TK
    assert torch.autograd.gradcheck(lambda x: route(x, config, ids_TK=ids_TK).probs_TK, logits_TE)


def sorted_by_id(ids_TK: Tensor, probs_TK: Tensor) -> tuple[Tensor, Tensor]:
    order_TK = ids_TK.argsort(-1)
    return ids_TK.gather(-1, order_TK), probs_TK.gather(-1, order_TK)


@pytest.mark.parametrize(("family", "normalize"), [("mixtral", True), ("qwen3_moe", True), ("qwen3_moe", False)])
@pytest.mark.usefixtures("implementation")
def test_r031_softmax_routers_of_transformers(family: str, normalize: bool) -> None:
    transformers = pytest.importorskip("transformers")
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter as HFRouter

        hf_config = transformers.MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=3)
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter as HFRouter

        hf_config = transformers.Qwen3MoeConfig(
            hidden_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=normalize
        )
    router = HFRouter(hf_config)
    torch.nn.init.normal_(router.weight)
    x_TD = torch.randn(40, 16)
    logits_TE, weights_TK, ids_TK = router(x_TD)
    routing = route(logits_TE, RouterConfig(top_k=3, normalize=normalize))
    assert torch.equal(routing.ids_TK, ids_TK)
    torch.testing.assert_close(routing.probs_TK, weights_TK)
    torch.testing.assert_close(logits_TE, F.linear(x_TD, router.weight))


@pytest.mark.usefixtures("implementation")
def test_grouped_sigmoid_router_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    hf_config = transformers.DeepseekV3Config(
        hidden_size=16, n_routed_experts=12, num_experts_per_tok=4, n_group=3, topk_group=2, routed_scaling_factor=2.5
    )
    router = DeepseekV3TopkRouter(hf_config)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.copy_(torch.rand(12))
    logits_TE, weights_TK, ids_TK = router(torch.randn(40, 16))
    routing = route(
        logits_TE,
        RouterConfig(top_k=4, score="sigmoid", scale=2.5, groups=3, group_top_k=2),
        bias_E=router.e_score_correction_bias,
    )
    for got, expected in zip(
        sorted_by_id(routing.ids_TK, routing.probs_TK), sorted_by_id(ids_TK, weights_TK), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_r077_choices_can_be_repeated_under_checkpoint_without_a_mask(dtype):
    logits = torch.randn(6, 5, dtype=dtype, requires_grad=True)
    config = RouterConfig(top_k=2)
    seen = []

    def unit(logits):
        routing = route(logits, config, ids_TK=seen[0] if seen else None)
        seen.append(routing.ids_TK)
        return (routing.probs_TK * torch.tensor([1.0, 3.0])).sum()

    torch.utils.checkpoint.checkpoint(unit, logits, use_reentrant=False).backward()
    (expected,) = torch.autograd.grad((route(logits, config).probs_TK * torch.tensor([1.0, 3.0])).sum(), logits)
    assert len(seen) == 2
    assert torch.equal(logits.grad, expected)
