"""Answers of /v1/responses: their types, and how they and their events are written."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Json
from typing_extensions import TypedDict

from monograph.serve import shapes
from monograph.serve.answers import (
    AnswerBuilder,
    ScoredToken,
    TextPiece,
    as_json,
    event,
    sampled_token,
)
from monograph.serve.blocks import AnswerBlock, BlockBuilder, BlockStep
from monograph.serve.fields import ToolChoiceWord
from monograph.serve.refused import Refused, error_body
from monograph.serve.requests import ChatRequest
from monograph.serve.responses_request import (
    FunctionTool,
    NamedFunction,
    ResponsesRequest,
    TextOptions,
)
from monograph.serve.versions import ServedModel

ItemStatus = Literal["in_progress", "completed", "incomplete"]
SequenceNumber = Annotated[int, Field(ge=0, description="The number of the event in the stream.")]
OutputIndex = Annotated[int, Field(ge=0, description="The number of the item in the answer.")]


# ── types ─────────────────────────────────────────────────────────────────────────────────────────


class OutputText(TypedDict):
    """A text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[shapes.ChatDrawnToken]


class OutputMessage(TypedDict):
    """What the model says."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: Annotated[list[OutputText], Field(max_length=1)]


class OutputCall(TypedDict):
    """A call of a tool. It is incomplete if the maximum number of tokens has cut it off."""

    type: Literal["function_call"]
    id: str
    call_id: Annotated[str, Field(description="The item with the result has it, too.")]
    name: str
    arguments: Annotated[
        str,
        Field(
            description="The arguments as JSON, as the model wrote them. They may be wrong unless the call is strict."
        ),
    ]
    status: ItemStatus


class ReasoningText(TypedDict):
    """The text of thoughts."""

    type: Literal["reasoning_text"]
    text: str


class OutputThoughts(TypedDict):
    """What the model thought, if its template has thoughts."""

    type: Literal["reasoning"]
    id: str
    summary: Annotated[list[Any], Field(max_length=0)]
    content: Annotated[list[ReasoningText], Field(max_length=1)]
    status: ItemStatus


OutputItem = Annotated[OutputMessage | OutputThoughts | OutputCall, Field(discriminator="type")]


class InputDetails(TypedDict):
    """Is not counted for a request: /metrics has what was reused in all."""

    cached_tokens: Literal[0]
    cache_write_tokens: Literal[0]


class OutputDetails(TypedDict):
    """Is not counted."""

    reasoning_tokens: Literal[0]


class ResponseUsage(TypedDict):
    """The numbers of tokens of a request. A token that ends a text is counted, too."""

    input_tokens: shapes.NaturalCount
    input_tokens_details: InputDetails
    output_tokens: shapes.NaturalCount
    output_tokens_details: OutputDetails
    total_tokens: shapes.NaturalCount


class IncompleteDetails(TypedDict):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(TypedDict):
    """An answer."""

    id: str
    object: Literal["response"]
    created_at: shapes.Time
    status: Annotated[
        ItemStatus,
        Field(description="incomplete: it has the maximum of tokens, or the context is full."),
    ]
    error: None
    incomplete_details: IncompleteDetails | None
    model: Annotated[
        str,
        Field(description="RUN@UPDATE, or RUN@UPDATE+ADAPTER, whatever name the request has."),
    ]
    system_fingerprint: str
    seed: int
    output: list[OutputItem]
    usage: ResponseUsage | None
    store: Annotated[Literal[False], Field(description="Nothing is stored.")]
    previous_response_id: None
    background: Literal[False]
    truncation: Literal["disabled"]
    reasoning: None
    metadata: Annotated[dict[str, Any], Field(max_length=0)]
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: TextOptions
    tool_choice: ToolChoiceWord | NamedFunction
    tools: list[FunctionTool]


class ResponseChange(TypedDict):
    """The answer begins, or has ended."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete"
    ]
    sequence_number: SequenceNumber
    response: ResponseAnswer


class ItemChange(TypedDict):
    """An item begins, or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: SequenceNumber
    output_index: OutputIndex
    item: OutputItem


class PartChange(TypedDict):
    """The text of a message or of thoughts begins, or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: SequenceNumber
    item_id: str
    output_index: OutputIndex
    content_index: Literal[0]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class ResponseTextDelta(TypedDict):
    """Further characters of a message."""

    type: Literal["response.output_text.delta"]
    sequence_number: SequenceNumber
    item_id: str
    output_index: OutputIndex
    content_index: Literal[0]
    delta: str
    logprobs: list[shapes.ChatDrawnToken]


