"""The requests to the server, as pydantic models: their fields, and which values each may have.

The protocol is that of OpenAI's API. If a field of the protocol is not supported, it is refused if it
would change the answer, and ignored if it would not. A field that is null counts as missing.

A request is refused by raising `Refused(status, message, field, code)`. The arguments are what the client
gets: an HTTP status, an error message, the name of the wrong field, and OpenAI's name of the error.

`monograph.serve.document` makes the OpenAPI document from the same models. Where a validator replaces
pydantic's own check, its `json_schema_input_type` says what the document shows for the field.
`monograph.serve.fields` has what the models are made of.
"""

import math
import re
import secrets
from dataclasses import Field as DataclassField
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    ValidationInfo,
    create_model,
    model_validator,
)

from monograph.automata import argument_types
from monograph.automata.pattern import MAX_PATTERN_LENGTH
from monograph.data.messages import message_of
from monograph.data.records import Unusable
from monograph.decode import Sampling
from monograph.decode.sampling import BIAS, RANGES, PenaltyScope
from monograph.errors import did_you_mean
from monograph.ranges import whole
from monograph.serve.compiling import MAX_CHOICES, MAX_CONSTRAINT_BYTES
from monograph.serve.fields import (
    TOOL_CHOICE_DESCRIPTION,
    AnyTextPart,
    Body,
    Expected,
    Ignored,
    MustBeEmpty,
    list_of_tools,
    not_supported,
    number_within,
    tool_choice_or,
)
from monograph.serve.refused import Refused
from monograph.text.field_reader import ArgumentTypes

# Limits on a request.
MAX_LOGPROBS = 20  # likeliest tokens that are reported at the position of each token
MAX_BIASES = 1024  # tokens in `logit_bias`
MAX_MESSAGES = 1024
MAX_PROMPTS = 1024
MAX_STOPS = 4  # texts in `stop`
MAX_STOP_BYTES = 64  # of each text in `stop`, and of each sequence breaker
# Sequence breakers of the sampler's DRY penalty. Each of them is searched for in every token of the
# vocabulary.
MAX_BREAKERS = 64
# A seed that the server chooses is below this number. Numbers in JavaScript are floats, which have all
# integers up to it.
SEED_LIMIT = 1 << 53

_Model = TypeVar("_Model", bound=BaseModel)


# ── types and validators of fields ────────────────────────────────────────────────────────────────


TokenId = Annotated[int, Field(ge=0, description="A token of the model's vocabulary.")]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def _require_short(text: str) -> str:
    """Return a text; refuse one that is too long."""
    # `max_length` counts characters, and this counts bytes.
    if len(text.encode()) > MAX_STOP_BYTES:
        raise ValueError
    return text


ShortText = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_STOP_BYTES,
        description=f"Has at most {MAX_STOP_BYTES} bytes of UTF-8.",
    ),
    AfterValidator(_require_short),
]


def _text_as_list(value: object) -> Any:
    return [value] if isinstance(value, str) else value


def _check_prompts(value: object, info: ValidationInfo) -> list[str | list[int]]:
    name = info.field_name
    is_one_prompt = isinstance(value, str) or _are_ids(value)
    prompts = [value] if is_one_prompt else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_PROMPTS:
        expected = f"a text, or a list of 1 to {MAX_PROMPTS:,} texts or lists of ids"
        raise Refused(400, f"{name}: expected {expected}", name)
    are_texts = all(isinstance(prompt, str) for prompt in prompts)
    if not are_texts and not all(map(_are_ids, prompts)):
        raise Refused(400, f"{name}: expected texts, or lists of at least one token id", name)
    return prompts


def _are_ids(value: object) -> bool:
    # `isinstance(each, int)` would accept booleans, too.
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


_PROMPT_COUNT_LIMITS = Field(min_length=1, max_length=MAX_PROMPTS)
PromptsField = Annotated[
    list[str | list[int]],
    PlainValidator(
        _check_prompts,
        json_schema_input_type=str
        | TokenIds
        | Annotated[list[str], _PROMPT_COUNT_LIMITS]
        | Annotated[list[TokenIds], _PROMPT_COUNT_LIMITS],
    ),
]


