"""Run: pytest tests/laws/test_cached_over_blocks.py (law 8 for texts of one to five blocks; through
Inductor: -m slow).

At each step the log-probabilities of all ids, reported in fp32, are within 1e-5 of those of a full
pass in fp64, for models in which every token that a layer sees matters: what a step does not read
of its cache, or reads wrongly, shows.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from batches import VOCABULARY
from far_sighted import decoded, far_sighted, reported_is_full, seen_at
from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Pace, Request
from monograph.decode.sampling import Sampling
from monograph.graph.capture import Backend, compiled
from monograph.laws.comparisons import LOG_PROBABILITY_BOUND
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION
from monograph.model.llama import Llama
from monograph.ops.attention import BLOCK

EVERY = Sampling(1.0, logprobs=VOCABULARY)
SMALL, CHUNK, BLOCKS = 16, 8, 5
SLOTS = SMALL * BLOCKS
LADDER = [1, 2, 4, 5]
FORM = CacheSizes(SLOTS, SMALL, longest_prompt=CHUNK)
WINDOW = 21  # more than a block, and not a whole number of them
SHAPES: dict[str, dict[str, Any]] = {
    "attention": {},
    "one head": {"num_key_value_heads": 1},
    "window": {"model_type": "mistral", "sliding_window": WINDOW},
    "window of a block": {"model_type": "mistral", "sliding_window": SMALL},
    "window and all": {"model_type": "qwen3", "sliding_window": WINDOW,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION)},
    "sinks": {
        "model_type": "gpt_oss", "num_experts": 3, "num_experts_per_tok": 2, "attention_bias": True,
        "sliding_window": WINDOW, "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
    },
    "no rotation": {
        "model_type": "smollm3", "sliding_window": WINDOW,
        "layer_types": (FULL_ATTENTION, SLIDING_ATTENTION), "no_rope_layers": (0, 1),
    },
    "hybrid": {
        "model_type": "qwen3_5_text", "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION), "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
    },
}  # fmt: skip


# The others by night: what they add is in the layers, which other tests see by day. Of both every
# second layer reads all that the cache holds, and the others a window or a state.
BY_DAY = "window and all", "hybrid"
OFTEN = [pytest.param(shape, marks=() if shape in BY_DAY else pytest.mark.slow) for shape in SHAPES]


@functools.cache
def model_of(shape: str, blocks: int = BLOCKS, block: int = SMALL, layers: int = 2) -> Llama:
    sizes = {"max_position_embeddings": blocks * block, "num_hidden_layers": layers} | SHAPES[shape]
    model = far_sighted(**sizes)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    return model


def machine_of(model: Llama, form: CacheSizes = FORM, rows: int = 3, **options: Any) -> Generator:
    return Generator(
        model, chain_of([EVERY]), rows=rows, slots=form, vocabulary=VOCABULARY, **options
    )


def tokens(count: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCABULARY) for _ in range(count))


def requests(lengths: Sequence[int], most: int = SLOTS) -> list[Request]:
    """Prompts of these lengths, each of which is continued by so many tokens, or to the end of the
    cache.
    """
    return [
        Request(tokens(length, seed), EVERY, most, seed=seed) for seed, length in enumerate(lengths)
    ]


def assert_law(machine: Generator, asked: Sequence[Request]) -> None:
    model = machine.reader.model
    for place, events in decoded(machine, asked).items():
        assert reported_is_full(model, asked[place], events), place


def sizes_of(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All numbers of blocks that a cache is read with from now on, in order."""
    first, sizes = cache.with_first_blocks, list[int]()

    def noted(blocks: int) -> KVCache:
        sizes.append(blocks)
        return first(blocks)

    monkeypatch.setattr(cache, "with_first_blocks", noted)
    return sizes


@pytest.mark.parametrize("shape", OFTEN)
def test_every_token_that_a_layer_may_see_moves_the_last_one_by_far_more_than_the_bound(
    shape: str,
) -> None:
    """Otherwise the other tests could not fail."""
    model, text = model_of(shape), tokens(SLOTS, 0)
    moved = seen_at(model, text, range(SLOTS - 1))
    windows = [model.config.window(layer) for layer in range(model.config.num_hidden_layers)]
    farthest = sum(SLOTS if window is None else window - 1 for window in windows)
    seen = moved[max(0, SLOTS - 1 - farthest) :]
    assert min(seen) > 100 * LOG_PROBABILITY_BOUND
    assert not any(moved[: len(moved) - len(seen)])


