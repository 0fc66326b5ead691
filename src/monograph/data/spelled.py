"""Count the texts that spell special tokens, to warn the user about them.

Some datasets have a column of texts that are chats, already rendered by a chat template. Other
programs turn the letters "<|im_start|>" in such a text into one special token. In Monograph the
letters of a text never become a special token (see `Tokenizer`). So a model would learn to write the
letters, one after the other, and not the special token.
"""

from collections.abc import Iterable, Mapping

from monograph.text.tokenizer import Tokenizer

# A text is first searched for the first characters of special tokens. These are far fewer strings than
# there are special tokens, because most special tokens begin alike.
_PREFIX_CHARS = 2


class SpecialTokenSpellings:
    """A count of the records and text files that have the letters of a special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokens_by_prefix: dict[str, list[str]] = {}
        for token in tokenizer.special:
            self._tokens_by_prefix.setdefault(token[:_PREFIX_CHARS], []).append(token)
        self._count = 0
        self._first = ""  # the first special token whose letters were found, and its place
        self._last_place = ""  # the place that was counted last

    def count(self, where: str, texts: Iterable[str]) -> None:
        """Count a record or file if one of these texts has the letters of a special token.

        The texts of one record or file may be given in several calls in a row. The record or file is
        still counted once.

        Args:
            where: the place of the record or file.
            texts: texts of the record or file.
        """
        token = next((token for text in texts for token in self._spelled_tokens(text)), None)
        if token is None or where == self._last_place:
            return
        self._count += 1
        self._last_place = where
        self._first = self._first or f"{token!r} in {where}"

    def notes(self) -> tuple[str, ...]:
        """Return a line for the user, or nothing if no text was counted."""
        if not self._count:
            return ()
        counted = f"{self._count:,} texts spell" if self._count > 1 else "a text spells"
        return (
            f"{counted} special tokens, as {self._first}: in a text these are letters; give chats as messages",
        )

    def _spelled_tokens(self, text: str) -> Iterable[str]:
        """Yield the special tokens whose letters a text has."""
        for prefix, tokens in self._tokens_by_prefix.items():
            if prefix in text:
                yield from (token for token in tokens if token in text)


def text_values(record: Mapping[str, object], *keys: str) -> list[str]:
    """Return the values of a record under these keys that are texts."""
    values = [record.get(key) for key in keys]
    return [value for value in values if isinstance(value, str)]
