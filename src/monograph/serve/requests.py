"""The requests that the server takes, as pydantic models: their fields, what each may be, and how
each is refused.

A field that would change the answer and is not built is refused, never ignored; a few that change
nothing are accepted. Null is as good as nothing. `monograph.serve.document` describes the same
models to clients.
"""

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import Field as Option
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema

from monograph.automata.pattern import MAX_LENGTH
from monograph.data.messages import message_of
from monograph.data.records import Unusable
from monograph.decode import Sampling
from monograph.decode.sampling import BIAS, RANGES, Scope
from monograph.errors import did_you_mean
from monograph.ranges import Range, whole
from monograph.serve.compiling import MOST_BYTES, MOST_CHOICES
from monograph.serve.refused import Refused

MOST_LOGPROBS = 20
MOST_BIASES = 1024
MOST_MESSAGES = 1024
MOST_PROMPTS = 1024
MOST_STOPS = 4
MOST_STOP_BYTES = 64
MOST_BREAKERS = 64  # each is looked for in every token
SEEDS = 1 << 53  # a seed that is drawn is below it: a page's numbers are floats

_Model = TypeVar("_Model", bound=BaseModel)


# ── what a field may be ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Expected:
    """What a field must be, where its type alone does not say it well: it completes the sentence
    "expected ...".
    """

    words: str
    shows_value: bool = False


def within(allowed: Range) -> PlainValidator:
    """Return the check of a number, which refuses it with the range's own words."""
    bounds = Field(ge=allowed.low, le=allowed.high)

    def check(value: object, info: ValidationInfo) -> Any:
        if not allowed.holds(value):
            name = info.field_name
            raise Refused(400, f"{name} = {value!r:.80}: expected {allowed.expected}", name)
        return value

    return PlainValidator(
        check, json_schema_input_type=Annotated[int if allowed.whole else float, bounds]
    )


def not_supported(advice: str) -> PlainValidator:
    """Return the check of a field that would change the text and is not built: it may only say that
    it is not used.
    """

    def check(value: object, info: ValidationInfo) -> None:
        name = str(info.field_name)
        if value and value != "none":
            raise Refused(400, f"{name} is not supported: {advice}", name, "unsupported_parameter")

    return PlainValidator(check, json_schema_input_type=_NotSupported)


_NotSupported = Annotated[
    Any,
    WithJsonSchema(
        {
            "enum": [None, False, 0, "", [], {}, "none"],
            "description": "Would change the text and is not supported: any other value is refused.",
        }
    ),
]
Ignored = Annotated[Any, WithJsonSchema({"description": "Is accepted and changes nothing."})]
Nothing = Annotated[
    Any,
    WithJsonSchema(
        {"enum": [None, False, 0, "", [], {}], "description": "Any other value is refused."}
    ),
]
TokenId = Annotated[int, Field(ge=0, description="A token of the model's vocabulary.")]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def _short(text: str) -> str:
    if len(text.encode()) > MOST_STOP_BYTES:
        raise ValueError
    return text


ShortText = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MOST_STOP_BYTES,
        description=f"Has at most {MOST_STOP_BYTES} bytes of UTF-8.",
    ),
    AfterValidator(_short),
]


def _in_a_list(value: object) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: object, info: ValidationInfo) -> list[str | list[int]]:
    name = info.field_name
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MOST_PROMPTS:
        raise Refused(
            400,
            f"{name}: expected a text, or a list of 1 to {MOST_PROMPTS:,} texts or lists of ids",
            name,
        )
    if not (all(isinstance(each, str) for each in prompts) or all(map(_are_ids, prompts))):
        raise Refused(
            400, f"{name}: expected texts, or lists of token ids, of which none is empty", name
        )
    return prompts


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


_Several = Field(min_length=1, max_length=MOST_PROMPTS)
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        _prompts,
        json_schema_input_type=str
        | TokenIds
        | Annotated[list[str], _Several]
        | Annotated[list[TokenIds], _Several],
    ),
]


def _biases(value: object, info: ValidationInfo) -> dict[int, float]:
    name = info.field_name
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise Refused(
            400, f"{name}: expected an object of at most {MOST_BIASES:,} biases by token id", name
        )
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 19):
            raise Refused(400, f"{name} has the key {key!r:.40}: expected a token id", name)
        if not BIAS.holds(bias):
            raise Refused(400, f"{name}[{int(key)}] = {bias!r:.80}: expected {BIAS.expected}", name)
    # The protocol's least bias forbids a token; so does any bias of -100 here, to the last bit.
    return {int(key): -math.inf if bias == -100 else bias for key, bias in value.items()}


