"""Run: pytest tests/faults/test_harness.py (the fault harness itself; skipped where there is no C
compiler).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from faults.harness import ERRORS, EVERY_FAULT, EVERY_UNREAD, FaultServer, applies, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


@pytest.fixture(scope="module")
def faults() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


def write_ten_bytes(folder: Path) -> None:
    with open(folder / "ten", "wb", buffering=0) as file:
        if file.write(b"0123456789") != 10:
            raise RuntimeError("short write")
        os.fsync(file.fileno())


def write_in_every_way(folder: Path) -> None:
    (folder / "python.txt").write_text("text")
    with open(folder / "appended", "a") as file:
        file.write("line\n")
    descriptor = os.open(folder / "vectors", os.O_CREAT | os.O_WRONLY)
    os.writev(descriptor, [b"one", b"two"])
    os.pwrite(descriptor, b"three", 6)
    os.ftruncate(descriptor, 4)
    os.close(descriptor)
    save_file({"weight": torch.ones(3)}, folder / "rust.safetensors")
    np.arange(5).tofile(folder / "stdio.bin")
    torch.save(torch.ones(2), folder / "cpp.pt")
    mapped = np.memmap(folder / "mapped.bin", dtype=np.uint8, mode="w+", shape=(8,))
    mapped.flush()
    shutil.copyfile(folder / "appended", folder / "copied")
    (folder / "sub").mkdir()
    os.replace(folder / "copied", folder / "sub" / "moved")
    shutil.rmtree(folder / "sub")


def read_in_every_way(folder: Path) -> None:
    (folder / "python.txt").read_text()
    descriptor = os.open(folder / "vectors", os.O_RDONLY)
    os.preadv(descriptor, [bytearray(2)], 0)
    os.close(descriptor)
    with safe_open(folder / "rust.safetensors", framework="pt") as file:
        file.get_tensor("weight")
    np.fromfile(folder / "stdio.bin", dtype=np.int64)
    torch.load(folder / "cpp.pt")
    np.memmap(folder / "mapped.bin", dtype=np.uint8, mode="r")
    os.listdir(folder / "sub")
    os.access(folder / "appended", os.R_OK)


def read_twice(folder: Path) -> None:
    """What becomes of two files, and of the first once more, is said by an error."""
    said = []
    for name in ("ten", "other", "ten"):
        try:
            said.append(os.stat(folder / name).st_size)
        except OSError as error:
            said.append(errno.errorcode[error.errno or 0])
    raise ValueError(said)


def touch_nothing_here(folder: Path) -> None:
    (folder.parent / "elsewhere").write_text("not below the folder")


def fail(folder: Path) -> None:
    raise ValueError("by itself")


def test_the_shim_sees_python_rust_and_c_writers(faults: FaultServer, tmp_path: Path) -> None:
    journal = faults.run(write_in_every_way, tmp_path).journal
    for file, needed in {
        "python.txt": {"create", "write", "close"},
        "appended": {"create", "write", "close"},
        "vectors": {"create", "writev", "pwrite", "ftruncate", "close"},
        "stdio.bin": {"create", "fwrite"},
        "cpp.pt": {"create", "write"},
        "mapped.bin": {"create", "mmap"},
        "copied": {"create", "sendfile", "rename"},
        "sub": {"mkdir", "rmdir"},
    }.items():
        seen = {operation.name for operation in journal if Path(operation.path).name == file}
        assert needed <= seen, (file, seen)
    # Its library's own temporary.
    rust = {operation.name for operation in journal if operation.path.startswith(".tmp")}
    assert {"create", "write"} <= rust
    assert [operation.detail for operation in journal if operation.name == "sendfile"][0] == "5"
    assert any(
        operation.name == "unlink" and operation.path.endswith("moved") for operation in journal
    )


def test_the_shim_sees_python_rust_and_c_readers(faults: FaultServer, tmp_path: Path) -> None:
    write_in_every_way(tmp_path)
    (tmp_path / "sub").mkdir()
    journal = faults.run(read_in_every_way, tmp_path, "record-reads").journal
    for file, needed in {
        "python.txt": {"open", "stat", "read"},
        "vectors": {"open", "read"},
        "rust.safetensors": {"open", "stat", "mmap"},
        "stdio.bin": {"open", "read"},
        "cpp.pt": {"open", "read"},
        "mapped.bin": {"open", "mmap"},
        "sub": {"opendir", "readdir"},
        "appended": {"access"},
    }.items():
        seen = {operation.name for operation in journal if Path(operation.path).name == file}
        assert needed <= seen, (file, seen)
    assert not {operation.name for operation in journal} & {"write", "create", "close"}


def test_each_read_fails_as_its_mode_says(faults: FaultServer, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("ten", "other"):
        (tmp_path / "there" / name).write_bytes(b"0123456789")
    for mode in EVERY_UNREAD:
        outcome = faults.run(read_twice, tmp_path / "there", mode, 1)
        error, lasting = mode.split()[0], "from here on" in mode
        second = error if lasting and error in ("EMFILE", "ENOMEM") else 10
        assert outcome.error == ("ValueError", str([error, second, error if lasting else 10])), mode
    assert {mode.split()[0] for mode in EVERY_UNREAD} == set(ERRORS)


def test_other_folders_are_left_alone(faults: FaultServer, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert faults.run(touch_nothing_here, tmp_path / "here").journal == []


def test_each_fault_does_what_its_name_says(faults: FaultServer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    seen = {}
    for outcome in faults.every_operation(write_ten_bytes, tmp_path / "empty", tmp_path):
        assert outcome.operation is not None
        file = outcome.folder / "ten"
        content = file.read_bytes() if file.exists() else None
        error = outcome.error and outcome.error[0] + ": " + outcome.error[1].split("]")[0]
        seen[outcome.mode, outcome.operation.name] = outcome.killed, error, content
    full, broken = "OSError: [Errno 28", "OSError: [Errno 5"
    assert seen == {
        ("kill", "create"): (True, None, None),
        ("kill", "write"): (True, None, b""),
        ("kill", "fsync"): (True, None, b"0123456789"),
        ("torn", "write"): (True, None, b"01234"),
        ("short", "write"): (False, "RuntimeError: short write", b"01234"),
        ("full-once", "create"): (False, full, None),
        ("full-once", "write"): (False, full, b""),
        ("full-once", "fsync"): (False, full, b"0123456789"),
        ("full-once", "close"): (False, full, b"0123456789"),
        ("full", "create"): (False, full, None),
        ("full", "write"): (False, full, b""),
        ("full", "fsync"): (False, full, b"0123456789"),
        ("broken-once", "create"): (False, broken, None),
        ("broken-once", "write"): (False, broken, b""),
        ("broken-once", "fsync"): (False, broken, b"0123456789"),
        ("broken-once", "close"): (False, broken, b"0123456789"),
        ("broken", "create"): (False, broken, None),
        ("broken", "write"): (False, broken, b""),
        ("broken", "fsync"): (False, broken, b"0123456789"),
    }


def test_every_operation_of_a_scenario_is_struck(faults: FaultServer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    journal = faults.record(write_ten_bytes, tmp_path / "empty", tmp_path)
    cases = sum(applies(mode, operation) for mode in EVERY_FAULT for operation in journal)
    assert (
        cases
        == sum(1 for _ in faults.every_operation(write_ten_bytes, tmp_path / "empty", tmp_path))
        == 19
    )
    with pytest.raises(AssertionError, match="never struck"):
        faults.run(write_ten_bytes, tmp_path / "empty", "kill", len(journal) + 1)
    with pytest.raises(AssertionError, match="by itself"):
        faults.record(fail, tmp_path / "empty", tmp_path)
    with pytest.raises(TypeError, match="module-level"):
        faults.run(lambda folder: None, tmp_path)
