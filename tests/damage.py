"""Damage to files, as disks, transfers and people do it."""

from __future__ import annotations

import random
from collections.abc import Callable


def flipped(data: bytearray, draws: random.Random) -> None:
    data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)


def scattered(data: bytearray, draws: random.Random) -> None:
    for _ in range(draws.randrange(2, 9)):
        data[draws.randrange(len(data))] = draws.randrange(256)


def cut(data: bytearray, draws: random.Random) -> None:
    del data[draws.randrange(len(data)) :]


def zeroed(data: bytearray, draws: random.Random) -> None:
    begin = draws.randrange(len(data))
    end = min(len(data), begin + draws.choice([1, 16, 512, 4096]))
    data[begin:end] = bytes(end - begin)


def lengthened(data: bytearray, draws: random.Random) -> None:
    data += draws.randbytes(draws.choice([1, 3, 512]))


def missing(data: bytearray, draws: random.Random) -> None:
    begin = draws.randrange(len(data))
    del data[begin : begin + draws.choice([1, 16, 512])]


def doubled(data: bytearray, draws: random.Random) -> None:
    begin = draws.randrange(len(data))
    data[begin:begin] = data[begin : begin + draws.choice([1, 16, 512])]


# Single bits most often: they are the hardest to notice.
WAYS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flipped, flipped, flipped, scattered, cut, zeroed, lengthened, missing, doubled,
)  # fmt: skip


def damaged(whole: bytes, draws: random.Random) -> bytes:
    """The same with some damage; never equal to it."""
    while True:
        data = bytearray(whole)
        draws.choice(WAYS)(data, draws)
        if data != whole:
            return bytes(data)
