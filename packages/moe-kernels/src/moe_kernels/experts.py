"""The experts' feed-forward networks, over rows that are grouped by expert.

Shape legend: R rows, E experts here, D model, F features of an expert.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from moe_kernels.activation import Activation, gated_activation
from moe_kernels.dtypes import internal_dtype
from moe_kernels.grouped_gemm import GroupedGemm, grouped_gemm
from moe_kernels.implementation import uses_triton

ProbsOn = Literal["activation", "output", "input"]


@dataclass(frozen=True, kw_only=True)
class ExpertActivations:
    """What lies between the rows of the experts and what they return, all of it read again in the backward only.

    Attributes:
        rows_RD, h_RF2, a_RF: what the first product, the activation and the second product read.
        y_RD: what the second product returned; with its gradient the backward of all of them begins.
        again: with `kept` returns `a_RF` anew, without gradient.
        kept: h_RF2 and what else the activation read.
    """

    rows_RD: Tensor
    h_RF2: Tensor
    a_RF: Tensor
    y_RD: Tensor
    again: Callable[..., Tensor]
    kept: tuple[Tensor, ...]


class ExpertUnits(Protocol):
    """Told of the activations of a forward, which need not be kept until their backward."""

    def making(self) -> AbstractContextManager[object]:
        """Around the activation."""

    def consumed(self, found: ExpertActivations) -> None:
        """The second product has read what the activation made."""


class ExpertCompute(Protocol):
    """Rows at their experts to rows of the same order and shape; fused implementations replace it whole."""

    def __call__(self, rows_RD: Tensor, probs_R: Tensor, offsets_E: Tensor) -> Tensor:
        """Expert e owns the rows `offsets[e-1]:offsets[e]` (int32, inclusive, on the device); later rows give zero.

        `probs_R` is the weight of each row in the internal dtype; it gets a gradient.
        """


class GroupedExperts(nn.Module):
    """y_r = p_r · (act(x_r W_gate) * (x_r W_up)) W2 of the row's expert, two grouped GEMMs around one fused activation.

    Parameters, uninitialised: `w1_ED2F` [E, D, 2, F], gate and up side by side, and `w2_EFD` [E, F, D]. F, a dim of its
    own in both, may be split over ranks; the sum of what they return is then y.

    Args:
        num_experts: E, experts of this rank.
        model_features: D.
        expert_features: F.
        activation: `silu` or `gelu`.
        probs_on: where the probability is multiplied in. `activation` (before W2) and `output` are equal, W2 being
            linear without bias; `activation` keeps least for the backward pass. `input` scales x before W1, which is
            another function.
        backend: computes the grouped products.
        units: told of its activations.
        dtype, device: of the parameters.
    """

    def __init__(
        self,
        num_experts: int,
        model_features: int,
        expert_features: int,
        *,
        activation: Activation = "silu",
        probs_on: ProbsOn = "activation",
        backend: GroupedGemm,
        units: ExpertUnits | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.probs_on: ProbsOn = probs_on
        self.backend = backend
        self.units = units
        w1_ED2F = torch.empty(num_experts, model_features, 2, expert_features, dtype=dtype, device=device)
        w2_EFD = torch.empty(num_experts, expert_features, model_features, dtype=dtype, device=device)
        self.w1_ED2F = nn.Parameter(w1_ED2F)
        self.w2_EFD = nn.Parameter(w2_EFD)

    def forward(self, rows_RD: Tensor, probs_R: Tensor, offsets_E: Tensor) -> Tensor:
        """See `ExpertCompute`; the host is synchronised where the backend does."""
        if self.probs_on == "input":
            rows_RD = _scaled(rows_RD, probs_R)
        h_RF2 = grouped_gemm(rows_RD, self.w1_ED2F.flatten(2), offsets_E, self.backend)
        weight_R = probs_R if self.probs_on == "activation" else None
        # A kernel does not read the rows after the last offset. The product made them zero, so that plainly they are
        # zero already, and another pass over all rows would be for nothing.
        num_rows = offsets_E[-1:] if uses_triton(h_RF2) else None
        with nullcontext() if self.units is None else self.units.making():
            a_RF = gated_activation(h_RF2, weight_R, self.activation, rows=num_rows)
        y_RD = grouped_gemm(a_RF, self.w2_EFD, offsets_E, self.backend)
        if self.units is not None:
            kept = tuple(tensor for tensor in (h_RF2, weight_R, num_rows) if tensor is not None)
            found = ExpertActivations(
                rows_RD=rows_RD, h_RF2=h_RF2, a_RF=a_RF, y_RD=y_RD, again=self._activated, kept=kept
            )
            self.units.consumed(found)
        return _scaled(y_RD, probs_R) if self.probs_on == "output" else y_RD

    def _activated(self, h_RF2: Tensor, *rest: Tensor) -> Tensor:
        left = list(rest)
        weight_R = left.pop(0) if self.probs_on == "activation" else None
        return gated_activation(h_RF2, weight_R, self.activation, rows=left.pop() if left else None)

    def extra_repr(self) -> str:
        experts, model, _, features = self.w1_ED2F.shape
        return f"{experts}, {model}, {features}, activation={self.activation}, probs_on={self.probs_on}"


def _scaled(rows_RD: Tensor, probs_R: Tensor) -> Tensor:
    return (rows_RD.to(internal_dtype(rows_RD.dtype)) * probs_R[:, None]).to(rows_RD.dtype)
