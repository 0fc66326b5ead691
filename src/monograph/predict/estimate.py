"""Estimate the peak memory of a training step in closed form.

The estimate takes microseconds, so that a search can compare many candidates; `footprint` traces
the chosen one.

static     = P (bytes of the weight + 4 of its gradient + bytes of its optimizer state) for P trained parameters, and
             2 more of the rounded weight where products add gradients (`fused`) and nothing is
             recomputed; with adapters P counts their parameters alone, and the bytes of the frozen
             base are added
stored     = L times numbers per token and layer (`stored_numbers`), times bytes of a number; a block that is captured
             in a low precision and recomputes nothing also keeps its weights, rounded
head       = gradient of the hidden states, plus the larger of: logits of a chunk, their gradient, the head's gradient,
             and the head's rounded weights (in fp32 the product of a chunk instead); the head's
             gradient twice. Where products add gradients, the larger of: a chunk's logits and their
             gradient; one of them and the head's. A captured loss of a frozen head on a CPU takes a
             chunk's logits, in fp32, and writes their gradient there
block      = what one block computes again, which is all that it does not store, and the gradients of its numbers
peak       = static + max(stored + head,  stored + block,  new gradients where a graph returns them,
                          an update's intermediates: of the largest plane if eager, of Muon's planes
                          if captured)
"""

import functools
import math
from collections import Counter
from typing import NamedTuple

import torch

from monograph.graph.inspect import ALL_LINEAR
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.graph.remat import Choice, Product, Recording, within
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.model.parameters import block_matrices, block_multiplied, layer_shapes, matrices
from monograph.ops.attention import MAX_KEYS_IN_BLOCKS, QUERIES
from monograph.ops.cross_entropy import chunk_count
from monograph.ops.delta_rule import CHUNK
from monograph.optim.formats import FORMATS
from monograph.predict.footprint import ON_THEIR_WAY, Work, turn_of

FROZEN_BYTES = {"int8": 1.0, "nf4": 0.516}  # bytes per number of a frozen linear layer
# Memory of an attention score, in bf16 numbers: its probability in fp32 (2) and in bf16 (1).
SCORE_NUMBERS = 3
# Without master weights an eager update rounds the weights as well.
ROUNDED_WEIGHTS_BYTES = 4
# Numbers of the compute dtype alive in a captured Muon update for each number of its largest plane.
ORTHOGONAL_NUMBERS = 3


def spared_bytes(
    parameters: int, parallel: str, ranks: int, base: tuple[str, str] | None = None
) -> int:
    """Return how many bytes fewer a rank holds than one device; negative if it holds more.

        ddp:  a second copy of the gradients
        fsdp: less by 1 - 1 / ranks of the weights, and of gradients and moments, if the weights are
            trained

    Two whole blocks, which a rank of fsdp gathers, are not counted.

    Args:
        parameters: their number.
        parallel: "ddp", or "fsdp" or "hsdp".
        ranks: the number of those that share out the weights.
        base: the format of frozen weights beside adapters, and the precision; None: all weights are
            trained, in fp32.
    """
    if base is None:
        return -4 * parameters if parallel == "ddp" else int(16 * parameters * (1 - 1 / ranks))
    each = FROZEN_BYTES.get(base[0], 4.0 if base[1] == "fp32" else 2.0)
    return 0 if parallel == "ddp" else int(each * parameters * (1 - 1 / ranks))


def stored_numbers(work: Work, remat: str | float) -> float:
    """Return how many numbers of the compute dtype a block keeps per token for its backward pass,
    its input included.

    Let d be the hidden size, q = query width / d, r = key-value width / d and phi = d_ff / d.

        captured, nothing recomputed     d (4 + 2q + 2r + 3 phi), as elementwise code is fused; q + r more where query,
                                         key and value are one product, which is kept for the value
        eager, nothing recomputed        d (7 + 2q + 2r + 4 phi), what each operation keeps; below fp32 4 d more, for
                                         the fp32 copies of the norms
        pointwise                        d (2 + 2q + 2r + 2 phi), the products alone
        a share                          that share of what is kept beyond the input
        full, offload                    d, the input; 0 if the input is on the host

    A mixture's d_ff is that of all experts of a token together, and `Work.routed_numbers` are
    added. Where attention is computed by matrix products (`monograph.ops.attention`), its
    probabilities are added in fp32 and in bf16. In a hybrid it is the mean of the blocks, and
    policies keep as large a share in a gated delta net as in attention.
    """
    layers = work.config.num_hidden_layers
    linear = sum(map(work.config.is_linear, range(layers)))
    numbers = _attending_numbers(work, remat)
    if not linear or remat in ("full", "offload"):
        return numbers
    share = numbers / _attending_numbers(work, "none")
    return ((layers - linear) * numbers + linear * share * _delta_net_numbers(work)) / layers