Biases = Annotated[
    dict[int, float],
    PlainValidator(
        _biases,
        json_schema_input_type=Annotated[
            dict[str, Annotated[float, Field(ge=BIAS.low, le=BIAS.high)]],
            Field(
                max_length=MOST_BIASES,
                json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,18}$"}},
            ),
        ],
    ),
]


def _messages(value: object, info: ValidationInfo) -> list[dict[str, Any]]:
    name = str(info.field_name)
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        raise Refused(400, f"{name}: expected a list of 1 to {MOST_MESSAGES:,} messages", name)
    return [_message(f"{name}[{index}]", each) for index, each in enumerate(value)]


def _message(name: str, value: object) -> dict[str, Any]:
    """Return a message, read as in training."""
    try:
        message = message_of(value, name, get_args(Role))
    except Unusable as unusable:
        raise Refused(400, str(unusable), "messages") from None
    assert isinstance(value, Mapping)  # `message_of` refuses anything else
    for key in value.keys() - Message.model_fields:
        said = f"{name}: there is no field {key!r:.80}{did_you_mean(key, Message.model_fields)}"
        raise Refused(400, said, "messages")
    return message


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────


class Body(BaseModel):
    """An object in JSON, with no other fields than its own."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: object) -> Any:
        """Return the fields that say something, all of which must be known."""
        if not isinstance(body, dict):
            return body
        names = {field.alias or name for name, field in cls.model_fields.items()}
        said = {name: value for name, value in body.items() if value is not None}
        for name in said:
            if name not in names:
                raise Refused(
                    400, f"there is no field {name!r:.80}{did_you_mean(name, names)}", name
                )
        return said

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema, in which every field that may be left out may be null, too."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, value in schema.get("properties", {}).items():
            if name not in schema.get("required", ()):
                schema["properties"][name] = _or_null(value)
        return schema


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    value = {
        key: inner
        for key, inner in schema.items()
        if key not in ("default", "description", "title")
    }
    said = {key: schema[key] for key in ("default", "description") if schema.get(key) is not None}
    if not value or None in value.get("enum", ()):  # it allows null already
        return value | said
    if "anyOf" not in value:
        value = {"anyOf": [value]}
    options = [each for each in value["anyOf"] if each != {"type": "null"}]
    return value | {"anyOf": [*options, {"type": "null"}]} | said


class TextPart(Body):
    """A part of what is said."""

    type: Literal["text"]
    text: str


class Function(BaseModel):
    """The tool that is called."""

    name: str
    arguments: dict[str, Any] | str | None = Field(
        None, description="An object, or its JSON as a text."
    )


class Call(BaseModel):
    """A call of a tool."""

    function: Function
    id: str | None = None
    type: str | None = None


Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(Body):
    """A part of the dialogue."""

    role: Role = Field(
        description="Who says it. A model without a chat template knows user and assistant only."
    )
    content: str | list[TextPart] | None = Field(
        None, description="What is said. It may be left out, or be null, beside tool_calls alone."
    )
    name: str | None = Field(None, description="The speaker's name, for templates that show it.")
    tool_calls: list[Call] | None = Field(
        None, description="Calls of tools that an assistant made, for templates that write them."
    )
    tool_call_id: str | None = Field(
        None, description="The call that a tool answers, for templates that write it."
    )
    reasoning_content: str | None = Field(
        None,
        description="An assistant's thoughts before the content, for templates that write them.",
    )
    thinking: str | None = Field(None, description="Another name of reasoning_content.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    refusal: Nothing = None
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None


class StreamOptions(Body):
    """What a stream has beside its texts."""

    include_usage: bool = Field(
        False,
        description="Sends one more piece at the end, which has no choices and has the usage. All others have usage "
        "null.",
    )
    include_obfuscation: bool | None = Field(None, description="Is ignored: nothing is obfuscated.")


class TemplateOptions(Body):
    """What the chat template reads beside the messages."""

    enable_thinking: bool | None = None


class JsonSchema(Body):
    """A JSON schema, with its name."""

    schema_: dict[str, Any] = Field(
        alias="schema",
        description=f"A bounded JSON schema of at most {MOST_BYTES:,} bytes; docs/constraints.md lists the keywords. "
        "It is kept in any case, strict or not.",
    )
    name: str | None = Field(None, description="Is ignored.")
    description: str | None = Field(None, description="Is ignored.")
    strict: bool | None = Field(None, description="Is ignored.")


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Request(Body):
    """What all requests may have: fields of the protocol that change nothing here."""

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    parallel_tool_calls: Ignored = None


class TokenizeRequest(Request):
    """A text to be encoded."""

    prompt: str
    add_special_tokens: bool = Field(True, description="Begins with the token that begins a text.")
    model: str | None = Field(None, description="Is ignored: the newest model's tokenizer is used.")


def _known_tokens(value: object, info: ValidationInfo) -> list[int]:
    known = range(info.context["vocabulary"]) if info.context else range(0)
    if not isinstance(value, list) or not all(
        type(token) is int and token in known for token in value
    ):
        raise Refused(400, f"tokens: expected a list of token ids from 0 to {known[-1]}", "tokens")
    return value


class DetokenizeRequest(Request):
    """Tokens to be decoded."""

    tokens: Annotated[
        list[int], PlainValidator(_known_tokens, json_schema_input_type=list[TokenId])
    ]
    model: str | None = Field(None, description="Is ignored: the newest model's tokenizer is used.")


class Limit(NamedTuple):
    """A constraint: "choices", "regex" or "json_schema", its value, and the field that has it."""

    kind: str
    value: str | list[str] | dict[str, Any]
    field: str


def _rows_at_most(value: object, info: ValidationInfo) -> int:
    allowed = whole(1, (info.context or {})["rows"])
    if not isinstance(value, int) or not allowed.holds(value):
        raise Refused(400, f"n = {value!r:.80}: expected {allowed.expected}", "n")
    return value


class TextRequest(Request):
    """What requests for texts have in common."""

    model: Annotated[
        str,
        Field(
            description="The name of a model, one of GET /v1/models. RUN@UPDATE is exactly these weights; RUN and last "
            "are the newest."
        ),
    ]
    n: Annotated[
        int,
        PlainValidator(
            _rows_at_most, json_schema_input_type=Annotated[int, Field(ge=1, le=MOST_PROMPTS)]
        ),
    ] = Field(
        1,
        description="The number of texts for each prompt. At most as many as the server writes at once (--rows); text "
        "i has a seed that follows from seed and i.",
    )
    seed: Annotated[int | None, within(RANGES["seed"])] = Field(
        None,
        description="Decides all draws: an equal request with an equal seed has an equal text, whatever else the "
        "server does. If it is left out, one is drawn, and the answer has it.",
    )
    stop: Annotated[
        list[ShortText],
        FailFast(),
        Field(max_length=MOST_STOPS),
        BeforeValidator(
            _in_a_list,
            json_schema_input_type=ShortText
            | Annotated[list[ShortText], Field(max_length=MOST_STOPS)],
        ),
        Expected(f"up to {MOST_STOPS} texts of 1 to {MOST_STOP_BYTES} bytes"),
    ] = Field([], description="The text ends before the first of these texts.")
    stream: bool = Field(False, description="Sends the text in pieces, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Is for a stream only.")
    regex: str | None = Field(
        None,
        description="The whole text matches this regular expression. docs/constraints.md lists the syntax. Excludes "
        "choice and response_format.",
        json_schema_extra={"maxLength": MAX_LENGTH},
    )
    choice: Annotated[
        list[str] | None, FailFast(), Field(min_length=1), Expected("a list of texts")
    ] = Field(
        None,
        description=f"The text is one of these, which have at most {MOST_BYTES:,} bytes in all. Excludes regex and "
        "response_format.",
        json_schema_extra={"maxItems": MOST_CHOICES},
    )
    response_format: Annotated[
        TextFormat | JsonSchemaFormat | None,
        Expected('{"type": "json_schema", "json_schema": {"schema": ...}}'),
    ] = Field(
        None,
        discriminator="type",
        description="The text is JSON that follows a schema. Excludes regex and choice.",
    )
    tools: Annotated[Any, not_supported("write what the tools can do into a message")] = None
    tool_choice: Annotated[Any, not_supported("leave it out")] = None
    functions: Annotated[Any, not_supported("write what they can do into a message")] = None
    function_call: Annotated[Any, not_supported("leave it out")] = None
    reasoning_effort: Annotated[Any, not_supported("leave it out")] = None
    suffix: Annotated[Any, not_supported("leave it out")] = None
    best_of: Annotated[Any, not_supported("ask for n texts")] = None
    audio: Annotated[Any, not_supported("leave it out")] = None
    modalities: Annotated[Any, not_supported("leave it out")] = None
    prediction: Annotated[Any, not_supported("leave it out")] = None
    web_search_options: Annotated[Any, not_supported("leave it out")] = None
    verbosity: Annotated[Any, not_supported("leave it out")] = None
    order: Annotated[Any, not_supported("leave it out")] = None

    @property
    def usage(self) -> bool:
        """Whether a last piece of the stream says how many tokens it took."""
        return self.stream_options is not None and self.stream_options.include_usage

    @cached_property
    def limit(self) -> Limit | None:
        """The constraint.

        Raises:
            Refused: there are two.
        """
        given = []
        if isinstance(self.response_format, JsonSchemaFormat):
            given.append(
                Limit("json_schema", self.response_format.json_schema.schema_, "response_format")
            )
        if self.regex is not None:
            given.append(Limit("regex", self.regex, "regex"))
        if self.choice is not None:
            given.append(Limit("choices", self.choice, "choice"))
        if len(given) > 1:
            raise Refused(
                400, f"{given[0].field} and {given[1].field}: give one of them", given[1].field
            )
        return given[0] if given else None

    @cached_property
    def sampling(self) -> Sampling:
        """How tokens are chosen, with a seed that is drawn where none was given."""
        options = {name: getattr(self, name) for name in OPTIONS}
        return Sampling(
            **options, seed=secrets.randbelow(SEEDS) if self.seed is None else self.seed
        )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (
            self.stream_options is not None
            and self.stream_options.model_fields_set
            and not self.stream
        ):
            raise Refused(400, "stream_options is for a stream", "stream_options")
        _ = self.limit
        return self


# ── the sampler's options ─────────────────────────────────────────────────────────────────────────

# `logprobs` is another number here, the seed has a field of its own, and the order is not built.
_OPTIONS = {
    option.name: option
    for option in fields(Sampling)
    if option.name not in ("logprobs", "seed", "order")
}
OPTIONS = frozenset(_OPTIONS)
# Their types, where it is no number of a range.
_TYPES: dict[str, Any] = {
    "penalty_scope": Annotated[
        Scope, Expected(f"one of {', '.join(get_args(Scope))}", shows_value=True)
    ],
    "dry_sequence_breakers": Annotated[
        list[ShortText],
        FailFast(),
        Field(max_length=MOST_BREAKERS),
        Expected(f"up to {MOST_BREAKERS} texts of 1 to {MOST_STOP_BYTES} bytes"),
    ],
    "logit_bias": Biases,
}
# The protocol's own default is not that of `monograph generate`.
_DEFAULTS: dict[str, Any] = {"temperature": 1.0}
_DESCRIPTIONS = {"logit_bias": "What is added to the logits, by token id. -100 forbids a token."}


def with_options(model: type[_Model]) -> type[_Model]:
    """Return a model with a field for each option of `Sampling`, as it is declared there."""
    said = _attributes(Sampling) | _DESCRIPTIONS
    added: dict[str, Any] = {}
    for name, option in _OPTIONS.items():
        kind = (
            _TYPES.get(name)
            or Annotated[int if RANGES[name].whole else float, within(RANGES[name])]
        )
        added[name] = kind, Field(_DEFAULTS.get(name, _default(option)), description=said.get(name))
    return create_model(
        model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added
    )


def _default(option: Option[Any]) -> Any:
    if callable(option.default_factory):
        return option.default_factory()
    return list(option.default) if isinstance(option.default, tuple) else option.default


def _attributes(described: type) -> dict[str, str]:
    """Return what the docstring of a class says of each attribute, in a sentence."""
    listed = (described.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", listed, re.MULTILINE)
    sentences = {name: " ".join(text.replace("`", "").split()) for name, text in found}
    return {name: f"{said[0].upper()}{said[1:]}" for name, said in sentences.items()}


# ── requests for texts ────────────────────────────────────────────────────────────────────────────


@with_options
class CompletionRequest(TextRequest):
    """Texts to be continued."""

    prompt: Prompts = Field(
        description="What the text continues. A text is encoded and has the token that begins a text before it; ids "
        "are taken as they are."
    )
    max_tokens: Annotated[int, within(whole(0, 2**31 - 1))] = Field(
        16, description="The most tokens of each text. 0 is for echo, and scores the prompt alone."
    )
    echo: bool = Field(
        False,
        description="Begins the answer with the prompt, whose log-probabilities are exact. Is not for a stream.",
    )
    logprobs: Annotated[int | None, within(whole(0, MOST_LOGPROBS))] = Field(
        None,
        description="Reports the log-probability of each token under the model's own distribution, and of so many of "
        "the likeliest tokens in its place.",
    )
    best_of: Annotated[int, within(whole(1, 2**31 - 1))] = Field(
        1, description="Is not supported: at most n."
    )

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of each text."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are reported with each; None: no log-probabilities at
        all.
        """
        return self.logprobs

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise Refused(
                400, "max_tokens is 0: only a request with echo asks for no token", "max_tokens"
            )
        if self.best_of > self.n:
            raise Refused(
                400, "best_of is not supported: ask for n texts", "best_of", "unsupported_parameter"
            )
        if self.echo and self.stream:
            raise Refused(400, "echo is for a text that is not streamed", "echo")
        return self


