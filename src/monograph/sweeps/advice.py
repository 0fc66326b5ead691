"""Say what a sweep's results mean, and what to run next: more seeds, or a longer axis.

Every proposed command begins with the sweep's own config.toml and has its number of updates, so
that new scores can be compared with the old ones. A knob is a varied key; a setting is a
combination of knobs' values, with one member for each seed.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from monograph.config import Settings
from monograph.config.axes import AMOUNT_KEYS, SEED
from monograph.config.settings import checked_value
from monograph.errors import UsageError
from monograph.evaluation.significance import (
    Setting,
    Table,
    pooled_settings,
    seeds_needed,
    t_quantile,
)
from monograph.report.knobs import short_key, value_text
from monograph.report.quantities import counted
from monograph.sweeps.folder import Sweep
from monograph.sweeps.spec import ORIGIN, describe_knobs
from monograph.terminal import shell_words

VALUES_BEYOND = 2  # how many values are proposed beyond the end of an axis
# If the values of an axis have equal ratios, the proposed values go on with the same ratio, or with
# this one if it is smaller: an axis of few values may span far more than is worth a further sweep.
# A single value has no ratio, so it is doubled and halved.
MAX_RATIO = 10.0
SINGLE_RATIO = 2.0
# The largest values that are proposed for keys that allow larger ones. An adapter that loses more
# than half of its input by dropout is hardly ever better.
MOST_ADVISED = {"lora.dropout": 0.5}
MIN_SEEDS = 4  # no fewer seeds are proposed, since the noise itself would hardly be known
MAX_SEEDS = 16  # no more seeds are proposed
# With fewer degrees of freedom, the noise is hardly known, and what looks like a small difference may be a
# large one.
MIN_DEGREES = 3
LENGTH_KEYS = ("train.updates", "train.tokens", "train.epochs")


class Advice(NamedTuple):
    """One conclusion from a sweep's results.

    Attributes:
        text: the conclusion, in one or two sentences.
        arguments: the command to run next, as the arguments after `monograph`; empty if there is
            none.
    """

    text: str
    arguments: tuple[str, ...] = ()


def advise(sweep: Sweep, table: Table) -> list[Advice]:
    """Return what follows from a finished sweep's table, the most urgent first."""
    if table.best is None:
        return [Advice("Every member diverged: lower the learning rates.")]
    best = table.best.setting
    if table.none_is_better:
        assert best.mean is not None
        return [
            *_divergence_advice(best),
            Advice(
                f"All settings have the same score, {best.mean.value:.3g} {table.unit}: none is better."
            ),
        ]
    return [
        *_divergence_advice(best),
        *_edge_advice(sweep, table, best),
        *_comparison_advice(sweep, table, best),
    ]


def advice_json(advices: Sequence[Advice]) -> list[dict[str, str | None]]:
    """Return advice as `--json` prints it: a text, and a command or null."""
    return [
        {
            "text": each.text,
            "command": shell_words("monograph", *each.arguments) if each.arguments else None,
        }
        for each in advices
    ]


def _divergence_advice(best: Setting) -> Iterator[Advice]:
    """Say that even the best setting diverged with some seeds."""
    if best.failed:
        seeds = f"{len(best.failed)} of {len(best.members)}"
        yield Advice(
            f"No setting is safe: even {_name(best)} diverged with {seeds} seeds. Lower the learning rates."
        )


