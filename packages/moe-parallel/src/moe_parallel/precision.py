"""The internal dtype: what sums over many addends and softmaxes are kept in."""

import torch


def internal_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for what is narrower, float64 for float64."""
    return torch.promote_types(torch.float32, dtype)
