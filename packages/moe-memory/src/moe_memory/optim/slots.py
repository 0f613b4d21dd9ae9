"""`Slot`: one number of optimizer state for each element of a buffer, in the dtype that the rule gives it.

Shape legend: A, C elements before and behind the dim of blocks, B along it, N blocks along it (`optim.blocks`).
"""

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from moe_memory.optim.blocks import BLOCK, block_dim, scale_box, scale_shape, view_by_block
from moe_memory.optim.buffer import Buffer, Chunk, Part, keep, whole_vectors, work_on
from moe_memory.optim.codes import decode, encode
from moe_parallel import Box


class Slot:
    """State beside master weights: read and written in chunks, kept as it is stored.

    Args:
        buffer: of the weights.
        name: such as `exp_avg`.
        dtype: in which it is kept; uint8 are codes.

    Attributes:
        values: one for each element of the buffer.
        scales: of codes, one for each block; the parts of parameters follow one another.
    """

    def __init__(self, buffer: Buffer, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._signed = name != "exp_avg_sq"
        self.values = torch.zeros_like(buffer.weights, dtype=dtype)
        self.scales: Tensor | None = None
        self._scale_starts: dict[str, int] = {}
        if dtype == torch.uint8:
            total = 0
            for part in buffer.parts:
                self._scale_starts[part.name] = total
                total += prod(self._scale_shape(part))
            self.scales = torch.zeros(total, dtype=torch.float32, device=buffer.weights.device)

    def read(self, chunk: Chunk, internal: torch.dtype) -> Tensor:
        """Values in the dtype of the arithmetic, to be changed in place and given to `write` (`buffer.work_on`)."""
        stored = chunk.of(self.values)
        if self.scales is None:
            return work_on(stored, internal)
        work = whole_vectors(stored, internal)
        x_ABC = work[: stored.numel()].view(chunk.shape_ABC)
        decode(stored.view(chunk.shape_ABC), self._scales_of(chunk), x_ABC, signed=self._signed)
        return work

    def write(self, chunk: Chunk, work: Tensor, bits: Tensor | None) -> None:
        """Keep what the tensor of `read` holds now.

        Args:
            bits: random bits of the elements, if the state is bfloat16.
        """
        stored = chunk.of(self.values)
        if self.scales is not None:
            x_ABC = work[: stored.numel()].view(chunk.shape_ABC)
            encode(x_ABC, stored.view(chunk.shape_ABC), self._scales_of(chunk), signed=self._signed)
        else:
            keep(stored, work, bits, self.name)

    def tensors(self) -> list[Tensor]:
        """Everything that it keeps."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    def state(
        self, part: Part, current: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, tuple[int, ...], Box, Tensor]]:
        """What a checkpoint holds of a part: name of the slot, whole shape, box, live tensor.

        Args:
            current: says where a tensor is now.
        """
        values = current(self.values)[part.start : part.start + part.elements].view(part.box.shape)
        yield self.name, part.spec.shape, part.box, values
        if self.scales is not None:
            dim, start, shape = _dim(part), self._scale_starts[part.name], self._scale_shape(part)
            scales = current(self.scales)[start : start + prod(shape)].view(shape)
            yield f"{self.name}_scale", scale_shape(part.spec.shape, dim), scale_box(part.box, dim), scales

    def _scales_of(self, chunk: Chunk) -> Tensor:
        """[A, N, C] of a chunk."""
        assert self.scales is not None
        start, shape = self._scale_starts[chunk.part.name], self._scale_shape(chunk.part)
        whole_ANC = self.scales[start : start + prod(shape)].view(view_by_block(shape, _dim(chunk.part)))
        first, last = chunk.rows_B.start // BLOCK, -(-chunk.rows_B.stop // BLOCK)
        return whole_ANC[chunk.rows_A, first:last]

    @staticmethod
    def _scale_shape(part: Part) -> tuple[int, ...]:
        return scale_shape(part.box.shape, _dim(part))


def _dim(part: Part) -> int:
    dim = block_dim(part.spec)
    assert dim is not None, "only what has blocks is kept in codes"
    return dim