def _edge_advice(sweep: Sweep, table: Table, best: Setting) -> Iterator[Advice]:
    """Say on which axes the best value is the first or the last that did not diverge, and which values
    to try next.
    """
    # The further sweep has the best value of each knob, and if it is at an edge, also values beyond it.
    axes = {key: [value] for key, value in best.knobs.items()}
    clauses = list[str]()  # of edges beyond which nothing was tried
    sentences = list[str]()  # of edges beyond which members diverged
    for key, value in best.knobs.items():
        tried = _distinct([setting.knobs[key] for setting in table.settings])
        if len(tried) < 2 or not _is_ordered(key, tried):
            continue
        # Only settings that are like the best in all other knobs tell whether this knob's value diverges.
        diverged = {
            setting.knobs[key]
            for setting in table.settings
            if setting.failed and {**setting.knobs, key: value} == best.knobs
        } - {value}
        sound = [each for each in tried if each not in diverged]
        name = short_key(key)
        further = dict[bool, list[Any]]()  # by whether they are above the best value
        for upwards in (False, True):
            end = sound[-1] if upwards else sound[0]
            if value != end:
                continue
            # The value nearest to the best one, in this direction, with which members diverged.
            if upwards:
                nearest_diverged = min((each for each in diverged if each > value), default=None)
            else:
                nearest_diverged = max((each for each in diverged if each < value), default=None)
            if nearest_diverged is not None:
                values = values_between(value, nearest_diverged)
            elif upwards and best.failed:
                values = []  # even the best value diverged with some seeds
            else:
                values = values_beyond(sound, upwards=upwards)
            sensible = [each for each in values if each <= MOST_ADVISED.get(key, math.inf)]
            further[upwards] = _accepted_values(sweep.settings, key, sensible)
            edge = "largest" if upwards else "smallest"
            if not further[upwards] or len(sound) == 1:
                continue
            if nearest_diverged is None:
                clauses.append(f"{value_text(value)} is the {edge} {name}")
            else:
                sentences.append(
                    f"{value_text(value)} is the {edge} {name} that did not diverge, so the best may lie between it "
                    f"and {value_text(nearest_diverged)}."
                )
        if any(further.values()):
            if len(sound) == 1:
                sentences.append(
                    f"{value_text(value)} is the only {name} that did not diverge. Try others near it."
                )
            axes[key] = [value, *further.get(True, []), *further.get(False, [])]
    if clauses:
        sentences.insert(
            0,
            f"{_joined(clauses)} that this sweep tried, so the best may lie beyond. Go on there.",
        )
    if sentences:
        yield Advice(" ".join(sentences), _command(sweep, axes, len(best.members)))


def _comparison_advice(sweep: Sweep, table: Table, best: Setting) -> Iterator[Advice]:
    """Say whether the best setting is better than the others by more than chance.

    If that is not known, say which runs would show it.
    """
    # A setting that diverged with more seeds than the best is no rival.
    rivals = [
        setting
        for setting in table.settings
        if setting.difference and len(setting.failed) <= len(best.failed)
    ]
    rivals.sort(key=table.worse_by)
    if not rivals:
        return
    if table.noise is None:
        # The noise will be estimated from the better half of the settings, so no others are proposed.
        nearest_rivals = rivals[: pooled_settings(1 + len(rivals))]
        unknown = "One seed cannot tell a difference from chance."
        seeds = MIN_SEEDS
        if table.degrees:
            unknown = (
                "Scores that differ equally for each seed do not tell a difference from chance."
            )
            seeds = max(MIN_SEEDS, 2 * len(best.members))
        yield Advice(
            f"{unknown} Run the best with {seeds} seeds each.",
            _command(sweep, _product_axes([best, *nearest_rivals]), seeds),
        )
        return
    tied = [setting for setting in rivals if setting.tied]
    if tied:
        yield from _tie_advice(sweep, table, best, tied)
        return
    nearest = rivals[0]
    assert nearest.difference and nearest.difference.standard_error is not None
    # Half of the 95 % confidence interval of the difference.
    half_interval = t_quantile(table.degrees) * nearest.difference.standard_error
    others = "the others"
    if len(rivals) + 1 < len(table.settings):
        any_stopped = any(setting.stopped for setting in table.settings)
        others += " that trained to the end" if any_stopped else " that did not diverge"
    yield Advice(
        f"{_name(best)} is better than {others} by more than chance: the next, {_name(nearest)}, is worse by "
        f"{table.worse_by(nearest):.3g} ± {half_interval:.2g} {table.unit} (95 %)."
    )


