"""Say what a sweep's results mean and what to run next: whether a difference is real, more seeds, a
longer axis.

Every command begins with the sweep's own config.toml and its number of updates, so that new scores
can be compared with the old ones.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from monograph.config import Settings
from monograph.config.axes import AMOUNTS, SEED
from monograph.config.settings import check
from monograph.errors import UsageError
from monograph.evaluation.significance import Setting, Table, pooled, seeds_needed, t_quantile
from monograph.report.quantities import counted
from monograph.sweeps.folder import Sweep
from monograph.sweeps.spec import ORIGIN, describe_knobs, short_key, value_text
from monograph.terminal import shell_words

BEYOND = 2  # values that are proposed beyond the end of an axis
FEWEST_SEEDS = 4  # with fewer the noise itself is hardly known
MOST_SEEDS = 16
# Degrees of freedom below which what looks like a small difference may be a large one.
FEW_DEGREES = 3
LENGTHS = ("train.updates", "train.tokens", "train.epochs")


class Advice(NamedTuple):
    """What a sweep's results mean.

    Attributes:
        text: one or two sentences.
        arguments: those of the command that follows from it, after `monograph`; empty if none does.
    """

    text: str
    arguments: tuple[str, ...] = ()


def advise(sweep: Sweep, table: Table) -> list[Advice]:
    """Return what follows from a finished sweep's table, in the order in which it is best done."""
    if table.best is None:
        return [Advice("Every member diverged: lower the learning rates.")]
    best = table.best.setting
    return [
        *_diverged(best),
        *_edge_advice(sweep, table, best),
        *_comparison_advice(sweep, table, best),
    ]


def as_json(advices: Sequence[Advice]) -> list[dict[str, str | None]]:
    """Return advice as `--json` prints it: a text, and a command or null."""
    return [
        {
            "text": each.text,
            "command": shell_words("monograph", *each.arguments) if each.arguments else None,
        }
        for each in advices
    ]


def _diverged(best: Setting) -> Iterator[Advice]:
    if best.failed:
        lost = f"{len(best.failed)} of {len(best.members)}"
        yield Advice(
            f"No setting is safe: even {_name(best)} diverged with {lost} seeds. Lower the learning rates."
        )


def _edge_advice(sweep: Sweep, table: Table, best: Setting) -> Iterator[Advice]:
    """Say on which axes the best value is the first or the last, and how to go on beyond."""
    axes = {key: [value] for key, value in best.knobs.items()}
    ends = list[str]()
    for key, value in best.knobs.items():
        tried = _distinct([setting.knobs[key] for setting in table.settings])
        if len(tried) < 2 or not _is_ordered(key, tried) or value not in (tried[0], tried[-1]):
            continue
        upwards = value == tried[-1]
        further = _accepted(sweep.settings, key, values_beyond(tried, upwards=upwards))
        if further:
            axes[key] = [value, *further]
            ends.append(
                f"{value_text(value)} is the {'largest' if upwards else 'smallest'} {short_key(key)}"
            )
    if ends:
        text = f"{_listed(ends)} that this sweep tried, so the best may lie beyond. Go on there."
        yield Advice(text, _command(sweep, axes, len(best.members)))


def _comparison_advice(sweep: Sweep, table: Table, best: Setting) -> Iterator[Advice]:
    """Say whether the best setting is better than the others by more than chance, and if not, what
    would tell.
    """
    rivals = [
        setting
        for setting in table.settings
        if setting.difference and len(setting.failed) <= len(best.failed)
    ]
    rivals.sort(key=_worse_by)
    if not rivals:
        return
    if table.noise is None:
        half = rivals[: pooled(1 + len(rivals))]
        yield Advice(
            f"One seed cannot tell a difference from chance. Run the best with {FEWEST_SEEDS} seeds each.",
            _command(sweep, _product_of([best, *half]), FEWEST_SEEDS),
        )
        return
    tied = [setting for setting in rivals if setting.tied]
    if tied:
        yield from _tie_advice(sweep, table, best, tied)
        return
    nearest = rivals[0]
    assert nearest.difference and nearest.difference.standard_error is not None
    bound = t_quantile(table.degrees) * nearest.difference.standard_error
    others = (
        "the others"
        if len(rivals) + 1 == len(table.settings)
        else "the others that did not diverge"
    )
    yield Advice(
        f"{_name(best)} is better than {others} by more than chance: the next, {_name(nearest)}, is worse by "
        f"{_worse_by(nearest):.3g} ± {bound:.2g} {table.unit} (95 %)."
    )


def _tie_advice(
    sweep: Sweep, table: Table, best: Setting, tied: Sequence[Setting]
) -> Iterator[Advice]:
    """Say which settings cannot be separated from the best, and by how many seeds they could."""
    assert table.noise is not None
    near = list[Setting]()
    alike = list[Setting]()
    seeds = max(FEWEST_SEEDS, len(best.members) + 1)
    for setting in tied:
        needed = seeds_needed(_worse_by(setting), table.noise, pooled(1 + len(tied)), MOST_SEEDS)
        if table.degrees < FEW_DEGREES:
            near.append(setting)  # what is needed follows from a noise that is hardly known
        elif needed is None:
            alike.append(setting)
        else:
            near.append(setting)
            seeds = max(seeds, needed)
    if near:
        yield Advice(
            f"{counted(len(best.members), 'seed')} cannot separate {_name(best)} from {_with_differences(near)}. Run "
            f"{seeds} seeds of each.",
            _command(sweep, _product_of([best, *near]), seeds),
        )
    if alike:
        yield Advice(
            f"{counted(len(best.members), 'seed')} cannot separate {_name(best)} from {_with_differences(alike)}, and "
            f"{MOST_SEEDS} would hardly: choose by what they cost."
        )


