"""Run: pytest tests/decode/test_fast_forward.py (needs a CUDA device)

A decode step by its own kernels writes what the model's own forward pass writes, and a row has the
same bits beside any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from adapted import many_stored
from batches import tiny_llama
from far_sighted import decoded, far_sighted, reported_is_full, seen_at
from monograph.decode.adapter_bank import AdapterBank, install
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.graph.lora import Lora, adapt, adapted_layers
from monograph.graph.lora_base import quantise_base
from monograph.graph.lora_merge import merge
from monograph.graph.rounded_base import round_frozen_weights
from monograph.graph.siblings import fuse_known, unfuse_siblings
from monograph.laws.comparisons import LOG_PROBABILITY_BOUND
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION
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
HYBRID: dict[str, Any] = {
    "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION),
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"model_type": "qwen2"},
    "scaled embeddings, centred norms and GELU": {"model_type": "gemma"},
    "norms of heads, a window": {
        "model_type": "qwen3",
        "sliding_window": 40,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
    },
    "a mixture in the second layer": {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "mlp_only_layers": (0,),
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "sliding_window": 40,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
    },
    "a delta net, and gated heads": {"model_type": "qwen3_5_text", **HYBRID},
    "a delta net and a shared expert": {
        "model_type": "qwen3_next",
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        **HYBRID,
    },
}
# By day one of the two bases whose numbers are few: tests/ops/test_layer_kernels.py has the products of both.
BASES = ["auto", pytest.param("int8", marks=pytest.mark.slow), "nf4"]
LONGROPE, SHORT = (5, 6, 7) * 50, (5, 6, 7)


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Llama:
    return tiny_llama(**SHAPE, **FAMILIES[family]).cuda().to(dtype)


def adapted(base: Any, dtype: torch.dtype = torch.float32, family: str = "biases") -> Llama:
    """Return a model with adapters that are not zero, on a base whose head is in `dtype`."""
    # The blocks of nf4 need widths that are multiples of 64.
    config = SHAPE | FAMILIES[family] | {"intermediate_size": 128}
    model = tiny_llama(**config).cuda()
    # No adapter on the keys: a product whose layers do not all have one.
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapt(model, Lora(rank=3, base=base, targets=targets, rslora=True))
    round_frozen_weights(model, dtype, [model.model.embed_tokens])
    change_adapters(model, 1)
    return model


def change_adapters(model: Llama, seed: int) -> None:
    """Write random numbers into the adapters' second matrices, in place, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            b = layer.lora_B.weight
            b.copy_(0.2 * torch.randn(b.shape, generator=generator))


def written(
    model: Llama, rows: int = 3, order: int = 1, **options: Any
) -> list[tuple[list[int], list[Any]]]:
    """Return tokens and log-probabilities of five texts, one with a longer prompt, by seed."""
    machine = Generator(
        model,
        chain_of([Sampling(0.9, logprobs=1)]),
        rows=rows,
        slots=300,
        vocabulary=259,
        **{"mode": "captured", "pace": 16} | options,
    )
    return texts_of(machine, list(range(5))[::order])


def texts_of(machine: Generator, seeds: Sequence[int]) -> list[tuple[list[int], list[Any]]]:
    """Return tokens and log-probabilities of texts, by seed; that of seed 2 has a longer prompt."""
    found: dict[int, tuple[int, list[int], list[Any]]] = {}
    for seed in seeds:
        prompt = (*(LONGROPE if seed == 2 else SHORT), seed + 9)
        sampling = Sampling(0.9, seed=seed, logprobs=1)
        found[machine.submit(Request(prompt, sampling, 12, ()))] = seed, [], []
    for event in machine.run():
        _, tokens, logprobs = found[event.number]
        tokens += event.token_ids
        logprobs += event.logprobs
    return [(tokens, logprobs) for _, tokens, logprobs in sorted(found.values())]


@pytest.mark.parametrize("target", ["q_proj", "o_proj", "up_proj"])
def test_an_adapter_that_the_kernels_would_leave_out_is_an_obstacle(target: str) -> None:
    from monograph.decode.fast_forward import obstacle

    model = model_of("llama")
    adapt(model, Lora(rank=2, targets=[target], dora=True))
    fuse_known(model)
    assert "DoRA" in (obstacle(model) or "")


def test_weights_of_one_product_with_other_numbers_in_4_bits_are_an_obstacle() -> None:
    """As in a folder that has some weights in nf4 and others in fp4; a kernel reads one table for all."""
    from monograph.decode.fast_forward import obstacle

    def give_other_numbers(layer: Any) -> None:
        layer.table.mul_(2)
        layer.numbers = tuple(layer.table.tolist())

    model = adapted("nf4")
    assert obstacle(model) is None
    attention = model.model.layers[0].self_attn
    give_other_numbers(attention.o_proj)  # is the only layer of its product
    assert obstacle(model) is None
    give_other_numbers(attention.k_proj)
    assert "other tables" in (obstacle(model) or "")


