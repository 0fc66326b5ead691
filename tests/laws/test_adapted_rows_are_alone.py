"""Run: pytest tests/laws/test_adapted_rows_are_alone.py (laws 7, 8 and 20 for rows with their own
adapter; through Inductor: -m slow)

Whatever adapters the other rows have, a row is what its own adapter gives alone; a row of the base
is what the base without a bank gives.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from adapted import many_stored
from batches import tiny_llama
from monograph import decode
from monograph.decode import adapter_bank, banked_layers
from monograph.decode.adapter_bank import (
    BASE,
    AdapterBank,
    StoredAdapter,
    bank_of,
    install,
    rows_with_adapters,
)
from monograph.decode.banked_layers import Banked, BankedEmbedding, BankedHead
from monograph.decode.cache import KVCache
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.prompt_reader import PromptToRead
from monograph.decode.request import Pace, Request
from monograph.decode.sampling import Sampling
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.graph import grouped, matmul
from monograph.graph.capture import compiled
from monograph.graph.lora import Lora
from monograph.graph.lora_base import quantise_base
from monograph.model.llama import Llama
from rewarded import products_have_rows_of_their_own

# Ranks on both sides of 16, other scales, and other targets.
LORAS = [
    Lora(rank=4, alpha=6.0),
    Lora(rank=16, alpha=8.0, rslora=True),
    Lora(rank=1, alpha=3.0, targets=("q_proj", "down_proj")),
    Lora(rank=24, alpha=32.0),
]
# DoRA, and rows of a few tokens, which the other adapters do not have.
PARTS = [
    Lora(rank=4, alpha=6.0, dora=True),
    Lora(rank=16, alpha=8.0, tokens=(3, 9, 60)),
    Lora(rank=2, alpha=6.0, dora=True, tokens=(0, 9)),
    Lora(rank=24, alpha=32.0),
]
# A second layer is generated from as the first one; that each layer has its own slots,
# `test_a_pass_of_mixed_rows_is_the_passes_of_their_adapters` shows of two.
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
TIED = {"tie_word_embeddings": True}
HYBRID = {"model_type": "qwen3_5_text", "layer_types": ("linear_attention", "full_attention")}
SHAPES: list[dict[str, Any]] = [{}, HYBRID, {"model_type": "qwen2"}]
# The other kinds of layers have nothing of their own here: a bank is of linear layers.
DAILY_SHAPES = [{}, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:])]
KINDS = pytest.mark.parametrize(
    ("loras", "shape"),
    [
        (LORAS, ONE_LAYER),
        pytest.param(LORAS, HYBRID, marks=pytest.mark.slow),
        pytest.param(LORAS, {"model_type": "qwen2"}, marks=pytest.mark.slow),
        (PARTS, {"model_type": "qwen2"} | ONE_LAYER),
        pytest.param(PARTS, TIED, marks=pytest.mark.slow),
    ],
    ids=["llama", "hybrid", "qwen2", "parts", "parts, tied"],
)
VOCABULARY, POSITIONS = 61, 128
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
SAMPLING = Sampling(0.9, top_k=20, logprobs=2)


class Many:
    """A base, its adapters alone, and one model with a bank of all of them."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        rank: int | None = None,
        capacity: int = 6,
        loras: Sequence[Lora] = LORAS,
        base: str = "auto",
        **sizes: Any,
    ) -> None:
        self.base = tiny_llama(
            dtype, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, **sizes
        )
        self.base.lm_head.weight.data *= 20
        loras = [replace(lora, base=base) for lora in loras]
        self.alone, self.stored = many_stored(self.base, loras, spread=0.2)
        if base != "auto":
            quantise_base(self.base, base, None)
        self.alone[BASE] = self.base
        self.model = copy.deepcopy(self.base)
        self.bank = install(self.model, self.stored, capacity=capacity, rank=rank)
        self.names = [*self.stored, BASE]


