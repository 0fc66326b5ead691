"""The OpenAPI document, made from the types of the requests and of the answers.

`OPERATIONS` lists all addresses of the server. The application makes its routes from the same list.
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
from monograph.serve import messages_answer, responses_answer, shapes
from monograph.serve.messages_request import CountRequest, MessagesRequest
from monograph.serve.refused import MESSAGES_PATH
from monograph.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from monograph.serve.responses_request import ResponsesRequest

_JSON = "application/json"
_EVENTS = "text/event-stream"
_SCHEMA_REFERENCE = "#/components/schemas/{model}"
_TEXT_ANSWER = "The texts: whole, or event by event if stream is true."
# Objects of these types may have further fields, since every server-sent event may also have the fields
# `event` (its kind) and `id`.
_EVENT_TYPES = (
    shapes.CompletionEvent,
    shapes.ChatEvent,
    responses_answer.ResponseEvent,
    messages_answer.MessageEvent,
)


class _ErrorForm(NamedTuple):
    """The form in which a protocol answers with errors.

    Attributes:
        error_type: the type of an error.
        prefix: the beginning of the names that answers with such errors have in the document.
    """

    error_type: type
    prefix: str = ""


_OPENAI = _ErrorForm(shapes.Error)
_ANTHROPIC = _ErrorForm(messages_answer.MessageError, "Message")


class Operation(NamedTuple):
    """An operation of the server: an address, what a client may send to it, and what it answers.

    Attributes:
        path: the address.
        name: the operation's name in the document and in the application's table of endpoints.
        tag: the operation's group in the document.
        summary: what the operation does, in a few words.
        answer: what the answer has, in a few words.
        answer_types: the type of the answer by media type.
        request_type: the type of the body; None: the operation has no body, and its method is GET.
        examples: bodies by name.
        errors: the statuses of errors that the operation may have in addition to those of all operations
            (`_ERRORS_OF_ALL`) and of all operations with a body (`_ERRORS_OF_POST`).
        is_open: whether the operation needs no key.
        description: a sentence with more about the operation, or "".
        error_form: the form of its errors.
    """

    path: str
    name: str
    tag: str
    summary: str
    answer: str
    answer_types: Mapping[str, Any]
    request_type: type | None = None
    examples: Mapping[str, dict[str, Any]] = {}
    errors: tuple[int, ...] = ()
    is_open: bool = False
    description: str = ""
    error_form: _ErrorForm = _OPENAI

    @property
    def method(self) -> str:
        """The HTTP method."""
        return "GET" if self.request_type is None else "POST"


_CAT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "age"],
}
_SHORT_REQUEST = {"model": "last", "prompt": "Once", "max_tokens": 4, "temperature": 0}
OPERATIONS = (
    Operation(
        path="/v1/completions",
        name="complete",
        tag="texts",
        summary="Continue texts",
        answer=_TEXT_ANSWER,
        answer_types={_JSON: shapes.CompletionAnswer, _EVENTS: shapes.CompletionEvent},
        request_type=CompletionRequest,
        examples={
            "a text": {"model": "last", "prompt": "Once upon a time", "max_tokens": 20, "seed": 1},
            "scored": {
                "model": "last",
                "prompt": [[1, 2, 3]],
                "max_tokens": 0,
                "echo": True,
                "logprobs": 1,
            },
            "in pieces": _SHORT_REQUEST
            | {"stream": True, "stream_options": {"include_usage": True}},
        },
        errors=(404, 429),
        description="Writes n texts after each prompt, or scores the prompt.",
    ),
    Operation(
        path="/v1/chat/completions",
        name="chat",
        tag="texts",
        summary="Answer in a dialogue",
        answer=_TEXT_ANSWER,
        answer_types={_JSON: shapes.ChatAnswer, _EVENTS: shapes.ChatEvent},
        request_type=ChatRequest,
        examples={
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
                    "json_schema": {"name": "cat", "schema": _CAT_SCHEMA},
                },
            },
            "in pieces": {
                "model": "last",
                "messages": [{"role": "user", "content": "Yes or no?"}],
                "choice": ["yes", "no"],
                "stream": True,
            },
        },
        errors=(404, 429),
        description="Writes n answers to the messages.",
    ),
    Operation(
        path="/v1/responses",
        name="respond",
        tag="texts",
        summary="Answer in a dialogue, as OpenAI's Responses",
        answer=_TEXT_ANSWER,
        answer_types={
            _JSON: responses_answer.ResponseAnswer,
            _EVENTS: responses_answer.ResponseEvent,
        },
        request_type=ResponsesRequest,
        examples={
            "an answer": {
                "model": "last",
                "input": "Who are you?",
                "max_output_tokens": 20,
                "seed": 1,
            },
            "in pieces": {
                "model": "last",
                "input": [{"role": "user", "content": "Yes or no?"}],
                "max_output_tokens": 4,
                "stream": True,
            },
        },
        errors=(404, 429),
        description="The same answer as a chat's, in another form. Nothing is stored.",
    ),
    Operation(
        path=MESSAGES_PATH,
        name="message",
        tag="texts",
        summary="Answer in a dialogue, as Anthropic's Messages",
        answer=_TEXT_ANSWER,
        answer_types={
            _JSON: messages_answer.MessageAnswer,
            _EVENTS: messages_answer.MessageEvent,
        },
        request_type=MessagesRequest,
        examples={
            "an answer": {
                "model": "last",
                "messages": [{"role": "user", "content": "Who are you?"}],
                "max_tokens": 20,
                "seed": 1,
            },
            "in pieces": {
                "model": "last",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Yes?"}]}],
                "max_tokens": 4,
                "stream": True,
            },
        },
        errors=(404, 429),
        description="The same answer as a chat's, in another form.",
        error_form=_ANTHROPIC,
    ),
    Operation(
        path=f"{MESSAGES_PATH}/count_tokens",
        name="countTokens",
        tag="tokens",
        summary="Count the tokens of a dialogue",
        answer="Their number.",
        answer_types={_JSON: messages_answer.CountedTokens},
        request_type=CountRequest,
        examples={
            "a message": {
                "model": "last",
                "messages": [{"role": "user", "content": "Who are you?"}],
            }
        },
        errors=(404,),
        error_form=_ANTHROPIC,
    ),
    Operation(
        path="/v1/models",
        name="listModels",
        tag="models",
        summary="List the names of the model",
        answer="All names.",
        answer_types={_JSON: shapes.Models},
    ),
    Operation(
        path="/v1/models/{name}",
        name="getModel",
        tag="models",
        summary="Look a model up",
        answer="The model.",
        answer_types={_JSON: shapes.Model},
        errors=(404,),
    ),
    Operation(
        path="/v1/load_lora_adapter",
        name="loadAdapter",
        tag="models",
        summary="Add an adapter",
        answer="The adapter, whose name requests may give as their model.",
        answer_types={_JSON: shapes.Model},
        request_type=LoadAdapterRequest,
        examples={"an adapter": {"lora_name": "poet", "lora_path": "poet-2"}},
        description="Reads it from --adapter-dir. A server without keys refuses this.",
    ),
    Operation(
        path="/v1/unload_lora_adapter",
        name="unloadAdapter",
        tag="models",
        summary="Remove an adapter",
        answer="It is removed; requests that have begun are finished with it.",
        answer_types={_JSON: shapes.Deleted},
        request_type=UnloadAdapterRequest,
        examples={"an adapter": {"lora_name": "poet"}},
        errors=(404,),
        description="A server without keys refuses this.",
    ),
    Operation(
        path="/tokenize",
        name="tokenize",
        tag="tokens",
        summary="Encode a text",
        answer="Its tokens.",
        answer_types={_JSON: shapes.Tokens},
        request_type=TokenizeRequest,
        examples={"a text": {"prompt": "Once upon"}},
    ),
    Operation(
        path="/detokenize",
        name="detokenize",
        tag="tokens",
        summary="Decode tokens",
        answer="Their text.",
        answer_types={_JSON: shapes.Decoded},
        request_type=DetokenizeRequest,
        examples={"three tokens": {"tokens": [1, 2, 3]}},
    ),
    Operation(
        path="/tokenizer_info",
        name="describeTokenizer",
        tag="tokens",
        summary="Describe the tokenizer",
        answer="Its special tokens and its chat template.",
        answer_types={_JSON: shapes.TokenizerInfo},
    ),
    Operation(
        path="/health",
        name="getHealth",
        tag="server",
        summary="Ask whether texts are written",
        answer="They are.",
        answer_types={_JSON: shapes.Health},
        is_open=True,
    ),
    Operation(
        path="/metrics",
        name="getMetrics",
        tag="server",
        summary="Read the counts",
        answer="Requests, tokens and times, in Prometheus' text format.",
        answer_types={"text/plain": str},
    ),
    Operation(
        path="/openapi.json",
        name="getDocument",
        tag="server",
        summary="Read this document",
        answer="This document.",
        answer_types={_JSON: shapes.OpenApiDocument},
        is_open=True,
    ),
    Operation(
        path="/",
        name="getPage",
        tag="server",
        summary="Open a page to talk to the model",
        answer="The page.",
        answer_types={"text/html": str},
        is_open=True,
    ),
)

_RETRY = {
    "description": "Seconds after which to try again.",
    "schema": {"type": "integer", "minimum": 1},
}


class _Failure(NamedTuple):
    """The description of an answer with an error status.

    Attributes:
        name: the answer's name in the document.
        description: when it is sent.
        headers: the document's entries of the headers that only this answer has, by name.
        may_be_text: whether it may also be plain text instead of JSON.
    """

    name: str
    description: str
    headers: Mapping[str, Any] = {}
    may_be_text: bool = False


_FAILURES = {
    400: _Failure(
        name="Wrong",
        description="The body is not a JSON object, or a field is unknown or wrong; param names the field.",
    ),
    401: _Failure(
        name="NoKey",
        description="The server needs a key, and the request has no valid one.",
        headers={"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    ),
    403: _Failure(
        name="Forbidden",
        description="Host is not a name of this server, or Origin is not this server, or adapters may not come and go.",
    ),
    404: _Failure(name="NotFound", description="There is no model with this name."),
    405: _Failure(
        name="WrongMethod",
        description="The address has another method.",
        headers={"Allow": {"schema": {"type": "string"}}},
    ),
    408: _Failure(
        name="Slow",
        description="The body did not arrive within 30 s, or the text was not done after 600 s.",
    ),
    413: _Failure(name="TooLarge", description="The body is larger than 1 MiB."),
    415: _Failure(name="WrongType", description="Content-Type is not application/json."),
    429: _Failure(
        name="Full",
        description="Too many texts or constraints wait.",
        headers={"Retry-After": _RETRY | {"required": True}},
    ),
    500: _Failure(name="Failed", description="The server failed: its terminal says why."),
    503: _Failure(
        name="NotReady",
        description="The model is being loaded, its thread has ended, or there are too many connections. The answer "
        "for too many connections is plain text.",
        headers={"Retry-After": _RETRY},
        may_be_text=True,
    ),
}
# The statuses of errors that all operations may have, and those that all operations with a body may have.
_ERRORS_OF_ALL = (403, 405, 500, 503)
_ERRORS_OF_POST = (400, 408, 413, 415)
_KEY = "A key of the server's file (--api-key-file), if the server was started with one."
_ABOUT = (
    "A model of `monograph serve`, through APIs that are compatible with OpenAI's and Anthropic's. A request with a "
    "seed always gets the same text, however busy the server is. A field that is missing or null has its default. A "
    "field that is not listed is refused, and so is a field that is not supported and would change the text. In "
    "addition to the protocol's fields, a request may have the options of `monograph.Sampling` (docs/generate.md), and "
    "one for completions or a chat a constraint: regex, choice or response_format."
)


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document as a JSON object."""
    types: set[type] = {form.error_type for form in (_OPENAI, _ANTHROPIC)}
    for operation in OPERATIONS:
        types.update(operation.answer_types.values())
        if operation.request_type is not None:
            types.add(operation.request_type)
    # The mode "validation" asks pydantic for the schema of what it reads, not of what it would write.
    inputs: list[Any] = [(each, "validation", TypeAdapter(each)) for each in types]
    schemas, definitions = TypeAdapter.json_schemas(
        inputs, ref_template=_SCHEMA_REFERENCE, schema_generator=_SchemaGenerator
    )
    # Pydantic's key of a schema is the first two parts of its input: the type and the mode.
    schema_by_type = {described_type: schema for (described_type, _), schema in schemas.items()}
    tags = dict.fromkeys(operation.tag for operation in OPERATIONS)  # each once
    paths = {
        operation.path: {operation.method.lower(): _operation_entry(operation, schema_by_type)}
        for operation in OPERATIONS
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Monograph",
            "version": __version__,
            "license": {"name": "MIT", "identifier": "MIT"},
            "description": _ABOUT,
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}, {}],  # with a key or without: both kinds of servers exist
        "tags": [{"name": tag} for tag in tags],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": _KEY}},
            "responses": {
                form.prefix + failure.name: _failure_entry(failure, schema_by_type[form.error_type])
                for form in (_OPENAI, _ANTHROPIC)
                for failure in _FAILURES.values()
            },
            "schemas": definitions["$defs"],
        },
    }


