"""What there is to stream with: memory of the device and of the host, a disk, and how fast bytes go between them."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from monograph.device import Device, describe
from monograph.measure.calibration import measured_memory_bytes_per_s
from monograph.measure.roofline import CPU_BYTES_PER_S, LINK_BYTES_PER_S, LINK_SHARE
from monograph.storage.reading import exists
from monograph.stream.clock import Link

# Of a host's free memory, what pinned buffers may take; of a disk's free space, what files may.
HOST_SHARE, DISK_SHARE = 0.9, 0.95
DISK_BYTES_PER_S = 2e9  # a solid-state disk's; no disk was measured


@dataclass(frozen=True)
class Limits:
    """What there is.

    Attributes:
        device_bytes: that tensors may take on the device.
        host_bytes: that buffers may take in the host's memory.
        disk_bytes: that files may take in the folder.
        link: how fast copies are.
        host_bytes_per_s: of the host's memory; None: measured where it is asked for.
        shared: whether device and host have one memory, `host_bytes`.
        folder: where files are.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    link: Link = field(default_factory=lambda: Link(LINK_SHARE * LINK_BYTES_PER_S, LINK_SHARE * LINK_BYTES_PER_S))
    host_bytes_per_s: float | None = CPU_BYTES_PER_S
    shared: bool = False
    folder: Path | None = None

    @cached_property
    def host_rate(self) -> float:
        """Bytes/s of the host's memory."""
        return self.host_bytes_per_s or measured_memory_bytes_per_s()

    @classmethod
    def here(cls, device: Device, device_bytes: int, folder: Path | None = None) -> Limits:
        """Those of this machine's host and disk, with a device of which so much may be taken."""
        host = describe(torch.device("cpu"))
        disk = shutil.disk_usage(_there(folder or Path(tempfile.gettempdir()))).free
        rate = CPU_BYTES_PER_S if device.type == "cpu" else LINK_SHARE * (device.link_bytes_per_s or LINK_BYTES_PER_S)
        link = Link(rate, rate, DISK_BYTES_PER_S)
        host_bytes, disk_bytes = int(HOST_SHARE * host.free_memory_bytes), int(DISK_SHARE * disk)
        return cls(device_bytes, host_bytes, disk_bytes, link, None, device.type == "cpu", folder)


def _there(folder: Path) -> Path:
    """The folder, or of those that it will be made in the one that is there."""
    return next(each for each in (folder, *folder.absolute().parents) if exists(each))
