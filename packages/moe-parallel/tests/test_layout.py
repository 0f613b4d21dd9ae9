"""ParallelLayout against a brute force that writes down both grids rank by rank."""

import itertools
import random
import time
from math import prod

import pytest

from moe_parallel import MoeParallelError, ParallelLayout
from moe_parallel.layout import DENSE_AXES, EXPERT_AXES
from moe_parallel.testing import legal_layouts

WORLDS = (1, 2, 3, 4, 6, 8, 12, 16)


def brute_force_layouts(world):
    """Every legal combination of degrees, by trying all of them."""
    degrees = range(1, world + 1)
    for tp, cp, pp in itertools.product(degrees, repeat=3):
        if world % (tp * cp * pp):
            continue
        for etp, ep in itertools.product(degrees, repeat=2):
            if world % (etp * ep * pp) == 0:
                yield {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}


def places(world, degrees):
    """rank -> coordinates: both grids are filled rank by rank, the first axis fastest."""
    dp = world // (degrees["tp"] * degrees["cp"] * degrees["pp"])
    edp = world // (degrees["etp"] * degrees["ep"] * degrees["pp"])
    place = [{} for _ in range(world)]
    rank = 0
    for pp in range(degrees["pp"]):
        for d in range(dp):
            for cp in range(degrees["cp"]):
                for tp in range(degrees["tp"]):
                    place[rank].update(tp=tp, cp=cp, dp=d, pp=pp)
                    rank += 1
    rank = 0
    for pp in range(degrees["pp"]):
        for d in range(edp):
            for ep in range(degrees["ep"]):
                for etp in range(degrees["etp"]):
                    assert place[rank]["pp"] == pp, "both grids put a rank into the same stage"
                    place[rank].update(etp=etp, ep=ep, edp=d)
                    rank += 1
    return place


def expected_groups(place, view, axes):
    """Ranks that share every coordinate of the view outside `axes`."""
    groups = {}
    for rank, coordinates in enumerate(place):
        key = tuple(coordinates[axis] for axis in view if axis not in axes)
        groups.setdefault(key, []).append(rank)
    return sorted(tuple(group) for group in groups.values())


@pytest.mark.parametrize("world", WORLDS)
def test_r066_every_layout_matches_the_brute_force(world):
    found = 0
    for degrees in brute_force_layouts(world):
        found += 1
        layout = ParallelLayout(world=world, **degrees)
        assert layout.problems() == []
        place = places(world, degrees)
        for rank in range(world):
            assert layout.coordinates(rank) == place[rank]
            assert layout.rank_at(**{axis: place[rank][axis] for axis in DENSE_AXES}) == rank
        assert layout.tp * layout.cp * layout.dp * layout.pp == world
        assert layout.etp * layout.ep * layout.edp * layout.pp == world
    assert found >= world  # there is at least one layout per expert degree of a prime world


@pytest.mark.parametrize("world", WORLDS)
def test_r066_every_rank_is_in_one_group_of_each_kind(world):
    # A sample that keeps the test fast: all layouts of small worlds, every seventh of the large ones.
    for degrees in itertools.islice(brute_force_layouts(world), 0, None, 1 if world <= 8 else 7):
        layout = ParallelLayout(world=world, **degrees)
        place = places(world, degrees)
        for view in (DENSE_AXES, EXPERT_AXES):
            for count in range(5):
                for axes in itertools.combinations(view, count):
                    groups = layout.groups(*axes)
                    assert groups == expected_groups(place, view, axes)
                    assert sorted(itertools.chain.from_iterable(groups)) == list(range(world))
                    for group in groups:
                        assert all(layout.group_of(rank, *axes) == group for rank in group)
                        # The place inside a group is the coordinate, which is what `Groups.rank` promises.
                        if count == 1:
                            assert [place[rank][axes[0]] for rank in group] == list(range(len(group)))


def test_r066_groups_of_any_world_are_those_of_the_brute_force():
    """Worlds and degrees at random, every combination of axes of one view."""
    for world in random.sample(range(1, 130), 25):
        layout = random.choice(list(legal_layouts(world)))
        degrees = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
        place = places(world, degrees)
        for view in (DENSE_AXES, EXPERT_AXES):
            for axes in itertools.chain.from_iterable(itertools.combinations(view, count) for count in range(5)):
                groups = layout.groups(*random.sample(axes, len(axes)))
                assert groups == expected_groups(place, view, axes), (layout, axes)
                assert {len(group) for group in groups} == {prod(layout.size(axis) for axis in axes)}
                rank = random.randrange(world)
                assert rank in layout.group_of(rank, *axes)
                assert layout.group_of(rank, *axes) in groups


