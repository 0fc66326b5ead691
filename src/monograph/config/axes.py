"""Parse the axes of a sweep, such as `key=1,2` or `key=log:1e-5..1e-2:8`, and list the points that
they span.

An axis is a list of values, or a range of numbers to draw samples from.
"""

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from monograph.config.given import COMMAND_LINE, Given, raise_all
from monograph.config.keys import KEYS, described
from monograph.config.renamed import Texts, joined, translated, translated_each
from monograph.config.settings import a_run_each, as_typed, check
from monograph.config.toml_file import from_toml
from monograph.ensemble.knobs import log_range, require_ends
from monograph.errors import UsageError

SEED = "train.seed"
# What each key declares, see `monograph.config.keys.Key`.
_DESCRIBED = {key: described(key) for key in KEYS}
IN_ONE_GRAPH = tuple(key for key, said in _DESCRIBED.items() if said.varies == "in one graph")
BETWEEN_GRAPHS = tuple(key for key, said in _DESCRIBED.items() if said.varies == "between graphs")
AXES = (*IN_ONE_GRAPH, *BETWEEN_GRAPHS)
AMOUNTS = tuple(key for key, said in _DESCRIBED.items() if said.is_amount)
_WHY_NOT = {key: said.fixed for key, said in _DESCRIBED.items() if key not in AXES}

_IN_BRACKETS = ("optim.betas",)  # keys of which one value is a pair
_RANGES = "a range has two ends, such as log:1e-4..1e-2:8, lin:0..0.2:3 or 0..3"
_RANGE = re.compile(r"(?:(log|lin):)?([^.:,]*(?:\.[^.:,]+)?)\.\.([^:,]*)(?::([^:,]*))?")
Point = dict[str, Any]
MOST_MEMBERS = 10_000  # a larger range is a typing error, and its points would fill the memory


class Axis(NamedTuple):
    """The values that one key takes.

    Attributes:
        key: the key in its dotted form.
        values: the values in the order given; empty for a range to draw from.
        stretch: (log or lin, first, last) of a range to draw from; None where values are listed.
    """

    key: str
    values: tuple[Any, ...]
    stretch: tuple[Literal["log", "lin"], float, float] | None = None

    @property
    def first(self) -> Any:
        """Return one of its values, or the first end of its range."""
        return self.stretch[1] if self.stretch else self.values[0]


def axes_of(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], list[Axis]]:
    """Return the overrides that are single values, and the axes.

    Raises:
        UsageError: a key cannot be an axis (the message lists those that can), a range is wrong, or
            a value is empty or given twice; all that is wrong is said at once.
    """
    fixed, axes, faults = axes_and_faults(overrides)
    raise_all(faults)
    return fixed, axes


