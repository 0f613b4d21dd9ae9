"""What attention over several ranks costs beside local attention over whole rows, in time and in memory.

    OMP_NUM_THREADS=1 python packages/moe-parallel/benchmarks/context.py

Time is forward and backward of one layer, in processor time, divided by that of `LocalAttention` over the whole rows
by the number of ranks: 1.00 is a perfect share. Every rank times both in turns, so that a busy machine slows both; the
ratio is the median of the turns, of the busiest rank. Processor time does not depend on how many cores the ranks have
to share; it has the copies of the exchanges in it, but no waiting. Making the tiles, once for all layers of a
microbatch, is shown beside it as a part of one layer.

Memory is the peak of what a core allocates and has not freed, output included, in forward and in backward, in units of
the keys and values of one rank.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moe_parallel import (
    AttentionCore,
    ContextSplit,
    FoldedMesh,
    LocalAttention,
    ParallelLayout,
    SequenceInfo,
    context_attention,
    document_numbers,
    run_distributed,
    select_slots,
    split_context,
)
from moe_parallel._torch_compat import operator_mode
from moe_parallel.attention.tiles import RowTiles

SLOTS, HEADS, KV_HEADS, FEATURES = 4096, 8, 4, 64
MEAN_DOCUMENT = 200
REPEATS = 5
KINDS = ("ring", "gather", "all_to_all", "hierarchical")
ROWS = ("one document", "documents")

Numbers = dict[str, float]


def document_of(rows: str) -> Tensor | None:
    if rows == "one document":
        return None
    generator = torch.Generator().manual_seed(0)
    boundary_N = torch.randint(1, SLOTS, (SLOTS // MEAN_DOCUMENT - 1,), generator=generator).sort().values
    return document_numbers(torch.cat([torch.tensor([0]), boundary_N]), SLOTS).unsqueeze(0)


def tensors() -> list[Tensor]:
    """q, k, v and the gradient of the output, of a whole row."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, SLOTS, heads, FEATURES, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def info_of(slots: int, document: Tensor | None = None, **context: Any) -> SequenceInfo:
    nothing = torch.zeros(1, slots, dtype=torch.int64)
    return SequenceInfo(
        position_BS=nothing, token_index_BS=nothing, valid_BS=nothing == 0, document_BS=document, **context
    )


def steps(core: AttentionCore, whole: list[Tensor], info: SequenceInfo) -> tuple[Callable[[], None], ...]:
    """Forward and backward, to be called in turn."""
    q, k, v, grad = whole
    out: list[Tensor] = []
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        out[:] = [core(leaves[0], leaves[1], leaves[2], info)]

    def backward() -> None:
        torch.autograd.grad(out.pop(), leaves, grad)

    return forward, backward


def seconds(calls: Iterable[Callable[[], object]]) -> float:
    began = time.process_time()
    for call in calls:
        call()
    return time.process_time() - began


def peak_bytes(step: Callable[[], None]) -> int:
    """The most that operators inside `step` have allocated and nobody has freed."""
    live, peak = 0, 0
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    def free(size: int) -> None:
        nonlocal live
        live -= size

    def call(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        nonlocal live, peak
        before = {id(x.untyped_storage()) for x in args if isinstance(x, Tensor)}
        result = operator(*args, **kwargs)
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor) and (storage := x.untyped_storage()) not in known and id(storage) not in before:
                known.add(storage)
                weakref.finalize(storage, free, storage.nbytes())
                live += storage.nbytes()
                peak = max(peak, live)
        return result

    with operator_mode(call):
        step()
    return peak


def make_tiles(split: ContextSplit) -> None:
    RowTiles(split.slot_CBS, split.document_BR).of(split.group.rank(), None, split.slot_CBS.device)


def measure(mesh: FoldedMesh) -> Numbers:
    """Of one rank: ratios of time by core and kind of rows, of making tiles, and peaks in keys and values of a rank."""
    group, whole = mesh.group("cp"), tensors()
    assert group is not None
    kinds = [kind for kind in KINDS if kind != "hierarchical" or mesh.cp_inner > 1]
    cores = {kind: context_attention(kind) for kind in kinds if kind != "hierarchical"}
    if mesh.cp_inner > 1:
        cores["hierarchical"] = context_attention(
            "hierarchical", inner=mesh.group("cp_inner"), outer=mesh.group("cp_outer")
        )
    found: Numbers = {}
    for rows in ROWS:
        document = document_of(rows)
        split = split_context(group, 1, SLOTS, document)
        here = [select_slots(x, split, group.rank()) for x in whole]
        info = info_of(here[0].shape[1], context=split)
        for kind, core in cores.items():
            peaks = [peak_bytes(step) / sum(x.nbytes for x in here[1:3]) for step in steps(core, here, info)]
            found[f"{rows} {kind} forward"], found[f"{rows} {kind} backward"] = peaks
        turns: list[Numbers] = []
        for _ in range(REPEATS):
            share = seconds(steps(LocalAttention(), whole, info_of(SLOTS, document))) / group.size()
            turn = {kind: seconds(steps(core, here, info)) / share for kind, core in cores.items()}
            turn["tiles"] = seconds([partial(make_tiles, split)]) / share
            turns.append(turn)
        found |= {f"{rows} {name}": median(turn[name] for turn in turns) for name in turns[0]}
    return found


def main() -> None:
    print(
        f"a row of {SLOTS} slots, {HEADS} query and {KV_HEADS} key/value heads of {FEATURES} features, float32, torch "
        f"{torch.__version__}"
    )
    for ranks in (2, 4):
        layout = ParallelLayout(world=ranks, cp=ranks)
        reports = run_distributed(layout, measure, limit_s=600, timeout_s=300, cp_inner=2 if ranks == 4 else 1)
        worst = {name: max(report[name] for report in reports) for name in reports[0]}
        print(f"\n{ranks} ranks               " + "".join(f"{rows:>16}" for rows in ROWS) + "  peak forward  backward")
        for kind in KINDS:
            if f"{ROWS[0]} {kind}" in worst:
                ratios = "".join(f"{worst[f'{rows} {kind}']:16.2f}" for rows in ROWS)
                peaks = [worst[f"{ROWS[0]} {kind} {way}"] for way in ("forward", "backward")]
                print(f"  {kind:20}{ratios}" + "{:14.1f}{:10.1f}".format(*peaks))
        print("  making the tiles    " + "".join(f"{worst[f'{rows} tiles']:16.3f}" for rows in ROWS))


if __name__ == "__main__":
    main()
