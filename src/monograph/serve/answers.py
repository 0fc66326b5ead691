"""Writes answers in the form of OpenAI's completions and chats, and sends answers of any form.

An answer has several *texts*, which the protocol calls choices. A *piece* is what is new in one text
since its last piece. A stream sends the pieces one by one; a whole answer joins those of each text.
`monograph.serve.responses_answer` and `monograph.serve.messages_answer` write answers in other forms.
"""

import codecs
import json
import secrets
import string
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.types import Scope, Send

from monograph.decode.request import Event, LogProbability
from monograph.decode.transcript import Transcript
from monograph.evaluation.choices import TokenScore
from monograph.serve import shapes
from monograph.serve.owner import ServedText
from monograph.serve.refused import Refused, error_body
from monograph.serve.requests import AnyTextRequest
from monograph.serve.versions import ServedModel
from monograph.text.call_reader import CallPiece, Thought
from monograph.text.calls import ID_LENGTH
from monograph.text.thoughts import AnswerReader
from monograph.text.tokenizer import Tokenizer

_COMMON_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


async def send_error(scope: Scope, send: Send, refused: Refused) -> None:
    """Answer with an error, in the form of the protocol to which the address belongs."""
    body = as_json(error_body(refused, scope["path"]))
    await send_body(send, body, status=refused.status, headers=refused.headers)


async def send_json(send: Send, value: object) -> None:
    """Answer with a JSON value."""
    await send_body(send, as_json(value))


