"""Recompute changes memory and nothing else: values, gradients, statistics and decisions are those of the first pass.

Shape legend: T tokens, D features, E experts, K choices, R rows.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_kernels import RouterConfig, inject_gradient, route, z_loss
from moe_kernels.permute import permute, permute_probs, row_map, unpermute
from moe_memory import MoeMemoryError, Replay, SavedBytes, activation_policy, run_unit
from moe_memory.recompute import KEEP, RECOMPUTE

TOKENS, FEATURES, EXPERTS, CHOICES = 12, 6, 5, 2
pytestmark = pytest.mark.usefixtures("poisoned")


class SmallMoE(nn.Module):
    """Router with z-loss, dispatch, a loop over the experts that were hit, and a statistic."""

    def __init__(self, seed=0, *, replayed=True, aux=0.5):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.gate_ED = nn.Parameter(torch.randn(EXPERTS, FEATURES, generator=generator, dtype=torch.float64))
        self.w_EDD = nn.Parameter(torch.randn(EXPERTS, FEATURES, FEATURES, generator=generator, dtype=torch.float64))
        self.replayed = replayed
        self.aux = aux
        self.plans = 0
        self.calls = 0
        self.bias_of_call = lambda call: None

    def plan(self, ids_TK):
        self.plans += 1
        return row_map(ids_TK, EXPERTS)

    def forward(self, replay, x_TD):
        self.calls += 1
        replay = replay if self.replayed else Replay()
        logits_TE = x_TD @ self.gate_ED.t()
        bias_E = self.bias_of_call(self.calls)
        routing = route(
            logits_TE,
            RouterConfig(top_k=CHOICES, score="sigmoid"),
            bias_E=bias_E,
            valid_T=torch.ones(len(x_TD), dtype=torch.bool),
            ids_TK=replay.recall("ids"),
        )
        replay.remember("ids", routing.ids_TK)
        layout = replay.once("plan", partial(self.plan, routing.ids_TK))
        probs_TK = inject_gradient(routing.probs_TK, z_loss(logits_TE).sum(), self.aux)
        rows_RD, probs_R = permute(x_TD, layout), permute_probs(probs_TK, layout)
        pieces = rows_RD.split(layout.counts_E.tolist())
        hit = [expert for expert, piece in enumerate(pieces) if len(piece)]
        out_RD = torch.cat([torch.tanh(pieces[expert] @ self.w_EDD[expert]) for expert in hit])
        return x_TD + unpermute(out_RD * probs_R[:, None], layout), routing.counts_E()


def tokens(seed=1):
    return torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(policies, *, seed=1, **arguments):
    """Outputs, statistics of each layer, gradients by name."""
    layers = nn.ModuleList(SmallMoE(index, **arguments) for index in range(len(policies)))
    x_TD = tokens(seed).requires_grad_()
    y_TD, statistics = x_TD, []
    for index, (policy, layer) in enumerate(zip(policies, layers, strict=True)):
        y_TD, counts_E = run_unit(policy, f"layers.{index}", layer, y_TD)
        statistics.append(counts_E)
    y_TD.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layers.named_parameters()} | {"x": x_TD.grad}
    return y_TD.detach(), statistics, gradients


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert len(found[1]) == len(expected[1])
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(mine, theirs)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert gradient.any(), name
        assert torch.equal(found[2][name], gradient), name


def test_the_configuration_names_the_policies():
    assert activation_policy("none") is KEEP
    assert activation_policy("full") is RECOMPUTE


@pytest.mark.parametrize(
    "policies",
    [[RECOMPUTE] * 3, [KEEP, RECOMPUTE, KEEP], [RECOMPUTE, KEEP, RECOMPUTE]],
    ids=["full", "inner", "alternate"],
)
def test_r010_r021_values_gradients_and_statistics_are_those_of_a_plain_run(policies):
    expected, found = run([KEEP] * 3), run(policies)
    assert_same(found, expected)
    for counts_E in found[1]:
        assert int(counts_E.sum()) == TOKENS * CHOICES


def test_r021_a_forward_without_backward_reports_the_true_counts():
    layer, twin = SmallMoE(), SmallMoE()
    _, counts_E = run_unit(RECOMPUTE, "layer", layer, tokens())
    _, expected_E = run_unit(KEEP, "layer", twin, tokens())
    assert torch.equal(counts_E, expected_E)
    assert layer.calls == 1


def test_the_second_pass_repeats_the_work_and_not_the_plan():
    layer = SmallMoE()
    x_TD = tokens().requires_grad_()
    y_TD, _ = run_unit(RECOMPUTE, "layer", layer, x_TD)
    assert (layer.calls, layer.plans) == (1, 1)
    y_TD.sum().backward()
    assert (layer.calls, layer.plans) == (2, 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_r055_the_gradient_of_a_loss_inside_a_unit_counts_once(reentrant):
    """The router's gradient from the auxiliary loss alone: the output does not enter the objective."""

    def gradient(call):
        layer = SmallMoE(aux=0.5)
        x_TD = tokens().requires_grad_()
        y_TD, _ = call(layer, x_TD)
        (y_TD * 0).sum().backward()
        return layer.gate_ED.grad

    layer = SmallMoE()
    (0.5 * z_loss(tokens() @ layer.gate_ED.t()).sum()).backward()
    explicit = layer.gate_ED.grad
    found = gradient(lambda layer, x: checkpoint(layer, Replay(), x, use_reentrant=reentrant))
    torch.testing.assert_close(found, explicit, rtol=1e-12, atol=1e-13)
    assert float(explicit.norm()) > 1
    assert torch.equal(gradient(lambda layer, x: run_unit(RECOMPUTE, "layer", layer, x)), found)


