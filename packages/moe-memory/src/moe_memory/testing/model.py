"""`SmallMoE`: a small model that has every kind of parameter, whole or in parts.

Shape legend: N tokens, M some of them or rows of experts, V vocabulary, D features, E experts, F features inside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_kernels import internal_dtype
from moe_parallel import AxisGroups, Box, Groups, ParameterKind, PlanRule, local_box, shard_specs

NUM_EXPERTS = 4


class SmallMoE(nn.Module):
    """Sub-modules with every kind of parameter: tied, scalar, empty, of a few odd shapes, experts, and every way in
    which ranks of `tp` and `etp` may share a parameter.

    The last expert never gets a token. Each layer sees the embedding, not the layer before it, so that the
    loss is a sum over tokens, experts and features. A rank takes the terms of its own experts, of its share of the
    tokens and of its part of the features: parts that add up to the loss of one process without any communication in
    the model.

    Args:
        dtype: of the parameters but the router's, which has the internal dtype.
        seed: of the initial values, which do not depend on the groups.
        groups: of this rank; `ep` splits the experts, `tp` and `etp` features, `cp dp` and `edp` the tokens.
        num_experts: of a layer, in the whole world.

    Attributes:
        specs: by global name.
    """

    def __init__(
        self, dtype: torch.dtype, seed: int, groups: Groups | None = None, num_experts: int = NUM_EXPERTS
    ) -> None:
        super().__init__()
        groups = groups or AxisGroups()
        self.num_experts = num_experts
        self._edp = _Share(groups.rank("edp"), groups.size("edp"))
        self._replica = _Share(groups.rank("cp", "dp"), groups.size("cp", "dp"))
        first = num_experts // groups.size("ep") * groups.rank("ep")
        etp = _Share(groups.rank("etp"), groups.size("etp"))
        self.embedding = _Embedding(weight_VD=(9, 5))
        self.layers = nn.ModuleList(_Layer(num_experts, first, etp) for _ in range(2))
        self.head = _Head(weight_FD=(7, 5), bias_D=(5,), scale=(), empty=(0, 4))
        self.columns = _Columns(up_DF=(5, 8), out_VD=(9, 5))
        self.gate = _Gate(weight_VD=(9, 5), gain_D=(5,))
        self.gate.is_first = groups.rank("tp") == 0
        self.specs = shard_specs(self, RULES)
        generator = torch.Generator().manual_seed(seed)
        for name, spec in self.specs.items():
            values = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            index = index_of(local_box(spec, groups))
            self.get_parameter(name).data = values[index].to(internal_dtype(dtype) if "router" in name else dtype)

    def forward(self, token_N: Tensor, layers: int = 2, run: Callable[..., Any] | None = None) -> Tensor:
        """This rank's part of the loss of a microbatch, in the internal dtype; of the first `layers` layers.

        Args:
            run: calls a layer; it is given the layer and its arguments.
        """
        run = run or _call
        x_ND = self.embedding(token_N)
        x_MD, token_M = self._edp.of(x_ND), self._edp.of(token_N)
        rows, inner = zip(*(run(layer, x_MD, token_M) for layer in list(self.layers)[:layers]), strict=True)
        y_MD = self.head(torch.cat(rows))
        # Tied: the embedding is read outside its own module.
        score_MV = _product(y_MD, self.embedding.weight_VD.t())
        replica_N = self._replica.of(token_N)
        terms = [score_MV, *inner, *self.columns(self._replica.of(x_ND))]
        dtype = internal_dtype(score_MV.dtype)
        loss: Tensor = sum((term.to(dtype).square().sum() for term in terms), self.gate(replica_N).to(dtype))
        return loss


# What ranks of `tp` and `etp` hold whole gets gradients of their own tokens or features, but for the gate.
RULES = (
    PlanRule(pattern="*.experts.w2_EDF", kind=ParameterKind.EXPERT, placements=(("ep", 0), ("etp", 2))),
    PlanRule(pattern="*.experts.*", kind=ParameterKind.EXPERT, placements=(("ep", 0),), grad_sum_axes=("etp",)),
    PlanRule(pattern="columns.up_DF", placements=(("tp", 1),)),
    PlanRule(pattern="columns.out_VD", placements=(("tp", 0),), uneven=True),
    PlanRule(pattern="gate.*"),
    PlanRule(pattern="*", grad_sum_axes=("tp",)),
)


@dataclass(frozen=True)
class _Share:
    """One of several shares of the tokens, which are dealt in turn."""

    rank: int
    ranks: int

    def of(self, x_N: Tensor) -> Tensor:
        return x_N[self.rank :: self.ranks]


class _Shaped(nn.Module):
    """A module of parameters of these shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class _Embedding(_Shaped):
    weight_VD: Tensor

    def forward(self, token_N: Tensor) -> Tensor:
        return self.weight_VD[token_N]


