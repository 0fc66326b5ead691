"""Tokenizers: `pytest tests/text/test_tokenizer.py`."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Engine

from monograph.errors import InputRefused, UsageError
from monograph.text import tokenizer_file
from monograph.text.lossless import LosslessCheck
from monograph.text.tokenizer import Tokenizer, parse_setting
from monograph.text.tokenizer_file import NORMAL_FORMS
from probes import probes
from reference import article

SAMPLE = [
    "def read(self, size=-1):\n    return self.buffer.read(size)\n",
    "naïve 数据 <|eos|> 🙂",
] * 3


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
        assert {piece for piece in tokenizer.pieces if len(piece) == 1} == {
            bytes([i]) for i in range(256)
        }
    assert [tokenizer.vocab_size for tokenizer in tokenizers()] == [259, 300, 259]


def test_parts_of_characters_decode_to_replacements():
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode("🙂")
    assert (
        tokenizer.decode(ids[:2]) == "\ufffd"
        and tokenizer.decode_bytes(ids[:2]) == "🙂".encode()[:2]
    )


def test_training_is_the_same_in_another_process(python):
    script = """
import json, sys
from monograph.text.tokenizer import Tokenizer
print(Tokenizer.train_bpe(json.loads(sys.argv[1]), 300).hash)
"""
    assert python(script, json.dumps(SAMPLE)).strip() == tokenizers()[1].hash


def test_the_hash_is_of_what_decides_ids(tmp_path):
    trained = tokenizers()[1]
    trained.save(tmp_path / "tokenizer.json")
    assert Tokenizer.from_file(tmp_path).hash == trained.hash
    # Nothing but bytes to learn: then the trained one is the tokenizer of bytes.
    assert tokenizers()[0].hash == tokenizers()[2].hash
    assert (
        len({tokenizer.hash for tokenizer in (*tokenizers(), Tokenizer.train_bpe(SAMPLE, 301))})
        == 3
    )
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
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / "tokenizer.json")
        )
        text = "def read(self):\n    naïve 🙂 data"
        assert theirs(text)["input_ids"] == [tokenizer.bos_id, *tokenizer.encode(text)]
        assert theirs.decode(tokenizer.encode(text)) == text


def other_specials(tmp_path, *contents):
    """A tokenizer file whose special tokens have other names."""
    content = json.loads(Tokenizer.bytes().to_json())
    names = dict(zip(("<|bos|>", "<|eos|>", "<|pad|>"), contents, strict=True))
    for token in content["added_tokens"]:
        token["content"] = names[token["content"]]
    content["model"]["vocab"] = {
        names.get(token, token): index for token, index in content["model"]["vocab"].items()
    }
    del content["post_processor"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_borders_of_documents_are_found_or_asked_for(tmp_path):
    known = Tokenizer.from_file(
        other_specials(tmp_path, "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>")
    )
    assert (known.bos_id, known.eos_id, known.pad_id) == (2, 1, 1)
    only_end = Tokenizer.from_file(other_specials(tmp_path, "<x>", "<|endoftext|>", "<y>"))
    assert (only_end.bos_id, only_end.eos_id) == (1, 1)
    path = other_specials(tmp_path, "<x>", "<y>", "<z>")
    with pytest.raises(
        InputRefused, match="no special token to begin and end documents with among <x>, <y>, <z>"
    ):
        Tokenizer.from_file(path)
    with pytest.raises(InputRefused, match="has no special token '<w>'"):
        Tokenizer(json.loads(path.read_text()), str(path), bos="<w>")
    assert Tokenizer(json.loads(path.read_text()), str(path), bos="<z>", eos="<y>").bos_id == 2
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<y>"}, "eos_token": "<z>"}'
    )
    configured = Tokenizer.from_file(tmp_path)
    assert (configured.bos_id, configured.eos_id) == (1, 2)


ALPHABET = [*pre_tokenizers.ByteLevel.alphabet()]
PLAIN = ["The cat sat on the mat; a dog (two?) ran.\n"] * 9


@pytest.mark.parametrize("form", NORMAL_FORMS)
@pytest.mark.parametrize("space_first", [True, False])
@pytest.mark.parametrize("use_regex", [True, False])
@pytest.mark.parametrize("alphabet", [ALPHABET, []], ids=["whole", "learned"])
def test_a_tokenizer_from_elsewhere_says_what_the_library_says(
    form, space_first, use_regex, alphabet
):
    made = {"form": form, "alphabet": alphabet, "use_regex": use_regex, "space_first": space_first}
    theirs = article.tokenizer([*PLAIN, *SAMPLE], **made)
    ours = Tokenizer(json.loads(theirs.to_str()), "x")
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.inserts_space) == (0, 1, 2, space_first)
    written = [
        "the cat",
        " the cat",
        "\nthe",
        "",
        "naïve 数据 🙂",
        "\u2460 \ufb01 caf\u00e9 e\u0301",
    ]
    for text in written[: 6 if alphabet else 5]:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == wanted
        assert ours.decode(wanted) == theirs.decode(wanted)
        assert theirs.token_to_id("[UNK]") not in wanted
    assert ours.decode(ours.encode("the cat", inside=True)) == "the cat"
    # Each stretch between special tokens is a text to the library.
    chat = "[BOT]the cat[EOT][BOT] sat[EOT]"
    assert ours.encode_rendered(chat) == theirs.encode(chat, add_special_tokens=False).ids
    assert ours.decode(ours.encode_rendered("a[EOT]cat", inside=True)[:1]) == "a"
    said = "".join(ours.notes)
    assert ("rewrites text" in said) == (form != "NFC") and ("has no tokens for" in said) == (
        not alphabet
    )


@pytest.mark.parametrize(
    "behavior", ["isolated", "merged_with_previous", "merged_with_next", "contiguous"]
)
@pytest.mark.parametrize("kind", ["a space", "punctuation"])
def test_text_that_is_cut_at_letters_is_read_as_the_library_does(kind, behavior):
    cut = (
        pre_tokenizers.Split(" ", behavior)
        if kind == "a space"
        else pre_tokenizers.Punctuation(behavior)
    )
    theirs = article.tokenizer(
        [*PLAIN, *SAMPLE], form="NFC", alphabet=ALPHABET, use_regex=False, space_first=False
    )
    theirs.pre_tokenizer = pre_tokenizers.Sequence([cut, theirs.pre_tokenizer])
    ours = Tokenizer(json.loads(theirs.to_str()), "x")
    for text in ("the  cat, sat; on (two)", " \n--", "", "naïve... 数据。🙂"):
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == wanted and ours.decode(wanted) == theirs.decode(wanted) == text


# Content that merges make, of byte letters, of one letter, that a normal form changes, that has
# spaces.
CONTENTS = [
    "cat",
    "\u0120cat",
    "\u0120",
    "!",
    "\u00e9",
    "gr\u00f6\u00dfe",
    "\u2122",
    "\u2460x",
    "e\u0301",
    "\u2026",
    "TM",
    "\u6570\u636e",
    "<h>",
    "  ",
    "\n",
]


@st.composite
def added_tokens(draw):
    flags = {name: draw(st.booleans()) for name in ("single_word", "normalized")}
    swallowing = {
        name: draw(st.sampled_from([False, False, False, True])) for name in ("lstrip", "rstrip")
    }
    # As which those that swallow spaces are taken here.
    special = draw(st.booleans()) or any(swallowing.values())
    return AddedToken(draw(st.sampled_from(CONTENTS)), **flags, **swallowing, special=special)


@functools.cache
def learned(form, whole, space_first):
    made = article.tokenizer(
        [*PLAIN, *SAMPLE, "cat!"],
        form=form,
        alphabet=ALPHABET if whole else [],
        use_regex=True,
        space_first=space_first,
    )
    return made.to_str()


@settings(max_examples=40)
@given(
    st.lists(added_tokens(), min_size=1, max_size=4, unique_by=lambda token: token.content),
    st.sampled_from(NORMAL_FORMS),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_with_any_added_tokens_a_text_is_read_as_the_library_does_or_refused_by_name(
    added, form, whole, space_first, seed
):
    theirs = Engine.from_str(learned(form, whole, space_first))
    for token in added:
        (theirs.add_special_tokens if token.special else theirs.add_tokens)([token])
    try:
        ours = Tokenizer(json.loads(theirs.to_str()), "x")
    except InputRefused as error:
        assert "in their normal form" in str(error)
        return
    theirs.encode_special_tokens = True
    texts = [
        *CONTENTS,
        "the cat",
        "concat",
        "TM is",
        "cat!",
        "caf\u00e9s",
        *("the" + each for each in CONTENTS),
    ]
    for text in [*texts, *probes(150, seed)[-30:]]:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        back, normal = theirs.decode(wanted), theirs.normalizer.normalize_str(text)
        try:
            assert ours.encode(text) == wanted, (text, added)
        except InputRefused as error:
            lost = {*wanted} & {*ours.special.values()} or back.removeprefix(
                " "
            ) != normal.removeprefix(" ")
            assert lost or any(token.content in text + normal for token in added), (
                text,
                str(error),
            )
            continue
        assert ours.decode(wanted) == back and not {*wanted} & {*ours.special.values()}, (
            text,
            added,
        )
        # A space before each text is put after an added token, too, of which `notes` tells.
        forms = [theirs.normalizer.normalize_str(each) for each in (back, text)]
        same = {form.replace(" ", "") if space_first else form for form in forms}
        assert len(same) == 1, (text, added)
    for token in (token for token in added if not token.special):
        ids = [theirs.token_to_id("a"), theirs.token_to_id(token.content)]
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("token", "text", "said"),
    [
        (
            AddedToken("cat", special=True),
            "cat; the cat",
            "would become the special token 'cat', which is not text",
        ),
        (AddedToken("!", special=True), "cat!", "'!' in 'cat!' would become the special token '!'"),
        (
            AddedToken("the", rstrip=True),
            "the end",
            "'the' in 'the end' would become the special token 'the'",
        ),
        (
            AddedToken("\u0120cat"),
            "the \u0120cat",
            "'\u0120cat' would come back as ' cat': the letters of an added token stand for",
        ),
        (
            AddedToken("\u00e9"),
            "caf\u00e9",
            "'\u00e9' would come back as '\ufffd': the letters of an added token",
        ),
    ],
)
def test_text_that_an_added_token_would_change_is_refused_and_named(token, text, said):
    theirs = article.tokenizer(
        ["the cat;cat;cat\n"] * 9, form="NFC", alphabet=ALPHABET, space_first=False, use_regex=True
    )
    (theirs.add_special_tokens if token.special else theirs.add_tokens)([token])
    ours = Tokenizer(json.loads(theirs.to_str()), "x")
    for inside in (False, True):
        with pytest.raises(InputRefused, match=re.escape(said)):
            ours.encode(text, inside=inside)


def test_runs_of_spaces_that_are_added_tokens_cost_no_second_look(monkeypatch):
    theirs = article.tokenizer(
        SAMPLE, form="NFC", alphabet=ALPHABET, space_first=False, use_regex=True
    )
    theirs.add_tokens([AddedToken(" " * count, normalized=False) for count in range(2, 9)])
    ours = Tokenizer(json.loads(theirs.to_str()), "x")
    monkeypatch.setattr(LosslessCheck, "_difference", None)
    text = "    def read(self):\n        pass"
    assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize(
    "decoder", [decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), None]
)
def test_a_decoder_that_is_not_the_one_of_bytes_is_refused(decoder):
    content = json.loads(tokenizers()[1].to_json())
    content["decoder"] = decoder and json.loads(decoder.__getstate__())
    with pytest.raises(
        InputRefused, match=f"decoder {'ByteLevel, Strip' if decoder else None} is not supported"
    ):
        Tokenizer(content, "x")


@pytest.mark.parametrize("unknown", ["[UNK]", None])
def test_text_that_the_vocabulary_cannot_write_is_refused_and_named(unknown):
    tokenizer = Tokenizer(json.loads(article.tokenizer(PLAIN, unknown=unknown).to_str()), "x")
    becomes = r"become \[UNK\]" if unknown else "be left out"
    with pytest.raises(
        InputRefused, match=rf"'é' in 'the caté' would {becomes}: the tokenizer has no token"
    ):
        tokenizer.encode("the caté")
    assert (
        "has no tokens for '!', '\"', '#' and the like: text with such characters is refused"
        in tokenizer.notes[-1]
    )
    assert not tokenizer.describe_change(PLAIN[0]) and tokenizer.describe_change("ok 🙂")


def test_what_no_text_can_have_is_not_missed():
    """The 13 bytes that UTF-8 never uses have no token where an alphabet was learned from text;
    nothing is lost.
    """
    unused = {*tokenizer_file.NEVER_IN_TEXT}
    letters = [
        letter for letter, byte in tokenizer_file.byte_alphabet().items() if byte not in unused
    ]
    tokenizer = Tokenizer(
        json.loads(
            article.tokenizer(PLAIN, form="NFC", alphabet=letters, space_first=False).to_str()
        ),
        "x",
    )
    assert len(unused) == 13 and not tokenizer.notes
    assert len({piece for piece in tokenizer.pieces if len(piece) == 1}) == 243
    for first in range(0, 0x110000, 4096):
        text = " " + "".join(
            chr(code) for code in range(first, first + 4096) if not 0xD800 <= code < 0xE000
        )
        text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "size", [0, 258, -5, 4e3, "4096", 99_999_999, pytest.param(-(10**5000), id="of 5,000 digits")]
)
def test_a_wrong_size_is_refused(size):
    with pytest.raises(UsageError, match="data.vocab_size.*: expected a whole number from 259"):
        parse_setting("bpe", size)


def test_a_size_is_of_a_tokenizer_that_is_trained():
    for asked in ("bytes", tokenizers()[1], "tokenizer.json"):
        with pytest.raises(
            UsageError, match="data.vocab_size is of a tokenizer that is trained here"
        ):
            parse_setting(asked, 300)


def test_settings_mean_tokenizers(tmp_path):
    assert parse_setting("bpe") == 4096 and parse_setting("bpe", 300) == 300
    assert parse_setting("bytes").vocab_size == 259
    assert parse_setting(tokenizers()[1]) is tokenizers()[1]
    with pytest.raises(
        InputRefused, match="gpt2: cannot be read: .*; give bpe, bytes or the tokenizer.json"
    ):
        parse_setting("gpt2")
    with pytest.raises(UsageError, match="vocab_size = 7: must be from 259"):
        Tokenizer.train_bpe(["a"], 7)


def test_a_lone_surrogate_is_refused():
    with pytest.raises(InputRefused, match="surrogate"):
        Tokenizer.bytes().encode("ab\ud800")


def test_the_bytes_tokenizer_never_changes():
    # Trained models depend on these ids.
    assert hashlib.sha256(b"".join(Tokenizer.bytes().pieces)).hexdigest().startswith(PIECES_SHA256)


PIECES_SHA256 = "22e36c70d947b2e2"
