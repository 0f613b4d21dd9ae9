"""Which CUDA device a rank takes, and which groups its messages go through, without a device."""

import sys
from types import SimpleNamespace

import pytest
import torch

from moe_parallel import ParallelLayout, run_distributed
from moe_parallel.pipeline import messages as messages_module
from moe_parallel.pipeline.order import Output
from moe_parallel.pipeline.placement import Placement
from moe_train.assemble import assemble, choose_device, stage_messages
from moe_train.config.checks import mesh_of
from moe_train.config.load import load_config
from moe_train.errors import MoeTrainError
from moe_train.testing import SMALL, short_corpus, small_config


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_rank_of_a_machine_takes_the_device_of_its_number_or_says_that_there_is_none(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for variable, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(variable, value)
    assert choose_device(name) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(MoeTrainError, match=r"LOCAL_RANK = 2, and this process sees 2 CUDA devices"):
        choose_device(name)


def test_a_training_makes_its_device_the_current_one(monkeypatch):
    class CurrentError(Exception):
        pass

    def set_device(device):
        raise CurrentError(device)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(sys.modules["moe_train.assemble"], "choose_device", lambda name: torch.device("cuda", 1))
    with pytest.raises(CurrentError) as caught:
        assemble(small_config())
    assert caught.value.args == (torch.device("cuda", 1),)


def test_messages_of_each_kind_and_direction_go_through_a_group_of_their_own():
    groups = SimpleNamespace(rank=lambda axis: 0, group=lambda axis: axis)
    messages = stage_messages(groups, Placement(kind="v", pp=2, vpp=2))  # on ranks 0, 1, 1, 0
    outputs = [Output(gradient, 0, stage) for gradient, stage in ((False, 0), (False, 2), (True, 1), (True, 3))]
    assert [messages._group(output) for output in outputs] == ["pp", "pp_down", "pp_back", "pp_back_up"]


@pytest.mark.dist
def test_neighbours_are_connected_before_the_first_step(monkeypatch):
    """Or NCCL would do it in the middle of one, where two ranks wait for each other."""
    sent, send = [], messages_module.send

    def seen(x, group, to):
        sent.append((group.group_desc, to, x.numel()))
        return send(x, group, to)

    monkeypatch.setattr(messages_module, "send", seen)
    layout = ParallelLayout(world=2, pp=2)
    config = load_config(
        "tiny_moe", [], [*SMALL, "parallel.pp=2", "parallel.vpp=2", "parallel.pipeline=Et|t||L"], world=2
    ).config

    def on_rank(mesh):
        assemble(config, mesh)
        return sent

    with short_corpus():
        found = run_distributed(layout, on_rank, timeout_s=20, **mesh_of(config, layout))
    assert found == [
        [("pp", 1, 1), ("pp_back_up", 1, 1), ("pp", 1, 1)],
        [("pp_back", 0, 1), ("pp_down", 0, 1), ("pp_back", 0, 1)],
    ]
