"""Arrays on disk: `pytest tests/data/test_shards.py`."""

from __future__ import annotations

import random

import numpy as np
import pytest

from monograph.data import shards
from monograph.data.shards import ShardWriter, open_shard, seal, token_dtype
from monograph.errors import InputRefused


def read(path, vocab_size=300):
    return open_shard(path, token_dtype(vocab_size), seal(path))


def write(path, items, vocab_size=300):
    with ShardWriter(path, token_dtype(vocab_size)) as shard:
        for part in np.array_split(items, 3):
            shard.append(part)
    return path


@pytest.mark.parametrize(("vocab_size", "bytes_each"), [(300, 2), (65_536, 2), (65_537, 4)])
def test_what_is_written_is_read(tmp_path, vocab_size, bytes_each):
    items = np.random.default_rng(0).integers(0, vocab_size, 700_001)
    items[0] = vocab_size - 1
    found = read(write(tmp_path / "a", items, vocab_size), vocab_size)
    assert found.itemsize == bytes_each and (found == items).all()
    assert not found.flags.writeable


def test_nothing_is_a_shard_too(tmp_path):
    assert len(read(write(tmp_path / "a", np.array([])))) == 0


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BLOCK_BYTES", 64)
    path = write(tmp_path / "a", np.arange(200))
    whole, sealed = path.read_bytes(), seal(path)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << random.Random(position).randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(InputRefused, match=str(path)):
            open_shard(path, token_dtype(300), sealed)
    for size in [*range(0, len(whole), 7), len(whole) + 1]:
        path.write_bytes(whole[:size].ljust(size, b"\0"))
        with pytest.raises(InputRefused, match=str(path)):
            open_shard(path, token_dtype(300), sealed)
    path.write_bytes(whole)
    assert (open_shard(path, token_dtype(300), sealed) == np.arange(200)).all() and seal(
        path
    ) == sealed


def test_the_damaged_block_is_named(tmp_path):
    path = write(tmp_path / "a", np.zeros(1_200_000))
    damaged = bytearray(path.read_bytes())
    damaged[shards.BLOCK_BYTES] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(InputRefused, match="block 2 of 3 is damaged"):
        read(path)


def test_another_shard_is_refused(tmp_path):
    with pytest.raises(InputRefused, match="not the file that manifest.json lists"):
        open_shard(
            write(tmp_path / "a", np.arange(5)),
            token_dtype(300),
            seal(write(tmp_path / "d", np.arange(1, 6))),
        )
    with pytest.raises(InputRefused, match="cannot be read"):
        open_shard(tmp_path / "missing", token_dtype(300), "")
    assert seal(write(tmp_path / "b", np.arange(6))) != seal(write(tmp_path / "c", np.arange(7)))


def test_an_error_while_writing_leaves_no_valid_file(tmp_path):
    with pytest.raises(ZeroDivisionError), ShardWriter(tmp_path / "a", token_dtype(9)) as shard:
        shard.append(np.arange(5))
        raise ZeroDivisionError
    with pytest.raises(InputRefused):
        open_shard(tmp_path / "a", token_dtype(9), seal(write(tmp_path / "b", np.arange(5))))
