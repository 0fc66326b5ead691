"""Decide the length of a run and its portions where the settings leave them open, and known learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from monograph.device import Device
from monograph.predict.footprint import Compile


@dataclass(frozen=True)
class Default:
    """The model that is trained where the settings name none, with its known figures (benchmarks/first_run.py).

    Attributes:
        preset: the preset's name.
        vocabulary: size of its tokenizer.
        tokens_per_update: tokens of an update; small updates learn the most per token at this size.
        tokens_to_beat_gzip: training tokens of the standard library after which its held-out bits per byte are below
            gzip's.
        tokens: least training tokens of a default run, after which its held-out bits per byte are 0.1 below those of an
            order-6 byte model.
    """

    preset: str
    vocabulary: int
    tokens_per_update: int
    tokens_to_beat_gzip: int
    tokens: int


DEFAULT = Default("micro", 4096, 2048, 600_000, 1_300_000)
# micro's was measured (docs/log.md) and nano takes it over; the rest are those of GPT-3 models of the nearest size
# (Brown et al. 2020, arXiv 2005.14165, table 2.1).
LEARNING_RATES = {"nano": 2e-3, "micro": 2e-3, "124m": 6e-4, "llama-179m": 6e-4, "1b": 2e-4, "8b": 1.2e-4}
# Muon's, where they were measured to be higher (docs/log.md); elsewhere AdamW's, as its updates have the same size.
MUON_LEARNING_RATES = {"nano": 6e-3, "micro": 6e-3}
# For existing weights (Schulman et al. 2025, "LoRA Without Regret": adapters want ten times the rate of all weights).
FINETUNING_RATES = {"all": 2e-5, "adapters": 2e-4}
UNKNOWN_RATE = 1e-3  # for a shape without a name
MOST_EPOCHS = 8
# From so many layers on, one graph for all of them takes minutes to compile (benchmarks/scopes.py).
DEEP = 16
# The share of a run's time that evaluations, samples and checkpoints leave for updates.
UPDATES_SHARE = 0.95
EVALUATIONS, CHECKPOINTS = 12, 6  # per run, where the settings leave it open


def default_seconds(minutes: float, seconds_per_update: float) -> float:
    """Return the seconds of the default run: `minutes`, or on a slow machine as long as DEFAULT.tokens need."""
    needed = DEFAULT.tokens / DEFAULT.tokens_per_update * seconds_per_update / UPDATES_SHARE
    return max(60 * minutes, needed)


def updates_for(seconds: float, seconds_per_update: float, most: int) -> int:
    """Return the updates that fit the time, at least 10 and at most `most`."""
    return max(10, min(most, int(seconds / seconds_per_update)))


def updates_of(tokens: int, tokens_per_update: int) -> int:
    """Return the updates that have `tokens` tokens in all, to the nearest whole number."""
    return max(1, round(tokens / tokens_per_update))


def most_updates(rows_per_epoch: int, rows_per_update: int) -> int:
    """Return the most updates of a run by time: it reads a text at most MOST_EPOCHS times, however long it may take."""
    return MOST_EPOCHS * -(-rows_per_epoch // rows_per_update)


def warmup(updates: int) -> int:
    """Return the warm-up: 5 % of the run, at least 10 updates if it has as many, at most 2,000."""
    return min(2000, max(min(10, updates // 2), updates // 20))


def interval(updates: int, times: int) -> int:
    """Return the number of updates between events that happen about `times` times in a run."""
    return max(1, -(-updates // times))


def optimizer(fresh: bool) -> str:
    """Return Muon for weights drawn here: 0.07 bits per byte better in the default run (docs/log.md); else AdamW."""
    return "muon" if fresh else "adamw"


def scopes(layers: int) -> tuple[Compile, ...]:
    """Return the scopes of one graph, best first: for a deep model a block, whose graph all blocks share."""
    return ("blocks", "whole", "none") if layers >= DEEP else ("whole", "blocks", "none")


def precision(device: Device) -> str:
    """Return bf16 where the device computes it in hardware, else fp32."""
    return "bf16" if device.has_bf16 else "fp32"


def known_learning_rate(preset: str, optimizer: str) -> float:
    """Return the preset's peak learning rate for "adamw" or "muon"."""
    return (MUON_LEARNING_RATES if optimizer == "muon" else {}).get(preset, LEARNING_RATES[preset])
