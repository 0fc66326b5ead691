"""Read arguments that a call has as fields (`monograph.text.notation`), and write them as JSON.

What a text without quotes means depends on the tool's schema: `5` is a number where the schema allows one,
and else the text "5". So the reader gets the types that each argument may have.
`monograph.automata.argument_types` has the same rules. By them, a model that must follow the schema never
writes a text that would be read as a value of another type.

`FieldReader` reads a call that grows token by token. It reads the notation of fields itself, and
`parsed_value` reads the values in them. Both read spellings: strings that have one character below 256 for
each byte, and one further character for each special token.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from monograph.storage.reading import parse_json
from monograph.text.notation import Fields, Notation

# The types of JSON schema. An argument may have all of them if nothing is known about it.
ALL_TYPES = frozenset(("array", "object", "string", "integer", "number", "boolean", "null"))
# For each argument of a tool, the types that it may have.
ArgumentTypes = Mapping[str, Collection[str]]
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")  # in JSON
_WORD_TYPES = ("boolean", "boolean", "null")  # the type of each of these words
_MAX_DEPTH = 64  # the maximum number of values inside each other
_SPACES = re.compile(r"[ \t\r\n]*")


class _Incomplete(Exception):
    """The text ends before its value does; more of the text may follow."""


class _Malformed(Exception):
    """The text does not have a value in this notation."""


class FieldReader:
    """Reads the fields of one call, whose text grows.

    Attributes:
        is_done: whether the last field has ended.
    """

    def __init__(self, fields: Fields, types: ArgumentTypes, ends: Sequence[str]) -> None:
        """Begin before the first field.

        Args:
            fields: how the arguments are written.
            types: the types that each argument may have; an argument that is not in it may have any type.
            ends: the texts that may follow the last field.
        """
        self.is_done = False
        self._fields = fields
        self._types = types
        self._inner = fields.inner
        self._ends = ends
        # A value without quotes ends before one of these characters, if the fields have nothing after values.
        self._end_characters = {text[0] for text in (fields.separator, *ends) if text}
        self._is_first = True  # whether no field has been read yet
        self._value_types = ALL_TYPES  # the types that the value now being read may have
        self._terminator = ""  # what ends the text that is being read
        # The method that reads the next part of a field: `_read_begin`, `_read_name`, `_read_value`, `_read_text` or
        # `_read_after`. It puts the method for the part after it here. It returns True if reading can go on now,
        # and False if it has to wait for more text or the last field has ended.
        self._state = self._read_begin
        self._text = ""  # the text that is not read yet
        self._written: list[str] = []  # the JSON that the current call of `read` returns

    def read(self, text: str) -> tuple[str, int]:
        """Return further characters of the JSON, and how many characters of the text were read for them.

        Args:
            text: all of the call's text that was not read yet.
        """
        self._text = text
        self._written = []
        while not self.is_done and self._state():
            pass
        return "".join(self._written), len(text) - len(self._text)

    def _take(self, size: int) -> str:
        """Remove the first characters of the text, and return them."""
        taken = self._text[:size]
        self._text = self._text[size:]
        return taken

    def _end(self) -> bool:
        """End the JSON, because no further field begins here; return False, as a state does."""
        self._written.append("{}" if self._is_first else "}")
        self.is_done = True
        return False

    def _read_begin(self) -> bool:
        """Read what stands before a name; see `_state`."""
        fields = self._fields
        begin = fields.before if self._is_first else fields.separator + fields.before
        # If nothing stands before a name, only what follows the last field can show that no further field comes.
        if not begin:
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
        """Read a name and what stands after it; see `_state`."""
        spelled_name, found, _ = self._text.partition(self._fields.middle)
        if not found:
            return False
        self._take(len(spelled_name) + len(found))
        name = _decoded(spelled_name)
        before_name = "{" if self._is_first else ", "
        self._written.append(before_name + json.dumps(name, ensure_ascii=False) + ": ")
        self._is_first = False
        self._value_types = frozenset(self._types.get(name, ALL_TYPES))
        self._state = self._read_value
        return True

    def _read_value(self) -> bool:
        """Read a value, or only begin it if it is a text that is not escaped; see `_state`."""
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
        """Begin a text up to `terminator`; return True, as a state does."""
        self._written.append('"')
        self._terminator = terminator
        self._state = self._read_text
        return True

    def _read_text(self) -> bool:
        """Read a text up to its terminator, or as much of it as is certain; see `_state`."""
        end = self._text.find(self._terminator)
        if end >= 0:
            self._written.append(_escaped(_decoded(self._take(end))) + '"')
            # The closing quote belongs to the value. Without quotes the terminator is what stands after a value,
            # which `_read_after` reads.
            if not self._fields.has_bare_texts:
                self._take(len(self._terminator))
            self._state = self._read_after
            return True
        # The end of the text may be the beginning of the terminator. The longest such end is kept back.
        kept = min(len(self._terminator) - 1, len(self._text))
        while not self._terminator.startswith(self._text[len(self._text) - kept :]):
            kept -= 1
        certain = _whole_characters(self._text[: len(self._text) - kept])
        self._written.append(_escaped(_decoded(self._take(certain))))
        return False

    def _read_bare_value(self) -> bool:
        """Read a value in a notation without quotes, which need not be a text; see `_state`."""
        after = self._fields.after
        openings = []  # those of arrays and objects, if the value may be one
        if "array" in self._value_types:
            openings.append(self._inner.array[0])
        if "object" in self._value_types:
            openings.append(self._inner.member[0])
        if any(self._text.startswith(opening) for opening in openings):
            # An array or object may contain what stands after a value, so it is read item by item.
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
        if any(opening.startswith(self._text) for opening in openings):
            return False  # The value may become an array or object.
        value, found, _ = self._text.partition(after)
        if not found:
            return False
        self._take(len(value))
        self._written.append(self._scalar_as_json(_decoded(value)))
        self._state = self._read_after
        return True

    def _scalar_as_json(self, text: str) -> str:
        """Return a value without quotes, which is not an array or object, as JSON."""
        types = self._value_types
        for spelled, word, name in zip(self._fields.words, _WORDS, _WORD_TYPES, strict=True):
            if name in types and text == spelled:
                return word
        number = _NUMBER if "number" in types else _INTEGER
        if types & {"number", "integer"} and number.fullmatch(text):
            return text
        if "string" not in types:
            # The value has none of the types that the schema allows. If it is JSON, it is left as it is, so that
            # the caller sees it.
            try:
                parse_json(text)
                return text
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)

    def _read_marked_value(self) -> bool:
        """Read a value in a notation with quotes, in which each value shows where it ends; see `_state`."""
        try:
            written, end = parsed_value(self._text, 0, self._inner)
        except _Incomplete:
            return False
        except _Malformed:
            # The characters up to the next possible end are taken for a text.
            ends = [self._text.find(character) for character in self._end_characters]
            found_ends = [end for end in ends if end >= 0]
            if not found_ends:
                return False
            end = min(found_ends)
            written = json.dumps(_decoded(self._text[:end]), ensure_ascii=False)
        self._take(end)
        self._written.append(written)
        self._state = self._read_after
        return True

    def _read_after(self) -> bool:
        """Read what stands after a value; see `_state`."""
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

    White space between the parts of arrays and objects does not matter. The functions below, each for a kind of
    value, return and raise the same.

    Args:
        text: a spelling.
        begin: where the value begins.
        notation: how it is written.
        depth: how many arrays and objects are around it.

    Raises:
        _Incomplete: the text ends before the value does.
        _Malformed: there is no value in this notation.
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
    """Return whether a text has a needle at a place.

    Raises:
        _Incomplete: the text ends inside the needle.
    """
    if text.startswith(needle, begin):
        return True
    if begin < len(text) and needle.startswith(text[begin:]):
        raise _Incomplete
    return False


def _parsed_text(text: str, begin: int, notation: Notation) -> tuple[str, int]:
    """Return a text in quotes as JSON, and where it ends."""
    quotes = notation.text
    begin += len(quotes.opening)
    end = text.find(quotes.closing, begin)
    while quotes.is_escaped and end >= 0 and _is_escaped(text, begin, end):
        end = text.find(quotes.closing, end + 1)
    if end < 0:
        raise _Incomplete
    inside = _decoded(text[begin:end])
    if not quotes.is_escaped:
        inside = _escaped(inside)
    written = f'"{inside}"'
    try:
        parse_json(written)
    except ValueError:
        raise _Malformed from None
    return written, end + len(quotes.closing)


def _is_escaped(text: str, begin: int, end: int) -> bool:
    """Return whether a quote is escaped: whether an odd number of backslashes is before it.

    Args:
        text: a spelling.
        begin: where the text in quotes begins.
        end: where the quote is.
    """
    inside = text[begin:end]
    backslashes = len(inside) - len(inside.rstrip("\\"))
    return backslashes % 2 == 1


def _parsed_array(text: str, begin: int, notation: Notation, depth: int) -> tuple[str, int]:
    """Return an array as JSON, and where it ends."""
    opening, separator, closing = notation.array
    items: list[str] = []
    place = _after_spaces(text, begin + len(opening))
    while not _has(text, place, closing):
        if items:
            place = _after_needle(text, place, separator.strip())
            place = _after_spaces(text, place)
        item, place = parsed_value(text, place, notation, depth + 1)
        items.append(item)
        place = _after_spaces(text, place)
    return "[" + ", ".join(items) + "]", place + len(closing)


def _parsed_object(text: str, begin: int, notation: Notation, depth: int) -> tuple[str, int]:
    """Return an object as JSON, and where it ends."""
    opening, middle, separator, closing = notation.member
    members: list[str] = []
    place = begin + len(opening)
    # White space before a name without quotes belongs to the name, so it is not skipped there.
    place_of_name = _after_spaces if notation.name.opening else _same_place
    while not _has(text, place_of_name(text, place), closing):
        if members:
            place = _after_needle(text, place, separator.strip())
        name, place = _parsed_name(text, place_of_name(text, place), notation)
        place = _after_spaces(text, place)
        place = _after_needle(text, place, middle.strip())
        place = _after_spaces(text, place)
        member, place = parsed_value(text, place, notation, depth + 1)
        members.append(f"{name}: {member}")
        place = _after_spaces(text, place)
    return "{" + ", ".join(members) + "}", place_of_name(text, place) + len(closing)


def _parsed_name(text: str, begin: int, notation: Notation) -> tuple[str, int]:
    """Return the name of an object's member as JSON, and where it ends."""
    if notation.name.opening:
        if not _has(text, begin, notation.name.opening):
            raise _Malformed if begin < len(text) else _Incomplete
        # The name is read like a text, with its own quotes.
        return _parsed_text(text, begin, replace(notation, text=notation.name))
    end = text.find(notation.member[1].strip(), begin)
    if end < 0:
        raise _Incomplete
    return json.dumps(_decoded(text[begin:end]), ensure_ascii=False), end


