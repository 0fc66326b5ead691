"""Decide and open what a run on preferences has: pairs of answers, their loss, and the reference that it compares with.

The reference is the weights that the run begins from. Its log-probabilities are computed once, before the first update,
by the step's own evaluation, and stored in the run's folder. A resumed run reads them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from monograph.data.corpus import Corpus
from monograph.errors import InputRefused
from monograph.evaluation.text import evaluate
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.rl.pairs import PairRows, read_pairs
from monograph.rl.preferences import PreferenceLoss
from monograph.run.progress import Progress
from monograph.session.plan import Plan
from monograph.session.session import Session
from monograph.storage.reading import exists
from monograph.storage.writing import sync, writing

REFERENCE = "reference.safetensors"  # in the run's folder


def open_pairs(plan: Plan, progress: Progress) -> Corpus:
    """Read the run's pairs, and print how many there are."""
    with progress.stage("pairs", str(plan.reading["source"])) as stage:
        pairs = read_pairs(plan.reading, progress=stage.report)
        held = f"{pairs.held_out.documents} held out" if pairs.held_out.documents else "none held out"
        skipped = sum(pairs.skipped.values())
        left_out = f", {counted(skipped, 'bad record')} skipped" if skipped else ""
        stage.result = (
            f"{counted(pairs.train.documents, 'pair')}, packed {pairs.stats.packed_share:.1%}, {held}{left_out}"
        )
    return pairs


def preference_loss(plan: Plan, pairs: Corpus, model: nn.Module) -> PreferenceLoss:
    """Return the loss of a run on preferences.

    Raises:
        InputRefused: the module gives no probabilities of tokens.
    """
    if not isinstance(model, Llama):
        raise InputRefused(
            f"model.init = {plan.recipe.init}: prefer.loss needs a language model, not a {type(model).__name__}"
        )
    train, held = pairs.train, pairs.held_out
    assert plan.preference and isinstance(train, PairRows) and isinstance(held, PairRows)
    return PreferenceLoss(plan.preference, train.answers + held.answers, max(train.most, held.most))


def take_reference(session: Session, resumed: bool, progress: Progress) -> None:
    """Fill in the reference's log-probabilities: computed and stored by a run that begins, read by one that resumes.

    Raises:
        InputRefused: they are lost or damaged.
        DiskFull: there is no room for them.
    """
    loss, path = session.engine.step.loss, session.run.folder / REFERENCE
    if not isinstance(loss, PreferenceLoss) or not loss.preference.needs_reference:
        return
    if resumed:
        loss.reference.copy_(_stored(path, session.text.fingerprint, loss.reference))
        return
    with progress.stage("reference", "log-probabilities of the weights before the first update") as stage:
        loss.recording.fill_(True)
        for rows in (session.text.train, session.text.held_out):
            if len(rows):
                evaluate(session.engine, rows, batch_rows=session.batches.rows_per_window, progress=stage.report)
        loss.recording.fill_(False)
        loss.taken()
        stage.result = f"of {counted(len(loss.reference) - 1, 'answer')}"
    content = save({"reference": loss.reference.cpu()}, {"fingerprint": session.text.fingerprint})
    with writing(session.run.folder):
        path.write_bytes(content)
        sync(path)
        sync(path.parent)


def _stored(path: Path, fingerprint: str, like: torch.Tensor) -> torch.Tensor:
    lost = f"{path}: the reference's log-probabilities are {{}}: put the file back, or begin a new run"
    if not exists(path):
        raise InputRefused(lost.format("missing"))
    with suppress(SafetensorError, OSError, RuntimeError), safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("fingerprint") == fingerprint:
            tensor = file.get_tensor("reference")
            if tensor.shape == like.shape and tensor.dtype == like.dtype and bool(tensor.isfinite().all()):
                return tensor
    raise InputRefused(lost.format("damaged or of other pairs"))


def preferred_in(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a run on preferences adds to its summary; empty for other runs."""
    compared = [row for row in rows if "accuracy" in row]
    if not compared:
        return {}
    held: Mapping[str, Any] = next((row for row in reversed(rows) if "eval_accuracy" in row), {})
    return {
        "tokens": compared[-1]["tokens"],
        "accuracy": compared[-1]["accuracy"],
        "margin": compared[-1]["margin"],
        "eval_accuracy": held.get("eval_accuracy"),
    }
