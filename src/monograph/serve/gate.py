"""Limits on what clients may ask for at once: texts, tokens of prompts, log-probabilities."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from monograph.device import clock
from monograph.serve.owner import Owner, ServedText
from monograph.serve.refused import Refused

WAITING_TEXTS = 4  # texts that may wait, per row
WAITING_PROMPTS = 4  # tokens of prompts that may wait, in contexts per row
# Log-probabilities of one request. Each takes about 200 bytes until it is sent.
MAX_REQUEST_LOGPROBS = 1 << 21
# Log-probabilities of all requests that only have prompts scored.
MAX_SCORED_LOGPROBS = 4 * MAX_REQUEST_LOGPROBS


class _Entry(NamedTuple):
    """When a text entered, and how many texts each row had to write then, at least 1."""

    began_s: float
    texts_per_row: float


class Gate:
    """Counts the texts that clients wait for, and refuses requests that would be too many.

    The gate itself has no queue: texts wait in the decoder, which serves clients in turn.

    Attributes:
        max_waiting: the maximum number of texts that wait for a row.
        refused: requests that were turned away.
        cancelled: texts that were cancelled, because nobody waited for them any more.
    """

    def __init__(self, owner: Owner, rows: int, context: int) -> None:
        """Make the gate of an owner whose decoder has `rows` rows of `context` tokens each."""
        self._owner = owner
        self.set_sizes(rows, context)
        self._entries: dict[ServedText, _Entry] = {}
        self._prompt_tokens = 0  # of the prompts of all entries
        self._text_s = 1.0  # a running mean of the time that a text takes in its row
        self.refused = 0
        self.cancelled = 0
        self._reserved_logprobs = 0

    def set_sizes(self, rows: int, context: int) -> None:
        """Take the sizes of the decoder that writes new texts."""
        self._rows = rows
        self.max_waiting = WAITING_TEXTS * rows
        self._max_prompt_tokens = (1 + WAITING_PROMPTS) * rows * context

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a row."""
        return max(0, len(self._entries) - self._rows)

    @property
    def max_texts(self) -> int:
        """The maximum number of texts that run and wait, and so of the texts of one request."""
        return self._rows + self.max_waiting

    def enter(self, texts: Sequence[ServedText]) -> None:
        """Have a client's texts written.

        Raises:
            Refused: too many texts wait.
        """
        prompt_tokens = sum(len(text.request.prompt_ids) for text in texts) + self._prompt_tokens
        count = len(self._entries) + len(texts)
        has_too_many_texts = count > self.max_texts
        # If no text waits, a client may have prompts of any length that its rows can hold.
        has_too_many_tokens = self.waiting > 0 and prompt_tokens > self._max_prompt_tokens
        if has_too_many_texts or has_too_many_tokens:
            self.refused += 1
            expected_s = math.ceil(self._text_s * count / self._rows)
            raise Refused(
                429,
                f"{self.waiting} texts wait already: try again later",
                code="rate_limit_exceeded",
                Retry_After=str(min(60, max(1, expected_s))),
            )
        self._prompt_tokens = prompt_tokens
        for text in texts:
            self._entries[text] = _Entry(clock(), max(1.0, len(self._entries) / self._rows))
            self._owner.write(text)

    @contextmanager
    def reserve_logprobs(self, count: int) -> Iterator[None]:
        """Reserve memory for log-probabilities of prompts until the end of the block.

        Raises:
            Refused: other requests have reserved too many.
        """
        if self._reserved_logprobs + count > MAX_SCORED_LOGPROBS:
            self.refused += 1
            message = "other clients have prompts scored: try again later"
            raise Refused(429, message, code="rate_limit_exceeded", Retry_After="10")
        self._reserved_logprobs += count
        try:
            yield
        finally:
            self._reserved_logprobs -= count

    def leave(self, text: ServedText, *, cancelled: bool = False) -> None:
        """Forget a text that has ended, or cancel one; a text that has left already is ignored."""
        entry = self._entries.pop(text, None)
        if entry is None:
            return
        self._prompt_tokens -= len(text.request.prompt_ids)
        if cancelled:
            self.cancelled += 1
            self._owner.cancel(text)
        else:
            text_s = (clock() - entry.began_s) / entry.texts_per_row
            self._text_s += 0.1 * (text_s - self._text_s)
