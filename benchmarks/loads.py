"""Start OpenAI-compatible servers, and load them by clients that wait for their answers, or by
arrivals that do not.

A client costs the cores that the server needs, so it only notes when each packet comes; the packets
are read when the load is over. Times begin when a request is due, not when it is sent, so that a
slow client hides no waiting.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import harness
import numpy as np
from rounds import ChildFailed

from monograph.device import clock

PATH = "/v1/completions"
STATUS = b"HTTP/1.1 200 "
LAST_CHUNK = b"\r\n0\r\n\r\n"
UNKNOWN, NO_END = -1, -2  # of the length of an answer: its head has not come, and it is chunked
HANG_S, START_S, END_S = 300.0, 600.0, 60.0  # of a load, of a start, which compiles, and of an end
# Of a client that was refused; one that comes again at once would measure refusals only.
PAUSE_S = 0.1
Packets = list[tuple[float, bytes]]


class Outcome(NamedTuple):
    """What became of a request.

    Attributes:
        status: of HTTP; 0 if the connection broke.
        e2el_s: from when the request was due until the last byte.
        ttft_s: until the first text of a stream; None without any.
        itl_s: between one text of a stream and the next.
        tokens: that the server counted.
        text: all of it.
        error: what the server said; None: nothing went wrong.
    """

    status: int
    e2el_s: float
    ttft_s: float | None
    itl_s: list[float]
    tokens: int
    text: str
    error: str | None

    @property
    def tpot_s(self) -> float | None:
        """Return the time of each token after the first one, or None if there was none."""
        if self.ttft_s is None or self.tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.tokens - 1)


class Load(NamedTuple):
    """A load's outcomes in the order of its requests, its wall time, and the CPU time of the
    client.
    """

    outcomes: list[Outcome]
    wall_s: float
    client_cpu_s: float


# ── a connection ──────────────────────────────────────────────────────────────────────────────────


class Connection(asyncio.Protocol):
    """A connection that is kept: one request at a time, and the packets of its answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the side that writes."""
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.ended = transport, asyncio.get_running_loop().create_future()
        self.ended.set_result(None)

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; what is returned is done when its answer is whole or the connection
        broke.
        """
        self.packets: Packets = []
        self.head, self.length, self.received, self.tail = b"", UNKNOWN, 0, b""
        self.ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        """Note a packet, and whether it is the last."""
        self.packets.append((clock(), data))
        self.received += len(data)
        self.tail = (self.tail + data)[-len(LAST_CHUNK) :]
        if self.length == UNKNOWN:
            self.head, found, _ = b"".join(data for _, data in self.packets).partition(b"\r\n\r\n")
            if found:
                length = header(self.head, b"content-length")
                self.length = NO_END if length is None else len(self.head) + 4 + int(length)
        whole = self.tail == LAST_CHUNK if self.length == NO_END else self.received == self.length
        if whole and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer that was under way."""
        if not self.ended.done():
            self.ended.set_result(None)


class Clients:
    """The connections to a server; a request takes one that is free, or opens one."""

    def __init__(self, address: str) -> None:
        self.place = urlsplit(address)
        self.free: list[Connection] = []
        # llama.cpp's server says that it keeps a connection, and closes it after a stream.
        self.kept = True

    async def ask(self, request: bytes, due_s: float) -> tuple[float, Packets]:
        """Return when a request was due, and the packets of its answer."""
        while True:
            old = self.free.pop() if self.free else None
            connection = old if old and not old.transport.is_closing() else await self._open()
            await connection.ask(request)
            if connection.packets or connection is not old:
                break
            self.kept = False
        if self.kept and header(connection.head, b"connection") != b"close":
            self.free.append(connection)
        else:
            connection.transport.close()
        return due_s, connection.packets

    async def _open(self) -> Connection:
        place = self.place.hostname or "", self.place.port or 80
        _, connection = await asyncio.get_running_loop().create_connection(Connection, *place)
        return connection

    def close(self) -> None:
        """Close all of them."""
        for connection in self.free:
            connection.transport.close()


def header(head: bytes, name: bytes) -> bytes | None:
    """Return the value of a header of an answer, or None."""
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return next((value.strip() for key, _, value in lines if key.lower() == name), None)


# ── loads ─────────────────────────────────────────────────────────────────────────────────────────


def closed_loop(address: str, bodies: Sequence[dict[str, Any]], clients: int) -> Load:
    """Send requests by so many clients, each of which waits for its answer before it sends the next
    one.
    """

    async def run(connections: Clients, requests: Sequence[bytes]) -> list[tuple[float, Packets]]:
        answers: list[tuple[float, Packets]] = [(0.0, [])] * len(requests)
        left = iter(enumerate(requests))

        async def client() -> None:
            for index, request in left:
                answers[index] = await connections.ask(request, clock())
                if _status(answers[index][1]) != 200:
                    await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(client() for _ in range(clients)))
        return answers

    return _run(address, bodies, run)


def open_loop(address: str, bodies: Sequence[dict[str, Any]], per_s: float, seed: int) -> Load:
    """Send requests at the times of a Poisson process, whether or not earlier ones were answered."""
    draws = random.Random(seed)
    times = list(accumulate(draws.expovariate(per_s) for _ in bodies))

    async def run(connections: Clients, requests: Sequence[bytes]) -> list[tuple[float, Packets]]:
        began, under_way = clock(), []
        for at, request in zip(times, requests, strict=True):
            await asyncio.sleep(began + at - clock())
            under_way.append(asyncio.create_task(connections.ask(request, began + at)))
        return list(await asyncio.gather(*under_way))

    return _run(address, bodies, run)


def _run(
    address: str,
    bodies: Sequence[dict[str, Any]],
    load: Callable[[Clients, Sequence[bytes]], Coroutine[Any, Any, list[tuple[float, Packets]]]],
) -> Load:
    requests = [_request(urlsplit(address).netloc, body) for body in bodies]

    async def within_time() -> list[tuple[float, Packets]]:
        connections = Clients(address)
        async with asyncio.timeout(HANG_S):
            answers = await load(connections, requests)
        connections.close()
        return answers

    wall, cpu = clock(), time.process_time()
    answers = asyncio.run(within_time())
    wall, cpu = clock() - wall, time.process_time() - cpu
    return Load([read(due_s, packets) for due_s, packets in answers], wall, cpu)


def _request(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    lines = (
        f"POST {PATH} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    )
    return "\r\n".join([*lines, "", ""]).encode() + content


# ── what came ─────────────────────────────────────────────────────────────────────────────────────


def _status(packets: Packets) -> int:
    line = b"".join(data for _, data in packets[: len(STATUS)])[: len(STATUS)]
    return int(line[9:12]) if len(line) == len(STATUS) and line.startswith(b"HTTP/1.") else 0


def read(due_s: float, packets: Packets) -> Outcome:
    """Read an answer, whole or as a stream."""
    status = _status(packets)
    if not status:
        return Outcome(0, clock() - due_s, None, [], 0, "", "the connection broke")
    streamed, found = _objects(packets)
    texts = [
        (at, choice["text"])
        for at, each in found
        for choice in each.get("choices", ())
        if choice.get("text")
    ]
    counts = [each["usage"]["completion_tokens"] for _, each in found if each.get("usage")]
    errors = [json.dumps(each["error"]) for _, each in found if "error" in each]
    if not errors and not counts:
        errors = ["the answer was cut short: it has no usage"]
    return Outcome(
        status,
        packets[-1][0] - due_s,
        texts[0][0] - due_s if streamed and texts else None,
        [after - before for (before, _), (after, _) in pairwise(texts)] if streamed else [],
        counts[-1] if counts else 0,
        "".join(text for _, text in texts),
        errors[0] if errors else None,
    )


def _objects(packets: Packets) -> tuple[bool, list[tuple[float, dict[str, Any]]]]:
    """Return whether an answer is a stream, and its objects with the times when their last bytes
    came.
    """
    raw, ends = (
        b"".join(data for _, data in packets),
        list(accumulate(len(data) for _, data in packets)),
    )
    head, _, body = raw.partition(b"\r\n\r\n")
    chunked = b"chunked" in (header(head, b"transfer-encoding") or b"").lower()
    pieces = list(_chunks(raw, len(head) + 4)) if chunked else [(len(raw), body)]
    if b"event-stream" not in (header(head, b"content-type") or b""):
        try:
            return False, [(packets[-1][0], json.loads(b"".join(piece for _, piece in pieces)))]
        except ValueError:
            return False, []
    times = [at for at, _ in packets]
    return True, [(times[bisect_right(ends, end - 1)], event) for end, event in _events(pieces)]


def _chunks(raw: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield each chunk of a body, and where it ends in what came."""
    while (line := raw.find(b"\r\n", at)) >= 0 and (
        size := int(raw[at:line].partition(b";")[0], 16)
    ):
        at = line + 2 + size
        if at > len(raw):
            return
        yield at, raw[line + 2 : at]
        at += 2


