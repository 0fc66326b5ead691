"""Builds expressions for JSON constants and for numbers within bounds.

`overlap` decides from types, constants and single members whether two schemas exclude each other.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monograph.automata.expression import (
    Alternation,
    Concatenation,
    Expression,
    Repetition,
    boxes,
    byte_range,
    in_json,
    joined,
    literal,
    optional,
    single,
)

STRING_LENGTH = 64  # most characters beyond its least of a string whose schema gives no limit
# Most digits of a number whose schema gives no limit: as many as a float64 holds exactly.
DIGITS = 15
# Most digits behind the point; serialisers write 17 significant ones after at most five zeros.
FRACTION_DIGITS = 22
_DIGIT = byte_range(0x30, 0x39)
_QUOTE = literal(b'"')


def constant(value: object) -> Expression:
    """Return an expression for a JSON value in compact form; its strings match in any form that
    `in_json` accepts.
    """
    if isinstance(value, str):
        return joined(_QUOTE, *(in_json(single(ord(character))) for character in value), _QUOTE)
    if isinstance(value, list):
        return joined(literal(b"["), *_separated([constant(item) for item in value]), literal(b"]"))
    if isinstance(value, Mapping):
        members = [
            joined(constant(name), literal(b":"), constant(item)) for name, item in value.items()
        ]
        return joined(literal(b"{"), *_separated(members), literal(b"}"))
    return literal(json.dumps(value).encode())


def _separated(parts: Sequence[Expression]) -> list[Expression]:
    return [piece for part in parts for piece in (literal(b","), part)][1:]


def integer(least: int, most: int) -> Expression:
    """Return an expression for the whole numbers from `least` to `most`, without leading zeros."""
    # A zero gets no minus sign, so each number has one spelling.
    return Alternation(
        (_natural(max(least, 0), most), joined(literal(b"-"), _natural(max(-most, 1), -least)))
    )


def _natural(least: int, most: int) -> Expression:
    """Return an expression for the whole numbers from `least` >= 0 to `most`; it matches nothing if
    there are none.
    """
    options: list[Expression] = []
    # One alternative for each number of digits: within one length, order of texts is order of
    # numbers.
    for size in range(len(str(least)), len(str(max(most, 0))) + 1):
        first = max(least, 10 ** (size - 1) if size > 1 else 0)
        last = min(most, 10**size - 1)
        if first <= last:
            low, high = ([int(digit) for digit in str(number)] for number in (first, last))
            for box in boxes(low, high, 0, 9):
                options.append(Concatenation(tuple(byte_range(0x30 + a, 0x30 + b) for a, b in box)))
    return Alternation(tuple(options))


def number() -> Expression:
    """Return an expression for numbers of at most DIGITS digits, FRACTION_DIGITS after the point, 2
    in the exponent.
    """
    sign = optional(literal(b"-"))
    exponent = optional(joined(_one_of(b"eE"), optional(_one_of(b"+-")), Repetition(_DIGIT, 1, 2)))
    return joined(sign, _natural(0, 10**DIGITS - 1), optional(_fraction(_DIGIT)), exponent)


def number_between(least: int, most: int) -> Expression:
    """Return an expression for decimals between two whole numbers, both included, without
    exponents.
    """
    return Alternation(
        (_decimals(max(least, 0), most), joined(literal(b"-"), _decimals(max(-most, 0), -least)))
    )


def _decimals(least: int, most: int) -> Expression:
    below = joined(_natural(least, most - 1), optional(_fraction(_DIGIT)))
    # The upper bound itself may only have zeros after its point.
    border = joined(
        _natural(most, most) if most >= least else Alternation(()),
        optional(_fraction(literal(b"0"))),
    )
    return Alternation((below, border))


def _fraction(digit: Expression) -> Expression:
    return joined(literal(b"."), Repetition(digit, 1, FRACTION_DIGITS))


def _one_of(sample: bytes) -> Expression:
    return Alternation(tuple(literal(bytes((byte,))) for byte in sample))


def equal(one: object, other: object) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0 but not true."""
    # True is an int to Python, but no number to JSON.
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
    """Return the types of JSON schema that a value has; a number without a fraction is also an
    integer.
    """
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    kinds = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def is_json(value: object) -> bool:
    """Return whether a Python value is a JSON value: it has no NaN, no infinity, and its names are
    strings.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(map(is_json, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(is_json, value.values()))
    return value is None or isinstance(value, str | int)


def overlap(
    options: Sequence[dict[str, Any]], target: Callable[[str], Any], spend: Callable[[int], None]
) -> tuple[int, int] | None:
    """Return the indices of two schemas that one value may follow, or None if every value follows
    at most one.

    Args:
        options: schemas that have been read, so that they are well formed and not recursive.
        target: returns the schema that a reference names.
        spend: counts comparisons of values, and raises if there are too many.
    """
    apart = _Apart(target, spend)
    for later in range(len(options)):
        for index in range(later):
            if not apart.disjoint(options[index], options[later]):
                return index, later
    return None


class _Apart:
    """Answers to whether two schemas exclude each other, kept for each pair that was asked about."""

    def __init__(self, target: Callable[[str], Any], spend: Callable[[int], None]) -> None:
        self.target, self.spend = target, spend
        self.known: dict[tuple[int, int], bool] = {}

    def disjoint(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return True only if no value follows both schemas."""
        pair = id(one), id(other)
        if pair not in self.known:
            left = self.alternatives(one)
            right = self.alternatives(other)
            self.known[pair] = all(self.plainly_disjoint(a, b) for a in left for b in right)
        return self.known[pair]

    def alternatives(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """Return schemas without references and choices; a value follows `schema` if it follows one
        of them.
        """
        leaves = []
        waiting = [schema]
        seen = set()
        for node in waiting:
            if id(node) in seen:
                continue
            seen.add(id(node))
            choices = [node[key] for key in ("anyOf", "oneOf") if key in node]
            if "$ref" in node:
                waiting.append(self.target(node["$ref"]))
            elif choices:
                waiting.extend(choices[0])
            else:
                leaves.append(node)
        return leaves

    def plainly_disjoint(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return True only if no value follows both schemas, which have no references or choices."""
        left = _constants(one)
        right = _constants(other)
        if left is not None and right is not None:
            self.spend(len(left) * len(right))
            return not any(equal(a, b) for a in left for b in right)
        shared = _kinds(one, left) & _kinds(other, right)
        if shared != {"object"} or left is not None or right is not None:
            return not shared
        # Only members that both require are certain to be there, and one of them that cannot agree
        # is enough.
        names = set(one.get("required", [])) & set(other.get("required", []))
        return any(
            self.disjoint(one["properties"][name], other["properties"][name]) for name in names
        )


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    return schema.get("enum", [schema.get("const")]) if {"enum", "const"} & schema.keys() else None


def _kinds(schema: dict[str, Any], constants: list[Any] | None) -> set[str]:
    """Return the types that a schema's values may have; an integer is a number here."""
    if constants is not None:
        # Counted as numbers alone, since 1.0 is an integer and a number.
        return set().union(*map(type_names, constants)) - {"integer"}
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if name == "integer" else name for name in types}
