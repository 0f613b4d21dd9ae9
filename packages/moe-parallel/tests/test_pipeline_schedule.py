"""Schedules are lists that can be printed, and checked before anything runs."""

import random

import pytest

from moe_parallel import MoeParallelError
from moe_parallel.pipeline.schedule import Action, Pass, check_schedule, one_by_one

F, B = Pass.FORWARD, Pass.BACKWARD


def parse(text):
    """`F0 B0 F1.1`: the inverse of printing."""
    actions = []
    for word in text.split():
        number, _, chunk = word[1:].partition(".")
        actions.append(Action(Pass(word[0]), int(number), int(chunk or 0)))
    return actions


def printed(actions):
    return " ".join(map(str, actions))


def test_one_by_one():
    assert printed(one_by_one(3)) == "F0 B0 F1 B1 F2 B2"
    assert one_by_one(0) == ()
    for number in range(5):
        check_schedule(one_by_one(number), 1)


@pytest.mark.parametrize(
    "text", ["F0 I0 W0 F1.1 I1.1 W1.1", "F0 F1 B0 F2 B1 B2", "F0 F0.1 B0.1 B0 F1.1 F1 B1 B1.1", "F12 B3.4"]
)
def test_printing_tells_actions_apart(text):
    assert printed(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("F0 F1 F2 B0 B1 B2", 1),
        ("F0 F1 B0 F2 B1 B2", 1),
        ("F1 F0 B0 B1", 1),
        ("F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", 2),
        ("F0 I0 W0 F1 I1 W1", 1),
        ("F0 I0 F1 I1 W1 W0", 1),
        ("F0 I0 F1 B1 W0", 1),
        ("", 1),
        ("", 0),
    ],
)
def test_schedules(text, chunks):
    check_schedule(parse(text), chunks)


@pytest.mark.parametrize(
    ("text", "chunks", "message"),
    [
        ("B0 F0", 1, "has B0 before its forward"),
        ("F0 B1 F1 B0", 1, "has B1 before its forward"),
        ("F0 B0.1 F0.1 B0", 2, "has B0.1 before its forward"),
        ("F0 F0 B0", 1, "has F0 twice"),
        ("F0 B0 B0", 1, "has B0 twice"),
        ("F0 B0 F0 B0", 1, "has F0 twice"),
        ("F0 F1 B0", 1, "lacks B1, and the number of microbatches is 2"),
        ("F0 B0 F2 B2", 1, "lacks F1, and the number of microbatches is 3"),
        ("F1 B1", 1, "lacks F0, and the number of microbatches is 2"),
        ("F0 B0", 2, "lacks F0.1, and the number of microbatches is 1"),
        ("F0 F0.1 B0.1 B0 F1 B1", 2, "lacks F1.1, and the number of microbatches is 2"),
        ("F0 B0 F0.1 B0.1", 1, "has F0.1, but the number of chunks is 1"),
        ("F0 B0", 0, "has F0, but the number of chunks is 0"),
        ("I0 F0 W0", 1, "has I0 before its forward"),
        ("F0 W0 I0", 1, "has W0 before the gradient of its input"),
        ("F0 I0 I0 W0", 1, "has I0 twice"),
        ("F0 I0 W0 W0", 1, "has W0 twice"),
        ("F0 I0 W0 F0", 1, "has F0 twice"),
        ("F0 B0 I0", 1, "has I0 besides another backward"),
        ("F0 B0 W0", 1, "has W0 besides another backward"),
        ("F0 I0 B0", 1, "has B0 besides another backward"),
        ("F0 I0 W0 B0", 1, "has B0 besides another backward"),
        ("F0 F1 I0 B1", 1, "lacks W0, and the number of microbatches is 2"),
        ("F0 F0.1 I0.1 W0.1", 2, "lacks B0, and the number of microbatches is 1"),
    ],
)
def test_what_is_no_schedule(text, chunks, message):
    with pytest.raises(MoeParallelError) as caught:
        check_schedule(parse(text), chunks)
    assert str(caught.value) == f"the schedule {message}"


@pytest.mark.parametrize("action", [Action(F, -1), Action(F, 0, -1)])
def test_numbers_below_zero(action):
    with pytest.raises(MoeParallelError, match=r"the schedule has F-1, but microbatches|the schedule has F0\.-1, but"):
        check_schedule([action], 1)


@pytest.mark.parametrize("text", ["F0 F0.1 F1 B0.1 F1.1 B0 B1.1 B1", "F0 F0.1 F1 I0.1 F1.1 W0.1 B0 B1.1 I1 W1"])
def test_every_list_that_lacks_an_action_or_swaps_two_passes_is_refused(text):
    actions = parse(text)
    check_schedule(actions, 2)
    for place in range(len(actions)):
        with pytest.raises(MoeParallelError):
            check_schedule(actions[:place] + actions[place + 1 :], 2)
        with pytest.raises(MoeParallelError):
            check_schedule([*actions[: place + 1], actions[place], *actions[place + 1 :]], 2)
    for _ in range(50):
        shuffled = random.sample(actions, len(actions))
        passes = {
            (n, c): [a.what for a in shuffled if (a.microbatch, a.chunk) == (n, c)] for n in (0, 1) for c in (0, 1)
        }
        if all(found in ([F, B], [F, Pass.INPUT, Pass.WEIGHT]) for found in passes.values()):
            check_schedule(shuffled, 2)
        else:
            with pytest.raises(MoeParallelError, match=r"before its forward|before the gradient"):
                check_schedule(shuffled, 2)
