"""Times on a machine that others use too: the least of a few tries."""

from __future__ import annotations

import time
from collections.abc import Callable

# Whatever takes longer hangs, however busy or slow the machine is. Who wants to know how fast
# something is counts its CPU seconds instead. pyproject.toml has the same number for a whole test.
HANG_S = 1200


def least_s(call: Callable[[], object], enough_s: float, tries: int = 5) -> float:
    """The CPU seconds of the fastest call, of at most `tries`: no call is repeated once one took
    `enough_s`.
    """
    least = float("inf")
    for _ in range(tries):
        began = time.process_time()
        call()
        least = min(least, time.process_time() - began)
        if least <= enough_s:
            break
    return least
