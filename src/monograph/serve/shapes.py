"""The types of the server's answers, in the form of the protocol in which it was asked.

The code that makes answers is type-checked against them, and the OpenAPI document is made from them.
Nothing is checked at run time. In the document, the docstrings are the types' descriptions.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, Json
from typing_extensions import TypedDict

from monograph.decode.sampling import RANGES
from monograph.serve.requests import MAX_LOGPROBS, TokenId

ServedFinish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]
NaturalCount = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
Time = Annotated[int, Field(ge=0, description="Seconds since 1970.")]
JsonLogProbability = Annotated[float, Field(le=0, description="ln p, and -9999 where p is 0.")]
Index = Annotated[
    int,
    Field(
        ge=0,
        description="The text's number: with n texts for each prompt, text i of prompt p has p * n + i.",
    ),
]
FinishReason = Annotated[
    ServedFinish,
    Field(
        description="stop: the text ended, or a stop text came. length: it has the maximum of tokens."
    ),
]
MaybeFinishReason = Annotated[
    ServedFinish | None, Field(description="Is null, except in the last piece of a text.")
]
_CHAT_FINISH = (
    "stop and length: as for a completion. tool_calls: the answer ended, and calls tools."
)
ChatFinishReason = Annotated[ChatFinish, Field(description=_CHAT_FINISH)]
MaybeChatFinishReason = Annotated[
    ChatFinish | None, Field(description="Is null, except in the last piece of an answer.")
]


class Usage(TypedDict):
    """The numbers of tokens of a request. A token that ends a text is counted, too."""

    prompt_tokens: NaturalCount
    completion_tokens: NaturalCount
    total_tokens: NaturalCount


class _Head(TypedDict):
    """The fields that all answers with texts have."""

    id: Annotated[str, Field(description="Is the same in all pieces of a stream.")]
    created: Time
    model: Annotated[
        str,
        Field(description="RUN@UPDATE, or RUN@UPDATE+ADAPTER, whatever name the request has."),
    ]
    system_fingerprint: Annotated[
        str,
        Field(
            description="Stands for the weights, the settings and the software: where it is equal, the same request "
            "with the same seed has the same text."
        ),
    ]
    seed: Annotated[
        int,
        Field(
            ge=RANGES["seed"].low,
            le=RANGES["seed"].high,
            description="The seed of the request, or the one that the server chose.",
        ),
    ]


UsageOrNull = Annotated[
    Usage | None,
    Field(description="With include_usage, null in all pieces but the last; otherwise left out."),
]

# ── /v1/completions ───────────────────────────────────────────────────────────────────────────────


class CompletionLogprobs(TypedDict):
    """The tokens of a text with their log-probabilities."""

    tokens: Annotated[
        list[str],
        Field(
            description=r"Each token's text. Bytes that are not UTF-8 are written like 'bytes:\xf0'."
        ),
    ]
    token_logprobs: Annotated[
        list[JsonLogProbability | None],
        Field(description="Null for the first token of an echoed prompt."),
    ]
    top_logprobs: Annotated[
        list[dict[str, JsonLogProbability] | None],
        Field(
            description="ln p of the likeliest tokens and of the sampled one, by their texts. A second token with an "
            "equal text is written like 'token_id:17'."
        ),
    ]
    text_offset: Annotated[
        list[NaturalCount], Field(description="The number of characters before each token.")
    ]


class CompletionChoice(TypedDict):
    """A text."""

    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionPieceChoice(TypedDict):
    """A piece of a text."""

    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: MaybeFinishReason


class CompletionAnswer(_Head):
    """Whole texts."""

    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: Usage


class CompletionPiece(_Head):
    """An event of a stream. A text is its joined pieces."""

    object: Literal["text_completion"]
    choices: list[CompletionPieceChoice]
    usage: NotRequired[UsageOrNull]


# ── /v1/chat/completions ──────────────────────────────────────────────────────────────────────────


class ChatToken(TypedDict):
    """A token with its log-probability."""

    token: str
    logprob: JsonLogProbability
    bytes: Annotated[
        list[Annotated[int, Field(ge=0, le=255)]], Field(description="The token's own bytes.")
    ]


class ChatDrawnToken(ChatToken):
    """A token that was sampled, with the likeliest tokens at its position."""

    top_logprobs: Annotated[list[ChatToken], Field(max_length=MAX_LOGPROBS)]


class ChatLogprobs(TypedDict):
    """The tokens of an answer with their log-probabilities."""

    content: list[ChatDrawnToken]
    refusal: None


class CalledTool(TypedDict):
    """The function that is called."""

    name: str
    arguments: Annotated[
        str,
        Field(
            description="The arguments as JSON, as the model wrote them. They may be wrong unless the call is strict, "
            "and incomplete if finish_reason is length."
        ),
    ]


class AnsweredCall(TypedDict):
    """A call of a tool."""

    id: Annotated[str, Field(description="The message with the result has it as tool_call_id.")]
    type: Literal["function"]
    function: CalledTool


class CalledToolPiece(TypedDict):
    """New characters of a call's arguments; in the call's first piece also the function's name."""

    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    """A piece of a call."""

    index: Annotated[int, Field(ge=0, description="The number of the call in the answer.")]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledToolPiece


