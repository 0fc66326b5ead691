"""Writes answers in the words of the protocol and sends them, whole or piece by piece as a stream
of events.
"""

import codecs
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.types import Send

from monograph.decode.completion import Transcript
from monograph.decode.request import Event, LogProbability
from monograph.evaluation.choices import TokenScore
from monograph.serve import shapes
from monograph.serve.owner import Generation
from monograph.serve.refused import Refused, error_of
from monograph.serve.versions import Version
from monograph.text.tokenizer import Tokenizer

_ALWAYS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


async def send_error(send: Send, refused: Refused) -> None:
    """Answer with an error."""
    await send_whole(
        send, as_json(error_of(refused)), status=refused.status, headers=refused.headers
    )


async def send_json(send: Send, value: object) -> None:
    """Answer with a JSON value."""
    await send_whole(send, as_json(value))


async def send_whole(
    send: Send, body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """Answer with a body."""
    await _start(
        send,
        status,
        {"content-type": "application/json", "content-length": str(len(body))} | (headers or {}),
    )
    await send({"type": "http.response.body", "body": body})


class Events:
    """An answer that is a stream of events."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self) -> None:
        """Send the head."""
        await _start(
            self._send,
            200,
            {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"},
        )

    async def send(self, *values: bytes) -> None:
        """Send an event for each JSON value."""
        await self._part(b"".join(b"data: " + value + b"\n\n" for value in values))

    async def ping(self) -> None:
        """Send a comment, so that no proxy takes the connection for dead."""
        await self._part(b": ping\n\n")

    async def end(self, *, done: bool = True) -> None:
        """End the stream; it is `done` if nothing went wrong."""
        await self._send(
            {"type": "http.response.body", "body": b"data: [DONE]\n\n" if done else b""}
        )

    async def _part(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def _start(send: Send, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.lower().encode(), value.encode()) for name, value in (_ALWAYS | headers).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


def as_json(value: object) -> bytes:
    """Return a value as JSON, without spaces."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


_IMPOSSIBLE = -9999.0  # JSON has no infinity


class Entry(NamedTuple):
    """A token with its log-probabilities.

    Attributes:
        token: its id.
        offset: the number of characters before it.
        value: ln p of it; None for the first token of a text, before which there is nothing.
        likeliest: (id, ln p) of the likeliest tokens at its place.
    """

    token: int
    offset: int
    value: float | None
    likeliest: Sequence[tuple[int, float]]


class Piece(NamedTuple):
    """What is new of a text: its number, characters, tokens, and how it ended, if it has."""

    number: int
    text: str
    entries: list[Entry]
    finish: shapes.Finish | None


class Writing:
    """A text that comes event by event.

    Attributes:
        tokens: how many were drawn.
    """

    def __init__(
        self,
        text: Generation,
        stop: Sequence[str],
        likeliest: int | None,
        *,
        ends: bool = True,
        before: str = "",
    ):
        """Begin a text.

        Args:
            text: the text.
            stop: the strings before which it ends.
            likeliest: how many tokens are reported beside each; None: no token is.
            ends: whether the token that ends the text is reported, too.
            before: the characters of an echoed prompt.
        """
        self._tokenizer = text.version.tokenizer
        self._unsaid = () if ends else text.request.stop_ids
        self._transcript = Transcript(self._tokenizer, stop, text.request.prompt_ids)
        self._index = text.index
        self._likeliest = likeliest
        self._waiting: list[tuple[int, Entry]] = []  # with the place of their first byte
        self._place, self._offsets = (
            0,
            Offsets(self._tokenizer.lead(text.request.prompt_ids), len(before)),
        )
        self.tokens = 0

    def add(self, event: Event) -> Piece:
        """Take an event; return what became certain by it."""
        self.tokens += len(event.token_ids)
        new = self._transcript.add(event.token_ids)
        if self._likeliest is not None:
            for token, found in zip(event.token_ids, event.logprobs, strict=True):
                self._note(token, found, self._likeliest)
        if event.finish is None:
            return Piece(self._index, new, self._certain(), None)
        new += self._transcript.finish()
        if self._waiting and self._waiting[-1][1].token in self._unsaid and event.finish == "stop":
            self._waiting.pop()
        # A text that failed is refused before it comes here.
        return Piece(
            self._index, new, self._certain(), "stop" if event.finish == "stop" else "length"
        )

    def _note(self, token: int, found: LogProbability, most: int) -> None:
        piece = self._tokenizer.pieces[token]
        offset = self._offsets.add(piece)
        self._waiting.append(
            (self._place, Entry(token, offset, found.drawn, found.likeliest[:most]))
        )
        self._place += len(piece)

    def _certain(self) -> list[Entry]:
        """Return the tokens that begin in the part of the text that is certain, or that have no
        bytes and end it.
        """
        size, pieces = self._transcript.size, self._tokenizer.pieces
        count = sum(
            place < size or (place == size and not pieces[e.token]) for place, e in self._waiting
        )
        certain, self._waiting = self._waiting[:count], self._waiting[count:]
        return [entry for _, entry in certain]


class Offsets:
    """Counts the whole characters before each token."""

    def __init__(self, lead: bytes, before: int = 0) -> None:
        """Begin after so many characters; `lead` are bytes at the beginning that are no part of the
        text.
        """
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._lead = lead
        self._count = before

    def add(self, piece: bytes) -> int:
        """Return how many characters come before a token with these bytes, and count its own."""
        before = self._count
        broken = self._decoder.getstate()[0]
        if piece:
            piece = bytes(piece).removeprefix(self._lead)
            self._lead = b""
            self._count += len(self._decoder.decode(piece))
        # Bytes that the token does not continue are a character by themselves.
        return before + len(broken.decode(errors="replace")) * (
            piece[:1].decode(errors="ignore") != ""
        )


def scored(tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenScore]) -> list[Entry]:
    """Return the entries of a prompt, whose first token has no score."""
    offsets = Offsets(tokenizer.lead(ids[:1]))
    pairs = zip(ids, [(None, ()), *scores], strict=True)
    return [Entry(token, offsets.add(tokenizer.pieces[token]), *found) for token, found in pairs]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    r"""Return the text of a token: a special token's name, and bytes that are no UTF-8 as
    `bytes:\xf0`.
    """
    if not (piece := bytes(tokenizer.pieces[token])):
        return next(
            (name for name, index in tokenizer.special.items() if index == token),
            f"token_id:{token}",
        )
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Answer:
    """The parts of an answer to one request."""

    # The names of the protocol: of a whole answer, of a piece, and the beginning of its id.
    whole_name = "text_completion"
    piece_name = "text_completion"
    prefix = "cmpl-"

    def __init__(self, version: Version, seed: int, likeliest: int | None) -> None:
        """Begin an answer of a version with this seed, in which tokens have so many of the
        likeliest beside them.
        """
        self._tokenizer = version.tokenizer
        self._likeliest = likeliest
        self._same = b""
        self._head: dict[str, Any] = {
            "id": self.prefix + uuid.uuid4().hex,
            "object": self.whole_name,
        }
        self._rest = {
            "created": int(time.time()),
            "model": version.id,
            "system_fingerprint": version.fingerprint,
            "seed": seed,
        }

    def whole(self, pieces: Sequence[Piece], usage: shapes.Usage) -> bytes:
        """Return the whole answer of whole texts as JSON."""
        # One by one, as `json` lets no other thread run meanwhile.
        choices = b",".join([as_json(self._choice(piece)) for piece in pieces])
        return (
            as_json(self._head | self._rest)[:-1]
            + b',"choices":['
            + choices
            + b'],"usage":'
            + as_json(usage)
            + b"}"
        )

    def piece(self, piece: Piece | None, usage: bool | shapes.Usage) -> bytes:
        """Return a piece of a stream as JSON; its usage is null if `usage` is true, but for the
        last piece.
        """
        if not self._same:  # all but the choice is the same in each piece
            self._same = (
                as_json(self._head | {"object": self.piece_name} | self._rest)[:-1] + b',"choices":'
            )
        choices = as_json([] if piece is None else [self._delta(piece)])
        said = b',"usage":' + as_json(None if isinstance(usage, bool) else usage) if usage else b""
        return self._same + choices + said + b"}"

    def begin(self, index: int) -> list[Piece]:
        """Return the pieces with which a text begins in a stream."""
        return []

    def _choice(self, piece: Piece) -> Mapping[str, Any]:
        return self._of_text(piece)

    def _delta(self, piece: Piece) -> Mapping[str, Any]:
        return self._of_text(piece)

    def _of_text(self, piece: Piece) -> shapes.CompletionPieceChoice:
        logprobs = None if self._likeliest is None else self._logprobs(piece.entries)
        return {
            "index": piece.number,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
        }

    def _logprobs(self, entries: Sequence[Entry]) -> shapes.CompletionLogprobs:
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [
                None if entry.value is None else _number(entry.value) for entry in entries
            ],
            "top_logprobs": [
                None if entry.value is None else self._by_text(entry) for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }

    def _by_text(self, entry: Entry) -> dict[str, float]:
        """Return the likeliest tokens and the chosen one by their texts, of which two tokens may
        have the same.
        """
        found: dict[str, float] = {}
        for token, value in dict([*entry.likeliest, (entry.token, entry.value or 0.0)]).items():
            text = self._text(token)
            found[f"token_id:{token}" if text in found else text] = _number(value)
        return found

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer, token)


