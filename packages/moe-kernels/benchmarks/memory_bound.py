"""What the operations that are bound by memory cost beside a copy of the bytes that they must read and write.

    OMP_NUM_THREADS=1 python packages/moe-kernels/benchmarks/memory_bound.py [--device cuda] [--dtype float32]

Prints, for the forward and the backward pass of each, the median time as a multiple of the time of a copy that reads
and writes as much in total; calls take turns, so that a busy machine slows both. One is the least that can be reached.
On a CPU it measures the plain implementation, on a GPU both, at sizes of DeepSeek-V3.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timing import in_turns
from torch import Tensor

from moe_kernels import apply_rope, gated_activation, rms_norm, rms_norm_residual, rope_tables
from moe_kernels.activation import Activation
from moe_kernels.cross_entropy import cross_entropy
from moe_kernels.implementation import Implementation, implementation

REPEATS = 21
KINDS: tuple[Activation, ...] = ("silu", "gelu")
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens, model features, expert rows and features, heads and their features and rotated ones, vocabulary."""

    tokens: int
    features: int
    rows: int
    expert_features: int
    heads: int
    head_features: int
    rotated: int
    vocabulary: int
    logit_tokens: int


SIZES = {
    "cpu": Sizes(
        tokens=4096,
        features=1024,
        rows=8192,
        expert_features=512,
        heads=16,
        head_features=96,
        rotated=32,
        vocabulary=16_384,
        logit_tokens=512,
    ),
    "cuda": Sizes(
        tokens=8192,
        features=7168,
        rows=65_536,
        expert_features=2048,
        heads=128,
        head_features=192,
        rotated=64,
        vocabulary=129_280,
        logit_tokens=4096,
    ),
}


@dataclass(frozen=True)
class Case:
    """An operation, the tensors it is differentiated by, and elements to read and write forward and backward."""

    name: str
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    leaves: list[Tensor]
    forward: int
    backward: int


def cases(sizes: Sizes, dtype: torch.dtype, device: str) -> list[Case]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    tokens, features, rows, width = sizes.tokens, sizes.features, sizes.rows, sizes.expert_features
    x, residual, weight, h = leaf(tokens, features), leaf(tokens, features), leaf(features), leaf(rows, 2 * width)
    probs = torch.rand(rows, device=device, requires_grad=True)
    q = leaf(1, tokens, sizes.heads, sizes.head_features)
    tables = rope_tables(torch.arange(tokens, device=device)[None], sizes.rotated, 1e4, dtype)
    logits = leaf(sizes.logit_tokens, sizes.vocabulary)
    targets = torch.randint(0, sizes.vocabulary, (sizes.logit_tokens,), device=device)
    return [
        Case("rms_norm", lambda x, w: rms_norm(x, w, EPS), [x, weight], 2 * x.numel(), 3 * x.numel()),
        Case(
            "rms_norm_residual",
            lambda x, r, w: rms_norm_residual(x, r, w, EPS),
            [x, residual, weight],
            4 * x.numel(),
            4 * x.numel(),
        ),
        *(
            Case(f"gated_activation {kind}", activation(kind), [h, probs], 3 * rows * width, 5 * rows * width)
            for kind in KINDS
        ),
        Case("apply_rope", lambda q: apply_rope(q, *tables), [q], 2 * q.numel(), 2 * q.numel()),
        Case("cross_entropy", lambda x: cross_entropy(x, targets), [logits], logits.numel(), 2 * logits.numel()),
    ]


def activation(kind: Activation) -> Callable[..., Tensor]:
    return lambda h, p: gated_activation(h, p, kind)


def ratios(case: Case, dtype: torch.dtype, device: str, chosen: Implementation) -> tuple[float, float]:
    """Of forward and backward to a copy of as many bytes."""
    with implementation(chosen):
        outputs = case.run(*case.leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        grads = [torch.randn_like(y) for y in outputs]
        copied = [torch.zeros(elements // 2, dtype=dtype, device=device) for elements in (case.forward, case.backward)]
        forward, copy, backward, copy_backward = in_turns(
            [
                lambda: case.run(*case.leaves),
                copied[0].clone,
                lambda: torch.autograd.grad(outputs, case.leaves, grads, retain_graph=True),
                copied[1].clone,
            ],
            device,
            REPEATS,
        )
    return forward / copy, backward / copy_backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    device, dtype = options.device, getattr(torch, options.dtype)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} thread(s) of a CPU"
    implementations: tuple[Implementation, ...] = ("plain", "triton") if device == "cuda" else ("plain",)
    print(f"{name}, torch {torch.__version__}, {options.dtype}; time / time of a copy of the same bytes")
    print(f"{'':24}" + "".join(f"{chosen + ' forward':>18}{'backward':>10}" for chosen in implementations))
    for case in cases(SIZES[device], dtype, device):
        measured = [ratios(case, dtype, device, chosen) for chosen in implementations]
        print(f"{case.name:24}" + "".join(f"{forward:18.2f}{backward:10.2f}" for forward, backward in measured))


if __name__ == "__main__":
    main()
