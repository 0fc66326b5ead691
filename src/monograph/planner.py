"""What a run will be, decided before it starts: every "auto" of the settings becomes a value, with its reason.

For now it sizes the default run from measured speed; placement, memory and recomputation come with the rooms they
choose between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from monograph.device import Device


@dataclass(frozen=True)
class Rung:
    """What is known of a preset trained on the standard library with its default settings.

    Attributes:
        preset: its name.
        params: parameters with its default vocabulary.
        tokens_to_beat_gzip: training tokens after which its held-out bits per byte are below gzip's, measured by
            benchmarks/first_run.py with a quarter added.
        lr: peak learning rate.
        vocabulary: size of the tokenizer trained for it.
        tokens_per_update: one update's tokens.
    """

    preset: str
    params: int
    tokens_to_beat_gzip: int
    lr: float
    vocabulary: int
    tokens_per_update: int


# From small to large. nano is too small to beat gzip at all, so the default never takes it.
LADDER = (
    Rung("micro", 2_400_000, 700_000, 6e-3, 4096, 4096),
    Rung("124m", 123_600_000, 40_000_000, 1.5e-3, 16384, 131_072),
)
LEARNING_RATES = {"nano": 1e-2, "micro": 6e-3, "124m": 1.5e-3, "llama-179m": 1e-3, "1b": 5e-4, "8b": 3e-4}
# Of a device's matrix-product rate, what a captured step of a small model reaches (2 CPU cores: 0.3 to 0.4).
EFFICIENCY = 0.3
MOST_EPOCHS = 8


@dataclass(frozen=True)
class Size:
    """The default run's size: a rung and how long to train it."""

    rung: Rung
    minutes: float
    reason: str


def size(matmul_flops: float, minutes: float) -> Size:
    """The largest rung that beats gzip within `minutes` at this speed; the smallest, for longer, if none does.

    Args:
        matmul_flops: FLOP/s of a large matrix product in the run's precision.
        minutes: what the user waits by default.
    """

    def needed(rung: Rung) -> float:
        return rung.tokens_to_beat_gzip * 6 * rung.params / (EFFICIENCY * matmul_flops) / 60

    fitting = [rung for rung in LADDER if needed(rung) <= minutes]
    if fitting:
        return Size(fitting[-1], minutes, f"the largest that beats gzip in {minutes:g} min here")
    longer = math.ceil(needed(LADDER[0]))
    return Size(LADDER[0], longer, f"the smallest that beats gzip; this machine needs {longer} min for that")


def updates_for(seconds: float, seconds_per_update: float, most: int) -> int:
    """Updates that fit the time, at least 10 and at most `most`."""
    return max(10, min(most, int(seconds / seconds_per_update)))


def warmup(updates: int) -> int:
    """5 % of the run, at least 10 updates where it has that many, at most 2,000."""
    return min(2000, max(min(10, updates // 2), updates // 20))


def interval(updates: int, times: int) -> int:
    """How many updates lie between events that happen about `times` times in a run."""
    return max(1, -(-updates // times))


def precision(device: Device) -> str:
    """bf16 where the device computes it in hardware, else fp32."""
    return "bf16" if device.has_bf16 else "fp32"


def known_learning_rate(preset: str) -> float:
    """The preset's peak learning rate for AdamW."""
    return LEARNING_RATES[preset]


def micro_batch(rows: int, params: int, width: int, layers: int, length: int, free_bytes: int) -> int:
    """Rows per micro-batch, a divisor of `rows` if possible, so that activations fit half of the free memory.

    A stored activation is counted as (6 + 2 + 3 * 2.7) numbers of 4 bytes per position, layer and unit of width, the
    closed form of a Llama block with full-precision residuals; weights, gradients and AdamW's moments are 16 bytes
    each.
    """
    per_row = 64 * width * layers * length
    fits = max(1, int((free_bytes / 2 - 16 * params) / per_row))
    return rows if fits >= rows else max(d for d in range(1, fits + 1) if rows % d == 0)
