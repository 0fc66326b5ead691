"""Run: pytest tests/text/test_field_reader.py

Arguments that are fields are read as their schema says, whole, in fragments and cut off.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.text.field_reader import ALL_TYPES, FieldReader
from monograph.text.notation import Fields, Notation, Quotes

_JSON_QUOTES = Quotes('"', '"', is_escaped=True)
_JSON = Notation(
    _JSON_QUOTES, ("true", "false", "null"), ("[", ", ", "]"), _JSON_QUOTES, ("{", ": ", ", ", "}")
)
_BARE_QUOTES = Quotes("", "", is_escaped=False)
TAGS = Fields("<", ">", "</>", "", False, _BARE_QUOTES, ("True", "False", "None"), _JSON)
_MARKS = Quotes("\U00010000", "\U00010000", is_escaped=False)
_WORDS = ("true", "false", "null")
_OWN = Notation(_MARKS, _WORDS, ("[", ",", "]"), _BARE_QUOTES, ("{", ":", ",", "}"))
MARKED = Fields("", ":", "", ",", False, _MARKS, _WORDS, _OWN)
END = "|end|"


def read(text: str, fields: Fields = TAGS, types: Any = None, sizes: Collection[int] = ()) -> str:
    """The JSON of a text that grows to these sizes."""
    reader = FieldReader(fields, types or {}, [END])
    written, begin = "", 0
    for size in [*sizes, len(text)]:
        piece, read_size = reader.read(text[begin:size])
        written += piece
        begin += read_size
        if reader.is_done:
            break
    return written


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("5", {"string"}, "5"),
        ("5", {"integer"}, 5),
        ("5", {"integer", "string"}, 5),
        ("5.0", {"integer", "string"}, "5.0"),
        ("5.0", {"number", "string"}, 5.0),
        ("-1e-7", {"number"}, -1e-7),
        ("05", {"number", "string"}, "05"),
        ("True", {"boolean"}, True),
        ("True", {"string", "null"}, "True"),
        ("None", {"string", "null"}, None),
        ("null", {"string", "null"}, "null"),
        ("null", {"integer"}, None),  # JSON that the schema does not have stays
        ("many", {"integer"}, "many"),
        ("", {"string"}, ""),
        ("", {"integer"}, ""),
        ('a"\\\n\té', ALL_TYPES, 'a"\\\n\té'),
        ("[1,2]", {"array"}, [1, 2]),
        ('["</>", {"a": null}]', ALL_TYPES, ["</>", {"a": None}]),
        ("[1,2]", {"string"}, "[1,2]"),
        ("[1, and more", ALL_TYPES, "[1, and more"),
        ("[1] and more", {"array", "string"}, "[1] and more"),
        ("{}", {"object"}, {}),
    ],
)
def test_a_text_without_quotes_is_what_the_schema_allows(
    value: str, types: Collection[str], expected: object
) -> None:
    spelled = value.encode().decode("latin-1")
    text = f"<a>{spelled}</><b>x</>{END}"
    found = read(text, types={"a": types})
    assert json.loads(found) == {"a": expected, "b": "x"}
    assert type(json.loads(found)["a"]) is type(expected)
    assert read(text, types={"a": types}, sizes=range(len(text))) == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a:1", {"a": 1}),
        ("a:-0.5e3,b:true,c:null", {"a": -500.0, "b": True, "c": None}),
        ("a:\U00010000x,}\U00010000,b:[]", {"a": "x,}", "b": []}),
        ("a:{ b:[1, 2],c:{}}", {"a": {" b": [1, 2], "c": {}}}),
        ("a:odd,b:2", {"a": "odd", "b": 2}),
    ],
)
def test_values_in_a_notation_with_marks_are_read(text: str, expected: object) -> None:
    found = read(text + END, MARKED)
    assert json.loads(found) == expected
    assert read(text + END, MARKED, sizes=range(len(text) + 5)) == found


def test_a_call_that_was_cut_has_its_arguments_as_far_as_they_go() -> None:
    text = "<a>one</><b>[1, 2]</>"
    types = {"a": {"string"}}
    whole = '{"a": "one", "b": [1, 2]}'
    seen = [read(text[:size], types=types) for size in range(len(text) + 1)]
    assert all(whole.startswith(each) for each in seen)
    assert '{"a": "on' in seen and seen[-1] == whole[:-1]


@given(
    st.lists(st.sampled_from(["<", ">", "</>", "a", "[", '"', "1", END, "é"]), max_size=12),
    st.data(),
)
def test_any_text_is_the_same_in_any_fragments(parts: list[str], data: st.DataObject) -> None:
    text = "<a>" + "".join(parts).encode().decode("latin-1")
    sizes = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    types = {"a": data.draw(st.sampled_from([{"string"}, {"array", "integer"}, ALL_TYPES]))}
    for fields in (TAGS, MARKED):
        assert read(text, fields, types, sizes) == read(text, fields, types)
