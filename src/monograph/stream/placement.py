"""Say where the buffers of a streamed model live, and allocate memory there.

A stage is some consecutive blocks of the model, or the parts before or after the blocks. A plane is
a flat buffer of parameters of one kind (`monograph.optim.Plane`); a stage has several planes.
"""

import math
import mmap
import os
import resource
import tempfile
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from monograph.errors import DiskFull, InputRefused, UsageError
from monograph.optim import OPTIMIZERS
from monograph.optim.formats import FORMATS
from monograph.storage.writing import DISK_ERRORS
from monograph.stream.lanes import Home

# When and where weights are updated; `Placement` explains the values.
When = Literal["sweep", "next forward", "backward"]
Where = Literal["device", "host"]


def buffer_names() -> tuple[str, ...]:
    """Return the names of all buffers that a stage may have, with any optimizer."""
    rules = (rule for optimizer in OPTIMIZERS.values() for rule in optimizer.rules)
    moments = [moment for rule in rules for moment in rule.moments]
    # A format stores each moment in one or several parts, e.g. codes and scales.
    parts = [part for state_format in FORMATS.values() for part in state_format.parts]
    moment_buffers = [part.buffer_name(moment) for part in parts for moment in moments]
    # `dict.fromkeys` removes duplicates, because optimizers share moments.
    return tuple(dict.fromkeys(("weights", "rest", "gradient", *moment_buffers, "ema", "frozen")))


@dataclass(frozen=True)
class Placement:
    """The places of buffers, and where and when weights are updated.

    Attributes:
        device: the device that computes.
        when: when weights are updated.
            "sweep": after the backward pass, stage by stage.
            "next forward": before each stage's next forward pass, while the previous stage
            computes; the results are equal to those of "sweep".
            "backward": as soon as a stage's gradient is complete; the gradient is not kept.
            So gradients cannot be clipped, and whether a gradient is finite is decided for each
            stage separately.
        where: where weights are updated.
            "device": all buffers that an update needs are copied to the device and back.
            "host": planes without a buffer on the device are updated on the host while the device
            computes; other planes are updated on the device.
        blocks_per_stage: the number of blocks that are fetched, run and updated together.
        offload: whether the inputs of stages are kept on the host. If so, the memory that is needed
            on the device does not grow with the depth.
        on_device: buffers that stay on the device, as (stage, name of the buffer). Their bytes never
            cross the link between host and device.
        on_disk: names of buffers that are in files, mapped into memory, in all stages where they
            are not on the device.
        folder: the folder of these files, which vanish with the process; None: the folder for
            temporary files.

    Stages are numbered from 0, which is the stage before the blocks. The names of buffers are
    "weights", "rest" (the low halves of fp32 weights that are stored as two halves), "gradient" and
    "ema", the moments of the optimizer ("exp_avg", "exp_avg_sq", "momentum_buffer"),
    `<moment>_scale` for moments in blocks, and "frozen" (all tensors of a stage that are not trained).

    Raises:
        UsageError: a value has no meaning.
    """

    device: torch.device = torch.device("cpu")
    when: When = "sweep"
    where: Where = "device"
    blocks_per_stage: int = 1
    offload: bool = False
    on_device: frozenset[tuple[int, str]] = frozenset()
    on_disk: frozenset[str] = frozenset()
    folder: Path | None = None

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        self._require(isinstance(self.device, torch.device), "device", "a torch.device(...)")
        self._require(self.when in get_args(When), "when", _one_of(get_args(When)))
        self._require(self.where in get_args(Where), "where", _one_of(get_args(Where)))
        # `type` is compared, because `isinstance` would accept True, which is an int.
        is_positive = type(self.blocks_per_stage) is int and self.blocks_per_stage > 0
        self._require(is_positive, "blocks_per_stage", "1 or more")
        self._require(type(self.offload) is bool, "offload", "True or False")
        known_names = buffer_names()
        buffers = ", ".join(known_names)
        self._require(
            _is_set_of(self.on_device, lambda pair: _is_buffer_of_stage(pair, known_names)),
            "on_device",
            f"a set of (stage, buffer), where a buffer is one of {buffers}",
        )
        self._require(
            _is_set_of(self.on_disk, known_names.__contains__),
            "on_disk",
            f"a set of buffers, of {buffers}",
        )
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(
                f"Placement: device = {self.device}: torch finds no GPU; use torch.device('cpu')"
            )

    def _require(self, is_valid: bool, name: str, expected: str) -> None:
        """Raise a UsageError about an attribute unless its value is valid."""
        if not is_valid:
            raise UsageError(f"Placement: {name} = {getattr(self, name)!r}: expected {expected}")

    def home(self, stage: int, name: str) -> Home:
        """Return where a stage's buffer of that name lives."""
        # The device has precedence, because a buffer in a file would only be slower.
        if (stage, name) in self.on_device:
            return Home.DEVICE
        return Home.DISK if name in self.on_disk else Home.HOST


def _one_of(values: tuple[str, ...]) -> str:
    return f"one of {', '.join(map(repr, values))}"


def _is_set_of(value: object, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, Set) and all(map(is_valid, value))


def _is_buffer_of_stage(pair: object, known_names: tuple[str, ...]) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and type(pair[0]) is int
        and pair[0] >= 0
        and pair[1] in known_names
    )


