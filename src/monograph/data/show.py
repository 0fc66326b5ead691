"""Shows one row as text: which documents it is made of, and which of its tokens are trained on."""

from __future__ import annotations

from itertools import groupby

from monograph.data.corpus import Corpus
from monograph.data.rows import IGNORE
from monograph.errors import UsageError
from monograph.terminal import visible
from monograph.text.tokenizer import Tokenizer

_TRAINED, _CONTEXT, _BORDER, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[36m", "\x1b[0m"


def render_row(corpus: Corpus, row_index: int, colour: bool) -> str:
    """One training row as text for a terminal.

    A ruled line names each piece's document. What is a target is green; what is only an input is dim, or in [brackets]
    without colour: a piece's first token (its own prediction, if it has one, belongs to the piece before), and in a
    conversation all but the answers. Special tokens show their name.

    Raises:
        UsageError: no row has this index.
    """
    rows, tokenizer = corpus.train, corpus.tokenizer
    if not 0 <= row_index < len(rows):
        raise UsageError(f"row {row_index}: the corpus has rows 0 to {len(rows) - 1}")
    row, length = rows.row(row_index), rows.sequence_length
    trained, pieces = int((row["targets"] != IGNORE).sum()), rows.pieces(row_index)
    filled = sum(piece.length for piece in pieces) / length
    head = f"row {row_index:,} of {len(rows):,}: {_counted(length, 'position')}, {trained} trained"
    lines, column = [f"{head}, {_counted(len(pieces), 'piece')}, {filled:.1%} filled"], 0
    for piece in pieces:
        place = slice(column, column + piece.length)
        inputs, targets = row["tokens"][place], row["targets"][place]
        part = f"tokens {piece.begin:,} to {piece.begin + piece.length:,} of {piece.tokens:,}"
        lines.append(_painted(f"── {visible(piece.document)}, {part} ──", _BORDER, colour))
        # The last target is no input of the row, and never without training.
        ids = [*inputs.tolist(), int(targets[-1])]
        lines.append(_runs(tokenizer, ids, [False, *(targets != IGNORE).tolist()], colour))
        column += piece.length
    if column < length:
        lines.append(_painted(f"── padding, {_counted(length - column, 'position')} ──", _BORDER, colour))
    return "\n".join(lines)


def answer_ends(corpus: Corpus) -> str:
    """What the answers of the training conversations end with, by name, id and how often."""
    names = {index: name for name, index in corpus.tokenizer.special.items()}
    ends = corpus.train.answer_ends().items()
    return ", ".join(f"{visible(names.get(index, '?'))} (id {index}) {count:,}x" for index, count in ends)


def _runs(tokenizer: Tokenizer, ids: list[int], trained: list[bool], colour: bool) -> str:
    shown, begin = "", 0
    for is_target, run in groupby(trained):
        end = begin + len(list(run))
        text, begin = _text(tokenizer, ids[begin:end]), end
        code = _TRAINED if is_target else _CONTEXT
        shown += _painted(text, code, True) if colour else text if is_target else f"[{text}]"
    return shown


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = {index: name.encode() for name, index in tokenizer.special.items()}
    return visible(
        b"".join([names.get(index, tokenizer.pieces[index]) for index in ids]).decode("utf-8", errors="replace")
    )


def _painted(text: str, code: str, colour: bool) -> str:
    return f"{code}{text}{_PLAIN}" if colour else text
