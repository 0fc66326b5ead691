"""The declaration of a stage of the sampler: which requests need it, and which numbers it reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from monograph.decode.sampling import RANGES, Sampling


@dataclass(frozen=True)
class SamplerKnob:
    """A number that a stage reads for each row.

    Attributes:
        value: returns the number for a request with these options.
        is_whole: whether the number is an int64; otherwise it is an fp32.
    """

    value: Callable[[Sampling], Any]
    is_whole: bool = False


def options(*names: str) -> dict[str, SamplerKnob]:
    """Return knobs by name, each of which has the value of the option of the same name."""
    return {name: SamplerKnob(attrgetter(name), RANGES[name].whole) for name in names}


@dataclass(frozen=True)
class SamplerStage:
    """A stage of the sampler.

    Attributes:
        name: its name in `Chain.stages`.
        is_needed: returns whether a request needs the stage.
        knobs: the numbers that it reads for each row, by name. In a row whose request does not need
            the stage, they turn it off.
        example: options of a request that needs the stage. A request with the examples of all stages
            needs all of them.
    """

    name: str
    is_needed: Callable[[Sampling], bool]
    knobs: Mapping[str, SamplerKnob]
    example: Mapping[str, Any]
