"""Lets texts in: at most so many wait, each client's in turn, and the decoder gets them when it has rows for them."""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from monograph.device import clock
from monograph.serve.fields import Refused
from monograph.serve.owner import Owner, Text

WAITING = 4  # texts that wait for each row
WAITING_PROMPTS = 4  # whole contexts of prompts that wait for each row
MOST_NUMBERS = 1 << 21  # log-probabilities of a request, each of which takes about 200 bytes until it is sent
MOST_SCORES = 4 * MOST_NUMBERS  # of all requests that have prompts scored and nothing written


class Gate:
    """The queue before the decoder.

    Attributes:
        most: texts that may wait.
        refused: requests that were turned away.
        cancelled: texts that nobody waited for any more.
    """

    def __init__(self, owner: Owner, rows: int, context: int) -> None:
        """Open it for a decoder of so many rows, each with a context of so many tokens."""
        self._owner = owner
        self.fit(rows, context)
        self._waiting: dict[str, deque[Text]] = {}  # by client, the one that is next first
        self._inside: dict[Text, float] = {}  # when each was let in
        self._text_s = 1.0  # about how long a text takes
        self.refused = self.cancelled = self._scores = 0

    def fit(self, rows: int, context: int) -> None:
        """Take the sizes of the decoder that writes new texts."""
        self._rows, self.most, self._most_tokens = rows, WAITING * rows, WAITING_PROMPTS * rows * context

    @property
    def waiting(self) -> int:
        """Return how many texts wait for a row."""
        return sum(map(len, self._waiting.values())) + max(0, len(self._inside) - self._rows)

    @property
    def most_at_once(self) -> int:
        """Return how many texts may be inside and wait together, so that no request may ever have more."""
        return self._rows + self.most

    def enter(self, texts: list[Text]) -> None:
        """Let a client's texts wait.

        Raises:
            Refused: the queue is full.
        """
        queued = [text for each in self._waiting.values() for text in each]
        tokens = sum(len(text.request.prompt_ids) for text in queued + texts)
        count = len(queued) + len(self._inside) + len(texts)
        if count > self.most_at_once or (queued and tokens > self._most_tokens):
            self.refused += 1
            raise Refused(
                429, f"{self.waiting} texts wait already: try again later", code="rate_limit_exceeded",
                Retry_After=str(min(60, max(1, math.ceil(self._text_s * count / self._rows)))),
            )  # fmt: skip
        for text in texts:
            self._waiting.setdefault(text.request.owner, deque()).append(text)
        self._fill()

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

    def leave(self, text: Text, *, cancelled: bool = False) -> None:
        """Let a text go: it has ended, or is cancelled, which may come after its end."""
        queue = self._waiting.get(text.request.owner)
        if queue and text in queue:
            queue.remove(text)
            self.cancelled += 1
            if not queue:
                del self._waiting[text.request.owner]
        elif text in self._inside:
            took = clock() - self._inside.pop(text)
            if cancelled:
                self.cancelled += 1
                self._owner.cancel(text)
            else:
                self._text_s += 0.1 * (took - self._text_s)
        self._fill()

    def _fill(self) -> None:
        # One more waits inside for each row, so that a row whose text ends has the next one at once.
        while self._waiting and len(self._inside) < 2 * self._rows:
            client, queue = next(iter(self._waiting.items()))
            del self._waiting[client]
            text = queue.popleft()
            if queue:
                self._waiting[client] = queue  # at the end: the others' turn comes first
            self._inside[text] = clock()
            self._owner.write(text)