def test_the_place_in_a_group_counts_the_first_axis_of_the_view_fastest():
    layout = ParallelLayout(world=48, tp=2, cp=3, pp=2, ep=6, etp=2)
    for rank in range(48):
        place = layout.coordinates(rank)
        assert layout.group_of(rank, "dp", "cp").index(rank) == place["cp"] + 3 * place["dp"]
        assert layout.group_of(rank, "ep", "etp").index(rank) == place["etp"] + 2 * place["ep"]


def test_sizes_of_axes():
    layout = ParallelLayout(world=48, tp=2, cp=3, pp=2, ep=6, etp=1)
    axes = (*DENSE_AXES, *EXPERT_AXES)
    assert {axis: layout.size(axis) for axis in axes} == {
        "tp": 2,
        "cp": 3,
        "dp": 4,
        "pp": 2,
        "etp": 1,
        "ep": 6,
        "edp": 4,
    }
    with pytest.raises(MoeParallelError, match="unknown axis 'world'"):
        layout.size("world")
    with pytest.raises(MoeParallelError, match="does not divide the world of 8"):
        ParallelLayout(world=8, ep=3).size("tp")


def test_words_for_a_rank_name_the_axes_that_have_several():
    layout = ParallelLayout(world=4, ep=2)
    assert layout.words_for(3) == "rank 3 of 4 (dp=3 ep=1 edp=1)"
    assert ParallelLayout(world=1).words_for(0) == "rank 0 of 1"


def test_groups_do_not_depend_on_the_order_of_the_axes():
    layout = ParallelLayout(world=24, tp=2, cp=3, pp=2, ep=6)
    assert layout.groups("tp", "cp") == layout.groups("cp", "tp")
    assert layout.group_of(13, "dp", "tp") == layout.group_of(13, "tp", "dp")


def test_known_groups_of_a_layout_with_different_degrees():
    # 24 ranks: dense tp2 cp3 dp2 pp2, expert etp2 ep3 edp2 pp2, written down by hand.
    layout = ParallelLayout(world=24, tp=2, cp=3, pp=2, ep=6)
    assert (layout.dp, layout.edp) == (2, 2)
    assert layout.groups("tp")[:3] == [(0, 1), (2, 3), (4, 5)]
    assert layout.groups("cp")[:3] == [(0, 2, 4), (1, 3, 5), (6, 8, 10)]
    assert layout.groups("dp")[:2] == [(0, 6), (1, 7)]
    assert layout.groups("ep")[:2] == [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]
    assert layout.groups("pp")[:2] == [(0, 12), (1, 13)]


def test_pipeline_groups_are_the_same_in_both_views():
    for layout in legal_layouts(16):
        stages = {}
        for rank in range(16):
            place = layout.coordinates(rank)
            stages.setdefault((place["etp"], place["ep"], place["edp"]), []).append(rank)
        assert sorted(map(tuple, stages.values())) == layout.groups("pp")


def test_r067_context_and_expert_parallelism_do_not_compete():
    layout = ParallelLayout(world=32, cp=4, ep=8)
    assert (layout.dp, layout.edp) == (8, 4)
    sample = {rank: layout.coordinates(rank)["dp"] for rank in range(32)}
    for group in layout.groups("tp", "cp"):
        assert len({sample[rank] for rank in group}) == 1, "peers that share a sequence read the same sample"
    for group in layout.groups("ep"):
        assert len({sample[rank] for rank in group}) == 2, "an ep group of 8 spans two dp ranks of 4 cp ranks each"
    assert sorted(sample.values()) == sorted(list(range(8)) * 4)


@pytest.mark.parametrize(
    ("degrees", "num_experts", "key", "numbers"),
    [
        ({"ep": 3}, None, "parallel.ep", ("3", "8")),
        ({"ep": 16}, None, "parallel.ep", ("16", "8")),
        ({"ep": 4}, 6, "parallel.ep", ("6", "4")),
        ({"ep": 8}, 4, "parallel.ep", ("4", "8")),
        ({"tp": 3}, None, "parallel.tp", ("3", "8")),
        ({"tp": 2, "pp": 3}, None, "parallel.pp", ("6", "8")),
        ({"ep": 2, "etp": 4, "pp": 2, "tp": 4}, None, "parallel.etp", ("16", "8")),
    ],
)
def test_r065_a_violation_names_both_numbers(degrees, num_experts, key, numbers):
    layout = ParallelLayout(world=8, **degrees)
    problems = layout.problems(num_experts=num_experts)
    mine = [problem for problem in problems if problem.key == key]
    assert mine, problems
    for number in numbers:
        assert number in mine[0].rule.replace("=", " ").split()
    with pytest.raises(MoeParallelError, match=key):
        layout.check(num_experts=num_experts)


