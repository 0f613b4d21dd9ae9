"""What the compiler made of a `CompileCase`: registers, spills, shared memory, accesses, matrix instructions.

A cubin is built and disassembled by tools that Triton brings along; no GPU is needed, and TRITON_INTERPRET must not be
set. Two kinds of access count as wide: 16 bytes or more per thread, and whole tiles by the tensor memory accelerator.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_kernels import triton_kernels
from moe_kernels.errors import MoeKernelsError
from moe_kernels.triton_kernels.compiled import CompileCase

CAPABILITIES = (90, 100)

_WARP_SIZE = 32
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# SASS of global memory: loads and stores through registers, asynchronous copies to shared memory, tiles.
_ACCESS = re.compile(r"\b((?:LDG|STG|LD|ST|LDGSTS)\.E[.\w]*|UTMA(?:LDG|STG)[.\w]*|UBLKCP[.\w]*)")
_WIDE = re.compile(r"\.(?:128|256)\b|^UTMA|^UBLKCP")
# Warp-group and warp products, and those of the tensor cores of sm_100.
_MATRIX = re.compile(r"\b((?:[HIQBOD]G?|UTC\w+?)MMA)\b")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one kernel on one architecture, counted in its instructions; how often they run is not known.

    Attributes:
        registers: of a thread.
        spill_bytes: of the stack of a thread, which holds nothing but spilled registers.
        shared_bytes: of a program.
        wide_accesses, accesses: instructions that access global memory.
        matrix: mnemonics to how many there are.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    wide_accesses: int
    accesses: int
    matrix: Mapping[str, int]


def cases_by_module() -> dict[str, tuple[CompileCase, ...]]:
    """The cases of every module of `triton_kernels` that has some."""
    cases = {}
    for found in iter_modules(triton_kernels.__path__):
        module = import_module(f"{triton_kernels.__name__}.{found.name}")
        if hasattr(module, "COMPILE_CASES"):
            cases[found.name] = module.COMPILE_CASES
    return cases


def figures(case: CompileCase, capability: int) -> Figures:
    """Compile for a capability (90, 100) and count.

    Raises:
        MoeKernelsError: Triton interprets in this process, so that kernels cannot be compiled.
    """
    compiled = compile_case(case, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _tool("cuobjdump", "-res-usage", cubin.name)
        sass = _tool("nvdisasm", cubin.name)
    accesses = _ACCESS.findall(sass)
    return Figures(
        registers=_number("REG", usage),
        spill_bytes=_number("STACK", usage),
        shared_bytes=compiled.metadata.shared,
        wide_accesses=sum(bool(_WIDE.search(access)) for access in accesses),
        accesses=len(accesses),
        matrix=dict(Counter(_MATRIX.findall(sass))),
    )


def compile_case(case: CompileCase, capability: int) -> Any:
    """Triton's compiled kernel; what it is compiled from is as a launch would find it."""
    if not isinstance(case.kernel, triton.JITFunction):
        raise MoeKernelsError(
            f"{case.name} cannot be compiled where Triton interprets; unset TRITON_INTERPRET before Triton is imported"
        )
    names = case.kernel.arg_names
    return triton.compile(
        ASTSource(
            fn=case.kernel,
            # In the order of the arguments.
            signature={name: "constexpr" if name in case.constants else case.signature[name] for name in names},
            constexprs=dict(case.constants),
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.multiples_of_16},
        ),
        target=GPUTarget("cuda", capability, _WARP_SIZE),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / name, *arguments], check=True, capture_output=True, text=True).stdout


def _number(name: str, usage: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", usage)
    if found is None:
        raise MoeKernelsError(f"cuobjdump reported no {name}, but: {usage.strip()!r}")
    return int(found[1])
