"""Check what a run needs of the machine: torch's compiler, the disk and the system's limits."""

import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from monograph import compat
from monograph.device import clock
from monograph.storage.reading import is_folder

PROBE_BYTES = 1 << 25  # 32 MiB
# The number of open files that a process should be allowed; a run has some dozens open.
FEWEST_FILES = 256


class Disk(NamedTuple):
    """The disk that holds a folder.

    Attributes:
        folder: the folder that was tested.
        free_bytes: free space.
        written_bytes_per_s: the rate of a write that includes the flush to the disk; None: writing
            failed.
        obstacle: why writing failed; None: it did not fail.
    """

    folder: str
    free_bytes: int
    written_bytes_per_s: float | None
    obstacle: str | None


def disk(folder: Path) -> Disk:
    """Time a write of 32 MiB to a file in a folder, or in its nearest existing parent.

    The file is removed afterwards.
    """
    candidates = (folder.absolute(), *folder.absolute().parents)
    existing = next(candidate for candidate in candidates if is_folder(candidate))
    rate: float | None
    obstacle = None
    try:
        with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            began = clock()
            file.write(bytes(PROBE_BYTES))
            os.fsync(file.fileno())
            rate = PROBE_BYTES / (clock() - began)
    except OSError as error:
        rate = None
        obstacle = error.strerror or str(error)
    return Disk(
        folder=str(existing),
        free_bytes=shutil.disk_usage(existing).free,
        written_bytes_per_s=rate,
        obstacle=obstacle,
    )


def compiled_obstacle(device: torch.device) -> str | None:
    """Compile a small function, and compare its gradient on the device with that of eager code.

    Returns:
        What is wrong with the compiled function; None if nothing is wrong.
    """

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ x.T) * 2).sum()

    def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.linspace(-1, 1, 256, device=device).reshape(16, 16).requires_grad_()
        of(x).backward()
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
    error_of_gradient = float((compiled - expected).abs().max())
    # `not <=` instead of `>`, so that NaN counts as an error.
    if not error_of_gradient <= 1e-4:
        return f"a compiled function's gradient is off by {error_of_gradient:.2g}"
    return None


def resource_limits() -> dict[str, int | None]:
    """Return the system's limits on this process; None: no limit.

    The keys are "open_files", "address_space_bytes" and "file_bytes" (the size of a file).
    """
    resources = {
        "open_files": resource.RLIMIT_NOFILE,
        "address_space_bytes": resource.RLIMIT_AS,
        "file_bytes": resource.RLIMIT_FSIZE,
    }
    limits: dict[str, int | None] = {}
    for name, number in resources.items():
        soft_limit, _ = resource.getrlimit(number)
        limits[name] = None if soft_limit == resource.RLIM_INFINITY else soft_limit
    return limits


def resource_limits_text(values: dict[str, int | None]) -> str:
    """Return the limits of `resource_limits` in words; "none" if there are none."""
    open_files = values["open_files"]
    memory_bytes = values["address_space_bytes"]
    file_bytes = values["file_bytes"]
    texts = list[str]()
    if open_files:
        texts.append(f"{open_files:,} open files")
    if memory_bytes is not None:
        texts.append(f"memory {memory_bytes / 2**30:.3g} GiB (ulimit -v)")
    if file_bytes is not None:
        texts.append(f"files of {file_bytes / 2**30:.3g} GiB (ulimit -f)")
    if open_files is not None and open_files < FEWEST_FILES:
        texts.append(f"open files should be {FEWEST_FILES} or more: ulimit -n {FEWEST_FILES}")
    return ", ".join(texts) or "none"
