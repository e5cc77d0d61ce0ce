"""Errors of checkpoints and weights: one for invalid input from the user, one for failures of the environment."""

from pathlib import PurePath


class CheckpointError(ValueError):
    """Invalid input: a wrong path, another model's checkpoint, a corrupted file, a folder that cannot be written."""


class CheckpointFailure(RuntimeError):
    """The environment failed: a full disk, a lost rank, a read error. Nothing was published."""


def require(argument: str, value: object, is_valid: bool, wanted: str) -> None:
    """Raise CheckpointError, naming the argument and what came, unless it is what is `wanted`: "a mapping of ..."."""
    if not is_valid:
        plain = value is None or isinstance(value, (bool, int, float, str, PurePath))
        shown = repr(str(value) if isinstance(value, PurePath) else value) if plain else f"the {type(value).__name__}"
        raise CheckpointError(f"{argument}: {shown} is not {wanted}")


def is_count(value: object, least: int) -> bool:
    """Whether the value is an int of at least `least`; bools are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
