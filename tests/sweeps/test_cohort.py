"""Run: pytest tests/sweeps/test_cohort.py (members that train at once: windows, and engines that are
filled anew)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batches import copied
from monograph import compat
from monograph.config import load
from monograph.data.corpus import Corpus
from monograph.device import describe
from monograph.ensemble import Ensemble
from monograph.graph.capture import Backend
from monograph.loop import train
from monograph.resident import Resident
from monograph.run import writing
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.session.objectives.texts import TextTask
from monograph.session.record import write_config
from monograph.session.resolve import resolve
from monograph.session.setup import BuiltRun, build_run, make_engine
from monograph.storage.writing import write_durably
from monograph.sweeps import cohort
from monograph.sweeps.cohort import Cohort
from monograph.sweeps.folder import Sweep
from monograph.sweeps.spec import Member, members_of

UPDATES = 6
KEYS: dict[str, Any] = {
    "data.tokenizer": "bytes", "data.sequence_length": 32, "model.hidden_size": 16, "model.num_hidden_layers": 1,
    "model.num_attention_heads": 2, "train.updates": UPDATES, "train.tokens_per_update": 128, "train.compile": "none",
    "train.precision": "fp32", "optim.name": "adamw", "train.save_every": 2, "optim.warmup_updates": 2,
}  # fmt: skip
POINTS: list[dict[str, Any]] = [
    {"optim.lr": 1e-2, "optim.weight_decay": 0.1, "train.seed": 0},
    {"optim.lr": 3e-2, "optim.weight_decay": 0.0, "train.seed": 1, "optim.warmup_updates": 0},
    {"optim.lr": 1e-2, "optim.weight_decay": 0.3, "train.seed": 1},
]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    yield [Run.create(tmp_path / str(index)) for index in range(len(POINTS))]


def members(points: list[dict[str, Any]] = POINTS, **keys: Any) -> list[Member]:
    found = members_of(load(None, KEYS | keys, {}), points)
    for member in found:
        member.plan = resolve(member.settings, describe())
    return found


def built(member: Member, text: Corpus) -> list[BuiltRun]:
    assert member.plan
    return cohort.with_length([build_run(member.plan, TextTask(text), describe())], UPDATES)


def mustered(these: list[Member], runs: list[Run], text: Corpus) -> Cohort:
    made = cohort.with_length(cohort.build_models(these, TextTask(text), describe()), UPDATES)
    several = len({m.settings.train.seed for m in these}) > 1
    return cohort.begin_cohort(
        these,
        runs,
        made,
        TextTask(text),
        cohort.make_members_engine(made, several, torch.device("cpu")),
    )


def losses(trained: Cohort, updates: int = UPDATES) -> list[list[float]]:
    found = [
        torch.atleast_1d(u.loss).tolist() for u in train(trained.engine, trained.windows, updates)
    ]
    return [list(member) for member in zip(*found, strict=True)]


def alone(member: Member, text: Corpus) -> list[float]:
    """As `monograph train` would train it: its own engine, its own order of rows."""
    made = built(member, text)
    engine = make_engine(made[0], torch.device("cpu"))
    engine.step.schedule = made[0].plan.schedule(UPDATES)
    batches = text.batches(128, seed=member.settings.train.seed)
    found = [float(update.loss) for update in train(engine, batches, UPDATES)]
    batches.close()
    return found


def test_a_save_changes_nothing_of_what_a_member_alone_draws_next() -> None:
    """Its dropout draws from torch's generator, where members of a cohort have their own."""
    session: Any = SimpleNamespace(
        plan=SimpleNamespace(job=SimpleNamespace(seed=3)), save=lambda keep: None
    )
    engine = Resident(nn.Linear(3, 2), loss=lambda model, window: (model(window["x"]).sum(), 1))
    alone: Any = Cohort([], engine, [session], None, [])  # type: ignore[arg-type]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    alone.save()
    assert torch.equal(torch.rand(3), expected)


def test_members_train_as_each_would_alone(runs: list[Run], text: Corpus) -> None:
    """Law 5 through everything that a sweep does: settings, weights, order of rows, schedule,
    optimizer.
    """
    together = mustered(members(), runs, text)
    assert isinstance(together.engine, Ensemble) and together.engine.stacked_parameters.each
    for found, member in zip(losses(together), members(), strict=True):
        assert found == pytest.approx(alone(member, text), rel=1e-5), "fp32, six updates"
    together.close()


def test_one_seed_is_one_window_for_all(runs: list[Run], text: Corpus) -> None:
    points = [{"optim.lr": 1e-2}, {"optim.lr": 3e-2}]
    together = mustered(members(points), runs[:2], text)
    assert isinstance(together.engine, Ensemble) and not together.engine.stacked_parameters.each
    assert together.sessions[0].batches is together.sessions[1].batches
    assert next(together.windows)["tokens"].shape == (4, 32)
    assert together.sessions[1].batches.rows_consumed == 4
    together.close()


def test_members_of_one_seed_read_the_same_rows(runs: list[Run], text: Corpus) -> None:
    together = mustered(members(), runs, text)
    window = next(together.windows)["tokens"]
    assert (
        window.shape == (3, 4, 32)
        and torch.equal(window[1], window[2])
        and not torch.equal(window[0], window[1])
    )
    together.close()


