"""Run: pytest tests/sweeps/test_rewards.py (members that train at once sample answers and learn from
their rewards as each would alone, are scored by answers to held-out prompts, and go on with the same
bits)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from laws.resumed import TIMES, write_inputs
from monograph.config import load
from monograph.decode.completion import Completion
from monograph.device import describe
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.graph.lora import adapted_layers
from monograph.laws.comparisons import LOG_PROBABILITY_BOUND, member_is_alone, outcome
from monograph.loop import train
from monograph.rl.members import MembersDrawer
from monograph.rl.rollouts import Drawer
from monograph.run.folder import Run
from monograph.run.progress import silent
from monograph.session.objective import SweptTask
from monograph.session.plan import RunPlan
from monograph.session.resolve import resolve
from monograph.session.setup import BuiltRun, build_run, make_engine
from monograph.step import Update
from monograph.storage.code import digests
from monograph.sweeps import cohort
from monograph.sweeps.cohort import Cohort
from monograph.sweeps.spec import Member, groups_of, have_own_rows, members_of, plan_of_member

UPDATES = 4
CPU = torch.device("cpu")
KEYS: dict[str, Any] = {
    "data.source": "prompts.jsonl", "data.sequence_length": 32, "data.held_out": 0.4, "train.updates": UPDATES,
    "train.compile": "none", "train.precision": "fp32", "train.save_every": 2, "model.init": "base", "lora.rank": 4,
    "rl.reward": "letters.py:score", "rl.prompts": 2, "rl.group": 3, "rl.max_new_tokens": 6,
}  # fmt: skip
POINTS: list[dict[str, Any]] = [
    {"lora.rank": 4, "optim.lr": 1e-2, "train.seed": 0},
    {"lora.rank": 2, "optim.lr": 3e-2, "train.seed": 1, "lora.alpha": 9.0},
    {"lora.rank": 7, "optim.lr": 1e-2, "train.seed": 1, "lora.rslora": True},
]
REGEX = "[^#]*[a-m][^#]*"
# Of advantages that sum to zero, the loss of the first of several updates is nothing but rounding.
CASES: dict[str, dict[str, Any]] = {
    "as given": {"rl.temperature": 0.9},
    "two updates of a sample": {"rl.updates": 2, "rl.advantage": "reinforce"},
    "several draws, dapo": {"rl.draws": 3, "rl.advantage": "dapo"},
    "a form, entropy": {"rl.answer_regex": "[a-z]{1,5}", "rl.entropy_coef": 0.01},
    "a KL term": {"rl.kl": "k3", "rl.kl_coef": 0.3, "rl.updates": 2, "rl.advantage": "reinforce"},
    "a KL term of the reward": {"rl.kl": "k1", "rl.kl_coef": 0.3, "rl.advantage": "rloo"},
    "cut answers, cispo": {
        "rl.truncated": "mask",
        "rl.max_new_tokens": 4,
        "rl.advantage": "cispo",
    },
    "a penalty, grpo": {"rl.truncation_penalty": 0.5, "rl.advantage": "grpo"},
    "a teacher": {"rl.reward": "teacher", "rl.teacher": "base"},
}
NIGHTLY = (
    "several draws, dapo",
    "cut answers, cispo",
    "a penalty, grpo",
    "a KL term of the reward",
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swept rewards")
    write_inputs(folder)
    return folder


@pytest.fixture(autouse=True)
def inside(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)


def members(points: Sequence[dict[str, Any]] = POINTS, **keys: Any) -> list[Member]:
    settings = load(None, KEYS | keys, {})
    settings = settings.vouching(digests(settings.programs))
    found = members_of(settings, points)
    for member in found:
        member.plan = plan_of_member(member.settings, describe())
    return found


def task_of(member: Member) -> SweptTask:
    assert member.plan
    return cohort.open_swept(member.plan, silent())


def with_values(built: BuiltRun, seed: int, dtype: torch.dtype) -> BuiltRun:
    """With adapters as if they had been trained, so that members sample different answers."""
    draw = torch.Generator().manual_seed(seed)
    model = built.model.to(dtype)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            shape = layer.lora_B.weight.shape
            layer.lora_B.weight.copy_(torch.randn(shape, generator=draw, dtype=dtype) * 0.3)
    return built._replace(model=model)


def mustered(
    these: list[Member], folder: Path, task: SweptTask, dtype: torch.dtype = torch.float32
) -> Cohort:
    made = cohort.with_length(cohort.build_models(these, task, describe()), UPDATES)
    made = [with_values(built, seed, dtype) for seed, built in enumerate(made)]
    own_rows = have_own_rows([built.plan for built in made])
    engine = cohort.make_members_engine(made, own_rows, CPU)
    places = [folder / str(index) for index in range(len(these))]
    runs = [Run(place) if place.exists() else Run.create(place) for place in places]
    return cohort.begin_cohort(these, runs, made, task, engine)


class Sampled:
    """Compares the answers that runs alone sample with those of members, token for token.

    Then it gives a run alone the log-probabilities of the member, which sampling computes in fp32.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.together = defaultdict[int, list[Completion]](list)
        self.place = 0
        self.compared = 0
        draw_together, draw_alone = MembersDrawer.draw, Drawer.draw

        def noted_together(drawer: MembersDrawer, wanted: Any) -> Any:
            answers = draw_together(drawer, wanted)
            for number, of_member in answers.items():
                self.together[number] += of_member
            return answers

        def compared_alone(drawer: Drawer, prompts: Any, seeds: Any) -> Any:
            answers = draw_alone(drawer, prompts, seeds)
            of_member = self.together[self.place][self.compared :][: len(answers)]
            self.compared += len(answers)
            for found, expected in zip(of_member, answers, strict=True):
                assert found.token_ids == expected.token_ids
                assert found.finish_reason == expected.finish_reason
                assert found.logprobs and expected.logprobs
                for one, other in zip(found.logprobs, expected.logprobs, strict=True):
                    assert abs(one.drawn - other.drawn) < LOG_PROBABILITY_BOUND
            return of_member

        monkeypatch.setattr(MembersDrawer, "draw", noted_together)
        monkeypatch.setattr(Drawer, "draw", compared_alone)

    def compare(self, place: int) -> None:
        """From now on, runs alone are compared with this member."""
        self.place = place
        self.compared = 0

    def all_were_compared(self) -> bool:
        return self.compared == len(self.together[self.place]) > 0


