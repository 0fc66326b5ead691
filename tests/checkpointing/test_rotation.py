"""Run: pytest tests/checkpointing/test_rotation.py (what is loaded, what is kept, a disk that does
not take it).
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from faults.examples import checkpoint, same, two_saves
from monograph.checkpointing import Checkpoint, load_newest, rotation, save
from monograph.errors import DiskFull, NoValidCheckpoint, UsageError
from monograph.storage import blocks


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_modes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        folder = save(tmp_path / "checkpoints", checkpoint(1))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask}
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask


def test_what_cannot_be_stored_is_refused_before_the_disk_is_touched(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="JSON"):
        save(tmp_path / "checkpoints", Checkpoint(1, {}, {}, {"generator": object()}))
    with pytest.raises(TypeError, match="spectrum: dtype torch.complex64"):
        save(
            tmp_path / "checkpoints",
            Checkpoint(1, {"spectrum": torch.zeros(2, dtype=torch.complex64)}, {}, {}),
        )
    with pytest.raises(UsageError, match="keep = 0: expected at least 1"):
        save(tmp_path / "checkpoints", checkpoint(1), keep=0)
    assert not (tmp_path / "checkpoints").exists()


def test_newest_says_what_it_skipped_and_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        NoValidCheckpoint, match="nowhere: no checkpoint to load; expected a folder"
    ):
        load_newest(tmp_path / "nowhere", pytest.fail)
    with pytest.raises(NoValidCheckpoint, match="expected a folder such as step-"):
        load_newest(tmp_path, pytest.fail)
    for update in (1, 2, 3):
        save(tmp_path, checkpoint(update), keep=3)
    assert same(load_newest(tmp_path, pytest.fail), checkpoint(3))
    assert same(load_newest(tmp_path, pytest.fail, at=1), checkpoint(1))
    with pytest.raises(
        NoValidCheckpoint, match="no checkpoint of update 5; there are those of 1, 2, 3"
    ):
        load_newest(tmp_path, pytest.fail, at=5)
    for update in (3, 2):
        (tmp_path / f"step-{update:08d}" / "state.json").write_text("{}")
    warnings: list[str] = []
    assert same(load_newest(tmp_path, warnings.append), checkpoint(1))
    assert len(warnings) == 1
    assert all(
        word in warnings[0]
        for word in ("step-00000003/state.json", "step-00000002/state.json", "2 bytes")
    )
    with pytest.raises(NoValidCheckpoint, match="step-00000002/state.json"):
        load_newest(tmp_path, pytest.fail, at=2)
    (tmp_path / "step-00000001" / "MANIFEST.json").unlink()
    with pytest.raises(
        NoValidCheckpoint,
        match="no valid checkpoint: .*step-00000003.*step-00000002.*step-00000001",
    ):
        load_newest(tmp_path, pytest.fail)


def test_one_that_is_removed_while_it_is_read_was_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on: what its reader listed is gone, and a newer one is there."""
    save(tmp_path, checkpoint(1), keep=1)
    load = rotation.load

    def overtaken(folder: Path) -> Checkpoint:
        if folder.name == "step-00000001":
            save(tmp_path, checkpoint(2), keep=1)
        return load(folder)

    monkeypatch.setattr(rotation, "load", overtaken)
    assert same(load_newest(tmp_path, pytest.fail), checkpoint(2))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for update in (1, 5, 20, 100_000_000):
        save(tmp_path, checkpoint(update), keep=3)
    assert names(tmp_path) == ["step-00000005", "step-00000020", "step-100000000"]
    assert same(load_newest(tmp_path, pytest.fail), checkpoint(100_000_000))


def test_saving_an_update_again_replaces_it(tmp_path: Path) -> None:
    two_saves(tmp_path)
    for seed in (1, 2):
        save(tmp_path, checkpoint(2, seed=seed))
        assert same(load_newest(tmp_path, pytest.fail), checkpoint(2, seed=seed))
        assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("also_replaced", [False, True])
def test_a_damaged_checkpoint_is_replaced_when_its_update_is_saved_again(
    also_replaced: bool, tmp_path: Path
) -> None:
    two_saves(tmp_path)
    if also_replaced:
        shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000002.replaced")
    (tmp_path / "step-00000002" / "state.json").unlink()
    save(tmp_path, checkpoint(2, seed=1))
    assert same(load_newest(tmp_path, pytest.fail), checkpoint(2, seed=1))
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_visibly_damaged_and_overtaken_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    for update in (1, 2, 3, 9):
        save(tmp_path, checkpoint(update), keep=9)
    state = tmp_path / "step-00000009" / "state.json"
    # A resumed run passes over it and goes on from 2.
    state.write_bytes(bytes(state.stat().st_size))
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"")
    save(tmp_path, checkpoint(4), keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_too_little_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_saves(tmp_path)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1234)
    )
    monkeypatch.setattr(blocks, "write_file", lambda *arguments: pytest.fail("written"))
    with pytest.raises(
        DiskFull,
        match=rf"{tmp_path}: .*update 3: No space.*needs \d,\d+ bytes, 1,234 are free.*earlier",
    ):
        save(tmp_path, checkpoint(3))
    with pytest.raises(
        DiskFull, match="update 0: No space.*1,234 are free.*nothing is lost: make room there"
    ):
        save(tmp_path, checkpoint(0))
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    two_saves(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            DiskFull, match=r"\.tmp-step-00000003/model.safetensors: .*File too large"
        ) as caught:
            save(tmp_path, checkpoint(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.EFBIG
    )
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert same(load_newest(tmp_path, pytest.fail), checkpoint(2))


def test_a_place_that_cannot_hold_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFull, match="file/checkpoints: .*Not a directory"):
        save(tmp_path / "file" / "checkpoints", checkpoint(1))
