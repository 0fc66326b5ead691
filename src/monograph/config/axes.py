"""Parse the axes of a sweep, such as `key=1,2` or `key=log:1e-5..1e-2:8`, and list their points.

An *axis* is a key with several values: a list of values, or a range of numbers from which values
are sampled. A *point* is one value for each axis. Each point is a *member* of the sweep: a run that
the sweep trains. Members may train in one graph (as an ensemble), or in a graph for each value.
"""

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from monograph.config.given import COMMAND_LINE, SourcedValue, raise_all
from monograph.config.keys import KEYS, key_declaration
from monograph.config.renamed import TextsByKey, new_spelling, new_spellings, texts_by_key
from monograph.config.settings import advise_run_each, as_typed, checked_value
from monograph.config.toml_file import toml_values
from monograph.ensemble.knobs import log_range, require_ends
from monograph.errors import UsageError

SEED = "train.seed"
_DECLARATIONS = {key: key_declaration(key) for key in KEYS}
# Keys that can be an axis, by how members may differ in them (`monograph.config.keys.Varies`).
IN_ONE_GRAPH = tuple(key for key, each in _DECLARATIONS.items() if each.varies == "in one graph")
BETWEEN_GRAPHS = tuple(
    key for key, each in _DECLARATIONS.items() if each.varies == "between graphs"
)
AXIS_KEYS = (*IN_ONE_GRAPH, *BETWEEN_GRAPHS)
# Keys whose larger values nearly always score better (`monograph.config.keys.Key.is_amount`).
AMOUNT_KEYS = tuple(key for key, each in _DECLARATIONS.items() if each.is_amount)
# {each other key: the reason why it cannot be an axis}.
_WHY_NO_AXIS = {key: each.fixed for key, each in _DECLARATIONS.items() if key not in AXIS_KEYS}

_PAIR_KEYS = ("optim.betas",)  # keys whose value is a pair
_RANGE_FORMS = "a range has two ends, such as log:1e-4..1e-2:8, lin:0..0.2:3 or 0..3"
# [log:|lin:]FIRST..LAST[:COUNT], where FIRST may be a number with a decimal point
_RANGE = re.compile(r"(?:(log|lin):)?([^.:,]*(?:\.[^.:,]+)?)\.\.([^:,]*)(?::([^:,]*))?")
Point = dict[str, Any]  # {an axis' key: its value}
# A sweep with more members is surely a typing error, and its points would fill the memory.
MAX_MEMBERS = 10_000


class SampledRange(NamedTuple):
    """A range of numbers from which values are sampled, such as `log:1e-4..1e-2`.

    Attributes:
        scale: "lin" for uniform values, "log" for log-uniform ones.
        first: the first end.
        last: the last end, which may be below the first.
    """

    scale: Literal["log", "lin"]
    first: float
    last: float


class Axis(NamedTuple):
    """The values that one key takes in a sweep.

    Attributes:
        key: the dotted key.
        values: the values in the given order; empty for a range to sample from.
        sampled_range: the range to sample from; None for listed values.
    """

    key: str
    values: tuple[Any, ...]
    sampled_range: SampledRange | None = None

    @property
    def first(self) -> Any:
        """Return one of its values, or the first end of its range."""
        return self.sampled_range.first if self.sampled_range else self.values[0]


def axes_of(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], list[Axis]]:
    """Return the overrides that are single values, and the axes.

    Raises:
        UsageError: a key cannot be an axis (the message lists those that can), a range is wrong, or
            a value is empty or given twice. The message names all faults.
    """
    fixed, axes, faults = axes_and_faults(overrides)
    raise_all(faults)
    return fixed, axes


def axes_and_faults(
    overrides: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Axis], list[UsageError]]:
    """Return the overrides that are single values, the axes, and the faults.

    Unknown keys are among the single values, and are refused when the settings are loaded.
    """
    fixed = dict[str, Any]()
    axes = list[Axis]()
    faults = list[UsageError]()
    for key, text in overrides.items():
        try:
            axis = _axis(key, text) if isinstance(text, str) and key in KEYS else None
        except UsageError as error:
            faults.append(error)
            continue
        if axis is None:
            fixed[key] = text
        else:
            axes.append(axis)
    return fixed, axes, faults


