"""Changes that are proposed where memory does not suffice: legal, ranked, and as good as they say."""

from dataclasses import replace
from functools import cache

import pytest

from moe_memory.measure import IdleInput, Owner, Peak
from moe_train.assemble import assemble
from moe_train.config.checks import cross_problems
from moe_train.config.load import load_config
from moe_train.memory.proposals import HOST_LINK_BYTES_PER_SECOND, Measured, ranked
from moe_train.testing import SMALL, measured_steps, short_corpus, small_config

GIB = 2**30
DEEP = ("model.num_layers=6", "data.sequence_length=200")


@cache
def measured(*overrides):
    with short_corpus():
        training = assemble(small_config(*DEEP, *overrides, recipe="tiny_deepseek_v3"))
    peak = measured_steps(training)
    watch = training.memory
    return Measured(peak=peak, seconds=watch.account.seconds, step_seconds=watch.step_seconds, on_device=False)


def proposals(before, *overrides, world=1, **more):
    return ranked(small_config(*DEEP, *overrides, recipe="tiny_deepseek_v3"), world, before, **more)


def test_what_a_proposal_saves_is_what_a_run_with_it_saves():
    """Every one of them, at the default settings and beside others; nearly, and rather too little."""
    for beside in ((), ('memory.recompute=["mla_up_proj"]',)):
        before = measured(*beside)
        found = proposals(before, *beside)
        assert {setting.partition("=")[0] for proposal in found for setting in proposal.settings} == {
            "memory.recompute",
            "train.microbatch_sequences",
        }
        for proposal in found:
            saved = before.peak.total_bytes - measured(*beside, *proposal.settings).peak.total_bytes
            assert 0.75 * saved <= proposal.saves_bytes <= 1.1 * saved, proposal
        known = [proposal for proposal in found if proposal.costs_percent is not None]
        assert len(known) >= 6
        assert all(0 < proposal.costs_percent < 100 for proposal in known)
        # Everything is more than a part of it.
        costs = {proposal.settings: proposal.costs_percent for proposal in known}
        assert costs['memory.recompute="full"',] == max(costs.values())


def test_proposals_are_legal_and_ranked():
    before = measured()
    config = small_config(*DEEP, recipe="tiny_deepseek_v3")
    found = proposals(before)
    for proposal in found:
        changed = small_config(*DEEP, *proposal.settings, recipe="tiny_deepseek_v3")
        assert not cross_problems(changed, 1)
        assert changed != config
    worth = [p.saves_bytes / max(p.costs_percent, 0.1) for p in found if p.costs_percent is not None]
    assert worth == sorted(worth, reverse=True)
    assert [p.costs_percent is None for p in found] == sorted(p.costs_percent is None for p in found)
    # What would not help comes last, whatever it costs.
    most = max(proposal.saves_bytes for proposal in found)
    first = proposals(before, least_bytes=most)[0]
    assert first.saves_bytes == most
    # Where everything is recomputed, what is inside is not proposed.
    full = proposals(measured('memory.recompute="full"'), 'memory.recompute="full"')
    assert [proposal.settings for proposal in full] == [("train.microbatch_sequences=4",)]


def test_on_a_device_host_memory_is_proposed_and_over_replicas_fsdp():
    peak = Peak(
        total_bytes=100 * GIB,
        owners={
            Owner("parameters", "a"): 20 * GIB,
            Owner("gradients", "a"): 40 * GIB,
            Owner("optimizer", "a"): 40 * GIB,
        },
        idle={IdleInput(f"layers.{layer}.attn_norm", 2**28): GIB for layer in range(6)}
        | {IdleInput(f"layers.{layer}.mlp_norm", 2**20 - 1): GIB for layer in range(6)},
    )
    before = Measured(peak=peak, seconds={}, step_seconds=2.0, on_device=True)
    found = {p.settings[0]: p for p in proposals(before, "model.num_experts=8", world=4)}
    state = found['optim.offload="state"']
    assert state.saves_bytes == 40 * GIB
    assert state.costs_percent == pytest.approx(100 * 80 * GIB / HOST_LINK_BYTES_PER_SECOND / 2)
    assert found['memory.offload=["attn_norm"]'].saves_bytes == 5 * GIB  # the latest layer stays
    assert 'memory.offload=["mlp_norm"]' not in found  # smaller tensors than memory.offload_min_elements stay
    assert found['memory.data_parallel="fsdp"'].saves_bytes == 45 * GIB
    on_host = ranked(
        small_config(*DEEP, recipe="tiny_deepseek_v3"), 1, Measured(**{**vars(before), "on_device": False})
    )
    assert on_host == []