def test_more_rows_than_a_tile_are_an_obstacle_for_adapters_on_dense_weights_alone() -> None:
    from monograph.decode.fast_forward import obstacle

    assert obstacle(model_of("llama"), rows=17) is None
    assert obstacle(adapted("int8"), rows=17) is None
    model = adapted("auto")
    assert obstacle(model, rows=16) is None
    assert "at most 16 rows" in (obstacle(model, rows=17) or "")


@pytest.mark.parametrize("base", ["auto", "nf4"])
def test_a_model_with_merged_adapters_has_no_obstacle(base: Any) -> None:
    """Commands merge the adapters of a run before they decode."""
    from monograph.decode.fast_forward import obstacle

    model = model_of("llama")
    adapt(model, Lora(rank=2, base=base, tokens=(3,)))
    merge(model)
    fuse_known(model)
    assert obstacle(model) is None


def test_a_head_with_a_hook_is_an_obstacle() -> None:
    from monograph.decode.fast_forward import obstacle

    model = model_of("llama")
    fuse_known(model)
    model.lm_head.register_forward_hook(lambda *_: None)
    assert "hooks" in (obstacle(model) or "")


def test_heads_that_no_cards_shared_memory_holds_are_an_obstacle() -> None:
    from monograph.decode.fast_forward import obstacle

    model = tiny_llama(**SHAPE | {"head_dim": 256}).cuda()
    fuse_known(model)
    assert "shared memory" in (obstacle(model) or "")


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"linear_key_head_dim": 136}, "at most 128 channels"),
        ({"linear_conv_kernel_dim": 17}, "at most 16 tokens"),
        ({"linear_value_head_dim": 5}, "multiples of 16"),
    ],
)
def test_a_delta_net_that_the_kernels_cannot_compute_is_an_obstacle(
    sizes: dict[str, int], reason: str
) -> None:
    from monograph.decode.fast_forward import obstacle

    model = tiny_llama(**SHAPE | FAMILIES["a delta net, and gated heads"] | sizes).cuda()
    fuse_known(model)
    assert reason in (obstacle(model) or "")


def test_an_adapter_of_a_delta_net_is_an_obstacle() -> None:
    from monograph.decode.fast_forward import obstacle

    model = model_of("a delta net, and gated heads")
    fuse_known(model)
    assert obstacle(model) is None
    unfuse_siblings(model)
    adapt(model, Lora(rank=2, targets=["in_proj_z"]))
    fuse_known(model)
    assert "adapter" in (obstacle(model) or "")


