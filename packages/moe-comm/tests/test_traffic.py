"""The ledger against the counts of the routing, and both against the bytes that are handed to torch.distributed."""

from contextvars import Context
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.distributed as dist

from moe_comm import (
    Sizing,
    TrafficEntry,
    build_dispatcher as build,
    combine,
    dispatch,
    note_buffer,
    note_host_sync,
    note_traffic,
    record_traffic,
)
from moe_comm.config import AllGatherConfig, AllToAllConfig, HybridConfig, LocalConfig
from moe_comm.counts import bytes_per_row, leg_bytes, metadata_bytes, rows_by_leg
from moe_comm.testing.harness import split_groups
from moe_comm.traffic import BACKWARD_OF, open_ledgers
from moe_comm.volume import RandomRouting, expected_rows
from moe_kernels import Routing, internal_dtype
from moe_parallel import AxisGroups, LinkClass, Topology
from moe_parallel.testing import run_threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CONFIGS = {
    "allgather": AllGatherConfig(),
    "alltoall_per_expert": AllToAllConfig(row="per_expert"),
    "alltoall_per_rank": AllToAllConfig(),
    "hybrid": HybridConfig(),
    "hybrid_rail_allgather": HybridConfig(rail="allgather"),
}


def step(dispatcher, ids_TK, num_experts, hidden, dtype, times=1):
    """Dispatch and combine with one plan, forward and backward."""
    x_TD = torch.randn(len(ids_TK), hidden, dtype=dtype, requires_grad=True)
    probs_TK = torch.rand(ids_TK.shape, dtype=internal_dtype(dtype), requires_grad=True)
    plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts))
    for _ in range(times):
        sent = dispatch(dispatcher, plan, x_TD, probs_TK)
        combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None].to(dtype)).sum().backward()


def uneven_ids(rank, world, num_experts, top_k):
    """Another number of tokens on every rank, none on the first, and low expert ids more often than high ones."""
    generator = torch.Generator().manual_seed(17 * world + rank)
    drawn_TK = torch.rand(7 * rank, top_k, generator=generator).square()
    return (drawn_TK * (num_experts + 1)).long() - 1


def exchanges(algorithm, rank, ids, *, num_experts, etp, nodes):
    """Leg, place of the sender, members, rows and choices of a row, of every exchange of a layer but the metadata."""
    place, shard = divmod(rank, etp)
    places = len(ids) // etp
    per_node = places // nodes
    node, local = divmod(place, per_node)
    members = {
        "dispatch": range(places),
        "dispatch_rail": range(local, places, per_node),
        "dispatch_node": range(node * per_node, (node + 1) * per_node),
    }
    by_shard = [
        rows_by_leg(algorithm, ids[s::etp], num_experts=num_experts, ranks_per_node=per_node) for s in range(etp)
    ]
    legs, arriving = [], [len(ids[place * etp + s]) for s in range(etp)]
    for leg, rows in by_shard[shard].items():
        inside = list(members[leg])
        if len(inside) > 1:
            legs.append((leg, inside.index(place), [p * etp + shard for p in inside], rows[inside][:, inside]))
            arriving = [of_shard[leg][:, place].sum().item() for of_shard in by_shard]
    choices = 1 if algorithm == "alltoall_per_expert" and legs else ids[0].shape[1]
    if etp > 1:
        ranks = [place * etp + s for s in range(etp)]
        legs.append(("gather", shard, ranks, [[count] * etp for count in arriving]))
    back = {
        "dispatch": "combine",
        "dispatch_rail": "combine_rail",
        "dispatch_node": "combine_node",
        "gather": "scatter",
    }
    there = [(leg, *rest) for leg, *rest in legs]
    home = [(back[leg], *rest) for leg, *rest in reversed(legs)]
    order = [*there, *home, *((BACKWARD_OF[leg], *rest) for leg, *rest in reversed([*there, *home]))]
    return [(leg, sender, ranks, rows, choices) for leg, sender, ranks, rows in order]


