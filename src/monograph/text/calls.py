"""Find out how a model's chat template writes the calls of tools in an answer.

The result is a `CallFrame`. With it, `monograph.text.call_reader` reads the calls in an answer of the
model, and `monograph.automata.calls` makes the model write calls.

A frame is found by trying the template: a chat with known calls is rendered, and the names, arguments and
ids of these calls are searched for in the result. So a new family of models needs no code of its own, as
long as its template writes each call's name and then its arguments, as JSON or as fields
(`monograph.text.notation`). Some templates write no calls, but tell the model in words how to write them.
Their frames are in the table `_DESCRIBED`.

Token ids are compared by their *spelling*: a string that has one character below 256 for each byte of an
ordinary token, and one character from `SPECIAL` on for each special token. So a special token is never the
same as its letters in a text.

A *hole* is a character in a frame that stands for what differs from call to call: the name, the arguments
or the id.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from monograph.errors import InputRefused
from monograph.storage.reading import parse_json
from monograph.text.chat import template_of
from monograph.text.messages import CALLS, UnreadKey, for_template
from monograph.text.notation import Fields, NotFound, find_fields
from monograph.text.template import Message
from monograph.text.tokenizer import Tokenizer

# The character of special token i is SPECIAL + i. Neither a byte nor a hole has this character.
SPECIAL = 1 << 16
# The holes.
NAME = "\u0100"
ARGUMENTS = "\u0101"
ID = "\u0102"
_HOLES = {NAME: "name", ARGUMENTS: "arguments", ID: "id"}
# Templates that write a call's id want this number of letters and digits.
ID_LENGTH = 9
NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_-]{0,64}")
WHITESPACE = " \t\r\n"


class Call(NamedTuple):
    """A call of a tool: its name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallFrame:
    """What a chat template writes around the calls of an answer, as spellings.

    An answer with the calls c1, c2 and c3 ends with

        opening c1 between c2 between c3 closing

    where each of c1 to c3 is `call` with the call's values in the place of the holes.

    Attributes:
        opening: what stands before the first call.
        call: a call from its first to its last hole. The holes are NAME, ARGUMENTS and perhaps ID.
        between: what stands between two calls; None: the template writes one call in an answer.
        closing: what stands between the last call and the end of the answer.
        follows_text: whether the answer may have text before the calls; if not, only white space and
            special tokens may be there.
        separators: what the template writes between the members of arguments, and after their names.
        variants: other ways to write `call`, which models of the family use although the template does
            not.
        fields: how arguments are written that are not JSON; None: they are JSON.
    """

    opening: str
    call: str
    between: str | None
    closing: str
    follows_text: bool
    separators: tuple[str, str]
    variants: tuple[str, ...] = ()
    fields: Fields | None = None

    @property
    def trigger(self) -> str:
        """The beginning of `opening`, by which a call is recognised.

        It is the text before the first bracket, brace or line end of the opening, such as <tool_call>. If
        there is no such text, it is the whole opening.
        """
        opening = self.opening.lstrip(WHITESPACE)
        before_json, *_ = re.split(r"[{\[\n]", opening, maxsplit=1)
        return before_json.rstrip(WHITESPACE) or opening

    def spelling_of(self, calls: Sequence[Call]) -> str:
        """Return the spelling of an answer that has only these calls; ids are zeros."""
        texts = []
        for name, arguments in calls:
            text = self.call.replace(NAME, _bytes_as_characters(name))
            text = text.replace(ID, "0" * ID_LENGTH)
            if self.fields is None:
                written = _bytes_as_characters(arguments)
            else:
                written = self.fields.write(parse_json(arguments))
            texts.append(text.replace(ARGUMENTS, written))
        return self.opening + (self.between or "").join(texts) + self.closing

    def grammar(self) -> dict[str, Any]:
        """Return the frame as JSON for `monograph.automata.calls`."""
        return {
            "trigger": parts_of(self.trigger),
            "after_trigger": parts_of(self.opening.lstrip(WHITESPACE)[len(self.trigger) :]),
            "opening": parts_of(self.opening),
            "call": parts_of(self.call),
            "variants": [parts_of(variant) for variant in self.variants],
            "between": None if self.between is None else parts_of(self.between),
            "closing": parts_of(self.closing),
            "follows_text": self.follows_text,
            "separators": list(self.separators),
            "fields": None if self.fields is None else self.fields.grammar(parts_of),
        }


