"""Random numbers that depend on a key and a counter: on no generator, rank, layout, device, or number drawn before.

A token draws the same numbers wherever it is computed and however often, so that layouts agree and a recomputed forward
repeats itself. Shape legend: T tokens here, N numbers per token.
"""

from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from torch import Tensor

# Of SplitMix64 (Steele, Lea, Flood, 2014): the increment, and the multipliers and shifts of the finaliser.
INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
# As many bits as every float dtype but the half-precision ones can hold, so that all dtypes draw the same numbers.
BITS = 24
_ALL = (1 << 64) - 1
# An operator takes it as a signed number.
_LARGEST_KEY = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class TokenRandom:
    """What the tokens of a microbatch draw in one step of training.

    Attributes:
        seed: of the run.
        step: of the optimizer; a tensor of one int64 draws the same numbers, and a graph reads it anew.
        index_T: int64, index of each token in the global order of the step.
        purpose: what draws, such as the name of a layer; other purposes draw other numbers.
    """

    seed: int
    step: int | Tensor
    index_T: Tensor
    purpose: str = ""

    def of(self, purpose: str) -> "TokenRandom":
        """The same tokens, for a purpose inside this one."""
        return replace(self, purpose=f"{self.purpose}/{purpose}")

    @property
    def key(self) -> int | Tensor:
        """Of seed, step and purpose: a number of 63 bits, a tensor where the step is one."""
        digest = blake2b(f"{self.seed} {self.purpose}".encode(), digest_size=8).digest()
        stream = int.from_bytes(digest, "little")
        if isinstance(self.step, Tensor):
            return _mix(self.step * _signed(INCREMENT) + _signed(stream)) & _LARGEST_KEY
        return _mixed(self.step * INCREMENT + stream) & _LARGEST_KEY

    def uniform(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """[T, N] numbers in [0, 1), multiples of 2^-24; the first of them do not depend on N."""
        token_T1 = _mix(self.index_T[:, None] * _signed(INCREMENT) + self.key)
        counter_N = torch.arange(1, numbers + 1, device=token_T1.device) * _signed(INCREMENT)
        bits_TN = _shift(_mix(token_T1 + counter_N), 64 - BITS)
        return bits_TN.to(dtype) * 2.0**-BITS


def _mixed(x: int) -> int:
    """As `_mix`, on a number of any size, of which 64 bits count."""
    first, second, last = SHIFTS
    x &= _ALL
    x = (x ^ x >> first) * MULTIPLIERS[0] & _ALL
    x = (x ^ x >> second) * MULTIPLIERS[1] & _ALL
    return x ^ x >> last


def _mix(x: Tensor) -> Tensor:
    first, second, last = SHIFTS
    x = (x ^ _shift(x, first)) * _signed(MULTIPLIERS[0])
    x = (x ^ _shift(x, second)) * _signed(MULTIPLIERS[1])
    return x ^ _shift(x, last)


def _shift(x: Tensor, bits: int) -> Tensor:
    # That of int64 fills up with the sign.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned number; torch multiplies both alike."""
    return x - (1 << 64) if x >> 63 else x
