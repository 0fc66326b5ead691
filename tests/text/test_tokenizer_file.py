"""Hostile and unsupported tokenizer files: `pytest tests/text/test_tokenizer_file.py`."""

from __future__ import annotations

import copy
import json
import re
import resource

import pytest

from monograph.errors import InputRefused
from monograph.text import tokenizer_trial
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import KNOWN_PATTERNS, read, texts

GOOD = json.loads(Tokenizer.train_bpe(["the cat the cat sat"] * 9, 264).to_json())
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def split(pattern, **more):
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    } | more


def changed(*path_and_value):
    *path, last, value = path_and_value
    content = copy.deepcopy(GOOD)
    part = content
    for key in path:
        part = part[key]
    part[last] = value
    return content


def added(**fields):
    content = copy.deepcopy(GOOD)
    content["added_tokens"].append({"id": 264, "content": "<new>", "special": True} | fields)
    return content


REFUSED = {
    "not 'BPE'": changed("model", "type", "Unigram"),
    "has no 'model' object": {"version": "1.0"},
    "has no 'vocab' object": changed("model", "vocab", ["a"]),
    "model.dropout": changed("model", "dropout", 0.5),
    "model.end_of_word_suffix": changed("model", "end_of_word_suffix", "</w>"),
    "id that is not a whole number": changed("model", "vocab", "a", 2**32 - 1),
    "id that is not a whole number from": changed("model", "vocab", "a", True),
    "id 3 is given twice": changed("model", "vocab", '"', 3),
    "not written in the byte-level alphabet": changed("model", "vocab", "▁the", 264),
    "ids are not 0 to 264: 264 is missing and 300 is there": added(id=300),
    "needs a content and an id": added(id=2**32),
    "needs a content and an id from": added(content=5),
    "id 5 is given twice": added(id=5),
    "but model.vocab says": added(content="the"),
    "added_tokens is not a list": changed("added_tokens", {}),
    r"model.merges\[0\]": changed("model", "merges", [["t", "zz"]]),
    r"model.merges\[0\] = 'abc'": changed("model", "merges", ["abc"]),
    "model.merges is not a list": changed("model", "merges", None),
    "normalizer Replace": changed("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 999}),
    "normalizer Lowercase": changed("normalizer", {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}),
    "does not end in ByteLevel": changed("pre_tokenizer", {"type": "Whitespace"}),
    "pre_tokenizer does not end": changed("pre_tokenizer", None),
    "pre_tokenizer step .*Split": changed(
        "pre_tokenizer", {"type": "Sequence", "pretokenizers": [split("(a+)+$"), BYTE_LEVEL]}
    ),
    "pre_tokenizer step .*is not one of the known": changed(
        "pre_tokenizer",
        {"type": "Sequence", "pretokenizers": [split(KNOWN_PATTERNS["qwen2"], behavior="Removed"), BYTE_LEVEL]},
    ),
    "pre_tokenizer step .*ByteLevel": changed(
        "pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, BYTE_LEVEL]}
    ),
    "pre_tokenizer step .*Removed": changed(
        "pre_tokenizer",
        {"type": "Sequence", "pretokenizers": [{**split("x"), "behavior": "Removed"}, BYTE_LEVEL]},
    ),
    "pre_tokenizer step .*add_prefix_space": changed("pre_tokenizer", BYTE_LEVEL | {"add_prefix_space": "yes"}),
    "pre_tokenizer step 'ByteLevel'": changed("pre_tokenizer", "ByteLevel"),
    "post_processor BertProcessing": changed("post_processor", "BertProcessing"),
    "post_processor RobertaProcessing": changed("post_processor", {"type": "RobertaProcessing"}),
    "post_processor TemplateProcessing": changed(
        "post_processor",
        {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {"<|bos|>": {"ids": [10**9]}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_it_is_refused_with_the_reason(message):
    with pytest.raises(InputRefused, match=f"bad.json: .*{message}") as raised:
        Tokenizer(REFUSED[message], "bad.json")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_padding_and_truncation_are_dropped():
    # With 4e9 instead of 1e6 the library aborts the process.
    hostile = GOOD | {
        "padding": {"strategy": {"Fixed": 1_000_000}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}
        | {"pad_token": "x"},
        "truncation": {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    }  # fmt: skip
    tokenizer = Tokenizer(hostile, "x")
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
    assert json.loads(tokenizer.to_json())["padding"] is None


def test_what_is_not_trusted_is_loaded_in_a_limited_process_first(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(GOOD))
    tried = []
    fault = tokenizer_trial.load_fault
    monkeypatch.setattr(
        tokenizer_trial, "load_fault", lambda text: tried.append(text) or fault(text)
    )
    assert (
        Tokenizer.from_file(path).hash
        == Tokenizer.from_file(path, trusted=True).hash
        == Tokenizer(GOOD, "x").hash
    )
    assert len(tried) == 1
    monkeypatch.setattr(tokenizer_trial, "load_fault", lambda text: "it aborts")
    with pytest.raises(
        InputRefused, match="tokenizer.json: the tokenizers library cannot load it: it aborts"
    ):
        Tokenizer.from_file(path)


HARMFUL = {
    "memory": {"padding": {"strategy": {"Fixed": 4 * 10**9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0,
                           "pad_token": "x"}},
    "time": {"normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": "b" * 10**6}},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["memory", pytest.param("time", marks=pytest.mark.slow)])
def test_the_limited_process_ends_and_this_one_goes_on(kind):
    """What the allow-list would not have let through: it ends its process."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert tokenizer_trial.load_fault(json.dumps(GOOD | HARMFUL[kind]))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime - began.ru_utime < tokenizer_trial.CPU_LIMIT_S + 5
    assert tokenizer_trial.load_fault(json.dumps(GOOD)) is None


@pytest.mark.parametrize("kind", ["RobertaProcessing", "BertProcessing"])
def test_special_tokens_that_a_post_processor_puts_around_a_text_change_nothing_else(kind):
    own = {"type": kind, "sep": ["<|eos|>", 1], "cls": ["<|bos|>", 0]}
    own |= {"trim_offsets": True, "add_prefix_space": True} if kind[0] == "R" else {}
    tokenizer = Tokenizer(changed("post_processor", own), "x")
    assert tokenizer.encode("the cat") == Tokenizer(GOOD, "x").encode("the cat")
    assert json.loads(tokenizer.to_json())["post_processor"] == own
    for wrong in (["<|eos|>", 2], ["a", 68], "<|eos|>", None):
        with pytest.raises(InputRefused, match=f"post_processor {kind} is not supported"):
            Tokenizer(changed("post_processor", own | {"sep": wrong}), "x")


@pytest.mark.parametrize("name", KNOWN_PATTERNS)
def test_known_patterns_are_accepted_and_lossless(name):
    steps = {"type": "Sequence", "pretokenizers": [split(KNOWN_PATTERNS[name]), BYTE_LEVEL]}
    tokenizer = Tokenizer(changed("pre_tokenizer", steps), "x")
    text = "Don't  naïve 12345 数据\r\n\n/ é🙂\t"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.hash != Tokenizer(GOOD, "x").hash


def test_added_tokens_that_are_text_stand_for_their_bytes():
    tokenizer = Tokenizer(added(content="  héllo", special=False), "x")
    assert tokenizer.encode("a  héllo")[-1] == 264 and tokenizer.token_bytes[264] == 8
    assert tokenizer.decode(tokenizer.encode("a  héllo b")) == "a  héllo b"


def test_nfc_is_the_one_normalizer_and_composes():
    """Text that is composed already, which is nearly all there is, comes back as it was."""
    plain, nfc = Tokenizer(GOOD, "x"), Tokenizer(changed("normalizer", {"type": "NFC"}), "x")
    for text, back in (
        ("caf\u00e9", "caf\u00e9"),
        ("cafe\u0301", "caf\u00e9"),
        ("\u212b", "\u00c5"),
    ):
        assert nfc.decode(nfc.encode(text)) == back and plain.decode(plain.encode(text)) == text


def test_merges_may_be_written_as_text():
    joined = changed("model", "merges", [" ".join(pair) for pair in GOOD["model"]["merges"]])
    assert Tokenizer(joined, "x").hash == Tokenizer(GOOD, "x").hash


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[]", "expected a JSON object"),
        (b"[" * 200_000, "cannot be read as JSON: nested too deeply"),
    ],
)
def test_what_is_not_json_is_refused(tmp_path, data, message):
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(InputRefused, match=f"{re.escape(str(path))}: {message}"):
        read(path)


def test_a_huge_file_is_refused_unread(tmp_path):
    path = tmp_path / "t.json"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputRefused, match="larger than 128 MiB"):
        read(path)


def test_texts_of_any_tokenizer_that_lists_them():
    plain = Tokenizer.bytes()
    found = plain.texts()
    assert sorted(found) == list(range(plain.vocab_size)) and (
        found[0],
        found[plain.id_of("a")],
    ) == ("<|bos|>", "a")
    assert (
        plain.id_of("<|eos|>") == 1
        and found[plain.id_of(" ")] == "\u0120"
        and plain.id_of("ab") is None
    )
    other = {
        "model": {"type": "Unigram", "vocab": {"x": 3}},
        "added_tokens": [{"id": 4, "content": "<s>"}],
    }
    assert texts(other, "here") == {3: "x", 4: "<s>"}
    vocabularies = [[["a", 0]], {}, {"a": -1}, {"a": True}, None]
    hostile = [{}, {"model": []}, *({"model": {"vocab": each}} for each in vocabularies)]
    hostile.append({"model": {"vocab": {"a": 0}}, "added_tokens": [3]})
    for content in hostile:
        with pytest.raises(InputRefused, match="here: has no list of tokens with their ids"):
            texts(content, "here")
