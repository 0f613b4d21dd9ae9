"""Errors of this package."""


class MoeParallelError(ValueError):
    """Base of every error that a caller of moe-parallel can provoke."""


def described(error: BaseException) -> str:
    """An error and its notes; where one of them has several lines each begins a line."""
    parts = [str(error), *getattr(error, "__notes__", [])]
    return ("\n" if any("\n" in part for part in parts) else "; ").join(parts)
