"""Run: pytest tests/text/test_sentence_pieces.py"""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from monograph.decode.transcript import Transcript
from monograph.errors import InputRefused
from monograph.text.tokenizer import Tokenizer
from probes import probes
from reference import pieces

FIRST_SPACE_IS_LOST = {"mistral", "always", "split"}


@functools.cache
def both(shape: str) -> tuple[Engine, Tokenizer]:
    theirs = pieces.engine(shape)
    return theirs, Tokenizer(json.loads(theirs.to_str()), shape, trusted=False)


@pytest.mark.parametrize("shape", pieces.SHAPES)
def test_ids_and_text_are_the_librarys(shape: str) -> None:
    """Of every text; where theirs loses a space at the beginning, that is said."""
    theirs, ours = both(shape)
    controls = {*ours.special.values()}
    for text in probes(600):
        found = theirs.encode(text, add_special_tokens=False).ids
        back = theirs.decode(found)
        assert ours.encode(text) == found and ours.decode(found) == back and not controls & {*found}
        own = text[1:] if shape in FIRST_SPACE_IS_LOST and text.startswith(" ") else text
        assert back == own
        ids = np.array([ours.bos_id, *found, ours.eos_id])
        assert ours.bytes_of(ids[1:], ids[:-1]) == len(back.encode())
        transcript = Transcript(ours, (), [ours.bos_id])
        streamed = "".join(transcript.add([each]) for each in found) + transcript.finish()
        assert streamed == transcript.text == back
        assert (
            ours.decode_bytes(ours.encode("x"))
            + b"".join(ours.pieces[each] for each in ours.encode(text, inside=True))
            == ("x" + text).encode()
        )
    assert any("leaves out one space" in note for note in ours.notes) == (
        shape in FIRST_SPACE_IS_LOST
    )


@pytest.mark.parametrize("shape", pieces.SHAPES)
def test_a_chat_has_the_librarys_ids(shape: str) -> None:
    theirs, ours = both(shape)
    begin, end = (
        next(name for name, each in ours.special.items() if each == i)
        for i in (ours.bos_id, ours.eos_id)
    )
    chats = [
        f"{begin}[INST] the cat [/INST] sat{end}",
        f"{begin}the{end}{begin} the",
        f"a{end}\n<|user|>\nthe{end}",
        "",
    ]
    chats += ["<|user|>\n the cat<|end|>\n<|assistant|>\nThe end<|end|>"]
    for chat in chats:
        assert ours.encode_rendered(chat) == theirs.encode(chat, add_special_tokens=False).ids
    ids = ours.encode_rendered(f"{begin}the cat{end}")
    transcript = Transcript(ours, (), ids[:-1])  # goes on with a text: what comes is all of it
    (sat,) = [ours.encode(" sat", inside=True)]
    assert transcript.add(sat) + transcript.finish() == " sat"
    opened = Transcript(ours, (), ours.encode_rendered("hi<|assistant|>\n"))
    assert opened.add(sat) + opened.finish() == ("sat" if shape == "phi3" else " sat")


@pytest.mark.parametrize("shape", pieces.SHAPES)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_with_added_tokens_a_text_is_read_as_the_library_does_or_refused_by_name(
    shape, normalized, special
) -> None:
    theirs = pieces.engine(shape)
    made = [
        AddedToken(each, normalized=normalized, special=special)
        for each in ("cat", "at", "é", "™", "▁the", "  ")
    ]
    (theirs.add_special_tokens if special else theirs.add_tokens)(made)
    ours = Tokenizer(json.loads(theirs.to_str()), "x")
    theirs.encode_special_tokens = True
    refused, added = 0, {theirs.token_to_id(each.content) for each in made}
    for text in ["cat", "the cat", " sat", "café™", "cats", *probes(150)]:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        if special and added & {*wanted}:
            refused += 1
            with pytest.raises(InputRefused, match="would become the special token"):
                ours.encode(text)
        else:
            assert ours.encode(text) == wanted and ours.decode(wanted) == theirs.decode(wanted), (
                text
            )
    assert bool(refused) == special


def test_that_an_added_token_is_set_apart_or_cut_in_two_is_said() -> None:
    for content, normalized, text, back, note in (
        ("c", True, "aca", "a ca", "puts a space next to 'c'"),
        ("Q", False, "aQa", "aQ a", "puts a space next to 'Q'"),
        ("of the", False, "of the", "of the", "so 'of the' may be cut in two"),
    ):
        theirs = pieces.engine("llama2")
        theirs.add_tokens([AddedToken(content, normalized=normalized)])
        ours = Tokenizer(json.loads(theirs.to_str()), "x")
        assert ours.decode(ours.encode(text)) == back == theirs.decode(theirs.encode(text).ids)
        assert note in "".join(ours.notes)


def test_two_tokens_of_one_text_are_told_apart() -> None:
    for shape in ("llama2", "gemma"):
        theirs, ours = both(shape)
        assert ours.id_of("a") == theirs.token_to_id("a") != theirs.token_to_id("<0x61>")
        assert ours.id_of(" the") == theirs.token_to_id("▁the") and ours.id_of("the cat") is None


