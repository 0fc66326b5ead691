# Run: pytest tests/benchmarks/test_serve.py [-m slow]
"""The load maker reads what came and when, counts refusals, and the script measures a server with
it.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate, pairwise

import pytest

import stub_server
from scripts import smoke

STUB = [sys.executable, stub_server.__file__]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FIRST, SECOND = (
    b'data: {"choices":[{"text":"a"}]}\n\n',
    'data: {"choices":[{"text":"ébc"}]}\n\n'.encode(),
)
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'


def chunked(*pieces):
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


# An event may lie in two chunks, and a chunk may hold two events.
STARTED = HEAD + chunked(b": ping\n\n" + FIRST[:10], FIRST[10:], SECOND)
STREAM = STARTED + chunked(USAGE + b"data: [DONE]\n\n", b"")


@pytest.fixture
def loads(script):
    return script("loads")


@pytest.fixture
def stub(loads, tmp_path):
    """A stub with two rows."""
    port = loads.free_port()
    server = loads.started(
        [*STUB, "FOLDER", "--port", str(port), "--rows", "2"],
        f"http://127.0.0.1:{port}",
        1,
        tmp_path / "log",
    )
    yield server
    server.end()


def asked(server, count, tokens=4, **fields):
    return [
        {"prompt": [index], "max_tokens": tokens, **server.own, **fields} for index in range(count)
    ]


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_read_however_it_is_cut_into_packets(loads, size):
    """A text's time is that of the packet with the last byte of its event."""
    parts = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    packets = [(100.0 + index, part) for index, part in enumerate(parts)]
    found = loads.read(99.0, packets)
    assert (found.status, found.text, found.tokens, found.error) == (200, "aébc", 2, None)
    ends = list(accumulate(map(len, parts)))

    def packet_of(last):
        end = STREAM.index(last) + len(last)
        return next(index for index, until in enumerate(ends) if until >= end)

    first, second = packet_of(FIRST[10:]), packet_of(SECOND)
    assert (
        found.ttft_s == first + 1 and found.itl_s == [second - first] and found.e2el_s == len(parts)
    )
    assert found.tpot_s == found.e2el_s - found.ttft_s


def test_a_stream_that_ends_early_is_no_answer(loads):
    for there in (STARTED, STARTED + chunked(USAGE)[:20]):
        found = loads.read(0.0, [(1.0, there)])
        assert "cut short" in found.error and found.text == "aébc"
    late = loads.read(0.0, [(1.0, STARTED + chunked(b'data: {"error": "late"}\n\n', b""))])
    assert late.error == '"late"'
    assert loads.read(0.0, []).error == "the connection broke"


def test_clients_wait_for_their_answers(loads, stub):
    load = loads.closed_loop(stub.address, asked(stub, 6, **STREAMED), 2)
    assert [one.text for one in load.outcomes] == ["abcd"] * 6 and {
        one.tokens for one in load.outcomes
    } == {4}
    assert load.wall_s > 3 * 4 * stub_server.TOKEN_S and load.client_cpu_s < load.wall_s
    for one in load.outcomes:
        assert one.ttft_s > 0.9 * stub_server.TOKEN_S and len(one.itl_s) == 3
        assert one.e2el_s >= one.ttft_s + sum(one.itl_s) and one.error is None
    whole = loads.closed_loop(stub.address, asked(stub, 2), 2).outcomes[0]
    assert (whole.text, whole.tokens, whole.ttft_s, whole.itl_s) == ("abcd", 4, None, [])


def test_refusals_are_counted_apart_from_failures(loads, stub):
    found = loads.loaded(stub, loads.closed_loop, asked(stub, 8, tokens=40), 4)
    assert (
        found["refused"] > 0
        and not found["failed"]
        and found["refused"] + len(found["answered"]) == 8
    )
    told = loads.counted([found, found])
    assert told["refused"] == 2 * found["refused"] and told["error"] is None


def test_what_a_server_refuses_otherwise_is_a_failure_with_its_words(loads, stub):
    other = stub._replace(own={"model": "other"})
    found = loads.loaded(other, loads.closed_loop, asked(stub, 1), 1)
    assert found["failed"] == ['404: {"message": "no such model"}']


def test_arrivals_wait_for_nobody_and_are_those_of_the_seed(loads, stub, monkeypatch):
    """Times begin when a request is due, so that one that is sent late has waited."""
    due, read = [], loads.read
    monkeypatch.setattr(
        loads, "read", lambda due_s, packets: due.append(due_s) or read(due_s, packets)
    )
    for seed in (1, 1, 2):
        load = loads.open_loop(stub.address, asked(stub, 20, tokens=20), 400.0, seed)
        assert {one.status for one in load.outcomes} == {200, 429}
    gaps = [[after - before for before, after in pairwise(due[at : at + 20])] for at in (0, 20, 40)]
    assert gaps[0] == pytest.approx(gaps[1]) and gaps[0] != pytest.approx(gaps[2])
    assert len({round(gap, 9) for gap in gaps[0]}) == 19 and 0.5 < 400 * sum(gaps[0]) / 19 < 2


