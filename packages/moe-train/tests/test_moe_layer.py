"""The Mixture-of-Experts layer written out with loops: shared expert, its gate, and experts at another width."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moe_memory.recompute import Replay
from moe_parallel import Pending
from moe_train.models.flops import decoder_costs
from moe_train.testing import small_config, small_model

VARIANTS = {
    "plain": (),
    "shared": ("model.shared_features=9",),
    "gated": ("model.shared_features=9", "model.shared_gate=true"),
    "latent": ("model.moe_latent_features=6",),
    "latent and shared": ("model.moe_latent_features=6", "model.shared_features=9"),
    "dense before": ("model.dense_layers=[0]", "model.dense_features=17"),
}


def layer_of(name):
    config = small_config(*VARIANTS[name]).model
    model = small_model(config, 31, torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    return config, model, model.layers[-1].moe


def swiglu(x, w1_DF, w2_FD):
    gate, up = (x @ w1_DF).chunk(2)
    return (F.silu(gate) * up) @ w2_FD


def written_out(layer, x_TD, valid_T, config):
    rows = []
    for x, valid in zip(x_TD, valid_T.tolist(), strict=True):
        probs_E = torch.softmax(layer.router.weight @ x, -1)
        chosen = probs_E.topk(config.router.top_k)
        weights = config.router.scale * chosen.values / chosen.values.sum()
        inside = x if layer.latent_down is None else layer.latent_down.weight @ x
        y = torch.zeros_like(inside)
        for weight, e in zip(weights, chosen.indices.tolist(), strict=True):
            y = y + valid * weight * swiglu(inside, layer.experts.w1_ED2F[e].flatten(1), layer.experts.w2_EFD[e])
        y = y if layer.latent_up is None else layer.latent_up.weight @ y
        if layer.shared is not None:
            mlp = layer.shared.mlp
            shared = swiglu(x, mlp.gate_up_proj.weight.flatten(0, 1).t(), mlp.down_proj.weight.t())
            gate = 1 if layer.shared.gate is None else torch.sigmoid(layer.shared.gate.weight[0] @ x)
            y = y + gate * shared
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_output_and_gradients_equal_the_layer_written_out(name):
    config, _, layer = layer_of(name)
    x_TD = torch.randn(10, 24, dtype=torch.float64, requires_grad=True)
    valid_T = torch.arange(10) % 5 < torch.tensor([5, 3]).repeat_interleave(5)
    y_TD, statistics = layer(x_TD, valid_T, None, Replay())
    expected_TD = written_out(layer, x_TD, valid_T, config)
    torch.testing.assert_close(y_TD, expected_TD, rtol=1e-10, atol=1e-12)
    assert int(statistics.counts.sum()) == 8 * 2
    inputs = [x_TD, *layer.parameters()]
    grad_TD = torch.randn_like(expected_TD)
    found = torch.autograd.grad(y_TD, inputs, grad_TD)
    wanted = torch.autograd.grad(expected_TD, inputs, grad_TD)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
        assert float(other.norm()) > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_r125_counts_equal_the_built_model(name):
    config, model, _ = layer_of(name)
    costs = decoder_costs(config, 31)
    assert sum(parameter.numel() for parameter in model.parameters()) == costs.parameters
    experts = model.layers[-1].moe.experts
    unused = sum(p.numel() for p in experts.parameters()) // config.num_experts * (config.num_experts - 2)
    assert costs.active_parameters == costs.parameters - unused * len(model.routers())


def test_a_latent_width_makes_experts_and_what_is_dispatched_smaller():
    """By alpha = D / L, which many more experts of the same total size make up for."""
    _, _, plain = layer_of("plain")
    _, _, latent = layer_of("latent")
    assert latent.experts.w1_ED2F.numel() * 4 == plain.experts.w1_ED2F.numel()
    assert latent.router.weight.shape == plain.router.weight.shape
    seen = []
    inner = latent.dispatcher.prepare
    latent.dispatcher.prepare = lambda plan, x, probs: seen.append(x.shape) or inner(plan, x, probs)
    latent(torch.randn(3, 24, dtype=torch.float64), torch.ones(3, dtype=torch.bool), None, Replay())
    assert seen == [(3, 6)]


@pytest.mark.parametrize("name", ["plain", "shared"])
def test_what_arrived_is_gone_while_experts_compute(name):
    """Their rows are copies of it."""
    _, _, layer = layer_of(name)
    arrived, alive = [], []

    def exchange(plan, parcel):
        received = replace(parcel, rows=parcel.rows.clone())
        arrived.append(weakref.ref(received.rows))
        return Pending.completed(received)

    layer.dispatcher.exchange = exchange
    layer.experts.register_forward_pre_hook(lambda *_: alive.append(arrived[-1]() is not None))
    x_TD = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    layer(x_TD, torch.ones(3, dtype=torch.bool), None, Replay())[0].sum().backward()
    assert alive == [False]
