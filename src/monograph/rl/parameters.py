"""The parameters of rewards and of losses of preferences, each of which is set by a key of its own.

A reward or a loss declares a `Parameter`, and `monograph.config.keys` makes the key from it, with
its type, its help and its errors. Nothing here needs torch, as the keys are read without it.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from monograph.errors import UsageError
from monograph.ranges import Range


class Parameter(NamedTuple):
    """A parameter of a reward or of a loss of preferences.

    Several rewards, or several losses, may have the same parameter. Only their defaults may differ.

    Attributes:
        key: the key that sets it, such as "rl.reward_regex".
        meaning: what the key means, in one sentence.
        values: for a number, the range of its values; for a text, a description of the text that
            completes the sentence "expected ...".
        default: its value if it is not set; None: it must be set.
        example: a possible value, if it has no default.
        is_model: whether the text names a model. The code that makes the reward loads that model.
        is_code: whether the text names a class in a Python file, which the user has to trust.
    """

    key: str
    meaning: str
    values: Range | str
    default: float | str | None = None
    example: float | str | None = None
    is_model: bool = False
    is_code: bool = False

    @property
    def field(self) -> str:
        """Return the key's name in its section, such as "reward_regex"."""
        return self.key.partition(".")[2]

    @property
    def name(self) -> str:
        """Return the name of the Python argument, such as "regex": the field without "reward_"."""
        return self.field.removeprefix("reward_")

    def require(self, value: object) -> None:
        """Refuse a value that the parameter cannot have.

        Raises:
            UsageError: the message names the key, the value and what was expected.
        """
        if isinstance(self.values, Range):
            self.values.require(self.key, value)
        elif not isinstance(value, str | os.PathLike) or not str(value):
            raise UsageError(f"{self.key} = {value!r}: expected {self.values}")


def values_of(
    parameters: Sequence[Parameter], arguments: Mapping[str, object], choice: str
) -> dict[str, Any]:
    """Return the value of each parameter by its name: the value in `arguments`, or else its default.

    Args:
        parameters: the parameters of a reward or of a loss.
        arguments: values by the parameters' names; None stands for a value that is not given.
        choice: the reward or loss, as an error names it: "rl.reward = regex".

    Raises:
        UsageError: a value is missing or out of range; the message names the key.
    """
    values: dict[str, Any] = {}
    for parameter in parameters:
        value = arguments.get(parameter.name)
        if value is None:
            value = parameter.default
        if value is None:
            raise UsageError(f"{choice}: give {parameter.key}, too")
        parameter.require(value)
        values[parameter.name] = value
    return values
