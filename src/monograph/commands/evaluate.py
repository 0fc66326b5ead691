"""`monograph evaluate`: bits per byte of a run's held-out text, or of other text."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path

import torch
from torch import Tensor

from monograph.config import load as load_settings
from monograph.data.corpus import Corpus
from monograph.data.corpus import corpus as open_corpus
from monograph.data.rows import Rows
from monograph.device import default_device
from monograph.evaluation import evaluate
from monograph.loss import Batch, token_loss
from monograph.model.llama import Llama
from monograph.run.folder import Run
from monograph.run.models import load


class _Scores:
    """A bare model as something that evaluates."""

    def __init__(self, model: Llama):
        self.model = model.eval()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        device = self.model.lm_head.weight.device
        return token_loss(self.model, {name: tensor.to(device) for name, tensor in batch.items()})


def run(run: str, *, data: list[str], json: bool) -> int:
    """Score the held-out rows of the run's data, or all of the text given; see the command line's help."""
    model, tokenizer = load(run, lambda line: print(f"warning: {line}", file=sys.stderr))
    folder = Path(run)
    is_run = folder.parts[:1] == ("last",) or (folder / "run.lock").is_file()
    length = model.config.max_position_embeddings
    if is_run:
        section = load_settings(Run.open(run).config, {}, {}).data
        length = section.sequence_length
    source, share = (data, 0.0) if data or not is_run else (section.source, section.held_out)
    packing = section.packing if is_run else "packed"
    text = open_corpus(
        source or "stdlib", tokenizer=tokenizer, sequence_length=min(length, 4096), packing=packing, held_out=share
    )
    rows = _rows(text, bool(share))
    result = evaluate(_Scores(model.to(default_device())), rows)
    print(
        f"{result.bits_per_byte:.4f} bits per byte, perplexity {result.perplexity:.2f}, "
        f"{result.tokens:,} tokens, {result.bytes:,} bytes of {text.name}"
    )
    if json:
        scores = {"bits_per_byte": result.bits_per_byte, "perplexity": result.perplexity, "tokens": result.tokens}
        print(jsonlib.dumps({"schema": "monograph.evaluate/1", **scores}))
    return 0


def _rows(text: Corpus, held_out: bool) -> Rows:
    return text.held_out if held_out else text.train
