"""Turn a source into rows to train on: `corpus()` finds the text, splits off a held-out part,
tokenises and packs it.

`render_row` shows one row as text: its documents, and which of its tokens are trained on.
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from monograph.data.documents import Reading
from monograph.data.forms import ASKED, LABELLED_FORM, PAIR_FORM, TEXT, Asked, Kind, by_keys
from monograph.data.kinds import are_completions, kind_of_records
from monograph.data.loss_mask import Answering
from monograph.data.progress import Progress
from monograph.data.rows import IGNORE, Rows
from monograph.data.sources import Sources, find
from monograph.data.store import CorpusRequest, StoredCorpus, open_or_build
from monograph.errors import InputRefused, UsageError
from monograph.ranges import COUNT
from monograph.storage.writing import temporary_folder, writing
from monograph.terminal import visible
from monograph.text.tokenizer import Tokenizer, parse

if TYPE_CHECKING:
    from monograph.data.batches import Batches


@dataclass(frozen=True)
class Stats:
    """Numbers about a corpus.

    Attributes:
        files: number of files.
        documents: number of texts and records, of which `held_out_documents` are held out (a text
            may be cut in two).
        conversations: number of conversations in the training part, 0 for texts. With
            conversations, `documents` counts `monograph.data.loss_mask.Row`s, and `bytes` only the
            text that is trained on.
        bytes: bytes of all text, of which `held_out_bytes` are held out.
        tokens: number of training targets in one pass over all rows.
        trained_share: share of the training part's tokens, without each document's first, that are
            targets.
        bytes_per_token: mean over the training part.
        packed_share: share of the training rows' positions that hold an input.
        skipped: {reason: count} of the files and records that were skipped.
    """

    files: int
    documents: int
    conversations: int
    bytes: int
    tokens: int
    trained_share: float
    bytes_per_token: float
    packed_share: float
    held_out_documents: int
    held_out_bytes: int
    skipped: dict[str, int]


@dataclass(frozen=True)
class Corpus:
    """Tokenised and packed text in two parts, one to train on and one held out to measure on.

    Attributes:
        name: the source as it was given.
        tokenizer: the tokenizer of the rows' ids.
        train: rows to train on.
        held_out: rows to measure on; empty if held_out = 0.
        fingerprint: hex sha256 of the text, the split, the tokenizer and the form of the rows;
            equal fingerprints mean equal rows.
        stats: numbers to show.
        notes: lines to show once (a rebuilt cache, skipped files, a tokenizer smaller than
            requested).
        folder: the folder of the stored tokens.
    """

    name: str
    tokenizer: Tokenizer
    train: Rows
    held_out: Rows
    fingerprint: str
    stats: Stats
    notes: tuple[str, ...]
    folder: Path

    @property
    def vocab_size(self) -> int:
        """Return the number of the tokenizer's ids."""
        return self.tokenizer.vocab_size

    @property
    def record_noun(self) -> str:
        """Return what a record is of which only answers are trained on: a conversation, or a
        completion of a text.
        """
        return "completion" if self.tokenizer.config.template is None else "conversation"

    @property
    def skipped(self) -> dict[str, int]:
        """Return {reason: count} of the files and records that were skipped."""
        return self.stats.skipped

    def batches(
        self,
        tokens_per_update: int,
        seed: int = 0,
        start: int = 0,
        epochs: int | None = None,
        pin: bool = False,
        skip: Sequence[Sequence[int]] = (),
    ) -> "Batches":
        """Return the training rows in shuffled order, in windows; see
        `monograph.data.batches.Batches`.
        """
        # Importing torch takes seconds, and only training needs it here.
        from monograph.data.batches import Batches

        return Batches(
            self.train, tokens_per_update, seed=seed, start=start, epochs=epochs, pin=pin, skip=skip
        )


