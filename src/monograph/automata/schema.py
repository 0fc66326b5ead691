"""Reads bounded JSON schemas into byte expressions; docs/constraints.md lists the supported
keywords.

Every accepted text is compact JSON that the schema validates. Every valid value is accepted in
compact form, with the members of its objects in the schema's order, unless it has more digits or
characters than the defaults allow.

The lengths of strings and arrays are counted (`counting`). Where a byte does not decide between
alternatives whose counters differ, and where more parts lie inside each other than there are
counters, they are written out.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes

from monograph.automata import values
from monograph.automata.counting import COUNTERS, MAX_COUNT, Ambiguous, Operation
from monograph.automata.dfa import Budget, byte_automaton
from monograph.automata.expression import (
    ANY,
    Alternation,
    CodePoints,
    Encoding,
    Expression,
    Intersection,
    Mark,
    Repetition,
    WithSource,
    in_json,
    joined,
    literal,
    optional,
)
from monograph.automata.pattern import search_expression
from monograph.errors import InputRefused
from monograph.storage.reading import json_fault, parse_json

# Reading recurses, and options are compared in pairs: limits keep a stranger's schema from taking
# long.
MAX_DEPTH, MAX_OPTIONS = 32, 64
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
# Keywords that do not restrict a value.
_ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
}
_ANNOTATIONS |= {"$schema", "$id", "$comment", "$defs", "definitions"}
_VALUES = {"type", "enum", "const"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ASSERTIONS = {
    *_VALUES,
    *_BOUNDS,
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
}
_ASSERTIONS |= {"minItems", "maxItems", "minLength", "maxLength", "pattern"}
# What reading one schema, and the digit ranges of one number, cost in steps of a `Budget`.
_STEPS, _NUMBER_STEPS = 300, 1500
_LARGEST = 10**18  # the largest size or bound that a schema may give


def parsed(text: str) -> Any:
    """Parse a schema given as text.

    Raises:
        InputRefused: the text is not JSON.
    """
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InputRefused(f"the JSON schema cannot be read as JSON: {json_fault(error)}") from None


def document(schema: object, counted: bool = True) -> Expression:
    """Return an expression for the compact JSON texts that a schema validates.

    Args:
        schema: a JSON schema (draft 2020-12) as `json.loads` returns it.
        counted: whether to count lengths; otherwise all are written out.

    Raises:
        InputRefused: the schema is unbounded, outside the subset, or malformed; the message has the
            place and the key.
    """
    return _Schemas(schema, 0 if counted else COUNTERS).read(schema, ("#",))


class _Schemas:
    """A reader of one JSON schema; its methods take a schema that lies inside it, and the path to
    that schema.
    """

    def __init__(self, root: object, counters: int) -> None:
        self.root = root
        self.counters = counters  # in use around what is being read
        self.known: dict[tuple[int, int], Expression] = {}  # what each reference was read into
        # The schemas, by identity, that references lead to and that are being read.
        self.open: list[int] = []
        self.budget = Budget("the JSON schema")

    def refuse(self, path: tuple[str, ...], fault: str) -> NoReturn:
        raise InputRefused(f"the JSON schema at {pointer(path)}: {fault}")

    def read(self, schema: object, path: tuple[str, ...]) -> Expression:
        """Return an expression for the texts of the schema at `path`."""
        self.budget.schema_path = pointer(path)
        self.budget.spend(_STEPS)
        if len(path) > MAX_DEPTH:
            self.refuse(
                path[:4], f"schemas lie more than {MAX_DEPTH} deep in each other: make it flatter"
            )
        if schema is True or schema == {}:
            self.refuse(path, "any value is valid here, so it is not bounded: give a type")
        if not isinstance(schema, dict):
            self.refuse(
                path,
                f"{str(schema)[:40]!r} is no schema that any value could follow: give an object",
            )
        # A key that is not known might narrow the values, and the text would then not be valid.
        for key in schema:
            if key not in _ANNOTATIONS | _ASSERTIONS | {"$ref", "anyOf", "oneOf"}:
                self.refuse(
                    path, f"{key!r} is not supported: leave it out or say the same with other keys"
                )
        for key in ("$ref", "anyOf", "oneOf"):
            if key in schema:
                if others := schema.keys() - _ANNOTATIONS - {key}:
                    self.refuse(
                        path,
                        f"{key!r} next to {min(others)!r} is not supported: let {key!r} stand alone",
                    )
                return (
                    self._reference(schema, path)
                    if key == "$ref"
                    else self._options(schema, key, path)
                )
        if "const" in schema or "enum" in schema:
            return self._enumeration(schema, path)
        # The types of a list begin with different characters, so their counters are not mixed up.
        return Alternation(
            tuple(self._typed(name, schema, path) for name in self._types(schema, path))
        )

    def _types(self, schema: dict[str, Any], path: tuple[str, ...]) -> list[str]:
        if (types := schema.get("type")) is None:
            self.refuse(
                path, "a value of any type is valid here, so it is not bounded: give 'type'"
            )
        names = types if isinstance(types, list) else [types]
        for name in names:
            if name not in _TYPES:
                self.refuse(path, f"type {str(name)[:40]!r} is none of {', '.join(_TYPES)}")
        if not names:
            self.refuse(path, "'type' names no type")
        return names

    def _typed(self, name: str, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        readers = {"object": self._object, "array": self._array, "string": self._string}
        if name in readers:
            return readers[name](schema, path)
        if name in ("integer", "number"):
            return self._number(name, schema, path)
        return (
            Alternation((literal(b"true"), literal(b"false")))
            if name == "boolean"
            else literal(b"null")
        )

    # ── references and choices ────────────────────────────────────────────────────────────────────

    def _reference(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        name = schema["$ref"]
        target = self.target(name, path)
        # A schema that is open leads back to itself: its texts have no bound on their depth.
        if id(target) in self.open or target is self.root:
            self.refuse(
                path, f"'$ref' to {name!r} is recursive, so it is not bounded: write its levels out"
            )
        # Read once: schemas may refer to one part many times, and the automaton shares its states,
        # too.
        key = id(target), self.counters
        if key not in self.known:
            self.open.append(id(target))
            self.known[key] = self.read(target, (*path, "$ref"))
            self.open.pop()
        return self.known[key]

    def target(self, name: object, path: tuple[str, ...]) -> Any:
        """Return the schema that a reference names by a JSON pointer in a URI's fragment (RFC
        6901).
        """
        if not isinstance(name, str) or not (
            name == "#" or name.startswith(("#/", "#%2F", "#%2f"))
        ):
            self.refuse(
                path, f"'$ref' to {str(name)[:60]!r} is not supported: refer to '#/$defs/NAME'"
            )
        try:
            # First the URI's escapes, of which one may be a slash, and then the pointer's.
            steps = unquote_to_bytes(name).decode().split("/")[1:]
        except UnicodeError:
            self.refuse(path, f"'$ref' to {name[:60]!r}: its percent escapes are no UTF-8")
        target = self.root
        for step in steps:
            if re.search("~(?![01])", step):
                self.refuse(path, f"'$ref' to {name[:60]!r}: write ~0 for '~' and ~1 for '/'")
            # ~1 first, or ~01 would become a slash.
            step = step.replace("~1", "/").replace("~0", "~")
            if (
                isinstance(target, list)
                and re.fullmatch("0|[1-9][0-9]{0,8}", step)
                and int(step) < len(target)
            ):
                target = target[int(step)]
            elif isinstance(target, dict) and step in target:
                target = target[step]
            else:
                self.refuse(
                    path, f"'$ref' to {name[:60]!r} leads nowhere: there is no {step[:60]!r}"
                )
        return target

    def _options(self, schema: dict[str, Any], key: str, path: tuple[str, ...]) -> Expression:
        options = schema[key]
        if not isinstance(options, list) or not 0 < len(options) <= MAX_OPTIONS:
            self.refuse(path, f"{key!r} is not a list of 1 to {MAX_OPTIONS} schemas")
        texts = self._alternatives(options, key, path)
        # An automaton accepts a text by any option; that exactly one fits has to be known
        # beforehand.
        if key == "oneOf":
            if shared := values.overlap(
                options, lambda name: self.target(name, path), self.budget.spend
            ):
                self.refuse(
                    path,
                    f"one value may follow options {shared[0]} and {shared[1]} of 'oneOf': use 'anyOf'",
                )
        return Alternation(tuple(texts))

    def _alternatives(
        self, options: list[Any], key: str, path: tuple[str, ...]
    ) -> list[Expression]:
        """Return the texts of each option, without counters if a byte would not say which option's
        are to count.
        """
        paths = [(*path, f"{key}/{index}") for index in range(len(options))]
        texts = [self.read(option, place) for option, place in zip(options, paths, strict=True)]
        if self.counters < COUNTERS:
            try:
                byte_automaton(Alternation(tuple(texts)), self.budget)
            except Ambiguous:
                outer = self.counters
                self.counters = COUNTERS
                texts = [
                    self.read(option, place) for option, place in zip(options, paths, strict=True)
                ]
                self.counters = outer
        return texts

    def _enumeration(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        if others := schema.keys() - _ANNOTATIONS - _VALUES:
            self.refuse(
                path, f"{min(others)!r} next to 'enum' or 'const' is not supported: leave it out"
            )
        allowed = schema.get("enum", [schema.get("const")])
        if not isinstance(allowed, list) or not all(map(values.is_json, allowed)):
            self.refuse(path, "'enum' is not a list of JSON values")
        self.budget.spend(len(str(schema)))
        if "const" in schema:
            allowed = [value for value in allowed if values.equal(value, schema["const"])]
        if "type" in schema:
            types = set(self._types(schema, path))
            allowed = [value for value in allowed if types & values.type_names(value)]
        if not allowed:
            self.refuse(path, "no value of 'enum' and 'const' is valid")
        return WithSource(
            Alternation(tuple(map(values.constant, allowed))), f"'enum' at {pointer(path)}"
        )

    # ── scalars ───────────────────────────────────────────────────────────────────────────────────

    def _size(
        self, schema: dict[str, Any], key: str, default: int | None, path: tuple[str, ...]
    ) -> int | None:
        size = schema.get(key, default)
        if size is not None and (
            not _is_number(size) or size != int(size) or not 0 <= size <= _LARGEST
        ):
            self.refuse(path, f"{key} = {str(size)[:40]}: expected a whole number, 0 or more")
        if size is not None and size > MAX_COUNT:
            self.refuse(
                path,
                f"{key} = {int(size):,}: at most {MAX_COUNT:,} are counted; give a smaller one",
            )
        return size if size is None else int(size)

    def _string(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        least = self._size(schema, "minLength", 0, path) or 0
        most = (
            self._size(schema, "maxLength", min(least + values.STRING_LENGTH, MAX_COUNT), path) or 0
        )
        if most < least:
            self.refuse(path, f"maxLength = {most} is below minLength = {least}")
        length: Expression
        key = "maxLength"
        if self.counters == COUNTERS:
            length = Repetition(in_json(ANY), least, most)
            if "pattern" in schema:
                # Intersected, because a pattern limits no length, and a string must have one.
                length = Intersection(self._pattern(schema, path, in_json), length)
        else:
            character = _counted(Operation("count", self.counters), in_json)
            if "pattern" in schema:
                key = "pattern"
                length = self._pattern(schema, path, character)
                if least:
                    length = Intersection(length, Repetition(character(ANY), least, None))
                least = 0
            else:
                length = Repetition(character(ANY), 0, None)
            length = self._bounded(length, least, most)
        return joined(
            literal(b'"'), WithSource(length, f"{key!r} at {pointer(path)}"), literal(b'"')
        )

    def _pattern(
        self, schema: dict[str, Any], path: tuple[str, ...], encoding: Encoding
    ) -> Expression:
        """Return an expression for the characters of a string that match the schema's pattern."""
        if not isinstance(schema["pattern"], str):
            self.refuse(path, "'pattern' is not a string")
        return search_expression(
            schema["pattern"], f"the JSON schema at {pointer(path)}: the pattern", encoding
        )

    def _bounded(self, counted: Expression, least: int, most: int) -> Expression:
        """Return an expression for repetitions, of which each has the operation "count", within
        bounds.
        """
        begin = Operation("begin", self.counters, most)
        end = Operation("end", self.counters, most - least if least else MAX_COUNT)
        return joined(Mark(begin), counted, Mark(end))

    def _number(self, name: str, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        self.budget.spend(_NUMBER_STEPS)
        bounds = {key: schema[key] for key in _BOUNDS if key in schema}
        for key, bound in bounds.items():
            if not _is_number(bound) or abs(bound) > _LARGEST:
                self.refuse(
                    path, f"{key} = {str(bound)[:40]}: expected a number of at most 18 digits"
                )
        largest = 10**values.DIGITS - 1
        # An open bound of whole numbers is the next whole number; one of decimals has no next
        # number.
        if name == "integer":
            lower = [math.ceil(bounds.get("minimum", -largest))]
            lower += [math.floor(bounds[key]) + 1 for key in bounds if key == "exclusiveMinimum"]
            upper = [math.floor(bounds.get("maximum", largest))]
            upper += [math.ceil(bounds[key]) - 1 for key in bounds if key == "exclusiveMaximum"]
            text = values.integer(max(lower), min(upper))
        else:
            for key, bound in bounds.items():
                if key.startswith("exclusive") or bound != int(bound):
                    self.refuse(
                        path,
                        f"{key} = {bound} of a number is not supported: give a whole minimum and maximum",
                    )
            lower = [int(bounds.get("minimum", -largest))]
            upper = [int(bounds.get("maximum", largest))]
            text = values.number_between(lower[0], upper[0]) if bounds else values.number()
        if max(lower) > min(upper):
            self.refuse(path, f"no {name} lies between its bounds")
        return text

    # ── arrays and objects ────────────────────────────────────────────────────────────────────────

    def _array(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        first = schema.get("prefixItems", [])
        items = schema.get("items")
        if not isinstance(first, list) or len(first) > MAX_OPTIONS:
            self.refuse(path, f"'prefixItems' is not a list of at most {MAX_OPTIONS} schemas")
        least = self._size(schema, "minItems", 0, path) or 0
        most = self._size(
            schema,
            "maxItems",
            len(first) if items is False or (first and items is None) else None,
            path,
        )
        if most is None:
            self.refuse(path, "an array without 'maxItems' is not bounded: give 'maxItems'")
        if items in (None, False):
            most = min(most, len(first))
        if most < least:
            self.refuse(
                path, f"no array has as many items as minItems = {least}: at most {most} are valid"
            )
        texts = [
            self.read(item, (*path, f"prefixItems/{index}"))
            for index, item in enumerate(first[:most])
        ]
        more: Expression = joined()
        if most > len(texts):
            texts, more = self._further(texts, items, least, most, path)
        # From the last item to the first, so that each item is followed by everything that may come
        # after it.
        for index in reversed(range(len(texts))):
            more = joined(literal(b",") if index else joined(), texts[index], more)
            more = optional(more) if index >= least else more
        return joined(literal(b"["), more, literal(b"]"))

    def _further(
        self, texts: list[Expression], items: object, least: int, most: int, path: tuple[str, ...]
    ) -> tuple[list[Expression], Expression]:
        """Return the texts of an array's first items, at least one, and that of those which follow
        them.
        """
        if not texts:
            texts = [self.read(items, (*path, "items"))]
        fewest = max(least - len(texts), 0)
        further = most - len(texts)
        if not further:
            return texts, joined()
        if self.counters == COUNTERS:
            item = joined(literal(b","), self.read(items, (*path, "items")))
            return texts, WithSource(
                Repetition(item, fewest, further), f"'maxItems' at {pointer(path)}"
            )
        count = Mark(Operation("count", self.counters))
        self.counters += 1
        item = joined(count, literal(b","), self.read(items, (*path, "items")))
        self.counters -= 1
        return texts, self._bounded(Repetition(item, 0, None), fewest, further)

    def _object(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        properties = schema.get("properties")
        required = schema.get("required", [])
        if schema.get("additionalProperties", False) is not False:
            self.refuse(
                path,
                "'additionalProperties' lets in members of any name, so it is not bounded: set it to false",
            )
        if properties is None and "additionalProperties" not in schema:
            self.refuse(path, "an object of any members is not bounded: give 'properties'")
        if not isinstance(properties, Mapping | None):
            self.refuse(path, "'properties' is not an object of schemas")
        if not isinstance(required, list):
            self.refuse(path, "'required' is not a list of names")
        for name in required:
            if not isinstance(name, str) or name not in (properties or {}):
                self.refuse(path, f"the required member {str(name)[:60]!r} is not in 'properties'")
        required = set(required)
        # Go from the last member to the first: `after` holds what may follow a member, `firsts` the
        # texts that begin with each member that may come first.
        after: list[Expression] = []
        firsts: list[Expression] = []
        for name, member in reversed([*(properties or {}).items()]):
            text = joined(
                values.constant(name),
                literal(b":"),
                self.read(member, (*path, f"properties/{escaped(name)}")),
            )
            self.budget.spend(len(after))
            firsts = [joined(text, *after), *(firsts if name not in required else [])]
            following = joined(literal(b","), text)
            after = [following if name in required else optional(following), *after]
        return joined(
            literal(b"{"), Alternation((*firsts, *([] if required else [joined()]))), literal(b"}")
        )


def pointer(path: tuple[str, ...]) -> str:
    """Return the place of a schema as a JSON pointer (RFC 6901), of at most 200 characters."""
    return "/".join(path)[:200]


def escaped(name: str) -> str:
    """Return a name as a JSON pointer writes it."""
    return name.replace("~", "~0").replace("/", "~1")


def _counted(operation: Operation, encoding: Encoding) -> Encoding:
    """Return an encoding in which an operation stands before each character."""
    known: dict[CodePoints, Expression] = {}

    def encoded(points: CodePoints) -> Expression:
        if points not in known:
            known[points] = joined(Mark(operation), encoding(points))
        return known[points]

    return encoded


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        or isinstance(value, float)
        and math.isfinite(value)
    )