def _bytes_as_characters(text: str) -> str:
    """Return the spelling of a text without special tokens."""
    return text.encode().decode("latin-1")


def parts_of(text: str) -> list[str | int | dict[str, Any]]:
    """Return the parts of a spelling as JSON: texts, ids of special tokens, and holes.

    `monograph.automata.calls` describes parts.
    """
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


# ── templates that write no calls ─────────────────────────────────────────────────────────────────


class _DescribedCalls(NamedTuple):
    """A family whose chat template tells the model in words how to write calls, and writes none itself.

    Attributes:
        variable: the template's variable with the functions. A template that reads it is of this family.
        frame: how the model is told to write calls. Special tokens are written as their letters here.
    """

    variable: str
    frame: CallFrame


_DESCRIBED = (
    # SmolLM3
    _DescribedCalls(
        variable="xml_tools",
        frame=CallFrame(
            opening='<tool_call>\n{"name": "',
            call=f'{NAME}", "arguments": {ARGUMENTS}',
            between='}\n</tool_call>\n<tool_call>\n{"name": "',
            closing="}\n</tool_call>",
            follows_text=True,
            separators=(", ", ": "),
        ),
    ),
)


def with_tools(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[Sequence[Message], dict[str, Any]]:
    """Return the messages and variables with which the chat template renders a chat with tools.

    If the template writes no calls, the calls of a message become the end of its content.

    Args:
        tokenizer: the tokenizer, with the chat template.
        messages: the chat.
        tools: the tools that the template shows; None: the chat has none.
    """
    described = _described_calls(tokenizer)
    if described is None:
        return messages, {} if tools is None else {"tools": tools}
    variables = {}
    if tools is not None:
        variables[described.variable] = [tool["function"] for tool in tools]
    return [_with_calls_in_content(described.frame, message) for message in messages], variables


def _described_calls(tokenizer: Tokenizer) -> _DescribedCalls | None:
    """Return the entry of `_DESCRIBED` for the chat template; None if the template writes calls itself."""
    words = template_of(tokenizer).words
    if CALLS in words:
        return None
    return next((described for described in _DESCRIBED if described.variable in words), None)


def _with_calls_in_content(frame: CallFrame, message: Message) -> Message:
    """Return a message whose calls are at the end of its content, written as in the frame."""
    if CALLS not in message:
        return message
    calls = []
    for call in message[CALLS]:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(Call(function["name"], arguments))
    content = message.get("content", "")
    separator = "\n" if content else ""
    other_keys = {key: value for key, value in message.items() if key != CALLS}
    # The frame has no special tokens here, so each character of the spelling is a byte of UTF-8.
    text_of_calls = frame.spelling_of(calls).encode("latin-1").decode()
    return {**other_keys, "content": content + separator + text_of_calls}


def _with_special_tokens(frame: CallFrame, tokenizer: Tokenizer) -> CallFrame:
    """Return a frame in which the letters of special tokens are replaced by their characters in spellings."""

    def spelled(text: str) -> str:
        """Return a text in which each special token is one character."""
        for token, token_id in tokenizer.special.items():
            text = text.replace(token, chr(SPECIAL + token_id))
        return text

    return replace(
        frame,
        opening=spelled(frame.opening),
        between=None if frame.between is None else spelled(frame.between),
        closing=spelled(frame.closing),
    )


# ── finding the frame ─────────────────────────────────────────────────────────────────────────────

# The texts of the chats that are rendered. No template contains them, and none is part of another one.
_QUESTION = {"role": "user", "content": "Zqa?"}
_CONTENT = "Zqb."
_NAMES = ("zqc_first", "zqd_second")
_IDS = ("zqe000001", "zqf000002")
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"zqg": "zqh", "zqi": [1, 2]},
    {"zqj": "zqk", "zql": [3, 4]},
)
_SEPARATORS = ((", ", ": "), (",", ":"), (",", ": "), (", ", ":"))
_UNREADABLE = "the chat template does not write a call as a name with its arguments after it, in JSON or one by one"


