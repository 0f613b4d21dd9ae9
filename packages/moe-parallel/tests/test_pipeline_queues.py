"""Messages on NCCL, where a group is one queue for every two ranks: what comes later in it waits for what came before.

So a rank that waits with a send for its receive must not hold up what its peer waits for. Nor must the first message of
a queue, which makes a connection: there the program of each of the two ranks waits for that of the other.
"""

from collections import Counter

import pytest
import torch

from moe_parallel import Pending
from moe_parallel.pipeline import messages as messages_module
from moe_parallel.pipeline.messages import Messages
from moe_parallel.pipeline.runtime import run_actions, run_forward
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
    """Makes something of the size that everybody knows; how large a gradient is it knows by its output."""

    def __init__(self):
        self._begun = set()

    def blank(self, microbatch, gradient):
        return torch.zeros(1) if not gradient or microbatch in self._begun else None

    def forward(self, microbatch, x):
        self._begun.add(microbatch)
        return torch.zeros(1)

    def backward(self, microbatch, gradient, report):
        self._begun.remove(microbatch)
        return torch.zeros(1)

    backward_input = backward

    def backward_weight(self, microbatch, report):
        pass


def program(monkeypatch, name, pp, vpp, rank, groups, microbatches, *, connects=True):
    """What a rank does with messages until a step is over, or a forward alone where there are no microbatches: `send`
    and `receive` with group and peer, and `wait` with the place of what it waits for."""
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
    if connects:
        messages.connect(torch.device("cpu"))
    chunks = [Chunk() for _ in range(vpp)]
    if microbatches:
        run_actions(schedule.order(pp, rank, microbatches, vpp), chunks, lambda names, *, last: None, messages)
    else:
        run_forward(chunks, messages)
    return events


def under_way(rank, events, done, connections):
    """The first in each queue that is not done, as far as the program has come: to a wait that is not over, or to a
    message without a connection, which is the other result."""
    found = {}
    for place, (what, *queue) in enumerate(events):
        if what == "wait":
            if queue[0] not in done:
                return found, None
            continue
        group, peer = queue
        connection = group, frozenset((rank, peer))
        if connection not in connections:
            return found, connection
        if place not in done:
            found.setdefault((group, peer), (what, place))
    return found, None


def left_over(programs):
    """Messages that never arrive."""
    done, connections = [set() for _ in programs], set()
    while True:
        states = [
            under_way(rank, events, ended, connections)
            for rank, (events, ended) in enumerate(zip(programs, done, strict=True))
        ]
        now, wanted = [queues for queues, _ in states], Counter(connection for _, connection in states if connection)
        connected = {connection for connection, ranks in wanted.items() if ranks == 2}
        arrived = [
            (rank, place, peer, now[peer][group, rank][1])
            for rank, queues in enumerate(now)
            for (group, peer), (what, place) in queues.items()
            if what == "send" and now[peer].get((group, rank), ("", 0))[0] == "receive"
        ]
        if not arrived and not connected:
            posted = sum(what != "wait" for events in programs for what, *_ in events)
            return (posted - sum(map(len, done))) // 2
        connections |= connected
        for rank, place, peer, there in arrived:
            done[rank].add(place)
            done[peer].add(there)


@pytest.mark.parametrize(("name", "pp", "vpp"), CASES)
def test_every_message_arrives(name, pp, vpp, monkeypatch):
    for microbatches in (0, 1, pp, 2 * pp + 1):
        programs = [program(monkeypatch, name, pp, vpp, rank, ONE_EACH, microbatches) for rank in range(pp)]
        assert any(what == "send" for events in programs for what, *_ in events)
        assert left_over(programs) == 0


@pytest.mark.parametrize(("name", "pp"), [("interleaved", 2), ("zero_bubble_v", 4)])
def test_it_takes_a_group_for_each_direction(name, pp, monkeypatch):
    two = {"there": "pp", "back": "pp_back"}
    assert left_over([program(monkeypatch, name, pp, 2, rank, two, 2 * pp) for rank in range(pp)]) > 0


@pytest.mark.parametrize(
    ("name", "vpp", "microbatches"), [("gpipe", 1, 2), ("interleaved", 2, 3), ("zero_bubble_v", 2, 3)]
)
def test_it_takes_connections_beforehand(name, vpp, microbatches, monkeypatch):
    programs = [program(monkeypatch, name, 3, vpp, rank, ONE_EACH, microbatches, connects=False) for rank in range(3)]
    assert left_over(programs) > 0
