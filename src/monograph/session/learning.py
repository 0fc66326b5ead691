"""The optimizer, its clipping and the schedule that a run's settings name."""

from __future__ import annotations

from monograph import planner
from monograph.config import Settings
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW, Muon, Optimizer
from monograph.schedule import Schedule, constant, warmup_cosine, warmup_stable_decay
from monograph.session.width import transfer_of
from monograph.step import Clip

FINAL = 0.05  # of the peak learning rate, where the schedule falls to if optim.schedule names no floor


def optimizer_name(settings: Settings, fresh: bool) -> str:
    """The optimizer's name, where it is left open the one for a model that is new or was trained before."""
    if settings.optim.name != "auto":
        return settings.optim.name
    return "adamw" if settings.train.parallel == "fsdp" else planner.optimizer(fresh=fresh)


def make_clip(settings: Settings) -> Clip | None:
    """What `optim.grad_clip` says: a number skips spikes, too; NUMBER:all makes every finite update."""
    asked = settings.optim.grad_clip
    if isinstance(asked, float):
        return Clip(asked, skip_spikes=True)
    return None if asked == "none" else Clip(float(asked.partition(":")[0]))


def make_schedule(settings: Settings, updates: int) -> Schedule:
    """The schedule that the settings name."""
    warmup = int(settings.optim.warmup_updates) if settings.optim.warmup_updates != "auto" else planner.warmup(updates)
    name = settings.optim.schedule.partition(":")[0]
    if name == "constant":
        return constant(warmup)
    if name == "wsd":
        return warmup_stable_decay(warmup, updates, final=floor(settings))
    return warmup_cosine(warmup, updates, floor(settings))


def floor(settings: Settings) -> float:
    """The share of the peak learning rate that the schedule falls to: 0.1 for `cosine:0.1`."""
    return float(settings.optim.schedule.partition(":")[2] or FINAL)


def make_optimizer(settings: Settings, config: LlamaConfig | None = None) -> Optimizer:
    """The optimizer that the settings name for a model of that shape; their learning rate is fixed.

    Args:
        settings: of the run.
        config: the model's shape, None if it is no Llama; what width transfer needs.
    """
    optim, transfer = settings.optim, transfer_of(settings, config)
    name, _, state = optim.name.partition(":")
    rule = Muon if name == "muon" else AdamW
    made = rule(
        state=state or "fp32",
        seed=settings.train.seed,
        lr=float(optim.lr),
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        ema=None if optim.ema == "none" else optim.ema,
    )
    return transfer.optimizer(made) if transfer else made