def _events(pieces: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each JSON event of a stream, and where its last piece ends in what came."""
    rest = b""
    for end, piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != event and data != b"[DONE]":
                yield end, json.loads(data)


# ── servers ───────────────────────────────────────────────────────────────────────────────────────


class Server(NamedTuple):
    """A server that is up: where, the id of its process, the fields that its requests need, and how
    it is ended.
    """

    address: str
    pid: int
    own: dict[str, Any]
    end: Callable[[], None]

    def cpu_s(self) -> float:
        """Return the CPU time that its process has used."""
        # The name of a process is in brackets and may hold spaces.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def started(
    command: Sequence[str],
    address: str,
    threads: int,
    log: Path,
    source: Path = harness.ROOT / "src",
) -> Server:
    """Start a server by its command, as a person does, and wait until it is in health; `source` has
    the package.

    Raises:
        ChildFailed: it ended, or was not up in time.
    """
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    limits = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("w+b") as said:
        process = subprocess.Popen(
            command, env=os.environ | limits, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )

    def end() -> None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    until = clock() + START_S
    while process.poll() is None and clock() < until:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=10):
                break
        except OSError:  # nobody listens, or 503 while it loads
            time.sleep(0.1)
    else:
        end()
        told = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise ChildFailed(told[-1] if told else f"exit code {process.returncode}", told[-40:])
    try:
        with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]["id"]
    except OSError as error:
        end()
        raise ChildFailed(f"/v1/models: {error}", []) from None
    return Server(address, process.pid, {"model": model}, end)


def loaded(
    server: Server, load: Callable[..., Load], bodies: Sequence[dict[str, Any]], *how: Any
) -> dict[str, Any]:
    """Put a load on a server; return its times, and what became of its requests."""
    cpu = server.cpu_s()
    found = load(server.address, [body | server.own for body in bodies], *how)
    outcomes = found.outcomes
    return {
        "wall_s": found.wall_s,
        "cpu_s": server.cpu_s() - cpu,
        "client_cpu_s": found.client_cpu_s,
        "tokens": sum(one.tokens for one in outcomes),
        "texts": [one.text for one in outcomes],
        "answered": [one for one in outcomes if not one.error],
        "refused": sum(one.status == 429 for one in outcomes),
        "failed": [
            f"{one.status}: {one.error}" for one in outcomes if one.error and one.status != 429
        ],
    }


def counted(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what is said of all rounds of a load: the requests, and the client's share of a core."""
    failed = [error for each in rounds for error in each["failed"]]
    return {
        "answered": sum(len(each["answered"]) for each in rounds),
        "refused": sum(each["refused"] for each in rounds),
        "failed": len(failed),
        "error": failed[0] if failed else None,
        "client_share": harness.spread([each["client_cpu_s"] / each["wall_s"] for each in rounds]),
        "tokens_per_s": harness.spread([each["tokens"] / each["wall_s"] for each in rounds]),
    }


def times_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return percentiles of all requests' times."""
    values: dict[str, list[Any]] = {
        "ttft_s": [one.ttft_s for one in outcomes],
        "itl_s": [gap for one in outcomes for gap in one.itl_s],
        "tpot_s": [one.tpot_s for one in outcomes],
        "e2el_s": [one.e2el_s for one in outcomes],
    }
    found: dict[str, Any] = {}
    for name, all_of in values.items():
        there = [value for value in all_of if value is not None]
        found[name] = (
            {f"p{share}": float(np.percentile(there, share)) for share in (50, 90, 99)}
            if there
            else None
        )
    return found
