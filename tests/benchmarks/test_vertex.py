# Run: pytest tests/benchmarks/test_vertex.py
"""The vertex of a learning-rate sweep: exact on parabolas, inside what was tried, honest at the
edges.
"""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.errors import UsageError

vertex = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "vertex.py"))[
    "vertex"
]
POWERS = [2.0**k for k in range(-9, -2)]


@given(
    st.floats(-8, -4),
    st.floats(0.001, 10),
    st.floats(-3, 3),
    st.lists(st.floats(0.3, 3), min_size=9, max_size=9),
)
def test_exact_on_a_parabola_at_any_spacing(place, curvature, least, gaps):
    exponents = [-10 + sum(gaps[:k]) for k in range(10)]
    losses = [least + curvature * (x - place) ** 2 for x in exponents]
    found = vertex([2**x for x in exponents], losses)
    best = min(range(10), key=losses.__getitem__)
    if best in (0, 9):
        assert found == (pytest.approx(2 ** exponents[best]), losses[best], False)
        return
    assert found.bracketed and found.log2 == pytest.approx(place, abs=1e-4)
    assert found.loss == pytest.approx(least, abs=1e-4)


@given(st.permutations(POWERS), st.lists(st.floats(1, 9), min_size=7, max_size=7))
def test_it_lies_beside_the_best_rate_in_any_order(lrs, losses):
    found, best = vertex(lrs, losses), min(zip(losses, lrs, strict=True))
    assert found.loss <= best[0] + 1e-12
    ties = [lr for lr, loss in zip(lrs, losses, strict=True) if loss == best[0]]
    assert min(abs(found.log2 - math.log2(lr)) for lr in ties) <= 0.5 + 1e-9
    assert found == vertex(*zip(*sorted(zip(lrs, losses, strict=True)), strict=True))


def test_a_tie_ends_in_the_middle():
    assert vertex(POWERS, [5, 4, 2, 2, 4, 5, 6]).log2 == pytest.approx(-6.5)
    assert vertex(POWERS, [2.0] * 7) == (2**-9, 2.0, False)
    assert vertex(POWERS[:5], [3, 2, 2, 2, 3]).log2 == pytest.approx(-7.5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_at_an_edge_or_beside_a_diverged_run_it_is_the_best_rate_itself(bad):
    assert vertex(POWERS, [1, 2, 3, 4, 5, 6, 7]) == (2**-9, 1, False)
    assert vertex(POWERS, [7, 6, 5, 4, 3, 2, 1]) == (2**-3, 1, False)
    assert vertex(POWERS, [5, 4, 3, bad, bad, bad, bad]) == (2**-7, 3, False)
    assert vertex(POWERS, [5, 4, 3, 3.5, bad, bad, bad]).bracketed
    assert vertex([1e-3], [2.0]) == (1e-3, 2.0, False)


@pytest.mark.parametrize(
    ("lrs", "losses"),
    [
        ([1e-3], []),
        ([1e-3, 1e-3], [1, 2]),
        ([0.0, 1e-3], [1, 2]),
        ([1e-3, 2e-3], [math.nan, math.inf]),
        ([], []),
    ],
)
def test_what_has_no_vertex_is_refused(lrs, losses):
    with pytest.raises(UsageError, match="vertex"):
        vertex(lrs, losses)
