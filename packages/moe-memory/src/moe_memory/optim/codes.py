"""Codes of 8 bits for moments: the dynamic tree of arXiv 2110.02861 (sections 1.3, 2.1), relative to a block's scale.

A code has a decimal exponent of as many bits as it needs and a fraction of the rest, so that it spans seven decades.
The unsigned one spends the sign on the fraction. The scale of a block is its largest absolute value.
"""

from functools import cache

import torch
from torch import Tensor

from moe_memory.optim.blocks import by_block

_EXPONENTS = 7


@cache
def code_values(signed: bool, device: torch.device) -> Tensor:
    """[256] float64 values of the codes, ascending: 0 is 0 of the unsigned and 127 of the signed ones, 255 is 1."""
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + (0 if signed else 1)) + 1, dtype=torch.float64)
        middles = (10.0 ** (exponent - _EXPONENTS + 1) * (edges[:-1] + edges[1:]) / 2).tolist()
        values += middles
        values += [-value for value in middles] if signed else []
    return torch.tensor(sorted(values), dtype=torch.float64, device=device)


@cache
def _limits(signed: bool, device: torch.device) -> Tensor:
    """[255] between the values of neighbouring codes; of the unsigned the first is 0.

    What is above zero never gets the code of zero: the root of a second moment is a divisor.
    """
    values = code_values(signed, device)
    limits = (values[:-1] + values[1:]) / 2
    if not signed:
        limits[0] = 0.0
    return limits


@cache
def _first_guess(signed: bool, device: torch.device) -> Tensor:
    """[65536] int32 code of the lowest float32 with these upper 16 bits: the right one or the one below it.

    Between two such numbers, 1/128 apart, lies at most one limit; to look this up is faster than to search.
    """
    upper = torch.arange(2**16, device=device)
    # Of negative numbers the lowest has the largest lower bits.
    bits = (upper << 16) | torch.where(upper >= 2**15, 2**16 - 1, 0)
    lowest = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    return torch.bucketize(lowest, _limits(signed, device).to(torch.float32), out_int32=True)


@cache
def _upper_limits(signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256] above which a value has a higher code than this."""
    limits = _limits(signed, device).to(dtype)
    return torch.cat([limits, limits.new_full((1,), torch.inf)])


def nearest_codes(x: Tensor, *, signed: bool) -> Tensor:
    """int32 codes of values relative to their scale."""
    if x.dtype != torch.float32:
        return torch.bucketize(x, _limits(signed, x.device).to(x.dtype), out_int32=True)
    flat = x.reshape(-1)
    upper = (flat.view(torch.int32) >> 16).bitwise_and_(2**16 - 1)
    code = _first_guess(signed, x.device).index_select(0, upper)
    # Comparisons in place have a float result, which takes a CPU a fifth of the time.
    is_above = _upper_limits(signed, x.dtype, x.device).index_select(0, code).lt_(flat)
    return code.add_(is_above.to(code.dtype)).view(x.shape)


def encode(x_ABC: Tensor, code_ABC: Tensor, scale_ANC: Tensor, *, signed: bool) -> None:
    """Write the nearest codes of the values, and the scales of their blocks."""
    for (x, scale), (code, _) in zip(by_block(x_ABC, scale_ANC), by_block(code_ABC, scale_ANC), strict=True):
        scale.copy_(x.abs().amax(2, keepdim=True))
        relative = x / torch.where(scale > 0, scale, 1.0).to(x.dtype)
        if not signed:  # what is above zero may be divided to zero
            torch.maximum(relative, x.clamp(max=torch.finfo(x.dtype).tiny), out=relative)
        code.copy_(nearest_codes(relative, signed=signed))


def decode(code_ABC: Tensor, scale_ANC: Tensor, x_ABC: Tensor, *, signed: bool) -> None:
    """Write the values of the codes; zeros where a scale below 10^-38 leaves nothing that the dtype holds."""
    values = code_values(signed, code_ABC.device).to(x_ABC.dtype)
    for (code, scale), (x, _) in zip(by_block(code_ABC, scale_ANC), by_block(x_ABC, scale_ANC), strict=True):
        torch.mul(values.index_select(0, code.flatten().int()).view(code.shape), scale, out=x)
