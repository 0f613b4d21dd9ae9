"""State sharded over runs of replicas, with a copy in every run (HSDP), for both engines."""

from math import gcd

import pytest
import torch

from moe_memory import (
    Fsdp,
    MemoryConfig,
    MoeMemoryError,
    OptimConfig,
    Zero1,
    activation_policy,
    build_engine,
    run_unit,
)
from moe_memory.config import ReshardConfig
from moe_memory.data_parallel.replicas import replicas_of
from moe_memory.testing import RanksConformance
from moe_memory.testing.reference import CONFIG, KEEP_INTERNAL
from moe_memory.testing.session import Session
from moe_parallel import AxisGroups, ParallelLayout, ParameterKind, gather_json, run_distributed
from moe_parallel.testing import count_collectives

pytestmark = pytest.mark.dist
LAYOUTS = ((ParallelLayout(world=4), 2), (ParallelLayout(world=8, tp=2, cp=2, ep=2), 4))
SMALL = ((ParallelLayout(world=4), 4),)


def run_of(groups, size):
    """The kit has layouts with fewer replicas, too."""
    return gcd(size, groups.size("cp", "dp"))


class TestZero1InRuns(RanksConformance):
    layouts = LAYOUTS
    small = SMALL

    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Zero1(
            config,
            groups,
            compute_dtype=compute_dtype,
            keep_internal=keep_internal,
            bucket_bytes=500,
            shard_replicas=run_of(groups, 2),
        )


class TestZero1WithWholeStateOnEveryRank(TestZero1InRuns):
    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Zero1(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal, shard_replicas=1)


class TestFsdpInRuns(RanksConformance):
    layouts = LAYOUTS
    small = SMALL

    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Fsdp(
            config,
            groups,
            compute_dtype=compute_dtype,
            keep_internal=keep_internal,
            shard_replicas=run_of(groups, 2),
            reshard=ReshardConfig(dense="backward", expert="step"),
            prefetch_units=1,
        )

    build_other = TestZero1InRuns.build


def test_runs_are_neighbours_and_experts_have_the_common_divisor():
    def work(groups):
        found = replicas_of(groups, 4)
        gather_json("connected")  # who leaves before closes connections that others are still making
        return {
            kind.value: (
                1 if replicas.shard is None else replicas.shard.size(),
                1 if replicas.copy is None else replicas.copy.size(),
                replicas.is_first_copy,
            )
            for kind, replicas in found.items()
        }

    results = run_distributed(ParallelLayout(world=8, ep=4), work)
    assert [result["dense"] for result in results] == [(4, 2, True)] * 4 + [(4, 2, False)] * 4
    assert {result["expert"] for result in results} == {(2, 1, True)}


def test_a_run_that_does_not_divide_is_refused():
    with pytest.raises(MoeMemoryError, match=r"memory.shard_replicas = 3 does not divide the 1 replicas"):
        replicas_of(AxisGroups(), 3)


def test_gradients_are_scattered_in_a_run_and_summed_over_the_runs():
    def work(groups):
        memory = MemoryConfig(shard_replicas=2)
        engine = build_engine(memory, CONFIG, groups, compute_dtype=torch.float64, keep_internal=KEEP_INTERNAL, seed=3)
        session = Session(engine, groups, torch.float64, seed=1)
        session.train([0])
        with count_collectives() as names:
            session.train([1])
        owned = sum(part.tensor.numel() for part in engine.state_tensors() if part.owned)
        held = sum(part.tensor.numel() for part in engine.state_tensors())
        return names, len(engine._buckets), held, owned

    results = run_distributed(ParallelLayout(world=4), work)
    for names, buckets, _, _ in results:
        assert len(names) == 3 * buckets
        assert sum("allreduce" in name or "all_reduce" in name for name in names) == buckets
    whole = sum(owned for *_, owned in results)
    assert sum(held for _, _, held, _ in results) == 2 * whole


@pytest.mark.parametrize(
    ("reshard", "gathers"), [("forward", 2 * 2), ("backward", 2), ("step", 1)], ids=["forward", "backward", "step"]
)
@pytest.mark.parametrize("kind", ["dense", "expert"])
def test_units_are_gathered_as_often_as_the_policy_says(reshard, gathers, kind):
    """In a step of two microbatches, besides the one gathering for good of what lies outside lists."""

    def work(groups):
        engine = Fsdp(
            CONFIG,
            groups,
            compute_dtype=torch.float64,
            keep_internal=KEEP_INTERNAL,
            reshard=ReshardConfig(**{kind: reshard}),
        )
        session = Session(engine, groups, torch.float64, seed=1)
        counts = []
        for _ in range(3):
            with count_collectives() as names:
                for microbatch in range(2):
                    session.accumulate([torch.arange(9)], last=microbatch == 1)
                engine.step(0.1, 1.0)
            counts.append(sum("gather" in name for name in names))
        units = [store for store in engine._stores if hasattr(store, "plan")]
        inside = {
            kind.value: sum(unit.plan.kind is kind and not unit.plan.stays for unit in units) for kind in ParameterKind
        }
        once = sum(unit.plan.stays for unit in units) + sum(not hasattr(store, "plan") for store in engine._stores)
        return counts, inside, once

    other = "expert" if kind == "dense" else "dense"
    for counts, inside, once in run_distributed(ParallelLayout(world=2), work):
        assert inside == {"dense": 2, "expert": 2}
        assert counts == [once + inside[kind] * gathers + inside[other] * 4] * 3


def test_build_engine_passes_what_the_configuration_says():
    memory = MemoryConfig(data_parallel="fsdp", prefetch_units=2, bucket_mib=0.5, reshard=ReshardConfig(dense="step"))
    engine = build_engine(memory, OptimConfig(), AxisGroups(), compute_dtype=torch.float32)
    assert (engine._prefetch_units, engine._bucket_bytes, engine._reshard.dense) == (2, 2**19, "step")


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_units_are_gathered_ahead_in_a_forward_and_not_when_it_is_repeated(ahead):
    def work(groups):
        engine = Fsdp(CONFIG, groups, compute_dtype=torch.float64, keep_internal=KEEP_INTERNAL, prefetch_units=ahead)
        session = Session(engine, groups, torch.float64, seed=1)
        policy = activation_policy("full")

        def run(layer, *inputs):
            return run_unit(policy, "layer", lambda _, *inputs: layer(*inputs), *inputs)

        at_layer = []
        session.model.layers[0].register_forward_pre_hook(lambda module, arguments: at_layer.append(gathers(names)))
        with count_collectives() as names:
            loss = session.model(torch.arange(9), run=run)
            in_forward = gathers(names)
            loss.backward()
        session.report(last=True)
        engine.finish()
        units = sum(hasattr(store, "plan") for store in engine._stores)
        return at_layer[0], in_forward, gathers(names), units

    for at_layer, in_forward, whole, units in run_distributed(ParallelLayout(world=2), work):
        assert at_layer == 2 + ahead  # the embedding, the layer, and what comes after it
        assert in_forward == units
        assert whole == units + 4  # both layers and their experts once more


def gathers(names):
    return sum("gather" in name for name in names)
