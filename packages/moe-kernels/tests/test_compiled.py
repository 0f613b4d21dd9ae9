"""Kernels compile for sm_90 and sm_100 without a GPU: no spills, wide accesses, matrix instructions.

In processes of their own, because Triton interprets in this one.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

PROGRAM = """
import json, sys
from dataclasses import asdict
from moe_kernels.triton_kernels.figures import CAPABILITIES, cases_by_module, figures

found = []
for module, cases in cases_by_module().items():
    kernels = set()
    for case in cases:
        first_of_module, first_of_kernel = not kernels, case.kernel not in kernels
        kernels.add(case.kernel)
        for capability in CAPABILITIES:
            # The covering subset: every kernel on the first architecture, and every module on the others.
            wanted = first_of_kernel if capability == CAPABILITIES[0] else first_of_module
            if wanted or "all" in sys.argv:
                about = {"module": module, "case": case.name, "capability": capability}
                found.append(about | asdict(figures(case, capability)))
json.dump(found, sys.stdout)
"""
# Aligned to nothing, so that every element is accessed alone; and kernels that read and write a number for each row.
NARROW = ("K999", "row_map ", "segment_sum")


def compiled(cache: Path, *arguments: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(
        command, env={**environment, "TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def check(found: list[dict]) -> None:
    spilling = [f"{f['case']} sm_{f['capability']}: {f['spill_bytes']} bytes" for f in found if f["spill_bytes"]]
    assert not spilling
    narrow = [f for f in found if not f["wide_accesses"] and not any(name in f["case"] for name in NARROW)]
    assert not narrow
    for f in found:
        if f["module"] == "grouped_gemm" and "fp32 K" not in f["case"].replace("to fp32", ""):
            assert set(f["matrix"]) == {"HGMMA" if f["capability"] == 90 else "UTCHMMA"}, f
        assert f["registers"] <= 255
        assert f["shared_bytes"] <= 227 * 1024


def test_a_case_of_every_kernel(tmp_path: Path) -> None:
    found = compiled(tmp_path)
    assert {f["capability"] for f in found} == {90, 100}
    assert "grouped_gemm" in {f["module"] for f in found}
    check(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_cases(tmp_path: Path) -> None:
    check(compiled(tmp_path, "all"))


def test_an_interpreted_kernel_is_refused() -> None:
    from moe_kernels import MoeKernelsError
    from moe_kernels.triton_kernels.figures import figures
    from moe_kernels.triton_kernels.grouped_gemm import COMPILE_CASES

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles in this process")
    with pytest.raises(MoeKernelsError, match="unset TRITON_INTERPRET"):
        figures(COMPILE_CASES[0], 90)


def test_every_module_with_kernels_has_cases() -> None:
    import moe_kernels

    folder = Path(moe_kernels.__file__).parent / "triton_kernels"
    with_kernels = {path.stem for path in folder.glob("*.py") if "@triton.jit" in path.read_text(encoding="utf-8")}
    with_cases = {path.stem for path in folder.glob("*.py") if "\nCOMPILE_CASES" in path.read_text(encoding="utf-8")}
    assert with_kernels
    assert with_kernels <= with_cases
