"""Find out how a chat template writes an answer's thoughts, and separate them from the answer's content.

`find_thoughts` renders an answer with known thoughts, and returns what the template writes around them.
`AnswerReader` then reads the answers of the model.

Texts are spellings: strings that have one character below 256 for each byte, and one further character for
each special token (`monograph.text.calls`).

Shapes: V tokens of the vocabulary.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from monograph.errors import InputRefused
from monograph.text.call_reader import AnswerPiece, CallPiece, CallReader, Thought, bytes_of
from monograph.text.calls import WHITESPACE, parts_of, spellings
from monograph.text.chat import template_of
from monograph.text.messages import THOUGHTS
from monograph.text.template import Message
from monograph.text.tokenizer import Tokenizer

# The texts of the chats that are rendered. No template contains them.
_QUESTION = {"role": "user", "content": "Zqa?"}
_CONTENT = "Zqb."
_THOUGHT = "Zqr."


class AnswerPlace(Enum):
    """Where a prompt leaves an answer.

    Attributes:
        BEFORE: the answer may begin with thoughts.
        INSIDE: it begins inside thoughts.
        AFTER: its thoughts are over, or empty.
    """

    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


@dataclass(frozen=True)
class Thoughts:
    """What a chat template writes around thoughts, without white space at the ends.

    Attributes:
        begin: what stands before thoughts.
        end: what stands after them.
        content_begin: what stands before the content; "" in most templates.
    """

    begin: str
    end: str
    content_begin: str

    def place_after(self, prompt: str) -> AnswerPlace:
        """Return where a prompt, as a spelling, leaves the answer."""
        text = prompt.rstrip(WHITESPACE)
        if text.endswith(self.begin):
            return AnswerPlace.INSIDE
        before_end = text.removesuffix(self.end)
        is_empty = before_end != text and before_end.rstrip(WHITESPACE).endswith(self.begin)
        return AnswerPlace.AFTER if is_empty else AnswerPlace.BEFORE

    def grammar(self, place: AnswerPlace) -> dict[str, Any]:
        """Return this as JSON for `monograph.automata.calls`."""
        return {"begin": parts_of(self.begin), "end": parts_of(self.end), "place": place.value}


def find_thoughts(tokenizer: Tokenizer) -> Thoughts | None:
    """Return how the tokenizer's chat template writes thoughts.

    None: the template writes no thoughts, or not in a way that is understood here.

    Raises:
        InputRefused: there is no template.
    """
    template = template_of(tokenizer)
    if THOUGHTS.isdisjoint(template.words):
        return None
    spelling_V = spellings(tokenizer)

    def spelled(chat: Sequence[Message], add_generation_prompt: bool = False) -> str:
        text = template.render(chat, add_generation_prompt)
        return "".join(spelling_V[index] for index in tokenizer.encode_rendered(text))

    plain = {"role": "assistant", "content": _CONTENT}
    try:
        prompt = spelled([_QUESTION], add_generation_prompt=True)
        header = spelled([_QUESTION, plain]).partition(_CONTENT)[0]
        earlier_header = spelled([_QUESTION, plain, _QUESTION]).partition(_CONTENT)[0]
        chat = spelled([_QUESTION, plain | {"reasoning_content": _THOUGHT}])
    except InputRefused:
        return None
    before, found, after = chat.partition(_THOUGHT)
    between, has_content, _ = after.partition(_CONTENT)
    if not found or not has_content:
        return None
    # What stands before the thoughts is a header, and then `begin`. The prompt cannot be taken for the header if
    # it ends with the beginning of thoughts, nor the header of the last answer if it ends with empty thoughts.
    # The header of an earlier answer has neither, because templates leave out the thoughts of earlier answers. So
    # the longest of the three is taken that leaves something for `begin`.
    headers = (prompt, header, earlier_header)
    starts = [text for text in headers if before.startswith(text) and before != text]
    if not starts:
        return None
    begin = before[len(max(starts, key=len)) :].strip(WHITESPACE)
    content_begin = header[len(prompt) :] if header.startswith(prompt) else ""
    # If the header has empty thoughts, `content_begin` is their end and not the beginning of the content.
    if not between.endswith(content_begin) or between == content_begin:
        content_begin = ""
    end = between[: len(between) - len(content_begin)].strip(WHITESPACE)
    if not begin or not end:
        return None
    return Thoughts(begin, end, content_begin.strip(WHITESPACE))


class AnswerReader:
    """Reads an answer, whose ids are added as they are sampled: thoughts, content and calls.

    White space around thoughts is left out. The end of the answer so far is kept back while it may be the
    beginning of something else.
    """

    def __init__(
        self,
        spelling_V: Sequence[str],
        lead: bytes,
        thoughts: Thoughts | None,
        place: AnswerPlace,
        call_reader: CallReader | None,
    ) -> None:
        """Begin an empty answer.

        Args:
            spelling_V: the spelling of each token.
            lead: the space that the tokenizer inserts before the answer, which is not part of it.
            thoughts: how thoughts are written; None: there are none.
            place: where the prompt leaves the answer.
            call_reader: reads the calls in the content; None: the content has no calls.
        """
        self._spelling_V = spelling_V
        self._lead = lead.decode("latin-1")
        self._thoughts = thoughts
        self._call_reader = call_reader
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""  # the spelling that is not read yet
        self._parts: list[str | CallPiece | Thought] = []  # what `_read` has found, for its result
        self._has_thought = False  # whether the thoughts being read have a character
        self._is_after_thoughts = False
        # The method that reads the pending text: `_read_begin`, `_read_thoughts` or `_read_content`. It gets whether
        # the answer is complete. It puts another of these methods here when that one must go on. It returns True if
        # reading can go on now, and False if it has to wait for more ids.
        self._state = self._read_content
        if thoughts is not None and place is not AnswerPlace.AFTER:
            self._state = self._read_thoughts if place is AnswerPlace.INSIDE else self._read_begin

    @property
    def call_count(self) -> int:
        """How many calls have begun."""
        return 0 if self._call_reader is None else self._call_reader.call_count

    def add(self, ids: Sequence[int]) -> AnswerPiece:
        """Add ids, and return the pieces of the answer that are certain now."""
        spelled = "".join([self._spelling_V[token_id] for token_id in ids])
        if spelled and self._lead:
            spelled = spelled.removeprefix(self._lead)
            self._lead = ""
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
            if self._call_reader is not None:
                self._parts += self._call_reader.finish().parts
            self._add_text(self._decoder.decode(b"", final=True))
        return AnswerPiece(self._parts)

    def _read_begin(self, is_final: bool) -> bool:
        """Read the beginning of thoughts or of content; see `_state`."""
        assert self._thoughts is not None
        text = self._pending.lstrip(WHITESPACE)
        for begin, state in (
            (self._thoughts.begin, self._read_thoughts),
            (self._thoughts.content_begin, self._read_content),
        ):
            if begin and text.startswith(begin):
                self._pending = text[len(begin) :]
                self._state = state
                return True
            may_follow = bool(begin) and begin.startswith(text)
            if may_follow and not is_final:
                return False
        if self._is_after_thoughts:
            self._pending = text
        self._state = self._read_content
        return True

    def _read_thoughts(self, is_final: bool) -> bool:
        """Read thoughts up to their end, or as far as they are certain; see `_state`."""
        assert self._thoughts is not None
        end = self._thoughts.end
        if not self._has_thought:
            self._pending = self._pending.lstrip(WHITESPACE)
        thought, found, after = self._pending.partition(end)
        if found:
            self._add_thought(thought.rstrip(WHITESPACE))
            self._add_thought_text(self._decoder.decode(b"", final=True))
            self._decoder.reset()
            self._pending = after
            self._has_thought = False
            self._is_after_thoughts = True
            self._state = self._read_begin
            return True
        # The number of characters that may be the beginning of `end`, and so are kept back.
        kept = 0
        if not is_final:
            kept = min(len(end) - 1, len(thought))
            while not end.startswith(thought[len(thought) - kept :]):
                kept -= 1
        certain = thought[: len(thought) - kept].rstrip(WHITESPACE)
        self._add_thought(certain)
        self._pending = "" if is_final else thought[len(certain) :]
        if is_final:
            self._add_thought_text(self._decoder.decode(b"", final=True))
        return False

    def _add_thought(self, spelled: str) -> None:
        """Add a spelling to the thoughts."""
        self._has_thought = self._has_thought or bool(spelled)
        self._add_thought_text(self._decoder.decode(bytes_of(spelled)))

    def _add_thought_text(self, text: str) -> None:
        """Add a piece of thoughts to the result, unless it is empty."""
        if text:
            self._parts.append(Thought(text))

    def _read_content(self, is_final: bool) -> bool:
        """Read all of the pending text, which is content and calls; see `_state`."""
        if self._call_reader is None:
            self._add_text(self._decoder.decode(bytes_of(self._pending)))
        else:
            self._parts += self._call_reader.add_spelled(self._pending).parts
        self._pending = ""
        return False

    def _add_text(self, text: str) -> None:
        """Add a piece of content to the result, unless it is empty."""
        if text:
            self._parts.append(text)
