"""The numbers in the rows of metrics.jsonl that people see: each is declared here, once.

Pages, pictures, comparisons, the terminal and the check of a row's types read this table. A new
number is a line here, and a value in a row: from `monograph.session.after_update`, or from an
objective's `figures`.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

# How the vertical axis is limited before the reader zooms.
#   around:  from the least to the largest value
#   late:    the same, without the first values of an untrained model, on whose scale the others would be one flat line
#   zero:    from 0 to the largest value
#   spikes:  from 0 to the 99.5 % quantile, as one spike would flatten the rest
Limits = Literal["around", "late", "zero", "spikes"]


@dataclass(frozen=True)
class Metric:
    """A number of a run's rows.

    Attributes:
        key: its name in a row, and in trackers; "" if the rows have it of held-out records alone.
        chart: the name of its chart on the page, and of its picture in figures/.
        title: what the chart shows, with the unit.
        label: what its line is called; the line of held-out records is "held out".
        held_out: the name of the same number on held-out records; "" if there is none.
        head: the head of its column in the table of scores on held-out records; "": its key.
        limits: see `Limits`.
        is_line: whether its values lie on a curve, so that no median is drawn over them.
        is_count: whether its values are written with SI prefixes.
        place: on the sheet of pictures "first" or "second" in the upper row, or in the lower one,
            or "" for none. A run has one that is "first" and one that is "second"; the later in the
            table wins. The first are wide on pages.
        is_score: whether the run is about this number instead of its loss, which is then not drawn:
            it is of advantages or of pairs, and no nats per token.
        is_printed: whether it is printed while a run trains.
        is_compared: whether comparisons of runs draw it.
    """

    key: str
    chart: str
    title: str
    label: str = "training"
    held_out: str = ""
    head: str = ""
    limits: Limits = "around"
    is_line: bool = False
    is_count: bool = False
    place: Literal["first", "second", "lower", ""] = ""
    is_score: bool = False
    is_printed: bool = False
    is_compared: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """Its names in the rows."""
        return tuple(key for key in (self.key, self.held_out) if key)


BITS_PER_BYTE = Metric(
    "",
    "held_out",
    "Held-out text, bits per byte",
    held_out="eval_bits_per_byte",
    head="bits per byte",
    limits="late",
    place="first",
)
LOSS = Metric(
    "train_loss",
    "loss",
    "Loss, nats per token",
    held_out="eval_loss",
    head="loss, nats",
    place="second",
)
LEARNING_RATE = Metric(
    "lr", "learning_rate", "Learning rate", "rate", limits="zero", is_line=True, place="lower"
)
SPEED = Metric(
    "tokens_per_s",
    "speed",
    "Tokens per second",
    "tokens/s",
    limits="zero",
    is_count=True,
    place="lower",
)


def _gauge(key: str, chart: str, title: str, label: str) -> Metric:
    """Return a number that the card itself measures."""
    return Metric(key, chart, title, label, limits="zero", is_count=True, is_compared=False)


# In the order of the charts on a page.
METRICS = [
    BITS_PER_BYTE,
    Metric(
        "reward",
        "reward",
        "Mean reward of each update's answers",
        held_out="eval_reward",
        place="first",
        is_score=True,
        is_printed=True,
    ),
    Metric(
        "accuracy",
        "accuracy",
        "Accuracy: the chosen answer scores higher",
        held_out="eval_accuracy",
        place="first",
        is_score=True,
        is_printed=True,
    ),
    LOSS,
    Metric(
        "entropy",
        "entropy",
        "Entropy of answers, nats per token",
        "entropy",
        limits="zero",
        place="second",
    ),
    Metric("kl", "kl", "KL divergence from the reference, nats per token", "KL"),
    Metric(
        "margin",
        "margin",
        "Margin of the chosen answers, nats",
        held_out="eval_margin",
        place="second",
        is_printed=True,
    ),
    LEARNING_RATE,
    Metric(
        "grad_norm",
        "gradient_norm",
        "Gradient norm, before clipping",
        "norm",
        limits="spikes",
        place="lower",
    ),
    SPEED,
    _gauge("gpu_utilization_percent", "utilization", "GPU utilisation, %", "utilisation"),
    _gauge("gpu_power_w", "power", "GPU power, W", "power"),
    _gauge("gpu_temperature_c", "temperature", "GPU temperature, °C", "temperature"),
    _gauge("gpu_clock_hz", "clock", "GPU clock, Hz", "clock"),
    _gauge("gpu_memory_bytes", "device_memory", "GPU memory of all programs, bytes", "memory"),
]


def keys() -> list[str]:
    """Return the names of all metrics in the rows."""
    return [key for metric in METRICS for key in metric.keys]


def held_out() -> list[Metric]:
    """Return the metrics that are measured on held-out records, too."""
    return [metric for metric in METRICS if metric.held_out]


def shown(present: Container[str]) -> list[Metric]:
    """Return the metrics of which one of the names is in `present`, without the loss if there is a
    score.
    """
    found = [metric for metric in METRICS if any(key in present for key in metric.keys)]
    if any(metric.is_score for metric in found):
        return [metric for metric in found if metric is not LOSS]
    return found


def printed(row: Container[str]) -> list[str]:
    """Return the names of the numbers of a row that are printed while the run trains."""
    return [metric.key for metric in METRICS if metric.is_printed and metric.key in row]
