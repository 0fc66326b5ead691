"""Limits on what clients may ask for at the same time: texts and log-probabilities.

The decoder writes one text at a time in each of its rows; other texts wait for a row. A prompt is
never longer than a row's context, so the limit on texts also bounds the memory of their prompts.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from monograph.device import clock
from monograph.serve.owner import Owner, ServedText
from monograph.serve.refused import Refused

# The maximum number of texts that wait, for each row of the decoder.
WAITING_TEXTS_PER_ROW = 4
# The maximum number of log-probabilities of a request. Each takes about 200 bytes until it is sent.
MAX_REQUEST_LOGPROBS = 1 << 21
# The maximum number of log-probabilities of all present requests that only score prompts.
MAX_SCORED_LOGPROBS = 4 * MAX_REQUEST_LOGPROBS


class _Entrance(NamedTuple):
    """When a text was let in, and how many texts there were at that time.

    Attributes:
        time_s: the time, in the seconds of `clock`.
        texts_per_row: the number of texts that ran or waited, divided by the number of rows; at least 1.
    """

    time_s: float
    texts_per_row: float


class Gate:
    """Counts the texts that clients wait for, and refuses a request if they would be too many.

    The gate itself has no queue: texts wait in the decoder, which serves clients in turn.

    Attributes:
        max_waiting: the maximum number of texts that wait for a row.
        refused: the number of requests that were refused.
        cancelled: the number of texts that were cancelled, since their clients had gone.
    """

    def __init__(self, owner: Owner, rows: int) -> None:
        """Make the gate of an owner whose decoder has `rows` rows."""
        self._owner = owner
        self.set_rows(rows)
        # All texts that run or wait.
        self._entrances: dict[ServedText, _Entrance] = {}
        # A running mean of the time that a text takes in its row. It begins with a guess of 1 s.
        self._mean_text_s = 1.0
        self.refused = 0
        self.cancelled = 0
        self._reserved_logprobs = 0

    def set_rows(self, rows: int) -> None:
        """Set the number of rows of the decoder that writes new texts."""
        self._rows = rows
        self.max_waiting = WAITING_TEXTS_PER_ROW * rows

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a row."""
        return max(0, len(self._entrances) - self._rows)

    @property
    def max_texts(self) -> int:
        """The maximum number of texts that run and wait, and so of the texts of one request."""
        return self._rows + self.max_waiting

    def enter(self, texts: Sequence[ServedText]) -> None:
        """Let the texts of a request in: the owner begins to write them.

        Raises:
            Refused: too many texts wait.
        """
        count = len(self._entrances) + len(texts)
        if count > self.max_texts:
            self.refused += 1
            expected_s = math.ceil(self._mean_text_s * count / self._rows)
            raise Refused(
                429,
                f"{self.waiting} texts wait already: try again later",
                code="rate_limit_exceeded",
                Retry_After=str(min(60, max(1, expected_s))),
            )
        for text in texts:
            texts_per_row = max(1.0, len(self._entrances) / self._rows)
            self._entrances[text] = _Entrance(clock(), texts_per_row)
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
        """Forget a text that has ended, or cancel one that has not.

        Nothing happens if it has left already.
        """
        entrance = self._entrances.pop(text, None)
        if entrance is None:
            return
        if cancelled:
            self.cancelled += 1
            self._owner.cancel(text)
        else:
            # Before this text, its row wrote about `texts_per_row - 1` others, so the text itself took only
            # a part of the time since its entrance.
            text_s = (clock() - entrance.time_s) / entrance.texts_per_row
            self._mean_text_s += 0.1 * (text_s - self._mean_text_s)
