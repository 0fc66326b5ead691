"""Turn a chat into token ids, and find the ids that end an answer.

Control tokens are special tokens that structure a chat, e.g. <|im_end|>. They come only from the
template, never from the text of a message. If a message has the letters of a control token, the token is
*typed*. Such letters are encoded as letters, so that no message can end its turn. To tell them from the
template's own control tokens, a *marker* is put between the letters before the chat is rendered.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from monograph.errors import InputRefused
from monograph.text.messages import for_template
from monograph.text.template import TOOL_USE, ChatTemplate, Message, TemplateRefusal
from monograph.text.tokenizer import Tokenizer

_PRIVATE_USE = range(0xE000, 0xF900)  # Unicode's private characters; a marker is one of them
# The roles whose messages are instructions for the whole chat.
_SYSTEM_ROLES = ("system", "developer")
# A chat of one turn, which every template can render.
_QUESTION = "What is it?"
_ANSWER = "It is an answer."


def template_of(tokenizer: Tokenizer, tools: object = None) -> ChatTemplate:
    """Return the tokenizer's chat template for a chat with these tools; None: without tools.

    As in transformers, a chat with tools takes the template named "tool_use", if there is one.

    Raises:
        InputRefused: the tokenizer has no chat template.
    """
    template = tokenizer.config.template
    if template is None:
        raise InputRefused(
            "the model has no chat template: put its chat_template.jinja next to its tokenizer.json "
            "(docs/finetune.md has one), or give plain text"
        )
    if tools is None:
        return template
    return tokenizer.config.named_templates.get(TOOL_USE, template)


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
    **variables: Any,
) -> list[int]:
    """Return the ids of a chat; they begin with a bos token only if the template writes one.

    The letters of a control token in a message are encoded as letters, so no message can end its
    turn. If a chat has typed control tokens, it is rendered with a marker inside their letters: a character
    that the chat does not have.

    Args:
        tokenizer: the tokenizer, with the chat template.
        messages: the chat.
        add_generation_prompt: whether to end with the beginning of an assistant's turn.
        variables: other variables of the template.

    Raises:
        InputRefused: as in `ChatTemplate.render` and `for_template`, or the marker changes other
            parts of the text, because the template does not copy the letters unchanged.
    """
    template = template_of(tokenizer, variables.get("tools"))
    template_messages = for_template(template, messages, **variables)
    marker = marker_for(tokenizer, template, [template_messages, variables])
    text = rendered(
        template, tokenizer, template_messages, marker, add_generation_prompt, **variables
    )
    require_system(text.replace(marker, ""), template_messages)
    return tokenizer.encode_rendered(text, marker)


def require_variables_read(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
    """Require that the chat template reads each of these variables of a chat.

    Raises:
        InputRefused: the template does not read a variable, which would be lost; or there is no
            template.
    """
    source = template_of(tokenizer, variables.get("tools")).source
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise InputRefused(
                f"{name!r} changes nothing, because the model's chat template does not read it: remove it, or name its "
                "key in data.ignore_keys"
            )


def require_system(text: str, messages: Sequence[Message]) -> None:
    """Require that a rendered chat contains its system messages; some templates leave them out.

    Raises:
        TemplateRefusal: a system message is missing in `text`.
    """
    for message in messages:
        role = message.get("role")
        content = message.get("content")
        if role not in _SYSTEM_ROLES or not isinstance(content, str):
            continue
        instructions = content.strip()
        # A template may write a message as a string of JSON.
        in_json = json.dumps(instructions, ensure_ascii=False)[1:-1]
        if instructions not in text and in_json not in text:
            raise TemplateRefusal(
                f"the chat template leaves out what the {role} says, {instructions[:40]!r}: "
                "say it in the user's first message"
            )


def marker_for(tokenizer: Tokenizer, template: ChatTemplate, content: object) -> str:
    """Return the marker of a chat: a character to put between the letters of typed control tokens.

    Args:
        tokenizer: the tokenizer.
        template: the chat template, which does not have the character.
        content: all texts of the chat, which do not have the character.

    Returns:
        The character; "" if no control token is typed in `content`.

    Raises:
        InputRefused: there is no such character.
    """
    if not _typed_tokens(tokenizer, content):
        return ""
    used_characters = json.dumps(content, ensure_ascii=False, default=str) + template.source
    for code in _PRIVATE_USE:
        if chr(code) not in used_characters:
            return chr(code)
    raise InputRefused(
        "a chat with all of Unicode's private characters and a control token is not supported"
    )


def rendered(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    marker: str,
    add_generation_prompt: bool = False,
    **variables: object,
) -> str:
    """Return a chat as text, with a marker after the first letter of each typed control token.

    Args:
        template: the chat template.
        tokenizer: the tokenizer.
        messages: the chat.
        marker: the marker, from `marker_for`.
        add_generation_prompt: whether to end with the beginning of an assistant's turn.
        variables: other variables of the template.

    Raises:
        InputRefused: see `chat_ids`.
    """
    text = template.render(messages, add_generation_prompt, **variables)
    typed = _typed_tokens(tokenizer, [list(messages), variables]) if marker else []
    if not typed:
        return text
    marked_messages = [_with_markers(dict(message), typed, marker) for message in messages]
    marked_variables = _with_markers(variables, typed, marker)
    marked_text = template.render(marked_messages, add_generation_prompt, **marked_variables)
    # Control tokens that overlap may still be there after one of them was split.
    if marked_text.replace(marker, "") != text or _typed_tokens(tokenizer, marked_messages):
        raise InputRefused(
            f"the text {typed[0]!r} in a message is a control token of this model, and its chat template does not "
            "copy it unchanged; write it in another way"
        )
    return marked_text


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the id of the first special token that the chat template writes after an answer.

    None: the model has no template, the template writes no special token there, or it changes the
    answer's letters.

    Raises:
        InputRefused: the template does not render.
    """
    if tokenizer.config.template is None:
        return None
    chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    _, answer, text_after = tokenizer.config.template.render(chat).rpartition(_ANSWER)
    if not answer:
        return None
    special_ids = set(tokenizer.special.values())
    ids_after = tokenizer.encode_rendered(text_after)
    return next((token_id for token_id in ids_after if token_id in special_ids), None)


