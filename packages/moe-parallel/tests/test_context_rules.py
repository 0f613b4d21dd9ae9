"""Which kinds of context parallelism go with which degrees and heads."""

import subprocess
import sys

import pytest

from moe_parallel import MoeParallelError, context_problems
from moe_parallel.context.rules import check_heads


def problems(kind, **sizes):
    return [(p.key, p.value, p.legal) for p in context_problems(kind, **{"heads": 8, "kv_heads": 2} | sizes)]


@pytest.mark.parametrize("kind", ["ring", "gather"])
@pytest.mark.parametrize("cp", [1, 2, 3, 7])
def test_ring_and_gather_take_any_degree(kind, cp):
    assert problems(kind, cp=cp) == []


def test_all_to_all_shares_out_heads():
    assert all(problems("all_to_all", cp=cp) == [] for cp in (1, 2, 4, 8))
    assert problems("all_to_all", cp=3) == [("parallel.cp", 3, "1, 2, 4, 8")]
    assert problems("all_to_all", cp=16) == [("parallel.cp", 16, "1, 2, 4, 8")]
    # 12 query heads divide by 4, but 6 key/value heads neither divide by 4 nor 4 by 6.
    assert problems("all_to_all", cp=4, heads=12, kv_heads=6) == [("parallel.cp", 4, "1, 2, 3, 6, 12")]


def test_hierarchical_shares_out_heads_inside():
    assert problems("hierarchical", cp=8, inner=2) == problems("hierarchical", cp=16, inner=8) == []
    assert problems("hierarchical", cp=12, inner=3) == [("parallel.cp_inner", 3, "2, 4")]
    for inner in (1, 8, 5, 0):
        assert problems("hierarchical", cp=8, inner=inner) == [("parallel.cp_inner", inner, "2, 4")]
    (problem,) = context_problems("hierarchical", cp=9, heads=8, kv_heads=2, inner=3)
    assert str(problem).endswith("No value fits; take parallel.cp_kind = ring")


def test_values_that_mean_nothing():
    assert problems("rings", cp=2) == [("parallel.cp_kind", "rings", "ring, all_to_all, gather, hierarchical")]
    assert problems("ring", cp=0) == [("parallel.cp", 0, "")]
    assert problems("hierarchical", cp=1, inner=2) == [("parallel.cp_inner", 2, "1")]


def test_the_error_of_a_core_says_the_same():
    check_heads("all_to_all", 8, 2, ranks=4)
    with pytest.raises(
        MoeParallelError, match=r"over 3 ranks: .* 8 query heads.* 2 key/value heads; legal here: 1, 2, 4"
    ):
        check_heads("all_to_all", 8, 2, ranks=3)


def test_rules_import_no_torch():
    code = "import sys; from moe_parallel import context_problems; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
