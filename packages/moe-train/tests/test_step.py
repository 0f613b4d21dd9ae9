"""Invariances of one step, judged in float64 (numerics §9)."""

from dataclasses import replace

import pytest
import torch

from moe_train.assemble import assemble
from moe_train.evaluate import validation_loss
from moe_train.scale import LoadWindow
from moe_train.step import run_step
from moe_train.testing import ALL_LOSSES, microbatches, short_corpus, small_config


def training(*overrides):
    with short_corpus():
        return assemble(small_config("memory.compute_dtype=float64", "optim.max_grad_norm=none", *overrides))


def ragged(batch):
    """Seven sequences, some rows short, some targets masked: what the end of an epoch and chat data look like."""
    batch = batch.rows(0, 7)
    lengths = torch.tensor([13, 13, 13, 13, 5, 13, 1])
    valid = batch.valid_BS & (torch.arange(13) < lengths[:, None])
    mask = valid.clone()
    mask[0, 3:9] = False
    mask[3] = False
    return replace(batch, valid_BS=valid, target_mask_BS=mask)


def window(run):
    model = run.config.model
    counts = torch.arange(model.num_layers * model.num_experts).view(model.num_layers, model.num_experts) + 1
    return LoadWindow(counts_LE=counts, num_tokens=50)


def gradients(run):
    """Main gradients by name, read from the parameters of the model after a backward."""
    return {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}


def step_and_state(run, batches):
    found = {}
    inner = run.engine.finish

    def finish():
        inner()
        found.update(gradients(run))

    run.engine.finish = finish
    results = [
        run_step(run, microbatches(run, batch), updates=i, window=window(run)) for i, batch in enumerate(batches)
    ]
    state = {tensor.name: tensor.tensor.clone() for tensor in run.engine.state_tensors()}
    return results, found, state


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@pytest.mark.parametrize("loss_norm", ["token", "microbatch"])
@pytest.mark.parametrize("shape", ["even", "ragged"])
def test_r002_r005_r009_r119_accumulation_changes_nothing(loss_norm, shape):
    reference = None
    for size in (8, 4, 2):
        run = training(
            *ALL_LOSSES,
            f"train.loss_norm={loss_norm}",
            f"train.microbatch_sequences={size}",
            "train.balance_sequences=2",
        )
        batches = [run.data.train.next_batch() for _ in range(3)]
        if shape == "ragged":
            batches = [ragged(batch) for batch in batches]
        results, grads, state = step_and_state(run, batches)
        if reference is None:
            reference = results, grads, state
            continue
        for mine, theirs in zip(results, reference[0], strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-10)
            assert mine.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-8)
            assert torch.equal(mine.statistics.counts, theirs.statistics.counts)
            for name in ("aux", "seq", "glob", "z"):
                torch.testing.assert_close(
                    getattr(mine.statistics, name), getattr(theirs.statistics, name), rtol=1e-8, atol=0
                )
        assert max(relative(grads[name], value) for name, value in reference[1].items()) < 1e-8
        assert max(relative(state[name], value) for name, value in reference[2].items()) < 1e-8
    assert all(float(value.norm()) > 0 for value in reference[1].values())


def test_first_step_gradients_agree_across_accumulation_to_1e_10():
    found = []
    for size in (8, 2):
        run = training(*ALL_LOSSES, f"train.microbatch_sequences={size}")
        _, grads, _ = step_and_state(run, [ragged(run.data.train.next_batch())])
        found.append(grads)
    assert max(relative(found[1][name], value) for name, value in found[0].items()) < 1e-10


@pytest.mark.parametrize("term", ["aux", "seq", "glob", "z"])
def test_r001_r017_losses_reach_the_router_and_never_the_reported_loss(term):
    """The gradient of a balance loss is linear in its coefficient, and the reported loss ignores it."""
    found = []
    for coefficient in (0.0, 0.5, 1.0):
        run = training(
            *[f"model.balance.{name}=0.0" for name in ("aux", "seq", "glob", "z")],
            f"model.balance.{term}={coefficient}",
        )
        results, grads, _ = step_and_state(run, [run.data.train.next_batch()])
        found.append((results[0].loss, grads["layers.1.moe.router.weight"]))
    assert found[0][0] == found[1][0] == found[2][0]
    half, whole = found[1][1] - found[0][1], found[2][1] - found[0][1]
    assert float(half.norm()) > 1e-6
    assert relative(2 * half, whole) < 1e-9


