"""Run: pytest tests/serve/test_connections.py

What a client may do to a connection: send nothing, read nothing, send what is no HTTP, or close
when it likes.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from clocks import HANG_S
from monograph.serve import connection
from monograph.text.tokenizer import Tokenizer
from served import Served, small

# 1 would end the text.
ENDLESS = {"prompt": "abc", "max_tokens": 250, "seed": 1, "logit_bias": {"1": -100}}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        yield served


@pytest.fixture
def generator(served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The decoder, slowed down so that a text lasts for some seconds."""
    until(served.idle)
    generator = next(iter(served.service.owner._decoders.values())).generator
    step = generator.advance

    def slow() -> Any:
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(generator, "advance", slow)
    return generator


def until(condition: Any) -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def asked(body: dict[str, Any], *headers: str) -> bytes:
    content = json.dumps({"model": "last", **body}).encode()
    return head(*headers, f"Content-Length: {len(content)}", "", "") + content


def head(*lines: str, kind: str = "application/json") -> bytes:
    first = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Type: {kind}"]
    return "\r\n".join([*first, *lines]).encode()


def connected(served: Served, *parts: bytes) -> socket.socket:
    """A socket on which these parts were sent, in packets of their own."""
    client = socket.create_connection(("127.0.0.1", served.port), timeout=HANG_S)
    for part in parts:
        client.sendall(part)
        time.sleep(0.05)
    return client


def read(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    with client, suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            found += part
    return found


@pytest.mark.parametrize(
    "parts",
    [
        [b"\x16\x03\x01\x00\xdc\x01\x00"],
        [b"GET /\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n"],
        [b"GET /", b"a" * 9000, b"a" * 9000],
        [head("Content-Length: -1", "", "")],
        [head("Content-Length: 1", "Content-Length: 2", "", "")],
        [head("") + CHUNKED, b"zz\r\n"],
        [head("") + CHUNKED, b"-5\r\nabcde\r\n"],
    ],
)
def test_what_is_no_http_is_refused_as_all_else(served: Served, parts: list[bytes]) -> None:
    first, _, body = read(connected(served, *parts)).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 400 ") and b"application/json" in first
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def message(answer: bytes) -> str:
    """What an answer to bad bytes says, after which nothing else comes."""
    first, _, body = answer.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 400 ") and b"connection: close" in first.lower()
    return str(json.loads(body)["error"]["message"])


def filled(size: int, lines: int) -> bytes:
    """A head of so many bytes."""
    short = HEALTH[:-2] + b"".join(b"X-%03d: \r\n" % number for number in range(lines)) + b"\r\n"
    return short.replace(b": \r\n", b": " + b"a" * (size - len(short)) + b"\r\n", 1)


@pytest.mark.parametrize("lines", [1, 40])
@pytest.mark.parametrize("more", [1, 1 << 12, 85_000])
def test_a_head_has_at_most_so_many_bytes_however_it_comes(
    served: Served, more: int, lines: int
) -> None:
    """In one packet it is whole before anything looks at how long it has become; blanks around a
    value count, too.
    """
    most, large = (
        filled(connection.MAX_HEAD_BYTES, lines),
        filled(connection.MAX_HEAD_BYTES + more, lines),
    )
    assert (len(most), len(large)) == (connection.MAX_HEAD_BYTES, connection.MAX_HEAD_BYTES + more)
    with connected(served, most) as client:
        assert client.recv(12) == b"HTTP/1.1 200"
    for wrong in (
        large,
        large.replace(b"aaa", b"   "),
        HEALTH.replace(b"/health", b"/" + b"a" * len(large)),
    ):
        for parts in ([wrong], [wrong[:9000], wrong[9000:]], [HEALTH + wrong]):
            answer = read(connected(served, *parts))
            assert "has more than 16,384 bytes" in message(answer[answer.rindex(b"HTTP/1.1 ") :])


@pytest.mark.parametrize(
    ("request_head", "words"),
    [
        (head("Content-Length: 5", "") + CHUNKED, "both Transfer-Encoding and Content-Length"),
        (head("Content-Length: 0", "") + CHUNKED, "both Transfer-Encoding and Content-Length"),
        (
            head("Transfer-Encoding: chunked", "Content-Length: 30", "", ""),
            "both Transfer-Encoding and Content-Length",
        ),
        (
            head("").replace(b"HTTP/1.1", b"HTTP/1.0") + CHUNKED,
            "Transfer-Encoding is not for HTTP/1.0",
        ),
        (head("Transfer-Encoding: gzip, chunked", "", ""), "not an HTTP request"),
    ],
)
def test_a_body_of_two_lengths_is_refused_and_what_hides_in_it_is_not_answered(
    served: Served, request_head: bytes, words: str
) -> None:
    answer = read(connected(served, request_head + b"0\r\n\r\n" + HEALTH))
    assert words in message(answer) and answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "parts",
    [
        [head("", kind="text/plain") + CHUNKED + b"5\r\nab", b"cde\r\nzz\r\n"],
        [
            head("Content-Length: 9", "", "").replace(b"POST", b"HEAD"),
            b"GET",
            HEALTH,
            b"\x00\r\n\r\n",
        ],
        [HEALTH.replace(b"GET", b"HEAD")[:-2] + CHUNKED + b"5\r\nab", b"cde\r\nzz\r\n"],
    ],
)
def test_bytes_that_come_after_the_answer_say_nothing_on_the_terminal(
    served: Served, parts: list[bytes], logged: list[logging.LogRecord]
) -> None:
    assert read(connected(served, *parts)).startswith(b"HTTP/1.1 ")
    assert not logged


