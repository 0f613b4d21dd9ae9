"""FoldedMesh: real groups on gloo have the members that the layout says, and none more than needed."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from moe_parallel import (
    CollectiveError,
    FoldedMesh,
    Groups,
    MoeParallelError,
    ParallelLayout,
    ShardSpec,
    all_reduce,
    context_axis,
    gradient_axes,
    run_distributed,
)
from moe_parallel._torch_compat import fake_world
from moe_parallel.layout import DENSE_AXES, EXPERT_AXES
from moe_parallel.mesh import ACTIVATION_AXES, CUT_AXES, GRADIENT_AXES
from moe_parallel.testing import legal_layouts

AXES = (*ACTIVATION_AXES, *GRADIENT_AXES)

# Degrees differ pairwise where the world has room for it, so that an axis taken for another shows (R043).
LAYOUTS = [
    {"world": 4, "ep": 4},
    {"world": 4, "tp": 2, "ep": 4},
    {"world": 8, "tp": 4, "ep": 2},
    {"world": 8, "tp": 2, "ep": 4},
    {"world": 8, "cp": 2, "ep": 4},
    {"world": 8, "tp": 2, "pp": 2, "ep": 4},
    {"world": 8, "cp": 4, "pp": 2, "etp": 2, "ep": 2},
    {"world": 8, "tp": 2, "cp": 2, "etp": 2, "ep": 4},
    {"world": 6, "tp": 3, "ep": 2},
]


@pytest.mark.dist
@pytest.mark.parametrize("degrees", LAYOUTS, ids=lambda degrees: "-".join(f"{k}{v}" for k, v in degrees.items()))
def test_r043_groups_have_the_members_of_the_layout(degrees):
    layout = ParallelLayout(**degrees)

    def on_rank(mesh):
        rank = dist.get_rank()
        assert isinstance(mesh, Groups)
        assert mesh.coordinates() == layout.coordinates(rank)
        assert (mesh.size("world"), mesh.rank("world")) == (layout.world, rank)
        assert mesh.group("world") is dist.group.WORLD
        reached = []
        for axes in AXES:
            members, group = layout.group_of(rank, *axes), mesh.group(*axes)
            assert mesh.group(*reversed(axes)) is group
            assert (mesh.size(*axes), mesh.rank(*axes)) == (len(members), members.index(rank))
            if group is None:
                assert len(members) == 1
                continue
            assert tuple(dist.get_process_group_ranks(group)) == members
            assert (group.size(), group.rank()) == (len(members), members.index(rank))
            # Who really answers: each rank sets its own bit.
            bits = all_reduce(torch.tensor([1 << rank]), group).wait().item()
            assert bits == sum(1 << member for member in members), axes
            reached.append(axes)
        return reached

    reached = run_distributed(layout, on_rank, timeout_s=10)
    assert all(axes == reached[0] for axes in reached)
    assert reached[0], "a layout without groups tests nothing"


def groups_by_identity(mesh):
    return {axes: id(group) for axes in AXES if (group := mesh.group(*axes)) is not None}


def test_axes_that_span_the_same_ranks_share_a_group_within_a_row_only():
    layout = ParallelLayout(world=16, cp=4, ep=4)  # dp and edp 4: cp = ep in members, dp = edp in members
    with fake_world(rank=5, world=16):
        mesh = FoldedMesh(layout, timeout_s=1)
        ids = groups_by_identity(mesh)
        assert ids["cp",] == ids["tp", "cp"] == ids["ep",] == ids["etp", "ep"]
        assert ids["dp",] == ids["edp",]
        assert len({ids["cp",], ids["dp",], ids["cp", "dp"]}) == 3
        assert mesh.group("cp").group_desc == "cp = tp * cp = ep = etp * ep"
        assert mesh.group("dp").group_desc == "dp = edp = etp * edp"


def test_a_gradient_reduction_never_takes_the_group_of_activations():
    # dp is 1, so that `cp` and `cp * dp` are the same ranks; the tokens of the next layer go through `cp`.
    with fake_world(rank=1, world=4):
        mesh = FoldedMesh(ParallelLayout(world=4, cp=4, ep=2), timeout_s=1)
        assert mesh.group("cp", "dp") is mesh.group("dp", "cp")
        assert mesh.group("cp", "dp") is not mesh.group("cp")
        assert dist.get_process_group_ranks(mesh.group("cp", "dp")) == dist.get_process_group_ranks(mesh.group("cp"))


# Members of the inner and the outer axis of some ranks, by hand. With tp 2, ranks of one cp are two apart.
CUT = [
    (
        "cp",
        {"world": 4, "cp": 4},
        2,
        {0: ((0, 1), (0, 2)), 1: ((0, 1), (1, 3)), 2: ((2, 3), (0, 2)), 3: ((2, 3), (1, 3))},
    ),
    (
        "cp",
        {"world": 12, "tp": 2, "cp": 6},
        3,
        {0: ((0, 2, 4), (0, 6)), 3: ((1, 3, 5), (3, 9)), 8: ((6, 8, 10), (2, 8)), 11: ((7, 9, 11), (5, 11))},
    ),
    (
        "cp",
        {"world": 12, "tp": 2, "cp": 6},
        2,
        {0: ((0, 2), (0, 4, 8)), 3: ((1, 3), (3, 7, 11)), 8: ((8, 10), (0, 4, 8)), 11: ((9, 11), (3, 7, 11))},
    ),
    ("cp", {"world": 8, "cp": 4}, 2, {5: ((4, 5), (5, 7)), 6: ((6, 7), (4, 6))}),  # dp 2
    ("ep", {"world": 6, "ep": 6}, 3, {0: ((0, 1, 2), (0, 3)), 4: ((3, 4, 5), (1, 4))}),
    ("ep", {"world": 8, "tp": 4, "ep": 4}, 2, {1: ((0, 1), (1, 3)), 6: ((6, 7), (4, 6))}),  # edp 2, and tp is ep
    # Places of ep are two ranks apart, and a node of four ranks has two of them.
    (
        "ep",
        {"world": 12, "ep": 6, "etp": 2},
        2,
        {0: ((0, 2), (0, 4, 8)), 3: ((1, 3), (3, 7, 11)), 8: ((8, 10), (0, 4, 8)), 11: ((9, 11), (3, 7, 11))},
    ),
]


@pytest.mark.parametrize(("axis", "degrees", "inner", "members"), CUT)
def test_an_axis_that_is_cut_in_two(axis, degrees, inner, members):
    layout, parts = ParallelLayout(**degrees), (f"{axis}_inner", f"{axis}_outer")
    for rank, of_rank in members.items():
        with fake_world(rank=rank, world=layout.world):
            mesh = FoldedMesh(layout, timeout_s=1, **{f"{axis}_inner": inner})
            assert getattr(mesh, f"{axis}_inner") == inner
            for part, ranks in zip(parts, of_rank, strict=True):
                assert tuple(dist.get_process_group_ranks(mesh.group(part))) == ranks
                assert (mesh.size(part), mesh.rank(part)) == (len(ranks), ranks.index(rank))
                assert part in mesh.group(part).group_desc
            inside, across = parts
            assert mesh.rank(axis) == mesh.rank(across) * inner + mesh.rank(inside)
            assert mesh.size(axis) == mesh.size(across) * mesh.size(inside)


def test_both_views_are_cut_at_the_same_time():
    with fake_world(rank=5, world=8):
        mesh = FoldedMesh(ParallelLayout(world=8, cp=4, ep=8), timeout_s=1, cp_inner=2, ep_inner=4)
        members = {
            axis: dist.get_process_group_ranks(mesh.group(axis))
            for axis in ("cp_inner", "cp_outer", "ep_inner", "ep_outer")
        }
    assert members == {"cp_inner": [4, 5], "cp_outer": [5, 7], "ep_inner": [4, 5, 6, 7], "ep_outer": [1, 5]}


@pytest.mark.dist
@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_the_two_groups_of_a_cut_axis_answer(axis):
    def on_rank(mesh):
        bit = 1 << mesh.rank("world")
        parts = (f"{axis}_inner", f"{axis}_outer")
        return [all_reduce(torch.tensor([bit]), mesh.group(part)).wait().item() for part in parts]

    found = run_distributed(ParallelLayout(world=4, **{axis: 4}), on_rank, **{f"{axis}_inner": 2})
    assert found == [[0b0011, 0b0101], [0b0011, 0b1010], [0b1100, 0b0101], [0b1100, 0b1010]]


@pytest.mark.parametrize("axis", ["cp", "ep"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_of_an_axis_that_is_not_cut_the_outer_part_is_the_whole(axis, size):
    inner, outer = f"{axis}_inner", f"{axis}_outer"
    with fake_world(rank=3, world=4):
        mesh = FoldedMesh(ParallelLayout(world=4, **{axis: size}), timeout_s=1)
        assert (mesh.size(inner), mesh.rank(inner), mesh.group(inner)) == (1, 0, None)
        assert (mesh.size(outer), mesh.rank(outer)) == (mesh.size(axis), mesh.rank(axis))
        assert mesh.group(outer) is mesh.group(axis)


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_one_run_is_the_whole(axis):
    inner, outer = f"{axis}_inner", f"{axis}_outer"
    with fake_world(rank=3, world=4):
        mesh = FoldedMesh(ParallelLayout(world=4, **{axis: 4}), timeout_s=1, **{inner: 4})
        assert mesh.group(inner) is mesh.group(axis)
        assert (mesh.size(outer), mesh.group(outer)) == (1, None)


@pytest.mark.parametrize("axis", ["cp", "ep"])
@pytest.mark.parametrize("inner", [-1, 0, 3, 8])
def test_runs_divide_the_axis(axis, inner):
    message = f"{axis}_inner = {inner} does not divide {axis} = 4"
    with fake_world(rank=0, world=4), pytest.raises(MoeParallelError, match=message):
        FoldedMesh(ParallelLayout(world=4, **{axis: 4}), timeout_s=1, **{f"{axis}_inner": inner})
    with pytest.raises(MoeParallelError, match=f"{axis}_inner = 2 does not divide {axis} = 1"):
        FoldedMesh(ParallelLayout(world=1), timeout_s=1, **{f"{axis}_inner": 2})


def test_gradients_that_are_summed_over_tp_as_well_have_a_group_of_their_own():
    with fake_world(rank=5, world=8):
        mesh = FoldedMesh(ParallelLayout(world=8, tp=2, cp=2), timeout_s=1)
        axes = gradient_axes(ShardSpec(name="norm", shape=(4,), grad_sum_axes=("tp",)))
        assert dist.get_process_group_ranks(mesh.group(*axes)) == list(range(8))
    with fake_world(rank=1, world=2):  # where it spans no more than tp, it still does not hold up its tokens
        mesh = FoldedMesh(ParallelLayout(world=2, tp=2), timeout_s=1)
        assert dist.get_process_group_ranks(mesh.group(*axes)) == dist.get_process_group_ranks(mesh.group("tp"))
        assert mesh.group(*axes) is not mesh.group("tp")


def test_axes_of_one_rank_do_not_count():
    with fake_world(rank=3, world=8):
        mesh = FoldedMesh(ParallelLayout(world=8, tp=2, ep=4), timeout_s=1)
        assert mesh.group("tp", "pp") is mesh.group("tp")
        assert mesh.group("tp", "cp") is mesh.group("tp")
        assert mesh.group("pp") is mesh.group("pp", "cp") is mesh.group() is None
        with pytest.raises(MoeParallelError, match=r"no group spans tp \* dp; groups are made for tp, cp, .*edp$"):
            mesh.group("tp", "dp")
        for question in (mesh.group, mesh.size, mesh.rank):
            with pytest.raises(MoeParallelError, match="mix the dense view"):
                question("tp", "ep")
            with pytest.raises(MoeParallelError, match="unknown axis 'sp'"):
                question("sp")


def test_all_ranks_make_the_same_number_of_groups():
    """torch names a group by its members and the number of groups before it, which must not differ between members."""
    worlds = random.sample(range(2, 200), 12)
    for world in (8, 16, *worlds):
        layouts = list(legal_layouts(world))
        for layout in random.sample(layouts, min(len(layouts), 10)):
            for row in (ACTIVATION_AXES, GRADIENT_AXES):
                made = [
                    [row.index(axes) for axes in first_of_each_set(layout, row, rank)] for rank in range(layout.world)
                ]
                assert made.count(made[0]) == layout.world, layout


@pytest.mark.parametrize(
    "degrees",
    [
        {"world": 12, "tp": 2, "cp": 6, "ep": 6, "etp": 2},
        {"world": 12, "tp": 3, "cp": 4, "ep": 12},
        {"world": 16, "cp": 8, "ep": 4, "etp": 2},
        {"world": 24, "tp": 2, "pp": 2, "cp": 6, "ep": 6},
    ],
)
def test_all_ranks_make_the_same_number_of_groups_where_axes_are_cut(degrees):
    """Parts of one axis may span the ranks of another axis, on every rank or on none."""
    layout = ParallelLayout(**degrees)
    cuts = [
        {"cp_inner": cp, "ep_inner": ep}
        for cp in range(1, layout.cp + 1)
        for ep in range(1, layout.ep + 1)
        if layout.cp % cp == layout.ep % ep == 0
    ]
    parts = [(part,) for both in CUT_AXES.values() for part in both]
    for cut in cuts:
        made = []
        for rank in range(layout.world):
            with fake_world(rank=rank, world=layout.world):
                mesh = FoldedMesh(layout, timeout_s=1, **cut)
                of_axes = [mesh.group(*axes) for axes in (*AXES, *parts)]
                made.append(sorted(group.group_desc for group in set(of_axes) - {None}))
        assert made.count(made[0]) == layout.world, cut


def first_of_each_set(layout, row, rank):
    sets = {}
    for axes in row:
        sets.setdefault(layout.group_of(rank, *axes), axes)
    return [axes for ranks, axes in sets.items() if len(ranks) > 1]


def test_every_pair_of_axes_of_a_gradient_or_an_exchange_lies_in_one_view():
    assert all(set(axes) <= set(DENSE_AXES) or set(axes) <= set(EXPERT_AXES) for axes in AXES)


@pytest.mark.parametrize("rank", [0, 9_999, 16_383])
def test_a_mesh_of_sixteen_thousand_ranks_takes_seconds(rank):
    layout = ParallelLayout(world=16_384, tp=8, cp=4, pp=16, ep=64, etp=2)
    with fake_world(rank=rank, world=layout.world):
        start = time.perf_counter()
        mesh = FoldedMesh(layout, timeout_s=1)
        assert time.perf_counter() - start < 5
        for axes in AXES:
            members = layout.group_of(rank, *axes)
            assert dist.get_process_group_ranks(mesh.group(*axes)) == list(members)
            assert mesh.rank(*axes) == members.index(rank)
        start = time.perf_counter()
        for _ in range(1000):
            mesh.group("cp", "dp")
            mesh.size("edp")
            mesh.rank("world")
        assert time.perf_counter() - start < 1, "a layer asks in every step"


def test_what_a_mesh_refuses():
    layout = ParallelLayout(world=4, ep=4)
    with pytest.raises(MoeParallelError, match=r"torch\.distributed is not initialised"):
        FoldedMesh(layout, timeout_s=1)
    with fake_world(rank=0, world=2):
        with pytest.raises(MoeParallelError, match="the layout is for 4 ranks, the default process group has 2"):
            FoldedMesh(layout, timeout_s=1)
        with pytest.raises(MoeParallelError, match=r"parallel\.ep = 3"):
            FoldedMesh(ParallelLayout(world=2, ep=3), timeout_s=1)
    assert not dist.is_initialized()


@pytest.mark.dist
@pytest.mark.parametrize("absent", ["dead", "late"])
def test_a_member_that_does_not_come_when_groups_are_made_is_named(absent):
    layout = ParallelLayout(world=2, ep=2)

    def on_rank(mesh):
        dist.barrier()
        if mesh.rank("ep") == 1:
            if absent == "dead":
                os._exit(1)
            time.sleep(3)
            return None
        with pytest.raises(CollectiveError, match=r"rank 0: making group ep = .* of ranks 0, 1 failed after") as e:
            FoldedMesh(layout, timeout_s=1)
        assert e.value.ranks == (0, 1)
        return "named"

    if absent == "late":
        assert run_distributed(layout, on_rank) == ["named", None]
    else:
        with pytest.raises(MoeParallelError, match=r"^rank 1 died with exit code 1$"):
            run_distributed(layout, on_rank)


@pytest.mark.dist
def test_a_world_of_one_has_no_groups():
    def on_rank(mesh):
        assert groups_by_identity(mesh) == {}
        assert mesh.group("world") is None
        assert (mesh.size("world"), mesh.rank("world"), mesh.size("ep"), mesh.rank("ep")) == (1, 0, 1, 0)

    run_distributed(ParallelLayout(world=1), on_rank)


# Members of the axes of each rank, by hand; who holds nothing is alone. Ranks of one pipeline are `world / pp` apart.
SHARED = [
    (
        {"world": 4, "pp": 4},
        {"pp_embedding": (0, 3)},
        {
            0: {"pp_embedding": (0, 3)},
            1: {"pp_embedding": (1,)},
            2: {"pp_embedding": (2,)},
            3: {"pp_embedding": (0, 3)},
        },
    ),
    (
        {"world": 4, "pp": 4},
        {"pp_embedding": (2, 0), "pp_head": (1, 3)},
        {
            0: {"pp_embedding": (0, 2), "pp_head": (0,)},
            1: {"pp_embedding": (1,), "pp_head": (1, 3)},
            2: {"pp_embedding": (0, 2), "pp_head": (2,)},
            3: {"pp_embedding": (3,), "pp_head": (1, 3)},
        },
    ),
    (
        {"world": 4, "pp": 2, "tp": 2},
        {"pp_embedding": (1,), "pp_head": (0, 1)},
        {
            0: {"pp_embedding": (0,), "pp_head": (0, 2)},
            1: {"pp_embedding": (1,), "pp_head": (1, 3)},
            2: {"pp_embedding": (2,), "pp_head": (0, 2)},
            3: {"pp_embedding": (3,), "pp_head": (1, 3)},
        },
    ),
    (
        {"world": 6, "pp": 3},  # dp 2
        {"pp_embedding": (0, 1, 2), "pp_head": (2,)},
        {rank: {"pp_embedding": (rank % 2, rank % 2 + 2, rank % 2 + 4), "pp_head": (rank,)} for rank in range(6)},
    ),
]


@pytest.mark.dist
@pytest.mark.parametrize(("degrees", "shared", "members"), SHARED)
def test_ranks_of_a_pipeline_that_hold_one_parameter(degrees, shared, members):
    """Also those that hold none make a group: torch counts groups, and members must have counted the same."""

    def on_rank(mesh):
        rank = mesh.rank("world")
        for axis, ranks in members[rank].items():
            assert (mesh.size(axis), mesh.rank(axis)) == (len(ranks), ranks.index(rank))
            group = mesh.group(axis)
            assert (group is None) == (len(ranks) == 1)
            if group is not None:
                assert axis in group.group_desc
                bits = all_reduce(torch.tensor([1 << rank]), group).wait().item()
                assert bits == sum(1 << member for member in ranks)
        # Groups that are made later find each other.
        again = FoldedMesh(mesh.layout, timeout_s=10)
        assert all_reduce(torch.ones(1), again.group("pp")).wait().item() == mesh.size("pp")

    run_distributed(ParallelLayout(**degrees), on_rank, shared=shared, timeout_s=10)


def test_without_holders_a_shared_axis_is_one_rank():
    with fake_world(rank=1, world=4):
        mesh = FoldedMesh(ParallelLayout(world=4, pp=4), timeout_s=1)
        assert (mesh.size("pp_head"), mesh.rank("pp_head"), mesh.group("pp_head")) == (1, 0, None)


def test_messages_of_each_kind_and_direction_have_a_group_of_their_own():
    axes = ("pp", "pp_down", "pp_back", "pp_back_up")
    with fake_world(rank=1, world=8):
        mesh = FoldedMesh(ParallelLayout(world=8, pp=4), timeout_s=1)
        groups = [mesh.group(axis) for axis in axes]
        assert len(set(map(id, groups))) == len(axes)
        for axis, group in zip(axes, groups, strict=True):
            assert dist.get_process_group_ranks(group) == [1, 3, 5, 7]
            assert (mesh.size(axis), mesh.rank(axis)) == (4, 0)
            assert group.group_desc == axis
    with fake_world(rank=1, world=8):
        mesh = FoldedMesh(ParallelLayout(world=8), timeout_s=1)
        assert [(mesh.size(axis), mesh.group(axis)) for axis in axes] == [(1, None)] * len(axes)


@pytest.mark.parametrize("shared", [{"pp": (0, 1)}, {"pp_embedding": (0, 2)}, {"pp_head": (-1, 0)}, {"embedding": ()}])
def test_shared_axes_that_are_none(shared):
    (axis,) = shared
    with (
        fake_world(rank=0, world=4),
        pytest.raises(
            MoeParallelError, match=rf"the shared axis {axis} has the places .*; axes are pp_embedding, pp_h"
        ),
    ):
        FoldedMesh(ParallelLayout(world=4, pp=2), timeout_s=1, shared=shared)


@pytest.mark.dist
def test_neighbours_of_cp_and_dp_have_groups_of_every_size():
    layout = ParallelLayout(world=8, tp=2, cp=2)

    def on_rank(mesh):
        found = []
        for size in (1, 2, 4):
            for axes in ((context_axis(size),), ("tp", context_axis(size))):
                group = mesh.group(*axes)
                members = dist.get_process_group_ranks(group) if group else [dist.get_rank()]
                assert len(members) == mesh.size(*axes)
                assert members[mesh.rank(*axes)] == dist.get_rank()
                found.append(members)
        assert mesh.group(context_axis(2)) is mesh.group("cp")  # the same ranks
        assert mesh.group(context_axis(4)) is not mesh.group("cp", "dp")  # gradients are not to wait for tokens
        return found

    ranks = run_distributed(layout, on_rank, timeout_s=20, context_sizes=(1, 2, 4))
    assert ranks[5] == [[5], [4, 5], [5, 7], [4, 5, 6, 7], [1, 3, 5, 7], list(range(8))]
    with pytest.raises(MoeParallelError, match="does not divide cp \\* dp"):
        run_distributed(ParallelLayout(world=2), lambda mesh: None, timeout_s=20, context_sizes=(4,))