def activations(size_bytes, layers=2):
    """A peak of activations in layers alone."""
    each = size_bytes // layers
    owners = {Owner("activations", f"layers.{layer}.rest"): each for layer in range(layers)}
    return Measured(peak=Peak(each * layers, owners), seconds={}, step_seconds=None, on_device=False)


def saved_by(setting, *overrides, world=1, stage=0):
    config = load_config("tiny_moe", [], [*SMALL, *overrides], world=world).config
    found = ranked(config, world, replace(activations(16 * GIB), stage=stage))
    return {p.settings[0]: p.saves_bytes for p in found}.get(setting)


BATCH = ("train.global_batch_sequences=16", "train.microbatch_sequences=4")


def test_a_proposal_knows_of_how_many_microbatches_activations_wait():
    full, half = 'memory.recompute="full"', "train.microbatch_sequences=2"
    # One layer of one microbatch is whole at a time.
    assert saved_by(full, *BATCH) == 8 * GIB
    assert saved_by(full, *BATCH, "parallel.pp=2", world=2) == 12 * GIB
    assert saved_by(full, *BATCH, "parallel.pp=2", world=2, stage=1) == 8 * GIB
    assert saved_by(full, *BATCH, "parallel.pp=2", "parallel.schedule=gpipe", world=2) == 14 * GIB
    # Where all of a step wait, smaller ones are only more.
    assert saved_by(half, *BATCH) == 8 * GIB
    assert saved_by(half, *BATCH, "parallel.pp=2", world=2) == 8 * GIB
    assert saved_by(half, *BATCH, "parallel.pp=2", "parallel.schedule=gpipe", world=2) is None
    assert saved_by(half, *BATCH, "train.global_batch_sequences=4", "parallel.pp=2", world=2) is None


def test_smaller_microbatches_are_smaller_and_leave_the_loss_as_it_is():
    # A rank has four sequences in a step, in however large microbatches.
    assert saved_by("train.microbatch_sequences=2", *BATCH, "train.microbatch_sequences=16", world=4) == 8 * GIB
    assert saved_by("train.microbatch_sequences=8", *BATCH, "train.microbatch_sequences=16", world=4) is None
    # Where the tokens of a microbatch compete, fewer compete in another one.
    for competing in ("model.capacity.factor=2.0", "model.router.sinkhorn_iterations=4"):
        assert saved_by("train.microbatch_sequences=2", *BATCH, "model.balance.aux=0", competing) is None


def test_what_an_update_needs_is_not_saved():
    config = load_config("tiny_moe", [], SMALL).config
    found = ranked(config, 1, replace(activations(16 * GIB), other_bytes=15 * GIB))
    assert {p.settings[0]: p.saves_bytes for p in found} == {
        'memory.recompute="full"': GIB,
        "train.microbatch_sequences=4": GIB,
    }


def test_a_pattern_that_is_there_stays_beside_what_is_proposed():
    listed = 'memory.recompute=["moe_act@layers.1"]'
    before = measured(listed)
    found = {p.settings[0]: p for p in proposals(before, listed)}
    assert set(found) > {'memory.recompute=["moe_act@layers.1", "layernorm"]', 'memory.recompute="full"'}
    # Of this unit one layer has nothing left to free.
    more = found['memory.recompute=["moe_act@layers.1", "moe_act"]']
    everywhere = {p.settings[0]: p for p in proposals(measured())}['memory.recompute=["moe_act"]']
    assert 0 < more.saves_bytes < everywhere.saves_bytes
