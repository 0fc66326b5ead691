"""Power cuts: every state of a folder that a journaling file system can be found in after one."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.harness import WRITES, FaultServer, Operation, Outcome, Scenario

# At risk at once, of which any two meet each pair of fates; of more of them all share one fate.
MOST_FILES = 3
# What becomes of bytes that were written and not synced: there, gone, zeros, or the first half of
# them.
FATES: tuple[Callable[[bytes], bytes], ...] = (
    lambda data: data,
    lambda data: b"",
    lambda data: bytes(len(data)),
    lambda data: data[: len(data) // 2],
)


def unsynced(journal: list[Operation]) -> dict[str, int]:
    """Files, as they are called in the end, and how many bytes were written to each since it was
    synced.
    """
    dirty: dict[str, int] = {}
    for operation in journal:
        if operation.name in WRITES:
            dirty[operation.path] = dirty.get(operation.path, 0) + int(operation.detail)
        elif operation.name in ("fsync", "unlink"):
            dirty.pop(operation.path, None)
        elif operation.name == "rename":
            source, target = operation.path, operation.detail
            for path in [path for path in dirty if path == source or path.startswith(source + "/")]:
                dirty[target + path.removeprefix(source)] = dirty.pop(path)
    return dirty


def power_cuts(
    faults: FaultServer, scenario: Scenario, prepared: Path, scratch: Path, stride: int = 1
) -> Iterator[Outcome]:
    """Every prefix of the operations, as a journaling file system keeps them, with un-fsynced bytes
    lost in each way.

    The kill before operation N is the disk with all of N - 1 operations; that the last few of them
    are not there either is the disk of an earlier N. With a `stride` one N of that many, the last
    one among them.
    """
    journal = faults.record(scenario, prepared, scratch)
    for number in range(len(journal) % stride + 1, len(journal) + 2, stride):
        folder = scratch / "cut"
        shutil.copytree(prepared, folder, symlinks=True)
        finished = number > len(journal)
        outcome = faults.run(
            scenario, folder, "record" if finished else "kill", 0 if finished else number
        )
        shutil.copytree(folder, scratch / "uncut", symlinks=True)
        at_risk = {
            path: size
            for path, size in unsynced(journal[: number - 1]).items()
            if (folder / path).is_file()
        }
        count = len(at_risk) if len(at_risk) <= MOST_FILES else 1
        for free in itertools.product(range(len(FATES)), repeat=min(count, MOST_FILES - 1)):
            fates = [FATES[index] for index in (*free, sum(free) % len(FATES))[:count]]
            shutil.rmtree(folder)  # what the test did to it
            shutil.copytree(scratch / "uncut", folder, symlinks=True)
            for (path, size), fate in zip(
                at_risk.items(), fates if count > 1 else fates * len(at_risk), strict=True
            ):
                whole = (folder / path).read_bytes()
                kept = max(0, len(whole) - size)
                (folder / path).write_bytes(whole[:kept] + fate(whole[kept:]))
            yield outcome
        shutil.rmtree(folder)
        shutil.rmtree(scratch / "uncut")
