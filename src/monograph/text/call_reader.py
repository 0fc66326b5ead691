"""Read the calls of tools in an answer while it is written."""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from monograph.text.calls import (
    ARGUMENTS,
    ID,
    ID_LENGTH,
    NAME,
    NAME_CHARACTERS,
    WHITESPACE,
    CallFrame,
)

_ID_CHARACTERS = re.compile(r"[A-Za-z0-9]*")


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
            characters = NAME_CHARACTERS if character == NAME else _ID_CHARACTERS
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


def message_of(
    ids: Sequence[int], frame: CallFrame, spelling_V: Sequence[str], lead: bytes = b""
) -> dict[str, Any]:
    """Return an answer as a message of a chat, with its calls.

    Args:
        ids: the whole answer, without the id that ends it.
        frame: how calls are written.
        spelling_V: the spelling of each token (`spellings`).
        lead: see `CallReader`.

    Returns:
        {"role": "assistant", "content": ..., "tool_calls": [{"name": ..., "arguments": ...}, ...]}. The
        arguments are an object, or what is written if that is no JSON. "tool_calls" may be empty.
    """
    reader = CallReader(frame, spelling_V, lead)
    pieces = [reader.add(ids), reader.finish()]
    calls: list[dict[str, Any]] = []
    for piece in (call for answer in pieces for call in answer.calls):
        if piece.name is not None:
            calls.append({"name": piece.name, "arguments": ""})
        calls[piece.number]["arguments"] += piece.arguments
    for call in calls:
        with suppress(ValueError):
            call["arguments"] = json.loads(call["arguments"])
    content = "".join(answer.content for answer in pieces)
    return {"role": "assistant", "content": content, "tool_calls": calls}


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
        self._opening = frame.opening.lstrip(WHITESPACE)
        self._tail = frame.call.split(ARGUMENTS)[1]
        self._heads = [form.split(ARGUMENTS)[0] for form in (frame.call, *frame.variants)]
        self._pending = ""  # the spelling that is not read yet
        self._content = ""
        self._calls: list[CallPiece] = []
        self._has_begun = False  # whether there was any text but white space
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
            self._pending = self._pending.lstrip(WHITESPACE)
            self._is_after_call = not self._pending
        begin = self._pending.find(self._frame.trigger)
        may_follow = self._frame.follows_text or not self._has_begun
        if begin > 0 and not self._frame.follows_text and _has_text(self._pending[:begin]):
            may_follow = False
        if begin < 0 or not may_follow:
            kept = self._kept_size() if may_follow and not is_final else 0
            self._take_content(len(self._pending) - kept)
            return False
        match = self._match_head(self._opening, begin)
        if match.end is not None:
            self._say(self._pending[:begin].rstrip(WHITESPACE))
            self._begin_call(match.name, match.end)
            return True
        if match.is_possible and not is_final:
            self._take_content(len(self._pending[:begin].rstrip(WHITESPACE)))
            return False
        self._take_content(begin + 1)  # it is no call, so it is read as content
        return True

    def _match_head(self, before: str, begin: int) -> _Match:
        """Return how the pending text has `before` and then a call up to its arguments, in any form."""
        is_possible = False
        for head in self._heads:
            match = _match(before + head + "{", self._pending, begin)
            if match.end is not None:
                return match
            is_possible = is_possible or match.is_possible
        return _Match(is_possible)

    def _kept_size(self) -> int:
        """Return how much of the end of the pending text may belong to a call that follows."""
        trigger = self._frame.trigger
        size = min(len(trigger) - 1, len(self._pending))
        while not trigger.startswith(self._pending[len(self._pending) - size :]):
            size -= 1
        before = self._pending[: len(self._pending) - size]
        return size + len(before) - len(before.rstrip(WHITESPACE))

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
            another = self._match_head(self._tail + self._frame.between, 0)
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
        self._has_begun = self._has_begun or _has_text(spelled)
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


def _has_text(spelled: str) -> bool:
    """Return whether a spelling has more than white space and special tokens."""
    return bool(_bytes_of(spelled).strip())


def _bytes_of(spelled: str) -> bytes:
    """Return the bytes of a spelling; special tokens have none."""
    return "".join(character for character in spelled if ord(character) < 256).encode("latin-1")
