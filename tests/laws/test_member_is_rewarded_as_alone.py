# Run: pytest tests/laws/test_member_is_rewarded_as_alone.py
"""Laws 5, 16 and 19 for rewards: the members of an ensemble, whose answers one decoder samples, sample
and learn what each would alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from adapted import SMALL, trained
from batches import captured_to_train, tiny_llama
from monograph import member_rollouts, policy_loss, rollouts
from monograph.decode import banked_layers
from monograph.decode.completion import Completion
from monograph.decode.prompt_reader import PromptReader
from monograph.ensemble import Ensemble
from monograph.errors import Diverged, UsageError
from monograph.graph import matmul
from monograph.graph.lora import Lora, adapt
from monograph.graph.shared_base import copy_with_shared_base
from monograph.laws.comparisons import LOG_PROBABILITY_BOUND, member_is_alone, outcome
from monograph.loop import train
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.rl.members import MembersDrawer, MembersRollouts
from monograph.rl.rollouts import Drawer, Rollouts
from monograph.step import Update
from monograph.text.tokenizer import Tokenizer

N, UPDATES = 3, 3
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = (5, 6, 5)
OTHERS = [replace(SMALL, rank=7, alpha=20.0, rslora=True), replace(SMALL, rank=2, alpha=3.0)]
RECORDS = [{"prompt": text} for text in ("2+2=", "a", "the longest of them", "7")]
OPTIONS: dict[str, Any] = {"prompts": 2, "group": 4, "max_new_tokens": 7}


def letters(prompt: str, answer: str, record: Any) -> float:
    """About half of the answers have some of these letters, and few have many."""
    return float(sum(letter < "p" for letter in answer))


def members_of(
    lora: Lora = SMALL,
    others: Sequence[Lora] = OTHERS,
    dtype: torch.dtype = torch.float64,
    **sizes: Any,
) -> list[Llama]:
    """Members that share a base, each with trained adapters, so that they sample different answers."""
    first = tiny_llama(torch.float32, vocab_size=259, **sizes)
    with torch.no_grad():
        for weight in first.parameters():
            weight.mul_(4.0 if weight.ndim > 1 else 1.0)
    adapt(first, lora)
    first.to(dtype)
    members = [
        first,
        *(copy_with_shared_base(first, each, seed) for seed, each in enumerate(others)),
    ]
    for number, member in enumerate(members):
        trained(member, seed=number, spread=0.2)
    return members


def together(
    members: list[Llama], micro_batch: int = 3, seeds: Sequence[int] = SEEDS, **options: Any
) -> tuple[Ensemble, MembersRollouts]:
    engine = Ensemble(
        members,
        loss=policy_loss(options.pop("advantage", "dr_grpo"), updates=options.pop("updates", 1)),
        optim=[AdamW(lr=rate) for rate in RATES[: len(members)]],
        clip=0.5,
        micro_batch=micro_batch,
        each=True,
    )
    windows = member_rollouts(
        engine, Tokenizer.bytes(), RECORDS, letters, seeds=seeds, **(OPTIONS | options)
    )
    return engine, windows


def alone(
    model: Llama, number: int, micro_batch: int = 3, **options: Any
) -> tuple[Resident, Rollouts]:
    """The slow path: a run of its own, whose answers its own decoder samples."""
    engine = Resident(
        model.train(),
        loss=policy_loss(options.pop("advantage", "dr_grpo"), updates=options.pop("updates", 1)),
        optim=AdamW(lr=RATES[number]),
        clip=0.5,
        micro_batch=micro_batch,
    )
    windows = rollouts(
        engine, Tokenizer.bytes(), RECORDS, letters, seed=SEEDS[number], **(OPTIONS | options)
    )
    # Members are scored by the usual attention, not by that of decoding.
    windows.drawer.set_options(replace(windows.drawer.options, exact=False, packed=True))
    assert isinstance(engine.model, Llama)
    engine.model.use_attention("auto")
    return engine, windows


def test_the_prompts_of_all_members_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts_of_passes = list[int]()
    read_pass = PromptReader._read_pass

    def counted(reader: PromptReader, prompts: Any, begins: Any, count: int) -> None:
        prompts_of_passes.append(len(prompts))
        read_pass(reader, prompts, begins, count)

    monkeypatch.setattr(PromptReader, "_read_pass", counted)
    _, windows = together(members_of())
    next(windows)
    assert set(prompts_of_passes) == {N * OPTIONS["prompts"]}, "each chunk of all at once"


class Sampled:
    """Notes the answers that members, or runs alone, sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.together: list[list[list[int]]] = [[] for _ in range(N)]
        self.alone: list[list[int]] = []
        draw_together, draw_alone = MembersDrawer.draw, Drawer.draw

        def noted_together(drawer: MembersDrawer, wanted: Any) -> dict[int, list[Completion]]:
            answers = draw_together(drawer, wanted)
            for number, of_member in answers.items():
                self.together[number] += [answer.token_ids for answer in of_member]
            return answers

        def noted_alone(drawer: Drawer, prompts: Any, seeds: Any) -> list[Completion]:
            answers = draw_alone(drawer, prompts, seeds)
            self.alone += [answer.token_ids for answer in answers]
            return answers

        monkeypatch.setattr(MembersDrawer, "draw", noted_together)
        monkeypatch.setattr(Drawer, "draw", noted_alone)


