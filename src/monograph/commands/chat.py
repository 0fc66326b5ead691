"""`monograph chat`: talk to a model in the terminal, or through a pipe that holds one message a
line.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol

from monograph.commands.generate import Asked, Message, Model, Options, constrained, open_model
from monograph.decode import Sampling
from monograph.errors import InputRefused, UsageError, did_you_mean
from monograph.terminal import is_terminal, shell_words

# What a person types instead of a message, with the help for it.
HELP = {
    "/help": "list these commands",
    "/system TEXT": "set the system prompt; without TEXT remove it",
    "/reset": "forget the chat so far; the system prompt stays",
    "/seed N": "set the seed; the same seed and the same chat give the same answer",
    "/quit": "leave, as Ctrl-D does",
}
KEYS = (
    "Ctrl-C stops an answer. A line that begins with a space is sent as it is, even if a / follows."
)
# The first is ours, the others are what other programs have.
_LEAVING = ("/quit", "/exit", "/bye", "/q")
_COMMANDS = tuple(line.split()[0] for line in HELP)
# How an answer may end besides at its own end, and what a person can do then.
_ENDED = {
    "length": "the answer was cut: --max-tokens is its longest length",
    "stopped": "stopped",
    "not_finite": "the model's numbers are not finite",
    "nothing_allowed": "the constraint left no token",
}


class Answers(Protocol):
    """What writes an answer: a model, or a stand-in."""

    def __call__(
        self, messages: list[Message], sampling: Sampling
    ) -> Iterator[tuple[str, str | None]]:
        """Yield pieces of the answer, each with how the answer ended, which is None until the last
        piece.
        """


class Chat:
    """A chat: its messages, its system prompt and its seed, which lines of a person change."""

    def __init__(
        self, answers: Answers, sampling: Sampling, system: str | None, live: bool
    ) -> None:
        """Begin a chat.

        Args:
            answers: what writes an answer.
            sampling: how each answer is sampled.
            system: the system prompt, if there is one.
            live: whether a person types, who can go on after an error; a pipe ends with it.
        """
        self.messages: list[Message] = []
        self.sampling, self.system_prompt = sampling, system
        self._answers, self._live = answers, live

    def take(self, line: str) -> bool:
        """Carry out a command, or answer a message; return whether the chat goes on.

        Raises:
            InputRefused: the model cannot answer the message, and nobody is there to send another.
            UsageError: a command is wrong, and nobody is there to repeat it.
        """
        if not line.strip():
            return True
        try:
            if line.startswith("/"):
                return self._command(*line.split(maxsplit=1))
            self._answer(line)
        except (InputRefused, UsageError) as error:
            if not self._live:
                raise
            tell(f"error: {error}")
        return True

    def _command(self, name: str, value: str = "") -> bool:
        value = value.strip()
        if name in _LEAVING:
            return False
        if name == "/help":
            width = max(map(len, HELP)) + 2
            tell(
                "\n".join(
                    [*(f"{command:<{width}}{meaning}" for command, meaning in HELP.items()), KEYS]
                )
            )
        elif name == "/system":
            self.system_prompt = value or None
            tell("system prompt set" if value else "no system prompt")
        elif name == "/reset":
            self.messages.clear()
            tell("a new chat")
        elif name == "/seed":
            self._set_seed(value)
        else:
            hint = did_you_mean(name, _COMMANDS) or "; /help lists the commands"
            raise UsageError(
                f"there is no command {name}{hint} (to send it as a message, begin with a space)"
            )
        return True

    def _set_seed(self, value: str) -> None:
        if not value.isdecimal():
            raise UsageError(f"/seed {value}: expected a whole number, 0 or more")
        self.sampling = replace(self.sampling, seed=int(value))
        tell(f"seed {int(value)}")

    def _answer(self, line: str) -> None:
        said = [*self.messages, {"role": "user", "content": line}]
        system = (
            []
            if self.system_prompt is None
            else [{"role": "system", "content": self.system_prompt}]
        )
        pieces = list[str]()
        ended = "stop"
        with _stopped_by_interrupt(self._live) as stopped:
            for text, end in self._answers([*system, *said], self.sampling):
                print(text, end="", flush=True)
                pieces.append(text)
                ended = end or ended
                if stopped():
                    ended = "stopped"
                    break
        print(flush=True)
        if ended in _ENDED:
            tell(f"({_ENDED[ended]})")
        self.messages = [*said, {"role": "assistant", "content": "".join(pieces)}]


def run(run: str, *, system: str | None, options: Options) -> None:
    """Answer each line of standard input; see the command line's help."""
    model = open_model(run, options)
    if model.tokenizer.config.template is None:
        raise InputRefused(
            f"{run}: the model has no chat template, so it continues texts and cannot chat: "
            f"`monograph generate {shell_words(run)} TEXT` continues one; to give it a template, put a "
            "chat_template.jinja next to its tokenizer.json"
        )
    model = constrained(model, [Asked(".", model.sampling)])
    live = is_terminal(sys.stdin)
    chat = Chat(answers_of(model), model.sampling, system, live)
    if live:
        tell(f"{run}: type a message. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    read = _typed if live else _piped
    while (line := read()) is not None and chat.take(line):
        pass


def answers_of(model: Model) -> Answers:
    """Return what writes answers with a model."""

    def answers(messages: list[Message], sampling: Sampling) -> Iterator[tuple[str, str | None]]:
        ids = model.question(messages)
        context = model.model.config.max_position_embeddings
        if len(ids) >= context:
            raise InputRefused(
                f"the chat has {len(ids)} tokens with this message, and the model's context is {context}: begin a new "
                "one, with /reset"
            )
        for piece in model.write([ids], [sampling]).stream():
            yield piece.text, piece.completion.finish_reason if piece.completion else None

    return answers


def tell(text: str) -> None:
    """Print what is no part of the chat, on standard error, so that a pipe gets answers alone."""
    print(text, file=sys.stderr, flush=True)


def _piped() -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _typed() -> str | None:
    """Return the next line of a terminal, with line editing and history where Python has readline;
    None at its end.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is imported
    while True:
        try:
            if is_terminal(sys.stdout):
                return input("> ")
            print("> ", end="", file=sys.stderr, flush=True)
            return input()
        except EOFError:
            tell("")
            return None
        except KeyboardInterrupt:
            tell("\n(Ctrl-D leaves)")


@contextmanager
def _stopped_by_interrupt(live: bool) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C inside the block be asked for, and a second one end the program.

    It is asked for between two pieces, so that no step of the model is cut in its middle. Through a
    pipe, where nobody could go on after it, Ctrl-C ends the program as everywhere.
    """
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop) if live else None
    try:
        yield lambda: asked
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
