"""What the kernels share that read and write much and compute little: how they take rows, tiles, and their cases."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from triton import next_power_of_2

from moe_kernels.triton_kernels.compiled import CompileCase


def feature_rows(x: Tensor) -> Tensor:
    """x [.., D] as [R, D] with neighbouring features side by side; a copy only where strides leave no other way."""
    x_RD = x.reshape(-1, x.shape[-1])
    return x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()


def tile(features: int, widest: int, elements: int) -> tuple[int, int]:
    """Rows and features of the tile of one program: all features up to `widest`, and several rows if they are short."""
    width = min(next_power_of_2(features), widest)
    return max(elements // width, 1), width


def compile_case(
    name: str, kernel: Any, constants: Mapping[str, Any], *, types: Mapping[str, str], num_warps: int
) -> CompileCase:
    """A case with every pointer and every stride divisible by 16.

    Args:
        constants: constexpr arguments, and None for tensors that are absent.
        types: of arguments that are neither pointers to bf16 (`.._ptr`) nor integers.
    """
    signature: dict[str, str] = {}
    for argument in kernel.arg_names:
        usual = "*bf16" if argument.endswith("_ptr") else "i32"
        signature[argument] = "constexpr" if argument in constants else types.get(argument, usual)
    aligned = [a for a in signature if a.endswith(("_ptr", "_stride")) and a not in constants]
    return CompileCase(
        name=name,
        kernel=kernel,
        signature=signature,
        constants=constants,
        multiples_of_16=tuple(aligned),
        num_warps=num_warps,
    )


def in_all_dtypes(cases: Iterable[CompileCase]) -> tuple[CompileCase, ...]:
    """The cases, which are in bf16, and the first of every kernel in fp16 and fp32 too."""
    found, seen = [], set()
    for case in cases:
        found.append(case)
        if case.kernel in seen:
            continue
        seen.add(case.kernel)
        for dtype in ("fp16", "fp32"):
            signature = {name: f"*{dtype}" if kind == "*bf16" else kind for name, kind in case.signature.items()}
            name = case.name.replace("bf16", dtype) if "bf16" in case.name else f"{case.name} {dtype}"
            found.append(replace(case, name=name, signature=signature))
    return tuple(found)
