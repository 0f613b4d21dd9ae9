"""What importing costs: configuration and command line work without torch, and nothing unused is loaded."""

import subprocess
import sys

import pytest

PACKAGES = ("moe_parallel", "moe_kernels", "moe_comm", "moe_memory", "moe_train")
HEAVY = ("torch", "numpy", "pydantic", "pydantic_core", "triton", "transformers")
NEVER = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torch.distributed.pipelining", "triton", "transformers"),
)


def loaded_by(code):
    """Modules in a fresh interpreter after running the code."""
    code += "\nimport sys\nsys.stderr.write('\\n'.join(['<loaded>', *sys.modules]))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("<loaded>\n")[2].splitlines())


@pytest.mark.parametrize(
    "module",
    [
        *("moe_parallel.config", "moe_parallel.layout", "moe_parallel.problem", "moe_kernels.config"),
        *("moe_kernels.registry", "moe_comm.config", "moe_memory.config", "moe_train.config.tree"),
        *("moe_train.models.config", "moe_train.models.families", "moe_train.plugins", "moe_train.run_directory"),
        *("moe_train.recipes.tiny_moe", "moe_train.observe.metrics", "moe_train.observe.report"),
    ],
)
def test_configuration_imports_nothing_heavy(module):
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_itself_imports_nothing_heavy(package):
    assert loaded_by(f"import {package}").isdisjoint(HEAVY)


def test_public_names_and_the_loader_load_nothing_that_is_not_used():
    names = f"import importlib\nfor package in map(importlib.import_module, {PACKAGES}):"
    # To ask for the class is to choose that engine.
    names += "\n    for name in set(package.__all__) - {'Fsdp'}: getattr(package, name)"
    loaded = loaded_by(f"{names}\nfrom moe_train.config.load import load_config\nload_config('tiny_moe')")
    assert {"torch", "moe_train.models.config"} <= loaded
    assert loaded.isdisjoint({"moe_train.models.decoder", "moe_train.loop", "moe_train.assemble", *NEVER})


def run_cli(*arguments):
    return f"from moe_train.cli import main\ntry: main({list(arguments)!r})\nexcept SystemExit: pass"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["config", "show", "--help"], ["doctor", "--help"]]
)
def test_help_imports_nothing_heavy(arguments):
    assert loaded_by(run_cli(*arguments)).isdisjoint(HEAVY)


def test_explain_and_report_need_no_torch():
    assert loaded_by(run_cli("explain", "loss")).isdisjoint(HEAVY)
    assert loaded_by(run_cli("report", "nowhere")).isdisjoint(HEAVY)