def _check_biases(value: object, info: ValidationInfo) -> dict[int, float]:
    name = info.field_name
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        expected = f"an object of at most {MAX_BIASES:,} biases by token id"
        raise Refused(400, f"{name}: expected {expected}", name)
    for key, bias in value.items():
        # Numbers of up to 18 digits fit into 64 bits.
        is_id = key.isascii() and key.isdecimal() and len(key) <= 18
        if not is_id:
            raise Refused(400, f"{name} has the key {key!r:.40}: expected a token id", name)
        if not BIAS.holds(bias):
            raise Refused(400, f"{name}[{int(key)}] = {bias!r:.80}: expected {BIAS.expected}", name)
    bias_by_id = {int(key): bias for key, bias in value.items()}
    for token, bias in bias_by_id.items():
        # -100 is the protocol's lowest bias, and forbids a token. Only -inf does so whatever the logit is.
        if bias == -100:
            bias_by_id[token] = -math.inf
    return bias_by_id


Biases = Annotated[
    dict[int, float],
    PlainValidator(
        _check_biases,
        json_schema_input_type=Annotated[
            dict[str, Annotated[float, Field(ge=BIAS.low, le=BIAS.high)]],
            Field(
                max_length=MAX_BIASES,
                json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,18}$"}},
            ),
        ],
    ),
]


