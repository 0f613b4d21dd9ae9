"""`PlainLoop`: the training loop that judges engines."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import internal_dtype
from moe_memory.config import OptimConfig
from moe_memory.testing.model import SmallMoE, is_decayed

CONFIG = OptimConfig(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
KEEP_INTERNAL = ("*router*",)


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
        self.config = config
        muon = [name for name in self.parameters if config.kind == "muon" and is_orthogonalised(name)]
        self.momentum = {name: torch.zeros_like(self._unpadded(name, self.masters[name])) for name in muon}
        adamw = {name: master for name, master in self.masters.items() if name not in self.momentum}
        decayed = [master for name, master in adamw.items() if is_decayed(name)]
        others = [master for name, master in adamw.items() if not is_decayed(name)]
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
            if name in self.momentum:
                self._update_by_muon(name, gradients[name] * factor, learning_rate)
            else:
                master.grad = _padded(gradients[name]) * factor
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._unpadded(name, self.masters[name]))

    def state(self) -> dict[str, Tensor]:
        found = {f"master/{name}": self._unpadded(name, master) for name, master in self.masters.items()}
        for slot in ("exp_avg", "exp_avg_sq"):
            for name, master in self.masters.items():
                if name not in self.momentum:
                    moments = self.optimizer.state.get(master, {})
                    found[f"{slot}/{name}"] = self._unpadded(name, moments.get(slot, torch.zeros_like(master)))
                elif slot == "exp_avg":
                    found[f"{slot}/{name}"] = self.momentum[name]
        return found

    @torch.no_grad()
    def _update_by_muon(self, name: str, gradient: Tensor, learning_rate: float) -> None:
        config, momentum, weight = self.config.muon, self.momentum[name], self._unpadded(name, self.masters[name])
        momentum.copy_(config.momentum * momentum + gradient)
        update = gradient + config.momentum * momentum if config.nesterov else momentum.clone()
        for matrix in update if update.ndim == 3 else [update]:
            matrix.copy_(_orthogonal(matrix, config.steps) * config.scale * max(matrix.shape) ** 0.5)
        weight.copy_(weight * (1 - learning_rate * self.config.weight_decay) - learning_rate * update)

    def _unpadded(self, name: str, flat: Tensor) -> Tensor:
        parameter = self.parameters[name]
        return flat[: parameter.numel()].view(parameter.shape)


def is_orthogonalised(name: str) -> bool:
    """By hand: matrices but those of the embedding, the head and the router."""
    return is_decayed(name) and name.endswith(("w1_EDF", "w2_EDF", "up_DF", "out_VD", "gate.weight_VD"))


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """As K. Jordan has it, but with the product of the rows whichever side is longer: the same polynomial."""
    x = matrix / (matrix.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        gram = torch.einsum("ij,kj->ik", x, x)
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ (gram @ x)
    return x


def _padded(tensor: Tensor) -> Tensor:
    """Flat, with zeros up to a multiple of 16 elements: 64 bytes, the longest vector."""
    return F.pad(tensor.flatten(), (0, -tensor.numel() % 16))
