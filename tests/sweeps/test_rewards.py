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

from batches import captured_to_train
from laws.resumed import TIMES, write_inputs
from monograph.config import load
from monograph.decode.completion import Completion
from monograph.device import describe
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.errors import InputRefused, UsageError
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
from monograph.sweeps.concurrency import TimedGroup
from monograph.sweeps.rehearsal import Rehearsal
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
    "a KL term": {
        "rl.temperature": 0.9,
        "rl.kl": "k3",
        "rl.kl_coef": 0.3,
        "rl.updates": 2,
        "rl.advantage": "reinforce",
    },
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
    "as given",
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


class Killed(BaseException):
    """As a signal that no handler sees."""


def fail_at(monkeypatch: pytest.MonkeyPatch, engine: Engine, moment: str) -> None:
    """End training in the middle of the third update: after its answers are sampled, after those of the
    second member are scored, or after weights have changed.
    """
    owner, name, last_call = {
        "draw": (MembersDrawer, "draw", 1),
        "score": (Drawer, "score", 2),
        "update": (Ensemble, "update", 1),
    }[moment]
    original = getattr(owner, name)
    calls = 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += engine.index == 2
        result = original(*arguments)
        if calls == last_call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, failing)


def trained(together: Cohort, updates: int, saves_at: int = 0) -> list[Any]:
    """The losses and figures of each update; what is saved is saved as soon as it can be."""
    rows = []
    for update in train(together.engine, together.windows, updates):
        rows.append((update.loss.tolist(), [counted(each) for each in together.figures()]))
        if update.index + 1 == saves_at:
            assert together.can_save
            together.save()
    return rows


def states(together: Cohort) -> list[torch.Tensor]:
    states_of_members = [session.engine.state() for session in together.sessions]
    return [
        tensor.clone()
        for state in states_of_members
        for tensor in (*state.model.values(), *state.optimizer.values())
    ]


RESUMED: list[tuple[str, dict[str, Any]]] = [
    ("draw", {"rl.kl": "k2", "rl.kl_coef": 0.2}),
    ("score", {"rl.draws": 2}),
    (
        "update",
        {
            "rl.updates": 2,
            "rl.advantage": "reinforce",
            "lora.dropout": 0.3,
            "train.micro_batch": 1,
        },
    ),
]


@pytest.mark.parametrize(("moment", "keys"), RESUMED, ids=[moment for moment, _ in RESUMED])
def test_members_go_on_with_the_same_bits(
    moment: str, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 10: ended while the members sample, while their answers are scored, or in the update, as a
    kill may do. Then losses, figures, weights and moments are those of an uninterrupted sweep.
    """
    these = members(**keys)
    with closing(task_of(these[0])) as task:
        whole = mustered(these, tmp_path / "whole", task)
        whole.prepare_references(False, silent())
        expected = trained(whole, UPDATES)
        killed = mustered(these, tmp_path / "killed", task)
        killed.prepare_references(False, silent())
        killed.save()
        with monkeypatch.context() as patch:
            fail_at(patch, killed.engine, moment)
            with pytest.raises(Killed):
                trained(killed, UPDATES, saves_at=2)
        again = mustered(these, tmp_path / "killed", task)
        assert cohort.resume_cohort(again, {}, silent()) == 2
        again.prepare_references(True, silent())
        for member_task, figures in zip(again.tasks, expected[1][1], strict=True):
            member_task.answer_tokens = figures["tokens"]  # the rows of metrics.jsonl have them
        assert trained(again, UPDATES) == expected[2:]
        assert all(map(torch.equal, states(again), states(whole)))
        for each in (whole, killed, again):
            each.close()


def test_a_checkpoint_after_a_failed_reward_has_every_members_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of the first member were scored when the reward of the second one failed, but it has
    not learned from them: it samples them again.
    """
    these = members()
    with closing(task_of(these[0])) as task:
        whole = mustered(these, tmp_path / "whole", task)
        expected = trained(whole, UPDATES)
        failed = mustered(these, tmp_path / "failed", task)
        with monkeypatch.context() as patch:
            fail_at(patch, failed.engine, "score")
            with pytest.raises(Killed):
                trained(failed, UPDATES)
        assert failed.can_save
        failed.save()
        again = mustered(these, tmp_path / "failed", task)
        assert cohort.resume_cohort(again, {}, silent()) == 2
        found = trained(again, UPDATES)
        assert [losses for losses, _ in found] == [losses for losses, _ in expected[2:]]
        for each in (whole, failed, again):
            each.close()


def test_a_member_without_finite_logits_touches_no_other(tmp_path: Path) -> None:
    """It is named as diverged at once, and samples no answers any more, also after a resume."""
    these = members(**{"lora.dropout": 0.2})
    with closing(task_of(these[0])) as task:

        def sweep(name: str, poisoned: bool) -> tuple[list[Any], Cohort]:
            together = mustered(these, tmp_path / name, task)
            together.save()
            rows = trained(together, 1)
            if poisoned:
                first_layer = next(iter(adapted_layers(together.sessions[1].engine.model).values()))
                first_layer.lora_B.weight.data.fill_(torch.nan)
            rows += trained(together, 2)
            together.freeze(dict.fromkeys(together.windows.left_out, 1))
            together.save()
            rows += trained(together, UPDATES)
            scores = task.evaluate_members(together.tasks, together.engine, 0, None)
            assert (scores[1] is None) == poisoned and scores[0] and scores[2]
            return rows, together

        expected, whole = sweep("whole", poisoned=False)
        found, together = sweep("poisoned", poisoned=True)
        assert together.divergences == {1: 1} and together.windows.left_out == {1}
        assert "reward" not in found[1][1][1], "no figures of a window before"
        for (losses, figures), (losses_found, figures_found) in zip(expected, found, strict=True):
            for place in (0, 2):
                assert losses[place] == losses_found[place]
                assert figures[place] == figures_found[place]
        for place in (0, 2):
            one, other = (each.sessions[place].engine.state() for each in (whole, together))
            assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)
        again = mustered(these, tmp_path / "poisoned", task)
        assert cohort.resume_cohort(again, {1: 1}, silent()) == 2
        assert again.windows.left_out == {1}
        resumed = trained(again, UPDATES)
        for (losses, _), (losses_found, _) in zip(expected[2:], resumed, strict=True):
            assert [losses[0], losses[2]] == [losses_found[0], losses_found[2]]


