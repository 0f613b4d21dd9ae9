"""A layer adds what attention returns to the residual stream and normalises the sum in one operation.

Shape legend: B sequences, S slots, T = B*S tokens, D model.
"""

import pytest
import torch

from moe_kernels import norm
from moe_memory.recompute import Replay
from moe_train.data.batch import Batch
from moe_train.testing import small_config, small_model

DENSE = ("model.dense_layers=[0]", "model.dense_features=17")


def draw(dtype):
    torch.manual_seed(5)
    model = small_model(small_config(*DENSE).model, 31, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    token_BS = torch.randint(31, (2, 7))
    info = Batch.from_rows(token_BS, token_BS, torch.ones_like(token_BS, dtype=torch.bool)).sequence_info()
    return model, info, model.context(info, None).rope, torch.randn(14, 24, dtype=dtype, requires_grad=True)


def in_three_operations(layer, x_TD, info, rope):
    total_TD = x_TD + layer.attention(layer.attention_norm(x_TD), info, rope)
    if hasattr(layer, "mlp"):
        return total_TD + layer.mlp(layer.mlp_norm(total_TD))
    y_TD, _ = layer.moe(layer.moe_norm(total_TD), info.valid_BS.flatten(), None, Replay())
    return total_TD + y_TD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("number", [0, 1], ids=["dense", "experts"])
def test_output_and_gradients_are_those_of_an_addition_and_a_norm(number, dtype, monkeypatch):
    model, info, rope, x_TD = draw(dtype)
    layer = model.layers[number]
    wanted = (x_TD, *layer.parameters())
    sums = []
    inner = norm.rms_norm_residual

    def counted(*arguments):
        sums.append(arguments)
        return inner(*arguments)

    monkeypatch.setattr(norm, "rms_norm_residual", counted)
    found_TD, _ = layer(Replay(), x_TD, info, rope, None)
    assert len(sums) == 1
    expected_TD = in_three_operations(layer, x_TD, info, rope)
    grad_TD = torch.randn_like(found_TD)
    assert torch.equal(found_TD, expected_TD)
    for one, other in zip(
        torch.autograd.grad(found_TD, wanted, grad_TD), torch.autograd.grad(expected_TD, wanted, grad_TD), strict=True
    ):
        assert torch.equal(one, other)
