"""What a run will be, decided before it starts: every "auto" of the settings becomes a value, with its reason."""

from __future__ import annotations

from monograph.planner.candidates import Asked, Candidate
from monograph.planner.choose import Plan, budget, plan, plan_anywhere
from monograph.planner.defaults import (
    DEFAULT,
    FINETUNING_RATES,
    LEARNING_RATES,
    MOST_EPOCHS,
    UNKNOWN_RATE,
    UPDATES_SHARE,
    default_seconds,
    interval,
    known_learning_rate,
    optimizer,
    precision,
    scopes,
    updates_for,
    warmup,
)
from monograph.planner.streaming import HOST_SHARE, Limits, StreamCandidate, streamed, tiers_said, way_said

__all__ = [
    "DEFAULT",
    "FINETUNING_RATES",
    "HOST_SHARE",
    "LEARNING_RATES",
    "MOST_EPOCHS",
    "UNKNOWN_RATE",
    "UPDATES_SHARE",
    "Asked",
    "Candidate",
    "Limits",
    "Plan",
    "StreamCandidate",
    "budget",
    "default_seconds",
    "interval",
    "known_learning_rate",
    "optimizer",
    "plan",
    "plan_anywhere",
    "precision",
    "scopes",
    "streamed",
    "tiers_said",
    "updates_for",
    "warmup",
    "way_said",
]