def stop_ids(tokenizer: Tokenizer, model_eos_ids: Collection[int] = ()) -> tuple[int, ...]:
    """Return all ids that stop inference, each once.

    They are the tokenizer's eos token, the ids in generation_config.json, and the special token
    that the chat template writes after an answer.

    Args:
        tokenizer: the tokenizer.
        model_eos_ids: the eos tokens in the model's configuration; if generation_config.json lists
            no ids, those that are special tokens stop inference as well.

    Raises:
        InputRefused: the template does not render.
    """
    stops = [tokenizer.eos_id, *tokenizer.config.stops, end_of_turn(tokenizer)]
    if not tokenizer.config.stops:
        stops += sorted(set(model_eos_ids).intersection(tokenizer.special.values()))
    valid_stops = (stop for stop in stops if stop is not None and stop < tokenizer.vocab_size)
    return tuple(dict.fromkeys(valid_stops))


def _typed_tokens(tokenizer: Tokenizer, content: object) -> list[str]:
    """Return the special tokens whose letters occur in the texts of `content`."""
    # There may be a thousand special tokens. The texts are joined, so that each token is searched
    # for only once.
    all_texts = "\0".join(_texts(content))
    return [token for token in tokenizer.special if token in all_texts]


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a JSON value, except keys that are words."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not _is_word(key):
                yield key
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _is_word(key: object) -> bool:
    """Return whether a key is a word, such as the keys that a template reads in a message.

    Other keys are texts, too: the keys of a call's arguments may even be the letters of control tokens.
    """
    return not isinstance(key, str) or re.fullmatch(r"\w+", key) is not None


def _with_markers(value: object, tokens: Sequence[str], marker: str) -> Any:
    """Return a JSON value, with `marker` after the first letter of each token in its texts."""
    if isinstance(value, dict):
        marked = {}
        for key, inner in value.items():
            marked_key = key if _is_word(key) else _with_markers(key, tokens, marker)
            marked[marked_key] = _with_markers(inner, tokens, marker)
        return marked
    if isinstance(value, list | tuple):
        return [_with_markers(inner, tokens, marker) for inner in value]
    if isinstance(value, str):
        for token in tokens:
            value = value.replace(token, token[0] + marker + token[1:])
    return value
