"""Run: pytest tests/serve/test_openapi.py

The document of the endpoint says what the endpoint takes and answers; it is written by hand, and cannot drift.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields as fields_of
from importlib.resources import files
from typing import Any

import pytest

from monograph import __version__
from monograph.decode.automata import KINDS
from monograph.decode.request import FINISHES
from monograph.decode.sampling import _BIAS, RANGES, Sampling
from monograph.serve import compiling, fields
from monograph.serve.app import OPEN, Guard, application
from monograph.serve.owner import Source
from monograph.serve.service import Service
from monograph.text.tokenizer import Tokenizer
from served import Served, small

DOCUMENT = json.loads(files("monograph.serve").joinpath("openapi.json").read_text())
SCHEMAS = DOCUMENT["components"]["schemas"]
TEXTS = {"CompletionRequest": fields.completion, "ChatRequest": fields.chat}
OPERATIONS = [(path, method, each) for path, methods in DOCUMENT["paths"].items() for method, each in methods.items()]
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
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
}
KNOWN |= {"items", "properties", "required", "additionalProperties", "propertyNames", "maxProperties", "pattern"}
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
    if not any(isinstance(value, TYPES[kind]) and (kind == "boolean") >= isinstance(value, bool) for kind in kinds):
        yield f"{at}: {value!r:.60} is none of {kinds}"
    elif json.dumps(value) not in map(json.dumps, allowed):
        yield f"{at}: {value!r:.60} is none of {allowed}"
    elif "anyOf" in schema and all(next(_faults(value, option, at), None) for option in schema["anyOf"]):
        yield f"{at}: {value!r:.60} follows no option"
    elif isinstance(value, dict):
        yield from _faults_of_object(value, schema, at)
    elif isinstance(value, list):
        yield from _faults_of_size(value, schema, "Items", at)
        for each in value:
            yield from _faults(each, schema.get("items", {}), f"{at}[]")
    elif isinstance(value, str):
        yield from _faults_of_text(value, schema, at)
    elif isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
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
    known, further = schema.get("properties", {}), schema.get("additionalProperties", {})
    if missing := set(schema.get("required", ())) - value.keys():
        yield f"{at}: {missing} are missing"
    if further is False and (unknown := value.keys() - known.keys()):
        yield f"{at}: {unknown} are unknown"
    yield from _faults_of_size(value, schema, "Properties", at)
    for name, each in value.items():
        yield from _faults(name, schema.get("propertyNames", {}), at)
        if name in known or further is not False:
            yield from _faults(each, known.get(name, further), f"{at}.{name}")


def inside(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of the document."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from inside(each)


def test_it_is_whole() -> None:
    """References lead somewhere, nothing lies around, and each operation has a name, an answer and all errors."""
    references = {each["$ref"] for each in inside(DOCUMENT) if "$ref" in each}
    made = {f"#/components/{kind}/{name}" for kind in ("schemas", "responses") for name in DOCUMENT["components"][kind]}
    assert references == made
    assert DOCUMENT["openapi"] == "3.1.0" and DOCUMENT["info"]["version"] == __version__
    names = [each["operationId"] for _, _, each in OPERATIONS]
    assert len(names) == len(set(names)) == 11
    for path, method, each in OPERATIONS:
        expected = {"200", "403", "405", "500", "503"} | ({"401"} if path not in OPEN else set())
        expected |= {"400", "408", "413", "415"} if method == "post" else set()
        expected |= {"404"} if path.startswith("/v1/") and path != "/v1/models" else set()
        expected |= {"429"} if method == "post" and path.startswith("/v1/") else set()
        assert each["responses"].keys() == expected, path
        assert (each.get("security") == []) == (path in OPEN)
        assert all(resolved(answer)["description"] for answer in each["responses"].values())
    for name, schema in SCHEMAS.items():
        assert "properties" not in schema or name.endswith("Event") or schema["additionalProperties"] is False, name


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


@pytest.mark.parametrize("request_name", TEXTS)
def test_a_request_has_the_fields_that_are_read(request_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, as `Fields` knows them at the end, and no other."""
    known: list[set[str]] = []
    end = fields.Fields.end
    monkeypatch.setattr(fields.Fields, "end", lambda self: (known.append(self._known), end(self))[1])
    body = {"model": "m", "prompt": "a"} if request_name == "CompletionRequest" else None
    TEXTS[request_name](body or {"model": "m", "messages": [{"role": "user", "content": "a"}]}, 8)
    properties = SCHEMAS[request_name]["properties"]
    assert properties.keys() == known[-1] | fields.IGNORED | fields.NOT_BUILT.keys()
    ignored = {name for name, each in properties.items() if each == {"$ref": "#/components/schemas/Ignored"}}
    refused = {name for name, each in properties.items() if each == {"$ref": "#/components/schemas/NotSupported"}}
    assert ignored == fields.IGNORED and refused == fields.NOT_BUILT.keys() - known[-1]
    assert fields.OPTIONS <= properties.keys() - refused - ignored


