"""Describe the charts of a run's metrics: scores, losses, learning rate, gradient norm, speed, a card's gauges."""

from collections.abc import Mapping, Sequence

import numpy as np

from monograph.report.charts import Chart, Columns, Floats, Line, Mark, Row, columns, present
from monograph.report.page import Bar, Drawings, bars
from monograph.report.quantities import counted, memory

Moments = Sequence[tuple[int, str]]
Yardsticks = Mapping[str, float]

KEYS = (
    "eval_bits_per_byte",
    "train_loss",
    "eval_loss",
    "reward",
    "eval_reward",
    "entropy",
    "accuracy",
    "eval_accuracy",
    "margin",
    "eval_margin",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "gpu_utilization_percent",
    "gpu_power_w",
    "gpu_temperature_c",
    "gpu_clock_hz",
    "gpu_memory_bytes",
)
_GAUGES = {
    "gpu_utilization_percent": "GPU utilisation, %",
    "gpu_power_w": "GPU power, W",
    "gpu_temperature_c": "GPU temperature, °C",
    "gpu_clock_hz": "GPU clock, Hz",
    "gpu_memory_bytes": "GPU memory of all programs, bytes",
}


def drawings_of(metrics: Sequence[Row], yardsticks: Yardsticks, moments: Moments) -> Drawings:
    """Return the charts of what a run's rows have.

    Args:
        metrics: rows as `monograph.report.figures` describes them.
        yardsticks: bits per byte by name.
        moments: (update, words) of what the learning rate's curve shows.
    """
    table = columns(metrics, KEYS)
    made = [
        _held_out(table, yardsticks),
        _scored(table, "reward", "Mean reward of each update's answers", "training"),
        _scored(table, "accuracy", "Accuracy: the chosen answer scores higher", "training"),
        _loss(table),
        _scored(table, "entropy", "Entropy of answers, nats per token", "entropy"),
        _scored(table, "margin", "Margin of the chosen answers, nats", "training"),
        _learning_rate(table, moments),
        _gradient_norm(table),
        _speed(table, metrics),
        *(_gauge(table, key, title) for key, title in _GAUGES.items()),
    ]
    ledger = next((row["memory"] for row in reversed(metrics) if (row.get("memory") or {}).get("measured")), None)
    return Drawings([table], [chart for chart in made if chart], [_peak(ledger)] if ledger else [])


def _limits(low: float, high: float, room: float = 0.06) -> tuple[float, float]:
    """Return an axis's ends with room above and below; equal ends move apart."""
    margin = room * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _from_zero(values: Floats, room: float = 1.15) -> tuple[float, float]:
    return min(0.0, float(values.min())), room * float(values.max()) or 1.0


def _held_out(table: Columns, yardsticks: Yardsticks) -> Chart | None:
    bits = present(table, "eval_bits_per_byte")
    if not len(bits):
        return None
    # The first value is an untrained model's. On its scale all later ones would be one flat line.
    high = max([min(float(bits.max()), 2.2 * float(bits[-1])), *yardsticks.values()])
    low = min([float(bits.min()), *yardsticks.values()])
    lines = [Line("eval_bits_per_byte", "held out", "points")]
    title = "Held-out text, bits per byte"
    return Chart("held_out", title, lines, _limits(low, high), levels=yardsticks, is_wide=True)


def _scored(table: Columns, key: str, title: str, label: str) -> Chart | None:
    """Return a chart of a score in training and, if there is one, of the same score on what is held out."""
    values = present(table, key)
    if not len(values):
        return None
    held = present(table, f"eval_{key}")
    lines = [Line(key, label)]
    if len(held):
        lines.append(Line(f"eval_{key}", "held out", "points", shade=1))
    every = np.concatenate([values, held])
    limits = _from_zero(every) if key == "entropy" else _limits(float(every.min()), float(every.max()))
    return Chart(key, title, lines, limits, is_wide=key in ("reward", "accuracy"))


def _loss(table: Columns) -> Chart | None:
    values = present(table, "train_loss")
    if not len(values) or {"reward", "accuracy"} & table.keys():  # such a loss is of advantages or of pairs
        return None
    held = present(table, "eval_loss")
    lines = [Line("train_loss", "training")]
    if len(held):
        lines.append(Line("eval_loss", "held out", "points", shade=1))
    every = np.concatenate([values, held])
    limits = _limits(float(every.min()), float(every.max()))
    return Chart("loss", "Loss, nats per token", lines, limits, is_wide="eval_bits_per_byte" not in table)


def _learning_rate(table: Columns, moments: Moments) -> Chart | None:
    rates = present(table, "lr")
    if not len(rates):
        return None
    marks = [Mark(row, words) for update, words in sorted(moments) if (row := _row_of(table, update)) is not None]
    room = 1.25 + 0.12 * len(marks)  # above the curve, for the marks' words
    return Chart("learning_rate", "Learning rate", [Line("lr", "rate", "line")], _from_zero(rates, room), marks=marks)


def _row_of(table: Columns, update: int) -> int | None:
    """Return the first row at or after an update; None if the run has not come so far."""
    return next((row for row, at in enumerate(table["update"]) if at is not None and at >= update), None)


def _gradient_norm(table: Columns) -> Chart | None:
    norms = present(table, "grad_norm")
    if not len(norms):
        return None
    # One spike would flatten the rest, so the top 0.5 % may leave the frame.
    high = 1.15 * float(np.quantile(norms, 0.995)) or 1.0
    return Chart("gradient_norm", "Gradient norm, before clipping", [Line("grad_norm", "norm")], (0.0, high))


def _speed(table: Columns, metrics: Sequence[Row]) -> Chart | None:
    speeds = present(table, "tokens_per_s")
    if not len(speeds):
        return None
    skipped = [row["update"] for row in metrics if row.get("skipped")]
    slower = [row["update"] for row in metrics if "slower" in row]
    at = [(update, "") for update in skipped] + [(update, "slower") for update in slower]
    marks = [Mark(row, words) for update, words in at if (row := _row_of(table, update)) is not None]
    note = f"{counted(len(skipped), 'update')} skipped, each marked below." if skipped else ""
    line = Line("tokens_per_s", "tokens/s")
    return Chart("speed", "Tokens per second", [line], _from_zero(speeds, 1.3), marks=marks, note=note, is_count=True)


def _gauge(table: Columns, key: str, title: str) -> Chart | None:
    values = present(table, key)
    if not len(values):
        return None
    name = key.removeprefix("gpu_")
    label = title.partition(",")[0].removeprefix("GPU ").partition(" of")[0]
    return Chart(name, title, [Line(key, label)], _from_zero(values), is_count=True)


def _peak(ledger: Mapping[str, Mapping[str, int]]) -> str:
    """Return the planned and the measured peak of memory as bars of their parts."""
    totals = {name: sum(ledger[name].values()) for name in ("planned", "measured")}
    longest = max(*totals.values(), 1)
    rows = []
    for name, total in totals.items():
        parts = [size / max(total, 1) for size in ledger[name].values()]
        rows.append((name, False, [Bar(memory(total), total / longest, parts)]))
    said = "; ".join(
        f"{name.capitalize()}: {', '.join(f'{part} {memory(size)}' for part, size in ledger[name].items())}"
        for name in totals
    )
    return (
        '<figure class="chart"><figcaption><h2>Peak memory</h2></figcaption>\n'
        f'{bars("Peak memory", [], rows)}<p class="note">{said}</p></figure>'
    )
