"""Run: pytest tests/test_loss.py

What a loss may return and promise, and the one line that says what is wrong with another result.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monograph.errors import UsageError
from monograph.loss import check_result, fill_of

ONE = torch.ones(())


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (ONE, r"-> \(sum, count\)$"),
        ((ONE,), r"-> \(sum, count\)$"),
        ((ONE, ONE, ONE), r"-> \(sum, count\)$"),
        ((1.0, ONE), "its sum is float, expected a tensor of one number"),
        ((torch.ones(2, 3), ONE), r"its sum is a tensor of shape \[2, 3\], expected"),
        ((ONE.cfloat(), ONE), "its sum is complex, expected a real number"),
        ((ONE, torch.ones(4)), r"its count is a tensor of shape \[4\], expected one number"),
        ((ONE, ONE.bool()), "its count is bool, expected one number"),
        ((ONE, ONE.bfloat16()), "its count is bfloat16, expected one number"),
        ((ONE, "3"), "its count is '3', expected"),
        ((ONE, ONE.clone().requires_grad_()), "its count requires a gradient"),
    ],
)
def test_what_is_no_pair_of_sum_and_count_is_named(result: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        check_result(result)


WINDOW = {
    "tokens": torch.zeros(2, 3, dtype=torch.uint8),
    "seen": torch.zeros(2, 3, dtype=torch.bool),
    "weights": torch.zeros(2, 3, dtype=torch.float16),
}


@pytest.mark.parametrize(
    ("fill", "line"),
    [
        (["tokens"], r"the loss's fill is \['tokens'\]: expected numbers by name"),
        ({"tokens": "0"}, r"the loss's fill is \{'tokens': '0'\}: expected numbers by name"),
        (
            {"tokens": 0, "a": 1, "b": 1},
            "names 'a', which is not in the window: it has tokens, seen, weights",
        ),
        ({"tokens": 256, "seen": 2}, "has 256 for 'tokens', which no uint8 holds"),
        ({"tokens": -1}, "has -1 for 'tokens'"),
        ({"tokens": 0.5}, "has 0.5 for 'tokens'"),
        ({"seen": 2}, "has 2 for 'seen', which no bool holds"),
        ({"weights": 65536.0}, "has 65536.0 for 'weights', which no float16 holds"),
    ],
)
def test_a_fill_that_the_window_cannot_hold_is_named(fill: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        fill_of(SimpleNamespace(fill=fill), WINDOW)  # type: ignore[arg-type]


def test_a_fill_may_have_the_extreme_numbers_of_a_dtype() -> None:
    fill = {"tokens": 255, "seen": True, "weights": -65504.0}
    assert fill_of(SimpleNamespace(fill=fill), WINDOW) == fill  # type: ignore[arg-type]
