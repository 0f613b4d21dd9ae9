"""AxisGroups: the world of one process, and existing groups by axis name."""

import pytest
import torch.distributed as dist

from moe_parallel import AxisGroups, Groups, MoeParallelError
from moe_parallel.testing import run_threads


def test_without_groups_every_axis_has_one_rank():
    groups = AxisGroups()
    assert isinstance(groups, Groups)
    for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp"):
        assert (groups.size(axis), groups.rank(axis), groups.group(axis)) == (1, 0, None)
    assert (groups.size("cp", "dp"), groups.rank("cp", "dp"), groups.group("cp", "dp")) == (1, 0, None)
    assert (groups.size("world"), groups.rank("world"), groups.group("world")) == (1, 0, None)
    assert groups.coordinates() == {}


def test_groups_report_size_rank_and_coordinates():
    def on_rank(rank, _):
        halves = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
        alone = [dist.new_group([member]) for member in range(6)]
        groups = AxisGroups({"dp": dist.group.WORLD, "ep": halves[rank // 3], "tp": alone[rank]})
        sizes = {axis: groups.size(axis) for axis in ("dp", "ep", "tp", "cp")}
        assert sizes == {"dp": 6, "ep": 3, "tp": 1, "cp": 1}
        assert groups.group("ep") is halves[rank // 3]
        assert groups.group("tp") is None, "a group of one needs no communication"
        return dict(groups.coordinates())

    assert run_threads(6, on_rank) == [{"dp": rank, "ep": rank % 3, "tp": 0} for rank in range(6)]


def test_several_axes_name_the_group_that_spans_them():
    def on_rank(rank, _):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        alone = [dist.new_group([member]) for member in range(4)]
        cp, dp, world = pairs[rank // 2], across[rank % 2], dist.group.WORLD
        groups = AxisGroups({"cp": cp, "dp": dp, ("dp", "cp"): world, "tp": alone[rank]})
        assert groups.group("cp", "dp") is groups.group("dp", "cp") is world
        assert (groups.size("cp", "dp"), groups.rank("cp", "dp")) == (4, rank)
        assert groups.group("tp", "cp") is cp, "an axis with one rank does not count"
        assert groups.coordinates() == {"cp": rank % 2, "dp": rank // 2, "tp": 0}
        with pytest.raises(MoeParallelError, match="no process group was given that spans the axes world"):
            groups.group("world")
        with pytest.raises(MoeParallelError, match="spans the axes cp, dp"):
            AxisGroups({"cp": cp, "dp": dp}).size("cp", "dp")
        # What was given for just these axes is taken, whatever is known of them one by one.
        assert AxisGroups({"cp": cp, ("cp", "dp"): world}).group("cp", "dp") is world

    run_threads(4, on_rank)
