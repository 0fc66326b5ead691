# Run: pytest tests/checkpointing/test_large.py
"""A file that is too large to be in memory twice: the same tensors one by one, each verified as it
is read.
"""

from __future__ import annotations

import pytest
import torch

from monograph import checkpointing
from monograph.checkpointing import Checkpoint, folder
from monograph.checkpointing.folder import CheckpointDamaged
from monograph.errors import NoValidCheckpoint
from monograph.storage import blocks


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(folder, "LARGE_BYTES", 10_000)
    draw = torch.Generator().manual_seed(0)
    model = {f"w{n}": torch.randn(17 * n + 1, 37, generator=draw) for n in range(9)}
    model |= {
        "ids": torch.arange(5),
        "half": torch.randn(33, generator=draw).bfloat16(),
        "empty": torch.zeros(0, 3),
    }
    optimizer = {"exp_avg.w0": torch.ones(3)}  # not large: read at once
    checkpointing.save(tmp_path, Checkpoint(7, model, optimizer, {"a": 1}))
    return tmp_path, model


def test_the_same_tensors_in_any_order_whatever_becomes_of_the_name(saved):
    path, model = saved
    found = checkpointing.load_newest(path, print)
    assert type(found.model).__name__ == "LargeFile" and isinstance(found.optimizer, dict)
    assert sorted(found.model) == sorted(model) and len(found.model) == len(model)
    (path / "step-00000007" / "model.safetensors").unlink()
    for name in [*found.model, *sorted(model, reverse=True)]:
        assert (
            torch.equal(found.model[name], model[name])
            and found.model[name].dtype == model[name].dtype
        )


def test_a_flipped_bit_is_found_before_and_while_it_is_read(saved):
    path, model = saved
    file = path / "step-00000007" / "model.safetensors"
    sound = checkpointing.load_newest(path, print)
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    with pytest.raises(NoValidCheckpoint, match="sha256"):
        checkpointing.load_newest(path, print)
    with pytest.raises(
        CheckpointDamaged, match=r"expected sha256 .* in block \d+ of \d+, found sha256"
    ):
        dict(sound.model)


def test_it_holds_a_few_blocks_and_no_more(saved):
    path, model = saved
    found = checkpointing.load_newest(path, print).model
    for name in found:
        assert len(found[name]) == len(model[name])
        assert found._read_block_cached.cache_info().currsize <= 4
