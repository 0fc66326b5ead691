"""`monograph serve`: serve a model through an OpenAI-compatible API, until SIGTERM or Ctrl-C.

uvicorn's connections have here the limits that it lacks. A client may send nothing, read nothing or send what is no
HTTP: it is left alone, and holds nothing for long.
"""

import asyncio
import json
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from monograph import interrupts
from monograph.decode.completion import MOST_ROWS
from monograph.device import default_device
from monograph.errors import InputRefused, UsageError, bug_report, said_by
from monograph.report.quantities import counted
from monograph.serve.app import application, is_local
from monograph.serve.owner import Source, Version
from monograph.serve.refused import Refused, error_of
from monograph.serve.service import Service
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import read_input
from monograph.terminal import one_line, warn

# of a request's head
HEAD_BYTES = 1 << 14
HEAD_S = 30.0
STALL_S = 30.0  # for a client to read something of an answer that waits for it
MOST_AHEAD = 1 << 16  # bytes of further requests that come before the answer to the first
MOST_CONNECTIONS = 1000


class _Requests(h11.Connection):
    """The requests of a connection, of which some that h11 lets pass are refused.

    Attributes:
        fault: what is wrong with the last bytes, if it is known.
    """

    fault = ""

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: the bytes are no request that may be answered.
        """
        before = len(self.trailing_data[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:  # of bytes that are no whole head yet
                self.fault = _LARGE_HEAD
            raise
        if isinstance(event, h11.Request):
            self.fault = _fault(event, before - len(self.trailing_data[0]))
            if self.fault:
                raise h11.RemoteProtocolError(self.fault)
        return event


_LARGE_HEAD = f"the head of the request has more than {HEAD_BYTES:,} bytes"


def _fault(request: h11.Request, head_bytes: int) -> str:
    """Return why a request is not answered, or "".

    Two lengths of a body are how a request hides in another from a proxy in front (RFC 9112, 6.1), and HTTP/1.0 has no
    Transfer-Encoding.
    """
    names = [name for name, _ in request.headers]
    if head_bytes > HEAD_BYTES:
        return _LARGE_HEAD
    if b"transfer-encoding" in names and b"content-length" in names:
        return "the request has both Transfer-Encoding and Content-Length: send one of them"
    if b"transfer-encoding" in names and request.http_version < b"1.1":
        return "Transfer-Encoding is not for HTTP/1.0: send Content-Length"
    return ""


class Connection(H11Protocol):
    """A connection that closes if no request comes for a while, nobody reads its answers, or others need its place."""

    conn: _Requests
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _seen: Any = None
    _since = 0.0  # when it became idle
    _ahead = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take what uvicorn gives."""
        super().__init__(*given, **named)
        self.conn = _Requests(h11.SERVER, HEAD_BYTES)

    def connection_made(self, transport: Any) -> None:
        """Begin to look; where there are too many, the one that was idle longest makes room."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._look()
        if len(self.connections) > MOST_CONNECTIONS:
            own = (each for each in self.connections if isinstance(each, Connection))
            idle = [each for each in own if each.idle and not each.transport.is_closing()]  # this one is, too
            min(idle, key=lambda each: each._since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End to look."""
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn's own timer would keep what was reset in memory until it fires

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
        """Read on while a request is answered; uvicorn would not, and so not see that its client has gone."""
        super().handle_events()
        if self._is_answering():
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Begin to be idle."""
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait until the client reads, but not forever."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or no request that may be answered, if nothing else was answered, and close."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # it sends nothing any more
        body = json.dumps(error_of(Refused(400, self.conn.fault or "these bytes are no HTTP request"))).encode()
        size = str(len(body)).encode()
        kind = b"application/json"
        headers = [(b"content-type", kind), (b"content-length", size), (b"connection", b"close")]
        try:
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
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


DRAIN_S = 30  # for requests that have begun, once the server is to end
IDLE_S = 20  # of a connection after an answer
MOST_KEY_BYTES = 1 << 16
MOST_NAME = 200  # characters of a name for the model
FILES = 1000  # that may be open beside the connections: those that are about to close, above all
BACKLOG = 128  # connections that wait, and that are taken at once


def run(
    run: str,
    *,
    host: str,
    port: int,
    api_key_file: Path | None,
    rows: int | None,
    served_names: Sequence[str],
    any_name: bool,
) -> None:
    """Serve a run's newest model, or a folder's; see the command line's help."""
    keep_compiled()
    require_names(served_names)
    keys = keys_in(api_key_file) if api_key_file else []
    if not keys and not is_local(host):
        raise UsageError(
            f"--host {host}: other machines can reach it, so give --api-key-file, a file with a key on each line"
        )
    source = Source(run, rows or MOST_ROWS[default_device().type], warn)
    service = Service(source, _say, _report, aliases=served_names, any_name=any_name)
    allow_connections()
    with _listening(host, port) as listening:
        asyncio.run(_serve(service, host, keys, listening))


