"""The learning rate: a function of the number of updates, so resuming cannot change it (R121)."""

from itertools import pairwise
from math import cos, isfinite, pi

import pytest

from moe_memory import OptimConfig, learning_rate


def rates(config, total, start=0):
    return [learning_rate(config, updates, total) for updates in range(start, total)]


def test_warm_up_and_cosine_by_hand():
    config = OptimConfig(lr=1.0, warmup_steps=4, schedule="cosine", min_lr_fraction=0.1)
    expected = [0.2, 0.4, 0.6, 0.8]
    expected += [0.1 + 0.9 * (1 + cos(pi * step / 5)) / 2 for step in range(6)]
    assert rates(config, 10) == pytest.approx(expected, rel=1e-14)
    assert rates(config, 10)[4] == pytest.approx(1.0)
    assert rates(config, 10)[7] == pytest.approx(0.1 + 0.9 * 0.34549150281252633)
    assert rates(config, 10)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("low", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 7, 30])
def test_cosine_begins_at_lr_ends_at_the_minimum_and_has_no_jump(warmup, low):
    config = OptimConfig(lr=0.02, warmup_steps=warmup, schedule="cosine", min_lr_fraction=low)
    values = rates(config, 100)
    assert values[warmup] == max(values) == pytest.approx(0.02)
    assert values[-1] == pytest.approx(0.02 * low, abs=1e-18)
    assert min(values[warmup:]) == pytest.approx(0.02 * low, abs=1e-18)
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    steps = [abs(a - b) for a, b in pairwise(values)]
    assert max(steps) <= max(0.02 / (warmup + 1), 0.02 * pi / 2 / (99 - warmup)) * 1.0001


def test_constant_stays():
    config = OptimConfig(lr=0.02, warmup_steps=2, schedule="constant")
    assert rates(config, 5) == pytest.approx([0.02 / 3, 0.04 / 3, 0.02, 0.02, 0.02])


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("total", [1, 2, 5, 20])
@pytest.mark.parametrize("warmup", [0, 1, 4, 5, 50])
def test_every_step_has_a_rate_above_zero_or_at_the_minimum(schedule, total, warmup):
    """Also where the warm-up is longer than the run, and after its end."""
    config = OptimConfig(lr=0.02, warmup_steps=warmup, schedule=schedule, min_lr_fraction=0.1)
    for updates in range(total + 30):
        rate = learning_rate(config, updates, total)
        assert isfinite(rate)
        assert 0 < rate <= 0.02 * (1 + 1e-12)
    if schedule == "cosine" and total - 1 > warmup:
        assert learning_rate(config, total + 29, total) == learning_rate(config, total - 1, total)


def test_r121_a_resumed_run_has_the_rates_of_an_uninterrupted_one():
    config = OptimConfig(lr=0.02, warmup_steps=10)
    assert rates(config, 100)[41:] == rates(config, 100, start=41)


def test_r121_a_new_schedule_takes_effect_where_it_is_now():
    old, new = OptimConfig(lr=0.02, warmup_steps=10), OptimConfig(lr=0.01, warmup_steps=10)
    assert learning_rate(new, 41, 100) == pytest.approx(learning_rate(old, 41, 100) / 2)
