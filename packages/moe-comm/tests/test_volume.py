"""Expected rows: the published table, and every probability against an enumeration of all choices."""

import random
import subprocess
import sys
from fractions import Fraction
from itertools import combinations
from math import comb
from typing import get_args

import pytest

from moe_comm import MoeCommError
from moe_comm.volume import Algorithm, RandomRouting, expected_rows, hit_probability, peak_rows

UNIFORM = RandomRouting(num_experts=256, top_k=8)
GROUPED = RandomRouting(num_experts=256, top_k=8, groups=8, chosen_groups=4)

# E = 256, K = 8, 8 ranks per node, as printed in the design. Uniform: nodes and ranks that a token hits, rows over the
# network with one row per expert, per rank and per node; then, of 4 of 8 groups: nodes, rows per rank and per node.
TABLE = {
    2: ("1.993", "6.523", "4.00", "3.262", "0.997", "1.926", "2.670", "0.963"),
    4: ("3.614", "7.267", "6.00", "5.450", "2.711", "2.928", "4.947", "2.196"),
    8: ("5.295", "7.676", "7.00", "6.716", "4.633", "3.629", "6.439", "3.175"),
    16: ("6.523", "7.890", "7.50", "7.397", "6.116", "5.339", "7.293", "5.006"),
    32: ("7.267", "8.000", "7.75", "7.750", "7.040", "6.597", "7.750", "6.390"),
}
SAVINGS = {2: ("3.27", "2.77"), 4: ("2.01", "2.25"), 8: ("1.45", "2.03"), 16: ("1.21", "1.46"), 32: ("1.10", "1.21")}


def network(algorithm, routing, nodes):
    return expected_rows(algorithm, routing, world=8 * nodes, ranks_per_node=8).network


@pytest.mark.parametrize("nodes", TABLE)
def test_the_published_table(nodes):
    found = [
        nodes * hit_probability(UNIFORM, nodes),
        8 * nodes * hit_probability(UNIFORM, 8 * nodes),
        *(network(algorithm, UNIFORM, nodes) for algorithm in ("alltoall_per_expert", "alltoall_per_rank", "hybrid")),
        nodes * hit_probability(GROUPED, nodes),
        *(network(algorithm, GROUPED, nodes) for algorithm in ("alltoall_per_rank", "hybrid")),
    ]
    printed = TABLE[nodes]
    assert tuple(f"{value:.{len(text) - 2}f}" for value, text in zip(found, printed, strict=True)) == printed
    saved = [network("alltoall_per_rank", r, nodes) / network("hybrid", r, nodes) for r in (UNIFORM, GROUPED)]
    assert tuple(f"{value:.2f}" for value in saved) == SAVINGS[nodes]


def test_the_other_published_numbers():
    wide, small = RandomRouting(num_experts=512, top_k=22), RandomRouting(num_experts=64, top_k=6)
    assert f"{network('alltoall_per_rank', wide, 8):.1f}" == "16.7"
    assert f"{network('hybrid', wide, 8):.2f}" == "6.65"
    assert f"{network('alltoall_per_rank', small, 2):.2f}" == "2.66"
    assert f"{network('hybrid', small, 2):.2f}" == "0.99"
    # MB per rank of 4096 tokens with 7168 features in bf16.
    megabytes = 4096 * 7168 * 2 / 1e6
    per_rank = [megabytes * network("alltoall_per_rank", UNIFORM, nodes) for nodes in (2, 4, 8)]
    hybrid = [megabytes * network("hybrid", UNIFORM, nodes) for nodes in (2, 4, 8)]
    assert ([round(value) for value in per_rank], [round(value) for value in hybrid]) == (
        [192, 320, 394],
        [59, 159, 272],
    )
    inside = [expected_rows(a, UNIFORM, world=64, ranks_per_node=8).nvlink for a in ("alltoall_per_rank", "hybrid")]
    assert [round(megabytes * value) for value in inside] == [49, 394]
    # Sending a token to every node costs so much more than to those that need it.
    more = [network("hybrid_rail_allgather", UNIFORM, nodes) / network("hybrid", UNIFORM, nodes) for nodes in (2, 4, 8)]
    assert [f"{100 * (value - 1):.2f}" for value in more] == ["0.35", "10.67", "51.10"]


