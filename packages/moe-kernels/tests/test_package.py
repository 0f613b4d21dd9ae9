import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import moe_kernels

SOURCE = Path(moe_kernels.__file__).parent
# Inside a Triton kernel fp32 is the internal dtype: float64 is refused before.
MATHS = sorted(
    set(SOURCE.rglob("*.py"))
    - {SOURCE / "dtypes.py", SOURCE / "testing.py"}
    - set((SOURCE / "triton_kernels").rglob("*.py"))
)
# Where the dtypes that a backend supports are listed.
DTYPE_TABLES = {
    SOURCE / "grouped_gemm" / "torch_backend.py": ["_DTYPES"],
    SOURCE / "implementation.py": ["TRITON_DTYPES"],
}


def fp32_literals(tree: ast.AST) -> list[int]:
    """Lines with `.float()`, or with `torch.float32` or another name of it."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "float")
        or (isinstance(node, ast.Attribute) and node.attr in ("float32", "float"))
    ]


@pytest.mark.parametrize("path", MATHS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_maths_module_names_fp32(path: Path) -> None:
    tree = ast.parse(path.read_text())
    tree.body = [
        statement
        for statement in tree.body
        if not (isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in DTYPE_TABLES.get(path, []))
    ]
    assert fp32_literals(tree) == []


@pytest.mark.parametrize("line", ["x.float()", "x.to(torch.float32)", "torch.zeros(3, dtype=torch.float)"])
def test_the_scan_for_fp32_sees_it(line: str) -> None:
    assert fp32_literals(ast.parse(line))


def test_every_public_name_exists() -> None:
    for name in moe_kernels.__all__:
        assert getattr(moe_kernels, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = moe_kernels.nothing


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert declared == set(moe_kernels._MODULE_OF)


def test_configuration_and_registry_import_without_torch() -> None:
    code = (
        "import sys, moe_kernels, moe_kernels.config, moe_kernels.registry\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_that_of_the_distribution() -> None:
    assert version("moe-stack-kernels") == moe_kernels.__version__
