"""`monograph serve`: serve a model through an OpenAI-compatible API, until SIGTERM or Ctrl-C."""

import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn

from monograph import interrupts
from monograph.decode.completion import MOST_ROWS
from monograph.device import default_device
from monograph.errors import InputRefused, UsageError, bug_report, said_by
from monograph.report.quantities import counted
from monograph.serve.app import application, is_local
from monograph.serve.connection import HEAD_BYTES, MOST_CONNECTIONS, Connection
from monograph.serve.service import Service
from monograph.serve.versions import Source, Version
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import read_input
from monograph.terminal import one_line, warn

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
    """Let the process have a file for each connection; many systems give it about a thousand in
    all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def keys_in(path: Path) -> list[str]:
    """Return the keys in a file, one a line.

    Raises:
        InputRefused: the file cannot be read, has no key, or has one that is too short to be secret
            or cannot be sent.
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
            raise InputRefused(
                f"--api-key-file {path}:{number}: expected a key of at least 16 characters"
            )
    if not keys:
        raise InputRefused(f"--api-key-file {path}: holds no key: write one on each line")
    return keys


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        # Without the protocol asyncio would not send each part of an answer at once.
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            # So that whoever asks early waits, or is told that the model is being loaded.
            listening.listen(BACKLOG)
            yield listening
    except OSError as error:
        raise InputRefused(f"--host {host} --port {port}: {error.strerror}") from None


async def _serve(service: Service, host: str, keys: list[str], listening: socket.socket) -> None:
    server = _Server(configured(service, host, keys), service)
    serving = asyncio.create_task(server.serve([listening]))
    begun = asyncio.create_task(
        _begin(service, server, host, listening.getsockname()[1], bool(keys))
    )
    try:
        await serving
    finally:
        with interrupts.ending_at_once():
            begun.cancel()
            try:
                with suppress(asyncio.CancelledError):
                    await begun  # raises what kept the model from being loaded
            finally:
                # No thread may be inside a device's library when Python ends, as that aborts the
                # process.
                service.end()
                await asyncio.get_running_loop().shutdown_default_executor()
    if service.crashed is not None:
        raise service.crashed
    answered = counted(sum(service.counted.by_status.values()), "request")
    # It may end before the model is loaded.
    drawn = service.owner.stock.drawn if service.ready else 0
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


async def _begin(
    service: Service, server: uvicorn.Server, host: str, port: int, needs_key: bool
) -> None:
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
    who = (
        "clients must send a key"
        if needs_key
        else "only this machine can reach it (others: --host, --api-key-file)"
    )
    if needs_key and is_local(host):
        who = "only this machine can reach it, with a key"
    how = (
        "chat template"
        if version.has_template
        else "no chat template: it continues the messages as text"
    )
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
    warn(
        f"bug: {one_line(f'{type(error).__name__}: {said_by(error)}')[:200]}; please report it with {place}"
    )


class _Server(uvicorn.Server):
    """A server that ends by SIGTERM or Ctrl-C once its requests have ended, and at once by a second
    one.
    """

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
        if (
            not self.should_exit
            and self._service.ready
            and (running := self._service.owner.stock.running)
        ):
            _say(f"ending; {counted(running, 'text')} may be finished within {DRAIN_S} s")
        self.should_exit = True
