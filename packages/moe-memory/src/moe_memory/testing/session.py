"""What the kit does with an engine on one rank, and how it looks at the result of several."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_memory.data_parallel.engine import DataParallelEngine, StateTensor
from moe_memory.testing.model import NUM_EXPERTS, SmallMoE, index_of
from moe_memory.testing.reference import step_tokens
from moe_memory.testing.verdict import require
from moe_parallel import Box, Groups, ShardSpec


class Session:
    """An engine that owns a `SmallMoE`, and the calls that make up a step.

    Args:
        dtype: compute dtype.
        seed: of the initial weights.
        num_experts: in the whole world.
    """

    def __init__(
        self,
        engine: DataParallelEngine,
        groups: Groups,
        dtype: torch.dtype,
        *,
        seed: int,
        num_experts: int = NUM_EXPERTS,
    ) -> None:
        self.engine = engine
        model = SmallMoE(dtype, seed, groups, num_experts)
        self.specs: dict[str, ShardSpec] = model.specs
        self.names = list(self.specs)
        self.model = engine.wrap(model, self.specs)

    def report(self, *, last: bool) -> None:
        """In two parts and from the back, as a backward that reports layer by layer."""
        for part in (self.names[4:], self.names[:4]):
            self.engine.grads_ready(part, last=last)

    def accumulate(self, microbatches: Sequence[Tensor], *, last: bool = True) -> None:
        """Backwards of these, up to `finish` unless more are to come."""
        for number, token_N in enumerate(microbatches):
            self.model(token_N).backward()
            self.report(last=last and number == len(microbatches) - 1)
        if last:
            self.engine.finish()

    def train(self, steps: Iterable[int]) -> None:
        for number in steps:
            self.accumulate(step_tokens(number))
            self.engine.step(0.02, 0.5)

    def weights(self) -> dict[str, Tensor]:
        """A copy of what the model computes with."""
        self.engine.synchronize()
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


@dataclass(frozen=True)
class Part:
    """A copy of a `StateTensor` that can be sent between processes."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    values: npt.NDArray[Any]
    owned: bool
    dtype: torch.dtype


def copied(tensors: Iterable[StateTensor]) -> list[Part]:
    return [Part(t.name, t.global_shape, t.box, to_numpy(t.tensor), t.owned, t.tensor.dtype) for t in tensors]


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """A copy; of bfloat16, which numpy does not know, the bits."""
    # Not the memory itself, which numpy would keep from being released and restored.
    tensor = tensor.detach().to("cpu", copy=True)
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def assembled(parts_of_ranks: Iterable[Sequence[Part]], what: str) -> dict[str, Tensor]:
    """Whole tensors from the parts of all ranks.

    Every element must be owned exactly once, and parts that are not owned be copies of what is (case R034).
    """
    parts_of_ranks = list(parts_of_ranks)
    whole: dict[str, npt.NDArray[Any]] = {}
    seen: dict[str, npt.NDArray[np.int64]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for parts in parts_of_ranks:
        for part in parts:
            shape, box, where = part.global_shape, part.box, f"{what}: {part.name}"
            require(whole.setdefault(part.name, np.zeros(shape, part.values.dtype)).shape == shape, f"{where}: shapes")
            dtypes.setdefault(part.name, part.dtype)
            inside = all(o >= 0 and o + n <= s for o, n, s in zip(box.offset, box.shape, shape, strict=True))
            require(inside and part.values.shape == box.shape, f"{where}: box {box} of {shape}")
            count = seen.setdefault(part.name, np.zeros(shape, np.int64))
            if part.owned:
                whole[part.name][index_of(box)] = part.values
                count[index_of(box)] += 1
    for name, count in seen.items():
        owners = sorted({*count.flatten().tolist()})
        require(owners in ([1], []), f"{what}: {name}: elements are owned by {' and '.join(map(str, owners))} ranks")
    for rank, parts in enumerate(parts_of_ranks):
        for part in parts:
            known = dtypes[part.name]
            require(part.dtype == known, f"{what}: {part.name} is {part.dtype} on rank {rank} and {known} elsewhere")
            same = whole[part.name][index_of(part.box)].tobytes() == part.values.tobytes()
            require(same, f"{what}: {part.name}: the copy on rank {rank} differs from what is owned")
    return {name: torch.from_numpy(values).view(dtypes[name]) for name, values in whole.items()}


def overwrite(engine: DataParallelEngine, whole: dict[str, npt.NDArray[Any]]) -> None:
    """Write this rank's parts of whole state tensors, as a checkpoint reader does."""
    for part in engine.state_tensors():
        part.tensor.copy_(torch.from_numpy(whole[part.name]).view(part.tensor.dtype)[index_of(part.box)])
