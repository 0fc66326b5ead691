# Run: pytest tests/profiling/test_laws.py
"""`monograph check --laws`: fast paths against slow ones on the machine at hand."""

from __future__ import annotations

import json
import math

import pytest

from cli.called import monograph_
from monograph.device import default_device
from monograph.profiling import laws as module
from monograph.profiling.laws import Law, laws


@pytest.mark.parametrize(
    ("law", "said"),
    [
        (Law("a", 1e-7, 2e-7), "1.0e-07 off, at most 2.0e-07"),
        (Law("a", 3e-7, 2e-7), "BROKEN: 3.0e-07 off, at most 2.0e-07"),
        (Law("a", math.nan, 2e-7), "BROKEN: nan off, at most 2.0e-07"),
        (Law("a", 0, 0), "equal"),
        (Law("a", 2, 0), "BROKEN: 2 differ"),
    ],
)
def test_a_law_says_how_far_off_it_is(law, said):
    assert law.said == said and law.holds == ("BROKEN" not in said)


def test_a_broken_law_is_an_error(monkeypatch, capsys):
    found = [Law("compiled = eager, fp32", 1.0, 2e-7), Law("streamed = resident, fp32", 0, 0)]
    monkeypatch.setattr(module, "laws", lambda device: iter(found))
    assert monograph_("check", "--laws", "--json") == 1
    out, error = capsys.readouterr()
    assert "BROKEN: 1.0e+00 off" in out and "equal" in out
    assert [law["holds"] for law in json.loads(out.splitlines()[-1])["laws"]] == [False, True]
    assert "computes wrong on this machine" in error and error.count("compiled = eager, fp32") == 1
    assert monograph_("check", "--laws", "a_run") == 2


@pytest.mark.slow
def test_all_laws_hold_here():
    assert [law for law in laws(default_device()) if not law.holds] == []
