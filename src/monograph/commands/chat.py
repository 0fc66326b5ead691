"""`monograph chat`: talk to a model in the terminal, or through a pipe with one message per line."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol

from monograph.commands.generate import (
    GenerateOptions,
    PromptRequest,
    ReadyModel,
    open_model,
    with_constraint,
)
from monograph.decode import Sampling
from monograph.errors import InputRefused, UsageError, did_you_mean
from monograph.terminal import is_terminal, shell_words
from monograph.text.template import Message

# The commands that a person can type instead of a message, with their help.
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
# Commands that end the chat: /quit, and those of other programs that do the same.
_LEAVING = ("/quit", "/exit", "/bye", "/q")
_COMMANDS = tuple(line.split()[0] for line in HELP)
# What to tell the person about an answer that did not end by itself, by its reason to end.
_END_NOTES = {
    "length": "the answer was cut: --max-tokens is its longest length",
    "stopped": "stopped",
    "not_finite": "the model's numbers are not finite",
    "nothing_allowed": "the constraint left no token",
}


class AnswerWriter(Protocol):
    """A function that writes answers: `answers_from` a model, or a substitute in tests."""

    def __call__(
        self, messages: list[Message], sampling: Sampling
    ) -> Iterator[tuple[str, str | None]]:
        """Yield pieces (text, reason to end) of the answer to the last message.

        The reason is None except in the last piece.
        """


class Chat:
    """A chat with a model.

    Attributes:
        messages: the messages so far, without the system prompt.
        sampling: the options of sampling.
        system_prompt: the system prompt; None for none.
    """

    def __init__(
        self, answers: AnswerWriter, sampling: Sampling, system: str | None, is_interactive: bool
    ) -> None:
        """Begin a chat.

        Args:
            answers: writes the answers.
            sampling: the options of sampling.
            system: the system prompt; None for none.
            is_interactive: whether a person types the lines. After an error, a person can type
                another line, but a pipe cannot, so the chat ends.
        """
        self.messages: list[Message] = []
        self.sampling = sampling
        self.system_prompt = system
        self._answers = answers
        self._is_interactive = is_interactive

    def handle_line(self, line: str) -> bool:
        """Carry out a command, or answer a message.

        Args:
            line: what was typed.

        Returns:
            Whether the chat continues.

        Raises:
            InputRefused: the model cannot answer the message, and no person types the lines.
            UsageError: the command is wrong, and no person types the lines.
        """
        if not line.strip():
            return True
        try:
            if line.startswith("/"):
                # The command's name, and what follows it if there is more.
                return self._command(*line.split(maxsplit=1))
            self._answer(line)
        except (InputRefused, UsageError) as error:
            if not self._is_interactive:
                raise
            print_note(f"error: {error}")
        return True

    def _command(self, name: str, value: str = "") -> bool:
        """Carry out a command, and return whether the chat continues.

        Args:
            name: the command, with its slash.
            value: what was typed after it.

        Raises:
            UsageError: there is no such command, or its value is wrong.
        """
        value = value.strip()
        if name in _LEAVING:
            return False
        if name == "/help":
            width = max(map(len, HELP)) + 2
            lines = [f"{command:<{width}}{meaning}" for command, meaning in HELP.items()]
            print_note("\n".join([*lines, KEYS]))
        elif name == "/system":
            self.system_prompt = value or None
            print_note("system prompt set" if value else "no system prompt")
        elif name == "/reset":
            self.messages.clear()
            print_note("a new chat")
        elif name == "/seed":
            self._set_seed(value)
        else:
            hint = did_you_mean(name, _COMMANDS) or "; /help lists the commands"
            raise UsageError(
                f"there is no command {name}{hint} (to send it as a message, begin with a space)"
            )
        return True

    def _set_seed(self, value: str) -> None:
        """Set the seed of later answers."""
        if not value.isdecimal():
            raise UsageError(f"/seed {value}: expected a whole number, 0 or more")
        self.sampling = replace(self.sampling, seed=int(value))
        print_note(f"seed {int(value)}")

    def _answer(self, line: str) -> None:
        """Print the answer to a message while it is written, and add both to the chat."""
        messages = [*self.messages, {"role": "user", "content": line}]
        system: list[Message] = []
        if self.system_prompt is not None:
            system = [{"role": "system", "content": self.system_prompt}]
        pieces = list[str]()
        end_reason = "stop"  # the answer ended by itself
        with _first_interrupt_requests_stop(self._is_interactive) as stop_requested:
            for text, reason in self._answers([*system, *messages], self.sampling):
                print(text, end="", flush=True)
                pieces.append(text)
                end_reason = reason or end_reason
                if stop_requested():
                    end_reason = "stopped"
                    break
        print(flush=True)
        if end_reason in _END_NOTES:
            print_note(f"({_END_NOTES[end_reason]})")
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def run(run: str, *, system: str | None, options: GenerateOptions) -> None:
    """Answer each line of standard input; see the command line's help."""
    model = open_model(run, options)
    if model.tokenizer.config.template is None:
        raise InputRefused(
            f"{run}: the model has no chat template, so it continues texts and cannot chat: "
            f"`monograph generate {shell_words(run)} TEXT` continues one; to give it a template, put a "
            "chat_template.jinja next to its tokenizer.json"
        )
    # A constraint depends on the tokens right before an answer. They are the same after each message, so
    # "." stands for any message.
    model = with_constraint(model, [PromptRequest(".", model.sampling)])
    is_interactive = is_terminal(sys.stdin)
    chat = Chat(answers_from(model), model.sampling, system, is_interactive)
    if is_interactive:
        print_note(
            f"{run}: type a message. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves."
        )
    read_line = _read_typed_line if is_interactive else _read_piped_line
    line = read_line()
    while line is not None and chat.handle_line(line):
        line = read_line()