def _check_messages(value: object, info: ValidationInfo) -> list[dict[str, Any]]:
    name = str(info.field_name)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise Refused(400, f"{name}: expected a list of 1 to {MAX_MESSAGES:,} messages", name)
    return [_read_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def _read_message(name: str, value: Any) -> dict[str, Any]:
    """Return a message, read in the same way as a message of training data.

    Args:
        name: the message's place in the request, such as "messages[0]".
        value: the message as JSON has it.

    Raises:
        Refused: it is not a message.
    """
    try:
        message = message_of(value, name, get_args(Role))
    except Unusable as unusable:
        raise Refused(400, str(unusable), "messages") from None
    # If an answer is sent back as a message, OpenAI's client has added "parsed": the object that it has made
    # of the content.
    message.pop("parsed", None)
    unknown_keys = message.keys() - RequestMessage.model_fields
    if unknown_keys:
        key = min(unknown_keys)
        hint = did_you_mean(key, RequestMessage.model_fields)
        raise Refused(400, f"{name}: there is no field {key!r:.80}{hint}", "messages")
    return message


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────


# The following models, up to `RequestMessage`, only describe a message in the OpenAPI document. Messages are
# read by `_read_message`.
class TextPart(AnyTextPart):
    """A part of a message's content."""

    type: Literal["text"]


class CalledFunction(BaseModel):
    """The tool that is called, and its arguments."""

    name: str
    arguments: dict[str, Any] | str | None = Field(
        None, description="An object, or its JSON as a text."
    )


class ToolCall(BaseModel):
    """A call of a tool."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


Role = Literal["system", "developer", "user", "assistant", "tool"]


class RequestMessage(Body):
    """A part of the dialogue."""

    role: Role = Field(
        description="Who speaks. A model without a chat template knows user and assistant only."
    )
    content: str | list[TextPart] | None = Field(
        None,
        description="What is said. Only a message with tool_calls may be without it.",
    )
    name: str | None = Field(None, description="The speaker's name, for templates that show it.")
    tool_calls: list[ToolCall] | None = Field(
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
    refusal: MustBeEmpty = None
    annotations: MustBeEmpty = None
    audio: MustBeEmpty = None
    function_call: MustBeEmpty = None
    parsed: Ignored = None


class StreamOptions(Body):
    """What a stream has in addition to its texts."""

    include_usage: bool = Field(
        False,
        description="Sends one more piece at the end, which has the usage and no choices. In all other pieces usage "
        "is null.",
    )
    include_obfuscation: bool | None = Field(None, description="Is ignored: nothing is obfuscated.")


class TemplateOptions(Body):
    """What the chat template reads in addition to the messages."""

    enable_thinking: bool | None = None


class JsonSchema(Body):
    """A JSON schema, with its name."""

    schema_: dict[str, Any] = Field(
        alias="schema",
        description=f"A bounded JSON schema of at most {MAX_CONSTRAINT_BYTES:,} bytes; docs/constraints.md lists the "
        "keywords. The text follows it whether strict is true or not.",
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


class BaseRequest(Body):
    """Fields of the protocol that every request may have, and that change nothing here."""

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


FunctionNameText = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class DescribedTool(Body):
    """What the tools of all protocols have."""

    name: FunctionNameText
    description: str | None = Field(None, description="What it does, for the model.")
    strict: bool | None = Field(
        None,
        description="Whether every call follows the schema. It must then be one that docs/constraints.md lists, and so "
        "must those of the request's other tools.",
    )


class FunctionDefinition(DescribedTool):
    """A function that the model may call."""

    parameters: dict[str, Any] | None = Field(
        None,
        description="The JSON schema of its arguments, which are an object. If it is missing, there are none.",
    )


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The function that the answer calls."""

    type: Literal["function"]
    function: FunctionName


class ToolUse(NamedTuple):
    """How an answer may use the tools of its request.

    Attributes:
        shown: all tools, in the form in which the chat template reads them.
        functions: the tools that may be called: all of them, or only the one that the request names.
        must_call: whether the answer consists of calls and nothing else.
        is_strict: whether a call must have the name of a function, and arguments that follow its schema.
        parallel: whether the answer may have several calls.
    """

    shown: list[dict[str, Any]]
    functions: list[FunctionDefinition]
    must_call: bool
    is_strict: bool
    parallel: bool

    @property
    def argument_types(self) -> dict[str, ArgumentTypes]:
        """The types that the arguments of each function may have, by the function's name."""
        return {function.name: argument_types(function.parameters) for function in self.functions}


class TokenizeRequest(BaseRequest):
    """A text to be encoded."""

    prompt: str
    add_special_tokens: bool = Field(True, description="Puts the token that begins a text first.")
    model: str | None = Field(None, description="Is ignored: the newest model's tokenizer is used.")


def _check_tokens(value: object, info: ValidationInfo) -> list[int]:
    assert info.context is not None  # the endpoint passes the size of the vocabulary to `read`
    vocabulary = info.context["vocabulary"]
    # `isinstance(token, int)` would accept booleans, too.
    if isinstance(value, list) and all(
        type(token) is int and 0 <= token < vocabulary for token in value
    ):
        return value
    expected = f"a list of token ids from 0 to {vocabulary - 1}"
    raise Refused(400, f"tokens: expected {expected}", "tokens")


class DetokenizeRequest(BaseRequest):
    """Tokens to be decoded."""

    tokens: Annotated[
        list[int], PlainValidator(_check_tokens, json_schema_input_type=list[TokenId])
    ]
    model: str | None = Field(None, description="Is ignored: the newest model's tokenizer is used.")


class UnloadAdapterRequest(BaseRequest):
    """An adapter to be removed."""

    lora_name: str = Field(description="The adapter's name.")


class LoadAdapterRequest(UnloadAdapterRequest):
    """An adapter to be added."""

    lora_path: str = Field(description="The name of its folder in the server's --adapter-dir.")


class Constraint(NamedTuple):
    """What a text of the answer must match.

    Attributes:
        kind: "choices", "regex", "json_schema" or "grammar".
        value: the choices, the expression, the schema or the grammar.
        field: the name of the request's field.
    """

    kind: str
    value: str | list[str] | dict[str, Any]
    field: str


def _check_n(value: Any, info: ValidationInfo) -> int:
    assert info.context is not None  # the endpoint passes the number of rows to `read`
    allowed = whole(1, info.context["rows"])
    if not isinstance(value, int) or not allowed.holds(value):
        raise Refused(400, f"n = {value!r:.80}: expected {allowed.expected}", "n")
    return value


ModelName = Annotated[
    str,
    Field(
        description="The name of a model or an adapter, one of GET /v1/models. RUN@UPDATE is exactly these weights; "
        "RUN and last are the newest."
    ),
]


class SampledRequest(BaseRequest):
    """The fields that requests for texts in all protocols have."""

    model: ModelName
    seed: Annotated[int | None, number_within(RANGES["seed"])] = Field(
        None,
        description="Decides the sampling: an equal request with an equal seed gets an equal text, whatever else the "
        "server does. If it is missing, the server chooses one, which the answer has.",
    )
    stream: bool = Field(False, description="Sends the text in pieces, as server-sent events.")


class TextRequest(SampledRequest):
    """The fields that requests for completions and chats have in common."""

    parallel_tool_calls: Ignored = None
    n: Annotated[
        int,
        PlainValidator(
            _check_n, json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_PROMPTS)]
        ),
    ] = Field(
        1,
        description="The number of texts for each prompt, at most as many as the server writes at once (--rows). The "
        "seed of text i follows from seed and i.",
    )
    stop: Annotated[
        list[ShortText],
        FailFast(),  # stops at the first wrong text, since only one fault is reported
        Field(max_length=MAX_STOPS),
        BeforeValidator(
            _text_as_list,
            json_schema_input_type=ShortText
            | Annotated[list[ShortText], Field(max_length=MAX_STOPS)],
        ),
        Expected(f"up to {MAX_STOPS} texts of 1 to {MAX_STOP_BYTES} bytes"),
    ] = Field(
        [],
        description="The text ends before the first of these texts. Excludes tools, unless the answer must call one.",
    )
    stream_options: StreamOptions | None = Field(None, description="Is allowed only with stream.")
    regex: str | None = Field(
        None,
        description="The whole text matches this regular expression. docs/constraints.md lists the syntax. Excludes "
        "choice, response_format and grammar.",
        json_schema_extra={"maxLength": MAX_PATTERN_LENGTH},
    )
    choice: Annotated[
        list[str] | None, FailFast(), Field(min_length=1), Expected("a list of texts")
    ] = Field(
        None,
        description=f"The text is one of these, which together have at most {MAX_CONSTRAINT_BYTES:,} bytes. Excludes "
        "regex, response_format and grammar.",
        json_schema_extra={"maxItems": MAX_CHOICES},
    )
    response_format: Annotated[
        TextFormat | JsonSchemaFormat | None,
        Expected('{"type": "json_schema", "json_schema": {"schema": ...}}'),
    ] = Field(
        None,
        discriminator="type",
        description="The text is JSON that follows a schema. Excludes regex, choice and grammar.",
    )
    grammar: str | None = Field(
        None,
        description=f"The text has the form of this grammar in GBNF, as llama.cpp reads it, of at most "
        f"{MAX_CONSTRAINT_BYTES:,} bytes. Excludes regex, choice and response_format.",
        json_schema_extra={"maxLength": MAX_CONSTRAINT_BYTES},
    )
    # A subclass that supports one of these fields declares it again: `ChatRequest` tools and tool_choice,
    # and `CompletionRequest` a best_of that changes nothing.
    tools: Annotated[Any, not_supported("ask /v1/chat/completions")] = None
    tool_choice: Annotated[Any, not_supported("ask /v1/chat/completions")] = None
    functions: Annotated[Any, not_supported("give tools")] = None
    function_call: Annotated[Any, not_supported("give tool_choice")] = None
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
    def stop_texts(self) -> list[str]:
        """The stop texts: the text ends before the first of them."""
        return self.stop

    @property
    def wants_usage(self) -> bool:
        """Whether the last piece of the stream has the request's usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @cached_property
    def constraint(self) -> Constraint | None:
        """The constraint on the text, if there is one.

        Raises:
            Refused: the request has more than one.
        """
        constraints = []
        if isinstance(self.response_format, JsonSchemaFormat):
            schema = self.response_format.json_schema.schema_
            constraints.append(Constraint("json_schema", schema, "response_format"))
        if self.regex is not None:
            constraints.append(Constraint("regex", self.regex, "regex"))
        if self.choice is not None:
            constraints.append(Constraint("choices", self.choice, "choice"))
        if self.grammar is not None:
            constraints.append(Constraint("grammar", self.grammar, "grammar"))
        if len(constraints) > 1:
            first = constraints[0].field
            second = constraints[1].field
            raise Refused(400, f"{first} and {second}: give one of them", second)
        return constraints[0] if constraints else None

    @cached_property
    def sampling(self) -> Sampling:
        """How tokens are sampled. If the request has no seed, a random number is chosen."""
        options = {name: getattr(self, name) for name in SAMPLER_OPTIONS}
        seed = secrets.randbelow(SEED_LIMIT) if self.seed is None else self.seed
        return Sampling(**options, seed=seed)

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        options = self.stream_options
        # An empty object asks for nothing, so it is allowed without a stream.
        has_stream_options = options is not None and bool(options.model_fields_set)
        if has_stream_options and not self.stream:
            raise Refused(400, "stream_options is for a stream", "stream_options")
        _ = self.constraint  # the property refuses a request with several constraints
        return self


# ── the sampler's options ─────────────────────────────────────────────────────────────────────────

# The fields of `Sampling` that become fields of a request. The other ones do not: `logprobs` has another
# meaning in the protocol, `seed` is declared above, and `order` is not supported.
SAMPLER_OPTIONS = {
    option.name: option
    for option in fields(Sampling)
    if option.name not in ("logprobs", "seed", "order")
}
# The types of the options that are not a number in a range.
_TYPES: dict[str, Any] = {
    "penalty_scope": Annotated[
        PenaltyScope, Expected(f"one of {', '.join(get_args(PenaltyScope))}", shows_value=True)
    ],
    "dry_sequence_breakers": Annotated[
        list[ShortText],
        FailFast(),
        Field(max_length=MAX_BREAKERS),
        Expected(f"up to {MAX_BREAKERS} texts of 1 to {MAX_STOP_BYTES} bytes"),
    ],
    "logit_bias": Biases,
}
# The defaults of the protocol that differ from those of `Sampling`.
_DEFAULTS: dict[str, Any] = {"temperature": 1.0}
_DESCRIPTIONS = {"logit_bias": "What is added to the logits, by token id. -100 forbids a token."}


def with_options(model: type[_Model]) -> type[_Model]:
    """Return a pydantic model with a further field for each option of the sampler.

    The fields' ranges, defaults and descriptions are those of `Sampling`, except where a table above
    has another one.
    """
    descriptions = _attribute_sentences(Sampling) | _DESCRIPTIONS
    new_fields: dict[str, Any] = {}
    for name, option in SAMPLER_OPTIONS.items():
        field_type = _TYPES.get(name)
        if field_type is None:
            allowed = RANGES[name]
            number_type = int if allowed.whole else float
            field_type = Annotated[number_type, number_within(allowed)]
        default = _DEFAULTS.get(name, _json_default(option))
        new_fields[name] = field_type, Field(default, description=descriptions.get(name))
    return create_model(
        model.__name__,
        __base__=model,
        __module__=model.__module__,
        __doc__=model.__doc__,
        **new_fields,
    )


def _json_default(option: DataclassField[Any]) -> Any:
    """Return the default of an option of `Sampling`, as JSON has it."""
    if callable(option.default_factory):
        return option.default_factory()
    # JSON has lists instead of tuples.
    return list(option.default) if isinstance(option.default, tuple) else option.default


def _attribute_sentences(documented: type) -> dict[str, str]:
    """Return what the docstring of a class says about each attribute, as sentences by name."""
    _, _, attributes = (documented.__doc__ or "").partition("Attributes:\n")
    # A line is indented by 8 spaces where an attribute begins, and by 12 where its text goes on.
    attribute = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)
    sentences = {}
    for name, text in attribute.findall(attributes):
        words = " ".join(text.replace("`", "").split())
        sentences[name] = words[0].upper() + words[1:]
    return sentences


# ── requests for texts ────────────────────────────────────────────────────────────────────────────


@with_options
class CompletionRequest(TextRequest):
    """Texts to be continued."""

    prompt: PromptsField = Field(
        description="What the text continues. A prompt that is a text is encoded, after the token that begins a "
        "text. A prompt of ids is used unchanged."
    )
    max_tokens: Annotated[int, number_within(whole(0, 2**31 - 1))] = Field(
        16,
        description="The maximum number of tokens of each text. 0 is allowed with echo, and only scores the prompt.",
    )
    echo: bool = Field(
        False,
        description="Begins the answer with the prompt, whose log-probabilities are exact. Excludes stream.",
    )
    logprobs: Annotated[int | None, number_within(whole(0, MAX_LOGPROBS))] = Field(
        None,
        description="Reports the log-probability of each token under the model's own distribution, and this number of "
        "the likeliest tokens at its position with theirs.",
    )
    best_of: Annotated[int, number_within(whole(1, 2**31 - 1))] = Field(
        1, description="Is not supported: may be at most n."
    )

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of each text."""
        return self.max_tokens

    @property
    def likeliest_count(self) -> int | None:
        """How many of the likeliest tokens are reported at the position of each token.

        None: the answer has no log-probabilities, not even those of its own tokens.
        """
        return self.logprobs

    @model_validator(mode="after")
    def _require_possible(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens is 0: expected at least 1, or echo to score the prompt"
            raise Refused(400, message, "max_tokens")
        if self.best_of > self.n:
            raise Refused(
                400, "best_of is not supported: ask for n texts", "best_of", "unsupported_parameter"
            )
        if self.echo and self.stream:
            raise Refused(400, "echo is for a text that is not streamed", "echo")
        return self


class DialogueFields(BaseRequest):
    """The fields that chats and requests to /v1/responses have in common."""

    chat_template_kwargs: TemplateOptions = Field(
        TemplateOptions(), description="What the chat template reads in addition to the messages."
    )
    parallel_tool_calls: bool = Field(
        True, description="Whether a strict answer may have several calls."
    )


@with_options
class ChatRequest(DialogueFields, TextRequest):
    """A dialogue to be continued."""

    messages: Annotated[
        list[dict[str, Any]],
        PlainValidator(
            _check_messages,
            json_schema_input_type=Annotated[
                list[RequestMessage], Field(min_length=1, max_length=MAX_MESSAGES)
            ],
        ),
    ] = Field(
        description="The dialogue so far. The model's chat template makes the prompt of it; without a template, the "
        "prompt is the joined contents."
    )
    max_completion_tokens: Annotated[int | None, number_within(whole(1, 2**31 - 1))] = Field(
        None,
        description="The maximum number of tokens of each text. If it is missing, the rest of the context.",
    )
    max_tokens: Annotated[int | None, number_within(whole(1, 2**31 - 1))] = Field(
        None, description="The older name of max_completion_tokens. Excludes it."
    )
    logprobs: bool = Field(
        False,
        description="Reports the log-probability of each token under the model's own distribution.",
    )
    top_logprobs: Annotated[int | None, number_within(whole(0, MAX_LOGPROBS))] = Field(
        None,
        description="Reports this number of the likeliest tokens at the position of each token. Needs logprobs.",
    )
    tools: Annotated[list[Tool], list_of_tools(Tool)] = Field(
        [],
        description="What the model may call. A call is not made here: the client sends its result in a message of "
        "the role tool.",
    )
    tool_choice: Annotated[
        str | NamedTool | None,
        tool_choice_or(NamedTool, '{"type": "function", "function": {"name": ...}}'),
    ] = Field(None, description=TOOL_CHOICE_DESCRIPTION)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template reads in addition to the messages and tools, by name."""
        return self.chat_template_kwargs.model_dump(exclude_none=True)

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """How the answer may use tools; None: the model does not see any.

        Raises:
            Refused: two tools have one name, or the choice needs a tool that is not there.
        """
        functions = {tool.function.name: tool.function for tool in self.tools}
        if len(functions) < len(self.tools):
            raise Refused(400, "tools: two functions have one name", "tools")
        choice = self.tool_choice
        if choice == "required" and not functions:
            raise Refused(400, "tool_choice = 'required': there are no tools", "tool_choice")
        callable_functions = list(functions.values())
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in functions:
                known = ", ".join(functions) or "none"
                message = f"tool_choice: there is no function {name!r:.80}: expected {known}"
                raise Refused(400, message, "tool_choice")
            callable_functions = [functions[name]]
        if not functions or choice == "none":
            return None
        must_call = choice not in (None, "auto")
        return ToolUse(
            # "strict" is for the server, so the model does not see it.
            shown=[
                tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
                for tool in self.tools
            ],
            functions=callable_functions,
            must_call=must_call,
            is_strict=must_call or any(function.strict for function in callable_functions),
            parallel=self.parallel_tool_calls and not isinstance(choice, NamedTool),
        )

    @property
    def stop_texts(self) -> list[str]:
        """The stop texts of the content. An answer that must call tools has no content, and so none."""
        must_call = self.tool_use is not None and self.tool_use.must_call
        return [] if must_call else self.stop

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of each text; None: as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest_count(self) -> int | None:
        """How many of the likeliest tokens are reported at the position of each token.

        None: the answer has no log-probabilities, not even those of its own tokens.
        """
        if not self.logprobs:
            return None
        return self.top_logprobs or 0

    @property
    def echo(self) -> bool:
        """Whether the answer begins with the prompt: never in a chat."""
        return False

    @model_validator(mode="after")
    def _require_possible(self) -> Self:
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            message = "max_tokens is the older name of max_completion_tokens: give one of them"
            raise Refused(400, message, "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        if self.tool_use is not None:
            # A call would break the constraint, and a stop text could cut a call off.
            conflicting_field = "stop" if self.stop_texts else None
            if self.constraint is not None:
                conflicting_field = self.constraint.field
            if conflicting_field is not None:
                message = f"{conflicting_field} and tools: give one of them"
                raise Refused(400, message, conflicting_field)
        return self


AnyTextRequest = CompletionRequest | ChatRequest
