"""Find out which types a schema allows, and what a text without quotes is read as.

A call whose arguments are fields has texts without quotes, e.g. `5`, which may be a number or a text. It is
a number if the schema allows one there, and else a text: `monograph.text.field_reader` reads it so, and
`monograph.automata.schema` never writes a text that would be read as something else.
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

    An argument about whose type nothing is known has all types, as has one that is not in the result.
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
        tools: the tools, as a chat template reads them. Those of another form are left out.
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
        root: the schema in which it is, to which references lead.
    """
    return _TypeReader(root).types(schema)


class _TypeReader:
    """Finds the types that schemas allow. It remembers them, as many schemas may refer to one."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}  # by the schema's identity

    def types(self, schema: object, depth: int = 0) -> frozenset[str]:
        """Return the types that a schema allows; all of them if nothing is known.

        Args:
            schema: a schema inside the root, or the root.
            depth: how many schemas it is an option or a reference of.
        """
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return TYPES
        key = id(schema)
        if key not in self._known:
            self._known[key] = frozenset()  # what a schema that leads to itself adds
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
    stated = leaf.get("type")
    listed = stated if isinstance(stated, list) else [stated]
    names = TYPES.intersection(name for name in listed if isinstance(name, str))
    if "const" in leaf or isinstance(leaf.get("enum"), list):
        constants = [leaf["const"]] if "const" in leaf else leaf["enum"]
        found = frozenset[str]().union(*map(type_names, constants))
        return found & names if names else found
    return names or TYPES


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
    """Return the schema that a reference in a fragment names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = root
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isascii() and key.isdigit() and len(key) < 9:
            target = target[int(key)] if int(key) < len(target) else None
        elif isinstance(target, Mapping):
            target = target.get(key)
        else:
            return None
    return target


def read_as_text(types: Collection[str], notation: ByteNotation) -> StateMachine | None:
    """Return an expression for the texts that are read as nothing but texts; None: all of them are.

    Args:
        types: the types that may stand there.
        notation: how values are written.
    """
    others: list[Expression] = []
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
    return complement(Alternation(tuple(others)), Budget("a text")) if others else None


def with_ignored(machine: StateMachine, *operations: CounterOperation) -> StateMachine:
    """Return a machine that ignores operations on counters."""
    return StateMachine(machine.rows, machine.accepting, machine.symbols_of, operations)
