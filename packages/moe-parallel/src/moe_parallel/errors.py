"""Errors of this package."""


class MoeParallelError(ValueError):
    """Base of every error that a caller of moe-parallel can provoke."""