class _SchemaGenerator(GenerateJsonSchema):
    """Makes schemas of objects that allow no further fields, and leaves out titles, which repeat names."""

    def typed_dict_schema(self, schema: TypedDictSchema) -> dict[str, Any]:
        json_schema = super().typed_dict_schema(schema)
        if schema.get("cls") in _EVENT_TYPES:  # an event may have further fields
            return json_schema
        return json_schema | {"additionalProperties": False}

    def generate_definitions(
        self, inputs: Sequence[tuple[JsonSchemaKeyT, JsonSchemaMode, CoreSchema]]
    ) -> tuple[
        dict[tuple[JsonSchemaKeyT, JsonSchemaMode], JsonSchemaValue], dict[DefsRef, JsonSchemaValue]
    ]:
        schemas, definitions = super().generate_definitions(inputs)
        return schemas, {name: _without_titles(schema) for name, schema in definitions.items()}


def _without_titles(value: object) -> Any:
    """Return a JSON schema, or a part of one, without its titles."""
    if isinstance(value, list):
        return [_without_titles(each) for each in value]
    if not isinstance(value, dict):
        return value
    # A title is a text. If "title" is the name of a property, its value is an object, which stays.
    return {
        key: _without_titles(each)
        for key, each in value.items()
        if key != "title" or not isinstance(each, str)
    }


