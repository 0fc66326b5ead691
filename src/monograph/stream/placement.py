"""Say where the buffers of a streamed model live, and allocate memory there."""

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
from monograph.storage.writing import FAILING
from monograph.stream.lanes import Home

When = Literal["sweep", "next forward", "backward"]
Where = Literal["device", "host"]


def buffer_names() -> tuple[str, ...]:
    """Return the names of all buffers that a stage of some optimizer may have."""
    rules = (rule for kind in OPTIMIZERS.values() for rule in kind.rules)
    moments = [moment for rule in rules for moment in rule.moments]
    parts = [part for form in FORMATS.values() for part in form.parts]
    of_moments = [part.buffer_name(moment) for part in parts for moment in moments]
    return tuple(dict.fromkeys(("weights", "rest", "gradient", *of_moments, "ema")))


@dataclass(frozen=True)
class Placement:
    """The places of buffers, and where and when weights are updated.

    Attributes:
        device: the device that computes.
        when: when weights are updated. "sweep": after the backward pass, stage by stage. "next
            forward": before each stage's next forward pass, while the stage before it computes; the
            numbers are the same. "backward": as soon as a stage's gradient is complete, which is
            then not kept; this needs training without clipping, and a gradient that is not finite
            is refused stage by stage.
        where: where weights are updated. "device": all buffers that an update needs are copied
            there and back. "host": a plane whose buffers are all off the device is updated on the
            host, once its gradient and the decision on the update have come, while the device
            computes until it needs the weights; a plane that has a buffer on the device is updated
            on the device.
        blocks_per_stage: blocks that are fetched, run and updated together.
        offload: whether the inputs of stages are kept on the host, so that the device's memory does
            not grow with the depth.
        on_device: buffers that stay on the device, as (stage, name of the buffer); their bytes
            never cross the link.
        on_disk: names of buffers that lie in files, mapped into memory, unless they are on the
            device.
        folder: the folder of these files, which vanish with the process.

    Buffers are named "weights", "rest" (the low halves of split weights), "gradient", and as in a
    checkpoint the moments of the optimizer's rules ("exp_avg", "exp_avg_sq", "momentum_buffer") and
    "ema", with moments in blocks also `<name>_scale`. Stages are numbered from 0, the stage before the blocks.

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
        known = buffer_names()
        buffers = ", ".join(known)
        expected = {
            "device": (isinstance(self.device, torch.device), "a torch.device(...)"),
            "when": (self.when in get_args(When), f"one of {', '.join(map(repr, get_args(When)))}"),
            "where": (
                self.where in get_args(Where),
                f"one of {', '.join(map(repr, get_args(Where)))}",
            ),
            "blocks_per_stage": (
                type(self.blocks_per_stage) is int and self.blocks_per_stage > 0,
                "1 or more",
            ),
            "offload": (type(self.offload) is bool, "True or False"),
            "on_device": (
                _all(self.on_device, lambda pair: _is_of_a_stage(pair, known)),
                f"a set of (stage, buffer), buffers being {buffers}",
            ),
            "on_disk": (
                _all(self.on_disk, known.__contains__),
                f"a set of buffers, of {buffers}",
            ),
        }
        for name, (fine, words) in expected.items():
            if not fine:
                raise UsageError(f"Placement: {name} = {getattr(self, name)!r}: expected {words}")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(
                f"Placement: device = {self.device}: torch finds no GPU; use torch.device('cpu')"
            )

    def home(self, stage: int, name: str) -> Home:
        """Return where a stage's buffer of that name lives."""
        # The device has precedence, as a buffer in a file would only be slower.
        away = Home.DISK if name in self.on_disk else Home.HOST
        return Home.DEVICE if (stage, name) in self.on_device else away


def _all(given: object, fine: Callable[[Any], bool]) -> bool:
    return isinstance(given, Set) and all(map(fine, given))


def _is_of_a_stage(pair: object, known: tuple[str, ...]) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and type(pair[0]) is int
        and pair[0] >= 0
        and pair[1] in known
    )


