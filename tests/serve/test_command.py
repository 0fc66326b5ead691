"""Run: pytest tests/serve/test_command.py

How `monograph serve` listens.
"""

from __future__ import annotations

import asyncio
import resource
import socket

from monograph.serve.command import BACKLOG, FILES, MOST_CONNECTIONS, _listening, allow_connections


def test_an_answer_in_several_packets_waits_for_no_acknowledgement() -> None:
    """With Nagle's algorithm a stream's packets would come 40 ms late."""
    at_once = list[int]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def connect(listening: socket.socket) -> None:
        async with await asyncio.start_server(connected, sock=listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            await reader.read()
            writer.close()

    with _listening("127.0.0.1", 0) as listening:
        asyncio.run(connect(listening))
    assert at_once == [1]


def test_there_are_files_for_all_connections() -> None:
    """A process that may open 1,024 files could not even read its page beside 1,000 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        allow_connections()
        assert 4 * BACKLOG < FILES  # it takes four rounds of the loop until one that makes room is closed
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(MOST_CONNECTIONS + FILES, hard), hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