class ChatMessage(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: Annotated[str | None, Field(description="Is null if the answer only calls tools.")]
    refusal: None
    reasoning_content: NotRequired[
        Annotated[
            str, Field(description="What the model thought before, if its template has thoughts.")
        ]
    ]
    tool_calls: NotRequired[Annotated[list[AnsweredCall], Field(min_length=1)]]


class ChatDelta(TypedDict):
    """The first piece of a text has the role and an empty content."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Annotated[list[CallDelta], Field(min_length=1)]]


class ChatChoice(TypedDict):
    """An answer."""

    index: Index
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatPieceChoice(TypedDict):
    """A piece of an answer."""

    index: Index
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: MaybeChatFinishReason


class ChatAnswer(_Head):
    """Whole answers."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage


class ChatPiece(_Head):
    """An event of a stream. A text is the joined contents of its pieces."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPieceChoice]
    usage: NotRequired[UsageOrNull]


# ── the rest ──────────────────────────────────────────────────────────────────────────────────────


class ErrorBody(TypedDict):
    """What is wrong."""

    message: Annotated[str, Field(description="One line: what is wrong, and what to do.")]
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "rate_limit_error",
        "server_error",
    ]
    param: Annotated[str | None, Field(description="The field that is wrong.")]
    code: (
        Literal[
            "context_length_exceeded",
            "invalid_api_key",
            "model_not_found",
            "rate_limit_exceeded",
            "timeout",
            "unavailable",
            "unsupported_parameter",
        ]
        | None
    )


class Error(TypedDict):
    """An error."""

    error: ErrorBody


class CompletionEvent(TypedDict):
    """A server-sent event of a stream.

    The last event is [DONE], or an error if the rest is missing. Lines that begin with a colon keep
    the connection open.
    """

    data: Literal["[DONE]"] | Json[CompletionPiece | Error]


class ChatEvent(TypedDict):
    """A server-sent event of a stream.

    The last event is [DONE], or an error if the rest is missing. Lines that begin with a colon keep
    the connection open.
    """

    data: Literal["[DONE]"] | Json[ChatPiece | Error]


class Model(TypedDict):
    """An entry of the list of models: one of the names by which requests can ask for the model."""

    id: str
    object: Literal["model"]
    created: Time
    owned_by: Literal["monograph"]
    max_model_len: Annotated[
        int,
        Field(
            ge=1, description="The context: the maximum number of tokens of a prompt and its text."
        ),
    ]
    root: Annotated[
        str,
        Field(
            description="RUN@UPDATE, or RUN@UPDATE+ADAPTER: the weights that the name stands for now."
        ),
    ]
    parent: Annotated[
        str | None, Field(description="If the name is that of an adapter, its model: RUN@UPDATE.")
    ]
    chat: Annotated[bool, Field(description="Whether the model has a chat template.")]


class Models(TypedDict):
    """All names of the model and its adapters."""

    object: Literal["list"]
    data: Annotated[list[Model], Field(min_length=1)]


class Deleted(TypedDict):
    """An adapter that was removed."""

    id: str
    object: Literal["model"]
    deleted: Literal[True]


class Health(TypedDict):
    """The server answers requests for texts."""

    status: Literal["ok"]
    model: str


class Tokens(TypedDict):
    """An encoded text."""

    tokens: list[TokenId]
    count: NaturalCount
    max_model_len: PositiveCount


class Decoded(TypedDict):
    """A decoded text."""

    prompt: Annotated[str, Field(description="Bytes that are not UTF-8 are U+FFFD.")]


class TokenizerInfo(TypedDict):
    """Special tokens and the chat template."""

    bos_token: Annotated[str | None, Field(description="Begins a text.")]
    eos_token: Annotated[str | None, Field(description="Ends a text.")]
    pad_token: Annotated[str | None, Field(description="Stands in unused positions.")]
    chat_template: Annotated[str | None, Field(description="A Jinja template.")]


OpenApiDocument = dict[str, Any]
