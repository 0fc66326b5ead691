"""Run: pytest tests/serve/test_storm.py (law 20, S5: after any storm of broken requests the server
is as before).

Requests of all kinds that fail: no HTTP, half of it, lies about lengths, refused fields, and
clients that go while they wait, while their constraint is compiled, while their prompt is read or
scored, or while their text comes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import random
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from clocks import HANG_S
from monograph.text.tokenizer import Tokenizer
from served import Served, small

THREADS, MIB = 8, 1 << 20
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
ENDLESS = {"max_tokens": 250, "logit_bias": {"1": -100}}  # 1 would end the text
SCORED = {"prompt": ["abc " * 60] * 20, "max_tokens": 0, "echo": True, "logprobs": 2}
Parts = tuple[bytes, ...]


def head(*lines: str, path: str = "/v1/completions", kind: str = "application/json") -> bytes:
    first = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}"]
    return "\r\n".join([*first, *lines]).encode()


def post(
    body: Any, path: str = "/v1/completions", *headers: str, kind: str = "application/json"
) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps({"model": "last"} | body).encode()
    return head(*headers, f"Content-Length: {len(content)}", "", "", path=path, kind=kind) + content


def no_http(draw: random.Random) -> Parts:
    return draw.choice(
        [
            (b"", b""), (draw.randbytes(40),), (b"POST /v1/compl",), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
            (b"\x16\x03\x01\x00\xdc\x01\x00",), (b"GET /health\r\n\r\n",), (GET % b"/\x00",),
            (GET % (b"/" + b"a" * 30000),),
            (GET[:-2] % b"/" + b"X: " + b"a" * 20000,), (GET[:-2] % b"/health" + b"a:b\r\n" * 2000 + b"\r\n",),
            (GET.replace(b"localhost", b"a\r\nHost: b") % b"/",), (GET.replace(b"localhost", b"[") % b"/",),
        ]
    )  # fmt: skip


def lies(draw: random.Random) -> Parts:
    body = b'{"model": "last", "prompt": "a"}'
    length, lengths = (
        (lambda n: f"Content-Length: {n}"),
        [5, 99, -1, 10**9, 10**30, "x", "5\r\nContent-Length: 6"],
    )
    return draw.choice(
        [
            (head(length(draw.choice(lengths)), "", "") + body,), (head(length(MIB), "", ""), b" " * 70000),
            (head("") + CHUNKED, b"5\r\nabcde\r\nzz\r\n"), (head("") + CHUNKED, b"fffffffff\r\n", b" " * 70000),
            (head("") + CHUNKED + b"1;" + b"x" * 20000,), (head("Expect: 100-continue", length(9), "", ""),),
            (head(length(9), "", "") + CHUNKED + b"0\r\n\r\n",), (post(b" " * (MIB + 1)),),
            (head("", kind="text/plain") + CHUNKED + b"5\r\nab", b"cde\r\nzz\r\n"),
        ]
    )  # fmt: skip


def refused(draw: random.Random) -> Parts:
    return (
        draw.choice(
            [
                post(b"{"), post(b"[" * 9999), post({"prompt": "a", "temperature": "hot"}), post({}, "/v1/nothing"),
                post({"prompt": "a" * 5000}), post({"prompt": ["a"] * 2000}), post({"prompt": "a", "stop": ["a"] * 9}),
                post({"prompt": "a", "regex": "(" * 99}), post({"prompt": "a"}, kind="text/plain"),
                post({"model": "x", "prompt": "a"}), post({"prompt": "a"}, "/v1/completions", "Origin: http://x"),
                post({"prompt": [[999]]}), post({"messages": [{"role": "x"}]}, "/v1/chat/completions"),
                post({"prompt": "\ud800"}, "/tokenize"), post({"tokens": [10**9]}, "/detokenize"), GET % b"/nothing",
            ]
        ),
    )  # fmt: skip


def left(draw: random.Random) -> Parts:
    """What is well asked for, by one who goes."""
    prompt = "abc " * draw.choice([1, 10, 50])
    options = draw.choice(
        [
            {}, {"n": 4}, {"logprobs": 20}, {"regex": f"[a-c]{{1,{draw.randrange(9, 99)}}}"}, {"stop": ["b", "cab"]},
            {"stop": [str(draw.randrange(99))]}, {"choice": ["yes", f"no{draw.randrange(99)}"]}, SCORED,
            {"prompt": [prompt] * 5, "echo": True, "logprobs": 1}, {"dry_multiplier": 1.0}, {"top_p": 0.9},
        ]
    )  # fmt: skip
    stream = {"stream": draw.random() < 0.5 and "echo" not in options, "seed": draw.randrange(9)}
    asked = post({"prompt": prompt} | ENDLESS | options | stream)
    said = (
        {"messages": [{"role": "user", "content": prompt}]}
        | ENDLESS
        | {"stream": draw.random() < 0.5}
    )
    more = draw.choice([(), (b"\r\n",), (GET % b"/health",) * 2])
    return (draw.choice([asked, post(said, "/v1/chat/completions")]), *more)


def broken(port: int, kind: Callable[[random.Random], Parts], seed: int) -> None:
    """Send a request, wait a while or for something, and go in one of the ways in which a client
    goes.
    """
    draw = random.Random(seed)
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as client:
        for part in kind(draw):
            client.sendall(part)
            time.sleep(draw.choice([0, 0, 0.001, 0.01]))
        way = draw.choice(["at once", "later", "after something", "reset", "half"])
        if way == "later":
            time.sleep(draw.choice([0.01, 0.05]))
        if way == "after something":
            client.settimeout(0.05)
            client.recv(draw.choice([1, 500, 1 << 16]))
        if way == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if way == "half":
            client.shutdown(socket.SHUT_WR)


def storm(served: Served, seeds: range) -> None:
    """A storm, after which nothing is left."""
    kinds = [no_http, lies, refused, left]
    with ThreadPoolExecutor(THREADS) as pool:
        for begin in range(seeds.start, seeds.stop, 1000):
            list(
                pool.map(
                    lambda seed: broken(served.port, kinds[seed % 4], seed),
                    seeds[begin - seeds.start :][:1000],
                )
            )
    service, state = served.service, served.server.server_state
    gate, end = service.gate, time.monotonic() + HANG_S
    while not served.idle() or state.connections or state.tasks or service._version_users.total():
        assert time.monotonic() < end
        time.sleep(0.01)
    [decoder] = service.owner._decoders.values()
    machine = decoder.generator
    assert not (decoder.texts or machine._queue or any(machine._records) or gate._entrances)
    assert len(machine._free_rows) == machine.rows and not any(machine.tables._uses.values())  # type: ignore[attr-defined]
    assert not service.owner._score_jobs and not any(
        each._waiting for each in service._compilers.values()
    )
    assert service.crash_error is None and not served.bugs


def resident() -> int:
    """Bytes of memory in use, without what the allocator has for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.fixture
def served() -> Any:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        yield served


ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 40, "temperature": 0.8, "seed": 3, "n": 2}


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_after_a_storm_of_broken_requests_all_is_as_before(
    count: int, served: Served, logged: list[logging.LogRecord]
) -> None:
    before, seeds, service = served.texts(**ASKED), range(count), served.service
    storm(served, seeds)
    # How many go before they are answered is a matter of the clock.
    while service.gate.cancelled <= count // 5 or not service.request_counts.by_status.keys() > {
        200,
        400,
        403,
        404,
        415,
    }:
        assert seeds.stop < 4_000
        seeds = range(seeds.stop, seeds.stop + count)
        storm(served, seeds)
    assert served.texts(**ASKED) == before
    assert not logged


@pytest.mark.slow
def test_ten_thousand_broken_requests_leave_no_memory_behind(served: Served) -> None:
    before = served.texts(**ASKED)
    storm(
        served, range(8_000)
    )  # until all that is kept for further requests is full, and the heap as broken as it gets
    warm = resident()
    storm(served, range(4_000, 14_000))
    assert served.texts(**ASKED) == before
    assert resident() - warm < 20 * MIB
