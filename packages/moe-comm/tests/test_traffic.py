"""The ledger against the formulas, and both against the bytes that are handed to torch.distributed."""

from contextvars import Context
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.distributed as dist

from moe_comm import MoeCommError, TrafficEntry, combine, dispatch, note_traffic, record_traffic
from moe_comm.alltoall import AllToAllDispatcher
from moe_comm.testing.harness import split_groups
from moe_comm.traffic import (
    alltoall_bytes,
    bytes_per_row,
    expected_rows,
    metadata_bytes,
    rows_by_rank,
    shared_rows,
)
from moe_kernels import Routing, internal_dtype
from moe_parallel import AxisGroups, LinkClass, Topology
from moe_parallel.testing import run_threads

LEGS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def step(dispatcher, ids_TK, num_experts, hidden, dtype):
    """Dispatch and combine, forward and backward."""
    x_TD = torch.randn(len(ids_TK), hidden, dtype=dtype, requires_grad=True)
    probs_TK = torch.rand(ids_TK.shape, dtype=internal_dtype(dtype), requires_grad=True)
    plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts))
    sent = dispatch(dispatcher, plan, x_TD, probs_TK)
    combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None].to(dtype)).sum().backward()


def uneven_ids(rank, world, num_experts, top_k):
    """Another number of tokens on every rank, none on the first, and low expert ids more often than high ones."""
    generator = torch.Generator().manual_seed(17 * world + rank)
    drawn_TK = torch.rand(7 * rank, top_k, generator=generator).square()
    return (drawn_TK * (num_experts + 1)).long() - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_ledger_holds_what_the_routing_says(world, dtype):
    num_experts, hidden = 3 * world, 5

    def on_rank(rank, groups):
        with record_traffic() as ledger:
            step(AllToAllDispatcher(groups, num_experts), ids[rank], num_experts, hidden, dtype)
        return ledger.entries

    ids = [uneven_ids(rank, world, num_experts, 2) for rank in range(world)]
    rows = [rows_by_rank(ids_TK, num_experts, world) for ids_TK in ids]
    assert len(set(map(sum, rows))) == world, "a routing that is uneven"
    for rank, entries in enumerate(run_threads(world, on_rank)):
        assert [entry.leg for entry in entries] == ["metadata", *LEGS]
        assert all(entry.rank == rank for entry in entries)
        assert entries[0].sent_bytes == (metadata_bytes(num_experts, world),) * world
        for entry in entries[1:]:
            assert entry.sent_bytes == alltoall_bytes(entry.leg, rank, rows, hidden=hidden, dtype=dtype)


SPLIT_LEGS = (
    "dispatch",
    "gather",
    "scatter",
    "combine",
    "combine_backward",
    "scatter_backward",
    "gather_backward",
    "dispatch_backward",
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("etp", "ep"), [(2, 1), (2, 2), (2, 3), (3, 1)])
def test_the_ledger_holds_what_the_routing_says_where_experts_are_split(etp, ep, dtype):
    num_experts, hidden, block = 3 * ep, 5, etp * ep

    def on_rank(rank, groups):
        dispatcher = AllToAllDispatcher(split_groups(rank, groups, etp), num_experts)
        with record_traffic() as ledger:
            step(dispatcher, ids[rank], num_experts, hidden, dtype)
        return ledger.entries

    ids = [uneven_ids(rank, block, num_experts, 2) for rank in range(block)]
    rows = [rows_by_rank(ids_TK, num_experts, ep) for ids_TK in ids]
    for rank, entries in enumerate(run_threads(block, on_rank)):
        place, shard = divmod(rank, etp)
        wanted = [("metadata", rank, tuple(range(block)), (metadata_bytes(num_experts, ep),) * block)]
        for leg in SPLIT_LEGS:
            if "gather" in leg or "scatter" in leg:
                sent = alltoall_bytes(leg, shard, shared_rows(rows, place, etp), hidden=hidden, dtype=dtype)
                wanted.append((leg, shard, tuple(range(place * etp, place * etp + etp)), sent))
            elif ep > 1:
                sent = alltoall_bytes(leg, place, rows[shard::etp], hidden=hidden, dtype=dtype)
                wanted.append((leg, place, tuple(range(shard, block, etp)), sent))
        assert [(entry.leg, entry.rank, entry.members, entry.sent_bytes) for entry in entries] == wanted


