"""Run: pytest tests/serve/test_openapi.py

The document of the endpoint says what the endpoint takes and answers; it is made from the types of
both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields as fields_of
from typing import Any

import pytest

from monograph import __version__
from monograph.automata import KINDS
from monograph.decode.request import FINISHES
from monograph.decode.sampling import RANGES, Sampling
from monograph.serve import compiling, requests
from monograph.serve.app import OPEN_PATHS, Guard, application
from monograph.serve.document import OPERATIONS as DECLARED
from monograph.serve.document import document
from monograph.serve.fields import read
from monograph.serve.messages_request import CountRequest, MessagesRequest
from monograph.serve.refused import Refused
from monograph.serve.requests import (
    ChatRequest,
    CompletionRequest,
    RequestMessage,
    TokenizeRequest,
)
from monograph.serve.responses_request import ResponsesRequest
from monograph.serve.service import Service
from monograph.serve.versions import Source
from monograph.text.messages import CALLS, THOUGHTS
from monograph.text.tokenizer import Tokenizer
from served import Served, small

DOCUMENT = json.loads(json.dumps(document()))
SCHEMAS = DOCUMENT["components"]["schemas"]
TEXTS = ("CompletionRequest", "ChatRequest", "ResponsesRequest", "MessagesRequest")
# The least that a request of each kind has.
LEAST = {
    CompletionRequest: {"model": "m", "prompt": "a"},
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    TokenizeRequest: {"prompt": "a"},
    ResponsesRequest: {"model": "m", "input": "a"},
    MessagesRequest: {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 4,
    },
    CountRequest: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
}
OPERATIONS = [
    (path, method, each)
    for path, methods in DOCUMENT["paths"].items()
    for method, each in methods.items()
]
TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": int | float,
}  # fmt: skip
# Keywords that `fault` knows, and those that refuse nothing.
KNOWN = {
    "$ref",
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "discriminator",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
}
KNOWN |= {
    "items",
    "properties",
    "required",
    "additionalProperties",
    "propertyNames",
    "maxProperties",
    "pattern",
}
KNOWN |= {"contentMediaType", "contentSchema", "description", "default"}


def resolved(place: dict[str, Any]) -> dict[str, Any]:
    """What a reference leads to; anything else is itself."""
    if "$ref" not in place:
        return place
    found = DOCUMENT
    for step in place["$ref"].removeprefix("#/").split("/"):
        found = found[step]
    return found


def fault(value: Any, schema: dict[str, Any]) -> str | None:
    """Where a value breaks a schema of the document; None where it does not."""
    return next(_faults(value, schema, "$"), None)


def _faults(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    schema = resolved(schema)
    assert schema.keys() <= KNOWN, schema
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", TYPES)
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else [value])
    if not any(
        isinstance(value, TYPES[kind]) and (kind == "boolean") >= isinstance(value, bool)
        for kind in kinds
    ):
        yield f"{at}: {value!r:.60} is none of {kinds}"
    elif json.dumps(value) not in map(json.dumps, allowed):
        yield f"{at}: {value!r:.60} is none of {allowed}"
    elif (options := schema.get("anyOf", schema.get("oneOf"))) and all(
        next(_faults(value, option, at), None) for option in options
    ):
        yield f"{at}: {value!r:.60} follows no option"
    elif isinstance(value, dict):
        yield from _faults_of_object(value, schema, at)
    elif isinstance(value, list):
        yield from _faults_of_size(value, schema, "Items", at)
        for each in value:
            yield from _faults(each, schema.get("items", {}), f"{at}[]")
    elif isinstance(value, str):
        yield from _faults_of_text(value, schema, at)
    elif isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get(
        "maximum", value
    ):
        yield f"{at}: {value} is out of range"


def _faults_of_size(value: Any, schema: dict[str, Any], kind: str, at: str) -> Iterator[str]:
    if not schema.get(f"min{kind}", 0) <= len(value) <= schema.get(f"max{kind}", len(value)):
        yield f"{at}: {len(value)} are too many or too few"


def _faults_of_text(value: str, schema: dict[str, Any], at: str) -> Iterator[str]:
    yield from _faults_of_size(value, schema, "Length", at)
    if not re.search(schema.get("pattern", ""), value):
        yield f"{at}: {value!r:.60} is not {schema['pattern']}"
    if "contentSchema" in schema:
        yield from _faults(json.loads(value), schema["contentSchema"], at)


def _faults_of_object(value: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    known, further = schema.get("properties", {}), schema.get("additionalProperties", True)
    if missing := set(schema.get("required", ())) - value.keys():
        yield f"{at}: {missing} are missing"
    if further is False and (unknown := value.keys() - known.keys()):
        yield f"{at}: {unknown} are unknown"
    yield from _faults_of_size(value, schema, "Properties", at)
    for name, each in value.items():
        yield from _faults(name, schema.get("propertyNames", {}), at)
        if name in known or further is not False:
            yield from _faults(
                each, known.get(name, {} if further is True else further), f"{at}.{name}"
            )


def inside(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of the document."""
    if isinstance(value, dict):
        yield value
    for each in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from inside(each)


