"""Build expressions for JSON constants and for numbers within bounds, and compare schemas.

`ByteNotation` says how values are written, as JSON or in another way. `find_overlap` decides whether schemas
exclude each other, which means that no value is valid for two of them. It compares types, constants, and the
members of objects.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from monograph.automata.expression import (
    Alternation,
    Concatenation,
    Encoding,
    Expression,
    Repetition,
    boxes,
    byte_range,
    concatenation,
    in_json,
    literal,
    optional,
    single,
    utf8,
)

# By default, 'maxLength' is 'minLength' plus this number.
STRING_LENGTH = 64
# The maximum number of digits of a number without bounds. A float64 holds this number of digits exactly.
DIGITS = 15
# The maximum number of digits after the point: serialisers write 17 significant digits after at most
# five zeros.
FRACTION_DIGITS = 22
_DIGIT = byte_range(0x30, 0x39)


class ByteQuotes(NamedTuple):
    """How a text or a name is written.

    Attributes:
        opening: what stands before it.
        closing: what stands after it.
        is_escaped: whether it is spelled as in a JSON string (`in_json`); otherwise it is its UTF-8.
    """

    opening: bytes
    closing: bytes
    is_escaped: bool

    @property
    def encoding(self) -> Encoding:
        """The encoding of the characters."""
        return in_json if self.is_escaped else utf8


_JSON_QUOTES = ByteQuotes(b'"', b'"', is_escaped=True)


@dataclass(frozen=True)
class ByteNotation:
    """How values are written.

    Attributes:
        text: how a text is written.
        words: what is written for true, false and null.
        array: what stands before the first item of an array, between two items, and after the last one.
        name: how the name of an object's member is written.
        member: what stands before the first member of an object, between a name and its value, between two
            members, and after the last one.
        after_value: what stands after the value of a member. A text without quotes ends there, so it cannot
            contain these bytes.
        is_sorted: whether members are in the order of their names; otherwise they keep the order that they have
            in the schema.
        inside: the notation of the values of members and of items; None: this one.
        has_only_objects: whether only objects can be written.
    """

    text: ByteQuotes = _JSON_QUOTES
    words: tuple[bytes, bytes, bytes] = (b"true", b"false", b"null")
    array: tuple[bytes, bytes, bytes] = (b"[", b",", b"]")
    name: ByteQuotes = _JSON_QUOTES
    member: tuple[bytes, bytes, bytes, bytes] = (b"{", b":", b",", b"}")
    after_value: bytes = b""
    is_sorted: bool = False
    inside: "ByteNotation | None" = None
    has_only_objects: bool = False

    @property
    def has_bare_texts(self) -> bool:
        """Whether texts have no quotes."""
        return not self.text.opening

    def in_order(self, members: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return the members of an object in the order in which they are written.

        Names are sorted as by Jinja's `dictsort`, which ignores case.
        """
        if self.is_sorted:
            return sorted(members.items(), key=lambda member: member[0].lower())
        return list(members.items())


COMPACT = ByteNotation()


def json_notation(item: bytes, key: bytes) -> ByteNotation:
    """Return the notation of JSON.

    Args:
        item: what stands between two members or items.
        key: what stands after the name of a member.
    """
    return ByteNotation(array=(b"[", item, b"]"), member=(b"{", key, item, b"}"))


def constant(value: object, notation: ByteNotation = COMPACT) -> Expression:
    """Return an expression for a JSON value in a notation."""
    inside = notation.inside or notation
    if isinstance(value, str):
        return quoted(value, notation.text)
    true, false, null = notation.words
    if value is None:
        return literal(null)
    if isinstance(value, bool):
        return literal(true if value else false)
    if isinstance(value, list):
        opening, separator, closing = notation.array
        items = [constant(item, inside) for item in value]
        parts = _separated(items, separator)
        return concatenation(literal(opening), *parts, literal(closing))
    if isinstance(value, Mapping):
        opening, middle, separator, closing = notation.member
        members = [
            concatenation(quoted(name, notation.name), literal(middle), constant(member, inside))
            for name, member in notation.in_order(value)
        ]
        parts = _separated(members, separator)
        return concatenation(literal(opening), *parts, literal(closing))
    return literal(json.dumps(value).encode())


