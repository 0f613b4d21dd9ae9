"""What acts on routers in training only: jitter, transport plans, forced balance (numerics §1, §7)."""

import pytest
import torch

from moe_kernels.config import RouterConfig
from moe_parallel import ParallelLayout, run_distributed
from moe_train.assemble import assemble
from moe_train.config.load import load_config
from moe_train.evaluate import validation_loss
from moe_train.models import router
from moe_train.models.config import BalanceConfig, DecoderConfig
from moe_train.step import run_step
from moe_train.testing import SMALL, microbatches, short_corpus

NO_LOSSES = ("model.balance.aux=0.0", "model.balance.seq=0.0", "model.balance.glob=0.0", "model.balance.bias_rate=none")
KINDS = {
    "jitter": ("model.router.jitter=0.3",),
    "plan": ("model.router.sinkhorn_iterations=5", *NO_LOSSES),
    "forced": ("model.router.force_balance=true",),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def config_of(world, *overrides):
    settings = [
        *SMALL,
        "model.num_experts=8",
        "model.expert_features=12",
        "memory.compute_dtype=float64",
        "kernels.grouped_gemm=loop",
        *overrides,
    ]
    return load_config("tiny_moe", [], settings, world=world).config


def two_steps(training):
    """Losses, of which the second shows the gradients of the first, and the choices of each layer and expert."""
    found = []
    for updates in range(2):
        batch = training.data.train.next_batch()
        rows = training.share.rows(batch.num_sequences)
        share = batch.rows(rows[0], rows[-1] + 1)
        result = run_step(training, microbatches(training, share), updates=updates, window=None)
        found.append((result.loss, result.statistics.counts.tolist()))
    return found


def alone(*overrides):
    with short_corpus():
        return assemble(config_of(1, *overrides))


def assert_same(found, expected):
    for (loss, counts), (want_loss, want_counts) in zip(found, expected, strict=True):
        assert loss == pytest.approx(want_loss, rel=1e-10)
        assert counts == want_counts


@kinds
def test_recompute_repeats_what_was_drawn(kind):
    plain, kept, recomputed = (
        two_steps(alone(*more)) for more in (NO_LOSSES, KINDS[kind], (*KINDS[kind], "memory.recompute=full"))
    )
    assert_same(recomputed, kept)
    assert plain[0][0] != pytest.approx(kept[0][0], rel=1e-6)


@pytest.mark.parametrize("kind", ["jitter", "forced"])
def test_accumulation_draws_the_same(kind):
    whole, parts = (two_steps(alone(*KINDS[kind], f"train.microbatch_sequences={size}")) for size in (8, 2))
    assert_same(parts, whole)


@pytest.mark.dist
@kinds
@pytest.mark.parametrize("axis", ["tp", "cp", "dp"])
def test_ranks_draw_as_one_does(kind, axis):
    overrides = (*KINDS[kind], "train.microbatch_sequences=4")
    sizes = {} if axis == "dp" else {axis: 2}

    def on_rank(mesh):
        return two_steps(assemble(config_of(2, *overrides, *(f"parallel.{k}={v}" for k, v in sizes.items())), mesh))

    with short_corpus():
        expected = two_steps(assemble(config_of(1, *overrides)))
        for found in run_distributed(ParallelLayout(world=2, **sizes), on_rank, timeout_s=20):
            assert_same(found, expected)


@kinds
def test_evaluation_is_that_of_a_router_without(kind):
    training, plain = alone(*KINDS[kind]), alone(*NO_LOSSES)
    with torch.no_grad():
        assert validation_loss(training, 4) == validation_loss(plain, 4)


def test_steps_and_layers_draw_for_themselves(monkeypatch):
    keys = []

    def remember(x_TD, amount, random):
        keys.append(random.key)
        return x_TD

    monkeypatch.setattr(router, "jitter", remember)
    two_steps(alone(*KINDS["jitter"], "train.seed=5"))
    assert len(set(keys)) == len(keys) == 4
    seen = set(keys)
    two_steps(alone(*KINDS["jitter"], "train.seed=6"))
    assert not seen & set(keys[4:])


def test_forced_balance_loads_every_expert_alike():
    [(_, counts), _] = two_steps(alone("model.router.force_balance=true"))
    tokens = 8 * 13
    assert all(count == tokens * 2 / 8 for layer in counts for count in layer)


def test_a_transport_plan_suffers_no_other_balance():
    config = DecoderConfig(
        router=RouterConfig(sinkhorn_iterations=4), balance=BalanceConfig(aux=0.1, seq=0.1, glob=0.1, bias_rate=0.0)
    )
    assert [problem.key for problem in config.problems()] == [
        f"model.balance.{name}" for name in ("aux", "seq", "glob", "bias_rate")
    ]
    legal = DecoderConfig(router=RouterConfig(sinkhorn_iterations=4), balance=BalanceConfig(z=0.1))
    assert legal.problems() == []
