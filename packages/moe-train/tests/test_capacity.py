"""Experts of limited capacity in a training (numerics §4)."""

from dataclasses import replace

import pytest
import torch

from moe_kernels import CapacityConfig
from moe_parallel import ParallelConfig, ParallelLayout, run_distributed
from moe_train.assemble import assemble, load_data
from moe_train.errors import MoeTrainError
from moe_train.evaluate import validation_loss
from moe_train.models.config import DecoderConfig
from moe_train.step import run_step
from moe_train.testing import ALL_LOSSES, microbatches, short_corpus, small_config
from moe_train.verify import Case, cases, verify


def first_step(*overrides):
    with short_corpus():
        run = assemble(small_config("memory.compute_dtype=float64", *ALL_LOSSES, *overrides))
    gradients = {}
    inner = run.engine.finish

    def finish():
        inner()
        gradients.update({name: parameter.grad.clone() for name, parameter in run.model.named_parameters()})

    run.engine.finish = finish
    result = run_step(run, microbatches(run, run.data.train.next_batch()), updates=0, window=None)
    return result, gradients


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_dropped_choices_are_counted_and_leave_the_load_as_it_is(policy):
    free, _ = first_step()
    tight, gradients = first_step("model.capacity.factor=0.5", f"model.capacity.policy={policy}")
    assert not free.statistics.dropped.any()
    assert (tight.statistics.dropped > 0).all()
    # The first layer sees the same tokens: its load and losses are of all choices.
    for name in ("counts", "aux", "seq", "z"):
        assert torch.equal(getattr(tight.statistics, name)[0], getattr(free.statistics, name)[0]), name
    assert tight.loss != free.loss
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_a_capacity_of_all_tokens_changes_nothing():
    free, gradients = first_step()
    wide, same = first_step("model.capacity.factor=100.0")
    assert wide.loss == free.loss
    assert not wide.statistics.dropped.any()
    for name, gradient in gradients.items():
        assert torch.equal(same[name], gradient), name


def test_r084_a_recomputed_forward_drops_the_same_choices():
    once, gradients = first_step("model.capacity.factor=0.5")
    again, same = first_step("model.capacity.factor=0.5", "memory.recompute=full")
    assert torch.equal(again.statistics.dropped, once.statistics.dropped)
    for name, gradient in gradients.items():
        assert torch.equal(same[name], gradient), name


@pytest.mark.parametrize(
    ("capacity", "key", "says"),
    [
        (CapacityConfig(factor=-1.0), "model.capacity.factor", "above 0"),
        (CapacityConfig(factor=1.0, pad=True), "model.capacity.pad", "dispatcher"),
    ],
)
def test_what_the_layer_cannot_do_is_refused(capacity, key, says):
    [problem] = DecoderConfig(capacity=capacity).problems()
    assert problem.key == key
    assert says in problem.rule


SHARED = ("model.num_experts=8", "model.expert_features=12", "model.capacity.scope=microbatch")
# Two sequences compete: four microbatches in one process.
TWO = (*SHARED, "train.microbatch_sequences=2")
SPREAD = {
    "tp2": {"tp": 2},
    "tp2 whole": {"tp": 2, "sequence_parallel": False},
    "cp2": {"cp": 2},
    "cp2 all-to-all": {"cp": 2, "cp_kind": "all_to_all"},
    "tp2 cp2": {"tp": 2, "cp": 2, "ep": 2},
    "dp2": {"ep": 2},
    "pp2": {"pp": 2},
}


@pytest.mark.dist
@pytest.mark.parametrize("policy", ["probability", "position"])
def test_r039_over_a_microbatch_what_is_dropped_does_not_depend_on_the_layout(policy):
    """Rows of 13 slots, which are padded to be split, some cut short."""
    found = small_config(*ALL_LOSSES, *TWO, "model.capacity.factor=0.7", f"model.capacity.policy={policy}")
    chosen = [
        Case(
            world=4 if name == "tp2 cp2" else 2,
            parallel=ParallelConfig(**parallel),
            engine="zero1",
            microbatch_sequences=2,
        )
        for name, parallel in SPREAD.items()
    ]
    with short_corpus():
        for deviation in verify(found, chosen, steps=2, timeout_s=20, data=load_data(found)):
            assert deviation.holds, deviation
        run = assemble(found)
        result = run_step(run, microbatches(run, run.data.train.next_batch()), updates=0, window=None)
    choices = result.statistics.counts.sum(1)
    assert (result.statistics.dropped > choices // 20).all()
    assert (result.statistics.dropped < choices // 2).all()


@pytest.mark.dist
def test_validation_drops_the_same_on_every_layout():
    found = small_config(*TWO, "model.capacity.factor=0.7", "memory.compute_dtype=float64")

    def loss(mesh):
        run = assemble(replace(found, parallel=parallel), mesh)
        return validation_loss(run, 4)

    losses = []
    with short_corpus():
        for parallel in (ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(cp=2)):
            layout = ParallelLayout(world=parallel.tp * parallel.cp, tp=parallel.tp, cp=parallel.cp, pp=1, ep=1, etp=1)
            losses += run_distributed(layout, loss, timeout_s=20)
        free = validation_loss(assemble(small_config("memory.compute_dtype=float64")), 4)
    assert losses == pytest.approx(losses[:1] * 5, rel=1e-12)
    assert abs(losses[0] - free) > 1e-6


@pytest.mark.dist
def test_verify_refuses_what_depends_on_the_layout():
    case = Case(world=2, parallel=ParallelConfig(ep=2), engine="zero1", microbatch_sequences=2)
    with pytest.raises(MoeTrainError, match=r"scope = 'rank'.*depends on the layout"):
        cases(small_config(*TWO, "model.capacity.factor=0.7", "model.capacity.scope=rank"), 2)
    for sequences, number in (("4", 2), ("2", 4)):
        found = small_config(*TWO, "model.capacity.factor=0.7", f"train.microbatch_sequences={sequences}")
        case = Case(world=2, parallel=ParallelConfig(ep=2), engine="zero1", microbatch_sequences=number)
        with pytest.raises(
            MoeTrainError, match=f"compete.*microbatch_sequences = {sequences}; .*microbatches of {number}"
        ):
            next(verify(found, [case], steps=1))


def test_verify_takes_layouts_whose_microbatches_are_whole():
    found = small_config(*SHARED, "model.capacity.factor=0.7", "train.microbatch_sequences=4")
    chosen = cases(found, 4)
    assert {case.microbatch_sequences for case in chosen} == {4}
    # Eight sequences are two microbatches.
    assert {case.layout.dp for case in chosen} == {1, 2}
