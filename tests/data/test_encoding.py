"""Turning documents into shards: `pytest tests/data/test_encoding.py`."""

from __future__ import annotations

import gc
import gzip
import json
import random
import re
import threading
import time
import unicodedata

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from monograph.data import encoding, reading
from monograph.data.documents import Documents, ReadingPlan
from monograph.data.encoding import encode_documents, train_tokenizer
from monograph.data.progress import Meter
from monograph.data.shards import INDEX_DTYPE, open_shard, seal, token_dtype
from monograph.data.sources import find_sources
from monograph.errors import InputRefused
from monograph.text.tokenizer import Tokenizer
from reference import article

READING = ReadingPlan("text", skip_bad=False)


def documents_of(source, tmp_path, held_out=0.0):
    return Documents(find_sources(source, tmp_path).files, READING, held_out)


@pytest.fixture
def documents(texts, tmp_path):
    return documents_of(texts, tmp_path)


def encoded(documents, tokenizer, folder):
    """(tokens, starts, records) of both sides, and their writers."""
    folder.mkdir()
    meter = Meter(None, "tokens", None)
    sides = encode_documents(documents, documents.files, tokenizer, folder, meter).writers
    found = {}
    for name, side in sides.items():
        paths = [folder / f"{name}.{suffix}" for suffix in ("tokens", "starts", "records")]
        kinds = token_dtype(tokenizer.vocab_size), INDEX_DTYPE, INDEX_DTYPE
        found[name] = [
            open_shard(path, kind, seal(path)) for path, kind in zip(paths, kinds, strict=True)
        ]
        assert side.tokens.count == len(found[name][0]) and sum(side.document_counts) == len(
            found[name][2]
        )
    assert meter.done == sum(side.bytes for side in sides.values()) == documents.text_bytes
    return found, sides


def test_a_document_is_bos_ids_eos(documents, texts, trained, tmp_path):
    found, sides = encoded(documents, trained, tmp_path / "a")
    paths = sorted(texts.rglob("*.txt"), key=lambda path: path.relative_to(texts).as_posix())
    tokens, starts, records = found["train"]
    assert (starts[0], starts[-1], len(starts)) == (
        0,
        len(tokens),
        len(paths) + 1,
    ) and not records.any()
    for i, path in enumerate(paths):
        ids = trained.encode(path.read_text(encoding="utf-8"))
        assert tokens[starts[i] : starts[i + 1]].tolist() == [trained.bos_id, *ids, trained.eos_id]
    assert sides["train"].bytes == sum(path.stat().st_size for path in paths)
    assert sides["train"].document_counts[: len(paths)] == [1] * len(paths)
    assert found["held_out"][1].tolist() == [0]


def test_parts_and_batches_do_not_show(texts, trained, tmp_path, monkeypatch):
    documents = documents_of(texts, tmp_path, held_out=0.3)
    whole = encoded(documents, trained, tmp_path / "whole")
    monkeypatch.setattr(reading, "PART_CHARS", 200)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 77)
    monkeypatch.setattr(encoding, "_BATCH_CHARS", 450)
    parts = encoded(documents, trained, tmp_path / "parts")
    for side in ("train", "held_out"):
        for one, other in zip(whole[0][side], parts[0][side], strict=True):
            assert (one == other).all()


def test_who_is_faster_does_not_show_in_the_bytes(texts, trained, tmp_path, monkeypatch):
    documents = documents_of(texts, tmp_path, held_out=0.3)
    encoded(documents, trained, tmp_path / "undisturbed")
    monkeypatch.setattr(encoding, "_BATCH_CHARS", 900)
    encode_batch, delays, begun, told = trained.encode_batch, random.Random(0), [], []

    def delayed(texts, inside):
        begun.append(len(texts))
        time.sleep(delays.choice([0.0, 0.0, 0.02]))
        return encode_batch(texts, inside)

    monkeypatch.setattr(trained, "encode_batch", delayed)
    (tmp_path / "delayed").mkdir()
    meter = Meter(
        lambda *arguments: told.append((threading.current_thread(), arguments[1])), "tokens", None
    )
    encode_documents(documents, documents.files, trained, tmp_path / "delayed", meter)
    for path in sorted((tmp_path / "undisturbed").iterdir()):
        assert (tmp_path / "delayed" / path.name).read_bytes() == path.read_bytes()
    assert len(begun) > 20 and meter.done == documents.text_bytes
    # A caller's function is called in the caller's thread, and counts what is written.
    assert {thread for thread, _ in told} == {threading.current_thread()}
    assert [done for _, done in told] == sorted(done for _, done in told)


