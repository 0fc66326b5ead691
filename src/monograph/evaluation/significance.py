"""Decides whether a difference is more than chance: paired differences, their standard error,
Student's t.
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple


class Mean(NamedTuple):
    """A mean and its standard error.

    Attributes:
        value: the mean.
        standard_error: sqrt(sum of (x - mean)^2 / (n - 1) / n); None for one value.
        n: the number of values.
    """

    value: float
    standard_error: float | None
    n: int

    @property
    def is_noise(self) -> bool | None:
        """Return whether zero is inside the interval value ± t · standard_error at 95 %; None
        without an error.
        """
        error = self.standard_error
        return None if error is None else abs(self.value) <= t_quantile(self.n - 1) * error


def mean(values: Sequence[float]) -> Mean:
    """Return the mean of independent values, such as paired differences; raise StatisticsError if
    there are none.
    """
    n = len(values)
    return Mean(
        statistics.fmean(values), statistics.stdev(values) / math.sqrt(n) if n > 1 else None, n
    )


@cache
def t_quantile(degrees: int) -> float:
    """Return the t for which P(|T| <= t) = 95 %, where T has Student's distribution with `degrees` of freedom."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)
    return high


POWER_QUANTILE = 0.8416  # of the normal distribution, at 80 %


def seeds_needed(difference: float, noise: float, settings: int, most: int) -> int | None:
    """Return how many seeds show a true difference in four sweeps of five; None if `most` would
    not.

        the smallest n >= 2 with |difference| * sqrt(n) / noise >= t(95 %, settings * (n - 1)) + 0.84

    The mean of n paired differences has the standard error noise / sqrt(n). It is beyond t standard
    errors, the bound of `tabulate`, with a probability of 80 % if its expectation is 0.84 standard
    errors beyond that.

    Args:
        difference: the difference of two settings.
        noise: standard deviation of a paired difference over seeds.
        settings: the number of settings that the noise is pooled over.
        most: the largest n to consider.
    """
    for n in range(2, most + 1):
        threshold = t_quantile(settings * (n - 1)) + POWER_QUANTILE
        if abs(difference) * math.sqrt(n) >= threshold * noise:
            return n
    return None


