"""The loss does not depend on the layout: `moe-train verify` on legal layouts, and what it must catch."""

from dataclasses import replace

import pytest
import torch

from moe_parallel import ParallelConfig, PlanRule
from moe_train import scale, step, verify as module
from moe_train.assemble import load_data
from moe_train.cli import main
from moe_train.data.batch import Batch
from moe_train.data.tokens import TokenSplit
from moe_train.models import plan
from moe_train.models.statistics import RouterStatistics
from moe_train.scale import MicrobatchScale, StepScale, TargetCount
from moe_train.testing import ALL_LOSSES, SMALL, STANDARD, short_corpus, small_config
from moe_train.verify import AXES, Case, cases, sample, verify

pytestmark = pytest.mark.dist

# More experts than some ranks have choices in a ragged step, so that some get no token; two microbatches' worth of
# balance sequences, so that a share is not always one of them.
# Three layers, so that four stages of a pipeline have something each.
TRAINING = ("model.num_layers=3", "model.num_experts=8", "model.expert_features=12", *ALL_LOSSES)


def config(*overrides, recipe="tiny_moe"):
    return small_config(*TRAINING, *overrides, recipe=recipe)


def deviations(chosen, *overrides, steps=4, recipe="tiny_moe"):
    with short_corpus():
        found = config(*overrides, recipe=recipe)
        return list(verify(found, chosen, steps=steps, timeout_s=20, data=load_data(found)))


def spread(world, engine, microbatch_sequences, **parallel):
    parallel = ParallelConfig(**parallel)
    return Case(world=world, parallel=parallel, engine=engine, microbatch_sequences=microbatch_sequences)


def assert_all_hold(found):
    assert found
    for deviation in found:
        assert deviation.holds, deviation


@pytest.mark.parametrize("world", [1, 2])
def test_r043_r051_r089_r119_every_layout_equals_one_process(world):
    chosen = cases(config(), world)
    assert len(chosen) == {1: 1, 2: 10}[world]
    assert_all_hold(deviations(chosen, steps=3))


def test_every_layout_of_four_ranks_is_a_case():
    chosen = cases(config(), 4)
    assert len({case.layout for case in chosen}) == len(chosen) == 46
    found = [case.choices for case in chosen if case.parallel.pp == 1]
    kinds = {(case["tp"], case.get("sequence"), case["cp_kind"]) for case in found if case["cp"] == 2}
    assert kinds == {
        *((1, None, kind) for kind in ("ring", "all_to_all", "gather")),
        *((2, how, kind) for how in ("split", "whole") for kind in ("ring", "all_to_all", "gather")),
    }
    kinds = {case["cp_kind"] for case in found if case["cp"] == 4}
    assert kinds == {"ring", "all_to_all", "gather", "hierarchical"}
    assert {(case["tp"], case["sequence"]) for case in found if case["tp"] == 4} == {(4, "split"), (4, "whole")}
    assert {case["engine"] for case in found} == {"zero1", "fsdp"}


@pytest.mark.parametrize(
    "overrides", [("train.loss_norm=microbatch", "train.balance_sequences=2"), ("memory.recompute=full",)]
)
def test_r002_r009_options_that_change_the_scales_or_repeat_the_forward(overrides):
    """Balance microbatches of two sequences; three sequences to a rank, so that padding sequences are made."""
    chosen = [spread(4, engine, 2, ep=2) for engine in ("zero1", "fsdp")]
    assert_all_hold(deviations(chosen, *overrides, "train.global_batch_sequences=7", "train.microbatch_sequences=2"))


@pytest.mark.parametrize("recipe", ["tiny_moe", "tiny_deepseek_v3"])
def test_r107_tied_and_untied_embeddings(recipe):
    for tied in ("true", "false"):
        chosen = [spread(2, "zero1", 2, tp=2), spread(2, "fsdp", 2, ep=2)]
        assert_all_hold(deviations(chosen, f"model.tied_embeddings={tied}", steps=2, recipe=recipe))


