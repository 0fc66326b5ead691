"""What the tests of the pretended card share, and which of them need one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from pretended_gpu import card

# Where the driver is not preloaded, only the making of the environment is tested. With the plugin,
# tests of numbers run: the driver then sees no kernel and no replay, as Python does their work, and an
# interpreter has no machine code. Without it, the other tests run.
OF_DRIVER = [
    "driver",
    "capture",
    "cards",
    "hook",
    "launches",
    "counts",
    "waits",
    "machine_code",
    "planned",
]
OF_NUMBERS = [
    "operators",
    "graphs",
    "order",
    "memory",
    "narrow",
    "programs",
    "libdevice",
    "interpreted",
    "commands",
    "ranks",
]
PLUGIN = "pretended_gpu.plugin" in sys.modules
collect_ignore = [
    *([] if card.PRELOADED else [f"test_{name}.py" for name in OF_DRIVER]),
    *(f"test_{name}.py" for name in (OF_DRIVER if PLUGIN else OF_NUMBERS)),
]


@pytest.fixture(autouse=True)
def _no_error_is_left() -> Iterator[None]:
    """An error that a test has provoked would else be raised by torch's next launch."""
    yield
    if card.PRELOADED:
        card.driver.cudaGetLastError()
