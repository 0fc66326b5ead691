"""What decides the tokens of a corpus, and so the name by which they are kept."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from monograph.data.answers import DAY, stops_of
from monograph.data.documents import Reading
from monograph.data.sources import Found
from monograph.text.chat import template_of
from monograph.text.tokenizer import Tokenizer

FORMAT = 2


@dataclass(frozen=True)
class Request:
    """What decides the tokens: the text, how it is read and split, and a tokenizer or the size of the one to train."""

    found: Found
    held_out: float
    tokenizer: Tokenizer | int
    reading: Reading

    @property
    def sources(self) -> list[Any]:
        """What decides the documents: files and, where some have records, how these are read."""
        records = any(file.has_records for file in self.found.files)
        reading: list[Any] | None = [self.reading.text_key, self.reading.skip_bad] if records else None
        if reading and self.reading.answering:
            reading += [self.reading.answering, *self._template]
        return [FORMAT, self.found.sha256, self.held_out, reading]

    @property
    def _template(self) -> list[Any]:
        """What beside the tokenizer decides the tokens of conversations."""
        assert isinstance(self.tokenizer, Tokenizer)
        template = template_of(self.tokenizer)
        return [template.source, sorted(template.tokens.items()), sorted(stops_of(self.tokenizer)), DAY]

    @property
    def key(self) -> str:
        """Hex name of the folder; equal requests have equal keys."""
        asked = self.tokenizer.hash if isinstance(self.tokenizer, Tokenizer) else f"bpe:{self.tokenizer}"
        return hashlib.sha256(json.dumps([*self.sources, asked]).encode()).hexdigest()[:32]
