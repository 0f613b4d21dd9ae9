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
SLOTS = ("master", "exp_avg", "exp_avg_sq")


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
