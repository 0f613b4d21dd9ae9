"""Which dtype each parameter computes in."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from moe_kernels import internal_dtype
from moe_memory.errors import MoeMemoryError


def compute_dtypes(names: Iterable[str], default: torch.dtype, keep_internal: Sequence[str]) -> dict[str, torch.dtype]:
    """Compute dtype by global name: the default, or the internal dtype of the default where a pattern matches.

    Raises:
        MoeMemoryError: a pattern that matches no name; a pattern without effect is a mistake.
    """
    names = list(names)
    for pattern in keep_internal:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MoeMemoryError(f"the pattern {pattern!r} of parameters in the internal dtype matches no parameter")
    return {
        name: internal_dtype(default) if any(fnmatchcase(name, p) for p in keep_internal) else default for name in names
    }
