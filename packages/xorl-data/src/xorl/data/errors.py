"""The two kinds of data errors: wrong input from the user, and a failure of the machine."""


class DataError(ValueError):
    """Unusable data or data options. The message says what was given, what is expected, and which option to change."""


class DataFailure(RuntimeError):
    """The environment failed: a full disk, no network, a killed process. No incomplete result is left behind."""