def wanted(algorithm, rank, ids, *, hidden, dtype, with_ids=True, **sizes):
    """Leg, place of the sender, members and bytes of every exchange of a layer, in order; without the metadata."""
    riding = {"hidden": hidden, "dtype": dtype, "with_ids": with_ids}
    return [
        (leg, sender, tuple(ranks), leg_bytes(leg, sender, rows, choices=choices, **riding))
        for leg, sender, ranks, rows, choices in exchanges(algorithm, rank, ids, **sizes)
    ]


def as_tuples(entries):
    return [(entry.leg, entry.rank, entry.members, entry.sent_bytes) for entry in entries]


# Expert-parallel ranks, ranks that share an expert, nodes.
BLOCKS = [(2, 1, 2), (3, 1, 1), (4, 1, 2), (6, 1, 2), (6, 1, 3), (1, 2, 1), (2, 2, 2), (4, 2, 2), (3, 3, 1), (3, 3, 3)]


@pytest.mark.parametrize(
    ("algorithm", "ep", "etp", "nodes"),
    [(name, *block) for name in CONFIGS for block in BLOCKS if "hybrid" not in name or block[2] > 1],
)
def test_the_ledger_holds_what_the_routing_says(algorithm, ep, etp, nodes):
    num_experts, hidden, top_k, world = 3 * ep, 5, 3, ep * etp
    dtype = DTYPES[(ep + etp) % len(DTYPES)]

    def on_rank(rank, groups):
        dispatcher = build(CONFIGS[algorithm], split_groups(rank, groups, etp, nodes), num_experts)
        with record_traffic() as ledger:
            step(dispatcher, ids[rank], num_experts, hidden, dtype)
        return ledger

    ids = [uneven_ids(rank, world, num_experts, top_k) for rank in range(world)]
    words = 6 + num_experts + ep + (nodes if algorithm == "hybrid" and nodes > 1 else 0)
    for rank, ledger in enumerate(run_threads(world, on_rank)):
        metadata, *entries = as_tuples(ledger.entries)
        assert metadata == ("metadata", rank, tuple(range(world)), (metadata_bytes(words),) * world)
        assert entries == wanted(
            algorithm, rank, ids, num_experts=num_experts, etp=etp, nodes=nodes, hidden=hidden, dtype=dtype
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_when_a_plan_is_used_again_ids_stay_at_home(algorithm, dtype):
    def on_rank(rank, groups):
        dispatcher = build(CONFIGS[algorithm], split_groups(rank, groups, 1, 2), 8)
        with record_traffic() as ledger:
            step(dispatcher, ids[rank], 8, 5, dtype, times=2)
        return ledger

    ids = [uneven_ids(rank, 4, 8, 3) for rank in range(4)]
    sizes = {"num_experts": 8, "etp": 1, "nodes": 2, "hidden": 5, "dtype": dtype}
    for rank, ledger in enumerate(run_threads(4, on_rank)):
        first, again = (wanted(algorithm, rank, ids, with_ids=with_ids, **sizes) for with_ids in (True, False))
        assert as_tuples(ledger.entries[1:]) == first + again


@pytest.mark.parametrize("algorithm", ["alltoall_per_rank", "alltoall_per_expert", "hybrid", "allgather"])
def test_what_is_held_is_what_one_exchange_sends_and_receives(algorithm):
    def on_rank(rank, groups):
        dispatcher = build(CONFIGS[algorithm], split_groups(rank, groups, 1, 2), 8)
        with record_traffic() as ledger:
            step(dispatcher, ids[rank], 8, 5, torch.bfloat16)
        return ledger

    ids = [uneven_ids(rank, 4, 8, 3) for rank in range(4)]
    for rank, ledger in enumerate(run_threads(4, on_rank)):
        held = []
        for leg, place, members, rows, choices in exchanges(algorithm, rank, ids, num_experts=8, etp=1, nodes=2):
            sent = [
                leg_bytes(leg, other, rows, hidden=5, dtype=torch.bfloat16, choices=choices, with_ids=True)
                for other in range(len(members))
            ]
            held.append(sum(sent[place]) + sum(from_other[place] for from_other in sent))
        assert ledger.peak_buffer_bytes == max(held)
        assert ledger.host_syncs == 1


@pytest.mark.parametrize("lanes", [2, 3])
def test_lanes_send_the_same_bytes_in_more_exchanges(lanes):
    def on_rank(rank, groups):
        dispatcher = build(HybridConfig(lanes=lanes), split_groups(rank, groups, 1, 2), 8)
        with record_traffic() as ledger:
            step(dispatcher, ids[rank], 8, 5, torch.float32)
        return ledger

    ids = [uneven_ids(rank, 4, 8, 3) for rank in range(4)]
    for rank, ledger in enumerate(run_threads(4, on_rank)):
        assert ledger.entries[0].sent_bytes == (metadata_bytes(6 + 8 + lanes * (4 + 2)),) * 4
        for leg, sender, members, sent in wanted(
            "hybrid", rank, ids, num_experts=8, etp=1, nodes=2, hidden=5, dtype=torch.float32
        ):
            parts = [entry for entry in ledger.entries if entry.leg == leg]
            assert len(parts) == lanes
            assert {(part.rank, part.members) for part in parts} == {(sender, members)}
            assert tuple(map(sum, zip(*(part.sent_bytes for part in parts), strict=True))) == sent


@pytest.mark.parametrize(("etp", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (1, torch.bfloat16)])
def test_rows_cross_machines_once_however_many_ranks_share_an_expert(etp, dtype):
    """Two places on a machine each; the bytes between machines are those of the rows, the copies stay inside."""
    topology = Topology.regular(2 * etp, ranks_per_node=etp)

    def on_rank(rank, groups):
        dispatcher = build(AllToAllConfig(), split_groups(rank, groups, etp), 4)
        with record_traffic() as ledger:
            step(dispatcher, torch.tensor([[0, 3], [2, 3], [1, -1]]), 4, 8, dtype)
        return ledger.bytes_by_link(topology, "dispatch"), ledger.bytes_by_link(topology, "gather")

    row_bytes = bytes_per_row("dispatch", 8, dtype, choices=2, with_ids=True)
    for rank, (dispatched, gathered) in enumerate(run_threads(2 * etp, on_rank)):
        place = rank // etp
        assert dispatched[LinkClass.NETWORK] == (2, 2)[place] * row_bytes
        assert dispatched[LinkClass.NVLINK] == gathered[LinkClass.NETWORK] == 0
        assert gathered[LinkClass.NVLINK] == (etp - 1) * 2 * (2, 2)[place] * row_bytes


@pytest.mark.parametrize("algorithm", CONFIGS)
@pytest.mark.parametrize("world", [2, 4])
def test_the_ledger_counts_what_torch_distributed_is_given(world, algorithm, monkeypatch):
    """Without looking at the ledger: bytes of the tensors that leave, less the part that stays, and the calls."""
    leaving, calls, num_experts = [0] * world, [0] * world, 2 * world
    all_to_all, gather_name = dist.all_to_all_single, "all_gather_into_tensor"
    gather_name = "all_gather_single" if hasattr(dist, "all_gather_single") else gather_name
    all_gather = getattr(dist, gather_name)

    def counted(output, x, output_split_sizes=None, input_split_sizes=None, group=None, **options):
        rank = dist.get_rank()
        rows = x.shape[0] - input_split_sizes[dist.get_rank(group)]
        leaving[rank] += rows * x[0:1].numel() * x.itemsize if len(x) else 0
        calls[rank] += 1
        return all_to_all(output, x, output_split_sizes, input_split_sizes, group=group, **options)

    def gathered(output, x, group=None, **options):
        leaving[dist.get_rank()] += (dist.get_world_size(group) - 1) * x.nbytes
        calls[dist.get_rank()] += 1
        return all_gather(output, x, group=group, **options)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    monkeypatch.setattr(dist, gather_name, gathered)

    def on_rank(rank, groups):
        dispatcher = build(CONFIGS[algorithm], split_groups(rank, groups, 1, 2), num_experts)
        with record_traffic() as ledger:
            step(dispatcher, uneven_ids(rank, world, num_experts, 3), num_experts, 4, torch.bfloat16)
        return ledger.leaving_bytes(), ledger.collectives()

    assert run_threads(world, on_rank) == list(zip(leaving, calls, strict=True))
    assert min(leaving) > 0


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_with_fixed_sizes_the_model_and_the_ledger_agree_on_the_worst_case(algorithm, etp):
    world, tokens, top_k = 4 * etp, 3, 2
    topology = Topology.regular(world, ranks_per_node=world // 2)
    choices = 1 if algorithm == "alltoall_per_expert" else top_k
    row_bytes = bytes_per_row("dispatch", 5, torch.float32, choices=choices, with_ids=True)

    def on_rank(rank, groups):
        dispatcher = build(CONFIGS[algorithm], split_groups(rank, groups, etp, 2), 8)
        probs_TK = torch.ones(tokens, top_k)
        ids_TK = torch.zeros(tokens, top_k, dtype=torch.int64)
        plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=8), Sizing(capacity_rows=9))
        with record_traffic() as ledger:
            dispatch(dispatcher, plan, torch.ones(tokens, 5), probs_TK)
        sent = ledger.bytes_by_link(topology)
        return [sent[link] / row_bytes / tokens for link in (LinkClass.NETWORK, LinkClass.NVLINK)]

    routing = RandomRouting(num_experts=8, top_k=top_k)
    rows = expected_rows(algorithm, routing, world=4, ranks_per_node=2, etp=etp, fixed=True)
    assert run_threads(world, on_rank) == [[rows.network, rows.nvlink]] * world


