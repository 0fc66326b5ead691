"""The text of a completion, which is made of its ids while they are sampled.

The text has only whole characters. Its end is held back as long as it may be the beginning of a stop
string.
"""

import codecs
from collections.abc import Iterable, Sequence

from monograph.text.tokenizer import Tokenizer


class Transcript:
    """The text of one completion, which grows with its ids.

    Attributes:
        token_ids: all ids so far.
        text: the part of the ids' text that is certain. It does not end with an incomplete character
            or the beginning of a stop string. After `finish` it ends before the first stop string.
        size: the number of bytes of `text` and of an incomplete character after it, before errors
            are replaced.
        stopped_by: after `finish`, the stop string before which the text ends; "" if there is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), preceding_ids: Sequence[int] = ()
    ) -> None:
        """Begin an empty text.

        Args:
            tokenizer: the tokenizer of the ids.
            stop: the text ends before the first of these strings.
            preceding_ids: the ids before the text.
        """
        # The space that the tokenizer adds before a text, or nothing. It is removed from the first bytes.
        self._lead = tokenizer.inserted_space(preceding_ids)
        self._tokenizer = tokenizer
        self._stop = [text.encode() for text in stop]
        # The decoder is incremental, because several tokens may share the bytes of one character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # The bytes after `text` that are not certain yet.
        self._pending_bytes = b""
        self.token_ids: list[int] = []
        self.text = ""
        self.size = 0
        self.stopped_by = ""

    def add(self, ids: Iterable[int]) -> str:
        """Add ids, and return the text that has become certain."""
        ids = list(ids)
        self.token_ids += ids
        self._pending_bytes += b"".join([self._tokenizer.pieces[index] for index in ids])
        return self._append(self._count_certain_bytes())

    def finish(self) -> str:
        """End the text, and return its rest up to the first stop string."""
        end = len(self._pending_bytes)
        for stop in self._stop:
            begin = self._pending_bytes.find(stop)
            if 0 <= begin < end:
                end = begin
                self.stopped_by = stop.decode()
        return self._append(end, final=True)

    def _count_certain_bytes(self) -> int:
        """Return how many pending bytes come before the first stop string, be it complete or not.

        An incomplete stop string is one whose beginning is the end of the bytes.
        """
        if not self._stop:
            return len(self._pending_bytes)
        for begin in range(len(self._pending_bytes)):
            for stop in self._stop:
                is_stop = self._pending_bytes.startswith(stop, begin)
                if is_stop or stop.startswith(self._pending_bytes[begin:]):
                    return begin
        return len(self._pending_bytes)

    def _append(self, size: int, *, final: bool = False) -> str:
        """Move the first `size` pending bytes to the text, and return the new text.

        Bytes of an incomplete character stay in the decoder, unless `final` says that no more follow.
        """
        certain = self._pending_bytes[:size]
        self._pending_bytes = self._pending_bytes[size:]
        self.size += size
        if certain:
            certain = certain.removeprefix(self._lead)
            self._lead = b""
        new = self._decoder.decode(certain, final)
        self.text += new
        return new