@pytest.mark.parametrize("recipe", STANDARD)
def test_r086_r107_the_standard_models_on_layouts_and_engines(recipe):
    """All losses, expert bias and its state, dense layer, shared expert, two tokens ahead, documents in a row."""
    chosen = sample(cases(config(recipe=recipe), 4), 5)
    assert all(any(case.layout.size(axis) > 1 for case in chosen) for axis in AXES)
    assert {case.engine for case in chosen} == {"zero1", "fsdp"}
    assert_all_hold(deviations(chosen, steps=2, recipe=recipe))


# Of the training, in turn: rows of one document and both ways to weigh losses.
ROWS_AND_NORMS = [
    (f"data.separate_documents={rows}", f"train.loss_norm={norm}")
    for rows in ("true", "false")
    for norm in ("token", "microbatch")
]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ROWS_AND_NORMS)
@pytest.mark.parametrize("recipe", STANDARD)
def test_the_standard_models_on_every_layout_of_four_ranks(recipe, overrides):
    chosen = cases(config(*overrides, recipe=recipe), 4)
    assert_all_hold(deviations(chosen, *overrides, steps=2, recipe=recipe))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", STANDARD)
def test_the_standard_models_over_many_steps(recipe):
    chosen = [*cases(config(recipe=recipe), 2), *sample(cases(config(recipe=recipe), 4), 8)]
    assert_all_hold(deviations(chosen, steps=20, recipe=recipe))


# Degrees that differ pairwise, experts over more ranks than share the data, experts split by features.
EIGHT = (
    {"tp": 2, "cp": 2},
    {"tp": 4, "ep": 8, "sequence_parallel": False},
    {"cp": 4, "cp_kind": "hierarchical", "cp_inner": 2},
    {"etp": 2, "ep": 2},
    {"tp": 2, "cp": 2, "ep": 8, "cp_kind": "all_to_all"},
    {"tp": 4, "cp": 2, "etp": 2, "ep": 4},
    {"cp": 2, "etp": 4, "cp_kind": "gather"},
    {"pp": 2, "tp": 2, "ep": 2, "schedule": "zero_bubble"},
    {"pp": 2, "cp": 2, "vpp": 2, "schedule": "interleaved"},
    {"pp": 4, "tp": 2, "etp": 2, "schedule": "gpipe"},
    {"pp": 4, "ep": 2, "pipeline": "Et|t|tm*2|L"},
    {"pp": 2, "vpp": 2, "ep": 4, "schedule": "zero_bubble_v"},
)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ROWS_AND_NORMS[1:3])
@pytest.mark.parametrize("recipe", STANDARD)
def test_r043_the_standard_models_on_eight_ranks(recipe, overrides):
    chosen = [
        spread(8, "zero1" if "zero" in parallel.get("schedule", "") else ("zero1", "fsdp")[number % 2], 2, **parallel)
        for number, parallel in enumerate(EIGHT)
        if recipe == "tiny_deepseek_v3" or "m*2" not in parallel.get("pipeline", "")
    ]
    chosen += sample(cases(config(*overrides, recipe=recipe), 8), 4)
    assert_all_hold(deviations(chosen, *overrides, steps=2, recipe=recipe))


