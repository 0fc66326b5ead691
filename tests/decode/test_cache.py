"""Run: pytest tests/decode/test_cache.py (what a step reads of one:
tests/laws/test_cached_over_blocks.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from batches import tiny_config, tiny_llama
from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.prompt_reader import (
    MAX_KNOWN_RECURRENCES,
    Ids,
    PromptReader,
    PromptToRead,
    ReuseKey,
)
from monograph.model.config import LlamaConfig
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION

CPU = torch.device("cpu")
PLAIN = tiny_config()
HYBRID = tiny_config(
    model_type="qwen3_5_text",
    layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
    linear_num_value_heads=4,
    linear_num_key_heads=2,
)


def cache_of(config: LlamaConfig, rows: int, slots: int, block: int = 8, seed: int = 0) -> KVCache:
    """A cache that is full of numbers."""
    cache, generator = (
        KVCache.allocate(config, rows, slots, torch.float32, CPU, block),
        torch.Generator(),
    )
    generator.manual_seed(seed)
    for tensor in all_of(cache):
        tensor.copy_(torch.randint(1, 1000, tensor.shape, generator=generator))
    return cache


def all_of(cache: KVCache) -> list[Tensor]:
    return [*cache.keys, *cache.values, *cache.recurrence_tensors()]


@pytest.mark.parametrize("blocks", range(1, 18))
def test_what_is_read_is_the_least_size_that_holds_the_slots(blocks: int) -> None:
    cache = KVCache.allocate(PLAIN, 1, 8 * blocks - 3, torch.float32, torch.device("meta"), 8)
    powers = [1 << power for power in range(6)]
    assert cache.block == 8 and len(cache.keys[0]) == blocks
    assert cache.block_counts == [*(size for size in powers if size < blocks), blocks]
    for slots in range(1, 8 * blocks + 1):
        assert cache.block_count_for(slots) == next(
            size for size in cache.block_counts if 8 * size >= slots
        )


@pytest.mark.parametrize("config", [PLAIN, HYBRID], ids=["attention", "hybrid"])
def test_memory_is_zero_and_that_of_so_many_rows(config: LlamaConfig) -> None:
    cache = KVCache.allocate(config, 3, 20, torch.bfloat16, CPU, 8)
    assert not any(tensor.any() for tensor in all_of(cache))
    assert sum(tensor.nbytes for tensor in all_of(cache)) == 3 * KVCache.bytes_per_row(
        config, 20, torch.bfloat16, 8
    )
    layers = [not config.layer_type(layer).attends for layer in range(config.num_hidden_layers)]
    heads = [0 if linear else config.num_key_value_heads for linear in layers]
    assert [list(keys.shape) for keys in cache.keys] == [
        [3, 3, each, 8, config.head_dim] for each in heads
    ]
    assert [keys.shape for keys in cache.keys] == [values.shape for values in cache.values]
    assert [*cache.recurrences] == [layer for layer, linear in enumerate(layers) if linear]
    for recurrence in cache.recurrences.values():
        assert recurrence[1].dtype == torch.float32, "a sum over all positions"


def test_a_look_at_fewer_blocks_is_into_the_same_memory() -> None:
    cache = cache_of(HYBRID, 2, 24)
    cache.pads_products = True
    look = cache.with_first_blocks(2)
    assert look.seen_blocks == 2 and look.pads_products and cache.seen_blocks is None
    assert all(one is other for one, other in zip(all_of(look), all_of(cache), strict=True))


@pytest.mark.parametrize("slots", [1, 8, 9, 16, 19, 24, 40])
def test_rows_are_copied_with_the_block_that_they_fill_in_part_and_nothing_else_is_touched(
    slots: int,
) -> None:
    to, source = cache_of(HYBRID, 4, 40), cache_of(HYBRID, 3, 40, seed=1)
    before, only_keys = [tensor.clone() for tensor in all_of(to)], cache_of(HYBRID, 4, 40)
    to.copy_rows([2, 0], source, [0, 1], slots)
    only_keys.copy_keys([2, 0], source, [0, 1], slots)
    blocks, keys = -(-slots // 8), 2 * len(to.keys)
    for place, (found, old, new) in enumerate(zip(all_of(to), before, all_of(source), strict=True)):
        expected = old.clone()
        for row, its_row in ((2, 0), (0, 1)):
            if place < keys:
                expected[:blocks, row] = new[:blocks, its_row]
            else:
                expected[row] = new[its_row]
        assert torch.equal(found, expected)
        assert torch.equal(all_of(only_keys)[place], expected if place < keys else old)


def test_a_cleared_row_is_zero_and_no_other() -> None:
    cache, before = cache_of(HYBRID, 3, 20), all_of(cache_of(HYBRID, 3, 20))
    cache.clear(1)
    for place, (found, old) in enumerate(zip(all_of(cache), before, strict=True)):
        axis = 1 if place < 2 * len(cache.keys) else 0
        assert not found.select(axis, 1).any()
        assert all(torch.equal(found.select(axis, row), old.select(axis, row)) for row in (0, 2))
    cache.clear(slice(None))
    assert not any(tensor.any() for tensor in all_of(cache))


def test_recurrences_begin_again_with_limits_of_the_first_rows() -> None:
    cache = cache_of(HYBRID, 3, 20)
    keys, [recurrence] = cache.keys[1].clone(), cache.recurrences.values()
    endless = int(recurrence.limit_B[2])
    cache.reset_recurrences([5, 7])
    assert recurrence.limit_B.tolist() == [5, 7, endless] and endless > 10**12
    assert not any(tensor.any() for tensor in cache.recurrence_tensors()) and torch.equal(
        cache.keys[1], keys
    )


def reader_of(
    rows: int = 1, slots: int = 256, *, whole: bool = False, **sizes: object
) -> PromptReader:
    model = tiny_llama(max_position_embeddings=slots, **sizes).eval()
    form = CacheSizes(slots, 16, prompts_at_once=rows, pads_products=whole)
    return PromptReader(model, form, 8, lambda function: function)


def test_a_prompt_that_is_held_is_not_read_again_for_its_owner() -> None:
    reader, ids = reader_of(), tuple(range(1, 30))

    def chooses(ids: Ids, owner: str) -> bool:
        return reader.choose_prompts([PromptToRead(ids, ReuseKey(owner))])

    assert chooses(ids, "a") and not reader.is_finished
    assert [
        reader.read_chunks(1),
        reader.read_chunks(2),
        reader.is_finished,
        reader.read_chunks(),
        reader.is_finished,
    ] == [
        1,
        2,
        False,
        1,
        True,
    ]
    assert not chooses(ids, "a") and not chooses((*ids[:-1], 60), "a")
    assert reader.is_finished, "the last token is read by the first step"
    assert chooses(ids, "b") and not reader.is_finished
    reader.forget()
    assert chooses(ids, "b") and not any(tensor.any() for tensor in all_of(reader.cache))


def test_prompts_are_read_with_those_that_follow_as_far_as_there_are_rows() -> None:
    reader = reader_of(3)
    first, second, third, fourth = (PromptToRead((token,) * (10 * token)) for token in (1, 2, 3, 4))
    assert reader.choose_prompts([first, first, second, second, third, fourth])
    assert reader.rows_of([second, first, third, first]) == [1, 0, 2, 0]
    assert reader.rows_of([second, fourth, first]) == [1], "up to the first that is not held"
    assert reader.read_chunks() == -(-(30 - 1) // 8), "chunks of the longest"


def test_prompts_that_may_not_share_keys_are_read_together_in_rows_of_their_own() -> None:
    reader, ids = reader_of(3), (1, 2, 3)
    prompts = [
        PromptToRead(ids, key) for key in (ReuseKey("a"), ReuseKey("b"), ReuseKey("a", 2, 7))
    ]
    assert reader.choose_prompts(prompts)
    assert reader.rows_of(prompts) == [0, 1, 2]
    assert reader._adapter_R.tolist() == [0, 0, 2]
    assert not reader.choose_prompts([prompts[2]])
    assert reader.choose_prompts([PromptToRead(ids, ReuseKey("a", 2, 8))]), "a slot's other write"
    assert reader._adapter_R.tolist() == [2, 0, 0]


def test_whole_prompts_leave_the_hidden_states_of_their_last_tokens() -> None:
    reader = reader_of(3, whole=True)
    prompts = [tuple(range(1, 1 + length)) for length in (1, 8, 13)]
    reader.choose_prompts(map(PromptToRead, prompts))
    reader.read_chunks()
    with torch.no_grad():
        last_RD = torch.stack([reader.model(torch.tensor([prompt]))[0, -1] for prompt in prompts])
    torch.testing.assert_close(reader.last_RD, last_RD, rtol=1e-5, atol=1e-6)


def test_the_recurrences_that_were_used_last_are_kept() -> None:
    types = {"model_type": "qwen3_5_text", "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION)}
    reader = reader_of(**types)

    def kept() -> list[Ids]:
        return [prompt.ids for prompt in reader._known_recurrences]

    prompts = [
        tuple(60 - token for token in range(17)),
        *((token,) * 18 for token in range(1, MAX_KNOWN_RECURRENCES // 2 + 1)),
    ]
    known = list(itertools.chain.from_iterable((prompt[:8], prompt[:16]) for prompt in prompts))
    for prompt in prompts[:-1]:
        reader.choose_prompts([PromptToRead(prompt)])
        reader.read_chunks()
    assert kept() == known[:MAX_KNOWN_RECURRENCES]
    reader.choose_prompts([PromptToRead(prompts[0])])
    assert reader.copy_first_chunks(reader.cache, 0, 16) == 16 and reader.is_finished
    assert kept() == [known[0], *known[2:MAX_KNOWN_RECURRENCES], known[1]], (
        "what was used comes last"
    )
    reader.choose_prompts([PromptToRead(prompts[-1])])
    reader.read_chunks()
    assert kept() == [*known[3:MAX_KNOWN_RECURRENCES], known[1], *known[MAX_KNOWN_RECURRENCES:]]


def test_only_what_is_known_to_be_the_same_is_skipped() -> None:
    reader, prompt = reader_of(), tuple(range(1, 40))
    source = cache_of(PLAIN, 2, 256, block=16)
    reader.choose_prompts([PromptToRead(prompt)])
    assert reader.copy_first_chunks(source, 1, 7) == 0 and reader._unread_chunks == [
        0,
        8,
        16,
        24,
        32,
    ]
    assert reader.copy_first_chunks(source, 1, 21) == 16 and reader._unread_chunks == [16, 24, 32]
    assert (
        torch.equal(reader.cache.keys[0][0, 0], source.keys[0][0, 1])
        and not reader.cache.keys[0][1:].any()
    )
