"""`monograph evaluate`: bits per byte of a run's held-out text, or of other text."""

from __future__ import annotations

import json as jsonlib
import sys

import torch
from torch import Tensor, nn

from monograph.config import load as load_settings
from monograph.data.corpus import corpus as open_corpus
from monograph.device import default_device
from monograph.errors import UsageError
from monograph.evaluation import Evaluation, evaluate
from monograph.graph.precision import Precision
from monograph.loss import Batch, Loss, token_loss
from monograph.measure.quantities import counted
from monograph.run.folder import Run
from monograph.run.models import load, load_trained, run_named
from monograph.session.story import standard_json

LONGEST_ROW = 4096


class _Scores:
    """A bare model and its loss as something that evaluates, at a precision."""

    def __init__(self, model: nn.Module, loss: Loss, precision: Precision):
        self.model, self.loss, self.precision = model.to(default_device()).eval(), loss, precision

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with self.precision.context(default_device().type):
            return self.loss(self.model, {name: tensor.to(default_device()) for name, tensor in batch.items()})


def run(run: str, *, data: list[str], json: bool) -> int:
    """Score the held-out rows of the run's data, or all of the text given; see the command line's help."""
    trained = run_named(run)
    result, name, averaged = _of_run(trained, data) if trained else (*_of_folder(run, data), False)
    standing = f"loss {result.loss:.4f}"
    if result.bits_per_byte is not None:
        standing = f"{result.bits_per_byte:.4f} bits per byte, perplexity {result.perplexity:.2f}"
    note = ", averaged weights" if averaged else ""
    print(f"{standing}, {counted(result.tokens, 'token')}, {counted(result.bytes, 'byte')} of {name}{note}")
    if json:
        scores = {key: getattr(result, key) for key in ("bits_per_byte", "perplexity", "loss", "tokens")}
        weights = "averaged" if averaged else "last"
        print(jsonlib.dumps({"schema": "monograph.evaluate/1", **standard_json(scores), "weights": weights}))
    return 0


def _of_run(run: Run, data: list[str]) -> tuple[Evaluation, str, bool]:
    model, loss, tokenizer, state, averaged = load_trained(run, _warn)
    settings = load_settings(run.config, {}, {})
    section, precision = settings.data, Precision(settings.train.precision)  # the run's own, or the figures differ
    text = open_corpus(
        data or section.source,
        tokenizer=tokenizer,
        sequence_length=section.sequence_length,
        packing=section.packing,
        held_out=0.0 if data else section.held_out,
        text_key=section.text_key,
        bad_records=section.bad_records,
    )
    if not data and text.fingerprint != state["fingerprint"]:
        _warn(f"{text.name} changed since the run: what is held out now may have been trained on")
    return evaluate(_Scores(model, loss, precision), text.train if data else text.held_out), text.name, averaged


def _of_folder(folder: str, data: list[str]) -> tuple[Evaluation, str]:
    model, tokenizer = load(folder, _warn)
    if not data:
        raise UsageError(f"{folder} is no run, so nothing was held out for it: give the text to score with --data")
    length = min(model.config.max_position_embeddings, LONGEST_ROW)
    text = open_corpus(data, tokenizer=tokenizer, sequence_length=length, held_out=0.0)
    return evaluate(_Scores(model, token_loss, Precision("fp32")), text.train), text.name


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
