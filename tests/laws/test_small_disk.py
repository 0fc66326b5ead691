"""Run: pytest tests/laws/test_small_disk.py (a real disk of 2 MB that fills up, and one that may
only be read).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clocks import HANG_S

IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]

# Runs where `disk` is the whole of a disk; the mount is seen by this process and its children
# alone.
SCRIPT = """
import shutil, subprocess, sys
from pathlib import Path
import pytest
from batches import tiny_llama
from faults.examples import checkpoint, same, two_saves
from faults.scenarios import LOGGED, append_metrics, begin, begin_metrics, look_at_metrics, quiet
from monograph import checkpointing
from monograph.text.tokenizer import Tokenizer
from monograph.errors import DiskFull, InputRefused
from monograph.model.hub import save_model
from monograph.run.folder import Run

disk = Path(sys.argv[1])

def mount(*options):
    subprocess.run(["mount", *options, str(disk)], check=True)

def saved():
    assert same(checkpointing.newest(disk / "checkpoints", pytest.fail), checkpoint(2))
    assert sorted(path.name for path in (disk / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]

mount("-t", "tmpfs", "-o", "size=2m", "none")
two_saves(disk / "checkpoints")
usage = shutil.disk_usage
shutil.disk_usage = lambda path: shutil._ntuple_diskusage(0, 0, 1 << 40)  # what fills up meanwhile
with pytest.raises(DiskFull, match="update 3: No space left"):
    checkpointing.save(disk / "checkpoints", checkpoint(3, tensors=9000))
shutil.disk_usage = usage
with pytest.raises(DiskFull, match="update 3: No space left"):
    checkpointing.save(disk / "checkpoints", checkpoint(3, tensors=9000))
saved()
with pytest.raises(DiskFull):
    save_model(tiny_llama(hidden_size=256, intermediate_size=512), disk / "out", Tokenizer.bytes())
assert [path.name for path in disk.iterdir()] == ["checkpoints"]

begin_metrics(disk)
(disk / "filler").write_bytes(bytes(usage(disk).free - 8192))
run, before = Run(disk / "run"), look_at_metrics(disk)
with pytest.raises(DiskFull, match="metrics.jsonl"):
    for _ in range(2000):
        run.log(LOGGED[3])
assert run.metrics.read_bytes().endswith(b"\\n") and run.rows()[:3] == LOGGED[:3]
(disk / "filler").unlink()
run.truncate_metrics(sum(len(line) for line in run.metrics.read_bytes().splitlines(keepends=True)[:3]))
append_metrics(disk)
assert look_at_metrics(disk) == "new"

mount("-o", "remount,ro")
for error, write in {
    DiskFull: lambda: checkpointing.save(disk / "checkpoints", checkpoint(3)),
    InputRefused: lambda: save_model(tiny_llama(), disk / "out"),
}.items():
    with pytest.raises(error, match="Read-only file system"):
        write()
for write in (lambda: run.log(LOGGED[0]), lambda: begin(disk / "new")):
    with pytest.raises(InputRefused, match="Read-only file system"):
        write()
saved()
assert look_at_metrics(disk) == "new"
print("all as it was")
"""


def unavailable() -> bool:
    return not shutil.which("unshare") or bool(
        subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True).returncode
    )


@pytest.mark.slow(
    reason="imports all in a process of its own; by day test_nothing_lost.py has calls that find the disk full"
)
@pytest.mark.skipif(
    unavailable(), reason="no namespace of our own to mount a disk in (unshare --user --mount)"
)
def test_a_disk_that_fills_up_and_one_that_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*IN_A_NAMESPACE, sys.executable, "-c", SCRIPT, str(tmp_path / "disk")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and done.stdout == "all as it was\n", done.stderr[-3000:]
