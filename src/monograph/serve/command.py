"""`monograph serve`: serve a model through OpenAI's and Anthropic's APIs, until SIGTERM or Ctrl-C."""

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
from monograph.decode.completion import MAX_ROWS
from monograph.decode.generator import DraftUse
from monograph.device import default_device
from monograph.errors import InputRefused, UsageError, bug_report, text_of_error
from monograph.report.quantities import counted
from monograph.run.adapters import named_folders
from monograph.serve.app import application, is_local
from monograph.serve.connection import MAX_CONNECTIONS, MAX_HEAD_BYTES, Connection
from monograph.serve.service import Service
from monograph.serve.versions import AdapterRoom, Source, Version
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import is_folder, read_input
from monograph.terminal import one_line, warn

# After a first SIGTERM or Ctrl-C, requests that have begun may take this time to end.
DRAIN_S = 30
# A connection is closed if no further request comes within this time after an answer.
IDLE_S = 20
MAX_KEY_FILE_BYTES = 1 << 16
# The maximum number of characters of a name for the model.
MAX_NAME_LENGTH = 200
# The maximum number of open files in addition to those of MAX_CONNECTIONS. Most of them are connections
# that are being closed.
OTHER_FILES = 1000
# The maximum number of connections that wait to be accepted, and of those that are accepted together.
BACKLOG = 128


def run(
    run: str,
    *,
    host: str,
    port: int,
    api_key_file: Path | None,
    rows: int | None,
    served_names: Sequence[str],
    any_name: bool,
    adapters: Sequence[str] = (),
    adapter_dir: Path | None = None,
    adapter_slots: int | None = None,
    adapter_rank: int | None = None,
    draft: str | None = None,
) -> None:
    """Serve a run's newest checkpoint or a folder's model; see the command line's help."""
    # This must come before the import of torch._dynamo, which sets its own cache path in the environment.
    keep_compiled()
    require_names(served_names)
    keys = read_keys(api_key_file) if api_key_file else []
    if not keys and not is_local(host):
        raise UsageError(
            f"--host {host}: other machines can reach this host, so give --api-key-file, a file with a key on each line"
        )
    folders = named_folders("--adapter", adapters)
    if adapter_dir is not None and not keys:
        raise UsageError(
            f"--adapter-dir {adapter_dir}: whoever reaches a server without keys could add adapters: give "
            "--api-key-file"
        )
    if adapter_dir is not None and not is_folder(adapter_dir):
        raise InputRefused(f"--adapter-dir {adapter_dir}: no such folder")
    has_room_for_some = bool(folders) or adapter_dir is not None
    if not has_room_for_some and (adapter_slots is not None or adapter_rank is not None):
        raise UsageError(
            "--adapter-slots, --adapter-rank: there are no adapters: give --adapter or --adapter-dir, too"
        )
    room = AdapterRoom(folders, adapter_dir, adapter_slots, adapter_rank)
    max_rows = rows or MAX_ROWS[default_device().type]
    source = Source(run, max_rows, warn, room, draft)
    service = Service(source, _say, _report_bug, aliases=served_names, any_name=any_name)
    allow_connections()
    with _listening_socket(host, port) as listener:
        asyncio.run(_serve(service, host, keys, listener))


def require_names(names: Sequence[str]) -> None:
    """Refuse names of the model that a client could not send or read.

    Raises:
        UsageError: a name is empty, too long, or has an invisible character.
    """
    for name in names:
        is_visible = bool(name.strip()) and name.isprintable()
        if not is_visible or len(name) > MAX_NAME_LENGTH:
            raise UsageError(
                f"--served-name {name!r:.80}: expected 1 to {MAX_NAME_LENGTH} visible characters, such as gpt-4o"
            )


