"""Run: pytest tests/session/test_brief.py (a run that is over before its step would be compiled is
not compiled).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laws.resumed import (
    PREFERRED,
    REWARDED,
    SETTINGS,
    cut_back,
    fingerprint,
    resume,
    start,
    write_inputs,
)
from monograph.config import load
from monograph.resident import Resident
from monograph.session import brief, reporting, warmup

KINDS: dict[str, dict[str, Any]] = {
    "texts": SETTINGS,
    "preferences": PREFERRED,
    "rewards": REWARDED,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reporting, "write_report", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


def settings_of(kind: str) -> dict[str, Any]:
    open_ = {key: value for key, value in KINDS[kind].items() if key != "train.compile"}
    return open_ | {"train.updates": 6, "train.save_every": 2}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=pytest.mark.slow if each != "texts" else ()) for each in KINDS],
)
def test_a_brief_run_is_not_compiled_and_goes_on_so(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def capture(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(Resident, "capture", capture)
    start("whole", settings_of(kind))
    said = capsys.readouterr().err
    assert (
        said.count("training without compiling: it takes about ") == 1
        and said.count("\ntrial ") == 1
    ), said
    assert load(Path("whole/config.toml"), {}, {}, recorded=True).train.compile == "none"
    cut_back("whole", "cut", 2)
    # The decision is recorded, and not made again.
    monkeypatch.setattr(brief, "MIN_COMPILE_S", 0.0)
    monkeypatch.setattr(brief, "COMPILE_S", 0.0)
    resume("cut")
    assert fingerprint(Path("cut")) == fingerprint(Path("whole"))


def test_a_brief_run_is_the_run_that_was_never_to_be_compiled() -> None:
    """Rewards draw their answers otherwise where nothing is compiled, so all of the session is made
    anew.
    """
    start("brief", settings_of("rewards"))
    start("eager", settings_of("rewards") | {"train.compile": "none"})
    found, expected = (fingerprint(Path(name)) for name in ("brief", "eager"))
    assert found["rows"] == expected["rows"]
    assert found["model.safetensors"] == expected["model.safetensors"]


def test_a_short_text_ends_a_run_before_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resident, "capture", None)  # nothing may call it
    monkeypatch.setattr(warmup, "time_update", lambda session: 0.01)
    given = {key: value for key, value in settings_of("texts").items() if key != "train.updates"}
    start("run", given | {"train.minutes": 10, "train.save_every": 1000})
    assert load(Path("run/config.toml"), {}, {}, recorded=True).train.compile == "none"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"train.compile": "whole"}, "asked for"),
        ({"train.updates": 10**9}, "long"),
        ({"train.updates": None, "train.minutes": 10}, "long by the clock"),
    ],
)
def test_what_is_compiled(
    change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiled(Exception):
        pass

    def capture(*_: object, **__: object) -> None:
        raise Compiled

    monkeypatch.setattr(Resident, "capture", capture)
    monkeypatch.setattr("monograph.session.eager_start.should_begin_eagerly", lambda *_: False)
    # As if the text were long.
    monkeypatch.setattr("monograph.planner.defaults.most_updates", lambda *_: 10**9)
    given = {
        key: value for key, value in (settings_of("texts") | change).items() if value is not None
    }
    with pytest.raises(Compiled):
        start("run", given)
