"""Run: pytest tests/graph/test_wide_rows.py

A GPU's kernels hold rows of norms in registers up to a width, and no others.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from monograph import compat
from monograph.graph.capture import MAX_ROW_LENGTH


@pytest.mark.parametrize(
    ("width", "hint", "holds"),
    [
        (1024, ReductionHint.INNER, True),  # as by default
        (2048, ReductionHint.INNER, True),
        (MAX_ROW_LENGTH, ReductionHint.INNER, True),
        (MAX_ROW_LENGTH + 1, ReductionHint.INNER, False),
        (2048, ReductionHint.OUTER, False),
    ],
)
def test_rows_up_to_a_width_are_held(
    width: int, hint: ReductionHint, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_default = InductorChoices.should_use_persistent_reduction
    monkeypatch.setattr(
        InductorChoices, "should_use_persistent_reduction", staticmethod(by_default)
    )
    compat.read_wide_rows_once.__wrapped__(MAX_ROW_LENGTH)  # not cached
    rows = SimpleNamespace(
        get_reduction_hint=lambda: hint,
        reduction_numel=sympy.Integer(width),
        numel=sympy.Integer(4096),
    )
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        assert bool(InductorChoices.should_use_persistent_reduction(rows, False)) == holds
        assert not InductorChoices.should_use_persistent_reduction(
            SimpleNamespace(**{**vars(rows), "reduction_numel": sympy.Integer(10**6)}), False
        )
        # Several programs share a row: none of them holds it.
        shared = {"reduction_numel": sympy.Integer(MAX_ROW_LENGTH)}
        assert not InductorChoices.should_use_persistent_reduction(
            SimpleNamespace(**{**vars(rows), **shared}), True
        )
