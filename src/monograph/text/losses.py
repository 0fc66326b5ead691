"""Find the part of a text that a tokenizer would lose: encoded and decoded, it would come back
changed.
"""

import os
from collections.abc import Collection, Sequence
from typing import Any

import tokenizers

from monograph.errors import InputRefused
from monograph.text.sentence_pieces import MARK
from monograph.text.tokenizer_file import Checked

LONGEST = 20  # characters of the text that a message shows before and after a lost character


class Losses:
    """A check of texts for losses by one tokenizer.

    Args:
        checked: the checked content of its file.
        added: the ids of its added tokens that are not special.
        engine: the tokenizer for whole texts, which encodes the letters of special tokens as text.
        inner: the tokenizer for a text that follows other text.
    """

    def __init__(
        self,
        checked: Checked,
        added: Collection[int],
        engine: tokenizers.Tokenizer,
        inner: tokenizers.Tokenizer,
    ) -> None:
        self._checked = checked
        self._engine = engine
        self._inner = inner
        # Added tokens whose letters may stand for bytes: they are decoded to other text, or merges
        # produce them from other text.
        self._doubtful = frozenset(
            index
            for index in (() if checked.marks else added)
            if index in checked.made
            or checked.pieces[index] != (engine.id_to_token(index) or "").encode()
        )
        self._made = checked.made.intersection(checked.special.values())
        self._written = set(checked.characters)

    def of(self, text: str, inside: bool, ids: Collection[int] | None = None) -> str:
        """Return what a text would lose, or ""; see `Tokenizer.loss`. With its `ids`, most texts
        need no encoding.
        """
        if self._checked.marks and (at := text.find(MARK)) >= 0:
            return f"{MARK!r} in {_around(text, at)!r} would become ' ': the tokenizer writes each space as that letter"
        unwritten = self._unwritten(text) if self._checked.lacking else ""
        suspects = self._made | self._doubtful
        if not unwritten and (not suspects or (ids is not None and suspects.isdisjoint(ids))):
            return ""
        encoded = (self._inner if inside else self._engine).encode(text, add_special_tokens=False)
        for index, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if index in self._made:
                name = text[start:end]
                special = self._engine.id_to_token(index)
                where = _around(text, start, end - start)
                return f"{name!r} in {where!r} would become the special token {special!r}, which is no text"
        return (
            self._changed(text, encoded.ids, unwritten)
            if unwritten or not suspects.isdisjoint(encoded.ids)
            else ""
        )

    def _changed(self, text: str, ids: Sequence[int], unwritten: str) -> str:
        pieces = b"".join(self._checked.pieces[index] for index in ids)
        form = self._form(text)
        back = self._form(pieces.decode(errors="replace"))
        # An added token wrote the characters that the rest of the vocabulary cannot.
        if form == back:
            return ""
        at = len(os.path.commonprefix([form, back]))
        shown = f"{form[at : at + LONGEST]!r} would come back as {back[at : at + LONGEST]!r}"
        return unwritten or f"{shown}: the letters of an added token stand for bytes"

    def _form(self, text: str) -> str:
        """Return a text in its normal form, without any spaces if the tokenizer inserts some."""
        form = self._normal(text)
        return (
            form.replace(" ", "").replace(MARK, "")
            if self._checked.space_first or self._checked.marks
            else form
        )

    def _unwritten(self, text: str) -> str:
        normal = self._normal(text)
        lacking = self._checked.lacking
        lost = {
            letter
            for letter in set(normal) - self._written
            if not lacking.isdisjoint(letter.encode())
        }
        self._written |= set(normal) - lost
        if not lost:
            return ""
        at = min(map(normal.find, lost))
        unknown = self._checked.json["model"]["unk_token"]
        shown = _around(normal, at)
        becomes = f"become {unknown}" if unknown else "be left out"
        shown = shown.replace(MARK, " ") if self._checked.marks else shown
        return f"{normal[at]!r} in {shown!r} would {becomes}: the tokenizer has no token for it"

    def _normal(self, text: str) -> str:
        return str(self._engine.normalizer.normalize_str(text)) if self._engine.normalizer else text


def require_apart(added: list[dict[str, Any]], engine: tokenizers.Tokenizer, where: str) -> None:
    """Refuse two added tokens with the same text, since the library takes either, changing from
    load to load.
    """
    seen = set[str]()
    for token in added:
        normal = (
            engine.normalizer.normalize_str(token["content"])
            if engine.normalizer and token["normalized"]
            else ""
        )
        form = normal or token["content"]
        if form in seen:
            raise InputRefused(
                f"{where}: two added tokens are {form[:60]!r} in their normal form; leave one out"
            )
        seen.add(form)


def _around(text: str, at: int, length: int = 0) -> str:
    return text[max(0, at - LONGEST) : at + length + LONGEST]
