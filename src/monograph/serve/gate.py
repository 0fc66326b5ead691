"""What clients may have written and scored at once: texts, tokens of prompts, log-probabilities."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from monograph.device import clock
from monograph.serve.owner import Generation, Owner
from monograph.serve.refused import Refused

WAITING = 4  # texts that wait for each row
WAITING_PROMPTS = 4  # whole contexts of prompts that wait for each row
# Log-probabilities of a request, each of which takes about 200 bytes until it is sent.
MOST_NUMBERS = 1 << 21
MOST_SCORES = 4 * MOST_NUMBERS  # of all requests that have prompts scored and nothing written


class Gate:
    """Counts the texts that clients wait for, and refuses what would be too many.

    It holds none: the decoder's queue is the only one, and has each client's in turn.

    Attributes:
        most: texts that may wait.
        refused: requests that were turned away.
        cancelled: texts that nobody waited for any more.
    """

    def __init__(self, owner: Owner, rows: int, context: int) -> None:
        """Count for a decoder of `rows` rows, each with a context of `context` tokens."""
        self._owner = owner
        self.fit(rows, context)
        # When, and how many for each row there were then.
        self._entered: dict[Generation, tuple[float, float]] = {}
        self._tokens = 0  # of their prompts
        self._text_s = 1.0  # about how long a text takes
        self.refused = 0
        self.cancelled = 0
        self._scores = 0

    def fit(self, rows: int, context: int) -> None:
        """Take the sizes of the decoder that writes new texts."""
        self._rows = rows
        self.most = WAITING * rows
        self._most_tokens = (1 + WAITING_PROMPTS) * rows * context

    @property
    def waiting(self) -> int:
        """Return how many texts wait for a row."""
        return max(0, len(self._entered) - self._rows)

    @property
    def most_at_once(self) -> int:
        """Return how many texts may be written and wait together, so that no request may ever have
        more.
        """
        return self._rows + self.most

    def enter(self, texts: Sequence[Generation]) -> None:
        """Have a client's texts written.

        Raises:
            Refused: too many wait.
        """
        tokens = self._tokens + sum(len(text.request.prompt_ids) for text in texts)
        count = len(self._entered) + len(texts)
        if count > self.most_at_once or (self.waiting and tokens > self._most_tokens):
            self.refused += 1
            raise Refused(
                429,
                f"{self.waiting} texts wait already: try again later",
                code="rate_limit_exceeded",
                Retry_After=str(min(60, max(1, math.ceil(self._text_s * count / self._rows)))),
            )
        self._tokens = tokens
        for text in texts:
            self._entered[text] = clock(), max(1.0, len(self._entered) / self._rows)
            self._owner.write(text)

    @contextmanager
    def scoring(self, numbers: int) -> Iterator[None]:
        """Let so many log-probabilities of prompts take memory until the end of the block.

        Raises:
            Refused: those of others take most of it.
        """
        if self._scores + numbers > MOST_SCORES:
            self.refused += 1
            message = "others have prompts scored: try again later"
            raise Refused(429, message, code="rate_limit_exceeded", Retry_After="10")
        self._scores += numbers
        try:
            yield
        finally:
            self._scores -= numbers

    def leave(self, text: Generation, *, cancelled: bool = False) -> None:
        """Release a finished or cancelled text; it may be cancelled after its end."""
        if text not in self._entered:
            return
        began, turns = self._entered.pop(text)
        self._tokens -= len(text.request.prompt_ids)
        if cancelled:
            self.cancelled += 1
            self._owner.cancel(text)
        else:
            self._text_s += 0.1 * ((clock() - began) / turns - self._text_s)