# What a block with a gated delta net keeps per token, in numbers of the compute dtype, by whether
# it is captured and in fp32: multiples of d, of the key channels, of the value heads' key channels
# and value channels, of a chunk's positions for each value head, and of the states for each
# position of a chunk. Fitted to traces of 9 shapes, within 0.03 % (1 % in eager bf16).
_DELTA_NET = {
    (True, True): (4.0, 4.1, 9.0, 8.0, 4.2, 1.5),
    (True, False): (4.0, 6.1, 9.9, 11.0, 7.3, 4.0),
    (False, True): (6.0, 12.1, 11.0, 15.0, 5.4, 1.5),
    (False, False): (10.0, 16.5, 22.2, 25.2, 10.7, 3.2),
}


def _delta_net_numbers(work: Work) -> float:
    config = work.config
    captured = work.compile != "none"
    heads = config.linear_num_value_heads
    size = config.linear_key_head_dim
    wide = config.linear_value_head_dim
    keys = config.linear_num_key_heads * size
    sizes = (
        config.hidden_size,
        keys,
        heads * size,
        heads * wide,
        heads * CHUNK,
        heads * size * wide / CHUNK,
    )
    multiples = _DELTA_NET[captured, work.precision == "fp32"]
    inner = (3 if captured else 4) * work.inner_numbers + work.routed_numbers
    return inner + sum(number * of for number, of in zip(multiples, sizes, strict=True))


def _attending_numbers(work: Work, remat: str | float) -> float:
    width, query, key_value = _widths(work.config)
    key_value = query if work.repeats_heads else key_value
    if remat in ("full", "offload"):
        return width if remat == "full" else 0
    if remat != "none":
        return width + _kept(work, remat).stored_bytes
    if work.compile != "none":
        scores = SCORE_NUMBERS * score_numbers(work)
        joined = query + key_value if work.fused and not work.lora else 0
        return (
            4 * width
            + 2 * query
            + 2 * key_value
            + joined
            + 3 * work.inner_numbers
            + work.routed_numbers
            + scores
        )
    fp32_copies = 4 * width if work.precision != "fp32" else 0
    return (
        7 * width
        + 2 * query
        + 2 * key_value
        + 4 * work.inner_numbers
        + work.routed_numbers
        + fp32_copies
    )


