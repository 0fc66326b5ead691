# Run: pytest tests/automata/test_schema.py    (a thousand random schemas: -m slow)
"""What an automaton accepts is valid, what is valid and compact it accepts, and what is not bounded
is refused.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from automata_vocabularies import END, allowed_ids, is_over, random_text
from clocks import least_s
from daily import nightly
from json_schemas import follows, random_schema, random_value
from monograph.automata import constraint
from monograph.automata.counting import COUNTERS, MAX_COUNT
from monograph.automata.dfa import (
    MAX_POSITIONS,
    MAX_STATES,
    MAX_WORK,
    ByteAutomaton,
    compile_expression,
)
from monograph.automata.pattern import MAX_PATTERN_LENGTH
from monograph.automata.schema import _SCHEMA_STEPS, _SchemaReader, parse_schema, schema_expression
from monograph.automata.tokens import MAX_CELLS, MAX_EFFECTS, constraint_automaton
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
    return compile_expression(schema_expression(schema), "the JSON schema")


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
    values, texts = check(20, seed=0)
    assert values > 100 and texts == 80


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
    assert automaton(parse_schema(json.dumps(PERSON))).accepts(text.encode()) == valid


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (
            {"type": "integer", "minimum": -12, "exclusiveMaximum": 105},
            [-12, -1, 0, 9, 99, 104],
            [-13, 105, 1000],
        ),
        ({"type": "integer", "minimum": 0.5, "maximum": 2}, [1, 2], [0, 3]),
        ({"type": "integer"}, [0, -1, 10**15 - 1, 1 - 10**15], [10**15]),
        (
            {"type": "number"},
            [0, -1.5, 1e-7, 0.1 + 0.2, 1e20, -0.0, 1 - 10**15, 1e99],
            [10**15, -(10**15), 1e100],
        ),
        ({"type": "number", "minimum": 0}, [0, 10**15 - 1, 10**15 - 1.5], [10**15, -1]),
        ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1, 1.0, 0.0], [1.5, -0.5, 2]),
        (
            {"type": "number", "minimum": -2, "maximum": -1},
            [-2, -1, -1.5, -2.0],
            [0, -2.5, 1.5, -0.5],
        ),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]},
            [[], [1], [1, 2]],
            [[2], [1, 2, 3]],
        ),
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
        ({"type": "string", "enum": ["a", 1], "title": "x"}, ["a"], [1]),
        ({"type": "string", "enum": ["a", None], "nullable": True}, ["a"], [None]),
        ({"enum": [1, "1", True]}, [1, "1", True], [0, False]),
        ({"enum": [1, 2], "const": 2}, [2], [1]),
        (
            {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]},
            ["a", 4],
            ["ab", None],
        ),
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
    with pytest.raises(
        InputRefused, match=r"at #: one value may follow options 0 and 1 of 'oneOf': use 'anyOf'"
    ):
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
        (
            {"type": "array", "items": {"type": "null"}},
            r"at #: an array without 'maxItems' is not bounded",
        ),
        ({"type": "object"}, r"at #: an object of any members is not bounded"),
        (
            {"type": "object", "properties": {"a": {}}},
            r"at #/properties/a: any value is valid here, so .* not bounded",
        ),
        (
            {"type": "object", "properties": {}, "additionalProperties": True},
            "any name, so it is not bounded",
        ),
        ({"minLength": 2}, "any type is valid here, so it is not bounded"),
        (True, "any value is valid here, so it is not bounded"),
        ({"$ref": "#"}, "'#' is recursive, so it is not bounded"),
        (
            {
                "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
                "$ref": "#/$defs/t",
            },
            r"at #/\$ref/items: '\$ref' to '#/\$defs/t' is recursive, so it is not bounded",
        ),
        # not in the subset
        ({"type": "string", "format": "date"}, "'format' is not supported"),
        (
            {"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": True},
            "'uniqueItems' is not",
        ),
        ({"allOf": [{"type": "null"}]}, "'allOf' is not supported"),
        ({"type": "number", "multipleOf": 2}, "'multipleOf' is not supported"),
        ({"type": "number", "minimum": 0.5}, "minimum = 0.5 of a number is not supported"),
        ({"$ref": "http://example.com/a"}, "is not supported: refer to '#/"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "'anyOf' next to 'type' is not supported"),
        ({"enum": [1], "minimum": 0}, "'minimum' next to 'enum' or 'const' is not supported"),
        ({"type": "string", "pattern": "a(?=b)"}, r"at #: the pattern: lookahead at position 1"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "options 0 and 1 of 'oneOf'"),
        # no schema, or nothing valid
        ({"type": "text"}, "type 'text' is none of object, array"),
        ({"type": []}, "'type' names no type"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"anyOf": []}, "'anyOf' is not a list of 1 to 64 schemas"),
        ({"anyOf": 3}, "'anyOf' is not a list"),
        ({"type": "string", "maxLength": -1}, "maxLength = -1: expected a whole number"),
        ({"type": "string", "maxLength": "9"}, "maxLength = 9: expected a whole number"),
        (
            {"type": "string", "minLength": 3, "maxLength": 2},
            "maxLength = 2 is below minLength = 3",
        ),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer lies between its bounds"),
        ({"type": "integer", "minimum": "3"}, "minimum = 3: expected a number"),
        (
            {"type": "array", "maxItems": 1, "minItems": 2, "items": {"type": "null"}},
            "no array has as many items",
        ),
        (
            {"type": "object", "properties": {}, "required": ["a"]},
            "the required member 'a' is not in 'properties'",
        ),
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
        *(
            ("integer", key)
            for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        ),
        *(("string", key) for key in ("minLength", "maxLength")),
        *(("array", key) for key in ("minItems", "maxItems")),
        ("number", "minimum"),
    ],
)
def test_bounds_of_any_number_of_digits(kind: str, key: str, sign: int) -> None:
    schema = {"type": kind, "items": {"type": "null"}, "maxItems": 1} | {key: sign * 10**400}
    with pytest.raises(InputRefused, match=f"{key} = -?10{{20,}}: expected a"):
        automaton(schema)


@pytest.mark.parametrize(
    "text", ["{", "", "[" * 100_000, '{"type": nope}', '{"type": "null", "type": "null"}']
)
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
        {"type": "string", "pattern": "^(.*a){90}b{0,99}(a|b)*a(a|b){40}$", "maxLength": 10**4},
        {
            "anyOf": [
                {"type": "string", "maxLength": 10**4},
                {"type": "string", "maxLength": 9999, "pattern": "a"},
            ]
        },
        doubling(20),
        {"enum": ["x" * 100 + str(number) for number in range(5000)]},
    ],
)
def test_hostile_schemas_are_refused_at_once(schema: Any) -> None:
    def refused() -> None:
        with pytest.raises(
            InputRefused, match="needs more than .* make it simpler or shorter|more than 32 deep"
        ):
            automaton(schema)

    assert least_s(refused, 2) < 2


TOOL = {
    "type": "object",
    "properties": {
        **{f"text{number}": {"type": "string", "maxLength": 4000} for number in range(20)},
        **{f"plain{number}": {"type": "string"} for number in range(5)},
        "content": {"type": "string", "minLength": 1, "maxLength": 32767},
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]+$", "minLength": 1, "maxLength": 299},
        "rows": {
            "type": "array",
            "maxItems": 100,
            "items": {
                "type": "object",
                "properties": {
                    "labels": {
                        "type": "array",
                        "items": {"type": "string", "maxLength": 200},
                        "maxItems": 100,
                    },
                    "kind": {"enum": ["a", "b"]},
                    "size": {"type": ["integer", "null"]},
                },
                "required": ["kind"],
            },
        },
    },
    "required": ["name"],
}


def test_an_ordinary_tools_schema_is_small() -> None:
    ours = automaton(TOOL)
    assert len(ours.next_SK) < 2500 and len(ours.effects) < 64
    row = {"labels": ["x" * 200] * 100, "kind": "b", "size": None}
    small = {"labels": [], "kind": "a"}
    valid = [
        {"text3": "é" * 4000, "name": "a" * 299},
        {"content": "\n" * 32767, "name": "a"},
        {"name": "a", "rows": [row, *[small] * 99]},
    ]
    invalid = [
        {"text3": "é" * 4001, "name": "a"},
        {"content": "", "name": "a"},
        {"content": "x" * 32768, "name": "a"},
        {"name": "a" * 300},
        {"name": "a b"},
        {"name": "a", "rows": [small] * 101},
        {"name": "a", "rows": [small, small | {"labels": ["x"] * 101}]},
        {"name": "a", "rows": [small, small | {"labels": ["x" * 201]}]},
    ]
    for ascii_only in (True, False):
        assert [value for value in valid if not ours.accepts(compact(value, ascii_only))] == []
        assert [value for value in invalid if ours.accepts(compact(value, ascii_only))] == []


def same_allowed(schema: Any, draw: random.Random, walks: int) -> int:
    """How many states of random texts allow the same tokens with counters as with each length
    written out.
    """
    counting = constraint("json_schema", schema, PIECES, [END])
    written = constraint_automaton(
        compile_expression(schema_expression(schema, uses_counters=False), "it"),
        PIECES,
        [END],
        "it",
    )
    assert not written.has_counters
    compared = 0
    for _ in range(walks):
        states = (0, 0)
        for _ in range(60):
            allowed = allowed_ids(counting, states[0])
            assert allowed == allowed_ids(written, states[1]), schema
            assert is_over(counting, states[0]) == is_over(written, states[1])
            compared += counting.has_counters
            token = draw.choice(sorted(allowed))
            if token == END:
                break
            states = (counting.after(states[0], token), written.after(states[1], token))
    return compared


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 2, "maxLength": 5},
        {"type": "string", "pattern": "^(aa)*é?$", "maxLength": 5},
        {"type": "string", "pattern": "^(aa)*é?$", "minLength": 2, "maxLength": 5},
        {"type": "string", "pattern": "[0-9]a", "minLength": 1, "maxLength": 4},
        {
            "type": "array",
            "items": {"type": "string", "maxLength": 2},
            "minItems": 2,
            "maxItems": 4,
        },
        {
            "type": "array",
            "prefixItems": [{"const": "a"}],
            "items": {"type": "integer"},
            "minItems": 3,
            "maxItems": 4,
        },
        {"anyOf": [{"enum": ["a", "abc"]}, {"type": "string", "minLength": 2, "maxLength": 3}]},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "string", "maxLength": 1}, "maxItems": 2},
            "maxItems": 3,
        },
        {
            "anyOf": [
                {"type": "array", "items": {"type": "string", "maxLength": n}, "maxItems": n}
                for n in (2, 3)
            ]
        },
        {
            "type": "object",
            "properties": {
                "a": {"type": "string", "maxLength": 3, "pattern": "^b{4}$"},
                "b": {"type": "null"},
            },
        },
    ],
)
def test_a_counter_allows_what_can_still_be_finished(schema: Any) -> None:
    """The other side, lengths written out, is compared with brute force in test_lift."""
    same_allowed(schema, random.Random(0), 25)


@pytest.mark.parametrize("schemas", nightly([15, 60], {15}))
def test_counters_allow_what_can_still_be_finished_for_random_schemas(schemas: int) -> None:
    draw = random.Random(5)
    assert sum(same_allowed(random_schema(draw), draw, 3) for _ in range(schemas)) > 5 * schemas


def test_without_a_token_for_each_byte_lengths_are_not_counted() -> None:
    """After three letters only one more would fit, which no token writes: a counter alone would not
    see that.
    """
    pieces = [b"", b"", b'"', b"ab", b"abc"]
    automaton = constraint(
        "json_schema", {"type": "string", "minLength": 4, "maxLength": 4}, pieces, [END]
    )
    assert not automaton.has_counters
    assert allowed_ids(automaton, automaton.after(0, 2)) == {3}
    assert allowed_ids(automaton, automaton.after(automaton.after(0, 2), 3)) == {3}


def test_more_counted_parts_inside_each_other_than_counters_are_written_out() -> None:
    schema: Any = {"type": "string", "maxLength": 1}
    for _ in range(4):
        schema = {"type": "array", "items": schema, "maxItems": 2}
    ours = automaton(schema)
    assert ours.accepts(b'[[[["a"],["a","b"]]]]') and not ours.accepts(b'[[[["a","b","c"]]]]')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "b/c": {"type": "string", "pattern": "^.{900}$"},
                },
            },
            r"needs more than 20,000 positions, the most of them for 'pattern' at #/properties/b~1c; make",
        ),
        (
            {"anyOf": [{"const": "x"}, {"type": "string", "maxLength": 4000}]},
            r"more than 20,000 positions, the most of them for 'maxLength' at #/anyOf/1; make",
        ),
        (
            {"type": "object", "properties": {"a": {"enum": [["x" * 9000] * 9]}}},
            r"for 'enum' at #/properties/a; make",
        ),
        (
            {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(4000)}},
            r"more than 1,000,000 steps to build, when #/properties/p[0-9]+ is read; make",
        ),
        (
            {"type": "array", "items": {"type": "string", "maxLength": 32768}, "maxItems": 9},
            r"at #/items: maxLength = 32,768: at most 32,767 are counted; give a smaller one",
        ),
        (
            {"type": "array", "items": {"type": "null"}, "maxItems": 10**9},
            r"at #: maxItems = 1,000,000,000: at most",
        ),
    ],
)
def test_what_is_too_large_is_named_by_place_key_and_limit(schema: Any, words: str) -> None:
    with pytest.raises(InputRefused, match=words):
        automaton(schema)


def test_the_page_names_the_limits_that_hold() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "constraints.md").read_text()
    sizes = " ".join(page.partition("## Sizes")[2].split())
    for limit, unit in (
        (MAX_STATES, "states"),
        (MAX_POSITIONS, "positions"),
        (MAX_WORK, "construction steps"),
        (MAX_CELLS, "cells"),
        (MAX_EFFECTS, "effects"),
        (MAX_PATTERN_LENGTH, "characters"),
        (MAX_COUNT, "characters or items"),
        (COUNTERS, "counted parts"),
    ):
        assert f"{limit:,} {unit}" in sizes, unit


REFERRED = {
    "properties": {"a": {"anyOf": [{"const": "first"}, {"const": "second"}]}},
    "$defs": {
        "a/b": {"const": "slash"},
        "m~n": {"const": "tilde"},
        "~1": {"const": "tilde one"},
        "é %": {"const": "percent"},
        "": {"const": "empty"},
        "0": {"const": "a name"},
    },
}


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("#/properties/a/anyOf/0", "first"),
        ("#/properties/a/anyOf/1", "second"),
        ("#/%70roperties/a/anyOf/%31", "second"),
        ("#/$defs/a~1b", "slash"),
        ("#/%24defs/a%7E1b", "slash"),
        ("#%2F$defs%2Fa~1b", "slash"),
        ("#/$defs/m~0n", "tilde"),
        ("#/$defs/~01", "tilde one"),
        ("#/$defs/%C3%A9%20%25", "percent"),
        ("#/$defs/é %25", "percent"),
        ("#/$defs/", "empty"),
        ("#/$defs/0", "a name"),
    ],
)
def test_a_reference_is_a_json_pointer_of_rfc_6901(pointer: str, value: str) -> None:
    schema = REFERRED | {
        "type": "object",
        "properties": REFERRED["properties"] | {"it": {"$ref": pointer}},
    }
    assert automaton(schema).accepts(compact({"it": value}, False))


@pytest.mark.parametrize(
    ("pointer", "words"),
    [
        ("#/properties/a/anyOf/2", "leads nowhere: there is no '2'"),
        ("#/properties/a/anyOf/-", "leads nowhere"),
        ("#/properties/a/anyOf/00", "leads nowhere"),
        ("#/properties/a/anyOf/+1", "leads nowhere"),
        ("#/properties/a/anyOf/\u0661", "leads nowhere"),
        ("#/properties/a/anyOf/0/const/0", "leads nowhere"),
        ("#/$defs/a%2Fb", "leads nowhere: there is no 'a'"),
        ("#/$defs/a~2b", "write ~0 for '~' and ~1 for '/'"),
        ("#/$defs/m~", "write ~0 for '~'"),
        ("#/$defs/%FF", "its percent escapes are not UTF-8"),
        ("#/properties/it", "is recursive"),
        ("#/%70roperties/it", "is recursive"),
        ("#", "is recursive"),
        ("#defs", "is not supported: refer to"),
    ],
)
def test_a_pointer_that_leads_nowhere_or_back_is_refused(pointer: str, words: str) -> None:
    schema = REFERRED | {
        "type": "object",
        "properties": REFERRED["properties"] | {"it": {"$ref": pointer}},
    }
    with pytest.raises(InputRefused, match=words):
        automaton(schema)


def test_many_optional_members() -> None:
    properties = {f"m{number}": {"type": "null"} for number in range(150)}
    ours = automaton({"type": "object", "properties": properties})
    assert (
        ours.accepts(b'{"m0":null,"m149":null}')
        and ours.accepts(b"{}")
        and not ours.accepts(b'{"m1":null,"m0":null}')
    )


@pytest.mark.parametrize(
    "part",
    nightly(
        [{"type": "integer"}, {"type": "number"}, {"type": "null"}, {"const": "x"}],
        [{"type": "number"}],
    ),
)
def test_a_wide_schema_is_refused_before_all_of_it_is_read(
    part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps, which are counted, and not in seconds, which are not the same on two machines."""
    count, read = 0, _SchemaReader.read

    def counted(self: _SchemaReader, schema: Any, path: tuple[str, ...]) -> Any:
        nonlocal count
        count += 1
        return read(self, schema, path)

    monkeypatch.setattr(_SchemaReader, "read", counted)
    for wide in (
        {"type": "object", "properties": {f"p{index}": part for index in range(4000)}},
        {"anyOf": [{"anyOf": [part] * 64}] * 64},
    ):
        count = 0
        with pytest.raises(InputRefused, match="needs more than 1,000,000 steps to build"):
            schema_expression(wide)
        assert (count - 1) * _SCHEMA_STEPS <= MAX_WORK


def test_values_that_are_compared_are_steps_too() -> None:
    numbers = [list(range(start, start + 2000)) for start in (0, 2000)]
    with pytest.raises(InputRefused, match="needs more than 1,000,000 steps to build"):
        schema_expression({"oneOf": [{"enum": each} for each in numbers]})
