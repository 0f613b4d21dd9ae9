"""What data parallelism costs: `zero1` and `fsdp` on two forked ranks over gloo, beside the same work without any.

    export OMP_NUM_THREADS=1
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592  # keep freed memory, as moe-train does
    python packages/moe-memory/benchmarks/engines.py

Prints the time of a step beside that of the same work without communication, by the same two processes in turn, so that
a machine that slows down slows all alike; its CPU time, which counts the threads of gloo but not who waits for whom or
for a processor; the bytes that a step sends (all of the machine's loopback traffic, so run
nothing else) beside the formula; and, with parameters so small that bytes do not matter, the host time of an engine's
own code, without waiting. Times and ratios are medians, the slower rank counts.

Shape legend: T tokens, D features, E experts, C rows of an expert, F features inside an expert.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_memory import DataParallelEngine, Fsdp, OptimConfig, Zero1
from moe_parallel import AxisGroups, FoldedMesh, Groups, ParallelLayout, ParameterKind, PlanRule, run_distributed
from moe_parallel.plan import shard_specs

RANKS, LAYERS, TOKENS, MICROBATCHES = 2, 4, 256, 2
FEATURES, HIDDEN, EXPERTS, EXPERT_HIDDEN, VOCABULARY = 512, 2048, 8, 1024, 4096
TURNS, STEPS, SMALL_STEPS = 5, 3, 60
DTYPE = torch.float32  # many CPUs have no fast bfloat16

ALONE = "no communication"
ENGINES: dict[str, Callable[..., DataParallelEngine]] = {"zero1": Zero1, "fsdp": Fsdp}


class Experts(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1_EDF = nn.Parameter(torch.randn(EXPERTS, features, hidden) * 0.02)
        self.w2_EFD = nn.Parameter(torch.randn(EXPERTS, hidden, features) * 0.02)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Two experts a token, all of them equally many."""
        rows_ECD = torch.cat([x_TD, x_TD]).view(EXPERTS, -1, x_TD.shape[1])
        y_ECD = torch.bmm(nn.functional.silu(torch.bmm(rows_ECD, self.w1_EDF)), self.w2_EFD)
        return y_ECD.view(2, *x_TD.shape).sum(0)