def _after_spaces(text: str, begin: int) -> int:
    """Return the place after white space; raises _Incomplete at the end of the text."""
    spaces = _SPACES.match(text, begin)
    assert spaces is not None
    if spaces.end() == len(text):
        raise _Incomplete
    return spaces.end()


def _same_place(text: str, begin: int) -> int:
    """Return the place itself; raises _Incomplete at the end of the text."""
    if begin == len(text):
        raise _Incomplete
    return begin


def _after_needle(text: str, begin: int, needle: str) -> int:
    """Return the place after a needle; raises _Malformed if the needle is not there."""
    if not _has(text, begin, needle):
        raise _Malformed
    return begin + len(needle)


def _decoded(spelled: str) -> str:
    """Return the text of a spelling; special tokens have none."""
    letters = "".join(character for character in spelled if ord(character) < 256)
    return letters.encode("latin-1").decode(errors="replace")


def _escaped(text: str) -> str:
    """Return a text with the escapes of a JSON string, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _whole_characters(spelled: str) -> int:
    """Return the size of a spelling without an unfinished character of UTF-8 at its end."""
    # Search backwards for the first byte of the last character, which has at most 4 bytes.
    for size in range(1, min(4, len(spelled)) + 1):
        byte = ord(spelled[-size])
        if byte & 0xC0 == 0x80:
            continue  # not the first byte of a character
        # The first byte says how many bytes the character has.
        if byte >> 5 == 0b110:
            expected_size = 2
        elif byte >> 4 == 0b1110:
            expected_size = 3
        else:
            expected_size = 4
        # Below 0xC0 the byte is a whole character, and from 0x100 on it is a special token.
        is_unfinished = 0xC0 <= byte < 0x100 and size < expected_size
        return len(spelled) - size if is_unfinished else len(spelled)
    return len(spelled)
