"""Decide whether a difference is more than chance: paired differences, their standard error,
Student's t.

Members are trained models. A knob is a hyperparameter in which members may differ. One knob, usually the
seed, is the repeated one: members that differ only in it have the same setting.
"""

import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
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
        """Return whether zero is inside the 95 % interval value ± t · standard_error; None if there
        is no standard error.
        """
        if self.standard_error is None:
            return None
        return abs(self.value) <= t_quantile(self.n - 1) * self.standard_error


def mean(values: Sequence[float]) -> Mean:
    """Return the mean of independent values, such as paired differences.

    Raises:
        StatisticsError: there are no values.
    """
    n = len(values)
    standard_error = statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Mean(value=statistics.fmean(values), standard_error=standard_error, n=n)


@cache
def t_quantile(degrees: int) -> float:
    """Return the t for which P(|T| <= t) = 95 %, where T has Student's distribution with `degrees`
    of freedom.
    """
    low, high = 0.0, 1e4
    for _ in range(80):  # bisection, down to the precision of a float
        middle = (low + high) / 2
        if _probability_within(middle, degrees) < 0.95:
            low = middle
        else:
            high = middle
    return high


def tail_probability(t: float, degrees: int) -> float:
    """Return P(T > t) for t >= 0, where T has Student's distribution with `degrees` of freedom.

    It is accurate to about 1e-15, and never negative.
    """
    return max(0.0, 0.5 - 0.5 * _probability_within(t, degrees))


POWER_QUANTILE = 0.8416  # of the normal distribution, at 80 %


def seeds_needed(difference: float, noise: float, settings: int, most: int) -> int | None:
    """Return how many seeds are needed so that a true difference is shown with a probability of 80 %.

    The result is None if more than `most` are needed.

        the smallest n >= 2 with
        |difference| * sqrt(n) / noise >= t(95 %, settings * (n - 1)) + 0.84

    The mean of n paired differences has the standard error noise / sqrt(n). `tabulate` shows a
    difference if this mean is beyond t standard errors. The probability of that is 80 % if the
    mean's expectation is 0.84 standard errors beyond t.

    Args:
        difference: the difference of two settings.
        noise: standard deviation of a paired difference over seeds.
        settings: the number of settings over which the noise is pooled.
        most: the largest n to consider.
    """
    for n in range(2, most + 1):
        threshold = t_quantile(settings * (n - 1)) + POWER_QUANTILE
        if abs(difference) * math.sqrt(n) >= threshold * noise:
            return n
    return None