def _is_ordered(key: str, values: Sequence[Any]) -> bool:
    """Return whether the values have an order, and the best one is expected somewhere inside."""
    return all(map(_is_number, values)) and key not in AMOUNTS


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def values_beyond(ordered: Sequence[float], *, upwards: bool) -> list[float]:
    """Return the next values of an axis beyond its last one, or before its first one.

        evenly spaced:  last + i · (last - first) / (n - 1)
        otherwise:      last · (last / first)^(i / (n - 1))        i = 1, 2

    The second form is for positive values alone; a zero at the start of such an axis does not
    count. Where the first form comes to zero or below, while all values are positive, each further
    value is half of the one before.

    Args:
        ordered: two or more values in rising order.
        upwards: whether to go on beyond the last.
    """
    steps = range(1, BEYOND + 1)
    positive = [value for value in ordered if value > 0]
    end = ordered[-1] if upwards else ordered[0]
    if len(ordered) > 2 and _is_even(ordered) or len(positive) < 2 or end <= 0:
        step = (ordered[-1] - ordered[0]) / (len(ordered) - 1)
        values = [end + (step if upwards else -step) * i for i in steps]
        if len(positive) == len(ordered) and min(values) <= 0:
            values = [end / 2**i for i in steps]
    else:
        ratio = (positive[-1] / positive[0]) ** (1 / (len(positive) - 1))
        values = [end * (ratio if upwards else 1 / ratio) ** i for i in steps]
    if all(isinstance(value, int) for value in ordered):
        return list(dict.fromkeys(round(value) for value in values))
    return [float(f"{value:.4g}") for value in values]


def _is_even(ordered: Sequence[float]) -> bool:
    step = (ordered[-1] - ordered[0]) / (len(ordered) - 1)
    return all(
        math.isclose(high - low, step, rel_tol=0.01) for low, high in itertools.pairwise(ordered)
    )


def _accepted(settings: Settings, key: str, values: Sequence[float]) -> list[Any]:
    """Return the values that the key and the other settings accept, as they are read from the
    command line.
    """
    found = list[Any]()
    for value in values:
        with suppress(UsageError):
            read = check(key, typed_value(value), ORIGIN, from_text=True)
            settings.resolve({key: read}, ORIGIN)
            found.append(read)
    return found


def _product_of(settings: Sequence[Setting]) -> dict[str, list[Any]]:
    """Return the axes whose product has these settings."""
    keys = dict.fromkeys(key for setting in settings for key in setting.knobs)
    return {key: _distinct([setting.knobs.get(key) for setting in settings]) for key in keys}


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Return the values without repetitions, numbers in rising order."""
    found = list({repr(value): value for value in values}.values())
    return sorted(found) if all(map(_is_number, found)) else found


def _command(sweep: Sweep, axes: Mapping[str, Sequence[Any]], seeds: int) -> tuple[str, ...]:
    """Return the arguments of a sweep over these axes and so many seeds, each member as long as in
    `sweep`.
    """
    words = [f"{key}={_axis(values)}" for key, values in axes.items()]
    return ("sweep", str(sweep.run.config), *words, *_seeds(sweep, seeds), *_length(sweep, axes))


def _seeds(sweep: Sweep, number: int) -> list[str]:
    """Return the axis of so many seeds, those of the sweep first; nothing if there is only the
    settings' seed.
    """
    had = list(dict.fromkeys(point[SEED] for point in sweep.points if SEED in point)) or [
        sweep.settings.train.seed
    ]
    unused = (seed for seed in itertools.count() if seed not in had)
    seeds = sorted([*had, *itertools.islice(unused, max(0, number - len(had)))])
    if len(seeds) == 1:
        return []
    is_range = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return [f"{SEED}={seeds[0]}..{seeds[-1]}" if is_range else f"{SEED}={_axis(seeds)}"]


def _length(sweep: Sweep, axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the number of updates, if the settings give a time instead and all members had the
    same number.
    """
    given = sweep.settings.values()
    if any(given[key] is not None or key in axes for key in LENGTHS):
        return []
    updates = {group["updates"] for group in sweep.record.get("groups", [])}
    return [f"train.updates={updates.pop()}"] if len(updates) == 1 else []


def _axis(values: Sequence[Any]) -> str:
    pairs = len(values) > 1 and any(isinstance(value, tuple) for value in values)
    return ",".join(f"[{typed_value(value)}]" if pairs else typed_value(value) for value in values)


def typed_value(value: object) -> str:
    """Return a value as it is typed on the command line, from which exactly this value is read."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(typed_value, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _worse_by(setting: Setting) -> float:
    assert setting.difference
    return setting.difference.value


def _with_differences(settings: Sequence[Setting]) -> str:
    return _listed([f"{_name(setting)} ({_worse_by(setting):+.3g})" for setting in settings])


def _name(setting: Setting) -> str:
    return describe_knobs(dict(setting.knobs))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
