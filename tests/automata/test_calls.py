"""Run: pytest tests/automata/test_calls.py    (2,000 sets of functions for each template: -m slow)

An answer with calls has no call that is malformed, and none that is valid is excluded.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automata_vocabularies import allowed_ids, state_after
from calling import ALONE, TEMPLATES, speaking
from daily import nightly
from json_schemas import follows, random_schema, random_value
from monograph.automata import Automaton, Calls, argument_types, call_constraint
from monograph.automata.calls import calls_expression, pieces_of_calls
from monograph.automata.dfa import ByteAutomaton, compile_expression
from monograph.automata.search import text_before, text_up_to, text_without
from monograph.errors import InputRefused
from monograph.text.call_reader import CallReader
from monograph.text.calls import SPECIAL, Call, CallFrame, find_frame, spellings
from monograph.text.chat import stop_ids
from monograph.text.field_reader import FieldReader
from monograph.text.notation import Fields, Notation, Quotes
from monograph.text.tokenizer import Tokenizer

EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
ONE = {
    "type": "object",
    "properties": {"a": {"enum": [1, "x"]}, "b": {"type": "boolean"}},
    "required": ["a"],
}


def frame_of(opening: str, call: str, between: str | None, closing: str, text: bool) -> CallFrame:
    separators = (", ", ": ")
    return CallFrame(opening, call, between, closing, text, separators)


@pytest.mark.parametrize("needle", ["a", "ab", "aa", "abab", "aabaa"])
def test_a_search_is_that_of_python(needle: str) -> None:
    alphabet = b"abc"
    found = needle.encode()
    up_to = compile_expression(text_up_to(found, alphabet, anywhere=True), "x")
    without = compile_expression(text_without(found, alphabet, anywhere=True), "x")
    otherwise = compile_expression(text_without(found, alphabet, anywhere=False), "x")
    for size in range(8):
        for letters in itertools.product("abc", repeat=size):
            text = "".join(letters)
            is_end = needle in text and text.index(needle) == size - len(needle)
            assert up_to.accepts(text.encode()) == is_end
            assert without.accepts(text.encode()) == (needle not in text)
            assert otherwise.accepts(text.encode()) == (not text.startswith(needle))
    assert not without.accepts(b"d")


def test_white_space_and_special_tokens_may_stand_before_a_call_that_begins_an_answer() -> None:
    special = pieces_of_calls(
        frame_of("<", "\u0100:\u0101", None, ">", False).grammar(), [b"", b"a"]
    )[0]
    alphabet = b"ab \n" + special
    for needle in (b"ab", b"a b"):
        begun = compile_expression(text_up_to(needle, alphabet, anywhere=False), "x")
        otherwise = compile_expression(text_without(needle, alphabet, anywhere=False), "x")
        for before in (b"", b" ", b"\n\n ", special, special + b" " + special):
            assert begun.accepts(before + needle) and not otherwise.accepts(before + needle)
            assert not begun.accepts(before + needle + b"a") and otherwise.accepts(before)
            assert otherwise.accepts(before + b"b" + needle) and otherwise.accepts(
                before + needle[:1]
            )
            assert not begun.accepts(before + b"b" + needle)
            assert otherwise.accepts(before + needle[:1] + special + needle)


def accepted(automaton: ByteAutomaton, longest: int) -> set[bytes]:
    """All texts of an automaton without counters."""
    assert not automaton.has_counters
    texts, found = [(0, b"")], set()
    while texts:
        state, text = texts.pop()
        assert len(text) <= longest
        if automaton.accepting_S[state]:
            found.add(text)
        for byte in range(256):
            next_state = int(automaton.next_SK[state, automaton.class_256[byte]])
            if next_state >= 0:
                texts.append((next_state, text + bytes([byte])))
    return found


def test_all_valid_calls_and_no_others_are_accepted() -> None:
    """By brute force: one call of two functions has these texts."""
    frame = frame_of("<", "\u0100:\u0101", "><", ">", True)
    calls = Calls(frame.grammar(), [("f", ONE), ("go", EMPTY)], must_call=True, parallel=False)
    automaton = compile_expression(calls_expression(calls, b"ab<>"), "x")
    arguments = ['{"a": 1}', '{"a": "x"}']
    arguments += [f'{each[:-1]}, "b": {b}}}' for each in arguments for b in ("true", "false")]
    expected = {f"<f:{each}>".encode() for each in arguments} | {b"<go:{}>"}
    assert accepted(automaton, 60) == expected
    several = compile_expression(calls_expression(calls._replace(parallel=True), b"ab<>"), "x")
    inner = [text[1:-1] for text in expected]
    for count in (1, 2, 3):
        for chosen in itertools.product(inner, repeat=count):
            assert several.accepts(b"<" + b"><".join(chosen) + b">")
    for text in expected:
        for place in range(len(text)):
            assert not several.accepts(text[:place] + text[place + 1 :])
    free = compile_expression(
        calls_expression(calls._replace(must_call=False), b'ab<>fgo{}:"'), "x"
    )
    for text in (b"", b"a", b"b>a", b"ab" * 9, *expected, *(b"ab" + text for text in expected)):
        assert free.accepts(text)
    for text in expected:
        assert not free.accepts(text + b"a") and not free.accepts(text[:-1])


@pytest.mark.parametrize("needle", ["a", "ab", "aa", "abab", "aabaa"])
def test_a_text_before_a_needle_does_not_hide_it(needle: str) -> None:
    before = compile_expression(text_before(needle.encode()), "x")
    for size in range(8):
        for letters in itertools.product("abc", repeat=size):
            text = "".join(letters)
            assert before.accepts(text.encode()) == ((text + needle).index(needle) == size)


def fields_of(
    before: str, middle: str, after: str, separator: str, quotes: tuple[str, str], inner: Notation
) -> Fields:
    text = Quotes(*quotes, is_escaped=False)
    words = ("True", "False", "None") if not quotes[0] else inner.words
    return Fields(before, middle, after, separator, inner.is_sorted, text, words, inner)


_JSON_QUOTES = Quotes('"', '"', is_escaped=True)
_JSON = Notation(
    _JSON_QUOTES, ("true", "false", "null"), ("[", ", ", "]"), _JSON_QUOTES, ("{", ": ", ", ", "}")
)
_MARKED = Quotes(chr(SPECIAL), chr(SPECIAL), is_escaped=False)
_OWN = Notation(
    _MARKED,
    ("true", "false", "null"),
    ("[", ",", "]"),
    Quotes("", "", is_escaped=False),
    ("{", ":", ",", "}"),
    is_sorted=True,
)
# Fields in tags, whose texts have no quotes, and fields in a notation of their own.
BARE = replace(
    frame_of("<", "\u0100>\u0101", "/><", "/>", True),
    fields=fields_of("(", "=", ")", "", ("", ""), _JSON),
)
OWN = replace(
    frame_of("<", "\u0100{\u0101", "}><", "}>", True),
    fields=fields_of("", ":", "", ",", (chr(SPECIAL), chr(SPECIAL)), _OWN),
)
MANY_TYPES = {
    "type": "object",
    "properties": {
        "b": {"enum": [1, "1", "a", "a)", "True", None]},
        "a": {"type": ["boolean", "string"], "maxLength": 1, "pattern": "^[tf)]?$"},
    },
    "required": ["b"],
}


def test_all_valid_calls_with_fields_and_no_others_are_accepted() -> None:
    """By brute force. A text is left out if it would be read as something else, or has an end in it."""
    pieces = [b"", *(bytes([byte]) for byte in range(256))]
    texts = ["", "t", "f", ")"]
    for frame, left_out in ((BARE, {"1", "a)", ")"}), (OWN, set())):
        calls = Calls(
            frame.grammar(), [("f", MANY_TYPES), ("go", EMPTY)], must_call=True, parallel=False
        )
        spelled = pieces_of_calls(calls.frame, pieces)
        automaton = compile_expression(calls_expression(calls, b"ab<>", uses_counters=False), "x")
        expected = set()
        for b in [1, "1", "a", "a)", "True", None]:
            for more in [{}, *({"a": a} for a in (True, False, *texts))]:
                arguments = {"b": b, **more}
                if not {each for each in arguments.values() if isinstance(each, str)} & left_out:
                    written = frame.spelling_of([Call("f", json.dumps(arguments))])
                    expected.add(written)
        expected.add(frame.spelling_of([Call("go", "{}")]))
        special = spelled[0].decode("latin-1")
        as_bytes = {text.replace(chr(SPECIAL), special).encode("latin-1") for text in expected}
        assert accepted(automaton, 60) == as_bytes


def written_as(frame: CallFrame, name: str, arguments: dict[str, Any], schema: Any) -> str | None:
    """A call as its frame writes it; None: a text in it cannot be written, or not as a text."""
    fields = frame.fields
    if fields is not None and fields.has_bare_texts:
        for argument, value in arguments.items():
            reader = FieldReader(fields, argument_types(schema), [frame.closing])
            written, _ = reader.read(fields.write({argument: value}) + frame.closing)
            if isinstance(value, str) and json.loads(written) != {argument: value}:
                return None
    return frame.spelling_of(
        [Call(name, json.dumps(arguments, ensure_ascii=False, separators=frame.separators))]
    )


def grown(
    automaton: Automaton,
    ends: Sequence[int],
    draw: random.Random,
    limit: int,
    ending: set[int],
    state: int = 0,
) -> list[int] | None:
    """A random answer that the automaton allows, up to an end; None if it was not over in time.

    After some tokens those are preferred that have one of the bytes that end texts and numbers.
    """
    ids = list[int]()
    while len(ids) < limit:
        if automaton.stops_S[state & 0xFFFF]:
            return ids
        allowed = allowed_ids(automaton, state)
        assert allowed, "no token may follow"
        if allowed & set(ends) and draw.random() < 0.5:
            return ids
        if len(ids) > 30 and allowed & ending:
            allowed = allowed & ending
        token = draw.choice(sorted(allowed))
        if token in ends:
            return ids
        ids.append(token)
        state = state_after(automaton, [token], state)
    return None


@pytest.mark.parametrize("sets", nightly([10, 2000], {10}))
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_call_is_malformed_and_no_valid_one_excluded(
    name: str, sets: int, tmp_path: Path
) -> None:
    """Random walks over tokens, for random sets of functions; and random valid calls, which are allowed."""
    tokenizer = speaking(tmp_path, name)
    ends = stop_ids(tokenizer)
    frame = find_frame(tokenizer, ends)
    spelling_V = spellings(tokenizer)
    pieces = tokenizer.pieces
    ending = {
        token for token, piece in enumerate(pieces) if piece in (b'"', b"}", b"]", b"\n", b"e")
    }
    letters = {spelled: token for token, spelled in enumerate(spelling_V) if len(spelled) == 1}
    draw = random.Random(name)
    read, accepted_count = 0, 0
    for _ in range(sets):
        functions = [
            (each, random_arguments(draw)) for each in draw.sample(["f", "go", "go_on", "a-b"], 2)
        ]
        schemas = dict(functions)
        calls = Calls(frame.grammar(), functions, must_call=True, parallel=draw.random() < 0.5)
        automaton = call_constraint(calls, pieces, ends)
        for called, schema in functions:
            valid = random_value(draw, schema)
            if not follows(valid, schema):
                continue
            written = written_as(frame, called, valid, schema)
            if written is not None:
                state = state_after(automaton, [letters[character] for character in written])
                assert state >= 0 and set(ends) <= allowed_ids(automaton, state), written
                accepted_count += 1
        for _ in range(4):
            ids = grown(automaton, ends, draw, 400, ending)
            if ids is None:
                continue
            types = {each: argument_types(schema) for each, schema in functions}
            reader = CallReader(frame, spelling_V, types=types)
            pieces_read = [reader.add([token]) for token in ids] + [reader.finish()]
            made = [piece for each in pieces_read for piece in each.calls]
            assert not "".join(each.content for each in pieces_read).strip()
            assert reader.call_count == 1 or (calls.parallel and reader.call_count > 1)
            for number in range(reader.call_count):
                own = [each for each in made if each.number == number]
                arguments = json.loads("".join(each.arguments for each in own))
                require_valid(arguments, schemas[own[0].name])
                read += 1
    assert read > 2 * sets and accepted_count > sets / 2


def require_valid(arguments: Any, schema: dict[str, Any]) -> None:
    """Require that a function's arguments follow its schema, also in the eyes of jsonschema, if it is installed."""
    assert follows(arguments, schema), (arguments, schema)
    if importlib.util.find_spec("jsonschema") is not None:
        importlib.import_module("jsonschema").validate(arguments, schema)