def place(tensor: Tensor, home: Home, label: str, placement: Placement) -> Tensor:
    """Copy a tensor to new memory at its home, and return the copy; see `allocate`."""
    return allocate(tensor, home, label, placement).copy_(tensor)


def allocate(like: Tensor, home: Home, label: str, placement: Placement) -> Tensor:
    """Return new memory of a tensor's shape and dtype.

    Args:
        like: a tensor with the shape and dtype.
        home: where the new memory is.
        label: what the memory is for, in messages.
        placement: the device that computes, and the folder of files.

    Raises:
        DiskFull: a file does not fit, or the disk fails.
        InputRefused: the host has not enough memory that a GPU can copy from, or no file can be
            created in the folder.
    """
    if home == Home.DEVICE:
        return torch.empty(like.shape, dtype=like.dtype, device=placement.device)
    if home == Home.DISK:
        return _mapped_file(like, label, placement.folder)
    return on_host(like, label, placement.device)


def _mapped_file(like: Tensor, label: str, folder: Path | None) -> Tensor:
    """Return memory of a tensor's shape and dtype in a new file that has no name.

    The file's blocks are allocated now, because a disk that is full later would kill the process.
    """
    size = like.nbytes
    try:
        # `dir=None` is the system's folder for temporary files.
        handle, path = tempfile.mkstemp(prefix="monograph-", suffix=".plane", dir=folder)
    except OSError as error:
        refusal = DiskFull if error.errno in DISK_ERRORS else InputRefused
        raise refusal(
            f"{folder or tempfile.gettempdir()}: cannot hold {label}: {error.strerror}"
        ) from None
    # The file is deleted now, so that a killed process leaves no file. The open handle keeps the
    # memory.
    Path(path).unlink()
    try:
        # `posix_fallocate` refuses a length of 0.
        os.posix_fallocate(handle, 0, max(size, 1))
        return torch.from_file(
            f"/proc/self/fd/{handle}", shared=True, size=like.numel(), dtype=like.dtype
        )
    # torch raises a RuntimeError if it cannot map the file.
    except (OSError, RuntimeError) as error:
        disk = os.fstatvfs(handle)
        free = disk.f_bavail * disk.f_frsize
        reason = f"{free:,} are free" if free < size else str(getattr(error, "strerror", error))
        raise DiskFull(
            f"{label} needs {size:,} bytes in {Path(path).parent}, and {reason}: make room, or keep fewer buffers "
            "on disk"
        ) from error
    finally:
        os.close(handle)


# ── pinned memory ───────────────────────────────────────────────────────────────────────────────
# Pinned memory is host memory whose pages are locked. A copy between a GPU and other host memory
# goes through a small pinned buffer, and the host has to wait for the copy. torch's own allocator
# of pinned memory rounds sizes up to a power of two (pytorch/pytorch#95823), which wastes a third
# of the host's memory for most planes. So pages are mapped here at their exact size.


class _LockedPages(mmap.mmap):
    """Anonymous pages that are locked as long as an object refers to them.

    Attributes:
        address: the address of the first page, once the pages are locked; 0 before.
    """

    address = 0

    def __del__(self) -> None:
        # Pages are unlocked before they are unmapped. Otherwise the driver would still count their
        # address as locked when other pages are mapped there later.
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def on_host(like: Tensor, label: str, device: torch.device) -> Tensor:
    """Return host memory of a tensor's shape and dtype, from which `device` can copy.

    Args:
        like: a tensor with the shape and dtype.
        label: what the memory is for, in messages.
        device: the device that computes. For a GPU the memory is pinned; for the meta device it is
            on the meta device as well.

    Raises:
        InputRefused: see `pinned`.
    """
    if device.type == "cuda":
        return pinned(like, label)
    if device.type == "meta":
        return torch.empty(like.shape, dtype=like.dtype, device="meta")
    # No device is given, so this is torch's default device, which a caller may have set to the meta
    # device.
    return torch.empty(like.shape, dtype=like.dtype)


def pinned(like: Tensor, label: str) -> Tensor:
    """Return pinned memory of a tensor's shape and dtype, filled with zeros.

    Args:
        like: a tensor with the shape and dtype.
        label: what the memory is for, in messages.

    Raises:
        InputRefused: the system has not enough memory, or does not allow so much to be locked.
    """
    size = like.nbytes
    length = max(1, math.ceil(size / mmap.PAGESIZE)) * mmap.PAGESIZE
    try:
        pages = _LockedPages(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise InputRefused(
            f"{label} needs {length:,} bytes of the host's memory, which has no space for them: keep fewer buffers "
            "there (on the device, or on disk), or in fewer bits"
        ) from error
    page_bytes = torch.frombuffer(pages, dtype=torch.uint8)
    error_code = int(torch.cuda.cudart().cudaHostRegister(page_bytes.data_ptr(), length, 0))
    if error_code:
        raise InputRefused(_lock_refusal(label, length, error_code))
    pages.address = page_bytes.data_ptr()
    return page_bytes[:size].view(like.dtype).view(like.shape)


def _lock_refusal(label: str, length: int, error_code: int) -> str:
    """Return the message for pages that cannot be locked."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    return (
        f"{label}: {length:,} bytes of the host's memory cannot be locked (CUDA error {error_code}); ulimit -l allows "
        f"{allowed}: raise it, give the container more memory, or keep fewer buffers on the host"
    )
