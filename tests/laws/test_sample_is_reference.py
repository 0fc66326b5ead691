"""Run: pytest tests/laws/test_sample_is_reference.py (law 7: the sampler draws what a float64 reference says)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batches import tiny_llama
from monograph.data.tokenizer import Tokenizer
from monograph.decode import Sampling, generate
from monograph.decode.sample import filtered, row_generators, sample

VOCABULARY, DRAWS = 12, 20_000
CHOICES = [(1.0, None), (0.5, None), (2.0, 5), (0.8, 1), (1.0, 3), (1e-3, 4), (1.0, 12), (0.7, 99)]


def reference(logits_V: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Probabilities by the definition: sort, keep the k likeliest, divide, softmax; in float64."""
    logits_V = logits_V.double()
    if top_k is not None:
        kept = logits_V.sort(descending=True).indices[:top_k]
        logits_V = torch.full_like(logits_V, -torch.inf).index_copy(0, kept, logits_V[kept])
    return torch.softmax(logits_V / temperature, 0)


def some_logits(seed: int, rows: int = 1) -> Tensor:
    return 2 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("temperature", "top_k"), CHOICES)
def test_support_and_probabilities(temperature: float, top_k: int | None) -> None:
    for seed in range(20):
        logits_1V = some_logits(seed)
        expected = reference(logits_1V[0], temperature, top_k)
        actual = torch.softmax(filtered(logits_1V, Sampling(temperature, top_k))[0].double(), 0)
        assert torch.equal(actual > 0, expected > 0) or temperature < 0.01
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("temperature", "top_k"), CHOICES)
def test_chi_square_of_the_draws(temperature: float, top_k: int | None) -> None:
    logits_1V, sampling = some_logits(3), Sampling(temperature, top_k, seed=11)
    drawn = sample(logits_1V.expand(DRAWS, -1), sampling, row_generators(sampling, DRAWS))
    expected = DRAWS * reference(logits_1V[0], temperature, top_k)
    counts = torch.bincount(drawn, minlength=VOCABULARY).double()
    assert not counts[expected == 0].any(), "outside the support"
    often = expected > 5
    statistic = ((counts - expected)[often].square() / expected[often]).sum()
    freedom = max(1, int(often.sum()) - 1)
    assert float(torch.special.gammaincc(torch.tensor(freedom / 2.0), statistic / 2)) > 1e-3


def test_a_wrong_sampler_would_be_noticed() -> None:
    """The chi-square has the power to see a temperature that is 5 % off."""
    logits_1V, sampling = some_logits(3), Sampling(1.05, None, seed=11)
    drawn = sample(logits_1V.expand(DRAWS, -1), sampling, row_generators(sampling, DRAWS))
    expected = DRAWS * reference(logits_1V[0], 1.0, None)
    counts = torch.bincount(drawn, minlength=VOCABULARY).double()
    statistic = ((counts - expected).square() / expected).sum()
    assert float(torch.special.gammaincc(torch.tensor((VOCABULARY - 1) / 2), statistic / 2)) < 1e-3


def test_greedy_is_the_likeliest_and_the_first_among_equals() -> None:
    logits_BV = some_logits(5, rows=50)
    assert torch.equal(sample(logits_BV, Sampling(0), []), logits_BV.argmax(-1))
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), Sampling(0), []).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits_BV, sampling = some_logits(6, rows=50), Sampling(temperature)
    assert torch.equal(sample(logits_BV, sampling, row_generators(sampling, 50)), logits_BV.argmax(-1))


def test_a_row_s_draws_do_not_depend_on_its_batch() -> None:
    logits_BV, sampling = some_logits(7, rows=9), Sampling(0.9, 6, seed=4)
    together = sample(logits_BV, sampling, row_generators(sampling, 9))
    for row in range(9):
        alone = sample(logits_BV[row : row + 1], sampling, row_generators(sampling, 9)[row : row + 1])
        assert alone[0] == together[row]


def test_a_text_does_not_depend_on_its_batch() -> None:
    """In a model's own arithmetic: the first of n continuations, and prompts alone or one after another."""
    model, tokenizer, sampling = tiny_llama(vocab_size=259), Tokenizer.bytes(), Sampling(1.0, seed=5)

    def written(prompts: list[str], n: int) -> list[list[int]]:
        return [c.token_ids for c in generate(model, tokenizer, prompts, sampling, max_tokens=12, n=n)]

    assert written(["ab"], 5)[0] == written(["ab"], 1)[0]
    assert written(["ab", "c"], 1) == written(["ab"], 1) + written(["c"], 1)
    assert len({tuple(ids) for ids in written(["ab"], 5)}) == 5, "different rows, different draws"
