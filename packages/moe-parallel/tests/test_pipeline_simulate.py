"""Simulated schedules take as long, and hold as much, as the closed formulas say."""

import random
from itertools import pairwise

import pytest

from moe_parallel import MoeParallelError
from moe_parallel.__main__ import main
from moe_parallel.pipeline.formulas import bubble_formula
from moe_parallel.pipeline.placement import Placement
from moe_parallel.pipeline.schedule import Pass, one_by_one
from moe_parallel.pipeline.schedules.table import SCHEDULES
from moe_parallel.pipeline.simulate import Durations, simulate


def simulated(name, pp, microbatches, vpp=1, durations=None):
    schedule = SCHEDULES[name]
    ranks = schedule.ranks(pp=pp, num_microbatches=microbatches, vpp=vpp)
    return simulate(ranks, schedule.places(pp=pp, vpp=vpp), durations)


def random_durations():
    forward, gradient = random.uniform(0.5, 3), random.uniform(0.5, 3)
    return Durations(forward=forward, input=gradient, weight=random.uniform(0.1, min(forward, gradient)))


@pytest.mark.parametrize(
    ("name", "vpp"), [(name, vpp) for name in SCHEDULES for vpp in (1, 2, 3) if SCHEDULES[name].takes(vpp)]
)
def test_the_bubble_is_that_of_the_formula(name, vpp):
    compared = 0
    for pp in range(1, 8):
        for microbatches in {pp, 2 * pp - 1, *random.sample(range(1, 24), 4)}:
            times = random.uniform(0.5, 3)
            for durations in (random_durations(), Durations(forward=times, input=times, weight=times)):
                numbers = {"pp": pp, "num_microbatches": microbatches, "vpp": vpp, "durations": durations}
                formula = bubble_formula(name, **numbers)
                if formula is not None:
                    found = simulated(name, pp, microbatches, vpp, durations)
                    assert found.bubble == pytest.approx(formula, abs=1e-9)
                    compared += 1
    assert compared >= 14


def test_published_formulas():
    for p, m, v in ((4, 8, 1), (8, 64, 2), (2, 6, 3)):
        for name in ("gpipe", "interleaved") + (("one_f_one_b",) if v == 1 else ()):
            formula = bubble_formula(name, pp=p, num_microbatches=m, vpp=v)
            assert formula == pytest.approx((p - 1) / (m * v + p - 1))
    # arXiv 2401.10241, table 2: idle (p - 1) (F + I - W), a third of 1F1B's where all take equally long.
    durations = Durations(forward=2, input=3, weight=1)
    assert bubble_formula("zero_bubble", pp=4, num_microbatches=8, durations=durations) == pytest.approx(12 / (12 + 48))
    idle = {name: bubble_formula(name, pp=4, num_microbatches=8) for name in ("zero_bubble", "one_f_one_b")}
    assert idle["zero_bubble"] / (1 - idle["zero_bubble"]) * 3 == pytest.approx(
        idle["one_f_one_b"] / (1 - idle["one_f_one_b"])
    )


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("zero_bubble", {"num_microbatches": 3}),
        ("zero_bubble_v", {"num_microbatches": 6, "vpp": 2}),
        ("zero_bubble_v", {"durations": Durations(input=1.1), "vpp": 2}),
        ("one_f_one_b", {"durations": Durations(message=0.1)}),
    ],
)
def test_where_no_formula_holds_the_bubble_is_larger(name, numbers):
    given = {"pp": 4, "num_microbatches": 8} | numbers
    assert bubble_formula(name, **given) is None
    easier = given | {"durations": Durations(), "num_microbatches": 8}
    found = simulated(name, 4, given["num_microbatches"], given.get("vpp", 1), given.get("durations"))
    assert found.bubble > bubble_formula(name, **easier)


def test_where_weights_take_longest_zb_h1_waits_longer_than_its_formula_says():
    durations = Durations(weight=1.5)
    assert bubble_formula("zero_bubble", pp=4, num_microbatches=8, durations=durations) is None
    found = simulated("zero_bubble", 4, 8, 1, durations)
    assert found.span - found.busy[0] > 3 * (1 + 1 - 1.5)


def test_a_rank_of_zb_v_does_not_wait_inside_its_work():
    for pp in range(1, 7):
        found = simulated("zero_bubble_v", pp, 2 * pp + 3, 2)
        assert found.inner_bubble == pytest.approx(0, abs=1e-12)
        assert found.span == 6 * (2 * pp + 3) + pp - 1


@pytest.mark.parametrize("pp", [1, 3, 6])
def test_what_ranks_hold(pp):
    many = 4 * pp
    assert simulated("gpipe", pp, many).held == (many,) * pp
    assert simulated("one_f_one_b", pp, many).held == tuple(pp - rank for rank in range(pp))
    assert simulated("one_f_one_b", pp, 2).held == tuple(min(2, pp - rank) for rank in range(pp))
    assert simulated("zero_bubble", pp, many).held == (pp,) * pp
    assert simulated("zero_bubble_v", pp, many, 2).held == (2 * pp,) * pp
    interleaved = simulated("interleaved", pp, many, 3).held
    assert interleaved == tuple(2 * pp + 2 * (pp - 1 - rank) + 1 for rank in range(pp))


