"""Find out how a chat template writes the arguments of a call that it does not write as JSON.

Some templates write each argument as a *field*, a name and a value, e.g.

    <parameter=city>
    Oslo
    </parameter>

The fields are found by trying: a call with known arguments is rendered, and the parts of the result that
are not arguments are what the template writes around them. Values of each type are rendered alone, and a
value of all types must then be rendered as expected.

All texts here are spellings: strings that have one character below 256 for each byte, and one further
character for each special token (`monograph.text.calls`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Grammar = dict[str, Any]  # JSON for `monograph.automata.calls`
# A function that returns the parts of a spelling, as JSON.
PartsOf = Callable[[str], list[Any]]


class Quotes(NamedTuple):
    """How a text or a name is written.

    Attributes:
        opening: what stands before it.
        closing: what stands after it.
        is_escaped: whether it is escaped as in JSON.
    """

    opening: str
    closing: str
    is_escaped: bool

    def write(self, text: str) -> str:
        """Return the spelling of a text."""
        if self.is_escaped:
            text = json.dumps(text, ensure_ascii=False)[1:-1]  # without JSON's own quotes
        return self.opening + _spelled(text) + self.closing

    def grammar(self, parts_of: PartsOf) -> Grammar:
        """Return the quotes as JSON for `monograph.automata.calls`."""
        return {
            "opening": parts_of(self.opening),
            "closing": parts_of(self.closing),
            "is_escaped": self.is_escaped,
        }


@dataclass(frozen=True)
class Notation:
    """How values are written.

    Attributes:
        text: how a text is written.
        words: what is written for true, false and null.
        array: what stands before the first item of an array, between two items, and after the last one.
        name: how the name of an object's member is written.
        member: what stands before the first member of an object, between a name and its value, between two
            members, and after the last one.
        is_sorted: whether the members of an object are in the order of their names.
    """

    text: Quotes
    words: tuple[str, str, str]
    array: tuple[str, str, str]
    name: Quotes
    member: tuple[str, str, str, str]
    is_sorted: bool = False

    def write(self, value: Any) -> str:
        """Return the spelling of a JSON value."""
        if isinstance(value, str):
            return self.text.write(value)
        if isinstance(value, bool) or value is None:
            return _word_of(value, self.words)
        if isinstance(value, list):
            opening, separator, closing = self.array
            return opening + separator.join(self.write(item) for item in value) + closing
        if isinstance(value, Mapping):
            opening, middle, separator, closing = self.member
            members = [
                self.name.write(name) + middle + self.write(member)
                for name, member in in_order(value, self.is_sorted)
            ]
            return opening + separator.join(members) + closing
        return json.dumps(value)

    def grammar(self, parts_of: PartsOf) -> Grammar:
        """Return the notation as JSON for `monograph.automata.calls`."""
        return {
            "text": self.text.grammar(parts_of),
            "words": [parts_of(word) for word in self.words],
            "array": [parts_of(text) for text in self.array],
            "name": self.name.grammar(parts_of),
            "member": [parts_of(text) for text in self.member],
            "is_sorted": self.is_sorted,
        }


@dataclass(frozen=True)
class Fields:
    """How the arguments of a call are written: each as a field, which is a name and a value.

    A call with the arguments a = 1 and b = 2 has

        before "a" middle "1" after separator before "b" middle "2" after

    Attributes:
        before: what stands before a name.
        middle: what stands between a name and its value.
        after: what stands after a value.
        separator: what stands between two fields.
        is_sorted: whether the fields are in the order of their names.
        text: how a value that is a text is written.
        words: what is written for a value that is true, false or null.
        inner: how arrays, objects and the values in them are written.
    """

    before: str
    middle: str
    after: str
    separator: str
    is_sorted: bool
    text: Quotes
    words: tuple[str, str, str]
    inner: Notation

    @property
    def has_bare_texts(self) -> bool:
        """Whether nothing marks a text, so that it ends where `after` begins."""
        return not self.text.opening

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return the spelling of arguments."""
        fields = []
        for name, value in in_order(arguments, self.is_sorted):
            name_and_value = _spelled(name) + self.middle + self.write_value(value)
            fields.append(self.before + name_and_value + self.after)
        return self.separator.join(fields)

    def write_value(self, value: Any) -> str:
        """Return the spelling of an argument's value."""
        if isinstance(value, str):
            return self.text.write(value)
        if isinstance(value, bool) or value is None:
            return _word_of(value, self.words)
        return self.inner.write(value)

    def grammar(self, parts_of: PartsOf) -> Grammar:
        """Return the fields as JSON for `monograph.automata.calls`."""
        return {
            "before": parts_of(self.before),
            "middle": parts_of(self.middle),
            "after": parts_of(self.after),
            "separator": parts_of(self.separator),
            "is_sorted": self.is_sorted,
            "text": self.text.grammar(parts_of),
            "words": [parts_of(word) for word in self.words],
            "inner": self.inner.grammar(parts_of),
        }


