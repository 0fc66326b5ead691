"""`monograph data`: show the rows that a model will be trained on, or tokenise the text for later
runs.
"""

import sys

from monograph.config import Settings
from monograph.data.corpus import Corpus, answer_ends, render_row
from monograph.device import describe
from monograph.errors import UsageError
from monograph.report.quantities import counted
from monograph.run.progress import Progress
from monograph.session.objectives.texts import open_corpus
from monograph.session.requirements import require_texts
from monograph.session.resolve import resolve
from monograph.terminal import own, takes_colour


def show(settings: Settings, *, row: int | None) -> None:
    """Print a packed row as text, its trained tokens marked; without a number, print the corpus's
    size and row 0.
    """
    require_texts(settings, "data")
    plan = resolve(settings, describe())
    corpus = open_corpus(plan.job.reading, Progress())
    if row is None:
        stats = corpus.stats
        print(f"{corpus.name}: {_chats(corpus) if stats.conversations else _texts(corpus)}")
        visits = corpus.train.per_epoch
        epoch = f", {visits:,} to an epoch" if visits != len(corpus.train) else ""
        rows = f"{counted(len(corpus.train), 'row')} of {plan.training.length}"
        print(f"{rows}{epoch}, {stats.packed_share:.1%} filled")
        held = f"{counted(stats.held_out_documents, 'document')}, {stats.held_out_bytes:,} bytes"
        held = (
            counted(corpus.held_out.conversations, corpus.record_noun)
            if stats.conversations
            else held
        )
        print(f"held out: {held}, {counted(len(corpus.held_out), 'row')}")
    elif row >= len(corpus.train):
        raise UsageError(f"--row {row}: the last row is {len(corpus.train) - 1:,}")
    own(sys.stdout, render_row(corpus, row or 0, colour=takes_colour(sys.stdout)) + "\n")


def _texts(corpus: Corpus) -> str:
    stats = corpus.stats
    texts = f"{counted(stats.files, 'file')}, {counted(stats.documents, 'document')}"
    return f"{texts}, {stats.bytes:,} bytes, {stats.tokens:,} tokens of {corpus.vocab_size:,} kinds"


def _chats(corpus: Corpus) -> str:
    stats, train = corpus.stats, corpus.train
    chats = f"{counted(stats.files, 'file')}, {counted(stats.conversations, corpus.record_noun)}"
    trained = f"{stats.tokens:,} of {train.inputs:,} tokens trained ({stats.trained_share:.1%})"
    return f"{chats} in {counted(train.documents, 'sequence')}, {trained}\nanswers end with {answer_ends(corpus)}"


def build(settings: Settings) -> None:
    """Tokenise and cache the text, and print the folder."""
    require_texts(settings, "data")
    corpus = open_corpus(resolve(settings, describe()).job.reading, Progress())
    print(f"{corpus.folder}: {corpus.stats.tokens:,} tokens, fingerprint {corpus.fingerprint[:16]}")
