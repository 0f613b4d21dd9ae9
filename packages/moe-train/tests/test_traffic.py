"""The metrics `comm/...` of a step against the counts of what its routers chose, exactly; and the machines of a run."""

import socket
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from moe_comm.counts import leg_bytes, metadata_bytes, rows_by_leg
from moe_comm.traffic import BACKWARD_OF
from moe_parallel import Place, Topology, run_distributed
from moe_train import assemble as assembling
from moe_train.assemble import assemble
from moe_train.config.checks import layout_of, mesh_of, topology_of
from moe_train.config.error import ConfigError
from moe_train.config.load import load_config
from moe_train.data.microbatches import next_step
from moe_train.launch import worker
from moe_train.observe.record import StepTraffic
from moe_train.step import run_step
from moe_train.testing import SMALL, short_corpus
from moe_train.traffic import traffic_of_all

EXPERTS, TOP_K, HIDDEN = 8, 2, 24


def configured(world, per_node, *comm):
    overrides = (
        *SMALL,
        f"model.num_experts={EXPERTS}",
        "train.microbatch_sequences=2",  # two microbatches on each of two ranks, one on each of four
        f"parallel.ep={world}",
        f"parallel.ranks_per_node={per_node}",
        *comm,
    )
    return load_config("tiny_moe", [], list(overrides), world=world).config


def traffic_and_choices(config, world):
    """By rank: the metrics of one step, and the ids of every plan in order."""
    build = assembling.build_dispatcher

    def on_rank(mesh):
        plans = []

        def recording(*arguments):
            dispatcher = build(*arguments)
            plan = dispatcher.plan

            def recorded(routing, *sizing):
                plans.append(routing.ids_TK.tolist())
                return plan(routing, *sizing)

            dispatcher.plan = recorded
            return dispatcher

        with patch.object(assembling, "build_dispatcher", recording):
            training = assemble(config, mesh)
        step = run_step(training, next_step(training.data.train, training.cut).microbatches, updates=0, window=None)
        return step.traffic, plans

    layout = layout_of(config, world)
    with short_corpus():
        return run_distributed(layout, on_rank, timeout_s=20, **mesh_of(config, layout))


HOME = {"dispatch": "combine", "dispatch_rail": "combine_rail", "dispatch_node": "combine_node"}
CASES = [
    ("alltoall_per_rank", 2, 1, 0, ("comm.kind=alltoall",)),
    ("alltoall_per_rank", 2, 2, 0, ("comm.kind=alltoall",)),
    ("alltoall_per_expert", 2, 1, 0, ("comm.kind=alltoall", "comm.row=per_expert")),
    ("allgather", 2, 1, 0, ("comm.kind=allgather",)),
    ("hybrid", 4, 2, 2, ("comm.kind=hybrid",)),
    ("hybrid_rail_allgather", 4, 2, 0, ("comm.kind=hybrid", "comm.rail=allgather")),
]


@pytest.mark.dist
@pytest.mark.parametrize(("algorithm", "world", "per_node", "node_words", "comm"), CASES)
def test_traffic_of_a_step_is_what_its_choices_say(algorithm, world, per_node, node_words, comm):
    results = traffic_and_choices(configured(world, per_node, *comm), world)
    traffic = results[0][0]
    assert all(other == traffic for other, _ in results)
    plans = [[torch.tensor(ids).view(-1, TOP_K) for ids in of_rank] for _, of_rank in results]
    assert len({len(of_rank) for of_rank in plans}) == 1
    assert len(plans[0]) == 2 * 4 // world  # layers, and microbatches of each rank

    node = torch.arange(world) // per_node
    crosses, stays = node[:, None] != node, torch.eye(world, dtype=torch.bool)
    there_bytes = torch.zeros(world, world, dtype=torch.int64)
    choices = 1 if algorithm == "alltoall_per_expert" else TOP_K
    hops = 0
    for ids in zip(*plans, strict=True):
        rows = rows_by_leg(algorithm, ids, num_experts=EXPERTS, ranks_per_node=per_node)
        hops = len(rows)
        for leg, rows_WW in rows.items():
            for name in (leg, HOME[leg], BACKWARD_OF[HOME[leg]], BACKWARD_OF[leg]):
                for rank in range(world):
                    sent = leg_bytes(
                        name, rank, rows_WW, hidden=HIDDEN, dtype=torch.float32, choices=choices, with_ids=True
                    )
                    there_bytes[rank] += torch.tensor(sent)
    words = 6 + EXPERTS + world + node_words
    plan_bytes = metadata_bytes(words) * len(plans[0])
    there_bytes += plan_bytes
    assert traffic.network_bytes == there_bytes[crosses].sum()
    assert traffic.self_bytes == there_bytes[stays].sum()
    assert traffic.node_bytes == there_bytes[~crosses & ~stays].sum()
    assert traffic.metadata_bytes == plan_bytes * world * (world - 1)
    assert traffic.network_bytes > 0 or per_node == world
    # The sizes once; for every hop, rows and probabilities there, rows back, and their gradients.
    assert traffic.collectives == len(plans[0]) * (1 + 6 * hops)
    assert traffic.host_syncs == len(plans[0])
    assert traffic.peak_buffer_bytes > 0