def random_arguments(draw: random.Random) -> dict[str, Any]:
    while True:
        schema = random_schema(draw)
        if schema.get("type") == "object":
            return schema


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_call_that_is_read_after_any_text_is_malformed(name: str, tmp_path: Path) -> None:
    """What the reader takes for a call, the automaton has restricted: also after texts that are nearly calls."""
    tokenizer = speaking(tmp_path, name)
    ends = stop_ids(tokenizer)
    frame = find_frame(tokenizer, ends)
    spelling_V = spellings(tokenizer)
    letters = {spelled: token for token, spelled in enumerate(spelling_V) if len(spelled) == 1}
    ending = {
        token for token, piece in enumerate(tokenizer.pieces) if piece in (b'"', b"}", b"\n", b"e")
    }
    functions = [("add", ONE), ("go", EMPTY)]
    calls = Calls(frame.grammar(), functions, must_call=False, parallel=True)
    automaton = call_constraint(calls, tokenizer.pieces, ends)
    draw = random.Random(name)
    opening = frame.opening.lstrip()
    texts = [
        " ",
        "\n",
        "a",
        chr(SPECIAL),
        opening,
        frame.trigger,
        opening[:-1],
        opening + "add",
        opening + "no",
    ]
    texts.append(
        opening + frame.call.replace("\u0100", "no").replace("\u0101", "{}") + frame.closing
    )
    read, text_only = 0, 0
    for _ in range(60):
        state, ids = 0, list[int]()
        for character in "".join(draw.choices(texts, k=draw.randrange(1, 4))):
            after = automaton.after(state, letters.get(character, letters["a"]))
            if after < 0:
                break
            state = after
            ids.append(letters.get(character, letters["a"]))
        ids += grown(automaton, ends, draw, 300, ending, state) or []
        types = {each: argument_types(schema) for each, schema in functions}
        reader = CallReader(frame, spelling_V, types=types)
        made = [piece for each in (reader.add(ids), reader.finish()) for piece in each.calls]
        text_only += not reader.call_count
        for number in range(reader.call_count):
            own = [each for each in made if each.number == number]
            require_valid(
                json.loads("".join(each.arguments for each in own)),
                dict(functions)[own[0].name or ""],
            )
            read += 1
    assert read > 10 and text_only > 3


