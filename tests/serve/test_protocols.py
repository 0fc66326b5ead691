"""Run: pytest tests/serve/test_protocols.py

OpenAI's Responses and Anthropic's Messages: the answer is that of a chat with the same seed, in another
form, whole or in events.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from batches import tiny_llama
from calling import speaking
from daily import nightly
from monograph.serve import messages_request, responses_request
from monograph.serve.answers import AnswerBuilder, ScoredToken, TextPiece, joined, token_usage
from monograph.serve.blocks import BlockBuilder
from monograph.serve.messages_answer import (
    INVALID_INPUT,
    MessageAnswer,
    MessageBuilder,
    MessageStreamEvent,
    _input,
)
from monograph.serve.requests import ChatRequest
from monograph.serve.responses_answer import ResponseAnswer, ResponseBuilder, ResponseStreamEvent
from monograph.serve.versions import ServedModel
from monograph.text.call_reader import CallPiece, Thought
from served import Answer, Served

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
ADD = {
    "type": "object",
    "properties": {"sum": {"enum": [1, 2]}, "fast": {"type": "boolean"}},
    "required": ["sum"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
SAID: list[dict[str, Any]] = [{"role": "user", "content": "Go?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tokenizer = speaking(tmp_path_factory.mktemp("tags"), "tags")
    model = tiny_llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=1024)
    with Served(model, tokenizer) as served:
        yield served


def asked(path: str, **more: Any) -> dict[str, Any]:
    """The same request in each protocol: `more` has the fields of a chat."""
    tools = more.pop("tools", None)
    choice = more.pop("tool_choice", None)
    limit = more.pop("max_tokens")
    stop = more.pop("stop", None)
    form = more.pop("schema", None)
    parallel = more.pop("parallel_tool_calls", True)
    body: dict[str, Any] = {"seed": 1} | more
    if path == CHAT:
        body |= {"messages": SAID, "max_tokens": limit, "stop": stop, "tool_choice": choice}
        body |= {"parallel_tool_calls": parallel}
        body["tools"] = tools and [
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
            for name, schema, strict in tools
        ]
        if form:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": form}}
    elif path == RESPONSES:
        assert stop is None
        body |= {"input": SAID, "max_output_tokens": limit, "tool_choice": choice}
        body |= {"parallel_tool_calls": parallel}
        body["tools"] = tools and [
            {"type": "function", "name": name, "parameters": schema, "strict": strict}
            for name, schema, strict in tools
        ]
        if form:
            body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": form}}
    else:
        body |= {"messages": SAID, "max_tokens": limit, "stop_sequences": stop}
        body["tools"] = tools and [
            {"name": name, "input_schema": schema, "strict": strict}
            for name, schema, strict in tools
        ]
        kind = {"required": "any"}.get(choice, choice)
        body["tool_choice"] = choice and {
            "type": kind,
            "disable_parallel_tool_use": not parallel,
        }
        if form:
            body["output_config"] = {"format": {"type": "json_schema", "schema": form}}
    return body


def posted(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = served.post(path, body)
    assert answer.status == 200, answer.body
    return dict(answer.body)


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a stream's events, each of which is named by its type."""
    answer = served.post(path, body | {"stream": True})
    assert answer.status == 200, answer.body
    *blocks, rest = answer.body.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def without_ids(value: Any) -> Any:
    """JSON without what is another at each request."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    passing = ("id", "call_id", "created", "created_at")
    return {key: without_ids(each) for key, each in value.items() if key not in passing}


def of_responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a stream of Responses is, by its pieces alone; it must be the one it ends with."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(event["item"])
            assert not event["item"].get("content") and not event["item"].get("arguments")
        assert event["output_index"] == len(items) - 1, "items come one after another"
        item = items[-1]
        if "item_id" in event:
            assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind == "reasoning_text.delta":
            item["content"][0]["text"] += event["delta"]
        elif kind == "output_text.delta":
            item["content"][0]["text"] += event["delta"]
            item["content"][0]["logprobs"] += event["logprobs"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
        elif kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert event["item"] == item
    last = events[-1]
    assert last["response"]["output"] == items and not events[0]["response"]["output"]
    assert last["type"] == "response." + last["response"]["status"]
    return dict(last["response"])


def of_messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a stream of Messages is."""
    first, *middle, delta, stop = events
    assert first["type"] == "message_start" and stop == {"type": "message_stop"}
    message = first["message"]
    assert message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    inputs: dict[int, str] = {}
    is_open = False
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            inputs[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            assert is_open
            block = message["content"][event["index"]]
            if event["delta"]["type"] == "text_delta":
                block["text"] += event["delta"]["text"]
            elif event["delta"]["type"] == "thinking_delta":
                block["thinking"] += event["delta"]["thinking"]
            else:
                inputs[event["index"]] += event["delta"]["partial_json"]
        is_open = event["type"] != "content_block_stop"
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            block["input"] = _input(inputs[index])
    assert not is_open and message["usage"]["input_tokens"] == delta["usage"]["input_tokens"]
    return dict(message | delta["delta"] | {"usage": delta["usage"]})


def told(path: str, answer: dict[str, Any]) -> tuple[str, list[tuple[str, Any]], int]:
    """What an answer says, whatever its form: text, calls, and the number of tokens."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        calls = [
            (call["function"]["name"], _input(call["function"]["arguments"]))
            for call in message.get("tool_calls", [])
        ]
        return message["content"] or "", calls, answer["usage"]["completion_tokens"]
    if path == RESPONSES:
        text = "".join(
            part["text"] for item in answer["output"] for part in item.get("content", [])
        )
        calls = [
            (item["name"], _input(item["arguments"]))
            for item in answer["output"]
            if item["type"] == "function_call"
        ]
        return text, calls, answer["usage"]["output_tokens"]
    text = "".join(block.get("text", "") for block in answer["content"])
    calls = [(block["name"], block["input"]) for block in answer["content"] if "input" in block]
    return text, calls, answer["usage"]["output_tokens"]


CASES: dict[str, dict[str, Any]] = {
    "a text": {"max_tokens": 12},
    "an option of the sampler": {"max_tokens": 12, "top_k": 3, "min_p": 0.01, "logit_bias": {"9": 5}},
    "a form": {"max_tokens": 30, "schema": SCHEMA},
    "calls": {"max_tokens": 200, "tools": [("add", ADD, False), ("stop", NOTHING, None)], "tool_choice": "required"},
    "a call that is cut": {"max_tokens": 45, "tools": [("add", ADD, True)], "tool_choice": "required"},
    "tools that are not called": {"max_tokens": 9, "tools": [("add", ADD, None)], "tool_choice": "auto"},
    "tools that are not shown": {"max_tokens": 9, "tools": [("add", ADD, None)], "tool_choice": "none"},
}  # fmt: skip


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "case", nightly(list(CASES), ["a text", "a form", "calls", "a call that is cut"])
)
def test_an_answer_is_that_of_the_chat_whole_and_in_events(
    case: str, path: str, served: Served
) -> None:
    more = CASES[case]
    chat = posted(served, CHAT, asked(CHAT, **more))
    whole = posted(served, path, asked(path, **more))
    assert told(path, whole) == told(CHAT, chat)
    assert whole["seed"] == 1 and whole["model"] == chat["model"]
    fold = of_responses if path == RESPONSES else of_messages
    assert without_ids(fold(events(served, path, asked(path, **more)))) == without_ids(whole)
    finish = chat["choices"][0]["finish_reason"]
    if path == MESSAGES:
        words = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
        assert whole["stop_reason"] == words[finish] and whole["stop_sequence"] is None
    else:
        is_cut = finish == "length"
        assert whole["status"] == ("incomplete" if is_cut else "completed")
        assert (whole["incomplete_details"] is not None) == is_cut
        assert whole["output"][-1]["status"] == whole["status"]


def test_a_call_that_is_cut_anywhere_is_what_is_complete_of_it(served: Served) -> None:
    more = CASES["a call that is cut"] | {"parallel_tool_calls": False}
    kinds = set()
    for limit in (35, 41, 47, 62):
        body = asked(MESSAGES, **more | {"max_tokens": limit})
        whole = posted(served, MESSAGES, body)
        assert without_ids(of_messages(events(served, MESSAGES, body))) == without_ids(whole)
        print(told(MESSAGES, whole))
        kinds.add(json.dumps(told(MESSAGES, whole)[1]))
    assert '[["add", {}]]' in kinds and '[["add", {"sum": 2}]]' in kinds
    assert _input("{'a': 1}") == {INVALID_INPUT: "{'a': 1}"} and _input("[1]") == {
        INVALID_INPUT: "[1]"
    }


def test_a_stop_sequence_is_told(served: Served) -> None:
    text, _, _ = told(MESSAGES, posted(served, MESSAGES, asked(MESSAGES, max_tokens=40)))
    stop = text[5]
    body = asked(MESSAGES, max_tokens=40, stop=["never", stop])
    whole = posted(served, MESSAGES, body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert told(MESSAGES, whole)[0] == text[: text.index(stop)]
    assert without_ids(of_messages(events(served, MESSAGES, body))) == without_ids(whole)


def test_log_probabilities_are_those_of_the_chat(served: Served) -> None:
    chat = posted(served, CHAT, asked(CHAT, max_tokens=9, logprobs=True, top_logprobs=2))
    body = asked(RESPONSES, max_tokens=9) | {
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "top_logprobs": 2,
    }
    whole = posted(served, RESPONSES, body)
    entries = chat["choices"][0]["logprobs"]["content"]
    assert whole["output"][0]["content"][0]["logprobs"] == entries and len(entries) == 9
    streamed = of_responses(events(served, RESPONSES, body))
    assert without_ids(streamed) == without_ids(whole)


def test_tokens_are_counted_without_an_answer(served: Served) -> None:
    tools = [("add", ADD, True)]
    for more in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"}):
        body = asked(MESSAGES, max_tokens=1, **more)
        usage = posted(served, MESSAGES, body)["usage"]
        counted = {key: body[key] for key in ("messages", "tools", "tool_choice")}
        assert posted(served, COUNT, counted) == {"input_tokens": usage["input_tokens"]}


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cut", range(1, 9))
def test_blocks_come_one_after_another_in_the_order_of_the_model(cut: int) -> None:
    """A text after a call, which loose models write, is a block of its own, however pieces are cut."""
    parts: list[str | CallPiece | Thought] = [
        Thought("t"), "a", "b", CallPiece(0, "f", ""), CallPiece(0, None, "{"), CallPiece(0, None, "}"), "c",
        CallPiece(1, "g", "{}"),
    ]  # fmt: skip
    builder = BlockBuilder()
    steps = builder.add(TextPiece(0, parts[:cut], [], None))
    steps += builder.add(TextPiece(0, parts[cut:], [], "stop", calls_tools=True))
    assert [(block.kind, block.name, block.text) for block in builder.blocks] == [
        ("thoughts", "", "t"), ("text", "", "ab"), ("call", "f", "{}"), ("text", "", "c"), ("call", "g", "{}"),
    ]  # fmt: skip
    order = [(step.kind, step.block.index) for step in steps if step.kind != "grow"]
    assert order == [(kind, index) for index in range(5) for kind in ("begin", "end")]
    grown = [""] * 5
    for step in steps:
        grown[step.block.index] += step.text
    assert grown == [block.text for block in builder.blocks]
    assert len({block.call_id for block in builder.blocks}) == 5 and builder.has_calls


def test_an_empty_answer_is_an_empty_text() -> None:
    builder = BlockBuilder()
    steps = builder.add(TextPiece(0, [], [], "stop"))
    assert [step.kind for step in steps] == ["begin", "end"] and builder.blocks[0].text == ""


@pytest.mark.parametrize("cut", range(4))
def test_a_text_has_the_log_probabilities_of_the_thoughts_before_it(cut: int) -> None:
    entries = [ScoredToken(token, token, -1.0, ()) for token in range(3)]
    parts = [[], [Thought("t")], ["a"]]
    pieces = [TextPiece(0, part, [entry], None) for part, entry in zip(parts, entries, strict=True)]
    pieces.append(TextPiece(0, [], [], "stop"))
    builder = BlockBuilder()
    steps = builder.add(joined(pieces[: cut + 1])) + [
        step for piece in pieces[cut + 1 :] for step in builder.add(piece)
    ]
    assert [(block.kind, block.text) for block in builder.blocks] == [
        ("thoughts", "t"),
        ("text", "a"),
    ]
    assert builder.blocks[1].entries == entries and not builder.blocks[0].entries
    told_entries = [(step.text, list(step.entries)) for step in steps if step.entries]
    assert told_entries == [("a", entries)], "together with the text"


def test_thoughts_are_told_apart_in_both_forms(served: Served) -> None:
    """Whole and in events, as the document has them."""
    model = ServedModel(served.service.newest)
    asked_chat = ChatRequest.model_validate(
        {"model": "last", "messages": SAID, "seed": 1}, context={"rows": 1}
    )
    response, _ = responses_request.read_request({"model": "last", "input": SAID}, rows=1)
    pieces = [
        TextPiece(0, [Thought("Hm"), Thought(".")], [], None),
        TextPiece(0, ["Yes."], [], "stop"),
    ]
    usage = token_usage(3, 4)

    def both(make: Callable[[], AnswerBuilder]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        builder = make()
        sent = builder.first_events(1, 3)
        for piece in pieces:
            sent += builder.piece_events(piece)
        sent += builder.last_events(usage)
        datas = [json.loads(each.decode().split("data: ")[1]) for each in sent]
        return json.loads(make().whole_json([pieces], usage)), datas

    whole, sent = both(lambda: ResponseBuilder(model, response, asked_chat))
    assert without_ids(of_responses(sent)) == without_ids(whole)
    TypeAdapter(ResponseAnswer).validate_python(whole)
    for each in sent:
        TypeAdapter(ResponseStreamEvent).validate_python(each)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    whole, sent = both(lambda: MessageBuilder(model, asked_chat))
    assert without_ids(of_messages(sent)) == without_ids(whole)
    TypeAdapter(MessageAnswer).validate_python(whole)
    for each in sent:
        TypeAdapter(MessageStreamEvent).validate_python(each)
    assert whole["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}


# ── requests ──────────────────────────────────────────────────────────────────────────────────────

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
READ = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One. Two."},
    {"role": "assistant", "reasoning_content": "Hm.", "content": "I call.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "It is 3."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "tool_calls": [CALL, CALL | {"id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": ""},
    {"role": "tool", "tool_call_id": "c2", "content": "4"},
]


def test_items_are_messages() -> None:
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "f",
        "status": "completed",
    }
    call["arguments"] = '{"a": "é"}'
    body = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user",
             "content": [{"type": "input_text", "text": "One. "}, {"type": "input_text", "text": "Two."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "I call.", "annotations": [], "logprobs": []}]},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "It is 3."}]},
            {"role": "user", "content": "And?"}, call, call | {"call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": ""},
            {"type": "function_call_output", "call_id": "c2", "output": "4"},
        ],
    }  # fmt: skip
    _, chat = responses_request.read_request(body, rows=1)
    assert chat.messages == READ
    # A message after a message is another one, and so are thoughts.
    said = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]}
    _, chat = responses_request.read_request({"model": "m", "input": [said, said, thought]}, rows=1)
    last = {"role": "assistant", "reasoning_content": "b", "content": ""}
    assert chat.messages == [said, said, last]


def test_blocks_are_messages() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "é"}}
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "m",
        "max_tokens": 1,
        "system": [{"type": "text", "text": "Be "} | cached, {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"},
                                              {"type": "text", "text": "I call."}, use]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "It is 3."}]},
                {"type": "text", "text": "And?"} | cached]},
            {"role": "assistant", "content": [use, use | {"id": "c2"}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c2", "content": "4"}]},
        ],
    }  # fmt: skip
    assert messages_request.read_request(body, rows=1).messages == READ


def test_tools_and_choices_are_those_of_a_chat() -> None:
    function = {"name": "f", "description": "Does.", "parameters": ADD, "strict": True}

    def chat(**more: Any) -> ChatRequest:
        tools = [{"type": "function", "function": function}]
        return ChatRequest.model_validate(
            {"model": "m", "messages": SAID, "tools": tools} | more, context={"rows": 1}
        )

    def response(**more: Any) -> ChatRequest:
        tools = [{"type": "function", **function}]
        body = {"model": "m", "input": SAID, "tools": tools} | more
        return responses_request.read_request(body, rows=1)[1]

    def message(**choice: Any) -> ChatRequest:
        tool = {"name": "f", "description": "Does.", "input_schema": ADD, "strict": True}
        body = {"model": "m", "max_tokens": 1, "messages": SAID, "tools": [tool]}
        return messages_request.read_request(
            body | {"tool_choice": choice} if choice else body, rows=1
        )

    named = chat(tool_choice={"type": "function", "function": {"name": "f"}}).tool_use
    one = chat(parallel_tool_calls=False).tool_use
    assert (
        response().tool_use
        == message().tool_use
        == message(type="auto").tool_use
        == chat().tool_use
    )
    assert message(type="any").tool_use == chat(tool_choice="required").tool_use
    assert message(type="tool", name="f").tool_use == named
    assert response(tool_choice={"type": "function", "name": "f"}).tool_use == named
    assert message(type="auto", disable_parallel_tool_use=True).tool_use == one
    assert response(parallel_tool_calls=False).tool_use == one
    assert message(type="none").tool_use is response(tool_choice="none").tool_use is None


RESPONSE_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "input is missing: expected a text or a list of items"),
    ({"input": []}, "input", "input: expected a text or a list of 1 to 1,024 items"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input",
     "input[0].type = 'item_reference': expected one of message, function_call, function_call_output, reasoning"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input",
     "input[0]: content[0].type = 'input_image': expected input_text or output_text"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input", "input[0].role = 'tool': expected 'user', 'assistant'"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input", "input[0].call_id is missing"),
    ({"input": "a " * 3000}, "input", "input: it has"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored: send the earlier items again"),
    ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
    ({"background": True}, "background", "background is not supported: wait for the answer"),
    ({"truncation": "auto"}, "truncation", "truncation: expected disabled: a prompt is never cut"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0]"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "list"}, "strict": True}]}, "tools",
     "the arguments of f: the JSON schema at #"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [{"type": "function", "name": "f"}]}, "tool_choice",
     "there is no function 'g'"),
    ({"tool_choice": "any"}, "tool_choice", 'expected none, auto, required or {"type": "function", "name": ...}'),
    ({"text": {"format": {"type": "json_object"}}}, "text", "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "http://x"}}}}, "text", "ref"),
    ({"top_logprobs": 2}, "top_logprobs", "needs include to have message.output_text.logprobs"),
    ({"include": ["file_search_call.results"]}, "include", "a list that may have message.output_text.logprobs"),
    ({"include": ["message.output_text.logprobs"], "tools": [{"type": "function", "name": "f"}]}, "include",
     "give one of them"),
    ({"messages": SAID}, "messages", "there is no field 'messages'"), ({"n": 2}, "n", "there is no field 'n'"),
    ({"max_output_tokens": 0}, "max_output_tokens", "a whole number from 1"),
    ({"temperature": -1}, "temperature", "a number from 0"),
    ({"reasoning": {"effort": "low"}}, "reasoning", "leave it"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "param", "said"), RESPONSE_FAULTS, ids=lambda value: str(value)[:40]
)
def test_a_wrong_response_request_is_refused_by_name(
    change: dict[str, Any], param: str, said: str, served: Served
) -> None:
    answer = served.post(RESPONSES, {"input": "a", "max_output_tokens": 2} | change)
    assert answer.status == 400, answer.body
    error = answer.body["error"]
    assert said in error["message"] and error["param"] == param
    assert "\n" not in error["message"]


MESSAGE_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing: expected the maximum number of tokens"),
    ({"messages": []}, "messages: expected a list of 1 to 1,024 messages"),
    ({"messages": ["a"]}, "messages[0] = 'a': expected an object"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role = 'tool': expected one of user, assistant"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0]: there is no field 'name'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content = None: expected a text or a list of blocks"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     "messages[0].content[0].type = 'image': expected one of text, tool_result for user"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
    ({"messages": [*SAID, {"role": "assistant", "content": "I"}]}, "the last one is an assistant's"),
    ({"messages": [{"role": "user", "content": "a " * 3000}]}, "messages: it has"),
    ({"system": 1}, "system = 1: expected a text or a list of parts"),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences: expected up to 4 texts"),
    ({"stop_sequences": ["a"], "tools": [{"name": "f", "input_schema": {}}]}, "stop_sequences and tools: give one of"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{"type": "web_search_20250305", "name": "f"}]}, "tools[0].type = 'web_search_20250305'"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name is for the type tool"),
    ({"tool_choice": {"type": "any"}}, "tool_choice = 'required': there are no tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: there is no field 'budget_tokens'"),
    ({"thinking": {"type": "enabled"}}, "thinking.type = 'enabled': expected 'disabled' or 'adaptive'"),
    ({"parallel_tool_calls": False}, "there is no field"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "http://x"}}}}, "output_config: "),
    ({"output_config": {"effort": "low"}}, "output_config: effort is not supported: leave it out"),
    ({"container": "x"}, "there is no field 'container'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), MESSAGE_FAULTS, ids=lambda value: str(value)[:40])
def test_a_wrong_message_request_is_refused_by_name(
    change: dict[str, Any], said: str, served: Served
) -> None:
    answer = served.post(MESSAGES, {"messages": SAID, "max_tokens": 2} | change)
    assert answer.status == 400, answer.body
    assert answer.body["type"] == "error"
    error = answer.body["error"]
    assert error["type"] == "invalid_request_error" and said in error["message"], error
    assert "\n" not in error["message"]


def error_of(answer: Answer, status: int) -> str:
    assert answer.status == status and answer.body["type"] == "error"
    return str(answer.body["error"]["type"])


def test_every_error_of_messages_has_their_form(served: Served) -> None:
    """Also those that the guard and the routes raise."""
    body = {"messages": SAID, "max_tokens": 2}
    assert error_of(served.post(MESSAGES, body | {"model": "other"}), 404) == "not_found_error"
    assert error_of(served.ask("GET", MESSAGES), 405) == "invalid_request_error"
    assert error_of(served.ask("POST", COUNT, b"{}"), 415) == "invalid_request_error"
    evil = {"Origin": "http://evil.example", "Content-Type": "application/json"}
    assert error_of(served.ask("POST", MESSAGES, b"{}", evil), 403) == "permission_error"
    typed = {"Content-Type": "application/json"}
    large = served.ask("POST", MESSAGES, b" " * ((1 << 20) + 1), typed)
    assert error_of(large, 413) == "request_too_large"
    answer = served.post(MESSAGES, body | {"thread": {"type": "create"}})
    assert error_of(answer, 400) == "invalid_request_error"
    details = {"error_code": "thread_unsupported_request", "unsupported": []}
    assert answer.body["error"]["details"] == details, "its clients then send all messages"
    assert "error" in served.ask("GET", "/v1/messages_of_mine").body, "another address"
    assert "type" not in served.ask("GET", "/v1/messages_of_mine").body
