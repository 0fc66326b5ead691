"""Answers of /v1/messages: their types, and how they and their events are written."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, Json
from pydantic_core import from_json
from typing_extensions import TypedDict

from monograph.serve import shapes
from monograph.serve.answers import AnswerBuilder, TextPiece, as_json, event
from monograph.serve.blocks import AnswerBlock, BlockBuilder, BlockStep
from monograph.serve.refused import MESSAGES_PATH, Refused, error_body
from monograph.serve.requests import ChatRequest
from monograph.serve.versions import ServedModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
BlockIndex = Annotated[int, Field(ge=0, description="The number of the block in the answer.")]
# If the arguments of a call are not a JSON object, they are a text under this key, as Anthropic's
# documentation has it.
INVALID_INPUT = "INVALID_JSON"


# ── types ─────────────────────────────────────────────────────────────────────────────────────────


class AnsweredText(TypedDict):
    """A text of an answer."""

    type: Literal["text"]
    text: str


class AnsweredToolUse(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(description="The block with the result has it as tool_use_id.")]
    name: str
    input: Annotated[
        dict[str, Any],
        Field(
            description="The arguments. Unless the call is strict they may be wrong, and what is no JSON is a text "
            f"under {INVALID_INPUT}. In a stream they are empty when the block begins."
        ),
    ]


class AnsweredThoughts(TypedDict):
    """What the model thought, if its template has thoughts."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Literal[""], Field(description="Thoughts are not signed.")]


AnsweredBlock = Annotated[
    AnsweredText | AnsweredThoughts | AnsweredToolUse, Field(discriminator="type")
]


class MessageUsage(TypedDict):
    """The numbers of tokens of a request. A token that ends a text is counted, too."""

    input_tokens: shapes.NaturalCount
    output_tokens: shapes.NaturalCount


class MessageAnswer(TypedDict):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: Annotated[
        str,
        Field(description="RUN@UPDATE, or RUN@UPDATE+ADAPTER, whatever name the request has."),
    ]
    system_fingerprint: str
    seed: int
    content: list[AnsweredBlock]
    stop_reason: Annotated[
        StopReason | None,
        Field(description="max_tokens: also if the context is full. Null when a stream begins."),
    ]
    stop_sequence: Annotated[str | None, Field(description="The text that came.")]
    usage: MessageUsage


class MessageStart(TypedDict):
    """The answer begins."""

    type: Literal["message_start"]
    message: MessageAnswer


class BlockStart(TypedDict):
    """A block begins."""

    type: Literal["content_block_start"]
    index: BlockIndex
    content_block: AnsweredBlock


class MessageTextDelta(TypedDict):
    """Further characters of a text."""

    type: Literal["text_delta"]
    text: str


class InputDelta(TypedDict):
    """Further characters of the JSON of an input."""

    type: Literal["input_json_delta"]
    partial_json: str


class ThinkingDelta(TypedDict):
    """Further characters of thoughts."""

    type: Literal["thinking_delta"]
    thinking: str


class BlockDelta(TypedDict):
    """A block grows."""

    type: Literal["content_block_delta"]
    index: BlockIndex
    delta: Annotated[MessageTextDelta | ThinkingDelta | InputDelta, Field(discriminator="type")]


class BlockStop(TypedDict):
    """A block has ended."""

    type: Literal["content_block_stop"]
    index: BlockIndex


class StopDelta(TypedDict):
    """Why the answer has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """The answer has ended."""

    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage


class MessageStop(TypedDict):
    """The stream is complete."""

    type: Literal["message_stop"]


class MessageErrorDetails(TypedDict):
    """Why a request that refers to stored messages is refused: nothing is stored."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: Annotated[list[str], Field(max_length=0)]


