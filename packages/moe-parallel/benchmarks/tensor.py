"""What tensor parallelism of a plan sends, beside the formula, and what its hooks cost the host.

    OMP_NUM_THREADS=1 python packages/moe-parallel/benchmarks/tensor.py

Bytes are counted from the tensors that a rank of a layer (attention and feed-forward part, each column-split then
row-split) and of the cross-entropy gives to its group in forward and backward, as what leaves the rank: (W-1)/W of
what it exchanges, W-1 times what it gathers, and 2 (W-1)/W of what it all-reduces (a ring). The command fails if a
number is not that of the formula, in which T tokens have D features and W ranks share them.

Host time is forward and backward of the edges of one layer on tensors of a few bytes: by `Boundary`, and by the same
collectives called bare in an autograd function each. On a group that communicates with nobody only the host is left;
on gloo, between two forked ranks, its share of the step shows. Calls take turns, so that a busy machine slows both.

Shape legend: T tokens, D features, F inner features, W ranks.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from moe_parallel import (
    Boundary,
    FoldedMesh,
    ModuleRule,
    ParallelLayout,
    ParallelPlan,
    PlanRule,
    apply_plan,
    run_distributed,
    vocabulary_cross_entropy,
)
from moe_parallel._torch_compat import all_gather_into, fake_world, operator_mode

TOKENS, FEATURES, INNER, VOCABULARY = 48, 16, 24, 60
REGIONS = ("attention", "mlp")
TURNS, STEPS = 60, 10

Bytes = dict[str, int]


class Region(nn.Module):
    """Stands for attention as for a feed-forward part: what happens between its two projections stays on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, INNER)
        self.down = nn.Linear(INNER, FEATURES, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        down_TD: Tensor = self.down(self.up(x_TD).tanh())
        return down_TD


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.regions = nn.ModuleDict({name: Region() for name in REGIONS})

    def forward(self, x_TD: Tensor) -> Tensor:
        for region in self.regions.values():
            x_TD = x_TD + region(x_TD)
        return x_TD


def plan_of(sequence_parallel: bool) -> ParallelPlan:
    edges = Boundary(inputs=("sum_gradients",), outputs=("sum_outputs",))
    if sequence_parallel:
        edges = Boundary(inputs=("gather_rows",), outputs=("sum_scatter_rows",))
    return ParallelPlan(
        parameters=(
            PlanRule(pattern="*.up.*", placements=(("tp", 0),)),
            PlanRule(pattern="*.down.weight", placements=(("tp", 1),)),
        ),
        modules=tuple(ModuleRule(pattern=f"regions.{name}", style=edges) for name in REGIONS),
    )


def sent(step: Callable[[], object], ranks: int) -> Bytes:
    """Bytes that leave this rank by kind of collective, and the number of calls under `<kind> calls`."""
    found: Counter[str] = Counter()

    def call(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if operator.namespace == "c10d":
            name = operator._schema.name.replace("_", "").partition("::")[2]
            given = args[0] if name.startswith("allreduce") else args[1]
            size = (given if isinstance(given, Tensor) else given[0]).nbytes
            if name.startswith("allreduce"):
                kind, size = "all-reduce", 2 * size * (ranks - 1) // ranks
            elif name.startswith("allgather"):
                kind, size = "all-gather", size * (ranks - 1)
            elif name.startswith("alltoall"):
                kind, size = "reduce-scatter", size * (ranks - 1) // ranks
            else:
                raise AssertionError(f"the layer is not expected to call {name}")
            found[kind] += size
            found[f"{kind} calls"] += 1
        return operator(*args, **kwargs)

    with operator_mode(call):
        step()
    return dict(found)


def layer_bytes(mesh: FoldedMesh, sequence_parallel: bool, dtype: torch.dtype) -> Bytes:
    layer, ranks = Layer().to(dtype), mesh.size("tp")
    apply_plan(layer, plan_of(sequence_parallel), mesh)
    rows = TOKENS // ranks if sequence_parallel else TOKENS
    x_TD = torch.randn(rows, FEATURES, dtype=dtype, requires_grad=True)
    return sent(lambda: layer(x_TD).sum().backward(), ranks)


def loss_bytes(mesh: FoldedMesh) -> Bytes:
    group, ranks, part = mesh.group("tp"), mesh.size("tp"), VOCABULARY // mesh.size("tp")
    logits_TV = torch.randn(TOKENS, part, dtype=torch.bfloat16, requires_grad=True)
    targets_T = torch.arange(TOKENS)
    losses = partial(vocabulary_cross_entropy, first=part * mesh.rank("tp"), vocab_size=VOCABULARY)
    return sent(lambda: losses(logits_TV, targets_T, group).sum().backward(), ranks)


def compare(name: str, ranks: int, reports: list[Bytes], formula: Bytes) -> bool:
    """Print what every rank has sent beside the formula; whether they agree."""
    agree = all(report == formula for report in reports)
    for kind in (kind for kind in formula if not kind.endswith(" calls")):
        counted = sorted({report.get(kind, 0) for report in reports})
        calls = sorted({report.get(f"{kind} calls", 0) for report in reports})
        print(
            f"  {name:31}{ranks:6}  {kind:15}{'/'.join(map(str, calls)):>6}{'/'.join(map(str, counted)):>12}"
            f"{formula[kind]:>12}{'' if agree else '   DIFFERS'}"
        )
    return agree


def traffic() -> bool:
    print(f"T {TOKENS}, D {FEATURES}, {len(REGIONS)} regions; bytes that leave a rank in forward and backward")
    print(f"  {'':31}{'ranks':>6}  {'collective':15}{'calls':>6}{'counted':>12}{'formula':>12}")
    agree = True
    for ranks in (2, 3, 4):
        layout = ParallelLayout(world=ranks, tp=ranks)
        for dtype in (torch.float32, torch.bfloat16):
            share = (ranks - 1) * TOKENS * FEATURES * dtype.itemsize // ranks  # of one all-gather or reduce-scatter
            calls = 2 * len(REGIONS)  # in forward and in backward
            split = dict.fromkeys(("all-gather", "reduce-scatter"), calls * share)
            whole = {"all-reduce": calls * 2 * share}
            for words, sequence_parallel, formula in (("tokens split", True, split), ("tokens whole", False, whole)):
                measure = partial(layer_bytes, sequence_parallel=sequence_parallel, dtype=dtype)
                formula |= {f"{kind} calls": calls for kind in list(formula)}
                name = f"layer, {words}, {str(dtype).removeprefix('torch.')}"
                agree &= compare(name, ranks, run_distributed(layout, measure), formula)
        loss = {"all-gather": (ranks - 1) * TOKENS * 3 * 4, "all-gather calls": 1}
        agree &= compare("cross-entropy, bfloat16", ranks, run_distributed(layout, loss_bytes), loss)
    return agree


class BareJoin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return bare_join(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return bare_sum(grad, ctx.group), None


class BareSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return bare_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return bare_join(grad, ctx.group), None


def bare_join(x: Tensor, group: ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    all_gather_into(out, x, group).wait()
    return out


def bare_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    x = x.contiguous()
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x, group=group, async_op=True).wait()
    first, *others = parts.chunk(group.size())
    total = first.clone()
    for part in others:
        total += part
    return total


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


class Bare(nn.Module):
    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = BareJoin.apply(x, self.group)
        summed: Tensor = BareSum.apply(joined.view_as(joined), self.group)
        return summed


def host_seconds(mesh: FoldedMesh) -> dict[str, float]:
    """Median of a step: the edges of a layer's regions in forward and backward."""
    group = mesh.group("tp")
    assert group is not None
    edges = Boundary(inputs=("gather_rows",), outputs=("sum_scatter_rows",))
    modules = {
        "boundary": [edges(Nothing(), mesh) for _ in REGIONS],
        "bare": [Bare(group) for _ in REGIONS],
        "none": [Nothing() for _ in REGIONS],
    }
    x = torch.ones(2, 2, requires_grad=True)
    grad = torch.ones(2, 2)
    times: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(TURNS + 5):
        for name, regions in modules.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                y = x
                for region in regions:
                    y = region(y)
                torch.autograd.grad(y, x, grad)
            times[name].append((time.perf_counter() - began) / STEPS)
    return {name: median(values[5:]) for name, values in times.items()}


def host() -> None:
    layout = ParallelLayout(world=2, tp=2)
    with fake_world(rank=0, world=2):
        alone = host_seconds(FoldedMesh(layout, timeout_s=1))
    on_gloo = max(run_distributed(layout, host_seconds, limit_s=600), key=lambda report: report["boundary"])
    print("\nhost time of the edges of a layer, forward and backward: 4 all-gathers and 4 reduce-scatters")
    for words, seconds in (("no communication", alone), ("2 ranks on gloo", on_gloo)):
        ours, bare, none = (seconds[name] * 1e6 for name in ("boundary", "bare", "none"))
        print(
            f"  {words:18} by Boundary {ours:7.0f} us, bare {bare:7.0f} us, without edges {none:5.0f} us; "
            f"Boundary / bare {ours / bare:.2f}"
        )


def main() -> None:
    print(f"torch {torch.__version__}")
    agree = traffic()
    host()
    if not agree:
        sys.exit("bytes differ from the formula")


if __name__ == "__main__":
    main()
