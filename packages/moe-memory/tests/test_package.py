"""The public names: all there, lazy, and typed as what they are."""

import ast
import importlib
from pathlib import Path

import pytest

import moe_memory


def test_every_public_name_exists_and_is_listed_once():
    assert len(set(moe_memory.__all__)) == len(moe_memory.__all__)
    for name in moe_memory.__all__:
        assert getattr(moe_memory, name) is not None
    assert set(moe_memory.__all__) <= set(dir(moe_memory))


def test_no_public_name_is_that_of_a_module():
    """Importing a module sets the attribute, and the name would then mean the module."""
    modules = {path.stem for path in Path(moe_memory.__file__).parent.iterdir()}
    assert modules.isdisjoint(moe_memory.__all__)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(moe_memory.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.asname: node.module for node in block.body for alias in node.names}
    assert set(imported) == set(moe_memory.__all__) - {"__version__"}
    for name, module in imported.items():
        assert getattr(moe_memory, name) is getattr(importlib.import_module(module), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Zero3'"):
        _ = moe_memory.Zero3