def flip(call):
    """A bias steers the choice only. In every second call it turns the order of the experts around."""
    return torch.arange(EXPERTS, dtype=torch.float64) * (10.0 if call % 2 == 0 else 0.0)


def flipped_run(replayed, shape_of_choice):
    layer = SmallMoE(replayed=replayed)
    layer.bias_of_call = flip if shape_of_choice else lambda call: None
    x_TD = tokens().requires_grad_()
    y_TD, _ = run_unit(RECOMPUTE, "layer", layer, x_TD)
    y_TD.square().sum().backward()
    return [x_TD.grad, layer.gate_ED.grad, layer.w_EDD.grad]


def test_r077_a_router_that_would_choose_otherwise_the_second_time_repeats_its_choices():
    expected = flipped_run(True, False)
    for mine, theirs in zip(flipped_run(True, True), expected, strict=True):
        assert torch.equal(mine, theirs)
    # Without the replay the second pass has other rows, which is an error, or wrong gradients if sizes agree by luck.
    try:
        wrong = flipped_run(False, True)
    except RuntimeError as error:
        wrong = [torch.zeros(())] * 3
        message = str(error)
    else:
        message = "recomputed"
    assert "recomputed" in message or "number of tensors" in message
    assert not all(torch.equal(mine, theirs) for mine, theirs in zip(wrong, expected, strict=True))


def test_r078_the_second_pass_repeats_dropout():
    def unit(replay, x):
        return F.dropout(x, 0.5) * 1.0

    agreement = {}
    for preserved in (True, False):
        x = torch.ones(4000, requires_grad=True)
        call = partial(run_unit, RECOMPUTE, "unit", unit) if preserved else partial(_without_rng, unit)
        y = call(x)
        torch.rand(10)
        before = torch.get_rng_state()
        y.sum().backward()
        if preserved:
            assert torch.equal(torch.get_rng_state(), before)
        agreement[preserved] = float(((x.grad != 0) == (y != 0)).double().mean())
    assert agreement[True] == 1.0
    assert 0.4 < agreement[False] < 0.6


def _without_rng(unit, x):
    return checkpoint(unit, Replay(), x, use_reentrant=False, preserve_rng_state=False)


def test_r078_what_a_unit_drew_from_a_generator_of_its_own_is_remembered():
    generator = torch.Generator().manual_seed(5)

    def unit(replay, x):
        noise = replay.once("noise", lambda: torch.rand(x.shape, generator=generator))
        return torch.where(noise < 0.5, x, 0.0) * x

    x = torch.randn(500, requires_grad=True)
    y = run_unit(RECOMPUTE, "unit", unit, x)
    torch.rand(10, generator=generator)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    assert 150 < int((y != 0).sum()) < 350


def test_r079_empty_experts_do_not_change_what_is_saved():
    """The loop runs over the experts that were hit: from one to all of them, and the input is all that is kept."""
    saved_by_hits = {}
    for favoured in range(1, EXPERTS):
        layer = SmallMoE()
        bias_E = torch.where(torch.arange(EXPERTS) < favoured, 0.0, -100.0).double()
        if favoured == 1:
            bias_E[1] = -50.0
        layer.bias_of_call = lambda call, bias_E=bias_E: bias_E
        x_TD = tokens().requires_grad_()
        with SavedBytes(exclude=layer.parameters()) as saved:
            y_TD, counts_E = run_unit(RECOMPUTE, "layer", layer, x_TD)
        saved_by_hits[int((counts_E > 0).sum())] = (saved.num_storages, saved.total_bytes)
        y_TD.sum().backward()
        assert x_TD.grad.isfinite().all()
    assert len(saved_by_hits) >= 3
    assert set(saved_by_hits.values()) == {(1, TOKENS * FEATURES * 8)}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_microbatches_in_flight_do_not_mix(order):
    def gradients(policy):
        layer = SmallMoE()
        losses = [run_unit(policy, "layer", layer, tokens(seed))[0].square().sum() for seed in range(3)]
        for number in order:
            losses[number].backward()
        return layer.gate_ED.grad, layer.w_EDD.grad, layer.plans

    for mine, theirs in zip(gradients(RECOMPUTE), gradients(KEEP), strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))


