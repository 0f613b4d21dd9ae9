"""Which CUDA device a rank takes, and which groups its messages go through, without a device."""

import sys
from types import SimpleNamespace

import pytest
import torch

from moe_parallel.pipeline.order import Output
from moe_parallel.pipeline.placement import Placement
from moe_train.assemble import assemble, choose_device
from moe_train.chunks import messages_of
from moe_train.errors import MoeTrainError
from moe_train.testing import small_config


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
    stages = SimpleNamespace(places=Placement(kind="v", pp=2, vpp=2))  # on ranks 0, 1, 1, 0
    messages = messages_of(SimpleNamespace(groups=groups, stages=stages))
    outputs = [Output(gradient, 0, stage) for gradient, stage in ((False, 0), (False, 2), (True, 1), (True, 3))]
    assert [messages._group(output) for output in outputs] == ["pp", "pp_down", "pp_back", "pp_back_up"]
