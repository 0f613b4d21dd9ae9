"""Finding, choosing and building dispatchers."""

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_comm import (
    DISPATCHERS,
    AllGatherConfig,
    AllToAllConfig,
    HybridConfig,
    LocalConfig,
    MoeCommError,
    build_dispatcher,
)
from moe_comm.local import LocalDispatcher
from moe_comm.two_level import TwoLevelDispatcher
from moe_kernels import PluginError
from moe_parallel import AxisGroups
from moe_parallel.testing import run_threads

install_acme = runpy.run_path(str(Path(__file__).parent / "third_party" / "install.py"))["install_acme"]


@dataclass(frozen=True, kw_only=True)
class OtherConfig:
    kind: str


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LocalConfig(), LocalDispatcher),
        (AllToAllConfig(), TwoLevelDispatcher),
        (AllGatherConfig(), TwoLevelDispatcher),
        (HybridConfig(), TwoLevelDispatcher),
    ],
    ids=["local", "alltoall", "allgather", "hybrid"],
)
def test_the_built_in_dispatchers_are_entry_points_like_any_other(config, kind):
    assert config.kind in DISPATCHERS.names()
    dispatcher = build_dispatcher(config, AxisGroups(), 4)
    assert isinstance(dispatcher, kind)
    assert dispatcher.num_experts == 4


def test_a_third_party_dispatcher_is_found_and_chosen(tmp_path, monkeypatch):
    assert "acme-allgather" not in DISPATCHERS.names()
    install_acme(tmp_path, monkeypatch)
    assert {"acme-allgather", "allgather", "alltoall", "auto", "hybrid", "local"} <= set(DISPATCHERS.names())
    plugin = DISPATCHERS.get("acme-allgather")

    def on_rank(rank, groups):
        return build_dispatcher(plugin.config(), groups, 6)

    dispatchers = run_threads(2, on_rank)
    assert [type(dispatcher).__name__ for dispatcher in dispatchers] == ["AcmeDispatcher", "AcmeDispatcher"]
    assert [dispatcher.rank for dispatcher in dispatchers] == [0, 1]
    lines = {line.name: line for line in DISPATCHERS.inventory()}
    assert (lines["acme-allgather"].distribution, lines["acme-allgather"].version) == ("acme-dispatch", "0.1.0")
    assert lines["acme-allgather"].reason is None
    assert lines["local"].distribution == "moe-stack-comm"


def test_only_the_chosen_plugin_is_loaded(tmp_path, monkeypatch):
    install_acme(tmp_path, monkeypatch)
    monkeypatch.delitem(sys.modules, "acme_dispatch", raising=False)
    build_dispatcher(LocalConfig(), AxisGroups(), 2)
    assert "acme_dispatch" not in sys.modules


def test_an_installation_ends_with_its_test(tmp_path):
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_acme(tmp_path, monkeypatch)
        assert "acme-allgather" in DISPATCHERS.names()
    assert "acme-allgather" not in DISPATCHERS.names()


def test_an_unknown_dispatcher_lists_what_is_installed(tmp_path, monkeypatch):
    install_acme(tmp_path, monkeypatch)
    with pytest.raises(
        PluginError,
        match=r"unknown dispatcher 'locl'; installed here: acme-allgather, .*local.*; did you mean 'local'",
    ):
        build_dispatcher(OtherConfig(kind="locl"), AxisGroups(), 4)


def test_two_distributions_with_one_name_are_an_error(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    install_acme(first, monkeypatch)
    install_acme(second, monkeypatch, distribution="acme-copy")
    with pytest.raises(PluginError, match=r"claimed by acme-copy 0\.1\.0 and by acme-dispatch 0\.1\.0"):
        DISPATCHERS.get("acme-allgather")


def test_options_of_another_dispatcher_are_refused():
    with pytest.raises(MoeCommError, match="'local' is configured by LocalConfig, not by OtherConfig"):
        build_dispatcher(OtherConfig(kind="local"), AxisGroups(), 4)


def test_experts_that_do_not_divide_are_refused(tmp_path, monkeypatch):
    install_acme(tmp_path, monkeypatch)
    config = DISPATCHERS.get("acme-allgather").config()

    def on_rank(rank, groups):
        with pytest.raises(MoeCommError, match="4 experts cannot be spread evenly over ep = 3 ranks"):
            build_dispatcher(config, groups, 4)

    run_threads(3, on_rank)
    with pytest.raises(MoeCommError, match="0 experts"):
        build_dispatcher(config, AxisGroups(), 0)


def test_the_largest_number_of_ranks_is_respected(tmp_path, monkeypatch):
    install_acme(tmp_path, monkeypatch)
    config = DISPATCHERS.get("acme-allgather").config()

    def on_rank(rank, groups):
        with pytest.raises(MoeCommError, match="serves ep up to 8, but ep = 9"):
            build_dispatcher(config, groups, 9)

    run_threads(9, on_rank)


def test_a_plugin_that_does_not_speak_of_split_experts_is_refused_for_them(tmp_path, monkeypatch):
    """It was written before there were any; without the refusal every rank would answer with a part of the sum."""
    install_acme(tmp_path, monkeypatch)
    config = DISPATCHERS.get("acme-allgather").config()

    def on_rank(rank, groups):
        words = r"serves etp up to 1, but etp = 2; .*comm\.kind.*parallel\.etp"
        with pytest.raises(MoeCommError, match=words):
            build_dispatcher(config, AxisGroups({"etp": groups.group("world")}), 4)

    run_threads(2, on_rank)