def requests_of(many: Many, count: int, seed: int = 0) -> list[tuple[str, Request]]:
    """Requests of random adapters, most of whose prompts begin with the same tokens."""
    draw = random.Random(seed)
    shared = tuple(range(3, 60))
    found = []
    for number in range(count):
        name = many.names[number % len(many.names)]
        own = tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.choice([1, 2, 9])))
        prompt = (shared[:40] if number % 3 else shared[: draw.randrange(2, 20)]) + own
        options = Request(
            prompt,
            SAMPLING,
            draw.choice([1, 9, 20]),
            seed=draw.randrange(2**40),
            adapter=many.bank.slot_of(name),
        )
        found.append((name, options))
    return found


def machine(model: Llama, rows: int = 4, **options: Any) -> Generator:
    pace = Pace(4, steps_while_waiting=2, max_chunks=1)
    return Generator(
        model,
        chain_of([SAMPLING]),
        rows=rows,
        slots=96,
        vocabulary=VOCABULARY,
        pace=pace,
        **options,
    )


def outcomes(generator: Generator, asked: list[Request]) -> list[tuple[list[int], list[Any]]]:
    """The ids and the log-probabilities of each request."""
    numbers = [generator.submit(request) for request in asked]
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    logprobs: dict[int, list[Any]] = {number: [] for number in numbers}
    for event in generator.run():
        ids[event.number] += event.token_ids
        logprobs[event.number] += event.logprobs
    return [(ids[number], logprobs[number]) for number in numbers]


def require_alone(many: Many, asked: list[tuple[str, Request]], **options: Any) -> None:
    """In a crowd, as by a generator with the same bank and rows that has one request alone."""
    found = outcomes(machine(many.model, **options), [request for _, request in asked])
    for (name, request), outcome in zip(asked, found, strict=True):
        [alone] = outcomes(machine(many.model, **options), [request])
        assert outcome == alone, name


@KINDS
def test_a_row_beside_rows_of_other_adapters_has_the_bits_that_it_has_alone(
    loras: list[Lora], shape: dict[str, Any]
) -> None:
    many = Many(loras=loras, **shape)
    require_alone(many, requests_of(many, 10))


@KINDS
def test_a_row_s_text_is_that_of_its_adapter_unmerged(
    loras: list[Lora], shape: dict[str, Any]
) -> None:
    """The reference has no bank and one row: the base with this adapter alone."""
    many = Many(torch.float64, loras=loras, **shape)
    asked = requests_of(many, 15)
    found = outcomes(machine(many.model), [request for _, request in asked])
    references = {name: machine(model, rows=1) for name, model in many.alone.items()}
    texts = set()
    for (name, request), (ids, logprobs) in zip(asked, found, strict=True):
        [(expected, expected_logprobs)] = outcomes(references[name], [request._replace(adapter=0)])
        assert ids == expected, name
        own = torch.tensor([each.drawn for each in logprobs])
        assert torch.allclose(
            own, torch.tensor([each.drawn for each in expected_logprobs]), rtol=0, atol=2e-6
        )
        texts.add(tuple(ids))
    assert len(texts) > 8


def test_the_adapters_write_different_texts() -> None:
    """Otherwise a row could read its neighbour's slot, and no test above would fail."""
    many = Many(**ONE_LAYER)
    [(_, first), *_] = requests_of(many, 1)
    asked = [first._replace(adapter=many.bank.slot_of(name), max_tokens=30) for name in many.names]
    texts = [tuple(ids) for ids, _ in outcomes(machine(many.model), asked)]
    assert len(set(texts)) == len(many.names)


