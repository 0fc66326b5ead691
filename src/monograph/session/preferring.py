"""Decide and open what a run on preferences has: pairs of answers, their loss, and the reference that it compares with.

The reference is the weights that the run begins from, here and in the KL term of a run with rewards. For pairs its
log-probabilities are computed once, before the first update, by the step's own evaluation; for a KL term, as nobody
knows the answers yet, the weights that are trained are kept. Both are stored in the run's folder, where a resumed run
reads them.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from monograph.data.corpus import Corpus
from monograph.distributed.rows import own_rows, whole_rows
from monograph.errors import InputRefused
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.rl.pairs import PairRows, read_pairs
from monograph.rl.preferences import PreferenceLoss
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.run.writing import write_whole
from monograph.session.plan import Plan
from monograph.session.session import Session
from monograph.storage.reading import exists
from monograph.storage.writing import sync

REFERENCE = "reference.safetensors"  # in the run's folder
LOST = "{}: the reference of this run is {}: put the file back, or begin a new run"
DAMAGED = "damaged, of another run, or of an earlier version"


def open_pairs(plan: Plan, progress: Progress) -> Corpus:
    """Read the run's pairs, and print how many there are."""
    with progress.stage("pairs", str(plan.reading["source"])) as stage:
        assert plan.preference
        pairs = read_pairs(plan.reading, labelled=plan.preference.labelled, progress=stage.report)
        held = f"{pairs.held_out.documents} held out" if pairs.held_out.documents else "none held out"
        skipped = sum(pairs.skipped.values())
        left_out = f", {counted(skipped, 'bad record')} skipped" if skipped else ""
        stage.result = (
            f"{counted(pairs.train.documents, 'answer' if plan.preference.labelled else 'pair')}, rows "
            f"{pairs.stats.packed_share:.1%} full, {held}{left_out}"
        )
    for line in pairs.notes:
        progress.line("note", line)
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
    loss = PreferenceLoss(plan.preference, train.answers + held.answers, max(train.most, held.most))
    loss.labels[1:] = torch.from_numpy(np.concatenate([train.labels, held.labels]))
    return loss


def keep_first_weights(session: Session, resumed: bool) -> None:
    """Give a run with a KL term its reference, the weights that it begins from.

    Raises:
        InputRefused: it is lost or damaged.
        DiskFull: there is no room for it.
    """
    if not session.reward or not (kl := session.drawer.options.kl) or not kl.needs_reference:
        return
    planes = session.engine.step.planes
    session.drawer.reference = [plane.param.clone() for plane in planes]
    # By name, as the planes of another number of ranks are others.
    views = (plane.views(own) for plane, own in zip(planes, session.drawer.reference, strict=True))
    (_read if resumed else _write)(session, dict(itertools.chain.from_iterable(views)))


def score_with_first_weights(session: Session, resumed: bool, progress: Progress) -> None:
    """Give a run on preferences its reference, the log-probabilities of all answers under the weights it begins from.

    Raises:
        InputRefused: it is lost or damaged.
        DiskFull: there is no room for it.
    """
    loss = session.engine.step.loss
    if not isinstance(loss, PreferenceLoss) or not loss.preference.needs_reference:
        return
    tensors = {"log_probabilities": loss.reference}
    if resumed:
        _read(session, tensors)
        return
    with progress.stage("reference", "log-probabilities under the initial weights") as stage:
        sides = session.text.train, session.text.held_out
        loss.remember(sides, session.engine.evaluate, session.batches.rows_per_window, stage.report)
        loss.reference.copy_(session.world.sum(loss.reference))  # each answer is scored by one rank
        stage.result = f"of {counted(len(loss.reference) - 1, 'answer')}"
    _write(session, tensors)


def verify_reference(run: Run) -> None:
    """Verify a run's stored reference; a run that has none is left in peace.

    Raises:
        InputRefused: it is damaged.
    """
    if exists(path := run.folder / REFERENCE):
        _stored(path)


def _write(session: Session, tensors: Mapping[str, torch.Tensor]) -> None:
    """Store a reference in the run's folder, before the run's first checkpoint."""
    gathered = ((name, whole_rows(tensor)) for name, tensor in tensors.items())  # one at a time, by all ranks
    there = {name: whole.cpu() for name, whole in gathered if session.world.leads}
    if not session.world.leads:
        return
    # One entry, as safetensors writes several in any order.
    content = save(there, {"whose": f"{session.corpus.fingerprint} {_digest(there)}"})
    write_whole(session.run.folder / REFERENCE, content, "nothing was trained yet: make room there, and start again")
    sync(session.run.folder)


def _read(session: Session, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill these tensors from the stored reference."""
    path = session.run.folder / REFERENCE
    if not exists(path):
        raise InputRefused(LOST.format(path, "missing"))
    stored, fingerprint = _stored(path)
    like = all(name in stored and stored[name].shape == tensor.shape for name, tensor in tensors.items())
    if not like or fingerprint != session.corpus.fingerprint:
        raise InputRefused(LOST.format(path, DAMAGED))
    for name, tensor in tensors.items():
        tensor.copy_(own_rows(stored[name], tensor))


def _stored(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a stored reference, and the fingerprint of what it was made for."""
    with suppress(SafetensorError, OSError, RuntimeError), safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        fingerprint, _, digest = (file.metadata() or {}).get("whose", "").rpartition(" ")
        if digest == _digest(stored):
            return stored, fingerprint
    raise InputRefused(LOST.format(path, DAMAGED))


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of all bytes, which notices what stays finite."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def preferred_in(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a run on preferences adds to its summary; empty for other runs."""
    compared = [row for row in rows if "accuracy" in row]
    if not compared:
        return {}
    held: Mapping[str, Any] = next((row for row in reversed(rows) if "eval_accuracy" in row), {})
    last = {key: compared[-1][key] for key in ("tokens", "accuracy", "margin")}
    return last | {"eval_accuracy": held.get("eval_accuracy")}
