"""Topology: which ranks share a machine or an NVLink domain."""

import pytest

from moe_parallel import LinkClass, MoeParallelError, Topology


def test_a_domain_is_a_machine_unless_said_otherwise():
    topology = Topology.regular(12, ranks_per_node=4)
    assert topology.node_of == topology.domain_of == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert (topology.world, topology.num_nodes) == (12, 3)


def test_links_from_the_nearest_to_the_farthest():
    # Machines of four ranks, NVLink between pairs.
    topology = Topology.regular(8, ranks_per_node=4, ranks_per_domain=2)
    links = [topology.link(1, other) for other in range(8)]
    assert links == [
        LinkClass.NVLINK,
        LinkClass.SELF,
        LinkClass.NODE,
        LinkClass.NODE,
        *[LinkClass.NETWORK] * 4,
    ]
    for first in range(8):
        for second in range(8):
            assert topology.link(first, second) is topology.link(second, first)


def test_an_nvlink_domain_may_span_machines():
    topology = Topology.regular(16, ranks_per_node=4, ranks_per_domain=8)
    assert topology.link(0, 7) is LinkClass.NVLINK
    assert topology.node_of[0] != topology.node_of[7]
    assert topology.link(7, 8) is LinkClass.NETWORK


def test_from_host_names_in_any_order():
    hosts = ["b", "a", "b", "c", "a"]
    topology = Topology.from_hosts(hosts)
    assert topology.node_of == (0, 1, 0, 2, 1)
    assert [topology.link(0, other) for other in range(5)] == [
        LinkClass.SELF,
        LinkClass.NETWORK,
        LinkClass.NODE,
        LinkClass.NETWORK,
        LinkClass.NETWORK,
    ]
    assert Topology.from_hosts(hosts, nvlink=True).link(0, 2) is LinkClass.NVLINK


def test_peers_on_the_machine_of_a_rank():
    topology = Topology.regular(8, ranks_per_node=4)
    assert topology.on_node((1, 3, 5, 7), 0) == (1, 3)
    assert topology.on_node((1, 3, 5, 7), 5) == (5, 7)
    assert topology.on_node((0, 1), 7) == ()


@pytest.mark.parametrize(
    ("nodes", "run"),
    [
        ("aaaabbbb", 4),
        ("aaaaaaaa", 8),
        ("abababab", 1),
        ("aabbccdd", 2),
        ("aabbaabb", 2),
        ("aaaabb", 2),  # a machine of four ranks is two runs
        ("aaabb", 1),
        ("abbbba", 1),
        ("a", 1),
    ],
)
def test_consecutive_members_on_a_machine(nodes, run):
    assert Topology.from_hosts(nodes).run_on_node(range(len(nodes))) == run
    cut = [nodes[first : first + run] for first in range(0, len(nodes), run)]
    assert all(len(part) == run and len(set(part)) == 1 for part in cut)


def test_members_of_a_group_are_taken_in_its_order():
    topology = Topology.regular(16, ranks_per_node=4)
    assert topology.run_on_node(range(0, 16, 2)) == 2  # ep places that are etp = 2 ranks apart
    assert topology.run_on_node([0, 4, 8, 12]) == 1
    assert topology.run_on_node([0, 4, 1, 5]) == 1
    assert topology.run_on_node([0, 1, 8, 9, 5, 4]) == 2
    assert topology.run_on_node([7]) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology.regular(8, ranks_per_node=3), "ranks_per_node = 3 does not divide the world of 8 ranks"),
        (lambda: Topology.regular(8, ranks_per_node=0), "ranks_per_node = 0 does not divide"),
        (lambda: Topology.regular(8, ranks_per_node=4, ranks_per_domain=3), "ranks_per_domain = 3 does not divide"),
        (lambda: Topology.regular(0, ranks_per_node=4), "at least one rank, not 0"),
        (lambda: Topology.from_hosts([]), "of every rank: 0 and 0 were given"),
        (lambda: Topology((0, 0), (0,)), "of every rank: 2 and 1 were given"),
    ],
)
def test_what_is_no_topology(make, message):
    with pytest.raises(MoeParallelError, match=message):
        make()


def test_a_machine_may_be_larger_than_the_world():
    assert Topology.regular(2, ranks_per_node=8).num_nodes == 1
