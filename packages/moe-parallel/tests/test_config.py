"""What may be imported without torch, and what a configuration dataclass promises."""

import dataclasses
import subprocess
import sys
from typing import get_args

import pytest

import moe_parallel
from moe_parallel import ParallelConfig, Problem
from moe_parallel.config import CpKind, ScheduleName
from moe_parallel.context.rules import KINDS
from moe_parallel.pipeline.schedules.table import SCHEDULES


def test_configuration_and_layout_do_not_import_torch():
    code = (
        "import sys, moe_parallel.config, moe_parallel.layout, moe_parallel.problem, moe_parallel.sharding\n"
        "import moe_parallel.__main__, moe_parallel.groups, moe_parallel.pipeline.schedule, moe_parallel.plan\n"
        "import moe_parallel.context.dynamic\n"
        "import moe_parallel.pipeline.balance, moe_parallel.pipeline.formulas, moe_parallel.pipeline.show\n"
        "heavy = {'torch', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_config_is_frozen_and_keyword_only():
    config = ParallelConfig(ep=4)
    assert dataclasses.asdict(config) == {
        "tp": 1,
        "cp": 1,
        "pp": 1,
        "vpp": 1,
        "pipeline": None,
        "schedule": "auto",
        "ep": 4,
        "etp": 1,
        "sequence_parallel": True,
        "cp_kind": "ring",
        "cp_inner": 1,
        "dynamic_cp_tokens": None,
        "ranks_per_node": None,
        "timeout_s": 600.0,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ep = 2
    with pytest.raises(TypeError):
        ParallelConfig(4)
    assert ParallelConfig.__pydantic_config__ == {"extra": "forbid"}


@pytest.mark.parametrize("seconds", [0, 0.0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_number_of_seconds(seconds):
    (problem,) = ParallelConfig(timeout_s=seconds).problems()
    assert str(problem) == f"parallel.timeout_s = {seconds!r}: a number of seconds is finite and above 0"
    assert ParallelConfig(timeout_s=0.5).problems() == ParallelConfig().problems() == []


def test_a_machine_has_a_rank():
    (problem,) = ParallelConfig(ranks_per_node=0).problems()
    assert str(problem) == "parallel.ranks_per_node = 0: a machine has at least one rank"
    assert ParallelConfig(ranks_per_node=8).problems() == []


@pytest.mark.parametrize("kind", ["ring", "all_to_all", "gather"])
def test_a_neighbourhood_is_of_hierarchical_context_parallelism_alone(kind):
    (problem,) = ParallelConfig(cp=4, cp_kind=kind, cp_inner=2).problems()
    assert str(problem) == f"parallel.cp_inner = 2: has no effect with parallel.cp_kind = {kind}; legal here: 1"
    assert ParallelConfig(cp=4, cp_kind="hierarchical", cp_inner=2).problems() == []


def test_the_kinds_of_the_configuration_are_those_that_there_are():
    assert get_args(CpKind) == KINDS
    assert get_args(ScheduleName) == ("auto", *SCHEDULES)


def test_every_public_name_can_be_reached():
    for name in moe_parallel.__all__:
        assert getattr(moe_parallel, name) is not None
    assert dir(moe_parallel) == sorted(moe_parallel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        moe_parallel.Nothing  # noqa: B018


def test_a_problem_reads_as_one_sentence():
    problem = Problem(key="parallel.ep", value=3, rule="3 does not divide 8", legal="1, 2", next_step="Set it to 2")
    assert str(problem) == "parallel.ep = 3: 3 does not divide 8; legal here: 1, 2. Set it to 2"
    assert str(Problem(key="a.b", value="x", rule="bad")) == "a.b = 'x': bad"
