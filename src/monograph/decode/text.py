"""From ids to text while they come: whole characters only, nothing that a stop string may still take back."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from monograph.text.tokenizer import Tokenizer


class Transcript:
    """The text of one completion.

    Attributes:
        token_ids: all ids so far.
        text: what they say for certain: without a character whose bytes are not all there, without the beginning of
            a stop string, and after `finish` without the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """Nothing yet after the ids `before`; it will end before the first of `stop` that appears."""
        self._lead = tokenizer.lead(before)  # not of the text
        self._tokenizer, self._stop = tokenizer, [each.encode() for each in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""
        self.token_ids: list[int] = []
        self.text = ""

    def add(self, ids: Iterable[int]) -> str:
        """Take more ids; the text that is certain now and was not before."""
        ids = list(ids)
        self.token_ids += ids
        self._held += b"".join([self._tokenizer.pieces[index] for index in ids])
        return self._say(len(self._held) - self._begun())

    def finish(self) -> str:
        """Nothing more comes: the rest of the text up to a stop string."""
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return self._say(min(found, default=len(self._held)), final=True)

    def _begun(self) -> int:
        """Bytes at the end that a stop string begins with, or from a whole one on."""
        held = self._held
        for at in range(len(held) if self._stop else 0):
            if any(stop.startswith(held[at:]) or held.startswith(stop, at) for stop in self._stop):
                return len(held) - at
        return 0

    def _say(self, size: int, *, final: bool = False) -> str:
        said = self._held[:size]
        if said:
            said, self._lead = said.removeprefix(self._lead), b""
        new = self._decoder.decode(said, final)
        self._held = self._held[size:]
        self.text += new
        return new
