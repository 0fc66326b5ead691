# Run: pytest tests/laws/test_member_prefers_as_alone.py
"""Law 5 for preferences: members of an ensemble learn from pairs as each would alone. Their reference,
which they score together, is the one that each would have alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adapted import SMALL, trained
from alone import stacked
from batches import captured_to_train, tiny_llama
from laws.test_preference_is_its_equation import LENGTH, PARAMETERS, VOCABULARY, pairs
from monograph import compat
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.ensemble.member import MemberEngine
from monograph.graph.lora import Lora, adapt
from monograph.graph.shared_base import copy_with_shared_base
from monograph.laws.comparisons import member_is_alone, outcome
from monograph.loop import train
from monograph.loss import Batch
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.rl.pairs import PairRows
from monograph.rl.preference_loss import PreferenceLoss
from monograph.rl.preferences import preference
from monograph.run.folder import Run
from monograph.run.progress import silent
from monograph.session.objectives.preferences import PreferenceTask
from monograph.step import Update
from monograph.text.tokenizer import Tokenizer

N, UPDATES, ROWS = 3, 3, 4
KNOBS = [SimpleNamespace(seed=20 + i, lr=1e-3 * 2**i, weight_decay=0.1 * i) for i in range(N)]
OTHERS = [replace(SMALL, rank=7, alpha=20.0, rslora=True), replace(SMALL, rank=2, alpha=3.0)]


def task_of(name: str) -> PreferenceTask:
    """What a run learns from that has this loss."""
    made = pairs(50, labelled=name == "kto")
    train_rows = PairRows(made[:40], "pairs", Tokenizer.bytes(), LENGTH, 1)
    held_out = PairRows(made[40:], "pairs", Tokenizer.bytes(), LENGTH, 1 + train_rows.answers)
    data: Any = SimpleNamespace(train=train_rows, held_out=held_out, fingerprint="f" * 64)
    return PreferenceTask(data, preference(name, **PARAMETERS[name]))


def loss_of(task: PreferenceTask, model: Llama) -> PreferenceLoss:
    return task.loss(None, model)  # type: ignore[arg-type]


def windows_of(task: PreferenceTask, seed: int) -> list[Batch]:
    """The windows of a member, in the order of its seed."""
    rows = task.data.train
    order = np.random.default_rng(seed).permutation(len(rows))[: UPDATES * ROWS]
    assert len(order) == UPDATES * ROWS
    return [
        {name: torch.from_numpy(values) for name, values in rows.window(indices).items()}
        for indices in order.reshape(UPDATES, ROWS)
    ]


def members_of(lora: Lora = SMALL, others: Sequence[Lora] = OTHERS, layers: int = 1) -> list[Llama]:
    """Members in fp64 that share a base, whose adapters are new."""
    first = tiny_llama(torch.float32, vocab_size=VOCABULARY, num_hidden_layers=layers)
    adapt(first, lora)
    first.double()
    return [first, *(copy_with_shared_base(first, each, seed) for seed, each in enumerate(others))]


def begun(task: PreferenceTask, engine: Engine, folder: Path) -> PreferenceTask:
    """The task of a member, or of a run alone."""
    own = task.for_member()
    own.begin(Run.create(folder), engine, World(), lambda: None)  # type: ignore[arg-type, return-value]
    return own


def shift_gains(loss: object) -> None:
    """Raise all gains, so that kto's z, which is at least 0, depends on them."""
    assert isinstance(loss, PreferenceLoss)
    if loss.preference.labelled:
        loss.reference.sub_(3.0)


