"""Law 5 on a real sweep: a member is trained once more, alone, by the ordinary engine, and the losses are compared."""

from __future__ import annotations

from typing import Any

import torch

from monograph.config import Settings
from monograph.config.recorded import run_settings
from monograph.data.corpus import Corpus
from monograph.device import compiler_obstacle, default_device, describe
from monograph.engine import Engine
from monograph.errors import InputRefused
from monograph.loop import train
from monograph.run.progress import Progress
from monograph.session import randomness
from monograph.session.learning import make_schedule
from monograph.session.setup import make_engine, make_model, open_corpus
from monograph.sweeps.results import Outcome

FACTOR = 4.0  # of what two ways to compute the same run alone differ by


def verify(outcome: Outcome, progress: Progress) -> dict[str, Any]:
    """Compare a member's training losses with those of the same run alone.

        difference = max over updates of |member - alone|      equal = difference <= 4 · max |alone - alone, otherwise|

    "Otherwise" is uncompiled, or where nothing is compiled in micro-batches of half the size: what rounding alone does
    to this run. Every way rounds differently, and training makes the differences grow; which is why no fixed bound will
    do.

    Raises:
        InputRefused: the member has no metrics, or its run is damaged.
    """
    member = [row["train_loss"] for row in outcome.rows if row.get("train_loss") is not None]
    if not member:
        raise InputRefused(f"{outcome.run.folder} has no updates to compare: train the sweep first")
    settings = run_settings(outcome.run)
    text = open_corpus(settings, progress)
    compiled = settings.train.compile != "none" and (default_device().type == "cuda" or not compiler_obstacle())
    alone = losses(settings, text, len(member), progress, compiled=compiled)
    if compiled:
        other = losses(settings, text, len(member), progress, compiled=False)
    else:
        half = settings.resolve({"train.micro_batch": max(1, int(settings.train.micro_batch) // 2)}, "verify")
        other = losses(half, text, len(member), progress, compiled=False)
    difference, bound = largest(member, alone), FACTOR * largest(alone, other)
    equal = difference <= bound
    progress.line(
        "verify",
        f"member {outcome.member.index} against the same run alone, {len(member)} updates: largest difference of the "
        f"training loss {difference:.2g}, {'within' if equal else 'beyond'} {bound:.2g} (4 x what two ways to compute "
        "it alone differ by)",
    )
    return {
        "member": outcome.member.index, "updates": len(member), "difference": difference, "bound": bound,
        "equal": equal,
    }  # fmt: skip


def largest(one: list[float], other: list[float]) -> float:
    """The largest difference at any update; nan and infinity are equal to themselves."""
    pairs = zip(one, other, strict=True)
    return max(0.0 if a == b or (a != a and b != b) else abs(a - b) for a, b in pairs)


def losses(settings: Settings, text: Corpus, updates: int, progress: Progress, *, compiled: bool) -> list[float]:
    """Training losses of a run alone, from its beginning."""
    made = make_model(settings, text, describe())
    engine = make_engine(made, default_device())
    engine.step.schedule = make_schedule(settings, int(settings.train.updates or updates))
    size, seed = int(settings.train.tokens_per_update), settings.train.seed
    batches = text.batches(size, seed=seed)
    randomness.seed(seed)
    with progress.stage("alone", "compiled" if compiled else f"eager, micro-batches of {engine.micro_batch}") as stage:
        if compiled:
            first = text.batches(size, seed=seed)
            engine.capture(next(first), scope="blocks" if settings.train.compile == "blocks" else "whole")
            first.close()
        found = _trained(engine, batches, updates, stage.report)
    batches.close()
    return found


def _trained(engine: Engine, batches: Any, updates: int, report: Any) -> list[float]:
    found = []
    for update in train(engine, batches, updates):
        found.append(update.loss)
        report("update", update.index + 1, updates)
    return [float(loss) for loss in torch.stack(found).tolist()]
