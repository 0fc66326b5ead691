"""Run: python tests/pretended_gpu/environment.py run 90 python -m pytest tests/pretended_gpu/test_machine_code.py

What is compiled for a GPU compiles down to this card's machine code.
"""

from __future__ import annotations

import torch

from monograph.decode.reproducible import gumbel_noise


def test_noise_for_a_range_of_tokens_is_compiled() -> None:
    """A product of a range's index and one of Philox's constants does not fit the 32 bits of an index."""
    seed_B = torch.zeros(2, dtype=torch.int64, device="cuda")
    noise = torch.compile(lambda seed, position: gumbel_noise(seed, position, 1000), fullgraph=True)
    assert noise(seed_B, seed_B).shape == (2, 1000)
