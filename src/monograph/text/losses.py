"""Find the part of a text that a tokenizer would lose: a part that encoding and decoding change."""

import os
from collections.abc import Collection, Sequence
from typing import Any

import tokenizers

from monograph.errors import InputRefused
from monograph.text.sentence_pieces import MARK
from monograph.text.tokenizer_file import CheckedTokenizer

LONGEST = 20  # the characters that a message shows before and after a lost character


class Losses:
    """Checks whether one tokenizer would lose parts of texts.

    Args:
        checked: the checked content of the tokenizer's file.
        added: the ids of its added tokens that are not special.
        engine: the library's tokenizer for a text at the beginning; it encodes the letters of
            special tokens as text.
        inner: the library's tokenizer for a text that follows other text.
    """

    def __init__(
        self,
        checked: CheckedTokenizer,
        added: Collection[int],
        engine: tokenizers.Tokenizer,
        inner: tokenizers.Tokenizer,
    ) -> None:
        self._checked = checked
        self._engine = engine
        self._inner = inner
        # In a byte-level vocabulary the letters of an added token may stand for bytes. Then the
        # token is decoded to other text, or merges produce it from other text.
        doubtful = set[int]()
        if not checked.marks:
            for index in added:
                letters = (engine.id_to_token(index) or "").encode()
                if index in checked.ids_from_merges or checked.pieces[index] != letters:
                    doubtful.add(index)
        # Special tokens that merges can produce from the letters of a text.
        self._special_from_text = checked.ids_from_merges.intersection(checked.special.values())
        self._suspects = self._special_from_text | doubtful
        # Characters that are known to have tokens.
        self._writable = set(checked.characters)

    def describe(self, text: str, inside: bool, ids: Collection[int] | None = None) -> str:
        """Return a sentence on what a text would lose, or "" if nothing is lost.

        Args:
            text: the text.
            inside: whether it follows other text.
            ids: its ids, if they are known: then most texts need not be encoded.
        """
        mark_position = text.find(MARK) if self._checked.marks else -1
        if mark_position >= 0:
            shown = _around(text, mark_position)
            return f"{MARK!r} in {shown!r} would become ' ': the tokenizer writes each space as that letter"
        no_token = self._character_without_token(text) if self._checked.lacking else ""
        no_suspects = not self._suspects or (ids is not None and self._suspects.isdisjoint(ids))
        if not no_token and no_suspects:
            return ""
        engine = self._inner if inside else self._engine
        encoded = engine.encode(text, add_special_tokens=False)
        for index, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if index in self._special_from_text:
                letters = text[start:end]
                special = self._engine.id_to_token(index)
                shown = _around(text, start, end - start)
                return f"{letters!r} in {shown!r} would become the special token {special!r}, which is not text"
        if no_token or not self._suspects.isdisjoint(encoded.ids):
            return self._difference(text, encoded.ids, no_token)
        return ""

    def _difference(self, text: str, ids: Sequence[int], no_token: str) -> str:
        """Return a sentence on how a text differs from its decoded ids, or "" if it does not.

        `no_token` is the sentence on a character without a token, or "".
        """
        pieces = b"".join(self._checked.pieces[index] for index in ids)
        before = self._comparable(text)
        after = self._comparable(pieces.decode(errors="replace"))
        # They may be equal although a character has no token: an added token may contain it.
        if before == after:
            return ""
        if no_token:
            return no_token
        begin = len(os.path.commonprefix([before, after]))
        end = begin + LONGEST
        return (
            f"{before[begin:end]!r} would come back as {after[begin:end]!r}: "
            "the letters of an added token stand for bytes"
        )

    def _comparable(self, text: str) -> str:
        """Return a text in normal form; without spaces, if the tokenizer inserts spaces."""
        normal = self._normal(text)
        if self._checked.space_first or self._checked.marks:
            return normal.replace(" ", "").replace(MARK, "")
        return normal

    def _character_without_token(self, text: str) -> str:
        """Return a sentence on the first character that has no token, or ""."""
        normal = self._normal(text)
        lacking = self._checked.lacking
        lost = {
            character
            for character in set(normal) - self._writable
            if not lacking.isdisjoint(character.encode())
        }
        self._writable |= set(normal) - lost
        if not lost:
            return ""
        position = min(map(normal.find, lost))
        unknown = self._checked.json["model"]["unk_token"]
        becomes = f"become {unknown}" if unknown else "be left out"
        shown = _around(normal, position)
        if self._checked.marks:
            shown = shown.replace(MARK, " ")
        return (
            f"{normal[position]!r} in {shown!r} would {becomes}: the tokenizer has no token for it"
        )

    def _normal(self, text: str) -> str:
        """Return a text in the tokenizer's normal form."""
        if self._engine.normalizer is None:
            return text
        return str(self._engine.normalizer.normalize_str(text))


def require_distinct_texts(
    added: list[dict[str, Any]], engine: tokenizers.Tokenizer, where: str
) -> None:
    """Refuse two added tokens with the same text.

    The library would recognise only one of the two, and which one differs from load to load.
    """
    seen = set[str]()
    for token in added:
        form = token["content"]
        if engine.normalizer and token["normalized"]:
            # An empty normal form is not used.
            form = engine.normalizer.normalize_str(form) or form
        if form in seen:
            raise InputRefused(
                f"{where}: two added tokens are {form[:60]!r} in their normal form; leave one out"
            )
        seen.add(form)


def _around(text: str, begin: int, length: int = 0) -> str:
    """Return a part of a text with the characters before and after it."""
    return text[max(0, begin - LONGEST) : begin + length + LONGEST]
