"""Read the calls of tools in an answer while it is written.

Texts are mostly *spellings*, strings that have one character below 256 for each byte, and one further
character for each special token. A *hole* is a character of a pattern that stands for what differs from
call to call: a tool's name, an id, or arguments. `monograph.text.calls` describes both.

Shapes: V tokens of the vocabulary.
"""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from monograph.storage.reading import parse_json
from monograph.text.calls import (
    ARGUMENTS,
    ID,
    ID_LENGTH,
    NAME,
    NAME_CHARACTERS,
    WHITESPACE,
    CallFrame,
)
from monograph.text.field_reader import ArgumentTypes, FieldReader

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


class Thought(NamedTuple):
    """Further characters of an answer's thoughts."""

    text: str


class AnswerPiece(NamedTuple):
    """A new piece of an answer.

    Attributes:
        parts: further characters of the content, pieces of calls, and thoughts, in the order in which they
            stand.
    """

    parts: list[str | CallPiece | Thought]

    @property
    def content(self) -> str:
        """The further characters of the content."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallPiece]:
        """The pieces of calls."""
        return [part for part in self.parts if isinstance(part, CallPiece)]


class _Match(NamedTuple):
    """Whether a growing text has a pattern at some position.

    Attributes:
        is_possible: whether the text has the pattern there, or may still have it when it grows.
        end: where the pattern ends in the text; None: the text does not have the whole pattern.
        name: what is in the text in the place of the hole NAME.
    """

    is_possible: bool
    end: int | None = None
    name: str = ""


def _match(pattern: str, text: str, begin: int) -> _Match:
    """Return whether a text has a pattern from `begin` on. The pattern may have the holes NAME and ID."""
    position = begin
    name = ""
    for character in pattern:
        if character == NAME:
            end = _end_of_run(NAME_CHARACTERS, text, position)
            if end == len(text):  # the name may become longer
                return _Match(is_possible=True)
            if end == position:  # there is no name
                return _Match(is_possible=False)
            name = text[position:end]
            position = end
        elif character == ID:
            end = _end_of_run(_ID_CHARACTERS, text, position)
            if end < position + ID_LENGTH:
                # The id is too short. At the end of the text it may become longer.
                return _Match(is_possible=end == len(text))
            position += ID_LENGTH
        elif position == len(text):
            return _Match(is_possible=True)
        elif text[position] != character:
            return _Match(is_possible=False)
        else:
            position += 1
    return _Match(True, position, name)


def _end_of_run(characters: re.Pattern[str], text: str, begin: int) -> int:
    """Return where the run of these characters ends that begins at `begin`; it may be empty."""
    run = characters.match(text, begin)
    assert run is not None  # the pattern matches the empty text
    return run.end()


def message_of(
    ids: Sequence[int],
    frame: CallFrame,
    spelling_V: Sequence[str],
    lead: bytes = b"",
    types: Mapping[str, ArgumentTypes] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return an answer as a message of a chat, with its calls.

    Args:
        ids: the whole answer, without the id that ends it.
        frame: how calls are written.
        spelling_V: the spelling of each token (`spellings`).
        lead: see `CallReader`.
        types: see `CallReader`.

    Returns:
        {"role": "assistant", "content": ..., "tool_calls": [{"name": ..., "arguments": ...}, ...]}. The
        arguments are the value of their JSON, or the text itself if it is not JSON. "tool_calls" may be
        empty.
    """
    reader = CallReader(frame, spelling_V, lead, types)
    answer_pieces = [reader.add(ids), reader.finish()]
    calls: list[dict[str, Any]] = []
    for answer_piece in answer_pieces:
        for call_piece in answer_piece.calls:
            if call_piece.name is not None:
                calls.append({"name": call_piece.name, "arguments": ""})
            calls[call_piece.number]["arguments"] += call_piece.arguments
    for call in calls:
        # Text that is not JSON, or is nested too deeply, stays as it is.
        with suppress(ValueError, RecursionError):
            call["arguments"] = parse_json(call["arguments"])
    content = "".join(answer_piece.content for answer_piece in answer_pieces)
    return {"role": "assistant", "content": content, "tool_calls": calls}


