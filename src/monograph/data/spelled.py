"""Count the texts that spell special tokens: the letters of one in a text are letters, which the
user is told.
"""

from collections.abc import Iterable, Mapping

from monograph.text.tokenizer import Tokenizer

# Characters of a token's content; far fewer beginnings than tokens have to be searched in a text.
_PREFIX = 2


class SpecialTokenSpellings:
    """A count of the texts that hold the letters of a special token.

    People put a chat that its template has rendered into a column of texts, where other programs
    make a token of
    "<|im_start|>". Here no text can write a special token (see `Tokenizer`), so the model would learn to spell it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._contents: dict[str, list[str]] = {}  # by their beginnings
        for content in tokenizer.special:
            self._contents.setdefault(content[:_PREFIX], []).append(content)
        self._count = 0
        self._first = ""
        self._last = ""  # the place that was counted last

    def see(self, where: str, texts: Iterable[str]) -> None:
        """Look at texts of the record or file at that place, which is counted once if its texts
        come in a row.
        """
        content = next((found for text in texts for found in self._found(text)), None)
        if content is None or where == self._last:
            return
        self._count += 1
        self._last = where
        self._first = self._first or f"{content!r} in {where}"

    def notes(self) -> tuple[str, ...]:
        """Return a line for the user, or none."""
        if not self._count:
            return ()
        these = f"{self._count:,} texts spell" if self._count > 1 else "a text spells"
        return (
            f"{these} special tokens, as {self._first}: in a text these are letters; give chats as messages",
        )

    def _found(self, text: str) -> Iterable[str]:
        beginnings = [beginning for beginning in self._contents if beginning in text]
        return (
            content
            for beginning in beginnings
            for content in self._contents[beginning]
            if content in text
        )


def texts_of(record: Mapping[str, object], *keys: str) -> list[str]:
    """Return what a record has under these keys, where it is a text."""
    values = [record.get(key) for key in keys]
    return [value for value in values if isinstance(value, str)]