def corpus(
    source: str | Path | Sequence[str | Path],
    *,
    weights: Sequence[float] | None = None,
    tokenizer: str | Path | Tokenizer = "bpe",
    vocab_size: int | None = None,
    sequence_length: int = 256,
    packing: str = "packed",
    held_out: float = 0.05,
    text_key: str | None = None,
    ignore_keys: str | Sequence[str] | None = None,
    bad_records: str = "refuse",
    answers: str = "every",
    too_long: str = "truncate",
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Prepare text for training. The tokens are cached, so a second call only hashes the text and
    checks the cache.

    Args:
        source: "stdlib" (the running Python's own standard library), "-" (standard input), a file,
            folder or glob pattern, a dataset of the Hugging Face hub (hf://OWNER/NAME), or a list
            of these. A document is a text file in UTF-8 (plain, .gz or .zst), or one record of a
            .jsonl or .ndjson file (plain, .gz or .zst), of a .parquet or .arrow file, or of a
            folder that `save_to_disk` wrote. In folders, hidden, empty and binary files are skipped
            and counted.
        weights: how often an epoch sees each source, such as [2, 0.5]; None: once.
        tokenizer: "bpe" to train one on the training part, "bytes", the path of a tokenizer.json,
            or a `Tokenizer`.
        vocab_size: entries of the tokenizer that is trained; None: 4,096.
        sequence_length: T, the number of positions in a row.
        packing: "packed" puts pieces of several documents into a row, "padded" one piece.
        held_out: fraction of the bytes to hold out, as whole packages of the standard library, else
            whole documents; see `monograph.data.documents.split`. 0 holds out nothing.
        text_key: the key or column of a record that holds its text, by default "text". Records
            without it that have "messages", "conversations", or "prompt" and "completion" are
            conversations, whose assistant's answers are trained on (docs/finetune.md); they need a
            tokenizer with a chat template, unless prompt and completion are texts, which are
            trained on as they are without one. Where a record could be both, a key that is given
            chooses: a text's, or one of these for conversations.
        ignore_keys: keys of records that are left out; any other key of a conversation is obeyed or
            refused.
        bad_records: "refuse" a bad record or a damaged file of records with an error, or "skip" and
            count it.
        answers: in conversations, train on "every" answer or on the "last" alone.
        too_long: for conversations longer than a row, leave out turns at their front ("truncate"),
            or treat them as bad records ("refuse").
        cache: the folder to keep the tokens in; see `monograph.data.store.open_or_build`.
        progress: called as progress(stage, done, total) in bytes during long work; see
            `monograph.data.progress`.

    Raises:
        UsageError: a setting is out of range.
        InputRefused: a text or tokenizer cannot be used (the message names it), or there is too
            little text to hold out one row.
        DiskFull: the cache has no room.
    """
    _check_settings(packing, bad_records, answers, too_long, sequence_length)
    sequence_length = int(sequence_length)  # json cannot write numpy's integers
    asked = parse(tokenizer, vocab_size)
    held_out = float(held_out)
    with temporary_folder() as spool:
        sources = find(source, spool, progress, weights)
        how = Answering(answers == "every", too_long == "truncate", sequence_length)
        said = Asked.of(text_key, ignore_keys)
        reading = Reading(
            text_key or TEXT,
            bad_records == "skip",
            how,
            tuple(sorted(said.ignored)),
            text_key in ASKED,
        )
        reading = _reading(sources, reading, said, asked)
        request = CorpusRequest(sources, held_out, asked, reading)
        stored = open_or_build(request, cache, progress)
    return _packed(request, stored, sequence_length, packing)


def _packed(
    request: CorpusRequest, stored: StoredCorpus, sequence_length: int, packing: str
) -> Corpus:
    """Arrange tokens in rows.

    Raises:
        InputRefused: there are too few tokens.
    """
    sources = request.text
    weights = [file.weight for file in request.text.files]
    train, held = _rows(stored, weights, sequence_length, packing == "packed")
    _check_size(sources.name, stored, train, held, request.held_out)
    decisive = [*request.sources, stored.tokenizer.hash, sequence_length, packing, weights]
    skipped = Counter(reason for _, reason in sources.skipped)
    return Corpus(
        name=sources.name,
        tokenizer=stored.tokenizer,
        train=train,
        held_out=held,
        fingerprint=hashlib.sha256(json.dumps(decisive).encode()).hexdigest(),
        stats=stats_of(len(sources.files), dict(skipped + Counter(stored.skipped)), train, held),
        notes=tuple(note for note in (*stored.notes, _skipped_note(sources)) if note),
        folder=stored.folder,
    )


_WITH_TEMPLATE = (
    "the tokenizer and chat template of a model: start from one with model.init = FOLDER, or name its folder here "
    "(records of 'prompt' and 'completion', texts, need none)"
)


def _check_settings(
    packing: str, bad_records: str, answers: str, too_long: str, sequence_length: int
) -> None:
    choices = (
        ("packing", packing, ("packed", "padded")),
        ("bad_records", bad_records, ("refuse", "skip")),
        ("answers", answers, ("every", "last")),
        ("too_long", too_long, ("truncate", "refuse")),
    )
    for key, value, (one, other) in choices:
        if value not in (one, other):
            raise UsageError(f"data.{key} = {value!r}: must be {one!r} or {other!r}")
    if not COUNT.holds(sequence_length):
        raise UsageError(f"data.sequence_length = {sequence_length!r}: must be at least 1")


def _rows(
    stored: StoredCorpus, weights: Sequence[float], sequence_length: int, packed: bool
) -> tuple[Rows, Rows]:
    # A large plan is stored next to the tokens, since a temporary folder may be in memory. A cache
    # folder that belongs to another user cannot be written to.
    scratch = stored.folder if os.access(stored.folder, os.W_OK) else Path(tempfile.gettempdir())
    with writing(scratch):
        train = Rows(stored.train, stored.tokenizer, sequence_length, packed, weights, scratch)
        return train, Rows(
            stored.held_out, stored.tokenizer, sequence_length, packed, folder=scratch
        )


def _reading(sources: Sources, asked: Reading, said: Asked, tokenizer: Tokenizer | int) -> Reading:
    """Return how to read these records: `answering` is kept only if they are conversations."""
    kind = kind_of_records([file.path for file in sources.files], said, asked.skip_bad)
    judged = {form.kind: form for form in (PAIR_FORM, LABELLED_FORM)}
    if kind in judged:
        raise InputRefused(
            f"{sources.name}: its records are {judged[kind].kind.value} by {by_keys(judged[kind])}, which `monograph "
            f"train` learns from with {judged[kind].setting}; for their texts name a key as data.text_key"
        )
    if kind is not Kind.CONVERSATIONS:
        return asked._replace(answering=None)
    if isinstance(tokenizer, Tokenizer) and tokenizer.config.template is not None:
        return asked
    if are_completions([file.path for file in sources.files], said, asked.skip_bad):
        return asked._replace(plain=True)
    if not isinstance(tokenizer, Tokenizer):
        raise UsageError(f"data.tokenizer = bpe: conversations need {_WITH_TEMPLATE}")
    return asked


def _check_size(name: str, stored: StoredCorpus, train: Rows, held: Rows, held_out: float) -> None:
    if not train.tokens:
        raise InputRefused(f"{name}: no text in it: {(*stored.notes, 'give a file with text')[0]}")
    length = held.sequence_length
    if train.conversations or held.conversations:
        lacking = (
            "to train on"
            if not train.conversations
            else "held out"
            if held_out and not len(held)
            else None
        )
        if lacking:
            raise InputRefused(
                f"{name}: no conversation is {lacking}; give more of them, or set data.held_out = 0"
            )
    elif held_out and held.tokens < length:
        remedy = "give more text, raise data.held_out, shorten data.sequence_length, or set data.held_out = 0"
        raise InputRefused(
            f"{name}: {held.tokens} held-out tokens, fewer than one row of {length}; {remedy}"
        )


def stats_of(files: int, skipped: dict[str, int], train: Rows, held: Rows) -> Stats:
    """Return the numbers about rows that were made of so many files."""
    return Stats(
        files=files,
        documents=train.documents + held.documents,
        conversations=train.conversations,
        bytes=train.bytes + held.bytes,
        tokens=train.tokens,
        trained_share=train.tokens / train.inputs,
        bytes_per_token=train.bytes / train.tokens,
        packed_share=train.filled,
        held_out_documents=held.documents,
        held_out_bytes=held.bytes,
        skipped=skipped,
    )


def _skipped_note(sources: Sources) -> str | None:
    unexpected = [(path, reason) for path, reason in sources.skipped if reason != "hidden"]
    if not unexpected or sources.name == "stdlib":
        return None
    path, reason = unexpected[0]
    more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
    return f"skipped: {path} ({reason}){more}"


_TRAINED = "\x1b[32m"
_CONTEXT = "\x1b[2m"
_BORDER = "\x1b[36m"
_PLAIN = "\x1b[0m"


def render_row(corpus: Corpus, row_index: int, colour: bool) -> str:
    """Return one training row as text for a terminal.

    A ruled line names each piece's document. Targets are green. Tokens that are only inputs are
    dim, or in [brackets] without colour: a piece's first token (if it is a target, then of the
    piece before) and, in a conversation, everything but the answers. Special tokens appear by name.

    Raises:
        UsageError: no row has this index.
    """
    rows, tokenizer = corpus.train, corpus.tokenizer
    if not 0 <= row_index < len(rows):
        raise UsageError(f"row {row_index}: the corpus has rows 0 to {len(rows) - 1}")
    row = rows.row(row_index)
    length = rows.sequence_length
    trained = int((row["targets"] != IGNORE).sum())
    pieces = rows.pieces(row_index)
    filled = sum(piece.length for piece in pieces) / length
    head = f"row {row_index:,} of {len(rows):,}: {_counted(length, 'position')}, {trained} trained"
    lines = [f"{head}, {_counted(len(pieces), 'piece')}, {filled:.1%} filled"]
    column = 0
    for piece in pieces:
        place = slice(column, column + piece.length)
        inputs, targets = row["tokens"][place], row["targets"][place]
        part = f"tokens {piece.begin:,} to {piece.begin + piece.length:,} of {piece.tokens:,}"
        lines.append(_painted(f"── {visible(piece.document)}, {part} ──", _BORDER, colour))
        # A piece's last target is not among its inputs, and it is always trained on.
        ids = [*inputs.tolist(), int(targets[-1])]
        lines.append(_runs(tokenizer, ids, [False, *(targets != IGNORE).tolist()], colour))
        column += piece.length
    if column < length:
        lines.append(
            _painted(f"── padding, {_counted(length - column, 'position')} ──", _BORDER, colour)
        )
    return "\n".join(lines)


def answer_ends(corpus: Corpus) -> str:
    """Return the tokens that end the training conversations' answers, by name, id and count."""
    names = {index: name for name, index in corpus.tokenizer.special.items()}
    ends = corpus.train.answer_ends().items()
    return ", ".join(
        f"{visible(names.get(index, '?'))} (id {index}) {count:,}x" for index, count in ends
    )


def _runs(tokenizer: Tokenizer, ids: list[int], trained: list[bool], colour: bool) -> str:
    shown, begin = "", 0
    for is_target, run in groupby(trained):
        end = begin + len(list(run))
        text = _text(tokenizer, ids[begin:end])
        begin = end
        code = _TRAINED if is_target else _CONTEXT
        shown += _painted(text, code, True) if colour else text if is_target else f"[{text}]"
    return shown


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = {index: name.encode() for name, index in tokenizer.special.items()}
    return visible(
        b"".join([names.get(index, tokenizer.pieces[index]) for index in ids]).decode(
            errors="replace"
        )
    )


def _painted(text: str, code: str, colour: bool) -> str:
    return f"{code}{text}{_PLAIN}" if colour else text