class Together:
    """Members with their reference, ready to train."""

    def __init__(self, task: PreferenceTask, members: list[Llama], folder: Path, micro_batch: int):
        self.task = task
        self.engine = Ensemble(
            members,
            KNOBS,
            loss=loss_of(task, members[0]),
            optim=AdamW,
            clip=0.5,
            micro_batch=micro_batch,
            each=True,
        )
        self.tasks = [
            begun(task, MemberEngine(self.engine, i), folder / f"member {i}") for i in range(N)
        ]
        self.windows = [
            stacked(windows)
            for windows in zip(*(windows_of(task, i) for i in range(N)), strict=True)
        ]

    def score_reference(self, resumed: bool = False) -> None:
        self.tasks[0].prepare_references(self.tasks, self.engine, resumed, ROWS, silent())
        shift_gains(self.engine.step.loss)

    def train(self) -> tuple[list[Update], list[list[dict[str, Any]]]]:
        """Return the updates, and each member's figures on each of them."""
        updates, figures = [], []
        for update in train(self.engine, self.windows):
            updates.append(update)
            figures.append([task.figures(None) for task in self.tasks])  # type: ignore[arg-type]
        return updates, [list(of_member) for of_member in zip(*figures, strict=True)]


def alone(
    task: PreferenceTask, model: Llama, number: int, folder: Path, micro_batch: int
) -> tuple[dict[str, Tensor], list[dict[str, Any]], Tensor]:
    """The slow path: a run of its own. Return its outcome, its figures, and its reference."""
    knobs = KNOBS[number]
    engine = Resident(
        model.train(),
        loss=loss_of(task, model),
        optim=AdamW(lr=knobs.lr, weight_decay=knobs.weight_decay),
        clip=0.5,
        micro_batch=micro_batch,
    )
    own = begun(task, engine, folder / f"alone {number}")
    own.prepare_reference_scores(False, ROWS, silent())
    shift_gains(engine.loss)
    updates, figures = [], []
    for update in train(engine, windows_of(task, number)):
        updates.append(update)
        figures.append(own.figures(None))  # type: ignore[arg-type]
    loss = engine.loss
    assert isinstance(loss, PreferenceLoss)
    return outcome(engine.state(), updates), figures, loss.reference


def compared(
    name: str,
    members: list[Llama],
    folder: Path,
    *,
    backend: str | None = None,
    micro_batch: int = 3,
) -> None:
    """Train together and alone, and compare losses, adapters, moments, figures and references."""
    copies = copy.deepcopy(members)
    together = Together(task_of(name), members, folder, micro_batch)
    if backend:
        captured_to_train(together.engine, together.windows[0], backend)
    together.score_reference()
    graphs = compat.captured_graphs()
    updates, figures = together.train()
    assert compat.captured_graphs() == graphs
    for i, model in enumerate(copies):
        solo, solo_figures, reference = alone(together.task, model, i, folder, micro_batch)
        found = outcome(together.engine.member_state(i), updates, member=i)
        assert member_is_alone(found, solo, least=1.0)
        own = together.engine.member_loss(i)
        assert isinstance(own, PreferenceLoss)
        torch.testing.assert_close(own.reference[1:], reference[1:], rtol=1e-12, atol=1e-12)
        for row, expected in zip(figures[i], solo_figures, strict=True):
            # Before the first update all gains are 0, up to rounding, so which answer is ahead is chance.
            ignored = {"accuracy"} if expected is solo_figures[0] else set[str]()
            for key in expected.keys() - ignored:
                assert row[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-9), key


BY_DAY = ("dpo", "kto")


@pytest.mark.parametrize(
    "name",
    [
        *BY_DAY,
        *(pytest.param(each, marks=pytest.mark.slow) for each in PARAMETERS if each not in BY_DAY),
    ],
)
def test_members_prefer_as_alone(name: str, tmp_path: Path) -> None:
    compared(name, members_of(layers=2 if name == "dpo" else 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [2, ROWS])
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_members_prefer_as_alone_captured(name: str, micro_batch: int, tmp_path: Path) -> None:
    """With one micro-batch, and with several."""
    compared(name, members_of(), tmp_path, backend="aot_eager", micro_batch=micro_batch)


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(replace(SMALL, base="nf4", dora=True), marks=pytest.mark.slow),
        replace(SMALL, base="int8"),
    ],
)
def test_members_on_a_quantised_base_prefer_as_alone(lora: Lora, tmp_path: Path) -> None:
    compared("dpo", members_of(lora, [lora] * (N - 1)), tmp_path)


