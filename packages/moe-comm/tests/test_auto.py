"""`auto` takes the best dispatcher that can serve the layout and says why."""

import logging

import pytest

from moe_comm.alltoall import AllToAllDispatcher
from moe_comm.config import AutoConfig, LocalConfig
from moe_comm.errors import MoeCommError
from moe_comm.local import LocalDispatcher
from moe_comm.registry import build_dispatcher
from moe_parallel import AxisGroups
from moe_parallel.testing import run_threads


def test_one_rank_gets_the_local_dispatcher(caplog):
    with caplog.at_level(logging.INFO, "moe_comm"):
        assert isinstance(build_dispatcher(AutoConfig(), AxisGroups(), 6), LocalDispatcher)
    assert caplog.messages == ["dispatcher: local"]


def test_several_ranks_get_the_all_to_all_and_the_log_says_why(caplog):
    with caplog.at_level(logging.INFO, "moe_comm"):
        found = run_threads(3, lambda rank, groups: build_dispatcher(AutoConfig(), groups, 6))
    assert all(isinstance(dispatcher, AllToAllDispatcher) for dispatcher in found)
    assert len(caplog.messages) == 3
    assert caplog.messages[0].startswith(
        "dispatcher: alltoall, because dispatcher 'local' keeps all experts whole on one rank, but ep = 3"
    )


def test_split_experts_get_the_all_to_all(caplog):
    def on_rank(rank, groups):
        return build_dispatcher(AutoConfig(), AxisGroups({"etp": groups.group("world")}), 6)

    with caplog.at_level(logging.INFO, "moe_comm"):
        found = run_threads(2, on_rank)
    assert all(isinstance(dispatcher, AllToAllDispatcher) for dispatcher in found)
    assert "'local' keeps all experts whole on one rank, but etp = 2" in caplog.messages[0]


def test_a_layout_that_none_can_serve_says_why_of_each(monkeypatch):
    monkeypatch.setattr("moe_comm.auto._ORDER", (LocalConfig(), LocalConfig()))

    def on_rank(rank, groups):
        with pytest.raises(MoeCommError, match=r"no dispatcher can serve this layout: .*'local'.*ep = 2.*; .*'local'"):
            build_dispatcher(AutoConfig(), groups, 6)

    run_threads(2, on_rank)
