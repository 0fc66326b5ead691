"""Run: pytest tests/automata/test_on_host.py

What llguidance lets pass is what the grammar has: no token more, and none less.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grammars import RECURSIVE, REGULAR, language
from monograph.automata import Calls
from monograph.automata.on_host import (
    HostConstraint,
    HostText,
    HostVocabulary,
    lark_of,
    lark_of_calls,
    require_llguidance,
)
from monograph.errors import InputRefused

needs_llguidance = pytest.mark.skipif(
    "not __import__('importlib').util.find_spec('llguidance')", reason="llguidance is missing"
)
REFUSAL = InputRefused("no automaton")
END = 0
# Tokens of several characters, halves of one, one twice, and a special one.
PIECES = [b"", b"(", b")", b"a", b"b", b"()", b"((", b"))", b"ab", b"ba", b"aab", b"a"]
PIECES += [b"\xc3", b"\xa9", "é".encode(), b""]


def followed(lark: str, pieces: list[bytes]) -> HostText:
    return HostConstraint(lark, HostVocabulary(pieces, [END]), REFUSAL).begin()


def copy(text: HostText) -> HostText:
    return replace(text, class_V=text.class_V.copy(), matcher=text.matcher.deep_copy())


@needs_llguidance
@pytest.mark.parametrize("grammar", [*REGULAR, *RECURSIVE])
@pytest.mark.parametrize("lead", [b"", b"b"])
def test_a_token_is_allowed_if_and_only_if_the_text_can_be_finished(
    grammar: str, lead: bytes
) -> None:
    longest = 3
    # Each beginning of 6 characters (a token has up to 3) can be finished by as many and one.
    texts = {lead + text.encode() for text in language(grammar, 2 * (longest + 3) + 1)}
    beginnings = {text[:end] for text in texts for end in range(len(text) + 1)}
    pieces = PIECES

    def walk(text: bytes, state: HostText) -> None:
        allowed = set(np.flatnonzero(state.write_classes() == 0).tolist())
        expected = {
            token for token, piece in enumerate(pieces) if piece and text + piece in beginnings
        }
        assert allowed - {END} == expected, text
        assert (END in allowed) == (text in texts), text
        for token in expected:
            longer = text + pieces[token]
            if len(longer) <= longest + len(lead):
                after = copy(state)
                can_go_on = any(each.startswith(longer) and each != longer for each in texts)
                assert after.take(token) == (longer in texts and not can_go_on), longer
                walk(longer, after)

    walk(b"", followed(lark_of("grammar", grammar, lead), pieces))


def written(text: HostText, pieces: list[bytes], seed: int) -> bytes:
    """Allowed tokens at random, until only the end may come or it is drawn."""
    draws = np.random.default_rng(seed)
    found = b""
    for _ in range(400):
        allowed = np.flatnonzero(text.write_classes() == 0)
        token = END if END in allowed and len(found) > 60 else int(draws.choice(allowed))
        if token == END:
            return found
        found += pieces[token]
        if text.take(token):
            return found
    return found


TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}, "next": {"$ref": "#"}},
    "required": ["v"],
    "additionalProperties": False,
}


def require_tree(value: Any) -> None:
    assert set(value) <= {"v", "next"} and value["v"] in (1, 2)
    if "next" in value:
        require_tree(value["next"])


BYTES = [b"", *(bytes([byte]) for byte in range(0x20, 0x7F)), b"\n", b'{"', b'"}', b"}}", b'":']


@needs_llguidance
def test_a_recursive_schema_gives_compact_json_that_follows_it() -> None:
    lark = lark_of("json_schema", TREE)
    found = {written(followed(lark, BYTES), BYTES, seed) for seed in range(20)}
    assert len(found) > 3
    for text in found:
        require_tree(json.loads(text))
        assert text == json.dumps(json.loads(text), separators=(",", ":")).encode()


FRAME: dict[str, Any] = {
    "opening": ["\n", 1, '{"name": "'],
    "trigger": [1],
    "after_trigger": ['{"name": "'],
    "call": [{"hole": "name"}, '", "arguments": ', {"hole": "arguments"}],
    "between": ["}\n", 1, '{"name": "'],
    "closing": ["}"],
    "variants": [],
    "follows_text": True,
    "separators": [", ", ": "],
    "fields": None,
}


@needs_llguidance
@pytest.mark.parametrize("trigger", ["special", "text"])
def test_calls_with_a_recursive_schema_are_those_of_the_frame(trigger: str) -> None:
    pieces = [b"", b"", *BYTES[1:]]
    frame = FRAME
    if trigger == "text":
        mark = ["<call>"]
        frame = frame | {
            "opening": ["\n", *mark, '{"name": "'],
            "trigger": mark,
            "between": ["}\n", *mark, '{"name": "'],
        }
    mark_id = 1 if trigger == "special" else None
    functions = [("get", TREE), ("get_all", TREE)]

    def must(parts: str) -> HostText:
        calls = Calls(frame, functions, must_call=parts == "required", parallel=True)
        return followed(lark_of_calls(calls, pieces), pieces)

    def read(state: HostText, text: str) -> bool:
        """Whether every token of a text is allowed, `$` for the special one, and the end after it."""
        for letter in text:
            token = 1 if letter == "$" else pieces.index(letter.encode())
            if state.write_classes()[token]:
                return False
            state.take(token)
        return not state.write_classes()[END]

    begin = "$" if mark_id else "<call>"
    one = f'{begin}{{"name": "get", "arguments": {{"v": 1, "next": {{"v": 2}}}}}}'
    other = f'{begin}{{"name": "get_all", "arguments": {{"v": 2}}}}'
    assert read(must("required"), "\n" + one)
    assert read(must("required"), "\n" + one + "\n" + other)
    assert not read(must("required"), "Well.\n" + one)
    assert not read(must("required"), "\n" + one.replace('"v": 2', '"v": 3'))
    assert not read(must("required"), "\n" + one.replace('"get"', '"set"'))
    assert read(must("auto"), "Well, no <ca.")
    assert read(must("auto"), "Well.\n" + one + "\n" + other)
    assert not read(must("auto"), "Well.\n" + one.replace('"v": 1', '"v": 3'))
    assert not read(must("auto"), "Well.\n" + one + " and so on")


@needs_llguidance
def test_thoughts_before_a_call_may_look_like_one() -> None:
    pieces = [b"", b"", *BYTES[1:]]
    thoughts = {"begin": ["<think>"], "end": ["</think>"], "place": "before"}
    calls = Calls(FRAME | {"thoughts": thoughts}, [("get", TREE)], must_call=True, parallel=False)
    state = followed(lark_of_calls(calls, pieces), pieces)
    for letter in '<think>{"name": </thin </think>\n\n$':
        token = 1 if letter == "$" else pieces.index(letter.encode())
        assert not state.write_classes()[token], letter
        state.take(token)
    with pytest.raises(InputRefused, match="require a call"):
        lark_of_calls(calls._replace(must_call=False), pieces)


@needs_llguidance
def test_what_llguidance_cannot_follow_is_refused_with_both_reasons() -> None:
    with pytest.raises(InputRefused, match="^no automaton; llguidance: .*multipleOf|nonsense"):
        followed(lark_of("json_schema", {"type": "nonsense"}), BYTES)
    chain = "\n".join(f'a{number} ::= "x" a{number + 1}' for number in range(2000))
    with pytest.raises(InputRefused, match="2,002 rules; llguidance follows at most 500"):
        lark_of("grammar", f'root ::= a0\n{chain}\na2000 ::= "x"')


def test_without_the_package_the_refusal_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("monograph.automata.on_host.find_spec", lambda name: None)
    with pytest.raises(InputRefused, match="^no automaton; .*install 'llguidance"):
        require_llguidance(REFUSAL)