class CallReader:
    """Reads the calls in an answer, whose ids are added as they are sampled.

    Everything that is not written as the frame says is content. White space between the content and a call
    is left out. The end of the answer so far is kept back while it may be the beginning of a call.

    Attributes:
        call_count: how many calls have begun.
    """

    def __init__(
        self,
        frame: CallFrame,
        spelling_V: Sequence[str],
        lead: bytes = b"",
        types: Mapping[str, ArgumentTypes] = MappingProxyType({}),
    ) -> None:
        """Begin an empty answer.

        Args:
            frame: how calls are written.
            spelling_V: the spelling of each token (`spellings`).
            lead: the space that the tokenizer inserts before the answer, which is not part of it.
            types: for each tool the types that its arguments may have. They matter only if the frame has
                fields.
        """
        self.call_count = 0
        self._frame = frame
        self._spelling_V = spelling_V
        self._lead = lead.decode("latin-1")
        # The opening from its trigger on. White space before it is handled apart.
        self._opening = frame.opening.lstrip(WHITESPACE)
        # What a call has before and after its arguments.
        self._heads = [form.split(ARGUMENTS)[0] for form in (frame.call, *frame.variants)]
        self._tail = frame.call.split(ARGUMENTS)[1]
        # What may stand after the arguments: the closing, or the text up to another call.
        self._ends = [self._tail + frame.closing]
        if frame.between is not None:
            self._ends.append(self._tail + frame.between)
        # What may stand where the arguments begin. Where arguments are fields, it is the text before the first
        # field or, in a call without arguments, what stands after arguments.
        self._begins = ["{"] if frame.fields is None else [frame.fields.before, *self._ends]
        self._types = types
        self._field_reader: FieldReader | None = None
        self._pending = ""  # the spelling that is not read yet
        # What `_read` has found, for its result.
        self._parts: list[str | CallPiece | Thought] = []
        self._has_begun = False  # whether there was any text other than white space
        self._is_after_call = False  # whether there was nothing but white space since a call
        # The method that reads the pending text: `_read_content`, `_read_arguments`, `_read_fields` or
        # `_read_end`. It gets whether the answer is complete. It puts another of these methods here when that one
        # must go on. It returns True if reading can go on now, and False if it has to wait for more ids.
        self._state = self._read_content
        self._decoder = _decoder()
        # Within arguments: the number of open brackets and braces, whether a string is open, and whether the
        # next character of the string is escaped by a backslash.
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def add(self, ids: Iterable[int]) -> AnswerPiece:
        """Add ids, and return the pieces of the answer that are certain now."""
        spelled = "".join([self._spelling_V[token_id] for token_id in ids])
        if spelled and self._lead:
            spelled = spelled.removeprefix(self._lead)
            self._lead = ""
        return self.add_spelled(spelled)

    def add_spelled(self, spelled: str) -> AnswerPiece:
        """Add the spelling of ids, and return the pieces of the answer that are certain now."""
        self._pending += spelled
        return self._read(is_final=False)

    def finish(self) -> AnswerPiece:
        """End the answer, and return the pieces that were kept back."""
        return self._read(is_final=True)

    def _read(self, *, is_final: bool) -> AnswerPiece:
        """Return the pieces that are certain; `is_final`: no more ids follow."""
        self._parts = []
        while self._state(is_final):
            pass
        if is_final:
            self._take_content(len(self._pending))
            self._flush_decoder()
        return AnswerPiece(self._parts)

    def _read_content(self, is_final: bool) -> bool:
        """Read up to the next call; see `_state`."""
        if self._is_after_call:
            # White space after a call is left out, also if it comes in several pieces.
            self._pending = self._pending.lstrip(WHITESPACE)
            self._is_after_call = not self._pending
        trigger_begin = self._pending.find(self._frame.trigger)
        if self._frame.follows_text:
            may_be_call = True
        else:
            # In this frame, a call can only be the first text of an answer.
            text_before = self._pending[:trigger_begin] if trigger_begin > 0 else ""
            may_be_call = not self._has_begun and not _has_text(text_before)
        if trigger_begin < 0 or not may_be_call:
            kept_size = self._kept_size() if may_be_call and not is_final else 0
            self._take_content(len(self._pending) - kept_size)
            return False
        content_size = len(self._pending[:trigger_begin].rstrip(WHITESPACE))
        match = self._match_head(self._opening, trigger_begin)
        if match.end is not None:
            self._add_content(self._pending[:content_size])
            self._begin_call(match.name, match.end)
            return True
        if match.is_possible and not is_final:
            self._take_content(content_size)
            return False
        # No call begins at the trigger. So its first character is content, and the search goes on after it.
        self._take_content(trigger_begin + 1)
        return True

    def _match_head(self, before: str, begin: int) -> _Match:
        """Return whether the pending text has, from `begin` on, `before` and a call up to its arguments.

        The call may be written in any form. The match ends where the arguments begin.
        """
        is_possible = False
        for head in self._heads:
            match = _match(before + head, self._pending, begin)
            if match.end is None:
                is_possible = is_possible or match.is_possible
                continue
            # The arguments must begin after the head.
            for begin_of_arguments in self._begins:
                next_match = _match(begin_of_arguments, self._pending, match.end)
                if next_match.end is not None:
                    return match
                is_possible = is_possible or next_match.is_possible
        return _Match(is_possible)

    def _kept_size(self) -> int:
        """Return how many characters at the end of the pending text may belong to a call that follows.

        They are the longest ending that is a beginning of the trigger, and the white space before it.
        """
        trigger = self._frame.trigger
        trigger_size = min(len(trigger) - 1, len(self._pending))
        while not trigger.startswith(self._pending[len(self._pending) - trigger_size :]):
            trigger_size -= 1
        before = self._pending[: len(self._pending) - trigger_size]
        certain_size = len(before.rstrip(WHITESPACE))
        return len(self._pending) - certain_size

    def _begin_call(self, name: str, end: int) -> None:
        """Begin a call of the tool `name`; its arguments begin at `end` in the pending text."""
        self._flush_decoder()
        self._parts.append(CallPiece(self.call_count, name, ""))
        self.call_count += 1
        self._pending = self._pending[end:]
        fields = self._frame.fields
        if fields is None:
            self._depth = 0
            self._state = self._read_arguments
        else:
            self._field_reader = FieldReader(fields, self._types.get(name, {}), self._ends)
            self._state = self._read_fields

    def _read_arguments(self, is_final: bool) -> bool:
        """Read the arguments of a call, up to the brace that closes them; see `_state`."""
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

    def _read_fields(self, is_final: bool) -> bool:
        """Read the arguments of a call that are fields; see `_state`."""
        assert self._field_reader is not None
        arguments, size = self._field_reader.read(self._pending)
        self._pending = self._pending[size:]
        if arguments:
            self._parts.append(CallPiece(self.call_count - 1, None, arguments))
        if self._field_reader.is_done:
            self._state = self._read_end
            return True
        if is_final:  # the answer was cut off within a field
            self._pending = ""
        return False

    def _read_end(self, is_final: bool) -> bool:
        """Read what follows the arguments of a call: another call, or the closing; see `_state`."""
        another_call = _Match(is_possible=False)
        if self._frame.between is not None:
            another_call = self._match_head(self._tail + self._frame.between, 0)
        if another_call.end is not None:
            self._begin_call(another_call.name, another_call.end)
            return True
        if another_call.is_possible and not is_final:
            return False
        closing = _match(self._tail + self._frame.closing, self._pending, 0)
        if closing.end is None and closing.is_possible:
            if is_final:  # the answer was cut off after the arguments
                self._pending = ""
            return False
        # Skip the closing. If the model has not written it, what it has written is content.
        if closing.end is not None:
            self._pending = self._pending[closing.end :]
        self._is_after_call = True
        self._state = self._read_content
        return True

    def _take_content(self, size: int) -> None:
        """Move the first characters of the pending text to the content."""
        self._add_content(self._pending[:size])
        self._pending = self._pending[size:]

    def _add_content(self, spelled: str) -> None:
        """Add a spelling to the content."""
        self._has_begun = self._has_begun or _has_text(spelled)
        self._add_text(self._decoder.decode(bytes_of(spelled)))

    def _add_text(self, text: str) -> None:
        """Add a piece of content to the result, unless it is empty."""
        if text:
            self._parts.append(text)

    def _take_arguments(self, size: int) -> None:
        """Move the first characters of the pending text to the arguments of the last call."""
        text = self._decoder.decode(bytes_of(self._pending[:size]))
        self._pending = self._pending[size:]
        if text:
            self._parts.append(CallPiece(self.call_count - 1, None, text))

    def _flush_decoder(self) -> None:
        """End the text of the decoder: an unfinished character becomes U+FFFD in the arguments or content."""
        text = self._decoder.decode(b"", final=True)
        if text and self._state == self._read_arguments:
            self._parts.append(CallPiece(self.call_count - 1, None, text))
        else:
            self._add_text(text)
        self._decoder = _decoder()


def _decoder() -> codecs.IncrementalDecoder:
    """Return a decoder of UTF-8 that gets its bytes piece by piece."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _has_text(spelled: str) -> bool:
    """Return whether a spelling has more than white space and special tokens."""
    return bool(bytes_of(spelled).strip())


def bytes_of(spelled: str) -> bytes:
    """Return the bytes of a spelling; special tokens have none."""
    return "".join(character for character in spelled if ord(character) < 256).encode("latin-1")