def _probability_within(t: float, degrees: int) -> float:
    """Return P(|T| <= t). For whole degrees it is a finite sum: Abramowitz and Stegun 26.7.3 (odd
    degrees) and 26.7.4 (even degrees).
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0  # the next term of the sum
    total = 0.0
    for k in range(odd + 2, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


@dataclass(frozen=True)
class Setting:
    """Members that differ only in the seed, or in another repeated knob.

    Attributes:
        knobs: the values that the members share, by name.
        members: the members' indices, by seed.
        mean: mean of the members' values; None if every member diverged.
        failed: the seeds of members that diverged, which have no value.
        difference: this setting's values minus those of the best setting, over the seeds for which
            both have one; None for the best setting itself, and if there is no such seed.
        tied: whether the difference is within the noise; None if it is not known.
        stopped: the seeds of members that were stopped early. Their values are from that moment.
    """

    knobs: Mapping[str, Any]
    members: Mapping[Hashable, int]
    mean: Mean | None
    failed: tuple[Hashable, ...] = ()
    difference: Mean | None = None
    tied: bool | None = None
    stopped: tuple[Hashable, ...] = ()


class Best(NamedTuple):
    """The setting with the best mean, and the index of its member with the best value."""

    setting: Setting
    member: int


@dataclass(frozen=True)
class Table:
    """A comparison of settings.

    Attributes:
        settings: the settings in the order of their first members.
        best: the best setting; None if every member diverged. If all settings have the same value
            (`none_is_better`), it is the first one, which a command that goes on from the best takes.
        values: each member's value; None for a member that diverged.
        noise: standard deviation of a paired difference over seeds, pooled over settings; None if
            there is only one seed, or if all seeds have the same differences. The latter happens if
            scores are coarse, such as shares of few answers. It does not mean that there is no noise.
        degrees: the degrees of freedom of `noise`.
        over: the name of the repeated knob.
        unit: the unit of the values.
        higher_is_better: whether higher values are better; otherwise lower ones are.
    """

    settings: tuple[Setting, ...]
    best: Best | None
    values: tuple[float | None, ...]
    noise: float | None
    degrees: int
    over: str = "seed"
    unit: str = field(default="bits/byte", kw_only=True)
    higher_is_better: bool = field(default=False, kw_only=True)

    def worse_by(self, setting: Setting) -> float:
        """Return by how much a setting, which was compared with the best, is worse than it."""
        assert setting.difference is not None
        value = setting.difference.value
        return -value if self.higher_is_better else value

    @property
    def how(self) -> str:
        """One sentence that says what "tied" means in this table, or why there is nothing to
        compare.
        """
        if self.none_is_better:
            return "all have the same value: none is better"
        if len(self.settings) == 1:
            return "one setting: there is nothing to compare it with"
        knob = self.over.rpartition(".")[2]  # the key without its section
        if self.best is None:
            return "all diverged"
        rivals = [each for each in self.settings if each.mean is not None and not each.stopped]
        if len(rivals) < 2:
            fate = "stopped early or diverged" if self._any_stopped else "diverged"
            return f"the others {fate}: there is nothing to compare the best with"
        if self.noise is None and self.degrees:
            return f"the differences are the same for each {knob}, so they do not tell the noise; give more of them"
        if self.noise is None:
            return f"one {knob}: no error bar, and no difference can be told from chance; give more of them"
        t = t_quantile(max(1, self.degrees))
        degrees = "1 degree" if self.degrees == 1 else f"{self.degrees} degrees"
        return (
            f"tied: the difference to the best, paired over {knob}s, is within {t:.1f} standard "
            f"errors (95 %, {degrees} of freedom, pooled over the better half)"
        )

    @property
    def none_is_better(self) -> bool:
        """Return whether all settings have the same score, such as a reward of 0.

        If there is only one setting, return whether all of its members have the same score.
        """
        if len(self.settings) > 1:
            scores = [setting.mean.value for setting in self.settings if setting.mean]
        else:
            scores = [value for value in self.values if value is not None]
            if len(scores) < len(self.values):  # a member diverged, and the others are better
                return False
        return len(scores) > 1 and len(set(scores)) == 1

    @property
    def _any_stopped(self) -> bool:
        """Return whether a member of any setting was stopped early."""
        return any(setting.stopped for setting in self.settings)

    def __str__(self) -> str:
        return "\n".join([*map(self.line, self.settings), self.how])

    def line(self, setting: Setting) -> str:
        """Return a setting in one line: knobs, mean ± standard error, and how it compares with the
        best.
        """
        knobs = []
        for key, value in setting.knobs.items():
            shown = f"{value:g}" if isinstance(value, float) else value
            knobs.append(f"{key}={shown}")
        name = " ".join(knobs) or "all"
        divergence = ""
        if setting.failed and setting.mean:
            divergence = f"{len(setting.failed)} of {len(setting.members)} diverged"
        standing = self.standing(setting, divergence)
        scored = f"{name}: {mean_text(setting.mean)} {self.unit}"
        return f"{scored}   {standing}" if standing else scored

    def standing(self, setting: Setting, fate: str) -> str:
        """Return a setting's standing in words: "best" or "tied" or neither, then `fate`.

        Args:
            setting: the setting.
            fate: which of its members diverged or were stopped, in words; "": none.
        """
        standing = ""
        if self.best and setting is self.best.setting and not self.none_is_better:
            standing = "best"
        elif setting.tied and setting.difference and not self.none_is_better:
            standing = f"tied ({setting.difference.value:+.3f})"
        return ", ".join(filter(None, (standing, fate)))


def mean_text(value: Mean | None) -> str:
    """Return `2.553 ± 0.012`, or `2.553` if there is no standard error, or `diverged` for None."""
    if value is None:
        return "diverged"
    if value.standard_error is None:
        return f"{value.value:.3f}"
    return f"{value.value:.3f} ± {value.standard_error:.3f}"


def tabulate(
    values: Sequence[float | None],
    knobs: Sequence[Mapping[str, Any]],
    over: str = "seed",
    unit: str = "bits/byte",
    stopped: Collection[int] = (),
    *,
    higher_is_better: bool = False,
) -> Table:
    """Compare settings, each of which was repeated with the same seeds (or values of another knob).

        d(s, seed)    = value(s, seed) - value(best, seed)
        difference(s) = mean over seeds of d(s, seed)
        noise^2       = sum over settings s of the better half, and seeds, of
                        (d(s, seed) - difference(s))^2 / degrees
        degrees       = sum over the same settings without the best of (seeds - 1)
        s is tied     = |difference(s)| <= t(95 %, degrees) · noise / sqrt(seeds)

    What a seed contributes (initial weights, order of rows) is in both values of a pair and
    cancels. Two seeds alone say little about noise, so it is pooled over settings. Far from the
    optimum, training is noisier, so the noise is pooled only over the better half of the settings, and
    over at least two. A setting with a member that diverged is never the best if another setting has no
    such member. A setting with a member that was stopped early is not compared with any other.

    Args:
        values: one for each member, such as its held-out bits per byte; None or not finite if the
            member diverged.
        knobs: the knobs of each member, by name.
        over: the name of the repeated knob; members without this knob are numbered instead.
        unit: the values' unit.
        stopped: the members that were stopped early. Their values are from that moment.
        higher_is_better: whether higher values are better.
    """
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    settings = _group_settings(finite, knobs, over, stopped)
    rivals = [setting for setting in settings if setting.mean and not setting.stopped]
    sign = -1 if higher_is_better else 1

    def rank(setting: Setting) -> tuple[bool, float]:
        """Return a key by which settings are sorted, the best mean first.

        Settings with a member that diverged come after all others.
        """
        assert setting.mean is not None
        return bool(setting.failed), sign * setting.mean.value

    ranked = sorted(rivals, key=rank)
    if not ranked:
        return Table(
            tuple(settings),
            best=None,
            values=tuple(finite),
            noise=None,
            degrees=0,
            over=over,
            unit=unit,
            higher_is_better=higher_is_better,
        )
    top = ranked[0]
    # The paired differences d of each setting. Settings are not hashable, so their ids are keys.
    differences = {id(other): _paired_differences(other, top, finite) for other in ranked[1:]}
    noise, degrees = _pooled_noise(list(differences.values()))
    t = t_quantile(degrees) if degrees else 0.0
    values_of_top = dict[int, float]()
    for member in top.members.values():
        value = finite[member]
        if value is not None:
            values_of_top[member] = value
    best_member = min(values_of_top, key=lambda member: sign * values_of_top[member])

    def compare_with_top(setting: Setting) -> Setting:
        """Return a setting with its difference to the best one, if it was compared with it."""
        paired = differences.get(id(setting))
        if not paired:
            return setting
        error = noise / math.sqrt(len(paired)) if noise is not None else None
        difference = Mean(value=statistics.fmean(paired), standard_error=error, n=len(paired))
        tied = None if error is None else abs(difference.value) <= t * error
        return replace(setting, difference=difference, tied=tied)

    return Table(
        tuple(map(compare_with_top, settings)),
        best=Best(top, best_member),
        values=tuple(finite),
        noise=noise,
        degrees=degrees,
        over=over,
        unit=unit,
        higher_is_better=higher_is_better,
    )


def _pooled_noise(differences: Sequence[Sequence[float]]) -> tuple[float | None, int]:
    """Return the noise of a `Table` and its degrees of freedom; see `tabulate`.

    Args:
        differences: the paired differences of each setting to the best one, better settings first.
    """
    squares = []
    degrees = 0
    for paired in differences[: pooled_settings(len(differences) + 1)]:
        squares += [(d - statistics.fmean(paired)) ** 2 for d in paired]
        degrees += max(0, len(paired) - 1)
    # If the difference of each setting to the best is the same for all seeds, scores are too coarse to tell
    # the noise. But if all of these differences are 0, the noise is taken as 0.
    are_equal_for_seeds = not any(squares)
    are_all_zero = not any(any(paired) for paired in differences)
    if degrees == 0 or (are_equal_for_seeds and not are_all_zero):
        return None, degrees
    return math.sqrt(sum(squares) / degrees), degrees


def pooled_settings(settings: int) -> int:
    """Return over how many settings `tabulate` pools the noise: the better half without the best
    setting.

    Args:
        settings: the number of all settings.
    """
    return max(2, math.ceil(settings / 2)) - 1


def _group_settings(
    values: Sequence[float | None],
    knobs: Sequence[Mapping[str, Any]],
    over: str,
    stopped: Collection[int],
) -> list[Setting]:
    """Return the settings in the order of their first members, not compared yet."""
    # The key is the shared knobs as text; the value is these knobs, and the members' indices by seed.
    groups: dict[str, tuple[dict[str, Any], dict[Hashable, int]]] = {}
    for index, member_knobs in enumerate(knobs):
        shared = {name: value for name, value in member_knobs.items() if name != over}
        _, members = groups.setdefault(repr(shared), (shared, {}))
        seed = member_knobs.get(over, len(members))
        members[seed] = index
    settings = []
    for shared, members in groups.values():
        member_values = [values[member] for member in members.values()]
        measured = [value for value in member_values if value is not None]
        failed = tuple(seed for seed, member in members.items() if values[member] is None)
        stopped_seeds = tuple(seed for seed, member in members.items() if member in stopped)
        settings.append(
            Setting(
                knobs=shared,
                members=members,
                mean=mean(measured) if measured else None,
                failed=failed,
                stopped=stopped_seeds,
            )
        )
    return settings


def _paired_differences(
    one: Setting, other: Setting, values: Sequence[float | None]
) -> list[float]:
    """Return the value of `one` minus that of `other` for every seed for which both have one."""
    differences = []
    for seed, member in one.members.items():
        if seed not in other.members:
            continue
        value = values[member]
        other_value = values[other.members[seed]]
        if value is not None and other_value is not None:
            differences.append(value - other_value)
    return differences