def _tie_advice(
    sweep: Sweep, table: Table, best: Setting, tied: Sequence[Setting]
) -> Iterator[Advice]:
    """Say which settings cannot be separated from the best, and how many seeds would separate them.

    Args:
        sweep: the sweep.
        table: the compared settings.
        best: the best setting.
        tied: settings that may be as good.
    """
    assert table.noise is not None
    separable = list[Setting]()
    inseparable = list[Setting]()
    seeds = max(MIN_SEEDS, len(best.members) + 1)
    for setting in tied:
        difference = table.worse_by(setting)
        needed = seeds_needed(difference, table.noise, pooled_settings(1 + len(tied)), MAX_SEEDS)
        if table.degrees < MIN_DEGREES:
            # `needed` was computed from the noise, which is hardly known here, so it is not used.
            separable.append(setting)
        elif needed is None:
            inseparable.append(setting)
        else:
            separable.append(setting)
            seeds = max(seeds, needed)
    tried_seeds = counted(len(best.members), "seed")
    if separable:
        yield Advice(
            f"{tried_seeds} cannot separate {_name(best)} from {_with_differences(separable)}. Run {seeds} seeds of "
            "each.",
            _command(sweep, _product_axes([best, *separable]), seeds),
        )
    if inseparable:
        yield Advice(
            f"{tried_seeds} cannot separate {_name(best)} from {_with_differences(inseparable)}, and {MAX_SEEDS} would "
            "hardly: choose by what they cost."
        )


def _is_ordered(key: str, values: Sequence[Any]) -> bool:
    """Return whether the values have an order, and the best is expected between the extremes.

    Of an amount (AMOUNT_KEYS), such as the number of updates, more is usually better.
    """
    return all(map(_is_number, values)) and key not in AMOUNT_KEYS


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def values_beyond(ordered: Sequence[float], *, upwards: bool) -> list[float]:
    """Return the next values of an axis of n values beyond its last value, or before its first one.

        evenly spaced:  last + i · (last - first) / (n - 1)
        otherwise:      last · (last / first)^(i / (n - 1))        i = 1, 2

    Before the first value, "first" and "last" change places. The second form needs positive values, so
    zeros at the start of the axis are left out. Its ratio is at most MAX_RATIO. If the first form gives
    zero or less although all values are positive, each further value is half of the previous one. A
    single value is multiplied by SINGLE_RATIO, or divided by it.

    Args:
        ordered: one or more values in rising order.
        upwards: whether to return values beyond the last one.
    """
    steps = range(1, VALUES_BEYOND + 1)
    if len(ordered) == 1:
        factor = SINGLE_RATIO if upwards else 1 / SINGLE_RATIO
        return _rounded([ordered[0] * factor**i for i in steps], ordered)
    positive = [value for value in ordered if value > 0]
    end = ordered[-1] if upwards else ordered[0]
    # Any two values are evenly spaced, so it takes three to show that the axis is.
    is_even = len(ordered) > 2 and _is_even(ordered)
    if is_even or len(positive) < 2 or end <= 0:
        step = (ordered[-1] - ordered[0]) / (len(ordered) - 1)
        signed_step = step if upwards else -step
        values = [end + signed_step * i for i in steps]
        if len(positive) == len(ordered) and min(values) <= 0:
            values = [end / 2**i for i in steps]
    else:
        ratio = (positive[-1] / positive[0]) ** (1 / (len(positive) - 1))
        ratio = min(ratio, MAX_RATIO)
        factor = ratio if upwards else 1 / ratio
        values = [end * factor**i for i in steps]
    return _rounded(values, ordered)


def values_between(value: float, bound: float) -> list[float]:
    """Return the value in the middle between the best value of an axis and one that diverged.

    It is their geometric mean, which is limited to the best value times or divided by MAX_RATIO. If
    one of them is not positive, it is their mean. There is none between neighbouring whole numbers.
    """
    if value > 0 and bound > 0:
        ratio = math.sqrt(bound / value)
        middle = value * min(max(ratio, 1 / MAX_RATIO), MAX_RATIO)
    else:
        middle = (value + bound) / 2
    return [each for each in _rounded([middle], [value, bound]) if each not in (value, bound)]


