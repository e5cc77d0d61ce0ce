"""The two ways in which checkpoints and weights fail: what the user gave is wrong, or the machine let us down."""


class CheckpointError(ValueError):
    """What was given cannot be used: a wrong path, another model's checkpoint, a corrupted file, an unusable folder."""


class CheckpointFailure(RuntimeError):
    """The environment failed: a full disk, a lost rank, a read error. What raises it has published nothing."""