def place(tensor: Tensor, home: Home, label: str, placement: Placement) -> Tensor:
    """Return the tensor's values at their home, in new memory.

    Raises:
        DiskFull: a file does not fit, or the disk fails.
        InputRefused: the host has not enough memory that a GPU can copy from, or the folder cannot
            hold a file.
    """
    if home == Home.DEVICE:
        # It is copied in any case: on a CPU it would share the host's memory otherwise.
        return tensor.to(placement.device, copy=True)
    on_disk = home == Home.DISK
    memory = (
        _mapped(tensor, label, placement.folder)
        if on_disk
        else on_host(tensor, label, placement.device)
    )
    return memory.copy_(tensor)


def _mapped(like: Tensor, label: str, folder: Path | None) -> Tensor:
    """Return memory in a file without a name, whose blocks are allocated now, as a full disk later
    would be fatal.
    """
    size = like.nbytes
    try:
        handle, path = tempfile.mkstemp(prefix="monograph-", suffix=".plane", dir=folder)
    except OSError as error:
        refusal = DiskFull if error.errno in FAILING else InputRefused
        raise refusal(
            f"{folder or tempfile.gettempdir()}: cannot hold {label}: {error.strerror}"
        ) from None
    Path(path).unlink()  # now, so that a killed process leaves no file
    try:
        os.posix_fallocate(handle, 0, max(size, 1))
        return torch.from_file(
            f"/proc/self/fd/{handle}", shared=True, size=like.numel(), dtype=like.dtype
        )
    except (OSError, RuntimeError) as error:  # a RuntimeError if it cannot be mapped
        where = os.fstatvfs(handle)
        free = where.f_bavail * where.f_frsize
        why = f"{free:,} are free" if free < size else str(getattr(error, "strerror", error))
        raise DiskFull(
            f"{label} needs {size:,} bytes in {Path(path).parent}, and {why}: make room, or keep fewer buffers on disk"
        ) from error
    finally:
        os.close(handle)


# ── page-locked memory ──────────────────────────────────────────────────────────────────────────
# A copy between a GPU and the host's other memory goes through a small buffer, and the host waits
# for it. torch's own allocator of page-locked memory rounds sizes up to a power of two
# (pytorch/pytorch#95823), which for most planes wastes a third of the host's memory. So pages are
# mapped at their exact size and locked once.


class _Locked(mmap.mmap):
    """Anonymous pages that are locked as long as an object refers to them."""

    address = 0

    def __del__(self) -> None:
        # Unlocked before they are unmapped, or the driver would take later pages there for these.
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def on_host(like: Tensor, label: str, device: torch.device) -> Tensor:
    """Return host memory of a tensor's shape and dtype, page-locked if `device` is a GPU.

    For another device it is ordinary memory; for the meta device it is on the meta device, too.
    Arguments and errors are those of `pinned`.
    """
    if device.type == "cuda":
        return pinned(like, label)
    return torch.empty(
        like.shape, dtype=like.dtype, device="meta" if device.type == "meta" else None
    )


def pinned(like: Tensor, label: str) -> Tensor:
    """Return page-locked memory of a tensor's shape and dtype, filled with zeros; its size is
    rounded up to pages.

    Args:
        like: a tensor with the shape and dtype.
        label: what the memory is for, in messages.

    Raises:
        InputRefused: the system has no more memory, or does not allow so much to be locked.
    """
    size = like.nbytes
    length = max(1, math.ceil(size / mmap.PAGESIZE)) * mmap.PAGESIZE
    try:
        pages = _Locked(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise InputRefused(
            f"{label} needs {length:,} bytes of the host's memory, and there are no more: keep fewer buffers there "
            "(on the device, or on disk), or in fewer bits"
        ) from error
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    if error_code := int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), length, 0)):
        raise InputRefused(_refused(label, length, error_code))
    pages.address = whole.data_ptr()
    return whole[:size].view(like.dtype).view(like.shape)


def _refused(label: str, length: int, error_code: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    return (
        f"{label}: {length:,} bytes of the host's memory cannot be locked (CUDA error {error_code}); ulimit -l allows "
        f"{allowed}: raise it, give the container more memory, or keep fewer buffers on the host"
    )
