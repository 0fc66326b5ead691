"""Requests to /v1/messages, Anthropic's interface, and their translation into requests of a chat.

The content of such a message is a text or a list of *blocks*: texts, thoughts, calls of tools (tool_use),
and results of calls (tool_result).
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationInfo

from monograph.ranges import whole
from monograph.serve.fields import (
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
)
from monograph.serve.refused import THREAD_UNSUPPORTED, Refused, field_names
from monograph.serve.requests import (
    MAX_MESSAGES,
    MAX_STOP_BYTES,
    MAX_STOPS,
    SAMPLER_OPTIONS,
    BaseRequest,
    ChatRequest,
    DescribedTool,
    ModelName,
    SampledRequest,
    ShortText,
    with_options,
)

# The names that some fields of a chat's request have in this protocol.
FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "max_completion_tokens": "max_tokens",
}


# ── messages ──────────────────────────────────────────────────────────────────────────────────────


class TextBlock(AnyTextPart):
    """A text."""

    type: Literal["text"]
    cache_control: Ignored = None
    citations: Annotated[Any, not_supported("leave it out")] = None


_Content = Annotated[str, text_or_parts(TextBlock)]


class ThinkingBlock(Body):
    """What the model thought, for templates that write it."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class ToolUseBlock(Body):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Content = ""
    is_error: bool | None = Field(None, description="Is ignored: the content says what went wrong.")
    cache_control: Ignored = None


UserBlock = TextBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | ToolUseBlock
_BLOCK_TYPES: dict[str, dict[str, type[Body]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": {"text": TextBlock},
}


class UserMessage(Body):
    """What a user said, and results of calls."""

    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Body):
    """What the model said. The last message cannot be one: an answer has no given beginning."""

    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Body):
    """What the model is told."""

    role: Literal["system"]
    content: str | list[TextBlock]


def _check_messages(value: object, info: ValidationInfo) -> list[dict[str, Any]]:
    """Return the messages as those of a chat."""
    name = str(info.field_name)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise Refused(400, f"{name}: expected a list of 1 to {MAX_MESSAGES:,} messages", name)
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(value):
        messages += _read_message(message, f"{name}[{index}]", name)
    if value[-1]["role"] == "assistant":
        message = f"{name}: the last one is an assistant's: an answer cannot be begun for the model"
        raise Refused(400, message, name)
    return messages


def _read_message(value: object, place: str, field: str) -> list[dict[str, Any]]:
    """Return a message as messages of a chat, in which each result of a call is a message of its own."""
    if not isinstance(value, dict):
        raise Refused(400, f"{place} = {value!r:.80}: expected an object", field)
    role = value.get("role")
    if not isinstance(role, str) or role not in _BLOCK_TYPES:
        known = ", ".join(_BLOCK_TYPES)
        raise Refused(400, f"{place}.role = {role!r:.80}: expected one of {known}", field)
    unknown = value.keys() - {"role", "content"}
    if unknown:
        raise Refused(400, f"{place}: there is no field {min(unknown)!r:.80}", field)
    content = value.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        message = f"{place}.content = {content!r:.80}: expected a text or a list of blocks"
        raise Refused(400, message, field)
    blocks = [
        _read_block(block, role, f"{place}.content[{index}]", field)
        for index, block in enumerate(content)
    ]
    return _assistant_messages(blocks) if role == "assistant" else _told_messages(role, blocks)


def _read_block(value: object, role: str, place: str, field: str) -> Body:
    """Return a block of a message of this role; see `read_object` for the other arguments."""
    types = _BLOCK_TYPES[role]
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in types:
        message = f"{place}.type = {kind!r:.80}: expected one of {', '.join(types)} for {role}"
        raise Refused(400, message, field)
    return read_object(types[kind], value, place, field)


def _assistant_messages(blocks: list[Body]) -> list[dict[str, Any]]:
    """Return the one message of a chat that the blocks of an assistant's message become."""
    message: dict[str, Any] = {"role": "assistant"}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {
                "name": block.name,
                "arguments": json.dumps(block.input, ensure_ascii=False),
            },
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if texts or not calls:
        message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _told_messages(role: str, blocks: list[Body]) -> list[dict[str, Any]]:
    """Return the messages of a chat that the blocks of a user's or system's message become."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}
            messages.append(result)
        elif isinstance(block, TextBlock):
            # Consecutive texts become one message.
            if not messages or messages[-1]["role"] == "tool":
                messages.append({"role": role, "content": ""})
            messages[-1]["content"] += block.text
    return messages or [{"role": role, "content": ""}]


# ── tools ─────────────────────────────────────────────────────────────────────────────────────────


class CustomTool(DescribedTool):
    """A tool that the model may use."""

    type: Literal["custom"] = "custom"
    input_schema: dict[str, Any] = Field(
        description="The JSON schema of its input, which is an object."
    )
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Annotated[Any, not_supported("leave it out")] = None
    defer_loading: Annotated[Any, not_supported("leave it out")] = None


class ToolChoice(Body):
    """How the answer uses tools."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="none: the model does not see the tools. auto: it may call them. any: it does. tool: it calls the "
        "named one once."
    )
    name: str | None = Field(None, description="The tool, with the type tool.")
    disable_parallel_tool_use: bool = Field(
        False, description="Whether a strict answer has one call at most."
    )


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


class SchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer."""

    format: SchemaFormat | None = Field(
        None, description="The answer is JSON that follows a schema. Excludes tools."
    )
    effort: Annotated[Any, not_supported("leave it out")] = None


class ThinkingOptions(Body):
    """Whether the model thinks first, for templates that read `enable_thinking`."""

    type: Literal["disabled", "adaptive"]
    display: Ignored = None


class CountRequest(BaseRequest):
    """A dialogue whose tokens are counted."""

    model: ModelName
    messages: Annotated[
        list[dict[str, Any]],
        PlainValidator(
            _check_messages,
            json_schema_input_type=Annotated[
                list[UserMessage | AssistantMessage | SystemMessage],
                Field(min_length=1, max_length=MAX_MESSAGES),
            ],
        ),
    ] = Field(description="The dialogue so far. The model's chat template makes the prompt of it.")
    system: _Content | None = Field(None, description="What the model is told first.")
    tools: Annotated[list[CustomTool], list_of_tools(CustomTool)] = Field(
        [],
        description="What the model may call. A call is not made here: the client sends its result in a block "
        "tool_result.",
    )
    tool_choice: Annotated[ToolChoice | None, read_as(ToolChoice)] = Field(
        None, description="How the answer uses tools."
    )
    thinking: Annotated[ThinkingOptions | None, read_as(ThinkingOptions)] = Field(
        None, description="Whether the model thinks first. A budget is not supported."
    )
    output_config: Annotated[OutputConfig, read_as(OutputConfig)] = Field(
        OutputConfig(format=None), description="The form of the answer."
    )
    cache_control: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None


_NO_THREAD = not_supported(
    "nothing is stored: send the earlier messages again", code=THREAD_UNSUPPORTED
)


@with_options
class MessagesRequest(CountRequest, SampledRequest):
    """A dialogue to be continued."""

    max_tokens: Annotated[int, number_within(whole(1, 2**31 - 1))] = Field(
        description="The maximum number of tokens of the answer."
    )
    stop_sequences: Annotated[
        list[ShortText],
        Field(max_length=MAX_STOPS),
        Expected(f"up to {MAX_STOPS} texts of 1 to {MAX_STOP_BYTES} bytes"),
    ] = Field(
        [],
        description="The answer ends before the first of these texts. Excludes tools, unless the answer must call one.",
    )
    thread: Annotated[Any, _NO_THREAD] = None


def read_request(fields: dict[str, Any], rows: int) -> ChatRequest:
    """Return a JSON object that is a request to /v1/messages, as a request of a chat.

    Args:
        fields: the JSON object.
        rows: how many texts the model writes at the same time.

    Raises:
        Refused: a field is wrong.
    """
    request = read(MessagesRequest, fields)
    # These fields have the same names and meanings in a chat, so they are taken as they were sent.
    same_fields = (*SAMPLER_OPTIONS, "seed", "stream")
    chat_fields = {name: value for name, value in fields.items() if name in same_fields}
    chat_fields["max_completion_tokens"] = request.max_tokens
    chat_fields["stop"] = request.stop_sequences
    with field_names(FIELD_NAMES):
        return read(ChatRequest, _chat_fields(request) | chat_fields, rows=rows)


def read_count_request(fields: dict[str, Any]) -> ChatRequest:
    """Return a JSON object that is a request to count tokens, as a request of a chat.

    Raises:
        Refused: a field is wrong.
    """
    chat_fields = _chat_fields(read(CountRequest, fields))
    with field_names(FIELD_NAMES):
        return read(ChatRequest, chat_fields, rows=1)


def _chat_fields(request: CountRequest) -> dict[str, Any]:
    """Return the fields of a chat's request that both kinds of requests have: those of `CountRequest`."""
    messages = request.messages
    if request.system is not None:
        messages = [{"role": "system", "content": request.system}, *messages]
    fields: dict[str, Any] = {"model": request.model, "messages": messages}
    fields["tools"] = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in request.tools
    ]
    choice = request.tool_choice
    if choice is not None:
        fields["tool_choice"] = _tool_choice(choice)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if request.thinking is not None:
        thinks = request.thinking.type == "adaptive"
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    if request.output_config.format is not None:
        schema = {"schema": request.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    """Return the choice as a request of a chat has it."""
    if choice.type == "tool":
        if choice.name is None:
            message = "tool_choice.name is missing: expected the name of a tool"
            raise Refused(400, message, "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.name is not None:
        raise Refused(400, "tool_choice.name is for the type tool", "tool_choice")
    return "required" if choice.type == "any" else choice.type