def test_members_without_adapters_are_refused_before_they_are_built() -> None:
    without = {key: value for key, value in KEYS.items() if not key.startswith("lora.")}
    settings = load(None, without, {})
    plan = plan_of_member(settings.vouching(digests(settings.programs)), describe())
    with pytest.raises(UsageError, match="members without adapters each have weights of their own"):
        plan.job.objective.require_at_once(plan)


def test_a_sweep_without_held_out_prompts_is_refused() -> None:
    [member] = members([{"data.held_out": 1e-9}])
    with pytest.raises(InputRefused, match=r"nothing is held out, .*: raise data.held_out = 1e-09"):
        task_of(member)


def test_epochs_of_several_draws_are_refused() -> None:
    [member] = members([{}], **{"rl.draws": 3})
    assert member.plan
    with closing(task_of(member)) as task:
        with pytest.raises(
            UsageError, match="train.epochs = 2: with rl.draws = 3 .* give train.up"
        ):
            task.updates_in_epochs(member.plan, 2)
    [member] = members([{}], **{"rl.updates": 3})
    assert member.plan
    with closing(task_of(member)) as task:
        assert task.updates_in_epochs(member.plan, 2) == 3 * 2 * task.records_per_epoch // 2


def test_the_plan_counts_a_decoder_of_all_members() -> None:
    """The memory of the answers' keys and values grows with the members, and so do the copies of the
    adapters that it reads.
    """
    these = members()
    [member, *_] = these
    assert member.plan
    with closing(task_of(member)) as task:
        built = build_run(member.plan, task, describe())
        timed = TimedGroup(groups_of(these)[0], task, CPU, describe())
        planned = timed._extra_bytes(built, 3)
        expected_runs = cohort.with_length(cohort.build_models(these, task, describe()), UPDATES)
        engine = cohort.make_members_engine(expected_runs, True, CPU)
        rehearsal = Rehearsal(expected_runs, task, engine)
        assert rehearsal.window["tokens"].shape[0] == 3
        assert rehearsal.window_s(UPDATES) > 0 and rehearsal.evaluation_s(4) > 0
        drawer = rehearsal.tasks[0]._members_drawer  # type: ignore[attr-defined]
        generator = drawer._generator
        caches = (generator.cache, generator.reader.cache)
        measured = sum(t.nbytes for cache in caches for t in (*cache.keys, *cache.values))
    assert planned == pytest.approx(measured + drawer.bank.nbytes, rel=0.02)


@pytest.mark.slow
def test_a_captured_step_learns_from_the_same_answers(tmp_path: Path) -> None:
    """Law 1, for windows whose rows differ in number."""
    these = members(**{"train.micro_batch": 1})
    found = []
    with closing(task_of(these[0])) as task:
        for name in ("eager", "captured"):
            together = mustered(these, tmp_path / name, task)
            if name == "captured":
                built = cohort.with_length(cohort.build_models(these, task, describe()), UPDATES)
                rehearsal = Rehearsal(built, task, together.engine)
                captured_to_train(together.engine, rehearsal.window, "aot_eager")
                for each in together.tasks:
                    each.engine.loss.take_figures()  # type: ignore[attr-defined]
            found.append(trained(together, UPDATES))
            together.close()
    for (losses, figures), (captured_losses, captured_figures) in zip(*found, strict=True):
        assert captured_losses == pytest.approx(losses, rel=1e-4, abs=1e-6)
        rewards = [[each["reward"] for each in of] for of in (figures, captured_figures)]
        assert rewards[0] == rewards[1]