def test_a_graph_that_rounds_by_another_seed_is_not_filled_anew(text: Corpus) -> None:
    """The seed of stochastic rounding is a constant of the graph; other states do not read it."""
    for state, filled in (("fp32", True), ("bf16", False)):
        first, other = (
            make_engine(built(member, text)[0], torch.device("cpu"))
            for member in members([{"train.seed": 0}, {"train.seed": 1}], **{"optim.state": state})
        )
        assert cohort.reuse_engine(first, other) == filled, state


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_an_engine_that_is_filled_anew_trains_as_a_fresh_one(
    text: Corpus, backend: Backend
) -> None:
    """Bits, and nothing is compiled again: other weights and another rate in an engine that has
    trained before.
    """
    these = members([*POINTS, {"optim.lr": 3e-2, "optim.weight_decay": 0.1, "train.seed": 1}])
    first, other, second = (built(these[index], text) for index in (0, 2, 3))
    engine = make_engine(first[0], torch.device("cpu"))
    cohort.set_planned_schedules(engine, first)
    batches = [text.batches(128, seed=seed) for seed in (0, 1, 1)]
    assert engine.capture(next(batches[2]), backend=backend) is None
    list(train(engine, batches[0], UPDATES))
    state, graphs = copied(engine.state()), compat.captured_graphs()
    assert not cohort.reuse_engine(engine, make_engine(other[0], torch.device("cpu"))), (
        "another decay is another graph"
    )
    assert all(
        torch.equal(tensor, state.model[name]) for name, tensor in engine.state().model.items()
    )
    assert cohort.reuse_engine(engine, make_engine(second[0], torch.device("cpu")))
    cohort.set_planned_schedules(engine, second)
    assert engine.index == 0 and int(engine.step.tokens) == 0
    found = [float(update.loss) for update in train(engine, batches[1], UPDATES)]
    assert compat.captured_graphs() == graphs and found == pytest.approx(
        alone(these[3], text), rel=1e-5
    )
    for each in batches:
        each.close()


def test_a_crew_goes_on_where_it_stood(runs: list[Run], text: Corpus, tmp_path: Path) -> None:
    """Law 10: the losses after a resume are the bits of an uninterrupted run, whichever member was
    saved last.
    """
    these = members()
    whole = mustered(these, [Run.create(tmp_path / f"w{i}") for i in range(3)], text)
    expected = losses(whole)
    whole.close()
    first = mustered(these, runs, text)
    for _ in train(first.engine, first.windows, 2):
        pass
    first.save()
    for _ in train(first.engine, first.windows, 4):
        pass
    first.sessions[0].save()  # as if killed between two members
    first.close()
    again = mustered(these, runs, text)
    assert cohort.resume_cohort(again, {}, Progress()) == 2 and again.engine.index == 2
    assert losses(again) == [each[2:] for each in expected]
    again.close()


def test_a_member_that_had_diverged_stays_where_it_was(runs: list[Run], text: Corpus) -> None:
    these = members()
    first = mustered(these, runs, text)
    for _ in train(first.engine, first.windows, 2):
        pass
    first.save()
    first.freeze({1: 3})
    for _ in train(first.engine, first.windows, 4):
        pass
    first.save()
    assert [sorted(path.name[-1] for path in run.checkpoints.iterdir()) for run in runs] == [
        ["2", "4"],
        ["2"],
        ["2", "4"],
    ]
    kept = first.engine.member_state(1).model  # type: ignore[attr-defined]
    first.close()
    again = mustered(these, runs, text)
    assert cohort.resume_cohort(again, {1: 3}, Progress()) == 4 and again.divergences == {1: 3}
    before = [p.clone() for p in again.sessions[1].engine.model.parameters()]
    losses(again)
    after = list(again.sessions[1].engine.model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(
        torch.equal(tensor, kept[name])
        for name, tensor in again.sessions[1].engine.state().model.items()
    )
    assert {"update": 4, "diverged": 3} in runs[1].rows()
    again.close()


def test_nothing_to_go_on_from(runs: list[Run], text: Corpus) -> None:
    together = mustered(members(), runs, text)
    runs[0].log({"update": 1, "train_loss": 9.0})
    assert cohort.resume_cohort(together, {}, Progress()) == 0 and runs[0].rows() == []
    together.close()


def test_settings_are_written_once_and_are_whole(runs: list[Run], text: Corpus) -> None:
    mustered(members(), runs, text).close()
    own = load(runs[1].config, {}, {})
    assert (own.optim.lr, own.optim.weight_decay, own.train.seed, own.train.updates) == (
        3e-2,
        0.0,
        1,
        UPDATES,
    )
    assert own.train.micro_batch == 4 and own.train.eval_every == 1 and runs[1].tokenizer.is_file()
    write_config(runs[1], own.resolve({"optim.lr": 0.5}, "test"))
    mustered(members(), runs, text).close()
    assert load(runs[1].config, {}, {}).optim.lr == 0.5, "a run that has begun is left as it is"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("partly", [False, True])
def test_a_member_that_is_killed_while_it_begins_begins_again(
    partly: bool, text: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of its files, or when that file is written under its passing name."""
    sweep = Sweep.create(tmp_path / "sweep", load(None, KEYS, {}), POINTS[:1], None)
    run = sweep.member(0)
    these = members(POINTS[:1])
    written = list[str]()

    def begin(kill_at: int) -> None:
        def write(path: Path, content: str | bytes, new: bool = True) -> None:
            dies = len(written) == kill_at
            if dies and not partly:
                raise Killed
            write_durably(path, content, new)
            if dies:
                raise Killed
            written.append(path.name)

        written.clear()
        monkeypatch.setattr(writing, "write_durably", write)
        with sweep.lock_members(these) as runs:
            mustered(these, runs, text).close()

    def files() -> dict[str, bytes]:
        found = {path.name: path.read_bytes() for path in run.folder.iterdir()}
        del found["run.lock"]  # counts each start
        return found

    begin(kill_at=-1)
    expected = files()
    assert expected.keys() == {"config.toml", "tokenizer.json"}
    for kill_at in range(len(written)):
        sweep.forget_members()
        with pytest.raises(Killed):
            begin(kill_at)
        begin(kill_at=-1)
        assert files() == expected
