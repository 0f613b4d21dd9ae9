"""Make the distribution in this folder look installed, for one test: no build, no pip.

Loaded by path, because it belongs to no package:

    install_acme = runpy.run_path("packages/moe-kernels/tests/third_party/install.py")["install_acme"]
"""

import tomllib
from functools import cache
from pathlib import Path

import pytest

from moe_kernels import registry

HERE = Path(__file__).parent


def install_acme(directory: Path, monkeypatch: pytest.MonkeyPatch, *, distribution: str | None = None) -> None:
    """Put `acme_gemm` and its entry points on the import path until the test ends.

    Args:
        directory: an empty folder, such as `tmp_path`; metadata is written there.
        monkeypatch: undoes everything.
        distribution: another name for the distribution, to play a second one that claims the same plug-in.
    """
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = distribution or project["name"]
    info = directory / f"{name.replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{entry} = {target}" for entry, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(directory)
    monkeypatch.syspath_prepend(HERE / "src")
    # The registry remembers what was installed when it first looked; the test gets a memory of its own.
    monkeypatch.setattr(registry, "_entries", cache(registry._entries.__wrapped__))
