"""Run: pytest tests/laws/test_preference_is_its_equation.py (laws 2, 9 and 18 for pairs of
answers).
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from batches import flat_gradient, tiny_llama
from daily import pairwise
from monograph.data.loss_mask import MaskedRow
from monograph.evaluation import evaluate
from monograph.graph.lora import Lora, adapt
from monograph.graph.precision import Precision
from monograph.loss import Batch
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.rl import preferences as room
from monograph.rl.pairs import Pair, PairRows
from monograph.rl.preference_loss import PreferenceLoss
from monograph.rl.preferences import preference
from monograph.text.tokenizer import Tokenizer

LENGTH, VOCABULARY = 40, 259
PARAMETERS = {
    "dpo": {"beta": 0.3},
    "robust": {"beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"beta": 0.4},
    "simpo": {"beta": 2.0, "gamma": 0.5},
    "orpo": {"beta": 0.3},
    "kto": {"beta": 0.3, "desirable_weight": 0.7, "undesirable_weight": 1.5},
}


def test_each_loss_has_its_equation_here() -> None:
    assert PARAMETERS.keys() == room.LOSSES.keys()


def pairs(count: int = 7, labelled: bool = False) -> list[Pair]:
    draws = random.Random(5)

    def ids(most: int) -> list[int]:
        return [draws.randrange(VOCABULARY) for _ in range(draws.randint(1, most))]

    made = []
    for _ in range(count):
        prompt, answers = ids(5), (ids(7), ids(7))
        rows = [
            MaskedRow(prompt + answer, ((len(prompt), len(prompt + answer)),)) for answer in answers
        ]
        made.append(Pair("", rows[0], rows[1], 0, False, draws.choice([-1, 1]) if labelled else 0))
    return made


def rows_of(made: Sequence[Pair]) -> PairRows:
    return PairRows(made, "pairs", Tokenizer.bytes(), LENGTH, 1)


def loss_of(name: str, rows: PairRows) -> PreferenceLoss:
    loss = PreferenceLoss(preference(name, **PARAMETERS[name]), rows.answers, rows.max_row_answers)
    loss.labels[1:] = torch.from_numpy(rows.labels)
    return loss


def window(rows: PairRows) -> Batch:
    return {
        key: torch.from_numpy(value) for key, value in rows.window(np.arange(len(rows))).items()
    }


def log_probability(model: Llama, row: MaskedRow) -> tuple[Tensor, int]:
    """Of one answer, alone in a batch, and its number of tokens."""
    ids, [(begin, end)] = torch.tensor(row.ids), row.spans
    log_TV = (model(ids[None, :-1])[0] @ model.lm_head.weight.T).log_softmax(-1)
    return log_TV[begin - 1 : end - 1].gather(-1, ids[begin:end, None]).sum(), end - begin


def textbook(
    name: str,
    chosen: Tensor,
    rejected: Tensor,
    references: Sequence[float],
    tokens: tuple[int, int],
) -> Tensor:
    beta = PARAMETERS[name]["beta"]
    gains, means = (
        (chosen - references[0], rejected - references[1]),
        (chosen / tokens[0], rejected / tokens[1]),
    )
    if name == "dpo":
        return -logsigmoid(beta * (gains[0] - gains[1]))
    if name == "robust":
        margin = beta * (gains[0] - gains[1])
        wrong = PARAMETERS[name]["label_smoothing"]
        return (-(1 - wrong) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1 - 2 * wrong)
    if name == "ipo":
        return (gains[0] / tokens[0] - gains[1] / tokens[1] - 1 / (2 * beta)) ** 2
    if name == "simpo":
        return -logsigmoid(beta * (means[0] - means[1]) - PARAMETERS[name]["gamma"])
    odds = [mean.exp() / (1 - mean.exp()) for mean in means]
    return -means[0] - beta * logsigmoid((odds[0] / odds[1]).log())


def kto(
    gains: Sequence[tuple[Tensor, Tensor]],
    labels: Sequence[int],
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> list[Tensor]:
    """The loss of each answer, from (its gain, the gain of an answer to another prompt)."""
    expected = max(0.0, sum(other.item() for _, other in gains) / len(gains))
    return [
        desirable_weight * (1 - torch.sigmoid(beta * (own - expected)))
        if label > 0
        else undesirable_weight * (1 - torch.sigmoid(beta * (expected - own)))
        for (own, _), label in zip(gains, labels, strict=True)
    ]


REFERENCES = -30 * torch.rand(15, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@functools.cache
def slow(name: str) -> tuple[float, Tensor]:
    """The mean loss over the pairs, each answer alone, and its gradient."""
    labelled = name.startswith("kto")
    model, made, references = (
        tiny_llama(torch.float64, vocab_size=VOCABULARY),
        pairs(labelled=labelled),
        REFERENCES,
    )
    losses, gains = [], []
    for number, pair in enumerate(made):
        (chosen, long), (rejected, short) = (
            log_probability(model, row) for row in (pair.chosen, pair.rejected)
        )
        own = references[1 + 2 * number : 3 + 2 * number].tolist()
        gains.append((chosen - own[0], rejected - own[1]))
        if not labelled:
            losses.append(textbook(name, chosen, rejected, own, (long, short)))
    if labelled:
        losses = kto(gains, [pair.label for pair in made], **PARAMETERS[name])
        assert (
            sum(other.item() for _, other in gains) > 0 and len({pair.label for pair in made}) == 2
        )
    mean = torch.stack(losses).mean()
    mean.backward()
    return float(mean.detach()), flat_gradient(model)


def fast(name: str, micro_batch: int | None) -> tuple[float, Tensor]:
    rows = rows_of(pairs(labelled=name.startswith("kto")))
    loss = loss_of(name, rows)
    loss.reference[1:] = REFERENCES[1:]
    engine = Resident(
        tiny_llama(torch.float64, vocab_size=VOCABULARY), loss=loss, micro_batch=micro_batch
    )
    engine.accumulate(window(rows))
    return float(engine.step.loss_sum / engine.step.count), flat_gradient(engine.model)


def apart(name: str, micro_batch: int | None = 1) -> float:
    (loss, gradient), (expected, true) = fast(name, micro_batch), slow(name)
    return max(abs(loss - expected) / abs(expected), float((gradient - true).norm() / true.norm()))


@pytest.mark.parametrize("micro_batch", [1, 2, None])
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_gradient_of_packed_pairs_is_that_of_each_answer_alone(
    name: str, micro_batch: int | None
) -> None:
    assert apart(name, micro_batch) <= 1e-12


def _of_sums(pairs: room.PreferenceInputs, beta: float) -> Tensor:
    chosen, rejected = pairs.gains
    return (chosen - rejected - 1 / (2 * beta)).square()


def _swapped(pairs: room.PreferenceInputs, beta: float) -> Tensor:
    return room._dpo(
        room.PreferenceInputs(*(pairs[index] for index in (1, 0, 3, 2, 5, 4, 6, 7))), beta=beta
    )


def _attached(pairs: room.PreferenceInputs, **parameters: float) -> Tensor:
    """The gradient goes through z, taken from a micro-batch."""
    return room._kto(pairs._replace(expected=pairs.gains[1].mean().clamp_min(0)), **parameters)


def _all_good(pairs: room.PreferenceInputs, **parameters: float) -> Tensor:
    return room._kto(pairs._replace(labels=pairs.labels.abs()), **parameters)


@contextmanager
def _of_nothing(self: PreferenceLoss, *functions: object) -> Iterator[None]:
    yield


class _MeanOfMeans(PreferenceLoss):
    def count(self, batch: Batch) -> Tensor:
        return torch.tensor(1 + len(batch["tokens"]))


class _OneMore(PairRows):
    """The prompt's last token is taken for one of the answer's."""

    def _targets(self, index_N: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        after_N = np.minimum(index_N + 1, len(self._side.tokens) - 1)
        return np.where(
            super()._targets(after_N) >= 0, self._side.tokens[index_N], super()._targets(index_N)
        )


def _without_end(pairs: room.PreferenceInputs) -> tuple[Tensor, Tensor]:
    return pairs.chosen / (pairs.chosen_tokens + 1), pairs.rejected / (pairs.rejected_tokens + 1)


def _misplaced(self: PreferenceLoss, pairs: room.PreferenceInputs, there_P: Tensor) -> None:
    self.reference.copy_(self.reference.roll(1))


@pytest.mark.parametrize(
    ("name", "where", "what", "fault"),
    [
        ("ipo", room.LOSSES, "ipo", _of_sums),
        ("dpo", room.LOSSES, "dpo", _swapped),
        ("dpo", None, "PreferenceLoss", _MeanOfMeans),
        ("simpo", None, "PairRows", _OneMore),
        ("orpo", room.PreferenceInputs, "means", property(_without_end)),
        ("dpo", PreferenceLoss, "_add_to_totals", _misplaced),
        ("kto", room.LOSSES, "kto", _attached),
        ("kto", room.LOSSES, "kto", _all_good),
        ("kto", PreferenceLoss, "update_of", _of_nothing),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_planted_fault_is_caught(
    name: str, where: object, what: str, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(where, dict):
        monkeypatch.setitem(where, what, replace(where[what], formula=fault))
    elif where is None:
        monkeypatch.setitem(globals(), what, fault)
    else:
        monkeypatch.setattr(where, what, fault)
    assert apart(name) > 1e-3


def compared(precision: str, adapters: bool, captured: str = "") -> tuple[Resident, PairRows]:
    """An engine that has taken the reference from the weights that it begins with."""
    layers = 1 if captured else 2  # the same lines for each layer of a graph, traced one by one
    rows, model = rows_of(pairs()), tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=layers)
    if adapters:
        adapt(model, Lora(rank=3, dropout=0.3, base="nf4", dora=True), seed=1)
    engine = Resident(
        model,
        loss=loss_of("dpo", rows),
        optim=AdamW(lr=1e-2),
        precision=Precision(precision),
        micro_batch=2,
    )
    if captured:
        assert engine.capture(window(rows), backend=captured) is None
    loss = engine.step.loss
    assert isinstance(loss, PreferenceLoss)
    loss.recording.fill_(True)
    evaluate(engine, rows, batch_rows=len(rows))
    loss.recording.fill_(False)
    loss.take_figures()
    return engine, rows


@pytest.mark.parametrize(("precision", "adapters"), pairwise(["fp32", "bf16"], [False, True]))
def test_the_first_loss_is_ln_2_to_the_bit(precision: str, adapters: bool) -> None:
    engine, rows = compared(precision, adapters)
    first = engine.evaluate(window(rows))
    assert float(first[0] / first[1]) == pytest.approx(math.log(2), rel=1e-15)
    assert engine.step.loss.take_figures()["margin"] == 0  # type: ignore[attr-defined]
    engine.accumulate(window(rows))
    engine.update()
    engine.evaluate(window(rows))
    assert engine.step.loss.take_figures()["margin"] != 0  # type: ignore[attr-defined]


def test_the_reference_of_adapters_is_the_base_in_the_same_bits() -> None:
    adapted, _ = compared("fp32", adapters=True)
    base = tiny_llama(vocab_size=VOCABULARY)
    # Other adapters, without magnitudes, which say nothing yet.
    adapt(base, Lora(rank=3, base="nf4"), seed=2)
    rows = rows_of(pairs())
    other = Resident(base, loss=loss_of("dpo", rows), micro_batch=2)
    other.step.loss.recording.fill_(True)  # type: ignore[attr-defined]
    evaluate(other, rows, batch_rows=len(rows))
    mine, theirs = (engine.step.loss.reference for engine in (adapted, other))  # type: ignore[attr-defined]
    assert torch.equal(mine, theirs) and bool((mine[1:] < 0).all())


@pytest.mark.slow  # by day the eager one is
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_captured_first_loss_is_ln_2(backend: str) -> None:
    engine, rows = compared("fp32", adapters=False, captured=backend)
    engine.accumulate(window(rows))
    assert float(engine.step.loss_sum / engine.step.count) == pytest.approx(math.log(2), rel=1e-7)