@pytest.mark.parametrize("name", TEMPLATES)
def test_any_text_may_stand_before_a_call_and_nothing_after_it(name: str, tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, name)
    ends = stop_ids(tokenizer)
    frame = find_frame(tokenizer, ends)
    functions = [("add", ONE)]
    calls = Calls(frame.grammar(), functions, must_call=False, parallel=True)
    automaton = call_constraint(calls, tokenizer.pieces, ends)
    every = set(range(tokenizer.vocab_size))
    assert allowed_ids(automaton, 0) == every
    letters = {
        spelled: token for token, spelled in enumerate(spellings(tokenizer)) if len(spelled) == 1
    }

    def tokens(spelled: str) -> list[int]:
        return [letters[character] for character in spelled]

    text = tokens("it is\n")
    assert allowed_ids(automaton, state_after(automaton, text)) == every
    written = frame.spelling_of([]).removesuffix(frame.closing).lstrip()
    trigger = tokens(frame.trigger)
    before = tokens(" \n" + chr(SPECIAL)) if name in ALONE else text
    assert written.startswith(frame.trigger)
    state = state_after(automaton, [*before, *trigger])
    assert state > 0 and len(allowed_ids(automaton, state)) < 30
    if name in ALONE:
        assert allowed_ids(automaton, state_after(automaton, [*text, *trigger])) == every
    arguments = json.dumps({"a": 1}, separators=frame.separators)
    whole = tokens(frame.spelling_of([Call("add", arguments)]).lstrip())
    after = state_after(automaton, [*before, *whole])
    assert after > 0 and set(ends) <= allowed_ids(automaton, after)
    assert not set(tokens("a")) & allowed_ids(automaton, after)
    may_go_on = frame.between is not None and frame.between.startswith(frame.closing)
    assert automaton.stops_S[after & 0xFFFF] != may_go_on


