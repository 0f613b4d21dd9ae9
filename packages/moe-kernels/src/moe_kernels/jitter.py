"""Jitter: multiplicative noise on what a router reads, in training (Switch Transformer, arXiv 2101.03961, section 2.3).

Shape legend: T tokens, D features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels.counter_random import TokenRandom
from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.implementation import uses_triton


def jitter(x_TD: Tensor, amount: float, random: TokenRandom) -> Tensor:
    """x times uniform numbers in [1 - amount, 1 + amount), one for each feature of each token; in the dtype of x.

    Nothing is kept for the backward pass but the index of each token: the numbers are drawn again.

    Raises:
        MoeKernelsError: `amount` outside [0, 1), or not an index for each token.
    """
    if not 0 <= amount < 1:
        raise MoeKernelsError(f"jitter lies in [0, 1), where no feature changes its sign, not at {amount}")
    if random.index_T.shape != x_TD.shape[:1]:
        raise MoeKernelsError(f"{x_TD.shape[0]} tokens have as many indices, not {tuple(random.index_T.shape)} of them")
    return _jitter(x_TD, amount, random)


def _times(x_TD: Tensor, amount: float, random: TokenRandom, triton: bool) -> Tensor:
    if triton:
        from moe_kernels.triton_kernels import jitter as kernels

        key = random.key
        if isinstance(key, int):
            key = random.index_T.new_full((), key)
        y_TD: Tensor = kernels.jitter(x_TD, random.index_T, amount, key)
        return y_TD
    uniform_TD = random.uniform(x_TD.shape[1], internal_dtype(x_TD.dtype))
    return (x_TD * (1 + amount * (2 * uniform_TD - 1))).to(x_TD.dtype)


class _Jitter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, amount: float, random: TokenRandom) -> Tensor:
        # Of the forward, whose noise the backward repeats.
        ctx.rest = (amount, random, uses_triton(x_TD))
        return _times(x_TD, *ctx.rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return _times(grad_TD, *ctx.rest), None, None


_jitter: Callable[..., Tensor] = _Jitter.apply