async def send_body(
    send: Send, body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """Answer with a whole body of JSON."""
    own_headers = {"content-type": "application/json", "content-length": str(len(body))}
    await _send_start(send, status, own_headers | (headers or {}))
    await send({"type": "http.response.body", "body": body})


class EventStream:
    """An answer that is a stream of server-sent events."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self) -> None:
        """Send the status and the headers."""
        # The last header keeps a proxy from collecting events before it passes them on.
        headers = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}
        await _send_start(self._send, 200, headers)

    async def send(self, events: Sequence[bytes]) -> None:
        """Send events, each as `event` has made it."""
        await self._send_chunk(b"".join(events))

    async def ping(self) -> None:
        """Send a comment, so that no proxy closes the connection as dead."""
        await self._send_chunk(b": ping\n\n")

    async def end(self, events: Sequence[bytes]) -> None:
        """Send the last events, and end the stream."""
        await self._send({"type": "http.response.body", "body": b"".join(events)})

    async def _send_chunk(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


def event(value: bytes, kind: str = "") -> bytes:
    """Return the server-sent event with this JSON value, and with the name of its kind if there is one."""
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + value + b"\n\n"


async def _send_start(send: Send, status: int, headers: dict[str, str]) -> None:
    """Send the status, and these headers in addition to those of all answers."""
    all_headers = _COMMON_HEADERS | headers
    pairs = [(name.lower().encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


def as_json(value: object) -> bytes:
    """Return a value as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class ScoredToken(NamedTuple):
    """An entry of an answer's log-probabilities: a token, with the log-probabilities at its position.

    Attributes:
        token: the token's id.
        offset: the number of characters before the token.
        logprob: ln p of the token; None for the first token of a prompt, which has no score.
        likeliest: (id, ln p) of the likeliest tokens at its position.
    """

    token: int
    offset: int
    logprob: float | None
    likeliest: Sequence[tuple[int, float]]


class TextPiece(NamedTuple):
    """What is new in a text.

    Attributes:
        text_index: the text's number in the answer.
        parts: new characters, new thoughts, and new pieces of tool calls, in the order in which they were
            written.
        entries: an entry for each new token, if the answer has log-probabilities, else empty.
        finish: how the text ended; None if it has not ended.
        calls_tools: whether the text has called a tool, in this piece or in an earlier one.
        stopped_by: the stop string that has ended the text; "" if none has.
    """

    text_index: int
    parts: Sequence[str | CallPiece | Thought]
    entries: list[ScoredToken]
    finish: shapes.ServedFinish | None
    calls_tools: bool = False
    stopped_by: str = ""

    @property
    def text(self) -> str:
        """The new characters, without those of calls and thoughts."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def thoughts(self) -> str:
        """The new characters of thoughts."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> list[CallPiece]:
        """The new pieces of calls."""
        return [part for part in self.parts if isinstance(part, CallPiece)]


def joined(pieces: Sequence[TextPiece]) -> TextPiece:
    """Return all pieces of a text as one; the last one has ended it."""
    return pieces[-1]._replace(
        parts=[part for piece in pieces for part in piece.parts],
        entries=[entry for piece in pieces for entry in piece.entries],
    )


class TextBuilder:
    """Makes the pieces of a text from the decoder's events.

    A piece has only characters that further tokens cannot change or remove. An incomplete character is held
    back, and so is what may be the beginning of a stop string. The entries of their tokens are held back
    with them.

    Attributes:
        token_count: the number of tokens that were sampled so far.
    """

    def __init__(
        self,
        text: ServedText,
        stop: Sequence[str],
        likeliest_count: int | None,
        *,
        reports_end: bool = True,
        echo: str = "",
        reader: AnswerReader | None = None,
    ):
        """Begin an empty text.

        Args:
            text: the text.
            stop: the strings before which the text ends.
            likeliest_count: how many of the likeliest tokens are reported at the position of each token;
                None: the answer has no log-probabilities.
            reports_end: whether a stop id (a token that ends the text) has an entry, too.
            echo: the prompt's characters, if the answer repeats them before the text.
            reader: reads the thoughts and calls in the text; None: there are none.
        """
        prompt_ids = text.request.prompt_ids
        self._tokenizer = text.version.tokenizer
        self._unreported_ids = () if reports_end else text.request.stop_ids
        self._transcript = Transcript(self._tokenizer, stop, prompt_ids)
        self._reader = reader
        self._stop_ids = text.request.stop_ids
        self._index = text.index
        self._likeliest_count = likeliest_count
        # Entries that are held back, each with the number of bytes before its token.
        self._uncertain_entries: list[tuple[int, ScoredToken]] = []
        self._byte_count = 0  # the bytes of all tokens so far
        self._offsets = CharacterOffsets(self._tokenizer.inserted_space(prompt_ids), len(echo))
        self.token_count = 0

    def add(self, event: Event) -> TextPiece:
        """Add an event's tokens; return the piece of the text that is certain now."""
        self.token_count += len(event.token_ids)
        new_text = self._transcript.add(event.token_ids)
        if event.finish is not None:
            new_text += self._transcript.finish()
        parts: list[str | CallPiece | Thought] = [new_text] if new_text else []
        calls_tools = False
        if self._reader is not None:
            # The text of the reader replaces that of the transcript, which contains the calls and thoughts
            # as well. The transcript is still needed: its size decides which entries are held back.
            parts = self._read_parts(self._reader, event)
            calls_tools = self._reader.call_count > 0
        if self._likeliest_count is not None:
            for token, logprobs in zip(event.token_ids, event.logprobs, strict=True):
                self._add_entry(token, logprobs, self._likeliest_count)
        if event.finish is None:
            return TextPiece(self._index, parts, self._take_certain_entries(), None, calls_tools)
        # The other finishes of the decoder are errors. The request has failed then, and does not get here.
        finish: shapes.ServedFinish = "stop" if event.finish == "stop" else "length"
        if finish == "stop" and self._uncertain_entries:
            # Remove the entry of the stop id that has ended the text, if it is not reported.
            _, last = self._uncertain_entries[-1]
            if last.token in self._unreported_ids:
                self._uncertain_entries.pop()
        entries = self._take_certain_entries()
        stopped_by = self._transcript.stopped_by
        return TextPiece(self._index, parts, entries, finish, calls_tools, stopped_by)

    def _read_parts(self, reader: AnswerReader, event: Event) -> list[str | CallPiece | Thought]:
        """Return the new characters, thoughts and pieces of calls, in their order."""
        ids = event.token_ids
        if ids and ids[-1] in self._stop_ids:  # a stop id is not part of the text
            ids = ids[:-1]
        parts = reader.add(ids).parts
        if event.finish is not None:
            parts = parts + reader.finish().parts
        return parts

    def _add_entry(self, token: int, logprobs: LogProbability, likeliest_count: int) -> None:
        """Add the entry of a token to those that are held back."""
        token_bytes = self._tokenizer.pieces[token]
        offset = self._offsets.add(token_bytes)
        entry = ScoredToken(token, offset, logprobs.drawn, logprobs.likeliest[:likeliest_count])
        self._uncertain_entries.append((self._byte_count, entry))
        self._byte_count += len(token_bytes)

    def _take_certain_entries(self) -> list[ScoredToken]:
        """Remove and return the entries of tokens that begin in the part of the text that is certain.

        A token without bytes, such as a special one, is also returned if it is at the end of that part.
        """
        certain_bytes = self._transcript.size
        # Entries are in the order of the text, so those to return are the first ones.
        certain_count = 0
        for begin, entry in self._uncertain_entries:
            has_no_bytes = not self._tokenizer.pieces[entry.token]
            if begin < certain_bytes or (begin == certain_bytes and has_no_bytes):
                certain_count += 1
        certain = self._uncertain_entries[:certain_count]
        self._uncertain_entries = self._uncertain_entries[certain_count:]
        return [entry for _, entry in certain]


class CharacterOffsets:
    """Counts the characters before each token of a text, whose tokens are added one by one.

    A character whose bytes are in several tokens is counted at the last of them. Bytes that are not
    UTF-8 are counted as U+FFFD, the replacement character.
    """

    def __init__(self, lead: bytes, count: int = 0) -> None:
        """Begin after `count` characters.

        Args:
            lead: bytes that the tokenizer adds at the beginning of the first token, and that are not
                part of the text.
            count: the number of characters before the first token.
        """
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._lead = lead
        self._count = count

    def add(self, token_bytes: bytes) -> int:
        """Return the number of characters before a token, and count the token's own."""
        offset = self._count
        # The first bytes of a character that earlier tokens have begun. It is not counted yet, since the
        # decoder returns only whole characters.
        incomplete, _ = self._decoder.getstate()
        text_bytes = bytes(token_bytes)
        if text_bytes:
            text_bytes = text_bytes.removeprefix(self._lead)
            self._lead = b""
            self._count += len(self._decoder.decode(text_bytes))
        # An ASCII byte never continues a character. If the token begins with one, the incomplete
        # character ends as U+FFFD before the token.
        begins_with_ascii = text_bytes[:1].isascii() and text_bytes[:1] != b""
        if begins_with_ascii:
            offset += len(incomplete.decode(errors="replace"))
        return offset


def prompt_entries(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenScore]
) -> list[ScoredToken]:
    """Return the entries of a prompt's tokens; the first token has no score."""
    offsets = CharacterOffsets(tokenizer.inserted_space(ids[:1]))
    no_score = (None, ())
    entries = []
    for token, (logprob, likeliest) in zip(ids, [no_score, *scores], strict=True):
        offset = offsets.add(tokenizer.pieces[token])
        entries.append(ScoredToken(token, offset, logprob, likeliest))
    return entries


