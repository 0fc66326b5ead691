"""Run: pytest tests/serve/test_command.py

How `monograph serve` listens, and which keys a file holds.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from pathlib import Path

import pytest

from monograph.errors import InputRefused, UsageError
from monograph.serve.command import (
    BACKLOG,
    MAX_CONNECTIONS,
    OTHER_FILES,
    _listening_socket,
    allow_connections,
    read_keys,
    require_names,
)


def test_an_answer_in_several_packets_waits_for_no_acknowledgement() -> None:
    """With Nagle's algorithm a stream's packets would come 40 ms late."""
    at_once = list[int]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once.append(
            writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        )
        writer.close()

    async def connect(listening: socket.socket) -> None:
        async with await asyncio.start_server(connected, sock=listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            await reader.read()
            writer.close()

    with _listening_socket("127.0.0.1", 0) as listening:
        asyncio.run(connect(listening))
    assert at_once == [1]


def test_there_are_files_for_all_connections() -> None:
    """A process that may open 1,024 files could not even read its page beside 1,000 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        allow_connections()
        # It takes four rounds of the loop until one that makes room is closed.
        assert 4 * BACKLOG < OTHER_FILES
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (
            min(MAX_CONNECTIONS + OTHER_FILES, hard),
            hard,
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


KEY = "a-key-of-sixteen"


@pytest.mark.parametrize(
    "content",
    [f"{KEY}\nsecond-{KEY}", f"\ufeff{KEY}\r\nsecond-{KEY}\r\n", f"\n {KEY} \n\nsecond-{KEY}\t\n"],
)
def test_a_file_of_keys_may_be_written_by_any_editor(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content.encode())
    assert read_keys(path) == [KEY, f"second-{KEY}"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            f"{KEY}\n{KEY}\0",
            r"keys:2: the key has the invisible character U\+0000; expected letters",
        ),
        (f"{KEY[:8]}\0{KEY[8:]}", r"keys:1: the key has the invisible character U\+0000"),
        (f"{KEY}\n\ufeff{KEY}", r"keys:2: the key has the invisible character U\+FEFF"),
        (f"{KEY}\u200b", r"keys:1: the key has the invisible character U\+200B"),
        (f"{KEY[:8]}\xa0{KEY[8:]}", r"keys:1: the key has the invisible character U\+00A0"),
        ("short", "keys:1: expected a key of at least 16 characters"),
        ("\ufeff\n", "keys: holds no key"),
    ],
)
def test_a_key_that_nobody_could_send_is_refused_by_its_line(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content.encode())
    with pytest.raises(InputRefused, match=words):
        read_keys(path)


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\u200b", "x" * 201])
def test_a_models_name_that_nobody_could_send_or_read_is_refused(name: str) -> None:
    require_names(["gpt-4o", "x" * 200])
    with pytest.raises(
        UsageError, match="--served-name .*: expected 1 to 200 visible characters, such as gpt-4o"
    ):
        require_names(["gpt-4o", name])


def test_a_file_of_keys_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(KEY.encode("utf-16"))
    with pytest.raises(InputRefused, match="it is not UTF-8"):
        read_keys(path)
