"""Which dtype each parameter computes in."""

import pytest
import torch

from moe_memory import MoeMemoryError, compute_dtypes

NAMES = ["layers.0.router.weight", "layers.0.experts.w1", "layers.10.router.weight", "norm.weight"]


@pytest.mark.parametrize(
    ("default", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_patterns_compute_in_the_internal_dtype_of_the_default(default, kept):
    found = compute_dtypes(NAMES, default, ["*.router.weight"])
    assert found == {name: kept if "router" in name else default for name in NAMES}
    assert list(found) == NAMES


def test_names_may_come_from_an_iterator():
    assert compute_dtypes(iter(NAMES), torch.bfloat16, ["norm.*"])["norm.weight"] == torch.float32


@pytest.mark.parametrize("pattern", ["router", "*.Router.*", "*.bias"])
def test_r050_a_pattern_that_matches_nothing_is_an_error(pattern):
    with pytest.raises(MoeMemoryError, match="matches no parameter"):
        compute_dtypes(NAMES, torch.bfloat16, ["*.router.weight", pattern])
