"""Run: pytest tests/pretended_gpu/test_planted.py (faults can be planted; lines that only a GPU
reaches are found)
"""

from __future__ import annotations

import ast

import pytest

from pretended_gpu import planted, reached


@pytest.mark.parametrize(
    "fault", planted.FAULTS, ids=lambda fault: f"{fault.file} {fault.before[:40]}"
)
def test_a_fault_can_be_planted(fault: planted.Fault) -> None:
    """Where the code has moved on, so must the fault."""
    code = (planted.ROOT / planted.SRC / fault.file).read_text(encoding="utf-8")
    assert code.count(fault.before) == 1 and fault.before != fault.after
    ast.parse(code.replace(fault.before, fault.after))


CODE = """
def one(x, cuda):
    if x.is_cuda and cuda:
        first()
    else:
        second()
    if not torch.cuda.is_available():
        return None
    third()
    with there:
        fourth()

def _on_cuda(x):
    fifth()

def two(device, gone):
    if device.type != "cuda" or gone:
        return sixth()
    try:
        seventh()
    except Bad:
        eighth()
    if device.type == "cuda" and not torch.cuda.is_available():
        ninth()
"""


def test_the_lines_that_only_a_gpu_reaches_are_found_by_their_conditions() -> None:
    found = {ast.unparse(each) for each in reached.of_a_gpu(ast.parse(CODE).body)}
    names = (
        "first()",
        "second()",
        "third()",
        "fourth()",
        "fifth()",
        "return sixth()",
        "seventh()",
        "eighth()",
    )
    assert [name in found for name in names] == [True, False, True, True, True, False, True, True]
    assert sum(map(len, reached.lines().values())) > 50
