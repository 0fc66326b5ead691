"""Run: pytest tests/decode/test_transcript.py"""

from __future__ import annotations

import random

import pytest

from monograph.decode.transcript import Transcript
from monograph.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.bytes()


def pieces(text: bytes, stop: list[str], sizes: list[int]) -> tuple[list[str], Transcript]:
    """What is said when the bytes come in runs of the given sizes."""
    ids, transcript, said = (
        [TOKENIZER.pieces.index(bytes([byte])) for byte in text],
        Transcript(TOKENIZER, stop),
        [],
    )
    while ids:
        size = sizes.pop(0) if sizes else len(ids)
        said.append(transcript.add(ids[:size]))
        ids = ids[size:]
    return [*said, transcript.finish()], transcript


def test_characters_come_whole() -> None:
    said, transcript = pieces("é€𝄞".encode(), [], [1] * 9)
    assert said == ["", "é", "", "", "€", "", "", "", "𝄞", ""] and transcript.text == "é€𝄞"


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    said, transcript = pieces(b"ab\nc\n\nd", ["\n\n"], [1] * 7)
    assert said == ["a", "b", "", "\nc", "", "", "", ""] and transcript.text == "ab\nc"


@pytest.mark.parametrize(
    ("stop", "text"), [(["z"], "xy"), (["yz"], "x"), (["q", "zx"], "xy"), (["zz"], "xyzxyz")]
)
def test_it_ends_before_the_first_stop_string(stop: list[str], text: str) -> None:
    assert pieces(b"xyzxyz", stop, [])[1].text == text


def test_any_bytes_in_any_runs_give_the_text_of_the_whole() -> None:
    generator = random.Random(0)
    for _ in range(500):
        text = bytes(
            generator.choice(b"ab\xc3\xa9\xe2\x82\xac\xf0\x9d")
            for _ in range(generator.randrange(20))
        )
        stop = [
            "".join(generator.choice("abé") for _ in range(generator.randrange(1, 4)))
            for _ in range(2)
        ]
        said, transcript = pieces(text, stop, [generator.randrange(1, 4) for _ in range(20)])
        cut = min((at for each in stop if (at := text.find(each.encode())) >= 0), default=len(text))
        assert "".join(said) == transcript.text == text[:cut].decode(errors="replace")
