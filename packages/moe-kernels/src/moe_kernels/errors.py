"""Errors of this package."""


class MoeKernelsError(ValueError):
    """Base of every error that a caller of moe-kernels can provoke."""
