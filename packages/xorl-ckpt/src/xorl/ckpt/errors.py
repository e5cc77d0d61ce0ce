"""The two kinds of errors of checkpoints and weights: wrong input from the user, and a failure of the machine."""


class CheckpointError(ValueError):
    """Unusable input: a wrong path, another model's checkpoint, a corrupted file, an unusable folder."""


class CheckpointFailure(RuntimeError):
    """The environment failed: a full disk, a lost rank, a read error. Nothing was published."""
