"""Render a model's chat template as transformers does: turn messages into the text that the model
continues.

Templates are programs by strangers, so a separate process renders them (`sandbox`), never this one.
"""

import functools
import json
import re
import socket
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Self

from monograph.errors import InputRefused
from monograph.storage.reading import entries, inside, read_input, status
from monograph.text import sandbox

FILE = "chat_template.jinja"
NAMED_FOLDER = "additional_chat_templates"
_SUFFIX = ".jinja"
DEFAULT, TOOL_USE = "default", "tool_use"  # the names of templates that transformers chooses by
MAX_SOURCE_BYTES = 1 << 16
MOST_NAMED = 64
_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
AT_ONCE = 16  # most renderings requested in one line
# Longest wait for the reply to one line, on a busy machine too.
PATIENCE_S = 30.0 + 2 * sandbox.SECONDS * AT_ONCE

Message = Mapping[str, Any]  # "role", "content", and any other keys that a template reads
# The names that transformers accepts for a model's reasoning; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ARGUMENTS = {"key": "needle"}  # of a call that shows in which form a template takes them


class Unspeakable(InputRefused):
    """A template refuses a chat with a message of its own, such as that roles do not take turns."""


class ChatTemplate:
    """A chat template in Jinja.

    Attributes:
        source: the template's text.
        tokens: the special tokens that it may use by name, such as {"bos_token": "<s>"}.
        day: the date that it sees as today's, such as "2024-07-26"; None for the real one.

    Raises:
        InputRefused: the source is larger than 64 KiB, which no model's template is.
    """

    def __init__(
        self,
        source: str,
        where: str,
        tokens: Mapping[str, str] | None = None,
        day: str | None = None,
    ):
        if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
            raise InputRefused(
                f"{where}: the chat template is larger than {MAX_SOURCE_BYTES >> 10} KiB"
            )
        self.source = source
        self.tokens = dict(tokens or {})
        self.day = day
        self._where = where
        # Ends the process that renders, if there is one.
        self._end: Callable[[], object] | None = None
        # One thread at a time asks the process, or it would read another's chat.
        self._turn = threading.Lock()
        self._ready: dict[str, dict[str, str]] = {}

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """Return all words of the source, among them every name that it reads."""
        return frozenset(re.findall(r"\w+", self.source))

    def on(self, day: str) -> Self:
        """Return the same template with another date as today's."""
        return type(self)(self.source, self._where, self.tokens, day)

    @property
    def reads_the_date(self) -> bool:
        """Return whether the rendered text may depend on the date."""
        return "strftime_now" in self.source

    @functools.cached_property
    def wants_objects(self) -> bool:
        """Return whether a call's arguments have to be an object, as a text of JSON would be
        escaped a second time.

        A call is rendered with its arguments in both forms. A template that writes the text as it
        is takes the text.
        """
        as_text, as_object = (
            self._called(arguments) for arguments in (json.dumps(_ARGUMENTS), _ARGUMENTS)
        )
        [needle] = _ARGUMENTS.values()
        return needle in as_object and json.dumps(_ARGUMENTS) not in as_text

    def _called(self, arguments: object) -> str:
        """Return a chat with a call of a tool; "" if the template refuses it."""
        function = {
            "name": "probe",
            "description": "Probes.",
            "parameters": {"type": "object", "properties": {}},
        }
        call = {
            "id": "probe0001",
            "type": "function",
            "function": {"name": "probe", "arguments": arguments},
        }
        asked, answer = (
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        )
        try:
            return self.render([asked, answer], tools=[{"type": "function", "function": function}])
        except InputRefused:
            return ""

    @property
    def tags_answers(self) -> bool:
        """Return whether the template marks the assistant's text by `{% generation %}`."""
        return re.search(r"\{%-?\+?\s*generation\b", self.source) is not None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: object
    ) -> str:
        """Return the chat as text with special tokens, equal to transformers'
        `apply_chat_template(tokenize=False)`.

        Args:
            messages: the chat, each {"role": ..., "content": ...}, with values of JSON's types.
            add_generation_prompt: whether to end with the beginning of an assistant's turn.
            variables: other variables of the template, such as enable_thinking or date_string.

        Raises:
            Unspeakable: the template refuses the messages with a message of its own.
            InputRefused: the template is not valid Jinja, or does what no template needs: reaches
                for Python's internals, computes for more than 2 s, takes more than 512 MiB, or
                writes more than 64 times its input and 1 MiB.
        """
        return self._rendered(self._request(messages, add_generation_prompt, variables, None))

    def expect(self, chats: Iterable[tuple[Sequence[Message], bool]], **variables: object) -> None:
        """Render these (messages, add_generation_prompt) together, which is faster, for later calls
        of `render`.

        Results of an earlier call of `expect` that were not used are dropped.
        """
        self._ready = {}
        asked = [self._request(messages, prompt, variables, None) for messages, prompt in chats]
        for begin in range(0, len(asked), AT_ONCE):
            part = asked[begin : begin + AT_ONCE]
            # If the process ended, each of these is rendered singly when it is needed, which shows
            # the one at fault.
            self._ready |= zip(part, self._answers(part) or (), strict=False)

    def tagged(
        self, messages: Sequence[Message], marks: tuple[str, str], **variables: object
    ) -> str:
        """Return the chat as text like `render`, with `marks` around the text that the template
        tags as an answer.
        """
        return self._rendered(self._request(messages, False, variables, marks))

    def _request(
        self,
        messages: Sequence[Message],
        prompt: bool,
        variables: Mapping[str, Any],
        marks: tuple[str, str] | None,
    ) -> str:
        """Return a request in the form that the process reads."""
        request = {
            "tools": None,
            "documents": None,
            **self.tokens,
            **variables,
            "messages": [_with_reasoning(message) for message in messages],
            "add_generation_prompt": prompt,
        }
        try:
            return json.dumps([request, marks])
        except (TypeError, ValueError, RecursionError) as error:
            raise InputRefused(f"a chat's messages must be JSON: {error}") from None

    def _rendered(self, request: str) -> str:
        answer = self._ready.pop(request, None)
        if answer is None:
            fault = {
                "error": f"it computes for more than {sandbox.SECONDS} s, or breaks its interpreter"
            }
            [answer] = self._answers([request]) or [fault]
        if "text" not in answer:
            refused = Unspeakable if answer["error"].startswith("TemplateError: ") else InputRefused
            raise refused(f"{self._where}: the chat template does not render: {answer['error']}")
        return str(answer["text"])

    def _answers(self, requests: list[str]) -> list[dict[str, str]] | None:
        """Return the process's answers; None if it ended instead."""
        with self._turn:
            return self._answers_in_turn(json.dumps(requests))

    def _answers_in_turn(self, line: str) -> list[dict[str, str]] | None:
        if self._end is None:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                ours.settimeout(PATIENCE_S)
                self._pipe = ours.makefile("rwb")
                # In a session of its own, so that Ctrl-C does not end it: the run still has to
                # save.
                process = subprocess.Popen(
                    [sys.executable, "-P", sandbox.__file__],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._end = weakref.finalize(self, _end, process, self._pipe)
            line = json.dumps([self.source, self.day]) + "\n" + line
        try:
            self._pipe.write(line.encode() + b"\n")
            self._pipe.flush()
            reply = self._pipe.readline()
        except OSError:  # it is gone, or has not answered in time
            reply = b""
        if reply.endswith(b"\n"):
            pieces: list[dict[str, str]] = json.loads(reply)
            return pieces
        self._end()
        self._end = None
        return None


def _end(process: subprocess.Popen[bytes], pipe: BufferedRWPair) -> None:
    process.kill()
    process.wait()
    with suppress(OSError):  # the process ended before it read everything
        pipe.close()


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return a message as transformers gives it to a template: without nulls, its thoughts under
    both names.
    """
    if not isinstance(message, Mapping):
        raise InputRefused(
            f"a chat's message is {type(message).__name__}: expected an object with a role and a content"
        )
    there = {key: value for key, value in message.items() if value is not None}
    thought = next((there[key] for key in _REASONING if key in there), None)
    return (
        there if thought is None else {"thinking": thought, **there, "reasoning_content": thought}
    )


def read_sources(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a folder's chat templates by name, as transformers reads them; {} if
    there is none.

    They are chat_template.jinja, named "default", and additional_chat_templates/NAME.jinja. If
    there is no such file, they are in tokenizer_config.json: a text, named "default", or several
    with their names.

    Raises:
        InputRefused: a file cannot be read, is too large or not UTF-8, `chat_template` has another
            form, or there are templates but none is named "default".
    """
    path, config = folder / FILE, folder / "tokenizer_config.json"
    sources = {}
    if status(path, follow=False) is not None:
        sources[DEFAULT] = _read_source(folder, path.name)
    for path in _named_files(folder / NAMED_FOLDER):
        sources[path.name.removesuffix(_SUFFIX)] = _read_source(path.parent, path.name)
    if not sources:
        sources = _stored_sources(tokenizer_config.get("chat_template"), config)
    for name in sources:
        if not _NAME.fullmatch(name):
            raise InputRefused(
                f"{folder}: a chat template has the name {name[:60]!r}: give it one of letters and digits"
            )
    if sources and DEFAULT not in sources:
        names = ", ".join(sorted(sources))
        raise InputRefused(
            f"{folder}: has chat templates named {names}, and none for chats without tools: add {FILE}, or in "
            "tokenizer_config.json one named 'default'"
        )
    return sources


def _named_files(folder: Path) -> list[Path]:
    entry = status(folder, follow=False)
    if entry is None:
        return []
    if stat.S_ISLNK(entry.st_mode):
        raise InputRefused(f"{folder}: is a link; put the folder of chat templates itself there")
    files = [path for path in entries(folder) if path.name.endswith(_SUFFIX)]
    if len(files) > MOST_NAMED:
        raise InputRefused(f"{folder}: has {len(files):,} chat templates, more than {MOST_NAMED}")
    return files


def _read_source(folder: Path, name: str) -> str:
    try:
        return read_input(inside(folder, name), MAX_SOURCE_BYTES).decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"{folder / name}: cannot be read as UTF-8 text: {error}") from None


def _stored_sources(stored: object, path: Path) -> dict[str, str]:
    """Return the templates by name of the value of `chat_template` in a tokenizer_config.json."""
    if stored is None:
        return {}
    sources = stored
    if isinstance(stored, str):
        sources = {DEFAULT: stored}
    if isinstance(stored, list) and all(isinstance(entry, dict) for entry in stored):
        sources = {entry.get("name"): entry.get("template") for entry in stored[:MOST_NAMED]}
    named = sources if isinstance(sources, dict) else None
    if named is None or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise InputRefused(
            f"{path}: chat_template is {str(stored)[:60]!r}: expected a text, or texts by name"
        )
    return dict(named)
