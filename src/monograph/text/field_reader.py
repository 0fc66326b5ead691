"""Read arguments that a call has as fields (`monograph.text.notation`), and write them as JSON.

What a text without quotes is depends on the tool's schema: `5` is a number where a number may be, and else
the text "5". So the reader gets the types that each argument may have. `monograph.automata.argument_types`
has the same rules, and a strict tool never gets a text that would be read as something else.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from monograph.text.notation import Fields, Notation

# The types of JSON schema. An argument may have all of them if nothing is known about it.
ALL_TYPES = frozenset(("array", "object", "string", "integer", "number", "boolean", "null"))
# For each argument of a tool, the types that it may have.
ArgumentTypes = Mapping[str, Collection[str]]
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")  # in JSON
_WORD_TYPES = ("boolean", "boolean", "null")
_MAX_DEPTH = 64
_SPACES = re.compile(r"[ \t\r\n]*")


class _Incomplete(Exception):
    """A value goes on behind the end of the text."""


class _Malformed(Exception):
    """There is no value in this notation."""


class FieldReader:
    """Reads the fields of one call, whose text grows.

    Attributes:
        is_done: whether the last field has ended.
    """

    def __init__(self, fields: Fields, types: ArgumentTypes, ends: Sequence[str]) -> None:
        """Begin before the first field.

        Args:
            fields: how the arguments are written.
            types: the types that arguments may have; one that is not there may have all.
            ends: the texts that may follow the last field.
        """
        self.is_done = False
        self._fields = fields
        self._types = types
        self._inner = fields.inner
        self._ends = ends
        # A value without quotes ends before one of these characters, if the fields have nothing after values.
        self._end_characters = {text[0] for text in (fields.separator, *ends) if text}
        self._is_first = True
        self._value_types = ALL_TYPES
        self._terminator = ""  # what ends the text that is being read
        self._state = self._read_begin
        self._text = ""  # the text that is not read yet
        self._written: list[str] = []

    def read(self, text: str) -> tuple[str, int]:
        """Return further characters of the JSON, and how many characters of the text they are made of.

        Args:
            text: all of the call's text that was not read yet.
        """
        self._text = text
        self._written = []
        while not self.is_done and self._state():
            pass
        return "".join(self._written), len(text) - len(self._text)

    def _take(self, size: int) -> str:
        taken = self._text[:size]
        self._text = self._text[size:]
        return taken

    def _end(self) -> bool:
        self._written.append("}" if not self._is_first else "{}")
        self.is_done = True
        return False

    def _read_begin(self) -> bool:
        """Read what stands before a name; return whether reading can go on (as in the other states)."""
        fields = self._fields
        begin = fields.before if self._is_first else fields.separator + fields.before
        if not begin:  # the end is what tells that there is no field
            if any(self._text.startswith(end) for end in self._ends):
                return self._end()
            if any(end.startswith(self._text) for end in self._ends):
                return False
        if self._text.startswith(begin):
            self._take(len(begin))
            self._state = self._read_name
            return True
        if begin.startswith(self._text):
            return False
        return self._end()

    def _read_name(self) -> bool:
        name, found, _ = self._text.partition(self._fields.middle)
        if not found:
            return False
        self._take(len(name) + len(found))
        text = _decoded(name)
        self._written.append(
            ("{" if self._is_first else ", ") + json.dumps(text, ensure_ascii=False) + ": "
        )
        self._is_first = False
        self._value_types = frozenset(self._types.get(text, ALL_TYPES))
        self._state = self._read_value
        return True

    def _read_value(self) -> bool:
        fields = self._fields
        quotes = fields.text
        if fields.has_bare_texts:
            if self._value_types == {"string"}:
                return self._begin_text(fields.after)
            return self._read_bare_value()
        if not quotes.is_escaped:
            if self._text.startswith(quotes.opening):
                self._take(len(quotes.opening))
                return self._begin_text(quotes.closing)
            if quotes.opening.startswith(self._text):
                return False
        return self._read_marked_value()

    def _begin_text(self, terminator: str) -> bool:
        self._written.append('"')
        self._terminator = terminator
        self._state = self._read_text
        return True

    def _read_text(self) -> bool:
        """Read a text up to its terminator; what is certain is written at once."""
        end = self._text.find(self._terminator)
        if end >= 0:
            self._written.append(_escaped(_decoded(self._take(end))) + '"')
            if not self._fields.has_bare_texts:
                self._take(len(self._terminator))
            self._state = self._read_after
            return True
        # The longest ending that is a beginning of the terminator is kept back.
        kept = min(len(self._terminator) - 1, len(self._text))
        while not self._terminator.startswith(self._text[len(self._text) - kept :]):
            kept -= 1
        certain = _whole_characters(self._text[: len(self._text) - kept])
        self._written.append(_escaped(_decoded(self._take(certain))))
        return False

    def _read_bare_value(self) -> bool:
        """Read a value that may be no text, up to what stands after a value."""
        after = self._fields.after
        types = self._value_types
        containers = [
            opening
            for opening, name in (
                (self._inner.array[0], "array"),
                (self._inner.member[0], "object"),
            )
            if name in types
        ]
        if any(self._text.startswith(opening) for opening in containers):
            # The texts in it may have what stands after a value, so its end is not searched for.
            try:
                written, end = parsed_value(self._text, 0, self._inner)
            except _Incomplete:
                return False
            except _Malformed:
                pass
            else:
                if self._text.startswith(after, end):
                    self._take(end)
                    self._written.append(written)
                    self._state = self._read_after
                    return True
                if after.startswith(self._text[end:]):
                    return False
        if any(opening.startswith(self._text) for opening in containers):
            return False
        value, found, _ = self._text.partition(after)
        if not found:
            return False
        self._take(len(value))
        self._written.append(self._read_as(_decoded(value)))
        self._state = self._read_after
        return True

    def _read_as(self, text: str) -> str:
        """Return a value that is no array or object as JSON."""
        types = self._value_types
        for spelled, word, name in zip(self._fields.words, _WORDS, _WORD_TYPES, strict=True):
            if name in types and text == spelled:
                return word
        number = _NUMBER if "number" in types else _INTEGER
        if types & {"number", "integer"} and number.fullmatch(text):
            return text
        if "string" not in types:
            # It is not what the schema wants. What is JSON stays, so that the caller sees it.
            try:
                json.loads(text)
                return text
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)

    def _read_marked_value(self) -> bool:
        """Read a value in a notation that marks texts, so that each value says where it ends."""
        try:
            written, end = parsed_value(self._text, 0, self._inner)
        except _Incomplete:
            return False
        except _Malformed:
            # What stands there is the value, as a text.
            end = next(
                (
                    place
                    for place, character in enumerate(self._text)
                    if character in self._end_characters
                ),
                -1,
            )
            if end < 0:
                return False
            written = json.dumps(_decoded(self._text[:end]), ensure_ascii=False)
        self._take(end)
        self._written.append(written)
        self._state = self._read_after
        return True

    def _read_after(self) -> bool:
        after = self._fields.after
        if self._text.startswith(after):
            self._take(len(after))
            self._state = self._read_begin
            return True
        if after.startswith(self._text):
            return False
        return self._end()


def parsed_value(text: str, begin: int, notation: Notation, depth: int = 0) -> tuple[str, int]:
    """Return the value in a text as JSON, and where it ends.

    White space between the parts of arrays and objects does not matter.

    Args:
        text: a spelling.
        begin: where the value begins.
        notation: how it is written.
        depth: how many values it is in.

    Raises:
        _Incomplete: the value goes on behind the end of the text.
        _Malformed: there is no such value.
    """
    if depth > _MAX_DEPTH:
        raise _Malformed
    array_opening, _, _ = notation.array
    object_opening, _, _, _ = notation.member
    if _has(text, begin, notation.text.opening):
        return _parsed_text(text, begin, notation)
    if _has(text, begin, array_opening):
        return _parsed_array(text, begin, notation, depth)
    if _has(text, begin, object_opening):
        return _parsed_object(text, begin, notation, depth)
    for spelled, word in zip(notation.words, _WORDS, strict=True):
        if _has(text, begin, spelled):
            return word, begin + len(spelled)
    number = _NUMBER.match(text, begin)
    if number is None:
        if text[begin:] in ("", "-"):
            raise _Incomplete
        raise _Malformed
    if re.fullmatch(r"[0-9.eE+-]*", text[number.end() :]):  # it may become longer
        raise _Incomplete
    return number[0], number.end()


def _has(text: str, begin: int, needle: str) -> bool:
    """Return whether a text has a needle at a place."""
    if text.startswith(needle, begin):
        return True
    if begin < len(text) and needle.startswith(text[begin:]):
        raise _Incomplete
    return False


def _parsed_text(text: str, begin: int, notation: Notation) -> tuple[str, int]:
    quotes = notation.text
    begin += len(quotes.opening)
    end = text.find(quotes.closing, begin)
    while quotes.is_escaped and end >= 0 and _is_escaped(text, begin, end):
        end = text.find(quotes.closing, end + 1)
    if end < 0:
        raise _Incomplete
    inside = _decoded(text[begin:end])
    written = f'"{inside if quotes.is_escaped else _escaped(inside)}"'
    try:
        json.loads(written)
    except ValueError:
        raise _Malformed from None
    return written, end + len(quotes.closing)


def _is_escaped(text: str, begin: int, end: int) -> bool:
    """Return whether an odd number of backslashes stands before a place."""
    inside = text[begin:end]
    return (len(inside) - len(inside.rstrip("\\"))) % 2 == 1


def _parsed_array(text: str, begin: int, notation: Notation, depth: int) -> tuple[str, int]:
    opening, separator, closing = notation.array
    items: list[str] = []
    place = _after_spaces(text, begin + len(opening))
    while not _has(text, place, closing):
        if items:
            place = _after_spaces(text, _after_needle(text, place, separator.strip()))
        item, place = parsed_value(text, place, notation, depth + 1)
        items.append(item)
        place = _after_spaces(text, place)
    return "[" + ", ".join(items) + "]", place + len(closing)


def _parsed_object(text: str, begin: int, notation: Notation, depth: int) -> tuple[str, int]:
    opening, middle, separator, closing = notation.member
    members: list[str] = []
    place = begin + len(opening)
    # White space before a name without quotes belongs to the name.
    before_name = _after_spaces if notation.name.opening else _same_place
    while not _has(text, before_name(text, place), closing):
        if members:
            place = _after_needle(text, place, separator.strip())
        name, place = _parsed_name(text, before_name(text, place), notation)
        place = _after_needle(text, _after_spaces(text, place), middle.strip())
        member, place = parsed_value(text, _after_spaces(text, place), notation, depth + 1)
        members.append(f"{name}: {member}")
        place = _after_spaces(text, place)
    return "{" + ", ".join(members) + "}", before_name(text, place) + len(closing)


def _parsed_name(text: str, begin: int, notation: Notation) -> tuple[str, int]:
    if notation.name.opening:
        if not _has(text, begin, notation.name.opening):
            raise _Malformed if begin < len(text) else _Incomplete
        return _parsed_text(text, begin, replace(notation, text=notation.name))
    end = text.find(notation.member[1].strip(), begin)
    if end < 0:
        raise _Incomplete
    return json.dumps(_decoded(text[begin:end]), ensure_ascii=False), end


def _after_spaces(text: str, begin: int) -> int:
    spaces = _SPACES.match(text, begin)
    assert spaces is not None
    if spaces.end() == len(text):
        raise _Incomplete
    return spaces.end()


def _same_place(text: str, begin: int) -> int:
    if begin == len(text):
        raise _Incomplete
    return begin


def _after_needle(text: str, begin: int, needle: str) -> int:
    """Return where the text goes on after a needle, which must be there."""
    if not _has(text, begin, needle):
        raise _Malformed
    return begin + len(needle)


def _decoded(spelled: str) -> str:
    """Return the text of a spelling; special tokens have none."""
    letters = "".join(character for character in spelled if ord(character) < 256)
    return letters.encode("latin-1").decode(errors="replace")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _whole_characters(spelled: str) -> int:
    """Return the size of a spelling without the bytes of a character that has only begun."""
    for size in range(1, min(4, len(spelled)) + 1):
        character = ord(spelled[-size])
        if character & 0xC0 == 0x80:
            continue  # a byte that goes on
        expected = 2 if character >> 5 == 0b110 else 3 if character >> 4 == 0b1110 else 4
        is_begun = 0xC0 <= character < 0x100 and expected > size
        return len(spelled) - size if is_begun else len(spelled)
    return len(spelled)