def hit_by_enumeration(routing, parts):
    size, per_group = routing.num_experts // parts, routing.num_experts // routing.groups
    hits = choices = 0
    for chosen in combinations(range(routing.groups), routing.chosen_groups):
        eligible = [expert for group in chosen for expert in range(group * per_group, (group + 1) * per_group)]
        for experts in combinations(eligible, routing.top_k):
            hits += len({expert // size for expert in experts})
            choices += 1
    return Fraction(hits, choices * parts)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "chosen"),
    [
        (12, 3, 1, 1),
        (12, 3, 4, 2),
        (12, 2, 6, 3),
        (12, 1, 3, 1),
        (12, 4, 2, 1),
        (12, 12, 1, 1),
        (12, 6, 4, 2),
        (12, 0, 3, 2),
    ],
)
def test_hits_of_every_choice_counted(experts, top_k, groups, chosen):
    """Of twelve experts, parts and groups need not divide each other: 3 groups and 4 parts, 4 groups and 6 parts."""
    routing = RandomRouting(num_experts=experts, top_k=top_k, groups=groups, chosen_groups=chosen)
    for parts in (1, 2, 3, 4, 6, 12):
        assert hit_probability(routing, parts) == pytest.approx(float(hit_by_enumeration(routing, parts)), abs=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_hits_against_the_closed_forms(seed):
    """One formula covers the three of the design: no groups, nodes of whole groups, groups of whole nodes."""
    drawn = random.Random(seed)
    experts, top_k = 64 * drawn.randint(1, 4), drawn.randint(1, 8)
    uniform = RandomRouting(num_experts=experts, top_k=top_k)
    for parts in (2, 4, 16, 64):
        share = experts // parts
        assert hit_probability(uniform, parts) == pytest.approx(1 - comb(experts - share, top_k) / comb(experts, top_k))
    groups, chosen = 8, drawn.randint(1, 8)
    size = experts // groups
    grouped = RandomRouting(num_experts=experts, top_k=top_k, groups=groups, chosen_groups=chosen)
    for parts in (2, 4):
        mine = groups // parts
        wanted = sum(
            comb(mine, j)
            * comb(groups - mine, chosen - j)
            / comb(groups, chosen)
            * (1 - comb((chosen - j) * size, top_k) / comb(chosen * size, top_k))
            for j in range(min(mine, chosen) + 1)
        )
        assert hit_probability(grouped, parts) == pytest.approx(wanted)
    for parts in (16, 32):
        wanted = chosen / groups * (1 - comb(chosen * size - experts // parts, top_k) / comb(chosen * size, top_k))
        assert hit_probability(grouped, parts) == pytest.approx(wanted)


def test_rows_by_link_by_hand():
    """Four ranks on two nodes, four experts, K = 1: a token goes to each rank with probability 1/4."""
    routing = RandomRouting(num_experts=4, top_k=1)
    found = {
        algorithm: expected_rows(algorithm, routing, world=4, ranks_per_node=2)
        for algorithm in get_args(Algorithm)
        if algorithm != "local"
    }
    assert {name: (rows.network, rows.nvlink) for name, rows in found.items()} == {
        "allgather": (2, 1),
        "alltoall_per_expert": (0.5, 0.25),
        "alltoall_per_rank": (0.5, 0.25),
        "hybrid": (0.5, 0.5),  # half of what is for a node is for the rank beside the one where it comes in
        "hybrid_rail_allgather": (1, 0.5),
    }
    assert found["hybrid"].total == 1
    alone = expected_rows("local", routing, world=1, ranks_per_node=1)
    assert (alone.network, alone.nvlink) == (0, 0)
    # Two ranks share each expert, and each passes on the one row per token that it gets.
    assert expected_rows("alltoall_per_rank", routing, world=4, ranks_per_node=2, etp=2).nvlink == 0.25 + 1


def test_without_a_second_level_hybrid_is_the_all_to_all():
    for per_node in (1, 8):
        hybrid, flat = (
            expected_rows(algorithm, GROUPED, world=8, ranks_per_node=per_node)
            for algorithm in ("hybrid", "alltoall_per_rank")
        )
        assert hybrid == flat


def test_peak_rows():
    found = peak_rows("hybrid", UNIFORM, world=64, ranks_per_node=8)
    assert (f"{found.rail:.3f}", f"{found.ranks:.3f}", found.experts, found.most) == ("5.295", "7.676", 8, 8)
    worst = peak_rows("hybrid", UNIFORM, world=64, ranks_per_node=8, worst=True)
    assert (worst.rail, worst.ranks, worst.experts, worst.most) == (8, 64, 64 * 4, 64 * 4)  # 4 experts on a rank, K = 8
    assert peak_rows("hybrid_rail_allgather", UNIFORM, world=64, ranks_per_node=8).rail == 8
    assert peak_rows("allgather", UNIFORM, world=64, ranks_per_node=8).most == 64
    assert peak_rows("alltoall_per_expert", UNIFORM, world=64, ranks_per_node=8).ranks == 8
    assert peak_rows("alltoall_per_expert", UNIFORM, world=64, ranks_per_node=8, worst=True).ranks == 64 * 4
    assert peak_rows("local", UNIFORM, world=1, ranks_per_node=1).most == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RandomRouting(num_experts=8, top_k=2, groups=3), "8 experts cannot be cut into groups = 3 of equal"),
        (lambda: RandomRouting(num_experts=0, top_k=0), "0 experts cannot be cut"),
        (lambda: RandomRouting(num_experts=8, top_k=2, groups=4, chosen_groups=5), "chosen_groups = 5 is not between"),
        (lambda: RandomRouting(num_experts=8, top_k=2, groups=4, chosen_groups=0), "chosen_groups = 0 is not between"),
        (
            lambda: RandomRouting(num_experts=8, top_k=3, groups=4, chosen_groups=1),
            r"top_k = 3 different experts cannot be chosen among 2 \(1 of 4 groups of 2\)",
        ),
        (lambda: hit_probability(UNIFORM, 3), "256 experts cannot be cut into 3 parts of equal size"),
        (lambda: hit_probability(UNIFORM, 0), "256 experts cannot be cut into 0 parts"),
        (lambda: expected_rows("hybrid", UNIFORM, world=8, ranks_per_node=3), "ranks_per_node = 3 does not divide the"),
        (lambda: expected_rows("local", UNIFORM, world=8, ranks_per_node=8), "local is for one rank, not for 8"),
        (
            lambda: expected_rows("hybrid", UNIFORM, world=12, ranks_per_node=4),
            "256 experts cannot be cut into 3 parts",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(MoeCommError, match=message):
        call()


def test_formulas_need_no_torch():
    code = "import sys, moe_comm.cost, moe_comm.volume; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
