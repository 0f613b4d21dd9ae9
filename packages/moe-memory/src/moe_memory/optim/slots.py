"""`Slot`: one number of optimizer state for each element of a buffer, in the dtype that the rule gives it.

Shape legend: A, C elements before and behind the dim of blocks, B along it, N blocks along it (`optim.blocks`).
"""

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from moe_memory.optim.blocks import BLOCK, block_dim, scale_box, scale_shape, view_by_block
from moe_memory.optim.buffer import VECTOR, Buffer, Chunk, Part, padded_chunk
from moe_memory.optim.codes import decode, encode
from moe_memory.optim.rounding import round_to_bfloat16
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
        """Values in the dtype of the arithmetic, in a temporary tensor with zeros up to whole vectors."""
        stored = chunk.of(self.values)
        if self.scales is None:
            return padded_chunk(stored, internal)
        out = stored.new_zeros(-(-stored.numel() // VECTOR) * VECTOR, dtype=internal)
        x_ABC = out[: stored.numel()].view(chunk.shape_ABC)
        decode(stored.view(chunk.shape_ABC), self._scales_of(chunk), x_ABC, signed=self._signed)
        return out

    def write(self, chunk: Chunk, values: Tensor, bits: Tensor | None) -> None:
        """Keep what a temporary tensor of `read` holds now.

        Args:
            bits: random bits of the elements, if the state is bfloat16.
        """
        stored = chunk.of(self.values)
        values = values[: stored.numel()]
        if self.scales is not None:
            shape = chunk.shape_ABC
            encode(values.view(shape), stored.view(shape), self._scales_of(chunk), signed=self._signed)
        elif bits is not None and stored.dtype == torch.bfloat16:
            stored.copy_(round_to_bfloat16(values, bits, self.name))
        else:
            stored.copy_(values)

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
