"""Run: pytest tests/decode/test_reproducible.py    (every uniform that a word can give: -m slow)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monograph.decode.reproducible import (
    UNIT,
    argmax_id,
    argmax_with_noise,
    continuation_seed,
    gumbel,
    gumbel_noise,
    gumbel_noise_of,
    log,
    log1p_negative,
    row_uniform,
    uniform,
    weight,
)
from monograph.laws.comparisons import error_within
from monograph.ops.philox import philox

ONES, PI = 0xFFFFFFFF, "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0"


# Random123 (D. E. Shaw Research), tests/kat_vectors, philox4x32 10: counter, key, result.
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0] * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([ONES] * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ([int(word, 16) for word in PI.split()], "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_generator_s_known_answers(given: list[int], expected: str) -> None:
    words = [torch.tensor([word]) for word in given]
    found = philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert " ".join(f"{int(word):08x}" for word in found) == expected


def test_noise_depends_on_seed_position_and_id_and_on_nothing_else() -> None:
    seeds, positions = [0, 1, 2**40 + 5, 2**63 - 1], [0, 1, 5, 2**33 + 2]
    noise_BV = gumbel_noise(torch.tensor(seeds), torch.tensor(positions), 1001)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in (0, 1, 2, 3, 4, 998, 1000):
            counter = [
                torch.tensor([word])
                for word in (token // 4, position % 2**32, position // 2**32, 0)
            ]
            key = (torch.tensor([seed % 2**32]), torch.tensor([seed // 2**32]))
            word = philox((counter[0], counter[1], counter[2], counter[3]), key)[token % 4]
            assert gumbel(word)[0] == noise_BV[row, token]
    assert torch.equal(
        gumbel_noise(torch.tensor(seeds[1:2]), torch.tensor(positions[1:2]), 77)[0],
        noise_BV[1, :77],
    )
    ids_BN = torch.tensor([[0, 1000, 5, 5, 2, 3]]).repeat(4, 1)
    own_BN = gumbel_noise_of(torch.tensor(seeds), torch.tensor(positions), ids_BN)
    assert torch.equal(own_BN, noise_BV.gather(-1, ids_BN)), "of some ids the same as of all"
    others = [
        gumbel_noise(torch.tensor([s]), torch.tensor([p]), 1001) for s in (0, 2**32) for p in (0, 1)
    ]
    assert len(set(torch.cat(others).flatten().tolist())) > 3990, (
        "another seed or position, other numbers"
    )


def test_a_row_s_own_number_is_apart_from_its_noise() -> None:
    seed_B = torch.arange(100)
    own_B, noise_B = row_uniform(seed_B, seed_B), gumbel_noise(seed_B, seed_B, 1)[:, 0]
    assert (
        len(set(own_B.tolist())) == 100
        and abs(float(torch.corrcoef(torch.stack([own_B, noise_B]))[0, 1])) < 0.4
    )


def test_seeds_of_continuations_do_not_meet() -> None:
    seeds = {continuation_seed(seed, index) for seed in (0, 1, 2**62) for index in range(50)}
    assert len(seeds) == 150 and all(0 <= seed < 2**63 for seed in seeds)


def checked(words: Tensor) -> tuple[float, float]:
    """The least and the greatest noise of these words, all in (0, 1) and finite, falling as the
    word rises.
    """
    u, g = uniform(words), gumbel(words)
    assert ((u > 0) & (u < 1)).all() and g.isfinite().all()
    order = words.argsort()
    # Neighbours may be level or an ulp out of order where the logarithm's polynomials meet.
    assert (g[order].diff() <= 4e-6).all()
    return float(g.min()), float(g.max())


def test_the_ends_of_the_uniform_are_finite() -> None:
    ends = torch.arange(2**17)
    low, high = checked(torch.cat([ends, 2**32 - 1 - ends, torch.arange(0, 2**32, 2**13)]))
    # -ln(24 ln 2) and -ln(2^-33)
    assert low == pytest.approx(-2.8115, abs=1e-3) and high == pytest.approx(22.8739, abs=1e-3)


@pytest.mark.slow
def test_every_word_gives_finite_noise() -> None:
    """All 2^32 words: they round to these fp32 numbers, on which the transform alone depends."""
    checked(torch.arange(2**24))
    for octave in range(24, 32):
        checked(2**octave + torch.arange(2**23) * 2 ** (octave - 23))
    checked(torch.tensor([2**32 - 1]))


def test_logarithms_and_weights_are_as_exact_as_the_library_s() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.exp(175 * torch.rand(10_000, generator=generator) - 87)  # normal fp32 numbers
    assert error_within(log(x), x.log(), x.double().log())
    u = torch.cat([torch.rand(10_000, generator=generator) * scale for scale in (1.0, 1e-3, 1e-9)])
    u = u.clamp(max=1 - 2**-24)
    relative = log1p_negative(u).double() / torch.log1p(-u.double())
    library = torch.log1p(-u).double() / torch.log1p(-u.double())
    assert error_within(relative.float(), library.float(), torch.ones_like(relative)), (
        "relative, near 0 as elsewhere"
    )
    y = -20 * torch.rand(10_000, generator=generator)
    # A weight is cut off to a multiple of 2^-43, which next to exp(-20) is 2^-14 of an fp32's last
    # place.
    assert error_within((weight(y).double() / UNIT).float(), y.exp(), y.double().exp())
    assert weight(torch.tensor([0.0, -torch.inf, -1e30, -40.0])).tolist() == [UNIT, 0, 0, 0]


@pytest.mark.parametrize("function", [gumbel, lambda words: weight(-uniform(words) * 30)])
def test_bits_do_not_depend_on_the_place_in_a_tensor(function) -> None:
    words = torch.randint(2**32, (1003,), generator=torch.Generator().manual_seed(1))
    alone = torch.cat([function(words[i : i + 1]) for i in range(0, 1003, 17)])
    assert torch.equal(alone, function(words)[::17])


@pytest.mark.parametrize("vocabulary", [1, 3, 259, 5000])
def test_the_greatest_sum_is_that_of_all_the_noise(vocabulary: int) -> None:
    """Of scores that are even, far apart, level, or mostly forbidden."""
    torch.manual_seed(0)
    seed_B, position_B = torch.randint(0, 2**62, (400,)), torch.arange(400)
    even_BV = torch.randn(400, vocabulary)
    forbidden_BV = torch.where(torch.rand(400, vocabulary) < 0.9, -torch.inf, even_BV)
    forbidden_BV[:, -1] = -20.0
    noise_BV = gumbel_noise(seed_B, position_B, vocabulary)
    for scores_BV in (
        even_BV,
        1e4 * even_BV,
        even_BV.round(),
        torch.zeros_like(even_BV),
        forbidden_BV,
    ):
        assert torch.equal(
            argmax_with_noise(scores_BV, seed_B, position_B), (scores_BV + noise_BV).argmax(-1)
        )


def test_of_equal_values_the_lowest_id_is_the_greatest() -> None:
    values_BN, ids_BN = (
        torch.tensor([[1.0, 2.0, 2.0], [3.0, 0.0, 3.0]]),
        torch.tensor([[0, 9, 4], [7, 1, 8]]),
    )
    assert argmax_id(values_BN, ids_BN).tolist() == [4, 7]
