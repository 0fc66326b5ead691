"""Run: pytest tests/sweeps/test_pruned.py (members that can hardly win are stopped: the rule's error,
and what the others compute)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands.test_lora import write_base
from monograph.config import load
from monograph.data.corpus import Corpus
from monograph.device import describe
from monograph.engine import Engine
from monograph.errors import UsageError
from monograph.evaluation.pruning import win_probabilities
from monograph.loop import train
from monograph.run.folder import Run
from monograph.run.progress import silent
from monograph.session.objectives.rewards import Rewards
from monograph.session.objectives.texts import Texts, TextTask
from monograph.session.resolve import resolve
from monograph.sweeps import cohort, pruning, results
from monograph.sweeps.folder import Sweep
from monograph.sweeps.looks import DECISIONS, looks_of
from monograph.sweeps.rehearsal import first_window
from monograph.sweeps.spec import Member, members_of

UPDATES = 8
KEYS: dict[str, Any] = {
    "data.tokenizer": "bytes", "data.sequence_length": 32, "train.updates": UPDATES, "train.tokens_per_update": 128,
    "train.compile": "none", "train.precision": "fp32", "optim.name": "adamw", "train.save_every": 4,
}  # fmt: skip
SMALL = {"model.hidden_size": 16, "model.num_hidden_layers": 1, "model.num_attention_heads": 2}
POINTS: list[dict[str, Any]] = [
    {"optim.lr": lr, "train.seed": seed} for lr in (1e-3, 1e-2, 3e-2) for seed in (0, 1)
]


def simulated_stops(
    settings: int, seeds: int, noise: float, spread: float, trials: int
) -> tuple[float, float]:
    """The shares of trials in which the best setting was stopped, and of the others that were.

    The curves are those for which the rule states its error: the expected gaps to the best setting are
    straight over the logarithm of the updates. Settings and seeds add noise, anew at each look.
    """
    draws = np.random.default_rng(settings * 100 + seeds)
    best_lost = 0
    others_stopped = 0
    for _ in range(trials):
        slopes, ends = draws.normal(size=(2, settings)) * spread
        of_seed = draws.normal(size=seeds)  # it cancels
        own_KS = draws.normal(size=(settings, seeds))  # it stays the same over the training
        best = int(ends.argmin())
        left = set(range(settings))
        scores = {}
        for share in (1 / 8, 1 / 4, 1 / 2):
            expected_K = ends - slopes * math.log2(share)
            fresh_KS = draws.normal(size=(settings, seeds))
            scores[share] = expected_K[:, None] + of_seed + noise * (own_KS + fresh_KS)
        for share in (1 / 4, 1 / 2):
            these = sorted(left)
            bounds = win_probabilities(
                scores[share / 2][these].tolist(),
                scores[share][these].tolist(),
                -math.log2(share),
                DECISIONS * (settings - 1),
            )
            left -= {each for each, bound in zip(these, bounds, strict=True) if bound <= 0.05}
        best_lost += best not in left
        others_stopped += settings - len(left) - (best not in left)
    return best_lost / trials, others_stopped / (trials * (settings - 1))


@pytest.mark.parametrize(("settings", "seeds"), [(2, 2), (8, 2), (4, 5)])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_the_best_is_stopped_as_seldom_as_is_said(settings: int, seeds: int, spread: float) -> None:
    """In 2,000 trials; three standard errors of a share of 5 % are 1.5 %. Without any spread every
    setting is as good as the best, which is the worst case for the rule.
    """
    lost, _ = simulated_stops(settings, seeds, 0.1, spread, 2000)
    assert lost <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_what_is_far_behind_is_stopped() -> None:
    """The rule has power: with gaps of a hundred times the noise, most of the others go."""
    _, stopped = simulated_stops(8, 2, 0.01, 1.0, 200)
    assert stopped > 0.8


def test_half_of_the_correction_would_be_noticed() -> None:
    """The bound of the simulation is tight enough to fail for a rule that ignores its comparisons."""
    draws = np.random.default_rng(0)
    lost = 0
    for _ in range(500):
        now = draws.normal(size=(8, 2))
        bounds = win_probabilities(now.tolist(), now.tolist(), 1.0, comparisons=1)
        lost += bounds[0] <= 0.05
    assert lost / 500 > 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_what_catches_up_is_kept() -> None:
    """It is far behind, and by a straight line it will be ahead."""
    before = [[2.0, 2.01], [3.0, 3.02]]
    now = [[1.9, 1.91], [2.3, 2.31]]
    assert win_probabilities(before, now, 2.0, 2) == [1.0, 1.0] or (
        win_probabilities(before, now, 2.0, 2)[1] == 1.0
    )
    level = [[1.9, 1.91], [2.9, 2.93]]
    assert win_probabilities(before, level, 2.0, 2)[1] < 0.05


def test_nothing_is_said_of_one_seed() -> None:
    assert win_probabilities([[1.0], [9.0]], [[1.0], [9.0]], 1.0, 2) == [1.0, 1.0]


def test_looks() -> None:
    assert looks_of(100) == ((12, 24, 48), (24, 48))
    assert looks_of(100, [48]) == ((24, 48), (48,))
    assert looks_of(100, []) == ((), ()) == looks_of(7)


def scored(folder: Path, table: dict[float, list[float]]) -> list[results.Outcome]:
    """A round whose members have these gaps to 2 nats at all looks, by rate and seed."""
    points = [{"optim.lr": lr, "train.seed": seed} for lr in table for seed in (0, 1)]
    settings = load(None, {"train.updates": 80}, {})
    sweep = Sweep.create(folder / "s", settings, points, None)
    members = members_of(settings, points)
    with sweep.lock_members(members) as runs:
        for run, member in zip(runs, members, strict=True):
            gap = table[member.knobs["optim.lr"]][member.knobs["train.seed"]]
            for look in looks_of(80).scored:
                run.log({"update": look, "eval_loss": 2 + gap + 0.1 / look, "eval_rows": 3})
    return [results.read_outcome(sweep, member) for member in members]


def test_a_setting_is_stopped_with_all_its_seeds(tmp_path: Path) -> None:
    outcomes = scored(tmp_path, {1e-3: [0.5, 0.51], 2e-3: [0.0, 0.0], 4e-3: [0.001, 0.0]})
    stopped = pruning.hopeless(outcomes, 80, 20, 0.05)
    assert set(stopped) == {0, 1} and all(bound < 0.05 for bound in stopped.values())
    # What was stopped at this look is found again, and what was stopped before is not compared.
    outcomes[0].run.log({"update": 20, "stopped": 20, "win_probability": 0.01})
    sweep = Sweep.open(tmp_path / "s")
    again = [results.read_outcome(sweep, outcome.member) for outcome in outcomes]
    assert pruning.hopeless(again, 80, 20, 0.05) == stopped
    assert pruning.hopeless(again, 80, 40, 0.05) == {}


def test_a_setting_that_diverged_or_is_not_whole_is_not_compared(tmp_path: Path) -> None:
    outcomes = scored(tmp_path, {1e-3: [0.5, 0.51], 2e-3: [0.0, 0.0], 4e-3: [0.001, 0.0]})
    assert pruning.hopeless(outcomes[1:], 80, 20, 0.05) == {}
    outcomes[1].run.log({"update": 18, "diverged": 10})
    sweep = Sweep.open(tmp_path / "s")
    again = [results.read_outcome(sweep, outcome.member) for outcome in outcomes]
    assert pruning.hopeless(again, 80, 20, 0.05) == {}


def test_stopped_members_are_shown_and_compared_with_none(tmp_path: Path) -> None:
    outcomes = scored(tmp_path, {1e-3: [0.5, 0.51], 2e-3: [0.0, 0.02], 4e-3: [0.03, 0.01]})
    for outcome in outcomes[:2]:
        outcome.run.log({"update": 20, "stopped": 20, "win_probability": 0.0123})
    sweep = Sweep.open(tmp_path / "s")
    found = [results.read_outcome(sweep, outcome.member) for outcome in outcomes]
    assert [each.is_over for each in found] == [True, True, False, False, False, False]
    table = results.compare_settings(found)
    lines = results.table_lines(table, found)
    assert lines[1].split()[:4] == ["0.001", "2.507", "±", "0.005"]
    assert lines[1].endswith("stopped at update 20: best with P < 0.01")
    assert table.settings[0].difference is None and table.degrees == 1
    members, _ = results.results_json(found, table)
    assert [member["stopped"] for member in members] == [20, 20, None, None, None, None]
    assert [each["standing"] for each in results.chart_settings(table)][0] == "stopped"


@pytest.mark.parametrize(
    ("points", "probability", "words"),
    [
        (POINTS, 0.0, "--prune = 0.0: expected a probability, such as 0.05"),
        (POINTS, 1.5, "expected a probability"),
        ([{"optim.lr": 1e-3}, {"optim.lr": 2e-3}], 0.05, "give at least two, train.seed=0,1"),
        ([{"train.seed": 0}, {"train.seed": 1}], 0.05, "this sweep has one: give an axis"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    points: list[dict[str, Any]], probability: float, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        pruning.require_prunable(Texts(), points, probability)


def test_rewards_are_not_pruned() -> None:
    """They may be flat for long before they rise, so what they are early says nothing about later."""
    with pytest.raises(UsageError, match="--prune does not go with rl.reward: .*: leave it out"):
        pruning.require_prunable(Rewards(), POINTS, 0.05)


def built_cohort(
    these: list[Member], folder: Path, text: Corpus, runs: dict[int, Run], *, compiled: bool
) -> cohort.Cohort:
    for member in these:
        if member.index not in runs:
            runs[member.index] = Run.create(folder / str(member.index))
    task = TextTask(text)
    made = cohort.with_length(cohort.build_models(these, task, describe()), UPDATES)
    engine = cohort.make_members_engine(made, own_rows=True, device=torch.device("cpu"))
    if compiled:
        assert engine.capture(first_window(made, task)) is None
    mine = [runs[member.index] for member in these]
    return cohort.begin_cohort(these, mine, made, task, engine)


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    state = engine.state()
    return {**state.model, **state.optimizer}


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [("whole", False), ("adapters", False), pytest.param("whole", True, marks=pytest.mark.slow)],
)
def test_the_others_compute_the_bits_of_a_sweep_without_stops(
    kind: str, compiled: bool, text: Corpus, tmp_path: Path
) -> None:
    """Six members, of which two leave after half of the updates: weights, moments and losses."""
    keys = KEYS | SMALL
    points = POINTS
    if kind == "adapters":
        write_base(tmp_path / "base")
        keys = KEYS | {
            "model.init": str(tmp_path / "base"),
            "lora.base": "nf4",
            "lora.dropout": 0.1,
        }
        points = [
            {**point, "lora.rank": rank}
            for point, rank in zip(POINTS, (4, 4, 2, 2, 7, 7), strict=True)
        ]
    these = members_of(load(None, keys, {}), points)
    for member in these:
        member.plan = resolve(member.settings, describe())
    whole = built_cohort(these, tmp_path / "whole", text, {}, compiled=compiled)
    expected = [update.loss for update in train(whole.engine, whole.windows, UPDATES)]
    runs: dict[int, Run] = {}
    all_members = built_cohort(these, tmp_path / "cut", text, runs, compiled=compiled)
    losses = [update.loss[2:] for update in train(all_members.engine, all_members.windows, 4)]
    all_members.save()
    all_members.close()
    fewer = built_cohort(these[2:], tmp_path / "cut", text, runs, compiled=compiled)
    assert cohort.resume_cohort(fewer, {}, silent()) == 4
    losses += [update.loss for update in train(fewer.engine, fewer.windows, UPDATES)]
    assert torch.equal(torch.stack(losses), torch.stack(expected)[:, 2:])
    for place in range(4):
        ours = state_of(fewer.sessions[place].engine)
        others = state_of(whole.sessions[place + 2].engine)
        assert ours.keys() == others.keys()
        assert all(torch.equal(ours[name], others[name]) for name in ours)
    fewer.close()
    whole.close()