def axes_and_faults(
    overrides: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Axis], list[UsageError]]:
    """Return the overrides that are single values, also those of keys that are not there; the axes;
    what is wrong.
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
    """Refuse axes in a TOML file, where a key has one value; other wrong values are left to whoever
    loads the file.

    Raises:
        UsageError: a key has several values; the message says how to type them.
    """
    faults = []
    for key, given in from_toml(toml).items():
        said = _several(key, given) if key in AXES else None
        if said is not None:
            why = "a file has one for each key; type the axis on the command line"
            faults.append(
                UsageError(f"{given.origin}: {key} has several values, and {why}: {said}")
            )
    raise_all(faults)


def _several(key: str, given: Given) -> str | None:
    """Return a value of a TOML file as an axis is typed; None if it is one value, right or wrong."""
    value = given.value
    with suppress(UsageError):
        check(key, value, "", from_text=False)
        return None
    if (each := translated_each(key, value)) and not translated(key, value):
        return _today(key, each).removeprefix("say ")
    text = _as_axis(value, given.written) if isinstance(value, list) else value
    with suppress(UsageError):
        if isinstance(text, str) and _axis(key, text) is not None:
            return f"{key}={text}"
    return None


def _as_axis(values: list[Any], written: str) -> str:
    """Return a list of a file as an axis is typed: as it was written, without quotes and spaces."""
    inside = re.sub(r"[\s\"']", "", written)[1:-1] or ",".join(map(_typed, values))
    return inside.rstrip(",")


def _typed(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def points(axes: Sequence[Axis], samples: int | None = None) -> list[Point]:
    """Return every combination of the axes' values, the last axis changing fastest, or `samples`
    random ones.

    Seeds are not sampled: each sample has every seed, so that it has an error bar, too. The draws
    depend only on the axes and the number of samples, and are the same each time.

    Raises:
        UsageError: a range has no number of values and `samples` is None, or there are fewer points
            than samples.
    """
    if samples is None:
        if open_ended := [axis for axis in axes if axis.stretch]:
            raise UsageError(
                f"{_said(open_ended[0])}: say how many values, ...:8, or draw some with --samples N"
            )
        return _product(axes)
    if samples < 1:
        raise UsageError(f"--samples {samples}: expected a number above 0")
    drawn, seeds = (
        [axis for axis in axes if axis.key != SEED],
        [axis for axis in axes if axis.key == SEED],
    )
    if not drawn:
        raise UsageError("--samples draws from axes: give one, such as optim.lr=log:1e-4..1e-2")
    _require_few(f"--samples {samples}", samples * math.prod(len(axis.values) for axis in seeds))
    generator = random.Random(0)
    if any(axis.stretch for axis in drawn):
        drawn_points = [
            {axis.key: _draw(axis, generator) for axis in drawn} for _ in range(samples)
        ]
    else:
        every = range(math.prod(len(axis.values) for axis in drawn))
        if samples > len(every):
            raise UsageError(
                f"--samples {samples}: the axes have {len(every)} points in all; leave it out for all"
            )
        drawn_points = [_point(drawn, index) for index in sorted(generator.sample(every, samples))]
    return [point | seed for point in drawn_points for seed in _product(seeds)]


def _require_few(what: str, members: int) -> None:
    """Refuse more than MOST_MEMBERS members.

    Raises:
        UsageError: there are too many; the message names `what`.
    """
    if members > MOST_MEMBERS:
        raise UsageError(f"{what}: {members:,} members; a sweep has {MOST_MEMBERS:,} at most")


def _product(axes: Sequence[Axis]) -> list[Point]:
    keys = [axis.key for axis in axes]
    _require_few(" ".join(keys), math.prod(len(axis.values) for axis in axes))
    combinations = itertools.product(*(axis.values for axis in axes))
    return [dict(zip(keys, combination, strict=True)) for combination in combinations]


def _point(axes: Sequence[Axis], index: int) -> Point:
    """Return `_product(axes)[index]` without making the product, which may be large."""
    values = {}
    for axis in reversed(axes):
        index, place = divmod(index, len(axis.values))
        values[axis.key] = axis.values[place]
    return dict(reversed(values.items()))


def _draw(axis: Axis, generator: random.Random) -> Any:
    if axis.stretch is None:
        return generator.choice(axis.values)
    scale, first, last = axis.stretch
    if scale == "lin":
        return _checked(axis.key, repr(generator.uniform(first, last)))
    return _checked(axis.key, repr(math.exp(generator.uniform(math.log(first), math.log(last)))))


def _axis(key: str, text: str) -> Axis | None:
    """Return the axis that a text describes; None if it is a single value."""
    if translated(key, text):
        return None  # whoever checks it says what to type instead
    if each := translated_each(key, text):
        raise UsageError(f"{key}={text}: {_today(key, each)}")
    if key in AXES and key not in _IN_BRACKETS and text[:1] + text[-1:] in ("[]", "()", "{}"):
        inside = re.sub(r"[\s\"']", "", text[1:-1])
        raise UsageError(f"{key}={text}: values are written without brackets: {key}={inside}")
    if meant := _range_meant(key, text):
        raise UsageError(f"{key}={text}: a range is typed as {key}={meant}")
    bounds = _RANGE.fullmatch(text) if ".." in text and "/" not in text else None
    parts = _parts(key, text)
    if bounds is None and text.startswith(("log:", "lin:")):
        raise UsageError(f"{key}={text}: {_RANGES}")
    if bounds is None and len(parts) < 2:
        return None
    if key not in AXES:
        try:
            check(key, text, COMMAND_LINE, from_text=True)
        except UsageError:
            axes = ", ".join(AXES)
            raise UsageError(
                f"{key}={text}: {key} cannot be an axis: {_WHY_NOT[key]}; axes are {axes}"
            ) from None
        return None  # it is a text with commas in it
    axis = (
        _ranged(key, text, *bounds.groups())
        if bounds
        else Axis(key, tuple(_checked(key, part) for part in parts))
    )
    for index, value in enumerate(axis.values):
        if value in axis.values[:index]:
            raise UsageError(
                f"{key}={text}: {value} is there twice, and its members would be equal"
            )
    return axis


def _range_meant(key: str, text: str) -> str:
    """Return how a range is typed that is written as other programs have it; "" if it is none."""
    if (whole := re.fullmatch(r"([0-9]+)[-:]([0-9]+)", text)) and 0 < int(whole[2]) - int(
        whole[1]
    ) <= 100:
        return f"{whole[1]}..{whole[2]}"
    called = re.fullmatch(r"(\w+)\(([^,()]+),([^,()]+)(?:,([^,()]+))?\)", text)
    if not called or key not in AXES:
        return ""
    name, first, last, count = (part and part.strip() for part in called.groups())
    scale = "log" if re.search("log|geom", name) else "lin"
    return f"{scale}:{first}..{last}" + (f":{count}" if count else "")


def _today(key: str, each: Sequence[Texts]) -> str:
    """Return what to type for an axis with values in old spellings, of which each says several
    keys.
    """
    values = joined(each)
    varied = [new for new, texts in values.items() if len(texts) > 1]
    if key not in AXES or not set(varied) <= set(AXES):
        return f"{a_run_each(each)}; {key} cannot be an axis: {_WHY_NOT[key]}"
    every = "; a sweep trains all combinations" if len(varied) > 1 else ""
    return f"say {as_typed({new: ','.join(texts) for new, texts in values.items()})}{every}"


def _parts(key: str, text: str) -> list[str]:
    """Split a text at its commas; a pair is one part, `0.9,0.95`, and several pairs are
    `[0.9,0.95],[0.9,0.99]`.
    """
    if key in _IN_BRACKETS:
        return re.findall(r"\[[^\]]*\]", text) or [text]
    return [part.strip() for part in text.split(",")]


def _ranged(
    key: str, text: str, scale: str | None, first: str, last: str, count: str | None
) -> Axis:
    """Parse `0..3`, `lin:0..0.2:3` or `log:1e-5..1e-2:8`; without a count, the latter two are
    ranges to draw from.
    """
    if not first.strip() or not last.strip():
        raise UsageError(f"{key}={text}: {_RANGES}")
    if scale is None:
        if (
            not (first.isdecimal() and last.isdecimal())
            or count is not None
            or int(last) < int(first)
        ):
            raise UsageError(
                f"{key}={text}: expected whole numbers, 0..3, or lin:0..0.2:3 or log:1e-4..1e-2:8"
            )
        _require_few(f"{key}={text}", int(last) - int(first) + 1)
        return Axis(
            key, tuple(_checked(key, str(number)) for number in range(int(first), int(last) + 1))
        )
    low = _number(key, text, first)
    high = _number(key, text, last)
    if scale == "log" and min(low, high) <= 0:
        raise UsageError(
            f"{key}={text}: the ends of a log range are above 0; for others there is lin:"
        )
    if count is None:
        require_ends(f"{key}={text}", low, high, 2)
        values = [_checked(key, end) for end in (first, last)]  # the key must accept both ends
        return Axis(
            key, (), ("log" if scale == "log" else "lin", float(values[0]), float(values[1]))
        )
    if not count.isdecimal():
        raise UsageError(
            f"{key}={text}: expected a whole number of values after the last colon, not {count!r}"
        )
    n = int(count)
    _require_few(f"{key}={text}", n)
    require_ends(f"{key}={text}", low, high, n)
    numbers = (
        log_range(low, high, n)
        if scale == "log"
        else [low + (high - low) * i / max(1, n - 1) for i in range(n)]
    )
    ends = {0: first, n - 1: last}
    return Axis(
        key, tuple(_checked(key, ends.get(i, f"{number:.4g}")) for i, number in enumerate(numbers))
    )


def _number(key: str, text: str, end: str) -> float:
    try:
        return float(end)
    except ValueError:
        raise UsageError(f"{key}={text}: {end!r} is no number") from None


def _checked(key: str, text: str) -> Any:
    if not text:
        raise UsageError(f"{key}: an axis with an empty value; give values between the commas")
    return check(key, text, COMMAND_LINE, from_text=True)


def _said(axis: Axis) -> str:
    assert axis.stretch
    return f"{axis.key}={axis.stretch[0]}:{axis.stretch[1]:g}..{axis.stretch[2]:g}"
