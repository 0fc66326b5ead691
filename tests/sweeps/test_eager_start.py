"""Run: pytest tests/sweeps/test_eager_start.py (updates of a sweep's members before their graphs
are compiled).
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands.inputs import TINY, over, with_texts
from monograph.commands.sweep import run
from monograph.config import load
from monograph.session import warmup
from monograph.session.eager_start import EAGER_KEY
from monograph.sweeps import concurrency, eager_start
from monograph.sweeps import progress as sweep_progress
from monograph.sweeps.concurrency import TimedGroup
from monograph.sweeps.folder import Sweep

BY_CLOCK = [each for each in TINY if not each.startswith(("train.compile", "train.updates"))]
BY_CLOCK += ["train.minutes=0.1", "train.keep=99"]
EARLY = 5
AXES = ["optim.lr=1e-3,1e-2", "train.seed=0,1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An update of a member takes a second, or of all at once 1.5 s, which is always worth it;
    graphs cost nothing.
    """
    monkeypatch.setattr(warmup, "capture_engine", lambda *_: None)
    monkeypatch.setattr("monograph.sweeps.results.capture_engine", lambda *_: None)
    monkeypatch.setattr(
        concurrency, "timed_update", lambda engine, _: {1: 1.0}.get(getattr(engine, "size", 1), 1.5)
    )
    monkeypatch.setattr(concurrency, "MIN_SAVING", 0.0)
    monkeypatch.setattr(TimedGroup, "is_brief", lambda _: False)
    monkeypatch.setattr(TimedGroup, "held_out_s", lambda *_: 0.0)
    monkeypatch.setattr(eager_start, "_is_possible", lambda _: True)
    monkeypatch.setattr(sweep_progress, "write_sweep_report", lambda *_: None)
    monkeypatch.setattr("monograph.planner.defaults.most_updates", lambda *_: 1000)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(with_texts(tmp_path))
    compiling_for(EARLY, monkeypatch)
    return tmp_path


def compiling_for(updates: int, monkeypatch: pytest.MonkeyPatch, end: object = 0) -> None:
    def poll() -> object:
        nonlocal updates
        updates -= 1
        if not updates and end is KeyboardInterrupt:
            raise KeyboardInterrupt
        return None if updates > 0 else end

    monkeypatch.setattr(
        "monograph.session.eager_start.start_python",
        lambda *_: SimpleNamespace(poll=poll, kill=lambda: None),
    )


def sweep(arguments: list[str], out: str, verify: int | None = None) -> int:
    return run(
        arguments, samples=None, verify=verify, out=Path(out), distill=False, prune=None, json=False
    )