@pytest.mark.parametrize(
    "family",
    # A plain one is among those that have more: with a tied head, with biases.
    [
        pytest.param(family, marks=pytest.mark.slow if family == "llama" else ())
        for family in FAMILIES
    ],
)
def test_it_writes_what_the_models_own_forward_pass_writes(family: str) -> None:
    ours = written(model_of(family), mode="eager")
    reference = written(model_of(family), mode="eager", impl="reference")
    same = sum(a[0] == b[0] for a, b in zip(ours, reference, strict=True))
    assert same >= 4, "one near tie may part two ways to compute"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("llama", torch.float32, marks=pytest.mark.slow),
        ("llama", torch.bfloat16),
        ("a delta net and a shared expert", torch.bfloat16),
        pytest.param("a delta net and a shared expert", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_log_probabilities_have_the_same_bits_in_any_batch_order_and_block(
    family: str, dtype: torch.dtype
) -> None:
    model = model_of(family, dtype)
    three = written(model)
    assert written(model, rows=1) == three
    assert written(model, rows=5, order=-1) == three
    assert written(model, pace=3) == three


@pytest.mark.parametrize("base", BASES)
def test_adapters_are_in_what_it_writes(base: Any) -> None:
    """A wrong adapter, or a wrong scale of a block of codes, writes other tokens."""
    model = adapted(base)
    ours = written(model, mode="eager")
    reference = written(model, mode="eager", impl="reference")
    same = sum(a[0] == b[0] for a, b in zip(ours, reference, strict=True))
    assert same >= 4, "one near tie may part two ways to compute"


# Of other ranks, scales and layers; DoRA; and rows of a few tokens.
LORAS = [
    Lora(rank=3, alpha=6.0, rslora=True),
    Lora(rank=16, alpha=8.0, targets=("q_proj", "down_proj")),
    Lora(rank=2, alpha=3.0, dora=True, tokens=(5, 40)),
]
# One layer, since numbers are what is asked, and interpreted kernels take their time.
BANKED = SHAPE | FAMILIES["biases"] | {"intermediate_size": 128, "num_hidden_layers": 1}
SLOTS = (1, 0, 2, 3)  # of the texts


def banked(
    base: Any = "auto", dtype: torch.dtype = torch.float32, loras: Sequence[Lora] = LORAS
) -> tuple[Llama, AdapterBank]:
    """Return a model with a bank of these adapters on a base, and room for one more."""
    plain = tiny_llama(**BANKED)
    _, stored = many_stored(plain, loras, spread=0.2)
    model = plain.cuda().to(dtype)
    if base != "auto":
        quantise_base(model, base, None)
    return model, install(model, stored, capacity=len(stored) + 1)


def written_by_rows(
    model: Llama, rows: int = 3, order: int = 1, slots: Sequence[int] = SLOTS, **options: Any
) -> list[tuple[list[int], list[Any]]]:
    """Return four short texts, each with the adapter in its slot."""
    return texts_by_rows(banked_machine(model, rows, **options), slots, order)


def banked_machine(model: Llama, rows: int = 3, **options: Any) -> Generator:
    return Generator(
        model,
        chain_of([Sampling(0.9, logprobs=1)]),
        rows=rows,
        slots=32,
        vocabulary=259,
        **{"mode": "eager", "pace": 4} | options,
    )


def texts_by_rows(
    machine: Generator, slots: Sequence[int], order: int = 1
) -> list[tuple[list[int], list[Any]]]:
    found: dict[int, tuple[int, list[int], list[Any]]] = {}
    for place in list(range(len(slots)))[::order]:
        sampling = Sampling(0.9, seed=place, logprobs=1)
        request = Request((*SHORT, place + 9), sampling, 5, (), adapter=slots[place])
        found[machine.submit(request)] = place, [], []
    for event in machine.run():
        _, tokens, logprobs = found[event.number]
        tokens += event.token_ids
        logprobs += event.logprobs
    return [(tokens, logprobs) for _, tokens, logprobs in sorted(found.values())]


@pytest.mark.parametrize("base", BASES)
def test_each_row_is_written_with_its_own_adapter(base: Any) -> None:
    """As the model's own forward pass writes it, which no other row's adapter reaches."""
    from monograph.decode.fast_forward import obstacle

    model, bank = banked(base)
    ours = written_by_rows(model)
    assert obstacle(model) is None and obstacle(model, rows=64) is None
    reference = written_by_rows(model, impl="reference")
    same = sum(a[0] == b[0] for a, b in zip(ours, reference, strict=True))
    assert same >= 3, "one near tie may part two ways to compute"
    for (_, found), (_, expected) in zip(ours, reference, strict=True):
        assert found[0].drawn == pytest.approx(expected[0].drawn, abs=LOG_PROBABILITY_BOUND)
    others = written_by_rows(model, slots=[0, 1, 0, 0])
    assert not any(a[1][0].drawn == b[1][0].drawn for a, b in zip(ours, others, strict=True))
    assert bank.slot_B is None


@pytest.mark.parametrize(
    ("base", "dtype"),
    [
        ("auto", torch.bfloat16),
        ("nf4", torch.bfloat16),
        pytest.param("auto", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_with_their_own_adapters_have_the_same_bits_in_any_batch_order_and_block(
    base: Any, dtype: torch.dtype
) -> None:
    model, _ = banked(base, dtype)
    three = written_by_rows(model, mode="captured")
    assert written_by_rows(model, rows=1) == three
    assert written_by_rows(model, rows=4, order=-1, pace=3) == three


def test_a_step_of_a_row_of_the_base_has_the_bits_of_a_model_without_a_bank() -> None:
    model, _ = banked(dtype=torch.bfloat16)
    plain = tiny_llama(**BANKED).cuda().to(torch.bfloat16)
    expected = written_by_rows(plain, slots=[0] * 4)
    found = written_by_rows(model)
    assert [a == b for a, b in zip(found, expected, strict=True)] == [slot == 0 for slot in SLOTS]


def test_an_adapter_that_comes_is_read_without_another_capture() -> None:
    model, bank = banked(dtype=torch.bfloat16, loras=LORAS[:2])
    stored = many_stored(tiny_llama(**BANKED), [Lora(rank=5, alpha=9.0)], spread=0.3)[1]["a0"]
    machine = banked_machine(model, rows=2, mode="captured")
    before = texts_by_rows(machine, (1, 2, 0, 2))
    graphs = machine.replays.graph_count
    assert graphs > 0
    slot = bank.add("new", stored)
    slots = (1, slot, 0, 2)
    after = texts_by_rows(machine, slots)
    assert machine.replays.graph_count == graphs
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True, True]
    assert after == written_by_rows(model, rows=1, slots=slots)


def test_a_captured_step_reads_the_adapters_of_the_last_update() -> None:
    """In 16 bits: adapters are fp32 there, and the rest of the model is not."""
    model = adapted("nf4", torch.bfloat16)
    seeds = (0, 1)

    def machine(rows: int, mode: Any) -> Generator:
        chain = chain_of([Sampling(0.9, logprobs=1)])
        return Generator(model, chain, rows=rows, slots=64, vocabulary=259, mode=mode, pace=4)

    kept = machine(2, "captured")
    before = texts_of(kept, seeds)
    change_adapters(model, 2)
    kept.forget()
    after = texts_of(kept, seeds)
    assert after != before
    # A new generator, which has never read the old adapters, with other rows.
    assert after == texts_of(machine(1, "eager"), seeds)


@pytest.mark.parametrize(
    "family",
    [
        "norms of heads, a window",
        pytest.param("gpt-oss", marks=pytest.mark.slow),
        pytest.param("scaled embeddings, centred norms and GELU", marks=pytest.mark.slow),
    ],
)
def test_a_pass_over_proposed_tokens_has_the_bits_of_steps(family: str) -> None:
    """Law 7, with drafts: captured, in two rows of five tokens, which one tile has; log-probabilities, too."""
    model = model_of(family)
    seeds = range(3)

    def machine(**options: Any) -> Generator:
        return Generator(
            model, chain_of([Sampling(0.9, logprobs=1)]), rows=2, slots=300, vocabulary=259,
            mode="captured", pace=8, **options,
        )  # fmt: skip

    drafted = machine(draft=model)
    drafted.settle_drafts()
    assert drafted.drafter is not None and drafted.drafter.forward_kernels is not None
    # A mixture's trial would show nothing, so its drafts are not switched off.
    assert drafted.drafts == ("while they pay" if family != "gpt-oss" else "always")
    assert not drafted.cache.one_query_at_a_time
    # Drafts as large as the model cost more than they save; here they are used all the same.
    drafted.drafter.cost = 1.0
    assert texts_of(drafted, seeds) == texts_of(machine(), seeds)
    # Texts of twelve tokens, each in passes of five, five and two.
    assert drafted.drafted_tokens == 4 * drafted.drafted_passes == 12 * len(seeds)


@pytest.mark.parametrize("family", [family for family in FAMILIES if "delta" in family])
def test_a_hybrids_steps_have_a_full_passs_log_probabilities(family: str) -> None:
    """Law 8: the state that a prompt's chunks leave is what the kernels go on with."""
    sizes = SHAPE | FAMILIES[family] | {"vocab_size": 61}
    model = far_sighted(torch.float32, **sizes).cuda()
    sampling = Sampling(1.0, logprobs=61)
    machine = Generator(
        model, chain_of([sampling]), rows=2, slots=300, vocabulary=61, mode="captured", pace=4
    )
    prompts = (LONGROPE[:140], SHORT, (*SHORT, 9))
    assert min(seen_at(model, prompts[0], [0, 70, 139])) > 100 * LOG_PROBABILITY_BOUND
    requests = [Request(prompt, sampling, 6, ()) for prompt in prompts]
    for place, events in decoded(machine, requests).items():
        assert reported_is_full(model, requests[place], events)


def test_a_mixture_with_a_hook_is_called() -> None:
    """Law 8: the hook's change is in what a step computes, whose other layers are the kernels'."""
    from monograph.decode.fast_forward import obstacle

    sizes = SHAPE | FAMILIES["a mixture in the second layer"] | {"vocab_size": 61}
    model = far_sighted(torch.float32, **sizes).cuda()
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: -3 * output)
    fuse_known(model)
    assert obstacle(model) is None
    sampling = Sampling(1.0, logprobs=61)
    machine = Generator(
        model, chain_of([sampling]), rows=1, slots=64, vocabulary=61, mode="eager", pace=2
    )
    request = Request(SHORT, sampling, 4, ())
    [events] = decoded(machine, [request]).values()
    assert reported_is_full(model, request, events)


def test_a_hybrid_remembers_nothing_of_earlier_weights() -> None:
    """Law 19."""
    model = model_of("a delta net, and gated heads")
    sampling = Sampling(0.9, logprobs=1)

    def new_machine() -> Generator:
        return Generator(
            model, chain_of([sampling]), rows=2, slots=64, vocabulary=259, mode="captured", pace=4
        )

    def reported(machine: Generator) -> list[Any]:
        texts = decoded(machine, [Request(SHORT, sampling, 6, ())])
        return [event.logprobs for events in texts.values() for event in events]

    machine = new_machine()
    before = reported(machine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    machine.forget()
    after = reported(machine)
    assert after == reported(new_machine()) != before


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_steps_write_what_captured_ones_write(family: str) -> None:
    captured, compiled = (written(model_of(family), mode=mode) for mode in ("captured", "compiled"))
    same = sum(a[0] == b[0] for a, b in zip(captured, compiled, strict=True))
    assert same >= 4, "one near tie may part two ways to compute"
