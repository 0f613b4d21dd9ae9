"""Errors of this package."""


class MoeTrainError(ValueError):
    """Base of every error that a user of moe-train can provoke. The message is a whole sentence, ready to be shown."""


def described(error: BaseException) -> str:
    """An error and its notes; where one of them has several lines each begins a line."""
    parts = [str(error), *getattr(error, "__notes__", [])]
    return ("\n" if any("\n" in part for part in parts) else "; ").join(parts)
