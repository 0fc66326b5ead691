"""Decide what the settings leave open: a run's length and intervals, its learning rate, optimizer and precision."""

from typing import Any, NamedTuple

from monograph.device import Device
from monograph.predict.footprint import Compile


class Default(NamedTuple):
    """The model that is trained where the settings name none, with measured figures (benchmarks/first_run.py).

    Attributes:
        preset: the preset's name.
        vocabulary: entries of its tokenizer.
        tokens_per_update: tokens of an update; a model of this size learns most per token from small updates.
        tokens_to_beat_gzip: training tokens of Python's standard library after which held-out bits per byte are below
            gzip's.
        tokens: fewest training tokens of a default run; after them held-out bits per byte are 0.1 below those of an
            order-6 byte model.
    """

    preset: str
    vocabulary: int
    tokens_per_update: int
    tokens_to_beat_gzip: int
    tokens: int


DEFAULT = Default("micro", 4096, 2048, 600_000, 1_300_000)
# The rate of micro was measured (docs/log.md) and is used for nano too; the others are those of the GPT-3 models of the
# nearest size (Brown et al. 2020, arXiv 2005.14165, table 2.1).
LEARNING_RATES = {"nano": 2e-3, "micro": 2e-3, "124m": 6e-4, "llama-179m": 6e-4, "1b": 2e-4, "8b": 1.2e-4}
# Muon's rates where higher ones were measured to be better (docs/log.md). Elsewhere AdamW's rates hold, as Muon's
# updates have the same size.
MUON_LEARNING_RATES = {"nano": 6e-3, "micro": 6e-3}
# Muon's momentum, and the embedding's rate over that of the matrices, where they were measured to be better than 0.95
# and 1 (benchmarks/recipe.py).
MUON_FIELDS = dict.fromkeys(("nano", "micro"), {"momentum": 0.9, "embedding_lr": 6.0})
# There the decay is DECAY for each epoch, as a text that is read again is learned by heart, and at most MOST_DECAY
# (docs/training.md).
DECAY, MOST_DECAY = 0.3, 1.0
# Rates for existing weights. Adapters need ten times the rate of all weights (Schulman et al. 2025, "LoRA Without
# Regret").
FINETUNING_RATES = {"all": 2e-5, "adapters": 2e-4}
JUDGED_SHARE = 0.1  # of these rates, for rewards and preferences: a careful choice, as answers say less than texts
UNKNOWN_RATE = 1e-3  # for a shape without a name
# Epochs after which a run by the clock ends, and those where the decay is MOST_DECAY (docs/training.md).
MOST_EPOCHS, MOST_DECAYED_EPOCHS = 8, 16
# From this many layers on, one graph for all of them takes minutes to compile (benchmarks/scopes.py).
DEEP = 16
# The share of a run's time that evaluations, samples and checkpoints leave for updates.
UPDATES_SHARE = 0.95
EVALUATIONS, CHECKPOINTS = 12, 6  # per run, where the settings leave it open


def default_seconds(minutes: float, seconds_per_update: float) -> float:
    """Return the seconds of the default run: `minutes`, or as many as DEFAULT.tokens take on a slow machine."""
    needed = DEFAULT.tokens / DEFAULT.tokens_per_update * seconds_per_update / UPDATES_SHARE
    return max(60 * minutes, needed)


def updates_for(seconds: float, seconds_per_update: float, most: int) -> int:
    """Return the number of updates that fit the time, at least 10 and at most `most`."""
    return max(10, min(most, int(seconds / seconds_per_update)))


def updates_of(tokens: int, tokens_per_update: int) -> int:
    """Return the number of updates that have about `tokens` tokens in all, at least 1."""
    return max(1, round(tokens / tokens_per_update))


def most_epochs(weight_decay: float) -> int:
    """Return how often a run that is limited by time reads its text at most."""
    return MOST_DECAYED_EPOCHS if weight_decay >= MOST_DECAY else MOST_EPOCHS


def most_updates(rows_per_epoch: int, rows_per_update: int, weight_decay: float) -> int:
    """Return the most updates of a run that is limited by time."""
    return most_epochs(weight_decay) * -(-rows_per_epoch // rows_per_update)


def likely_updates(minutes: float, seconds_per_update: float, rows_per_epoch: int, rows_per_update: int) -> int:
    """Return the number of updates of a run by the clock, from a prediction of their seconds."""
    most = most_updates(rows_per_epoch, rows_per_update, MOST_DECAY)
    return updates_for(UPDATES_SHARE * 60 * minutes, seconds_per_update, most)


def warmup(updates: int) -> int:
    """Return the updates of the warm-up: 5 % of the run, at least 10 (or half of a shorter run), at most 2,000."""
    return min(2000, max(min(10, updates // 2), updates // 20))


def interval(updates: int, times: int) -> int:
    """Return the number of updates between events that happen about `times` times in a run."""
    return max(1, -(-updates // times))


def optimizer(fresh: bool) -> str:
    """Return "muon" for fresh weights, as the default run gains 0.07 bits per byte (docs/log.md), else "adamw"."""
    return "muon" if fresh else "adamw"


def scopes(layers: int) -> tuple[Compile, ...]:
    """Return the compile scopes, best first: for a deep model "blocks", a graph that all blocks share."""
    return ("blocks", "whole", "none") if layers >= DEEP else ("whole", "blocks", "none")


def precision(device: Device) -> str:
    """Return "bf16" if the device computes it in hardware, else "fp32"."""
    return "bf16" if device.has_bf16 else "fp32"


def known_learning_rate(preset: str, optimizer: str) -> float:
    """Return the preset's peak learning rate for "adamw" or "muon"."""
    shape = preset.rpartition(":")[2]  # a family's own was not searched for
    return (MUON_LEARNING_RATES if optimizer == "muon" else {}).get(shape, LEARNING_RATES[shape])


def muon_fields(preset: str, optimizer: str, epochs: int = 1) -> dict[str, Any]:
    """Return the fields in which a new model's optimizer "adamw" or "muon" differs from its class's defaults.

    A family's own presets have none: some, such as Gemma, scale what the embedding gives.
    """
    if optimizer != "muon" or preset not in MUON_FIELDS:
        return {}
    return {**MUON_FIELDS[preset], "weight_decay": min(MOST_DECAY, round(DECAY * max(1, epochs), 6))}
