"""Shape legend: R rows, E experts, D model, F features."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from moe_kernels import GroupedExperts, RouterConfig, route, select_grouped_gemm
from moe_kernels.permute import permute, permute_probs, row_map, unpermute
from moe_kernels.testing import RaggedCase

ProbsOn = Literal["activation", "output", "input"]
CASE = RaggedCase("mixed", (5, 0, 8, 2), rows_after=3)


def build(dtype: torch.dtype = torch.float64, backend: str = "auto", **options: Any) -> GroupedExperts:
    experts = GroupedExperts(4, 8, 6, backend=select_grouped_gemm(backend, dtype, "cpu"), dtype=dtype, **options)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


def reference(experts: GroupedExperts, rows_RD: Tensor, probs_R: Tensor, counts: tuple[int, ...]) -> Tensor:
    """numerics §5, one row at a time."""
    act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[experts.activation]
    outputs = []
    row = 0
    for expert, count in enumerate(counts):
        for _ in range(count):
            x_D, p = rows_RD[row], probs_R[row]
            if experts.probs_on == "input":
                x_D, p = x_D * p, torch.ones_like(p)
            gate_F, up_F = (x_D @ experts.w1_ED2F[expert].flatten(1)).chunk(2)
            outputs.append(p * ((act(gate_F) * up_F) @ experts.w2_EFD[expert]))
            row += 1
    return torch.stack(outputs + [rows_RD.new_zeros(8)] * (rows_RD.shape[0] - row))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("probs_on", ["activation", "output", "input"])
def test_r076_each_placement_follows_its_formula(activation: Any, probs_on: ProbsOn) -> None:
    experts = build(activation=activation, probs_on=probs_on)
    rows_RD = torch.randn(CASE.num_rows, 8, dtype=torch.float64, requires_grad=True)
    probs_R = torch.rand(CASE.num_rows, dtype=torch.float64, requires_grad=True)
    leaves = (rows_RD, probs_R, experts.w1_ED2F, experts.w2_EFD)
    weight_RD = torch.randn(CASE.num_rows, 8, dtype=torch.float64)
    got = experts(rows_RD, probs_R, CASE.offsets_E())
    expected = reference(experts, rows_RD, probs_R, CASE.counts)
    torch.testing.assert_close(got, expected)
    for one, other in zip(
        torch.autograd.grad((got * weight_RD).sum(), leaves),
        torch.autograd.grad((expected * weight_RD).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_r076_before_and_after_w2_are_equal_and_before_the_experts_is_not() -> None:
    rows_RD = torch.randn(CASE.num_rows, 8, dtype=torch.float64)
    probs_R = torch.rand(CASE.num_rows, dtype=torch.float64, requires_grad=True)
    results = {}
    experts = build()
    for placement in ("activation", "output", "input"):
        other = build(probs_on=placement)
        other.load_state_dict(experts.state_dict())
        y_RD = other(rows_RD, probs_R, CASE.offsets_E())
        results[placement] = (y_RD, *torch.autograd.grad(y_RD.square().sum(), probs_R))
    for one, other_result in zip(results["activation"], results["output"], strict=True):
        torch.testing.assert_close(one, other_result, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(results["activation"][0], results["input"][0])


@pytest.mark.parametrize("probs_on", ["activation", "output", "input"])
def test_r076_probabilities_stay_in_the_internal_dtype_until_the_multiply(probs_on: ProbsOn) -> None:
    experts = build(torch.bfloat16, probs_on=probs_on)
    rows_RD = torch.randn(CASE.num_rows, 8).bfloat16()
    # These two differ in fp32 and are equal in bf16; their outputs must differ somewhere.
    probs_R = torch.full((CASE.num_rows,), 0.7)
    close_R = probs_R * (1 + 2**-10)
    assert torch.equal(probs_R.bfloat16(), close_R.bfloat16())
    outputs = [experts(rows_RD, p, CASE.offsets_E()) for p in (probs_R, close_R)]
    assert outputs[0].dtype == torch.bfloat16
    assert not torch.equal(*outputs)
    leaf_R = probs_R.requires_grad_()
    (grad_R,) = torch.autograd.grad(experts(rows_RD, leaf_R, CASE.offsets_E()).sum(), leaf_R)
    assert grad_R.dtype == torch.float32


def test_r053_experts_without_rows_stay_attached_with_zero_gradients() -> None:
    experts = build(torch.float32)
    rows_RD = torch.zeros(0, 8, requires_grad=True)
    y_RD = experts(rows_RD, torch.zeros(0), torch.zeros(4, dtype=torch.int32))
    assert y_RD.shape == (0, 8)
    y_RD.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert not parameter.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r130_two_steps_in_poisoned_memory_agree(dtype: torch.dtype) -> None:
    experts = build(dtype)
    rows_RD = torch.randn(CASE.num_rows, 8).to(dtype)
    probs_R = torch.rand(CASE.num_rows)
    steps = []
    for _ in range(2):
        experts.zero_grad()
        y_RD = experts(rows_RD, probs_R, CASE.offsets_E())
        y_RD.square().sum().backward()
        steps.append([y_RD, *(parameter.grad for parameter in experts.parameters())])
    for one, other in zip(*steps, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


def test_parameters_are_uninitialised_and_described() -> None:
    experts = GroupedExperts(3, 8, 6, backend=select_grouped_gemm("loop", torch.float32, "cpu"), device="meta")
    assert {name: tuple(p.shape) for name, p in experts.named_parameters()} == {
        "w1_ED2F": (3, 8, 2, 6),
        "w2_EFD": (3, 6, 8),
    }
    assert "3, 8, 6" in repr(experts)


@pytest.mark.parametrize("probs_on", ["activation", "output"])
def test_r060_inner_features_may_be_split_and_the_parts_added_up(probs_on: ProbsOn) -> None:
    """Two ranks with some of the inner features each, as expert tensor parallelism has it, against one with all."""
    whole = build(torch.float64, probs_on=probs_on)
    rows_RD = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    probs_R = torch.rand(12, dtype=torch.float64, requires_grad=True)
    offsets_E = torch.tensor([3, 3, 10, 12], dtype=torch.int32)
    grad_RD = torch.randn(12, 8, dtype=torch.float64)
    expected = whole(rows_RD, probs_R, offsets_E)
    total, grads = torch.zeros_like(expected), [torch.zeros_like(rows_RD), torch.zeros_like(probs_R)]
    for features in (slice(0, 2), slice(2, 6)):
        part = build(torch.float64, probs_on=probs_on)
        part.w1_ED2F.data = whole.w1_ED2F.detach()[..., features].clone()
        part.w2_EFD.data = whole.w2_EFD.detach()[:, features].clone()
        y_RD = part(rows_RD, probs_R, offsets_E)
        total += y_RD.detach()
        for grad, more in zip(grads, torch.autograd.grad(y_RD, [rows_RD, probs_R], grad_RD), strict=True):
            grad.add_(more)
    torch.testing.assert_close(total, expected.detach())
    for grad, other in zip(grads, torch.autograd.grad(expected, [rows_RD, probs_R], grad_RD), strict=True):
        torch.testing.assert_close(grad, other)


def test_a_fake_step_counts_the_flops_of_six_products() -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        experts = build(torch.float32, "torch")
        rows_RD = torch.empty(40, 8, requires_grad=True)
        experts(rows_RD, torch.empty(40), torch.empty(4, dtype=torch.int32)).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 40 * 8 * (12 + 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_whole_layer_equals_mixtral_of_transformers(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    hf_config = transformers.MixtralConfig(
        hidden_size=8, intermediate_size=6, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    )
    block = MixtralSparseMoeBlock(hf_config).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    experts = build(dtype)
    with torch.no_grad():
        experts.w1_ED2F.copy_(block.experts.gate_up_proj.transpose(1, 2).reshape(4, 8, 2, 6))
        experts.w2_EFD.copy_(block.experts.down_proj.transpose(1, 2))
    x_TD = torch.randn(30, 8, dtype=dtype, requires_grad=True)
    grad_TD = torch.randn(30, 8, dtype=dtype)
    expected = block(x_TD[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected_grads = torch.autograd.grad(
        expected.view(30, 8), (x_TD, block.gate.weight, block.experts.down_proj), grad_TD
    )

    routing = route(x_TD @ block.gate.weight.t(), RouterConfig())
    layout = row_map(routing.ids_TK, 4)
    rows_RD = experts(permute(x_TD, layout), permute_probs(routing.probs_TK, layout), layout.offsets_E)
    y_TD = unpermute(rows_RD, layout)
    grads = torch.autograd.grad(y_TD, (x_TD, block.gate.weight, experts.w2_EFD), grad_TD)
    # transformers routes in fp32 whatever the dtype.
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y_TD, expected.view(30, 8), **tolerance)
    torch.testing.assert_close(grads[0], expected_grads[0], **tolerance)
    torch.testing.assert_close(grads[1], expected_grads[1], **tolerance)
    torch.testing.assert_close(grads[2], expected_grads[2].transpose(1, 2), **tolerance)