class _Layer(nn.Module):
    def __init__(self, num_experts: int, first_here: int, etp: _Share) -> None:
        super().__init__()
        self.first_here, self.etp = first_here, etp
        self.norm_D = nn.Parameter(torch.empty(5))
        self.router = _Router(weight_ED=(num_experts, 5))
        self.experts = _Experts(
            w1_EDF=(num_experts, 5, 7), b1_EF=(num_experts, 7), gain_E=(num_experts,), w2_EDF=(num_experts, 5, 4)
        )

    def forward(self, x_ND: Tensor, token_N: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the experts that are here, [M, F] and [M, the features that are here]."""
        x_ND = x_ND * self.norm_D
        return cast(tuple[Tensor, Tensor], self.experts(x_ND, self.router(x_ND), token_N, self.first_here, self.etp))


class _Router(_Shaped):
    weight_ED: Tensor

    def forward(self, x_ND: Tensor) -> Tensor:
        return _product(x_ND.to(self.weight_ED.dtype), self.weight_ED.t()).softmax(-1).to(x_ND.dtype)


class _Experts(_Shaped):
    """What is whole on the ranks of `etp` gets other tokens there; `w2_EDF` is split and gets all of them."""

    w1_EDF: Tensor
    b1_EF: Tensor
    gain_E: Tensor
    w2_EDF: Tensor

    def forward(
        self, x_ND: Tensor, probs_NE: Tensor, token_N: Tensor, first: int, etp: _Share
    ) -> tuple[Tensor, Tensor]:
        whole, split = [], []
        for index in range(len(self.gain_E)):
            rows = (token_N % (probs_NE.shape[1] - 1) == first + index).nonzero().flatten()
            split.append(torch.tanh(_product(x_ND[rows], self.w2_EDF[index])))
            rows = etp.of(rows)
            h_MF = torch.tanh(_product(x_ND[rows], self.w1_EDF[index]) + self.b1_EF[index])
            whole.append(h_MF * probs_NE[rows, first + index, None] * self.gain_E[index])
        return torch.cat(whole), torch.cat(split)


class _Head(_Shaped):
    weight_FD: Tensor
    bias_D: Tensor
    scale: Tensor
    empty: Tensor

    def forward(self, h_MF: Tensor) -> Tensor:
        return _product(h_MF, self.weight_FD) * self.scale + self.bias_D + self.empty.sum()


class _Columns(_Shaped):
    """Split over `tp`, the second unevenly: of 9 rows the last of two ranks has 4, the last of four none."""

    up_DF: Tensor
    out_VD: Tensor

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(_product(x_ND, self.up_DF)), _product(x_ND, self.out_VD.t())


class _Gate(_Shaped):
    """Every rank of `tp` has the whole gradient of these, although the loss must count the term once."""

    weight_VD: Tensor
    gain_D: Tensor
    is_first: bool

    def forward(self, token_N: Tensor) -> Tensor:
        term = (self.weight_VD[token_N] * self.gain_D).square().sum()
        return term if self.is_first else term - term.detach()


def _call(layer: Callable[..., Any], *inputs: Tensor) -> Any:
    return layer(*inputs)


def _product(x_NA: Tensor, w_AB: Tensor) -> Tensor:
    """x w. Where an engine keeps a weight must not change a bit, and a matrix product may depend on its address."""
    return (x_NA.unsqueeze(-1) * w_AB).sum(-2)


def index_of(box: Box) -> tuple[slice, ...]:
    """The index of a box in the whole tensor."""
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))


def is_expert(name: str) -> bool:
    return ".experts." in name


def is_decayed(name: str) -> bool:
    """By hand: matrices, and what is a matrix in each expert."""
    return name.endswith(("weight_VD", "weight_ED", "w1_EDF", "w2_EDF", "weight_FD", "empty", "up_DF", "out_VD"))
