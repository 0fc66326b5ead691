"""Which parameters of a test run by day: the others are slow, and run at night."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def nightly(values: Iterable[Any], day: Collection[Any]) -> list[Any]:
    """The values as parameters, of which those that are not among the day's are slow."""
    return [
        value if value in day else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]


def pairwise(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """All pairs as parameters, of which as many run by day as each value needs to be in one of
    them.
    """
    day = {(each % len(one), each % len(other)) for each in range(max(len(one), len(other)))}
    return [
        pytest.param(first, second, marks=() if (i, j) in day else pytest.mark.slow)
        for i, first in enumerate(one)
        for j, second in enumerate(other)
    ]
