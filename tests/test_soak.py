"""Run: pytest -m slow tests/test_soak.py -s (a long run: memory, files and times stay)."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from commands.inputs import TINY, over, with_texts
from monograph.run.folder import Run

UPDATES, INTERVAL = 100_000, 2500
MOST_MIB = 0.2  # in 10,000 updates; one number kept of each update is more
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def watched(process: subprocess.Popen[bytes], metrics: Path) -> list[tuple[int, float, int]]:
    """(rows written, resident MiB, open files) of a process every half second, to its end."""
    found, folder = list[tuple[int, float, int]](), Path(f"/proc/{process.pid}")
    rows, offset = 0, 0
    while process.poll() is None:
        time.sleep(0.5)
        try:
            resident = int((folder / "statm").read_text().split()[1]) * PAGE / 2**20
            files = len(list((folder / "fd").iterdir()))
        except OSError:  # it has just ended
            break
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(offset)
                new = file.read()
            rows, offset = rows + new.count(b"\n"), offset + len(new)
            found.append((rows, resident, files))
    return found


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_hundred_thousand_updates(tmp_path: Path) -> None:
    with_texts(tmp_path)
    settings = over(
        TINY,
        f"train.updates={UPDATES}",
        f"train.eval_every={INTERVAL}",
        f"train.save_every={INTERVAL}",
    )
    command = [sys.executable, "-m", "monograph", "train", *settings, "--out", "run"]
    with (
        (tmp_path / "err").open("wb") as err,
        subprocess.Popen(command, cwd=tmp_path, stderr=err) as process,
    ):
        seen = watched(process, tmp_path / "run" / "metrics.jsonl")
    assert process.returncode == 0, (tmp_path / "err").read_text()[-2000:]
    rows = [row for row in Run(tmp_path / "run").rows() if "train_loss" in row]
    assert (
        len(rows) == UPDATES
        and sum("eval_loss" in row for row in Run(tmp_path / "run").rows()) >= UPDATES // INTERVAL
    )

    later = [each for each in seen if UPDATES / 4 < each[0] < UPDATES]
    updates, mib, files = (np.array(column, dtype=float) for column in zip(*later, strict=True))
    slope = float(np.polyfit(updates, mib, 1)[0]) * 10_000
    took = np.diff([row["wall_s"] for row in rows])
    quarters = [statistics.median(part) for part in np.array_split(took, 4)]
    times = ", ".join(f"{1000 * quarter:.2f}" for quarter in quarters)
    print(
        f"{UPDATES:,} updates: {mib[0]:.1f} to {mib[-1]:.1f} MiB resident, {slope:+.2f} MiB in 10,000 updates; "
        f"{files.min():.0f} to {files.max():.0f} open files; an update of each quarter took {times} ms"
    )
    assert slope <= MOST_MIB
    assert files.max() - files.min() <= 8  # a save has some of its files open
    assert quarters[3] <= 1.25 * min(quarters)
