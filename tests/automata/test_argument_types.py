"""Run: pytest tests/automata/test_argument_types.py

The types that a schema allows, by which a text without quotes is read.
"""

from __future__ import annotations

from typing import Any

import pytest

from monograph.automata import argument_types, types_of_tools
from monograph.automata.argument_types import TYPES, allowed_types


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "enum": ["a", 1]}, {"string"}),
        ({"enum": ["a", 1, 0.5]}, {"string", "integer", "number"}),
        ({"const": None}, {"null"}),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a~1b"}]}, {"integer", "string"}),
        ({"oneOf": [{"type": "array"}, {"anyOf": [{"type": "object"}]}]}, {"array", "object"}),
        ({"$ref": "#/$defs/nowhere"}, TYPES),
        ({"$ref": "#/$defs/itself"}, {"boolean"}),
        ({}, TYPES),
        ({"type": "any"}, TYPES),
        ({"type": 3}, TYPES),
        (True, TYPES),
    ],
)
def test_the_types_of_a_schema(schema: Any, expected: set[str]) -> None:
    itself = {"anyOf": [{"$ref": "#/$defs/itself"}, {"type": "boolean"}]}
    defs = {"a/b": {"type": "string"}, "itself": itself}
    root = {"type": "object", "properties": {"x": schema}, "$defs": defs}
    assert argument_types(root) == {"x": expected}
    assert allowed_types(schema, root) == expected


def test_tools_of_any_form_are_read() -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "null"}}}}
    tools = [{"function": function}, {"name": "g"}, {"function": 1}, 2, {"function": {"name": 3}}]
    assert types_of_tools(tools) == {"f": {"a": {"null"}}, "g": {}}
    assert argument_types(None) == argument_types([1]) == {}


def test_many_references_to_many_options_are_read_once() -> None:
    """20,000 times 20,000 would take minutes."""
    options = {"anyOf": [{"const": number} for number in range(20_000)]}
    properties = {f"p{number}": {"$ref": "#/$defs/many"} for number in range(20_000)}
    types = argument_types({"properties": properties, "$defs": {"many": options}})
    assert len(types) == 20_000 and types["p7"] == {"integer", "number"}
