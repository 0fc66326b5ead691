"""Run: pytest tests/decode/test_on_a_gpu.py (needs a CUDA device)

Captured and replayed: the tokens of the eager step, and nothing but four bytes a row and step leave
the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapted import many_stored
from batches import tiny_llama
from far_sighted import decoded, far_sighted, reported_is_full, seen_at
from monograph.automata import constraint, stop_strings
from monograph.decode.adapter_bank import install
from monograph.decode.automaton_tables import AutomatonTables
from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.generator import Generator, Mode
from monograph.decode.knobs import chain_of
from monograph.decode.request import Pace, Request
from monograph.decode.sampling import Sampling
from monograph.graph.lora import Lora
from monograph.laws.comparisons import LOG_PROBABILITY_BOUND
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION
from monograph.model.llama import Llama
from monograph.ops.attention import MIN_BLOCK
from monograph.text.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu
TOKENIZER = Tokenizer.bytes()
FULL = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2}
PATTERN = constraint("regex", "[0-9a]{1000,1100}", TOKENIZER.pieces, [TOKENIZER.eos_id])
STOP = stop_strings(["b", "zz"], TOKENIZER.pieces)


def generator(**options: Any) -> Generator:
    model = tiny_llama(vocab_size=259, max_position_embeddings=1400).cuda()
    chain = chain_of([Sampling(**FULL)])
    return Generator(
        model, chain, rows=3, slots=1400, vocabulary=259, automata=[PATTERN, STOP], **options
    )


def written(machine: Generator) -> list[list[int]]:
    requests = [
        Request((5, 6, 7), Sampling(**FULL, seed=seed), 80, (1,), None, STOP) for seed in range(7)
    ]
    found: dict[int, list[int]] = {machine.submit(request): [] for request in requests}
    for event in machine.run():
        found[event.number] += event.token_ids
    return list(found.values())


@pytest.mark.parametrize("block", [1, 5, 16])
def test_replayed_blocks_write_what_single_steps_write(block: int) -> None:
    assert written(generator(mode="compiled", pace=block)) == written(
        generator(mode="compiled", pace=2)
    )


def test_eager_steps_write_alike() -> None:
    ours, eager = written(generator(mode="compiled")), written(generator())
    assert sum(a == b for a, b in zip(ours, eager, strict=True)) >= 6, (
        "one near tie may part two modes"
    )


def test_captured_steps_write_what_called_ones_write_with_nothing_left_to_capture() -> None:
    """As an endpoint decodes: several chains, automata that come and go, prompts read between
    blocks.
    """
    several = [chain_of([Sampling(1.0)]), chain_of([Sampling(1.0), Sampling(**FULL)])]

    def served(mode: Any) -> Generator:
        model = tiny_llama(vocab_size=259, max_position_embeddings=300).cuda()
        tables = AutomatonTables(259, torch.device("cuda"), automata=1)
        return Generator(
            model,
            several,
            rows=3,
            slots=300,
            vocabulary=259,
            automata=tables,
            pace=Pace(8, 2, 1),
            mode=mode,
        )

    def all_kinds(machine: Generator) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for seed in range(9):
            sampling = Sampling(**FULL, seed=seed) if seed % 3 == 0 else Sampling(1.0, seed=seed)
            prompt = (5, 6, 7) * (60 if seed % 2 else 1)
            found[
                machine.submit(
                    Request(prompt, sampling, 30, (1,), None, STOP if seed % 4 == 0 else None)
                )
            ] = []
        while machine.busy:
            for event in machine.advance():
                found[event.number] += event.token_ids
        return list(found.values())

    machine = served("captured")
    machine.warm_up()
    before = machine.replays.graph_count
    assert all_kinds(machine) == all_kinds(served("eager"))
    assert machine.replays.graph_count == before > 8 and machine.reused > 0


@pytest.mark.parametrize(
    "shape", ["attention", "window and all", "keys of earlier layers, experts beside"]
)
def test_captured_steps_over_one_to_five_blocks_have_a_full_passs_log_probabilities(
    shape: str,
) -> None:
    """Law 8 where each size of what is read is a graph of its own
    (tests/laws/test_cached_over_blocks.py).
    """
    longest, sampling = 5 * MIN_BLOCK, Sampling(1.0, logprobs=61)
    window = {
        "model_type": "qwen3",
        "sliding_window": 21,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
    }
    shared = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "sliding_window": 21,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION) * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 30.0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    sizes = {"window and all": window, "keys of earlier layers, experts beside": shared}
    model = far_sighted(max_position_embeddings=longest, **sizes.get(shape, {})).cuda()
    machine = Generator(
        model, chain_of([sampling]), rows=3, slots=CacheSizes(longest, MIN_BLOCK, longest_prompt=8), vocabulary=61,
        pace=Pace(4, 2, 1), mode="captured",
    )  # fmt: skip
    text = tuple((7 * at + at // 5) % 61 for at in range(longest))
    assert min(seen_at(model, text, range(0, longest - 1, 6))) > 100 * LOG_PROBABILITY_BOUND
    begun = [(0, 1), (0, 79), (43, 5), (0, 17), (43, 20), (59, 1), (0, 33)]
    asked = [
        Request((*text[:shared], *text[-own:]), sampling, 40, seed=own) for shared, own in begun
    ]
    alone = decoded(machine, asked[:1])
    for place, events in [*alone.items(), *decoded(machine, asked).items()]:
        assert reported_is_full(model, asked[place], events)
    assert (
        machine.cache.block_counts == [1, 2, 4, 5]
        and machine.replays.graph_count == 4
        and machine.reused > 0
    )


def test_a_thousand_steps_copy_four_bytes_a_row_and_step() -> None:
    machine = generator(mode="compiled", pace=50)

    def run() -> None:
        for seed in range(3):
            machine.submit(Request((5, 6), Sampling(**FULL, seed=seed), 1000, (1,), PATTERN, STOP))
        assert sum(len(event.token_ids) for event in machine.run()) == 3000

    run()  # captures
    replay, copies = machine.replays.run, list[Any]()

    def watched(times: int, *variant: Any) -> None:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profile:
            replay(times, *variant)
            torch.cuda.synchronize()
        copies.extend(
            event
            for event in profile.events()
            if "Memcpy" in event.name and "DtoD" not in event.name
        )

    machine.replays.run = watched  # type: ignore[method-assign]
    before = machine.outbox.bytes_out
    run()
    assert copies == [] and machine.outbox.bytes_out - before == 4 * 3 * 1000


def test_rows_with_their_own_adapters_are_replayed_and_read_what_is_in_their_slots_now() -> None:
    """A slot that is written between two blocks needs no further capture."""
    base = tiny_llama(vocab_size=259, max_position_embeddings=1400, num_hidden_layers=1)
    base.lm_head.weight.data *= 20
    _, stored = many_stored(base, [Lora(rank=4), Lora(rank=20), Lora(rank=2)], spread=0.2)
    model = base.cuda()
    bank = install(model, {name: stored[name] for name in ("a0", "a1")}, capacity=3)

    def texts(machine: Generator) -> list[list[int]]:
        numbers = [
            machine.submit(Request((5, 6, 7), Sampling(0.9), 9, seed=3, adapter=slot))
            for slot in (0, *bank.slots.values())
        ]
        found: dict[int, list[int]] = {number: [] for number in numbers}
        for event in machine.run():
            found[event.number] += event.token_ids
        return list(found.values())

    def machine(mode: Mode) -> Generator:
        chain = chain_of([Sampling(0.9)])
        return Generator(model, chain, rows=3, slots=64, vocabulary=259, mode=mode, pace=4)

    captured = machine("captured")
    first = texts(captured)
    assert first == texts(machine("eager")) and len(set(map(tuple, first))) == 3
    variants = captured.replays.variant_count
    bank.free(bank.retire("a0"))
    bank.add("a2", stored["a2"])
    bank.add("a0 again", stored["a0"])
    second = texts(captured)
    assert second == texts(machine("eager")) and second[1] == first[2]
    assert second[3] == first[1] and captured.replays.variant_count == variants


def two_blocks_of(model: Llama, **options: Any) -> Generator:
    """A generator of which two blocks are under way at a time."""
    return Generator(
        model,
        chain_of([Sampling(**FULL)]),
        rows=3,
        slots=200,
        vocabulary=259,
        automata=[PATTERN, STOP],
        pace=7,
        **options,
    )


@pytest.mark.parametrize("mode", ["captured", pytest.param("compiled", marks=pytest.mark.slow)])
def test_replayed_passes_over_proposed_tokens_write_what_single_steps_write(mode: Mode) -> None:
    """Two blocks are under way at a time, and in each a row has another number of tokens."""
    sizes: dict[str, Any] = {"vocab_size": 259, "max_position_embeddings": 200}
    model = tiny_llama(torch.float64, **sizes).cuda()
    draft = tiny_llama(torch.float64, num_hidden_layers=1, **sizes).cuda()
    draft.load_state_dict(model.state_dict(), strict=False)

    drafted = two_blocks_of(model, mode=mode, draft=draft, draft_tokens=2)
    assert drafted.reads_behind
    assert written(drafted) == written(two_blocks_of(model))
    assert drafted.drafted_tokens > 1.1 * drafted.drafted_passes


def test_a_recurrent_model_and_its_own_head_are_replayed() -> None:
    """What a pass changes of the states is a part of its graph."""
    model = tiny_llama(
        torch.float64,
        model_type="qwen3_5_text",
        layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
        mtp_num_hidden_layers=1,
        vocab_size=259,
        max_position_embeddings=200,
    ).cuda()

    drafted = two_blocks_of(model, mode="captured", draft="mtp", draft_tokens=1)
    assert written(drafted) == written(two_blocks_of(model))
    assert drafted.drafted_passes > 10


def test_more_proposed_tokens_than_a_tile_has_rows_are_left_to_the_models_own_pass() -> None:
    from monograph.decode.fast_forward import FastForward  # imports Triton

    model = tiny_llama(head_dim=32).cuda()
    forward = FastForward(model, rows=8)
    cache = KVCache.allocate(model.config, 8, 16, torch.float32, torch.device("cuda"))
    tokens = torch.zeros(8, 3, dtype=torch.int64, device="cuda")
    assert forward.logits_of_columns(tokens, tokens, cache, 1) is None