def _operation_entry(operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the document's entry of an operation.

    Args:
        operation: the operation.
        schemas: the schema of each type of a body or an answer.
    """
    statuses = {*_ERRORS_OF_ALL, *operation.errors}
    entry: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
    }
    if operation.description:
        entry["description"] = operation.description
    if operation.is_open:
        entry["security"] = []
    else:
        statuses.add(401)
    if "{name}" in operation.path:
        entry["parameters"] = [
            {
                "name": "name",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
                "description": "A name of GET /v1/models.",
            }
        ]
    if operation.request_type is not None:
        statuses.update(_ERRORS_OF_POST)
        examples = {name: {"value": value} for name, value in operation.examples.items()}
        body = {"schema": schemas[operation.request_type], "examples": examples}
        entry["requestBody"] = {"required": True, "content": {_JSON: body}}
    content = {
        media_type: {"schema": schemas[answer_type]}
        for media_type, answer_type in operation.answer_types.items()
    }
    responses: dict[str, Any] = {"200": {"description": operation.answer, "content": content}}
    for status in sorted(statuses):
        name = operation.error_form.prefix + _FAILURES[status].name
        reference = f"#/components/responses/{name}"
        responses[str(status)] = {"$ref": reference}
    return entry | {"responses": responses}


def _failure_entry(failure: _Failure, error_schema: dict[str, Any]) -> dict[str, Any]:
    """Return the document's entry of an answer with an error."""
    content: dict[str, Any] = {_JSON: {"schema": error_schema}}
    if failure.may_be_text:
        content["text/plain"] = {"schema": {"type": "string"}}
    entry: dict[str, Any] = {"description": failure.description, "content": content}
    if failure.headers:
        entry["headers"] = dict(failure.headers)
    return entry