def in_order(members: Mapping[str, Any], is_sorted: bool) -> list[tuple[str, Any]]:
    """Return the members of an object in the order in which they are written.

    Names are sorted as by Jinja's `dictsort`, which ignores case.
    """
    if is_sorted:
        return sorted(members.items(), key=lambda member: member[0].lower())
    return list(members.items())


def _spelled(text: str) -> str:
    """Return the spelling of a text without special tokens."""
    return text.encode().decode("latin-1")


def _word_of(value: bool | None, words: tuple[str, str, str]) -> str:
    """Return what is written for a value; `words` are for true, false and null."""
    true, false, null = words
    if value is None:
        return null
    return true if value else false


# ── finding the fields ────────────────────────────────────────────────────────────────────────────

# Names and values that no template contains. None of them is part of another one, and the names of each pair are
# in alphabetical order.
_NAMES = ("zqg", "zqi")
_INNER_NAMES = ("zqj", "zql")
_NUMBERS = (70707, 60606)
_TEXT = "zqh"
_SPECIAL_TEXT = 'z"q\\h\n<q>'
_DEEP = {
    "zqj": [1, {"zqk": 'a"\\\n', "zql": [True, None, False, 0.5, -7, "", [], {}]}],
    "zql": "zqh",
}


class NotFound(Exception):
    """The template does not write the arguments as fields."""


def find_fields(render: Callable[[Mapping[str, Any]], str]) -> Fields:
    """Return how a chat template writes arguments as fields.

    Args:
        render: returns the spelling of an answer with one call, which has these arguments.

    Raises:
        NotFound: the template writes them otherwise.
    """
    around = _find_around(render)

    def value(known: Any) -> str:
        """Return the spelling of a value, found by rendering it as the only argument."""
        return _between(render({_NAMES[0]: known}), around.begin, around.end)

    fields = Fields(
        before=around.before,
        middle=around.middle,
        after=around.after,
        separator=around.separator,
        is_sorted=_is_sorted(render, _NAMES),
        text=_find_quotes(value),
        words=(value(True), value(False), value(None)),
        inner=_find_inner(value),
    )
    for known in (_DEEP, [_DEEP], _SPECIAL_TEXT, 0.5, -7, 1e-7):
        if value(known) != fields.write_value(known):
            raise NotFound
    if fields.has_bare_texts:
        # Only what stands after a value says where a text ends.
        is_readable = bool(fields.after)
    else:
        # `monograph.text.field_reader` reads these values in the notation of values inside others.
        inner = fields.inner
        is_readable = fields.text == inner.text and fields.words == inner.words
    if not is_readable:
        raise NotFound
    return fields


class _Around(NamedTuple):
    """What a template writes around fields.

    Attributes:
        begin: the answer's text before the value of its one field.
        end: the answer's text after this value.
        before, middle, after, separator: see `Fields`.
    """

    begin: str
    end: str
    before: str
    middle: str
    after: str
    separator: str


