"""Render a model's chat template as transformers does: turn messages into the text that the model
continues.

Templates are programs by strangers, so they are never rendered in this process, but in a separate
one (`monograph.text.sandbox`).
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
from monograph.storage.reading import entries, file_inside, read_input, status
from monograph.text import sandbox

FILE = "chat_template.jinja"
NAMED_FOLDER = "additional_chat_templates"
_SUFFIX = ".jinja"
# The names of the templates for chats without and with tools, as in transformers.
DEFAULT = "default"
TOOL_USE = "tool_use"
MAX_SOURCE_BYTES = 1 << 16
MAX_NAMED_TEMPLATES = 64  # the maximum number of files in NAMED_FOLDER
_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
MAX_BATCH = 16  # the maximum number of renderings that are requested in one line
# The longest wait for the reply to one line; it is long enough for a busy machine.
REPLY_TIMEOUT_S = 30.0 + 2 * sandbox.CPU_LIMIT_S * MAX_BATCH

Message = Mapping[str, Any]  # "role", "content", and any other keys that a template reads
# The keys of a message that may have the model's reasoning, as in transformers. Templates read only the first
# two (`_with_reasoning`).
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# The arguments of the call that `ChatTemplate.wants_objects` tries out.
_PROBE_ARGUMENTS = {"key": "needle"}


class TemplateRefusal(InputRefused):
    """A template cannot express a chat, such as one whose roles do not take turns."""


class ChatTemplate:
    """A chat template in Jinja.

    Attributes:
        source: the template's text.
        tokens: the special tokens that the template may use by name, e.g. {"bos_token": "<s>"}.
        day: the date that the template sees as today's, e.g. "2024-07-26"; None: the real date.

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
        """Store the template; it is not compiled yet.

        Args:
            source: see the attributes.
            where: the template's place, for messages.
            tokens: see the attributes; None: none.
            day: see the attributes.
        """
        if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
            raise InputRefused(
                f"{where}: the chat template is larger than {MAX_SOURCE_BYTES >> 10} KiB"
            )
        self.source = source
        self.tokens = dict(tokens or {})
        self.day = day
        self._where = where
        # A function that ends the process that renders; None: there is no process.
        self._end_process: Callable[[], object] | None = None
        # Held while a thread waits for the process, so that no thread reads the reply to another
        # thread's request.
        self._lock = threading.Lock()
        # {request: its reply} of the chats of `render_ahead` that `render` has not taken yet.
        self._rendered_ahead: dict[str, dict[str, str]] = {}

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """Return all words of the source. They include every name that the template reads."""
        return frozenset(re.findall(r"\w+", self.source))

    def with_date(self, day: str) -> Self:
        """Return a copy of the template that sees `day` as today's date."""
        return type(self)(self.source, self._where, self.tokens, day)

    @property
    def reads_the_date(self) -> bool:
        """Return whether the rendered text may depend on the date."""
        return "strftime_now" in self.source

    @functools.cached_property
    def wants_objects(self) -> bool:
        """Return whether the arguments of a tool call must be an object, not the text of its JSON.

        To find out, a call is rendered with its arguments in both forms. Some templates write
        arguments as JSON. Such a template would escape the quotes of a text a second time, so it
        needs an object. Others write the text unchanged, so they need a text, unless they write an
        object in a notation of their own.
        """
        probe_json = json.dumps(_PROBE_ARGUMENTS)
        rendered_with_text = self._render_call(probe_json)
        rendered_with_object = self._render_call(_PROBE_ARGUMENTS)
        [(name, needle)] = _PROBE_ARGUMENTS.items()
        if needle not in rendered_with_object:
            return False
        if probe_json not in rendered_with_text:
            return True
        # The template writes texts unchanged, so it can take a text. But if it writes an object neither as JSON nor
        # as Python does, which is Jinja's default, it has a notation of its own, and needs an object.
        json_or_python = rf"""["']{name}["']\s*:\s*["']{needle}["']"""
        return re.search(json_or_python, rendered_with_object) is None

    def _render_call(self, arguments: object) -> str:
        """Return a chat with a tool call with these arguments as text; "" if it is refused."""
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
        question = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        tools = [{"type": "function", "function": function}]
        try:
            return self.render([question, answer], tools=tools)
        except InputRefused:
            return ""

    @property
    def tags_answers(self) -> bool:
        """Return whether the template tags the assistant's text with `{% generation %}`."""
        return re.search(r"\{%-?\+?\s*generation\b", self.source) is not None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: object
    ) -> str:
        """Return the chat as text with special tokens.

        It equals transformers' `apply_chat_template(tokenize=False)`.

        Args:
            messages: the chat, each {"role": ..., "content": ...}, with values of JSON's types.
            add_generation_prompt: whether to end with the beginning of an assistant's turn.
            variables: other variables of the template, e.g. enable_thinking or date_string.

        Raises:
            TemplateRefusal: the template refuses the messages with its own message.
            InputRefused: the template is not valid Jinja, or does what no template needs: it
                accesses Python's internals, computes for more than 2 s, takes more than 512 MiB, or
                writes more than 64 times its input plus 1 MiB.
        """
        return self._render_request(self._request(messages, add_generation_prompt, variables, None))

    def render_ahead(
        self, chats: Iterable[tuple[Sequence[Message], bool]], **variables: object
    ) -> None:
        """Render chats in advance, for later calls of `render`.

        Rendering them together is faster. Results of an earlier call of `render_ahead` are dropped.

        Args:
            chats: the chats, as (messages, add_generation_prompt).
            variables: other variables of the template.
        """
        self._rendered_ahead = {}
        requests = [self._request(messages, prompt, variables, None) for messages, prompt in chats]
        for begin in range(0, len(requests), MAX_BATCH):
            batch = requests[begin : begin + MAX_BATCH]
            # If the process ends, these requests have no replies. `render` then renders each of
            # them alone, so that the error names the right chat.
            replies = self._replies(batch) or ()
            self._rendered_ahead |= zip(batch, replies, strict=False)

    def tagged(
        self, messages: Sequence[Message], marks: tuple[str, str], **variables: object
    ) -> str:
        """Return the chat as text like `render`, with marks around the text that the template tags.

        Args:
            messages: the chat.
            marks: the texts before and after each text that the template tags with
                `{% generation %}`.
            variables: other variables of the template.
        """
        return self._render_request(self._request(messages, False, variables, marks))

    def _request(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        marks: tuple[str, str] | None,
    ) -> str:
        """Return the JSON of a request to the process; `sandbox` describes it."""
        request = {
            # transformers always gives these two variables to a template.
            "tools": None,
            "documents": None,
            **self.tokens,
            **variables,
            "messages": [_with_reasoning(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return json.dumps([request, marks])
        except (TypeError, ValueError, RecursionError) as error:
            raise InputRefused(f"a chat's messages must be JSON: {error}") from None

    def _render_request(self, request: str) -> str:
        """Return the text of a request; `render_ahead` may have rendered it already."""
        reply = self._rendered_ahead.pop(request, None)
        if reply is None:
            replies = self._replies([request])
            if replies is None:
                seconds = sandbox.CPU_LIMIT_S
                fault = f"it computes for more than {seconds} s, or breaks its interpreter"
                replies = [{"error": fault}]
            [reply] = replies
        if "text" not in reply:
            message = f"{self._where}: the chat template does not render: {reply['error']}"
            # "TemplateError" is the type of the error that a template raises itself.
            if reply["error"].startswith("TemplateError: "):
                raise TemplateRefusal(message)
            raise InputRefused(message)
        return str(reply["text"])

    def _replies(self, requests: list[str]) -> list[dict[str, str]] | None:
        """Return the process's replies to requests; None if the process ended instead."""
        with self._lock:
            lines = json.dumps(requests)
            if self._end_process is None:
                self._start_process()
                lines = json.dumps([self.source, self.day]) + "\n" + lines
            assert self._end_process is not None
            try:
                self._pipe.write(lines.encode() + b"\n")
                self._pipe.flush()
                reply_line = self._pipe.readline()
            except OSError:  # the process ended, or has not replied in time
                reply_line = b""
            if reply_line.endswith(b"\n"):
                replies: list[dict[str, str]] = json.loads(reply_line)
                return replies
            self._end_process()
            self._end_process = None
            return None

    def _start_process(self) -> None:
        """Start the process, and set `_pipe` and `_end_process`."""
        our_end, child_end = socket.socketpair()
        with our_end, child_end:
            our_end.settimeout(REPLY_TIMEOUT_S)
            self._pipe = our_end.makefile("rwb")
            # The process has its own session, so that Ctrl-C does not end it: the run still has to
            # save.
            process = subprocess.Popen(
                [sys.executable, "-P", sandbox.__file__],
                stdin=child_end.fileno(),
                stdout=child_end.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._end_process = weakref.finalize(self, _end_process, process, self._pipe)


def _end_process(process: subprocess.Popen[bytes], pipe: BufferedRWPair) -> None:
    """End a process that renders, and close the pipe to it."""
    process.kill()
    process.wait()
    with suppress(OSError):  # raised if the process ended before it read everything
        pipe.close()


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return a message as transformers gives it to a template.

    Keys with null are left out. The model's reasoning, if there is any, is under both keys that
    templates read: "reasoning_content" and "thinking".
    """
    if not isinstance(message, Mapping):
        raise InputRefused(
            f"a chat's message is {type(message).__name__}: expected an object with a role and a content"
        )
    without_nulls = {key: value for key, value in message.items() if value is not None}
    for key in _REASONING_KEYS:
        if key in without_nulls:
            reasoning = without_nulls[key]
            # If the message has another value under "thinking", that one is kept.
            return {"thinking": reasoning, **without_nulls, "reasoning_content": reasoning}
    return without_nulls


def read_sources(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a folder's chat templates by name, as transformers reads them.

    They are in chat_template.jinja, which is named "default", and in
    additional_chat_templates/NAME.jinja. If there are no such files, they are in
    tokenizer_config.json: a text, which is named "default", or several texts with names. {}: there
    are no templates.

    Args:
        folder: the folder of a model.
        tokenizer_config: the content of its tokenizer_config.json.

    Raises:
        InputRefused: a file cannot be read, is too large or not UTF-8, `chat_template` has another
            form, or there are templates but none is named "default".
    """
    sources: dict[str, str] = {}
    if status(folder / FILE, follow=False) is not None:
        sources[DEFAULT] = _read_source(folder, FILE)
    for path in _named_files(folder / NAMED_FOLDER):
        sources[path.name.removesuffix(_SUFFIX)] = _read_source(path.parent, path.name)
    if not sources:
        config_path = folder / "tokenizer_config.json"
        sources = _stored_sources(tokenizer_config.get("chat_template"), config_path)
    for name in sources:
        if not _NAME.fullmatch(name):
            raise InputRefused(
                f"{folder}: a chat template has the name {name[:60]!r}: give it a name of letters and digits"
            )
    if sources and DEFAULT not in sources:
        names = ", ".join(sorted(sources))
        raise InputRefused(
            f"{folder}: has chat templates named {names}, and none for chats without tools: add {FILE}, or in "
            "tokenizer_config.json one named 'default'"
        )
    return sources


def _named_files(folder: Path) -> list[Path]:
    """Return the files of named chat templates in `folder`, which may be missing."""
    folder_status = status(folder, follow=False)
    if folder_status is None:
        return []
    if stat.S_ISLNK(folder_status.st_mode):
        raise InputRefused(f"{folder}: is a link; put the folder of chat templates itself there")
    files = [path for path in entries(folder) if path.name.endswith(_SUFFIX)]
    if len(files) > MAX_NAMED_TEMPLATES:
        raise InputRefused(
            f"{folder}: has {len(files):,} chat templates, more than {MAX_NAMED_TEMPLATES}"
        )
    return files


def _read_source(folder: Path, name: str) -> str:
    """Return the source of a chat template from a file of this name in a folder."""
    try:
        content = read_input(file_inside(folder, name), MAX_SOURCE_BYTES)
        return content.decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"{folder / name}: cannot be read as UTF-8 text: {error}") from None


def _stored_sources(stored: object, path: Path) -> dict[str, str]:
    """Return the chat templates in a tokenizer_config.json, by name.

    Args:
        stored: the value of `chat_template`; None: there is no such key.
        path: the path of the file, for messages.
    """
    if stored is None:
        return {}
    refusal = InputRefused(
        f"{path}: chat_template is {str(stored)[:60]!r}: expected a text, or texts by name"
    )
    sources: dict[Any, Any]
    if isinstance(stored, str):
        sources = {DEFAULT: stored}
    elif isinstance(stored, dict):
        sources = dict(stored)
    elif isinstance(stored, list) and all(isinstance(entry, dict) for entry in stored):
        sources = {
            entry.get("name"): entry.get("template") for entry in stored[:MAX_NAMED_TEMPLATES]
        }
    else:
        raise refusal
    for name, source in sources.items():
        if not isinstance(name, str) or not isinstance(source, str):
            raise refusal
    return sources
