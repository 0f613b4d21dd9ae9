"""The gated activation of a feed-forward layer, with the router's probability folded in.

Shape legend: R rows, F features of an expert; h_RF2 is [R, 2F], gate and up side by side.
"""

from collections.abc import Callable
from math import pi, sqrt
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.implementation import uses_triton
from moe_kernels.passes import row_slices, write

Activation = Literal["silu", "gelu"]


def gated_activation(h_RF2: Tensor, probs_R: Tensor | None, kind: Activation, *, rows: Tensor | None = None) -> Tensor:
    """a = act(gate) * up * p with h = [gate | up], [R, F], in the dtype of h.

    The product is formed in the internal dtype and rounded once. Only h and p are kept for the backward pass, which
    recomputes the rest; with p inside, the output of the following product need not be kept for p's gradient.

    Args:
        h_RF2: [R, 2F].
        probs_R: [R], usually in the internal dtype; its gradient is summed in the internal dtype. None is a factor of
            one (dense layer).
        kind: `silu` is x * sigmoid(x) (SwiGLU), `gelu` is the exact x * Phi(x) (GeGLU).
        rows: integer [1] on the device of h, how many rows there are (`offsets_E[-1:]`). The others, whatever they
            hold, give zeros in both directions; kernels do not read them, and nothing waits for the number.

    Raises:
        MoeKernelsError: h cannot be halved, or there is not one probability per row.
    """
    # A kernel would read what is not there.
    num_rows, features = h_RF2.shape
    if features % 2 or (probs_R is not None and probs_R.shape[0] != num_rows):
        probs = "" if probs_R is None else f" with {tuple(probs_R.shape)} probabilities"
        raise MoeKernelsError(f"h is [R, 2F] with a probability for each row, not {tuple(h_RF2.shape)}{probs}")
    return _gated_activation(h_RF2, probs_R, kind, rows)


def _value_and_slope(gate: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
    if kind == "silu":
        sigmoid = torch.sigmoid(gate)
        value = gate * sigmoid
        # sigma (1 + x (1 - sigma)) = value + sigma (1 - value): no second exponential, which costs five products.
        return value, torch.lerp(value, value.new_ones(()), sigmoid, out=sigmoid)
    cdf = torch.erf(gate / sqrt(2)).add_(1).mul_(0.5)
    density = gate.square().mul_(-0.5).exp_().mul_(1 / sqrt(2 * pi))
    return gate * cdf, cdf.addcmul_(gate, density)


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_RF2: Tensor, probs_R: Tensor | None, kind: Activation, num_rows: Tensor | None) -> Tensor:
        ctx.save_for_backward(h_RF2, probs_R, num_rows)
        ctx.kind = kind
        ctx.triton = uses_triton(h_RF2)
        if ctx.triton:
            from moe_kernels.triton_kernels import activation as kernels

            result: Tensor = kernels.gated_activation(h_RF2, probs_R, num_rows, kind)
            return result
        internal = internal_dtype(h_RF2.dtype)
        act = F.silu if kind == "silu" else F.gelu
        a_RF = h_RF2.new_empty(h_RF2.shape[0], h_RF2.shape[1] // 2)
        p_R1 = None if probs_R is None else probs_R.to(internal)[:, None]
        for rows in row_slices(a_RF):
            gate, up = h_RF2[rows].to(internal).chunk(2, -1)
            if p_R1 is None:
                torch.mul(act(gate), up, out=a_RF[rows])
            else:
                torch.mul(act(gate).mul_(up), p_R1[rows], out=a_RF[rows])
        return a_RF if num_rows is None else _zero_after(num_rows, a_RF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        h_RF2, probs_R, num_rows = ctx.saved_tensors
        if ctx.triton:
            from moe_kernels.triton_kernels import activation as kernels

            dh_RF2, dp_R = kernels.gated_activation_backward(grad_RF, h_RF2, probs_R, num_rows, ctx.kind)
            return dh_RF2, None if probs_R is None else dp_R, None, None
        internal = internal_dtype(h_RF2.dtype)
        dh_RF2 = h_RF2.new_empty(h_RF2.shape)
        p_R1 = None if probs_R is None else probs_R.to(internal)[:, None]
        dp_R1 = None if p_R1 is None else torch.empty_like(p_R1)
        for rows in row_slices(grad_RF):
            gate, up = h_RF2[rows].to(internal).chunk(2, -1)
            dgate, dup = dh_RF2[rows].chunk(2, -1)
            grad = grad_RF[rows].to(internal)
            value, slope = _value_and_slope(gate, ctx.kind)
            if p_R1 is None or dp_R1 is None:
                write(dup, torch.mul, value, grad)
                write(dgate, torch.mul, slope.mul_(up), grad)
            else:
                # Three temporaries, each reused: five cost 15 % of the whole.
                grad_up = grad * up
                write(dgate, torch.mul, slope.mul_(grad_up), p_R1[rows])
                torch.sum(grad_up.mul_(value), dim=-1, keepdim=True, out=dp_R1[rows])
                write(dup, torch.mul, value.mul_(grad), p_R1[rows])
        if num_rows is not None:
            _zero_after(num_rows, dh_RF2)
            dp_R1 = None if dp_R1 is None else _zero_after(num_rows, dp_R1)
        return dh_RF2, None if dp_R1 is None else dp_R1[:, 0].to(probs_R.dtype), None, None


def _zero_after(num_rows: Tensor, x_RF: Tensor) -> Tensor:
    return x_RF.masked_fill_(torch.arange(x_RF.shape[0], device=x_RF.device)[:, None] >= num_rows, 0)


_gated_activation: Callable[..., Tensor] = _GatedActivation.apply
