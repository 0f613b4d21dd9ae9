"""Units are those of the layer that a model names, whatever it calls its layers; what names no unit is refused."""

import pytest
import torch

from moe_memory import LayerUnits, MemoryConfig, MoeMemoryError, SavedBytes, activation_policy, memory_policy, run_unit

LAYERS = ["block{}", "layers.{}", "model.layers.{}", "model.decoder.layers.{}"]


def layer(units):
    def forward(_, x):
        return units.run("mlp", lambda _, x: torch.tanh(torch.tanh(torch.tanh(x).square()).square()), x).square()

    return forward


def kept(recompute, name):
    """Bytes that autograd keeps of three layers."""
    policy = activation_policy(recompute)
    y = torch.randn(8, 4, requires_grad=True)
    with SavedBytes() as saved:
        for number in range(3):
            place = name.format(number)
            y = run_unit(policy, place, layer(LayerUnits(policy, place)), y)
    y.sum().backward()
    return saved.total_bytes


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_parts_are_recomputed_whatever_the_layer_is_called(name):
    size = 8 * 4 * 4
    # Of a layer its input; of the part its input, and its output, which the square keeps.
    assert kept("full", name) == 3 * size
    assert kept(["mlp"], name) == 2 * 3 * size
    assert kept([f"full@{name.format(1)}"], name) == kept("none", name) - (kept("none", name) - 3 * size) // 3


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_leave_whatever_the_layer_is_called(name):
    policy = memory_policy(MemoryConfig(offload=("mlp_norm",), offload_min_elements=1), torch.device("cpu"))
    forward, y = policy.forward(), torch.randn(8, 4, requires_grad=True)
    for number in range(3):
        with forward:
            h = y * 2
            y = torch.tanh(h.square())
            LayerUnits(policy, name.format(number)).idle("mlp_norm", (h,), y)
    assert policy.offloaded_bytes == 2 * 8 * 4 * 4  # the latest stays
    y.sum().backward()


@pytest.mark.parametrize("recompute", ["ful", ["layernom"], ["moe@"], ["mlp", "mlp"]])
def test_what_names_no_unit_is_refused_where_the_policy_is_made(recompute):
    with pytest.raises(MoeMemoryError, match=r"^memory\.recompute = "):
        activation_policy(recompute)


def test_what_names_no_input_is_refused_where_the_policy_is_made():
    with pytest.raises(MoeMemoryError, match=r"^memory\.offload = 'mlp_nrm': .* legal here: attn_norm, "):
        memory_policy(MemoryConfig(offload=("mlp_nrm",)), torch.device("cpu"))
