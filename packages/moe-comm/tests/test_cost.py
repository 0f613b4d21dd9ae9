"""The model of bytes and latency: by hand, where it turns, and what it says."""

from typing import get_args

import pytest

from moe_comm import MoeCommError
from moe_comm.cost import LayerSize, LinkSpeeds, cheapest, estimate
from moe_comm.volume import Algorithm, RandomRouting, expected_rows

GROUPED = RandomRouting(num_experts=256, top_k=8, groups=8, chosen_groups=4)


def size(nodes, tokens=4096, **others):
    return LayerSize(routing=GROUPED, world=8 * nodes, ranks_per_node=8, tokens=tokens, hidden=7168, **others)


def test_by_hand():
    """Two nodes of one rank, K = 1 of two experts: half of 1000 tokens leave, with 100 features of 4 bytes."""
    layer = LayerSize(
        routing=RandomRouting(num_experts=2, top_k=1), world=2, ranks_per_node=1, tokens=1000, hidden=100, itemsize=4
    )
    found = estimate("alltoall_per_rank", layer, LinkSpeeds(network_gb_per_s=1, nvlink_gb_per_s=1, collective_us=7))
    assert found.network_bytes == 500 * (408 + 400)
    assert found.nvlink_bytes == 0
    assert found.collectives == 4  # the sizes, rows, probabilities, and rows back
    assert found.time_us == pytest.approx(404 + 28)
    assert found.bound == "the network"


def test_two_levels_follow_each_other_and_lanes_hide_the_shorter():
    speeds = LinkSpeeds(collective_us=0)
    for lanes in (1, 2, 4):
        found = estimate("hybrid", size(4, lanes=lanes), speeds)
        network_us, nvlink_us = found.network_bytes / 50e3, found.nvlink_bytes / 450e3
        assert found.time_us == pytest.approx(network_us + nvlink_us / lanes)
    assert [estimate("hybrid", size(4, lanes=lanes)).collectives for lanes in (1, 4)] == [7, 25]
    assert (
        estimate("hybrid", size(1, lanes=2), speeds).time_us == estimate("alltoall_per_rank", size(1), speeds).time_us
    )


@pytest.mark.parametrize("algorithm", sorted(set(get_args(Algorithm)) - {"local"}))
def test_bytes_are_those_of_the_expected_rows(algorithm):
    found = estimate(algorithm, size(4))
    rows = expected_rows(algorithm, GROUPED, world=32, ranks_per_node=8)
    row_bytes = 2 * 7168 * 2 + 8 * (1 if algorithm == "alltoall_per_expert" else 8)
    assert found.network_bytes == pytest.approx(rows.network * 4096 * row_bytes)
    assert found.nvlink_bytes == pytest.approx(rows.nvlink * 4096 * row_bytes)


def test_one_rank_costs_nothing():
    layer = LayerSize(routing=GROUPED, world=1, ranks_per_node=1, tokens=4096, hidden=7168)
    ranking = cheapest(layer)
    assert (ranking.best.algorithm, ranking.best.time_us, ranking.best.collectives) == ("local", 0, 0)
    assert ranking.best.bound == "nothing"


def test_shared_experts_add_a_hop():
    alone, shared = estimate("hybrid", size(2)), estimate("hybrid", size(2, etp=2))
    assert shared.collectives == alone.collectives + 3
    assert shared.network_bytes == alone.network_bytes
    assert shared.nvlink_bytes > alone.nvlink_bytes


@pytest.mark.parametrize("algorithm", ["allgather", "alltoall_per_rank"])
def test_what_is_handed_on_follows_what_arrives(algorithm):
    """In one level the network and NVLink work at once, and NVLink again for the ranks that share an expert."""
    speeds = LinkSpeeds(collective_us=0)
    alone, shared = (estimate(algorithm, size(2, etp=etp), speeds) for etp in (1, 2))
    assert alone.bound == shared.bound == "the network"
    handed_on_us = (shared.nvlink_bytes - alone.nvlink_bytes) / 450e3
    assert handed_on_us > 0.1 * alone.time_us
    assert shared.time_us == pytest.approx(alone.time_us + handed_on_us)


@pytest.mark.parametrize(
    ("nodes", "tokens", "best"),
    [
        (1, 4096, "alltoall_per_rank"),  # no network: forwarding has nothing to save, and is no simpler
        (2, 4096, "hybrid"),
        (8, 4096, "hybrid"),
        (2, 8, "alltoall_per_rank"),  # so few bytes that the starts of collectives decide
    ],
)
def test_where_the_choice_turns(nodes, tokens, best):
    ranking = cheapest(size(nodes, tokens))
    assert ranking.best.algorithm == best
    times = [found.time_us for found in ranking.estimates]
    assert times == sorted(times)
    assert {found.algorithm for found in ranking.estimates} == set(get_args(Algorithm)) - {"local"}


def test_a_fast_network_leaves_nothing_to_save():
    speeds = LinkSpeeds(network_gb_per_s=450)
    assert cheapest(size(2), speeds).best.algorithm == "alltoall_per_rank"


def test_the_reason_is_a_sentence_with_its_numbers():
    ranking = cheapest(size(4), among=["alltoall_per_rank", "hybrid"])
    assert ranking.reason == (
        "hybrid takes 6.71 ms for a layer's dispatch and combine by the model, bound by the network (258 MB over the "
        "network, 679 MB inside the node); next is alltoall_per_rank with 11.7 ms, bound by the network (582 MB over "
        "the network, 170 MB inside the node)"
    )
    only = cheapest(size(4), among=["allgather"])
    assert only.reason.startswith("allgather takes 56.5 ms")
    assert "next" not in only.reason


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LinkSpeeds(network_gb_per_s=0), "network_gb_per_s = 0 is no speed"),
        (lambda: LinkSpeeds(nvlink_gb_per_s=-1), "nvlink_gb_per_s = -1 is no speed"),
        (lambda: LinkSpeeds(nvlink_gb_per_s=float("nan")), "nvlink_gb_per_s = nan is no speed"),
        (lambda: LinkSpeeds(collective_us=-1), "collective_us = -1 is no time; it must be at least 0"),
        (lambda: LinkSpeeds(collective_us=float("nan")), "collective_us = nan is no time"),
        (lambda: cheapest(size(2), among=["local"]), "none of local can serve 16 ranks"),
        (lambda: cheapest(size(2), among=[]), "none of no algorithms can serve 16 ranks"),
        (lambda: estimate("local", size(2)), "local is for one rank, not for 16"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(MoeCommError, match=message):
        call()
