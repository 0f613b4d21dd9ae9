"""R128: the kit fails dispatchers whose fixed sizes are wrong in one place each."""

from dataclasses import replace

import pytest
import torch

from moe_comm import EXACT, AllToAllConfig, Sizing, alltoall
from moe_comm.metadata import common_sizes
from moe_comm.testing import DispatcherConformance
from moe_comm.two_level import TwoLevelDispatcher
from moe_comm.way import Level
from moe_parallel import MoeParallelError


class SizesExactlyAllTheSame(TwoLevelDispatcher):
    def plan(self, routing, sizing=EXACT):
        return super().plan(routing, Sizing(row_multiple=sizing.row_multiple))


class ForgetsTheOverflow(TwoLevelDispatcher):
    def plan(self, routing, sizing=EXACT):
        return replace(super().plan(routing, sizing), overflow=torch.zeros((), dtype=torch.int64))


class CountsTheOverflowTwice(TwoLevelDispatcher):
    def plan(self, routing, sizing=EXACT):
        plan = super().plan(routing, sizing)
        return replace(plan, overflow=plan.overflow * 2)


class CountsWhatFoundNoRow(TwoLevelDispatcher):
    """Counts are those of the choices, not of the rows."""

    def plan(self, routing, sizing=EXACT):
        plan = super().plan(routing, sizing)
        return replace(plan, counts_E=super().plan(routing).counts_E)


class ReadsTheOverflow(TwoLevelDispatcher):
    def plan(self, routing, sizing=EXACT):
        plan = super().plan(routing, sizing)
        assert int(plan.overflow) >= 0
        return plan


class ComparesSizesEveryTime(TwoLevelDispatcher):
    def plan(self, routing, sizing=EXACT):
        self._agreed.clear()
        return super().plan(routing, sizing)


class ComparesSizesNever(TwoLevelDispatcher):
    def plan(self, routing, sizing=EXACT):
        if sizing.capacity_rows is not None:
            num_tokens, num_choices = routing.ids_TK.shape
            self._agreed[sizing, num_choices] = common_sizes(sizing, num_tokens, num_choices)
        return super().plan(routing, sizing)


class KeepsOtherRows(TwoLevelDispatcher):
    def arrange(self, plan, received):
        sent = super().arrange(plan, received)
        return replace(sent, rows_RD=sent.rows_RD.roll(1, 0)) if plan.is_fixed else sent


class FillsPadding(TwoLevelDispatcher):
    def arrange(self, plan, received):
        sent = super().arrange(plan, received)
        padding_R = plan.landing.map.choice_R < 0
        return replace(sent, rows_RD=sent.rows_RD.masked_fill(padding_R[:, None], 1.0))


class LetsPaddingSpread(TwoLevelDispatcher):
    def prepare_return(self, plan, rows_RD):
        return super().prepare_return(plan, rows_RD + rows_RD.sum() * 0)


class LosesWrongIds(TwoLevelDispatcher):
    def plan(self, routing, sizing=EXACT):
        is_good_TK = (routing.ids_TK >= 0) & (routing.ids_TK < self.num_experts)
        return super().plan(replace(routing, ids_TK=routing.ids_TK.where(is_good_TK, -1)), sizing)


def kit(dispatcher, world):
    def build(config, groups, num_experts):
        node = Level.of(groups, "ep", "dispatch", "combine")
        return dispatcher(groups, num_experts, rail=Level.alone(), node=node)

    members = {"plugin": replace(alltoall.PLUGIN, build=build), "config": AllToAllConfig(), "worlds": (world,)}
    return type("Kit", (DispatcherConformance,), {**members, "roundings": 2})()


FITS, FIRST = "test_static_equals_exact_while_it_fits", "test_static_keeps_the_first_rows"
AGAIN, DIFFER = (
    "test_r082_static_plans_are_made_again_without_the_host",
    "test_static_sizes_that_differ_are_refused_on_every_rank",
)


@pytest.mark.parametrize("world", [2, (2, 1)], ids=str)
@pytest.mark.parametrize(
    ("dispatcher", "rule", "message"),
    [
        (SizesExactlyAllTheSame, FITS, "rows"),
        (SizesExactlyAllTheSame, FIRST, "rows"),
        (ForgetsTheOverflow, FIRST, "an overflow of 0 where"),
        (CountsTheOverflowTwice, FIRST, "found no row"),
        (CountsWhatFoundNoRow, FIRST, "counts"),
        (ReadsTheOverflow, AGAIN, "dispatch 1 reads on the host: .*__int__"),
        (ComparesSizesEveryTime, AGAIN, "dispatch 1 reads on the host: .*tolist"),
        (ComparesSizesNever, DIFFER, "refused with other words|accepted|cannot start|raised|disagree"),
        (KeepsOtherRows, FIRST, "rows: values differ"),
        (FillsPadding, FITS, "rows after the last are not zero"),
        (LetsPaddingSpread, FIRST, "outputs and gradients"),
        (LosesWrongIds, "test_static_ids_out_of_range_are_overflow", "but the overflow is 0"),
        (ForgetsTheOverflow, "test_random_cases", "an overflow of 0 where"),
    ],
)
def test_r128_a_fault_of_fixed_sizes_is_caught(dispatcher, rule, message, world):
    with pytest.raises((AssertionError, MoeParallelError, RuntimeError), match=message):
        getattr(kit(dispatcher, world), rule)(world)
