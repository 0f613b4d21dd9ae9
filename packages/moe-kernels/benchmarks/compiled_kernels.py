"""What the compiler makes of every Triton kernel for sm_90 and sm_100; no GPU is needed.

    python packages/moe-kernels/benchmarks/compiled_kernels.py [--write] [module ..]

Prints a Markdown table of all compile cases of `moe_kernels.triton_kernels`, or of the modules named, and with --write
replaces docs/results/compiled-kernels.md by it. The command fails if a kernel spills registers.
"""

import argparse
import sys
from pathlib import Path

import triton

from moe_kernels.triton_kernels.figures import CAPABILITIES, Figures, cases_by_module, figures

PAGE = Path(__file__).parents[3] / "docs" / "results" / "compiled-kernels.md"
HEAD = f"""# What the compiler makes of the kernels

    python packages/moe-kernels/benchmarks/compiled_kernels.py --write

Every Triton kernel of moe-kernels, compiled by Triton {triton.__version__} for sm_90 (Hopper) and sm_100 (Blackwell),
with the types and sizes of real models. Nothing here was run: these are counts of instructions in the cubins. A cell
has sm_90, then sm_100. Registers are those of a thread. Accesses are instructions that access global memory; wide ones
move 16 bytes or more per thread, or a tile. Matrix instructions are warp-group products (HGMMA, from `wgmma`), those of
the fifth generation (UTCHMMA, from `tcgen05.mma`), or warp products (HMMA); fp32 is multiplied without any.
"""
TITLES = ("case", "registers", "spilled bytes", "shared KiB", "wide accesses", "matrix instructions")


def row(name: str, found: list[Figures]) -> str:
    cells = (
        [str(f.registers) for f in found],
        [str(f.spill_bytes) for f in found],
        [f"{f.shared_bytes / 1024:.0f}" for f in found],
        [f"{f.wide_accesses} of {f.accesses}" for f in found],
        [" ".join(f"{count} {mnemonic}" for mnemonic, count in f.matrix.items()) for f in found],
    )
    return f"| {name} | " + " | ".join(" / ".join(cell) if any(cell) else "" for cell in cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"replace {PAGE.name}")
    parser.add_argument("modules", nargs="*", help="such as norm")
    options = parser.parse_args()
    modules = cases_by_module()
    page, spilling = [HEAD.rstrip()], []
    for module in options.modules or modules:
        page.append(f"\n## {module}\n\n| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
        for case in modules[module]:
            found = [figures(case, capability) for capability in CAPABILITIES]
            page.append(row(case.name, found))
            if any(f.spill_bytes for f in found):
                spilling.append(case.name)
            print(page[-1], file=sys.stderr, flush=True)
    text = "\n".join(page) + "\n"
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    if spilling:
        print(f"registers are spilled by: {', '.join(spilling)}", file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
