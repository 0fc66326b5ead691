"""A setting's value with its origin, and one error for several faults of settings."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from monograph.errors import MonographError, UsageError

COMMAND_LINE = "command line"
MAX_FAULTS = 5  # the largest number of faults that an error names
# The ranks of origins: a value of a higher rank overrides one of a lower rank.
TOML_RANK = 1
ENVIRONMENT_RANK = 2
COMMAND_LINE_RANK = 3


class SourcedValue(NamedTuple):
    """A value with its origin.

    Attributes:
        value: the value.
        origin: where the value was written, for messages, such as "run.toml:7".
        rank: TOML_RANK, ENVIRONMENT_RANK or COMMAND_LINE_RANK. If keys exclude each other, the one
            with the highest rank counts.
        from_text: whether the value may be a text that stands for a number, as in a shell.
        written: the value as a person wrote it, for messages; "": messages show `value` itself.
    """

    value: Any
    origin: str
    rank: int
    from_text: bool
    written: str = ""


def raise_all(faults: Sequence[MonographError]) -> None:
    """Raise one error with the messages of all faults, so that a person can correct all at once.

    Without faults this function does nothing.

    Raises:
        UsageError: one of the faults is a UsageError.
        MonographError: none is; the error has the class of the first fault.
    """
    if not faults:
        return
    if len(faults) == 1:
        raise faults[0]
    lines = [str(fault) for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        lines.append(f"{len(faults) - MAX_FAULTS} more like these")
    is_usage_error = any(isinstance(fault, UsageError) for fault in faults)
    error_class = UsageError if is_usage_error else type(faults[0])
    raise error_class("; also ".join(lines))
