"""`Zero1` over forked ranks, against the kit."""

import numpy as np
import pytest
import torch
from torch import nn

from moe_memory import Zero1
from moe_memory.testing import RanksConformance
from moe_memory.testing.reference import CONFIG, KEEP_INTERNAL, step_tokens
from moe_memory.testing.session import Session
from moe_parallel import AxisGroups, ParallelLayout, run_distributed, shard_specs
from moe_parallel.testing import count_collectives

pytestmark = pytest.mark.dist


class TestZero1OverRanks(RanksConformance):
    def build(self, config, groups, *, compute_dtype, keep_internal):
        # Buckets of one or a few parameters, so that several are under way at once.
        return Zero1(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal, bucket_bytes=500)


def test_a_reduction_starts_with_the_last_gradient_of_its_bucket_and_weights_return_late():
    """Two collectives a bucket: one is issued while layers are still to be reported, one by the update."""

    def work(groups):
        engine = Zero1(CONFIG, groups, compute_dtype=torch.float64, keep_internal=KEEP_INTERNAL, bucket_bytes=500)
        session = Session(engine, groups, torch.float64, seed=1)
        session.train([0])
        session.model(step_tokens(1, 1)[0]).backward()
        issued = []
        alone = "layers.1.experts.w1_EDF"  # the only parameter of its bucket
        for names in ([alone], [name for name in session.names if name != alone]):
            with count_collectives() as found:
                engine.grads_ready(names, last=True)
            issued.append(len(found))
        with count_collectives() as found:
            engine.finish()
        assert not found
        before = session.model.head.weight_FD.detach().clone()
        with count_collectives() as found:
            engine.step(0.02, 1.0)
        assert len(found) == len(engine._buckets)
        stale = torch.equal(session.model.head.weight_FD, before)
        with count_collectives() as found:
            session.model(step_tokens(2, 1)[0])
            engine.synchronize()
        assert not found
        assert not torch.equal(session.model.head.weight_FD, before)
        return issued, len(engine._buckets), stale

    for issued, buckets, stale in run_distributed(ParallelLayout(world=2), work):
        assert issued == [1, buckets - 1]
        assert stale


def test_a_large_parameter_is_reduced_and_gathered_in_place():
    """Cut into equal slices it needs no copies, and nobody must see half of it."""

    def work(groups):
        torch.manual_seed(1)
        model = nn.Linear(32, 8, dtype=torch.float64)
        engine = Zero1(CONFIG, groups, compute_dtype=torch.float64, bucket_bytes=1024)
        specs = shard_specs(model, [], groups)
        model = engine.wrap(model, specs)
        generator = torch.Generator().manual_seed(2)
        for _ in range(3):
            x = torch.randn(6, 32, generator=generator, dtype=torch.float64)
            model(x[groups.rank("dp") :: groups.size("dp")]).square().sum().backward()
            engine.grads_ready(list(specs), last=True)
            engine.finish()
            engine.step(0.02, 0.5)
        engine.synchronize()
        return model.weight.detach().numpy().copy(), [bucket._layout.same for bucket in engine._buckets]

    weight, _ = work(AxisGroups())
    for found, same in run_distributed(ParallelLayout(world=2), work):
        assert same == [True, False]
        np.testing.assert_allclose(found, weight, rtol=0, atol=1e-12 * abs(weight).max())


def test_parameters_that_behave_alike_share_buckets_in_the_order_of_the_model():
    def work(groups):
        engine = Zero1(CONFIG, groups, compute_dtype=torch.bfloat16, keep_internal=KEEP_INTERNAL, bucket_bytes=1000)
        session = Session(engine, groups, torch.bfloat16, seed=1)
        return [
            (bucket.key.kind.value, bucket.key.rule.weight_decay > 0, bucket.names) for bucket in engine._buckets
        ], session.names

    buckets, names = run_distributed(ParallelLayout(world=2), work)[0]
    assert sorted(name for *_, members in buckets for name in members) == sorted(names)
    firsts = [names.index(members[0]) for *_, members in buckets]
    assert firsts == sorted(firsts)
    # w1_EDF has 4 * 5 * 7 float32 gradients, 560 bytes: alone.
    assert ("expert", True, ("layers.0.experts.w1_EDF",)) in buckets
    decayed = (
        "embedding.weight_VD",
        "head.weight_FD",
        "head.empty",
        "columns.up_DF",
        "columns.out_VD",
        "gate.weight_VD",
    )
    assert ("dense", True, decayed) in buckets


def test_a_shared_parameter_is_waited_for_by_every_module_that_has_it():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(x).square().sum()

    def work(groups):
        torch.manual_seed(1)
        model = Twins().double()
        specs = shard_specs(model, [], groups)
        engine = Zero1(CONFIG, groups, compute_dtype=torch.float64)
        model = engine.wrap(model, specs)
        losses = []
        for _ in range(3):
            loss = model(torch.ones(1, 4, dtype=torch.float64))
            loss.backward()
            engine.grads_ready(list(specs), last=True)
            engine.finish()
            engine.step(0.02, 1.0)
            losses.append(loss.item())
        return losses

    one, two = work(AxisGroups()), run_distributed(ParallelLayout(world=2), work)
    # Adam's first steps do not depend on the size of the gradient, which two ranks double.
    assert two[0] == two[1]
    assert two[0] == pytest.approx(one, rel=1e-4)
    assert one[2] < one[1] < one[0]