def test_one_rank_sends_nothing():
    with record_traffic() as ledger:
        step(build(LocalConfig(), AxisGroups(), 4), torch.tensor([[0, 3], [1, 2]]), 4, 8, torch.float32)
    assert ledger.entries == []
    assert ledger.leaving_bytes() == ledger.collectives() == ledger.peak_buffer_bytes == 0
    assert ledger.host_syncs == 1  # it sizes the rows of its experts as well


def test_links_by_hand():
    """A group of ranks 1, 2 and 5 of six, two machines of three ranks: only rank 5 is on the other machine."""
    topology = Topology.regular(6, ranks_per_node=3)
    with record_traffic() as ledger:
        note_traffic(TrafficEntry(leg="dispatch", rank=1, members=(1, 2, 5), sent_bytes=(10, 20, 40)))
        note_traffic(TrafficEntry(leg="combine", rank=1, members=(1, 2, 5), sent_bytes=(1, 2, 4)))
    by_link = ledger.bytes_by_link(topology)
    assert by_link == {LinkClass.SELF: 22, LinkClass.NVLINK: 11, LinkClass.NODE: 0, LinkClass.NETWORK: 44}
    assert ledger.bytes_by_link(topology, leg="combine")[LinkClass.NETWORK] == 4
    assert (ledger.leaving_bytes(), ledger.leaving_bytes("dispatch")) == (55, 50)


