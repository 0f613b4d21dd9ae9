"""Every `moe_*` module comes from our own distribution, not from a stranger's package of a similar name."""

import importlib
import json
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

PACKAGES = ["parallel", "kernels", "comm", "memory", "train"]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_module_comes_from_our_distribution(name):
    owner = distribution(f"moe-stack-{name}")
    module = importlib.import_module(f"moe_{name}")
    assert module.__version__ == version(f"moe-stack-{name}")
    direct = json.loads(owner.read_text("direct_url.json") or "{}")
    if direct.get("dir_info", {}).get("editable"):
        pytest.skip("installed in editable mode: the wheel has no module files")
    files = {Path(owner.locate_file(file)).resolve() for file in owner.files or []}
    assert Path(module.__file__).resolve() in files


@pytest.mark.parametrize("name", PACKAGES)
def test_siblings_are_ranges_and_never_pins(name):
    requirements = [r for r in distribution(f"moe-stack-{name}").requires or [] if r.startswith("moe-stack-")]
    assert all(">=" in requirement and "<" in requirement and "==" not in requirement for requirement in requirements)
    assert len(requirements) == {"parallel": 0, "kernels": 0, "comm": 2, "memory": 2, "train": 4}[name]