@pytest.mark.parametrize(
    ("dtype", "loras"),
    [
        (torch.float32, PARTS),
        (torch.bfloat16, LORAS),
        pytest.param(torch.float32, LORAS, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, PARTS, marks=pytest.mark.slow),
    ],
    ids=["parts-fp32", "plain-bf16", "plain-fp32", "parts-bf16"],
)
def test_rows_of_the_base_have_the_bits_of_the_base_without_a_bank(
    dtype: torch.dtype, loras: list[Lora]
) -> None:
    many = Many(dtype, loras=loras, **ONE_LAYER)
    asked = requests_of(many, 15)
    found = outcomes(machine(many.model), [request for _, request in asked])
    only_base = [
        request._replace(adapter=0, max_tokens=request.max_tokens if name == BASE else 1)
        for name, request in asked
    ]
    expected = outcomes(machine(many.base), only_base)
    for (name, _), outcome, known in zip(asked, found, expected, strict=True):
        if name == BASE:
            assert outcome == known


def hidden_states(model: Llama, tokens_BT: Tensor, slot_B: Tensor | None = None) -> Tensor:
    rows, device = len(tokens_BT), tokens_BT.device
    cache = KVCache.allocate(model.config, rows, POSITIONS, torch.float64, device)
    positions = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    bank = bank_of(model) if slot_B is not None else None
    with torch.no_grad(), rows_with_adapters(bank, torch.zeros(0) if slot_B is None else slot_B):
        return model(tokens_BT, positions=positions, cache=cache)


@pytest.mark.parametrize("loras", [LORAS, PARTS], ids=["plain", "parts"])
@pytest.mark.parametrize("shape", [*SHAPES, TIED], ids=["llama", "hybrid", "qwen2", "tied"])
@pytest.mark.parametrize("rank", [None, 40])
def test_a_pass_of_mixed_rows_is_the_passes_of_their_adapters(
    loras: list[Lora], shape: dict[str, Any], rank: int | None
) -> None:
    """Law 8's bound, 1e-12 in fp64, whatever the rank of the bank, and the same for the logits."""
    many = Many(torch.float64, rank, loras=loras, **shape)
    tokens_BT = torch.randint(
        VOCABULARY, (len(many.names), 20), generator=torch.Generator().manual_seed(0)
    )
    slot_B = torch.tensor([many.bank.slot_of(name) for name in many.names])
    found_BTD = hidden_states(many.model, tokens_BT, slot_B)
    with torch.no_grad(), rows_with_adapters(many.bank, slot_B):
        found_BTV = many.model.logits(found_BTD)
    for row, name in enumerate(many.names):
        expected_BTD = hidden_states(many.alone[name], tokens_BT[row : row + 1])
        assert (found_BTD[row] - expected_BTD[0]).abs().max() <= 1e-12, name
        with torch.no_grad():
            expected_TV = many.alone[name].logits(expected_BTD)[0]
        assert (found_BTV[row] - expected_TV).abs().max() <= 1e-12 * expected_TV.abs().max(), name