def test_links_of_several_groups_add_up():
    topology = Topology.regular(4, ranks_per_node=2)
    with record_traffic() as ledger:
        for leg, members in (("dispatch_rail", (0, 2)), ("dispatch_node", (2, 3)), ("dispatch_node", (2, 3))):
            note_traffic(TrafficEntry(leg=leg, rank=0, members=members, sent_bytes=(1, 10)))
    by_link = ledger.bytes_by_link(topology)
    assert by_link == {LinkClass.SELF: 3, LinkClass.NVLINK: 20, LinkClass.NODE: 0, LinkClass.NETWORK: 10}


def test_collectives_waits_and_buffers_are_counted_while_a_ledger_is_open():
    note_host_sync()
    note_buffer(100)
    with record_traffic() as ledger:
        note_host_sync()
        note_host_sync((ledger,))  # in backward: the ledger of the forward pass is still open here, and counts once
        for held_bytes in (3, 7, 5):
            note_buffer(held_bytes)
        kept = open_ledgers()
        Context().run(note_host_sync, kept)
        Context().run(note_buffer, 9, kept)
        note_traffic(TrafficEntry(leg="dispatch", rank=0, members=(0, 1), sent_bytes=(1, 2), collectives=2))
        note_traffic(entry("combine"))
    note_host_sync(kept)
    note_buffer(100, kept)
    assert (ledger.host_syncs, ledger.peak_buffer_bytes) == (3, 9)
    assert [ledger.collectives(leg) for leg in (None, "dispatch", "combine", "metadata")] == [3, 2, 1, 0]


