"""Turning documents into shards: `pytest tests/data/test_encoding.py`."""

from __future__ import annotations

import numpy as np
import pytest

from monograph.data import encoding, text
from monograph.data.encoding import encode_documents, train_tokenizer
from monograph.data.progress import Meter
from monograph.data.shards import open_shard, seal
from monograph.data.split import Document
from monograph.data.tokenizer import Tokenizer
from monograph.errors import InputRefused


@pytest.fixture
def documents(texts):
    paths = sorted(texts.rglob("*.txt"))
    return [Document(path.name, path, 0, path.stat().st_size) for path in paths]


def encoded(documents, tokenizer, folder):
    folder.mkdir()
    meter = Meter(None, "tokens", None)
    count = encode_documents(documents, tokenizer, folder / "train", meter)
    paths = [folder / f"train.{name}" for name in ("tokens", "starts", "bytes")]
    arrays = [open_shard(path, tokenizer.hash, seal(path)) for path in paths]
    assert count == len(arrays[0]) and meter.done == sum(document.bytes for document in documents)
    return arrays


def test_a_document_is_bos_ids_eos(documents, trained, tmp_path):
    tokens, starts, sizes = encoded(documents, trained, tmp_path / "a")
    assert (starts[0], starts[-1], len(starts)) == (0, len(tokens), len(documents) + 1)
    for i, document in enumerate(documents):
        ids = trained.encode(document.path.read_text(encoding="utf-8"))
        assert tokens[starts[i] : starts[i + 1]].tolist() == [trained.bos_id, *ids, trained.eos_id]
    assert sizes.tolist() == [document.bytes for document in documents]


def test_parts_and_batches_do_not_show(documents, trained, tmp_path, monkeypatch):
    whole = encoded(documents, trained, tmp_path / "whole")
    monkeypatch.setattr(text, "PART_CHARS", 200)
    monkeypatch.setattr(text, "BLOCK_BYTES", 77)
    monkeypatch.setattr(encoding, "_BATCH_CHARS", 450)
    for one, other in zip(whole, encoded(documents, trained, tmp_path / "parts"), strict=True):
        assert (one == other).all()


def test_part_of_a_file_is_a_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"0123456789")
    tokenizer = Tokenizer.bytes()
    tokens, _, sizes = encoded([Document("a", path, 0, 7), Document("a", path, 7, 10)], tokenizer, tmp_path / "a")
    assert tokenizer.decode_bytes(tokens.tolist()) == b"0123456789" and sizes.tolist() == [7, 3]
    assert tokens[9] == tokenizer.bos_id and tokens[8] == tokenizer.eos_id


def test_large_vocabularies_need_four_bytes(monkeypatch, tmp_path):
    tokenizer = Tokenizer.bytes()
    monkeypatch.setattr(tokenizer, "vocab_size", 70_000)
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    assert encoded([Document("a", path, 0, 3)], tokenizer, tmp_path / "a")[0].dtype == np.uint32


def test_training_reads_the_documents_and_tells_what_fell_short(documents, trained):
    told = []
    tokenizer, note = train_tokenizer(documents, 400, lambda *arguments: told.append(arguments))
    assert tokenizer.hash == trained.hash and note is None
    total = sum(document.bytes for document in documents)
    assert told[0] == ("tokenizer", 0, total) and told[-1] == ("tokenizer", total, total)
    tokenizer, note = train_tokenizer(documents, 50_000, None)
    assert (
        note == f"the tokenizer has {tokenizer.vocab_size:,} entries, not 50,000: the text has no more pairs to merge"
    )


def test_a_large_corpus_is_sampled(documents, monkeypatch):
    monkeypatch.setattr(encoding, "TOKENIZER_SAMPLE_BYTES", 5000)
    read = []
    actual = encoding.read_text
    monkeypatch.setattr(encoding, "read_text", lambda *where: read.append(where) or actual(*where))
    _, note = train_tokenizer(documents, 300, None)
    assert note and "was trained on" in note
    sizes = [stop - start for _, start, stop in read]
    assert 4000 < sum(sizes) < 5200 and len(sizes) > 1
    assert [path for path, *_ in read] != [document.path for document in documents[: len(read)]]


def test_bad_text_stops_training(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"fine\n\xff")
    with pytest.raises(InputRefused, match=r"bad.txt: byte 5 \(line 2\) is not UTF-8"):
        train_tokenizer([Document("bad", path, 0, 6)], 300, None)
