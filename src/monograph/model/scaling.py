"""Describe rotary positions and the ways in which they are stretched for longer contexts. Needs no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from monograph.errors import InputRefused

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

LARGEST_SIZE = 2**31 - 1
FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
LONG = "longrope"


def check_whole(name: str, value: object) -> None:
    """Raise InputRefused unless the value is a whole number from 1 to 2^31 - 1, the largest that
    GGUF can hold.
    """
    _check_size(name, value, 1, "")


def check_id(name: str, value: object) -> None:
    """Raise InputRefused unless the value is a whole number from 0 to 2^31 - 1."""
    _check_size(name, value, 0, "a token id, ")


def _check_size(name: str, value: object, least: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputRefused(
            f"{name} = {value!r}: expected {meaning}a whole number of at least {least}"
        )
    if value > LARGEST_SIZE:
        raise InputRefused(f"{name} = {value}: expected {meaning}at most {LARGEST_SIZE}")


def check_number(name: str, value: object) -> None:
    """Raise InputRefused unless the value is a positive number that torch takes: an int64 or a
    finite float.
    """
    most = 2**63 if isinstance(value, int) else 1e300
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < most:
        raise InputRefused(f"{name} = {value!r}: expected a positive number below {most:g}")


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation, which makes every rotary wavelength `factor` times as long (Chen et
    al. 2306.15595).

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
    """Llama 3.1's stretching of rotary wavelengths beyond the context of pre-training; see
    `rope.inverse_frequencies`.

    Attributes:
        factor: stretching of long wavelengths, at least 1.
        low_freq_factor: wavelengths above original_max_position_embeddings / low_freq_factor tokens
            are long.
        high_freq_factor: wavelengths below original_max_position_embeddings / high_freq_factor
            tokens are kept.
        original_max_position_embeddings: context length of pre-training, tokens.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_number(f"rope_scaling.{name}", getattr(self, name))
        check_whole(
            "rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings
        )
        if self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
            raise InputRefused(
                f"rope_scaling.factor = {self.factor}, low_freq_factor = {self.low_freq_factor}, high_freq_factor = "
                f"{self.high_freq_factor}: expected a factor of at least 1 and low below high"
            )


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: fast rotations are kept, slow ones stretched, and scores sharpened; see
    `rope.inverse_frequencies`.

    Attributes:
        factor: stretching of slow rotations, at least 1.
        attention_factor: factor of every cosine and sine, so that scores are multiplied by its
            square.
        beta_fast: pairs that turn more often in the context of pre-training are kept.
        beta_slow: pairs that turn less often are stretched by `factor`.
        truncate: whether the two pairs between which it changes are rounded to whole ones,
            outwards.
        original_max_position_embeddings: context length of pre-training, tokens.
    """

    factor: float
    attention_factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow"):
            check_number(f"rope_scaling.{name}", getattr(self, name))
        check_whole(
            "rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings
        )
        if not isinstance(self.truncate, bool):
            raise InputRefused(f"rope_scaling.truncate = {self.truncate!r}: expected true or false")
        if self.factor < 1 or self.beta_fast < self.beta_slow:
            raise InputRefused(
                f"rope_scaling.factor = {self.factor}, beta_fast = {self.beta_fast}, beta_slow = {self.beta_slow}: "
                "expected a factor of at least 1, and beta_fast not below beta_slow"
            )

    @staticmethod
    def usual_attention_factor(factor: float, mscale: float = 1.0) -> float:
        """Return 1 + 0.1 mscale ln(factor), the paper's choice (Peng et al., arXiv 2309.00071,
        section 3.4).
        """
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE: each wavelength is stretched by a factor of its own (Ding et al., arXiv
    2402.13753).

    Attributes:
        short_factor: those for texts up to original_max_position_embeddings, the only ones that are
            computed here.
        long_factor: those for longer texts, kept for exports.
        attention_factor: factor of every cosine and sine.
        original_max_position_embeddings: context length of pre-training, tokens.
        max_position_embeddings: longest text with long_factor, tokens, kept for exports.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int
    max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if not isinstance(factors, tuple):
                raise InputRefused(f"rope_scaling.{name} = {factors!r}: expected a list of numbers")
            for factor in factors:
                check_number(f"a number of rope_scaling.{name}", factor)
                if factor < 1e-3:
                    raise InputRefused(
                        f"a number of rope_scaling.{name} = {factor}: expected at least 0.001"
                    )
        check_number("rope_scaling.attention_factor", self.attention_factor)
        check_whole("original_max_position_embeddings", self.original_max_position_embeddings)
        check_whole("max_position_embeddings", self.max_position_embeddings)

    def check_pairs(self, pairs: int) -> None:
        """Raise InputRefused unless there is a factor for each of so many pairs of channels."""
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count != pairs:
                raise InputRefused(
                    f"rope_scaling.{name} has {count} numbers: expected {pairs}, one for each pair"
                )

    @property
    def longest(self) -> int:
        """Return the length of the longest text that is computed here."""
        return min(self.original_max_position_embeddings, self.max_position_embeddings)


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling

_KINDS: dict[str, type[Scaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    LONG: LongScaling,
}


def kind_of(scaling: Scaling) -> str:
    """Return the rope_type of a scaling."""
    return next(name for name, kind in _KINDS.items() if type(scaling) is kind)


class Rope(NamedTuple):
    """The rotary positions in a config.json, not checked yet: base and scaling, and the base in
    layers with a window.

    `local_theta` is None where those layers are like the others; they have no scaling otherwise.
    `part` is the share of a head's channels that are rotated.
    """

    theta: object
    scaling: Scaling | None
    local_theta: object = None
    part: object = 1.0


def from_hf(
    values: Mapping[str, Any],
    local_theta: float | None,
    keys: Collection[str],
    kinds: Collection[str],
) -> Rope:
    """Return the rotary positions of a config.json with its family's defaults filled in.

    With `local_theta`, the default base in layers with a window, a file has a table for each kind
    of layer; `keys` are the family's, and `kinds` those of the scalings that it has.

    Raises:
        InputRefused: a kind of scaling that is not supported, or a wrong or missing value.
    """
    # transformers 5 writes a dictionary `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`.
    # If a file has both, transformers reads only `rope_scaling`.
    if local_theta is not None:
        if "rope_local_base_freq" in keys:
            local_theta = values.get("rope_local_base_freq", local_theta)
            check_number("rope_local_base_freq", local_theta)
        return _by_kind(values, local_theta, kinds)
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = _table(values, name)
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise InputRefused(
            f"{name}.{nested[0]}: one rotary embedding for each kind of layer is not supported"
        )
    share = "partial_rotary_factor"
    part = rope.pop(share, values.get(share)) if share in keys else None
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    return Rope(theta, _scaling(rope, values, kinds), part=1.0 if part is None else part)


def _by_kind(values: Mapping[str, Any], local_theta: object, kinds: Collection[str]) -> Rope:
    """Return what two tables say, of the layers without a window and of those with one."""
    tables = _table(values, "rope_parameters")
    for key in tables:
        if key not in (FULL, SLIDING):
            raise InputRefused(
                f"rope_parameters.{key}: expected a table for {FULL!r} and one for {SLIDING!r}"
            )
    whole = _table(tables, FULL) | _table(values, "rope_scaling")
    # Transformers looks for it beside the two tables, where nobody writes it.
    whole.pop("truncate", None)
    local = _table(tables, SLIDING)
    usual = values["rope_theta"]
    if _scaling(local, values, kinds) is not None:
        raise InputRefused(
            f"rope_parameters.{SLIDING}: rope_type = {local.get('rope_type')!r} is not supported there"
        )
    return Rope(
        whole.get("rope_theta", usual),
        _scaling(whole, values, kinds),
        local.get("rope_theta", local_theta),
    )


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = values.get(name) or {}
    if not isinstance(table, dict):
        raise InputRefused(f"{name} = {table!r}: expected a table or null")
    return {**table}


def _scaling(
    rope: dict[str, Any], values: Mapping[str, Any], kinds: Collection[str]
) -> Scaling | None:
    if rope.get("partial_rotary_factor", 1) != 1:
        raise InputRefused(
            f"partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported: only 1 is"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if LONG in kinds and kind in ("su", "yarn"):  # older names of it
        kind = LONG
    if not isinstance(kind, str) or kind not in kinds:
        raise InputRefused(
            f"rope_type = {kind!r} is not supported: only 'default', {', '.join(map(repr, kinds))} are"
        )
    length = "original_max_position_embeddings"
    if length in values:  # outside of the table it takes precedence over a value inside
        rope = {**rope, length: values[length]}
    rope = {length: values["max_position_embeddings"], **rope}
    rope = _yarn(rope) if kind == "yarn" else rope
    rope = _long(rope, values["max_position_embeddings"]) if kind == LONG else rope
    if missing := [field.name for field in fields(_KINDS[kind]) if field.name not in rope]:
        raise InputRefused(f"the key {missing[0]} of the {kind} rope scaling is missing")
    return _KINDS[kind](**{field.name: rope[field.name] for field in fields(_KINDS[kind])})


def _yarn(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the table with what it leaves open, as transformers fills it in: 0 and null stand for
    a default, too.
    """
    rope = rope | {
        key: rope.get(key) or usual for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
    }
    rope = {"truncate": True, **rope}
    if rope.get("attention_factor") is None and "factor" in rope:
        scales = [rope.get("mscale") or 1.0, rope.get("mscale_all_dim") or 1.0]
        for key, number in zip(
            ("factor", "mscale", "mscale_all_dim"), (rope["factor"], *scales), strict=True
        ):
            check_number(f"rope_scaling.{key}", number)
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        one, all_dim = (
            YarnScaling.usual_attention_factor(rope["factor"], scale if both else 1.0)
            for scale in scales
        )
        rope["attention_factor"] = one / all_dim if both else one
    return rope