def test_the_letter_that_stands_for_a_space_is_refused_in_a_text() -> None:
    theirs, ours = both("llama2")
    assert theirs.decode(theirs.encode("a▁b", add_special_tokens=False).ids) == "a b"
    with pytest.raises(InputRefused, match="'▁' in 'a▁b' would become ' '"):
        ours.encode("a▁b")


@pytest.mark.parametrize("metaspace_decoder", [False, True])
def test_without_tokens_of_bytes_a_lost_character_is_named(metaspace_decoder: bool) -> None:
    theirs = pieces.engine("split", byte_fallback=False, metaspace_decoder=metaspace_decoder)
    ours = Tokenizer(json.loads(theirs.to_str()), "x")
    for text in (" the cat", "the  dog", "  self", "数据\n"):
        found = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == found and ours.decode(found) == theirs.decode(
            found
        ) == text.removeprefix(" ")
    assert "<unk>" in theirs.encode("the 🙂").tokens and "has no tokens for '!'" in "".join(
        ours.notes
    )
    with pytest.raises(
        InputRefused, match="'🙂' in ' ?the 🙂' would become <unk>: the tokenizer has no token"
    ):
        ours.encode("the 🙂")


def changed(shape: str, section: str, **values: object) -> dict:
    content = json.loads(pieces.engine(shape).to_str())
    content[section] = (content[section] or {}) | values
    return content


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
REFUSED = {
    r"does not decode bytes: '\n' would come back as '<0x0A>'": changed(
        "mistral", "decoder", **METASPACE
    ),
    r"'<0x0A>' would come back as '\n'": changed("llama2", "model", ignore_merges=True),
    "more ways than one": changed("llama2", "pre_tokenizer", **METASPACE),
    "in an unknown one (9)": changed("mistral", "pre_tokenizer", prepend_scheme="9"),
    "decoder is not one of the known ones": changed("llama2", "decoder", decoders=[]),
    "has no '▁' for a single space": changed("llama2", "model", vocab={"a": 0}),
    "pre_tokenizer step": changed("llama2", "pre_tokenizer", type="Whitespace"),
    "'   a' would come back as 'a'": changed("mistral", "decoder", **METASPACE)
    | {"model": changed("mistral", "model", byte_fallback=False)["model"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_lose_text_is_refused_and_named(message: str) -> None:
    with pytest.raises(InputRefused, match=f"bad.json: .*{re.escape(message)}") as raised:
        Tokenizer(REFUSED[message], "bad.json")
    assert len(str(raised.value)) < 400


def lossy(kind: str) -> Engine:
    """A tokenizer of a kind that loses text, and of nothing else that would."""
    words = ["[UNK]", *dict.fromkeys("▁aAbe\u0301²\n🙂☃")]
    made = Engine(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    if kind == "WordPiece":
        made = Engine(models.WordPiece(dict(made.get_vocab()), unk_token="[UNK]"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    if kind.startswith("Unigram"):
        scored = [("<unk>", 0.0), *((word, -1.0) for word in words[1:])]
        if "bytes" in kind:
            scored += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
        made = Engine(models.Unigram(scored, unk_id=0, byte_fallback="bytes" in kind))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        if "bytes" in kind:
            made.decoder = decoders.Sequence(
                [
                    decoders.Replace("▁", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            )
        # As every one is that transformers converts from SentencePiece's files.
        if "spaces" in kind:
            made.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    made.add_special_tokens(["<s>", "</s>"])
    return made


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("WordLevel", "a  b", "[UNK]"),
        ("WordPiece", "a  b", "a b"),
        ("Unigram", "a\tb", "a<unk>b"),
        ("Unigram of spaces", "a  b", "a b"),
        ("Unigram of bytes", "<0x0A>", "\n"),
    ],
)
def test_what_another_kind_of_model_would_lose_is_said(
    tmp_path, kind: str, before: str, after: str
) -> None:
    made = lossy(kind)
    assert made.decode(made.encode(before).ids) == after
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    with pytest.raises(
        InputRefused, match=re.escape(f"With it {before!r} would come back as {after!r}")
    ):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize("shape", pieces.SHAPES)
def test_it_is_the_same_after_it_was_saved(tmp_path, shape: str) -> None:
    theirs, ours = both(shape)
    ours.save(tmp_path / "tokenizer.json")
    again, library = (
        Tokenizer.from_file(tmp_path),
        Engine.from_file(str(tmp_path / "tokenizer.json")),
    )
    assert again.hash == ours.hash and len({both(each)[1].hash for each in pieces.SHAPES}) == len(
        pieces.SHAPES
    )
    for text in probes(200):
        assert library.encode(text, add_special_tokens=False).ids == again.encode(text)
        assert library.decode(again.encode(text)) == again.decode(again.encode(text))