CASES: dict[str, dict[str, Any]] = {
    "dr_grpo": {},
    "large weights": {},
    "dapo, several draws": {"advantage": "dapo", "draws": 3, "prompts": 3},
    # Of advantages that sum to zero, the loss of the first update would be nothing but rounding.
    "two updates of a sample": {"advantage": "reinforce", "updates": 2},
}


BASES = {
    "int8": replace(SMALL, base="int8"),
    "nf4, dora": replace(SMALL, base="nf4", dora=True),
}


NIGHTLY = ("dapo, several draws", "nf4, dora")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=pytest.mark.slow) if each in NIGHTLY else each
        for each in (*CASES, *BASES)
    ],
)
def test_members_sample_and_learn_as_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "large weights":
        monkeypatch.setattr(banked_layers, "LARGE_WEIGHT", 1)
    options = CASES.get(name, {})
    members = members_of()
    if name in BASES:
        members = members_of(BASES[name], [replace(BASES[name], rank=7), BASES[name]])
    copies = copy.deepcopy(members)
    sampled = Sampled(monkeypatch)
    engine, windows = together(members, **options)
    updates = list(train(engine, windows, updates=UPDATES))
    for i, model in enumerate(copies):
        sampled.alone = []
        solo, own_windows = alone(model, i, **options)
        own_updates = list(train(solo, own_windows, updates=UPDATES))
        assert sampled.together[i] == sampled.alone
        found = outcome(engine.member_state(i), updates, member=i)
        assert member_is_alone(found, outcome(solo.state(), own_updates), least=1.0)
        numbers = windows.members[i].numbers
        assert {**numbers, "drawn_s": 0, "scored_s": 0} == pytest.approx(
            {**own_windows.numbers, "drawn_s": 0, "scored_s": 0}
        )
    assert sampled.together[0] != sampled.together[2], "of one seed, but of other adapters"


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_members_sample_is_scored_within_1e_5(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the products of large weights, on a processor where MKL is slow."""
    monkeypatch.setattr(banked_layers, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(matmul, "mkl_is_slow", torch.backends.mkldnn.is_available)
    engine, windows = together(members_of(dtype=torch.float32), micro_batch=2)
    if captured:
        captured_to_train(engine, next(windows), "aot_eager")
        for i in range(N):
            engine.member_loss(i).take_figures()  # type: ignore[attr-defined]
    for _ in train(engine, windows, updates=UPDATES):
        for i in range(N):
            figures = engine.member_loss(i).take_figures()  # type: ignore[attr-defined]
            assert 0 < figures["drawn_minus_scored_max"] < LOG_PROBABILITY_BOUND


def test_nothing_of_the_old_weights_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 19: after updates, the answers are those of a new decoder on the same weights."""
    engine, windows = together(members_of())
    list(train(engine, windows, updates=2))
    state = [rollouts.state()["rows"] for rollouts in windows.members]
    fresh = member_rollouts(engine, Tokenizer.bytes(), RECORDS, letters, seeds=SEEDS, **OPTIONS)
    for rollouts_of_member, rows in zip(fresh.members, state, strict=True):
        rollouts_of_member.rows_consumed = rows
    expected, found = next(fresh), next(windows)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_member_without_finite_logits_leaves_the_bits_of_the_others() -> None:
    def left(poisoned: bool) -> tuple[list[torch.Tensor], list[Update]]:
        members = members_of()
        engine, windows = together(members)
        updates = list(train(engine, windows, updates=1))
        if poisoned:
            next(p for p in members[1].parameters() if p.requires_grad).data.fill_(torch.nan)
        updates += train(engine, windows, updates=3)
        state = [p for i in (0, 2) for p in members[i].parameters() if p.requires_grad]
        return [*state, *(update.loss[[0, 2]] for update in updates)], updates

    poisoned, updates = left(poisoned=True)
    assert all(map(torch.equal, poisoned, left(poisoned=False)[0]))
    assert [int(update.skipped[1]) for update in updates] == [0, 1, 2]


def test_members_none_of_which_has_finite_logits_have_diverged() -> None:
    members = members_of()
    _, windows = together(members)
    for member in members:
        next(p for p in member.parameters() if p.requires_grad).data.fill_(torch.nan)
    with pytest.raises(Diverged, match="not finite"):
        next(windows)


EXPERTS = {"model_type": "gpt_oss", "num_experts": 5, "num_experts_per_tok": 2}
REFUSED: list[tuple[Any, str]] = [
    (lambda: together(members_of(replace(SMALL, targets=("gate_proj",)), [], **EXPERTS), seeds=[1]), "has experts"),
    (lambda: together(members_of(replace(SMALL, tokens=(3, 17)), []), seeds=[1]), "rows of tokens"),
    (lambda: together([tiny_llama(torch.float32, vocab_size=259)], seeds=[1]), "without adapters"),
    (lambda: together(members_of(), seeds=[1]), "1 seeds for 3 members"),
]  # fmt: skip


@pytest.mark.parametrize(("begin", "part"), REFUSED, ids=[part for _, part in REFUSED])
def test_what_one_decoder_cannot_have_is_refused(begin: Any, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        begin()
