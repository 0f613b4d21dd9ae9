"""What our collectives cost beside bare `torch.distributed`, between two forked ranks on gloo.

    OMP_NUM_THREADS=1 python packages/moe-parallel/benchmarks/collectives.py

Prints ratios of median times: of each wrapper to the bare call of the same bytes, where calls take turns so that a busy
machine slows both; `reduce_scatter` by exchange beside gloo's own, an all-reduce of a copy (which leaves the input as
it was, as ours does) and one in place; and the time that the host spends in a wrapper around a collective that costs
nothing. Both ranks begin each call together, and the slower one's time counts. Memory above 32 MB comes fresh from the
kernel in every call, which then costs as much as the exchange.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_parallel import (
    FoldedMesh,
    ParallelLayout,
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    run_distributed,
)
from moe_parallel._torch_compat import all_gather_into, reduce_scatter_into
from moe_parallel.collectives import start

RANKS = 2
ELEMENTS = {"16 kB": 4_096, "4 MB": 1_048_576, "64 MB": 16_777_216}
REPEATS = {"16 kB": 300, "4 MB": 60, "64 MB": 9}
HOST_REPEATS = 20_000

Call = Callable[[], object]
Times = dict[str, list[float]]


def alternate(group: ProcessGroup, repeats: int, calls: dict[str, Call]) -> Times:
    """Seconds of every call, in turns that both ranks begin together."""
    times: Times = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            dist.barrier(group)
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: values[2:] for name, values in times.items()}


def measure(mesh: FoldedMesh) -> dict[str, Times]:
    group = mesh.group("ep")
    assert group is not None
    return {size: alternate(group, REPEATS[size], calls(elements, group)) for size, elements in ELEMENTS.items()}


def calls(elements: int, group: ProcessGroup) -> dict[str, Call]:
    """Ours and the bare ones; every bare call allocates its output as ours do."""
    x, part = torch.ones(elements), torch.ones(elements // RANKS)
    rows = [elements // RANKS] * RANKS

    def bare_gather() -> None:
        all_gather_into(torch.empty(elements), part, group).wait()

    def bare_exchange() -> Tensor:
        out = torch.empty(elements)
        dist.all_to_all_single(out, x, rows, rows, group=group, async_op=True).wait()
        return out

    return {
        "all_reduce": lambda: all_reduce(x, group, "max").wait(),
        "bare all_reduce": lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True).wait(),
        "all_gather": lambda: all_gather(part, group).wait(),
        "bare all_reduce of a copy": lambda: dist.all_reduce(x.clone(), group=group, async_op=True).wait(),
        "bare all_gather": bare_gather,
        "all_to_all": lambda: all_to_all(x, group, send_rows=rows, receive_rows=rows).wait(),
        "bare all_to_all": bare_exchange,
        "reduce_scatter": lambda: reduce_scatter(x, group).wait(),
        "bare reduce_scatter": lambda: reduce_scatter_into(torch.empty(elements // RANKS), x, group).wait(),
    }


class NoWork:
    """A collective that is over before it began."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def host_us(mesh: FoldedMesh) -> float:
    """Host time of a wrapper around a collective that costs nothing: starting it, and waiting for it."""
    group = mesh.group("ep")
    assert group is not None
    x, work = torch.ones(1), NoWork()

    def once() -> Tensor:
        pending: Pending[Tensor] = start("all_reduce", group, x, lambda: work)
        return pending.wait()

    def bare() -> Tensor:
        work.wait()
        return x

    seconds = []
    for call in (once, bare):
        began = time.perf_counter()
        for _ in range(HOST_REPEATS):
            call()
        seconds.append(time.perf_counter() - began)
    return (seconds[0] - seconds[1]) / HOST_REPEATS * 1e6


def slower(reports: list[Times]) -> dict[str, float]:
    """Median seconds by call, of the slower rank in each turn."""
    return {name: median(map(max, *(report[name] for report in reports))) for name in reports[0]}


def main() -> None:
    layout = ParallelLayout(world=RANKS, ep=RANKS)
    reports = run_distributed(layout, measure, limit_s=600)
    print(
        f"{RANKS} ranks on gloo, torch {torch.__version__}; medians, bytes are those of the larger of input and output"
    )
    print("\nours / bare           " + "".join(f"{size:>12}" for size in ELEMENTS))
    times = {size: slower([report[size] for report in reports]) for size in ELEMENTS}
    for name in ("all_reduce", "all_gather", "all_to_all"):
        print(f"  {name:20}" + "".join(f"{times[size][name] / times[size][f'bare {name}']:12.2f}" for size in ELEMENTS))
    print("\nreduce_scatter by exchange / other")
    for name in ("bare reduce_scatter", "bare all_reduce of a copy", "bare all_reduce", "bare all_to_all"):
        ratios = [times[size]["reduce_scatter"] / times[size][name] for size in ELEMENTS]
        print(f"  {name.removeprefix('bare '):20}" + "".join(f"{ratio:12.2f}" for ratio in ratios))
    bare_us = times["16 kB"]["bare all_reduce"] * 1e6
    alone_us = max(run_distributed(layout, host_us))
    print(f"\nhost time of a wrapper alone: {alone_us:.1f} us, {alone_us / bare_us:.3f} of a bare all_reduce of 16 kB")


if __name__ == "__main__":
    main()
