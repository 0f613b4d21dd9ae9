"""Schedules of all ranks: the order of torch's, no rank waits for ever, and messages keep their order."""

import random

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from moe_parallel import MoeParallelError
from moe_parallel.pipeline.order import check_ranks, messages, walk
from moe_parallel.pipeline.placement import Placement
from moe_parallel.pipeline.schedule import Action, Pass, one_by_one
from moe_parallel.pipeline.schedules.interleaved import rounds
from moe_parallel.pipeline.schedules.table import SCHEDULES, schedule_named

CHUNKS = [(name, vpp) for name, schedule in SCHEDULES.items() for vpp in (1, 2, 3) if schedule.takes(vpp)]


def made(name, pp, microbatches, vpp=1):
    """The lists of all ranks as text."""
    ranks = SCHEDULES[name].ranks(pp=pp, num_microbatches=microbatches, vpp=vpp)
    return [" ".join(map(str, actions)) for actions in ranks]


def parse(*texts):
    ranks = []
    for text in texts:
        words = [(word[0], *word[1:].partition(".")[::2]) for word in text.split()]
        ranks.append([Action(Pass(what), int(number), int(chunk or 0)) for what, number, chunk in words])
    return ranks


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "vpp", "ranks"),
    [
        ("gpipe", 2, 3, 1, ["F0 F1 F2 B0 B1 B2"] * 2),
        ("gpipe", 1, 2, 2, ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"]),
        ("one_f_one_b", 3, 4, 1, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("one_f_one_b", 3, 1, 1, ["F0 B0"] * 3),
        (
            "interleaved",
            2,
            2,
            2,
            ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"],
        ),
        ("zero_bubble", 2, 3, 1, ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]),
        (
            "zero_bubble_v",
            2,
            3,
            2,
            [
                "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0 W0 F2.1 I2.1 W2.1 I1 W1 I2 W2",
                "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 I1 I2.1 I2 W1 W2.1 W2",
            ],
        ),
    ],
)
def test_schedules_that_can_be_checked_by_eye(name, pp, microbatches, vpp, ranks):
    assert made(name, pp, microbatches, vpp) == ranks


# torch's own schedules, made without processes: their lists need a few numbers of the object only.

ORACLES = {
    "gpipe": ("ScheduleGPipe", 1),
    "one_f_one_b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 3),
    "zero_bubble": ("ScheduleInterleavedZeroBubble", 1),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", 3),
    "zero_bubble_v": ("ScheduleZBVZeroBubble", 2),
}