# What decoding and the loss compute of one token differs by rounding, except in an eager run alone.
ROUNDED = {"drawn_minus_scored", "drawn_minus_scored_max", "ratio"}


def counted(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if key not in TIMES | ROUNDED}


def trained_alone(
    plan: RunPlan,
    task: SweptTask,
    seed: int,
    folder: Path,
    dtype: torch.dtype = torch.float64,
) -> tuple[Engine, list[Update], list[dict[str, Any]], dict[str, Any]]:
    """The slow path: a run of its own, whose answers its own decoder samples."""
    [built] = cohort.with_length([build_run(plan, task, describe())], UPDATES)
    engine = make_engine(with_values(built, seed, dtype), CPU)
    engine.step.schedule = built.plan.schedule(UPDATES)
    own = task.for_member()
    own.begin(Run.create(folder), engine, World(), lambda: built.plan)
    own.prepare_reference_weights(False)
    windows = own.windows(0, None, ())
    updates, figures = [], []
    for update in train(engine, windows, UPDATES):
        updates.append(update)
        figures.append(counted(own.figures(windows)))
    score = own.evaluate(0, None)
    assert score
    return engine, updates, figures, dict(score.figures)


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=pytest.mark.slow) if each in NIGHTLY else each for each in CASES],
)
def test_members_sample_and_learn_as_each_would_alone(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laws 5, 16 and 19: the answers token for token, and in fp64 losses, norms, weights, moments and
    figures, of training and of held-out prompts.
    """
    these = members(**CASES[case])
    assert len(groups_of(these)) == 1
    with closing(task_of(these[0])) as task:
        sampled = Sampled(monkeypatch)
        together = mustered(these, tmp_path, task, torch.float64)
        engine = together.engine
        assert isinstance(engine, Ensemble)
        together.prepare_references(False, silent())
        updates, figures = [], []
        for update in train(engine, together.windows, UPDATES):
            updates.append(update)
            figures.append([counted(each) for each in together.figures()])
        scores = task.evaluate_members(together.tasks, engine, 0, None)
        for place, member in enumerate(these):
            sampled.compare(place)
            plan = plan_of_member(member.settings, describe())
            solo, own_updates, own_figures, own_score = trained_alone(
                plan, task, place, tmp_path / f"alone {place}"
            )
            assert sampled.all_were_compared()
            assert [each[place] for each in figures] == [
                pytest.approx(each, abs=1e-6) for each in own_figures
            ]
            score = scores[place]
            assert score and dict(score.figures) == pytest.approx(own_score, abs=1e-6)
            found = outcome(engine.member_state(place), updates, member=place)
            comparison = member_is_alone(found, outcome(solo.state(), own_updates), least=1.0)
            assert comparison, comparison
        answers = [[each.token_ids for each in sampled.together[place]] for place in range(3)]
        assert answers[0] != answers[1] != answers[2]
    together.close()


def test_members_sample_and_learn_as_train_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train`, without a graph on a CPU, scores answers by the arithmetic of sampling, which is fp32."""
    these = members(**{"rl.updates": 2})
    with closing(task_of(these[0])) as task:
        sampled = Sampled(monkeypatch)
        together = mustered(these, tmp_path, task)
        updates = list(train(together.engine, together.windows, UPDATES))
        task.evaluate_members(together.tasks, together.engine, 0, None)
        for place, member in enumerate(these):
            sampled.compare(place)
            plan = resolve(member.settings, describe())
            assert plan.training.answer_scoring == "exact"
            _, own_updates, _, _ = trained_alone(
                plan, task, place, tmp_path / f"alone {place}", torch.float32
            )
            assert sampled.all_were_compared()
            for name in ("loss", "grad_norm"):
                found = [float(getattr(update, name)[place]) for update in updates]
                expected = [float(getattr(update, name)) for update in own_updates]
                assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
    together.close()
