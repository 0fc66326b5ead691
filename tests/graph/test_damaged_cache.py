"""Run: pytest tests/graph/test_damaged_cache.py (what a compiler leaves that was killed does not stop a run)."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from monograph import compat
from monograph.device import compiler_obstacle

PROGRAM = """
import torch
from torch import nn
from monograph.resident import Resident

torch.manual_seed(0)
model = nn.Linear(3, 2)

def loss(model, batch):
    return torch.tanh(model(batch["x"])).square().sum(), torch.tensor(4)

engine = Resident(model, loss=loss)
window = {"x": torch.linspace(-1, 1, 12).reshape(4, 3)}
assert (reason := engine.capture(window)) is None, reason
engine.accumulate(window)
print(float(engine.update().loss))
"""


@pytest.mark.skipif(compiler_obstacle() is not None, reason=compiler_obstacle() or "")
@pytest.mark.parametrize(("pattern", "old"), [("*.so", True), ("*.main.so", False)])
def test_libraries_that_were_cut_off_are_made_again(pattern: str, old: bool, tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def trained() -> str:
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    expected = trained()
    libraries = [path for path in tmp_path.rglob(pattern) if path.stat().st_size]
    assert libraries
    for number, path in enumerate(libraries):
        os.truncate(path, 0 if number % 2 else path.stat().st_size // 2)
        os.utime(path, (0, 0) if old else None)
    assert trained() == expected
    assert all(path.stat().st_size for path in libraries if path.exists())


def test_only_what_is_cut_off_and_not_being_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    # A header that says: one section of 64 bytes, whose table begins at byte 64.
    whole = struct.pack("<4s36xQ10xHH2x", b"\x7fELF", 64, 64, 1) + bytes(64)
    content = {"whole": whole, "short": whole[:-1], "empty": b"", "text": b"no library" * 99, "young": b""}
    for name, written in content.items():
        path = tmp_path / "ab" / f"{name}.so"
        path.write_bytes(written)
        os.utime(path, None if name == "young" else (0, 0))
    compat.remove_cut_off_libraries.__wrapped__()
    assert sorted(path.stem for path in (tmp_path / "ab").iterdir()) == ["whole", "young"]