class MessageErrorBody(TypedDict):
    """What is wrong."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "api_error",
    ]
    message: Annotated[
        str, Field(description="One line: what is wrong, with the field's name, and what to do.")
    ]
    details: NotRequired[MessageErrorDetails]


class MessageError(TypedDict):
    """An error."""

    type: Literal["error"]
    error: MessageErrorBody


MessageStreamEvent = Annotated[
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageError,
    Field(discriminator="type"),
]


class MessageEvent(TypedDict):
    """A server-sent event of a stream, whose field event is the type of its data.

    The last one is message_stop or error. Lines that begin with a colon keep the connection open.
    """

    data: Json[MessageStreamEvent]


class CountedTokens(TypedDict):
    """The number of tokens of a prompt."""

    input_tokens: shapes.NaturalCount


# ── the builder ───────────────────────────────────────────────────────────────────────────────────


class MessageBuilder(AnswerBuilder):
    """Makes the answer to one request to /v1/messages."""

    def __init__(self, model: ServedModel, request: ChatRequest) -> None:
        """Begin an answer of a model to a request."""
        self._blocks = BlockBuilder()
        self._fields: dict[str, Any] = {
            "id": "msg_" + uuid.uuid4().hex,
            "type": "message",
            "role": "assistant",
            "model": model.id,
            "system_fingerprint": model.fingerprint,
            "seed": request.sampling.seed,
        }

    def whole_json(self, texts: Sequence[Sequence[TextPiece]], usage: shapes.Usage) -> bytes:
        """Return the whole answer; see the base class."""
        for piece in texts[0]:
            self._blocks.add(piece)
        content = []
        for block in self._blocks.blocks:
            call_input = _input(block.text) if block.kind == "call" else {}
            content.append(_content_block(block, call_input))
        return as_json(
            self._fields | {"content": content} | self._stop() | {"usage": _message_usage(usage)}
        )

    def first_events(self, text_count: int, prompt_tokens: int) -> list[bytes]:
        """Return the event that tells that the answer begins."""
        message = self._fields | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
        return [_event("message_start", message=message)]

    def piece_events(self, piece: TextPiece) -> list[bytes]:
        """Return the events of a piece."""
        return [_step_event(step) for step in self._blocks.add(piece)]

    def last_events(self, usage: shapes.Usage) -> list[bytes]:
        """Return the events that tell why the answer has ended, and that the stream is complete."""
        delta = _event("message_delta", delta=self._stop(), usage=_message_usage(usage))
        return [delta, _event("message_stop")]

    def error_event(self, refused: Refused) -> bytes:
        """Return the event of an error."""
        return event(as_json(error_body(refused, MESSAGES_PATH)), "error")

    def _stop(self) -> dict[str, Any]:
        """Return the fields that say why the answer has ended."""
        blocks = self._blocks
        reason: StopReason = "end_turn"
        if blocks.finish == "length":
            reason = "max_tokens"
        elif blocks.has_calls:
            reason = "tool_use"
        elif blocks.stopped_by:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": blocks.stopped_by or None}


def _event(kind: str, **fields: Any) -> bytes:
    """Return a server-sent event of this kind, with the fields of its data."""
    return event(as_json({"type": kind, **fields}), kind)


def _step_event(step: BlockStep) -> bytes:
    """Return the event that says what happens to a block."""
    block = step.block
    if step.kind == "begin":
        empty = _content_block(replace(block, text=""), {})
        return _event("content_block_start", index=block.index, content_block=empty)
    if step.kind == "end":
        return _event("content_block_stop", index=block.index)
    delta = {"type": "text_delta", "text": step.text}
    if block.kind == "call":
        delta = {"type": "input_json_delta", "partial_json": step.text}
    elif block.kind == "thoughts":
        delta = {"type": "thinking_delta", "thinking": step.text}
    return _event("content_block_delta", index=block.index, delta=delta)


def _content_block(block: AnswerBlock, call_input: dict[str, Any]) -> dict[str, Any]:
    """Return a block as the protocol has it; `call_input` is the arguments, if it is a call."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "thoughts":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": call_input}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    If they are cut off, the object has what is complete. Anthropic's client makes the same object of a
    stream.
    """
    try:
        value = from_json(arguments, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_INPUT: arguments}


def _message_usage(usage: shapes.Usage) -> MessageUsage:
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
