import math
from typing import Any

import pytest

from moe_kernels.config import RouterConfig


def fields(num_experts: int, **options: Any) -> list[str]:
    return [name for name, _ in RouterConfig(**options).problems(num_experts)]


@pytest.mark.parametrize(
    ("num_experts", "options"),
    [
        (8, {}),
        (8, {"top_k": 8}),
        (8, {"score": "sigmoid", "normalize": True, "scale": 2.5}),
        (8, {"softmax_order": "after_topk"}),
        (8, {"softmax_order": "after_topk", "normalize": False}),
        (8, {"top_k": 4, "groups": 4, "group_top_k": 2}),
        (8, {"top_k": 3, "groups": 8, "group_top_k": 3}),
        (1, {"top_k": 1}),
        (8, {"jitter": 0.01, "sinkhorn_iterations": 4}),
        (8, {"groups": 2, "force_balance": True}),
    ],
)
def test_legal_configurations_have_no_problem(num_experts: int, options: dict[str, Any]) -> None:
    assert fields(num_experts, **options) == []


@pytest.mark.parametrize(
    ("num_experts", "options", "field"),
    [
        (8, {"top_k": 9}, "top_k"),
        (8, {"top_k": 0}, "top_k"),
        (8, {"scale": 0.0}, "scale"),
        (8, {"scale": math.inf}, "scale"),
        (8, {"scale": math.nan}, "scale"),
        (8, {"score": "sigmoid", "softmax_order": "after_topk"}, "softmax_order"),
        (8, {"jitter": 1.0}, "jitter"),
        (8, {"jitter": -0.1}, "jitter"),
        (8, {"jitter": math.nan}, "jitter"),
        (8, {"sinkhorn_iterations": -1}, "sinkhorn_iterations"),
        (8, {"sinkhorn_iterations": 2, "groups": 2}, "sinkhorn_iterations"),
        (8, {"sinkhorn_iterations": 2, "force_balance": True}, "sinkhorn_iterations"),
    ],
)
def test_each_violated_rule_names_its_field(num_experts: int, options: dict[str, Any], field: str) -> None:
    assert fields(num_experts, **options) == [field]


@pytest.mark.parametrize(
    "options",
    [
        {"normalize": True},
        {"softmax_order": "after_topk"},
        {"softmax_order": "after_topk", "normalize": False},
        {"score": "sigmoid", "normalize": True},
    ],
)
def test_r028_one_choice_with_a_constant_weight_is_refused_unless_allowed(options: dict[str, Any]) -> None:
    assert fields(4, top_k=1, **options) == ["top_k"]
    assert fields(4, top_k=1, allow_constant_weight=True, **options) == []
    assert fields(1, top_k=1, **options) == []  # one expert, nothing to choose


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"groups": 3}, "groups", "1, 2, 4, 8"),
        ({"groups": 0}, "groups", "1, 2, 4, 8"),
        ({"groups": 4, "group_top_k": 5}, "group_top_k", "1 and 4"),
        ({"groups": 4, "group_top_k": 0}, "group_top_k", "1 and 4"),
        ({"groups": 4, "group_top_k": 1, "top_k": 3}, "top_k", "at most 2"),
        ({"groups": 4, "group_top_k": 2, "top_k": 3}, "group_top_k", "1, 3"),
    ],
)
def test_r033_group_rules_are_checked_with_the_legal_values(options: dict[str, Any], field: str, said: str) -> None:
    [(name, rule)] = RouterConfig(**options).problems(8)
    assert name == field
    assert said in rule
    assert rule.endswith(".")


def test_all_problems_are_reported_at_once() -> None:
    assert fields(8, top_k=9, scale=-1.0, groups=3) == ["top_k", "scale", "groups"]