def quoted(text: str, quotes: ByteQuotes) -> Expression:
    """Return an expression for a text in quotes."""
    characters = [quotes.encoding(single(ord(character))) for character in text]
    return concatenation(literal(quotes.opening), *characters, literal(quotes.closing))


def _separated(parts: Sequence[Expression], separator: bytes) -> list[Expression]:
    """Return the parts with a separator between each two."""
    separated: list[Expression] = []
    for part in parts:
        if separated:
            separated.append(literal(separator))
        separated.append(part)
    return separated


def integer(minimum: int, maximum: int) -> Expression:
    """Return an expression for the whole numbers from `minimum` to `maximum`.

    Each number has one spelling: without leading zeros, and 0 without a minus sign.
    """
    not_negative = _natural(max(minimum, 0), maximum)
    negative = concatenation(literal(b"-"), _natural(max(-maximum, 1), -minimum))
    return Alternation((not_negative, negative))


def _natural(minimum: int, maximum: int) -> Expression:
    """Return an expression for the whole numbers from `minimum` >= 0 to `maximum`.

    If there are none, it matches nothing.
    """
    options: list[Expression] = []
    fewest_digits = len(str(minimum))
    most_digits = len(str(max(maximum, 0)))
    # There is one option for each number of digits: texts of one length have the order of their
    # numbers, which `boxes` needs.
    for size in range(fewest_digits, most_digits + 1):
        smallest = 10 ** (size - 1) if size > 1 else 0
        first = max(minimum, smallest)
        last = min(maximum, 10**size - 1)
        if first <= last:
            first_digits = [int(digit) for digit in str(first)]
            last_digits = [int(digit) for digit in str(last)]
            for box in boxes(first_digits, last_digits, 0, 9):
                digits = [byte_range(0x30 + lowest, 0x30 + highest) for lowest, highest in box]
                options.append(Concatenation(tuple(digits)))
    return Alternation(tuple(options))


def number() -> Expression:
    """Return an expression for numbers without bounds.

    They have up to DIGITS digits before the point, FRACTION_DIGITS after it, and 2 in the exponent.
    """
    sign = optional(literal(b"-"))
    exponent = optional(
        concatenation(_one_of(b"eE"), optional(_one_of(b"+-")), Repetition(_DIGIT, 1, 2))
    )
    return concatenation(sign, _natural(0, 10**DIGITS - 1), optional(_fraction(_DIGIT)), exponent)


def number_between(minimum: int, maximum: int) -> Expression:
    """Return an expression for decimals from `minimum` to `maximum`, without exponents."""
    not_negative = _decimals(max(minimum, 0), maximum)
    negative = concatenation(literal(b"-"), _decimals(max(-maximum, 0), -minimum))
    return Alternation((not_negative, negative))


def _decimals(minimum: int, maximum: int) -> Expression:
    """Return an expression for decimals from `minimum` >= 0 to `maximum`.

    If there are none, it matches nothing.
    """
    below_maximum = concatenation(_natural(minimum, maximum - 1), optional(_fraction(_DIGIT)))
    # The maximum itself may only have zeros after its point.
    whole_maximum = _natural(maximum, maximum) if maximum >= minimum else Alternation(())
    maximum_itself = concatenation(whole_maximum, optional(_fraction(literal(b"0"))))
    return Alternation((below_maximum, maximum_itself))


def _fraction(digit: Expression) -> Expression:
    """Return an expression for a point and up to FRACTION_DIGITS digits."""
    return concatenation(literal(b"."), Repetition(digit, 1, FRACTION_DIGITS))


def _one_of(characters: bytes) -> Expression:
    return Alternation(tuple(literal(bytes((byte,))) for byte in characters))