@pytest.fixture
def _threads_of_earlier_tests_have_ended():
    """An engine that nothing refers to ends its thread when it is collected.

    Only tests that count threads ask for this: a collection takes most of a second in a process that
    has run many tests.
    """
    gc.collect()


def own_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("monograph")]


@pytest.mark.usefixtures("_threads_of_earlier_tests_have_ended")
@pytest.mark.parametrize("where", ["reading", "tokenizer", "progress"])
def test_an_error_or_interrupt_anywhere_comes_out_and_leaves_no_thread(
    texts, trained, tmp_path, monkeypatch, where
):
    monkeypatch.setattr(encoding, "_BATCH_CHARS", 900)
    (tmp_path / "out").mkdir()
    error = {"progress": KeyboardInterrupt}.get(where, InputRefused)("as it was raised")
    calls = []

    def failing(value):
        calls.append(value)
        if len(calls) > 5:
            raise error
        return value

    documents, meter = documents_of(texts, tmp_path, held_out=0.3), Meter(None, "tokens", None)
    if where == "tokenizer":
        encode_batch = trained.encode_batch
        monkeypatch.setattr(
            trained, "encode_batch", lambda texts, inside: failing(encode_batch(texts, inside))
        )
    elif where == "progress":
        monkeypatch.setattr(meter, "add", failing)
    source = map(failing, documents) if where == "reading" else documents
    with pytest.raises(type(error), match="as it was raised"):
        encode_documents(source, documents.files, trained, tmp_path / "out", meter)
    assert own_threads() == []
    # Read ahead, encoded ahead, and no further: an error stops the rest.
    assert len(calls) <= 6 + 2 * encoding._ENCODERS


@pytest.mark.usefixtures("_threads_of_earlier_tests_have_ended")
def test_an_interrupt_ends_the_training_before_anything_is_merged(documents, monkeypatch):
    monkeypatch.setattr(encoding, "_TRAINING_PARTS", 1)
    merged, train_bpe = [], Tokenizer.train_bpe

    def slow(texts, vocab_size):
        tokenizer = train_bpe((time.sleep(0.05) or reading for reading in texts), vocab_size)
        merged.append(tokenizer)
        return tokenizer

    def interrupt(stage, done, total):
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "train_bpe", slow)
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(documents, 300, interrupt)
    assert merged == [] and own_threads() == []


def test_both_parts_of_a_file_are_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456\n89")
    tokenizer = Tokenizer.bytes()
    found, sides = encoded(
        documents_of(tmp_path / "a.txt", tmp_path, 0.4), tokenizer, tmp_path / "a"
    )
    for side, expected in (("train", b"0123456\n"), ("held_out", b"89")):
        tokens = found[side][0].tolist()
        assert tokenizer.decode_bytes(tokens) == expected and sides[side].bytes == len(expected)
        assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)


