"""Run: pytest tests/session/test_random_state.py"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from monograph.errors import InputRefused
from monograph.session.random_state import random_state, restore_random, seed_all

CPU = torch.device("cpu")


def draws() -> list[float]:
    normal = np.random.normal(size=3)  # keeps one number back
    return [random.random(), random.gauss(0, 1), *normal, np.random.rand(), *torch.rand(3).tolist()]


def test_a_seed_is_a_beginning() -> None:
    seed_all(5)
    first = draws()
    seed_all(5)
    assert draws() == first
    seed_all(2**63 - 1)
    assert draws() != first


def test_another_generator_of_numpy_is_refused_in_words() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.raises(
            InputRefused, match=r"numpy\.random uses PCG64, .*: remove set_bit_generator"
        ):
            random_state(CPU)
    finally:
        np.random.set_bit_generator(own)


@pytest.mark.parametrize("before", range(4))
def test_it_goes_on_where_it_stood(before: int) -> None:
    seed_all(1)
    for _ in range(before):
        draws()
    saved = json.loads(json.dumps(random_state(CPU)))
    expected = draws()
    seed_all(99)
    restore_random(saved, CPU)
    assert draws() == expected


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    saved = json.loads(json.dumps(random_state(device)))
    expected = torch.rand(5, device=device)
    torch.rand(7, device=device)
    restore_random(saved, device)
    assert torch.equal(torch.rand(5, device=device), expected)
