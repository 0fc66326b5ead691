"""Run: pytest tests/graph/test_damaged_cache.py (what a compiler leaves that was killed does not
stop a run).
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

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


OF_BF16 = """
import torch
from monograph.graph.capture import compiled
from torch._inductor import config

torch.manual_seed(0)
x = torch.randn(64, 259).bfloat16()
total = compiled(lambda x: x.float().logsumexp(-1))(x)
assert torch.allclose(total, x.float().logsumexp(-1), rtol=1e-5)
print(config.cpp.simdlen)
"""


@pytest.mark.slow
@pytest.mark.skipif(compiler_obstacle() is not None, reason=compiler_obstacle() or "")
def test_code_for_wider_vectors_is_not_taken_for_narrower_ones(tmp_path: Path) -> None:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    for capability in ("avx512", "avx2"):
        environment |= {"ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run(
            [sys.executable, "-c", OF_BF16], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]


def test_the_key_of_a_cache_has_the_width_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    config, keys = torch._inductor.config, []
    for capability in ("avx2", "default"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        with config.patch({"cpp.simdlen": None}):  # which monkeypatch would take away in the end
            compat.key_cache_by_vector_width.__wrapped__()
            keys.append(config.save_config_portable()["cpp.simdlen"])
    assert keys[0] != keys[1] or not valid_vec_isa_list(), keys


@pytest.mark.slow
@pytest.mark.skipif(compiler_obstacle() is not None, reason=compiler_obstacle() or "")
def test_libraries_that_were_cut_off_are_made_again(tmp_path: Path) -> None:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def trained() -> str:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    expected = trained()
    libraries = [path for path in tmp_path.rglob("*.so") if path.stat().st_size]
    assert len(libraries) >= 2
    for number, path in enumerate(libraries):
        os.truncate(path, 0 if number % 2 else path.stat().st_size // 2)
    assert trained() == expected
    assert all(path.stat().st_size for path in libraries if path.exists())


def test_only_what_stays_cut_off_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    # A header that says: one section of 64 bytes, whose table begins at byte 64.
    whole = struct.pack("<4s36xQ10xHH2x", b"\x7fELF", 64, 64, 1) + bytes(64)
    content = {
        "whole": whole,
        "short": whole[:-1],
        "empty": b"",
        "text": b"no library" * 99,
        "being written": whole[:9],
    }
    for name, written in content.items():
        (tmp_path / "ab" / f"{name}.so").write_bytes(written)
    finishes = tmp_path / "ab" / "being written.so"
    monkeypatch.setattr(time, "sleep", lambda seconds: finishes.write_bytes(whole))
    compat.remove_truncated_libraries.__wrapped__()
    assert sorted(path.stem for path in (tmp_path / "ab").iterdir()) == ["being written", "whole"]