# One rank of dp, or with others; and stages of unequal size, some empty, as one chunk of a rank and as two.
PIPELINES = {
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2 tp2 ep2": (4, {"pp": 2, "tp": 2, "ep": 2}),
    "pp2 cp2": (4, {"pp": 2, "cp": 2}),
    "pp4 dp2 uneven": (8, {"pp": 4, "ep": 2}),
}
UNEVEN = {
    ("tiny_qwen3_moe", 1): "Et|t|t|L",
    ("tiny_qwen3_moe", 2): "E|t|t||t|||L",
    ("tiny_deepseek_v3", 1): "Et|t|tmm|L",
    ("tiny_deepseek_v3", 2): "E|t|t||t||mm|L",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("recipe", STANDARD)
def test_every_schedule_of_a_pipeline_equals_one_process(recipe, name):
    """Embedding and output projection are one parameter, of the first and the last stage, and of the tokens ahead."""
    world, degrees = PIPELINES[name]
    chosen = [
        spread(
            world,
            "zero1",
            2,
            **degrees,
            schedule=schedule,
            vpp=vpp,
            # Three layers are too few for eight stages of equal size.
            pipeline=UNEVEN[recipe, vpp] if "uneven" in name or degrees["pp"] * vpp == 8 else None,
        )
        for schedule, vpp in module.ORDERS
    ]
    assert_all_hold(deviations(chosen, "model.tied_embeddings=true", steps=3, recipe=recipe))


@pytest.mark.parametrize(
    "overrides",
    [
        ("memory.recompute=full", "model.moe_latent_features=9"),
        ("train.loss_norm=microbatch", "train.balance_sequences=2"),
        ("model.balance.bias_recentred=true", "model.sliding_window=5", "model.full_attention_layers=[1]"),
    ],
)
def test_options_of_the_standard_model_on_four_ranks(overrides):
    chosen = [spread(4, engine, 2, ep=2) for engine in ("zero1", "fsdp")]
    sizes = ("train.global_batch_sequences=7", "train.microbatch_sequences=2")
    assert_all_hold(deviations(chosen, *overrides, *sizes, steps=2, recipe="tiny_deepseek_v3"))


@pytest.mark.slow
def test_a_sample_of_eight_ranks_over_many_steps():
    chosen = sample(cases(config(), 8), 6)
    assert_all_hold(deviations(chosen, steps=20))


def test_a_sample_of_eight_ranks():
    chosen = [spread(8, "zero1", 2, tp=2, cp=2, etp=2, ep=4), spread(8, "fsdp", 1, tp=4, ep=8)]
    assert_all_hold(deviations(chosen, steps=2))


def test_a_sample_covers_what_all_cases_have():
    found = cases(config(), 4)
    assert sample(found, len(found)) != []
    chosen = sample(found, 12)
    assert len(chosen) == 12
    every = {item for case in found for item in case.choices.items()}
    assert every == {item for case in chosen for item in case.choices.items()}


def test_r024_verify_sees_a_bias_that_each_rank_moves_by_its_own_load(monkeypatch):
    inner = RouterStatistics.summed

    def summed(self, losses, groups):
        statistics, total = inner(self, losses, groups)
        return replace(statistics, counts=self.counts), total

    monkeypatch.setattr(RouterStatistics, "summed", summed)
    chosen = [spread(2, "zero1", 4)]
    (deviation,) = deviations(chosen, "model.balance.glob=0", steps=2, recipe="tiny_deepseek_v3")
    assert not deviation.holds
    assert deviation.state[1].startswith("bias/")


def test_r086_verify_sees_targets_ahead_that_each_rank_counts_by_itself(monkeypatch):
    inner = StepScale.over
    monkeypatch.setattr(StepScale, "over", lambda self, groups: replace(inner(self, groups), ahead=self.ahead))
    chosen = [spread(2, "zero1", 4)]
    (deviation,) = deviations(chosen, steps=1, recipe="tiny_deepseek_v3")
    assert not deviation.holds


def without_reduction(self, part, inner=MicrobatchScale.of):
    found = inner(self, part)
    return replace(found, routing=replace(found.routing, reduce=None))


def without_context(self, context=None, inner=Batch.sequence_info):
    return inner(self, None)


def of_the_slots_here(self, batch, axis, inner=TokenSplit.padded):
    """Positions that start at 0 in every part of a row."""
    padded = inner(self, batch, axis)
    return replace(padded, position_BS=padded.position_BS % (padded.position_BS.shape[1] // 4))


TWICE = TargetCount(targets=2, balance=2)

SPLIT_FAULTS = {
    "R034 no sum over tp": ({"tp": 2}, plan, "_summed", PlanRule),
    "R007 balance of this rank only": ({"tp": 2}, MicrobatchScale, "of", without_reduction),
    "R007 balance of these slots only": ({"cp": 2}, MicrobatchScale, "of", without_reduction),
    "attention to these slots only": ({"cp": 2}, Batch, "sequence_info", without_context),
    "positions of these slots only": ({"cp": 2}, TokenSplit, "padded", of_the_slots_here),
    "R089 another divisor": ({"cp": 2}, StepScale, "over", lambda self, _: replace(self, targets=TWICE)),
}


@pytest.mark.parametrize("fault", SPLIT_FAULTS)
def test_verify_sees_a_fault_of_split_tokens(fault, monkeypatch):
    parallel, *patch = SPLIT_FAULTS[fault]
    inner = verify.__globals__["_run"]

    def only_where_spread(config, case, *rest):
        with monkeypatch.context() as changed:
            if case.world > 1:
                changed.setattr(*patch)
            return inner(config, case, *rest)

    monkeypatch.setattr(module, "_run", only_where_spread)
    # One row at a time, so that every row is split.
    (deviation,) = deviations([spread(2, "zero1", 1, **parallel)], steps=1)
    assert not deviation.holds


FAULTS = {
    "counts of this rank only": (StepScale, "over", lambda self, groups: self),
    "a norm of this rank only": (step, "reduce_norm_parts", lambda parts, order, groups: sum(parts.values()) ** 0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_r119_r128_verify_sees_a_fault(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    chosen = [spread(2, "zero1", 4, ep=2)]
    (deviation,) = deviations(chosen, "optim.max_grad_norm=0.1", steps=2)
    assert not deviation.holds


def test_verify_sees_a_rank_that_trains_on_the_wrong_sequences(monkeypatch):
    inner = module.assemble

    def assemble(config, groups, data):
        training = inner(config, groups, data)
        return replace(training, cut=replace(training.cut, share=replace(training.share, rank=0)))

    monkeypatch.setattr(module, "assemble", assemble)
    chosen = [spread(2, "zero1", 4)]
    (deviation,) = deviations(chosen, steps=1)
    assert not deviation.holds


def test_verify_sees_a_gradient_that_is_off_by_one_in_1e8(monkeypatch):
    inner = scale.StepScale.microbatch

    def microbatch(self, batch, *arguments, **named):
        found = inner(self, batch, *arguments, **named)
        return replace(found, target_weight_T=found.target_weight_T * (1 + 1e-8 * (batch.num_sequences < 8)))

    monkeypatch.setattr(scale.StepScale, "microbatch", microbatch)
    chosen = [spread(2, "zero1", 4)]
    (deviation,) = deviations(chosen, steps=1)
    assert not deviation.holds


def test_the_command_prints_a_line_for_each_case_and_exits_1_on_a_violation(capsys, monkeypatch):
    arguments = [
        "verify",
        "tiny_moe",
        *SMALL,
        *TRAINING,
        "optim.max_grad_norm=0.1",
        "--world",
        "2",
        "--steps",
        "2",
        "--limit",
        "2",
    ]
    with short_corpus():
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[-1] for line in lines[2:4]] == ["ok", "ok"]
        assert lines[-1] == "the loss does not depend on the layout"
        monkeypatch.setattr(*FAULTS["a norm of this rank only"])
        assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "VIOLATED" in out
    assert "2 of 2 cases beyond the limits" in out


def test_the_command_verifies_the_standard_models(capsys):
    sizes = ("data.sequence_length=13", "train.global_batch_sequences=4", "train.microbatch_sequences=4")
    with short_corpus():
        assert main(["verify", "standard", *sizes, "--world", "2", "--steps", "1", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("the loss does not depend on the layout") == 2
    assert "tiny_qwen3_moe: 1 of 10 cases" in out
    assert "tiny_deepseek_v3: 1 of 10 cases" in out


def test_the_command_refuses_what_it_cannot_do(capsys):
    assert main(["verify", "tiny_moe", "--world", "0"]) == 2
    assert "--world 0 is not at least 1" in capsys.readouterr().err
    assert main(["verify", "tiny_moe", "--world", "2", "parallel.ep=2"]) == 2
    assert "parallel" in capsys.readouterr().err


def test_ragged_steps_are_ragged():
    with short_corpus():
        batch = load_data(config()).train.next_batch()
    cut = module.ragged(batch, 1)
    lengths = cut.valid_BS.sum(1)
    assert 0 in lengths.tolist() or int(lengths.min()) < 13
    assert not torch.equal(cut.target_mask_BS, cut.valid_BS)


def test_both_engines_take_part_whatever_one_of_them_is_told():
    told = config("memory.data_parallel=fsdp", "memory.prefetch_units=1", "memory.reshard.expert=step")
    assert cases(told, 4) == cases(config(), 4)
