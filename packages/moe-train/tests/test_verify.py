"""The loss does not depend on the layout: `moe-train verify` on legal layouts, and what it must catch."""

from dataclasses import replace

import pytest
import torch

from moe_parallel import ParallelLayout
from moe_train import scale, step, verify as module
from moe_train.assemble import load_data
from moe_train.cli import main
from moe_train.models.statistics import RouterStatistics
from moe_train.scale import StepScale
from moe_train.testing import ALL_LOSSES, SMALL, STANDARD, short_corpus, small_config
from moe_train.verify import Case, cases, sample, verify

pytestmark = pytest.mark.dist

# More experts than some ranks have choices in a ragged step, so that some get no token; two microbatches' worth of
# balance sequences, so that a share is not always one of them.
TRAINING = ("model.num_experts=8", *ALL_LOSSES)


def config(*overrides, recipe="tiny_moe"):
    return small_config(*TRAINING, *overrides, recipe=recipe)


def deviations(chosen, *overrides, steps=4, recipe="tiny_moe"):
    with short_corpus():
        found = config(*overrides, recipe=recipe)
        return list(verify(found, chosen, steps=steps, timeout_s=20, data=load_data(found)))


def assert_all_hold(found):
    assert found
    for deviation in found:
        assert deviation.holds, deviation


@pytest.mark.parametrize("world", [1, 2, 4])
def test_r043_r051_r119_every_layout_and_engine_equals_one_process(world):
    chosen = cases(config(), world)
    assert {case.layout.ep for case in chosen} == {ep for ep in (1, 2, 4) if ep <= world}
    assert {case.engine for case in chosen} == {"zero1", "fsdp"}
    assert_all_hold(deviations(chosen))


@pytest.mark.parametrize(
    "overrides", [("train.loss_norm=microbatch", "train.balance_sequences=2"), ("memory.recompute=full",)]
)
def test_r002_r009_options_that_change_the_scales_or_repeat_the_forward(overrides):
    """Balance microbatches of two sequences; three sequences to a rank, so that padding sequences are made."""
    layout = ParallelLayout(world=4, ep=2)
    chosen = [Case(layout=layout, engine=engine, microbatch_sequences=2) for engine in ("zero1", "fsdp")]
    assert_all_hold(deviations(chosen, *overrides, "train.global_batch_sequences=7", "train.microbatch_sequences=2"))


@pytest.mark.parametrize("recipe", ["tiny_moe", "tiny_deepseek_v3"])
def test_r107_tied_and_untied_embeddings(recipe):
    layout = ParallelLayout(world=2, ep=2)
    for tied in ("true", "false"):
        chosen = [Case(layout=layout, engine=engine, microbatch_sequences=2) for engine in ("zero1", "fsdp")]
        assert_all_hold(deviations(chosen, f"model.tied_embeddings={tied}", steps=2, recipe=recipe))


@pytest.mark.parametrize("recipe", STANDARD)
def test_r086_r107_the_standard_models_on_layouts_and_engines(recipe):
    """All losses, expert bias and its state, dense layer, shared expert, two tokens ahead, documents in a row."""
    chosen = sample(cases(config(recipe=recipe), 4), 3)
    assert {case.layout.ep for case in chosen} == {1, 2, 4}
    assert {case.engine for case in chosen} == {"zero1", "fsdp"}
    assert_all_hold(deviations(chosen, steps=2, recipe=recipe))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("recipe", STANDARD)
def test_the_standard_models_on_every_layout_and_engine_over_many_steps(recipe, world):
    assert_all_hold(deviations(cases(config(recipe=recipe), world), steps=20, recipe=recipe))


@pytest.mark.parametrize(
    "overrides",
    [
        ("memory.recompute=full", "model.moe_latent_features=9"),
        ("train.loss_norm=microbatch", "train.balance_sequences=2"),
        ("model.balance.bias_recentred=true", "model.sliding_window=5", "model.full_attention_layers=[1]"),
    ],
)
def test_options_of_the_standard_model_on_four_ranks(overrides):
    layout = ParallelLayout(world=4, ep=2)
    chosen = [Case(layout=layout, engine=engine, microbatch_sequences=2) for engine in ("zero1", "fsdp")]
    sizes = ("train.global_batch_sequences=7", "train.microbatch_sequences=2")
    assert_all_hold(deviations(chosen, *overrides, *sizes, steps=2, recipe="tiny_deepseek_v3"))


