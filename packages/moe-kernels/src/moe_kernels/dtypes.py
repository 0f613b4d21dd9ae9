"""The internal dtype of mathematics: at least float32, and float64 where the input is float64.

Scores, probabilities, losses, master weights, moments and main gradients follow it, so that a float64 run is float64
throughout and can judge the others.
"""

import torch


def internal_dtype(dtype: torch.dtype) -> torch.dtype:
    """`promote_types(float32, dtype)`: float32 for low precision and float32, float64 for float64."""
    return torch.promote_types(torch.float32, dtype)