def require_single_values(toml: Path) -> None:
    """Refuse axes in a TOML file, where a key has one value.

    Other wrong values are refused when the file is loaded.

    Raises:
        UsageError: a key has several values; the message says how to type them.
    """
    faults = []
    for key, given in toml_values(toml).items():
        typed_axis = _file_value_as_axis(key, given) if key in AXIS_KEYS else None
        if typed_axis is not None:
            advice = "a file has one for each key; type the axis on the command line"
            faults.append(
                UsageError(f"{given.origin}: {key} has several values, and {advice}: {typed_axis}")
            )
    raise_all(faults)


def _file_value_as_axis(key: str, given: SourcedValue) -> str | None:
    """Return the axis, as a person types it, for several values that a TOML file gives to a key.

    The result is None for a single value, whether the key takes it or not.
    """
    value = given.value
    with suppress(UsageError):
        checked_value(key, value, "", from_text=False)
        return None  # the key takes it, so it is a single value
    # A list of values in old spellings (`monograph.config.renamed`).
    translations = new_spellings(key, value)
    if translations and not new_spelling(key, value):
        # The caller's message needs only what is to be typed.
        return _new_axis_advice(key, translations).removeprefix("say ")
    text = _list_as_axis(value, given.written) if isinstance(value, list) else value
    with suppress(UsageError):
        if isinstance(text, str) and _axis(key, text) is not None:
            return f"{key}={text}"
    return None


def _list_as_axis(values: list[Any], written: str) -> str:
    """Return a list of a TOML file as an axis is typed: without brackets, quotes and spaces.

    Args:
        values: the values.
        written: the list as a person wrote it; "" if it is unknown.
    """
    if written:
        without_spaces_and_quotes = re.sub(r"[\s\"']", "", written)
        inside = without_spaces_and_quotes[1:-1]  # without the brackets
    else:
        inside = ",".join(map(_axis_text, values))
    return inside.rstrip(",")


def _axis_text(value: object) -> str:
    """Return a value as a person types it in an axis."""
    if isinstance(value, list):
        return f"[{','.join(map(_axis_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def points(axes: Sequence[Axis], samples: int | None = None) -> list[Point]:
    """Return every combination of the axes' values, or random points.

    Seeds are not sampled: each random point is repeated with every seed, so that it has an error
    bar, too. The points depend only on the axes and the number of samples, and are the same each
    time.

    Args:
        axes: the axes.
        samples: the number of random points; None for every combination, in which the last axis
            changes fastest.

    Raises:
        UsageError: a range has no number of values and `samples` is None, or there are fewer points
            than samples.
    """
    if samples is None:
        for axis in axes:
            if axis.sampled_range:
                raise UsageError(
                    f"{_range_text(axis.key, axis.sampled_range)}: say how many values, ...:8, "
                    "or draw some with --samples N"
                )
        return _product(axes)
    if samples < 1:
        raise UsageError(f"--samples {samples}: expected a number above 0")
    sampled_axes = [axis for axis in axes if axis.key != SEED]
    seed_axes = [axis for axis in axes if axis.key == SEED]
    if not sampled_axes:
        raise UsageError("--samples draws from axes: give one, such as optim.lr=log:1e-4..1e-2")
    seeds = math.prod(len(axis.values) for axis in seed_axes)
    _require_few(f"--samples {samples}", samples * seeds)
    generator = random.Random(0)
    if any(axis.sampled_range for axis in sampled_axes):
        sampled_points = [
            {axis.key: _sample(axis, generator) for axis in sampled_axes} for _ in range(samples)
        ]
    else:
        # Without ranges, no point is sampled twice.
        indices = range(math.prod(len(axis.values) for axis in sampled_axes))
        if samples > len(indices):
            raise UsageError(
                f"--samples {samples}: the axes have {len(indices)} points in all; leave it out for all"
            )
        sampled_indices = sorted(generator.sample(indices, samples))
        sampled_points = [_point(sampled_axes, index) for index in sampled_indices]
    return [point | seed for point in sampled_points for seed in _product(seed_axes)]


def _require_few(typed_text: str, members: int) -> None:
    """Refuse more than MAX_MEMBERS members.

    Args:
        typed_text: what a person typed to get them, for the message.
        members: the number of members.

    Raises:
        UsageError: there are too many members.
    """
    if members > MAX_MEMBERS:
        raise UsageError(f"{typed_text}: {members:,} members; a sweep has {MAX_MEMBERS:,} at most")


