"""Describe rotary positions and the ways to scale them for longer contexts, and read and write them
as keys of a config.json.

The module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer, check_positive_number
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

LONGROPE = "longrope"  # the rope_type of `LongScaling`
# The key of a table of rotary positions that says how queries grow (`GrowingYarnScaling`).
QUERY_GROWTH = "llama_4_scaling_beta"
PROPORTIONAL = "proportional"  # the rope_type of `ProportionalScaling`
_ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every rotary wavelength is multiplied by `factor`.

    Source: Chen et al., arXiv 2306.15595.

    Attributes:
        factor: factor of the wavelengths, at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive_number("rope_scaling.factor", self.factor)
        if self.factor < 1:
            raise InputRefused(f"rope_scaling.factor = {self.factor}: expected at least 1")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are multiplied by `factor`, short ones are kept.

    `rope.inverse_frequencies` has the equation.

    Attributes:
        factor: factor of long wavelengths, at least 1.
        low_freq_factor: wavelengths above original_max_position_embeddings / low_freq_factor tokens
            are long.
        high_freq_factor: wavelengths below original_max_position_embeddings / high_freq_factor
            tokens are short.
        original_max_position_embeddings: context length of pre-training, tokens.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive_number(f"rope_scaling.{name}", getattr(self, name))
        check_positive_integer(
            "rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings
        )
        if self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
            raise InputRefused(
                f"rope_scaling.factor = {self.factor}, low_freq_factor = {self.low_freq_factor}, high_freq_factor = "
                f"{self.high_freq_factor}: expected a factor of at least 1, and low_freq_factor below high_freq_factor"
            )


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: long wavelengths are multiplied by `factor`, short ones are kept, and attention's scores
    are made larger.

    `rope.inverse_frequencies` has the equation. A pair is two channels that are rotated together.

    Attributes:
        factor: factor of long wavelengths, at least 1.
        attention_factor: factor of every cosine and sine. So attention's scores are multiplied by
            the square of this factor.
        original_max_position_embeddings: context length of pre-training, tokens.
        beta_fast: pairs with more rotations than this in the context of pre-training are kept.
        beta_slow: pairs with fewer rotations than this are stretched by `factor`.
        truncate: whether the indices of the pairs with beta_fast and beta_slow rotations are
            rounded to integers, the first down and the second up.
    """

    factor: float
    attention_factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow"):
            check_positive_number(f"rope_scaling.{name}", getattr(self, name))
        check_positive_integer(
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
    def default_attention_factor(factor: float, mscale: float = 1.0) -> float:
        """Return 1 + 0.1 mscale ln(factor), or 1 for a factor of at most 1.

        Source: Peng et al., arXiv 2309.00071, section 3.4.
        """
        if factor <= 1:
            return 1.0
        return 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class GrowingYarnScaling(YarnScaling):
    """YaRN with queries that grow with their positions, as in Ministral 3.

    A query at position p is multiplied by

        1 + llama_4_scaling_beta ln(1 + floor(p / L)),   L = original_max_position_embeddings.

    This package computes only texts of up to L tokens, in which all these factors are 1. So it never
    uses `llama_4_scaling_beta`, and keeps it only for exports.

    Source: modeling_ministral3.py of transformers 5.23.

    Attributes:
        llama_4_scaling_beta: how fast queries grow, above 0.
        max_position_embeddings: longest text with growing queries, tokens.
    """

    llama_4_scaling_beta: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_number("rope_scaling.llama_4_scaling_beta", self.llama_4_scaling_beta)
        check_positive_integer("max_position_embeddings", self.max_position_embeddings)

    @property
    def longest(self) -> int:
        """Return the length of the longest text that this package computes, tokens."""
        return min(self.original_max_position_embeddings, self.max_position_embeddings)


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE: each wavelength has its own factor.

    This package computes only texts of up to original_max_position_embeddings tokens. So it never
    uses `long_factor`, and keeps it only for exports.

    Source: Ding et al., arXiv 2402.13753.

    Attributes:
        short_factor: the wavelengths' factors in texts of up to original_max_position_embeddings
            tokens.
        long_factor: the wavelengths' factors in longer texts.
        attention_factor: factor of every cosine and sine.
        original_max_position_embeddings: context length of pre-training, tokens.
        max_position_embeddings: longest text with long_factor, tokens.
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
                check_positive_number(f"a number of rope_scaling.{name}", factor)
                if factor < 1e-3:
                    raise InputRefused(
                        f"a number of rope_scaling.{name} = {factor}: expected at least 0.001"
                    )
        check_positive_number("rope_scaling.attention_factor", self.attention_factor)
        check_positive_integer(
            "original_max_position_embeddings", self.original_max_position_embeddings
        )
        check_positive_integer("max_position_embeddings", self.max_position_embeddings)

    def check_pairs(self, pairs: int) -> None:
        """Raise InputRefused unless both lists have `pairs` factors, one for each pair of channels."""
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count != pairs:
                raise InputRefused(
                    f"rope_scaling.{name} has {count} numbers: expected {pairs}, one for each pair"
                )

    @property
    def longest(self) -> int:
        """Return the length of the longest text that this package computes, tokens."""
        return min(self.original_max_position_embeddings, self.max_position_embeddings)


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the fastest pairs of channels are rotated, with the wavelengths that they have if all are.

    `rope.inverse_frequencies` has the equation.

    Attributes:
        partial_rotary_factor: share of the pairs that are rotated.
        factor: factor of the wavelengths.
    """

    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("partial_rotary_factor", "factor"):
            check_positive_number(f"rope_parameters.{name}", getattr(self, name))
        if self.partial_rotary_factor > 1:
            raise InputRefused(
                f"rope_parameters.partial_rotary_factor = {self.partial_rotary_factor}: expected at most 1"
            )

    def rotated_pairs(self, head_dim: int) -> int:
        """Return how many pairs of a head's channels are rotated. These are the first ones."""
        return int(self.partial_rotary_factor * head_dim // 2)


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling | ProportionalScaling

_SCALING_CLASSES: dict[str, type[Scaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    LONGROPE: LongScaling,
    PROPORTIONAL: ProportionalScaling,
}


def rope_type(scaling: Scaling) -> str:
    """Return transformers' name of a scaling, the value of its `rope_type`."""
    if isinstance(scaling, YarnScaling):  # queries may grow in addition
        return "yarn"
    return next(
        name for name, scaling_class in _SCALING_CLASSES.items() if type(scaling) is scaling_class
    )


class Rope(NamedTuple):
    """The rotary positions that a config.json states.

    The numbers are as in the file and not yet checked. The scaling is checked.

    Attributes:
        theta: base of the wavelengths.
        scaling: the scaling of the wavelengths; None: they are not scaled.
        local_theta: base of the wavelengths in layers with a window, which then have no scaling;
            None: these layers have the base and the scaling of the other layers.
        partial_rotary_factor: share of a head's channels that are rotated.
    """

    theta: object
    scaling: Scaling | None
    local_theta: object = None
    partial_rotary_factor: object = 1.0


def from_hf(
    values: Mapping[str, Any],
    local_theta: float | None,
    keys: Collection[str],
    rope_types: Collection[str],
) -> Rope:
    """Return the rotary positions that a config.json states.

    Args:
        values: the content of the config.json, with its family's defaults filled in.
        local_theta: the family's default base in layers with a window. Files of a family with such a
            default have one table for these layers and one for the others. None: files have one
            table for all layers.
        keys: the family's optional keys.
        rope_types: the family's scalings, by transformers' names.

    Raises:
        InputRefused: a scaling that the family does not have, or a wrong or missing value.
    """
    if local_theta is not None:
        if "rope_local_base_freq" in keys:
            local_theta = values.get("rope_local_base_freq", local_theta)
            check_positive_number("rope_local_base_freq", local_theta)
        return _read_two_tables(values, local_theta, rope_types)
    # transformers 5 writes a dictionary `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`.
    # If a file has both, transformers reads only `rope_scaling`.
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    table = _copy_table(values, name)
    nested = [key for key, value in table.items() if isinstance(value, dict)]
    if nested:
        raise InputRefused(
            f"{name}.{nested[0]}: one rotary embedding for each kind of layer is not supported"
        )
    partial_rotary_factor = None
    if "partial_rotary_factor" in keys:
        partial_rotary_factor = table.pop(
            "partial_rotary_factor", values.get("partial_rotary_factor")
        )
    if partial_rotary_factor is None:
        partial_rotary_factor = 1.0
    theta = table.get("rope_theta", values.get("rope_theta", 10_000.0))
    scaling = _read_scaling(table, values, rope_types)
    if QUERY_GROWTH in keys:
        scaling = _with_query_growth(scaling, table, values["max_position_embeddings"])
    return Rope(theta, scaling, partial_rotary_factor=partial_rotary_factor)


def _with_query_growth(
    scaling: Scaling | None, table: Mapping[str, Any], max_length: int
) -> Scaling | None:
    """Return the scaling of a family whose queries grow with their positions.

    Args:
        scaling: the scaling that the table states besides this growth.
        table: the table of rotary positions.
        max_length: the file's max_position_embeddings.

    Raises:
        InputRefused: the table has no `QUERY_GROWTH`, which transformers needs, or the growth has
            another scaling than YaRN.
    """
    growth = table.get(QUERY_GROWTH)
    if growth is None:
        raise InputRefused(f"rope_parameters.{QUERY_GROWTH} is missing: expected a number, or 0")
    if growth == 0 and not isinstance(growth, bool):
        return scaling
    if not isinstance(scaling, YarnScaling):
        raise InputRefused(
            f"rope_parameters.{QUERY_GROWTH} = {growth!r} is supported only with rope_type = 'yarn'"
        )
    return GrowingYarnScaling(
        **asdict(scaling), llama_4_scaling_beta=growth, max_position_embeddings=max_length
    )


def _read_two_tables(
    values: Mapping[str, Any], local_theta: object, rope_types: Collection[str]
) -> Rope:
    """Return the rotary positions of a file with two tables in `rope_parameters`: one for full
    attention, and one for layers with a window.

    Args:
        values: the content of the config.json, with its family's defaults filled in.
        local_theta: base in layers with a window, if their table has none.
        rope_types: the family's scalings, by transformers' names.
    """
    tables = _copy_table(values, "rope_parameters")
    for key in tables:
        if key not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise InputRefused(
                f"rope_parameters.{key}: expected a table for {FULL_ATTENTION!r} and one for {SLIDING_ATTENTION!r}"
            )
    older_table = _copy_table(values, "rope_scaling")
    # transformers adds this table to one that has the rope_type "default". So it never reads "type", the
    # older name of rope_type.
    if "rope_type" not in older_table and older_table.get("type", "default") != "default":
        raise InputRefused(
            f"rope_scaling: type = {older_table['type']!r} is the older name of rope_type, which transformers does not "
            "read in this family: write rope_type"
        )
    full_table = _copy_table(tables, FULL_ATTENTION) | older_table
    # transformers does not read `truncate` from one of two tables.
    full_table.pop("truncate", None)
    sliding_table = _copy_table(tables, SLIDING_ATTENTION)
    default_theta = values["rope_theta"]
    # With two tables, transformers reads the original length only from a table.
    values = {key: value for key, value in values.items() if key != _ORIGINAL_LENGTH}
    if _read_scaling(sliding_table, values, rope_types) is not None:
        sliding_type = sliding_table.get("rope_type")
        raise InputRefused(
            f"rope_parameters.{SLIDING_ATTENTION}: rope_type = {sliding_type!r} is not supported there"
        )
    return Rope(
        full_table.get("rope_theta", default_theta),
        _read_scaling(full_table, values, rope_types),
        sliding_table.get("rope_theta", local_theta),
    )


def _copy_table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of the table with this name, or {} if the file has no such table or null."""
    table = values.get(name) or {}
    if not isinstance(table, dict):
        raise InputRefused(f"{name} = {table!r}: expected a table or null")
    return {**table}


def _read_scaling(
    table: dict[str, Any], values: Mapping[str, Any], rope_types: Collection[str]
) -> Scaling | None:
    """Return the scaling that a table of rotary positions states.

    Args:
        table: the content of `rope_scaling`, `rope_parameters` or a table in the latter.
        values: the content of the config.json, with its family's defaults filled in.
        rope_types: the family's scalings, by transformers' names.
    """
    name = table.get("rope_type", table.get("type", "default"))
    if name == PROPORTIONAL and name in rope_types:
        factors = ("partial_rotary_factor", "factor")
        return ProportionalScaling(**{key: table[key] for key in factors if key in table})
    if table.get("partial_rotary_factor", 1) != 1:
        raise InputRefused(
            f"partial_rotary_factor = {table['partial_rotary_factor']!r} is not supported: only 1 is"
        )
    if name == "default":
        return None
    # Older files of families with LongRoPE call it "su" or "yarn".
    if LONGROPE in rope_types and name in ("su", "yarn"):
        name = LONGROPE
    if not isinstance(name, str) or name not in rope_types:
        supported = ", ".join(map(repr, rope_types))
        raise InputRefused(
            f"rope_type = {name!r} is not supported: only 'default', {supported} are"
        )
    # The original length outside of the table takes precedence over the one in the table. Without
    # either it is max_position_embeddings.
    if _ORIGINAL_LENGTH in values:
        table = {**table, _ORIGINAL_LENGTH: values[_ORIGINAL_LENGTH]}
    table = {_ORIGINAL_LENGTH: values["max_position_embeddings"], **table}
    if name == "yarn":
        table = _complete_yarn(table)
    elif name == LONGROPE:
        table = _complete_long(table, values["max_position_embeddings"])
    scaling_class = _SCALING_CLASSES[name]
    attributes = [field.name for field in fields(scaling_class)]
    missing = [attribute for attribute in attributes if attribute not in table]
    if missing:
        raise InputRefused(f"the key {missing[0]} of the {name} rope scaling is missing")
    return scaling_class(**{attribute: table[attribute] for attribute in attributes})


def _complete_yarn(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table of YaRN with transformers' values for the keys that the file leaves out.

    As in transformers, a beta_fast, beta_slow, mscale or mscale_all_dim of 0 or null counts as left out.
    """
    table = {"truncate": True, **table}
    table["beta_fast"] = table.get("beta_fast") or 32.0
    table["beta_slow"] = table.get("beta_slow") or 1.0
    if table.get("attention_factor") is None and "factor" in table:
        factor = table["factor"]
        mscale = table.get("mscale")
        mscale_all_dim = table.get("mscale_all_dim")
        check_positive_number("rope_scaling.factor", factor)
        check_positive_number("rope_scaling.mscale", mscale or 1.0)
        check_positive_number("rope_scaling.mscale_all_dim", mscale_all_dim or 1.0)
        attention_factor = YarnScaling.default_attention_factor(factor)
        if mscale and mscale_all_dim:
            numerator = YarnScaling.default_attention_factor(factor, mscale)
            denominator = YarnScaling.default_attention_factor(factor, mscale_all_dim)
            attention_factor = numerator / denominator
        table["attention_factor"] = attention_factor
    return table


def _complete_long(table: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Return a table of LongRoPE with transformers' values for the keys that the file leaves out.

    Lists become tuples.

    Args:
        table: the table, with the original length.
        max_length: the file's max_position_embeddings.
    """
    table = {
        name: tuple(value) if isinstance(value, list) else value for name, value in table.items()
    }
    original_length = table["original_max_position_embeddings"]
    check_positive_integer("max_position_embeddings", max_length)
    check_positive_integer("original_max_position_embeddings", original_length)
    factor = table.get("factor")
    if factor is None:
        factor = max_length / original_length
    check_positive_number("rope_scaling.factor", factor)
    if table.get("attention_factor") is None:
        # For an original length of 1, the denominator would be 0.
        if factor > 1 and original_length > 1:
            table["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original_length))
        else:
            table["attention_factor"] = 1.0
    return table | {"max_position_embeddings": max_length}


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a config.json that state the rotary positions of a configuration."""
    theta = config.rope_theta
    scaling = config.rope_scaling
    values = dict[str, Any]()
    if PROPORTIONAL in config.family.rope_types:
        return {"rope_parameters": _two_tables_to_hf(config)}
    if isinstance(scaling, LongScaling):
        values = _long_to_hf(scaling)
    elif QUERY_GROWTH in config.family.optional_keys:
        values = _growing_to_hf(config)
    elif scaling is not None:
        values["rope_scaling"] = {"rope_type": rope_type(scaling), **asdict(scaling)}
    elif "rope_parameters" in config.family.defaults:
        # A file without this key would get the family's default, which has a scaling.
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if "rope_local_theta" in config.family.optional_keys:
        local_theta = config.rope_local_theta or theta
        values["rope_parameters"] = {
            FULL_ATTENTION: {"rope_theta": theta},
            SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": local_theta},
        }
        values["rope_local_base_freq"] = local_theta
    return values


def _growing_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys that state rotary positions in a family whose queries grow with their positions.

    transformers reads the growth and the original length from `rope_parameters` with any rope_type.
    """
    scaling = config.rope_scaling
    table: dict[str, Any] = {
        "rope_type": "default",
        QUERY_GROWTH: 0.0,
        _ORIGINAL_LENGTH: config.max_position_embeddings,
    }
    if scaling is not None:
        table |= {**asdict(scaling), "rope_type": rope_type(scaling)}
    longest = table.pop("max_position_embeddings", config.max_position_embeddings)
    return {
        "rope_parameters": {**table, "rope_theta": config.rope_theta},
        "rope_scaling": None,  # transformers would prefer this table, without the growth
        "max_position_embeddings": longest,
    }


def _two_tables_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the tables of rotary positions of layers without and with a window."""
    full_table: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if isinstance(config.rope_scaling, ProportionalScaling):
        full_table["rope_type"] = PROPORTIONAL
        full_table["partial_rotary_factor"] = config.rope_scaling.partial_rotary_factor
        if config.rope_scaling.factor != 1:
            full_table["factor"] = config.rope_scaling.factor  # transformers warns of this key
    local_theta = config.rope_local_theta or config.rope_theta
    return {
        FULL_ATTENTION: full_table,
        SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": local_theta},
    }


def _long_to_hf(scaling: LongScaling) -> dict[str, Any]:
    """Return the keys of a config.json that state a LongRoPE scaling."""
    # transformers reads both lengths outside of the table.
    lengths = {
        "max_position_embeddings": scaling.max_position_embeddings,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
    factors = {
        "short_factor": list(scaling.short_factor),
        "long_factor": list(scaling.long_factor),
    }
    table: dict[str, Any] = {"type": LONGROPE, **factors}
    completed = _complete_long({**factors, **lengths}, scaling.max_position_embeddings)
    # transformers 4 expects a table of exactly three keys. A fourth is written only if transformers would
    # otherwise compute another attention_factor.
    if scaling.attention_factor != completed["attention_factor"]:
        table["attention_factor"] = scaling.attention_factor
    return {"rope_scaling": table, **lengths}
