"""A stub of a server: each token is one letter and takes 5 ms, and whoever finds all rows busy gets
429.

Run: python tests/stub_server.py FOLDER --port 8080 --rows 2
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

TOKEN_S = 0.005
busy = 0


def chunk(event: str) -> bytes:
    """One event of a stream, as HTTP's chunk."""
    return f"{len(event) + 8:x}\r\ndata: {event}\n\n\r\n".encode()


async def complete(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Answers whole or as a stream."""
    count, streamed = body["max_tokens"], body.get("stream")
    usage = {"completion_tokens": count}
    if streamed:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
    for index in range(count):
        await asyncio.sleep(TOKEN_S)
        if streamed:
            writer.write(
                chunk(json.dumps({"choices": [{"text": chr(97 + index % 26)}], "usage": None}))
            )
    if streamed:
        writer.write(
            chunk(json.dumps({"choices": [], "usage": usage})) + chunk("[DONE]") + b"0\r\n\r\n"
        )
    else:
        whole(
            writer,
            200,
            {
                "choices": [{"text": "".join(chr(97 + i % 26) for i in range(count))}],
                "usage": usage,
            },
        )


def whole(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> None:
    """Answers with an object."""
    content = json.dumps(answer).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)


async def serve(rows: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the requests of one connection."""
    global busy
    while head := await reader.readuntil(b"\r\n\r\n"):
        fields = dict(
            line.lower().split(": ", 1) for line in head.decode().splitlines()[1:] if line
        )
        body = json.loads(await reader.readexactly(int(fields.get("content-length", 0))) or b"{}")
        if head.startswith(b"GET"):
            whole(writer, 200, {"data": [{"id": "stub"}]})
        elif body["model"] != "stub":
            whole(writer, 404, {"error": {"message": "no such model"}})
        elif busy >= rows:
            whole(writer, 429, {"error": {"message": "all rows are busy"}})
        else:
            busy += 1
            try:
                await complete(body, writer)
            finally:
                busy -= 1


async def main(port: int, rows: int) -> None:
    """Serves until the process is ended."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(rows, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(
        main(
            int(sys.argv[sys.argv.index("--port") + 1]), int(sys.argv[sys.argv.index("--rows") + 1])
        )
    )
