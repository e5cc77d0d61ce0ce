"""The two ways in which data fails: what the user gave is wrong, or the machine let us down."""


class DataError(ValueError):
    """Data or data options that cannot be used: says what came, what is wanted, and which option to change."""


class DataFailure(RuntimeError):
    """The environment failed: a full disk, no network, a process that was ended. Nothing half-made is left behind."""