def score_numbers(work: Work) -> int:
    """Return how many attention scores per token of a block are in memory: 0 where a fused kernel
    computes attention.

    Queries are taken in blocks, and a block of queries reads the keys up to its own end.
    """
    in_products = work.device_type == "cpu" and work.compile != "none" and work.precision == "bf16"
    if not in_products or work.length > MAX_KEYS_IN_BLOCKS:
        return 0
    blocks = -(-work.length // QUERIES)
    keys = sum(min(work.length, (block + 1) * QUERIES) for block in range(blocks)) / blocks
    return int(work.config.num_attention_heads * keys)


def recomputed_flops(work: Work) -> tuple[int, int]:
    """Return the FLOPs per token and layer that the backward pass repeats: of linear layers, and of
    attention.
    """
    if work.remat in ("none", "pointwise"):
        return 0, 0
    kept = _kept(work, work.remat).what if work.remat not in ("full", "offload") else ()
    repeated = [product for product in _products(work) if product.name not in kept]
    # A block that is recomputed as a whole also repeats its last product (down), whose result
    # nothing reads.
    last = 2 * work.config.hidden_size * work.inner_numbers if not kept else 0
    attention = sum(product.flops for product in repeated if product.name in (_SCORES, _ATTENTION))
    return sum(product.flops for product in repeated) - attention + last, attention


_SCORES, _ATTENTION = ("scores", 0), ("attention", 0)


def _widths(config: LlamaConfig) -> tuple[int, int, int]:
    head = config.head_dim
    return config.hidden_size, config.num_attention_heads * head, config.num_key_value_heads * head


def _products(work: Work) -> tuple[Product, ...]:
    """Return a block's products, per token, except the last, whose result the backward pass does
    not read.

    `stored_bytes` of a `Product` holds numbers here.
    """
    width, query, key_value = _widths(work.config)
    inner = work.inner_numbers
    products = [
        ("query", query),
        ("key", key_value),
        ("value", key_value),
        ("gate", inner),
        ("up", inner),
    ]
    # Next to each adapter both its product and that of the frozen weight are results.
    results = 2 if work.lora else 1
    linear = [
        Product((name, 0), results * numbers, 2 * width * numbers) for name, numbers in products
    ]
    # FLOPs of the scores, and as many of mixing the values: 2 per pair and number, for the half of
    # the pairs that causal attention sees.
    attending = query * work.length
    if scores := score_numbers(work):
        attention = [Product(_SCORES, scores, attending), Product(_ATTENTION, query, attending)]
    else:
        attention = [Product(_ATTENTION, query, 2 * attending)]
    return (*linear, *attention, Product(("output", 0), results * width, 2 * query * width))


@functools.lru_cache(maxsize=64)
def _kept(work: Work, remat: str | float) -> Choice:
    """Return which products a policy between `none` and `full` keeps; `stored_bytes` are numbers
    per token here.
    """
    curve = Recording(0, 0, 0, _products(work)).curve()
    if remat == "pointwise":
        return curve[-1]
    beyond_input = (
        _attending_numbers(work, "none") - work.config.hidden_size + _rounded(work) / work.tokens
    )
    return within(curve, int(float(remat) * beyond_input)) or curve[0]


def _rounded(work: Work) -> int:
    """Return how many numbers of a captured block's weights are kept rounded to the compute dtype."""
    as_kept = (
        work.compile == "none"
        or work.precision == "fp32"
        or not work.optim.master_weights
        or work.lora
    )
    layers = range(work.config.num_hidden_layers)
    return (
        0
        if as_kept or work.fused
        else max(_numbers(block_matrices(work.config, layer)) for layer in layers)
    )


class _Frozen(NamedTuple):
    """A model with adapters: the number of their parameters, and those a token is multiplied with;
    the frozen bytes.
    """

    adapters: int
    base_bytes: int
    multiplied: float


@functools.lru_cache(maxsize=64)
def _frozen(config: LlamaConfig, lora: Lora, precision: str) -> _Frozen:
    """Return the sizes of a model of any depth, from two shallow ones where all its blocks get the
    same adapters.
    """
    layers = config.num_hidden_layers
    turn = turn_of(config)
    least = turn + layers % turn
    named_one_by_one = isinstance(lora.targets, str) and lora.targets != ALL_LINEAR
    if named_one_by_one or layers <= least + turn:
        return _built(config, lora, precision)
    low, high = (
        _built(config.shortened(depth), lora, precision) for depth in (least, least + turn)
    )
    turns = (layers - least) // turn
    return _Frozen(
        low.adapters + turns * (high.adapters - low.adapters),
        low.base_bytes + turns * (high.base_bytes - low.base_bytes),
        low.multiplied + turns * (high.multiplied - low.multiplied),
    )


def _built(config: LlamaConfig, lora: Lora, precision: str) -> _Frozen:
    """Return the sizes of a model as it is built."""
    with torch.device("meta"):
        model = Llama(config)
        install_adapters(model, lora, precision=Precision(precision))
    sizes = {True: 0, False: 0}
    for tensor in model.parameters():
        sizes[tensor.requires_grad] += tensor.numel() if tensor.requires_grad else tensor.nbytes
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    share = config.num_experts_per_tok / max(config.num_experts, 1)
    multiplied = sum(tensor.numel() * (share if tensor.ndim == 3 else 1) for tensor in trained)
    return _Frozen(sizes[True], sizes[False], multiplied)


def trained_numbers(config: LlamaConfig, lora: Lora | None, precision: str) -> int:
    """Return the number of trained parameters, the adapters' if there are any."""
    return _frozen(config, lora, precision).adapters if lora else config.parameter_count()


def copied_bytes(config: LlamaConfig, lora: Lora | None, precision: str, halved: bool) -> int:
    """Return the bytes of the whole copy that draws answers from a sharded model; see
    `Parameters.gathered`.

    Args:
        config: the model's shape.
        lora: the adapters; None: all weights are trained.
        precision: the precision, in whose 16 bits the matrices of blocks are kept.
        halved: whether all weights of blocks are.
    """
    if lora:
        frozen = _frozen(config, lora, precision)
        return frozen.base_bytes + 4 * frozen.adapters
    shapes = [
        shape
        for layer in range(config.num_hidden_layers)
        for shape in layer_shapes(config, layer).values()
    ]
    narrow = 0 if precision == "fp32" else _numbers(shapes if halved else matrices(config))
    return 4 * config.parameter_count() - 2 * narrow


def trained_adapters(work: Work) -> int:
    """Return the adapters' parameters that a token is multiplied with; 0 if the model itself is
    trained.
    """
    return round(_frozen(work.config, work.lora, work.precision).multiplied) if work.lora else 0


def dense_bytes(work: Work) -> float:
    """Return the bytes that one pass over all blocks reads and writes to dequantise linear weights;
    0 if none are.
    """
    if work.lora is None or work.lora.base not in FROZEN_BYTES:
        return 0.0
    return _matrices(work.config) * (FROZEN_BYTES[work.lora.base] + work.number_bytes)


def estimate_bytes(work: Work) -> int:
    """Return the peak bytes by the closed form at the top of this file, on a device of
    `work.device_type`.

    With adapters, the head has no gradient, and each adapter's inner values `A x` are kept.
    """
    config = work.config
    lora = work.lora
    number = work.number_bytes
    tokens = work.tokens
    optim = work.optim
    weight = 4 if optim.master_weights else 2
    whole_blocks = work.remat in ("full", "offload")
    trained, frozen_bytes, _ = (
        _frozen(config, lora, work.precision) if lora else (config.parameter_count(), 0, 0)
    )
    moments = optim.moments_of_matrices if lora else optim.moments_each
    rounded = 2 if work.fused and work.remat == "none" and weight == 4 else 0
    average = 0 if optim.ema is None else weight
    static = frozen_bytes + trained * (
        weight + rounded + 4 + moments * FORMATS[optim.state].bytes_each + average
    )
    layers = (
        block_multiplied(config, config.num_hidden_layers - 1) if lora and not whole_blocks else []
    )
    inner = sum(lora.rank + lora.dora * shape[0] for shape in layers) if lora else 0
    kept = (stored_numbers(work, work.remat) + inner) * tokens + _rounded(work) * (
        work.remat == "none"
    )
    stored = (
        ON_THEIR_WAY * work.input_bytes
        if work.remat == "offload"
        else config.num_hidden_layers * kept * number
    )
    dense = (4 + number) * _largest_weight(config) if lora and lora.base != "auto" else 0
    # One block's values are recomputed, as far as they are not stored, and then their gradients
    # come.
    values = stored_numbers(work, "none") * number * tokens
    there = (
        stored_numbers(work, "full" if work.remat == "offload" else work.remat) * number * tokens
    )
    block = 2 * (values + dense) - there
    head = 0 if lora else config.vocab_size * config.hidden_size
    logits = tokens / chunk_count(tokens, config.vocab_size, work.device_type) * config.vocab_size
    if work.fused:  # eagerly, a chunk's logits are in fp32 twice while they become their gradient
        loss = max(
            logits * (2 * number if work.compile != "none" else 8 + number),
            logits * number + 4 * head,
        )
    elif (
        not head and work.compile != "none" and work.device_type == "cpu"
    ):  # the gradient is written over the logits
        loss = 4 * logits
    else:
        loss = max((logits + head) * (4 + number), 8 * head)
    loss += 2 * work.input_bytes
    stack = _largest_stack(config) if optim.updates_matrices and not lora else 0
    if work.compile == "none":
        each = FORMATS[optim.state].eager_update_bytes + (
            0 if optim.master_weights else ROUNDED_WEIGHTS_BYTES
        )
        after = each * max(stack, trained - _matrices(config) * bool(stack))
    else:
        # New gradients that one graph returns; where products add them, those of the head alone.
        returned = trained if (work.compile == "whole" or lora) and not work.fused else head
        after = max(4 * returned, ORTHOGONAL_NUMBERS * number * stack)
    return int(static + max(stored + max(loss, block), after))


@functools.lru_cache(maxsize=64)
def _largest_stack(config: LlamaConfig) -> int:
    """Return the size, in numbers, of the largest plane of block matrices of one shape, which Muon
    updates at once.
    """
    return max(number * math.prod(shape) for shape, number in Counter(matrices(config)).items())


@functools.lru_cache(maxsize=64)
def _matrices(config: LlamaConfig) -> int:
    """Return how many numbers the matrices of all blocks have."""
    return _numbers(matrices(config))


@functools.lru_cache(maxsize=64)
def _largest_weight(config: LlamaConfig) -> int:
    """Return the numbers of the largest weight in a block, which may be all experts' matrices in
    one.
    """
    layers = range(config.num_hidden_layers)
    return max(
        math.prod(shape) for layer in layers for shape in layer_shapes(config, layer).values()
    )


def _numbers(shapes: list[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
