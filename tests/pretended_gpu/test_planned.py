"""Run: make gpu-less ARGS=tests/pretended_gpu/test_planned.py

Law 12 by a GPU's allocator: what is planned for kinds of steps on a GPU, streamed ones among them,
is what they take (`benchmarks/plan.py`). Kernels compute nothing here, so it runs without the
plugin and in a process of its own. By day the kinds that were once furthest off.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import plan
import pretended

pretended.watch()
KINDS = [
    (f"{kind}, {work.compile}, {work.precision}, remat {work.remat}, {index}", case)
    for index, (kind, case) in enumerate(plan.of_kinds())
    for work in [case.work if isinstance(case, plan.StreamWay) else case]
]
DAY = (
    "other precisions, blocks, fp8",
    "streamed, blocks, bf16, remat 0.5",
    "streamed adapters, blocks, bf16, remat pointwise",
)
CASES = [
    pytest.param(case, id=name, marks=() if name.startswith(DAY) else pytest.mark.slow)
    for name, case in KINDS
]


@pytest.mark.parametrize("case", CASES)
def test_what_is_planned_is_what_the_card_s_allocator_sees(
    case: plan.Work | plan.StreamWay,
) -> None:
    assert abs(plan.compared(case)["error"]) < plan.GOAL
