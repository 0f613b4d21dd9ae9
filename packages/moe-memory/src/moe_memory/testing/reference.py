"""A small model that has every kind of parameter, and the plain training loop that judges engines.

Shape legend: N tokens, V vocabulary, D features, E experts, F features inside an expert, O outputs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels import internal_dtype
from moe_memory.config import OptimConfig
from moe_parallel import ParameterKind, ShardSpec

CONFIG = OptimConfig(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
KEEP_INTERNAL = ("router*",)
DECAYED = ("embedding_VD", "router_ED", "w1_EDF", "head_FO", "empty")
EXPERTS = ("w1_EDF", "b1_EF", "gain_E")
SLOTS = ("master", "exp_avg", "exp_avg_sq")


class SmallMoE(nn.Module):
    """Three experts, the last of which never gets a token; a scalar, an empty and differently shaped parameters."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        shapes = {
            "embedding_VD": (9, 5),
            "norm_D": (5,),
            "scale": (),
            "router_ED": (3, 5),
            "w1_EDF": (3, 5, 7),
            "b1_EF": (3, 7),
            "gain_E": (3,),
            "head_FO": (7, 6),
            "bias_O": (6,),
            "empty": (0, 4),
        }
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            keep = name == "router_ED"
            setattr(self, name, nn.Parameter(values.to(internal_dtype(dtype) if keep else dtype)))

    def forward(self, token_N: Tensor) -> Tensor:
        p = dict(self.named_parameters())
        x_ND = p["embedding_VD"][token_N] * p["norm_D"] * p["scale"]
        probs_NE = _product(x_ND.to(p["router_ED"].dtype), p["router_ED"].t()).softmax(-1).to(x_ND.dtype)
        loss = p["empty"].sum()
        for expert in range(2):
            rows = token_N % 2 == expert
            h_NF = torch.tanh(_product(x_ND[rows], p["w1_EDF"][expert]) + p["b1_EF"][expert])
            h_NF = h_NF * probs_NE[rows, expert, None] * p["gain_E"][expert]
            y_NO = _product(h_NF, p["head_FO"]) + p["bias_O"]
            loss = loss + y_NO.to(internal_dtype(y_NO.dtype)).square().sum()
        return loss


def _product(x_NA: Tensor, w_AB: Tensor) -> Tensor:
    """x w. Where an engine keeps a weight must not change a bit, and a matrix product may depend on its address."""
    return (x_NA.unsqueeze(-1) * w_AB).sum(-2)


def specs_of(model: nn.Module) -> dict[str, ShardSpec]:
    return {
        name: ShardSpec(
            name=name,
            shape=tuple(parameter.shape),
            kind=ParameterKind.EXPERT if name in EXPERTS else ParameterKind.DENSE,
        )
        for name, parameter in model.named_parameters()
    }


def step_tokens(seed: int, microbatches: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(9, (8,), generator=generator) for _ in range(microbatches)]


class PlainLoop:
    """What every engine must agree with.

    Masters are padded to whole vectors: the tail of a tensor, which does not fill one, torch's fused kernel rounds
    differently, by a unit in the last place.
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.masters = {name: _padded(p.detach().to(internal_dtype(p.dtype))) for name, p in self.parameters.items()}
        decayed = [self.masters[name] for name in DECAYED]
        others = [master for name, master in self.masters.items() if name not in DECAYED]
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
        gradients = self.gradients(microbatches)
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
