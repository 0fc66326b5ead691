"""Run: pytest tests/evaluation/test_comparison.py (scores by document, pairs by seed and by
document)
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from batches import tiny_llama
from monograph.data.corpus import Corpus, corpus
from monograph.ensemble.knobs import Knobs, grid
from monograph.errors import UsageError
from monograph.evaluation import compare, evaluate
from monograph.evaluation import text as scoring
from monograph.evaluation.choices import ChoiceMarks
from monograph.evaluation.comparison import compare_answers
from monograph.evaluation.significance import mean
from monograph.evaluation.text import Evaluates, Scores, by_document, difference, evaluate_members
from monograph.resident import Resident


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return made(tmp_path_factory.mktemp("texts"), "bytes")


def made(folder: Path, tokenizer: str, **how: object) -> Corpus:
    draws, texts = random.Random(0), folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(24):
        words = [draws.choice(["ab", "cdé", "efg\n"]) for _ in range(draws.randint(4, 60))]
        (texts / f"{number}.txt").write_text(" ".join(words))
    settings = {"sequence_length": 16, "held_out": 0.5, "cache": folder / "cache"} | how
    return corpus(texts, tokenizer=tokenizer, **settings)  # type: ignore[arg-type]


class Members:
    """Models that give every target the same number of nats, each its own; member by member, known
    in advance.
    """

    def __init__(self, nats: Sequence[float], knobs: Sequence[Knobs] = (), counts: int = 1):
        self.nats_N, self.knobs, self.counts = (
            torch.tensor(nats, dtype=torch.float64),
            tuple(knobs),
            counts,
        )

    def evaluate(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        count = (batch["targets"] != -100).sum() * self.counts
        return count * self.nats_N, count.expand(len(self.nats_N))


class Alone(Members):
    def evaluate(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = super().evaluate(batch)
        return total[0], count[0]


def resident(seed: int) -> Resident:
    return Resident(tiny_llama(torch.float64, vocab_size=259, seed=seed))


def held_bits(text: Corpus, nats: float) -> float:
    return nats / math.log(2) * text.held_out.tokens / text.held_out.bytes


# ---- by document ---------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_documents_add_up_to_the_whole(tmp_path: Path, packing: str) -> None:
    rows = made(tmp_path, "bytes", packing=packing).held_out
    scored = resident(3)
    scores, whole = by_document(scored, rows), evaluate(scored, rows)
    assert scores.bits_UN.shape == (rows.documents, 1) and scores.bytes_U.sum() == whole.bytes
    assert scores.bits_per_byte_N[0] == pytest.approx(whole.bits_per_byte, rel=1e-12)
    assert list(scores.bytes_U) == [len(document) for document in rows.texts()]


def test_a_documents_score_is_its_own(tmp_path: Path) -> None:
    """As if it were alone in its rows: scored packed and scored padded are the same (law 9)."""
    packed, padded = (
        made(tmp_path, "bytes", packing=packing).held_out for packing in ("packed", "padded")
    )
    one, other = (by_document(resident(3), rows).bits_UN for rows in (packed, padded))
    np.testing.assert_allclose(one, other, rtol=1e-11)


def test_units_of_several_documents(text: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    each = by_document(resident(1), text.held_out)
    monkeypatch.setattr(scoring, "MOST_UNITS", 4)
    units = by_document(resident(1), text.held_out)
    parts = np.array_split(np.arange(len(each.bytes_U)), 4)
    assert list(units.bytes_U) == [each.bytes_U[part].sum() for part in parts]
    np.testing.assert_allclose(
        units.bits_UN, [each.bits_UN[part].sum(0) for part in parts], rtol=1e-12
    )


def test_units_do_not_depend_on_the_tokenizer(tmp_path: Path) -> None:
    one, other = (
        made(tmp_path, "bytes").held_out,
        made(tmp_path, "bpe", vocab_size=300, sequence_length=8).held_out,
    )
    assert one.tokens > other.tokens
    assert list(by_document(Members([1.0]), one).bytes_U) == list(
        by_document(Members([1.0]), other).bytes_U
    )


def test_a_loss_that_counts_something_else_is_refused(text: Corpus) -> None:
    with pytest.raises(UsageError, match="says nothing about bytes"):
        by_document(Members([1.0], counts=2), text.held_out)
    with pytest.raises(UsageError, match="says nothing about bytes"):
        compare(Members([1.0, 2.0], grid(seed=[0, 1]), counts=2), text.held_out)


def test_the_error_of_a_difference_is_the_scatter_of_samples_of_documents() -> None:
    """The ratio estimator's standard error against the spread of d over many draws of as many
    documents.
    """
    draws = np.random.default_rng(0)

    def sample() -> tuple[Scores, Scores]:
        bytes_U = draws.integers(50, 400, 40)
        base_U = 2.0 * bytes_U + draws.normal(0, 30, 40)
        other_U = base_U - 0.1 * bytes_U + draws.normal(0, 10, 40)
        return Scores(other_U[:, None], bytes_U), Scores(base_U[:, None], bytes_U)

    found = [difference(*sample()) for _ in range(400)]
    spread = float(np.std([each.value for each in found], ddof=1))
    assert np.mean([each.value for each in found]) == pytest.approx(-0.1, abs=4 * spread / 20)
    assert np.mean([each.standard_error for each in found]) == pytest.approx(
        spread, rel=4 / math.sqrt(2 * 400)
    )


# ---- two engines ---------------------------------------------------------------------------------


def test_ensembles_are_paired_by_seed(text: Corpus) -> None:
    a = Members([3.0, 2.0, 2.5], grid(seed=[0, 1, 2]))
    b = Members([2.4, 1.9, 2.9, 7.0], [Knobs(seed=2), Knobs(seed=1), Knobs(seed=0), Knobs(seed=9)])
    found = compare(a, b, text.held_out)
    expected = mean([held_bits(text, nats) for nats in (2.9 - 3.0, 1.9 - 2.0, 2.4 - 2.5)])
    assert found.difference.value == pytest.approx(expected.value) and found.difference.n == 3
    assert found.difference.standard_error == pytest.approx(expected.standard_error, abs=1e-12)
    assert (
        found.paired_by == "seed" and found.verdict == "b is better" and "(3 seeds)" in str(found)
    )
    assert found.a == pytest.approx(held_bits(text, 2.5))


def test_single_models_are_paired_by_document(text: Corpus) -> None:
    a, b = resident(1), resident(2)
    found = compare(a, b, text.held_out)
    whole = [evaluate(each, text.held_out).bits_per_byte for each in (a, b)]
    assert [found.a, found.b] == pytest.approx(whole, rel=1e-12)
    assert found.difference.value == pytest.approx(found.b - found.a, rel=1e-9)
    assert found.paired_by == "document" and found.difference.n == text.held_out.documents
    assert found.parameters and "+0 % parameters" in str(found)
    same = compare(a, a, text.held_out)
    assert same.difference[:2] == (0.0, 0.0) and same.verdict == "the difference may be chance"


def test_one_seed_in_common_is_paired_by_document(text: Corpus) -> None:
    a, b = Members([3.0, 2.0], grid(seed=[0, 1])), Members([9.0, 2.2], grid(seed=[5, 1]))
    found = compare(a, b, text.held_out)
    assert found.paired_by == "document" and found.difference.value == pytest.approx(
        held_bits(text, 0.2)
    )
    assert compare(Alone([2.0]), Alone([2.2]), text.held_out).difference.value == pytest.approx(
        held_bits(text, 0.2)
    )


def test_members_that_differ_in_more_are_no_repetitions(text: Corpus) -> None:
    a = Members([3.0, 2.0], grid(lr=[1e-3, 1e-2], seed=[0]))
    with pytest.raises(UsageError, match="the members differ in lr too"):
        compare(a, Alone([2.0]), text.held_out)


# ---- one ensemble --------------------------------------------------------------------------------


def test_an_ensembles_settings(text: Corpus) -> None:
    engine = Members([3.0, 3.1, 2.0, 2.2], grid(lr=[1e-3, 1e-2], seed=[0, 1]))
    table = compare(engine, text.held_out, over="seed")
    assert table.best and table.best.member == 2 and table.best.setting.knobs == {"lr": 1e-2}
    assert table.values == tuple(
        pytest.approx(held_bits(text, nats)) for nats in (3.0, 3.1, 2.0, 2.2)
    )
    with pytest.raises(UsageError, match="is for an ensemble"):
        compare(Alone([2.0]), text.held_out)


def test_a_member_at_a_time(text: Corpus) -> None:
    found = evaluate_members(Members([1.0, 2.0]), text.held_out)
    assert [each.loss for each in found] == pytest.approx([1.0, 2.0])
    several: Evaluates = Members([1.0, 2.0])
    with pytest.raises(UsageError, match="2 members"):
        evaluate(several, text.held_out)
    assert evaluate(Members([1.5]), text.held_out).loss == pytest.approx(1.5)


def test_answers_are_paired_by_question_or_by_seed() -> None:
    def answers(*right: int) -> list[ChoiceMarks]:
        return [ChoiceMarks(bool(each), False, False) for each in right]

    found = compare_answers({0: answers(0, 0, 1, 0)}, {0: answers(1, 0, 1, 1)})
    assert (found.a, found.b, found.paired_by, found.difference.n) == (0.25, 0.75, "question", 4)
    assert found.difference.value == 0.5 and found.difference.standard_error == pytest.approx(
        math.sqrt(1 / 12)
    )
    assert found.verdict == "the difference may be chance" and "acc (4 questions)" in str(found)
    one = {seed: answers(0, seed % 2) for seed in range(4)}
    other = {seed: answers(1, seed % 2) for seed in (1, 2, 3)}
    found = compare_answers(one, other)
    assert (found.paired_by, found.difference) == (
        "seed",
        mean([0.5, 0.5, 0.5]),
    ) and found.verdict == "b is better"
    assert compare_answers(other, one).verdict == "a is better"
    assert replace(found, difference=mean([0.5])).verdict == "one seed cannot tell it from chance"