def test_one_rank_sends_nothing():
    config = load_config("tiny_moe", [], list(SMALL)).config
    with short_corpus():
        training = assemble(config)
    step = run_step(training, next_step(training.data.train, training.cut).microbatches, updates=0, window=None)
    assert step.traffic == replace(StepTraffic.from_numbers([0] * 7), host_syncs=2)  # one for each layer


@pytest.mark.dist
def test_over_ranks_bytes_add_up_and_of_the_rest_the_most_counts():
    def on_rank(mesh):
        rank = mesh.rank("world")
        return traffic_of_all(StepTraffic.from_numbers([10**12 + rank, 2, 3 * rank, 4, 5 + rank, 6 - rank, 7]), mesh)

    config = configured(2, 1)
    for found in run_distributed(layout_of(config, 2), on_rank, timeout_s=20):
        assert found == StepTraffic.from_numbers([2 * 10**12 + 1, 4, 3, 8, 6, 6, 7])


# Machines


def test_machines_are_as_configured_or_one():
    config = configured(4, 2)
    assert topology_of(config, 4) == Topology.regular(4, ranks_per_node=2)
    silent = replace(config, parallel=replace(config.parallel, ranks_per_node=None))
    assert topology_of(silent, 4).num_nodes == 1
    assert [mesh_of(each, layout_of(each, 4))["ep_inner"] for each in (config, silent)] == [2, 4]


def test_ranks_of_ep_on_a_machine_are_the_same_number_everywhere():
    config = configured(4, 2)
    layout = layout_of(config, 4)
    assert mesh_of(config, layout, Topology.from_hosts("aabb"))["ep_inner"] == 2
    assert mesh_of(config, layout, Topology.from_hosts("aaab"))["ep_inner"] == 1
    half = replace(config, parallel=replace(config.parallel, ep=2))
    assert mesh_of(half, layout_of(half, 4), Topology.from_hosts("aaab"))["ep_inner"] == 1  # the last two differ


def test_machines_of_unequal_size_are_refused():
    with pytest.raises(
        ConfigError, match=r"(?s)ranks_per_node = 3.*does not divide the world of 4.*legal here: 1, 2, 4"
    ):
        configured(4, 3)


@pytest.mark.parametrize(("per_node", "node_of"), [("none", (0, 1)), ("2", (0, 0))])
def test_a_launched_rank_asks_the_machines_unless_told(per_node, node_of):
    config = configured(2, per_node)
    names = iter(("red", "blue"))

    def on_rank(mesh):
        for _ in range(1 + mesh.rank("world")):
            name = next(names)
        with (
            patch.object(socket, "gethostname", lambda: name),
            patch.object(worker, "joined", lambda *_, **__: patch.dict("os.environ")),
            patch.object(Place, "from_environment", lambda: Place(rank=mesh.rank("world"), world=2)),
            worker.rank_groups(config) as (groups, topology),
        ):
            assert groups.size("ep_inner") == (2 if node_of == (0, 0) else 1)
            return topology.node_of

    assert run_distributed(layout_of(config, 2), on_rank, timeout_s=20) == [node_of] * 2
