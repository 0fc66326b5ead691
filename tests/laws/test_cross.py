# Run: pytest tests/laws/test_cross.py    (all combinations: -m slow)
"""Laws 1, 2, 3, 9 and 10 where precision, recomputation, compile scope and accumulation meet.

By day every choice of what runs eagerly is there once; at night pairs meet, and then every
combination, of two layers.
"""

from __future__ import annotations

import pytest
import torch

from batches import packed, tiny_llama
from laws.together import LAYERS, ROWS, by_day, check, cross, pairs, pairwise, separate_gradient
from monograph.graph.precision import Precision
from monograph.optim import AdamW
from monograph.resident import Resident

CROSS = cross(("fp32", "bf16", "fp16", "fp8", "fp8_head"))
# By day all that is eager: test_compiled_is_eager.py compiles one graph of the whole,
# test_scopes.py some by blocks.
BY_DAY = by_day([each for each in pairwise(CROSS) if each[2] == "none"])


def laws_hold(precision, policy, scope, split, layers=2):
    # A head in fp8 needs a vocabulary that is a multiple of 16.
    sizes = {"num_hidden_layers": layers, "vocab_size": 64}

    def made(policy, split):
        return Resident(
            tiny_llama(**sizes), optim=AdamW(lr=1e-2), clip=0.5,
            precision=Precision(precision), remat=policy, micro_batch=split,
        )  # fmt: skip

    exact = tiny_llama(torch.float64, **sizes)
    check(made, separate_gradient(exact, exact.lm_head.weight, packed(ROWS)), policy, scope, split)


@pytest.mark.parametrize(("precision", "policy", "scope", "split"), BY_DAY)
def test_every_pair(precision, policy, scope, split):
    laws_hold(precision, policy, scope, split, LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "policy", "scope", "split"), CROSS)
def test_every_combination(precision, policy, scope, split):
    laws_hold(precision, policy, scope, split)


def test_the_pairs_are_all_there():
    chosen = pairwise(CROSS)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, CROSS)) and len(chosen) <= 30