def token_text(tokenizer: Tokenizer, token: int) -> str:
    r"""Return the text of a token.

    A special token has its name. Bytes that are not UTF-8 are written as `bytes:\xf0`.
    """
    token_bytes = bytes(tokenizer.pieces[token])
    if not token_bytes:
        for name, index in tokenizer.special.items():
            if index == token:
                return name
        return f"token_id:{token}"
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class AnswerBuilder(ABC):
    """Makes the JSON of the answer to one request, or the events of a stream."""

    @abstractmethod
    def whole_json(self, texts: Sequence[Sequence[TextPiece]], usage: shapes.Usage) -> bytes:
        """Return the whole answer.

        Args:
            texts: all pieces of each text.
            usage: the tokens of the request.
        """

    @abstractmethod
    def first_events(self, text_count: int, prompt_tokens: int) -> list[bytes]:
        """Return the events before the first token of any text.

        Args:
            text_count: how many texts the answer has.
            prompt_tokens: how many tokens the prompts have.
        """

    @abstractmethod
    def piece_events(self, piece: TextPiece) -> list[bytes]:
        """Return the events of a piece."""

    @abstractmethod
    def last_events(self, usage: shapes.Usage) -> list[bytes]:
        """Return the events after the last piece, which tell the client that the answer is complete."""

    @abstractmethod
    def error_event(self, refused: Refused) -> bytes:
        """Return the event of an error that has ended the stream."""


