"""The OpenAPI document, made from the types of the requests and of the answers.

`OPERATIONS` is the list of all addresses: the application routes by it, too.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic.json_schema import (
    DefsRef,
    GenerateJsonSchema,
    JsonSchemaKeyT,
    JsonSchemaMode,
    JsonSchemaValue,
)
from pydantic_core.core_schema import CoreSchema, TypedDictSchema

from monograph import __version__
from monograph.serve import shapes
from monograph.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_JSON, _EVENTS = "application/json", "text/event-stream"
_PLACE = "#/components/schemas/{model}"
TEXT_ANSWER = "The texts: whole, or event by event if stream is true."


class Operation(NamedTuple):
    """What an address does.

    Attributes:
        path: the address.
        name: its name in the document, by which the application knows what answers it.
        summary: what it does, in a few words.
        tag: the kind of operation.
        said: what its answer is.
        answer: the type of the answer, by media type; None: an object or a text of no type.
        request: the type of the body; None: it is read by GET.
        examples: bodies by name.
        errors: the statuses of errors beside those that every such operation may have.
        is_open: whether it needs no key.
        description: more of what it does.
    """

    path: str
    name: str
    summary: str
    tag: str
    said: str
    answer: Mapping[str, Any]
    request: type | None = None
    examples: Mapping[str, dict[str, Any]] = {}
    errors: tuple[int, ...] = ()
    is_open: bool = False
    description: str = ""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return "GET" if self.request is None else "POST"


_CAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "age"],
}
_ONCE = {"model": "last", "prompt": "Once", "max_tokens": 4, "temperature": 0}
OPERATIONS = (
    Operation(
        "/v1/completions",
        "complete",
        "Continue texts",
        "texts",
        TEXT_ANSWER,
        {_JSON: shapes.Completion, _EVENTS: shapes.CompletionEvent},
        CompletionRequest,
        {
            "a text": {"model": "last", "prompt": "Once upon a time", "max_tokens": 20, "seed": 1},
            "scored": {
                "model": "last",
                "prompt": [[1, 2, 3]],
                "max_tokens": 0,
                "echo": True,
                "logprobs": 1,
            },
            "in pieces": _ONCE | {"stream": True, "stream_options": {"include_usage": True}},
        },
        (404, 429),
        description="Writes n texts after each prompt, or scores the prompt.",
    ),
    Operation(
        "/v1/chat/completions",
        "chat",
        "Answer in a dialogue",
        "texts",
        TEXT_ANSWER,
        {_JSON: shapes.Chat, _EVENTS: shapes.ChatEvent},
        ChatRequest,
        {
            "an answer": {
                "model": "last",
                "messages": [{"role": "user", "content": "Who are you?"}],
                "max_completion_tokens": 20,
                "seed": 1,
            },
            "JSON": {
                "model": "last",
                "messages": [{"role": "user", "content": "Which cat?"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "cat", "schema": _CAT},
                },
            },
            "in pieces": {
                "model": "last",
                "messages": [{"role": "user", "content": "Yes or no?"}],
                "choice": ["yes", "no"],
                "stream": True,
            },
        },
        (404, 429),
        description="Writes n answers to the messages.",
    ),
    Operation(
        "/v1/models",
        "listModels",
        "List the names of the model",
        "models",
        "All names.",
        {_JSON: shapes.Models},
    ),
    Operation(
        "/v1/models/{name}",
        "getModel",
        "Look a model up",
        "models",
        "The model.",
        {_JSON: shapes.Model},
        errors=(404,),
    ),
    Operation(
        "/tokenize",
        "tokenize",
        "Encode a text",
        "tokens",
        "Its tokens.",
        {_JSON: shapes.Tokens},
        TokenizeRequest,
        {"a text": {"prompt": "Once upon"}},
    ),
    Operation(
        "/detokenize",
        "detokenize",
        "Decode tokens",
        "tokens",
        "Their text.",
        {_JSON: shapes.Decoded},
        DetokenizeRequest,
        {"three tokens": {"tokens": [1, 2, 3]}},
    ),
    Operation(
        "/tokenizer_info",
        "describeTokenizer",
        "Describe the tokenizer",
        "tokens",
        "Its special tokens and its chat template.",
        {_JSON: shapes.TokenizerInfo},
    ),
    Operation(
        "/health",
        "getHealth",
        "Ask whether texts are written",
        "server",
        "They are.",
        {_JSON: shapes.Health},
        is_open=True,
    ),
    Operation(
        "/metrics",
        "getMetrics",
        "Read the counts",
        "server",
        "Requests, tokens and times, in Prometheus' text format.",
        {"text/plain": str},
    ),
    Operation(
        "/openapi.json",
        "getDocument",
        "Read this document",
        "server",
        "This document.",
        {_JSON: shapes.Document},
        is_open=True,
    ),
    Operation(
        "/",
        "getPage",
        "Open a page to talk to the model",
        "server",
        "The page.",
        {"text/html": str},
        is_open=True,
    ),
)

_RETRY = {
    "description": "Seconds after which to try again.",
    "schema": {"type": "integer", "minimum": 1},
}


class _Failure(NamedTuple):
    """An answer with an error."""

    name: str
    description: str
    headers: Mapping[str, Any] = {}
    is_text: bool = False  # or JSON


_FAILURES = {
    400: _Failure(
        "Wrong", "The body is no JSON object, or a field is unknown or wrong; param names it."
    ),
    401: _Failure(
        "NoKey",
        "The server has keys, and the request has none of them.",
        {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    ),
    403: _Failure("Forbidden", "Host is not a name of this server, or Origin is another page's."),
    404: _Failure("NotFound", "There is no model of this name."),
    405: _Failure(
        "WrongMethod", "The address has another method.", {"Allow": {"schema": {"type": "string"}}}
    ),
    408: _Failure(
        "Slow", "The body did not arrive within 30 s, or the text was not done after 600 s."
    ),
    413: _Failure("TooLarge", "The body is larger than 1 MiB."),
    415: _Failure("WrongType", "Content-Type is not application/json."),
    429: _Failure(
        "Full", "As many texts wait as may.", {"Retry-After": _RETRY | {"required": True}}
    ),
    500: _Failure("Failed", "The server failed: its terminal says why."),
    503: _Failure(
        "NotReady",
        "The model is being loaded, or its thread has ended; or there are too many connections, which the server says "
        "in plain text.",
        {"Retry-After": _RETRY},
        is_text=True,
    ),
}
_OF_ALL, _OF_POSTED = (403, 405, 500, 503), (400, 408, 413, 415)
_KEY = "A key of the server's file (--api-key-file), if it was started with one."
_ABOUT = (
    "A model of `monograph serve`, through an OpenAI-compatible API. A request with a seed always gets the same text, "
    "however busy the server is. Every field that is left out has its default, and so has one that is null. A field "
    "that is not listed is refused, and so is one that would change the text and is not supported. Beside OpenAI's "
    "fields a request may have the options of `monograph.Sampling` (docs/generate.md), and a constraint: regex, choice "
    "or response_format."
)


@cache
def document() -> dict[str, Any]:
    """Return the document."""
    types = {
        kind
        for each in OPERATIONS
        for kind in (each.request, *each.answer.values())
        if kind is not None
    }
    types.add(shapes.Error)
    adapters: list[Any] = [(kind, "validation", TypeAdapter(kind)) for kind in types]
    schemas, definitions = TypeAdapter.json_schemas(
        adapters, ref_template=_PLACE, schema_generator=_Untitled
    )
    by_type = {kind: schema for (kind, _), schema in schemas.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Monograph",
            "version": __version__,
            "license": {"name": "MIT", "identifier": "MIT"},
            "description": _ABOUT,
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}, {}],
        "tags": [{"name": tag} for tag in dict.fromkeys(each.tag for each in OPERATIONS)],
        "paths": {
            each.path: {each.method.lower(): _described(each, by_type)} for each in OPERATIONS
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": _KEY}},
            "responses": {
                each.name: _failed(each, by_type[shapes.Error]) for each in _FAILURES.values()
            },
            "schemas": definitions["$defs"],
        },
    }


class _Untitled(GenerateJsonSchema):
    """Makes schemas without titles, which would only repeat the names; an answer has no further
    fields.
    """

    def typed_dict_schema(self, schema: TypedDictSchema) -> dict[str, Any]:
        further = {} if schema.get("cls") in shapes.EVENTS else {"additionalProperties": False}
        return super().typed_dict_schema(schema) | further

    def generate_definitions(
        self, inputs: Sequence[tuple[JsonSchemaKeyT, JsonSchemaMode, CoreSchema]]
    ) -> tuple[
        dict[tuple[JsonSchemaKeyT, JsonSchemaMode], JsonSchemaValue], dict[DefsRef, JsonSchemaValue]
    ]:
        schemas, definitions = super().generate_definitions(inputs)
        return schemas, {name: _untitled(schema) for name, schema in definitions.items()}


def _untitled(value: object) -> Any:
    if isinstance(value, list):
        return [_untitled(each) for each in value]
    if not isinstance(value, dict):
        return value
    # A field may be called "title": then it is an object.
    return {
        key: _untitled(each)
        for key, each in value.items()
        if key != "title" or not isinstance(each, str)
    }


def _described(operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    content = {media: {"schema": schemas[kind]} for media, kind in operation.answer.items()}
    statuses = {*_OF_ALL, *operation.errors}
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
    }
    if operation.description:
        found["description"] = operation.description
    if operation.is_open:
        found["security"] = []
    else:
        statuses.add(401)
    if "{name}" in operation.path:
        said = "A name of GET /v1/models."
        kind = {"type": "string", "minLength": 1}
        found["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": kind, "description": said}
        ]
    if operation.request is not None:
        statuses.update(_OF_POSTED)
        examples = {name: {"value": value} for name, value in operation.examples.items()}
        body = {"schema": schemas[operation.request], "examples": examples}
        found["requestBody"] = {"required": True, "content": {_JSON: body}}
    errors = {
        str(status): {"$ref": f"#/components/responses/{_FAILURES[status].name}"}
        for status in sorted(statuses)
    }
    return found | {
        "responses": {"200": {"description": operation.said, "content": content}} | errors
    }


def _failed(failure: _Failure, schema: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": schema}}
    if failure.is_text:
        content["text/plain"] = {"schema": {"type": "string"}}
    headers = {"headers": dict(failure.headers)} if failure.headers else {}
    return {"description": failure.description, "content": content} | headers
