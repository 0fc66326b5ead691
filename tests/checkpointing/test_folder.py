"""Run: pytest tests/checkpointing/test_folder.py [-m slow] (every damaged file is refused by name)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from faults.examples import checkpoint, same, two_saves
from monograph.checkpointing import CheckpointDamaged, load, load_newest, load_state, save, verify
from monograph.checkpointing.folder import FileEntry, read_manifest
from monograph.errors import NoValidCheckpoint
from monograph.storage import blocks

FILES = ("MANIFEST.json", "model.safetensors", "optimizer.safetensors", "state.json")


def test_loaded_tensors_are_plain_memory_of_their_own(tmp_path: Path) -> None:
    folder = save(tmp_path, checkpoint(1))
    loaded = load(folder)
    storages = [
        tensor.untyped_storage() for tensor in (*loaded.model.values(), *loaded.optimizer.values())
    ]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    for name in ("model.safetensors", "optimizer.safetensors"):
        with open(folder / name, "r+b") as file:  # in place: a mapping would show it
            file.write(bytes((folder / name).stat().st_size))
    assert same(loaded, checkpoint(1))


@pytest.mark.parametrize("flips", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_flipped_bit_anywhere_falls_back_with_one_warning(flips: int, tmp_path: Path) -> None:
    two_saves(tmp_path)
    random_numbers = random.Random(flips)
    for turn in range(flips):
        path = tmp_path / "step-00000002" / FILES[turn % len(FILES)]
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[random_numbers.randrange(len(whole))] ^= 1 << random_numbers.randrange(8)
        path.write_bytes(flipped)
        warnings: list[str] = []
        assert same(load_newest(tmp_path, warnings.append), checkpoint(1)), path
        assert len(warnings) == 1 and str(path) in warnings[0] and "step-00000001" in warnings[0]
        path.write_bytes(whole)
    assert same(load_newest(tmp_path, pytest.fail), checkpoint(2))


@pytest.mark.parametrize("ways", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_any_change_of_any_byte_of_the_manifest_is_refused(ways: int, tmp_path: Path) -> None:
    """In all three ways, or each byte in another one of them."""
    folder = save(tmp_path, checkpoint(1))
    whole = (folder / "MANIFEST.json").read_bytes()
    for place in range(len(whole)):
        for other in ((whole[place] ^ 1, ord(" "), ord("0")) * 2)[place % 3 :][:ways]:
            if other != whole[place]:
                (folder / "MANIFEST.json").write_bytes(
                    whole[:place] + bytes([other]) + whole[place + 1 :]
                )
                with pytest.raises(CheckpointDamaged, match="MANIFEST.json"):
                    verify(folder)


def test_the_error_names_the_file_and_both_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 512)
    folder = save(tmp_path, checkpoint(1))
    path = folder / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[1000] ^= 4
    path.write_bytes(data)
    expected = json.loads((folder / "MANIFEST.json").read_text())["files"][path.name]["sha256"]
    for check in (verify, load):
        with pytest.raises(CheckpointDamaged) as caught:
            check(folder)
        assert caught.value.file == path
        assert caught.value.expected == f"sha256 {expected[1]} in block 2 of {len(expected)}"
        assert caught.value.actual.startswith("sha256 ") and caught.value.actual[7:] not in expected
        assert (
            str(caught.value)
            == f"{path}: expected {caught.value.expected}, found {caught.value.actual}"
        )


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('"update": 1', '"update": 2', "found sha256"),
        (",\n", " ,\n", "found the same content spelled otherwise"),
    ],
)
def test_the_manifest_vouches_for_itself(old: str, new: str, found: str, tmp_path: Path) -> None:
    folder = save(tmp_path, checkpoint(1))
    text = (folder / "MANIFEST.json").read_text()
    (folder / "MANIFEST.json").write_text(text.replace(old, new, 1))
    with pytest.raises(
        CheckpointDamaged, match=f"content of sha256 {json.loads(text)['root']}, {found}"
    ):
        verify(folder)


def forge(folder: Path, name: str, data: bytes, **changed: object) -> None:
    """Replaces a file and writes a manifest that vouches for it, as somebody with bad intentions
    would.
    """
    manifest = read_manifest(folder)
    (folder / name).write_bytes(data)
    entry = FileEntry(len(data), [hashlib.sha256(data).hexdigest()])
    forged = dataclasses.replace(manifest, **{"files": {**manifest.files, name: entry}, **changed})
    (folder / "MANIFEST.json").write_bytes(forged.encode())


@pytest.mark.parametrize(
    ("name", "data", "changed"),
    [
        ("state.json", b"not JSON", {}),
        ("state.json", b"[1]", {}),
        ("state.json", b"[" * 100_000, {}),
        ("model.safetensors", b"", {}),
        ("model.safetensors", b"1234567", {}),
        ("optimizer.safetensors", b"\xff" * 16, {}),
        ("state.json", b"{}", {"run": ["a"]}),
        (
            "state.json",
            b"{}",
            {"files": dict.fromkeys(FILES[1:], FileEntry(10, cast(list[str], 7)))},
        ),
        ("state.json", b"{}", {"files": dict.fromkeys(FILES[1:], FileEntry(-1, []))}),
    ],
)
def test_a_forged_checkpoint_is_refused_in_one_line(
    name: str, data: bytes, changed: dict[str, object], tmp_path: Path
) -> None:
    folder = save(tmp_path, checkpoint(1))
    forge(folder, name, data, **changed)
    with pytest.raises(CheckpointDamaged) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_state_that_nobody_writes_is_refused_by_its_size_alone(tmp_path: Path) -> None:
    folder = save(tmp_path, checkpoint(1))
    manifest = read_manifest(folder)
    manifest.files["state.json"] = FileEntry(2**25, [])
    (folder / "MANIFEST.json").write_bytes(manifest.encode())
    os.truncate(folder / "state.json", 2**25)
    with pytest.raises(
        CheckpointDamaged, match="state.json: expected at most 16777216 bytes, found 33554432 bytes"
    ):
        load_state(folder)


def replace_by_link(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


WAYS_TO_DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "missing": lambda path: path.unlink(),
    "misnamed": lambda path: path.rename(path.with_name("other")),
    "extra": lambda path: path.with_name("extra").write_bytes(b""),
    "another update's": lambda path: shutil.copy(
        path.parent.parent / "step-00000001" / path.name, path
    ),
    "link": replace_by_link,
    "pipe": replace_by_pipe,
    "folder": replace_by_folder,
}


@pytest.mark.parametrize("way", WAYS_TO_DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_damaged_missing_extra_and_swapped_files_are_refused(
    way: str, file: str, tmp_path: Path
) -> None:
    two_saves(tmp_path)
    folder = tmp_path / "step-00000002"
    WAYS_TO_DAMAGE[way](folder / file)
    for check in (verify, load):
        with pytest.raises(CheckpointDamaged, match=r"expected .*, found "):
            check(folder)
    warnings: list[str] = []
    assert same(load_newest(tmp_path, warnings.append), checkpoint(1)) and len(warnings) == 1


def test_exchanged_files_and_folders_are_refused(tmp_path: Path) -> None:
    two_saves(tmp_path)
    one, two, aside = tmp_path / "step-00000001", tmp_path / "step-00000002", tmp_path / "aside"
    for first, second in ((one, two), (two / "model.safetensors", two / "optimizer.safetensors")):
        for source, target in ((first, aside), (second, first), (aside, second)):
            source.rename(target)
    with pytest.raises(NoValidCheckpoint, match="update 2 as in the folder's name, found update 1"):
        load_newest(tmp_path, pytest.fail)


def test_a_manifest_cannot_name_other_files(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoints", checkpoint(1))
    secret = tmp_path / "secret"
    secret.write_text("{}")
    content = json.loads((folder / "MANIFEST.json").read_text())
    content["files"]["../../secret"] = {"bytes": 2, "sha256": []}
    (folder / "MANIFEST.json").write_text(json.dumps(content, indent=1) + "\n")
    with pytest.raises(CheckpointDamaged):
        load(folder)
