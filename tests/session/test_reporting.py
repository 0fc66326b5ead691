"""Run: pytest tests/session/test_reporting.py"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batches import packed, tiny_llama
from laws.resumed import REWARDED, SETTINGS, start, write_inputs
from monograph import compat
from monograph.device import clock, describe
from monograph.distributed.world import World
from monograph.predict.roofline import flops_per_token, matmul_parameters
from monograph.report.run_report import About, run_page
from monograph.resident import Resident
from monograph.run.folder import Run
from monograph.session import reporting
from monograph.session.objectives.rewards import RewardTask
from monograph.session.reporting import Reporter, _planned_memory_text, _unused_memory_text
from monograph.session.sample_prompt import SamplePrompt
from monograph.text.tokenizer import Tokenizer
from rewarded import OPTIONS


class TimedRun:
    """A run that may take 100 s, on a machine whose speed nobody foresaw."""

    def __init__(self, seconds_per_update: float, updates: int = 1000) -> None:
        self.seconds_per_update, self.updates, self.early_cool_down, self.budget_s = (
            seconds_per_update,
            updates,
            None,
            100.0,
        )
        self.left_s, self.deadline_s = math.inf, None
        self.told: list[str] = []
        self.progress = SimpleNamespace(line=lambda _, text: self.told.append(text))
        self.session, self.world = self, World()
        self.spent_s, self.recent_update_s, self.elapsed_s, self.first_update = (
            0.0,
            seconds_per_update,
            0.0,
            0,
        )
        while (update := round(self.spent_s / seconds_per_update)) < self.updates:
            self.spent_s += seconds_per_update
            Reporter.shorten_if_late(self, update + 1)  # type: ignore[arg-type]

    _length_in_budget, _per_update_s = Reporter._length_in_budget, Reporter._per_update_s

    @property
    def training_since_s(self) -> float:
        return clock() - self.spent_s

    def cool_down_until(self, updates: int) -> None:
        self.early_cool_down, self.updates = self.spent_s, updates  # type: ignore[assignment]


@pytest.mark.parametrize("seconds_per_update", [0.105, 0.13, 0.2, 1.0, 3.0])
def test_a_slower_machine_ends_in_time(seconds_per_update: float) -> None:
    run = TimedRun(seconds_per_update)
    assert run.early_cool_down and 70 <= run.early_cool_down <= 75 and len(run.told) == 1
    assert (
        run.spent_s == pytest.approx(97, rel=0.03)
        or run.updates - run.early_cool_down / seconds_per_update <= 11
    )


@pytest.mark.parametrize("updates, ends", [(9, 4), (4, 4)])
def test_updates_that_take_long_are_fewer_and_only_a_shorter_run_is_said_to_end_early(
    updates: int, ends: int
) -> None:
    run = TimedRun(30.0, updates)
    assert run.updates == ends and len(run.told) == (ends < updates)


@pytest.mark.parametrize("seconds_per_update", [0.05, 0.09, 0.099])
def test_a_machine_as_fast_as_thought_does_all_updates(seconds_per_update: float) -> None:
    run = TimedRun(seconds_per_update)
    assert run.early_cool_down is None and run.updates == 1000


def test_a_run_that_cools_down_early_ends_at_100_percent_and_says_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slower_machine(reporter: Reporter, update: int) -> None:
        if update == 8:
            reporter.session.cool_down_until(14)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Reporter, "shorten_if_late", slower_machine)
    monkeypatch.setattr(reporting, "write_report", lambda *_: None)
    write_inputs(tmp_path)
    start("run", SETTINGS)
    said = capsys.readouterr().err
    assert "update 14/14 100 %" in said and "14/20" not in said, said
    assert "14 of 20 planned updates" in said


@pytest.mark.parametrize("reward, said", [("0", 1), ("len(completion) % 2", 0)])
def test_rewards_that_are_all_equal_are_said_to_teach_nothing_while_it_trains_and_at_the_end(
    reward: str,
    said: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pages = []
    monkeypatch.setattr(reporting, "write_report", lambda *given: pages.append(run_page(*given)))
    write_inputs(tmp_path)
    Path("letters.py").write_text(f"def score(prompt, completion, record):\n    return {reward}\n")
    start("run", REWARDED | {"train.updates": 5, "train.compile": "none"})
    lines = " ".join(capsys.readouterr().err.split())
    assert lines.count("so far, the answers to a prompt all had the same reward, so") == said
    assert (
        lines.count("in all updates, the answers to a prompt all had the same reward, so") == said
    )
    warned = '<p class="standing warning">In all updates, the answers to a prompt all had the same reward, so'
    assert [page.count(warned) for page in pages] == [said]


def test_a_page_in_progress_doubts_nothing_before_the_run_has_begun_well() -> None:
    task = SimpleNamespace(doubt=lambda rows: "nothing was learned")
    for done, updates, said in (
        (2, 9, ""),
        (3, 9, "nothing was learned"),
        (1, 1, "nothing was learned"),
    ):
        session = SimpleNamespace(task=task, updates=updates, engine=SimpleNamespace(index=done))
        assert Reporter.doubt(SimpleNamespace(session=session), []) == said  # type: ignore[arg-type]
    page = run_page(Path("run"), {}, [], About(doubt="nothing was learned"), "in progress")
    assert "So far, nothing was learned." in page


@pytest.mark.parametrize("traced, slots, said", [
    (True, 0, " (4.0 MiB planned)"), (True, 22, " (at most 4.0 MiB planned)"), (False, 22, " (~4.0 MiB planned)"),
])  # fmt: skip
def test_planned_memory_that_a_formula_estimated_is_marked(
    traced: bool, slots: int, said: str
) -> None:
    expected = SimpleNamespace(by_origin={"weights": 2**22} if traced else None)
    plan: Any = SimpleNamespace(peak_memory_bytes=2**22, expected=expected)
    assert _planned_memory_text(plan, slots) == said
    assert _planned_memory_text(SimpleNamespace(peak_memory_bytes=None, expected=None), 0) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize("unused, peak, said", [
    (0, 2**22, ""), (2**22 // 101, 2**22, ""), (0, None, ""),
    (2**21, 2**22, ", 2.0 MiB of it unused in replayed graphs"),
])  # fmt: skip
def test_memory_that_replayed_graphs_hold_unused_is_told_beside_the_peak(
    unused: int, peak: int | None, said: str
) -> None:
    """It is why the plan of a tiny run is less than half of the peak: the allocator's segments."""
    assert _unused_memory_text(unused, peak) == said


