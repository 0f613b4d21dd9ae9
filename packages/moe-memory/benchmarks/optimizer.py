"""What an update costs: each choice of dtypes beside `torch.optim.AdamW(fused=True)` in float32, on equal buffers.

    export OMP_NUM_THREADS=1
    python packages/moe-memory/benchmarks/optimizer.py

Prints the time of an update as a multiple of torch's, by the same process in turn, so that a machine that slows down
slows both alike; bytes of state that each parameter keeps, and the most that an update needs beside it. Muon is beside
torch's AdamW too, on square matrices; times and ratios are medians.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from statistics import median

import torch

from moe_memory import OptimConfig, Optimizer
from moe_memory.measure import LiveBytes
from moe_memory.optim.buffer import Buffer, Part
from moe_memory.optim.rules import update_rule
from moe_parallel import AxisGroups, Box, ShardSpec

TURNS = 7
# The work of Muon grows with the shorter side of a matrix, that of AdamW does not.
SHAPES = {"adamw": (2048, 2048), "muon": (512, 512)}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

FLOAT32 = OptimConfig()
BF16 = replace(FLOAT32, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
INT8 = replace(FLOAT32, exp_avg_dtype="int8", exp_avg_sq_dtype="int8")
LOW = {"master_dtype": "bfloat16", "gradient_dtype": "bfloat16"}
CHOICES = {
    "float32": FLOAT32,
    "moments bfloat16": BF16,
    "moments int8": INT8,
    "gradients bfloat16": replace(FLOAT32, gradient_dtype="bfloat16"),
    "all bfloat16": replace(BF16, **LOW),
    "moments int8, rest bfloat16": replace(INT8, **LOW),
    "Muon, float32": replace(FLOAT32, kind="muon"),
    "Muon, bfloat16 iterations": replace(FLOAT32, kind="muon", muon=replace(FLOAT32.muon, dtype="bfloat16")),
}


@dataclass(frozen=True)
class Result:
    ratio: float
    state_bytes: float
    gradient_bytes: float
    more_bytes: float


def timed(run: Callable[[], object]) -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(config: OptimConfig) -> Result:
    spec = ShardSpec(name="weight", shape=SHAPES[config.kind])
    rule = update_rule(config, spec, torch.bfloat16)
    weights = torch.randn(prod(spec.shape), device=DEVICE)
    part = Part(spec=spec, box=Box.whole(spec.shape), start=0)
    buffer = Buffer(weights=weights.to(rule.master), parts=[part], rule=rule, compute=torch.bfloat16)
    ours = Optimizer(config, [(spec, rule)], [buffer], AxisGroups(), DEVICE)
    judge = weights.clone().requires_grad_()
    judge.grad = torch.randn_like(judge) * 1e-3
    gradient = judge.grad.to(rule.gradient)
    torchs = torch.optim.AdamW([judge], lr=1e-3, fused=True)
    spent: list[tuple[float, float]] = []
    for _ in range(TURNS):
        spare = gradient.clone()  # an update may change it
        spent.append((timed(torchs.step), timed(lambda spare=spare: ours.step(1e-3, [spare]))))  # type: ignore[misc]
    state = [tensor for *_, tensor in ours.state(0, part)]
    spare = gradient.clone()
    with LiveBytes(also=[spare, *state]) as live:
        before = live.live_bytes
        ours.step(1e-3, [spare])
    return Result(
        ratio=median(own / other for other, own in spent[2:]),
        state_bytes=sum(tensor.nbytes for tensor in state) / weights.numel(),
        gradient_bytes=float(gradient.element_size()),
        more_bytes=(live.peak_bytes - before) / weights.numel(),
    )


def main() -> None:
    print(f"matrices {SHAPES}, {DEVICE.type}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| state | update beside torch's fused AdamW | bytes of state | of gradient | more in an update |")
    print("|---|---|---|---|---|")
    for name, config in CHOICES.items():
        found = measure(config)
        print(
            f"| {name} | {found.ratio:.2f} | {found.state_bytes:.2f} | {found.gradient_bytes:.0f} | "
            f"{found.more_bytes:.2f} |"
        )


if __name__ == "__main__":
    main()
