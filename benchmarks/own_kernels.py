"""Call each Triton kernel that is written by hand at the shapes of real models, so that what a card's
machine code of it needs can be listed (`machine_code.py`).

A kernel is compiled anew where its sizes differ. So each is called for one row and for many, and
attention for a cache of one block, of few and of many. Nothing is computed with the numbers, which
nobody wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from launches import HYBRID
from sampler import FILTERED, GREEDY
from torch import Tensor

from monograph.decode.chain import SamplerRows
from monograph.decode.knobs import chain_of, new_knobs
from monograph.model.config import LlamaConfig
from monograph.ops.attention import BLOCK
from monograph.ops.cross_entropy import chunk_count
from monograph.ops.fused_gradients import add_scaled_
from monograph.ops.logits_gradient import replace_logits_
from monograph.ops.rotation import rotate_projections

ROWS = (1, 64)  # of a decode step
BLOCKS = (1, 3, 8, 32)  # of the cache
RANK = 16  # of adapters
SLOTS = 9  # of a bank of adapters
PROMPT_CHUNK = 128  # tokens of a prompt that are read at once
TRAINED = (16, 2048)  # rows and tokens of a micro-batch
EPS = 1e-5
# What is called, and the call.
Calls = Iterator[tuple[str, Callable[[], object]]]


class Unwritten:
    """Makes tensors on the card that nobody writes."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Make tensors of this dtype."""
        self.dtype = dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of this shape, and of another dtype if one is given."""
        return torch.empty(shape, dtype=dtype or self.dtype, device="cuda")


def of_llama(config: LlamaConfig, dtype: torch.dtype) -> Calls:
    """Yield calls of the kernels that train a model and decode with it."""
    new = Unwritten(dtype)
    for rows in ROWS:
        yield from _attention(config, new, rows)
        yield from _products(config, new, rows)
        for form in ("int8", "nf4"):
            for rank in (0, RANK):
                yield from _frozen_products(config, new, rows, form, rank)
        for form in ("dense", "int8", "nf4"):
            yield from _banked_products(config, new, rows, form)
        yield from _sampling(config, rows)
    yield from _adapted_products(config, new)
    yield "a prompt's attention", lambda: _prompt_attention(config, new)
    yield from _training(config, new)


def attention_of(config: LlamaConfig, dtype: torch.dtype) -> Calls:
    """Yield calls of a decode step's attention."""
    for rows in ROWS:
        yield from _attention(config, Unwritten(dtype), rows)


