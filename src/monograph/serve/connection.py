"""A client's connection, with the limits for which uvicorn and h11 have no option.

A client that sends nothing, does not read its answer, or sends bytes that are not HTTP, can keep its
connection only for a short time. Two limits are options of uvicorn, in `command.server_config`: the size of an
unfinished head (a request's first line and headers), and the time between two requests.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from monograph.serve.refused import Refused, error_body

MAX_HEAD_BYTES = 1 << 14
# A request's head must arrive within this time.
HEAD_TIMEOUT_S = 30.0
# A client must read within this time if the buffers of an answer are full.
READ_TIMEOUT_S = 30.0
# The maximum number of bytes of pipelined requests: those that a client sends before the present one is
# answered.
MAX_PIPELINED_BYTES = 1 << 16
MAX_CONNECTIONS = 1000
_LARGE_HEAD = f"the head of the request has more than {MAX_HEAD_BYTES:,} bytes"


class _RequestReader(h11.Connection):
    """Reads the requests of a connection, and refuses every head of more than MAX_HEAD_BYTES.

    h11 itself refuses a large head only if it arrives in several pieces.

    Attributes:
        has_large_head: whether the connection was refused because of a large head.
    """

    has_large_head = False

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: the bytes are not a request, or its head is too large.
        """
        unread_bytes = len(self.trailing_data[0])  # received bytes that are not parsed yet
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # 431 is the status that h11 suggests if an unfinished head is too large.
            self.has_large_head = error.error_status_hint == 431
            raise
        if isinstance(event, h11.Request):
            head_bytes = unread_bytes - len(self.trailing_data[0])
            if head_bytes > MAX_HEAD_BYTES:
                self.has_large_head = True
                raise h11.RemoteProtocolError(_LARGE_HEAD)
        return event


class Connection(H11Protocol):
    """A connection that is closed if its client does nothing for too long.

    It is closed if no request comes, if the client does not read an answer, or if it is idle and a
    new connection needs its place. The public methods are called by asyncio and uvicorn. They extend
    uvicorn's methods of the same names.
    """

    # uvicorn's names: `conn` reads requests, and `cycle` is the present or last request with its answer.
    conn: _RequestReader
    _idle_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    # The value of `cycle` when the idle timer started.
    _last_cycle: RequestResponseCycle | None = None
    _idle_since = 0.0  # in the time of the event loop
    _pipelined_bytes = 0  # the bytes received while a request is answered

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take uvicorn's arguments, and replace uvicorn's reader of requests."""
        super().__init__(*arguments, **options)
        self.conn = _RequestReader(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Start the idle timer of a new connection.

        If there are too many connections, the one that has been idle for the longest time is closed.
        """
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._check_idle()  # the first check only starts the timer
        if len(self.connections) > MAX_CONNECTIONS:
            # This list is never empty, since this connection is idle.
            idle = [
                other
                for other in self.connections
                if isinstance(other, Connection)
                and other.is_idle
                and not other.transport.is_closing()
            ]
            longest_idle = min(idle, key=lambda other: other._idle_since)
            longest_idle.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        for timer in (self._idle_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # If the client has reset the connection, uvicorn leaves its timer running, which would keep this
        # object in memory.
        self._unset_keepalive_if_required()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or answered. An unfinished head does not count."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Receive bytes. While a request is answered, at most MAX_PIPELINED_BYTES are accepted."""
        if self._is_answering():
            self._pipelined_bytes += len(data)
        else:
            self._pipelined_bytes = 0
        if self._pipelined_bytes > MAX_PIPELINED_BYTES:
            self.transport.abort()
            return
        # If the client has said that its request is the last one (Connection: close), what comes after it
        # is ignored.
        if self._pipelined_bytes and self.conn.their_state is h11.MUST_CLOSE:
            return
        super().data_received(data)

    def handle_events(self) -> None:
        """Handle what was received, and continue to read while a request is answered.

        Uvicorn would pause reading when more bytes come before the answer is complete, and so would not
        notice that the client has gone.
        """
        super().handle_events()
        if self._is_answering():
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Remember when the connection became idle."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Pause the answer until the client reads, for at most READ_TIMEOUT_S."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue the answer, and cancel the timer."""
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request, or a head that is too large, and close the connection.

        If the answer to an earlier request has begun, only close it.
        """
        if self.cycle is not None:
            self.cycle.disconnected = True  # the answer to the earlier request must not go on
        message = "these bytes are not an HTTP request"
        if self.conn.has_large_head:
            message = _LARGE_HEAD
        body = json.dumps(error_body(Refused(400, message))).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events = (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        try:
            for event in events:
                sent_bytes = self.conn.send(event)
                self.transport.write(sent_bytes or b"")  # h11 returns None instead of no bytes
        except h11.LocalProtocolError:  # an earlier answer has begun, or must not have a body
            self.transport.abort()
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        """Return whether a request has arrived with its whole body, and its answer is not complete."""
        return not self.is_idle and not self.cycle.more_body

    def _check_idle(self) -> None:
        """Abort the connection if it is idle and no request came since the last check.

        Otherwise check again in HEAD_TIMEOUT_S. Each request has a new `cycle`.
        """
        is_first_check = self._idle_timer is None
        if self.is_idle and not is_first_check and self.cycle is self._last_cycle:
            # Not `close`, which would wait until the client has read the last answer.
            self.transport.abort()
            return
        self._last_cycle = self.cycle
        self._idle_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._check_idle)