def answers_from(model: ReadyModel) -> AnswerWriter:
    """Return a function that writes answers with a model."""

    def answers(messages: list[Message], sampling: Sampling) -> Iterator[tuple[str, str | None]]:
        ids = model.prompt_ids(messages)
        positions = model.model.config.max_position_embeddings
        if len(ids) >= positions:
            raise InputRefused(
                f"the chat has {len(ids)} tokens with this message, and the model's context is {positions}: "
                "begin a new one, with /reset"
            )
        for piece in model.generate([ids], [sampling]).stream():
            reason = piece.completion.finish_reason if piece.completion else None
            yield piece.text, reason

    return answers


def print_note(text: str) -> None:
    """Print a text that is not part of the chat on standard error, since a pipe wants only answers."""
    print(text, file=sys.stderr, flush=True)


def _read_piped_line() -> str | None:
    """Return the next line of standard input; None at the end."""
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _read_typed_line() -> str | None:
    """Return the next line that a person types; None after Ctrl-D."""
    with suppress(ImportError):  # some Pythons lack it
        import readline  # noqa: F401 - once imported, it gives `input` line editing and history
    while True:
        try:
            if is_terminal(sys.stdout):
                return input("> ")
            # `input` would write the prompt to standard output, among the answers.
            print("> ", end="", file=sys.stderr, flush=True)
            return input()
        except EOFError:
            print_note("")
            return None
        except KeyboardInterrupt:
            print_note("\n(Ctrl-D leaves)")


@contextmanager
def _first_interrupt_requests_stop(is_interactive: bool) -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C in the `with` block set a flag. A second Ctrl-C ends the program.

    The flag is read between two pieces of an answer, so that no step of the model is interrupted.

    Args:
        is_interactive: whether a person types. Otherwise the first Ctrl-C ends the program.

    Yields:
        A function that returns the flag.
    """
    is_requested = False

    def request_stop(*_: object) -> None:
        nonlocal is_requested
        is_requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # for the second Ctrl-C

    former_handler = signal.signal(signal.SIGINT, request_stop) if is_interactive else None
    try:
        yield lambda: is_requested
    finally:
        if former_handler is not None:
            signal.signal(signal.SIGINT, former_handler)
