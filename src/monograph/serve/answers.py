"""Writes answers in the form of the protocol and sends them, whole or as a stream of events."""

import codecs
import json
import secrets
import string
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.types import Send

from monograph.decode.request import Event, LogProbability
from monograph.decode.transcript import Transcript
from monograph.evaluation.choices import TokenScore
from monograph.serve import shapes
from monograph.serve.owner import ServedText
from monograph.serve.refused import Refused, error_body
from monograph.serve.versions import ServedModel
from monograph.text.call_reader import CallPiece, CallReader
from monograph.text.calls import ID_LENGTH
from monograph.text.tokenizer import Tokenizer

_COMMON_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


async def send_error(send: Send, refused: Refused) -> None:
    """Answer with an error."""
    body = as_json(error_body(refused))
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
        headers = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}
        await _send_start(self._send, 200, headers)

    async def send(self, *values: bytes) -> None:
        """Send an event for each JSON value."""
        await self._send_chunk(b"".join(b"data: " + value + b"\n\n" for value in values))

    async def ping(self) -> None:
        """Send a comment, so that no proxy closes the connection as dead."""
        await self._send_chunk(b": ping\n\n")

    async def end(self, *, is_done: bool = True) -> None:
        """End the stream.

        Args:
            is_done: whether all texts are sent, which a last event, [DONE], says. An error that ended
                the stream has been sent as an event before.
        """
        last_event = b"data: [DONE]\n\n" if is_done else b""
        await self._send({"type": "http.response.body", "body": last_event})

    async def _send_chunk(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_start(send: Send, status: int, headers: dict[str, str]) -> None:
    all_headers = _COMMON_HEADERS | headers
    pairs = [(name.lower().encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


def as_json(value: object) -> bytes:
    """Return a value as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


_MIN_LOGPROB = -9999.0  # it is written for ln 0, as JSON has no infinity


class ScoredToken(NamedTuple):
    """An entry of an answer's log-probabilities: those at the position of one token.

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
    """A new piece of a text.

    Attributes:
        text_index: the text's number in the answer.
        text: the new characters.
        entries: an entry for each new token, if the answer has log-probabilities, else empty.
        finish: how the text ended; None if it has not ended.
        calls: new pieces of calls of tools.
        calls_tools: whether the text up to here has a call.
    """

    text_index: int
    text: str
    entries: list[ScoredToken]
    finish: shapes.ServedFinish | None
    calls: Sequence[CallPiece] = ()
    calls_tools: bool = False


class TextBuilder:
    """Makes the pieces of a text from the decoder's events.

    A piece has only the text that is certain. An incomplete character, or what may be the beginning of
    a stop string, is held back with its tokens' entries until further tokens decide it.

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
        call_reader: CallReader | None = None,
    ):
        """Begin an empty text.

        Args:
            text: the text.
            stop: the strings before which the text ends.
            likeliest_count: how many of the likeliest tokens are reported in the place of each token;
                None: the answer has no log-probabilities.
            reports_end: whether a stop id that ends the text has an entry, too.
            echo: the prompt's characters, if the answer repeats them before the text.
            call_reader: reads the calls of tools in the text; None: there are none.
        """
        prompt_ids = text.request.prompt_ids
        self._tokenizer = text.version.tokenizer
        self._unreported_ids = () if reports_end else text.request.stop_ids
        self._transcript = Transcript(self._tokenizer, stop, prompt_ids)
        self._call_reader = call_reader
        self._stop_ids = text.request.stop_ids
        self._index = text.index
        self._likeliest_count = likeliest_count
        # Entries of tokens whose text is held back, each with the number of bytes before its token.
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
        calls = list[CallPiece]()
        if self._call_reader is not None:
            new_text, calls = self._read_calls(self._call_reader, event)
        calls_tools = self._call_reader is not None and self._call_reader.call_count > 0
        if self._likeliest_count is not None:
            for token, logprobs in zip(event.token_ids, event.logprobs, strict=True):
                self._add_entry(token, logprobs, self._likeliest_count)
        if event.finish is None:
            entries = self._take_certain_entries()
            return TextPiece(self._index, new_text, entries, None, calls, calls_tools)
        # For finishes that are errors, the request is refused before the event comes here.
        finish: shapes.ServedFinish = "stop" if event.finish == "stop" else "length"
        if finish == "stop" and self._uncertain_entries:
            # Remove the entry of the stop id that has ended the text, if it is not reported.
            _, last = self._uncertain_entries[-1]
            if last.token in self._unreported_ids:
                self._uncertain_entries.pop()
        entries = self._take_certain_entries()
        return TextPiece(self._index, new_text, entries, finish, calls, calls_tools)

    def _read_calls(self, reader: CallReader, event: Event) -> tuple[str, list[CallPiece]]:
        """Return the new characters of the content, and the new pieces of calls."""
        ids = event.token_ids
        if ids and ids[-1] in self._stop_ids:  # it only ends the text
            ids = ids[:-1]
        content, calls = reader.add(ids)
        if event.finish is not None:
            rest = reader.finish()
            content += rest.content
            calls = calls + rest.calls
        return content, calls

    def _add_entry(self, token: int, logprobs: LogProbability, likeliest_count: int) -> None:
        token_bytes = self._tokenizer.pieces[token]
        offset = self._offsets.add(token_bytes)
        entry = ScoredToken(token, offset, logprobs.drawn, logprobs.likeliest[:likeliest_count])
        self._uncertain_entries.append((self._byte_count, entry))
        self._byte_count += len(token_bytes)

    def _take_certain_entries(self) -> list[ScoredToken]:
        """Remove and return the entries of tokens that begin in the certain part of the text.

        A token without bytes, such as a special one, also counts if it is at the end of that part.
        """
        certain_bytes = self._transcript.size
        # Entries are in the order of the text, so these are the first ones.
        count = 0
        for begin, entry in self._uncertain_entries:
            is_empty = not self._tokenizer.pieces[entry.token]
            if begin < certain_bytes or (begin == certain_bytes and is_empty):
                count += 1
        certain = self._uncertain_entries[:count]
        self._uncertain_entries = self._uncertain_entries[count:]
        return [entry for _, entry in certain]


class CharacterOffsets:
    """Counts the characters before each token of a text, whose tokens are added one by one."""

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
        # The bytes of a character that earlier tokens have begun, which is not counted yet.
        incomplete, _ = self._decoder.getstate()
        text_bytes = bytes(token_bytes)
        if text_bytes:
            text_bytes = text_bytes.removeprefix(self._lead)
            self._lead = b""
            self._count += len(self._decoder.decode(text_bytes))
        # An ASCII byte does not continue a character. So the incomplete one ends before it, as U+FFFD.
        begins_with_ascii = text_bytes[:1].isascii() and text_bytes[:1] != b""
        if begins_with_ascii:
            offset += len(incomplete.decode(errors="replace"))
        return offset


def prompt_entries(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenScore]
) -> list[ScoredToken]:
    """Return the entries of a prompt's tokens; the first token has no score."""
    offsets = CharacterOffsets(tokenizer.inserted_space(ids[:1]))
    entries = []
    for token, (logprob, likeliest) in zip(ids, [(None, ()), *scores], strict=True):
        entries.append(ScoredToken(token, offsets.add(tokenizer.pieces[token]), logprob, likeliest))
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


class AnswerBuilder:
    """Makes the JSON of the answer to one request for completions."""

    # How the protocol names the object of a whole answer and that of an event, and the prefix of the
    # answer's id.
    whole_name = "text_completion"
    event_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, model: ServedModel, seed: int, likeliest_count: int | None) -> None:
        """Begin an answer.

        Args:
            model: the model that writes.
            seed: the seed of the request.
            likeliest_count: how many of the likeliest tokens are reported in the place of each token;
                None: the answer has no log-probabilities.
        """
        self._tokenizer = model.version.tokenizer
        self._likeliest_count = likeliest_count
        # An event's JSON up to the value of "choices", which is the same in all events of a stream.
        self._event_head = b""
        self._fields: dict[str, Any] = {
            "id": self.id_prefix + uuid.uuid4().hex,
            "object": self.whole_name,
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": model.fingerprint,
            "seed": seed,
        }

    def whole_json(self, pieces: Sequence[TextPiece], usage: shapes.Usage) -> bytes:
        """Return the whole answer; each piece is a whole text."""
        # The choices are serialised one by one: no other thread can run during a call of `json`, and it
        # would take long for all of them.
        choices = b",".join([as_json(self._choice(piece)) for piece in pieces])
        head = as_json(self._fields)[:-1]  # without the closing brace
        return head + b',"choices":[' + choices + b'],"usage":' + as_json(usage) + b"}"

    def piece_json(self, piece: TextPiece, *, has_usage: bool) -> bytes:
        """Return the event of a piece.

        Args:
            piece: the piece.
            has_usage: whether the client wants the usage, which another event has. In the protocol the
                field usage of all others is then null.
        """
        usage = b',"usage":null' if has_usage else b""
        return self._event_json(as_json([self._event_choice(piece)]), usage)

    def usage_json(self, usage: shapes.Usage) -> bytes:
        """Return the last event of a stream, if it has a usage; it has no choices."""
        return self._event_json(b"[]", b',"usage":' + as_json(usage))

    def parts(self, piece: TextPiece) -> list[TextPiece]:
        """Return the pieces for which a stream sends one event each, of one piece of a text."""
        return [piece]

    def first_pieces(self, index: int) -> list[TextPiece]:
        """Return the pieces that a stream sends before the first token of text number `index`."""
        return []

    def _event_json(self, choices: bytes, usage: bytes) -> bytes:
        if not self._event_head:
            fields = self._fields | {"object": self.event_name}
            without_brace = as_json(fields)[:-1]  # the closing one
            self._event_head = without_brace + b',"choices":'
        return self._event_head + choices + usage + b"}"

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
        by_token = dict([*entry.likeliest, (entry.token, entry.logprob or 0.0)])
        by_text: dict[str, float] = {}
        for token, value in by_token.items():
            text = self._token_text(token)
            if text in by_text:  # two tokens may have the same text
                text = f"token_id:{token}"
            by_text[text] = _finite(value)
        return by_text

    def _token_text(self, token: int) -> str:
        return token_text(self._tokenizer, token)


class ChatAnswerBuilder(AnswerBuilder):
    """Makes the JSON of the answer to one request of a chat."""

    whole_name = "chat.completion"
    event_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def first_pieces(self, index: int) -> list[TextPiece]:
        """Return one empty piece: `_event_choice` sends the role in place of an empty text."""
        return [TextPiece(index, "", [], None)]

    def parts(self, piece: TextPiece) -> list[TextPiece]:
        """Return a part for new content and one for each piece of a call; none if nothing is new."""
        parts = [
            TextPiece(piece.text_index, "", [], None, [call], piece.calls_tools)
            for call in piece.calls
        ]
        if piece.text or piece.entries or (piece.finish is not None and not parts):
            content = piece._replace(calls=(), finish=None)
            parts.insert(0, content)
        if parts:
            parts[-1] = parts[-1]._replace(finish=piece.finish)
        return parts

    def _choice(self, piece: TextPiece) -> Mapping[str, Any]:
        message: shapes.ChatMessage = {"role": "assistant", "content": piece.text, "refusal": None}
        calls: list[shapes.AnsweredCall] = []
        for _, name, arguments in piece.calls:
            if name is not None:
                function: shapes.CalledTool = {"name": name, "arguments": ""}
                calls.append({"id": _new_call_id(), "type": "function", "function": function})
            calls[-1]["function"]["arguments"] += arguments
        if calls:
            message["tool_calls"] = calls
            message["content"] = piece.text or None
        return {"index": piece.text_index, "message": message} | self._logprobs_and_finish(piece)

    def _event_choice(self, piece: TextPiece) -> Mapping[str, Any]:
        delta: shapes.ChatDelta = {}
        if piece.calls:
            delta = {"tool_calls": [_call_delta(call) for call in piece.calls]}
        elif piece.text:
            delta = {"content": piece.text}
        elif not piece.entries and piece.finish is None:
            delta = {"role": "assistant", "content": ""}
        return {"index": piece.text_index, "delta": delta} | self._logprobs_and_finish(piece)

    def _logprobs_and_finish(self, piece: TextPiece) -> dict[str, Any]:
        logprobs: shapes.ChatLogprobs | None = None
        if self._likeliest_count is not None:
            content = [self._sampled_token(entry) for entry in piece.entries]
            logprobs = {"content": content, "refusal": None}
        finish: shapes.ChatFinish | None = piece.finish
        if piece.finish == "stop" and piece.calls_tools:
            finish = "tool_calls"
        return {"logprobs": logprobs, "finish_reason": finish}

    def _sampled_token(self, entry: ScoredToken) -> shapes.ChatDrawnToken:
        likeliest = [self._chat_token(token, logprob) for token, logprob in entry.likeliest]
        # Only a prompt's first token has no log-probability, and a chat repeats no prompt.
        sampled = self._chat_token(entry.token, entry.logprob or 0.0)
        return {**sampled, "top_logprobs": likeliest}

    def _chat_token(self, token: int, logprob: float) -> shapes.ChatToken:
        return {
            "token": self._token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.pieces[token]),
        }


def _call_delta(call: CallPiece) -> shapes.CallPiece:
    """Return a piece of a call in the form of the protocol."""
    if call.name is None:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    return {
        "index": call.number,
        "id": _new_call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _new_call_id() -> str:
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


def _finite(logprob: float) -> float:
    # A comparison with NaN is false, so NaN becomes the minimum, too; `max` might return NaN.
    return logprob if logprob > _MIN_LOGPROB else _MIN_LOGPROB
