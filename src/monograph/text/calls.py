"""How a model's chat template writes the calls of tools in an answer, and how calls are read again.

What stands around a call is found by trying the template: a chat with known calls is rendered, and the
names, arguments and ids are searched for in the result. So a new family needs no code of its own, as
long as its template writes each call's name, and after it the arguments as JSON.

Ids are compared by their *spelling*: a string that has one character below 256 for each byte of a
token, and one character from `SPECIAL` on for a special token. So a special token is never the same as
its letters in a text.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from monograph.errors import InputRefused
from monograph.text.chat import template_of
from monograph.text.messages import UnreadKey, for_template
from monograph.text.tokenizer import Tokenizer

# The character of special token i is SPECIAL + i. No byte has it, and none of the holes.
SPECIAL = 1 << 16
# Characters that stand in a frame for what differs from call to call.
NAME, ARGUMENTS, ID = "\u0100", "\u0101", "\u0102"
_HOLES = {NAME: "name", ARGUMENTS: "arguments", ID: "id"}
# Templates that write a call's id want this many letters and digits.
ID_LENGTH = 9
_NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_-]*")
_ID_CHARACTERS = re.compile(r"[A-Za-z0-9]*")
_WHITESPACE = " \t\r\n"


class Call(NamedTuple):
    """A call of a tool: its name, and its arguments as the JSON that the model wrote."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallFrame:
    """What a chat template writes around the calls of an answer, as spellings.

    An answer with the calls c1, c2 and c3 ends with

        opening c1 between c2 between c3 closing

    where each call is written like `call`, with its values in the place of the holes.

    Attributes:
        opening: what stands before the first call.
        call: the text from the first to the last hole of a call: NAME, ARGUMENTS and perhaps ID.
        between: what stands between two calls; None: the template writes one call in an answer.
        closing: what stands between the last call and the end of the answer.
        follows_text: whether the answer may have text before the calls; if not, it begins with them.
        separators: what the template writes between the members of arguments, and after their names.
    """

    opening: str
    call: str
    between: str | None
    closing: str
    follows_text: bool
    separators: tuple[str, str]

    @property
    def trigger(self) -> str:
        """The first part of `opening`, by which a call is recognised.

        It is what stands before the JSON of a call, such as <tool_call>; if nothing does, all of the
        opening.
        """
        opening = self.opening.lstrip(_WHITESPACE)
        before_json = re.split(r"[{\[]", opening, maxsplit=1)[0].rstrip(_WHITESPACE)
        return before_json or opening

    def written(self, calls: Sequence[Call]) -> str:
        """Return the spelling of an answer that has only these calls, without ids."""
        texts = []
        for name, arguments in calls:
            text = self.call.replace(NAME, name).replace(ID, "0" * ID_LENGTH)
            texts.append(text.replace(ARGUMENTS, arguments.encode().decode("latin-1")))
        return self.opening + (self.between or "").join(texts) + self.closing

    def grammar(self) -> dict[str, Any]:
        """Return the frame as JSON for `monograph.automata.calls`."""
        return {
            "trigger": _parts(self.trigger),
            "after_trigger": _parts(self.opening.lstrip(_WHITESPACE)[len(self.trigger) :]),
            "opening": _parts(self.opening),
            "call": _parts(self.call),
            "between": None if self.between is None else _parts(self.between),
            "closing": _parts(self.closing),
            "follows_text": self.follows_text,
            "separators": list(self.separators),
        }


def _parts(text: str) -> list[str | int | dict[str, Any]]:
    """Return the parts of a spelling: texts, ids of special tokens, and holes."""
    parts: list[str | int | dict[str, Any]] = []
    for run in re.findall("[\0-\xff]+|.", text, re.DOTALL):
        if run in _HOLES:
            parts.append({"hole": _HOLES[run]})
        elif ord(run[0]) >= SPECIAL:
            parts.append(ord(run) - SPECIAL)
        else:
            parts.append(run)
    return parts


def spellings(tokenizer: Tokenizer) -> list[str]:
    """Return the spelling of each token of the vocabulary."""
    return [
        bytes(piece).decode("latin-1") if piece else chr(SPECIAL + token_id)
        for token_id, piece in enumerate(tokenizer.pieces)
    ]


# ── finding the frame ─────────────────────────────────────────────────────────────────────────────

# What is rendered. No template contains these texts, and none is part of another one.
_QUESTION = {"role": "user", "content": "Zqa?"}
_CONTENT = "Zqb."
_NAMES = ("zqc_first", "zqd_second")
_IDS = ("zqe000001", "zqf000002")
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"zqg": "zqh", "zqi": [1, 2]},
    {"zqj": "zqk", "zql": [3, 4]},
)
_SEPARATORS = ((", ", ": "), (",", ":"), (",", ": "), (", ", ":"))
_UNREADABLE = (
    "the chat template does not write a call as a name with its arguments in JSON after it"
)


