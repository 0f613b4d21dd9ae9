"""AxisGroups: the world of one process, and existing groups by axis name."""

import torch.distributed as dist

from moe_parallel import AxisGroups, Groups
from moe_parallel.testing import run_threads


def test_without_groups_every_axis_has_one_rank():
    groups = AxisGroups()
    assert isinstance(groups, Groups)
    for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp"):
        assert (groups.size(axis), groups.rank(axis), groups.group(axis)) == (1, 0, None)
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
