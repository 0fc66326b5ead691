"""Run: pytest tests/evaluation/test_text.py"""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from batches import tiny_llama
from monograph.data.corpus import Corpus, corpus
from monograph.errors import UsageError
from monograph.evaluation import evaluate
from monograph.loss import TokenLoss
from monograph.resident import Resident


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder, draws = tmp_path_factory.mktemp("texts"), random.Random(0)
    for number in range(12):
        (folder / f"{number}.txt").write_text(
            "".join(draws.choice("abcdé \n") for _ in range(draws.randint(9, 90)))
        )
    return corpus(
        folder, tokenizer="bytes", sequence_length=16, held_out=0.4, cache=folder / "cache"
    )


class Uniform:
    """Every token is as likely as any other: the scores are known."""

    def evaluate(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        count = (batch["targets"] != -100).sum()
        return count * math.log(259), count


def engine() -> Resident:
    return Resident(tiny_llama(torch.float64, vocab_size=259))


def test_a_uniform_model_has_the_known_scores(text: Corpus) -> None:
    rows = text.held_out
    result = evaluate(Uniform(), rows)
    assert result.loss == pytest.approx(math.log(259)) and result.perplexity == pytest.approx(259)
    assert (result.tokens, result.bytes) == (rows.tokens, rows.bytes)
    assert result.bits_per_byte == pytest.approx(math.log2(259) * rows.tokens / rows.bytes)


def test_bytes_are_those_of_the_text(text: Corpus) -> None:
    assert evaluate(Uniform(), text.held_out).bytes == sum(
        len(document) for document in text.held_out.texts()
    )


@pytest.mark.parametrize("batch_rows", [1, 3, 64])
def test_how_many_rows_at_once_changes_nothing(text: Corpus, batch_rows: int) -> None:
    scored, once = engine(), evaluate(engine(), text.held_out, batch_rows=16)
    other = evaluate(scored, text.held_out, batch_rows=batch_rows)
    assert other.loss == pytest.approx(once.loss, rel=1e-12) and other[3:] == once[3:]


def test_it_is_the_mean_over_rows_one_by_one(text: Corpus) -> None:
    scored, rows = engine(), text.held_out
    sums = [
        scored.evaluate({k: torch.from_numpy(v)[None] for k, v in rows.row(i).items()})
        for i in range(len(rows))
    ]
    assert evaluate(scored, rows).loss == pytest.approx(
        float(sum(s[0] for s in sums)) / rows.tokens, rel=1e-12
    )


def test_a_limit_scores_that_many_rows(text: Corpus) -> None:
    rows = text.held_out
    result = evaluate(Uniform(), rows, limit=3)
    assert (result.tokens, result.bytes) == rows.count_targets(
        3
    ) and 0 < result.tokens < rows.tokens
    assert evaluate(Uniform(), rows, limit=10**6) == evaluate(Uniform(), rows)


def test_dropout_is_off_and_comes_back_on(text: Corpus) -> None:
    scored = engine()
    scored.model.model.norm = torch.nn.Sequential(scored.model.model.norm, torch.nn.Dropout(0.5))
    assert evaluate(scored, text.held_out) == evaluate(scored, text.held_out)
    assert scored.model.training


def test_a_loss_of_another_kind_has_no_bits_per_byte(text: Corpus) -> None:
    class Sequences(TokenLoss):
        def __call__(
            self, model: torch.nn.Module, batch: dict[str, torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return super().__call__(model, batch)[0], torch.tensor(len(batch["tokens"]))

    result = evaluate(Resident(tiny_llama(vocab_size=259), loss=Sequences()), text.held_out)
    assert result.bits_per_byte is None and result.loss > 0


def test_a_hopeless_model_has_a_perplexity_all_the_same(text: Corpus) -> None:
    class Hopeless(Uniform):
        def evaluate(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            total, count = super().evaluate(batch)
            return total * 1e6, count

    assert math.isfinite(evaluate(Hopeless(), text.held_out).perplexity)


def test_nothing_held_out_is_said(text: Corpus, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 40)
    none = corpus(
        tmp_path / "a.txt",
        tokenizer="bytes",
        sequence_length=16,
        held_out=0,
        cache=tmp_path / "cache",
    )
    with pytest.raises(UsageError, match="nothing to evaluate on"):
        evaluate(Uniform(), none.held_out)
