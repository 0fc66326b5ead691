"""`monograph compare`: is one run better than another, on the same held-out text, and how sure is that?"""

from __future__ import annotations

import json as jsonlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monograph.data.corpus import corpus
from monograph.data.rows import Rows
from monograph.device import default_device
from monograph.errors import UsageError
from monograph.evaluation.comparison import Comparison, bits_per_byte, compare_on, percent
from monograph.loss import Batch
from monograph.measure.quantities import count, counted
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.run.register import SWEEP
from monograph.session.subject import Subject, of_run
from monograph.sweeps.folder import seeds_of_best


@dataclass(frozen=True)
class _Side:
    """A run, or a sweep's best setting with all its seeds; it evaluates as an engine does.

    Attributes:
        name: as it was given.
        subjects: one for each seed.
        knobs: the seeds, of several.
        tokens_per_s: of training; None where it was not measured, or with others beside it.
    """

    name: str
    subjects: list[Subject]
    knobs: tuple[dict[str, Any], ...]
    tokens_per_s: float | None

    @property
    def members(self) -> list[torch.nn.Module]:
        """The models."""
        return [each.module for each in self.subjects]

    @property
    def params(self) -> int:
        """Of one of them."""
        return sum(p.numel() for p in self.members[0].parameters())

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of every seed, [N]."""
        found = [each.evaluate(batch) for each in self.subjects]
        return torch.stack([total for total, _ in found]), torch.stack([size for _, size in found])


def run(runs: Sequence[str], *, json: bool) -> int:
    """Compare every run with the first; see the command line's help."""
    if len(runs) < 2:
        raise UsageError("compare takes two runs or more, the first being what the others are compared with")
    progress = Progress()
    sides = [_side(name) for name in runs]
    first = sides[0]
    texts = [_held_out(side, first) for side in sides]
    found: list[Comparison] = []
    with progress.stage("compare", f"on what {first.name} held out") as stage:
        own = statistics.fmean(bits_per_byte(first, texts[0], stage.report))
        for side, rows in zip(sides[1:], texts[1:], strict=True):
            found.append(compare_on(first, texts[0], side, rows, progress=stage.report))
    scores = [own, *(each.b for each in found)]
    width = max(map(len, runs))
    for side, score in zip(sides, scores, strict=True):
        speed = f"   {count(side.tokens_per_s, 'tok/s')}" if side.tokens_per_s else ""
        seeds = f"   {counted(len(side.subjects), 'seed')}" if len(side.subjects) > 1 else ""
        print(f"{side.name:<{width}}   {score:.4f} bits/byte   {count(side.params)} parameters{speed}{seeds}")
    for side, each, rows in zip(sides[1:], found, texts[1:], strict=True):
        print(_line(first, side, each, rows))
    if json:
        print(jsonlib.dumps(_json(sides, scores, found)))
    return 0


def _side(name: str) -> _Side:
    folder = Run.located(name)
    runs = seeds_of_best(folder) if (folder / SWEEP).is_file() else {0: Run.open(name)}
    subjects = [of_run(run, _warn) for run in runs.values()]
    for subject in subjects:
        subject.module.to(default_device()).eval()
    knobs = tuple({"seed": seed} for seed in runs) if len(runs) > 1 else ()
    return _Side(name, subjects, knobs, _speed(next(iter(runs.values()))))


def _held_out(side: _Side, first: _Side) -> Rows:
    """What the first one held out, in the rows of this one's tokenizer."""
    subject, own = side.subjects[0], first.subjects[0].own_text
    if subject.own_text != own:
        _warn(f"{side.name} was trained on other text: what {first.name} held out may be part of it")
    text = corpus(tokenizer=subject.tokenizer, **subject.reading, **own)
    if subject.own_text == own and text.fingerprint != subject.fingerprint:
        _warn(f"{text.name} changed since {side.name}: what is held out now may have been trained on")
    if len(text.held_out) == 0:
        raise UsageError(f"{first.name} held nothing out (data.held_out = 0): name a run that did as the first")
    return text.held_out


def _speed(run: Run) -> float | None:
    """The median of training; members of a sweep had others beside them, so theirs says nothing."""
    if (run.folder.resolve().parent.parent / SWEEP).is_file():
        return None
    rates = [row["tokens_per_s"] for row in run.rows() if row.get("tokens_per_s")]
    return statistics.median(rates) if rates else None


def _line(first: _Side, side: _Side, found: Comparison, rows: Rows) -> str:
    error = "" if found.difference.standard_error is None else f" ± {found.difference.standard_error:.4f}"
    grouped = found.paired_by == "document" and found.difference.n < rows.documents
    pairs = f"{found.difference.n} groups of documents" if grouped else counted(found.difference.n, found.paired_by)
    verdict = found.verdict.replace("b is", f"{side.name} is").replace("a is", f"{first.name} is")
    cost = [f"{percent(first.params, side.params)} parameters"]
    if first.tokens_per_s and side.tokens_per_s:
        cost.append(f"{percent(first.tokens_per_s, side.tokens_per_s)} tokens/s")
    difference = f"{side.name} - {first.name} = {found.difference.value:+.4f}{error} bits/byte ({pairs})"
    return " · ".join([difference, verdict, *cost])


def _json(sides: Sequence[_Side], scores: Sequence[float], found: Sequence[Comparison]) -> dict[str, Any]:
    runs = [
        {
            "run": side.name, "bits_per_byte": score, "params": side.params, "tokens_per_s": side.tokens_per_s,
            "seeds": [knobs["seed"] for knobs in side.knobs],
        }
        for side, score in zip(sides, scores, strict=True)
    ]  # fmt: skip
    differences = [
        {
            "run": side.name, "against": sides[0].name, "difference": each.difference.value,
            "standard_error": each.difference.standard_error, "pairs": each.difference.n, "paired_by": each.paired_by,
            "is_noise": each.difference.is_noise,
        }
        for side, each in zip(sides[1:], found, strict=True)
    ]  # fmt: skip
    return {"schema": "monograph.compare/1", "runs": runs, "differences": differences}


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
