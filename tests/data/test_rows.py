"""Rows of one side of the split: `pytest tests/data/test_rows.py`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from monograph.data.piece_lengths import PieceLengths
from monograph.data.rows import IGNORE


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("side", ["train", "held_out"])
@pytest.mark.parametrize("length", [1, 7, 32, 5000])
def test_every_token_but_bos_is_a_target_once(small, packing, side, length):
    corpus = small(packing=packing, sequence_length=length, held_out=0.45)
    rows = getattr(corpus, side)
    window = rows.window(np.arange(len(rows)))
    targets = Counter(window["targets"][window["targets"] != IGNORE].tolist())
    expected = Counter(rows._side.tokens.tolist())
    del expected[corpus.tokenizer.bos_id]
    assert targets == expected and sum(targets.values()) == rows.tokens
    pieces = [piece for i in range(len(rows)) for piece in rows.pieces(i)]
    covered = Counter(
        (piece.document, begin)
        for piece in pieces
        for begin in range(piece.begin, piece.begin + piece.length)
    )
    assert max(covered.values()) == 1 and len(covered) == rows.tokens
    assert rows.filled_share == pytest.approx(rows.tokens / (len(rows) * length))


def test_segments_and_positions_describe_the_pieces(small):
    corpus = small(sequence_length=64)
    rows, tokenizer = corpus.train, corpus.tokenizer
    several = 0
    for index in range(len(rows)):
        row, pieces = rows.row(index), rows.pieces(index)
        several += len(pieces) > 1
        column = 0
        for number, piece in enumerate(pieces, 1):
            place = slice(column, column + piece.length)
            assert (row["segments"][place] == number).all()
            assert row["positions"][place].tolist() == list(range(piece.length))
            assert (row["tokens"][place][1:] == row["targets"][place][:-1]).all()
            assert (row["tokens"][column] == tokenizer.bos_id) == (piece.begin == 0)
            assert (row["targets"][place][-1] == tokenizer.eos_id) == (
                piece.begin + piece.length == piece.document_tokens - 1
            )
            column += piece.length
        assert (row["segments"][column:] == 0).all() and (row["positions"][column:] == 0).all()
        assert (row["targets"][column:] == IGNORE).all() and (
            row["tokens"][column:] == tokenizer.pad_id
        ).all()
        assert not (row["tokens"][:column] == tokenizer.pad_id).any()
    assert several > 3


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_the_lengths_of_pieces_are_those_that_an_epoch_visits(small, packing, length):
    rows = small(packing=packing, sequence_length=length).train
    lengths = [piece.length for row in range(len(rows)) for piece in rows.pieces(row)]
    assert rows.piece_lengths == PieceLengths.of_pieces(np.array(lengths))


def pieces_of(rows):
    """The (inputs, targets) of every piece, in no order."""
    found = []
    for index in range(len(rows)):
        row, column = rows.row(index), 0
        for piece in rows.pieces(index):
            place = slice(column, column + piece.length)
            found.append((tuple(row["tokens"][place]), tuple(row["targets"][place])))
            column += piece.length
    return Counter(found)


@pytest.mark.parametrize("side", ["train", "held_out"])
def test_padded_rows_have_the_same_pieces_as_packed_ones(small, side):
    packed, padded = (getattr(small(packing=packing), side) for packing in ("packed", "padded"))
    assert pieces_of(packed) == pieces_of(padded)
    assert len(packed) < len(padded) == pieces_of(padded).total()
    assert set(padded.row(0)) == {"tokens", "targets"}
    assert set(packed.row(0)) == {"tokens", "targets", "segments", "positions"}


def test_windows_are_rows(small):
    rows = small().train
    indices = np.array([5, 0, 5, len(rows) - 1])
    window = rows.window(indices)
    for place, index in enumerate(indices):
        for key, values in rows.row(int(index)).items():
            assert values.dtype == np.int64 and (window[key][place] == values).all()


def test_the_text_comes_back(small, texts):
    corpus = small(held_out=0.3)
    files = Counter(path.read_bytes() for path in texts.rglob("*.txt"))
    sides = [list(corpus.train.texts()), list(corpus.held_out.texts())]
    assert Counter(sides[0] + sides[1]) == files
    for rows, side in zip((corpus.train, corpus.held_out), sides, strict=True):
        assert rows.bytes == sum(map(len, side)) and rows.documents == len(side)
        # Each target's bytes once: bits per byte divides by what the targets stand for.
        window = rows.window(np.arange(len(rows)))
        assert (
            corpus.tokenizer.token_bytes[window["targets"][window["targets"] != IGNORE]].sum()
            == rows.bytes
        )


def test_nothing_held_out_is_no_rows(small):
    held = small(held_out=0).held_out
    assert (len(held), held.tokens, held.bytes, held.documents, held.filled_share) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert list(held.texts()) == [] and list(held.batches_in_order(4)) == []
