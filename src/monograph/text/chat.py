"""Turn a chat into token ids, where control tokens come from the template and never from a message;
find its stops.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from monograph.errors import InputRefused
from monograph.text.messages import for_template
from monograph.text.template import TOOL_USE, ChatTemplate, Message, Unspeakable
from monograph.text.tokenizer import Tokenizer

_PRIVATE_USE = range(0xE000, 0xF900)
_SYSTEM = ("system", "developer")  # who says what holds for the whole chat
# A chat of one turn, which every template can render.
_QUESTION, _ANSWER = "What is it?", "It is an answer."


def template_of(tokenizer: Tokenizer, tools: object = None) -> ChatTemplate:
    """Return the tokenizer's chat template: with tools the one named "tool_use" if there is one, as
    in transformers.

    Raises:
        InputRefused: the tokenizer has none.
    """
    if tokenizer.config.template is None:
        raise InputRefused(
            "the model has no chat template: put its chat_template.jinja next to its tokenizer.json "
            "(docs/finetune.md has one), or give plain text"
        )
    return (
        tokenizer.config.template
        if tools is None
        else tokenizer.config.named.get(TOOL_USE, tokenizer.config.template)
    )


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
    **variables: Any,
) -> list[int]:
    """Return the ids of a chat; it begins with a beginning-of-text token only if the template
    writes one.

    "<|im_start|>" inside a message means the letters that someone typed, not the token, so no message can end its turn.
    To tell the two apart, a chat with such letters is rendered a second time, with a marker (a
    character that occurs nowhere else) inside them; if this changes anything else in the text, the
    chat is refused.

    Raises:
        InputRefused: as in `ChatTemplate.render` and `for_template`, or the template does not copy
            such letters unchanged.
    """
    template = template_of(tokenizer, variables.get("tools"))
    read = for_template(template, messages, **variables)
    marker = marker_for(tokenizer, template, [read, variables])
    text = rendered(template, tokenizer, read, marker, add_generation_prompt, **variables)
    require_system(text.replace(marker, ""), read)
    return tokenizer.encode_rendered(text, marker)


def require_read(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
    """Require that the chat template reads what stands beside a chat's messages, which would be
    lost otherwise.

    Raises:
        InputRefused: it does not, or there is no template; the message names the first such
            variable.
    """
    source = template_of(tokenizer, variables.get("tools")).source
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise InputRefused(
                f"{name!r} changes nothing, as the model's chat template does not read it: remove it, or name its key "
                "in data.ignore_keys"
            )


def require_system(text: str, messages: Sequence[Message]) -> None:
    """Require that a rendered chat has what its system says, which some templates leave out without
    a word.

    Raises:
        Unspeakable: it has not.
    """
    for message in messages:
        role = message.get("role")
        content = message.get("content")
        if role not in _SYSTEM or not isinstance(content, str):
            continue
        said = content.strip()
        if said not in text and json.dumps(said, ensure_ascii=False)[1:-1] not in text:
            raise Unspeakable(
                f"the chat template leaves out what the {role} says, {said[:40]!r}: say it in the user's first message"
            )


def marker_for(tokenizer: Tokenizer, template: ChatTemplate, said: object) -> str:
    """Return a character that is neither in `said` nor in the template, to split typed control
    tokens.

    It is "" if `said` has none of these.

    Raises:
        InputRefused: there is no such character.
    """
    if not _typed(tokenizer, said):
        return ""
    taken = json.dumps(said, ensure_ascii=False, default=str) + template.source
    marker = next((chr(code) for code in _PRIVATE_USE if chr(code) not in taken), None)
    if marker is None:
        raise InputRefused(
            "a chat with all of Unicode's private characters and a control token is not supported"
        )
    return marker


def rendered(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    marker: str,
    add_generation_prompt: bool = False,
    **variables: object,
) -> str:
    """Return a chat as text, with `marker` after the first letter of each control token that
    somebody typed.

    Raises:
        InputRefused: see `chat_ids`.
    """
    text = template.render(messages, add_generation_prompt, **variables)
    typed = _typed(tokenizer, [list(messages), variables]) if marker else []
    if not typed:
        return text
    apart = [_apart(dict(message), typed, marker) for message in messages]
    marked = template.render(apart, add_generation_prompt, **_apart(variables, typed, marker))
    if marked.replace(marker, "") != text or _typed(tokenizer, apart):
        raise InputRefused(
            f"the text {typed[0]!r} in a message is a control token of this model, and its chat template does not "
            "copy it as it is; write it in another way"
        )
    return marked


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the special token that the chat template writes after an answer.

    None if the model has no template, or if the template writes only text there or changes the
    answer's letters.

    Raises:
        InputRefused: the template does not render.
    """
    if tokenizer.config.template is None:
        return None
    chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    _, marker, rest = tokenizer.config.template.render(chat).rpartition(_ANSWER)
    controls = set(tokenizer.special.values())
    after = tokenizer.encode_rendered(rest) if marker else []
    return next((index for index in after if index in controls), None)


def stop_ids(tokenizer: Tokenizer, own: Collection[int] = ()) -> tuple[int, ...]:
    """Return all ids that stop inference, without duplicates.

    They are the tokenizer's end of text, the ids in generation_config.json, and the special token
    that the chat template writes after an answer.

    Args:
        tokenizer: the text's tokenizer.
        own: ids that end a document by the model's configuration; used if generation_config.json
            lists none.

    Raises:
        InputRefused: the template does not render.
    """
    known = () if tokenizer.config.stops else sorted({*own} & {*tokenizer.special.values()})
    ends = [tokenizer.eos_id, *tokenizer.config.stops, end_of_turn(tokenizer), *known]
    return tuple(
        dict.fromkeys(end for end in ends if end is not None and end < tokenizer.vocab_size)
    )


def _typed(tokenizer: Tokenizer, said: object) -> list[str]:
    """Return the special tokens whose letters occur in `said`."""
    # Joined to search all texts at once, as there may be a thousand special tokens.
    letters = "\0".join(_texts(said))
    return [content for content in tokenizer.special if content in letters]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    values = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    for inner in values:
        yield from _texts(inner)


def _apart(value: object, contents: Sequence[str], marker: str) -> Any:
    if isinstance(value, dict):
        return {key: _apart(inner, contents, marker) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_apart(inner, contents, marker) for inner in value]
    if isinstance(value, str):
        for content in contents:
            value = value.replace(content, content[0] + marker + content[1:])
    return value