@pytest.mark.parametrize("base", [pytest.param("int8", marks=pytest.mark.slow), "nf4"])
def test_rows_on_a_base_in_few_bits_are_those_of_their_adapters(base: str) -> None:
    """Their products are in fp32 whatever the model's dtype: texts, and law 7's bound of fp32."""
    many = Many(base=base, **ONE_LAYER)
    asked = requests_of(many, 10)
    found = outcomes(machine(many.model), [request for _, request in asked])
    references = {name: machine(model, rows=4) for name, model in many.alone.items()}
    for (name, request), (ids, logprobs) in zip(asked, found, strict=True):
        [(expected, expected_logprobs)] = outcomes(references[name], [request._replace(adapter=0)])
        assert ids == expected, name
        if name == BASE:
            assert logprobs == expected_logprobs
    require_alone(many, asked)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_reads_the_slots_and_what_is_in_them_anew(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other slots, and another adapter in a slot, do not make another graph, and are read by it."""
    monkeypatch.setattr(
        decode.generator, "compile_function", lambda function: compiled(function, backend=backend)
    )
    many = Many(torch.float64, num_hidden_layers=1)
    generator = machine(many.model, mode="compiled")
    asked = [request for _, request in requests_of(many, 10)]
    shortest = Request((3, 4), SAMPLING, 3)
    outcomes(generator, [shortest])
    counters.clear()
    for more in ([], [many.bank.add("again", many.stored["a3"])]):
        requests = [*asked, *(asked[0]._replace(adapter=slot) for slot in more)]
        found, expected = outcomes(generator, requests), outcomes(machine(many.model), requests)
        assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert not counters["stats"]["unique_graphs"]


# ── adapters that come and go ─────────────────────────────────────────────────────────────────


def coming_and_going(many: Many, requests: int, seed: int) -> Iterator[None]:
    """Random requests while adapters are removed and added again; each has the text and the
    log-probabilities that it had alone. A slot is written again only when nothing that used it runs.
    """
    draw = random.Random(seed)
    generator = machine(many.model)
    asked = requests_of(many, 30, seed)
    slots = {name: many.bank.slot_of(name) for name in many.names}
    alone_bank = copy.deepcopy(many.model)

    @cache
    def alone(number: int) -> tuple[list[int], list[Any]]:
        """By a copy whose adapters stay where they were."""
        name, request = asked[number]
        return outcomes(machine(alone_bank), [request._replace(adapter=slots[name])])[0]

    expected: dict[int, tuple[list[int], list[Any]]] = {}
    written: dict[int, tuple[list[int], list[Any]]] = {}
    retired: list[int] = []
    left = requests
    while left or generator.busy:
        if left and len(written) < 9:
            number = draw.randrange(len(asked))
            name, request = asked[number]
            if name == BASE or name in many.bank.slots:
                key = generator.submit(request._replace(adapter=many.bank.slot_of(name)))
                expected[key], written[key] = alone(number), ([], [])
                left -= 1
        if draw.random() < 0.2 and len(many.bank.slots) == len(many.stored):
            names = draw.sample([*many.bank.slots], 3)
            retired += [many.bank.retire(name) for name in names]
        for slot in [slot for slot in retired if not generator.uses_adapter(slot)]:
            many.bank.free(slot)
            retired.remove(slot)
        missing = [name for name in many.stored if name not in many.bank.slots]
        if missing and len(many.bank.slots) + len(retired) < many.bank.capacity:
            name = draw.choice(missing)
            many.bank.add(name, many.stored[name])
        for event in generator.advance():
            ids, logprobs = written[event.number]
            ids += event.token_ids
            logprobs += event.logprobs
            if event.finish is not None:
                assert written.pop(event.number) == expected.pop(event.number)
        yield
    assert not written


@pytest.mark.parametrize("requests", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_have_their_texts_while_adapters_come_and_go(requests: int) -> None:
    many = Many(capacity=4, **ONE_LAYER)
    shapes = {id(buffer): buffer.shape for buffer in many.model.buffers()}
    for _ in coming_and_going(many, requests, seed=requests):
        pass
    assert {id(buffer): buffer.shape for buffer in many.model.buffers()} == shapes


# ── what a bank refuses ───────────────────────────────────────────────────────────────────────


def adapter_of(lora: Lora, base: Llama, place: str = "folder") -> StoredAdapter:
    [stored] = many_stored(base, [lora])[1].values()
    return stored._replace(place=place)


def test_what_a_bank_cannot_hold_is_refused_by_name() -> None:
    base = tiny_llama()
    model = copy.deepcopy(base)
    narrow = adapter_of(Lora(rank=4, targets=("q_proj",)), base)
    bank = install(model, {"narrow": narrow}, capacity=2)
    assert bank.rank == adapter_bank.LEAST_RANK and len(bank.layers) == 2
    with pytest.raises(InputRefused, match="folder: r = 17 is above 16.*--adapter-rank"):
        bank.add("wide", adapter_of(Lora(rank=17, targets=("q_proj",)), base))
    with pytest.raises(
        InputRefused, match=r"folder: target_modules has model.layers.0.mlp.up_proj"
    ):
        bank.add("other", adapter_of(Lora(rank=4, targets=("up_proj",)), base))
    with pytest.raises(
        InputRefused, match="folder: magnitudes.* none of the adapters at the start"
    ):
        bank.add("other", adapter_of(Lora(rank=4, targets=("q_proj",), dora=True), base))
    with pytest.raises(
        InputRefused, match="folder: 1 trained rows of tokens.* at most 0: begin with"
    ):
        bank.add("other", adapter_of(Lora(rank=4, targets=("q_proj",), tokens=(5,)), base))
    with pytest.raises(UsageError, match="an adapter 'narrow' already"):
        bank.add("narrow", narrow)
    bank.add("second", narrow)
    with pytest.raises(UsageError, match="room for 2 adapters"):
        bank.add("third", narrow)
    with pytest.raises(UsageError, match="no adapter 'third': expected narrow, second, base"):
        bank.slot_of("third")
    with pytest.raises(OutOfDeviceMemory, match="room for 9999999 adapters of rank 16.*are free"):
        install(copy.deepcopy(base), {"narrow": narrow}, capacity=9999999)
    with pytest.raises(UsageError, match="2 adapters, but there is room for 1"):
        install(copy.deepcopy(base), {"narrow": narrow, "same": narrow}, capacity=1)
    with pytest.raises(UsageError, match="has a bank of adapters already"):
        install(model, {})
    assert not any("bank" in name for name in model.state_dict())
    with pytest.raises(UsageError, match="no slot 3"):
        machine(model).submit(Request((3,), SAMPLING, 1, adapter=3))
    with pytest.raises(UsageError, match="no slot 1"):
        machine(base).submit(Request((3,), SAMPLING, 1, adapter=1))


def test_adapters_of_experts_are_refused_by_name() -> None:
    mixture = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    lora = Lora(rank=2, targets=("up_proj",))
    words = "target_modules: adapters of experts"
    with pytest.raises(InputRefused, match=f"a0: {words}.*can only be merged"):
        many_stored(tiny_llama(**mixture), [lora])


def test_a_bank_that_begins_empty_takes_magnitudes() -> None:
    many = Many(torch.float64, loras=PARTS, **ONE_LAYER)
    model = copy.deepcopy(many.base)
    bank = install(model, {}, capacity=1)
    asked = requests_of(many, 1)[0][1]
    slot = bank.add("a0", many.stored["a0"])
    found = outcomes(machine(model), [asked._replace(adapter=slot)])
    assert found == outcomes(machine(many.model), [asked._replace(adapter=many.bank.slots["a0"])])


# ── planted faults: each breaks what the tests above hold ─────────────────────────────────────


def read_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Banked.forward

    def rolled(self: Banked, input: Tensor) -> Tensor:
        slot_B = self.bank.slot_B
        self.bank.slot_B = None if slot_B is None else slot_B.roll(1)
        try:
            return forward(self, input)
        finally:
            self.bank.slot_B = slot_B

    monkeypatch.setattr(Banked, "forward", rolled)


def share_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Generator._prompt_of

    def without_write(self: Generator, request: Request) -> PromptToRead:
        prompt = own(self, request)
        key = prompt.reuse_key._replace(adapter=0, slot_write=0)
        return prompt._replace(reuse_key=key)

    monkeypatch.setattr(Generator, "_prompt_of", without_write)


def forget_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of the bank's rank, and not of the adapter's."""
    write = AdapterBank._write
    monkeypatch.setattr(
        AdapterBank,
        "_write",
        lambda self, slot, adapter: write(
            self, slot, adapter._replace(scale=adapter.scale * adapter.rank / self.rank)
        ),
    )


def forget_the_rows_of_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BankedEmbedding, "forward", torch.nn.Embedding.forward)