def test_it_is_whole() -> None:
    """References lead somewhere, nothing lies around, and each operation has a name, an answer and
    all errors.
    """
    references = {each["$ref"] for each in inside(DOCUMENT) if "$ref" in each}
    made = {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "responses")
        for name in DOCUMENT["components"][kind]
    }
    assert references == made
    assert DOCUMENT["openapi"] == "3.1.0" and DOCUMENT["info"]["version"] == __version__
    names = [each["operationId"] for _, _, each in OPERATIONS]
    assert len(names) == len(set(names)) == 16
    for path, method, each in OPERATIONS:
        expected = {"200", "403", "405", "500", "503"} | (
            {"401"} if path not in OPEN_PATHS else set()
        )
        expected |= {"400", "408", "413", "415"} if method == "post" else set()
        names_no_model = path in ("/v1/models", "/v1/load_lora_adapter")
        expected |= {"404"} if path.startswith("/v1/") and not names_no_model else set()
        writes = ("completions", "/responses", "/messages")
        expected |= {"429"} if path.endswith(writes) else set()
        assert each["responses"].keys() == expected, path
        assert (each.get("security") == []) == (path in OPEN_PATHS)
        assert all(resolved(answer)["description"] for answer in each["responses"].values())
    for name, schema in SCHEMAS.items():
        # What a call of a tool says further is for the template, and an event has a kind and an id.
        is_open = name in ("ToolCall", "CalledFunction") or name.endswith("Event")
        assert "properties" not in schema or is_open or schema["additionalProperties"] is False, (
            name
        )


def test_another_reader_finds_it_valid() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    schemathesis.openapi.from_dict(DOCUMENT).validate()


def test_it_has_the_addresses_that_are_answered() -> None:
    guard = application(Service(Source("x", 1, print), print, print), "localhost", [])
    assert isinstance(guard, Guard)
    answered = {
        (route.path.replace(":path", ""), (route.methods - {"HEAD"}).pop().lower())
        for route in guard._app.routes  # type: ignore[attr-defined]
    }
    assert answered == {(path, method) for path, method, _ in OPERATIONS}
    assert len(answered) == len(DECLARED)


