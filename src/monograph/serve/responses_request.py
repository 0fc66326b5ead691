"""Requests to /v1/responses, OpenAI's interface for agents, and their translation into requests of a chat.

An answer of this interface is a list of *items*: messages, calls of tools, and thoughts. A client sends
the items of earlier answers back, with the results of the calls. This server stores nothing, so a request
that refers to an earlier answer by its id is refused.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationInfo

from monograph.ranges import whole
from monograph.serve.fields import (
    TOOL_CHOICE_DESCRIPTION,
    AnyTextPart,
    Body,
    Expected,
    Ignored,
    list_of_tools,
    not_supported,
    number_within,
    read,
    read_as,
    read_object,
    text_or_parts,
    tool_choice_or,
)
from monograph.serve.refused import Refused, field_names
from monograph.serve.requests import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    SAMPLER_OPTIONS,
    ChatRequest,
    DialogueFields,
    FunctionDefinition,
    JsonSchema,
    SampledRequest,
    TextFormat,
    with_options,
)

# The names that some fields of a chat's request have in this protocol.
FIELD_NAMES = {
    "messages": "input",
    "response_format": "text",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "include",
}
_LOGPROBS = "message.output_text.logprobs"


class InputPart(AnyTextPart):
    """A part of a message's content."""

    type: Literal["input_text", "output_text"]
    annotations: Ignored = None
    logprobs: Ignored = None


class ThoughtPart(AnyTextPart):
    """A part of an assistant's thoughts."""

    type: Literal["reasoning_text", "summary_text"]


_Content = Annotated[str, text_or_parts(InputPart)]
_Thoughts = Annotated[str, text_or_parts(ThoughtPart)]


class MessageItem(Body):
    """A message. Parts of what the model is told have the type input_text, parts of what it said output_text."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class FunctionCallItem(Body):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="The arguments as JSON.")
    id: Ignored = None
    status: Ignored = None


class FunctionOutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Content
    id: Ignored = None
    status: Ignored = None


class ReasoningItem(Body):
    """What the model thought, for templates that write it. The summary is read only without a content."""

    type: Literal["reasoning"]
    summary: _Thoughts = ""
    content: _Thoughts | None = None
    id: Ignored = None
    status: Ignored = None
    encrypted_content: Annotated[Any, not_supported("leave it out")] = None


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
_ITEM_TYPES: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}


def _check_input(value: object, info: ValidationInfo) -> list[InputItem]:
    name = str(info.field_name)
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        expected = f"a text or a list of 1 to {MAX_MESSAGES:,} items"
        raise Refused(400, f"{name}: expected {expected}", name)
    return [_read_item(each, f"{name}[{index}]", name) for index, each in enumerate(value)]


def _read_item(value: object, place: str, field: str) -> InputItem:
    # An item without a type is a message.
    kind = "message"
    if isinstance(value, dict):
        kind = value.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEM_TYPES:
        known = ", ".join(_ITEM_TYPES)
        raise Refused(400, f"{place}.type = {kind!r:.80}: expected one of {known}", field)
    return read_object(_ITEM_TYPES[kind], value, place, field)


class FunctionTool(FunctionDefinition):
    """A tool that the model may use."""

    type: Literal["function"]


class NamedFunction(Body):
    """The function that the answer calls."""

    type: Literal["function"]
    name: str


class NamedSchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """The form of the answer's text."""

    format: TextFormat | NamedSchemaFormat | None = Field(
        None, discriminator="type", description="The text is JSON that follows a schema."
    )
    verbosity: Annotated[Any, not_supported("leave it out")] = None