def find_frame(tokenizer: Tokenizer, stop_ids: Iterable[int]) -> CallFrame:
    """Return what the tokenizer's chat template writes around calls.

    Args:
        tokenizer: the tokenizer, with the chat template.
        stop_ids: the ids that end an answer.

    Raises:
        InputRefused: there is no template, or it does not write tools or calls, or not in this form.
    """
    return _FrameFinder(tokenizer, stop_ids).find()


class _FrameFinder:
    """Renders chats with known calls, and compares them."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._spellings = spellings(tokenizer)
        stops = [re.escape(self._spellings[stop]) for stop in stop_ids]
        self._stop = re.compile("|".join(stops) or r"(?!)")
        parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
        self._tools = [
            {
                "type": "function",
                "function": {"name": name, "description": "Zqm.", "parameters": parameters},
            }
            for name in _NAMES
        ]
        self._prompt = self._spelled([_QUESTION], add_generation_prompt=True)

    def find(self) -> CallFrame:
        """Return the frame; see `find_frame`."""
        if not any(name in self._prompt for name in _NAMES):
            raise InputRefused("the chat template does not show tools to the model")
        alone = self._answer(count=1)
        separators = next((each for each in _SEPARATORS if _json_of(0, each) in alone), None)
        if separators is None:
            raise InputRefused(_UNREADABLE)
        before, call, closing = _parted(_with_holes(alone, separators))
        opening, follows_text = self._opening(before, separators)
        frame = CallFrame(
            opening=opening,
            call=call,
            between=self._between(before, call, closing, separators),
            closing=closing,
            follows_text=follows_text,
            separators=separators,
        )
        _require_readable(frame)
        return frame

    def _spelled(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        """Return the spelling of a rendered chat with the known tools."""
        template = template_of(self._tokenizer, self._tools)
        try:
            chat = for_template(template, messages, tools=self._tools)
        except UnreadKey:
            raise InputRefused("the chat template does not write calls of tools") from None
        text = template.render(chat, add_generation_prompt, tools=self._tools)
        return "".join(self._spellings[index] for index in self._tokenizer.encode_rendered(text))

    def _answer(self, count: int, content: str = "") -> str:
        """Return the spelling of an answer with known calls, up to the id that ends it."""
        calls = [
            {
                "id": _IDS[number],
                "type": "function",
                "function": {"name": _NAMES[number], "arguments": json.dumps(_ARGUMENTS[number])},
            }
            for number in range(count)
        ]
        answer: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        if content:
            answer["content"] = content
        chat = self._spelled([_QUESTION, answer])
        if not chat.startswith(self._prompt):
            raise InputRefused("the chat template writes another prompt once there is an answer")
        return self._stop.split(chat[len(self._prompt) :], maxsplit=1)[0]

    def _opening(self, before: str, separators: tuple[str, str]) -> tuple[str, bool]:
        """Return what begins the calls, and whether text may stand before it.

        Args:
            before: what the template writes before a call that is the whole answer. Some templates
                begin each answer with empty thoughts, which are not part of the opening.
            separators: those of the arguments.
        """
        try:
            answer = _with_holes(self._answer(count=1, content=_CONTENT), separators)
        except InputRefused:  # some templates refuse a call beside a content
            return before, False
        after_content = answer.partition(_CONTENT)[2]
        if not after_content:  # the template leaves the content out
            return before, False
        after_content = re.split(f"[{NAME}{ARGUMENTS}{ID}]", after_content, maxsplit=1)[0]
        size = 0
        while before[-size - 1 :] == after_content[-size - 1 :] and size < len(before):
            size += 1
        opening = before[len(before) - size :].lstrip(_WHITESPACE)
        if not opening:
            raise InputRefused(
                "the chat template writes nothing before a call that tells it from text"
            )
        # White space at the beginning of an answer belongs to the opening, but not after thoughts.
        return (before if before.lstrip(_WHITESPACE) == opening else opening), True

    def _between(
        self, before: str, call: str, closing: str, separators: tuple[str, str]
    ) -> str | None:
        """Return what stands between two calls; None: the template writes only one."""
        try:
            answer = _with_holes(self._answer(count=2), separators)
        except InputRefused:
            return None
        begin, end = before + call, call + closing
        has_both = answer.startswith(begin) and answer.endswith(end)
        if not has_both or len(answer) <= len(begin) + len(end):
            return None
        between = answer[len(begin) : len(answer) - len(end)]
        return None if any(hole in between for hole in _HOLES) else between


def _json_of(number: int, separators: tuple[str, str]) -> str:
    return json.dumps(_ARGUMENTS[number], separators=separators)


def _with_holes(answer: str, separators: tuple[str, str]) -> str:
    """Return an answer with holes in the place of the names, arguments and ids."""
    for number, (name, call_id) in enumerate(zip(_NAMES, _IDS, strict=True)):
        answer = answer.replace(_json_of(number, separators), ARGUMENTS)
        answer = answer.replace(name, NAME).replace(call_id, ID)
    return answer


def _parted(answer: str) -> tuple[str, str, str]:
    """Return what stands before an answer's one call, the call, and what stands after it.

    Raises:
        InputRefused: the call does not have one name, and after it the arguments.
    """
    holes = "".join(character for character in answer if character in _HOLES)
    if holes.replace(ID, "") != NAME + ARGUMENTS:
        raise InputRefused(_UNREADABLE)
    begin = answer.index(holes[0])
    end = answer.rindex(holes[-1]) + 1
    return answer[:begin], answer[begin:end], answer[end:]


def _require_readable(frame: CallFrame) -> None:
    """Refuse a frame whose calls cannot be told apart from what stands around them."""
    after_name = frame.call.partition(NAME)[2][0]
    if _NAME_CHARACTERS.fullmatch(after_name):
        raise InputRefused("the chat template does not mark the end of a call's name")
    if not frame.trigger:
        raise InputRefused("the chat template writes nothing before a call that tells it from text")


# ── reading calls ─────────────────────────────────────────────────────────────────────────────────


class CallPiece(NamedTuple):
    """A new piece of a call.

    Attributes:
        number: the call's number in the answer, from 0.
        name: the name of the tool, in the first piece of a call; None in the others.
        arguments: further characters of the arguments.
    """

    number: int
    name: str | None
    arguments: str


class AnswerPiece(NamedTuple):
    """A new piece of an answer: further characters of its content, and pieces of its calls."""

    content: str
    calls: list[CallPiece]


class _Match(NamedTuple):
    """How a text begins with a pattern.

    Attributes:
        is_possible: whether the text begins with the pattern, or may still do so when it grows.
        end: where the pattern ends in the text; None: the text is too short.
        name: what stands in the place of NAME.
    """

    is_possible: bool
    end: int | None = None
    name: str = ""


def _match(pattern: str, text: str, begin: int) -> _Match:
    """Return how a text has a pattern, which may have the holes NAME and ID, from `begin` on."""
    position = begin
    name = ""
    for character in pattern:
        if character in (NAME, ID):
            characters = _NAME_CHARACTERS if character == NAME else _ID_CHARACTERS
            end = characters.match(text, position).end()  # type: ignore[union-attr]  # matches ""
            if character == ID:
                end = min(end, position + ID_LENGTH)
            is_complete = end < len(text) if character == NAME else end == position + ID_LENGTH
            if not is_complete:
                return _Match(is_possible=end == len(text))
            if end == position:
                return _Match(is_possible=False)
            if character == NAME:
                name = text[position:end]
            position = end
        elif position == len(text):
            return _Match(is_possible=True)
        elif text[position] != character:
            return _Match(is_possible=False)
        else:
            position += 1
    return _Match(True, position, name)


class CallReader:
    """Reads the calls in an answer, whose ids are added as they are sampled.

    What is not written like the frame is content. White space between the content and a call is left
    out.

    Attributes:
        call_count: how many calls have begun.
    """

    def __init__(self, frame: CallFrame, spelling_V: Sequence[str], lead: bytes = b"") -> None:
        """Begin an empty answer.

        Args:
            frame: how calls are written.
            spelling_V: the spelling of each token (`spellings`).
            lead: what the tokenizer inserts before the answer, and what is not part of it.
        """
        self.call_count = 0
        self._frame = frame
        self._spelling_V = spelling_V
        self._lead = lead.decode("latin-1")
        self._opening = frame.opening.lstrip(_WHITESPACE)
        self._head, self._tail = frame.call.split(ARGUMENTS)
        self._pending = ""  # the spelling that is not read yet
        self._content = ""
        self._calls: list[CallPiece] = []
        self._has_begun = False  # whether there was anything but white space
        self._is_after_call = False  # whether there was nothing but white space since a call
        self._state = self._read_content
        self._decoder = _decoder()
        # Within arguments: how many brackets are open, and whether a string is, or an escape in it.
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def add(self, ids: Iterable[int]) -> AnswerPiece:
        """Add ids; return what they make certain."""
        spelled = "".join([self._spelling_V[token_id] for token_id in ids])
        if spelled and self._lead:
            spelled = spelled.removeprefix(self._lead)
            self._lead = ""
        self._pending += spelled
        return self._read(is_final=False)

    def finish(self) -> AnswerPiece:
        """End the answer; return what was not certain before."""
        return self._read(is_final=True)

    def _read(self, *, is_final: bool) -> AnswerPiece:
        self._content = ""
        self._calls = []
        while self._state(is_final):
            pass
        if is_final:
            self._say(self._pending)
            self._pending = ""
            self._flush()
        return AnswerPiece(self._content, self._calls)

    def _read_content(self, is_final: bool) -> bool:
        """Read up to the next call; return whether another state reads on."""
        if self._is_after_call:
            self._pending = self._pending.lstrip(_WHITESPACE)
            self._is_after_call = not self._pending
        begin = self._pending.find(self._frame.trigger)
        may_follow = self._frame.follows_text or not self._has_begun
        if begin > 0 and not self._frame.follows_text and self._pending[:begin].strip(_WHITESPACE):
            may_follow = False
        if begin < 0 or not may_follow:
            kept = self._kept_size() if may_follow and not is_final else 0
            self._take_content(len(self._pending) - kept)
            return False
        match = _match(self._opening + self._head + "{", self._pending, begin)
        if match.end is not None:
            self._say(self._pending[:begin].rstrip(_WHITESPACE))
            self._begin_call(match.name, match.end)
            return True
        if match.is_possible and not is_final:
            self._take_content(len(self._pending[:begin].rstrip(_WHITESPACE)))
            return False
        self._take_content(begin + 1)  # it is no call, so it is read as content
        return True

    def _kept_size(self) -> int:
        """Return how much of the end of the pending text may belong to a call that follows."""
        trigger = self._frame.trigger
        size = min(len(trigger) - 1, len(self._pending))
        while not trigger.startswith(self._pending[len(self._pending) - size :]):
            size -= 1
        before = self._pending[: len(self._pending) - size]
        return size + len(before) - len(before.rstrip(_WHITESPACE))

    def _begin_call(self, name: str, end: int) -> None:
        """Begin a call, whose arguments begin with the brace before `end`."""
        self._flush()
        self._calls.append(CallPiece(self.call_count, name, ""))
        self.call_count += 1
        self._pending = self._pending[end - 1 :]
        self._depth = 0
        self._state = self._read_arguments

    def _read_arguments(self, is_final: bool) -> bool:
        """Read the arguments of a call; return whether another state reads on."""
        for position, character in enumerate(self._pending):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._take_arguments(position + 1)
                    self._state = self._read_end
                    return True
        self._take_arguments(len(self._pending))
        return False

    def _read_end(self, is_final: bool) -> bool:
        """Read what follows the arguments of a call; return whether another state reads on."""
        end = _match(self._tail + self._frame.closing, self._pending, 0)
        another = _Match(is_possible=False)
        if self._frame.between is not None:
            pattern = self._tail + self._frame.between + self._head + "{"
            another = _match(pattern, self._pending, 0)
        if another.end is not None:
            self._begin_call(another.name, another.end)
            return True
        if another.is_possible and not is_final:
            return False
        if end.end is None and end.is_possible:
            if is_final:  # the answer was cut off after the arguments
                self._pending = ""
            return False
        if end.end is not None:
            self._pending = self._pending[end.end :]
        self._is_after_call = True
        self._state = self._read_content
        return True

    def _take_content(self, size: int) -> None:
        self._say(self._pending[:size])
        self._pending = self._pending[size:]

    def _say(self, spelled: str) -> None:
        """Add to the content."""
        self._has_begun = self._has_begun or bool(spelled.strip(_WHITESPACE))
        self._content += self._decoder.decode(_bytes_of(spelled))

    def _take_arguments(self, size: int) -> None:
        text = self._decoder.decode(_bytes_of(self._pending[:size]))
        self._pending = self._pending[size:]
        if text:
            self._calls.append(CallPiece(self.call_count - 1, None, text))

    def _flush(self) -> None:
        """End an incomplete character, in the arguments of a call or in the content."""
        text = self._decoder.decode(b"", final=True)
        if text and self._state == self._read_arguments:
            self._calls.append(CallPiece(self.call_count - 1, None, text))
        else:
            self._content += text
        self._decoder = _decoder()


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _bytes_of(spelled: str) -> bytes:
    """Return the bytes of a spelling; special tokens have none."""
    return "".join(character for character in spelled if ord(character) < 256).encode("latin-1")
