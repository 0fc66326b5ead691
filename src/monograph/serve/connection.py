"""A client's connection, with the limits for which uvicorn and h11 have no option.

A client may send nothing, read nothing or send what is no HTTP: it is left alone, and holds nothing
for long. What they do by an option, the size of an unfinished head and the time between two
requests, is in `command.configured`.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from monograph.serve.refused import Refused, error_of

# of a request's head
HEAD_BYTES = 1 << 14
HEAD_S = 30.0
STALL_S = 30.0  # for a client to read something of an answer that waits for it
MOST_AHEAD = 1 << 16  # bytes of further requests that come before the answer to the first
MOST_CONNECTIONS = 1000


class _Requests(h11.Connection):
    """The requests of a connection; h11 itself lets a large head pass if it comes whole.

    Attributes:
        has_large_head: whether that is what is wrong with the last bytes.
    """

    has_large_head = False

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: the bytes are no request that may be answered.
        """
        before = len(self.trailing_data[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # Of bytes that are no whole head yet.
            self.has_large_head = error.error_status_hint == 431
            raise
        if isinstance(event, h11.Request) and before - len(self.trailing_data[0]) > HEAD_BYTES:
            self.has_large_head = True
            raise h11.RemoteProtocolError(_LARGE_HEAD)
        return event


_LARGE_HEAD = f"the head of the request has more than {HEAD_BYTES:,} bytes"


class Connection(H11Protocol):
    """A connection that closes if no request comes for a while, nobody reads its answers, or others
    need its place.
    """

    conn: _Requests
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _seen: RequestResponseCycle | None = None
    _since = 0.0  # when it became idle
    _ahead = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take what uvicorn gives."""
        super().__init__(*given, **named)
        self.conn = _Requests(h11.SERVER, HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Start the idle timer; where there are too many connections, the one that was idle longest
        makes room.
        """
        super().connection_made(transport)
        self._since = self.loop.time()
        self._look()
        if len(self.connections) > MOST_CONNECTIONS:
            own = (each for each in self.connections if isinstance(each, Connection))
            # This one is, too.
            idle = [each for each in own if each.idle and not each.transport.is_closing()]
            min(idle, key=lambda each: each._since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # Uvicorn's own timer would keep what was reset in memory until it fires.
        self._unset_keepalive_if_required()

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Take bytes, but of further requests not too many, and none where there may be none."""
        self._ahead = self._ahead + len(data) if self._is_answering() else 0
        if self._ahead > MOST_AHEAD:
            self.transport.abort()
        elif not self._ahead or self.conn.their_state is not h11.MUST_CLOSE:
            super().data_received(data)

    def handle_events(self) -> None:
        """Read on while a request is answered; uvicorn would not, and so not see that its client
        has gone.
        """
        super().handle_events()
        if self._is_answering():
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Note when the connection became idle."""
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait until the client reads, but not forever."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the stall timer."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or no request that may be answered, if nothing else was answered,
        and close.
        """
        if self.cycle is not None:
            self.cycle.disconnected = True  # it sends nothing any more
        what = _LARGE_HEAD if self.conn.has_large_head else "these bytes are no HTTP request"
        body = json.dumps(error_of(Refused(400, what))).encode()
        size = str(len(body)).encode()
        kind = b"application/json"
        headers = [(b"content-type", kind), (b"content-length", size), (b"connection", b"close")]
        try:
            for event in (
                h11.Response(status_code=400, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # another answer has begun, or none may have a body
            self.transport.abort()
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        return not self.idle and not self.cycle.more_body

    def _look(self) -> None:
        if self.idle and self._timer is not None and self.cycle is self._seen:
            self.transport.abort()  # it may be closed already, but for bytes that nobody reads
            return
        self._seen = self.cycle
        self._timer = self.loop.call_later(HEAD_S, self._look)
