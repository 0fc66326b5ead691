"""Reading text in parts: `pytest tests/data/test_reading.py`."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from monograph.data import reading
from monograph.data.reading import cut_for_tokens, cut_position, read_text, text_parts
from monograph.errors import InputRefused
from monograph.text.tokenizer_file import KNOWN_PATTERNS

# Letters, digits, marks, symbols and white space of several kinds, weighted towards what patterns
# treat specially.
TEXTS = st.text(
    st.sampled_from("ab  \n\n\r\t1²½'s-./數é\u0301\u00a0\u3000🙂Ll") | st.characters(codec="utf-8"),
    max_size=60,
)


@functools.cache
def splitter(name: str) -> pre_tokenizers.PreTokenizer:
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Split(Regex(KNOWN_PATTERNS[name]), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def words(name: str, part: str) -> list[str]:
    return [word for word, _ in splitter(name).pre_tokenize_str(part)]


@pytest.mark.parametrize("name", ["gpt2", *KNOWN_PATTERNS])
@given(TEXTS, st.integers(1, 60))
def test_a_cut_does_not_change_the_words(name, whole, limit):
    cut = cut_for_tokens(whole, limit, longest := limit + 20)
    if cut < min(longest, len(whole)):
        assert words(name, whole[:cut]) + words(name, whole[cut:]) == words(name, whole)


def test_a_place_to_cut_is_found_where_there_is_one():
    assert cut_for_tokens("one two three four", 12, 15) == 7
    assert cut_for_tokens("數據 數據數據" + "x" * 5000, 5000, 9000) == 2
    assert cut_for_tokens("one two three four", 2, 9) == 3
    assert cut_for_tokens("x" * 100, 50, 70) == 70 and cut_for_tokens("x" * 60, 50, 70) == 60


@given(TEXTS, st.integers(1, 9), st.integers(1, 7), st.integers(0, 9))
def test_the_parts_are_the_text(tmp_path_factory, whole, block, part, more):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(data := whole.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_BYTES", block)
        patch.setattr(reading, "PART_CHARS", part)
        patch.setattr(reading, "LONGEST_PART_CHARS", part + more)
        parts = list(read_text(path, 0, len(data)))
        # Blocks do not show: a record, whose text comes whole, is cut where the same text in a file
        # is.
        assert [part for part, _ in parts] == list(text_parts(whole))
    assert "".join(part for part, _ in parts).encode() == data
    assert all(0 < len(part_text) <= part + more for part_text, _ in parts)
    assert [done for _, done in parts] == sorted(done for _, done in parts) and (
        not parts or parts[-1][1] == len(data)
    )


@pytest.mark.parametrize("block", [3, 1 << 20])
@pytest.mark.parametrize(
    ("data", "byte", "line"),
    [
        (b"ab\n\xff\n", 3, 2),
        (b"\n\n\nok \xe2\x82", 6, 4),
        (b"\xc3\x28", 0, 1),
        (b"x" * 50 + b"\xed\xa0\x80", 50, 1),
    ],
)
def test_invalid_utf8_is_refused_by_file_byte_and_line(
    tmp_path, monkeypatch, data, byte, line, block
):
    monkeypatch.setattr(reading, "BLOCK_BYTES", block)
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(
        InputRefused, match=rf"bad\.txt: byte {byte} \(line {line}\) is not UTF-8: 0x"
    ):
        list(read_text(path, 0, len(data)))


def test_a_file_that_shrinks_or_goes_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    with pytest.raises(InputRefused, match="became shorter"):
        list(read_text(path, 0, 9))
    with pytest.raises(InputRefused, match="gone.txt: cannot be read"):
        list(read_text(tmp_path / "gone.txt", 0, 9))


@given(TEXTS.filter(bool), st.integers(0, 200))
def test_a_file_is_cut_after_a_line_or_between_characters(tmp_path_factory, whole, wanted):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(data := whole.encode())
    wanted = min(max(1, wanted), len(data))
    cut = cut_position(path, wanted, len(data))
    assert wanted <= cut <= len(data)
    data[:cut].decode(), data[cut:].decode()
    if b"\n" in data[wanted:-1]:
        assert data[cut - 1 : cut] == b"\n" and b"\n" not in data[wanted : cut - 1]