def find_frame(tokenizer: Tokenizer, stop_ids: Iterable[int]) -> CallFrame:
    """Return what the tokenizer's chat template writes around calls.

    Args:
        tokenizer: the tokenizer, with the chat template.
        stop_ids: the ids that end an answer.

    Raises:
        InputRefused: there is no template, it does not write tools or calls, or a call is not written as
            a name with its arguments after it.
    """
    described = _described_calls(tokenizer)
    if described is not None:
        return _with_special_tokens(described.frame, tokenizer)
    return _FrameFinder(tokenizer, stop_ids).find()


class _FrameFinder:
    """Finds the frame of a chat template by rendering chats with known calls and comparing them."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._spellings = spellings(tokenizer)
        stops = [re.escape(self._spellings[stop]) for stop in stop_ids]
        # The pattern of any token that ends an answer. `(?!)` matches nothing.
        self._stop_pattern = re.compile("|".join(stops) or r"(?!)")
        parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
        self._tools = [
            {
                "type": "function",
                "function": {"name": name, "description": "Zqm.", "parameters": parameters},
            }
            for name in _NAMES
        ]
        self._prompt = self._spelled([_QUESTION], add_generation_prompt=True)
        # How the known arguments are written: as fields, or as JSON with these separators.
        self._fields: Fields | None = None
        self._separators = _SEPARATORS[0]

    def find(self) -> CallFrame:
        """Return the frame; see `find_frame`."""
        if not any(name in self._prompt for name in _NAMES):
            raise InputRefused("the chat template does not show tools to the model")
        one_call = self._answer(count=1)
        separators = next((pair for pair in _SEPARATORS if _json_of(0, pair) in one_call), None)
        if separators is None:
            self._fields = self._find_fields()
        else:
            self._separators = separators
        before, call, closing = _split_at_call(self._with_holes(one_call))
        opening, follows_text = self._opening(before)
        frame = CallFrame(
            opening=opening,
            call=call,
            between=self._between(before, call, closing),
            closing=closing,
            follows_text=follows_text,
            separators=self._separators,
            fields=self._fields,
        )
        _require_readable(frame)
        # Some templates leave out text before calls. The model may still write such text if the beginning of
        # the calls is marked by a text that is not JSON, such as <tool_call>.
        is_marked = frame.trigger[0] not in "{["
        variants = _variants(frame, self._tokenizer)
        return replace(frame, follows_text=follows_text or is_marked, variants=variants)

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

    def _answer(
        self,
        count: int,
        content: str = "",
        arguments: Sequence[Mapping[str, Any]] = _ARGUMENTS,
    ) -> str:
        """Return the spelling of an answer with known calls, up to the id that ends it."""
        calls = [
            {
                "id": _IDS[number],
                "type": "function",
                "function": {"name": _NAMES[number], "arguments": json.dumps(arguments[number])},
            }
            for number in range(count)
        ]
        answer: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        if content:
            answer["content"] = content
        chat = self._spelled([_QUESTION, answer])
        # The answer comes after the prompt, or after the header if the template writes the prompt in another way
        # once there is an answer.
        begins = [text for text in (self._prompt, self._header) if chat.startswith(text)]
        if not begins:
            raise InputRefused("the chat template writes another prompt once there is an answer")
        answer_text, *_ = self._stop_pattern.split(chat[len(begins[0]) :], maxsplit=1)
        return answer_text

    @cached_property
    def _header(self) -> str:
        """What the template writes before the content of an answer without calls.

        It may differ from the prompt: the prompt may end with the beginning of thoughts, or with empty
        thoughts, which the template does not write before an answer.
        """
        chat = self._spelled([_QUESTION, {"role": "assistant", "content": _CONTENT}])
        return chat.partition(_CONTENT)[0]

    def _find_fields(self) -> Fields:
        """Return how the template writes arguments that are not JSON."""

        def render(arguments: Mapping[str, Any]) -> str:
            """Return the spelling of an answer with one call, which has these arguments."""
            return self._answer(1, arguments=[arguments])

        try:
            return find_fields(render)
        except (NotFound, InputRefused):
            raise InputRefused(_UNREADABLE) from None

    def _with_holes(self, answer: str) -> str:
        """Return an answer with holes in the place of the names, arguments and ids."""
        for number, (name, call_id) in enumerate(zip(_NAMES, _IDS, strict=True)):
            if self._fields is None:
                arguments = _json_of(number, self._separators)
            else:
                arguments = self._fields.write(_ARGUMENTS[number])
            answer = answer.replace(arguments, ARGUMENTS)
            answer = answer.replace(name, NAME).replace(call_id, ID)
        return answer

    def _opening(self, before: str) -> tuple[str, bool]:
        """Return what begins the calls, and whether text may stand before it.

        The same call is rendered after a text. What the template writes between this text and the call
        ends like `before`, and this common ending is the opening. Some templates begin each answer with
        empty thoughts. They are in `before`, but not in the common ending.

        Args:
            before: what the template writes before a call that is the whole answer.
        """
        try:
            answer = self._with_holes(self._answer(count=1, content=_CONTENT))
        except InputRefused:  # some templates refuse an answer with both a content and a call
            return before, False
        _, _, after_content = answer.partition(_CONTENT)
        if NAME not in after_content:
            # The template leaves the content out, or writes it after the call.
            return before, False
        any_hole = f"[{NAME}{ARGUMENTS}{ID}]"
        after_text, *_ = re.split(any_hole, after_content, maxsplit=1)  # from the text to the call
        size = 0  # the number of characters of the common ending
        while size < len(before) and before[-size - 1 :] == after_text[-size - 1 :]:
            size += 1
        opening = before[len(before) - size :].lstrip(WHITESPACE)
        if not opening:
            raise InputRefused(
                "the chat template writes nothing before a call that tells it from text"
            )
        # White space before the opening belongs to it if nothing else is before it. Otherwise, e.g. after empty
        # thoughts, it does not.
        if before.lstrip(WHITESPACE) == opening:
            opening = before
        return opening, True

    def _between(self, before: str, call: str, closing: str) -> str | None:
        """Return what stands between two calls; None: the template writes only one."""
        try:
            answer = self._with_holes(self._answer(count=2))
        except InputRefused:
            return None
        begin = before + call
        end = call + closing
        has_both = answer.startswith(begin) and answer.endswith(end)
        if not has_both or len(answer) <= len(begin) + len(end):
            return None
        between = answer[len(begin) : len(answer) - len(end)]
        return None if any(hole in between for hole in _HOLES) else between


def _variants(frame: CallFrame, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the other ways to write a call that the models of a family use; see `CallFrame.variants`."""
    if frame.trigger != "to=functions.":  # only gpt-oss has other ways
        return ()
    # These models also write the function's name after the channel, and may then say that JSON follows.
    spelled = {token: chr(SPECIAL + token_id) for token, token_id in tokenizer.special.items()}
    constrain = spelled.get("<|constrain|>")
    message = spelled.get("<|message|>")
    if constrain is None or message is None:
        return ()
    before_arguments = (f"{constrain}json{message}", f" {constrain}json{message}", message)
    return tuple(NAME + before + ARGUMENTS for before in before_arguments)


def _json_of(number: int, separators: tuple[str, str]) -> str:
    """Return the arguments of a known call as JSON."""
    return json.dumps(_ARGUMENTS[number], separators=separators)


def _split_at_call(answer: str) -> tuple[str, str, str]:
    """Return what stands before an answer's one call, the call from hole to hole, and what stands after it.

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
    _, _, after_name = frame.call.partition(NAME)
    if NAME_CHARACTERS.fullmatch(after_name[0]):
        raise InputRefused("the chat template does not mark the end of a call's name")
    if not frame.trigger:
        raise InputRefused("the chat template writes nothing before a call that tells it from text")
