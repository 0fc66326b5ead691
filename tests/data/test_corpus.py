"""From a source to rows: `pytest tests/data/test_corpus.py`."""

from __future__ import annotations

import inspect
import itertools
import time

import pytest

from clocks import least_s
from monograph.data.corpus import corpus
from monograph.data.options import ReadingOptions
from monograph.errors import InputRefused, UsageError


def names(rows):
    return [rows._side.document_name(document) for document in range(rows.documents)]


@pytest.mark.slow
def test_the_standard_library_from_nothing(tmp_path):
    calls = []

    def progress(stage, done, total):
        calls.append((time.monotonic(), stage, done, total))

    begin_s = time.monotonic()
    built = corpus("stdlib", tokenizer="bpe", vocab_size=1024, cache=tmp_path, progress=progress)
    times_s = [begin_s, *(call[0] for call in calls), time.monotonic()]
    # A tenth of the whole on a free machine; this one may be busy.
    assert max(after - before for before, after in itertools.pairwise(times_s)) < max(
        2, (times_s[-1] - begin_s) / 3
    )
    stages = [stage for stage, _ in itertools.groupby(stage for _, stage, _, _ in calls)]
    assert stages == ["sources", "tokenizer", "bytes tokenised", "verify"]
    assert all(done <= total for _, _, done, total in calls)

    stats, modules = built.stats, {name.split("/")[0] for name in names(built.held_out)}
    assert stats.held_out_bytes <= 0.05 * stats.bytes < stats.held_out_bytes * 1.2
    assert not modules & {name.split("/")[0] for name in names(built.train)} and len(modules) > 5
    assert stats.files == built.train.documents + built.held_out.documents > 300
    assert stats.held_out_documents == built.held_out.documents and stats.documents == stats.files
    assert stats.bytes == built.train.bytes + built.held_out.bytes
    assert stats.bytes_per_token > 2.3 and stats.packed_share > 0.98
    assert built.notes == () and built.name == "stdlib" and built.vocab_size == 1024

    again = corpus("stdlib", tokenizer="bpe", vocab_size=1024, cache=tmp_path)
    assert (
        least_s(lambda: corpus("stdlib", tokenizer="bpe", vocab_size=1024, cache=tmp_path), 1) < 1
    )
    assert (again.fingerprint, again.stats) == (built.fingerprint, stats)


def test_the_fingerprint_follows_every_setting(texts, tmp_path):
    variants = [
        {},
        {"tokenizer": "bytes", "vocab_size": None},
        {"sequence_length": 31},
        {"packing": "padded"},
        {"held_out": 0.2},
        {"source": [texts / "001.txt", texts / "sub"]},
    ]
    defaults = {
        "source": texts,
        "tokenizer": "bpe",
        "vocab_size": 300,
        "sequence_length": 32,
        "cache": tmp_path,
    }
    prints = [corpus(**(defaults | variant)).fingerprint for variant in variants]
    assert len(set(prints)) == len(variants)
    assert corpus(**defaults).fingerprint == prints[0]
    assert (
        corpus(**(defaults | {"held_out": 0})).fingerprint
        == corpus(**(defaults | {"held_out": 0.0})).fingerprint
    )


def test_a_tokenizer_file_and_a_tokenizer_are_taken(texts, trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    by_file = corpus(texts, tokenizer=tmp_path / "tokenizer.json", sequence_length=32)
    assert corpus(texts, tokenizer=trained, sequence_length=32).fingerprint == by_file.fingerprint
    assert by_file.vocab_size == trained.vocab_size


def test_one_file_loses_its_tail_and_says_so(texts, tmp_path):
    book = tmp_path / "book.txt"
    book.write_bytes(b"".join(path.read_bytes() for path in sorted(texts.rglob("*.txt"))))
    built = corpus(book, tokenizer="bytes", sequence_length=32)
    assert b"".join([*built.train.texts(), *built.held_out.texts()]) == book.read_bytes()
    assert 0.03 * built.stats.bytes < built.stats.held_out_bytes <= 0.05 * built.stats.bytes
    assert built.notes[0].startswith("held out: the last") and built.stats.files == 1


def test_what_was_passed_over_is_said(texts, tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    built = corpus([texts, f"{tmp_path}/*.png"], tokenizer="bytes", sequence_length=32)
    assert built.notes == (f"skipped: {tmp_path}/image.png (binary)",)
    assert built.stats.skipped == {"binary": 1}
    assert built.name == f"{texts} and 1 more"


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("tiny " * 30, {}, "a.txt: .* held-out tokens, fewer than one row of 256"),
        (
            "word " * 300,
            {},
            "a.txt: .* held-out tokens, fewer than one row of 256; .* or set data.held_out = 0",
        ),
    ],
)
def test_too_little_text_is_refused(tmp_path, text, settings, message):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InputRefused, match=message):
        corpus(tmp_path / "a.txt", tokenizer="bytes", **settings)


def test_text_shorter_than_a_row_is_a_padded_row(tmp_path):
    (tmp_path / "a.txt").write_text("tiny")
    rows = corpus(tmp_path / "a.txt", tokenizer="bytes", held_out=0).train
    assert (len(rows), rows.tokens, rows.bytes) == (1, 5, 4) and rows.filled_share == 5 / 256
    assert (rows.row(0)["targets"] != -100).sum() == 5


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"packing": "dense"}, "data.packing = 'dense': must be 'packed' or 'padded'"),
        ({"sequence_length": 0}, "data.sequence_length = 0"),
        ({"held_out": 0.9}, "data.held_out = 0.9"),
        ({"bad_records": "keep"}, "data.bad_records = 'keep': must be 'refuse' or 'skip'"),
        (
            {"tokenizer": "bpe", "vocab_size": 9},
            "data.vocab_size = 9: expected a whole number from 259",
        ),
    ],
)
def test_a_wrong_setting_is_refused(texts, setting, message):
    with pytest.raises(UsageError, match=message):
        corpus(texts, **setting)


def test_invalid_text_is_refused_by_file_and_byte(texts, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo \xe9\n" + b"x" * 999)
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(InputRefused, match=r"bad.txt: byte 8 \(line 2\) is not UTF-8: 0xe9"):
            corpus([texts, tmp_path / "bad.txt"], tokenizer=tokenizer)


def test_preparing_text_imports_no_torch(python, texts):
    script = """
import sys
from monograph.data.corpus import corpus
from monograph.data.corpus import render_row
render_row(corpus(sys.argv[1], tokenizer="bytes", sequence_length=16), 0, True)
print("torch" in sys.modules)
"""
    assert python(script, str(texts)) == "False\n"


def test_the_options_that_rooms_pass_on_are_the_arguments_of_corpus_with_its_usual_values() -> None:
    arguments = inspect.signature(corpus).parameters
    usual = {
        name: each.default
        for name, each in arguments.items()
        if name not in ("source", "cache", "progress")
    }
    assert vars(ReadingOptions("stdlib")) == {"source": "stdlib", **usual}