def _rounded(values: Sequence[float], tried: Sequence[float]) -> list[float]:
    """Return values with four digits, or as whole numbers if those that were tried are."""
    if all(isinstance(value, int) for value in tried):
        return list(dict.fromkeys(round(value) for value in values))
    return [float(f"{value:.4g}") for value in values]


def _is_even(ordered: Sequence[float]) -> bool:
    step = (ordered[-1] - ordered[0]) / (len(ordered) - 1)
    return all(
        math.isclose(high - low, step, rel_tol=0.01) for low, high in itertools.pairwise(ordered)
    )


def _accepted_values(settings: Settings, key: str, values: Sequence[float]) -> list[Any]:
    """Return the values that are valid for the key and go together with the other settings.

    They are returned as they would be read from the command line.
    """
    accepted = list[Any]()
    for value in values:
        with suppress(UsageError):
            read_value = checked_value(key, typed_value(value), ORIGIN, from_text=True)
            settings.resolve({key: read_value}, ORIGIN)
            accepted.append(read_value)
    return accepted


def _product_axes(settings: Sequence[Setting]) -> dict[str, list[Any]]:
    """Return axes whose combinations include these settings."""
    keys = dict.fromkeys(key for setting in settings for key in setting.knobs)
    return {key: _distinct([setting.knobs.get(key) for setting in settings]) for key in keys}


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Return the values without repetitions, numbers in rising order."""
    distinct = list({repr(value): value for value in values}.values())
    return sorted(distinct) if all(map(_is_number, distinct)) else distinct


def _command(sweep: Sweep, axes: Mapping[str, Sequence[Any]], seeds: int) -> tuple[str, ...]:
    """Return the arguments of a further sweep.

    Args:
        sweep: the sweep. The members of the further one are as long as its own.
        axes: the further sweep's values by key.
        seeds: its number of seeds.
    """
    words = [f"{key}={_axis_text(values)}" for key, values in axes.items()]
    seed_words = _seed_axis(sweep, seeds)
    return ("sweep", str(sweep.run.config), *words, *seed_words, *_length_argument(sweep, axes))


def _seed_axis(sweep: Sweep, number: int) -> list[str]:
    """Return the argument for the axis of `number` seeds, which include those of the sweep.

    There is no argument if the settings' own seed is the only one.
    """
    used = list(dict.fromkeys(point[SEED] for point in sweep.points if SEED in point))
    if not used:
        used = [sweep.settings.train.seed]
    unused = (seed for seed in itertools.count() if seed not in used)
    further = itertools.islice(unused, max(0, number - len(used)))
    seeds = sorted([*used, *further])
    if len(seeds) == 1:
        return []
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return [f"{SEED}={seeds[0]}..{seeds[-1]}"]
    return [f"{SEED}={_axis_text(seeds)}"]


def _length_argument(sweep: Sweep, axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the argument for the number of updates, so that the further sweep has the same.

    There is no argument if the settings or the axes give the length, or if members had different
    numbers.
    """
    given = sweep.settings.values()
    if any(given[key] is not None or key in axes for key in LENGTH_KEYS):
        return []
    updates = {group["updates"] for group in sweep.record.get("groups", [])}
    return [f"train.updates={updates.pop()}"] if len(updates) == 1 else []


def _axis_text(values: Sequence[Any]) -> str:
    # A value that is a tuple has commas itself, so several of them are put in brackets.
    in_brackets = len(values) > 1 and any(isinstance(value, tuple) for value in values)
    texts = [typed_value(value) for value in values]
    if in_brackets:
        texts = [f"[{text}]" for text in texts]
    return ",".join(texts)


def typed_value(value: object) -> str:
    """Return a value as text for the command line, which reads exactly this value from it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(typed_value, value))
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def _with_differences(settings: Sequence[Setting]) -> str:
    texts = []
    for setting in settings:
        assert setting.difference is not None
        texts.append(f"{_name(setting)} ({setting.difference.value:+.3g})")
    return _joined(texts)


def _name(setting: Setting) -> str:
    return describe_knobs(dict(setting.knobs))


def _joined(texts: Sequence[str]) -> str:
    """Return the texts as a list in words: a, b and c."""
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
