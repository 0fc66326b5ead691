"""A client's connection, with the limits for which uvicorn and h11 have no option.

A client that sends nothing, reads nothing or sends other bytes than HTTP may hold its connection
only for a short time. Two limits are options of uvicorn, in `command.server_config`: the size of an
unfinished head, and the time between two requests.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from monograph.serve.refused import Refused, error_body

HEAD_BYTES = 1 << 14  # the largest head of a request
HEAD_S = 30.0  # for a request's head to arrive
STALL_S = 30.0  # for a client to read a part of an answer that fills the buffers
MAX_AHEAD_BYTES = 1 << 16  # of further requests, before the first one is answered
MAX_CONNECTIONS = 1000


class _Requests(h11.Connection):
    """Reads the requests of a connection, and refuses every head of more than HEAD_BYTES.

    h11 itself refuses a large head only if it does not arrive as a whole.

    Attributes:
        has_large_head: whether the last bytes were refused for a large head.
    """

    has_large_head = False

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: the bytes are not a request, or its head is too large.
        """
        unread_bytes = len(self.trailing_data[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # h11 says so of an unfinished head.
            self.has_large_head = error.error_status_hint == 431
            raise
        if isinstance(event, h11.Request):
            head_bytes = unread_bytes - len(self.trailing_data[0])
            if head_bytes > HEAD_BYTES:
                self.has_large_head = True
                raise h11.RemoteProtocolError(_LARGE_HEAD)
        return event


_LARGE_HEAD = f"the head of the request has more than {HEAD_BYTES:,} bytes"


class Connection(H11Protocol):
    """A connection that is closed if its client does nothing for too long.

    It is closed if no request comes, if nobody reads the answers, or if it is idle and a new
    connection needs its place.
    """

    conn: _Requests
    _idle_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _last_cycle: RequestResponseCycle | None = (
        None  # the request that was last answered when the idle timer started
    )
    _idle_since = 0.0  # the loop's time
    _ahead_bytes = 0  # received while a request is answered

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take uvicorn's arguments."""
        super().__init__(*arguments, **options)
        self.conn = _Requests(h11.SERVER, HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Start the idle timer; if there are too many connections, close one.

        The one to be closed has been idle for the longest time.
        """
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._check_idle()
        if len(self.connections) > MAX_CONNECTIONS:
            # Never empty, since this connection is idle.
            idle = [
                other
                for other in self.connections
                if isinstance(other, Connection)
                and other.is_idle
                and not other.transport.is_closing()
            ]
            min(idle, key=lambda other: other._idle_since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        for timer in (self._idle_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # Uvicorn's own timer would keep a connection that was reset in memory until it fires.
        self._unset_keepalive_if_required()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Take bytes, within the limit for further requests while one is answered."""
        if self._is_answering():
            self._ahead_bytes += len(data)
        else:
            self._ahead_bytes = 0
        if self._ahead_bytes > MAX_AHEAD_BYTES:
            self.transport.abort()
            return
        # The client may have said that its request is the last one: then further bytes are ignored.
        if self._ahead_bytes and self.conn.their_state is h11.MUST_CLOSE:
            return
        super().data_received(data)

    def handle_events(self) -> None:
        """Go on to read while a request is answered.

        Uvicorn would stop, and so would not see that the client has gone.
        """
        super().handle_events()
        if self._is_answering():
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Remember when the connection became idle."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait until the client reads, for at most STALL_S."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the stall timer."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not a request, or whose head is too large, and close.

        If another answer has begun, only close.
        """
        if self.cycle is not None:
            self.cycle.disconnected = True  # so the earlier request sends nothing more
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
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # another answer has begun, or may not have a body
            self.transport.abort()
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        # Not before the request's body is complete.
        return not self.is_idle and not self.cycle.more_body

    def _check_idle(self) -> None:
        """Abort the connection if no request came since the last check; check again in HEAD_S."""
        is_first_check = self._idle_timer is None
        if self.is_idle and not is_first_check and self.cycle is self._last_cycle:
            # Not `close`, which would wait until the client has read the last answer.
            self.transport.abort()
            return
        self._last_cycle = self.cycle
        self._idle_timer = self.loop.call_later(HEAD_S, self._check_idle)
