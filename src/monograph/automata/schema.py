"""Parse bounded JSON schemas into expressions over bytes (`monograph.automata.expression`).

docs/constraints.md lists the supported keywords.

Every accepted text is JSON that the schema validates, or the same in another notation
(`monograph.automata.values`). It has white space only where the notation has it. Conversely, every valid
value is accepted in this form, with the members of its objects in the schema's order. The exceptions are
values with more digits or characters than the defaults allow, and texts that a notation cannot have.

The lengths of strings and arrays are counted by counters (`monograph.automata.counting`). In two
cases lengths are written out instead, which means that the automaton has a state for each length:

- The next byte does not decide between alternatives that use the counters differently.
- More counted parts are inside each other than there are counters.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes

from monograph.automata import values
from monograph.automata.argument_types import allowed_types, read_as_text, with_ignored
from monograph.automata.counting import COUNTERS, MAX_COUNT, Ambiguous, CounterOperation
from monograph.automata.dfa import Budget, byte_automaton
from monograph.automata.expression import (
    ANY,
    Alternation,
    CodePoints,
    CounterMark,
    Encoding,
    Expression,
    Intersection,
    Repetition,
    WithSource,
    concatenation,
    literal,
    optional,
)
from monograph.automata.pattern import search_expression
from monograph.automata.search import text_before
from monograph.automata.values import COMPACT, ByteNotation
from monograph.errors import InputRefused
from monograph.storage.reading import json_fault, parse_json

# These limits bound the time that any schema can take.
MAX_DEPTH = 32  # the maximum number of schemas inside each other; reading recurses for each
MAX_OPTIONS = 64  # the maximum number of options of 'oneOf'; all pairs of them are compared
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
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
    # In OpenAPI 3.0, "nullable" also allows null. JSON Schema has no such keyword, so here it changes nothing.
    "nullable",
}
# The keywords that an enumeration may have.
_ENUMERATION = {"type", "enum", "const"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Keywords that restrict a value and may be combined.
_ASSERTIONS = {
    *_ENUMERATION,
    *_BOUNDS,
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
}
# Keywords that replace a schema by others; they must stand alone.
_SUBSCHEMAS = ("$ref", "anyOf", "oneOf")
_KEYWORDS = {*_ANNOTATIONS, *_ASSERTIONS, *_SUBSCHEMAS}
# The steps of a `Budget` that are counted for reading one schema.
_SCHEMA_STEPS = 300
# The steps of a `Budget` that are counted for the digit ranges of one number.
_NUMBER_STEPS = 1500
_LARGEST = 10**18  # the largest size or bound that a schema may give


def parse_schema(text: str) -> Any:
    """Parse the text of a schema as JSON.

    Raises:
        InputRefused: the text is not JSON.
    """
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InputRefused(f"the JSON schema cannot be read as JSON: {json_fault(error)}") from None


def schema_expression(
    schema: object,
    uses_counters: bool = True,
    notation: ByteNotation = COMPACT,
    *,
    is_bounded: bool = True,
) -> Expression:
    """Return an expression for the texts that a schema validates.

    Args:
        schema: a JSON schema (draft 2020-12) as `json.loads` returns it.
        uses_counters: whether counters count lengths; False: all lengths are written out.
        notation: how values are written; no other white space is accepted.
        is_bounded: whether a string without 'maxLength' has a default one, and an array without
            'maxItems' is refused; otherwise both may be of any length.

    Raises:
        InputRefused: the schema is unbounded, outside the subset, or malformed; the message has the
            place and the key.
    """
    counters_in_use = 0 if uses_counters else COUNTERS
    reader = _SchemaReader(schema, counters_in_use, notation, is_bounded=is_bounded)
    return reader.read(schema, ("#",))


class _SchemaReader:
    """Reads one JSON schema and the schemas inside it.

    Most methods take such an inner schema and the path to it.

    Attributes:
        root: the schema.
        notation: how the schema now being read is written.
        types: the types of values that may be in the place of the schema now being read, if texts have no
            quotes there.
        terminator: the bytes that follow a text without quotes.
        is_bounded: see `schema_expression`.
        counters_in_use: the number of counters that are used by the arrays around the schema now being
            read. The schema itself uses the next one. If the number is COUNTERS, none is free, and lengths
            are written out.
        expressions: the expressions of the referenced schemas that were read, by (the schema's identity,
            `counters_in_use`, the notation's identity, `types`).
        being_read: the identities of the referenced schemas that are being read.
        budget: limits the time that reading takes.
    """

    def __init__(
        self,
        root: object,
        counters_in_use: int,
        notation: ByteNotation = COMPACT,
        *,
        is_bounded: bool = True,
    ) -> None:
        self.root = root
        self.notation = notation
        self.types: frozenset[str] = frozenset()
        self.terminator = b""
        self.is_bounded = is_bounded
        self.counters_in_use = counters_in_use
        self.expressions: dict[tuple[int, int, int, frozenset[str]], Expression] = {}
        self.being_read: list[int] = []
        self.budget = Budget("the JSON schema")

    def refuse(self, path: tuple[str, ...], fault: str) -> NoReturn:
        """Raise an error that names the place of a schema."""
        raise InputRefused(f"the JSON schema at {pointer(path)}: {fault}")

    def read(self, schema: object, path: tuple[str, ...]) -> Expression:
        """Return an expression for the texts of the schema at `path`."""
        self.budget.schema_path = pointer(path)
        self.budget.spend(_SCHEMA_STEPS)
        if len(path) > MAX_DEPTH:
            # The beginning of such a path is enough to find the place.
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
        # An unknown key may restrict the values. If it were ignored, texts would be accepted that are not
        # valid.
        for key in schema:
            if key not in _KEYWORDS:
                self.refuse(
                    path, f"{key!r} is not supported: leave it out or say the same with other keys"
                )
        for key in _SUBSCHEMAS:
            if key in schema:
                return self._subschema(schema, key, path)
        if "const" in schema or "enum" in schema:
            return self._enumeration(schema, path)
        # Texts of different types begin with different characters, so the first byte decides which type's
        # counters are used.
        return Alternation(
            tuple(self._of_type(name, schema, path) for name in self._types(schema, path))
        )

    def _types(self, schema: dict[str, Any], path: tuple[str, ...]) -> list[str]:
        """Return the types that a schema names."""
        types = schema.get("type")
        if types is None:
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

    def _of_type(self, name: str, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        """Return an expression for the schema's texts of one type."""
        if name == "object":
            return self._object(schema, path)
        if self.notation.has_only_objects:
            self.refuse(path, "the chat template writes arguments one by one: give the type object")
        if name == "array":
            return self._array(schema, path)
        if name == "string":
            return self._string(schema, path)
        if name in ("integer", "number"):
            return self._number(name, schema, path)
        true, false, null = self.notation.words
        if name == "boolean":
            return Alternation((literal(true), literal(false)))
        return literal(null)

    # ── references and choices ────────────────────────────────────────────────────────────────────

    def _subschema(self, schema: dict[str, Any], key: str, path: tuple[str, ...]) -> Expression:
        """Return an expression for a schema with "$ref", "anyOf" or "oneOf"."""
        other_keys = schema.keys() - _ANNOTATIONS - {key}
        if other_keys:
            self.refuse(
                path,
                f"{key!r} next to {min(other_keys)!r} is not supported: let {key!r} stand alone",
            )
        if key == "$ref":
            return self._reference(schema, path)
        return self._options(schema, key, path)

    def _reference(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        """Return an expression for a schema with "$ref", which refers to another schema."""
        name = schema["$ref"]
        target = self.target(name, path)
        # A schema that refers to itself has texts of any depth.
        if id(target) in self.being_read or target is self.root:
            self.refuse(
                path, f"'$ref' to {name!r} is recursive, so it is not bounded: write its levels out"
            )
        # Many schemas may refer to the same target. It is read once for each number of counters in use. All
        # references then have the same expression, which the automaton compiles once.
        key = id(target), self.counters_in_use, id(self.notation), self.types
        if key not in self.expressions:
            self.being_read.append(id(target))
            self.expressions[key] = self.read(target, (*path, "$ref"))
            self.being_read.pop()
        return self.expressions[key]

    def target(self, name: object, path: tuple[str, ...]) -> Any:
        """Return the schema that a reference names.

        Args:
            name: the value of "$ref", a JSON pointer in a URI's fragment (RFC 6901).
            path: the path to the schema with the reference.
        """
        if not isinstance(name, str) or not (
            name == "#" or name.startswith(("#/", "#%2F", "#%2f"))
        ):
            self.refuse(
                path, f"'$ref' to {str(name)[:60]!r} is not supported: refer to '#/$defs/NAME'"
            )
        try:
            # The URI's escapes are decoded before the pointer is split, because a slash may be
            # escaped.
            steps = unquote_to_bytes(name).decode().split("/")[1:]
        except UnicodeError:
            self.refuse(path, f"'$ref' to {name[:60]!r}: its percent escapes are not UTF-8")
        target = self.root
        for step in steps:
            if re.search("~(?![01])", step):
                self.refuse(path, f"'$ref' to {name[:60]!r}: write ~0 for '~' and ~1 for '/'")
            # ~1 is replaced first: otherwise ~01, which stands for ~1, would become a slash.
            key = step.replace("~1", "/").replace("~0", "~")
            is_index = re.fullmatch("0|[1-9][0-9]{0,8}", key) is not None
            if isinstance(target, list) and is_index and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                self.refuse(
                    path, f"'$ref' to {name[:60]!r} leads nowhere: there is no {key[:60]!r}"
                )
        return target

    def _options(self, schema: dict[str, Any], key: str, path: tuple[str, ...]) -> Expression:
        """Return an expression for a schema with "anyOf" or "oneOf"."""
        options = schema[key]
        if not isinstance(options, list) or not 0 < len(options) <= MAX_OPTIONS:
            self.refuse(path, f"{key!r} is not a list of 1 to {MAX_OPTIONS} schemas")
        expressions = self._option_expressions(options, key, path)
        # 'oneOf' demands that exactly one option is valid. The automaton accepts every text that some
        # option accepts, so the options must exclude each other.
        if key == "oneOf":
            overlapping = values.find_overlap(
                options, lambda name: self.target(name, path), self.budget.spend
            )
            if overlapping:
                first, second = overlapping
                self.refuse(
                    path,
                    f"one value may follow options {first} and {second} of 'oneOf': use 'anyOf'",
                )
        return Alternation(tuple(expressions))

    def _option_expressions(
        self, options: list[Any], key: str, path: tuple[str, ...]
    ) -> list[Expression]:
        """Return the expression of each option.

        Lengths in the options are written out, instead of counted, if a byte would not decide which
        option's counters are used.
        """

        def read_options() -> list[Expression]:
            return [
                self.read(option, (*path, f"{key}/{index}")) for index, option in enumerate(options)
            ]

        expressions = read_options()
        if self.counters_in_use == COUNTERS:
            return expressions
        try:
            # The options are compiled only to find out whether the counters are ambiguous.
            byte_automaton(Alternation(tuple(expressions)), self.budget)
        except Ambiguous:
            outer_counters = self.counters_in_use
            self.counters_in_use = COUNTERS
            expressions = read_options()
            self.counters_in_use = outer_counters
        return expressions

    def _enumeration(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        """Return an expression for a schema with "enum" or "const"."""
        other_keys = schema.keys() - _ANNOTATIONS - _ENUMERATION
        if other_keys:
            self.refuse(
                path,
                f"{min(other_keys)!r} next to 'enum' or 'const' is not supported: leave it out",
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
        if self.notation.has_only_objects:
            self.refuse(path, "the chat template writes arguments one by one: give 'properties'")
        options = tuple(self._constant(value) for value in allowed)
        return WithSource(Alternation(options), f"'enum' at {pointer(path)}")

    def _constant(self, value: object) -> Expression:
        """Return an expression for one value of an enumeration."""
        expression = values.constant(value, self.notation)
        if isinstance(value, str) and self.notation.has_bare_texts:
            return self._read_as_text(expression)
        return expression

    def _read_as_text(self, expression: Expression, *operations: CounterOperation) -> Expression:
        """Return an expression without the texts that would be read differently, because they have no quotes.

        A text is read up to its terminator, so it must not have the terminator in it. It must not look like a
        value of another type either, if such a value may be in its place.

        Args:
            expression: the texts.
            operations: the operations on counters in `expression`.
        """
        machines = [text_before(self.terminator)]
        only_text = read_as_text(self.types, self.notation)
        if only_text is not None:
            machines.append(only_text)
        for machine in machines:
            expression = Intersection(expression, with_ignored(machine, *operations))
        return expression

    # ── scalars ───────────────────────────────────────────────────────────────────────────────────

    def _size(
        self, schema: dict[str, Any], key: str, default: int | None, path: tuple[str, ...]
    ) -> int | None:
        """Return a limit on a length, such as "maxLength", or the default if the schema lacks the key.

        None means that there is no limit: the schema has null, or the default is None.
        """
        size = schema.get(key, default)
        if size is None:
            return None
        if not _is_number(size) or size != int(size) or not 0 <= size <= _LARGEST:
            self.refuse(path, f"{key} = {str(size)[:40]}: expected a whole number, 0 or more")
        if size > MAX_COUNT:
            self.refuse(
                path,
                f"{key} = {int(size):,}: at most {MAX_COUNT:,} are counted; give a smaller one",
            )
        return int(size)

    def _string(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        """Return an expression for the strings of a schema."""
        # A schema may have null as a limit. `_size` then returns None, which counts as 0 here.
        min_length = self._size(schema, "minLength", 0, path) or 0
        default_max = min(min_length + values.STRING_LENGTH, MAX_COUNT)
        has_limit = self.is_bounded or schema.get("maxLength") is not None
        max_length = self._size(schema, "maxLength", default_max, path) or 0
        if max_length < min_length:
            self.refuse(path, f"maxLength = {max_length} is below minLength = {min_length}")
        has_counter = has_limit and self.counters_in_use < COUNTERS
        if has_counter:
            characters = self._counted_characters(schema, path, min_length, max_length)
        else:
            characters = self._characters(
                schema, path, min_length, max_length if has_limit else None
            )
        # The keyword that an error names if the automaton is too large.
        if has_limit and not has_counter:
            source = "maxLength"
        elif "pattern" in schema:
            source = "pattern"
        else:
            source = "maxLength" if has_limit else "minLength"
        opening, closing, _ = self.notation.text
        return concatenation(
            literal(opening),
            WithSource(characters, f"{source!r} at {pointer(path)}"),
            literal(closing),
        )

    def _characters(
        self,
        schema: dict[str, Any],
        path: tuple[str, ...],
        min_length: int,
        max_length: int | None,
    ) -> Expression:
        """Return an expression for the characters of a string, whose length is written out."""
        encoding = self.notation.text.encoding
        characters: Expression = Repetition(encoding(ANY), min_length, max_length)
        if "pattern" in schema:
            # A pattern does not limit the length, so the texts must match both.
            characters = Intersection(self._pattern(schema, path, encoding), characters)
        if self.notation.has_bare_texts:
            characters = self._read_as_text(characters)
        return characters

    def _counted_characters(
        self, schema: dict[str, Any], path: tuple[str, ...], min_length: int, max_length: int
    ) -> Expression:
        """Return an expression for the characters of a string, whose length a counter limits."""
        counts = CounterOperation("count", self.counters_in_use)
        character = _counting_encoding(counts, self.notation.text.encoding)
        characters: Expression
        if "pattern" in schema:
            characters = self._pattern(schema, path, character)
            # Only the maximum is counted. The minimum is written out: compiling then removes the beginnings of
            # texts that cannot both match the pattern and become long enough.
            counted_minimum = 0
            if min_length:
                characters = Intersection(characters, Repetition(character(ANY), min_length, None))
        else:
            characters = Repetition(character(ANY), 0, None)
            counted_minimum = min_length
        if self.notation.has_bare_texts:
            characters = self._read_as_text(characters, counts)
        return self._bound_repetitions(characters, counted_minimum, max_length)

    def _pattern(
        self, schema: dict[str, Any], path: tuple[str, ...], encoding: Encoding
    ) -> Expression:
        """Return an expression for the characters of a string that match the schema's pattern."""
        if not isinstance(schema["pattern"], str):
            self.refuse(path, "'pattern' is not a string")
        return search_expression(
            schema["pattern"], f"the JSON schema at {pointer(path)}: the pattern", encoding
        )

    def _bound_repetitions(self, counted: Expression, minimum: int, maximum: int) -> Expression:
        """Return an expression for `minimum` to `maximum` repetitions of a part.

        Args:
            counted: any number of repetitions of the part, each with the operation "count".
            minimum: the smallest number of repetitions.
            maximum: the largest number of repetitions.
        """
        begin = CounterOperation("begin", self.counters_in_use, maximum)
        # The counter counts down from `maximum`, so at most `maximum - minimum` may be left at the end.
        # Without a minimum there is no condition at the end, as MAX_COUNT allows every count.
        max_left = maximum - minimum if minimum else MAX_COUNT
        end = CounterOperation("end", self.counters_in_use, max_left)
        return concatenation(CounterMark(begin), counted, CounterMark(end))

    def _number(self, name: str, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        """Return an expression for the numbers of a schema; `name` is "integer" or "number"."""
        self.budget.spend(_NUMBER_STEPS)
        bounds = {key: schema[key] for key in _BOUNDS if key in schema}
        for key, bound in bounds.items():
            if not _is_number(bound) or abs(bound) > _LARGEST:
                self.refuse(
                    path, f"{key} = {str(bound)[:40]}: expected a number of at most 18 digits"
                )
        largest = 10**values.DIGITS - 1
        if name == "integer":
            lower = math.ceil(bounds.get("minimum", -largest))
            upper = math.floor(bounds.get("maximum", largest))
            if "exclusiveMinimum" in bounds:
                lower = max(lower, math.floor(bounds["exclusiveMinimum"]) + 1)
            if "exclusiveMaximum" in bounds:
                upper = min(upper, math.ceil(bounds["exclusiveMaximum"]) - 1)
            expression = values.integer(lower, upper)
        else:
            # An exclusive bound is not supported, because no decimal number is the next one after it.
            for key, bound in bounds.items():
                if key.startswith("exclusive") or bound != int(bound):
                    self.refuse(
                        path,
                        f"{key} = {bound} of a number is not supported: give a whole minimum and maximum",
                    )
            lower = int(bounds.get("minimum", -largest))
            upper = int(bounds.get("maximum", largest))
            expression = values.number_between(lower, upper) if bounds else values.number()
        if lower > upper:
            self.refuse(path, f"no {name} lies between its bounds")
        return expression

    # ── arrays and objects ────────────────────────────────────────────────────────────────────────

    def _array(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        """Return an expression for the arrays of a schema."""
        prefix = schema.get("prefixItems", [])
        items = schema.get("items")
        if not isinstance(prefix, list) or len(prefix) > MAX_OPTIONS:
            self.refuse(path, f"'prefixItems' is not a list of at most {MAX_OPTIONS} schemas")
        min_items = self._size(schema, "minItems", 0, path) or 0
        # `items` is the schema of the items after the prefix. Without such a schema there are none.
        has_only_prefix = items is False or (bool(prefix) and items is None)
        default_max = len(prefix) if has_only_prefix else None
        max_items = self._size(schema, "maxItems", default_max, path)
        if max_items is None and (self.is_bounded or items is None):
            self.refuse(path, "an array without 'maxItems' is not bounded: give 'maxItems'")
        if max_items is not None and items in (None, False):
            max_items = min(max_items, len(prefix))
        if max_items is not None and max_items < min_items:
            self.refuse(
                path,
                f"no array has as many items as minItems = {min_items}: at most {max_items} are valid",
            )
        opening, separator, closing = self.notation.array
        first_items = [
            self._read_inside(item, (*path, f"prefixItems/{index}"))
            for index, item in enumerate(prefix[:max_items])
        ]
        rest: Expression = concatenation()
        if max_items is None or max_items > len(first_items):
            first_items, rest = self._repeated_items(first_items, items, min_items, max_items, path)
        # The loop goes from the last item to the first. `rest` is everything that may follow the current
        # item; an item that may be missing is optional together with its rest.
        for index in reversed(range(len(first_items))):
            comma = literal(separator) if index else concatenation()
            rest = concatenation(comma, first_items[index], rest)
            if index >= min_items:
                rest = optional(rest)
        return concatenation(literal(opening), rest, literal(closing))

    def _repeated_items(
        self,
        first_items: list[Expression],
        items: object,
        min_items: int,
        max_items: int | None,
        path: tuple[str, ...],
    ) -> tuple[list[Expression], Expression]:
        """Return expressions for the first items of an array, and for the repeated items after them.

        Args:
            first_items: the expressions of 'prefixItems'.
            items: the schema of the items after them.
            min_items: the smallest number of all items.
            max_items: the largest number of all items, larger than that of `first_items`; None: no limit.
            path: the path to the array's schema.

        Returns:
            The expressions of the first items, at least one, and the expression for the items after
            them, each with a comma before it.
        """
        # The array's first item has no comma before it, so it is not one of the repeated items.
        if not first_items:
            first_items = [self._read_inside(items, (*path, "items"))]
        minimum = max(min_items - len(first_items), 0)
        maximum = None if max_items is None else max_items - len(first_items)
        if maximum == 0:
            return first_items, concatenation()
        comma = literal(self.notation.array[1])
        if maximum is None or self.counters_in_use == COUNTERS:
            item = concatenation(comma, self._read_inside(items, (*path, "items")))
            repetition = Repetition(item, minimum, maximum)
            source = "minItems" if maximum is None else "maxItems"
            return first_items, WithSource(repetition, f"{source!r} at {pointer(path)}")
        count = CounterMark(CounterOperation("count", self.counters_in_use))
        self.counters_in_use += 1
        item = concatenation(count, comma, self._read_inside(items, (*path, "items")))
        self.counters_in_use -= 1
        # `remove_operations` assumes that a counted part can be repeated until its count is low enough for
        # the end. That does not hold for an item whose expression matches no text. So if the array needs such an
        # item, the repetition itself requires one, and then the expression of the array matches no text either.
        repeated = Repetition(item, min(minimum, 1), None)
        return first_items, self._bound_repetitions(repeated, minimum, maximum)

    def _object(self, schema: dict[str, Any], path: tuple[str, ...]) -> Expression:
        """Return an expression for the objects of a schema, with members in the schema's order."""
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
        required_names = set(required)
        opening, middle, separator, closing = self.notation.member
        # Each member except the first has a comma before it, and optional members may be left out. So each
        # member that may come first is an option, followed by the later members with their commas. Members
        # are read from the last to the first. `after` has the later members.
        after: list[Expression] = []
        options: list[Expression] = []
        for name, member in reversed(self.notation.in_order(properties or {})):
            self._require_readable(name, path)
            value = self._read_inside(member, (*path, f"properties/{escape_for_pointer(name)}"))
            text = concatenation(
                values.quoted(name, self.notation.name),
                literal(middle),
                value,
                literal(self.notation.after_value),
            )
            self.budget.spend(len(after))
            # If this member is required, no later member can come first.
            if name in required_names:
                options = []
            options = [concatenation(text, *after), *options]
            with_comma = concatenation(literal(separator), text)
            after = [with_comma if name in required_names else optional(with_comma), *after]
        if not required_names:
            options.append(concatenation())
        return concatenation(literal(opening), Alternation(tuple(options)), literal(closing))

    def _read_inside(self, schema: object, path: tuple[str, ...]) -> Expression:
        """Return an expression for the texts of a schema inside an array or object."""
        outer = self.notation, self.types, self.terminator
        self.terminator = self.notation.after_value
        self.notation = self.notation.inside or self.notation
        self.types = frozenset()
        if self.notation.has_bare_texts:
            self.types = allowed_types(schema, self.root)
        expression = self.read(schema, path)
        self.notation, self.types, self.terminator = outer
        return expression

    def _require_readable(self, name: str, path: tuple[str, ...]) -> None:
        """Refuse a member's name if a reader could not tell where it ends."""
        quotes = self.notation.name
        if quotes.closing or quotes.is_escaped:
            return
        _, middle, _, closing = self.notation.member
        name_and_middle = name.encode() + middle
        # A reader ends the name at the first `middle`, and takes `closing` for the end of the object.
        ends_early = name_and_middle.find(middle) < len(name.encode())
        is_closing = bool(closing) and not quotes.opening and name_and_middle.startswith(closing)
        if ends_early or is_closing:
            self.refuse(
                path,
                f"the member {name[:60]!r} has {middle.decode(errors='replace')!r}, by which the chat template ends "
                "a name: give it another one",
            )


def pointer(path: tuple[str, ...]) -> str:
    """Return the place of a schema as a JSON pointer (RFC 6901), its first 200 characters."""
    return "/".join(path)[:200]


def escape_for_pointer(name: str) -> str:
    """Return a name with the escapes of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _counting_encoding(operation: CounterOperation, encoding: Encoding) -> Encoding:
    """Return an encoding that puts an operation before each character."""
    # Expressions are stored here, so that equal sets of characters share one expression.
    expressions: dict[CodePoints, Expression] = {}

    def encode(points: CodePoints) -> Expression:
        if points not in expressions:
            expressions[points] = concatenation(CounterMark(operation), encoding(points))
        return expressions[points]

    return encode


def _is_number(value: object) -> bool:
    if isinstance(value, bool):  # a bool is an int in Python
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
