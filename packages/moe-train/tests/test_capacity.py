"""Experts of limited capacity in a training (numerics §4)."""

import pytest
import torch

from moe_kernels import CapacityConfig
from moe_train.assemble import assemble
from moe_train.models.config import DecoderConfig
from moe_train.step import run_step
from moe_train.testing import ALL_LOSSES, microbatches, short_corpus, small_config


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
        (CapacityConfig(factor=1.0, scope="microbatch"), "model.capacity.scope", "does not gather"),
    ],
)
def test_what_the_layer_cannot_do_is_refused(capacity, key, says):
    [problem] = DecoderConfig(capacity=capacity).problems()
    assert problem.key == key
    assert says in problem.rule
