# Run: pytest tests/profiling/test_laws.py
"""`monograph check --laws`: fast paths against slow ones on the machine at hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from cli.called import monograph_
from monograph.device import default_device
from monograph.profiling import laws as module
from monograph.profiling.laws import Compared, laws

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("law", "said"),
    [
        (Compared(1e-7, 2e-7), "1.0e-07 off, at most 2.0e-07"),
        (Compared(3e-7, 2e-7), "BROKEN: 3.0e-07 off, at most 2.0e-07"),
        (Compared(math.nan, 2e-7), "BROKEN: nan off, at most 2.0e-07"),
        (Compared(0, 0), "0 differ"),
        (Compared(2, 0), "BROKEN: 2 differ"),
        (Compared(0, 0, "nothing is replayed"), "BROKEN: nothing is replayed"),
    ],
)
def test_a_law_says_how_far_off_it_is(law, said):
    assert law.said == said and law.holds == ("BROKEN" not in said)


def test_a_broken_law_is_an_error_and_the_others_are_compared_all_the_same(monkeypatch, capsys):
    def fails():
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    def says_nothing():
        raise AssertionError

    found = [("a", lambda: Compared(math.nan, 2e-7)), ("b", fails), ("s", says_nothing), ("c", lambda: Compared(0, 0))]
    monkeypatch.setattr(module, "laws", lambda device: iter(found))
    assert monograph_("check", "--laws", "--json") == 1
    out, error = capsys.readouterr()
    told = json.loads(out.splitlines()[-1], parse_constant=pytest.fail)
    assert [(law["holds"], law["error"]) for law in told["laws"]] == [(False, None)] * 3 + [(True, 0)]
    assert "RuntimeError: CUDA error: an illegal memory access\n" in out and "a; b; s" in error
    assert monograph_("check", "--laws", "a_run") == 2


def test_a_fault_breaks_its_law(monkeypatch):
    """Documents that see each other, and an update that one engine makes otherwise."""
    eager = {name: compare for name, compare in laws(CPU) if name.startswith(("packed", "streamed"))}
    assert list(eager) == [f"{what} = {slow}, {name}" for name in ("fp32", "bf16")
                           for what, slow in (("packed", "separate"), ("streamed", "resident"))]  # fmt: skip
    assert eager["packed = separate, fp32"]().holds and eager["streamed = resident, fp32"]().holds
    rows, alone = module._windows()
    monkeypatch.setattr(module, "_windows", lambda: ({**rows, "segments": rows["segments"].clamp(max=1)}, alone))
    small = module._Small(CPU, "fp32")
    assert not small.off(small.engine).holds
    monkeypatch.setattr(module.Resident, "update", lambda engine: None)
    assert small.streamed().error > 0


@pytest.mark.gpu
def test_replayed_updates_are_compared_with_called_ones_on_a_gpu():
    found = dict(laws(torch.device("cuda", 0)))["replayed = called, fp32"]()
    assert found.holds, found.said


@pytest.mark.slow
def test_all_laws_hold_here():
    found = {name: compare() for name, compare in laws(default_device())}
    assert len(found) >= 9 and [name for name, law in found.items() if not law.holds] == []