def weights(out: str) -> dict[str, str]:
    newest = [
        max(member.glob("checkpoints/step-*")) for member in sorted(Path(out, "members").iterdir())
    ]
    files = [
        folder / name
        for folder in newest
        for name in ("model.safetensors", "optimizer.safetensors")
    ]
    return {
        str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def test_all_members_begin_at_once_and_go_on_compiled_from_there() -> None:
    assert sweep([*BY_CLOCK, *AXES], "whole", verify=3) == 0, (
        "alone it has the losses that it had among the others"
    )
    made = Sweep.open(Path("whole"))
    [group] = made.record["groups"]
    assert group["rounds"] == [4] and group["eager_updates"] == EARLY
    in_all = group["updates"]
    assert in_all == EARLY + 3, "6 s are 3 updates of all, beside those that were made before"
    for index in range(4):
        rows = made.member(index).rows()
        assert [row["update"] for row in rows if "lr" in row] == [*range(1, in_all + 1)]
        assert [row["update"] for row in rows if EAGER_KEY in row] == [*range(1, EARLY + 1)]
        saved = sorted(path.name for path in made.member(index).checkpoints.iterdir())
        assert saved[0] == f"step-{EARLY:08d}", "no checkpoint from before the graph"
        settings = load(made.member(index).config, {}, {}, recorded=True)
        assert settings.train.updates == in_all and settings.train.compile != "none"

    shutil.copytree("whole", "cut")
    cut = Sweep.open(Path("cut"))
    for index in range(4):  # as if it had been killed right after the first checkpoint
        member = cut.member(index)
        for folder in sorted(member.checkpoints.glob("step-*"))[1:]:
            shutil.rmtree(folder)
        rows = member.metrics.read_text().splitlines(keepends=True)
        member.metrics.write_text("".join(row for row in rows if '"summary"' not in row))
    sweep([], "cut")
    assert weights("cut") == weights("whole")


def test_groups_that_no_graph_holds_together_make_as_many_updates() -> None:
    sweep([*over(BY_CLOCK, "model.hidden_size=16,32"), "optim.lr=1e-3,1e-2"], "whole")
    made = Sweep.open(Path("whole"))
    assert [group["eager_updates"] for group in made.record["groups"]] == [EARLY, EARLY]
    early = [
        [row["update"] for row in made.member(index).rows() if EAGER_KEY in row]
        for index in range(4)
    ]
    assert early == [[*range(1, EARLY + 1)]] * 4


def test_what_is_stopped_before_the_graphs_are_there_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling_for(3, monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep([*BY_CLOCK, *AXES], "stopped")
    assert Sweep.open(Path("stopped")).member(0).rows()[-1]["update"] == 3
    compiling_for(EARLY, monkeypatch)
    sweep([*BY_CLOCK, *AXES], "stopped")
    rows = Sweep.open(Path("stopped")).member(0).rows()
    assert [row["update"] for row in rows if "lr" in row] == [*range(1, EARLY + 4)], (
        "rows of before stayed"
    )


def test_members_go_on_without_a_graph_if_the_compiler_takes_longer_than_they_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling_for(10**9, monkeypatch)
    monkeypatch.setattr(eager_start, "patience_for", lambda *_: 0.0)
    assert sweep([*BY_CLOCK, *AXES], "whole", verify=1) == 0
    made = Sweep.open(Path("whole"))
    [group] = made.record["groups"]
    assert (group["eager_updates"], group["updates"], group["compile"]) == (1, 4, "none")
    for index in range(4):
        settings = load(made.member(index).config, {}, {}, recorded=True)
        assert (settings.train.compile, settings.train.updates) == ("none", 4)
        assert [row["update"] for row in made.member(index).rows() if "lr" in row] == [1, 2, 3, 4]


@pytest.mark.slow
def test_what_was_compiled_before_does_not_begin_eagerly() -> None:
    sweep([*BY_CLOCK, *AXES], "first")
    sweep([*BY_CLOCK, *AXES], "second")
    assert not any(EAGER_KEY in row for row in Sweep.open(Path("second")).member(0).rows())


@pytest.mark.parametrize(
    ("change", "possible"),
    [
        ({}, True),
        ({"updates": 8}, False),
        ({"epochs": 1}, False),
        ({"compile": "none"}, False),
        ({"memory": "stream"}, False),
        ({"cores": 1}, False),
        ({"samples_answers": True}, False),
    ],
)
def test_it_is_for_a_length_by_the_clock_that_is_compiled(
    change: dict[str, Any], possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("monograph.session.eager_start.compiler_obstacle", lambda: None)
    facts = {
        "updates": 0,
        "epochs": None,
        "compile": "whole",
        "memory": "device",
        "type": "cpu",
        "cores": 2,
        "samples_answers": False,
    } | change
    training = SimpleNamespace(compile=facts["compile"])
    span = SimpleNamespace(epochs=facts["epochs"])
    plan = SimpleNamespace(
        job=SimpleNamespace(
            recipe=SimpleNamespace(code=None),
            span=span,
            objective=SimpleNamespace(samples_answers=facts["samples_answers"]),
        ),
        training=training,
        **facts,
    )
    timed_group: Any = SimpleNamespace(
        machine=SimpleNamespace(**facts), group=SimpleNamespace(plan=plan)
    )
    assert eager_start._is_possible([timed_group]) == possible
