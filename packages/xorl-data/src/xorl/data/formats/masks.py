"""Honours or refuses keys that mask or weight messages and rows.

A key that excludes text in another trainer must not be ignored here, because the text would be trained.
"""

from __future__ import annotations

from collections.abc import Mapping

from xorl.data.columns import FOREIGN_MASKS, ROW_MASKS, TRAIN_KEYS
from xorl.data.errors import DataError

# The values of NeMo's column `mask`, which names the masked role.
_MASKED_ROLES = ("User", "user", "Human", "human")
_ROW_MASKS, _FOREIGN_MASKS = frozenset(ROW_MASKS), frozenset(FOREIGN_MASKS)


def check_row_masks(row: Mapping[str, object], used: frozenset[str]) -> None:
    """Raises DataError for a column that masks or weights rows, unless its value means ordinary training.

    NeMo's `mask: User` does, because only the assistant's messages are trained.

    `used` are the columns that the format reads; they may have any name.
    """
    for name in sorted((row.keys() & _ROW_MASKS) - used):
        value = row[name]
        if value is None or (name in TRAIN_KEYS and _is_one(value)) or (name == "mask" and value in _MASKED_ROLES):
            continue
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:40] + "..."
        raise DataError(
            f"column {name!r} is {shown}: it masks rows or gives them weights in other trainers, and xorl would ignore "
            f"it. Leave it out with ignore_columns=[{name!r}]; to exclude an assistant message from training, set "
            "train: false in the message, and to exclude tokens, give tokenized rows labels of -100"
        )


def train_flag(fields: Mapping[str, object], number: int) -> bool | None:
    """Whether a message is to be trained, by the TRAIN_KEYS in it; None if it has none.

    Raises DataError for values other than true and false (1 and 0), for keys that contradict each other, and for
    masking keys of other trainers that xorl does not support.
    """
    foreign = sorted(fields.keys() & _FOREIGN_MASKS)
    if foreign:
        raise DataError(
            f"message {number} has the key {foreign[0]!r}, which masks messages or gives them weights in other "
            "trainers, and which xorl does not support; remove it, and set train: false in the messages that are not "
            "to be trained"
        )
    flags = {name: fields[name] for name in TRAIN_KEYS if name in fields}
    if not flags:
        return None
    values = list(flags.values())
    if any(value not in (0, 1) for value in values) or any(value != values[0] for value in values):
        names = " and ".join(flags)
        equal = " and equal" if len(flags) > 1 else ""
        raise DataError(f"message {number}: {names} must be true or false (1 or 0){equal}, got {values}")
    return bool(values[0])


def check_part_masks(part: Mapping[str, object], number: int) -> None:
    """Raises DataError for a key of a part of message `number` that excludes it from training, or gives it a weight."""
    for name in part:
        if name in _ROW_MASKS and part[name] is not None and not (name in TRAIN_KEYS and _is_one(part[name])):
            raise DataError(
                f"message {number}: a part of its content or a tool call sets {name}: {part[name]!r}, but only whole "
                "messages can be excluded from training; remove the key, or set train: false in the message"
            )


def _is_one(value: object) -> bool:
    return isinstance(value, (bool, int, float)) and value == 1