def test_times_of_every_action():
    durations = Durations(forward=2, backward=3, message=0.5)
    found = simulated("one_f_one_b", 2, 2, durations=durations)
    times = [[(str(timed.action), timed.start, timed.end) for timed in actions] for actions in found.ranks]
    assert times == [
        [("F0", 0, 2), ("F1", 2, 4), ("B0", 8, 11), ("B1", 13, 16)],
        [("F0", 2.5, 4.5), ("B0", 4.5, 7.5), ("F1", 7.5, 9.5), ("B1", 9.5, 12.5)],
    ]
    assert found.span == 16
    assert found.busy == (10, 10)
    assert found.bubble == pytest.approx(12 / 32)
    assert found.inner_bubble == pytest.approx(6 / 16)


def test_nothing_goes_between_stages_of_one_rank():
    durations = Durations(message=100)
    assert simulated("gpipe", 1, 3, 2, durations).bubble == 0
    assert simulated("zero_bubble_v", 1, 3, 2, durations).bubble == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_does_two_things_at_once_and_nothing_begins_before_what_it_needs(name):
    schedule = SCHEDULES[name]
    vpp, durations = 2 if schedule.takes(2) else 1, Durations(forward=1.3, input=0.7, weight=1.9, message=0.25)
    places = schedule.places(pp=3, vpp=vpp)
    found = simulated(name, 3, 7, vpp, durations)
    forward, gradient = {}, {}
    for rank, actions in enumerate(found.ranks):
        assert all(before.end <= behind.start for before, behind in pairwise(actions))
        for timed in actions:
            assert timed.end - timed.start == pytest.approx(durations.of(timed.action.what))
            key = places.stage_of(rank, timed.action.chunk), timed.action.microbatch
            if timed.action.what is Pass.FORWARD:
                forward[key] = timed
            elif timed.action.what is not Pass.WEIGHT:
                gradient[key] = timed
    for stage, number in forward:
        travel = durations.message if stage and places.rank_of(stage) != places.rank_of(stage - 1) else 0
        if stage:
            assert forward[stage, number].start >= forward[stage - 1, number].end + travel
            assert gradient[stage - 1, number].start >= gradient[stage, number].end + travel
        assert gradient[stage, number].start >= forward[stage, number].end


def test_the_timeline():
    assert simulated("one_f_one_b", 2, 3).timeline().splitlines() == [
        "rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        "rank 1  .  F0 B0 -- F1 B1 -- F2 B2 --",
    ]
    thirds = Durations(forward=1 / 3, input=1 / 3, weight=1 / 3)
    assert simulated("one_f_one_b", 2, 3, durations=thirds).timeline() == simulated("one_f_one_b", 2, 3).timeline()
    lines = simulated("interleaved", 12, 12, 2).timeline().splitlines()
    assert {line[:9] for line in lines} == {f"rank {rank:<2}  " for rank in range(12)}
    # Every pass is shown, whatever the durations are.
    found = simulated("zero_bubble_v", 3, 7, 2, random_durations())
    for line, actions in zip(found.timeline().splitlines(), found.ranks, strict=True):
        assert [word for word in line.split()[2:] if word[0] in "FIW"] == [str(timed.action) for timed in actions]


def test_a_step_without_microbatches_takes_no_time():
    found = simulate([one_by_one(0)], Placement(pp=1))
    assert (found.span, found.bubble, found.inner_bubble, found.held, found.timeline()) == (0, 0, 0, (0,), "")


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 0])
@pytest.mark.parametrize("what", ["forward", "input", "weight", "backward", "message"])
def test_durations_are_checked(what, value):
    if what == "message" and value == 0:
        assert Durations(message=0).message == 0
        return
    with pytest.raises(MoeParallelError, match=f"^the duration {what} is {value}; legal here: a number "):
        Durations(**{what: value})


def test_a_large_pipeline():
    found = simulated("zero_bubble", 64, 128)
    assert found.bubble == pytest.approx(bubble_formula("zero_bubble", pp=64, num_microbatches=128))


# The command


EXAMPLE = """\
one_f_one_b: 4 ranks, 4 microbatches, 1 chunk of a rank
rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 -- .  B1 -- .  B2 -- .  B3 --
rank 1  .  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
rank 2  .  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
rank 3  .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --

time     21, of which a rank works 12
bubble   0.4286 of the time (formula 0.4286); inside a rank's work 0.4286
held     4, 3, 2, 1 activations at most, by rank, each of one microbatch in one chunk
"""


def run(capsys, *arguments):
    status = main(["schedule", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_prints_a_timeline(capsys):
    assert run(capsys, "--schedule", "one_f_one_b", "--pp", "4", "--microbatches", "4") == (0, EXAMPLE, "")
    status, out, _ = run(capsys, "--schedule", "interleaved", "--pp", "2", "--microbatches", "2", "--vpp", "2")
    assert status == 0
    assert out.splitlines()[1] == ("rank 0  F0   F1   F0.1 F1.1 .    .    B0.1 ---- .    B1.1 ---- B0   ---- B1   ----")
    status, out, _ = run(
        capsys, "--schedule", "zero_bubble", "--pp", "2", "--microbatches", "2", "--weight", "2", "--message", "1"
    )
    assert status == 0
    assert "no formula for these numbers" in out


def test_a_long_row_of_ranks_is_cut(capsys):
    _, out, _ = run(capsys, "--schedule", "gpipe", "--pp", "20", "--microbatches", "3")
    assert "held     3, 3, 3, 3, 3, 3, 3, 3, ... 3 activations" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "x", "--pp", "2", "--microbatches", "2"), "parallel.schedule = 'x': "),
        (("--schedule", "gpipe", "--pp", "0", "--microbatches", "2"), "parallel.pp = 0: "),
        (("--schedule", "gpipe", "--pp", "2", "--microbatches", "2", "--weight", "0"), "the duration weight is 0.0; "),
    ],
)
def test_what_cannot_be_shown_is_said_with_status_2(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(message)