def test_bytes_after_the_last_request_change_no_answer(
    served: Served, generator: Any, logged: list[logging.LogRecord]
) -> None:
    last = asked(ENDLESS | {"max_tokens": 20, "stream": True}, "Connection: close")
    assert read(connected(served, last, b"\r\n", b"\x00\x01")).endswith(
        b"data: [DONE]\n\n\r\n0\r\n\r\n"
    )
    assert not logged


@pytest.mark.parametrize("extra", [b"\r\n", HEALTH, b"x"])
@pytest.mark.parametrize("stream", [False, True])
def test_one_who_sent_more_and_closed_has_gone(
    served: Served, generator: Any, stream: bool, extra: bytes
) -> None:
    """uvicorn stops to read as soon as a further request has begun, and would not see the end."""
    client = connected(served, asked(ENDLESS | {"stream": stream}))
    until(lambda: generator.running == 1)
    client.sendall(extra)
    time.sleep(0.1)
    before = served.service.owner.counts.blocks
    client.close()
    until(lambda: generator.running == 0)
    assert served.service.owner.counts.blocks - before < 20  # of 250


def test_requests_that_come_together_are_answered_one_after_another(served: Served) -> None:
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    found = read(
        connected(served, asked({"prompt": "a"}) + asked({"prompt": "b"}) + HEALTH * 3 + last)
    )
    assert found.count(b"HTTP/1.1 200 OK") == 6


def test_one_who_sends_requests_and_waits_for_none_is_cut_off(
    served: Served, generator: Any
) -> None:
    client = connected(served, asked(ENDLESS), HEALTH * 2000)
    assert read(client) == b""
    until(served.idle)


def test_a_client_that_reads_nothing_holds_nothing_for_long(
    served: Served, generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.3)
    connections = served.server.server_state.connections
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", served.port))
    page = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    client.sendall(page * 1000)
    until(lambda: any(each.flow.write_paused for each in connections))
    until(lambda: not connections)
    client.close()


def test_an_answer_that_nobody_reads_closes_with_its_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer bytes than make uvicorn wait: they stay after the end of the answer, and the close
    waits for them.
    """
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    connections = served.server.server_state.connections
    with connected(served, HEALTH) as client:
        [ours] = connections
        monkeypatch.setattr(ours.transport, "close", lambda: None)
        until(lambda: not connections)
        client.recv(1 << 16)


def test_a_connection_that_was_reset_is_forgotten_at_once(served: Served) -> None:
    """uvicorn's timer for the next request would keep it, with all that it has read, for 20 s."""
    connections = served.server.server_state.connections
    until(lambda: not connections)
    client = connected(served, HEALTH)
    [ours] = connections
    until(lambda: ours.timeout_keep_alive_task)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    until(lambda: not connections)
    until(lambda: ours.timeout_keep_alive_task is None)


def test_idle_connections_lock_nobody_out(
    served: Served, generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 20)
    until(lambda: not served.server.server_state.connections)
    busy = connected(served, asked(ENDLESS | {"max_tokens": 50}, "Connection: close"))
    until(lambda: generator.running == 1)
    idle = [connected(served) for _ in range(30)]
    until(lambda: len(served.server.server_state.connections) == 20)
    assert served.ask("GET", "/health").status == 200 and served.texts("a")
    for each in idle[:11]:  # those that were idle longest
        each.settimeout(5)
        assert read(each) == b""
    assert read(busy).startswith(b"HTTP/1.1 200 ")
    for each in idle:
        each.close()