def _product(axes: Sequence[Axis]) -> list[Point]:
    """Return every combination of the axes' values; the last axis changes fastest."""
    keys = [axis.key for axis in axes]
    _require_few(" ".join(keys), math.prod(len(axis.values) for axis in axes))
    combinations = itertools.product(*(axis.values for axis in axes))
    return [dict(zip(keys, combination, strict=True)) for combination in combinations]


def _point(axes: Sequence[Axis], index: int) -> Point:
    """Return `_product(axes)[index]` without making the product, which may be large."""
    values = {}
    # The digits of the index, in a mixed base, are the indices of the axes' values. The last axis has the lowest
    # digit.
    for axis in reversed(axes):
        index, value_index = divmod(index, len(axis.values))
        values[axis.key] = axis.values[value_index]
    return dict(reversed(values.items()))


def _sample(axis: Axis, generator: random.Random) -> Any:
    """Return a random value of an axis: one of its values, or a number from its range."""
    if axis.sampled_range is None:
        return generator.choice(axis.values)
    scale, first, last = axis.sampled_range
    if scale == "lin":
        number = generator.uniform(first, last)
    else:
        number = math.exp(generator.uniform(math.log(first), math.log(last)))
    return _check_value(axis.key, repr(number))


def _axis(key: str, text: str) -> Axis | None:
    """Return the axis that a text describes; None if the text is a single value.

    Raises:
        UsageError: the key cannot be an axis, a range is wrong, or a value is empty or given twice.
    """
    if new_spelling(key, text):
        # It is an old spelling of a single value, which is refused with advice when it is loaded.
        return None
    translations = new_spellings(key, text)
    if translations:
        raise UsageError(f"{key}={text}: {_new_axis_advice(key, translations)}")
    has_brackets = text[:1] + text[-1:] in ("[]", "()", "{}")
    if key in AXIS_KEYS and key not in _PAIR_KEYS and has_brackets:
        inside = re.sub(r"[\s\"']", "", text[1:-1])
        raise UsageError(f"{key}={text}: values are written without brackets: {key}={inside}")
    suggested_range = _suggest_range(key, text)
    if suggested_range:
        raise UsageError(f"{key}={text}: a range is typed as {key}={suggested_range}")
    # A text with a slash is a path, such as ../texts, and no range.
    range_match = _RANGE.fullmatch(text) if ".." in text and "/" not in text else None
    parts = _split_values(key, text)
    if range_match is None and text.startswith(("log:", "lin:")):
        raise UsageError(f"{key}={text}: {_RANGE_FORMS}")
    if range_match is None and len(parts) < 2:
        return None
    if key not in AXIS_KEYS:
        try:
            checked_value(key, text, COMMAND_LINE, from_text=True)
        except UsageError:
            axes = ", ".join(AXIS_KEYS)
            raise UsageError(
                f"{key}={text}: {key} cannot be an axis: {_WHY_NO_AXIS[key]}; axes are {axes}"
            ) from None
        return None  # the key takes texts, and this text has commas
    if range_match:
        axis = _axis_of_range(key, text, *range_match.groups())
    else:
        axis = Axis(key, tuple(_check_value(key, part) for part in parts))
    for index, value in enumerate(axis.values):
        if value in axis.values[:index]:
            raise UsageError(
                f"{key}={text}: {value} is there twice, and its members would be equal"
            )
    return axis


def _suggest_range(key: str, text: str) -> str:
    """Return how to type a range that is written as in another program; "" for other texts."""
    # 0-3 or 0:3
    integers = re.fullmatch(r"([0-9]+)[-:]([0-9]+)", text)
    if integers:
        first, last = integers.groups()
        # Ranges of seeds are short. A longer range is probably another kind of value.
        if 0 < int(last) - int(first) <= 100:
            return f"{first}..{last}"
    # loguniform(1e-4, 1e-2) or linspace(0, 1, 5)
    call = re.fullmatch(r"(\w+)\(([^,()]+),([^,()]+)(?:,([^,()]+))?\)", text)
    if not call or key not in AXIS_KEYS:
        return ""
    name, first, last, count = (part.strip() for part in call.groups(default=""))
    scale = "log" if re.search("log|geom", name) else "lin"
    suggested = f"{scale}:{first}..{last}"
    return f"{suggested}:{count}" if count else suggested


