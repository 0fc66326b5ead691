"""Finds what of a text a tokenizer would not give back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import tokenizers

from monograph.text import sentence_pieces
from monograph.text.tokenizer_file import Checked


class Losses:
    """What one tokenizer loses.

    Args:
        checked: its file.
        added: the added tokens that are text, each in its normal form, by id.
        engine: encodes a text, special tokens in it as letters.
        inner: encodes what goes on with other text.
    """

    def __init__(
        self, checked: Checked, added: Mapping[int, str], engine: tokenizers.Tokenizer, inner: tokenizers.Tokenizer
    ) -> None:
        self._checked, self._added, self._engine, self._inner = checked, added, engine, inner
        self._changed = {
            content: checked.pieces[i]
            for i, content in added.items()
            if not checked.marks and checked.pieces[i] != content.encode()
        }
        self._written = set(checked.characters)

    def may_be_in(self, ids: Sequence[int]) -> bool:
        """Whether a text with these ids is worth a look."""
        checked = self._checked
        return bool(checked.lacking or checked.marks or self._changed or not checked.made.isdisjoint(ids))

    def of(self, text: str, inside: bool) -> str:
        """See `Tokenizer.loss`."""
        if self._checked.marks and (at := text.find(sentence_pieces.MARK)) >= 0:
            mark, shown = sentence_pieces.MARK, text[max(0, at - 20) : at + 20]
            return f"{mark!r} in {shown!r} would become ' ': the tokenizer writes each space as that letter"
        special = self._special(text, inside) if self._checked.made else ""
        return special or self._altered(text) or (self._unwritten(text) if self._checked.lacking else "")

    def _special(self, text: str, inside: bool) -> str:
        found = (self._inner if inside else self._engine).encode(text, add_special_tokens=False)
        for index, (start, end) in zip(found.ids, found.offsets, strict=True):
            if index in self._checked.made:
                shown, name = text[max(0, start - 20) : end + 20], self._engine.id_to_token(index)
                return f"{text[start:end]!r} in {shown!r} would become the special token {name!r}, which is no text"
        return ""

    def _altered(self, text: str) -> str:
        texts = (text, self._normal(text)) if self._changed else ()
        for content, piece in self._changed.items():
            if any(content in each for each in texts):
                back = piece.decode(errors="replace")
                return f"{content!r} would come back as {back!r}: an added token whose letters stand for bytes"
        return ""

    def _unwritten(self, text: str) -> str:
        written, lacking = self._between_added(text), self._checked.lacking
        lost = {each for each in set(written) - self._written if not lacking.isdisjoint(each.encode())}
        self._written |= set(written) - lost
        if not lost:
            return ""
        at = min(map(written.find, lost))
        unknown, shown = self._checked.json["model"]["unk_token"], written[max(0, at - 20) : at + 20]
        becomes = f"become {unknown}" if unknown else "be left out"
        shown = shown.replace(sentence_pieces.MARK, " ") if self._checked.marks else shown
        return f"{written[at]!r} in {shown!r} would {becomes}: the tokenizer has no token for it"

    def _between_added(self, text: str) -> str:
        """What is left of a text, in its normal form, between the added tokens that are text."""
        normal = self._normal(text)
        if not any(each in text or each in normal for each in self._added.values()):
            return normal
        found = self._engine.encode(text, add_special_tokens=False)
        spans = [span for index, span in zip(found.ids, found.offsets, strict=True) if index in self._added]
        ends = [0, *itertools.chain(*spans), len(text)]
        return "".join(self._normal(text[start:end]) for start, end in zip(ends[::2], ends[1::2], strict=True))

    def _normal(self, text: str) -> str:
        return str(self._engine.normalizer.normalize_str(text)) if self._engine.normalizer else text