def allow_connections() -> None:
    """Raise the process's limit of open files, so that each connection can have one.

    On many systems the limit is about a thousand files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    limit = needed
    if hard != resource.RLIM_INFINITY:
        limit = min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def read_keys(path: Path) -> list[str]:
    """Return the keys in a file, which has one on each line.

    Raises:
        InputRefused: the file cannot be read or has no key, or a key is too short to be secret or
            cannot be sent in a header.
    """
    try:
        # Some editors begin a file with a byte order mark.
        lines = read_input(path, MAX_KEY_FILE_BYTES).decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputRefused(f"--api-key-file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputRefused(f"--api-key-file {path}: it is not UTF-8") from None
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key:
            continue
        # An invisible character would be missing in a key that is typed from the screen, and a header
        # cannot contain it.
        invisible = [letter for letter in key if not letter.isprintable()]
        if invisible:
            raise InputRefused(
                f"--api-key-file {path}:{number}: the key has the invisible character U+{ord(invisible[0]):04X}; "
                "expected letters, digits and signs"
            )
        if len(key) < 16:
            raise InputRefused(
                f"--api-key-file {path}:{number}: expected a key of at least 16 characters"
            )
        keys.append(key)
    if not keys:
        raise InputRefused(f"--api-key-file {path}: holds no key: write one on each line")
    return keys


def _listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        InputRefused: there is no such address, or another program listens there.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, socket_type, protocol, _, address = infos[0]
        # The protocol is given because asyncio turns Nagle's delay off only for sockets that name TCP.
        listener = socket.socket(family, socket_type, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Clients can connect from now on, and are told that the model is being loaded.
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InputRefused(f"--host {host} --port {port}: {error.strerror}") from None
    return listener


async def _serve(service: Service, host: str, keys: list[str], listener: socket.socket) -> None:
    """Serve until a signal, and then print how much was answered.

    An error that has ended the server is raised: one in the thread that runs the decoder (`Owner`), or one
    while the model was loaded.
    """
    server = _Server(server_config(service, host, keys), service)
    port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve([listener]))
    loading = asyncio.create_task(_load_and_follow(service, server, host, port, bool(keys)))
    try:
        await serving
    finally:
        with interrupts.end_at_once_inside():  # from here on, another Ctrl-C ends the process
            loading.cancel()
            try:
                with suppress(asyncio.CancelledError):
                    await loading  # raises the error that kept the model from being loaded
            finally:
                # All threads are ended here. If Python ended while one is inside a device's library, the
                # process would abort.
                service.end()
                await asyncio.get_running_loop().shutdown_default_executor()
    if service.crash_error is not None:
        raise service.crash_error
    answered = counted(sum(service.request_counts.by_status.values()), "request")
    # The server may end before the model is loaded.
    sampled_tokens = service.owner.counts.sampled_tokens if service.is_ready else 0
    _say(f"ended; {answered} answered, {counted(sampled_tokens, 'token')} written")


def server_config(service: Service, host: str, keys: list[str]) -> uvicorn.Config:
    """Return uvicorn's configuration, with the limits that are options of uvicorn."""
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
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        proxy_headers=False,
        backlog=BACKLOG,
    )


async def _load_and_follow(
    service: Service, server: uvicorn.Server, host: str, port: int, needs_key: bool
) -> None:
    """Load the model, print that it is ready, and then load each newer version of it."""

    def end_server() -> None:
        server.should_exit = True

    _say(f"loading {service.source.name}")
    try:
        version = await service.begin(end_server)
    except BaseException:
        end_server()
        raise
    _print_ready(version, host, port, needs_key)
    await service.follow()


def _print_ready(version: Version, host: str, port: int, needs_key: bool) -> None:
    url_host = f"[{host}]" if ":" in host else host  # an IPv6 address
    address = f"http://{url_host}:{port}"
    if not needs_key:
        access = "only this machine can reach it (others: --host, --api-key-file)"
    elif is_local(host):
        access = "only this machine can reach it, with a key"
    else:
        access = "clients must send a key"
    template = "chat template"
    if not version.has_template:
        template = "no chat template: it continues the messages as text"
    if version.bank is not None:
        adapters = ", ".join(version.bank.slots) or "none yet"
        room = f"room for {version.bank.capacity} of rank {version.bank.rank} or less"
        _say(f"adapters: {adapters}; {room}, {version.bank.nbytes / 2**20:,.0f} MiB")
    if version.draft is not None:
        _say(f"drafts: {_DRAFT_WORDS[version.drafts]}")
    print(
        f"ready     {address}   {version.id}: {version.capacity}; {template}\n"
        f"          OPENAI_BASE_URL={address}/v1   chat page: {address}/   {access}\n"
        "          a request with a seed always gets the same text, however busy the server is",
        flush=True,
    )


# When a version uses drafts, in words.
_DRAFT_WORDS: dict[DraftUse, str] = {
    "while they pay": "used while they save time, by count",
    "always": (
        "used in all passes, since they paid in a rehearsal, and since with this number of rows (--rows) they "
        "cannot be switched off without changing how texts are rounded"
    ),
    "never": (
        "not used: they did not pay in a rehearsal, and with this number of rows (--rows) they cannot be switched "
        "off later without changing how texts are rounded"
    ),
}


def _say(line: str) -> None:
    print(f"serve     {one_line(line)}", flush=True)


def _report_bug(error: Exception) -> None:
    path = bug_report(sys.argv[1:])
    words = one_line(f"{type(error).__name__}: {text_of_error(error)}")[:200]
    warn(f"bug: {words}; please report it with {path}")


class _Server(uvicorn.Server):
    """A server that ends at SIGTERM or Ctrl-C.

    After the first one it still answers the requests that have begun; at the second it ends at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM in the event loop, until the end of the block.

        Otherwise a signal would raise an error in the code that runs at that moment.
        """
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._handle_signal)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _handle_signal(self) -> None:
        # uvicorn's flags: `should_exit` ends the server after its requests, and `force_exit` at once.
        is_second = self.should_exit
        self.force_exit = is_second
        if not is_second and self._service.is_ready:
            running = self._service.owner.counts.running_rows
            if running:
                _say(f"ending; {counted(running, 'text')} may be finished within {DRAIN_S} s")
        self.should_exit = True
