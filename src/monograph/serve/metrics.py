"""Counts and durations of requests, for /metrics."""

import itertools
from bisect import bisect_left
from collections import Counter

from starlette.types import Message, Scope, Send


class RequestCounts:
    """Counts requests by status.

    Attributes:
        by_status: the number of requests that were answered with each status.
    """

    def __init__(self) -> None:
        self.by_status: Counter[int] = Counter()

    def counting_send(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that counts the request when its answer begins.

        It also sets `scope["answered"]`: whether the answer has begun.
        """
        scope["answered"] = False

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["answered"] = True
                self.by_status[message["status"]] += 1
            await send(message)

        return count_and_send


# The upper bounds of a histogram's buckets.
_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Histogram:
    """A histogram of durations, as in Prometheus."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(_BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s

    def lines(self, name: str) -> list[str]:
        """Return the histogram's lines in Prometheus' text format."""
        bounds = (*map(str, _BOUNDS_S), "+Inf")
        # In Prometheus, a bucket also counts the durations of all smaller buckets.
        totals = [*itertools.accumulate(self._counts)]
        buckets = (
            f'{name}_bucket{{le="{bound}"}} {total}'
            for bound, total in zip(bounds, totals, strict=True)
        )
        return [
            f"# TYPE {name} histogram",
            *buckets,
            f"{name}_sum {self._sum_s:.6f}",
            f"{name}_count {totals[-1]}",
        ]
