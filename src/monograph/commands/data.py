"""`monograph data`: show the rows that a model will be trained on, or tokenise the text for later
runs.
"""

import sys
from collections.abc import Iterator

from monograph.config import Settings
from monograph.data.corpus import Corpus, answer_ends, render_row
from monograph.device import describe
from monograph.errors import UsageError
from monograph.report.quantities import counted
from monograph.run.progress import Progress
from monograph.session.objectives.texts import open_corpus
from monograph.session.requirements import require_texts
from monograph.session.resolve import resolve
from monograph.terminal import takes_colour, write_as_is


def show(settings: Settings, *, row: int | None) -> None:
    """Print a packed row as text, with the tokens marked that are trained on.

    Args:
        settings: the settings of a run.
        row: the row's number, from 0; None for row 0, with the corpus's size before it.
    """
    require_texts(settings, "data")
    plan = resolve(settings, describe())
    corpus = open_corpus(plan.job.reading, Progress())
    if row is None:
        for line in _sizes(corpus, plan.training.length):
            print(line)
    elif row >= len(corpus.train):
        raise UsageError(f"--row {row}: the last row is {len(corpus.train) - 1:,}")
    rendered = render_row(corpus, row or 0, colour=takes_colour(sys.stdout))
    write_as_is(sys.stdout, f"{rendered}\n")  # with the escape sequences of its colours


def _sizes(corpus: Corpus, row_length: int) -> Iterator[str]:
    """Yield lines with the numbers of records, tokens and rows, trained and held out.

    Args:
        corpus: the corpus.
        row_length: tokens of a row.
    """
    stats = corpus.stats
    if stats.conversations:
        yield from _conversation_sizes(corpus)
        held_out = counted(corpus.held_out.conversations, corpus.record_noun)
    else:
        yield _text_sizes(corpus)
        documents = counted(stats.held_out_documents, "document")
        held_out = f"{documents}, {stats.held_out_bytes:,} bytes"
    rows = len(corpus.train)
    epoch = ""
    if corpus.train.per_epoch != rows:
        epoch = f", {corpus.train.per_epoch:,} to an epoch"
    yield f"{counted(rows, 'row')} of {row_length}{epoch}, {stats.packed_share:.1%} filled"
    yield f"held out: {held_out}, {counted(len(corpus.held_out), 'row')}"


def _text_sizes(corpus: Corpus) -> str:
    """Return the line about a corpus of text."""
    stats = corpus.stats
    documents = f"{counted(stats.files, 'file')}, {counted(stats.documents, 'document')}"
    tokens = f"{stats.tokens:,} tokens of {corpus.vocab_size:,} kinds"
    return f"{corpus.name}: {documents}, {stats.bytes:,} bytes, {tokens}"


def _conversation_sizes(corpus: Corpus) -> Iterator[str]:
    """Yield the lines about a corpus of conversations."""
    stats = corpus.stats
    train = corpus.train
    records = f"{counted(stats.files, 'file')}, {counted(stats.conversations, corpus.record_noun)}"
    sequences = counted(train.documents, "sequence")
    trained = f"{stats.tokens:,} of {train.inputs:,} tokens trained ({stats.trained_share:.1%})"
    yield f"{corpus.name}: {records} in {sequences}, {trained}"
    yield f"answers end with {answer_ends(corpus)}"


def build(settings: Settings) -> None:
    """Tokenise and cache the text, and print the folder."""
    require_texts(settings, "data")
    plan = resolve(settings, describe())
    corpus = open_corpus(plan.job.reading, Progress())
    print(f"{corpus.folder}: {corpus.stats.tokens:,} tokens, fingerprint {corpus.fingerprint[:16]}")
