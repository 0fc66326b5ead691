# Run: pytest tests/decode/automata/test_schema.py    (a thousand random schemas: -m slow)
"""What an automaton accepts is valid, what is valid and compact it accepts, and what is not bounded is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from automata_vocabularies import END, random_text
from clocks import least_s
from json_schemas import follows, random_schema, random_value
from monograph.decode.automata import constraint
from monograph.decode.automata.dfa import MAX_WORK, ByteAutomaton, compiled
from monograph.decode.automata.schema import _STEPS, _Schemas, document, parsed
from monograph.errors import InputRefused

BYTES = [b"", b"", *(bytes([byte]) for byte in range(256))]
PIECES = [
    *BYTES,
    b'{"',
    b'":',
    b'",',
    b'","',
    b"true",
    b"null",
    b"[]",
    b"12",
    b"a\\",
    b'"}',
    "é".encode(),
    b"\\u00",
    b".5",
]


def automaton(schema: Any) -> ByteAutomaton:
    return compiled(document(schema), "the JSON schema")


def compact(value: Any, ascii_only: bool) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=ascii_only).encode()


def check(schemas: int, seed: int) -> tuple[int, int]:
    """How many values and sampled texts agreed with the validator."""
    draw, values, texts = random.Random(seed), 0, 0
    for _ in range(schemas):
        schema = random_schema(draw)
        ours = automaton(schema)
        for _ in range(10):
            value = random_value(draw, schema)
            for ascii_only in (False, True):
                accepts = ours.accepts(compact(value, ascii_only))
                assert accepts == follows(value, schema), (schema, value)
            values += accepts
        tokens = constraint("json_schema", schema, PIECES, [END])
        for _ in range(4):
            text = random_text(tokens, PIECES, draw)
            assert ours.accepts(text) and follows(json.loads(text), schema), (schema, text)
            texts += 1
    return values, texts


def test_valid_is_accepted_and_accepted_is_valid() -> None:
    values, texts = check(60, seed=0)
    assert values > 300 and texts == 240


@pytest.mark.slow
def test_valid_is_accepted_and_accepted_is_valid_for_many_schemas() -> None:
    check(1000, seed=1)


PERSON = {
    "$defs": {"tag": {"type": "string", "maxLength": 3}},
    "title": "A person",
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "mail": {"anyOf": [{"type": "string", "pattern": "^[a-z]+@[a-z]+$"}, {"type": "null"}]},
    },
    "required": ["name", "mail"],
}


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"name":"Zoé","age":7,"tags":["a","b"],"mail":"a@b"}', True),
        ('{"name":"","mail":null}', True),
        ('{"name":"\\ud835\\udd18","mail":null}', True),
        ('{"name":"\\ud835","mail":null}', False),
        ('{"name":"\t","mail":null}', False),
        ('{"name":"' + "x" * 64 + '","mail":null}', True),
        ('{"name":"' + "x" * 65 + '","mail":null}', False),
        ('{"name":"a","age":121,"mail":null}', False),
        ('{"name":"a","age":07,"mail":null}', False),
        ('{"name":"a","tags":["abcd"],"mail":null}', False),
        ('{"name":"a","mail":"@b"}', False),
        ('{"mail":null,"name":"a"}', False),
        ('{"name":"a"}', False),
        ('{"name": "a", "mail": null}', False),
    ],
)
def test_an_object(text: str, valid: bool) -> None:
    assert automaton(parsed(json.dumps(PERSON))).accepts(text.encode()) == valid


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "minimum": -12, "exclusiveMaximum": 105}, [-12, -1, 0, 9, 99, 104], [-13, 105, 1000]),
        ({"type": "integer", "minimum": 0.5, "maximum": 2}, [1, 2], [0, 3]),
        ({"type": "integer"}, [0, -1, 10**15 - 1, 1 - 10**15], [10**15]),
        ({"type": "number"}, [0, -1.5, 1e-7, 0.1 + 0.2, 1e20, -0.0], []),
        ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1, 1.0, 0.0], [1.5, -0.5, 2]),
        ({"type": "number", "minimum": -2, "maximum": -1}, [-2, -1, -1.5, -2.0], [0, -2.5, 1.5, -0.5]),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, [[], [1], [1, 2]], [[2], [1, 2, 3]]),
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
        ({"type": "string", "enum": ["a", 1], "title": "x"}, ["a"], [1]),
        ({"enum": [1, "1", True]}, [1, "1", True], [0, False]),
        ({"enum": [1, 2], "const": 2}, [2], [1]),
        ({"oneOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}, ["a", 4], ["ab", None]),
    ],
)
def test_values(schema: Any, inside: list[Any], outside: list[Any]) -> None:
    ours = automaton(schema)
    assert [value for value in inside if not ours.accepts(compact(value, True))] == []
    assert [value for value in outside if ours.accepts(compact(value, True))] == []


def test_oneof_by_a_telling_member() -> None:
    def shape(kind: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"kind": {"const": kind}, "size": {"type": "null"}},
            "required": ["kind"],
        }

    options = {"oneOf": [{"$ref": "#/$defs/a"}, shape("square")], "$defs": {"a": shape("circle")}}
    assert automaton(options).accepts(b'{"kind":"circle","size":null}')
    with pytest.raises(InputRefused, match=r"at \$: one value may follow options 0 and 1 of 'oneOf': use 'anyOf'"):
        automaton({"oneOf": [shape("circle"), shape("circle")]})


def nested(levels: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        # not bounded
        ({"type": "array", "items": {"type": "null"}}, r"at \$: an array without 'maxItems' is not bounded"),
        ({"type": "object"}, r"at \$: an object of any members is not bounded"),
        (
            {"type": "object", "properties": {"a": {}}},
            r"at \$\.properties\.a: any value is valid here, so .* not bounded",
        ),
        ({"type": "object", "properties": {}, "additionalProperties": True}, "any name, so it is not bounded"),
        ({"minLength": 2}, "any type is valid here, so it is not bounded"),
        (True, "any value is valid here, so it is not bounded"),
        ({"$ref": "#"}, "'#' is recursive, so it is not bounded"),
        (
            {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}, "$ref": "#/$defs/t"},
            r"at \$\.\$ref\.items: '\$ref' to '#/\$defs/t' is recursive, so it is not bounded",
        ),
        # not in the subset
        ({"type": "string", "format": "date"}, "'format' is not supported"),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": True}, "'uniqueItems' is not"),
        ({"allOf": [{"type": "null"}]}, "'allOf' is not supported"),
        ({"type": "number", "multipleOf": 2}, "'multipleOf' is not supported"),
        ({"type": "number", "minimum": 0.5}, "minimum = 0.5 of a number is not supported"),
        ({"$ref": "http://example.com/a"}, "is not supported: refer to '#/"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "'anyOf' next to 'type' is not supported"),
        ({"enum": [1], "minimum": 0}, "'minimum' next to 'enum' or 'const' is not supported"),
        ({"type": "string", "pattern": "a(?=b)"}, r"at \$: the pattern: lookahead at position 1"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "options 0 and 1 of 'oneOf'"),
        # no schema, or nothing valid
        ({"type": "text"}, "type 'text' is none of object, array"),
        ({"type": []}, "'type' names no type"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"anyOf": []}, "'anyOf' is not a list of 1 to 64 schemas"),
        ({"anyOf": 3}, "'anyOf' is not a list"),
        ({"type": "string", "maxLength": -1}, "maxLength = -1: expected a whole number"),
        ({"type": "string", "maxLength": "9"}, "maxLength = 9: expected a whole number"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength = 2 is below minLength = 3"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer lies between its bounds"),
        ({"type": "integer", "minimum": "3"}, "minimum = 3: expected a number"),
        ({"type": "array", "maxItems": 1, "minItems": 2, "items": {"type": "null"}}, "no array has as many items"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "the required member 'a' is not in 'properties'"),
        ({"type": "object", "properties": [], "required": []}, "'properties' is not an object"),
        ({"type": "object", "properties": {}, "required": "a"}, "'required' is not a list"),
        ({"enum": []}, "no value of 'enum' and 'const' is valid"),
        ({"enum": [float("nan")]}, "'enum' is not a list of JSON values"),
        ({"type": "string", "enum": [1]}, "no value of 'enum' and 'const' is valid"),
        ({"type": "string", "pattern": 3}, "'pattern' is not a string"),
        ({"type": "string", "pattern": "^a{9}$", "maxLength": 3}, "matches no text at all"),
        ({"type": "string", "pattern": r"[^\s\S]"}, "matches no text at all"),
        (False, "is no schema that any value could follow"),
        (nested(40), "more than 32 deep"),
    ],
)
def test_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(InputRefused, match=words) as caught:
        automaton(schema)
    assert "\n" not in str(caught.value) and "JSON schema" in str(caught.value)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("integer", key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
        *(("string", key) for key in ("minLength", "maxLength")),
        *(("array", key) for key in ("minItems", "maxItems")),
        ("number", "minimum"),
    ],
)
def test_bounds_of_any_number_of_digits(kind: str, key: str, sign: int) -> None:
    schema = {"type": kind, "items": {"type": "null"}, "maxItems": 1} | {key: sign * 10**400}
    with pytest.raises(InputRefused, match=f"{key} = -?10{{20,}}: expected a"):
        automaton(schema)


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, '{"type": nope}', '{"type": "null", "type": "null"}'])
def test_text_that_is_not_json(text: str) -> None:
    with pytest.raises(InputRefused, match="the JSON schema cannot be read as JSON"):
        constraint("json_schema", text, BYTES, [END])


def doubling(levels: int) -> dict[str, Any]:
    """A schema of a few lines that stands for 2 ** levels items."""
    defs: dict[str, Any] = {"d0": {"type": "string", "maxLength": 9}}
    for level in range(levels):
        item = {"$ref": f"#/$defs/d{level}"}
        defs[f"d{level + 1}"] = {"type": "array", "prefixItems": [item, item], "minItems": 2}
    return {"$defs": defs, "$ref": f"#/$defs/d{levels}"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "items": {"type": "string"}, "maxItems": 10**9},
        {"type": "string", "pattern": "(.*a){20}b{0,99}", "maxLength": 10**6},
        doubling(20),
        {"enum": ["x" * 100 + str(number) for number in range(5000)]},
    ],
)
def test_hostile_schemas_are_refused_at_once(schema: Any) -> None:
    def refused() -> None:
        with pytest.raises(InputRefused, match="needs more than .* make it simpler or shorter|more than 32 deep"):
            automaton(schema)

    assert least_s(refused, 2) < 2


def test_many_optional_members() -> None:
    properties = {f"m{number}": {"type": "null"} for number in range(150)}
    ours = automaton({"type": "object", "properties": properties})
    assert (
        ours.accepts(b'{"m0":null,"m149":null}') and ours.accepts(b"{}") and not ours.accepts(b'{"m1":null,"m0":null}')
    )


@pytest.mark.parametrize("part", [{"type": "integer"}, {"type": "number"}, {"type": "null"}, {"const": "x"}])
def test_a_wide_schema_is_refused_before_all_of_it_is_read(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps, which are counted, and not in seconds, which are not the same on two machines."""
    count, read = 0, _Schemas.read

    def counted(self: _Schemas, schema: Any, path: tuple[str, ...]) -> Any:
        nonlocal count
        count += 1
        return read(self, schema, path)

    monkeypatch.setattr(_Schemas, "read", counted)
    for wide in (
        {"type": "object", "properties": {f"p{index}": part for index in range(4000)}},
        {"anyOf": [{"anyOf": [part] * 64}] * 64},
    ):
        count = 0
        with pytest.raises(InputRefused, match="needs more than 1,000,000 steps to build"):
            document(wide)
        assert (count - 1) * _STEPS <= MAX_WORK


def test_values_that_are_compared_are_steps_too() -> None:
    numbers = [list(range(start, start + 2000)) for start in (0, 2000)]
    with pytest.raises(InputRefused, match="needs more than 1,000,000 steps to build"):
        document({"oneOf": [{"enum": each} for each in numbers]})