class TextDone(TypedDict):
    """The whole text of a message."""

    type: Literal["response.output_text.done"]
    sequence_number: SequenceNumber
    item_id: str
    output_index: OutputIndex
    content_index: Literal[0]
    text: str
    logprobs: list[shapes.ChatDrawnToken]


class ThoughtsDelta(TypedDict):
    """Further characters of thoughts."""

    type: Literal["response.reasoning_text.delta"]
    sequence_number: SequenceNumber
    item_id: str
    output_index: OutputIndex
    content_index: Literal[0]
    delta: str


class ThoughtsDone(TypedDict):
    """The whole text of thoughts."""

    type: Literal["response.reasoning_text.done"]
    sequence_number: SequenceNumber
    item_id: str
    output_index: OutputIndex
    content_index: Literal[0]
    text: str


class ArgumentsDelta(TypedDict):
    """Further characters of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    sequence_number: SequenceNumber
    item_id: str
    output_index: OutputIndex
    delta: str


class ArgumentsDone(TypedDict):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    sequence_number: SequenceNumber
    item_id: str
    output_index: OutputIndex
    name: str
    arguments: str


class ResponseFault(TypedDict):
    """An error, which ends the stream."""

    type: Literal["error"]
    sequence_number: SequenceNumber
    message: str
    code: str | None
    param: str | None
    error: shapes.ErrorBody


ResponseStreamEvent = Annotated[
    ResponseChange
    | ItemChange
    | PartChange
    | ResponseTextDelta
    | TextDone
    | ThoughtsDelta
    | ThoughtsDone
    | ArgumentsDelta
    | ArgumentsDone
    | ResponseFault,
    Field(discriminator="type"),
]


class ResponseEvent(TypedDict):
    """A server-sent event of a stream, whose field event is the type of its data.

    The last one is response.completed, response.incomplete or error. Lines that begin with a colon keep
    the connection open.
    """

    data: Json[ResponseStreamEvent]


# ── the builder ───────────────────────────────────────────────────────────────────────────────────


_ID_PREFIXES = {"text": "msg_", "call": "fc_", "thoughts": "rs_"}
# The beginning of the names of the events that tell how a block of each kind grows.
_GROWING = {
    "text": "response.output_text",
    "call": "response.function_call_arguments",
    "thoughts": "response.reasoning_text",
}


class ResponseBuilder(AnswerBuilder):
    """Makes the answer to one request to /v1/responses."""

    def __init__(self, model: ServedModel, request: ResponsesRequest, chat: ChatRequest) -> None:
        """Begin an answer.

        Args:
            model: the model that writes.
            request: the request.
            chat: the same request, translated into a request of a chat.
        """
        self._tokenizer = model.version.tokenizer
        self._blocks = BlockBuilder()
        self._item_ids: list[str] = []  # the id of each block's item
        self._event_count = 0
        self._fields: dict[str, Any] = {
            "id": "resp_" + uuid.uuid4().hex,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model.id,
            "system_fingerprint": model.fingerprint,
            "seed": chat.sampling.seed,
            "output": [],
            "usage": None,
            "store": False,
            "previous_response_id": None,
            "background": False,
            "truncation": "disabled",
            "reasoning": None,
            "metadata": {},
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "parallel_tool_calls": request.parallel_tool_calls,
            "temperature": chat.sampling.temperature,
            "top_p": chat.sampling.top_p,
            "text": request.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools],
        }
        if isinstance(request.tool_choice, NamedFunction):
            self._fields["tool_choice"] = request.tool_choice.model_dump()

    def whole_json(self, texts: Sequence[Sequence[TextPiece]], usage: shapes.Usage) -> bytes:
        """Return the whole answer; see the base class."""
        for piece in texts[0]:
            self._add(piece)
        return as_json(self._ended(usage))

    def first_events(self, text_count: int, prompt_tokens: int) -> list[bytes]:
        """Return the events that tell that the answer begins."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._fields) for kind in kinds]

    def piece_events(self, piece: TextPiece) -> list[bytes]:
        """Return the events of a piece."""
        events: list[bytes] = []
        for step in self._add(piece):
            events += self._step_events(step)
        return events

    def last_events(self, usage: shapes.Usage) -> list[bytes]:
        """Return the event that has the whole answer."""
        answer = self._ended(usage)
        return [self._event(f"response.{answer['status']}", response=answer)]

    def error_event(self, refused: Refused) -> bytes:
        """Return the event of an error."""
        # OpenAI's own client raises an exception only if the event has a field "error".
        body = error_body(refused)["error"]
        return self._event(
            "error", message=body["message"], code=body["code"], param=body["param"], error=body
        )

    def _add(self, piece: TextPiece) -> list[BlockStep]:
        """Add a piece, and give each new block an id for its item; return the steps of the blocks."""
        steps = self._blocks.add(piece)
        for block in self._blocks.blocks[len(self._item_ids) :]:
            self._item_ids.append(_ID_PREFIXES[block.kind] + uuid.uuid4().hex)
        return steps

    def _step_events(self, step: BlockStep) -> list[bytes]:
        """Return the events that tell a step."""
        block = step.block
        place: dict[str, Any] = {
            "item_id": self._item_ids[block.index],
            "output_index": block.index,
        }
        if block.kind != "call":
            place["content_index"] = 0
        if step.kind == "begin":
            return self._begin_events(block, place)
        if step.kind == "end":
            return self._end_events(block, place)
        new: dict[str, Any] = {"delta": step.text}
        if block.kind == "text":
            new["logprobs"] = self._logprobs(step.entries)
        return [self._event(f"{_GROWING[block.kind]}.delta", **place, **new)]

    def _begin_events(self, block: AnswerBlock, place: dict[str, Any]) -> list[bytes]:
        # The block may have its first characters already, but they are sent in the next event.
        empty = replace(block, text="", entries=[])
        item = self._item(empty, "in_progress")
        if block.kind != "call":
            item["content"] = []
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind != "call":
            part = self._part(empty)
            events.append(self._event("response.content_part.added", **place, part=part))
        return events

    def _end_events(self, block: AnswerBlock, place: dict[str, Any]) -> list[bytes]:
        whole: dict[str, Any] = {"text": block.text}
        if block.kind == "call":
            whole = {"name": block.name, "arguments": block.text}
        elif block.kind == "text":
            whole["logprobs"] = self._logprobs(block.entries)
        events = [self._event(f"{_GROWING[block.kind]}.done", **place, **whole)]
        if block.kind != "call":
            part = self._part(block)
            events.append(self._event("response.content_part.done", **place, part=part))
        item = self._item(block, self._status(block))
        events.append(self._event("response.output_item.done", output_index=block.index, item=item))
        return events

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event of the stream."""
        value = {"type": kind, "sequence_number": self._event_count, **fields}
        self._event_count += 1
        return event(as_json(value), kind)

    def _status(self, block: AnswerBlock) -> ItemStatus:
        """Return the status of a block that has ended.

        The last block is incomplete if the maximum number of tokens has cut it off.
        """
        is_last = block.index == len(self._blocks.blocks) - 1
        is_cut = is_last and self._blocks.finish == "length"
        return "incomplete" if is_cut else "completed"

    def _item(self, block: AnswerBlock, status: ItemStatus) -> dict[str, Any]:
        """Return a block as an item of the answer."""
        item: dict[str, Any] = {"id": self._item_ids[block.index], "status": status}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return item | {"type": "function_call"} | call
        content = [self._part(block)]
        if block.kind == "thoughts":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _part(self, block: AnswerBlock) -> dict[str, Any]:
        """Return the one part of the content of a text or of thoughts."""
        if block.kind == "thoughts":
            return {"type": "reasoning_text", "text": block.text}
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._logprobs(block.entries),
        }

    def _logprobs(self, entries: Sequence[ScoredToken]) -> list[shapes.ChatDrawnToken]:
        return [sampled_token(self._tokenizer, entry) for entry in entries]

    def _ended(self, usage: shapes.Usage) -> dict[str, Any]:
        """Return the answer after its last piece."""
        is_cut = self._blocks.finish == "length"
        return self._fields | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block, self._status(block)) for block in self._blocks.blocks],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
