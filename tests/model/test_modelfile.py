# Run: pytest tests/model/test_modelfile.py
"""Ollama's Modelfile: a TEMPLATE only where it equals the chat template, and why not where it does
not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from chats import speaking
from monograph.model import gguf_words as room
from monograph.model.gguf_words import ChatMessages, held_out_chats, modelfile
from monograph.text.chat import stop_ids
from monograph.text.tokenizer import Tokenizer

LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def evaluate(go: str, chat: ChatMessages) -> str:
    """Evaluate a Go template of the few forms written here: range .Messages, if eq .Role, .Content,
    else, end.

    Raises:
        ValueError: the template uses another form.
    """
    parts = re.split(r"\{\{ ?(.*?) ?\}\}", go)
    body, rest = parts[1:].index("range .Messages"), len(parts) - 1 - parts[::-1].index("end")
    loop = parts[body + 2 : rest]
    return (
        parts[0]
        + "".join(_evaluated(loop, message) for message in chat)
        + "".join(parts[rest + 1 :])
    )


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


def written(folder: Path, source: str | None, name: str = "chatml") -> str:
    tokenizer = speaking(folder, name)
    if source is not None:
        (folder / "chat_template.jinja").write_text(source)
        tokenizer = Tokenizer.from_file(folder)
    return modelfile("model.gguf", tokenizer, stop_ids(tokenizer))


def test_chatml_word_for_word(tmp_path: Path) -> None:
    turn = "<|im_start|>{role}\n{{{{ .Content }}}}<|im_end|>\n"
    cases = [
        f'if eq .Role "{role}" }}}}{turn.format(role=role)}{{{{'
        for role in ("system", "user", "assistant")
    ]
    template = (
        "{{ range .Messages }}{{ "
        + " else ".join(cases)
        + " end }}{{ end }}<|im_start|>assistant\n"
    )
    stops = 'PARAMETER stop "<|eos|>"\nPARAMETER stop "<|im_end|>"\n'
    assert written(tmp_path, None) == f'FROM ./model.gguf\nTEMPLATE """{template}"""\n{stops}'


@pytest.mark.parametrize("name", ["chatml", "headers", "plain", "thinking"])
def test_what_is_written_renders_like_the_chat_template(tmp_path: Path, name: str) -> None:
    tokenizer = speaking(tmp_path, name)
    found = re.search(r'TEMPLATE """(.*)"""', modelfile("m", tokenizer, ()), re.DOTALL)
    assert found and tokenizer.config.template
    chats = held_out_chats()
    assert len(chats) == 20 and len({str(chat) for chat in chats}) == 20
    for chat in chats:
        assert "<|bos|>" not in evaluate(found[1], chat)
        rendered = tokenizer.config.template.render(chat, add_generation_prompt=True)
        assert rendered.removeprefix("<|bos|>") == evaluate(found[1], chat)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LOOP + "{{ strftime_now('%Y') }}", "the chat template writes the day's date"),
        (LOOP.replace("m.content", "m.content * 2"), "leaves a message out or repeats it"),
        (LOOP.replace("m.content", "m.content | upper"), "leaves a message out or repeats it"),
        (LOOP.replace("{{ m.role }}", "{{ loop.index }}"), "writes other text around a message that follows another"),
        (LOOP.replace("{{ m.content }}", "{{ m.content | replace('Why', 'How') }}"), "does more than put text around"),
        (LOOP + "{% if messages | length > 4 %}and so on{% endif %}", "does more than put text around each message"),
        ("{{ '{{' }}" + LOOP, "other text around|marks that Go's templates"),
        (LOOP.replace("\n", "\n{{ '{{' }}"), "marks that Go's templates or a Modelfile would read as their own"),
        (LOOP.replace("{{ m.content }}", "{ {{- m.content }}"), "marks that Go's templates or a Modelfile would read"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + LOOP, "no system"),
    ],
)  # fmt: skip
def test_a_template_that_go_does_not_say_is_left_out_with_the_reason(
    tmp_path: Path, source: str, reason: str
) -> None:
    text = written(tmp_path, source)
    assert "TEMPLATE " not in text and re.search(f"\n# No TEMPLATE: .*({reason})", text), text
    assert 'PARAMETER stop "<|eos|>"' in text and "im_start" not in text


def test_without_a_chat_template_there_is_none() -> None:
    text = modelfile("model.gguf", Tokenizer.bytes(), (1,))
    assert (
        text
        == 'FROM ./model.gguf\n# No TEMPLATE: the model has no chat template.\nPARAMETER stop "<|eos|>"\n'
    )


def test_what_was_probed_wrongly_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = room._probe
    monkeypatch.setattr(room, "_probe", lambda *arguments: (right(*arguments)[0], " "))
    assert "does more than put text around each message" in written(tmp_path, None)


def test_the_evaluator_knows_only_what_is_written_here() -> None:
    with pytest.raises(ValueError, match="the form 'len .Content' is not known"):
        evaluate(
            "{{ range .Messages }}{{ len .Content }}{{ end }}", [{"role": "user", "content": "x"}]
        )