def _within(t: float, degrees: int) -> float:
    """Return P(|T| <= t), which is a finite sum for whole degrees: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(odd + 2, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


@dataclass(frozen=True)
class Setting:
    """Members that differ only in the seed, or in another repeated knob.

    Attributes:
        knobs: the values that the members share, by name.
        members: the members' indices, by seed.
        mean: mean of the members' values over the seeds that have one; None if none has.
        failed: seeds without a value, whose members diverged.
        difference: difference from the best setting over the seeds that both have; None for the
            best itself.
        tied: whether the difference is within the noise; None if the noise is unknown.
    """

    knobs: Mapping[str, Any]
    members: Mapping[Hashable, int]
    mean: Mean | None
    failed: tuple[Hashable, ...] = ()
    difference: Mean | None = None
    tied: bool | None = None


class Best(NamedTuple):
    """The setting with the lowest mean, and the index of its member with the lowest value."""

    setting: Setting
    member: int


@dataclass(frozen=True)
class Table:
    """A comparison of settings, in which lower values are better.

    Attributes:
        settings: the settings in the order of their first members.
        best: the best setting; None if every member diverged.
        values: the value of each member, None for one that diverged.
        noise: standard deviation of a paired difference over seeds, pooled; None if there is only
            one seed.
        degrees: the degrees of freedom of `noise`.
        over: the name of the repeated knob.
        unit: the unit of the values.
    """

    settings: tuple[Setting, ...]
    best: Best | None
    values: tuple[float | None, ...]
    noise: float | None
    degrees: int
    over: str = "seed"
    unit: str = field(default="bits/byte", kw_only=True)

    @property
    def how(self) -> str:
        """One sentence that says what "tied" means in this table, or why there is nothing to
        compare.
        """
        if len(self.settings) == 1:
            return "one setting: there is nothing to compare it with"
        over = self.over.rpartition(".")[2]
        if sum(setting.mean is not None for setting in self.settings) < 2:
            return (
                "the others diverged: there is nothing to compare the best with"
                if self.best
                else "all diverged"
            )
        if self.noise is None:
            return f"one {over}: no error bar, and no difference can be told from chance; give more of them"
        errors = t_quantile(max(1, self.degrees))
        return (
            f"tied: the difference to the best, paired over {over}s, is within {errors:.1f} standard "
            f"errors (95 %, {self.degrees} degree{'s' * (self.degrees > 1)} of freedom, pooled over the better half)"
        )

    def __str__(self) -> str:
        return "\n".join([*map(self.line, self.settings), self.how])

    def line(self, setting: Setting) -> str:
        """Return a setting in one line: knobs, mean ± standard error, and how it compares with the
        best.
        """
        name = " ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in setting.knobs.items()
        )
        lost = (
            f"{len(setting.failed)} of {len(setting.members)} diverged"
            if setting.failed and setting.mean
            else ""
        )
        standing = self.standing(setting, lost)
        scored = f"{name or 'all'}: {written(setting.mean)} {self.unit}"
        return f"{scored}   {standing}" if standing else scored

    def standing(self, setting: Setting, lost: str) -> str:
        """Return a setting's standing in words: best, tied, and what is said of members that were
        `lost`.
        """
        tied = (
            f"tied (+{setting.difference.value:.3f})" if setting.tied and setting.difference else ""
        )
        return ", ".join(
            filter(None, ("best" if self.best and setting is self.best.setting else tied, lost))
        )


def written(value: Mean | None) -> str:
    """Return `2.553 ± 0.012`, or `2.553` if there is no standard error, or `diverged` for None."""
    if value is None:
        return "diverged"
    return f"{value.value:.3f}" + (
        "" if value.standard_error is None else f" ± {value.standard_error:.3f}"
    )


def tabulate(
    values: Sequence[float | None],
    knobs: Sequence[Mapping[str, Any]],
    over: str = "seed",
    unit: str = "bits/byte",
) -> Table:
    """Compare settings over repetitions, in a layout where a repetition (a seed) is shared by all
    settings.

        difference of setting s = mean over seeds of value(s, seed) - value(best, seed)
        noise^2 = sum over settings s of the better half, and seeds, of (d(s, seed) -
        difference(s))^2 / degrees

    with d(s, seed) the paired difference and degrees = (settings - 1) · (seeds - 1). What a seed
    contributes (initial weights, order of rows) is in both values of a pair and cancels. Two seeds
    alone say little about noise, so it is pooled over settings; but far from the optimum training
    is noisier, so only the better half of the settings, and at
    least two, count. A setting is tied with the best if |difference| <= t(95 %, degrees) · noise / sqrt(seeds). A
    setting with a member that diverged is never the best if another setting has none.

    Args:
        values: one for each member, such as its held-out bits per byte; None or not finite if the
            member diverged.
        knobs: the knobs of each member, by name.
        over: the name of the repeated knob; members without this knob are numbered instead.
        unit: the values' unit.
    """
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    settings = _settings(finite, knobs, over)
    ranked = sorted(
        (s for s in settings if s.mean),
        key=lambda s: (bool(s.failed), s.mean.value if s.mean else 0.0),
    )
    if not ranked:
        return Table(tuple(settings), None, tuple(finite), None, 0, over, unit=unit)
    top = ranked[0]
    paired = {id(other): _paired(other, top, finite) for other in ranked[1:]}
    half = ranked[1 : 1 + pooled(len(ranked))]
    squares = [(d - statistics.fmean(paired[id(s)])) ** 2 for s in half for d in paired[id(s)]]
    degrees = sum(max(0, len(paired[id(s)]) - 1) for s in half)
    noise = math.sqrt(sum(squares) / degrees) if degrees else None
    best = Best(
        top,
        min(
            (m for m in top.members.values() if finite[m] is not None),
            key=lambda m: finite[m] or 0.0,
        ),
    )
    factor = t_quantile(degrees) if degrees else 0.0

    def compared(setting: Setting) -> Setting:
        pairs = paired.get(id(setting))
        if not pairs:
            return setting
        error = noise / math.sqrt(len(pairs)) if noise is not None else None
        difference = Mean(statistics.fmean(pairs), error, len(pairs))
        tied = None if error is None else abs(difference.value) <= factor * error
        return replace(setting, difference=difference, tied=tied)

    return Table(
        tuple(map(compared, settings)), best, tuple(finite), noise, degrees, over, unit=unit
    )


def pooled(settings: int) -> int:
    """Return how many of so many settings lend `tabulate` their noise: the better half without the
    best.
    """
    return max(2, -(-settings // 2)) - 1


def _settings(
    values: Sequence[float | None], knobs: Sequence[Mapping[str, Any]], over: str
) -> list[Setting]:
    groups: dict[str, tuple[dict[str, Any], dict[Hashable, int]]] = {}
    for index, member in enumerate(knobs):
        shared = {name: value for name, value in member.items() if name != over}
        members = groups.setdefault(repr(shared), (shared, {}))[1]
        members[member.get(over, len(members))] = index
    settings = []
    for shared, members in groups.values():
        measured = [value for member in members.values() if (value := values[member]) is not None]
        failed = tuple(seed for seed, member in members.items() if values[member] is None)
        settings.append(Setting(shared, members, mean(measured) if measured else None, failed))
    return settings


def _paired(one: Setting, other: Setting, values: Sequence[float | None]) -> list[float]:
    """Return the value of `one` minus that of `other` for every seed for which both have one."""
    pairs = (
        (values[one.members[s]], values[other.members[s]])
        for s in one.members
        if s in other.members
    )
    return [a - b for a, b in pairs if a is not None and b is not None]
