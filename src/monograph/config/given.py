"""Hold a value with its origin, and raise what is wrong with several of them as one error."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from monograph.errors import MonographError, UsageError

COMMAND_LINE = "command line"
MOST_FAULTS = 5  # that one error names


class Given(NamedTuple):
    """A value with its origin.

    Attributes:
        value: the value.
        origin: the origin, for messages.
        rank: 1 (TOML), 2 (environment) or 3 (command line); of keys that exclude each other the
            highest counts.
        from_text: whether a number may be given as text.
        written: the value as a person wrote it, for messages; "": as it is.
    """

    value: Any
    origin: str
    rank: int
    from_text: bool
    written: str = ""


def raise_all(faults: Sequence[MonographError]) -> None:
    """Raise one error that says what several say, so that a person corrects all at once.

    Raises:
        UsageError: one of several faults is a UsageError.
        MonographError: of the first fault's kind, otherwise.
    """
    if not faults:
        return
    if len(faults) == 1:
        raise faults[0]
    lines = [str(fault) for fault in faults[:MOST_FAULTS]]
    if len(faults) > MOST_FAULTS:
        lines.append(f"{len(faults) - MOST_FAULTS} more like these")
    wrongly_used = any(isinstance(fault, UsageError) for fault in faults)
    raise (UsageError if wrongly_used else type(faults[0]))("; also ".join(lines))
