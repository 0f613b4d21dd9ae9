import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from moe_kernels import PluginError, Registry

GROUP = "moe_kernels.testing"


@dataclass(frozen=True, kw_only=True)
class Record:
    name: str
    interface_version: int = 1
    reason: str | None = None

    def available(self) -> str | None:
        return self.reason


def entry(name: str, record: Any, distribution: str = "ours", version: str = "1.0") -> SimpleNamespace:
    def load() -> Any:
        if isinstance(record, Exception):
            raise record
        return record

    return SimpleNamespace(name=name, load=load, dist=SimpleNamespace(name=distribution, version=version))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry[Record]]:
    def build(*entries: SimpleNamespace) -> Registry[Record]:
        monkeypatch.setattr("moe_kernels.registry._entries", {GROUP: entries}.__getitem__)
        return Registry(GROUP, "gadget", Record, 1)

    return build


def test_get_loads_the_named_one_only(registry: Callable[..., Registry[Record]]) -> None:
    record = Record(name="fast")
    found = registry(entry("fast", record), entry("broken", ImportError("no cuda")))
    assert found.get("fast") is record
    assert found.names() == ["broken", "fast"]


def test_an_unknown_name_lists_what_is_installed_and_guesses(registry: Callable[..., Registry[Record]]) -> None:
    found = registry(entry("fast", Record(name="fast")), entry("plain", Record(name="plain")))
    with pytest.raises(PluginError, match=r"unknown gadget 'fats'; installed here: fast, plain; did you mean 'fast'\?"):
        found.get("fats")
    with pytest.raises(PluginError, match=r"installed here: fast, plain$"):
        found.get("zzz")
    with pytest.raises(PluginError, match="installed here: none"):
        registry().get("fast")


def test_a_duplicate_name_names_both_distributions(registry: Callable[..., Registry[Record]]) -> None:
    found = registry(
        entry("fast", Record(name="fast"), "theirs", "2.1"), entry("fast", Record(name="fast"), "ours", "1.0")
    )
    with pytest.raises(PluginError, match=r"claimed by ours 1\.0 and by theirs 2\.1"):
        found.get("fast")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (ImportError("no cuda"), "'fast' of ours 1.0 could not be loaded: ImportError: no cuda"),
        (Record(name="fast", interface_version=2), "interface version 2, this release speaks 1"),
        (Record(name="slow"), "calls itself 'slow'"),
        ("text", "resolves to str, expected Record"),
    ],
)
def test_a_broken_plugin_is_refused_with_its_distribution(
    registry: Callable[..., Registry[Record]], record: Any, message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        registry(entry("fast", record)).get("fast")


def test_an_explicit_name_that_cannot_run_here_is_an_error(registry: Callable[..., Registry[Record]]) -> None:
    found = registry(entry("fast", Record(name="fast", reason="needs a GPU")), entry("plain", Record(name="plain")))
    with pytest.raises(PluginError, match="'fast' cannot run here: needs a GPU"):
        found.get_available("fast")
    assert found.get_available("plain").name == "plain"


def test_first_logs_one_line_with_the_reasons(
    registry: Callable[..., Registry[Record]], caplog: pytest.LogCaptureFixture
) -> None:
    found = registry(
        entry("fast", Record(name="fast", reason="needs a GPU")),
        entry("odd", Record(name="odd")),
        entry("plain", Record(name="plain")),
    )
    with caplog.at_level(logging.INFO, logger="moe_kernels"):
        chosen = found.first(["fast", "odd", "plain"], lambda record: "odd dtype" if record.name == "odd" else None)
    assert chosen.name == "plain"
    assert [record.getMessage() for record in caplog.records] == [
        "gadget: plain (not fast: needs a GPU; not odd: odd dtype)"
    ]
    with pytest.raises(PluginError, match="no gadget can run here: not fast: needs a GPU"):
        found.first(["fast"], lambda record: None)


def test_the_inventory_reports_what_fails_to_load(registry: Callable[..., Registry[Record]]) -> None:
    lines = registry(
        entry("plain", Record(name="plain")),
        entry("broken", ImportError("no cuda"), "theirs", "2.1"),
        entry("fast", Record(name="fast", reason="needs a GPU")),
    ).inventory()
    assert [(line.name, line.distribution, line.version) for line in lines] == [
        ("broken", "theirs", "2.1"),
        ("fast", "ours", "1.0"),
        ("plain", "ours", "1.0"),
    ]
    assert lines[0].reason is not None
    assert "no cuda" in lines[0].reason
    assert [line.reason for line in lines[1:]] == ["needs a GPU", None]