class CompletionAnswerBuilder(AnswerBuilder):
    """Makes the answer to one request for completions."""

    # How the protocol names the object of a whole answer and that of an event, and the prefix of the
    # answer's id.
    whole_name = "text_completion"
    event_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, model: ServedModel, request: AnyTextRequest) -> None:
        """Begin an answer of a model to a request."""
        self._tokenizer = model.version.tokenizer
        self._likeliest_count = request.likeliest_count
        self._wants_usage = request.wants_usage
        # An event's JSON up to the value of "choices", which is the same in all events of a stream.
        self._event_head = b""
        self._fields: dict[str, Any] = {
            "id": self.id_prefix + uuid.uuid4().hex,
            "object": self.whole_name,
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": model.fingerprint,
            "seed": request.sampling.seed,
        }

    def whole_json(self, texts: Sequence[Sequence[TextPiece]], usage: shapes.Usage) -> bytes:
        """Return the whole answer; see the base class."""
        # The choices are serialised one by one, because no other thread can run during a call of `json`, and
        # one call for all choices would take long.
        choices = b",".join([as_json(self._choice(joined(pieces))) for pieces in texts])
        head = as_json(self._fields)[:-1]  # without the closing brace
        return head + b',"choices":[' + choices + b'],"usage":' + as_json(usage) + b"}"

    def first_events(self, text_count: int, prompt_tokens: int) -> list[bytes]:
        """Return no events."""
        return []

    def piece_events(self, piece: TextPiece) -> list[bytes]:
        """Return one event."""
        return [self._piece_event(piece)]

    def last_events(self, usage: shapes.Usage) -> list[bytes]:
        """Return an event that has the usage and no choices, if the client wants it, and [DONE]."""
        events = [event(b"[DONE]")]
        if self._wants_usage:
            events.insert(0, self._event(b"[]", b',"usage":' + as_json(usage)))
        return events

    def error_event(self, refused: Refused) -> bytes:
        """Return the event of an error."""
        return event(as_json(error_body(refused)))

    def _piece_event(self, piece: TextPiece) -> bytes:
        # If the client wants the usage, only the event before [DONE] has it. In all others it is null.
        usage = b',"usage":null' if self._wants_usage else b""
        return self._event(as_json([self._event_choice(piece)]), usage)

    def _event(self, choices: bytes, usage: bytes) -> bytes:
        if not self._event_head:
            fields = self._fields | {"object": self.event_name}
            head = as_json(fields)[:-1]  # without the closing brace
            self._event_head = head + b',"choices":'
        return event(self._event_head + choices + usage + b"}")

    def _choice(self, piece: TextPiece) -> Mapping[str, Any]:
        return self._completion_choice(piece)

    def _event_choice(self, piece: TextPiece) -> Mapping[str, Any]:
        return self._completion_choice(piece)

    def _completion_choice(self, piece: TextPiece) -> shapes.CompletionPieceChoice:
        logprobs = None if self._likeliest_count is None else self._logprobs(piece.entries)
        return {
            "index": piece.text_index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
        }

    def _logprobs(self, entries: Sequence[ScoredToken]) -> shapes.CompletionLogprobs:
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.logprob is None:
                token_logprobs.append(None)
                top_logprobs.append(None)
            else:
                token_logprobs.append(_finite(entry.logprob))
                top_logprobs.append(self._likeliest_by_text(entry))
        return {
            "tokens": [self._token_text(entry.token) for entry in entries],
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": [entry.offset for entry in entries],
        }

    def _likeliest_by_text(self, entry: ScoredToken) -> dict[str, float]:
        """Return ln p of the likeliest tokens and of the sampled one, by their texts."""
        by_token = dict(entry.likeliest)
        by_token[entry.token] = entry.logprob or 0.0  # `or` only for the type: it is not None here
        by_text: dict[str, float] = {}
        for token, logprob in by_token.items():
            text = self._token_text(token)
            if text in by_text:  # two tokens may have the same text
                text = f"token_id:{token}"
            by_text[text] = _finite(logprob)
        return by_text

    def _token_text(self, token: int) -> str:
        return token_text(self._tokenizer, token)


