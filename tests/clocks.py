"""Times on a machine that others use too: the least of a few tries."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_s(call: Callable[[], object], enough_s: float, tries: int = 5) -> float:
    """The CPU seconds of the fastest call, of at most `tries`: no call is repeated once one took `enough_s`."""
    least = float("inf")
    for _ in range(tries):
        began = time.process_time()
        call()
        least = min(least, time.process_time() - began)
        if least <= enough_s:
            break
    return least