def require_names(names: Sequence[str]) -> None:
    """Refuse a model's name that nobody could send or read.

    Raises:
        UsageError: a name is empty, too long, or has an invisible character.
    """
    for name in names:
        if not name.strip() or not name.isprintable() or len(name) > MOST_NAME:
            raise UsageError(
                f"--served-name {name!r:.80}: expected 1 to {MOST_NAME} visible characters, such as gpt-4o"
            )


def allow_connections() -> None:
    """Let the process have a file for each connection; many systems give it about a thousand in all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def keys_in(path: Path) -> list[str]:
    """Return the keys in a file, one a line.

    Raises:
        InputRefused: the file cannot be read, has no key, or has one that is too short to be secret or cannot be sent.
    """
    try:
        # Some editors begin a file with a byte order mark.
        lines = read_input(path, MOST_KEY_BYTES).decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputRefused(f"--api-key-file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputRefused(f"--api-key-file {path}: it is not UTF-8") from None
    keys = [line.strip() for line in lines if line.strip()]
    for number, line in enumerate(lines, 1):
        # Who has the key sees only the others, and no header may have a control character.
        hidden = next((letter for letter in line.strip() if not letter.isprintable()), None)
        if hidden is not None:
            raise InputRefused(
                f"--api-key-file {path}:{number}: the key has the invisible character U+{ord(hidden):04X}; expected "
                "letters, digits and signs"
            )
        if 0 < len(line.strip()) < 16:
            raise InputRefused(f"--api-key-file {path}:{number}: expected a key of at least 16 characters")
    if not keys:
        raise InputRefused(f"--api-key-file {path}: holds no key: write one on each line")
    return keys


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Without the protocol asyncio would not send each part of an answer at once.
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)  # so that whoever asks early waits, or is told that the model is being loaded
            yield listening
    except OSError as error:
        raise InputRefused(f"--host {host} --port {port}: {error.strerror}") from None


async def _serve(service: Service, host: str, keys: list[str], listening: socket.socket) -> None:
    server = _Server(configured(service, host, keys), service)
    serving = asyncio.create_task(server.serve([listening]))
    begun = asyncio.create_task(_begin(service, server, host, listening.getsockname()[1], bool(keys)))
    try:
        await serving
    finally:
        with interrupts.ending_at_once():
            begun.cancel()
            try:
                with suppress(asyncio.CancelledError):
                    await begun  # raises what kept the model from being loaded
            finally:
                # No thread may be inside a device's library when Python ends, as that aborts the process.
                service.end()
                await asyncio.get_running_loop().shutdown_default_executor()
    if service.crashed is not None:
        raise service.crashed
    answered = counted(sum(service.counted.by_status.values()), "request")
    drawn = service.owner.stock.drawn if service.ready else 0  # it may end before the model is loaded
    _say(f"ended; {answered} answered, {counted(drawn, 'token')} written")


def configured(service: Service, host: str, keys: list[str]) -> uvicorn.Config:
    """Return the configuration of a server, with all its limits."""
    return uvicorn.Config(
        application(service, host, keys),
        http=Connection,
        ws="none",
        lifespan="off",
        log_level=logging.CRITICAL,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=DRAIN_S,
        h11_max_incomplete_event_size=HEAD_BYTES,
        proxy_headers=False,
        backlog=BACKLOG,
    )


async def _begin(service: Service, server: uvicorn.Server, host: str, port: int, needs_key: bool) -> None:
    def end() -> None:
        server.should_exit = True

    _say(f"loading {service.source.name}")
    try:
        version = await service.begin(end)
    except BaseException:
        end()
        raise
    _say_ready(service, version, host, port, needs_key)
    await service.follow()


def _say_ready(service: Service, version: Version, host: str, port: int, needs_key: bool) -> None:
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    who = "clients must send a key" if needs_key else "only this machine can reach it (others: --host, --api-key-file)"
    if needs_key and is_local(host):
        who = "only this machine can reach it, with a key"
    how = "chat template" if version.has_template else "no chat template: it continues the messages as text"
    print(
        f"ready     {address}   {version.id}: {version.size}; {how}\n"
        f"          OPENAI_BASE_URL={address}/v1   chat page: {address}/   {who}\n"
        "          a request with a seed always gets the same text, however busy the server is",
        flush=True,
    )


def _say(line: str) -> None:
    print(f"serve     {one_line(line)}", flush=True)


def _report(error: Exception) -> None:
    place = bug_report(sys.argv[1:])
    warn(f"bug: {one_line(f'{type(error).__name__}: {said_by(error)}')[:200]}; please report it with {place}")


class _Server(uvicorn.Server):
    """A server that ends by SIGTERM or Ctrl-C once its requests have ended, and at once by a second one."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take both signals, which the code that is called last would else handle by an error."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        if not self.should_exit and self._service.ready and (running := self._service.owner.stock.running):
            _say(f"ending; {counted(running, 'text')} may be finished within {DRAIN_S} s")
        self.should_exit = True
