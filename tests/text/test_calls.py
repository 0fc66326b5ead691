"""Run: pytest tests/text/test_calls.py

The frame of a family's calls is what its template writes, and what it writes is read again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from automata_vocabularies import allowed_ids, state_after
from calling import (
    ALONE,
    CALLS,
    CONTENTLESS,
    FIELDS,
    QUESTION,
    SINGLE,
    TEMPLATES,
    TOOLS,
    MadeCalls,
    answer_ids,
    read_answer,
    speaking,
)
from monograph.automata import Calls, call_constraint
from monograph.errors import InputRefused
from monograph.text.call_reader import CallReader, message_of
from monograph.text.calls import Call, CallFrame, find_frame, spellings, with_tools
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.notation import in_order
from monograph.text.template import ChatTemplate
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_config import TokenizerConfig
from reference import pieces

CUTS = st.lists(st.integers(0, 60), max_size=5)
Family = tuple[Tokenizer, CallFrame, list[str]]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """A function that returns a family's tokenizer, frame and spellings."""

    @cache
    def find(name: str) -> Family:
        tokenizer = speaking(tmp_path_factory.mktemp(name), name)
        return tokenizer, find_frame(tokenizer, stop_ids(tokenizer)), spellings(tokenizer)

    return find


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_frame_is_found(name: str, family: Callable[[str], Family]) -> None:
    _, frame, _ = family(name)
    assert (frame.between is None) == (name in SINGLE)
    assert frame.follows_text == (name not in ALONE)
    assert frame.separators == ((",", ":") if name == "compact" else (", ", ": "))


# Each example is rendered by another process, which takes time.
@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_writes_is_the_frame_and_is_read_again(
    name: str, examples: int, family: Callable[[str], Family]
) -> None:
    tokenizer, frame, spelling_V = family(name)

    @settings(max_examples=examples)
    @given(CALLS, st.sampled_from(["", "Let me see.", "é🙂 {", "so\n it <is"]), CUTS)
    @example([("f", {"a": "</tool_call>"}), ("g", {})], "Text", [1, 2, 3, 4, 5])
    @example([("f", {"<|im_end|>": "[CALLS]", "é": '"'})], "", [])
    def check(calls: MadeCalls, content: str, cuts: list[int]) -> None:
        made = calls[:1] if frame.between is None else calls
        content = "" if name in CONTENTLESS else content
        if name in FIELDS:  # not all names and texts can be fields
            made = [(called, as_fields(frame, arguments)) for called, arguments in made]
        ids = answer_ids(tokenizer, made, content)
        values = [
            json.dumps(arguments, ensure_ascii=False, separators=frame.separators)
            for _, arguments in made
        ]
        written = frame.spelling_of(
            [Call(called, text) for (called, _), text in zip(made, values, strict=True)]
        )
        spelled = "".join(spelling_V[token] for token in ids)
        if name == "list":  # the frame's ids are zeros
            spelled = re.sub(r'"call0000\d"', '"000000000"', spelled)
        assert spelled.endswith(written.lstrip() if content else written)
        said, found = read_answer(CallReader(frame, spelling_V), ids)
        if name in ("copied", "described"):  # as the client had written it
            values = [json.dumps(arguments, ensure_ascii=False) for _, arguments in made]
        assert found == [(called, text) for (called, _), text in zip(made, values, strict=True)]
        for more in (cuts, range(len(ids))):
            assert read_answer(CallReader(frame, spelling_V), ids, more) == (said, found)
        # Thoughts and the heads of channels are text that the template wrote beside the content.
        is_beside = name in ("thoughts", "channels")
        assert content in said if is_beside else said == content

    check()


def as_fields(frame: CallFrame, value: Any, depth: int = 0) -> Any:
    """Arguments that can be written as fields: without names and texts that have the ends of such, and
    without texts that are written like something else.
    """
    fields = frame.fields
    assert fields is not None
    if isinstance(value, list):
        return [as_fields(frame, item, depth + 1) for item in value]
    if isinstance(value, dict):
        members = {
            name.replace(":", "").replace(fields.middle, ""): as_fields(frame, member, depth + 1)
            for name, member in value.items()
        }
        return dict(in_order(members, fields.is_sorted))
    if isinstance(value, str) and depth == 1 and fields.has_bare_texts:
        return "T" + value.replace(fields.after, "")
    return value


