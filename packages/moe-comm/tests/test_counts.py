"""Exact counts of an actual routing: by hand, against loops over tokens, and on average against the expectation."""

import pytest
import torch

from moe_comm import MoeCommError
from moe_comm.counts import (
    bytes_per_row,
    leg_bytes,
    metadata_bytes,
    rows_by_leg,
    rows_by_rank,
    shared_rows,
    tokens_by_part,
)
from moe_comm.traffic import BACKWARD_OF
from moe_comm.volume import RandomRouting, expected_rows

ALGORITHMS = ("allgather", "alltoall_per_expert", "alltoall_per_rank", "hybrid", "hybrid_rail_allgather")


def uneven_ids(world, num_experts, top_k, seed):
    """Ranks with no token and with several, choices of no expert and of the same one twice."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 9, (world,), generator=generator).tolist()
    tokens[seed % world] = 0
    return [torch.randint(-1, num_experts, (count, top_k), generator=generator) for count in tokens]


def rows_by_loops(algorithm, ids, num_experts, ranks_per_node):
    """Token by token, as a person would send them."""
    world, per_rank = len(ids), num_experts // len(ids)
    legs = {name: [[0] * world for _ in ids] for name in ("dispatch", "dispatch_rail", "dispatch_node")}
    for sender, ids_TK in enumerate(ids):
        for choices in ids_TK.tolist():
            ranks = [expert // per_rank for expert in choices if expert >= 0]
            if algorithm == "allgather":
                ranks = set(range(world))
            elif algorithm != "alltoall_per_expert":
                ranks = set(ranks)
            for rank in ranks:
                legs["dispatch"][sender][rank] += 1
            nodes = {rank // ranks_per_node for rank in ranks}
            if algorithm == "hybrid_rail_allgather":
                nodes = range(world // ranks_per_node)
            for node in nodes:
                rail = node * ranks_per_node + sender % ranks_per_node
                legs["dispatch_rail"][sender][rail] += 1
                for rank in ranks:
                    legs["dispatch_node"][rail][rank] += rank // ranks_per_node == node
    names = ["dispatch_rail", "dispatch_node"] if "hybrid" in algorithm else ["dispatch"]
    return {name: legs[name] for name in names}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("world", "ranks_per_node"), [(1, 1), (4, 2), (6, 3), (6, 2), (6, 1), (6, 6), (12, 4)])
def test_rows_of_every_leg(algorithm, world, ranks_per_node):
    for seed in range(5):
        ids = uneven_ids(world, 3 * world, 4, seed)
        found = rows_by_leg(algorithm, ids, num_experts=3 * world, ranks_per_node=ranks_per_node)
        assert {leg: rows.tolist() for leg, rows in found.items()} == rows_by_loops(
            algorithm, ids, 3 * world, ranks_per_node
        )


def test_one_rank_sends_nothing():
    assert rows_by_leg("local", uneven_ids(1, 3, 2, 0), num_experts=3, ranks_per_node=1) == {}


ROUTINGS = {
    "uniform": RandomRouting(num_experts=64, top_k=8),
    "4 of 8 groups": RandomRouting(num_experts=64, top_k=8, groups=8, chosen_groups=4),
    "1 of 4 groups": RandomRouting(num_experts=64, top_k=3, groups=4, chosen_groups=1),
}


def drawn(routing, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    in_group_TG = torch.rand(tokens, routing.groups, generator=generator).argsort(1) < routing.chosen_groups
    scores_TE = torch.rand(tokens, routing.num_experts, generator=generator)
    eligible_TE = in_group_TG.repeat_interleave(routing.num_experts // routing.groups, 1)
    return scores_TE.masked_fill(~eligible_TE, -1).topk(routing.top_k, 1).indices


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("world", "ranks_per_node"), [(4, 2), (16, 4), (16, 8), (32, 4)])
def test_counts_agree_with_the_expectation(name, world, ranks_per_node):
    """Within five standard errors; the rows of single tokens deviate from their mean by less than 1.5."""
    routing, tokens = ROUTINGS[name], 4096
    ids = [drawn(routing, tokens // world, 100 * world + rank) for rank in range(world)]
    node = torch.arange(world) // ranks_per_node
    crosses = node[:, None] != node
    stays = ~crosses & ~torch.eye(world, dtype=torch.bool)
    for algorithm in ALGORITHMS:
        rows = sum(rows_by_leg(algorithm, ids, num_experts=64, ranks_per_node=ranks_per_node).values())
        expected = expected_rows(algorithm, routing, world=world, ranks_per_node=ranks_per_node)
        for links, wanted in ((crosses, expected.network), (stays, expected.nvlink)):
            assert rows[links].sum().item() / tokens == pytest.approx(wanted, abs=5 * 1.5 / tokens**0.5)


def test_rows_and_bytes_by_hand():
    assert rows_by_rank(torch.tensor([[0, 1], [3, -1], [3, 3]]), 4, 2) == (2, 3)
    assert rows_by_rank(torch.empty(0, 2, dtype=torch.int64), 4, 2) == (0, 0)
    assert tokens_by_part(torch.tensor([[0, 1], [3, -1], [3, 3], [-1, -1], [1, 2]]), 4, 2).tolist() == [2, 3]
    assert tokens_by_part(torch.empty(0, 2, dtype=torch.int32), 4, 2).tolist() == [0, 0]
    assert metadata_bytes(5) == 40
    rows = ((1, 2), (3, 4))
    assert leg_bytes("dispatch", 0, rows, hidden=1, dtype=torch.float32) == (8, 16)
    assert leg_bytes("combine", 0, torch.tensor(rows), hidden=1, dtype=torch.float32) == (4, 12)
    assert leg_bytes("combine_rail_backward", 0, rows, hidden=1, dtype=torch.float32) == (4, 8)
    assert leg_bytes("dispatch_node", 0, rows, hidden=1, dtype=torch.float32, choices=3, with_ids=True) == (28, 56)
    assert leg_bytes("dispatch_node_backward", 0, rows, hidden=1, dtype=torch.float32, choices=3) == (16, 48)


def test_rows_of_ranks_that_share_experts_by_hand():
    assert shared_rows([(1, 2), (3, 4), (5, 6), (7, 8)], 1, 2) == [[8, 8], [12, 12]]  # of shards 0 and 1 to place 1
    shared = [[8, 8], [12, 12]]
    assert leg_bytes("gather", 1, shared, hidden=1, dtype=torch.float32) == (96, 96)
    assert leg_bytes("gather_backward", 1, shared, hidden=1, dtype=torch.float32) == (64, 96)
    assert leg_bytes("scatter", 1, shared, hidden=1, dtype=torch.float32) == (32, 48)
    assert leg_bytes("scatter_backward", 1, shared, hidden=1, dtype=torch.float32) == (48, 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_what_rides_on_which_leg(dtype):
    """Probabilities there and their gradients back, ids there alone, and neither on what the experts answer."""
    probability = 8 if dtype is torch.float64 else 4
    for leg, backward in BACKWARD_OF.items():
        there = "dispatch" in leg or leg == "gather"
        rides = 6 * probability if there else 0
        assert bytes_per_row(leg, 10, dtype, choices=6) == 10 * dtype.itemsize + rides
        assert bytes_per_row(leg, 10, dtype, choices=6, with_ids=True) == 10 * dtype.itemsize + rides + 24 * there
        assert bytes_per_row(backward, 10, dtype, choices=6, with_ids=True) == 10 * dtype.itemsize + rides


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bytes_per_row("metadata", 8, torch.float32), "not sent in rows"),
        (
            lambda: rows_by_leg("hybrid", uneven_ids(4, 8, 2, 0), num_experts=8, ranks_per_node=3),
            "ranks_per_node = 3 does not divide the group of 4 ranks",
        ),
        (
            lambda: rows_by_leg("allgather", uneven_ids(4, 8, 2, 0), num_experts=6, ranks_per_node=2),
            "6 experts cannot be spread evenly over 4 ranks",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(MoeCommError, match=message):
        call()
