"""Write Ollama's Modelfile, with a TEMPLATE in Go if one is shown to equal the model's chat template.

Ollama runs no Jinja, and there is no general translation from Jinja to Go. Without a TEMPLATE it takes that of a model
with a similar template, or sends the bare prompt. So the chat template is probed for the text around each role's
message, what was found is compared with it on chats that the probe did not use, and the same is written in Go.
"""

import re
from collections.abc import Sequence
from itertools import chain, cycle, islice

from monograph.errors import InputRefused
from monograph.text.template import ChatTemplate
from monograph.text.tokenizer import Tokenizer

Chat = Sequence[dict[str, str]]
_WORDS = ("Why?", "one\ntwo\n\nthree", "ünï 数据 🙂", 'say "so" {it}', "a <b> & c's", "1 2  3", "#\t.")


class _NotInGo(Exception):
    """The reason why a template cannot be written in Go, which becomes a comment in the Modelfile."""


def modelfile(weights: str, tokenizer: Tokenizer, stops: Sequence[int]) -> str:
    """Return the text of a Modelfile, for chats without tools.

    Args:
        weights: name of the GGUF file in the same folder, which makes Ollama put the beginning-of-text token first.
        tokenizer: the tokenizer whose chat template is translated.
        stops: ids that end a text.
    """
    text_of = {index: text for text, index in tokenizer.special.items()}
    lines = [f"FROM ./{weights}"]
    try:
        lines.append(f'TEMPLATE """{_in_go(tokenizer.config.template, text_of[tokenizer.bos_id])}"""')
    except _NotInGo as reason:
        lines.append(f"# No TEMPLATE: {reason}.")
    # A quote would end the string in the file's syntax.
    lines += [f'PARAMETER stop "{text_of[stop]}"' for stop in stops if stop in text_of and '"' not in text_of[stop]]
    return "\n".join(lines) + "\n"


def _in_go(template: ChatTemplate | None, bos: str) -> str:
    if template is None:
        raise _NotInGo("the model has no chat template")
    if "strftime_now" in template.source:
        raise _NotInGo("the chat template writes the day's date")
    try:
        around, turn = _probed(template, bos)
        for chat in held_out_chats():
            said = ((around[message["role"]], message["content"]) for message in chat)
            same = "".join(before + content + after for (before, after), content in said) + turn
            if template.render(chat, add_generation_prompt=True).removeprefix(bos) != same:
                raise _NotInGo("the chat template does more than put text around each message")
    except InputRefused as error:  # its message begins with the model's folder, which must not get into the export
        raise _NotInGo("the chat template " + " ".join(str(error).partition("the chat template ")[2].split())) from None
    cases = (
        f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{' for role, (before, after) in around.items()
    )
    return f"{{{{ range .Messages }}}}{{{{ {' else '.join(cases)} end }}}}{{{{ end }}}}{turn}"


def _probed(template: ChatTemplate, bos: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the text before and after each role's message, and the text that asks for an answer."""

    def around(*roles: str, prompt: bool = False) -> list[str]:
        chat = [{"role": role, "content": f"Q{number}q"} for number, role in enumerate(roles)]
        parts = re.split(r"Q\dq", template.render(chat, add_generation_prompt=prompt).removeprefix(bos))
        if len(parts) != len(roles) + 1:
            raise _NotInGo("the chat template leaves a message out or repeats it")
        return parts

    before_user, after_user = around("user")
    _, to_answer, to_user, turn = around("user", "assistant", "user", prompt=True)
    before_system, from_system, _ = around("system", "user")
    ends_alike = to_user.endswith(before_user) and from_system.endswith(before_user)
    if not (ends_alike and to_answer.startswith(after_user) and turn.startswith(after_user)):
        raise _NotInGo("the chat template writes other text around a message that follows another")
    found = {
        "system": (before_system, from_system.removesuffix(before_user)),
        "user": (before_user, after_user),
        "assistant": (to_answer.removeprefix(after_user), to_user.removesuffix(before_user)),
    }
    turn = turn.removeprefix(after_user)
    # A brace at the end would be read with those of the action that follows.
    if any(re.search(r'\{\{|\}\}|"""|\{\Z', part) for part in (*chain(*found.values()), turn)):
        raise _NotInGo("the chat template writes marks that Go's templates or a Modelfile would read as their own")
    return found, turn


def held_out_chats() -> list[Chat]:
    """Return 20 chats of 1 to 5 questions, with and without a system message; no message begins or ends in a space."""
    chats: list[Chat] = []
    words = cycle(_WORDS)
    for number in range(20):
        roles = ["user", *["assistant", "user"] * (number % 5)]
        if number >= 10:
            roles.insert(0, "system")
        chats.append([{"role": role, "content": word} for role, word in zip(roles, islice(words, 11), strict=False)])
    return chats
