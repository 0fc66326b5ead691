"""What a stage of the sampler declares: when a request needs it, and the numbers that it reads of
each row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from monograph.decode.sampling import RANGES, Sampling


@dataclass(frozen=True)
class Knob:
    """A number that a stage reads of each row.

    Attributes:
        value: returns a request's number.
        is_whole: whether it is an int64, not an fp32.
    """

    value: Callable[[Sampling], Any]
    is_whole: bool = False


def options(*names: str) -> dict[str, Knob]:
    """Return knobs that are options of the same names."""
    return {name: Knob(_Option(name), RANGES[name].whole) for name in names}


@dataclass(frozen=True)
class _Option:
    name: str

    def __call__(self, sampling: Sampling) -> Any:
        return getattr(sampling, self.name)


@dataclass(frozen=True)
class SamplerStage:
    """A stage of the sampler.

    Attributes:
        name: its name in `Chain.stages`.
        is_needed: returns whether a request needs it.
        knobs: the numbers that it reads of each row, by name. In a row that does not need it they
            turn it off.
        example: options with which a request needs it.
    """

    name: str
    is_needed: Callable[[Sampling], bool]
    knobs: Mapping[str, Knob]
    example: Mapping[str, Any]