@pytest.mark.parametrize("name", sorted(fields.OPTIONS))
def test_an_option_has_the_range_and_the_default_of_sampling(name: str) -> None:
    schema, default = SCHEMAS[name], {each.name: each for each in fields_of(Sampling)}[name]
    assert all(SCHEMAS[request]["properties"][name] == {"$ref": f"#/components/schemas/{name}"} for request in TEXTS)
    if name in RANGES:
        allowed = RANGES[name]
        assert schema["type"] == ["integer" if allowed.whole else "number", "null"]
        assert (schema["minimum"], schema["maximum"]) == (allowed.low, allowed.high)
    value = default.default_factory() if callable(default.default_factory) else default.default
    # The protocol's own default is not that of `monograph generate`.
    assert schema["default"] == (1 if name == "temperature" else list(value) if isinstance(value, tuple) else value)


def test_the_other_bounds_are_those_that_are_read() -> None:
    assert (SCHEMAS["seed"]["minimum"], SCHEMAS["seed"]["maximum"]) == (RANGES["seed"].low, RANGES["seed"].high)
    assert (SCHEMAS["logprobs"]["minimum"], SCHEMAS["logprobs"]["maximum"]) == (0, fields.MOST_LOGPROBS)
    assert SCHEMAS["ChatRequest"]["properties"]["top_logprobs"]["maximum"] == fields.MOST_LOGPROBS
    assert SCHEMAS["ChatRequest"]["properties"]["messages"]["maxItems"] == fields.MOST_MESSAGES
    prompts = SCHEMAS["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert [each["maxItems"] for each in prompts if "maxItems" in each] == [fields.MOST_PROMPTS] * 2
    bias = SCHEMAS["logit_bias"]
    assert bias["maxProperties"] == fields.MOST_BIASES
    assert (bias["additionalProperties"]["minimum"], bias["additionalProperties"]["maximum"]) == (_BIAS.low, _BIAS.high)
    assert SCHEMAS["stop"]["anyOf"][1]["maxItems"] == fields.MOST_STOPS
    assert SCHEMAS["StopText"]["maxLength"] == fields.MOST_STOP_BYTES
    assert SCHEMAS["choice"]["maxItems"] == compiling.MOST_CHOICES
    message = SCHEMAS["Message"]["properties"]
    assert message["role"]["enum"] == list(fields.ROLES) and message.keys() == fields.SPOKEN | fields.EMPTY
    assert set(KINDS) == {"choices", "regex", "json_schema"} and {"choice", "regex", "response_format"} < SCHEMAS.keys()
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
        values = [{"data": line.removeprefix("data: ")} for line in answer.body.split("\n") if line.startswith("data")]
        assert values[-1] == {"data": "[DONE]"}
    for value in values:
        assert not (found := fault(value, schema)), (path, found)
    wanted = {name.lower() for name, header in said.get("headers", {}).items() if header.get("required")}
    assert wanted <= answer.headers.keys()


FURTHER: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": ["a", "b"], "n": 2, "logprobs": 3, "stop": ["e", "x"], "echo": True, "max_tokens": 9},
        {"prompt": "a", "stream": True, "logprobs": 0, "n": 2, "top_k": 3, "user": "u", "tools": [], "top_p": None},
        {"prompt": "a", "regex": "[ab]{3}", "logit_bias": {"70": -100}},
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
            assert answer.status == (200 if path in OPEN else 401)
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
