"""The expert bias of a training: who moves it, when, and that it survives everything else (numerics §3)."""

from types import SimpleNamespace

import pytest
import torch

from moe_parallel import AxisGroups, ParallelLayout, run_distributed
from moe_train.assemble import assemble
from moe_train.checkpoint.load import latest_checkpoint, read_index
from moe_train.config.load import load_config
from moe_train.evaluate import validation_loss
from moe_train.models.bias import bias_tensors
from moe_train.progress import Progress, restore, save
from moe_train.step import run_step
from moe_train.testing import STANDARD, microbatches, short_corpus, small_config

RATE = 2.0**-7


def training(*overrides):
    options = (f"model.balance.bias_rate={RATE}", "memory.compute_dtype=float64", *overrides)
    with short_corpus():
        return assemble(small_config(*options, recipe="tiny_deepseek_v3"))


def steps(run, number, first=0):
    results = []
    for update in range(first, first + number):
        results.append(run_step(run, microbatches(run, run.data.train.next_batch()), updates=update, window=None))
    return results


def biases(run):
    return {router.name: router.bias_E.clone() for router in run.model.routers()}


def test_r022_r024_it_moves_against_the_load_of_the_step_in_every_layer_with_experts():
    """Layers behind one without experts, and those of multi-token prediction, move too."""
    run = training("model.dense_layers=[1]")
    assert [router.name for router in run.model.routers()] == ["layers.0", "layers.2", "mtp.0", "mtp.1"]
    places = [router.bias_E.data_ptr() for router in run.model.routers()]
    expected = torch.zeros(4, 8, dtype=torch.float64)
    for result in steps(run, 3):
        counts = result.statistics.counts
        tokens = int(counts[0].sum()) // 4
        assert counts.sum(1).tolist() == [tokens * 4] * 4
        expected += RATE * torch.sign(counts.double().mean(1, keepdim=True) - counts)
    found = biases(run)
    assert torch.equal(torch.stack(list(found.values())), expected)
    assert all(bias.any() for bias in found.values())
    assert [router.bias_E.data_ptr() for router in run.model.routers()] == places  # R094


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("size", [8, 2])
def test_r020_r021_recompute_evaluation_and_microbatches_leave_it_alone(recompute, size):
    reference = training()
    expected = [result.statistics.counts for result in steps(reference, 2)]
    run = training(f"memory.recompute={recompute}", f"train.microbatch_sequences={size}")
    found = [result.statistics.counts for result in steps(run, 1)]
    before = biases(run)
    validation_loss(run, 4)
    assert all(torch.equal(value, before[name]) for name, value in biases(run).items())
    found += [result.statistics.counts for result in steps(run, 1, first=1)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(value, biases(reference)[name]) for name, value in biases(run).items())


def test_a_skipped_step_does_not_move_it():
    run = training()
    steps(run, 1)
    before = biases(run)
    hook = run.model.embedding.weight.register_hook(lambda grad: grad * float("nan"))
    assert steps(run, 1, first=1)[0].skipped
    hook.remove()
    assert all(torch.equal(value, before[name]) for name, value in biases(run).items())
    assert not steps(run, 1, first=1)[0].skipped
    assert not all(torch.equal(value, before[name]) for name, value in biases(run).items())


def test_a_rate_of_zero_keeps_it_and_none_leaves_it_out():
    run = training("model.balance.bias_rate=0.0")
    steps(run, 1)
    assert not any(bias.any() for bias in biases(run).values())
    without = training("model.balance.bias_rate=none")
    steps(without, 1)
    assert not list(bias_tensors(without.model, AxisGroups()))


def test_r019_it_is_float32_where_the_model_computes_in_bfloat16():
    run = training("memory.compute_dtype=bfloat16")
    steps(run, 3)
    assert {bias.dtype for bias in biases(run).values()} == {torch.float32}
    expected = {round(float(value) / RATE, 3) for bias in biases(run).values() for value in bias}
    assert expected <= {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0}


def test_r094_a_checkpoint_holds_it_and_a_resumed_run_continues_it_bitwise(tmp_path):
    straight = training()
    steps(straight, 4)
    run = training()
    steps(run, 2)
    where = SimpleNamespace(checkpoints=tmp_path)
    progress = Progress.start(run)
    progress.step = progress.updates = 2
    save(run, where, progress)
    index = read_index(latest_checkpoint(tmp_path))
    names = [name for name in index.tensors if name.startswith("bias/")]
    assert sorted(names) == ["bias/layers.1", "bias/layers.2", "bias/mtp.0", "bias/mtp.1"]
    again = training()
    found = restore(again, where)
    assert found.updates == 2
    assert all(torch.equal(value, biases(run)[name]) for name, value in biases(again).items())
    assert any(bias.any() for bias in biases(again).values())
    steps(again, 2, first=2)
    assert all(torch.equal(value, biases(straight)[name]) for name, value in biases(again).items())
    for mine, other in zip(again.engine.state_tensors(), straight.engine.state_tensors(), strict=True):
        assert torch.equal(mine.tensor, other.tensor), mine.name


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["zero1", "fsdp"])
def test_r094_it_moves_from_two_ranks_to_one(tmp_path, engine):
    """Owned by one rank when it is saved, read by all of them."""
    where = SimpleNamespace(checkpoints=tmp_path)
    double = ("memory.compute_dtype=float64", f"model.balance.bias_rate={RATE}")

    def on_rank(mesh):
        options = (*double, "parallel.ep=2", f"memory.data_parallel={engine}")
        run = assemble(standard(*options, world=2), mesh)
        steps(run, 2)
        progress = Progress.start(run)
        progress.step = progress.updates = 2
        save(run, where, progress)
        again = assemble(standard(*options, world=2), mesh)
        restore(again, where)
        return all(torch.equal(value, biases(run)[name]) for name, value in biases(again).items())

    with short_corpus():
        assert run_distributed(ParallelLayout(world=2, ep=2), on_rank, timeout_s=20, limit_s=60) == [True, True]
    straight, run = training(), training()
    steps(straight, 3)
    restore(run, where)
    steps(run, 1, first=2)
    assert all(torch.equal(value, biases(straight)[name]) for name, value in biases(run).items())


def standard(*overrides, world):
    return load_config("tiny_deepseek_v3", [], [*STANDARD["tiny_deepseek_v3"], *overrides], world=world).config
