"""Run: pytest tests/sweeps/test_preferences.py (members that train at once learn from pairs as each
would alone, go on with the same bits, and are scored by held-out pairs)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from laws.resumed import write_inputs
from monograph.config import load
from monograph.device import describe
from monograph.ensemble import Ensemble
from monograph.errors import InputRefused
from monograph.loop import train
from monograph.run.folder import Run
from monograph.run.progress import Progress, silent
from monograph.session.objective import SweptTask
from monograph.session.resolve import resolve
from monograph.session.setup import build_run, make_engine
from monograph.sweeps import cohort
from monograph.sweeps.cohort import Cohort
from monograph.sweeps.results import train_alone
from monograph.sweeps.spec import Member, groups_of, have_own_rows, members_of

UPDATES = 6
CPU = torch.device("cpu")
KEYS: dict[str, Any] = {
    "data.sequence_length": 32, "data.held_out": 0.3, "train.updates": UPDATES, "train.tokens_per_update": 128,
    "train.compile": "none", "train.precision": "fp32", "train.save_every": 2, "lora.rank": 4,
}  # fmt: skip
POINTS: list[dict[str, Any]] = [
    {"lora.rank": 4, "optim.lr": 1e-2, "train.seed": 0},
    {"lora.rank": 2, "optim.lr": 3e-2, "train.seed": 1, "lora.alpha": 9.0},
    {"lora.rank": 7, "optim.lr": 1e-2, "train.seed": 1, "lora.rslora": True},
]
LOSSES = {"dpo": "pairs.jsonl", "kto": "labelled.jsonl"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swept preferences")
    write_inputs(folder)
    return folder


def members(here: Path, loss: str = "dpo", points: list[dict[str, Any]] = POINTS) -> list[Member]:
    keys = {
        "model.init": str(here / "base"),
        "data.source": str(here / LOSSES[loss]),
        "prefer.loss": loss,
    }
    found = members_of(load(None, KEYS | keys, {}), points)
    for member in found:
        member.plan = resolve(member.settings, describe())
    return found


def task_of(member: Member) -> SweptTask:
    assert member.plan
    return cohort.open_swept(member.plan, silent())


def mustered(these: list[Member], folder: Path) -> Cohort:
    task = task_of(these[0])
    made = cohort.with_length(cohort.build_models(these, task, describe()), UPDATES)
    own_rows = have_own_rows([built.plan for built in made])
    engine = cohort.make_members_engine(made, own_rows, CPU)
    places = [folder / str(index) for index in range(len(these))]
    runs = [Run(place) if place.exists() else Run.create(place) for place in places]
    return cohort.begin_cohort(these, runs, made, task, engine)


def trained(together: Cohort, updates: int) -> list[Any]:
    """The losses and the figures of each update."""
    return [
        (update.loss.tolist(), together.figures())
        for update in train(together.engine, together.windows, updates)
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_members_learn_from_pairs_as_each_would_alone(
    loss: str, here: Path, tmp_path: Path
) -> None:
    these = members(here, loss)
    assert len(groups_of(these)) == 1
    together = mustered(these, tmp_path)
    assert isinstance(together.engine, Ensemble)
    together.prepare_references(False, silent())
    updates = trained(together, UPDATES)
    for place, member in enumerate(these):
        assert member.plan
        plan = member.plan.with_decided_values({})
        alone = train_alone(
            together.sessions[place].run, plan, task_of(member), UPDATES, silent(), compiled=False
        )
        assert [losses[place] for losses, _ in updates] == pytest.approx(alone, rel=1e-5)
    tokens = [figures[0]["tokens"] for _, figures in updates]
    assert tokens == sorted(tokens) and tokens[-1] > tokens[0] > 0
    together.close()


def test_members_of_one_seed_have_rows_of_their_own(here: Path, tmp_path: Path) -> None:
    """By which they share out what the reference scores."""
    together = mustered(members(here, points=[{"optim.lr": 1e-2}, {"optim.lr": 3e-2}]), tmp_path)
    window = next(together.windows)["tokens"]
    assert window.ndim == 3 and torch.equal(window[0], window[1])
    assert together.sessions[0].batches is together.sessions[1].batches
    together.close()


@pytest.mark.parametrize("loss", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_members_go_on_with_the_same_bits(loss: str, here: Path, tmp_path: Path) -> None:
    """Law 10: the losses and figures after a resume are those of an uninterrupted sweep."""
    these = members(here, loss)
    whole = mustered(these, tmp_path / "whole")
    whole.prepare_references(False, silent())
    expected = trained(whole, UPDATES)
    whole.close()
    first = mustered(these, tmp_path / "killed")
    first.prepare_references(False, silent())
    trained(first, 2)
    first.save()
    trained(first, 4)
    first.sessions[0].save()  # as if killed between two members
    first.close()
    again = mustered(these, tmp_path / "killed")
    assert cohort.resume_cohort(again, {}, Progress()) == 2
    again.prepare_references(True, silent())
    for task, figures in zip(again.tasks, expected[1][1], strict=True):
        task.answer_tokens = figures["tokens"]  # the rows of metrics.jsonl have them
    assert trained(again, UPDATES) == expected[2:]
    again.close()


def test_members_are_scored_by_held_out_pairs(here: Path, tmp_path: Path) -> None:
    these = members(here)
    together = mustered(these, tmp_path)
    together.prepare_references(False, silent())
    trained(together, 2)
    [first, *_] = together.tasks
    scores = first.evaluate_members(together.tasks, together.engine, batch_rows=2, limit=None)
    for task, session, score in zip(together.tasks, together.sessions, scores, strict=True):
        alone = task.evaluate(2, None)
        assert alone and score and score.figures == alone.figures
        assert 0 <= score.figures["eval_accuracy"] <= 1
        assert session.engine.loss.totals.sum() == 0  # type: ignore[attr-defined]
    together.close()


def test_a_sweep_without_held_out_pairs_is_refused(here: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    [member] = members(here, points=[{"data.source": str(tmp_path / "one.jsonl")}])
    with pytest.raises(InputRefused, match=r"nothing is held out, .*: raise data.held_out = 0.3"):
        task_of(member)


def test_one_member_alone_is_an_ordinary_run(here: Path, tmp_path: Path) -> None:
    these = members(here, points=POINTS[:1])
    together = mustered(these, tmp_path)
    together.prepare_references(False, silent())
    found = [losses for losses, _ in trained(together, UPDATES)]
    together.close()
    [member] = these
    assert member.plan
    task = task_of(member)
    [made] = cohort.with_length([build_run(member.plan, task, describe())], UPDATES)
    engine = make_engine(made, CPU)
    engine.step.schedule = made.plan.schedule(UPDATES)
    own = task.for_member()
    own.begin(Run.create(tmp_path / "alone"), engine, together.sessions[0].world, lambda: made.plan)
    own.prepare_reference_scores(False, 4, silent())
    windows: Iterator[Any] = own.windows(0, None, ())
    assert found == [update.loss.tolist() for update in train(engine, windows, UPDATES)]