@pytest.mark.parametrize("dead, doubted", [([1.0, 1.0], True), ([1.0, 0.9], False), ([], False)])
def test_a_run_of_which_one_prompt_taught_something_is_not_doubted(
    dead: list[float], doubted: bool
) -> None:
    rows = [{"update": number, "dead": share} for number, share in enumerate(dead)] + [
        {"update": 2, "eval_reward": 1}
    ]
    task: Any = SimpleNamespace(drawer=SimpleNamespace(options=OPTIONS))
    assert bool(RewardTask.doubt(task, rows)) == doubted


@pytest.mark.parametrize(
    ("masks", "cut", "said"),
    [(True, 1.0, "all answers were cut"), (True, 0.5, "same reward"), (False, 1.0, "same reward")],
)
def test_a_doubt_about_rewards_says_why_nothing_was_learned(
    masks: bool, cut: float, said: str
) -> None:
    options = replace(OPTIONS, masks_truncated=masks, turns=3)
    task: Any = SimpleNamespace(drawer=SimpleNamespace(options=options))
    assert said in RewardTask.doubt(task, [{"dead": 1.0, "cut": cut}, {"eval_reward": 1.0}])


def test_a_machine_that_has_just_slowed_down_is_taken_at_its_present_speed() -> None:
    run = TimedRun(0.09)
    run.spent_s, run.recent_update_s, run.early_cool_down = 72.0, 0.3, None
    Reporter.shorten_if_late(run, 800)  # type: ignore[arg-type]
    assert run.updates == 800 + int(25 / 0.3)