@pytest.mark.parametrize(("etp", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (1, torch.bfloat16)])
def test_rows_cross_machines_once_however_many_ranks_share_an_expert(etp, dtype):
    """Two places on a machine each; the bytes between machines are those of the rows, the copies stay inside."""
    topology = Topology.regular(2 * etp, ranks_per_node=etp)

    def on_rank(rank, groups):
        dispatcher = AllToAllDispatcher(split_groups(rank, groups, etp), 4)
        with record_traffic() as ledger:
            step(dispatcher, torch.tensor([[0, 3], [2, 3], [1, -1]]), 4, 8, dtype)
        return ledger.bytes_by_link(topology, "dispatch"), ledger.bytes_by_link(topology, "gather")

    row_bytes = bytes_per_row("dispatch", 8, dtype)
    for rank, (dispatched, gathered) in enumerate(run_threads(2 * etp, on_rank)):
        place = rank // etp
        assert dispatched[LinkClass.NETWORK] == (3, 2)[place] * row_bytes
        assert dispatched[LinkClass.NVLINK] == gathered[LinkClass.NETWORK] == 0
        assert gathered[LinkClass.NVLINK] == (etp - 1) * 2 * (2, 3)[place] * row_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_ledger_counts_what_torch_distributed_is_given(world, dtype, monkeypatch):
    """Without looking at the ledger: bytes of the tensors that leave, less the part that stays."""
    leaving, num_experts = [0] * world, 2 * world
    original = dist.all_to_all_single

    def counted(output, x, output_split_sizes=None, input_split_sizes=None, group=None, **options):
        rank = dist.get_rank(group)
        rows = x.shape[0] - input_split_sizes[rank]
        leaving[rank] += rows * x[0:1].numel() * x.itemsize if len(x) else 0
        return original(output, x, output_split_sizes, input_split_sizes, group=group, **options)

    monkeypatch.setattr(dist, "all_to_all_single", counted)

    def on_rank(rank, groups):
        with record_traffic() as ledger:
            step(
                AllToAllDispatcher(groups, num_experts), uneven_ids(rank, world, num_experts, 3), num_experts, 4, dtype
            )
        return ledger.leaving_bytes()

    assert run_threads(world, on_rank) == leaving
    assert min(leaving) > 0


def test_one_rank_sends_nothing():
    with record_traffic() as ledger:
        step(AllToAllDispatcher(AxisGroups(), 4), torch.tensor([[0, 3], [1, 2]]), 4, 8, torch.float32)
    assert ledger.entries == []
    assert ledger.leaving_bytes() == 0


@pytest.mark.parametrize(("world", "ranks_per_node", "top_k"), [(4, 2, 2), (8, 4, 4), (16, 8, 8)])
def test_uniform_routing_costs_what_is_expected(world, ranks_per_node, top_k):
    num_experts, tokens = 4 * world, 4096
    topology = Topology.regular(world, ranks_per_node=ranks_per_node)
    expected = expected_rows(top_k, world=world, ranks_per_node=ranks_per_node)
    rank = world // 2
    generator = torch.Generator().manual_seed(world)
    ids_TK = torch.rand(tokens, num_experts, generator=generator).topk(top_k).indices
    with record_traffic() as ledger:
        rows = rows_by_rank(ids_TK, num_experts, world)
        sent_bytes = tuple(count * bytes_per_row("dispatch", 16, torch.bfloat16) for count in rows)
        note_traffic(TrafficEntry(leg="dispatch", rank=rank, members=tuple(range(world)), sent_bytes=sent_bytes))
    by_link = ledger.bytes_by_link(topology)
    per_token = {link: total / (tokens * (16 * 2 + 4)) for link, total in by_link.items()}
    assert per_token[LinkClass.NETWORK] == pytest.approx(expected.network, rel=0.03)
    assert per_token[LinkClass.NVLINK] == pytest.approx(expected.nvlink, rel=0.1)
    assert sum(per_token.values()) == pytest.approx(top_k)
    assert expected.total == pytest.approx(top_k * (1 - 1 / world))


def test_expected_rows_of_the_published_table():
    """E = 256, K = 8, 8 ranks per machine: rows per token over the network for 2 to 32 machines."""
    network = [expected_rows(8, world=8 * nodes, ranks_per_node=8).network for nodes in (2, 4, 8, 16, 32)]
    assert network == [4.0, 6.0, 7.0, 7.5, 7.75]
    with pytest.raises(MoeCommError, match="ranks_per_node = 3 does not divide the group of 8 ranks"):
        expected_rows(8, world=8, ranks_per_node=3)


def test_rows_and_bytes_by_hand():
    assert rows_by_rank(torch.tensor([[0, 1], [3, -1], [3, 3]]), 4, 2) == (2, 3)
    assert rows_by_rank(torch.empty(0, 2, dtype=torch.int64), 4, 2) == (0, 0)
    assert bytes_per_row("dispatch", 10, torch.bfloat16) == 10 * 2 + 4
    assert bytes_per_row("dispatch_backward", 10, torch.float64) == 10 * 8 + 8
    assert bytes_per_row("combine", 10, torch.bfloat16) == bytes_per_row("combine_backward", 10, torch.bfloat16) == 20
    assert metadata_bytes(8, 2) == (4 + 1) * 8
    rows = ((1, 2), (3, 4))
    assert alltoall_bytes("dispatch", 0, rows, hidden=1, dtype=torch.float32) == (8, 16)
    assert alltoall_bytes("combine", 0, rows, hidden=1, dtype=torch.float32) == (4, 12)
    assert shared_rows([(1, 2), (3, 4), (5, 6), (7, 8)], 1, 2) == [[8, 8], [12, 12]]  # of shards 0 and 1 to place 1
    assert alltoall_bytes("gather", 1, [[8, 8], [12, 12]], hidden=1, dtype=torch.float32) == (96, 96)
    assert alltoall_bytes("gather_backward", 1, [[8, 8], [12, 12]], hidden=1, dtype=torch.float32) == (64, 96)
    assert alltoall_bytes("scatter", 1, [[8, 8], [12, 12]], hidden=1, dtype=torch.float32) == (32, 48)
    assert alltoall_bytes("scatter_backward", 1, [[8, 8], [12, 12]], hidden=1, dtype=torch.float32) == (48, 48)
    with pytest.raises(MoeCommError, match="not sent in rows"):
        bytes_per_row("metadata", 8, torch.float32)


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
            dispatcher, x_TD, ids_TK = AllToAllDispatcher(groups, 2), torch.ones(1, 1, requires_grad=True), [[0]]
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
