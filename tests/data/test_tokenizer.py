"""Tokenizers: `pytest tests/data/test_tokenizer.py`."""

from __future__ import annotations

import functools
import hashlib
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monograph.data.tokenizer import Tokenizer, parse
from monograph.errors import InputRefused, UsageError

SAMPLE = ["def read(self, size=-1):\n    return self.buffer.read(size)\n", "naïve 数据 <|eos|> 🙂"] * 3


@functools.cache
def tokenizers() -> tuple[Tokenizer, ...]:
    return Tokenizer.bytes(), Tokenizer.train_bpe(SAMPLE, 300), Tokenizer.train_bpe(["a"], 259)


@given(st.text(st.characters(codec="utf-8")))
@example("<|bos|><|eos|><|pad|>")
@example("\0\r\n\t \ufeff\U0010ffff")
def test_any_text_comes_back(text):
    for tokenizer in tokenizers():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)


def test_ids_are_dense_and_specials_have_no_bytes():
    for tokenizer in tokenizers():
        assert tokenizer.vocab_size == len(tokenizer.pieces) == len(tokenizer.token_bytes)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
        assert tokenizer.token_bytes.dtype == np.int32 and (tokenizer.token_bytes == 0).sum() == 3
        assert {piece for piece in tokenizer.pieces if len(piece) == 1} == {bytes([i]) for i in range(256)}
    assert [tokenizer.vocab_size for tokenizer in tokenizers()] == [259, 300, 259]


def test_parts_of_characters_decode_to_replacements():
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode("🙂")
    assert tokenizer.decode(ids[:2]) == "\ufffd" and tokenizer.decode_bytes(ids[:2]) == "🙂".encode()[:2]


def test_training_is_the_same_in_another_process(python):
    script = """
import json, sys
from monograph.data.tokenizer import Tokenizer
print(Tokenizer.train_bpe(json.loads(sys.argv[1]), 300).hash)
"""
    assert python(script, json.dumps(SAMPLE)).strip() == tokenizers()[1].hash


def test_the_hash_is_of_what_decides_ids(tmp_path):
    trained = tokenizers()[1]
    trained.save(tmp_path / "tokenizer.json")
    assert Tokenizer.from_file(tmp_path).hash == trained.hash
    # Nothing but bytes to learn: then the trained one is the tokenizer of bytes.
    assert tokenizers()[0].hash == tokenizers()[2].hash
    assert len({tokenizer.hash for tokenizer in (*tokenizers(), Tokenizer.train_bpe(SAMPLE, 301))}) == 3
    content = json.loads(trained.to_json())
    content["model"]["merges"][3:5] = content["model"]["merges"][4:2:-1]
    assert Tokenizer(content, "x").hash != trained.hash
    assert Tokenizer(json.loads(trained.to_json()), "x", bos="<|eos|>").hash != trained.hash


def test_a_saved_tokenizer_reads_the_same(tmp_path):
    trained = tokenizers()[1]
    trained.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert loaded.encode("def read():\n  🙂") == trained.encode("def read():\n  🙂")
    assert (loaded.bos_id, loaded.eos_id, loaded.pieces) == (0, 1, trained.pieces)


def test_transformers_reads_it_and_begins_with_bos(tmp_path):
    transformers = pytest.importorskip("transformers")
    for tokenizer in tokenizers()[:2]:
        tokenizer.save(tmp_path / "tokenizer.json")
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
        text = "def read(self):\n    naïve 🙂 data"
        assert theirs(text)["input_ids"] == [tokenizer.bos_id, *tokenizer.encode(text)]
        assert theirs.decode(tokenizer.encode(text)) == text


def other_specials(tmp_path, *contents):
    """A tokenizer file whose special tokens have other names."""
    content = json.loads(Tokenizer.bytes().to_json())
    names = dict(zip(("<|bos|>", "<|eos|>", "<|pad|>"), contents, strict=True))
    for token in content["added_tokens"]:
        token["content"] = names[token["content"]]
    content["model"]["vocab"] = {names.get(token, token): index for token, index in content["model"]["vocab"].items()}
    del content["post_processor"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_borders_of_documents_are_found_or_asked_for(tmp_path):
    known = Tokenizer.from_file(other_specials(tmp_path, "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>"))
    assert (known.bos_id, known.eos_id, known.pad_id) == (2, 1, 1)
    only_end = Tokenizer.from_file(other_specials(tmp_path, "<x>", "<|endoftext|>", "<y>"))
    assert (only_end.bos_id, only_end.eos_id) == (1, 1)
    path = other_specials(tmp_path, "<x>", "<y>", "<z>")
    with pytest.raises(InputRefused, match="no special token to begin and end documents with among <x>, <y>, <z>"):
        Tokenizer.from_file(path)
    with pytest.raises(InputRefused, match="has no special token '<w>'"):
        Tokenizer.from_file(path, bos="<w>")
    assert Tokenizer.from_file(path, bos="<z>", eos="<y>").bos_id == 2
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<y>"}, "eos_token": "<z>"}')
    configured = Tokenizer.from_file(tmp_path)
    assert (configured.bos_id, configured.eos_id) == (1, 2)


@pytest.mark.parametrize(
    "asked", ["bpe:", "bpe:x", "bpe:258", "bpe:-5", "bpe:4e3", "bpe:99999999", "bpe:" + "9" * 5000]
)
def test_a_wrong_size_is_refused(asked):
    with pytest.raises(UsageError, match="whole number from 259"):
        parse(asked)


def test_settings_mean_tokenizers(tmp_path):
    assert parse("bpe:4_096") == 4096
    assert parse("bytes").vocab_size == 259
    assert parse(tokenizers()[1]) is tokenizers()[1]
    with pytest.raises(InputRefused, match="gpt2: cannot be read .* give bpe:N, bytes or the path"):
        parse("gpt2")
    with pytest.raises(UsageError, match="bpe:7"):
        Tokenizer.train_bpe(["a"], 7)


def test_a_lone_surrogate_is_refused():
    with pytest.raises(InputRefused, match="surrogate"):
        Tokenizer.bytes().encode("ab\ud800")


def test_the_bytes_tokenizer_never_changes():
    # Trained models depend on these ids.
    assert hashlib.sha256(b"".join(Tokenizer.bytes().pieces)).hexdigest().startswith(PIECES_SHA256)


PIECES_SHA256 = "22e36c70d947b2e2"
