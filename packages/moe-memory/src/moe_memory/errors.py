"""Errors of this package."""


class MoeMemoryError(ValueError):
    """Base of every error that a caller of moe-memory can provoke."""
