"""How rotary wavelengths are stretched beyond the context of pre-training: the kinds, checked. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from monograph.errors import InputRefused

LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True)
class LinearScaling:
    """Every wavelength `factor` times as long: position interpolation (Chen et al., arXiv 2306.15595).

    Attributes:
        factor: at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("rope_scaling.factor", self.factor)
        if self.factor < 1:
            raise InputRefused(f"rope_scaling.factor = {self.factor}: expected at least 1")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of rotary wavelengths beyond the context of pre-training; see `rope.inverse_frequencies`.

    Attributes:
        factor: by how much wavelengths longer than the low-frequency border are stretched, at least 1.
        low_freq_factor: that border is original_max_position_embeddings / low_freq_factor tokens.
        high_freq_factor: wavelengths below original_max_position_embeddings / high_freq_factor tokens are kept.
        original_max_position_embeddings: context length of pre-training, tokens.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_number(f"rope_scaling.{name}", getattr(self, name))
        check_whole("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)
        if self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
            raise InputRefused(
                f"rope_scaling.factor = {self.factor}, low_freq_factor = {self.low_freq_factor}, high_freq_factor = "
                f"{self.high_freq_factor}: expected a factor of at least 1 and low below high"
            )


Scaling = LinearScaling | Llama3Scaling

_KINDS: dict[str, type[Scaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling}


def from_hf(values: dict[str, Any]) -> tuple[Any, Scaling | None]:
    """The rotary base, not checked yet, and the scaling of a config.json.

    Raises:
        InputRefused: a kind of scaling that is not computed here, or a wrong or missing value.
    """
    # transformers 5 writes one dictionary `rope_parameters`, 4 wrote `rope_theta` beside `rope_scaling`. Of a file that
    # has both transformers reads `rope_scaling` alone.
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(name) or {}
    if not isinstance(rope, dict):
        raise InputRefused(f"{name} = {rope!r}: expected a table or null")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise InputRefused(f"{name}.{nested[0]}: one rotary embedding for each kind of layer is not supported")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise InputRefused(f"partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported: only 1 is")
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputRefused(f"rope_type = {kind!r} is not supported: only 'default', 'linear' and 'llama3' are")
    names, length = [field.name for field in fields(_KINDS[kind])], "original_max_position_embeddings"
    if length in values:  # beside the table it counts more than in it
        rope = {**rope, length: values[length]}
    rope = {length: values["max_position_embeddings"], **rope}
    if missing := [name for name in names if name not in rope]:
        raise InputRefused(f"the key {missing[0]} of the {kind} rope scaling is missing")
    return theta, _KINDS[kind](**{name: rope[name] for name in names})


def to_hf(scaling: Scaling) -> dict[str, Any]:
    """The table `rope_scaling` of a config.json."""
    return {"rope_type": next(name for name, kind in _KINDS.items() if type(scaling) is kind), **asdict(scaling)}


def check_whole(name: str, value: object) -> None:
    """Raises InputRefused unless the value is a whole number from 1 to 2^31 - 1, which is as much as GGUF can hold."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputRefused(f"{name} = {value!r}: expected a whole number of at least 1")
    if value > LARGEST_SIZE:
        raise InputRefused(f"{name} = {value}: expected at most {LARGEST_SIZE}")


def check_number(name: str, value: object) -> None:
    """Raises InputRefused unless the value is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise InputRefused(f"{name} = {value!r}: expected a positive number")
