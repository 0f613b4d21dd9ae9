"""Errors of this package."""


class MoeCommError(ValueError):
    """Base of every error that a caller of moe-comm can provoke."""
