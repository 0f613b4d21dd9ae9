"""`CompileCase`: what a kernel is compiled for where no GPU runs it, in tests and for the table of `docs/results`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """A kernel with types and sizes as a real model has them.

    Attributes:
        name: of the row in the table, such as `rms_norm forward bf16 D7168`.
        kernel: the `triton.jit` function.
        signature: argument name to type, as of `triton.compiler.ASTSource`: `*bf16`, `i32`, `fp32`, `constexpr`.
        constants: the value of each `constexpr` argument.
        multiples_of_16: arguments (pointers, and integers such as row lengths) that are divisible by 16, as a launch
            would find them to be.
        num_warps, num_stages: as the launcher chooses.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    multiples_of_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