class ChatAnswerBuilder(CompletionAnswerBuilder):
    """Makes the answer to one request of a chat."""

    whole_name = "chat.completion"
    event_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def first_events(self, text_count: int, prompt_tokens: int) -> list[bytes]:
        """Return an event for each text, with the speaker's role."""
        # For an empty piece, `_event_choice` writes the role.
        return [self._piece_event(TextPiece(index, [], [], None)) for index in range(text_count)]

    def piece_events(self, piece: TextPiece) -> list[bytes]:
        """Return events for the new thoughts and the new text, and then one for each piece of a call.

        The last event has the finish. If nothing is new there is no event, because an empty piece would be
        sent as the role.
        """
        split: list[TextPiece] = []
        thoughts = piece.thoughts
        if thoughts:
            entries = [] if piece.text else piece.entries
            split.append(piece._replace(parts=[Thought(thoughts)], entries=entries, finish=None))
        # If there is nothing but a finish, it is sent with an empty text.
        is_finish_alone = piece.finish is not None and not piece.calls and not thoughts
        has_entries_alone = piece.entries and not thoughts
        if piece.text or has_entries_alone or is_finish_alone:
            split.append(piece._replace(parts=[piece.text], finish=None))
        split += [piece._replace(parts=[call], entries=[], finish=None) for call in piece.calls]
        if split:
            split[-1] = split[-1]._replace(finish=piece.finish)
        return [self._piece_event(each) for each in split]

    def _choice(self, piece: TextPiece) -> Mapping[str, Any]:
        message: shapes.ChatMessage = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.thoughts:
            message["reasoning_content"] = piece.thoughts
        calls: list[shapes.AnsweredCall] = []
        for call in piece.calls:
            # The first piece of a call has the tool's name. The others continue the arguments.
            if call.name is not None:
                function: shapes.CalledTool = {"name": call.name, "arguments": ""}
                calls.append({"id": new_call_id(), "type": "function", "function": function})
            calls[-1]["function"]["arguments"] += call.arguments
        if calls:
            message["tool_calls"] = calls
            message["content"] = piece.text or None
        return {"index": piece.text_index, "message": message} | self._logprobs_and_finish(piece)

    def _event_choice(self, piece: TextPiece) -> Mapping[str, Any]:
        delta: shapes.ChatDelta = {}
        if piece.calls:
            delta = {"tool_calls": [_call_delta(call) for call in piece.calls]}
        elif piece.thoughts:
            delta = {"reasoning_content": piece.thoughts}
        elif piece.text:
            delta = {"content": piece.text}
        elif not piece.entries and piece.finish is None:  # the empty piece of `first_events`
            delta = {"role": "assistant", "content": ""}
        return {"index": piece.text_index, "delta": delta} | self._logprobs_and_finish(piece)

    def _logprobs_and_finish(self, piece: TextPiece) -> dict[str, Any]:
        logprobs: shapes.ChatLogprobs | None = None
        if self._likeliest_count is not None:
            content = [sampled_token(self._tokenizer, entry) for entry in piece.entries]
            logprobs = {"content": content, "refusal": None}
        finish: shapes.ChatFinish | None = piece.finish
        if piece.finish == "stop" and piece.calls_tools:
            finish = "tool_calls"
        return {"logprobs": logprobs, "finish_reason": finish}


def sampled_token(tokenizer: Tokenizer, entry: ScoredToken) -> shapes.ChatDrawnToken:
    """Return an entry of the log-probabilities of an answer in a chat."""
    likeliest = [_chat_token(tokenizer, token, logprob) for token, logprob in entry.likeliest]
    # `or` only for the type: the log-probability is None only for the first token of a prompt, and an
    # answer in a chat does not repeat its prompt.
    sampled = _chat_token(tokenizer, entry.token, entry.logprob or 0.0)
    return {**sampled, "top_logprobs": likeliest}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> shapes.ChatToken:
    return {
        "token": token_text(tokenizer, token),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.pieces[token]),
    }


def _call_delta(call: CallPiece) -> shapes.CallDelta:
    """Return a piece of a call in the form of the protocol."""
    if call.name is None:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    return {
        "index": call.number,
        "id": new_call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def new_call_id() -> str:
    """Return an id for a call, in the form that all chat templates accept."""
    characters = string.ascii_letters + string.digits
    return "".join(secrets.choice(characters) for _ in range(ID_LENGTH))


def token_usage(prompt_tokens: int, sampled_tokens: int) -> shapes.Usage:
    """Return the usage of a request: the tokens of its prompts and of its texts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
    }


_MIN_LOGPROB = -9999.0  # is written instead of ln 0, since JSON has no infinity


def _finite(logprob: float) -> float:
    """Return a log-probability, but at least `_MIN_LOGPROB`."""
    # A comparison with NaN is false, so NaN becomes the minimum, too; `max` might return NaN.
    return logprob if logprob > _MIN_LOGPROB else _MIN_LOGPROB