VALUES: list[Any] = [
    None, 0, 1, -1, 1.5, 9, 2**31, 2**63, 1e400, True, False, "", "a", "none", "all", "a" * 65, [], {}, ["a"],
    [1], [1, 2], ["a", 1], [""], ["a"] * 70, ["a" * 65], [[1], [2]], [[]], [[1], "a"], {"1": 2}, {"a": 1}, {"1": "x"},
    {"1": 1e9}, {"1": -100}, {"include_usage": True}, {"include_usage": 1}, {"enable_thinking": False},
    {"enable_thinking": "x"},
    {"type": "text"}, {"type": "text", "json_schema": {}}, {"type": "json_object"}, {"json_schema": {"schema": {}}},
    {"type": "json_schema", "json_schema": {"schema": {}, "name": "a", "strict": True}}, {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": {"schema": 1}},
    {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, [{"role": "user", "content": "a"}] * 2,
    [{"role": "nobody", "content": "a"}], [{"role": "user", "content": "a", "mood": 1}], [{"content": "a"}],
    [{"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "a", "name": None}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}], "refusal": ""}],
    [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": None}}], [{"type": "function"}],
    [{"type": "function", "function": {"name": "f g"}}], [{"type": "x", "function": {"name": "f"}}], [1], [None],
    [{"type": "function", "function": {"name": "f", "mood": 1}}], {"type": "function", "function": {"name": 1}},
    # Items of Responses and blocks of Messages.
    [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}], [{"type": "function_call"}],
    [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "b"}]}],
    [{"type": "reasoning", "summary": [], "encrypted_content": "x"}], [{"type": "item_reference", "id": "a"}],
    [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}], "id": "a"}],
    [{"role": "user", "content": [{"type": "input_image", "text": "b"}]}], [{"type": "function", "name": "f"}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b", "is_error": True}]}],
    [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
     {"role": "user", "content": []}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]},
     {"role": "user", "content": "a"}],
    [{"name": "f", "input_schema": {}}], [{"name": "f", "input_schema": {}, "type": "custom", "strict": 1}],
    {"type": "auto"}, {"type": "any", "disable_parallel_tool_use": True}, {"type": "enabled", "budget_tokens": 9},
    {"type": "adaptive"}, {"format": {"type": "json_schema", "schema": {}}}, {"effort": "low"},
    {"format": {"type": "json_schema", "schema": {}, "name": "a"}}, {"format": {"type": "text"}}, {"verbosity": "low"},
    ["message.output_text.logprobs"], ["file_search_call.results"], "auto", "disabled",
]  # fmt: skip
# Allowed by itself, and refused beside the other fields of the least request, or by this server's
# number of rows.
BESIDE = {
    ("max_tokens", 0),
    ("best_of", 9),
    ("n", 9),
    ("top_logprobs", 0),
    ("top_logprobs", 1),
    ("top_logprobs", 9),
}
BESIDE |= {("stream_options", "{'include_usage': True}")}


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_what_is_read_is_what_is_allowed(kind: type[Any]) -> None:
    """Value for value: a check that is written beside its schema says the same."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    for name in (*SCHEMAS[kind.__name__]["properties"], "unknown"):
        for value in VALUES[name == "unknown" :]:  # null is as good as nothing
            body = LEAST[kind] | {name: value}
            try:
                read(kind, body, rows=8)
            except Refused as refused:
                is_beside = (name, value if isinstance(value, int) else str(value)) in BESIDE
                assert fault(body, schema) or is_beside, (name, value, str(refused))
                assert (
                    refused.status == 400
                    and refused.param
                    and len(str(refused)) < 250
                    and "\n" not in str(refused)
                )
            else:
                assert not (found := fault(body, schema)), (name, value, found)


@pytest.mark.parametrize("name", sorted(requests.SAMPLER_OPTIONS))
def test_an_option_has_the_range_and_the_default_of_sampling(name: str) -> None:
    option = {each.name: each for each in fields_of(Sampling)}[name]
    for request in TEXTS:
        schema = SCHEMAS[request]["properties"][name]
        value = option.default_factory() if callable(option.default_factory) else option.default
        # The protocol's own default is not that of `monograph generate`.
        assert schema["default"] == (
            1 if name == "temperature" else list(value) if isinstance(value, tuple) else value
        )
        assert schema["description"] and {"type": "null"} in schema["anyOf"]
        if name in RANGES:
            low, high = RANGES[name].low, RANGES[name].high
            number = {
                "type": "integer" if RANGES[name].whole else "number",
                "minimum": low,
                "maximum": high,
            }
            assert schema["anyOf"][0] == number


def test_an_option_that_is_added_to_the_sampler_is_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is declared once, beside its range and its words."""
    declared = dict(requests.SAMPLER_OPTIONS)
    monkeypatch.setitem(RANGES, "top_b", RANGES["top_a"])
    monkeypatch.setattr(requests, "SAMPLER_OPTIONS", declared | {"top_b": declared["top_a"]})
    request = requests.with_options(requests.TextRequest)
    assert read(request, {"model": "m", "top_b": 0.5}, rows=8).top_b == 0.5  # type: ignore[attr-defined]
    with pytest.raises(Refused, match="top_b = 2: expected a number from 0 to 1"):
        read(request, {"model": "m", "top_b": 2}, rows=8)


