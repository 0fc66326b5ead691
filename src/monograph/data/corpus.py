"""Turn a source into rows to train on: `corpus()` finds the text, holds some of it out, tokenises it
and packs it.

A *row* has a fixed number of positions, which hold *pieces* of documents (`monograph.data.pack`).
`render_row` shows a row as text, with its documents and the tokens that are trained on.
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

from monograph.data.documents import ReadingPlan
from monograph.data.forms import (
    CONVERSATION_TEXT_KEYS,
    LABELLED_FORM,
    PAIR_FORM,
    TEXT,
    RecordKind,
    RecordSettings,
    needed_keys,
)
from monograph.data.kinds import are_completions, kind_of_records
from monograph.data.loss_mask import AnswerOptions
from monograph.data.progress import ProgressCallback
from monograph.data.rows import IGNORE, Rows
from monograph.data.sources import Sources, find_sources
from monograph.data.store import CorpusRequest, StoredCorpus, open_or_build
from monograph.errors import InputRefused, UsageError
from monograph.ranges import COUNT
from monograph.storage.writing import cache_errors_explained, temporary_folder
from monograph.terminal import visible
from monograph.text.tokenizer import Tokenizer, parse_setting

if TYPE_CHECKING:
    from monograph.data.batches import Batches


@dataclass(frozen=True)
class Stats:
    """Numbers about a corpus.

    Attributes:
        files: number of files.
        documents: number of texts and records. A text that the split cuts in two counts twice, and a
            conversation counts as often as `monograph.data.loss_mask` divides it into rows.
        conversations: number of conversations in the training part, 0 for texts.
        bytes: bytes of all text; with conversations, of the text that is trained on.
        tokens: number of targets in one pass over all training rows.
        trained_share: the share of the training part's tokens that are targets. The first token of each
            document is not counted, because it can never be a target.
        bytes_per_token: mean number of bytes of a token of the training part.
        packed_share: share of the training rows' positions that have an input.
        held_out_documents: number of `documents` that are held out.
        held_out_bytes: number of `bytes` that are held out.
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
    """Tokenised and packed text: one part to train on, and one part held out for evaluation.

    Attributes:
        name: the source as it was given.
        tokenizer: the tokenizer of the rows' ids.
        train: rows to train on.
        held_out: rows to evaluate on; empty if held_out = 0.
        fingerprint: hex sha256 of everything on which the rows depend: the text, the split, the
            tokenizer, the rows' length, packing and weights.
        stats: numbers to show.
        notes: lines to show once, such as a rebuilt cache, skipped files, or a tokenizer that is
            smaller than requested.
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
        """Return the noun for a record in messages to the user, if only answers are trained on.

        It is "conversation", or "completion" if the tokenizer has no chat template.
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
        """Return the training rows in shuffled order, in windows: the rows of one update at a time.

        The arguments are those of `monograph.data.batches.Batches`.
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
    progress: ProgressCallback | None = None,
) -> Corpus:
    """Prepare text for training.

    The tokens are cached, so a second call only hashes the text and checks the cache.

    Args:
        source: "stdlib" (the running Python's own standard library), "-" (standard input), a file,
            folder or glob pattern, a dataset of the Hugging Face hub (hf://OWNER/NAME), or a list
            of these. A document is a text file in UTF-8 (plain, .gz or .zst), or one record of a
            .jsonl or .ndjson file (plain, .gz or .zst), of a .parquet or .arrow file, or of a
            folder that `save_to_disk` wrote. In folders, hidden, empty and binary files are skipped
            and counted.
        weights: number of times that an epoch sees each source, such as [2, 0.5]; None: once each.
        tokenizer: "bpe" to train a tokenizer on the training part, "bytes", the path of a
            tokenizer.json, or a `Tokenizer`.
        vocab_size: number of entries of a tokenizer that is trained; None: 4,096.
        sequence_length: T, the number of positions in a row.
        packing: "packed" to put pieces of several documents into a row, or "padded" to put only one
            piece into a row.
        held_out: fraction of the bytes to hold out, 0 for none. Complete packages of the standard
            library are held out, or else complete documents (`monograph.data.documents.split`).
        text_key: the key or column of a record that has its text; None: "text". Records without
            this key that have "messages", "conversations", or "prompt" and "completion" are
            conversations, and the assistant's answers are trained on (docs/finetune.md).
            Conversations need a tokenizer with a chat template, unless their prompts and
            completions are texts. If a record has both a text and a conversation, give the key that
            counts, which may also be one of the keys of conversations.
        ignore_keys: keys of records that are ignored. Every other key of a conversation is used or
            refused.
        bad_records: "refuse" to raise an error for a bad record or a damaged file of records, or
            "skip" to skip and count it.
        answers: "every" to train on every answer of a conversation, or "last" to train on the last.
        too_long: what to do with conversations that are longer than a row: "truncate" to leave out
            their first turns, or "refuse" to treat them as bad records.
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
    # The caller may give a numpy integer, which json cannot write.
    sequence_length = int(sequence_length)
    tokenizer_or_size = parse_setting(tokenizer, vocab_size)
    held_out = float(held_out)
    with temporary_folder() as spool:
        sources = find_sources(source, spool, progress, weights)
        answer_options = AnswerOptions(
            every=answers == "every",
            truncate=too_long == "truncate",
            max_inputs=sequence_length,
        )
        record_settings = RecordSettings.of(text_key, ignore_keys)
        reading = ReadingPlan(
            text_key=text_key or TEXT,
            skip_bad=bad_records == "skip",
            answer_options=answer_options,
            ignored_keys=tuple(sorted(record_settings.ignored_keys)),
            is_kind_set=text_key in CONVERSATION_TEXT_KEYS,
        )
        reading = _decide_reading(sources, reading, record_settings, tokenizer_or_size)
        request = CorpusRequest(sources, held_out, tokenizer_or_size, reading)
        stored = open_or_build(request, cache, progress)
    return _pack(request, stored, sequence_length, packing)


def _pack(
    request: CorpusRequest, stored: StoredCorpus, sequence_length: int, packing: str
) -> Corpus:
    """Arrange stored tokens in rows, and return the corpus.

    Raises:
        InputRefused: there are too few tokens.
    """
    sources = request.sources
    weights = [file.weight for file in sources.files]
    train, held_out = _rows(stored, weights, sequence_length, packing == "packed")
    _require_enough(sources.name, stored, train, held_out, request.held_out)
    # Everything on which the rows depend.
    identity = [*request.document_values, stored.tokenizer.hash, sequence_length, packing, weights]
    skipped_files = Counter(reason for _, reason in sources.skipped)
    skipped = dict(skipped_files + Counter(stored.skipped))
    notes = [*stored.notes, _skipped_note(sources)]
    return Corpus(
        name=sources.name,
        tokenizer=stored.tokenizer,
        train=train,
        held_out=held_out,
        fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        stats=stats_of(len(sources.files), skipped, train, held_out),
        notes=tuple(note for note in notes if note),
        folder=stored.folder,
    )


def _check_settings(
    packing: str, bad_records: str, answers: str, too_long: str, sequence_length: int
) -> None:
    """Refuse a setting that is out of range.

    Raises:
        UsageError: the message names the setting.
    """
    choices = (
        ("packing", packing, ("packed", "padded")),
        ("bad_records", bad_records, ("refuse", "skip")),
        ("answers", answers, ("every", "last")),
        ("too_long", too_long, ("truncate", "refuse")),
    )
    for key, value, (first, second) in choices:
        if value not in (first, second):
            raise UsageError(f"data.{key} = {value!r}: must be {first!r} or {second!r}")
    if not COUNT.holds(sequence_length):
        raise UsageError(f"data.sequence_length = {sequence_length!r}: must be at least 1")


def _rows(
    stored: StoredCorpus, weights: Sequence[float], sequence_length: int, packed: bool
) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out rows."""
    # A large plan of the rows is kept in files. These are put next to the tokens, because the system's
    # folder for temporary files may be in memory. The system's folder is used only if the folder of the
    # tokens cannot be written, for example because it belongs to another user.
    scratch = stored.folder if os.access(stored.folder, os.W_OK) else Path(tempfile.gettempdir())
    with cache_errors_explained(scratch):
        train = Rows(stored.train, stored.tokenizer, sequence_length, packed, weights, scratch)
        held_out = Rows(stored.held_out, stored.tokenizer, sequence_length, packed, folder=scratch)
    return train, held_out


_NEEDS_TEMPLATE = (
    "the tokenizer and chat template of a model: start from one with model.init = FOLDER, or give its folder as "
    "data.tokenizer (records with a 'prompt' and a 'completion' that are texts need neither)"
)


def _decide_reading(
    sources: Sources,
    reading: ReadingPlan,
    record_settings: RecordSettings,
    tokenizer: Tokenizer | int,
) -> ReadingPlan:
    """Decide how to read the records of the sources, after looking at a sample of the records.

    Args:
        sources: the files.
        reading: how to read them if they are conversations and there is a chat template.
        record_settings: what the user's settings say about the keys of records.
        tokenizer: the tokenizer, or the size of one that is trained later.

    Raises:
        InputRefused: the records are not texts or conversations.
        UsageError: the conversations need a tokenizer with a chat template.
    """
    paths = [file.path for file in sources.files]
    kind = kind_of_records(paths, record_settings, reading.skip_bad)
    for form in (PAIR_FORM, LABELLED_FORM):
        if kind is form.kind:
            raise InputRefused(
                f"{sources.name}: its records are {form.kind.value} by {needed_keys(form)}, which `monograph train` "
                f"learns from with {form.setting}; for their texts name a key as data.text_key"
            )
    if kind is not RecordKind.CONVERSATIONS:
        return reading._replace(answer_options=None)
    if isinstance(tokenizer, Tokenizer) and tokenizer.config.template is not None:
        return reading
    if are_completions(paths, record_settings, reading.skip_bad):
        return reading._replace(without_template=True)
    if not isinstance(tokenizer, Tokenizer):
        raise UsageError(f"data.tokenizer = bpe: conversations need {_NEEDS_TEMPLATE}")
    # `ConversationConverter` refuses a tokenizer without a template.
    return reading


def _require_enough(
    name: str, stored: StoredCorpus, train: Rows, held_out: Rows, held_out_share: float
) -> None:
    """Require that there is a text to train on, and that enough text is held out.

    Raises:
        InputRefused: there is too little text for one of the two; the message begins with the source's
            name.
    """
    if not train.tokens:
        reason = stored.notes[0] if stored.notes else "give a file with text"
        raise InputRefused(f"{name}: no text in it: {reason}")
    length = held_out.sequence_length
    if train.conversations or held_out.conversations:
        missing = ""
        if not train.conversations:
            missing = "to train on"
        elif held_out_share and not len(held_out):
            missing = "held out"
        if missing:
            raise InputRefused(
                f"{name}: no conversation is {missing}; give more of them, or set data.held_out = 0"
            )
    elif held_out_share and held_out.tokens < length:
        raise InputRefused(
            f"{name}: {held_out.tokens} held-out tokens, fewer than one row of {length}; give more text, "
            "raise data.held_out, shorten data.sequence_length, or set data.held_out = 0"
        )


def stats_of(files: int, skipped: dict[str, int], train: Rows, held_out: Rows) -> Stats:
    """Return the numbers about a corpus.

    Args:
        files: number of files.
        skipped: {reason: count} of the files and records that were skipped.
        train: the rows to train on.
        held_out: the held-out rows.
    """
    return Stats(
        files=files,
        documents=train.documents + held_out.documents,
        conversations=train.conversations,
        bytes=train.bytes + held_out.bytes,
        tokens=train.tokens,
        trained_share=train.tokens / train.inputs,
        bytes_per_token=train.bytes / train.tokens,
        packed_share=train.filled_share,
        held_out_documents=held_out.documents,
        held_out_bytes=held_out.bytes,
        skipped=skipped,
    )


def _skipped_note(sources: Sources) -> str | None:
    """Return a line for the user about the skipped files; None if only hidden files were skipped."""
    not_hidden = [(path, reason) for path, reason in sources.skipped if reason != "hidden"]
    if not not_hidden or sources.name == "stdlib":
        return None
    path, reason = not_hidden[0]
    more = f" and {len(not_hidden) - 1} more" if len(not_hidden) > 1 else ""
    return f"skipped: {path} ({reason}){more}"


# The codes of a terminal's colours: green, dim, cyan, and the default.
_TRAINED_COLOUR = "\x1b[32m"
_CONTEXT_COLOUR = "\x1b[2m"
_RULE_COLOUR = "\x1b[36m"
_DEFAULT_COLOUR = "\x1b[0m"


def render_row(corpus: Corpus, row_index: int, colour: bool) -> str:
    """Return one training row as text for a terminal.

    A ruled line above each piece names its document. Targets are green. Tokens that are only inputs
    are dim, or in [brackets] without colour: the first token of a piece, and in a conversation all
    tokens outside of the answers. Special tokens appear by name.

    Args:
        corpus: the corpus.
        row_index: the index of the row.
        colour: whether the terminal has colours.

    Raises:
        UsageError: no row has this index.
    """
    rows = corpus.train
    tokenizer = corpus.tokenizer
    if not 0 <= row_index < len(rows):
        raise UsageError(f"row {row_index}: the corpus has rows 0 to {len(rows) - 1}")
    row = rows.row(row_index)
    length = rows.sequence_length
    trained = int((row["targets"] != IGNORE).sum())
    pieces = rows.pieces(row_index)
    filled = sum(piece.length for piece in pieces) / length
    lines = [
        f"row {row_index:,} of {len(rows):,}: {_counted(length, 'position')}, {trained} trained, "
        f"{_counted(len(pieces), 'piece')}, {filled:.1%} filled"
    ]
    column = 0
    for piece in pieces:
        columns = slice(column, column + piece.length)
        inputs = row["tokens"][columns]
        targets = row["targets"][columns]
        end = piece.begin + piece.length
        place = f"tokens {piece.begin:,} to {end:,} of {piece.document_tokens:,}"
        lines.append(_paint(f"── {visible(piece.document)}, {place} ──", _RULE_COLOUR, colour))
        # A piece has one token more than inputs: the target of its last position, which is always trained on.
        ids = [*inputs.tolist(), int(targets[-1])]
        is_target = [False, *(targets != IGNORE).tolist()]
        lines.append(_render_tokens(tokenizer, ids, is_target, colour))
        column += piece.length
    if column < length:
        padding = _counted(length - column, "position")
        lines.append(_paint(f"── padding, {padding} ──", _RULE_COLOUR, colour))
    return "\n".join(lines)


def answer_ends(corpus: Corpus) -> str:
    """Return the last tokens of the training conversations' answers: name, id and count of each."""
    names = {token_id: name for name, token_id in corpus.tokenizer.special.items()}
    counts = corpus.train.answer_ends().items()
    return ", ".join(
        f"{visible(names.get(token_id, '?'))} (id {token_id}) {count:,}x"
        for token_id, count in counts
    )


def _render_tokens(
    tokenizer: Tokenizer, ids: list[int], is_target: list[bool], colour: bool
) -> str:
    """Return tokens as text in which targets look different from tokens that are only inputs."""
    rendered = ""
    begin = 0
    for are_targets, run in groupby(is_target):
        end = begin + len(list(run))
        text = _text(tokenizer, ids[begin:end])
        begin = end
        if colour:
            rendered += _paint(text, _TRAINED_COLOUR if are_targets else _CONTEXT_COLOUR, colour)
        elif are_targets:
            rendered += text
        else:
            rendered += f"[{text}]"
    return rendered


def _counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of ids, with special tokens by name. It is safe to print."""
    names = {token_id: name.encode() for name, token_id in tokenizer.special.items()}
    text = b"".join([names.get(token_id, tokenizer.pieces[token_id]) for token_id in ids])
    return visible(text.decode(errors="replace"))


def _paint(text: str, code: str, colour: bool) -> str:
    """Return a text in the colour of a code, or unchanged if `colour` is False."""
    return f"{code}{text}{_DEFAULT_COLOUR}" if colour else text
