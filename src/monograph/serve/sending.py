"""Reads bodies and sends answers, whole or as a stream of events, and counts what was sent."""

import asyncio
import json
from collections import Counter
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from monograph.serve.fields import MOST_BODY, Refused

BODY_S = 30.0  # for a body to arrive
_ALWAYS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Closed(Exception):
    """The client has gone."""


class Counted:
    """Counts requests by status.

    Attributes:
        by_status: how many were answered so.
    """

    def __init__(self) -> None:
        self.by_status: Counter[int] = Counter()

    def watched(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that counts; `scope["answered"]` becomes whether an answer has begun."""
        scope["answered"] = False

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["answered"] = True
                self.by_status[message["status"]] += 1
            await send(message)

        return sent


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Return a request's body.

    Raises:
        Refused: it is too large, or too slow.
        Closed: the client has gone.
    """
    too_large = Refused(413, f"the body is larger than {MOST_BODY:,} bytes")
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdecimal() and int(declared[:19]) > MOST_BODY:
        raise too_large
    parts, size, more = list[bytes](), 0, True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Closed
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > MOST_BODY:
                    raise too_large
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_S:.0f} s") from None
    return b"".join(parts)


async def closed(receive: Receive) -> None:
    """Wait until the client has gone, once its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def error_of(refused: Refused) -> dict[str, Any]:
    """Return an error in the protocol's words."""
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(refused.status)
    kind = kind or ("invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


async def send_error(send: Send, refused: Refused) -> None:
    """Answer with an error."""
    await send_whole(send, as_json(error_of(refused)), status=refused.status, headers=refused.headers)


async def send_json(send: Send, value: Any) -> None:
    """Answer with a JSON value."""
    await send_whole(send, as_json(value))


async def send_whole(send: Send, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
    """Answer with a body."""
    await _start(send, status, {"content-type": "application/json", "content-length": str(len(body))} | (headers or {}))
    await send({"type": "http.response.body", "body": body})


class Events:
    """An answer that is a stream of events."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self) -> None:
        """Send the head."""
        await _start(self._send, 200, {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"})

    async def send(self, *values: bytes) -> None:
        """Send an event for each JSON value."""
        await self._part(b"".join(b"data: " + value + b"\n\n" for value in values))

    async def ping(self) -> None:
        """Send a comment, so that no proxy takes the connection for dead."""
        await self._part(b": ping\n\n")

    async def end(self, *, done: bool = True) -> None:
        """End the stream; it is `done` if nothing went wrong."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if done else b""})

    async def _part(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def _start(send: Send, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.lower().encode(), value.encode()) for name, value in (_ALWAYS | headers).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


def as_json(value: Any) -> bytes:
    """Return a value as JSON, without spaces."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
