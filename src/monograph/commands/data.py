"""`monograph data`: what a model is about to be trained on."""

from __future__ import annotations

import sys

from monograph import planner
from monograph.config import Settings
from monograph.data.corpus import Corpus
from monograph.data.corpus import corpus as open_corpus
from monograph.data.show import render_row
from monograph.errors import UsageError
from monograph.run.progress import Progress


def show(settings: Settings, *, row: int | None) -> int:
    """Decode a packed row with its trained tokens marked; without a number, the corpus in figures and row 0."""
    corpus = _open(settings)
    if row is None:
        stats = corpus.stats
        print(
            f"{corpus.name}: {stats.files:,} files, {stats.documents:,} documents, {stats.bytes:,} bytes, "
            f"{stats.tokens:,} tokens of {corpus.vocab_size:,} kinds"
        )
        visits = corpus.train.per_epoch
        epoch = f", {visits:,} to an epoch" if visits != len(corpus.train) else ""
        length = settings.data.sequence_length
        print(f"{len(corpus.train):,} rows of {length}{epoch}, {stats.packed_share:.1%} filled")
        held = f"{stats.held_out_documents:,} documents, {stats.held_out_bytes:,} bytes"
        print(f"held out: {held}, {len(corpus.held_out):,} rows")
    elif row >= len(corpus.train):
        raise UsageError(f"--row {row}: there are {len(corpus.train):,} rows, 0 to {len(corpus.train) - 1:,}")
    print(render_row(corpus, row or 0, colour=sys.stdout.isatty()))
    return 0


def build(settings: Settings) -> int:
    """Tokenise and cache the text, and say where."""
    corpus = _open(settings)
    print(f"{corpus.folder}: {corpus.stats.tokens:,} tokens, fingerprint {corpus.fingerprint[:16]}")
    return 0


def _open(settings: Settings) -> Corpus:
    data = settings.data
    tokenizer = f"bpe:{planner.DEFAULT.vocabulary}" if data.tokenizer == "auto" else data.tokenizer
    progress = Progress()
    with progress.stage("data", "reading and tokenising") as stage:
        corpus = open_corpus(
            data.source,
            tokenizer=tokenizer,
            sequence_length=data.sequence_length,
            packing=data.packing,
            held_out=data.held_out,
            text_key=data.text_key,
            bad_records=data.bad_records,
            progress=stage.report,
        )
    for line in corpus.notes:
        progress.line("note", line)
    return corpus