def _find_around(render: Callable[[Mapping[str, Any]], str]) -> _Around:
    """Return what a template writes around fields, found by calls with none, one and two arguments."""
    first, second = _NAMES
    number, other = _NUMBERS
    without = render({})
    with_one = render({first: number})
    with_two = render({first: number, second: other})
    begin, end = _split(with_one, str(number))
    head, middle = _split(begin, first)
    # Find the place of the fields in the answer without fields: the text up to there begins `head`, and the
    # text from there on ends `end`. The rest of `head` is then `before`, and the rest of `end` is `after`.
    places = []
    for place in range(len(without) + 1):
        if head.startswith(without[:place]) and end.endswith(without[place:]):
            places.append(place)
    if not places or not middle:
        raise NotFound
    # If several places are possible, all of them describe the same calls. A place at white space is preferred,
    # because it does not cut a tag in two.
    places_at_space = [place for place in places if without[place : place + 1].isspace()]
    place = (places_at_space or places)[0]
    before = head[place:]
    after = end.removesuffix(without[place:])
    begin_of_second = begin + str(number) + after
    end_of_first = before + second + middle + str(other) + end
    separator = _between(with_two, begin_of_second, end_of_first)
    return _Around(begin, end, before, middle, after, separator)


def _is_sorted(render: Callable[[Mapping[str, Any]], str], names: tuple[str, str]) -> bool:
    """Return whether a template sorts the members of an object by their names.

    Args:
        render: returns the spelling of an object.
        names: two names, in alphabetical order.
    """
    first, second = names
    written = render({second: 1, first: 2})
    return written.index(first) < written.index(second)


def _find_quotes(value: Callable[[Any], str]) -> Quotes:
    """Return how a text is written, by a function that returns the spelling of a value."""
    opening, closing = _split(value(_TEXT), _TEXT)
    for is_escaped in (False, True):
        quotes = Quotes(opening, closing, is_escaped)
        if value(_SPECIAL_TEXT) == quotes.write(_SPECIAL_TEXT):
            return quotes
    raise NotFound


def _find_inner(value: Callable[[Any], str]) -> Notation:
    """Return how arrays and objects are written, by a function that returns the spelling of a value."""
    number, other = _NUMBERS
    # [number, other] is written as: opening number separator other closing.
    array_opening, rest = _split(value([number, other]), str(number))
    array_separator, array_closing = _split(rest, str(other))

    def item(known: Any) -> str:
        """Return the spelling of a value inside an array."""
        return _between(value([known]), array_opening, array_closing)

    first, second = _INNER_NAMES
    # {first: number, second: other} is written as: begin first middle number gap second middle other closing.
    # `begin` is the object's opening and what stands before a name. `gap` is the separator and what stands before a
    # name. The object without members is written as the opening and the closing.
    begin, rest = _split(item({first: number, second: other}), first)
    middle, rest = _split(rest, str(number))
    gap, rest = _split(rest, second)
    _, object_closing = _split(rest, str(other))
    empty = item({})
    if not empty.endswith(object_closing):
        raise NotFound
    object_opening = empty[: len(empty) - len(object_closing)]
    if not begin.startswith(object_opening):
        raise NotFound
    name_opening = begin[len(object_opening) :]
    if not gap.endswith(name_opening):
        raise NotFound
    member_separator = gap[: len(gap) - len(name_opening)]
    text = _find_quotes(item)
    # A name in quotes is escaped like a text. The quote belongs to the name, not to what follows it.
    name_closing = text.closing if name_opening and middle.startswith(text.closing) else ""
    name = Quotes(name_opening, name_closing, text.is_escaped and bool(name_opening))
    return Notation(
        text=text,
        words=(item(True), item(False), item(None)),
        array=(array_opening, array_separator, array_closing),
        name=name,
        member=(object_opening, middle[len(name_closing) :], member_separator, object_closing),
        is_sorted=_is_sorted(item, _INNER_NAMES),
    )


def _split(text: str, needle: str) -> tuple[str, str]:
    """Return what stands before and after a needle, which must occur once."""
    before, found, after = text.partition(needle)
    if not found or needle in after:
        raise NotFound
    return before, after


def _between(text: str, begin: str, end: str) -> str:
    """Return what stands between the known beginning and end of a text."""
    is_known = text.startswith(begin) and text.endswith(end) and len(text) >= len(begin) + len(end)
    if not is_known:
        raise NotFound
    return text[len(begin) : len(text) - len(end)]
