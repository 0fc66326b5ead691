"""Write Ollama's Modelfile, with a TEMPLATE in Go if one is shown to equal the model's chat template.

Ollama runs no Jinja, and there is no general translation from Jinja to Go. Without a TEMPLATE it takes that of a model
with a similar template, or sends the bare prompt. So the chat template is probed for the text around each role's
message, the same is written in Go, and both are compared on chats that the probe did not use.
"""

import re
from collections.abc import Sequence
from itertools import cycle, islice

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
        go = _probed(template, bos)
        for chat in held_out_chats():
            if template.render(chat, add_generation_prompt=True).removeprefix(bos) != evaluate(go, chat):
                raise _NotInGo("the chat template does more than put text around each message")
    except InputRefused as error:  # its message begins with the model's folder, which must not get into the export
        raise _NotInGo("the chat template " + " ".join(str(error).partition("the chat template ")[2].split())) from None
    return go


def _probed(template: ChatTemplate, bos: str) -> str:
    """Return a Go template that puts the same text around each role's message as the chat template."""

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
    branches = [
        ("system", before_system, from_system.removesuffix(before_user)),
        ("user", before_user, after_user),
        ("assistant", to_answer.removeprefix(after_user), to_user.removesuffix(before_user)),
    ]
    if any(mark in part for branch in (*branches, ("", turn, "")) for part in branch for mark in ("{{", "}}", '"""')):
        raise _NotInGo("the chat template writes marks that Go's templates or a Modelfile would read as their own")
    cases = " else ".join(f'if eq .Role "{role}" }}}}{pre}{{{{ .Content }}}}{post}{{{{' for role, pre, post in branches)
    return f"{{{{ range .Messages }}}}{{{{ {cases} end }}}}{{{{ end }}}}{turn.removeprefix(after_user)}"


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


def evaluate(go: str, chat: Chat) -> str:
    """Evaluate a Go template of the few forms written here: range .Messages, if eq .Role, .Content, else, end.

    Raises:
        ValueError: the template uses another form.
    """
    parts = re.split(r"\{\{ ?(.*?) ?\}\}", go)
    body, rest = parts[1:].index("range .Messages"), len(parts) - 1 - parts[::-1].index("end")
    loop = parts[body + 2 : rest]
    return parts[0] + "".join(_evaluated(loop, message) for message in chat) + "".join(parts[rest + 1 :])


def _evaluated(parts: Sequence[str], message: dict[str, str]) -> str:
    """Return the text of the loop's body for one message; odd `parts` are actions, even ones text."""
    written, taken, inside, active = [parts[0]], False, False, True
    for action, text in zip(parts[1::2], parts[2::2], strict=True):
        condition = re.fullmatch(r'(?:else )?if eq \.Role "(\w+)"', action)
        if condition and inside == action.startswith("else"):
            active = not taken and message["role"] == condition[1]
            inside, taken = True, taken or active
        elif action == "end" and inside:
            inside, taken, active = False, False, True
        elif action == ".Content":
            written.append(message["content"] * active)
        else:
            raise ValueError(f"the form {action!r} is not known here")
        written.append(text * active)
    return "".join(written)