def forget_the_rows_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BankedHead, "with_own_rows", lambda self, logits, input: logits)


def forget_the_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    """B is multiplied by g, and W is not."""
    write = AdapterBank._write

    def without_gain(self: AdapterBank, slot: int, adapter: StoredAdapter) -> None:
        write(self, slot, adapter)
        for layer in self.layers.values():
            assert layer.bank_gain_SN is not None
            layer.bank_gain_SN.zero_()

    monkeypatch.setattr(AdapterBank, "_write", without_gain)


@pytest.mark.parametrize(
    ("fault", "loras"),
    [
        (read_a_neighbour, LORAS),
        (share_prompts, LORAS),
        (forget_the_scale, LORAS),
        (forget_the_rows_of_the_embedding, PARTS),
        (forget_the_rows_of_the_head, PARTS),
        (forget_the_magnitudes, PARTS),
    ],
)
def test_a_planted_fault_is_noticed(
    fault: Any, loras: list[Lora], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_row_s_text_is_that_of_its_adapter_unmerged(loras, ONE_LAYER)


def test_a_slot_that_is_written_while_a_row_still_runs_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Generator, "uses_adapter", lambda self, slot: False)
    many = Many(capacity=4, **ONE_LAYER)
    with pytest.raises(AssertionError):
        for _ in coming_and_going(many, 40, seed=40):
            pass


