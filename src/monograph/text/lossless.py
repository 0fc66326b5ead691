"""Check that a tokenizer loses no part of a text, and describe the part that it would lose.

A part is lost if it comes back changed from encoding and decoding. Two changes do not count: a normal form
of Unicode, and inserted spaces.
"""

import os
from collections.abc import Collection, Sequence
from typing import Any

import tokenizers

from monograph.errors import InputRefused
from monograph.text.sentence_pieces import MARK
from monograph.text.tokenizer_file import CheckedTokenizer

SHOWN_CHARS = 20  # the characters that a message shows before and after a lost character


class LosslessCheck:
    """A check, for one tokenizer, whether it would lose parts of texts.

    Args:
        checked: the checked content of the tokenizer's file.
        added: the ids of its added tokens that are not special.
        engine: the library's tokenizer for a text at the beginning of a document; it encodes the
            letters of special tokens as text.
        engine_inside: the library's tokenizer for a text that follows other text.
    """

    def __init__(
        self,
        checked: CheckedTokenizer,
        added: Collection[int],
        engine: tokenizers.Tokenizer,
        engine_inside: tokenizers.Tokenizer,
    ) -> None:
        self._checked = checked
        self._engine = engine
        self._engine_inside = engine_inside
        # In a byte-level vocabulary each letter stands for a byte, e.g. "Ġ" for a space. The letters of an added
        # token stand for themselves. But the library does not tell the two apart: it may decode an added token
        # "Ġa" to " a", and merges may produce that token from the text " a".
        ambiguous_ids = set[int]()
        is_byte_level = checked.marks is None  # otherwise spaces are written as MARK
        if is_byte_level:
            for token_id in added:
                letters = (engine.id_to_token(token_id) or "").encode()
                if token_id in checked.ids_from_merges or checked.pieces[token_id] != letters:
                    ambiguous_ids.add(token_id)
        # The ids of special tokens that merges can produce from the letters of a text.
        self._special_from_text = checked.ids_from_merges.intersection(checked.special.values())
        # A text loses nothing if its ids have no suspect id, and all of its characters have tokens.
        self._suspect_ids = self._special_from_text | ambiguous_ids
        # The characters that are known to have tokens. The set grows with the texts that are checked.
        self._writable = set(checked.writable_characters)

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
        character_fault = self._character_without_token(text) if self._checked.missing_bytes else ""
        if not self._suspect_ids:
            may_have_suspects = False
        else:
            may_have_suspects = ids is None or not self._suspect_ids.isdisjoint(ids)
        # For most texts the check ends here. What follows encodes the text, which takes longer.
        if not character_fault and not may_have_suspects:
            return ""
        engine = self._engine_inside if inside else self._engine
        encoded = engine.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if token_id in self._special_from_text:
                letters = text[start:end]
                special = self._engine.id_to_token(token_id)
                shown = _around(text, start, end - start)
                return f"{letters!r} in {shown!r} would become the special token {special!r}, which is not text"
        if character_fault or not self._suspect_ids.isdisjoint(encoded.ids):
            return self._difference(text, encoded.ids, character_fault)
        return ""

    def _difference(self, text: str, ids: Sequence[int], character_fault: str) -> str:
        """Return a sentence on how a text differs from its decoded ids, or "" if it does not.

        Args:
            text: the text.
            ids: its ids.
            character_fault: the sentence on a character without a token, or "".
        """
        decoded = b"".join(self._checked.pieces[token_id] for token_id in ids)
        before = self._comparable(text)
        after = self._comparable(decoded.decode(errors="replace"))
        # The two may be equal even if a character has no token, because an added token may contain it.
        if before == after:
            return ""
        if character_fault:
            return character_fault
        begin = len(os.path.commonprefix([before, after]))
        end = begin + SHOWN_CHARS
        return (
            f"{before[begin:end]!r} would come back as {after[begin:end]!r}: "
            "the letters of an added token stand for bytes"
        )

    def _comparable(self, text: str) -> str:
        """Return a text in normal form, and without spaces if the tokenizer inserts or rewrites them."""
        normal = self._normal(text)
        if self._checked.inserts_space or self._checked.marks:
            return normal.replace(" ", "").replace(MARK, "")
        return normal

    def _character_without_token(self, text: str) -> str:
        """Return a sentence on the first character that has no token, or ""."""
        normal = self._normal(text)
        missing_bytes = self._checked.missing_bytes
        without_token = {
            character
            for character in set(normal) - self._writable
            if not missing_bytes.isdisjoint(character.encode())
        }
        self._writable |= set(normal) - without_token
        if not without_token:
            return ""
        position = min(map(normal.find, without_token))
        unknown_token = self._checked.json["model"]["unk_token"]
        becomes = f"become {unknown_token}" if unknown_token else "be left out"
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
    """Refuse two added tokens with the same text, after normalization.

    The library would recognise only one of the two, and which one differs from load to load.
    """
    seen = set[str]()
    for token in added:
        token_text = token["content"]
        if engine.normalizer and token["normalized"]:
            # The library does not use an empty normal form.
            token_text = engine.normalizer.normalize_str(token_text) or token_text
        if token_text in seen:
            raise InputRefused(
                f"{where}: two added tokens are {token_text[:60]!r} in their normal form; leave one out"
            )
        seen.add(token_text)


def _around(text: str, begin: int, length: int = 0) -> str:
    """Return a part of a text with the characters before and after it."""
    return text[max(0, begin - SHOWN_CHARS) : begin + length + SHOWN_CHARS]
