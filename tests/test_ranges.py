# Run: pytest tests/test_ranges.py
"""Whole numbers of numpy are taken wherever Python's are, and booleans nowhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import monograph as mono
from batches import tiny_llama
from monograph.errors import UsageError
from monograph.schedule import warmup_cosine
from monograph.text.tokenizer import Tokenizer


def test_numpy_integers_are_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 200)
    model, found = tiny_llama(vocab_size=Tokenizer.bytes().vocab_size), []
    for of in (int, np.int64):
        data = mono.corpus(
            tmp_path / "a.txt",
            tokenizer="bytes",
            sequence_length=of(32),
            held_out=0,
            cache=tmp_path / "cache",
        )
        with_seed = next(data.batches(tokens_per_update=of(128), seed=of(1)))
        sampling = mono.Sampling(top_k=of(3), seed=of(5))
        (written,) = mono.generate(
            model, Tokenizer.bytes(), ["ab"], sampling, max_tokens=of(4), n=of(1)
        )
        found.append((with_seed["tokens"].tolist(), written.token_ids))
    assert found[0] == found[1]


def test_what_is_no_number_text_or_split_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 200)
    model, tokenizer = tiny_llama(vocab_size=Tokenizer.bytes().vocab_size), Tokenizer.bytes()
    data = mono.corpus(
        tmp_path / "a.txt",
        tokenizer="bytes",
        sequence_length=32,
        held_out=0,
        cache=tmp_path / "cache",
    )
    for prompt in (b"ab", {1: 2}, None, 3):
        with pytest.raises(UsageError, match="expected texts, or sequences of ids, not"):
            mono.generate(model, tokenizer, [prompt])
    with pytest.raises(UsageError, match="sequence_length = True"):
        mono.corpus(tmp_path / "a.txt", tokenizer="bytes", sequence_length=True)
    with pytest.raises(UsageError, match="tokens_per_update = 128.5"):
        data.batches(tokens_per_update=128.5)
    for name in (None, b"bytes"):
        with pytest.raises(
            UsageError, match="expected bpe, bytes, a tokenizer.json or a Tokenizer"
        ):
            mono.corpus(tmp_path / "a.txt", tokenizer=name)

    with pytest.raises(UsageError, match="the rows are a list: give a split of a corpus"):
        mono.evaluate(mono.Resident(model), [1])
    with pytest.raises(UsageError, match="a Llama scores no batch: give an engine"):
        mono.evaluate(model, data.held_out)


def test_no_rate_of_a_warm_up_is_above_the_peak() -> None:
    assert warmup_cosine(1.5, 4)(1) == 1.0