@pytest.mark.parametrize("examples", [25, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_any_ids_are_the_same_answer_in_any_fragments(
    name: str, examples: int, family: Callable[[str], Family]
) -> None:
    """Also what is nearly a call: calls that are cut, doubled or damaged."""
    tokenizer, frame, spelling_V = family(name)
    token = st.integers(0, tokenizer.vocab_size - 1)
    call = answer_ids(
        tokenizer, [("add", {"a": [1, {"é": '"}'}], "b": ""}), ("go", {})][: 2 - (name in SINGLE)]
    )

    @settings(max_examples=examples)
    @given(st.lists(st.tuples(st.integers(0, 50), st.lists(token, max_size=3)), max_size=3), CUTS)
    def check(changes: list[tuple[int, list[int]]], cuts: list[int]) -> None:
        ids = list(call)
        for place, new in changes:
            ids[place : place + 1] = new
        ids += call
        whole = read_answer(CallReader(frame, spelling_V), ids)
        assert read_answer(CallReader(frame, spelling_V), ids, cuts) == whole
        assert read_answer(CallReader(frame, spelling_V), ids, range(len(ids))) == whole

    check()


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_without_a_call_is_content(name: str, family: Callable[[str], Family]) -> None:
    tokenizer, frame, spelling_V = family(name)
    for text in (" a\n\n", "<tool_cal", '{"name": ', "", "\n", "to=functions", "<tool_call>\n{}"):
        ids = tokenizer.encode(text)
        assert read_answer(CallReader(frame, spelling_V), ids, range(len(ids))) == (text, [])


def test_letters_of_a_special_token_are_no_call(family: Callable[[str], Family]) -> None:
    tokenizer, frame, spelling_V = family("marks")
    ids = tokenizer.encode('[CALLS]add[ARGS]{"a": 1}')
    assert read_answer(CallReader(frame, spelling_V), ids)[1] == []


def test_calls_that_a_template_only_describes_become_content(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "described")
    function = {"name": "Übung\u0100", "arguments": '{"\u0101": 1}'}
    message = {
        "role": "assistant",
        "content": "So",
        "tool_calls": [{"function": function}, function],
    }
    [written], variables = with_tools(tokenizer, [message], None)
    call = '<tool_call>\n{"name": "Übung\u0100", "arguments": {"\u0101": 1}}\n</tool_call>'
    assert written == {"role": "assistant", "content": f"So\n{call}\n{call}"} and variables == {}


def test_a_name_that_is_too_long_is_no_call(family: Callable[[str], Family]) -> None:
    tokenizer, frame, spelling_V = family("tags")
    for size, is_call in ((64, True), (65, False)):
        ids = answer_ids(tokenizer, [("a" * size, {})])
        said, calls = read_answer(CallReader(frame, spelling_V), ids, range(len(ids)))
        assert bool(calls) == is_call != bool(said)


def test_a_call_that_begins_an_answer_may_follow_a_special_token(
    family: Callable[[str], Family],
) -> None:
    tokenizer, frame, spelling_V = family("bare")
    call = answer_ids(tokenizer, [("add", {"a": 1})])
    for before, is_call in (("", True), ("\n ", True), ("So: ", False), ("{", False)):
        ids = [tokenizer.special["<|header|>"], *tokenizer.encode(before), *call]
        said, calls = read_answer(CallReader(frame, spelling_V), ids, range(len(ids)))
        assert bool(calls) == is_call and bool(said) != is_call


def test_a_call_may_have_the_forms_that_gpt_oss_writes(family: Callable[[str], Family]) -> None:
    tokenizer, frame, spelling_V = family("channels")
    heads = (
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.add<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.add<|message|>",
        " to=functions.add<|channel|>commentary json<|message|>",
    )
    values = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    calls = Calls(frame.grammar(), [("add", values)], must_call=False, parallel=True)
    ends = [tokenizer.special["<|call|>"]]
    automaton = call_constraint(calls, tokenizer.pieces, ends)
    for head in heads:
        thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        ids = tokenizer.encode_rendered(thoughts + head + '{"a": 1}')
        said, found = read_answer(CallReader(frame, spelling_V), ids, range(len(ids)))
        assert found == [("add", '{"a": 1}')] and "Hm." in said and "functions" not in said
        assert allowed_ids(automaton, state_after(automaton, ids)) >= {*ends}
        wrong = tokenizer.encode_rendered(thoughts + head + '{"b"')
        assert state_after(automaton, wrong) < 0


def test_content_goes_on_before_and_after_calls(family: Callable[[str], Family]) -> None:
    tokenizer, frame, spelling_V = family("tags")
    call = answer_ids(tokenizer, [("add", {"a": 1})])
    ids = [*tokenizer.encode("One. \n\n"), *call, *tokenizer.encode("\n two"), *call]
    said, calls = read_answer(CallReader(frame, spelling_V), ids)
    assert said == "One.two" and calls == [("add", '{"a": 1}')] * 2


def test_an_answer_that_was_cut_has_the_call_as_far_as_it_goes(
    family: Callable[[str], Family],
) -> None:
    tokenizer, frame, spelling_V = family("tags")
    ids = answer_ids(tokenizer, [("add", {"a": "é"})])
    text = b"".join(tokenizer.pieces[token] for token in ids)
    assert text.endswith(b"}\n</tool_call>")
    for count in range(len(ids)):
        said, calls = read_answer(CallReader(frame, spelling_V), ids[:count])
        assert not (said and calls)
        if calls:
            assert calls[0][0] == "add"
            assert '{"a": "é"}'.startswith(calls[0][1].rstrip("\ufffd"))


# Roles begin with a special token, after which some of these tokenizers insert a space.
_OPENED = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{{ eos_token }}{% endif %}{% for m in messages %}"
    "{{ m.role }}{{ bos_token }}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant{{ bos_token }}{% endif %}"
)


@pytest.mark.parametrize("shape", pieces.SHAPES)
def test_a_space_that_a_tokenizer_inserts_is_not_content(shape: str) -> None:
    tokenizer = Tokenizer(json.loads(pieces.engine(shape).to_str()), shape, trusted=False)
    begin, end = (
        next(name for name, token in tokenizer.special.items() if token == token_id)
        for token_id in (tokenizer.bos_id, tokenizer.eos_id)
    )
    tokens = {"bos_token": begin, "eos_token": end}
    tokenizer.config = TokenizerConfig(tokens, ChatTemplate(_OPENED, shape, tokens))
    frame = find_frame(tokenizer, [tokenizer.eos_id])
    assert frame.follows_text and frame.opening.lstrip() == '<call>{"name": "'
    prompt = chat_ids(tokenizer, [QUESTION], add_generation_prompt=True, tools=TOOLS)
    lead = tokenizer.inserted_space(prompt)
    calls = Calls(frame.grammar(), [("add", {"type": "object", "properties": {}})], True, True)
    automaton = call_constraint(calls, tokenizer.pieces, [tokenizer.eos_id])
    for content in ("", "the cat", " sat"):
        ids = answer_ids(tokenizer, [("add", {}), ("add", {})], content)
        read = read_answer(CallReader(frame, spellings(tokenizer), lead), ids, range(len(ids)))
        # Some of these tokenizers lose a space at the beginning of a text.
        assert read in [(content, [("add", "{}")] * 2), (content.lstrip(), [("add", "{}")] * 2)]
        if not content:
            after = state_after(automaton, ids)
            assert tokenizer.eos_id in allowed_ids(automaton, after)


REFUSED = {
    "no tools": ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not show tools to the model"),
    "no calls": (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "does not write calls of tools",
    ),
    "no JSON": (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<f={{ call.function.name }}>{% for key in call.function.arguments.items() %}{{ key }}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "does not write a call as a name with its arguments after it, in JSON or one by one",
    ),
    "no name": (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<f={{ call.id }}>{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}",
        "does not write a call as a name with its arguments after it, in JSON or one by one",
    ),
    "arguments first": (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<f={{ call.function.arguments | tojson }}>{{ call.function.name }}>{% endfor %}{% endfor %}",
        "does not write a call as a name with its arguments after it, in JSON or one by one",
    ),
    "another prompt": (
        "{{ tools | tojson }}{% for m in messages %}{{ (messages | last).tool_calls | length }}{{ m.content }}"
        "{{ m.tool_calls }}{% endfor %}",
        "writes another prompt once there is an answer",
    ),
    "no end of a name": (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<f={{ call.function.name }}x{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}",
        "does not mark the end of a call's name",
    ),
    "nothing before a call": (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}:{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}",
        "writes nothing before a call that tells it from text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_found_is_refused_by_name(name: str, tmp_path: Path) -> None:
    template, message = REFUSED[name]
    tokenizer = speaking(tmp_path, template)
    with pytest.raises(InputRefused, match=message):
        find_frame(tokenizer, stop_ids(tokenizer))


def test_without_a_template_there_are_no_calls() -> None:
    tokenizer = Tokenizer.bytes()
    with pytest.raises(InputRefused, match="no chat template"):
        find_frame(tokenizer, stop_ids(tokenizer))


def test_an_answer_with_calls_is_a_message_again(family: Callable[[str], Family]) -> None:
    tokenizer, frame, spelling_V = family("tags")
    written = '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>'
    ids = tokenizer.encode_rendered(f"Well. {written}\n{broken}")
    assert message_of(ids, frame, spelling_V) == {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [
            {"name": "add", "arguments": {"a": [1, 2]}},
            {"name": "add", "arguments": '{"a": 1,}'},
        ],
    }