def equal(one: object, other: object) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0, but not true."""
    # In Python, True equals 1.
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            equal(value, other[name]) for name, value in one.items()
        )
    return bool(one == other)


def type_names(value: object) -> set[str]:
    """Return the types that JSON schema gives a value, e.g. "integer" and "number" for 1.0."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def is_json(value: object) -> bool:
    """Return whether a Python value is a JSON value.

    It must not contain NaN or infinity, and the names of members must be strings.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(map(is_json, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(is_json, value.values()))
    return value is None or isinstance(value, str | int)


def find_overlap(
    options: Sequence[dict[str, Any]], target: Callable[[str], Any], spend: Callable[[int], None]
) -> tuple[int, int] | None:
    """Find two schemas that may both be valid for the same value.

    Args:
        options: schemas. `monograph.automata.schema` must have read them before, which refuses schemas that are
            malformed or recursive.
        target: returns the schema that a reference names.
        spend: counts comparisons of values, and raises if there are too many.

    Returns:
        The indices of the first such schemas; None if each value is valid for at most one schema.
    """
    comparison = _Comparison(target, spend)
    for second in range(len(options)):
        for first in range(second):
            if not comparison.disjoint(options[first], options[second]):
                return first, second
    return None


class _Comparison:
    """Decides whether two schemas exclude each other, and caches the answer for each pair."""

    def __init__(self, target: Callable[[str], Any], spend: Callable[[int], None]) -> None:
        self.target = target
        self.spend = spend
        self.answers: dict[tuple[int, int], bool] = {}

    def disjoint(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return whether it is certain that no value is valid for both schemas.

        False does not mean that there is such a value: the lengths of strings, for example, are not compared.
        """
        pair = id(one), id(other)
        if pair not in self.answers:
            left = self.alternatives(one)
            right = self.alternatives(other)
            self.answers[pair] = all(self.alternatives_disjoint(a, b) for a in left for b in right)
        return self.answers[pair]

    def alternatives(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas that are left when "$ref", "anyOf" and "oneOf" of `schema` are resolved.

        A value that is valid for `schema` is valid for one of them.
        """
        leaves = []
        waiting = [schema]
        seen = set()
        for node in waiting:  # The list grows in the loop body.
            if id(node) in seen:
                continue
            seen.add(id(node))
            if "$ref" in node:
                waiting.append(self.target(node["$ref"]))
            elif "anyOf" in node:
                waiting.extend(node["anyOf"])
            elif "oneOf" in node:
                waiting.extend(node["oneOf"])
            else:
                leaves.append(node)
        return leaves

    def alternatives_disjoint(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return what `disjoint` returns, for schemas without "$ref", "anyOf" and "oneOf"."""
        left_constants = _constants(one)
        right_constants = _constants(other)
        if left_constants is not None and right_constants is not None:
            self.spend(len(left_constants) * len(right_constants))
            return not any(equal(a, b) for a in left_constants for b in right_constants)
        shared_types = _types(one, left_constants) & _types(other, right_constants)
        any_constants = left_constants is not None or right_constants is not None
        if any_constants or shared_types != {"object"}:
            return not shared_types
        # If both schemas require a member, every value that is valid for both has it. So the schemas exclude
        # each other if their schemas of one such member do.
        names = set(one.get("required", [])) & set(other.get("required", []))
        return any(
            self.disjoint(one["properties"][name], other["properties"][name]) for name in names
        )


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists with "enum" or "const"; None if it lists none."""
    if "enum" in schema or "const" in schema:
        values: list[Any] = schema.get("enum", [schema.get("const")])
        return values
    return None


def _types(schema: dict[str, Any], constants: list[Any] | None) -> set[str]:
    """Return the types that a schema's values may have, with "number" for "integer"."""
    # "integer" is replaced, because 1.0 is an integer and a number, so the two types overlap.
    if constants is not None:
        return set().union(*map(type_names, constants)) - {"integer"}
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if name == "integer" else name for name in types}
