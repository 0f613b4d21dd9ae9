"""Choices that load every expert equally, whatever the router thinks: for benchmarks.

Shape legend: T tokens here, K choices per token, E experts.
"""

import torch
from torch import Tensor

from moe_kernels.counter_random import TokenRandom
from moe_kernels.errors import MoeKernelsError


def balanced_choices(num_experts: int, top_k: int, random: TokenRandom) -> Tensor:
    """K different experts for each token, int64 [T, K]; of E tokens that follow each other every expert gets K choices.

    The experts of a token lie E / K apart, on as many ranks as K choices can meet. Which token begins where depends on
    its index in the step and on the key. Groups and bias play no part. The host is not synchronised.

    Raises:
        MoeKernelsError: more choices than experts.
    """
    if not 1 <= top_k <= num_experts:
        raise MoeKernelsError(f"{top_k} different experts cannot be chosen of {num_experts}")
    apart_K = torch.arange(top_k, device=random.index_T.device) * (num_experts // top_k)
    return (random.index_T[:, None] + random.key % num_experts + apart_K) % num_experts