def test_what_has_no_type_of_its_own_is_as_it_is_read() -> None:
    texts = SCHEMAS["ChatRequest"]["properties"]
    assert texts["choice"]["maxItems"] == compiling.MAX_CHOICES
    assert (
        set(KINDS) == {"choices", "regex", "json_schema", "grammar"}
        and {"choice", "regex", "response_format", "grammar"} < texts.keys()
    )
    assert RequestMessage.model_fields.keys() >= {
        "role",
        "content",
        "name",
        "tool_call_id",
        CALLS,
        *THOUGHTS,
    }
    ends = {each for each in FINISHES.values() if each in ("stop", "length")}
    assert set(SCHEMAS["CompletionChoice"]["properties"]["finish_reason"]["enum"]) == ends


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        yield served


def assert_said(path: str, method: str, answer: Any) -> None:
    """That an answer is one of those that the document says."""
    kind = answer.headers["content-type"].split(";")[0]
    said = resolved(DOCUMENT["paths"][path][method]["responses"][str(answer.status)])
    schema, values = said["content"][kind]["schema"], [answer.body]
    if kind == "text/event-stream":
        values = [
            {"data": line.removeprefix("data: ")}
            for line in answer.body.split("\n")
            if line.startswith("data")
        ]
        last = {"/v1/responses": "response.", "/v1/messages": "message_stop"}.get(path, "[DONE]")
        assert last in values[-1]["data"]
    for value in values:
        assert not (found := fault(value, schema)), (path, found)
    wanted = {
        name.lower() for name, header in said.get("headers", {}).items() if header.get("required")
    }
    assert wanted <= answer.headers.keys()


FURTHER: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": ["a", "b"], "n": 2, "logprobs": 3, "stop": ["e", "x"], "echo": True, "max_tokens": 9},
        {"prompt": "a", "stream": True, "logprobs": 0, "n": 2, "top_k": 3, "user": "u", "tools": [], "top_p": None},
        {"prompt": "a", "regex": "[ab]{3}", "logit_bias": {"70": -100}},
        {"prompt": "a", "grammar": "root ::= [ab]{3}"}, {"prompt": "a", "grammar": "root ::= "},
        {"prompt": "a", "response_format": {"type": "text"}},
        {"prompt": "a", "response_format": {"type": "text", "json_schema": {}}}, {"prompt": "a", "temperture": 1},
        {"prompt": "a", "response_format": {"type": "text", "strict": True}},
        {"prompt": "a" * 999}, {"prompt": "a", "model": "other"}, {},
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "logprobs": True,
         "top_logprobs": 2},
        {"messages": [{"role": "user", "content": "a", "tool_calls": []}], "stream": True, "logprobs": True,
         "stream_options": {"include_usage": True}, "max_tokens": 4},
        {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"},
        {"messages": [{"role": "user", "content": "a", "mood": "glad"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]},
        {"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]},
    ],
    "/v1/responses": [
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 4,
         "include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": True},
        {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [
            {"type": "output_text", "text": "b", "annotations": []}]}], "max_output_tokens": 4, "top_k": 3},
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}}}},
        {"input": "a", "previous_response_id": "resp_1"}, {"input": "a", "store": True, "max_output_tokens": 2},
        {"input": [{"type": "item_reference", "id": "x"}]}, {"input": "a", "instructions": "b"}, {"input": []},
        {"input": "a", "tools": [{"type": "web_search"}]}, {"input": "a", "truncation": "auto"},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": True, "top_k": 3},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]}],
         "max_tokens": 9, "stop_sequences": ["e"], "thinking": {"type": "disabled"}, "temperature": 0.5},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30,
         "output_config": {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}},
        {"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 4},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "model": "other"},
    ],
    "/v1/messages/count_tokens": [
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}, {"messages": []},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "input_schema": {}}]},
    ],
    "/tokenize": [{"prompt": "a", "add_special_tokens": None}, {"prompt": 1}],
    "/detokenize": [{"tokens": []}, {"tokens": [-1]}],
}  # fmt: skip


