"""Showing a row: `pytest tests/data/test_show.py`."""

from __future__ import annotations

import re

import pytest

from monograph.data.corpus import corpus, render_row
from monograph.errors import UsageError


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    for name, text in {
        "a": "first text",
        "b": "zweiter ü\x1b[31m",
        "c": "third " * 20,
        "d": "f" * 30,
    }.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return corpus(folder, tokenizer="bytes", sequence_length=32, held_out=0, cache=folder / "cache")


def test_every_piece_is_named_and_every_token_shown(shown):
    text = [render_row(shown, index, colour=False) for index in range(len(shown.train))]
    whole = "\n".join(text)
    assert "── " in whole and "[<|bos|>]first text<|eos|>" in whole
    assert "tokens 0 to 11 of 12 ──" in whole
    assert re.search(
        r"\[[third ]\][third ]{32}\n", whole
    )  # a piece from the middle begins with the last one's last token
    for index, row in enumerate(text):
        trained = int((shown.train.row(index)["targets"] != -100).sum())
        padding = f"── padding, {32 - trained} position{'s' if trained < 31 else ''} ──"
        assert f"row {index} of {len(text)}: 32 positions, {trained} trained" in row
        assert (padding in row) == (trained < 32)


def test_one_of_anything_is_singular(tmp_path):
    (tmp_path / "a.txt").write_text("first text")
    one = corpus(
        tmp_path / "a.txt",
        tokenizer="bytes",
        sequence_length=1,
        held_out=0,
        cache=tmp_path / "cache",
    )
    assert ": 1 position, 1 trained, 1 piece, 100.0% filled" in render_row(one, 0, colour=False)


def test_colour_marks_what_is_trained(shown):
    coloured = "\n".join(render_row(shown, index, colour=True) for index in range(len(shown.train)))
    assert "\x1b[2m<|bos|>\x1b[0m\x1b[32mfirst text<|eos|>\x1b[0m" in coloured
    plain = re.sub(r"\x1b\[\d+m", "", coloured)
    assert plain == re.sub(
        r"\[(<\|bos\|>|.)\]",
        r"\1",
        "\n".join(render_row(shown, i, False) for i in range(len(shown.train))),
    )


def test_text_cannot_command_the_terminal(shown):
    everything = "".join(
        render_row(shown, index, colour=False) for index in range(len(shown.train))
    )
    assert "\x1b" not in everything and r"zweiter ü\x1b[31m" in everything


def test_a_row_that_is_not_there(shown):
    with pytest.raises(
        UsageError, match=f"row 99: the corpus has rows 0 to {len(shown.train) - 1}"
    ):
        render_row(shown, 99, colour=False)
