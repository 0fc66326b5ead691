"""Run: pytest tests/pretended_gpu/test_planted.py (faults can be planted)"""

from __future__ import annotations

import ast

import pytest

from pretended_gpu import planted


@pytest.mark.parametrize(
    "fault", planted.FAULTS, ids=lambda fault: f"{fault.file} {fault.before[:40]}"
)
def test_a_fault_can_be_planted(fault: planted.Fault) -> None:
    """Where the code has moved on, so must the fault."""
    code = (planted.ROOT / planted.SRC / fault.file).read_text(encoding="utf-8")
    assert code.count(fault.before) == 1 and fault.before != fault.after
    ast.parse(code.replace(fault.before, fault.after))
