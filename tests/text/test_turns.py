"""Run: pytest tests/text/test_turns.py (what stands between the turns of a chat, in ids)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chats import speaking
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.template import TemplateRefusal
from monograph.text.tokenizer import Tokenizer
from monograph.text.turns import ChatTurns, TextTurns

ASKED = [{"role": "user", "content": "Does it rain?"}]
NEXT = [{"role": "user", "content": "And <|im_end|> now?"}]


def begun(tokenizer: Tokenizer, **variables: Any) -> ChatTurns:
    return ChatTurns(tokenizer, ASKED, variables, stop_ids(tokenizer))


# What the model of a template writes before its answer, since the prompt ends before that.
SPACES = {"chatml": "", "headers": "", "plain": "\n", "inst": " "}


@pytest.mark.parametrize("name", SPACES)
def test_turns_in_ids_are_the_chat_that_the_template_writes(tmp_path: Path, name: str) -> None:
    """Two turns of ids, whose letters encode to the same ids again."""
    tokenizer = speaking(tmp_path, name)
    ends = stop_ids(tokenizer)
    asked = [{"role": "user", "content": "Does it rain?"}]
    chat = begun(tokenizer)
    ids = list(chat.ids)
    messages: list[dict[str, Any]] = list(ASKED)
    for said in ("no", "yes"):
        end = next(
            each
            for each in chat_ids(tokenizer, [*asked, {"role": "assistant", "content": "no"}])[::-1]
            if each in ends
        )
        answer = [*tokenizer.encode(SPACES[name] + said, inside=True), end]
        ids += answer + chat.ids_after(answer, NEXT)
        messages += [{"role": "assistant", "content": said}, *NEXT]
    assert ids == chat_ids(tokenizer, messages, add_generation_prompt=True)


def test_an_answer_that_was_cut_gets_the_end_that_the_template_writes(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    end = tokenizer.special["<|im_end|>"]
    cut = begun(tokenizer).ids_after(tokenizer.encode("no"), NEXT)
    ended = begun(tokenizer).ids_after([*tokenizer.encode("no"), end], NEXT)
    assert cut == [end, *ended]
    assert ended.count(end) == 1, "that of the next message: typed letters are no token"


def test_a_template_that_drops_earlier_thoughts_is_refused(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "thinking")
    with pytest.raises(TemplateRefusal, match="does not repeat earlier answers"):
        begun(tokenizer).ids_after(tokenizer.encode("no"), NEXT)
    with pytest.raises(TemplateRefusal, match="does not repeat earlier answers"):
        begun(tokenizer, enable_thinking=False).ids_after(tokenizer.encode("no"), NEXT)


def test_a_text_goes_on_after_what_was_sampled() -> None:
    tokenizer = Tokenizer.bytes()
    text = TextTurns(tokenizer, "1+1=")
    assert text.ids == [tokenizer.bos_id, *tokenizer.encode("1+1=")]
    assert text.ids_after([*tokenizer.encode("3"), tokenizer.eos_id], "no\n") == tokenizer.encode(
        "no\n"
    )
    assert text.ids_after([5], "") == []
