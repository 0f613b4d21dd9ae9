"""What tests share. Memory is poisoned, so that a value that nobody wrote is a NaN and not a lucky zero."""

import pytest
import torch

from moe_parallel import AxisGroups
from moe_parallel.testing import run_threads


@pytest.fixture(autouse=True)
def poisoned_memory():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture
def places_of():
    """`places_of(layout, rank)`: `Groups` as far as plans and counting read it."""

    class PlacesOf:
        def __init__(self, layout, rank):
            self.size, self.rank = layout.size, layout.coordinates(rank).get

    return PlacesOf


@pytest.fixture
def on_tp():
    """`on_tp(ranks, fn)`: results of `fn(groups)` by rank, in threads whose groups have the axis `tp`."""

    def run(ranks, fn):
        def on_rank(_, groups):
            world = groups.group("world")
            return fn(AxisGroups({} if world is None else {"tp": world}))

        return run_threads(ranks, on_rank)

    return run
