"""Messages on NCCL, where a group is one queue for every two ranks: what comes later in it waits for what came before.

So a rank that waits with a send for its receive must not hold up what its peer waits for.
"""

import pytest
import torch

from moe_parallel import Pending
from moe_parallel.pipeline import messages as messages_module
from moe_parallel.pipeline.messages import Messages
from moe_parallel.pipeline.runtime import run_actions
from moe_parallel.pipeline.schedules.table import SCHEDULES

ONE_EACH = {"there": "pp", "back": "pp_back", "there_down": "pp_down", "back_up": "pp_back_up"}
CASES = [
    (name, pp, vpp)
    for name, schedule in SCHEDULES.items()
    for pp in (2, 3, 4)
    for vpp in (1, 2, 3)
    if schedule.takes(vpp)
]


class Chunk:
    """Makes something of the size that everybody knows."""

    def blank(self, microbatch, gradient):
        return torch.zeros(1)

    def forward(self, microbatch, x):
        return torch.zeros(1)

    def backward(self, microbatch, gradient, report):
        return torch.zeros(1)

    def backward_input(self, microbatch, gradient, report):
        return torch.zeros(1)

    def backward_weight(self, microbatch, report):
        pass


def program(monkeypatch, name, pp, vpp, rank, groups):
    """What a rank does with messages in a step of 2 * pp microbatches: `send` and `receive` with group and peer, and
    `wait` with the place of what it waits for."""
    events = []

    def send(x, group, to):
        events.append(("send", group, to))
        return Pending.completed(x)

    def receive(out, group, source):
        place = len(events)
        events.append(("receive", group, source))

        def came(value):
            events.append(("wait", place))
            return value

        return Pending(out, finish=came)

    monkeypatch.setattr(messages_module, "send", send)
    monkeypatch.setattr(messages_module, "receive", receive)
    schedule = SCHEDULES[name]
    messages = Messages(schedule.places(pp=pp, vpp=vpp), rank, **groups)
    run_actions(
        schedule.order(pp, rank, 2 * pp, vpp), [Chunk() for _ in range(vpp)], lambda names, *, last: None, messages
    )
    return events


def heads(events, done):
    """What may be under way: the first in each queue that is not done, up to the first wait that is not over."""
    found = {}
    for place, (what, *queue) in enumerate(events):
        if what == "wait":
            if queue[0] not in done:
                return found
        elif place not in done:
            found.setdefault(tuple(queue), (what, place))
    return found


def left_over(programs):
    """Messages that never arrive."""
    done = [set() for _ in programs]
    while True:
        now = [heads(events, ended) for events, ended in zip(programs, done, strict=True)]
        arrived = [
            (rank, place, peer, now[peer][group, rank][1])
            for rank, queues in enumerate(now)
            for (group, peer), (what, place) in queues.items()
            if what == "send" and now[peer].get((group, rank), ("", 0))[0] == "receive"
        ]
        if not arrived:
            posted = sum(what != "wait" for events in programs for what, *_ in events)
            return (posted - sum(map(len, done))) // 2
        for rank, place, peer, there in arrived:
            done[rank].add(place)
            done[peer].add(there)


@pytest.mark.parametrize(("name", "pp", "vpp"), CASES)
def test_every_message_arrives(name, pp, vpp, monkeypatch):
    programs = [program(monkeypatch, name, pp, vpp, rank, ONE_EACH) for rank in range(pp)]
    assert any(what == "send" for events in programs for what, *_ in events)
    assert left_over(programs) == 0


@pytest.mark.parametrize(("name", "pp"), [("interleaved", 2), ("zero_bubble_v", 4)])
def test_it_takes_a_group_for_each_direction(name, pp, monkeypatch):
    two = {"there": "pp", "back": "pp_back"}
    assert left_over([program(monkeypatch, name, pp, 2, rank, two) for rank in range(pp)]) > 0