def test_prompts_are_not_shared_after_a_slot_got_another_adapter() -> None:
    """Its rows and the reader still have the prompt's keys and values of the earlier adapter."""
    many = Many(**ONE_LAYER)
    [(_, request), *_] = requests_of(many, 1)
    request = request._replace(adapter=many.bank.slot_of("a0"), max_tokens=12)
    generator = machine(many.model, rows=1)
    outcomes(generator, [request])
    many.bank.free(many.bank.retire("a0"))
    slot = many.bank.slot_of("a0") if "a0" in many.bank.slots else None
    while slot != request.adapter:  # the slots that were free before are used first
        slot = many.bank.add(f"a1 in {slot}", many.stored["a1"])
    expected = outcomes(
        machine(many.model, rows=1), [request._replace(adapter=many.bank.slot_of("a1"))]
    )
    assert outcomes(generator, [request]) == expected


@pytest.mark.parametrize("onednn", [False, pytest.param(True, marks=needs_onednn)])
@pytest.mark.parametrize("positions", [1, 3])
def test_fast_products_give_a_row_its_bits_in_any_batch(
    positions: int, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order and number of rows, and what the adapters of the others are, if the machine's
    products have them.
    """
    monkeypatch.setattr(banked_layers, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(matmul, "mkl_is_slow", lambda: onednn)
    if not onednn:
        monkeypatch.setattr(grouped, "mkl_is_slow", lambda: False)
    many = Many()
    layer = many.bank.layers["model.layers.0.mlp.down_proj"]
    input_BTK = torch.randn(32, positions, layer.in_features)
    slot_B = torch.randint(0, 1 + len(LORAS), (32,))

    def output(rows: Tensor, fast: bool = True) -> Tensor:
        many.bank.has_fast_products = fast
        with rows_with_adapters(many.bank, slot_B[rows]):
            found: Tensor = layer(input_BTK[rows])
            assert (many.bank.groups is not None) == fast
        return found

    every = torch.arange(32)
    expected = output(every)
    assert torch.allclose(expected, output(every, fast=False), atol=1e-5)
    own_rows = products_have_rows_of_their_own(many.model, least=4)
    for rows in (torch.randperm(32), every[:8], every[20:]):
        found = output(rows)
        assert torch.allclose(found, expected[rows], atol=1e-5)
        assert not own_rows or torch.equal(found, expected[rows])
    layer.bank_A_SRK[2] = torch.nan
    others = slot_B != 2
    assert torch.equal(output(every)[others], expected[others]) and others.sum() < 32