def _new_axis_advice(key: str, translations: Sequence[TextsByKey]) -> str:
    """Return what to type for an axis whose values are old spellings.

    Args:
        key: the key.
        translations: for each value, the new keys with their values.
    """
    if key not in AXIS_KEYS:
        return f"{advise_run_each(translations)}; {key} cannot be an axis: {_WHY_NO_AXIS[key]}"
    new_texts = texts_by_key(translations)
    varied_keys = [new_key for new_key, texts in new_texts.items() if len(texts) > 1]
    can_be_axes = set(varied_keys) <= set(AXIS_KEYS)
    if not varied_keys or not can_be_axes:
        # Axes of the new keys would not give the same members.
        return advise_run_each(translations)
    advice = as_typed({new_key: ",".join(texts) for new_key, texts in new_texts.items()})
    # Two new axes have more points than the one axis that was typed.
    note = "; a sweep trains all combinations" if len(varied_keys) > 1 else ""
    return f"say {advice}{note}"


def _split_values(key: str, text: str) -> list[str]:
    """Split a text at its commas.

    For a key whose value is a pair, `0.9,0.95` is one part, and `[0.9,0.95],[0.9,0.99]` are two.
    """
    if key in _PAIR_KEYS:
        return re.findall(r"\[[^\]]*\]", text) or [text]
    return [part.strip() for part in text.split(",")]


def _axis_of_range(
    key: str, text: str, scale: str | None, first: str, last: str, count: str | None
) -> Axis:
    """Return the axis of a range.

    Args:
        key: the key.
        text: the range as a person typed it, for messages.
        scale: "log" or "lin"; None for a range of whole numbers, such as `0..3`.
        first: the first end.
        last: the last end.
        count: the number of values, as in `lin:0..0.2:3`; None for a range to sample from.

    Raises:
        UsageError: the range is wrong, or the key does not take its values.
    """
    if not first.strip() or not last.strip():
        raise UsageError(f"{key}={text}: {_RANGE_FORMS}")
    if scale is None:
        are_integers = first.isdecimal() and last.isdecimal()
        if not are_integers or count is not None or int(last) < int(first):
            raise UsageError(
                f"{key}={text}: expected whole numbers, 0..3, or lin:0..0.2:3 or log:1e-4..1e-2:8"
            )
        integers = range(int(first), int(last) + 1)
        _require_few(f"{key}={text}", int(last) - int(first) + 1)
        return Axis(key, tuple(_check_value(key, str(integer)) for integer in integers))
    # The first end may be above the last one.
    first_number = _number(key, text, first)
    last_number = _number(key, text, last)
    if scale == "log" and min(first_number, last_number) <= 0:
        raise UsageError(
            f"{key}={text}: the ends of a log range are above 0; for others there is lin:"
        )
    if count is None:
        require_ends(f"{key}={text}", first_number, last_number, 2)
        # The key must accept both ends.
        first_value = float(_check_value(key, first))
        last_value = float(_check_value(key, last))
        known_scale: Literal["log", "lin"] = "log" if scale == "log" else "lin"
        return Axis(key, (), SampledRange(known_scale, first_value, last_value))
    if not count.isdecimal():
        raise UsageError(
            f"{key}={text}: expected a whole number of values after the last colon, not {count!r}"
        )
    size = int(count)
    _require_few(f"{key}={text}", size)
    require_ends(f"{key}={text}", first_number, last_number, size)
    if scale == "log":
        numbers = log_range(first_number, last_number, size)
    else:
        difference = last_number - first_number
        numbers = [first_number + difference * index / max(1, size - 1) for index in range(size)]
    texts = [f"{number:.4g}" for number in numbers]
    # The ends are as they were typed, not rounded. If there is one value, both ends are equal.
    texts[0] = first
    texts[-1] = last
    return Axis(key, tuple(_check_value(key, value_text) for value_text in texts))


def _number(key: str, text: str, end: str) -> float:
    """Return the number that one end of a range stands for.

    Args:
        key: the key.
        text: the range as a person typed it, for messages.
        end: the end as a person typed it.
    """
    try:
        return float(end)
    except ValueError:
        raise UsageError(f"{key}={text}: {end!r} is not a number") from None


def _check_value(key: str, text: str) -> Any:
    """Return the value of one text of an axis.

    Raises:
        UsageError: the text is empty, or the key does not take it.
    """
    if not text:
        raise UsageError(f"{key}: an axis with an empty value; give values between the commas")
    return checked_value(key, text, COMMAND_LINE, from_text=True)


def _range_text(key: str, sampled_range: SampledRange) -> str:
    """Return a range to sample from as it is typed."""
    scale, first, last = sampled_range
    return f"{key}={scale}:{first:g}..{last:g}"
