"""Fixtures of this package's tests."""

import importlib
import sys

import pytest

from moe_kernels import registry


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(name, entry_points, source)`: a distribution of a third party, for one test.

    Its module is called `name` with underscores; `entry_points` is the text of entry_points.txt.
    """
    modules = []

    def install_one(name, entry_points, source):
        folder = tmp_path / "site" / name
        info = folder / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(entry_points)
        module = name.replace("-", "_")
        (folder / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(folder)
        modules.append(module)
        forget()

    def forget():
        importlib.invalidate_caches()
        registry._entries.cache_clear()

    yield install_one
    monkeypatch.undo()
    for module in modules:
        sys.modules.pop(module, None)
    forget()
