"""A small model that has every kind of parameter, and the plain training loop that judges engines.

Shape legend: N tokens, M rows of experts, V vocabulary, D features, E experts, F features inside an expert.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels import internal_dtype
from moe_memory.config import OptimConfig
from moe_parallel import AxisGroups, Groups, ParameterKind, PlanRule, ShardSpec, local_box, shard_specs

CONFIG = OptimConfig(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
KEEP_INTERNAL = ("*router*",)
NUM_EXPERTS = 4
SLOTS = ("master", "exp_avg", "exp_avg_sq")


class SmallMoE(nn.Module):
    """Sub-modules with every kind of parameter: tied, scalar, empty, of a few odd shapes, and experts.

    The last expert never gets a token. Each layer sees the embedding, not the layer before it, so that the
    loss is a sum over tokens and experts. A rank takes the terms of its own experts and of its share of the tokens:
    parts that add up to the loss of one process without any communication in the model.

    Args:
        dtype: of the parameters but the router's, which has the internal dtype.
        seed: of the initial values, which do not depend on the groups.
        groups: of this rank; `ep` splits the experts, `edp` the tokens.
        num_experts: of a layer, in the whole world.
    """

    def __init__(
        self, dtype: torch.dtype, seed: int, groups: Groups | None = None, num_experts: int = NUM_EXPERTS
    ) -> None:
        super().__init__()
        groups = groups or AxisGroups()
        self.num_experts = num_experts
        self.edp = groups.rank("edp"), groups.size("edp")
        self.embedding = _Embedding(weight_VD=(9, 5))
        here = num_experts // groups.size("ep")
        self.layers = nn.ModuleList(_Layer(num_experts, here, here * groups.rank("ep")) for _ in range(2))
        self.head = _Head(weight_FD=(7, 5), bias_D=(5,), scale=(), empty=(0, 4))
        generator = torch.Generator().manual_seed(seed)
        for name, spec in specs_of(self, groups).items():
            values = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            box = local_box(spec, groups)
            index = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
            self.get_parameter(name).data = values[index].to(internal_dtype(dtype) if "router" in name else dtype)

    def forward(self, token_N: Tensor, layers: int = 2) -> Tensor:
        """This rank's part of the loss of a microbatch, in the internal dtype; of the first `layers` layers."""
        share, shares = self.edp
        token_N = token_N[share::shares]
        x_ND = self.embedding(token_N)
        rows = [layer(x_ND, token_N) for layer in list(self.layers)[:layers]]
        y_MD = self.head(torch.cat(rows))
        # Tied: the embedding is read outside its own module.
        score_MV = _product(y_MD, self.embedding.weight_VD.t())
        return score_MV.to(internal_dtype(score_MV.dtype)).square().sum()


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
    def __init__(self, num_experts: int, here: int, first_here: int) -> None:
        super().__init__()
        self.first_here = first_here
        self.norm_D = nn.Parameter(torch.empty(5))
        self.router = _Router(weight_ED=(num_experts, 5))
        self.experts = _Experts(w1_EDF=(here, 5, 7), b1_EF=(here, 7), gain_E=(here,))

    def forward(self, x_ND: Tensor, token_N: Tensor) -> Tensor:
        """Rows of the experts that are here [M, F]."""
        x_ND = x_ND * self.norm_D
        return cast(Tensor, self.experts(x_ND, self.router(x_ND), token_N, self.first_here))


class _Router(_Shaped):
    weight_ED: Tensor

    def forward(self, x_ND: Tensor) -> Tensor:
        return _product(x_ND.to(self.weight_ED.dtype), self.weight_ED.t()).softmax(-1).to(x_ND.dtype)


class _Experts(_Shaped):
    w1_EDF: Tensor
    b1_EF: Tensor
    gain_E: Tensor

    def forward(self, x_ND: Tensor, probs_NE: Tensor, token_N: Tensor, first: int) -> Tensor:
        found = []
        for index in range(len(self.gain_E)):
            rows = token_N % (probs_NE.shape[1] - 1) == first + index
            h_MF = torch.tanh(_product(x_ND[rows], self.w1_EDF[index]) + self.b1_EF[index])
            found.append(h_MF * probs_NE[rows, first + index, None] * self.gain_E[index])
        return torch.cat(found)


class _Head(_Shaped):
    weight_FD: Tensor
    bias_D: Tensor
    scale: Tensor
    empty: Tensor

    def forward(self, h_MF: Tensor) -> Tensor:
        return _product(h_MF, self.weight_FD) * self.scale + self.bias_D + self.empty.sum()


def _product(x_NA: Tensor, w_AB: Tensor) -> Tensor:
    """x w. Where an engine keeps a weight must not change a bit, and a matrix product may depend on its address."""
    return (x_NA.unsqueeze(-1) * w_AB).sum(-2)


def is_expert(name: str) -> bool:
    return ".experts." in name


def is_decayed(name: str) -> bool:
    """By hand: matrices, and what is a matrix in each expert."""
    return name.endswith(("weight_VD", "weight_ED", "w1_EDF", "weight_FD", "empty"))


def specs_of(model: nn.Module, groups: Groups | None = None) -> dict[str, ShardSpec]:
    rule = PlanRule(pattern="*.experts.*", kind=ParameterKind.EXPERT, placements=(("ep", 0),))
    return shard_specs(model, [rule], groups or AxisGroups())


def step_tokens(seed: int, microbatches: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(9, (12,), generator=generator) for _ in range(microbatches)]


class PlainLoop:
    """What every engine must agree with.

    Masters are padded to whole vectors: the tail of a tensor, which does not fill one, torch's fused kernel rounds
    differently, by a unit in the last place.
    """

    def __init__(self, model: SmallMoE, config: OptimConfig) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.masters = {name: _padded(p.detach().to(internal_dtype(p.dtype))) for name, p in self.parameters.items()}
        decayed = [master for name, master in self.masters.items() if is_decayed(name)]
        others = [master for name, master in self.masters.items() if not is_decayed(name)]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def gradients(self, microbatches: Sequence[Tensor]) -> dict[str, Tensor]:
        total = {name: torch.zeros(p.shape, dtype=internal_dtype(p.dtype)) for name, p in self.parameters.items()}
        for token_N in microbatches:
            for parameter in self.parameters.values():
                parameter.grad = None
            self.model(token_N).backward()
            for name, parameter in self.parameters.items():
                assert parameter.grad is not None
                total[name] = total[name] + parameter.grad.to(total[name].dtype)
        return total

    def step(self, microbatches: Sequence[Tensor], learning_rate: float, factor: Tensor | float) -> None:
        self.update(self.gradients(microbatches), learning_rate, factor)

    def update(self, gradients: Mapping[str, Tensor], learning_rate: float, factor: Tensor | float) -> None:
        for name, master in self.masters.items():
            master.grad = _padded(gradients[name]) * factor
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._unpadded(name, self.masters[name]))

    def state(self) -> dict[str, Tensor]:
        found = {f"master/{name}": self._unpadded(name, master) for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for slot in ("exp_avg", "exp_avg_sq"):
                found[f"{slot}/{name}"] = self._unpadded(name, self.optimizer.state[master][slot])
        return found

    def _unpadded(self, name: str, flat: Tensor) -> Tensor:
        parameter = self.parameters[name]
        return flat[: parameter.numel()].view(parameter.shape)


def _padded(tensor: Tensor) -> Tensor:
    """Flat, with zeros up to a multiple of 16 elements: 64 bytes, the longest vector."""
    return F.pad(tensor.flatten(), (0, -tensor.numel() % 16))