class Layer(nn.Module):
    def __init__(self, features: int, hidden: int, expert_hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up, self.down = nn.Linear(features, hidden, bias=False), nn.Linear(hidden, features, bias=False)
        self.experts = Experts(features, expert_hidden)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD + self.down(nn.functional.silu(self.up(self.norm(x_TD))))
        return x_TD + self.experts(x_TD)


class Model(nn.Module):
    def __init__(self, features: int, hidden: int, expert_hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, features)
        self.layers = nn.ModuleList(Layer(features, hidden, expert_hidden) for _ in range(LAYERS))
        self.head = nn.Linear(features, VOCABULARY, bias=False)

    def forward(self, token_T: Tensor) -> Tensor:
        x_TD = self.embedding(token_T)
        for layer in self.layers:
            x_TD = layer(x_TD)
        return self.head(x_TD).float().square().mean()


class Run:
    """A model under an engine."""

    def __init__(self, name: str, groups: Groups, *, small: bool = False) -> None:
        self.engine = ENGINES[name](OptimConfig(), groups, compute_dtype=DTYPE)
        sizes = (8, 8, 8) if small else (FEATURES, HIDDEN, EXPERT_HIDDEN)
        model = Model(*sizes)
        specs = shard_specs(model, [PlanRule(pattern="*.experts.*", kind=ParameterKind.EXPERT)], groups)
        self.sizes = [parameter.numel() for parameter in model.parameters()]
        self.names = list(specs)
        self.model = self.engine.wrap(model, specs)
        self.tokens = torch.randint(VOCABULARY, (MICROBATCHES, 8 if small else TOKENS))
        self.engine_s = 0.0

    def step(self) -> None:
        last_layers = [f"layers.{number}." for number in reversed(range(LAYERS))]
        reports = [[n for n in self.names if n.startswith(prefix)] for prefix in ["head", *last_layers, "embedding"]]
        for number, token_T in enumerate(self.tokens):
            self.model(token_T).backward()
            began = time.thread_time()
            for names in reports:
                self.engine.grads_ready(names, last=number == MICROBATCHES - 1)
            self.engine_s += time.thread_time() - began
        began = time.thread_time()
        self.engine.finish()
        self.engine.norm_parts(2.0)
        self.engine.step(1e-3, 1.0)
        self.engine_s += time.thread_time() - began

    def wait(self) -> None:
        """For the weights, which belong to the step; what is gathered layer by layer belongs to the next."""
        if isinstance(self.engine, Zero1):
            self.engine.synchronize()


@dataclass(frozen=True)
class Timing:
    """Of one way to train: seconds of a step, its wall and CPU time as multiples of those alone, bytes sent."""

    seconds: float
    wall_ratio: float
    cpu_ratio: float
    sent: int


def timings() -> dict[str, Timing]:
    """Each way takes its turn of some steps; the weights that the last one leaves under way belong to it."""

    def work(mesh: FoldedMesh) -> dict[str, Timing]:
        runs = {ALONE: Run("zero1", AxisGroups())} | {name: Run(name, mesh) for name in ENGINES}
        turns: dict[str, list[tuple[float, float, int]]] = {name: [] for name in runs}
        for _ in range(TURNS + 1):
            for name, run in runs.items():
                dist.barrier()
                before, wall, cpu = loopback_bytes(), time.perf_counter(), time.process_time()
                for _ in range(STEPS):
                    run.step()
                run.wait()
                cpu = time.process_time() - cpu
                dist.barrier()
                turns[name].append((time.perf_counter() - wall, cpu, loopback_bytes() - before))
        return {
            name: Timing(
                median(wall for wall, _, _ in found[1:]) / STEPS,
                median(mine[0] / other[0] for mine, other in zip(found[1:], turns[ALONE][1:], strict=True)),
                median(mine[1] / other[1] for mine, other in zip(found[1:], turns[ALONE][1:], strict=True)),
                int(median(sent for _, _, sent in found[1:])) // STEPS,
            )
            for name, found in turns.items()
        }

    results = run_distributed(ParallelLayout(world=RANKS), work, timeout_s=120, limit_s=900)
    return {name: max((result[name] for result in results), key=lambda timing: timing.seconds) for name in results[0]}


def host_us(name: str, groups: Callable[[FoldedMesh], Groups]) -> tuple[float, int]:
    """CPU time of the calling thread inside an engine's calls in a step of tiny parameters, and their number."""

    def work(mesh: FoldedMesh) -> tuple[float, int]:
        run = Run(name, groups(mesh), small=True)
        times = []
        for _ in range(SMALL_STEPS):
            run.engine_s = 0.0
            run.step()
            times.append(run.engine_s)
        return median(times[5:]) * 1e6, len(run.names)

    results = run_distributed(ParallelLayout(world=RANKS), work, limit_s=600)
    return max(time_us for time_us, _ in results), results[0][1]


def loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def formula_bytes(name: str, parameters: int, outside: int) -> int:
    """Every collective sends (N - 1) / N of its bytes from each of N ranks.

    `zero1` reduces once in float32 and gathers once in the compute dtype. `fsdp` reduces every microbatch, and gathers
    layers twice a microbatch, what is outside of them once a step; gloo's own reduce-scatter, which it calls, sends
    twice as much as it must.
    """
    grad, weight = 4, DTYPE.itemsize
    if name == "zero1":
        total = parameters * (grad + weight)
    else:
        layers = parameters - outside
        total = MICROBATCHES * (parameters * grad + 2 * layers * weight) + outside * weight
    return (RANKS - 1) * total


def main() -> None:
    model = Model(FEATURES, HIDDEN, EXPERT_HIDDEN)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    outside = 2 * VOCABULARY * FEATURES
    print(f"{parameters / 1e6:.0f} M parameters, {RANKS} ranks, {MICROBATCHES} x {TOKENS} tokens each, {DTYPE}")
    for name, timing in timings().items():
        line = f"  {name:<18} {timing.seconds * 1e3:6.0f} ms, {timing.wall_ratio:.2f}x; CPU {timing.cpu_ratio:.2f}x"
        if name in ENGINES:
            expected = formula_bytes(name, parameters, outside)
            line += (
                f"   {timing.sent / 1e6:7.1f} MB sent, formula {expected / 1e6:.1f} MB, {timing.sent / expected:.3f}"
            )
        print(line)
    print("host time inside the engine's calls, a step of tiny parameters")
    for name, groups, label in (
        ("zero1", lambda mesh: AxisGroups(), "zero1, one rank"),
        ("zero1", lambda mesh: mesh, "zero1"),
        ("fsdp", lambda mesh: mesh, "fsdp"),
    ):
        microseconds, count = host_us(name, groups)
        print(f"  {label:<18} {microseconds:7.0f} us, {microseconds / count / MICROBATCHES:.1f} us a gradient")


if __name__ == "__main__":
    main()