def _long(rope: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return the table with lists as tuples and what it leaves open, as transformers fills it in."""
    rope = {name: tuple(each) if isinstance(each, list) else each for name, each in rope.items()}
    original = rope["original_max_position_embeddings"]
    for name, number in (
        ("max_position_embeddings", longest),
        ("original_max_position_embeddings", original),
    ):
        check_whole(name, number)
    factor = longest / original if rope.get("factor") is None else rope["factor"]
    check_number("rope_scaling.factor", factor)
    if rope.get("attention_factor") is None:
        stretched = factor > 1 and original > 1
        rope["attention_factor"] = (
            math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0
        )
    return rope | {"max_position_embeddings": longest}


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a config.json that say a LlamaConfig's rotary positions."""
    theta = config.rope_theta
    scaling = config.rope_scaling
    found = dict[str, Any]()
    if scaling is not None:
        table = {
            name: list(each) if isinstance(each, tuple) else each
            for name, each in asdict(scaling).items()
        }
        found["rope_scaling"] = {"rope_type": kind_of(scaling), **table}
        if isinstance(scaling, LongScaling):  # both lengths count outside of the table
            lengths = {
                name: table.pop(name)
                for name in ("max_position_embeddings", "original_max_position_embeddings")
            }
            lists = {name: table[name] for name in ("short_factor", "long_factor")}
            # transformers 4 wants a table of exactly three keys.
            usual = _long({**lists, **lengths}, scaling.max_position_embeddings)["attention_factor"]
            table = lists if scaling.attention_factor == usual else table
            found = {"rope_scaling": {"type": LONG, **table}, **lengths}
    elif "rope_parameters" in config.family.defaults:  # which would count without them
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if "rope_local_theta" in config.family.keys:
        local = config.rope_local_theta or theta
        of_local = {"rope_type": "default", "rope_theta": local}
        found |= {
            "rope_parameters": {FULL: {"rope_theta": theta}, SLIDING: of_local},
            "rope_local_base_freq": local,
        }
    return found
