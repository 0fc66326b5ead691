"""Run: pytest tests/rl/test_public.py (rewards, distillation and preferences from Python)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import monograph
from batches import tiny_llama
from monograph.errors import InputRefused, UsageError
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.rl.rewards import Answer
from monograph.text.tokenizer import Tokenizer

BYTES = Tokenizer.bytes()
RECORDS = [{"prompt": text} for text in ("a", "bc", "def", "g")]


def low(prompt: str, answer: str, record: Mapping[str, Any]) -> dict[str, float]:
    return {
        "low": np.float32(sum(letter < "`" for letter in answer) / 4),
        "short": -len(answer) / 8,
    }


def learner(loss: torch.nn.Module, rate: float = 0.02) -> Resident:
    return Resident(tiny_llama(vocab_size=BYTES.vocab_size), loss=loss, optim=AdamW(lr=rate))  # type: ignore[arg-type]


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_answers_to_rewards_get_better_and_say_so_by_part(captured: bool) -> None:
    engine = learner(monograph.policy_loss("rloo", entropy_coef=0.001))
    if captured:
        first = next(
            monograph.rollouts(engine, BYTES, RECORDS, low, group=8, prompts=4, max_new_tokens=4)
        )
        assert engine.capture(first, backend="aot_eager") is None
    answers = monograph.rollouts(
        engine, BYTES, RECORDS, low, group=8, prompts=4, max_new_tokens=4, seed=3
    )
    rewards = []
    for _ in monograph.train(engine, answers, updates=12):
        rewards.append(answers.numbers["reward"])
        parts = answers.numbers["reward.low"] + answers.numbers["reward.short"]
        assert math.isclose(parts, rewards[-1], abs_tol=1e-6)
        apart = engine.step.loss.take_figures()["drawn_minus_scored_max"]  # type: ignore[attr-defined]
        assert apart < 1e-5 if captured else apart == 0
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert answers.state()["rows"] == 12 * 4


def test_a_draw_is_a_function_of_weights_and_seed() -> None:
    def window(seed: int, some: Sequence[Mapping[str, Any]] = RECORDS) -> torch.Tensor:
        engine = learner(monograph.policy_loss())
        return next(
            monograph.rollouts(engine, BYTES, some, low, prompts=2, max_new_tokens=4, seed=seed)
        )["targets"]

    assert torch.equal(window(1), window(1)) and not torch.equal(window(1), window(2))


def test_a_student_learns_from_how_much_likelier_its_teacher_finds_each_token() -> None:
    """What is drawn depends on the student alone, and what it is worth on what the teacher reads."""
    found = []
    for told in (None, "x", "y"):
        engine = learner(monograph.policy_loss("dapo"))
        records = [{**record, "teacher_prompt": told} if told else record for record in RECORDS]
        teacher = monograph.distill(tiny_llama(vocab_size=BYTES.vocab_size, seed=7))
        window = next(
            monograph.rollouts(engine, BYTES, records, teacher, prompts=4, max_new_tokens=4)
        )
        assert float(window["shares"].sum()) == int((window["targets"] != -100).sum())
        found.append(window)
    for one, other in itertools.combinations(found, 2):
        assert torch.equal(one["targets"], other["targets"]) and not torch.equal(
            one["factors"], other["factors"]
        )


class Batched(monograph.Reward):
    """A reward that scores all answers at once."""

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [float(place % 2) for place, _ in enumerate(answers)]


def test_a_reward_of_one_s_own_and_a_named_one_score_answers() -> None:
    for reward, more in ((Batched(), {}), ("regex", {"regex": "[a-z]*"})):
        engine = learner(monograph.policy_loss())
        more |= {"prompts": 2, "max_new_tokens": 2, "truncated": "mask"}
        answers = monograph.rollouts(engine, BYTES, RECORDS, reward, **more)
        window = next(answers)
        assert 0 <= answers.numbers["reward"] <= 1 and 0 < answers.numbers["cut"] < 1
        assert not isinstance(reward, Batched) or answers.numbers["reward"] == 0.5
        # Those that are cut are left out: the last target of each row ends its answer.
        last = [
            int(targets[targets != -100][-1])
            for targets in window["targets"]
            if bool((targets != -100).any())
        ]
        assert set(last) <= {BYTES.eos_id}


def write(path: Path, labelled: bool) -> Path:
    words = ["north", "south", "over", "under", "left", "right"]
    records: list[dict[str, Any]] = []
    for one, other in itertools.permutations(words, 2):
        if labelled:
            records += [{"prompt": one, "completion": other, "label": one < other}]
        else:
            records += [{"prompt": one, "chosen": max(one, other), "rejected": other[::-1]}]
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


@pytest.mark.parametrize(
    ("name", "beta", "captured"),
    [
        ("dpo", 0.5, False),
        pytest.param("dpo", 0.5, True, marks=pytest.mark.slow),
        ("orpo", 0.1, False),
        ("kto", 0.5, False),
    ],
)
def test_pairs_are_learned_from(name: str, beta: float, captured: bool, tmp_path: Path) -> None:
    labelled = name == "kto"
    read = monograph.pairs(
        write(tmp_path / "p.jsonl", labelled), BYTES, labelled=labelled, sequence_length=64
    )
    loss = monograph.preference_loss(read, name, beta=beta)
    engine = learner(loss, rate=0.01)
    if captured:  # rehearsed updates leave no reference behind, and the first one takes it
        assert (
            engine.capture(
                next(iter(read.batches(256, seed=1))), backend="aot_eager", scope="blocks"
            )
            is None
        )
    figures = []
    for update in monograph.train(engine, read.batches(256, seed=1), updates=16):
        figures.append(loss.take_figures() | {"loss": float(update.loss)})
    if name != "orpo":
        assert figures[0]["accuracy"] == 0.5 and figures[0]["loss"] == pytest.approx(
            0.5 if labelled else math.log(2)
        )
    assert (
        sum(each["accuracy"] for each in figures[-4:]) > 3.2
        and figures[-1]["margin"] > figures[0]["margin"]
    )


def test_a_resumed_loss_needs_its_reference(tmp_path: Path) -> None:
    read = monograph.pairs(write(tmp_path / "p.jsonl", False), BYTES, sequence_length=64)
    window = next(iter(read.batches(256)))

    def begun() -> Resident:
        return learner(monograph.preference_loss(read))

    engine, other = begun(), begun()
    engine.accumulate(window)
    engine.update()
    other.load_state(engine.state())
    with pytest.raises(UsageError, match=r"loss.state_dict\(\)"):
        other.accumulate(window)
    other.step.loss.load_state_dict(engine.step.loss.state_dict())  # type: ignore[attr-defined]
    for each in (engine, other):
        each.accumulate(window)
    assert torch.equal(engine.step.loss_sum, other.step.loss_sum)


def refused(**more: Any) -> None:
    given: dict[str, Any] = {"records": RECORDS, "reward": low, "max_new_tokens": 4, **more}
    records, reward, loss = given.pop("records"), given.pop("reward"), given.pop("loss", None)
    engine = learner(loss or monograph.policy_loss())
    next(monograph.rollouts(engine, BYTES, records, reward, **given))


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"group": 1}, UsageError, "group = 1: expected a whole number from 2$"),
        ({"prompts": 0}, UsageError, "prompts = 0"),
        ({"loss": monograph.token_loss}, UsageError, r"loss=monograph.policy_loss\("),
        ({"records": []}, InputRefused, "there are no records"),
        ({"records": [{"text": "a"}]}, InputRefused, "record 1: has no key 'prompt'"),
        (
            {"records": [{"prompt": "a" * 61}]},
            InputRefused,
            "record 1: the prompt has 62 tokens, more than 60",
        ),
        ({"reward": "exact"}, InputRefused, "record 1: rl.reward needs a text or a list of texts"),
        (
            {"truncation_penalty": math.nan},
            UsageError,
            "truncation_penalty = nan: expected a number from 0",
        ),
        ({"truncation_penalty": "mask"}, UsageError, "truncation_penalty = 'mask'"),
        ({"truncated": "drop"}, UsageError, "truncated = 'drop': expected 'keep' or 'mask'"),
        (
            {"truncated": "mask", "truncation_penalty": 0.5},
            UsageError,
            "answers that truncated = 'mask' leaves out",
        ),
        ({"reward": "regex"}, UsageError, "rl.reward = regex: give rl.reward_regex, too"),
        ({"reward": lambda *_: torch.ones(2)}, InputRefused, "returned tensor"),
        (
            {"reward": monograph.distill(tiny_llama()), "max_new_tokens": 4},
            UsageError,
            "has another vocabulary",
        ),
        ({"reward": "exact", "regex": "a"}, UsageError, "regex does not go with rl.reward = exact"),
        ({"promts": 3}, UsageError, "promts is no argument of rollouts"),
        ({"reward": "teacher"}, UsageError, r"monograph.distill\(teacher\)"),
        ({"reward": "exat"}, UsageError, "did you mean exact"),
        (
            {"reward": lambda *_: math.nan},
            InputRefused,
            "record 1: <lambda> returned nan: correct it",
        ),
        ({"reward": lambda *_: "1"}, InputRefused, "returned '1'"),
        ({"reward": lambda *_: object()}, InputRefused, "returned <object"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(
    given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        refused(**given)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: monograph.policy_loss("ppo"), "advantage = 'ppo': expected one of dr_grpo"),  # type: ignore[arg-type]
        (lambda: monograph.policy_loss(temperature=0.0), "temperature = 0.0"),
        (
            lambda: monograph.policy_loss(kl="k2"),
            "kl = k2: say how strong it is, such as kl_coef = 0.05",
        ),
        (lambda: monograph.policy_loss(kl="k4", kl_coef=0.1), "kl = 'k4': expected k1, k2 or k3"),
        (
            lambda: monograph.policy_loss(kl_coef=0.1),
            "kl_coef is the strength of kl: say k1, k2 or k3",
        ),
        (
            lambda: monograph.policy_loss(kl="k2", kl_coef=0.1, entropy_coef=0.1),
            "entropy_coef does not go with kl = k2",
        ),
        (
            lambda: monograph.policy_loss("grpo", kl="k1", kl_coef=0.1),
            "is a part of the reward, which advantage = grpo divides by its deviation: take dr_grpo",
        ),
    ],
)
def test_a_loss_that_is_not_is_refused(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


def test_a_loss_and_answers_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    read = {
        labelled: monograph.pairs(
            write(tmp_path / f"{labelled}.jsonl", labelled), BYTES, labelled=labelled
        )
        for labelled in (False, True)
    }
    for labelled, loss, words in (
        (False, "kto", "compares labelled answers: read them with labelled=True"),
        (True, "dpo", "compares pairs, not labelled answers"),
        (False, "ppo", "expected dpo, robust"),
        (False, "dpo:0.1", "expected dpo, robust"),
    ):
        with pytest.raises(UsageError, match=words):
            monograph.preference_loss(read[labelled], loss)
