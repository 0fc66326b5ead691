"""Run: pytest tests/text/test_thoughts.py

Thoughts are found as the template writes them, and read apart from content and calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from automata_vocabularies import allowed_ids, state_after
from calling import QUESTION, TOOLS, speaking
from monograph.automata import Calls, call_constraint
from monograph.text.call_reader import CallPiece, CallReader, Thought
from monograph.text.calls import find_frame, spellings
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.thoughts import AnswerPlace, AnswerReader, Thoughts, find_thoughts
from monograph.text.tokenizer import Tokenizer

# Thoughts are in a message of their own, before that of the content, as those of gpt-oss.
MESSAGES = (
    "{% if tools %}{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}{% if m.role == 'user' %}<|start|>user"
    "<|message|>{{ m.content }}<|end|>{% else %}{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis"
    "<|message|>{{ m.reasoning_content }}<|end|>{% endif %}{% for call in m.tool_calls or [] %}<|start|>assistant"
    " to=functions.{{ call.function.name }}<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FAMILIES = {
    "thoughts": AnswerPlace.BEFORE,
    "fields": AnswerPlace.INSIDE,
    MESSAGES: AnswerPlace.BEFORE,
}
GO = {"type": "object", "properties": {}}


def found(folder: Path, template: str) -> tuple[Tokenizer, Thoughts, AnswerPlace]:
    tokenizer = speaking(folder, template)
    thoughts = find_thoughts(tokenizer)
    assert thoughts is not None
    prompt = chat_ids(tokenizer, [QUESTION], add_generation_prompt=True, tools=TOOLS)
    spelling_V = spellings(tokenizer)
    return tokenizer, thoughts, thoughts.place_after("".join(spelling_V[each] for each in prompt))


def read(
    tokenizer: Tokenizer,
    thoughts: Thoughts | None,
    place: AnswerPlace,
    ids: list[int],
    sizes: Iterable[int] = (),
) -> tuple[str, str, list[str]]:
    """The thoughts, the content and the calls of ids that come in pieces."""
    frame = find_frame(tokenizer, stop_ids(tokenizer))
    spelling_V = spellings(tokenizer)
    reader = AnswerReader(spelling_V, b"", thoughts, place, CallReader(frame, spelling_V))
    parts: list[str | CallPiece | Thought] = []
    begin = 0
    for end in [*sizes, len(ids)]:
        parts += reader.add(ids[begin:end]).parts
        begin = end
    parts += reader.finish().parts
    calls: list[str] = []
    for part in parts:
        if isinstance(part, CallPiece):
            calls += [part.name] if part.name else []
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return thought, "".join(part for part in parts if isinstance(part, str)), calls


@pytest.mark.parametrize("template", FAMILIES, ids=["thoughts", "fields", "messages"])
def test_thoughts_are_read_apart_as_the_template_writes_them(template: str, tmp_path: Path) -> None:
    tokenizer, thoughts, place = found(tmp_path, template)
    assert place is FAMILIES[template]
    prompt = chat_ids(tokenizer, [QUESTION], add_generation_prompt=True, tools=TOOLS)
    function = {"name": "add", "arguments": {"a": "x"}}
    call: dict[str, Any] = {"id": "a00000000", "type": "function", "function": function}
    for content, calls in (("It is 3.", []), ("", [call])):
        answer = {"role": "assistant", "reasoning_content": "Hm,\n<é>.", "content": content} | (
            {"tool_calls": calls} if calls else {}
        )
        ids = chat_ids(tokenizer, [QUESTION, answer], tools=TOOLS)
        assert ids[: len(prompt)] == prompt
        stops = stop_ids(tokenizer)
        if template is MESSAGES:
            stops = (*stops, tokenizer.special["<|call|>"], tokenizer.special["<|return|>"])
        ids = ids[len(prompt) :]
        ids = ids[: next((at for at, each in enumerate(ids) if each in stops), len(ids))]
        expected = ("Hm,\n<é>.", content, [each["function"]["name"] for each in calls])
        assert read(tokenizer, thoughts, place, ids) == expected
        assert read(tokenizer, thoughts, place, ids, range(len(ids))) == expected
        # What was cut inside thoughts has no content.
        cut = [read(tokenizer, thoughts, place, ids[:size]) for size in range(len(ids))]
        inside = [each for each in cut if each[0] and each[0] != "Hm,\n<é>."]
        assert len(inside) > 3 and all(each[1:] == ("", []) for each in inside)


def test_a_prompt_with_empty_thoughts_leaves_an_answer_after_them(tmp_path: Path) -> None:
    _, thoughts, _ = found(tmp_path, "thoughts")
    assert thoughts.place_after("assistant\n<think>\n\n</think>\n\n") is AnswerPlace.AFTER
    assert thoughts.place_after("assistant\n<think>\n") is AnswerPlace.INSIDE
    assert thoughts.place_after("<think>\nHm.</think>\n\n") is AnswerPlace.BEFORE


def test_an_answer_without_thoughts_is_content(tmp_path: Path) -> None:
    tokenizer, thoughts, _ = found(tmp_path, "thoughts")
    for text in (" \n It is <think>so</think>.", "<thin", "\n", ""):
        ids = tokenizer.encode(text)
        for sizes in ((), range(len(ids))):
            assert read(tokenizer, thoughts, AnswerPlace.BEFORE, ids, sizes) == ("", text, [])


@pytest.mark.parametrize("must_call", [True, False])
def test_what_begins_a_call_does_not_count_inside_thoughts(must_call: bool, tmp_path: Path) -> None:
    tokenizer, thoughts, place = found(tmp_path, "fields")
    ends = stop_ids(tokenizer)
    frame = find_frame(tokenizer, ends).grammar() | {"thoughts": thoughts.grammar(place)}
    calls = Calls(frame, [("go", GO)], must_call=must_call, parallel=False)
    automaton = call_constraint(json.loads(json.dumps(calls)) and calls, tokenizer.pieces, ends)

    def after(text: str) -> int:
        return state_after(automaton, tokenizer.encode_rendered(text))

    whole = "<tool_call>\n<function=go>\n</function>\n</tool_call>"
    thought = "I might <tool_call> it.\n</think>\n\n"
    inside = after("I might <tool_call> it")
    assert inside >= 0 and bool(set(ends) & allowed_ids(automaton, inside)) != must_call
    done = after(thought + whole)
    assert done >= 0 and set(ends) <= allowed_ids(automaton, done)
    assert after(thought + "<tool_call>\n<function=no") < 0
    over = after(thought + "Well")
    assert (over < 0) == must_call
