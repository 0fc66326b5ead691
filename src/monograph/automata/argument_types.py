"""Find out which types a schema allows, and what a text without quotes is read as.

Some chat templates write each argument of a call as a field, and a string in it without quotes. Then `5` may
be a number or a text. `monograph.text.field_reader` reads it as a number if the schema allows one there, and
else as a text. So `monograph.automata.schema` lets no text through that would be read as a value of another
type.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from monograph.automata.counting import CounterOperation
from monograph.automata.dfa import Budget, complement
from monograph.automata.expression import (
    Alternation,
    Expression,
    Repetition,
    StateMachine,
    byte_range,
    concatenation,
    literal,
)
from monograph.automata.pattern import fullmatch_expression
from monograph.automata.values import ByteNotation, type_names

TYPES = frozenset(("array", "object", "string", "integer", "number", "boolean", "null"))
_INTEGER = "-?(0|[1-9][0-9]*)"
_NUMBER = _INTEGER + r"(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
_MAX_DEPTH = 64  # the maximum number of references and options inside each other


def argument_types(schema: object) -> dict[str, frozenset[str]]:
    """Return the types that each argument of a function may have, by the schema of the arguments.

    If nothing is known about the type of an argument, the argument has all types. An argument that is not in
    the result may have any type, too.
    """
    types: dict[str, frozenset[str]] = {}
    reader = _TypeReader(schema)
    for leaf in _leaves(schema, schema):
        properties = leaf.get("properties")
        if isinstance(properties, Mapping):
            for name, member in properties.items():
                types[name] = types.get(name, frozenset()) | reader.types(member)
    return types


def types_of_tools(tools: Iterable[object]) -> dict[str, dict[str, frozenset[str]]]:
    """Return for each function the types that its arguments may have; see `argument_types`.

    Args:
        tools: the tools, as a chat template reads them. Values of another form are left out.
    """
    types = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            types[function["name"]] = argument_types(function.get("parameters"))
    return types


def allowed_types(schema: object, root: object) -> frozenset[str]:
    """Return the types that a schema allows; all of them if nothing is known.

    Args:
        schema: the schema.
        root: the whole schema around it, in which references are looked up.
    """
    return _TypeReader(root).types(schema)


class _TypeReader:
    """Finds the types that schemas allow, and remembers them, because many schemas may refer to one."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}  # by the schema's identity

    def types(self, schema: object, depth: int = 0) -> frozenset[str]:
        """Return the types that a schema allows; all of them if nothing is known.

        Args:
            schema: a schema inside the root, or the root.
            depth: how many references and options led to the schema.
        """
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return TYPES
        key = id(schema)
        if key not in self._known:
            self._known[key] = frozenset()  # A schema that leads back to itself adds no type.
            options = schema.get("anyOf", schema.get("oneOf"))
            if "$ref" in schema:
                found = self.types(_target(schema["$ref"], self._root), depth + 1)
            elif isinstance(options, list):
                found = frozenset[str]().union(
                    *[self.types(option, depth + 1) for option in options]
                )
            else:
                found = _types_of_leaf(schema)
            self._known[key] = found
        return self._known[key]


def _types_of_leaf(leaf: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema without "$ref", "anyOf" and "oneOf" allows."""
    stated = leaf.get("type")
    names = stated if isinstance(stated, list) else [stated]
    stated_types = TYPES.intersection(name for name in names if isinstance(name, str))
    if not stated_types:
        stated_types = TYPES
    if "const" in leaf:
        constants = [leaf["const"]]
    elif isinstance(leaf.get("enum"), list):
        constants = leaf["enum"]
    else:
        return stated_types
    constant_types = frozenset[str]().union(*map(type_names, constants))
    return stated_types & constant_types


def _leaves(schema: object, root: object) -> list[Mapping[str, Any]]:
    """Return the schemas that are left when "$ref", "anyOf" and "oneOf" are resolved.

    What cannot be resolved is an empty schema, which allows everything.
    """
    leaves: list[Mapping[str, Any]] = []
    waiting = [schema]
    seen: set[int] = set()
    for node in waiting:  # The list grows in the loop body.
        if not isinstance(node, Mapping):
            leaves.append({})
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        options = node.get("anyOf", node.get("oneOf"))
        if "$ref" in node:
            waiting.append(_target(node["$ref"], root))
        elif isinstance(options, list):
            waiting.extend(options)
        else:
            leaves.append(node)
    return leaves


def _target(reference: object, root: object) -> object:
    """Return the schema that a reference such as "#/$defs/NAME" names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = root
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        # No list has an index of nine digits, and int() refuses thousands of them.
        if isinstance(target, list) and key.isascii() and key.isdigit() and len(key) < 9:
            target = target[int(key)] if int(key) < len(target) else None
        elif isinstance(target, Mapping):
            target = target.get(key)
        else:
            return None
    return target


def read_as_text(types: Collection[str], notation: ByteNotation) -> StateMachine | None:
    """Return an expression for the texts without quotes that are not read as a value of another type.

    Args:
        types: the types of values that may be in this place.
        notation: how values are written.

    Returns:
        The expression; None if every text is read as a text.
    """
    others: list[Expression] = []  # the texts that are read as a value of another type
    if "number" in types:
        others.append(fullmatch_expression(_NUMBER, "a number"))
    elif "integer" in types:
        others.append(fullmatch_expression(_INTEGER, "an integer"))
    true, false, null = notation.words
    if "boolean" in types:
        others += [literal(true), literal(false)]
    if "null" in types:
        others.append(literal(null))
    anything = Repetition(byte_range(0, 255), 0, None)
    for name, opening in (("array", notation.array[0]), ("object", notation.member[0])):
        if name in types:
            others.append(concatenation(literal(opening), anything))
    if not others:
        return None
    return complement(Alternation(tuple(others)), Budget("a text"))


def with_ignored(machine: StateMachine, *operations: CounterOperation) -> StateMachine:
    """Return the machine for the same texts, in which these operations on counters may be anywhere."""
    return StateMachine(machine.rows, machine.accepting, machine.symbols_of, operations)
