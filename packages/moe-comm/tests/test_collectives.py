"""How often each dispatcher communicates and reads on the host, forward and backward, on every rank alike."""

from dataclasses import replace

import pytest
import torch

from moe_comm import (
    EXACT,
    AllGatherConfig,
    AllToAllConfig,
    HybridConfig,
    LocalConfig,
    Sizing,
    build_dispatcher,
    combine,
    dispatch,
    record_traffic,
)
from moe_comm.local import LocalDispatcher
from moe_comm.testing.harness import split_groups
from moe_comm.testing.host_reads import count_host_reads
from moe_kernels import Routing
from moe_parallel import AxisGroups
from moe_parallel.testing import count_collectives, run_threads

# Config, ranks, etp and nodes; then lanes times hops.
LAYOUTS = {
    "alltoall": (AllToAllConfig(), 3, 1, 1, 1),
    "alltoall etp": (AllToAllConfig(), 4, 2, 1, 2),
    "alltoall etp alone": (AllToAllConfig(), 2, 2, 1, 1),
    "per expert": (AllToAllConfig(row="per_expert"), 2, 1, 1, 1),
    "allgather": (AllGatherConfig(), 3, 1, 1, 1),
    "hybrid": (HybridConfig(), 4, 1, 2, 2),
    "hybrid, one rank per node": (HybridConfig(), 2, 1, 2, 1),
    "hybrid lanes": (HybridConfig(lanes=3), 4, 1, 2, 6),
    "hybrid etp": (HybridConfig(), 8, 2, 2, 3),
    "hybrid rail allgather": (HybridConfig(rail="allgather"), 4, 1, 2, 2),
}


def routing(rank, num_experts, is_empty=False):
    """Ranks have different numbers of tokens, the first none."""
    generator = torch.Generator().manual_seed(rank)
    ids_TK = torch.randint(-1, num_experts, (2 * rank, 3), generator=generator)
    probs_TK = torch.rand(2 * rank, 3, requires_grad=True)
    return Routing(ids_TK=ids_TK.fill_(-1) if is_empty else ids_TK, probs_TK=probs_TK, num_experts=num_experts)


def layer(dispatcher, given, sizing):
    """Collectives and host reads of plan, dispatch, combine and backward."""
    counted = []

    def count(step):
        with count_collectives() as issued, count_host_reads() as reads:
            result = step()
        counted.append((len(issued), reads))
        return result

    plan = count(lambda: dispatcher.plan(given, sizing))
    x_TD = torch.randn(len(given.ids_TK), 5, requires_grad=True)
    sent = count(lambda: dispatch(dispatcher, plan, x_TD, given.probs_TK))
    y_TD = count(lambda: combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None]))
    count(y_TD.sum().backward)
    return counted


@pytest.mark.parametrize("is_empty", [False, True], ids=["some", "nothing"])
@pytest.mark.parametrize(("config", "world", "etp", "nodes", "hops"), LAYOUTS.values(), ids=LAYOUTS)
def test_an_exact_layer(config, world, etp, nodes, hops, is_empty):
    """One all-gather for the plan; for each hop two collectives there, one back, and the same again in backward.

    The host reads once, in the plan: what it looks at later is that copy.
    """

    def on_rank(rank, groups):
        inner = split_groups(rank, groups, etp, nodes)
        dispatcher = build_dispatcher(config, inner, 2 * world // etp)
        with record_traffic() as ledger:
            counted = layer(dispatcher, routing(rank, 2 * world // etp, is_empty), EXACT)
        reads = [reads for _, reads in counted]
        assert reads[0][0] == "cpu"
        assert reads[0].count("cpu") == 1
        assert reads[1:] == [[], [], []]
        assert ledger.host_syncs == 1
        assert ledger.collectives() == sum(issued for issued, _ in counted)
        return [issued for issued, _ in counted]

    assert run_threads(world, on_rank) == [[1, 2 * hops, hops, 3 * hops]] * world


@pytest.mark.parametrize(("config", "world", "etp", "nodes", "hops"), LAYOUTS.values(), ids=LAYOUTS)
def test_r082_a_static_layer(config, world, etp, nodes, hops):
    """As in exact mode; the host reads the first time, to compare sizes, and never after it. Row 36."""

    def on_rank(rank, groups):
        inner = split_groups(rank, groups, etp, nodes)
        dispatcher = build_dispatcher(config, inner, 2 * world // etp)
        sizing = Sizing(capacity_rows=9, overflow="drop", most_tokens=2 * world)
        given = routing(rank, 2 * world // etp)
        first = layer(dispatcher, given, sizing)
        with record_traffic() as ledger:
            second = layer(dispatcher, replace(given, probs_TK=given.probs_TK.detach().requires_grad_()), sizing)
        assert ledger.host_syncs == 0
        assert [reads for _, reads in second] == [[], [], [], []]
        # All sizes come to the host at once; what is read of them there waits for no device.
        assert [reads.count("cpu") for _, reads in first] == [1, 0, 0, 0]
        assert [reads for _, reads in first[1:]] == [[], [], []]
        return [issued for issued, _ in first], [issued for issued, _ in second]

    expected = [1, 2 * hops, hops, 3 * hops]
    assert run_threads(world, on_rank) == [(expected, expected)] * world


@pytest.mark.parametrize(
    "config", [LocalConfig(), AllToAllConfig(), AllGatherConfig(), HybridConfig()], ids=lambda config: config.kind
)
def test_one_rank_does_not_communicate(config):
    dispatcher = build_dispatcher(config, AxisGroups(), 4)
    assert [issued for issued, _ in layer(dispatcher, routing(3, 4), EXACT)] == [0, 0, 0, 0]
    assert [issued for issued, _ in layer(dispatcher, routing(3, 4), Sizing(capacity_rows=9))] == [0, 0, 0, 0]


def test_the_local_dispatcher_reads_once():
    with record_traffic() as ledger:
        counted = layer(LocalDispatcher(4), routing(3, 4), EXACT)
    assert [reads for _, reads in counted] == [["tolist"], [], [], []]
    assert ledger.host_syncs == 1


def test_reads_are_counted():
    """The counter itself: by thread, nested, and methods are what they were afterwards."""
    before = torch.Tensor.item
    x = torch.tensor([2.0, 3.0])
    with count_host_reads() as outer:
        bool(x[0] > 1)
        with count_host_reads() as inner:
            x.tolist(), x[0].item(), float(x[1]), torch.nonzero(x)
        int(x[0])
        x + 1
    assert inner == ["tolist", "item", "__float__", "nonzero"]
    assert outer == ["__bool__", "__int__"]
    assert torch.Tensor.item is before
    x.tolist()
    assert len(outer) == 2
