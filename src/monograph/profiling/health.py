"""Check what a run relies on: torch's compiler, the disk and the system's limits."""

import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from monograph import compat
from monograph.device import clock
from monograph.storage.reading import is_folder

PROBE_BYTES = 1 << 25  # 32 MiB
FEWEST_FILES = 256  # a run keeps some dozens open


class Disk(NamedTuple):
    """The disk that holds a folder.

    Attributes:
        folder: the folder that was probed.
        free_bytes: free space.
        written_bytes_per_s: rate of a durable write; None if writing failed.
        obstacle: why it cannot be written; None if it can.
    """

    folder: str
    free_bytes: int
    written_bytes_per_s: float | None
    obstacle: str | None


def disk(folder: Path) -> Disk:
    """Time a durable write of 32 MiB in a folder, or in its nearest existing parent; the file is
    removed.
    """
    there = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if is_folder(parent)
    )
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            began = clock()
            file.write(bytes(PROBE_BYTES))
            os.fsync(file.fileno())
            rate = PROBE_BYTES / (clock() - began)
    except OSError as error:
        return Disk(str(there), shutil.disk_usage(there).free, None, error.strerror or str(error))
    return Disk(str(there), shutil.disk_usage(there).free, rate, None)


def compiled_obstacle(device: torch.device) -> str | None:
    """Return what is wrong with a small compiled function, forward and backward, on the device;
    None if nothing is.
    """

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ x.T) * 2).sum()

    def gradient(of: object) -> torch.Tensor:
        x = torch.linspace(-1, 1, 256, device=device).reshape(16, 16).requires_grad_()
        of(x).backward()  # type: ignore[operator]
        assert x.grad is not None
        return x.grad

    try:
        compat.key_cache_by_vector_width()
        compat.quiet_missing_tf32()
        compiled = gradient(torch.compile(function))
        expected = gradient(function)
    except Exception as error:
        return (
            f"a compiled function fails: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        )
    off = float((compiled - expected).abs().max())
    return None if off <= 1e-4 else f"a compiled function's gradient is off by {off:.2g}"


def limits() -> dict[str, int | None]:
    """Return the limits on this process, None for no limit: open files, and bytes of memory and of
    a file.
    """
    kinds = {
        "open_files": resource.RLIMIT_NOFILE,
        "address_space_bytes": resource.RLIMIT_AS,
        "file_bytes": resource.RLIMIT_FSIZE,
    }
    values = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {
        name: None if value == resource.RLIM_INFINITY else value for name, value in values.items()
    }


def limits_said(values: dict[str, int | None]) -> str:
    """Return the limits in words."""
    files, memory, file = values.values()
    said = [f"{files:,} open files" if files else ""]
    said += [f"memory {memory / 2**30:.3g} GiB (ulimit -v)" if memory is not None else ""]
    said += [f"files of {file / 2**30:.3g} GiB (ulimit -f)" if file is not None else ""]
    if files is not None and files < FEWEST_FILES:
        said.append(f"open files should be {FEWEST_FILES} or more: ulimit -n {FEWEST_FILES}")
    return ", ".join(filter(None, said)) or "none"
