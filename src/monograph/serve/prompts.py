"""Make the prompts of requests for texts: the ids that the model reads.

The messages of a chat become a prompt by the model's chat template.
"""

from collections.abc import Sequence

from monograph.errors import MonographError
from monograph.serve.refused import Refused
from monograph.serve.requests import AnyTextRequest, ChatRequest, CompletionRequest
from monograph.serve.versions import Version
from monograph.text.calls import CallFrame, with_tools
from monograph.text.chat import chat_ids

PromptIds = Sequence[Sequence[int]]  # the ids of each prompt


def find_call_frame(request: AnyTextRequest, version: Version) -> CallFrame | None:
    """Return what the chat template writes around calls; None: the request has no tools.

    Raises:
        Refused: the model has no chat template, or its template writes no calls that can be read.
    """
    if not isinstance(request, ChatRequest) or request.tool_use is None:
        return None
    try:
        return version.call_frame
    except MonographError as error:
        raise Refused(400, f"tools: {error}", "tools") from None


def prompt_ids(request: AnyTextRequest, version: Version) -> list[list[int]]:
    """Return the ids of each prompt.

    Raises:
        Refused: a prompt is too long for the model's context, or cannot be encoded, or has an id that
            the model does not have.
    """
    field = _field(request)
    if isinstance(request, CompletionRequest):
        # Since a character has at least one byte, a prompt of more characters than this cannot fit into the
        # context, even if each of its tokens is as long as the longest one. It is refused without encoding
        # it, which would take time.
        max_characters = version.context * version.longest_token_bytes
        for prompt in request.prompt:
            if isinstance(prompt, str) and len(prompt) > max_characters:
                raise _too_long(f"more than {version.context:,}", version, field)
    prompts = encode_prompts(request, version)
    max_ids = version.context - 1
    if (
        request.token_limit == 0
    ):  # the prompt is only scored, so no position for a new token is needed
        max_ids = version.context
    for ids in prompts:
        if len(ids) > max_ids:
            raise _too_long(f"{len(ids):,}", version, field)
    return prompts


def encode_prompts(request: AnyTextRequest, version: Version) -> list[list[int]]:
    """Return the ids of each prompt, even if they are too many for the context.

    Raises:
        Refused: a prompt cannot be encoded, or has an id that the model does not have.
    """
    field = _field(request)
    try:
        if isinstance(request, CompletionRequest):
            return [_encode(version, prompt) for prompt in request.prompt]
        if not version.has_template:
            return [_encode(version, joined_messages(request))]
        shown_tools = None if request.tool_use is None else request.tool_use.shown
        messages, variables = with_tools(version.tokenizer, request.messages, shown_tools)
        variables |= request.template_variables
        ids = chat_ids(version.tokenizer, messages, add_generation_prompt=True, **variables)
    except MonographError as error:
        raise Refused(400, f"{field}: {error}", field) from None
    return [ids]


def _field(request: AnyTextRequest) -> str:
    """Return the name of the request's field that has the prompt."""
    return "prompt" if isinstance(request, CompletionRequest) else "messages"


def _encode(version: Version, prompt: str | list[int]) -> list[int]:
    """Return the ids of one prompt, which is a text or a list of ids."""
    tokenizer = version.tokenizer
    if isinstance(prompt, str):
        return [tokenizer.bos_id, *tokenizer.encode(prompt)]
    last = tokenizer.vocab_size - 1
    if any(not 0 <= token <= last for token in prompt):
        raise Refused(400, f"prompt: expected token ids from 0 to {last}", "prompt")
    return prompt


def joined_messages(request: ChatRequest) -> str:
    """Return the prompt for a model without a chat template: the messages' texts, joined.

    Raises:
        Refused: a message has another role than user and assistant, or a key that only a template
            would read.
    """
    keys = {key for message in request.messages for key in message}
    unread_keys = keys - {"role", "content", "name"}
    why = "messages: the model has no chat template, so"
    if unread_keys:
        raise Refused(400, f"{why} nothing reads {min(unread_keys)}: leave it out", "messages")
    for message in request.messages:
        if message["role"] not in ("user", "assistant"):
            advice = f"change the role {message['role']}"
            raise Refused(400, f"{why} it knows user and assistant only: {advice}", "messages")
    return "".join(message["content"] for message in request.messages)


def _too_long(token_count: str, version: Version, field: str) -> Refused:
    message = (
        f"{field}: it has {token_count} tokens, and the model's context is {version.context:,}: "
        "shorten it"
    )
    return Refused(400, message, field, "context_length_exceeded")