def _attention(config: LlamaConfig, new: Unwritten, rows: int, rotates: bool = True) -> Calls:
    from monograph.ops.decode_kernels import attend, attend_fits

    heads, key_heads, size = _heads(config)
    if not attend_fits(torch.device("cuda", 0), BLOCK, size, new.dtype):
        return

    def call(blocks: int) -> None:
        cache = (blocks, rows, key_heads, BLOCK, size)
        angles = (new(rows, size // 2, dtype=torch.float32) for _ in range(2))
        attend(
            new(rows, (heads + 2 * key_heads) * size),
            new(*cache),
            new(*cache),
            new(rows, dtype=torch.int64),
            new(rows, key_heads, dtype=torch.int32),
            blocks,
            heads,
            size**-0.5,
            *(angles if rotates else ()),
        )

    for blocks in BLOCKS:
        name = f"attention, heads of {size}, {rows} x {blocks} blocks"
        yield name, lambda blocks=blocks: call(blocks)


def _products(config: LlamaConfig, new: Unwritten, rows: int) -> Calls:
    from monograph.ops.decode_kernels import Norm
    from monograph.ops.layer_kernels import project, project_gated

    width, inner = config.hidden_size, config.intermediate_size
    heads, key_heads, size = _heads(config)
    norm = Norm(new(width), EPS)
    x, residual = new(rows, width), new(rows, width)
    mixed = new(rows, heads * size)
    columns = (heads + 2 * key_heads) * size
    yield f"query, key, value, {rows}", lambda: project(x, new(columns, width), norm)
    yield (
        f"output, {rows}",
        lambda: project(mixed, new(width, heads * size), residual_BN=residual),
    )
    yield (
        f"gate and up, {rows}",
        lambda: project_gated(x, new(2 * inner, width), norm, "silu"),
    )
    yield (
        f"down, {rows}",
        lambda: project(new(rows, inner), new(width, inner), residual_BN=residual),
    )
    yield f"head, {rows}", lambda: project(x, new(config.vocab_size, width), norm)


def _frozen_products(config: LlamaConfig, new: Unwritten, rows: int, form: Any, rank: int) -> Calls:
    from monograph.ops.layer_kernels import LowRank

    def adapter(columns: int, summed: int) -> LowRank | None:
        if not rank:
            return None
        a, b = (new(*shape, dtype=torch.float32) for shape in ((rank, summed), (columns, rank)))
        return LowRank(a, b, 2.0)

    name = f"{form}{' with adapters' if rank else ''}, {rows}"
    yield from _layer_products(config, new, rows, form, adapter, name, rounds_adapters=True)


def _banked_products(config: LlamaConfig, new: Unwritten, rows: int, form: Any) -> Calls:
    """Yield calls with a bank: under autocast and without it, and without it with magnitudes."""
    from monograph.ops.layer_kernels import LowRankBank

    fp32 = torch.float32
    slots = new(rows, dtype=torch.int64)

    def bank(columns: int, summed: int, has_magnitudes: bool = False) -> LowRankBank:
        return LowRankBank(
            new(SLOTS, RANK, summed, dtype=fp32),
            new(SLOTS, RANK, columns, dtype=fp32),
            new(SLOTS, dtype=fp32),
            new(SLOTS, columns, dtype=fp32) if has_magnitudes else None,
            slots,
        )

    for name, adapter, rounds_adapters in (
        ("a bank", bank, True),
        ("a bank in fp32", bank, False),
        ("a bank with magnitudes", functools.partial(bank, has_magnitudes=True), False),
    ):
        yield from _layer_products(
            config, new, rows, form, adapter, f"{form} with {name}, {rows}", rounds_adapters
        )


def _layer_products(
    config: LlamaConfig,
    new: Unwritten,
    rows: int,
    form: Any,
    adapter: Callable[[int, int], Any],
    name: str,
    rounds_adapters: bool,
) -> Calls:
    """Yield calls of a layer's products; `adapter` returns what adapts one, by its columns and inputs."""
    from monograph.ops.decode_kernels import Norm
    from monograph.ops.layer_kernels import StoredLayer, multiply, multiply_gated

    def layer(columns: int, summed: int) -> StoredLayer:
        stored = _stored(form, columns, summed, new)
        return StoredLayer(form, stored, None, adapter(columns, summed))

    width, inner = config.hidden_size, config.intermediate_size
    heads, key_heads, size = _heads(config)
    norm = Norm(new(width), EPS)
    x, residual = new(rows, width), new(rows, width)
    columns = [heads * size, key_heads * size, key_heads * size]

    def several() -> Tensor:
        layers = [layer(number, width) for number in columns]
        return multiply(x, layers, columns, norm, rounds_adapters=rounds_adapters)

    def one() -> Tensor:
        down = [layer(width, inner)]
        return multiply(new(rows, inner), down, [width], None, residual, rounds_adapters)

    def gated() -> Tensor:
        gate, up = layer(inner, width), layer(inner, width)
        return multiply_gated(x, gate, up, inner, norm, "silu", rounds_adapters)

    yield f"query, key, value, {name}", several
    yield f"down, {name}", one
    yield f"gate and up, {name}", gated


def _adapted_products(config: LlamaConfig, new: Unwritten) -> Calls:
    for rows in ROWS[:1]:  # more rows are torch's products
        yield from _frozen_products(config, new, rows, "dense", RANK)


def _stored(form: str, columns: int, summed: int, new: Unwritten) -> tuple[Tensor, ...]:
    """Return what stores a weight, as `monograph.graph.frozen` does."""
    fp32, int8 = torch.float32, torch.int8
    if form == "dense":
        return (new(columns, summed),)
    if form == "int8":
        return new(columns, summed, dtype=int8), new(columns, dtype=fp32)
    blocks = columns * summed // 64
    codes = new(columns * summed // 2, dtype=torch.uint8)
    levels, steps = new(blocks, dtype=int8), new(-(-blocks // 256), dtype=fp32)
    return codes, levels, steps, new(dtype=fp32), new(16, dtype=fp32)


def _prompt_attention(config: LlamaConfig, new: Unwritten) -> Tensor:
    from monograph.ops.cached_attention_kernel import attend_cache

    heads, key_heads, size = _heads(config)
    cache = (4, 1, key_heads, BLOCK, size)
    positions = new(1, PROMPT_CHUNK, dtype=torch.int64)
    return attend_cache(new(1, heads, PROMPT_CHUNK, size), new(*cache), new(*cache), positions)


def _sampling(config: LlamaConfig, rows: int) -> Calls:
    from monograph.decode.fast_sampler import FastSampler

    device = torch.device("cuda", 0)
    sampler = FastSampler(rows, device)
    long = torch.empty(rows, dtype=torch.int64, device=device)
    for name, sampling in (("greedy", GREEDY), ("filters", FILTERED)):
        chain = chain_of([sampling])
        assert sampler.supports(chain, "window", config.vocab_size)
        state = SamplerRows(long, long, long, new_knobs(chain, rows, device))
        logits = torch.empty(rows, config.vocab_size, device=device)
        yield (
            f"sampler, {name}, {rows}",
            lambda chain=chain, state=state, logits=logits: sampler.sample(
                logits, state, long, chain
            ),
        )


def _training(config: LlamaConfig, new: Unwritten) -> Calls:
    rows, length = TRAINED
    heads, key_heads, size = _heads(config)
    tokens = rows * length // chunk_count(rows * length, config.vocab_size, "cuda")
    fp32 = torch.float32

    def rotate(back: bool) -> None:
        angles = [new(rows, length, size // 2, dtype=fp32) for _ in range(2)]
        projections = [
            new(rows, length, count * size).requires_grad_(back)
            for count in (heads, key_heads, key_heads)
        ]
        rotated = rotate_projections(*projections, *angles)
        if back:
            torch.autograd.backward(rotated, [each.detach() for each in rotated])

    yield "rotation", lambda: rotate(back=False)
    yield "rotation of gradients", lambda: rotate(back=True)
    yield (
        "gradient of the head",
        lambda: add_scaled_(new(tokens, dtype=fp32), new(tokens, dtype=fp32), new(dtype=fp32)),
    )
    yield (
        "loss",
        lambda: replace_logits_(
            new(tokens, config.vocab_size), new(tokens, dtype=torch.int64), new(tokens, dtype=fp32)
        ),
    )


def of_hybrid(config: LlamaConfig, dtype: torch.dtype) -> Calls:
    """Yield calls of the kernels for decoding with delta nets, gated attention and mixtures."""
    new = Unwritten(dtype)
    for rows in ROWS:
        yield from _attention(config, new, rows, rotates=False)
        yield f"delta net, {rows}", lambda rows=rows: _delta_net(config, new, rows)
        yield f"gated heads, {rows}", lambda rows=rows: _gated_heads(config, new, rows)
        yield f"mixture, {rows}", lambda rows=rows: _mixture(config, new, rows)
    yield "a prompt's attention", lambda: _prompt_attention(config, new)


def _delta_net(config: LlamaConfig, new: Unwritten, rows: int) -> None:
    from monograph.ops.delta_net_kernels import (
        DeltaNetParameters,
        DeltaNetShape,
        convolve_token,
        delta_rule_token,
    )

    heads, size = config.linear_num_value_heads, config.linear_value_head_dim
    taps = config.linear_conv_kernel_dim
    shape = DeltaNetShape(
        config.linear_num_key_heads, heads, config.linear_key_head_dim, size, by_key_head=True
    )
    projected = new(rows, shape.channels + heads * size + 2 * heads)
    position, count, limit = (new(rows, dtype=torch.int64) for _ in range(3))
    parameters = DeltaNetParameters(new(heads), new(heads), new(size), eps=EPS, l2_eps=EPS)
    mixed, is_new = convolve_token(
        projected, new(shape.channels, 1, taps), position, count, limit,
        new(rows, taps, shape.channels), shape,
    )  # fmt: skip
    state = new(rows, heads, config.linear_key_head_dim, size, dtype=torch.float32)
    delta_rule_token(mixed, projected, parameters, is_new, state, count, shape)


def _gated_heads(config: LlamaConfig, new: Unwritten, rows: int) -> None:
    from monograph.ops.decode_kernels import Norm
    from monograph.ops.gated_heads_kernels import (
        multiply_by_gate,
        multiply_by_gates,
        prepare_heads,
    )

    heads, key_heads, size = _heads(config)
    pairs = int(size * HYBRID["partial_rotary_factor"]) // 2
    norms = Norm(new(size), EPS, True), Norm(new(size), EPS, True)
    cos, sin = (new(rows, pairs, dtype=torch.float32) for _ in range(2))
    projected = new(rows, 2 * (heads + key_heads) * size)
    prepare_heads(projected, norms, cos, sin, heads, key_heads)
    multiply_by_gates(new(rows, heads * size), projected, heads)
    multiply_by_gate(new(rows, config.hidden_size), new(rows, 1))


def _mixture(config: LlamaConfig, new: Unwritten, rows: int) -> None:
    from monograph.ops.decode_kernels import Norm
    from monograph.ops.expert_kernels import expert_inner, expert_sum, route

    experts, width = config.num_experts, config.hidden_size
    inner = config.moe_intermediate_size
    chosen, weights = route(new(rows, experts), config.num_experts_per_tok, True)
    x, norm = new(rows, width), Norm(new(width), EPS, True)
    gate, up = (new(experts, inner, width) for _ in range(2))
    found = expert_inner(x, norm, chosen, (gate, up), None, "silu")
    expert_sum(found, chosen, weights, new(experts, width, inner), None, x)


def _heads(config: LlamaConfig) -> tuple[int, int, int]:
    """Return the numbers of query heads and key-value heads, and the channels of a head."""
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


CALLS: dict[str, Callable[[torch.dtype], Calls]] = {
    "124m": lambda dtype: of_llama(LlamaConfig.preset("124m"), dtype),
    "1b": lambda dtype: of_llama(LlamaConfig.preset("1b"), dtype),
    "8b": lambda dtype: attention_of(LlamaConfig.preset("8b"), dtype),
    "qwen3-next": lambda dtype: of_hybrid(
        LlamaConfig(
            **HYBRID, num_hidden_layers=2, layer_types=("linear_attention", "full_attention")
        ),
        dtype,
    ),
}