@pytest.mark.parametrize("space_first", [True, False])
def test_a_space_is_put_before_a_document_and_before_no_other_part(
    tmp_path, monkeypatch, space_first
):
    words = "word\nand word \u2460 word " * 60
    (tmp_path / "a.txt").write_text(words)
    (tmp_path / "b.txt").write_text(" begun" + words)
    made = {
        "alphabet": pre_tokenizers.ByteLevel.alphabet(),
        "use_regex": True,
        "space_first": space_first,
    }
    theirs = article.tokenizer([words], **made)
    tokenizer = Tokenizer(json.loads(theirs.to_str()), "x")
    monkeypatch.setattr(reading, "PART_CHARS", 100)
    folder = tmp_path / "out"
    folder.mkdir()
    documents = documents_of(f"{tmp_path}/*.txt", tmp_path)
    meter = Meter(None, "tokens", None)
    sides = encode_documents(documents, documents.files, tokenizer, folder, meter).writers
    kind = token_dtype(tokenizer.vocab_size)
    tokens = open_shard(folder / "train.tokens", kind, seal(folder / "train.tokens")).tolist()
    wanted = [
        [0, *theirs.encode(each, add_special_tokens=False).ids, 1]
        for each in (words, " begun" + words)
    ]
    assert tokens == [*wanted[0], *wanted[1]]
    read = [" " * space_first + words, " begun" + words]
    assert sides["train"].bytes == len(unicodedata.normalize("NFKC", "".join(read)).encode())


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.txt", "the cat\n" * 9000 + "the caf\u00e9\n" + "cat\n" * 9, "a.txt:9001"),
        ("a.txt", "the cat\u2028\r\nthe caf\u00e9", "a.txt:2"),
        ("a.txt.gz", "the cat\n" * 3 + "the caf\u00e9", "a.txt.gz:4"),
        ("a.jsonl", '{"text": "the cat"}\n{"text": "the caf\\u00e9"}\n', "a.jsonl:2"),
    ],
)
@pytest.mark.parametrize("unknown", ["[UNK]", None])
@pytest.mark.parametrize("held_out", [0.0, 0.3])
def test_text_that_would_be_lost_is_refused_by_file_and_line(
    tmp_path, name, content, place, unknown, held_out
):
    (tmp_path / name).write_bytes(
        gzip.compress(content.encode()) if name.endswith("gz") else content.encode()
    )
    learnt = "".join(
        dict.fromkeys(content.replace("\u00e9", "e").splitlines(keepends=True))
    )  # of 9,000 lines, each once
    tokenizer = Tokenizer(json.loads(article.tokenizer([learnt], unknown=unknown).to_str()), "x")
    documents = documents_of(tmp_path / name, tmp_path, held_out if name == "a.txt" else 0)
    (tmp_path / "out").mkdir()
    with pytest.raises(
        InputRefused, match=rf"{re.escape(place)}: '\u00e9' in '.*caf\u00e9.*' would be"
    ):
        encode_documents(
            documents, documents.files, tokenizer, tmp_path / "out", Meter(None, "tokens", None)
        )


def test_large_vocabularies_need_four_bytes(monkeypatch, tmp_path):
    tokenizer = Tokenizer.bytes()
    monkeypatch.setattr(tokenizer, "vocab_size", 70_000)
    (tmp_path / "a.txt").write_bytes(b"abc")
    found, _ = encoded(documents_of(tmp_path / "a.txt", tmp_path), tokenizer, tmp_path / "a")
    assert found["train"][0].dtype == np.uint32


def test_training_reads_the_documents_and_tells_what_fell_short(documents, trained):
    told = []
    tokenizer, notes = train_tokenizer(documents, 400, lambda *arguments: told.append(arguments))
    assert tokenizer.hash == trained.hash and notes == ()
    total = documents.text_bytes
    assert told[0] == ("tokenizer", 0, total) and told[-1] == ("tokenizer", total, total)
    tokenizer, notes = train_tokenizer(documents, 50_000, None)
    reason = "the text has no more pairs to merge"
    assert notes == (f"the tokenizer has {tokenizer.vocab_size:,} entries, not 50,000: {reason}",)


def test_a_large_corpus_is_sampled(documents, texts, tmp_path, monkeypatch):
    lines = [
        json.dumps({"text": path.read_text(encoding="utf-8")})
        for path in sorted(texts.rglob("*.txt"))
    ]
    (tmp_path / "many.jsonl").write_text("\n".join(lines[:20]))
    records = documents_of(tmp_path / "many.jsonl", tmp_path, held_out=0.2)
    held = [
        "".join(part for part, _ in document.parts) for document in records if document.held_out
    ]
    for source in (documents, records):
        assert list(source.sample(10**9))
        chosen = "".join(source.sample(source.train_bytes // 3))
        # Records are taken or left whole, by their hash: 20 of them vary more than files, of which
        # the last is cut.
        assert 0.1 * source.train_bytes < len(chosen.encode()) < 0.6 * source.train_bytes
    assert held and not any(reading in "".join(records.sample(10**9)) for reading in held)
    monkeypatch.setattr(encoding, "TOKENIZER_SAMPLE_BYTES", 5000)
    _, notes = train_tokenizer(documents, 300, None)
    assert "was trained on" in notes[0]
    assert 4000 < len("".join(documents.sample(5000)).encode()) < 5200


def test_records_without_text_teach_a_tokenizer_the_bytes_alone(tmp_path):
    """What is told of them is that there is no text, once the corpus is made."""
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    tokenizer, notes = train_tokenizer(documents_of(tmp_path / "blank.jsonl", tmp_path), 300, None)
    assert tokenizer.vocab_size < 300 and notes == ()


def test_bad_text_stops_training(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine\n\xff")
    with pytest.raises(InputRefused, match=r"bad.txt: byte 5 \(line 2\) is not UTF-8"):
        train_tokenizer(documents_of(tmp_path / "bad.txt", tmp_path), 300, None)
