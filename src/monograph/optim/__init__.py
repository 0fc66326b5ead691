"""Update parameters: updates as free functions, the flat planes they run over, and optimizers that choose updates."""

from monograph.optim.narrow import join, split, split_, splittable
from monograph.optim.optimizers import AdamW, Group, Muon, Optimizer, checked, hidden_matrices, initialise, update_
from monograph.optim.planes import Kind, Plane, holding, planes, trainable, unlinked, vectors_at_once
from monograph.optim.updates import adamw_, ema_, muon_, nesterov, newton_schulz, next_moments

__all__ = [
    "AdamW", "Group", "Kind", "Muon", "Optimizer", "Plane",
    "adamw_", "checked", "ema_", "hidden_matrices", "holding", "initialise", "join", "muon_", "nesterov",
    "newton_schulz", "next_moments", "planes", "splittable", "split", "split_", "trainable", "unlinked", "update_",
    "vectors_at_once",
]  # fmt: skip
