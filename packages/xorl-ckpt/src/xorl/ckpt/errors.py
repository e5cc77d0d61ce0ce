"""Errors of checkpoints and weights: one for invalid input from the user, one for failures of the environment."""


class CheckpointError(ValueError):
    """Invalid input: a wrong path, another model's checkpoint, a corrupted file, a folder that cannot be written."""


class CheckpointFailure(RuntimeError):
    """The environment failed: a full disk, a lost rank, a read error. Nothing was published."""