def test_padding_is_invisible():
    """Rows of padding and padding at the end of rows change no loss, statistic or gradient (R003, R038)."""
    run = training(*ALL_LOSSES)
    whole = run.data.train.next_batch().rows(0, 3)
    found = []
    for garbage in (0, 200):
        valid = whole.valid_BS & (torch.arange(13) < torch.tensor([[13], [4], [0]]))
        token = torch.where(valid, whole.token_BS, garbage)
        target = torch.where(valid, whole.target_BS, garbage)
        batch = replace(whole, token_BS=token, target_BS=target, valid_BS=valid, target_mask_BS=valid)
        run = training(*ALL_LOSSES)
        results, grads, _ = step_and_state(run, [batch])
        found.append((results[0].loss, results[0].statistics, grads))
    run = training(*ALL_LOSSES)
    results, grads, _ = step_and_state(run, [batch.rows(0, 2)])
    found.append((results[0].loss, results[0].statistics, grads))
    for loss, statistics, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-12)
        assert torch.equal(statistics.counts, found[0][1].counts)
        assert int(statistics.counts.sum()) == (13 + 4) * 2 * 2
        assert int(statistics.dropped.sum()) == 0
        for name, value in found[0][2].items():
            assert relative(grads[name], value) < 1e-10, name


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_r010_r016_r020_r021_recompute_and_evaluation_leave_no_trace(recompute):
    reference = training(*ALL_LOSSES)
    expected = step_and_state(reference, [reference.data.train.next_batch() for _ in range(2)])
    run = training(*ALL_LOSSES, f"memory.recompute={recompute}")
    batches = [run.data.train.next_batch() for _ in range(2)]
    first = run_step(run, microbatches(run, batches[0]), updates=0, window=window(run))
    before = validation_loss(run, 4)
    assert validation_loss(run, 4) == before
    second = run_step(run, microbatches(run, batches[1]), updates=1, window=window(run))
    for mine, theirs in zip((first, second), expected[0], strict=True):
        assert mine.loss == theirs.loss
        assert mine.gradient_norm == theirs.gradient_norm
        for name, value in vars(mine.statistics).items():
            assert torch.equal(value, getattr(theirs.statistics, name)), name
        counts = mine.statistics.counts
        assert counts.sum(1).tolist() == [8 * 13 * 2] * 2
    for tensor in run.engine.state_tensors():
        assert torch.equal(tensor.tensor, expected[2][tensor.name]), tensor.name


def test_a_non_finite_step_is_skipped_and_leaves_everything_as_it_was():
    run = training()
    run_step(run, microbatches(run, run.data.train.next_batch()), updates=0, window=None)
    before = {tensor.name: tensor.tensor.clone() for tensor in run.engine.state_tensors()}
    values = run.engine.state_values()
    name = "layers.0.attention.q_proj.weight"
    parameter = dict(run.model.named_parameters())[name]
    hook = parameter.register_hook(lambda grad: grad * float("nan"))
    result = run_step(run, microbatches(run, run.data.train.next_batch()), updates=1, window=None)
    hook.remove()
    assert result.skipped
    assert run.engine.state_values() == values
    for tensor in run.engine.state_tensors():
        assert torch.equal(tensor.tensor, before[tensor.name])
    assert not run_step(run, microbatches(run, run.data.train.next_batch()), updates=1, window=None).skipped


def test_bad_router_rows_are_counted_by_layer():
    run = training()
    weight = dict(run.model.named_parameters())["layers.1.moe.router.weight"]
    with torch.no_grad():
        weight[:, 0] = float("nan")
    result = run_step(run, microbatches(run, run.data.train.next_batch()), updates=0, window=None)
    assert result.skipped
    assert result.statistics.bad_rows.tolist() == [0, 8 * 13]


def test_bf16_computes_in_bf16_and_keeps_router_and_masters_in_fp32():
    with short_corpus():
        run = assemble(small_config("memory.compute_dtype=bfloat16"))
    dtypes = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    router = {name for name in dtypes if name.endswith("router.weight")}
    assert len(router) == 2
    assert all(dtype == (torch.float32 if name in router else torch.bfloat16) for name, dtype in dtypes.items())
    assert {tensor.tensor.dtype for tensor in run.engine.state_tensors()} == {torch.float32}
    losses = [
        run_step(run, microbatches(run, run.data.train.next_batch()), updates=i, window=None).loss for i in range(12)
    ]
    assert losses[-1] < losses[0] - 0.5


def test_steps_are_bitwise_repeatable():
    runs = []
    for _ in range(2):
        with short_corpus():
            run = assemble(small_config(*ALL_LOSSES))
        results = [
            run_step(run, microbatches(run, run.data.train.next_batch()), updates=i, window=window(run))
            for i in range(3)
        ]
        runs.append(([r.loss for r in results], {t.name: t.tensor.clone() for t in run.engine.state_tensors()}))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


@pytest.mark.parametrize("tied", [True, False])
def test_r107_tied_is_one_parameter_and_untied_are_two(tied):
    run = training(f"model.tied_embeddings={str(tied).lower()}")
    parameters = dict(run.model.named_parameters())
    before = {name: value.detach().clone() for name, value in parameters.items()}
    for updates in range(5):
        run_step(run, microbatches(run, run.data.train.next_batch()), updates=updates, window=None)
    assert not torch.equal(parameters["embedding.weight"], before["embedding.weight"])
    saved = {tensor.name for tensor in run.engine.state_tensors()}
    assert ("master/head.weight" in saved) is not tied
    if not tied:
        assert not torch.equal(parameters["head.weight"], parameters["embedding.weight"])
        batch = run.data.train.next_batch()
        with torch.no_grad():
            parameters["head.weight"].zero_()
            assert not run.model(batch.token_BS, batch.sequence_info(), None).logits_BSV.any()