def test_a_second_backward_repeats_the_same_decisions():
    layer = SmallMoE()
    x_TD = tokens().requires_grad_()
    loss = run_unit(RECOMPUTE, "layer", layer, x_TD)[0].square().sum()
    loss.backward(retain_graph=True)
    first = x_TD.grad.clone()
    loss.backward()
    assert torch.equal(x_TD.grad, 2 * first)
    assert layer.plans == 1


class Decision:
    """Something that can be watched."""


def test_a_replay_lives_exactly_as_long_as_its_graph():
    alive = weakref.WeakSet()

    def unit(replay, x):
        alive.add(replay.once("decision", Decision))
        return torch.tanh(x * x)

    x = torch.randn(10, requires_grad=True)
    y = run_unit(RECOMPUTE, "unit", unit, x)
    gc.collect()
    assert len(alive) == 1
    y.sum().backward()
    assert len(alive) == 0
    y = run_unit(RECOMPUTE, "unit", unit, x)
    assert len(alive) == 1
    del y
    assert len(alive) == 0


@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
@pytest.mark.parametrize("backward", [True, False])
def test_fifty_steps_leave_nothing_behind(policy, backward):
    """Without the garbage collector: nothing may hang on cycles, which would keep gigabytes until it runs."""
    layers = [SmallMoE(index) for index in range(2)]
    replays = weakref.WeakSet()
    # torch imports more in its first checkpoint, and imports leave cycles that hold the frames above them.
    run_unit(policy, "layer", layers[0], tokens())[0].sum().backward()
    gc.collect()
    gc.disable()
    try:
        for step in range(50):
            y_TD = tokens(step)
            for index, layer in enumerate(layers):
                y_TD, _ = policy.run(f"layers.{index}.full", layer, watched(replays), y_TD)
            if backward:
                y_TD.sum().backward()
            del y_TD
            assert len(replays) == 0, f"step {step}"
    finally:
        gc.enable()


def watched(replays):
    replay = Replay()
    replays.add(replay)
    return replay


@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
def test_without_gradients_a_unit_runs_once(policy):
    layer = SmallMoE()
    with torch.no_grad():
        y_TD, counts_E = run_unit(policy, "layer", layer, tokens())
    assert layer.calls == 1
    assert not y_TD.requires_grad
    assert int(counts_E.sum()) == TOKENS * CHOICES


def test_inputs_without_gradient_still_give_gradients_to_parameters():
    layer, twin = SmallMoE(), SmallMoE()
    run_unit(RECOMPUTE, "layer", layer, tokens())[0].sum().backward()
    run_unit(KEEP, "layer", twin, tokens())[0].sum().backward()
    assert torch.equal(layer.w_EDD.grad, twin.w_EDD.grad)


def test_a_policy_of_ones_own_sees_the_name_and_a_fresh_replay():
    seen = []

    class Alternate:
        def run(self, unit, function, replay, *args):
            seen.append((unit, replay))
            return (RECOMPUTE if unit == "layers.1.full" else KEEP).run(unit, function, replay, *args)

    assert_same(run([Alternate()] * 3), run([KEEP] * 3))
    assert [unit for unit, _ in seen] == ["layers.0.full", "layers.1.full", "layers.2.full"]
    assert len({id(replay) for _, replay in seen}) == 3


def test_remember_keeps_the_first_value_and_recall_is_none_before():
    replay = Replay()
    assert replay.recall("ids") is None
    replay.remember("ids", 0)
    replay.remember("ids", 1)
    assert replay.recall("ids") == 0


def test_once_computes_once_whatever_the_value_is():
    for value in (3, 0, None, ""):
        replay, calls = Replay(), []
        for _ in range(2):
            assert replay.once("x", lambda calls=calls, value=value: calls.append(1) or value) == value
        assert len(calls) == 1


@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
def test_a_decision_may_be_computed_from_what_has_gradients(policy):
    """What autograd would save for it in the first pass would be missing in the second."""
    weight = torch.randn(3, 5, requires_grad=True)

    def unit(replay, x):
        scores = replay.once("scores", lambda: torch.tanh(x @ weight.t()))
        assert not scores.requires_grad
        return torch.tanh(x * weight[scores.argmax(1)])

    x = torch.randn(7, 5, requires_grad=True)
    run_unit(policy, "unit", unit, x).sum().backward()
    expected = torch.autograd.grad(torch.tanh(x * weight[(x @ weight.t()).argmax(1)]).sum(), [x, weight])
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_a_tensor_with_a_graph_cannot_be_remembered():
    """It would belong to the graph of the first pass: its gradient would be lost."""
    x = torch.ones(2, requires_grad=True)
    replay = Replay()
    with pytest.raises(MoeMemoryError, match="'probs' requires a gradient and cannot be remembered"):
        replay.remember("probs", x * 2)
    replay.remember("probs", (x * 2).detach())
    assert replay.recall("probs").tolist() == [2.0, 2.0]