@pytest.mark.parametrize("shape", OFTEN)
def test_a_text_that_grows_through_all_blocks_alone(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that steps between two reads cross the borders.
    machine = machine_of(model_of(shape), pace=5)
    sizes = sizes_of(machine.cache, monkeypatch)
    assert_law(machine, requests([1]))
    assert sorted(set(sizes)) == machine.cache.block_counts == LADDER


# On both sides of the borders of chunks and blocks; a prompt's last token is read by its first
# step.
LENGTHS = [79, 66, 65, 47, 34, 33, 18, 17, 16, 9, 8, 1, 31, 63, 78]


@pytest.mark.parametrize("shape", OFTEN)
def test_a_prompt_of_each_length_alone(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another in a row, where each finds what longer ones have left; steps begun at once
    cross borders.
    """
    machine = machine_of(model_of(shape), rows=1, pace=3)
    sizes = sizes_of(machine.reader.cache, monkeypatch)
    for request in requests(LENGTHS, most=4):
        assert_law(machine, [request])
    assert sorted(set(sizes)) == machine.reader.cache.block_counts == LADDER


FORMS = {
    "prompts one by one": FORM,
    "prompts at once": FORM._replace(prompts_at_once=3),
    "last tokens read with the prompts": FORM._replace(prompts_at_once=3, pads_products=True),
    "chunks of a block": FORM._replace(longest_prompt=SMALL),
}


def in_turn(*axes: Sequence[Any]) -> list[Any]:
    """All combinations; by day each value of the longest axis with one of the others, in turn."""
    longest = max(map(len, axes))
    by_day = {tuple(axis[at % len(axis)] for axis in axes) for at in range(longest)}
    every = itertools.product(*axes)
    return [pytest.param(*each, marks=() if each in by_day else pytest.mark.slow) for each in every]


@pytest.mark.parametrize(
    ("shape", "form"), in_turn(["attention", "window and all", "hybrid", "sinks"], list(FORMS))
)
def test_prompts_in_a_crowd(shape: str, form: str) -> None:
    """Short ones beside long ones, in blocks of steps that end where they will."""
    machine = machine_of(model_of(shape), FORMS[form], pace=5)
    assert_law(machine, requests([1, 79, 17, 33, 9, 65, 2, 48, 70], most=11))


@pytest.mark.parametrize(
    ("shape", "ahead", "chunk"),
    in_turn(["hybrid", "window and all"], [False, True], [CHUNK, SMALL]),
)
def test_prompts_that_begin_alike_read_between_the_blocks_of_others(
    shape: str, ahead: bool, chunk: int
) -> None:
    """A row's first chunks are copied, which end inside a block, from a row that has gone on and
    beside others.
    """
    machine = machine_of(model_of(shape), FORM._replace(longest_prompt=chunk), pace=Pace(4, 2, 1))
    machine.reads_behind = ahead
    shared = tokens(60, 99)
    # Others come between, so that what is in common is no longer where the reader reads; 47 is one
    # below a border.
    begun = [(43, 7), (0, 61), (26, 3), (59, 2), (0, 66), (47, 9), (60, 9), (0, 44), (51, 14)]
    asked = [
        Request((*shared[:common], *tokens(own, seed)), EVERY, 6 + seed, seed=seed)
        for seed, (common, own) in enumerate(begun)
    ]
    for _ in range(2):
        assert_law(machine, asked)
    assert machine.reused >= 5 * SMALL


def test_blocks_of_the_usual_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `generate` and the endpoint have them, over five of them."""
    machine = machine_of(
        model_of("attention", block=BLOCK), CacheSizes(BLOCKS * BLOCK), pace=Pace(8, 2, 2)
    )
    assert machine.reader.chunk == BLOCK // 2
    sizes = [sizes_of(cache, monkeypatch) for cache in (machine.cache, machine.reader.cache)]
    assert (
        min(seen_at(machine.reader.model, tokens(BLOCKS * BLOCK, 0), range(0, 639, 71)))
        > 100 * LOG_PROBABILITY_BOUND
    )
    for length in (120, 250, 377, 508, 636):
        assert_law(machine, requests([length], most=12))
    assert [sorted(set(each)) for each in sizes] == [LADDER] * 2
    assert_law(machine, requests([3, 630, 127, 300], most=9))


def compiled_by(
    backend: Backend, shape: str, monkeypatch: pytest.MonkeyPatch, **sizes: int
) -> Generator:
    monkeypatch.setattr(
        "monograph.decode.generator.compile_function", functools.partial(compiled, backend=backend)
    )
    model = model_of(shape, **sizes)
    return machine_of(
        model, FORM._replace(per_row=model.config.max_position_embeddings), mode="compiled"
    )


@pytest.mark.slow
def test_a_traced_step_reads_the_next_block_too(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = compiled_by("aot_eager", "window", monkeypatch, blocks=2, layers=1)
    assert_law(machine, requests([1]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = compiled_by("inductor", shape, monkeypatch)
    lengths = [1, 13, 17, 29, 33, 45, 49, 61, 65, 76]
    for request in requests(lengths, most=4):
        assert_law(machine, [request])
    assert_law(machine, requests(lengths, most=3))