@pytest.mark.slow
def test_a_sample_of_eight_ranks_over_many_steps():
    chosen = sample(cases(config(), 8), 4)
    assert {case.layout.ep for case in chosen} == {1, 2, 4, 8}
    assert_all_hold(deviations(chosen, steps=20))


def test_a_sample_of_eight_ranks():
    chosen = sample(cases(config(), 8), 2)
    assert {case.engine for case in chosen} == {"zero1", "fsdp"}
    assert_all_hold(deviations(chosen, steps=2))


def test_a_sample_covers_what_all_cases_have():
    found = cases(config(), 4)
    assert sample(found, len(found)) != []
    chosen = sample(found, 3)
    assert len(chosen) == 3
    assert {case.layout.ep for case in chosen} == {1, 2, 4}
    assert len({case.engine for case in chosen}) == 2


def test_r024_verify_sees_a_bias_that_each_rank_moves_by_its_own_load(monkeypatch):
    inner = RouterStatistics.summed

    def summed(self, losses, groups):
        statistics, total = inner(self, losses, groups)
        return replace(statistics, counts=self.counts), total

    monkeypatch.setattr(RouterStatistics, "summed", summed)
    chosen = [Case(layout=ParallelLayout(world=2), engine="zero1", microbatch_sequences=4)]
    (deviation,) = deviations(chosen, "model.balance.glob=0", steps=2, recipe="tiny_deepseek_v3")
    assert not deviation.holds
    assert deviation.state[1].startswith("bias/")


def test_r086_verify_sees_targets_ahead_that_each_rank_counts_by_itself(monkeypatch):
    inner = StepScale.over
    monkeypatch.setattr(StepScale, "over", lambda self, groups: replace(inner(self, groups), ahead=self.ahead))
    chosen = [Case(layout=ParallelLayout(world=2), engine="zero1", microbatch_sequences=4)]
    (deviation,) = deviations(chosen, steps=1, recipe="tiny_deepseek_v3")
    assert not deviation.holds


FAULTS = {
    "counts of this rank only": (StepScale, "over", lambda self, groups: self),
    "a norm of this rank only": (step, "reduce_norm_parts", lambda parts, order, groups: sum(parts.values()) ** 0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_r119_r128_verify_sees_a_fault(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    chosen = [Case(layout=ParallelLayout(world=2, ep=2), engine="zero1", microbatch_sequences=4)]
    (deviation,) = deviations(chosen, "optim.max_grad_norm=0.1", steps=2)
    assert not deviation.holds


def test_verify_sees_a_rank_that_trains_on_the_wrong_sequences(monkeypatch):
    inner = module.assemble

    def assemble(config, groups, data):
        training = inner(config, groups, data)
        return replace(training, share=replace(training.share, rank=0))

    monkeypatch.setattr(module, "assemble", assemble)
    chosen = [Case(layout=ParallelLayout(world=2), engine="zero1", microbatch_sequences=4)]
    (deviation,) = deviations(chosen, steps=1)
    assert not deviation.holds


def test_verify_sees_a_gradient_that_is_off_by_one_in_1e8(monkeypatch):
    inner = scale.StepScale.microbatch

    def microbatch(self, batch, *arguments):
        found = inner(self, batch, *arguments)
        return replace(found, target_weight_T=found.target_weight_T * (1 + 1e-8 * (batch.num_sequences < 8)))

    monkeypatch.setattr(scale.StepScale, "microbatch", microbatch)
    chosen = [Case(layout=ParallelLayout(world=2), engine="zero1", microbatch_sequences=4)]
    (deviation,) = deviations(chosen, steps=1)
    assert not deviation.holds


def test_the_command_prints_a_line_for_each_case_and_exits_1_on_a_violation(capsys, monkeypatch):
    arguments = ["verify", "tiny_moe", *SMALL, *TRAINING, "--world", "2", "--steps", "2", "--limit", "2"]
    with short_corpus():
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[-1] for line in lines[2:4]] == ["ok", "ok"]
        assert lines[-1] == "the loss does not depend on the layout"
        monkeypatch.setattr(StepScale, "over", lambda self, groups: self)
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
    assert "tiny_qwen3_moe: 1 of 4 cases" in out
    assert "tiny_deepseek_v3: 1 of 4 cases" in out


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