def by_torch(name, pp, microbatches, vpp):
    kind = getattr(torch_schedules, ORACLES[name][0])
    schedule = object.__new__(kind)
    count = max(1, microbatches // pp)
    numbers = {
        "pp_group_size": pp,
        "n_local_stages": vpp,
        "_n_microbatches": microbatches,
        "_num_stages": pp * vpp,
        "num_stages": pp * vpp,
        "number_of_rounds": count,
        "microbatches_per_round": microbatches // count,
    }
    for attribute, value in numbers.items():
        setattr(schedule, attribute, value)
    if vpp == 1 and name in ("gpipe", "one_f_one_b"):
        order = schedule._get_pipeline_order()
        lists = [order[rank] for rank in range(pp)]
    else:
        lists = [schedule._calculate_single_rank_operations(rank) for rank in range(pp)]
    places = SCHEDULES[name].places(pp=pp, vpp=vpp)
    texts = []
    for rank, actions in enumerate(lists):
        computed = [action for action in actions if action is not None and action.is_compute_op]
        assert all(places.rank_of(action.stage_index) == rank for action in computed)
        texts.append(
            " ".join(
                str(
                    Action(
                        Pass(action.computation_type.value),
                        action.microbatch_index,
                        places.chunk_of(action.stage_index),
                    )
                )
                for action in computed
            )
        )
    return texts


@pytest.mark.parametrize("name", ORACLES)
def test_the_order_is_that_of_torch(name):
    compared = 0
    for pp in range(1, 7):
        for vpp in range(1, ORACLES[name][1] + 1):
            if not SCHEDULES[name].takes(vpp) or (name == "interleaved" and vpp == 1):
                continue
            for microbatches in range(1, 17):
                # torch refuses the others.
                if microbatches % max(1, microbatches // pp) or (name == "one_f_one_b" and microbatches < pp):
                    continue
                ours, theirs = made(name, pp, microbatches, vpp), by_torch(name, pp, microbatches, vpp)
                if name == "one_f_one_b":
                    # The list that torch 2.13 prints for the last rank has its forwards numbered from 1.
                    assert ours.pop() == " ".join(map(str, one_by_one(microbatches)))
                    theirs.pop()
                assert ours == theirs
                compared += 1
    assert compared >= 60


def test_interleaved_with_one_chunk_is_1f1b():
    for pp in (1, 2, 5):
        for microbatches in (1, 4, 7):
            assert made("interleaved", pp, microbatches) == made("one_f_one_b", pp, microbatches)


@pytest.mark.parametrize(("name", "vpp"), CHUNKS)
def test_any_number_of_microbatches_works_on_any_number_of_ranks(name, vpp):
    schedule = SCHEDULES[name]
    for pp in range(1, 9):
        for microbatches in {1, pp, *random.sample(range(1, 17), 4)}:
            ranks = schedule.ranks(pp=pp, num_microbatches=microbatches, vpp=vpp)
            check_ranks(ranks, schedule.places(pp=pp, vpp=vpp))
            passes = 3 if schedule.splits_backward else 2
            assert [len(actions) for actions in ranks] == [passes * microbatches * vpp] * pp


@pytest.mark.parametrize(("name", "vpp"), CHUNKS)
def test_outputs_and_gradients_cross_between_ranks_in_the_order_in_which_they_are_needed(name, vpp):
    schedule = SCHEDULES[name]
    for pp, microbatches in ((2, 5), (4, 8), (4, 11)):
        places = schedule.places(pp=pp, vpp=vpp)
        sent, received = messages(schedule.ranks(pp=pp, num_microbatches=microbatches, vpp=vpp), places)
        assert sent == received
        crossing = sum(places.rank_of(stage) != places.rank_of(stage + 1) for stage in range(places.num_stages - 1))
        assert sum(map(len, sent.values())) == 2 * microbatches * crossing


def test_a_round_is_as_long_as_the_pipeline_or_up_to_twice_as_long():
    assert [list(map(len, rounds(4, number))) for number in (3, 4, 7, 8, 10, 15)] == [
        [3], [4], [7], [4, 4], [5, 5], [5, 5, 5],
    ]  # fmt: skip
    for pp in range(1, 9):
        for number in range(1, 40):
            assert [one for together in rounds(pp, number) for one in together] == list(range(number))
            if number >= pp:
                assert all(pp <= len(together) < 2 * pp for together in rounds(pp, number))


@pytest.mark.parametrize("kind", ["loop", "v"])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (1, 3), (4, 1), (4, 2), (3, 3)])
def test_placements(kind, pp, vpp):
    places = Placement(kind=kind, pp=pp, vpp=vpp)
    for stage in range(places.num_stages):
        assert places.stage_of(places.rank_of(stage), places.chunk_of(stage)) == stage
        if kind == "loop":
            assert (places.rank_of(stage), places.chunk_of(stage)) == (stage % pp, stage // pp)
        elif stage:
            assert abs(places.rank_of(stage) - places.rank_of(stage - 1)) <= 1
    if kind == "v" and vpp == 2:
        assert [places.stage_of(rank, 1) for rank in range(pp)] == [2 * pp - 1 - rank for rank in range(pp)]


# What is refused


def test_numbers_that_fit_no_schedule():
    for numbers, message in [
        (
            {"pp": 0, "num_microbatches": 0},
            "parallel.pp = 0: the number of pipeline ranks is an integer of at least 1\n",
        ),
        ({"pp": 2, "num_microbatches": 0}, "num_microbatches = 0: "),
        (
            {"pp": 2, "num_microbatches": 4, "vpp": 2},
            "parallel.vpp = 2: the schedule one_f_one_b does not work with so many chunks of a rank; legal here: 1. "
            "Schedules for 2: gpipe, interleaved, interleaved_zero_bubble, zero_bubble_v",
        ),
    ]:
        with pytest.raises(MoeParallelError) as caught:
            SCHEDULES["one_f_one_b"].ranks(**numbers)
        assert str(caught.value).startswith(message)
    assert [p.legal for p in SCHEDULES["zero_bubble_v"].problems(pp=2, num_microbatches=1, vpp=3)] == ["2"]
    assert [p.legal for p in SCHEDULES["gpipe"].problems(pp=2, num_microbatches=1, vpp=0)] == ["1 or more"]
    with pytest.raises(MoeParallelError, match=r"^parallel.schedule = 'x': .*; legal here: gpipe, one_f_one_b, "):
        schedule_named("x")


@pytest.mark.parametrize(
    ("ranks", "vpp", "message"),
    [
        (["F0 B0"], 1, "there are schedules of 1 ranks, but the number of ranks is 2"),
        (["F0 B0", "F0"], 1, "rank 1: the schedule lacks B0"),
        (["F0 B0", "F0 B0 F1 B1"], 1, "rank 1 has other microbatches than rank 0"),
        (
            ["F0 B0 F1 B1", "F0 F1 B0 B1"],
            1,
            "the schedule never ends, because ranks wait: rank 0 at B0 for gradient 0 of stage 1, "
            "rank 1 at F1 for output 1 of stage 0",
        ),
        (
            ["F0.1 F0 B0 B0.1", "F0 F0.1 B0.1 B0"],
            2,
            "the schedule never ends, because ranks wait: rank 0 at F0.1 for output 0 of stage 1, "
            "rank 1 at F0 for output 0 of stage 0",
        ),
        (
            ["F0 F1 B0 B1", "F1 F0 B0 B1"],
            1,
            "rank 0 sends output 0 of stage 0 to rank 1, which needs output 1 of stage 0 before it; messages "
            "between two ranks keep their order",
        ),
        (
            ["F0 F1 I1 I0 W0 W1", "F0 F1 B0 B1"],
            1,
            "rank 1 sends gradient 0 of stage 1 to rank 0, which needs gradient 1 of stage 1 before it; messages "
            "between two ranks keep their order",
        ),
    ],
)
def test_lists_that_do_not_fit_together(ranks, vpp, message):
    with pytest.raises(MoeParallelError) as caught:
        check_ranks(parse(*ranks), Placement(pp=2, vpp=vpp))
    assert str(caught.value).startswith(message)


def test_lists_that_fit_together_are_walked_each_action_after_what_it_needs():
    places = Placement(kind="v", pp=2, vpp=2)
    ranks = SCHEDULES["zero_bubble_v"].ranks(pp=2, num_microbatches=5, vpp=2)
    done = set()
    for rank, action in walk(ranks, places):
        stage, number = places.stage_of(rank, action.chunk), action.microbatch
        if action.what is Pass.FORWARD:
            assert stage == 0 or ("F", number, stage - 1) in done
        elif action.what is Pass.INPUT:
            assert stage == 3 or ("I", number, stage + 1) in done
            assert ("F", number, stage) in done
        done.add((action.what.value, number, stage))
    assert len(done) == 3 * 5 * 4