@with_options
class ChatRequest(TextRequest):
    """A dialogue to be continued."""

    messages: Annotated[
        list[dict[str, Any]],
        PlainValidator(
            _messages,
            json_schema_input_type=Annotated[
                list[Message], Field(min_length=1, max_length=MOST_MESSAGES)
            ],
        ),
    ] = Field(
        description="The dialogue so far. The model's chat template puts it together; without one, the texts are "
        "joined and continued."
    )
    max_completion_tokens: Annotated[int | None, within(whole(1, 2**31 - 1))] = Field(
        None,
        description="The most tokens of each text. If it is left out, the rest of the context.",
    )
    max_tokens: Annotated[int | None, within(whole(1, 2**31 - 1))] = Field(
        None, description="The older name of max_completion_tokens; both at once are refused."
    )
    logprobs: bool = Field(
        False,
        description="Reports the log-probability of each token under the model's own distribution.",
    )
    top_logprobs: Annotated[int | None, within(whole(0, MOST_LOGPROBS))] = Field(
        None,
        description="Reports so many of the likeliest tokens in the place of each. Needs logprobs.",
    )
    chat_template_kwargs: TemplateOptions = Field(
        TemplateOptions(), description="What the chat template reads beside the messages."
    )

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat's template reads beside the messages."""
        return self.chat_template_kwargs.model_dump(exclude_none=True)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of each text; None: as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are reported with each; None: no log-probabilities at
        all.
        """
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def echo(self) -> bool:
        """Whether the answer begins with the prompt: in a chat it never does."""
        return False

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            said = "max_tokens is the older name of max_completion_tokens: give one of them"
            raise Refused(400, said, "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        return self


Asked = CompletionRequest | ChatRequest


# ── reading ───────────────────────────────────────────────────────────────────────────────────────

_MISSING = {
    "model": "GET /v1/models says which there are",
    "prompt": "expected a text, a list of texts, or lists of token ids",
    "messages": "expected a list of messages",
    "tokens": "expected a list of token ids",
}
_TYPE_WORDS = {
    "string_type": "a text",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def read(model: type[_Model], body: dict[str, Any], **context: int) -> _Model:
    """Return a body as a request.

    Args:
        model: the kind of request.
        body: the JSON object.
        context: what the server's model allows: "rows", the largest n, or "vocabulary", the number
            of token ids.

    Raises:
        Refused: a field is wrong; the error names it.
    """
    try:
        return model.model_validate(body, context=context)
    except ValidationError as error:
        raise _refusal(model, error) from None


def _refusal(model: type[BaseModel], error: ValidationError) -> Refused:
    """Return what is said of the first wrong field."""
    first = error.errors(include_url=False)[0]
    names = [step for step in first["loc"] if isinstance(step, str)]
    name = names[-1]
    is_missing = first["type"] == "missing"
    if is_missing and len(names) == 1:
        return Refused(400, f"{name} is missing: {_MISSING[name]}", name)
    if is_missing or len(names) == 1:  # of what is inside a field, its own words say most
        for expected in model.model_fields[names[0]].metadata:
            if isinstance(expected, Expected):
                shown = f" = {first['input']!r:.80}" if expected.shows_value else ""
                return Refused(400, f"{names[0]}{shown}: expected {expected.words}", names[0])
    words = _TYPE_WORDS.get(first["type"], first["msg"])
    return Refused(400, f"{name} = {first['input']!r:.80}: expected {words}", name)
