"""How the benchmarks here take the time of calls."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

WARM_UP = 3


def in_turns(calls: Sequence[Callable[[], object]], device: str, repeats: int) -> list[float]:
    """Median seconds of each call. They take turns, so that a busy machine slows all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(WARM_UP + repeats):
        for mine, call in zip(times, calls, strict=True):
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            mine.append(time.perf_counter() - began)
    return [median(mine[WARM_UP:]) for mine in times]