@pytest.mark.parametrize("path", FURTHER)
def test_what_it_shows_is_answered_as_it_says(served: Served, path: str) -> None:
    """Its examples get answers; the further requests get those answers or errors that it lists."""
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    for name, example in body["examples"].items():
        assert not fault(example["value"], body["schema"])
        answer = served.post(path, example["value"])
        assert answer.status == 200, (name, answer.body)
        assert_said(path, "post", answer)
    for further in FURTHER[path]:
        answer = served.post(path, further)
        whole = {"model": "last", **further} if path.startswith("/v1") else further
        assert (answer.status == 200) <= (fault(whole, body["schema"]) is None), (further, answer)
        assert_said(path, "post", answer)
    assert_said(path, "post", served.ask("POST", path, b"{}"))
    assert_said(path, "get" if path == "/health" else "post", served.ask("DELETE", path))


@pytest.mark.parametrize("path", [path for path, method, _ in OPERATIONS if method == "get"])
def test_what_is_read_is_as_it_says(served: Served, path: str) -> None:
    answer = served.ask("GET", path.replace("{name}", "last"))
    assert answer.status == 200
    assert_said(path, "get", answer)
    assert_said(path, "get", served.ask("GET", path, headers={"Host": "evil.example"}))
    assert_said(path, "get", served.ask("DELETE", path.replace("{name}", "last")))
    if "{name}" in path:
        assert_said(path, "get", served.ask("GET", "/v1/models/other"))


def test_who_has_no_key_is_told_as_it_says() -> None:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer, keys=["a-key-of-more-than-16"]) as served:
        for path, method, _ in OPERATIONS:
            answer = served.ask(method.upper(), path.replace("{name}", "last"))
            assert answer.status == (200 if path in OPEN_PATHS else 401)
            assert_said(path, method, answer)


def test_the_validator_of_these_tests_finds_faults() -> None:
    request = {"$ref": "#/components/schemas/CompletionRequest"}
    good = {"model": "m", "prompt": [1], "top_p": 0.5, "stop": ["a"], "logit_bias": {"1": 2}}
    assert fault(good, request) is None
    for wrong in (
        {"top_p": 1.1}, {"top_p": True}, {"top_k": 1.5}, {"prompt": []}, {"prompt": [1, "a"]}, {"stop": ["a"] * 5},
        {"stop": ""}, {"stop": "a" * 65}, {"logit_bias": {"a": 1}}, {"logit_bias": {"1": 1e7}}, {"unknown": 1},
        {"tools": [1]}, {"penalty_scope": "most"}, {"model": None}, {"response_format": {"type": "json_object"}},
    ):  # fmt: skip
        assert fault(good | wrong, request), wrong
    assert fault({"model": "m"}, request)
    assert fault({"data": '{"id": 1}'}, {"$ref": "#/components/schemas/ChatEvent"})