def entry(leg="dispatch"):
    return TrafficEntry(leg=leg, rank=0, members=(0, 1), sent_bytes=(1, 2))


def test_ledgers_nest_and_close():
    note_traffic(entry())  # nobody listens
    with record_traffic() as outer:
        note_traffic(entry())
        with record_traffic() as inner:
            note_traffic(entry("combine"))
        note_traffic(entry("metadata"))
    note_traffic(entry())
    assert [e.leg for e in outer.entries] == ["dispatch", "combine", "metadata"]
    assert [e.leg for e in inner.entries] == ["combine"]
    with pytest.raises(FrozenInstanceError):
        inner.entries[0].rank = 1


def test_backward_in_another_thread_reaches_the_ledgers_of_its_forward_while_they_are_open():
    """On CUDA backward runs in threads of autograd, to which the ledgers of the caller are invisible."""

    def on_rank(rank, groups):
        def forward():
            dispatcher, x_TD, ids_TK = build(AllToAllConfig(), groups, 2), torch.ones(1, 1, requires_grad=True), [[0]]
            probs_TK = torch.ones(1, 1)
            plan = dispatcher.plan(Routing(ids_TK=torch.tensor(ids_TK), probs_TK=probs_TK, num_experts=2))
            return combine(dispatcher, plan, dispatch(dispatcher, plan, x_TD, probs_TK).rows_RD).sum()

        elsewhere = Context()
        with record_traffic() as ledger:
            elsewhere.run(forward().backward)
            late = forward()
        elsewhere.run(late.backward)
        late = forward()
        with record_traffic() as backward_alone:
            late.backward()
        return [e.leg for e in ledger.entries], [e.leg for e in backward_alone.entries]

    legs = ["metadata", "dispatch", "combine"]
    backward = ["combine_backward", "dispatch_backward"]
    assert run_threads(2, on_rank) == [([*legs, *backward, *legs], backward)] * 2


def test_a_forward_that_autograd_repeats_in_another_thread_is_noted():
    """On CUDA recompute runs there as well: the plan, which is that of the first forward, knows who listened then."""

    def on_rank(rank, groups):
        dispatcher, x_TD, probs_TK = build(AllToAllConfig(), groups, 2), torch.ones(1, 1), torch.ones(1, 1)
        routing = Routing(ids_TK=torch.tensor([[0]]), probs_TK=probs_TK, num_experts=2)

        def again():
            leaf_TD = x_TD.clone().requires_grad_()
            combine(dispatcher, plan, dispatch(dispatcher, plan, leaf_TD, probs_TK).rows_RD).sum().backward()

        with record_traffic() as ledger:
            plan = dispatcher.plan(routing)
            Context().run(again)
        Context().run(again)
        return [e.leg for e in ledger.entries]

    legs = ["metadata", "dispatch", "combine", "combine_backward", "dispatch_backward"]
    assert run_threads(2, on_rank) == [legs] * 2
