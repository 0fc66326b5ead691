"""Run: pytest tests/serve/test_command.py

How `monograph serve` listens.
"""

from __future__ import annotations

import asyncio
import socket

from monograph.serve.command import _listening


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
