"""Stochastic rounding to bfloat16 from random bits that depend on the element and the update, and on nothing else.

Nearest rounding loses every change of less than half a unit in the last place, 1/512 of the value; rounded up with a
probability that is the part lost, the value is right on average. The number of the element in the whole parameter
decides (numerics §7), so that runs repeat bit for bit and no layout rounds otherwise.
"""

import torch
from torch import Tensor

from moe_kernels.counter_random import INCREMENT, MULTIPLIERS, SHIFTS, TokenRandom
from moe_parallel import Box

# Each rounding takes 16 of the 64 bits of an element.
FIELDS = ("master", "exp_avg", "exp_avg_sq")
_FIELD_BITS = 16
_LOST_BITS = 16  # of float32 in bfloat16
_LARGEST = torch.finfo(torch.bfloat16).max


def element_numbers(box: Box, shape: tuple[int, ...], start: int, stop: int, device: torch.device) -> Tensor:
    """int64: places in the whole parameter, row by row, of elements `start` to `stop` of a box of it."""
    number = torch.arange(start, stop, device=device)
    # Dims that the box has whole are one run with the dim before them.
    sizes, offsets, strides = [1], [0], [1]
    stride = 1
    for size, offset, whole in zip(reversed(box.shape), reversed(box.offset), reversed(shape), strict=True):
        if strides[-1] * sizes[-1] == stride and offsets[-1] == 0:
            offsets[-1] = offset * (stride // strides[-1])
            sizes[-1] *= size
        else:
            sizes.append(size)
            offsets.append(offset)
            strides.append(stride)
        stride *= whole
    if len(sizes) == 1:
        return number.add_(offsets[0]) if offsets[0] else number
    place = torch.zeros_like(number)
    for size, offset, stride in zip(sizes, offsets, strides, strict=True):
        place.add_((number % size).add_(offset).mul_(stride))
        number = number.div_(size, rounding_mode="floor")
    return place


def random_bits(seed: int, update: int, name: str, number: Tensor) -> Tensor:
    """int64 with 64 random bits for each element of a parameter, by its number, in one update; reuses `number`."""
    key = TokenRandom(seed=seed, step=update, index_T=number, purpose=f"round/{name}").key
    x = number.mul_(_signed(INCREMENT)).add_(key)
    shifted = torch.empty_like(x)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier is not None:
            x.mul_(_signed(multiplier))
    return x


def round_to_bfloat16(x: Tensor, bits: Tensor, field: str) -> Tensor:
    """Float32 values in bfloat16, up or down.

    What is larger than the largest of bfloat16 becomes that, never infinite; infinities and NaN stay.

    Args:
        bits: of `random_bits`, in the shape of the values.
        field: which of the bits, by what is rounded: one of `FIELDS`.
    """
    shift = _FIELD_BITS * FIELDS.index(field)
    draw = (bits >> shift if shift else bits).to(torch.int32).bitwise_and_((1 << _FIELD_BITS) - 1)
    x = x.to(torch.float32)
    # Nothing is added to the others: a sum might be infinite, and of NaN, which differ in lower bits, zero.
    draw.mul_(x.abs().lt_(_LARGEST).to(torch.int32))
    return draw.add_(x.view(torch.int32)).bitwise_and_(-(1 << _LOST_BITS)).view(torch.float32).to(torch.bfloat16)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return x - (1 << 64) if x >> 63 else x