def test_members_that_begin_from_other_functions_have_other_references(tmp_path: Path) -> None:
    """Adapters that were trained before, with other scales."""
    first = trained(members_of(others=[])[0])
    others = [replace(SMALL, alpha=alpha) for alpha in (9.0, 1.0)]
    compared("dpo", [first, *(copy_with_shared_base(first, each) for each in others)], tmp_path)


def test_members_of_all_weights_prefer_as_alone(tmp_path: Path) -> None:
    model = tiny_llama(torch.float64, vocab_size=VOCABULARY, num_hidden_layers=1)
    compared("dpo", [copy.deepcopy(model) for _ in range(N)], tmp_path)


@pytest.mark.parametrize("name", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_a_member_that_diverges_leaves_the_bits_of_the_others(name: str, tmp_path: Path) -> None:
    def left(poisoned: bool) -> list[Tensor]:
        folder = tmp_path / str(poisoned)
        members = members_of()
        together = Together(task_of(name), members, folder, micro_batch=3)
        together.score_reference()
        if poisoned:
            next(p for p in members[1].parameters() if p.requires_grad).data.fill_(torch.nan)
        updates, _ = together.train()
        state = [p for i in (0, 2) for p in members[i].parameters() if p.requires_grad]
        return [*state, *(update.loss[[0, 2]] for update in updates)]

    same = zip(left(poisoned=True), left(poisoned=False), strict=True)
    assert all(torch.equal(one, other) for one, other in same)


def test_members_that_are_resumed_read_their_references(tmp_path: Path) -> None:
    together = Together(task_of("dpo"), members_of(), tmp_path, micro_batch=3)
    together.score_reference()
    loss = together.engine.step.loss
    assert isinstance(loss, PreferenceLoss)
    scored = loss.reference.clone()
    loss.reference.zero_()
    together.score_reference(resumed=True)
    assert torch.equal(loss.reference, scored) and scored[:, 1:].ne(0).all()


@pytest.mark.parametrize("alike", [True, False])
def test_members_that_begin_alike_score_each_answer_once(alike: bool, tmp_path: Path) -> None:
    members = members_of()
    if not alike:
        trained(members[1])
    together = Together(task_of("dpo"), members, tmp_path, micro_batch=3)
    rows = 0

    def count(*_: object) -> None:
        nonlocal rows
        rows += 1

    together.score_reference()
    model = together.engine.model
    hook = model.register_forward_pre_hook(count)  # type: ignore[arg-type]
    together.score_reference()
    hook.remove()
    sides = (together.task.data.train, together.task.data.held_out)
    each = ROWS * N if alike else ROWS
    batches = sum(-(-len(side) // each) for side in sides)
    assert rows == batches * 2  # micro-batches of 3 of the 4 rows of a member


def test_every_member_of_one_loss_has_buffers_of_its_own(tmp_path: Path) -> None:
    task = task_of("dpo")
    given = loss_of(task, members_of()[0])
    engine = Ensemble(members_of(), KNOBS, loss=given, optim=AdamW, each=True)
    engine.step.loss.totals[1] = 2.0  # type: ignore[attr-defined]
    totals = [engine.member_loss(i).totals for i in range(N)]  # type: ignore[attr-defined]
    assert [int(each.sum()) for each in totals] == [0, 12, 0]
    assert given.totals.shape == (6,) and not given.totals.any(), "the caller's stays as it is"


@pytest.mark.parametrize("each", [False, True])
def test_an_ensemble_scores_the_reference_of_a_loss_that_a_caller_made(each: bool) -> None:
    """In Python, the loss itself scores the reference before the first update."""
    task = task_of("dpo")
    members = members_of()
    given = loss_of(task, members[0])
    given.sides = [task.data.train, task.data.held_out]  # type: ignore[list-item]
    engine = Ensemble(members, KNOBS, loss=given, optim=AdamW, micro_batch=ROWS, each=each)
    window = windows_of(task, 0)[0]
    [update] = train(engine, [stacked([window] * N) if each else window])
    torch.testing.assert_close(
        update.loss, torch.full((N,), 2.0).double().log(), rtol=1e-12, atol=0
    )
