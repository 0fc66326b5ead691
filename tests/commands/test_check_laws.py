# Run: pytest tests/commands/test_check_laws.py
"""`monograph check --laws`: fast paths against slow ones on the machine at hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from cli.called import monograph_
from monograph.decode.filters import FILTERS
from monograph.decode.generator import Generator
from monograph.device import default_device
from monograph.laws import check as module
from monograph.laws.check import Law, laws
from monograph.laws.comparisons import LawComparison
from monograph.resident import Resident

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("law", "words"),
    [
        (LawComparison(1e-7, 2e-7), ("1.0e-07", "2.0e-07", "holds")),
        (LawComparison(3e-7, 2e-7), ("3.0e-07", "2.0e-07", "BROKEN")),
        (LawComparison(math.nan, 2e-7), ("nan", "2.0e-07", "BROKEN")),
        (LawComparison(math.inf, math.inf), ("inf", "inf", "BROKEN")),
        (LawComparison(0, 0), ("0 differ", "0", "holds")),
        (LawComparison(2, 0), ("2 differ", "0", "BROKEN")),
        (
            LawComparison(0, 0, "nothing is replayed"),
            ("0 differ", "0", "BROKEN: nothing is replayed"),
        ),
    ],
)
def test_a_law_says_how_far_off_it_is(law, words):
    assert law.in_words == words and law.holds == bool(law) == (words[2] == "holds")


def test_a_broken_law_is_an_error_and_the_others_are_compared_all_the_same(monkeypatch, capsys):
    def fails():
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    def says_nothing():
        raise AssertionError

    found = [(1, "a", lambda: LawComparison(math.nan, 2e-7)), (2, "b", fails), (3, "s", says_nothing),
             (10, "c", lambda: LawComparison(0, 0))]  # fmt: skip
    monkeypatch.setattr(module, "laws", lambda device: [Law(*law) for law in found])
    assert monograph_("check", "--laws", "--json") == 1
    out, error = capsys.readouterr()
    told = json.loads(out.splitlines()[-1], parse_constant=pytest.fail)
    assert told["schema"] == "monograph.check/1" and all(
        law["seconds"] >= 0 for law in told["laws"]
    )
    assert [(law["number"], law["holds"], law["error"]) for law in told["laws"]] == [
        (1, False, None), (2, False, None), (3, False, None), (10, True, 0)
    ]  # fmt: skip
    assert (
        "RuntimeError: CUDA error: an illegal memory access\n" in out
        and "law 1 (a), 2 (b), 3 (s);" in error
    )
    assert monograph_("check", "--laws", "a_run") == 2


def test_the_table_names_a_law_before_it_is_compared_and_ctrl_c_ends_it(monkeypatch, capsys):
    def interrupted():
        assert "  10  resumed = uninterrupted" in capsys.readouterr().out
        raise KeyboardInterrupt

    monkeypatch.setattr(
        module, "laws", lambda device: [Law(10, "resumed = uninterrupted, fp32", interrupted)]
    )
    assert monograph_("check", "--laws") == 130


def small_laws():
    """The laws that take no compiler, by name."""
    return {
        law.name: law for law in laws(CPU) if not law.name.startswith(("compiled", "generated"))
    }


def test_each_law_has_its_number():
    listed = laws(CPU)
    assert sorted({law.number for law in listed}) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 18, 19]
    assert [law.number for law in listed] == sorted(law.number for law in listed)
    assert len({law.name for law in listed}) == len(listed)


def seen_by_others(monkeypatch):
    """Documents that see each other."""
    rows, alone = module._windows()
    monkeypatch.setattr(
        module, "_windows", lambda: ({**rows, "segments": rows["segments"].clamp(max=1)}, alone)
    )


def without_update(monkeypatch):
    """A resident engine whose weights do not change."""
    real = module.Resident.update

    def update(engine):
        parameters = list(engine.step.model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        done = real(engine)
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        return done

    monkeypatch.setattr(module.Resident, "update", update)


def kept(monkeypatch):
    """Prompts whose keys and values are kept after an update."""
    monkeypatch.setattr(Generator, "forget", lambda generator: None)


def forgotten(monkeypatch):
    """Moments that a checkpoint's state is loaded without."""
    whole = Resident.load_state
    monkeypatch.setattr(
        Resident,
        "load_state",
        lambda engine, state: whole(engine, replace(state, optimizer=zeros(state.optimizer))),
    )


def zeros(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def cut_elsewhere(monkeypatch):
    """A filter that keeps all."""
    monkeypatch.setitem(
        FILTERS, "min_p", replace(FILTERS["min_p"], apply=lambda candidates, knobs: candidates)
    )


FAULTS = {
    "packed = separate, fp64": seen_by_others,
    "streamed = resident, fp32": without_update,
    "resumed = uninterrupted, fp32": forgotten,
    "sampled = reference, fp32": cut_elsewhere,
    "used generator = new one, fp32": kept,
}


SLOW = ("streamed = resident, fp32", "resumed = uninterrupted, fp32")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAULTS]
)
def test_a_fault_breaks_its_law(monkeypatch, name):
    assert small_laws()[name].compare().holds
    FAULTS[name](monkeypatch)
    found = small_laws()[name].compare()
    assert not found.holds and not found.why and found.error > found.bound


@pytest.mark.gpu
@pytest.mark.slow
def test_replayed_updates_are_compared_with_called_ones_on_a_gpu():
    found = next(
        law for law in laws(torch.device("cuda", 0)) if law.name == "replayed = called, fp32"
    ).compare()
    assert found.holds, found.in_words


@pytest.mark.slow
def test_all_laws_hold_here():
    found = {law.name: law.compare() for law in laws(default_device())}
    assert len(found) >= 20 and [name for name, law in found.items() if not law.holds] == []
