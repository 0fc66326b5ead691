"""Run: pytest tests/evaluation/test_yardsticks.py (the array code against a plain dictionary
model).
"""

from __future__ import annotations

import gzip
import lzma
import math
import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monograph.evaluation.yardsticks import (
    kneser_ney_bits_per_byte,
    trigram_bits_per_byte,
    yardsticks,
)

# Few letters repeat contexts often; all bytes, 0 and 255 too, must pack without touching their
# neighbours
texts = st.one_of(
    st.text("ab", max_size=60).map(str.encode),
    st.lists(st.sampled_from([0, 1, 254, 255]), max_size=40).map(bytes),
)
PROSE = b"the cat sat on the mat; the dog sat on the log; the cat and the dog ran. " * 12


class DictionaryModel:
    """Interpolated modified Kneser-Ney, written from its definition: counts in dictionaries, one
    probability a call.
    """

    def __init__(self, train: bytes, order: int) -> None:
        self.order = min(order, len(train) - 1)
        self.counts: list[Counter[bytes]] = []
        self.continuations: list[dict[bytes, list[int]]] = []
        self.discounts: list[list[float]] = []
        for k in range(self.order + 1):
            longer = {train[i : i + k + 2] for i in range(len(train) - k - 1)}
            highest = Counter(train[i : i + k + 1] for i in range(len(train) - k))
            counts = highest if k == self.order else Counter(gram[1:] for gram in longer)
            following: dict[bytes, list[int]] = defaultdict(list)
            for gram, count in counts.items():
                following[gram[:-1]].append(count)
            self.counts.append(counts)
            self.continuations.append(following)
            self.discounts.append(self.discounts_of(counts))

    @staticmethod
    def discounts_of(counts: Counter[bytes]) -> list[float]:
        n = [sum(count == i for count in counts.values()) for i in range(5)]
        fallback = (n[1] + 1) / (n[1] + 2 * n[2] + 2)
        discounts = [0.0]
        for i in (1, 2, 3):
            defined = n[i] > 0 and n[1] > 0
            value = i - (i + 1) * n[1] / (n[1] + 2 * n[2]) * n[i + 1] / n[i] if defined else 0.0
            discounts.append(value if 0 < value < i else fallback)
        return discounts

    def probability(self, history: bytes, byte: int) -> float:
        p = 1 / 256
        for k in range(min(self.order, len(history)) + 1):
            context = history[len(history) - k :]
            following = self.continuations[k].get(context)
            if following is None:
                continue
            discount = self.discounts[k]
            own = self.counts[k].get(context + bytes([byte]), 0)
            kept = own - discount[min(own, 3)] if own else 0.0
            p = (kept + sum(discount[min(count, 3)] for count in following) * p) / sum(following)
        return p

    def bits_per_byte(self, text: bytes) -> float:
        return -sum(
            math.log2(self.probability(text[:i], byte)) for i, byte in enumerate(text)
        ) / len(text)


@settings(max_examples=150)
@given(texts, texts.filter(len), st.integers(0, 7))
def test_array_model_equals_dictionary_model(train: bytes, held_out: bytes, order: int) -> None:
    expected = DictionaryModel(train, order).bits_per_byte(held_out)
    assert kneser_ney_bits_per_byte(train, held_out, order) == pytest.approx(expected, rel=1e-12)


def test_array_model_equals_dictionary_model_on_prose() -> None:
    """Here counts of 1, 2, 3 and 4 all occur, so the discounts are the estimates and not their
    substitute.
    """
    shuffled = random.Random(0).sample(PROSE.split(b" "), k=len(PROSE.split(b" ")))
    train, held_out = PROSE[:500] + b" ".join(shuffled), PROSE[300:600].upper() + PROSE[:200]
    for order in (0, 3, 6):
        expected = DictionaryModel(train, order).bits_per_byte(held_out)
        assert kneser_ney_bits_per_byte(train, held_out, order) == pytest.approx(
            expected, rel=1e-12
        )


@pytest.mark.parametrize("context", [b"the ca", b"t", b"zzzzzz", b"\x00\xff"])
def test_probabilities_of_the_next_byte_sum_to_one(context: bytes) -> None:
    before = kneser_ney_bits_per_byte(PROSE, context, 6) * len(context)
    total = 0.0
    for byte in range(256):
        text = context + bytes([byte])
        total += 2 ** -(kneser_ney_bits_per_byte(PROSE, text, 6) * len(text) - before)
    assert total == pytest.approx(1, abs=1e-9)


@settings(max_examples=25)
@given(texts, texts.filter(len))
def test_trigram_equals_its_definition(train: bytes, held_out: bytes) -> None:
    grams = Counter(train[i : i + 3] for i in range(len(train) - 2))
    pairs: Counter[bytes] = Counter()
    for gram, count in grams.items():
        pairs[gram[:2]] += count
    bits = 0.0
    for i, byte in enumerate(held_out):
        context = held_out[i - 2 : i] if i >= 2 else None
        bits += (
            8
            if context is None
            else -math.log2((grams[context + bytes([byte])] + 1) / (pairs[context] + 256))
        )
    assert trigram_bits_per_byte(train, held_out) == pytest.approx(bits / len(held_out), rel=1e-12)


def test_compressors_are_counted_on_the_held_out_text_alone() -> None:
    held_out = PROSE[:400]
    found = yardsticks(PROSE, held_out)
    assert found["gzip -9"] == 8 * len(gzip.compress(held_out, 9)) / 400
    assert found["xz -9"] == 8 * len(lzma.compress(held_out, preset=9)) / 400
    assert yardsticks(PROSE * 2, held_out)["gzip -9"] == found["gzip -9"]


def test_more_context_and_text_of_the_same_kind_help() -> None:
    words = random.Random(1).choices(PROSE.split(), k=3000)
    train, held_out = b" ".join(words[:2500]), b" ".join(words[2500:])
    order_0, order_6 = (kneser_ney_bits_per_byte(train, held_out, order) for order in (0, 6))
    assert order_6 < trigram_bits_per_byte(train, held_out) < order_0 < 8
    assert order_6 < kneser_ney_bits_per_byte(bytes(range(256)) * 50, held_out, 6)


def test_nothing_to_learn_from_leaves_eight_bits() -> None:
    assert kneser_ney_bits_per_byte(b"", b"abc", 6) == trigram_bits_per_byte(b"", b"abc") == 8


def test_progress_goes_from_none_to_all() -> None:
    calls: list[tuple[str, int, int | None]] = []
    yardsticks(PROSE, PROSE[:100], progress=lambda *call: calls.append(call))
    assert calls == [("yardsticks", done, 4) for done in range(5)]
