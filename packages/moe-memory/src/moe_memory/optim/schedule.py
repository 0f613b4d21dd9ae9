"""The learning rate as a pure function of the number of updates."""

from math import cos, pi

from moe_memory.config import OptimConfig


def learning_rate(config: OptimConfig, updates: int, total_updates: int) -> float:
    """Rate of the update that follows `updates` earlier ones; defined for every number of them.

    Linear warm-up from lr / (warmup_steps + 1), then `constant`, or `cosine` from lr to min_lr_fraction * lr at
    `total_updates - 1` and beyond.
    """
    if updates < config.warmup_steps:
        return config.lr * (updates + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    span = max(total_updates - 1 - config.warmup_steps, 1)
    progress = min((updates - config.warmup_steps) / span, 1.0)
    low = config.min_lr_fraction
    return config.lr * (low + (1 - low) * (1 + cos(pi * progress)) / 2)