class ChatAnswer(Answer):
    """The parts of an answer to a chat."""

    whole_name = "chat.completion"
    piece_name = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def begin(self, index: int) -> list[Piece]:
        """Return the pieces with which a text begins in a stream: an empty one, which has the role."""
        return [Piece(index, "", [], None)]

    def _choice(self, piece: Piece) -> Mapping[str, Any]:
        message: shapes.ChatMessage = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.number, "message": message} | self._end(piece)

    def _delta(self, piece: Piece) -> Mapping[str, Any]:
        first = not piece.text and not piece.entries and piece.finish is None
        delta: shapes.ChatDelta = {"content": piece.text} if piece.text else {}
        if first:
            delta = {"role": "assistant", "content": ""}
        return {"index": piece.number, "delta": delta} | self._end(piece)

    def _end(self, piece: Piece) -> dict[str, Any]:
        entries = [self._entry(entry) for entry in piece.entries]
        said: shapes.ChatLogprobs | None = (
            None if self._likeliest is None else {"content": entries, "refusal": None}
        )
        return {"logprobs": said, "finish_reason": piece.finish}

    def _entry(self, entry: Entry) -> shapes.ChatDrawnToken:
        likeliest = [self._token(token, value) for token, value in entry.likeliest]
        return {**self._token(entry.token, entry.value or 0.0), "top_logprobs": likeliest}

    def _token(self, token: int, value: float) -> shapes.ChatToken:
        return {
            "token": self._text(token),
            "logprob": _number(value),
            "bytes": list(self._tokenizer.pieces[token]),
        }


def usage_of(prompt: int, drawn: int) -> shapes.Usage:
    """Return how many tokens a request took."""
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def _number(value: float) -> float:
    return value if value > _IMPOSSIBLE else _IMPOSSIBLE
