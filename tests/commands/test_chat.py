"""Run: pytest tests/commands/test_chat.py (talking to a model: what a person may type, and what
stops what).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.test_finetune import folder_that_chats
from monograph.commands.chat import HELP, Chat
from monograph.decode import Sampling
from monograph.errors import InputRefused, UsageError
from monograph.text.template import Message


class Echo:
    """Answers with the last message's words, a piece each, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Message], int]] = []
        self.end = "stop"

    def __call__(
        self, messages: list[Message], sampling: Sampling
    ) -> Iterator[tuple[str, str | None]]:
        self.asked.append((messages, sampling.seed))
        for word in messages[-1]["content"].split():
            if word == "refuse":
                raise InputRefused("this cannot be asked")
            for _ in range({"interrupt": 1, "twice": 2}.get(word, 0)):
                signal.raise_signal(signal.SIGINT)  # in this thread, at once
            yield f"{word} ", None
        yield "", self.end


def begun(live: bool = True, system: str | None = None) -> tuple[Chat, Echo]:
    echo = Echo()
    return Chat(echo, Sampling(seed=3), system, live), echo


def test_a_message_is_answered_with_the_chat_so_far() -> None:
    chat, echo = begun(system="be brief")
    assert chat.handle_line("one two") and chat.handle_line("") and chat.handle_line("three")
    [_, (messages, seed)] = echo.asked
    assert seed == 3 and [(message["role"], message["content"]) for message in messages] == [
        ("system", "be brief"),
        ("user", "one two"),
        ("assistant", "one two "),
        ("user", "three"),
    ]


def test_commands_change_the_chat_and_are_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    chat, echo = begun(system="be brief")
    for line in (
        "a",
        "/seed 7",
        "/reset",
        "b",
        "/system say it twice",
        "c",
        "/system",
        "/reset",
        "d",
        "/help",
    ):
        assert chat.handle_line(line)
    assert [seed for _, seed in echo.asked] == [3, 7, 7, 7]
    assert [message["content"] for message in echo.asked[1][0]] == ["be brief", "b"]
    assert [message["content"] for message in echo.asked[2][0]] == ["say it twice", "b", "b ", "c"]
    assert [message["content"] for message in echo.asked[3][0]] == ["d"]
    assert not any(chat.handle_line(leaving) for leaving in ("/quit", "/exit", "/bye", "/q"))
    out, err = capsys.readouterr()
    assert all(command in err for command in HELP) and "/" not in out


@pytest.mark.parametrize("line", ["/rest", "/x", "/seed", "/seed no", "/etc/passwd is what?"])
def test_a_wrong_command_is_answered_and_not_sent(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, echo = begun()
    assert chat.handle_line(line) and not echo.asked
    assert "error: " in capsys.readouterr().err
    piped, _ = begun(live=False)
    with pytest.raises(UsageError):
        piped.handle_line(line)


def test_a_message_may_begin_with_a_slash_after_a_space() -> None:
    chat, echo = begun()
    chat.handle_line(" /etc/passwd is what?")
    assert echo.asked[0][0][-1]["content"] == " /etc/passwd is what?"


def test_a_message_that_cannot_be_answered_leaves_the_chat_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat, echo = begun()
    assert chat.handle_line("one") and chat.handle_line("refuse this") and chat.handle_line("two")
    assert [message["content"] for message in echo.asked[-1][0]] == ["one", "one ", "two"]
    assert "error: this cannot be asked" in capsys.readouterr().err
    with pytest.raises(InputRefused):
        begun(live=False)[0].handle_line("refuse this")


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    chat, echo = begun()
    assert chat.handle_line("one interrupt two three") and signal.getsignal(signal.SIGINT) is before
    out, err = capsys.readouterr()
    assert out == "one interrupt \n" and "(stopped)" in err
    chat.handle_line("go on")
    assert echo.asked[-1][0][1]["content"] == "one interrupt "
    with pytest.raises(KeyboardInterrupt):
        chat.handle_line("twice")  # a second one ends the program
    with pytest.raises(KeyboardInterrupt):
        begun(live=False)[0].handle_line("interrupt two")


def test_an_answer_that_was_cut_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    chat, echo = begun()
    echo.end = "length"
    chat.handle_line("one")
    assert "--max-tokens" in capsys.readouterr().err


def test_a_model_is_talked_to_through_a_pipe_and_on_a_terminal(
    server: CommandServer, here: Path
) -> None:
    folder_that_chats(here, "chatml")
    (here / "lines").write_text("why 1\n/seed 2\n\nwhat 2\n")
    options = ("--max-tokens", "3", "--system", "the answer is what the user said")
    piped = server.run(here, "chat", "chatty", *options, stdin=here / "lines")
    assert piped.code == 0 and len(piped.out.splitlines()) == 2 and "seed 2" in piped.err, piped.err

    ours, theirs = os.openpty()
    command = server.start(
        here, "chat", "chatty", *options, stdin=Path(os.ttyname(theirs)), terminal=1
    )
    command.until(lambda: "type a message" in command.out)
    os.write(ours, b"why 1\n")
    command.until(lambda: command.out.count("> ") == 2)
    command.signal(signal.SIGINT)
    # Until the prompt is there again, the terminal is not ready for a Ctrl-D, which would be lost.
    command.until(lambda: "Ctrl-D leaves)" in command.out and command.out.endswith("> "))
    os.write(ours, b"\x04")
    done = command.wait()
    os.close(ours)
    os.close(theirs)
    assert done.code == 0 and piped.out.splitlines()[0] in done.out


def test_a_model_without_a_template_says_what_to_do_instead(
    server: CommandServer, here: Path
) -> None:
    folder_that_chats(here, "chatml")
    (here / "chatty" / "chat_template.jinja").unlink()
    done = server.run(here, "chat", "chatty")
    assert (
        done.code == 3
        and "`monograph generate chatty TEXT`" in done.err
        and len(done.err.splitlines()) == 1
    )