@with_options
class ResponsesRequest(DialogueFields, SampledRequest):
    """A dialogue to be continued, as a list of items."""

    input: Annotated[
        list[InputItem],
        PlainValidator(
            _check_input,
            json_schema_input_type=str
            | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)],
        ),
    ] = Field(
        description="The dialogue so far; a text is the message of a user. The model's chat template makes the prompt "
        "of it."
    )
    instructions: str | None = Field(
        None, description="What the model is told first: a message of the role system."
    )
    max_output_tokens: Annotated[int | None, number_within(whole(1, 2**31 - 1))] = Field(
        None,
        description="The maximum number of tokens of the answer. If it is missing, the rest of the context.",
    )
    tools: Annotated[list[FunctionTool], list_of_tools(FunctionTool)] = Field(
        [],
        description="What the model may call. A call is not made here: the client sends its result in an item "
        "function_call_output.",
    )
    tool_choice: Annotated[
        str | NamedFunction | None,
        tool_choice_or(NamedFunction, '{"type": "function", "name": ...}'),
    ] = Field(None, description=TOOL_CHOICE_DESCRIPTION)
    text: Annotated[TextOptions, read_as(TextOptions)] = Field(
        TextOptions(format=None), description="The form of the answer's text."
    )
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
        Expected(f"a list that may have {_LOGPROBS}"),
    ] = Field(
        [],
        description=f"{_LOGPROBS}: reports the log-probability of each token. Excludes tools. "
        "reasoning.encrypted_content is ignored.",
    )
    top_logprobs: Annotated[int | None, number_within(whole(0, MAX_LOGPROBS))] = Field(
        None,
        description="Reports this number of the likeliest tokens at the position of each token. Needs include to have "
        f"{_LOGPROBS}.",
    )
    stream_options: Ignored = None
    max_tool_calls: Ignored = None
    truncation: Annotated[
        Literal["disabled"] | None, Expected("disabled: a prompt is never cut")
    ] = Field(None, description="A prompt that is too long is refused, never cut.")
    previous_response_id: Annotated[
        Any, not_supported("nothing is stored: send the earlier items again in input")
    ] = None
    conversation: Annotated[
        Any, not_supported("nothing is stored: send the earlier items again in input")
    ] = None
    background: Annotated[Any, not_supported("wait for the answer")] = None
    prompt: Annotated[Any, not_supported("give instructions and input")] = None
    reasoning: Annotated[Any, not_supported("leave it out")] = None


def read_request(fields: dict[str, Any], rows: int) -> tuple[ResponsesRequest, ChatRequest]:
    """Return a JSON object as a request to /v1/responses, and translated into a request of a chat.

    Args:
        fields: the JSON object.
        rows: how many texts the model writes at the same time.

    Raises:
        Refused: a field is wrong.
    """
    request = read(ResponsesRequest, fields)
    # These fields have the same names and meanings in a chat, so they are taken as they were sent.
    same_fields = (
        *SAMPLER_OPTIONS,
        "model",
        "seed",
        "stream",
        "parallel_tool_calls",
        "chat_template_kwargs",
    )
    chat_fields = {name: value for name, value in fields.items() if name in same_fields}
    chat_fields["messages"] = _messages(request)
    chat_fields["max_completion_tokens"] = request.max_output_tokens
    chat_fields["tools"] = [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in request.tools
    ]
    chat_fields["tool_choice"] = request.tool_choice
    if isinstance(request.tool_choice, NamedFunction):
        function = {"name": request.tool_choice.name}
        chat_fields["tool_choice"] = {"type": "function", "function": function}
    if isinstance(request.text.format, NamedSchemaFormat):
        schema = {"schema": request.text.format.schema_}
        chat_fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    has_logprobs = _LOGPROBS in request.include
    if request.top_logprobs is not None and not has_logprobs:
        message = f"top_logprobs needs include to have {_LOGPROBS}"
        raise Refused(400, message, "top_logprobs")
    if has_logprobs and request.tools:
        raise Refused(400, f"include: {_LOGPROBS} and tools: give one of them", "include")
    chat_fields["logprobs"] = has_logprobs
    chat_fields["top_logprobs"] = request.top_logprobs
    with field_names(FIELD_NAMES):
        return request, read(ChatRequest, chat_fields, rows=rows)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages of a chat that the items of a request become.

    Thoughts, a message of the assistant and the calls after it become one message.
    """
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    for item in request.input:
        if isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn_of(item, messages).setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReasoningItem):
            thoughts = item.summary if item.content is None else item.content
            _turn_of(item, messages)["reasoning_content"] = thoughts
        elif item.role == "assistant":
            _turn_of(item, messages)["content"] = item.content
        else:
            messages.append({"role": item.role, "content": item.content})
    for message in messages:
        # An assistant's message that has only thoughts gets an empty content.
        if "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _turn_of(item: InputItem, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message to which an item belongs: the last message, or a new one.

    A call belongs to any message of the assistant before it, a message only to thoughts before it, and
    thoughts always begin a new message.
    """
    last = messages[-1] if messages else {}
    follows_assistant = last.get("role") == "assistant"
    follows_thoughts = follows_assistant and last.keys() == {"role", "reasoning_content"}
    if isinstance(item, FunctionCallItem) and follows_assistant:
        return last
    if isinstance(item, MessageItem) and follows_thoughts:
        return last
    messages.append({"role": "assistant"})
    return messages[-1]