def test_a_connection_that_the_server_closed_is_opened_again(loads):
    """llama.cpp's server closes one after a stream, though it says that it keeps it."""
    server = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as here:
    print(flush=True)
    while True:
        one = here.accept()[0]
        one.recv(10000)
        one.sendall(bytes.fromhex(sys.argv[2]))
        one.close()
"""
    port = loads.free_port()
    command = [sys.executable, "-c", server, str(port), STREAM.hex()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        load = loads.closed_loop(f"http://127.0.0.1:{port}", [{}] * 5, 1)
    finally:
        process.kill()
        process.communicate()
    assert [one.text for one in load.outcomes] == ["aébc"] * 5


def test_serve(script, monkeypatch, tmp_path, capsys):
    """Beside a stub, which refuses who finds no row, and without `generate`, which compiles."""
    serve = script("serve")
    monkeypatch.setattr(serve, "COMMAND", STUB)
    cases = smoke(
        serve,
        monkeypatch,
        tmp_path / "found.json",
        "--servers",
        serve.OURS,
        "--parts",
        "latency",
        "rate",
    )["cases"]
    loads = {case.get("load"): case for case in cases}
    assert [*loads] == [
        "idle",
        "rows closed",
        "2 x rows closed",
        "8 x rows at once",
        "1 x rate open",
        "2 x rate open",
        None,
    ]
    assert all(case["answered"] > 0 and not case["failed"] for case in cases)
    assert (
        loads["idle"]["refused"]
        == loads["rows closed"]["refused"]
        == 0
        < loads["2 x rows closed"]["refused"]
    )
    assert (
        loads["idle"]["ttft_s"]["p50"] > 0.9 * stub_server.TOKEN_S < loads["idle"]["itl_s"]["p99"]
    )
    assert (
        loads["2 x rate open"]["arrivals_per_s"] == 2 * loads["1 x rate open"]["arrivals_per_s"] > 0
    )
    assert cases[-1]["part"] == "rate" and cases[-1]["requests_per_s"]["low"] > 0
    said = capsys.readouterr().out
    assert "TTFT" in said and "requests/s" in said and "so many times as fast" not in said
    monkeypatch.setattr(
        serve, "COMMAND", [sys.executable, "-c", "raise SystemExit('no such command')"]
    )
    [case] = smoke(
        serve, monkeypatch, tmp_path / "none.json", "--servers", serve.OURS, "--parts", "rate"
    )["cases"]
    assert case["error"] == "not measured: no such command"


def test_what_is_compared(script):
    """Above 1 Monograph is faster: rates are divided by the other's, and the other's times by its
    own.
    """
    serve, counts = script("serve"), {"answered": 1}
    times = {"ttft_s": {"p50": 1.0, "p99": 2.0}, "itl_s": None, "e2el_s": {"p50": 3.0}}
    rates = {"requests_per_s": {"values": [10.0, 20.0]}}
    ours = [{"part": "latency", "load": "idle", **times}, {"part": "rate", **rates}]
    theirs = [
        {"part": "latency", "load": "idle", **times, "ttft_s": {"p50": 2.0, "p99": 2.0}},
        {"part": "rate", "requests_per_s": {"values": [20.0, 10.0]}},
    ]
    cases = [{"system": serve.OURS, **counts, **case} for case in ours]
    cases += [{"system": serve.SERVERS[1], **counts, **case} for case in theirs]
    found = {case["what"]: case["times"] for case in serve.compared(cases)}
    assert {what: spread["values"] for what, spread in found.items()} == {
        "TTFT p50, idle": [2.0],
        "TTFT p99, idle": [1.0],
        "E2EL p50, idle": [1.0],
        "requests/s": [0.5, 2.0],
    }


@pytest.mark.slow
def test_serve_beside_generate_and_llama_cpp(script, monkeypatch, tmp_path):
    """The servers themselves: what is served is what is generated."""
    for package in ("starlette", "uvicorn", "xllamacpp"):
        pytest.importorskip(package)
    cases = smoke(
        script("serve"), monkeypatch, tmp_path / "found.json", "--parts", "overhead", "rate"
    )["cases"]
    assert [case for case in cases if case.get("error")] == []
    ways = {(case["system"], case.get("how")): case for case in cases if case["part"] == "overhead"}
    assert len(ways) == 2 + 2 + 2 and all(case["answered"] == 2 * 2 for case in ways.values())
    assert (
        ways["monograph", "whole"]["same_text"] == ways["monograph", "streamed"]["same_text"] == 1
    )
    assert {case["what"] for case in cases if case["part"] == "compared"} == {
        "tokens/s streamed",
        "requests/s",
    }
