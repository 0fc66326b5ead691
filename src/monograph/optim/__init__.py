"""Update parameters: formulas as free functions, the flat planes they run over, and optimizers that
choose formulas.
"""

from monograph.optim.adamw import AdamW, adamw_
from monograph.optim.muon import Muon, hidden_matrices, muon_, newton_schulz
from monograph.optim.narrow import join, split, split_, splittable
from monograph.optim.optimizer import Group, Hyperparameters, Knob, Optimizer, ParameterKind, Rule
from monograph.optim.optimizers import OPTIMIZERS, name_of, require_optimizer
from monograph.optim.planes import (
    Plane,
    added_at_once,
    planes,
    temporary_params,
    trainable,
    unlinked,
)
from monograph.optim.updates import ema_, initialise, round_parameters, update_

__all__ = [
    "OPTIMIZERS",
    "AdamW",
    "Group",
    "Hyperparameters",
    "ParameterKind",
    "Knob",
    "Muon",
    "Optimizer",
    "Plane",
    "Rule",
    "adamw_",
    "added_at_once",
    "require_optimizer",
    "ema_",
    "hidden_matrices",
    "temporary_params",
    "initialise",
    "join",
    "muon_",
    "name_of",
    "newton_schulz",
    "planes",
    "round_parameters",
    "splittable",
    "split",
    "split_",
    "trainable",
    "unlinked",
    "update_",
]