def test_special_tokens_are_told_apart_from_their_letters_and_from_other_bytes() -> None:
    pieces = [b"", b"", b"", b"a", b"\xff", b"\xc0b", "é".encode()]
    frame = {
        "trigger": [1],
        "after_trigger": [],
        "opening": [1],
        "call": [2],
        "variants": [],
        "between": None,
        "closing": [],
        "fields": None,
    }
    spelled = pieces_of_calls(frame, pieces)
    assert spelled[1] != spelled[2] and len(spelled[1]) == len(spelled[2]) == 1
    assert spelled[0] == spelled[4] and spelled[0] not in spelled[1:3]
    assert spelled[3] == b"a" and spelled[6] == "é".encode()
    assert spelled[1][0] not in b"".join([spelled[0], *spelled[2:]])
    many = dict(frame, call=list(range(40)))
    with pytest.raises(InputRefused, match="40 special tokens around a call"):
        pieces_of_calls(many, pieces)


def test_a_schema_that_is_not_supported_is_refused_by_its_function() -> None:
    frame = frame_of("<", "\u0100:\u0101", None, ">", True).grammar()
    no_members = {"type": "object"}
    no_type = {"type": "object", "properties": {"a": {}}}
    for schema, words in ((no_members, "any members"), (no_type, "any value")):
        calls = Calls(frame, [("f", EMPTY), ("go", schema)], must_call=True, parallel=True)
        with pytest.raises(InputRefused, match=f"the arguments of go: .*{words}"):
            call_constraint(calls, Tokenizer.bytes().pieces, [0])


def test_texts_and_lists_in_arguments_have_no_default_limit() -> None:
    properties = {
        "text": {"type": "string"},
        "list": {"type": "array", "items": {"type": "integer"}},
    }
    schema = {"type": "object", "properties": properties, "required": ["text", "list"]}
    frame = frame_of("<", "\u0100:\u0101", None, ">", True)
    calls = Calls(frame.grammar(), [("f", schema)], must_call=True, parallel=True)
    automaton = compile_expression(calls_expression(calls, b"a"), "x")
    for size in (0, 1, 5000):
        value = json.dumps({"text": "é" * size, "list": [size] * size}, ensure_ascii=False)
        assert automaton.accepts(f"<f:{value}>".encode())
    assert not automaton.accepts(b'<f:{"text": "a", "list": [1, "a"]}>')