def test_r065_all_violations_come_at_once():
    problems = ParallelLayout(world=8, tp=0, cp=3, ep=16, etp=True).problems(num_experts=6)
    assert [problem.key for problem in problems] == [
        "parallel.tp",
        "parallel.etp",
        "parallel.cp",
        "parallel.ep",
        "parallel.ep",
    ]
    assert problems[3].legal == "1, 2"  # divides the world of 8 and the 6 experts
    with pytest.raises(MoeParallelError) as caught:
        ParallelLayout(world=8, tp=0, cp=3, ep=16, etp=True).check(num_experts=6)
    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize("value", [0, -2, 1.0, "2", None, True])
def test_a_degree_that_is_no_count_is_a_problem(value):
    assert [problem.key for problem in ParallelLayout(world=4, cp=value).problems()] == ["parallel.cp"]
    assert [problem.key for problem in ParallelLayout(world=value).problems()] == ["world"]
    if value is not None:
        assert [problem.key for problem in ParallelLayout(world=4).problems(num_experts=value)] == ["model.num_experts"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda layout: layout.dp,
        lambda layout: layout.edp,
        lambda layout: layout.coordinates(0),
        lambda layout: layout.rank_at(),
        lambda layout: layout.groups("tp"),
        lambda layout: layout.group_of(0, "ep"),
    ],
)
def test_an_illegal_layout_answers_nothing_but_its_problems(ask):
    with pytest.raises(MoeParallelError, match=r"ep \* pp = 1 \* 3 \* 1 = 3 does not divide the world of 8"):
        ask(ParallelLayout(world=8, ep=3))


@pytest.mark.parametrize("world", [1, 6, 12, 16])
def test_legal_values_are_exactly_those_without_a_problem(world):
    for degrees in itertools.islice(brute_force_layouts(world), 0, None, 3):
        layout = ParallelLayout(world=world, **degrees)
        for axis in degrees:
            for num_experts in (None, 4):
                if num_experts is not None and axis != "ep" and num_experts % layout.ep:
                    continue  # that problem is another axis's
                expected = [
                    value
                    for value in range(1, world + 1)
                    if not ParallelLayout(world=world, **{**degrees, axis: value}).problems(num_experts=num_experts)
                ]
                assert list(layout.legal_values(axis, num_experts=num_experts)) == expected


def test_no_value_is_legal_where_the_other_degrees_do_not_fit():
    assert ParallelLayout(world=8, tp=3).legal_values("cp") == ()
    assert ParallelLayout(world=8, tp=3).legal_values("ep") == (1, 2, 4, 8)


def test_questions_that_have_no_answer():
    layout = ParallelLayout(world=8, tp=2, ep=4)
    with pytest.raises(MoeParallelError, match=r"'dp' has no degree to choose"):
        layout.legal_values("dp")
    with pytest.raises(MoeParallelError, match="mix the dense view"):
        layout.groups("tp", "ep")
    with pytest.raises(MoeParallelError, match="unknown axis 'sp'"):
        layout.groups("sp")
    with pytest.raises(MoeParallelError, match="named twice"):
        layout.group_of(0, "tp", "tp")
    with pytest.raises(MoeParallelError, match="legal here: 0 to 7"):
        layout.coordinates(8)
    with pytest.raises(MoeParallelError, match="legal here: 0 to 7"):
        layout.group_of(-1, "tp")
    with pytest.raises(MoeParallelError, match="tp = 2 is outside the axis; legal here: 0 to 1"):
        layout.rank_at(tp=2)


def test_sixteen_thousand_ranks_take_no_time():
    layout = ParallelLayout(world=16384, tp=8, cp=4, pp=16, ep=64, etp=2)
    assert (layout.dp, layout.edp) == (32, 8)
    start = time.perf_counter()
    groups = layout.groups("edp")
    own = layout.group_of(16383, "dp", "cp")
    # Every combination of axes of both views.
    everything = [
        layout.groups(*axes)
        for view in (DENSE_AXES, EXPERT_AXES)
        for count in range(5)
        for axes in itertools.combinations(view, count)
    ]
    assert time.perf_counter() - start < 3.0
    assert len(groups) == 2048
    assert groups[-1][-1] == 16383
    assert len(own) == 128
    assert own[-1] == 16383
    assert all(sum(map(len, groups)) == 16384 for groups in everything)


@pytest.mark.parametrize("world", WORLDS)
def test_legal_layouts_yields_each_layout_once(world):
    degrees = ("tp", "cp", "pp", "ep", "etp")
    found = [tuple(getattr(layout, axis) for axis in degrees) for layout in legal_layouts(world)]
    assert len(set(found)) == len(found)
    assert set(found) == {tuple(layout[axis] for axis in degrees) for layout in brute_force_layouts(world)}
