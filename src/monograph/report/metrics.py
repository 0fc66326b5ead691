"""Declare the numbers in the rows of metrics.jsonl that people see.

Pages, pictures, comparisons, the terminal and the check of a row's types read this table. A new
number needs an entry here and a value in a row. The value comes from
`monograph.run.metrics_log.metrics_rows`, `monograph.session.after_update`, or `figures` of an
objective (`monograph.session.objective`).

Training records and held-out records may have the same number, for example a loss. It is one metric
with two keys.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

# How the ends of the vertical axis are chosen, before the reader zooms.
#   around:  from the lowest to the highest value
#   late:    as "around", without the first values of an untrained model: on their scale the other
#            values would be one flat line
#   zero:    from 0 to the highest value
#   spikes:  from 0 to the 99.5 % quantile, since a spike would flatten the other values
AxisLimits = Literal["around", "late", "zero", "spikes"]


@dataclass(frozen=True)
class Metric:
    """A number of a run's rows.

    Attributes:
        key: its key in a row, and its name in trackers; "" if only held-out records have it.
        chart: the name of its chart on the page, and of its picture in figures/.
        title: what the chart shows, with the unit.
        label: the name of its line; the line of held-out records is "held out".
        held_out: the key of the same number on held-out records; "" if there is none.
        head: the head of its column in the table of held-out scores; "" for its key.
        limits: how the ends of its vertical axis are chosen.
        is_line: whether its values lie on a smooth curve. Other values are drawn with their median.
        is_count: whether its values are written with SI prefixes.
        place: its place on the sheet of all pictures: "first" and "second" are in the upper row,
            "lower" is in the lower row, and "" is not on the sheet. If a run has several metrics with
            the place "first" or "second", the sheet shows the last of them in the table. On pages, the
            charts of "first" are wide.
        is_score: whether it says how good the run is, in place of the loss. Then no loss is drawn,
            since a loss of advantages or of pairs is not in nats per token.
        is_printed: whether it is printed while a run trains.
        is_compared: whether comparisons of runs draw it.
    """

    key: str
    chart: str
    title: str
    label: str = "training"
    held_out: str = ""
    head: str = ""
    limits: AxisLimits = "around"
    is_line: bool = False
    is_count: bool = False
    place: Literal["first", "second", "lower", ""] = ""
    is_score: bool = False
    is_printed: bool = False
    is_compared: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """Its keys in the rows."""
        return tuple(key for key in (self.key, self.held_out) if key)


BITS_PER_BYTE = Metric(
    key="",
    chart="held_out",
    title="Held-out text, bits per byte",
    held_out="eval_bits_per_byte",
    head="bits per byte",
    limits="late",
    place="first",
)
LOSS = Metric(
    key="train_loss",
    chart="loss",
    title="Loss, nats per token",
    held_out="eval_loss",
    head="loss, nats",
    place="second",
)
LEARNING_RATE = Metric(
    key="lr",
    chart="learning_rate",
    title="Learning rate",
    label="rate",
    limits="zero",
    is_line=True,
    place="lower",
)
SPEED = Metric(
    key="tokens_per_s",
    chart="speed",
    title="Tokens per second",
    label="tokens/s",
    limits="zero",
    is_count=True,
    place="lower",
)


def _gauge(key: str, chart: str, title: str, label: str) -> Metric:
    """Return the metric of a number that the GPU itself measures."""
    return Metric(
        key=key,
        chart=chart,
        title=title,
        label=label,
        limits="zero",
        is_count=True,
        is_compared=False,
    )


# In the order of the charts on a page.
METRICS = [
    BITS_PER_BYTE,
    Metric(
        key="reward",
        chart="reward",
        title="Mean reward of each update's answers",
        held_out="eval_reward",
        place="first",
        is_score=True,
        is_printed=True,
    ),
    Metric(
        key="accuracy",
        chart="accuracy",
        title="Accuracy: the chosen answer scores higher",
        held_out="eval_accuracy",
        place="first",
        is_score=True,
        is_printed=True,
    ),
    LOSS,
    Metric(
        key="entropy",
        chart="entropy",
        title="Entropy of answers, nats per token",
        label="entropy",
        limits="zero",
        place="second",
    ),
    Metric(
        key="kl",
        chart="kl",
        title="KL divergence from the reference, nats per token",
        label="KL",
    ),
    Metric(
        key="margin",
        chart="margin",
        title="Margin of the chosen answers, nats",
        held_out="eval_margin",
        place="second",
        is_printed=True,
    ),
    LEARNING_RATE,
    Metric(
        key="grad_norm",
        chart="gradient_norm",
        title="Gradient norm, before clipping",
        label="norm",
        limits="spikes",
        place="lower",
    ),
    SPEED,
    _gauge(
        key="gpu_utilization_percent",
        chart="utilization",
        title="GPU utilisation, %",
        label="utilisation",
    ),
    _gauge(key="gpu_power_w", chart="power", title="GPU power, W", label="power"),
    _gauge(
        key="gpu_temperature_c",
        chart="temperature",
        title="GPU temperature, °C",
        label="temperature",
    ),
    _gauge(key="gpu_clock_hz", chart="clock", title="GPU clock, Hz", label="clock"),
    _gauge(
        key="gpu_memory_bytes",
        chart="device_memory",
        title="GPU memory of all programs, bytes",
        label="memory",
    ),
]


def metric_keys() -> list[str]:
    """Return the keys of all metrics, on training and on held-out records."""
    return [key for metric in METRICS for key in metric.keys]


def held_out_metrics() -> list[Metric]:
    """Return the metrics that held-out records have."""
    return [metric for metric in METRICS if metric.held_out]


def shown_metrics(keys: Container[str]) -> list[Metric]:
    """Return the metrics to draw for rows that have these keys.

    A metric is drawn if the rows have one of its keys. The loss is not drawn if a score is
    (`Metric.is_score`).
    """
    metrics = [metric for metric in METRICS if any(key in keys for key in metric.keys)]
    if any(metric.is_score for metric in metrics):
        return [metric for metric in metrics if metric is not LOSS]
    return metrics


def printed_keys(row: Container[str]) -> list[str]:
    """Return the keys of a row whose numbers are printed while the run trains."""
    return [metric.key for metric in METRICS if metric.is_printed and metric.key in row]
