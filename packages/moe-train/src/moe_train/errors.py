"""Errors of this package."""


class MoeTrainError(ValueError):
    """Base of every error that a user of moe-train can provoke. The message is a whole sentence, ready to be shown."""
