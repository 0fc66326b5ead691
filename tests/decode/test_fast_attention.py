"""Run: pytest tests/decode/test_fast_attention.py (needs a CUDA device)

With its kernels a cache gives and holds what it does without.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batches import tiny_config, tiny_llama
from monograph.decode.cache import KVCache
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.laws.comparisons import error_within
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION
from monograph.model.llama import Llama

pytestmark = pytest.mark.gpu
SHAPE = {
    "vocab_size": 259,
    "max_position_embeddings": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# Families that the kernels of a whole step cannot compute.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 40, "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION)},
    "gpt_oss": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "sliding_window": 40,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
    },
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2},
    "olmo2": {},
}
PROMPTS = ((5, 6, 7) * 50, (5, 6, 7), tuple(range(9, 140)))


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Llama:
    return tiny_llama(**SHAPE, model_type=family, **FAMILIES[family]).cuda().to(dtype)


def written(model: Llama, **options: Any) -> list[tuple[int, ...]]:
    machine = Generator(
        model,
        chain_of([Sampling(0.9)]),
        rows=3,
        slots=300,
        vocabulary=259,
        **{"mode": "captured", "pace": 8} | options,
    )
    numbers = [
        machine.submit(Request(prompt, Sampling(0.9, seed=seed), 10, ()))
        for seed, prompt in enumerate(PROMPTS)
    ]
    texts = dict.fromkeys(numbers, ())
    for event in machine.run():
        texts[event.number] += tuple(event.token_ids)
    return [texts[number] for number in numbers]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_writes_what_it_writes_without_kernels(family: str) -> None:
    ours, reference = (written(model_of(family), impl=impl) for impl in ("auto", "reference"))
    same = sum(a == b for a, b in zip(ours, reference, strict=True))
    assert same >= 2, "one near tie may part two ways to compute"


def attended(
    cache: KVCache, dtype: torch.dtype, with_kernels: bool, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """The attention of a chunk of 40 and of the two positions after it; what the cache then holds."""
    from monograph.decode.fast_attention import FastAttention

    generator = torch.Generator().manual_seed(0)
    if with_kernels:
        cache.kernels = FastAttention(3, 2, torch.device("cuda"))
    found = []
    for begin, end in ((0, 40), (40, 41), (41, 42)):
        heads = [
            torch.randn(3, count, end - begin, 32, generator=generator, dtype=torch.float64).to(
                cache.keys[0]
            )
            for count in (4, 2, 2)
        ]
        positions = torch.arange(begin, end, device="cuda").repeat(3, 1) + 100
        found.append(cache.with_first_blocks(2).attend(0, tuple(heads), positions, **options).cpu())  # type: ignore[arg-type]
    return torch.cat(found, 2), [cache.keys[0].cpu(), cache.values[0].cpu()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_steps_and_chunks_are_as_exact_as_without_kernels(
    dtype: torch.dtype, window: int | None, has_sinks: bool
) -> None:
    config = tiny_config(**SHAPE)

    def result(kind: torch.dtype, with_kernels: bool) -> tuple[Tensor, list[Tensor]]:
        cache = KVCache.allocate(config, 3, 300, kind, torch.device("cuda"))
        sink = torch.linspace(-1, 2, 4, dtype=kind, device="cuda") if has_sinks else None
        return attended(cache, kind, with_kernels, window=window, sink_H=sink)

    (ours, held), (naive, expected) = result(dtype, True), result(dtype, False)
    exact, _ = result(torch.float64, False)
    assert error_within(ours, naive, exact)
    assert all(torch.equal(a, b) for a, b in zip(held, expected, strict=True))


@pytest.mark.parametrize("head_dim", [16, 24, 256])
def test_heads_that_a_kernel_cannot_compute_are_left_to_torch(head_dim: int) -> None:
    """In fp32 a block of heads of 256 channels fits no card's shared memory."""
    from monograph.decode.fast_attention import FastAttention

    kernels = FastAttention(1, 2, torch.device("cuda"))
    cache = torch.zeros(1, 1, 2, 128, head_dim, device="cuda")
    heads = tuple(torch.zeros(1, count, 1, head_dim, device="cuda") for count in (4, 2, 2))
    position_1 = torch.zeros(1, dtype=torch.int64, device="cuda")
    assert kernels.step(heads, cache, cache, position_1, 1, None, None) is None  # type: ignore[arg-type]
    chunk = kernels.chunk(heads[0], cache, cache, position_1[:, None], None, None)
    assert (chunk is None) == (head_dim == 24)


def test_keys_in_another_dtype_than_the_caches_are_left_to_torch() -> None:
    """Autocast may compute a norm of keys in fp32."""
    from monograph.decode.fast_attention import FastAttention

    kernels = FastAttention(1, 2, torch.device("cuda"))
    cache = torch.zeros(1, 1, 2, 128, 32, device="cuda", dtype=torch.bfloat16)
    query, key, value = (
        torch.zeros(1, count, 1, 32, device="cuda", dtype=dtype)
        for count, dtype in ((4, torch.bfloat16), (2, torch.float32), (2, torch.bfloat16))
    )
    position_1 = torch.zeros(1, dtype=torch.int64, device="cuda")
    assert kernels.step((query, key, value), cache, cache, position_1, 1, None, None) is None
