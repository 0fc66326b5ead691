"""Run: pytest tests/sweeps/test_shared_base.py (a sweep of adapters holds one base)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from commands.test_lora import write_base
from monograph.checkpointing import load_newest
from monograph.config import load
from monograph.data.corpus import Corpus
from monograph.device import describe
from monograph.ensemble import Ensemble
from monograph.graph.shared_base import frozen_parameters
from monograph.loop import train
from monograph.run import recorded_state
from monograph.run.folder import Run
from monograph.session.objectives.texts import TextTask
from monograph.session.resolve import resolve
from monograph.session.setup import build_run, make_engine
from monograph.step.guard import memory_of
from monograph.sweeps import cohort
from monograph.sweeps.spec import Member, groups_of, members_of

UPDATES = 5
CPU = torch.device("cpu")
KEYS: dict[str, Any] = {
    "data.sequence_length": 32, "train.updates": UPDATES, "train.tokens_per_update": 128, "train.compile": "none",
    "train.precision": "fp32", "lora.base": "nf4", "train.save_every": UPDATES,
}  # fmt: skip
POINTS: list[dict[str, Any]] = [
    {"lora.rank": 4, "optim.lr": 1e-3, "train.seed": 0},
    {"lora.rank": 2, "optim.lr": 3e-3, "train.seed": 1, "lora.alpha": 9.0, "lora.rslora": True},
    {"lora.rank": 7, "optim.lr": 1e-3, "train.seed": 1, "lora.lr_ratio": 4.0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    write_base(folder / "base")
    return folder


def members(folder: Path, points: list[dict[str, Any]]) -> list[Member]:
    found = members_of(load(None, KEYS | {"model.init": str(folder / "base")}, {}), points)
    for member in found:
        member.plan = resolve(member.settings, describe())
    return found


def alone(member: Member, text: Corpus) -> list[float]:
    """The losses of `monograph train`: a base of its own, its own engine and order of rows."""
    assert member.plan
    made = cohort.with_length([build_run(member.plan, TextTask(text), describe())], UPDATES)
    engine = make_engine(made[0], CPU)
    engine.step.schedule = made[0].plan.schedule(UPDATES)
    batches = text.batches(128, seed=member.settings.train.seed)
    found = [float(update.loss) for update in train(engine, batches, UPDATES)]
    batches.close()
    return found


def test_adapters_swept_on_one_base_train_and_are_saved_as_alone(
    folder: Path, text: Corpus, tmp_path: Path
) -> None:
    """Law 5 for ranks, scales, rates and seeds that differ."""
    these = members(folder, POINTS)
    assert len(groups_of(these)) == 1
    made = cohort.with_length(cohort.build_models(these, TextTask(text), describe()), UPDATES)
    engine = cohort.make_members_engine(made, own_rows=True, device=CPU)
    assert isinstance(engine, Ensemble)
    bases = [[memory_of(p) for p in frozen_parameters(member)] for member in engine.members]
    assert bases[0] == bases[1] == bases[2]
    runs = [Run.create(tmp_path / str(index)) for index in range(len(these))]
    together = cohort.begin_cohort(these, runs, made, TextTask(text), engine)
    updates = list(train(engine, together.windows, UPDATES))
    for place, member in enumerate(these):
        losses = [float(update.loss[place]) for update in updates]
        assert losses == pytest.approx(alone(member, text), rel=1e-5), "fp32, five updates"
    together.save()
    together.close()
    saved = load_newest(runs[2].checkpoints, lambda line: None)
    ranks = {tensor.shape[0] for name, tensor in saved.model.items() if "lora_A" in name}
    assert ranks == {7}
    recorded_state.require_valid(saved.state, UPDATES, runs[2])  # its seed is that of its recipe


@pytest.mark.parametrize("key", ["lora.rank", "lora.alpha", "lora.dropout"])
def test_an_engine_is_not_filled_with_other_adapters(folder: Path, text: Corpus, key: str) -> None:
    values = {"lora.rank": (4, 2), "lora.alpha": (8.0, 16.0), "lora.dropout": (0.0, 0.1)}[key]
    these = members(folder, [{"lora.rank": 4, key: value} for value in values])
    made = cohort.build_models(these, TextTask(text), describe())
    engines = [make_engine(built, CPU) for built in cohort.with_length(made, UPDATES)]
    assert not cohort.reuse_engine(engines[0], engines[1])