@pytest.mark.parametrize("eager, warmup, cooled, expected", [
    (0, 35, None, [(35, "warm-up ends")]),
    (20, 35, None, [(20, "length set"), (35, "warm-up ends")]),
    (77, 35, [500, 700], [(77, "length set, warm-up over"), (500, "cool-down begins early")]),
    (77, 0, None, [(77, "length set")]),
    (0, 1, None, []),
])  # fmt: skip
def test_each_kink_of_the_learning_rate_has_its_reason(
    eager: int, warmup: int, cooled: list[int] | None, expected: list[tuple[int, str]]
) -> None:
    session = SimpleNamespace(
        plan=SimpleNamespace(intervals=SimpleNamespace(warmup_updates=warmup)),
        early_cool_down=cooled,
    )
    rows = [
        {"update": update, **({"eager": True} if update <= eager else {})}
        for update in range(1, 100)
    ]
    assert Reporter._schedule_kinks(SimpleNamespace(session=session), rows) == expected  # type: ignore[arg-type]


def test_a_sample_makes_no_graphs_of_blocks() -> None:
    """A block's graph would be made anew for each layer's cache: two a layer, in the middle of the
    training.
    """
    tokenizer = Tokenizer.bytes()
    engine = Resident(
        tiny_llama(num_hidden_layers=2, vocab_size=tokenizer.vocab_size, max_position_embeddings=64)
    )
    assert engine.capture(packed(6), "eager", "blocks") is None
    graphs = compat.captured_graphs()
    plan = SimpleNamespace(job=SimpleNamespace(seed=0))
    session = SimpleNamespace(
        engine=engine, records=SimpleNamespace(tokenizer=tokenizer), plan=plan, world=World()
    )
    telling = SimpleNamespace(
        session=session, _can_write=True, sample_prompt=SamplePrompt("alpha", "alpha", (), ())
    )
    assert Reporter._write_texts(telling, 1, 8) and compat.captured_graphs() == graphs  # type: ignore[arg-type]
    engine.accumulate(packed(6))
    engine.update()
    assert compat.captured_graphs() == graphs and engine.step.scope == "blocks"


@pytest.mark.parametrize("learns", ["packed texts", "rewards"])
def test_mfu_counts_the_documents_that_the_run_s_rows_hold(
    learns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that are made anew for each update nobody knows the documents: no MFU there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reporting, "write_report", lambda *_: None)
    machine = replace(describe(), peak_flops={"fp32": 1e12})
    monkeypatch.setattr(reporting, "describe", lambda _: machine)
    sessions = []
    summary = Reporter._summary

    def kept_summary(report: Reporter) -> dict[str, Any]:
        sessions.append(report.session)
        return summary(report)

    monkeypatch.setattr(Reporter, "_summary", kept_summary)
    write_inputs(tmp_path)
    settings = REWARDED if learns == "rewards" else SETTINGS
    start("run", settings | {"train.updates": 3, "train.save_every": 3})
    found = next(row["summary"] for row in Run(Path("run")).rows() if "summary" in row)
    if learns == "rewards":
        assert found["mfu"] is None
        return
    session = sessions[0]
    rows = session.task.data.train
    window = rows.window(np.arange(len(rows)))
    pairs = (window["positions"] + 1)[window["segments"] > 0].sum()
    config = session.model_config
    width = config.num_attention_heads * config.head_dim
    attention = 12 * config.num_hidden_layers * width * pairs / rows.inputs
    flops_per_s = found["tokens_per_s"] * (6 * matmul_parameters(config) + attention)
    assert found["mfu"] == pytest.approx(flops_per_s / 1e12)
    whole_rows = flops_per_token(config, session.plan.training.length)
    assert found["mfu"] < found["tokens_per_s"] * whole_rows / 1e12
