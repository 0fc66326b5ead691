"""Estimate the peak memory of a training step in closed form.

The estimate takes microseconds, so that a search can compare many candidates. `footprint` traces
the chosen one. A number here is an element of a tensor. A plane is one tensor that has the values of
many parameters, such as all gradients.

    peak = static + max(stored + head,  stored + block,  returned gradients,  update)

static      For each of the P trained parameters: its weight, 4 bytes of its gradient, its optimizer
            state. If the matrix products of the backward pass add to the planes of gradients themselves
            (`Work.fused`) and nothing is recomputed: 2 bytes more, of the weight rounded to 16 bits.
            With adapters P counts the adapters'
            parameters, and the bytes of the frozen base are added.
stored      What the forward pass keeps for the backward pass: numbers per token and layer
            (`stored_numbers`) of all layers. A block that is captured in a low precision and
            recomputes nothing also keeps its weights, rounded.
head        The loss, which computes logits in chunks of tokens. It takes the gradient of the hidden
            states, and one of these:
            - If products add gradients: the logits of a chunk and the gradient of the head. Or, in an
              eager step, the logits with their gradient in fp32, before the gradient of the head is
              there, if that is more.
            - In a captured loss of a frozen head on a CPU: a chunk's logits in fp32, over which their
              gradient is written.
            - Otherwise the larger of two sums. The first is the head's gradient twice. The second is a
              chunk's logits, their gradient, the head's gradient, and the head's rounded weights. In
              fp32, where nothing is rounded, a chunk's product takes the place of the rounded weights.
              A captured step on a GPU never has the logits and their gradient at the same time.
block       The values of one block that are recomputed because they were not stored, and the gradients
            of all its values. If the base is quantised, its largest weight, dequantised, is among the
            values.
returned gradients
            The gradients that a graph returns in new memory.
update      The intermediate values of an update: of the largest plane if the update is eager, of
            Muon's planes if it is captured.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.graph.lora import Lora
from monograph.graph.lora_targets import ALL_LINEAR
from monograph.graph.precision import Precision
from monograph.graph.remat import Choice, Product, Recording, cheapest_within
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama, feed_forward_of_family
from monograph.model.mixer import mixer_of
from monograph.model.parameters import (
    block_active_matrix_shapes,
    block_matrix_shapes,
    block_shapes,
    matrix_shapes,
)
from monograph.ops.attention import BLOCK_QUERIES, MAX_KEYS_IN_BLOCKS
from monograph.ops.cross_entropy import chunk_count
from monograph.optim.formats import FORMATS
from monograph.predict.footprint import INPUTS_ON_DEVICE, Work, layer_period

# Bytes per number of a frozen linear layer, scales included.
FROZEN_BYTES = {"int8": 1.0, "nf4": 0.516}
# Memory of an attention score, in bf16 numbers: its probability in fp32 (2) and in bf16 (1).
SCORE_NUMBERS = 3
# The additional bytes per number of an eager update without master weights, because it rounds weights.
ROUNDED_WEIGHTS_BYTES = 4
# How many numbers of the compute dtype are alive for each number of Muon's largest plane, while a
# captured update orthogonalises it.
ORTHOGONAL_NUMBERS = 3
# The names of attention's products among `_products`: (name, index of the call of this name in the block).
_SCORES, _ATTENTION = ("scores", 0), ("attention", 0)


def spared_bytes(
    parameters: int, parallel: str, ranks: int, base: tuple[str, str] | None = None
) -> int:
    """Return how many bytes a rank saves compared with training on one device; negative if it needs
    more.

    With ddp a rank holds a second copy of the gradients. With fsdp and hsdp it holds 1 / ranks of
    the weights, and if they are trained, of gradients and moments. The two blocks whose complete
    weights a rank gathers with fsdp are not counted.

    Args:
        parameters: the number of the model's parameters.
        parallel: "ddp", "fsdp" or "hsdp".
        ranks: the number of ranks among which the weights are divided.
        base: (format, precision) of the frozen weights of a model with adapters; None: all weights
            are trained, in fp32.
    """
    if base is None:
        if parallel == "ddp":
            return -4 * parameters
        # Weight, gradient and two moments in fp32.
        return int(16 * parameters * (1 - 1 / ranks))
    if parallel == "ddp":
        return 0
    base_format, precision = base
    weight_bytes = FROZEN_BYTES.get(base_format, 4.0 if precision == "fp32" else 2.0)
    return int(weight_bytes * parameters * (1 - 1 / ranks))


def stored_numbers(work: Work, remat: str | float) -> float:
    """Return how many numbers of the compute dtype a block keeps per token for its backward pass,
    its input included.

    Let d be the hidden size, q = query width / d, r = key-value width / d and phi = d_ff / d.

        captured, nothing recomputed     d (4 + 2q + 2r + 3 phi), as elementwise code is fused; q + r more if query,
                                         key and value are one product: the value is a view of it and keeps all
        eager, nothing recomputed        d (7 + 2q + 2r + 4 phi), what each operation keeps; below fp32 4 d more, for
                                         the fp32 copies of the norms
        pointwise                        d (2 + 2q + 2r + 2 phi), only the products
        a share                          that share of what is kept beyond the input
        full, offload                    d, the input; 0 if the input is on the host

    A mixture's d_ff is that of all experts of a token together, and `Work.routed_numbers` are
    added. Where attention is computed by matrix products (`monograph.ops.attention`), its
    probabilities are added in fp32 and in bf16. In a hybrid, some blocks have another mixer than
    attention (`Mixer.kept_numbers`). Then the result is the mean over blocks. The share that `remat`
    keeps of a block with attention is assumed to be kept of the other blocks, too.

    Args:
        work: the step.
        remat: the recomputation, used instead of `work.remat`, so that callers can compare several.
    """
    config = work.config
    layers = config.num_hidden_layers
    numbers = _attention_block_numbers(work, remat)
    captured = work.compile != "none"
    in_fp32 = work.precision == "fp32"
    blocks_by_mixer = Counter(mixer_of(config, layer) for layer in range(layers))
    kept_by_mixer = {
        mixer: mixer.kept_numbers(config, captured=captured, in_fp32=in_fp32)
        for mixer in blocks_by_mixer
    }
    # `kept_numbers` of attention is None, because a block with attention keeps `numbers`.
    all_attention = set(kept_by_mixer.values()) == {None}
    if all_attention or remat in ("full", "offload"):
        return numbers
    share = numbers / _attention_block_numbers(work, "none")
    feed_forward = (3 if captured else 4) * work.inner_numbers + work.routed_numbers
    total = 0.0
    for mixer, blocks in blocks_by_mixer.items():
        own_numbers = kept_by_mixer[mixer]
        if own_numbers is None:
            total += blocks * numbers
        else:
            total += blocks * share * (feed_forward + own_numbers)
    return total / layers


def _attention_block_numbers(work: Work, remat: str | float) -> float:
    """Return how many numbers per token a block with attention keeps, see `stored_numbers`."""
    width, query, key_value = _widths(work.config)
    if work.repeats_heads:
        key_value = query
    if remat == "full":
        return width
    if remat == "offload":
        return 0
    if remat != "none":
        # This field has numbers here, not bytes.
        return width + _kept_products(work, remat).stored_bytes
    if work.compile != "none":
        scores = SCORE_NUMBERS * score_numbers(work)
        joined_product = query + key_value if work.fused and not work.lora else 0
        return (
            4 * width
            + 2 * query
            + 2 * key_value
            + joined_product
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
    """Return how many attention scores per token of a block are in memory; 0 if a fused kernel
    computes attention.

    Attention is computed for one block of queries after another. Each reads the keys up to its own end.
    """
    uses_products = (
        work.device_type == "cpu" and work.compile != "none" and work.precision == "bf16"
    )
    if not uses_products or work.length > MAX_KEYS_IN_BLOCKS:
        return 0
    block_ends = [
        min(work.length, (block + 1) * BLOCK_QUERIES)
        for block in range(math.ceil(work.length / BLOCK_QUERIES))
    ]
    mean_keys = sum(block_ends) / len(block_ends)
    return int(work.config.num_attention_heads * mean_keys)


def recomputed_flops(work: Work) -> tuple[int, int]:
    """Return the FLOPs per token and layer that the backward pass recomputes: of linear layers, and
    of attention.
    """
    if work.remat in ("none", "pointwise"):
        return 0, 0
    kept: Sequence[object] = ()
    if work.remat not in ("full", "offload"):
        kept = _kept_products(work, work.remat).selection
    recomputed = [product for product in _products(work) if product.name not in kept]
    attention_flops = sum(
        product.flops for product in recomputed if product.name in (_SCORES, _ATTENTION)
    )
    linear_flops = sum(product.flops for product in recomputed) - attention_flops
    if not kept:
        # A block that is recomputed as a whole also recomputes its last product (down), although
        # nothing reads the result. This product is not among `_products`.
        linear_flops += 2 * work.config.hidden_size * work.inner_numbers
    return linear_flops, attention_flops


def _widths(config: LlamaConfig) -> tuple[int, int, int]:
    """Return the hidden size, the width of all query heads, and the width of all key-value heads.

    Where layers have heads of several widths, these are means over layers.
    """
    of_layers = [config.of_layer(layer) for layer in range(config.num_hidden_layers)]
    key_value_widths = [each.num_key_value_heads * each.head_dim for each in of_layers]
    key_value_width = sum(key_value_widths) // len(of_layers)
    return config.hidden_size, query_width(config), key_value_width


def query_width(config: LlamaConfig) -> int:
    """Return the width of all query heads of a layer together, the mean over layers."""
    layers = range(config.num_hidden_layers)
    mean_head_dim = sum(config.of_layer(layer).head_dim for layer in layers) / len(layers)
    return int(config.num_attention_heads * mean_head_dim)


def _products(work: Work) -> tuple[Product, ...]:
    """Return the matrix products of a block, per token, except the last one (down), whose result the
    backward pass does not read.

    The field `stored_bytes` of a `Product` has the numbers of its result here, not bytes.
    """
    width, query, key_value = _widths(work.config)
    inner = work.inner_numbers
    result_widths = {
        "query": query,
        "key": key_value,
        "value": key_value,
        "gate": inner,
        "up": inner,
    }
    # With an adapter there are two results: the adapter's and the frozen weight's.
    results = 2 if work.lora else 1
    linear = [
        Product((name, 0), results * result_width, 2 * width * result_width)
        for name, result_width in result_widths.items()
    ]
    # Scores and mixing of the values each take half of attention's FLOPs: 2 * query width for each pair of
    # tokens. A token is in length / 2 pairs, since causal attention sees half of them.
    half_flops = query * work.length
    scores = score_numbers(work)
    if scores:
        attention = [Product(_SCORES, scores, half_flops), Product(_ATTENTION, query, half_flops)]
    else:
        attention = [Product(_ATTENTION, query, 2 * half_flops)]
    return (*linear, *attention, Product(("output", 0), results * width, 2 * query * width))


@functools.lru_cache(maxsize=64)
def _kept_products(work: Work, remat: str | float) -> Choice:
    """Return which products a block keeps with remat "pointwise" or a share.

    The field `stored_bytes` of the `Choice` has numbers per token here, not bytes.
    """
    # The choices go from the one that keeps least to the one that keeps all products. Each takes the
    # least memory for what it recomputes.
    recording = Recording(input_bytes=0, stored_bytes=0, rest_flops=0, products=_products(work))
    choices = recording.choices()
    if remat == "pointwise":
        return choices[-1]
    # What a block keeps if nothing is recomputed, its rounded weights included, without its input.
    numbers_beyond_input = (
        _attention_block_numbers(work, "none")
        - work.config.hidden_size
        + _rounded_numbers(work) / work.tokens
    )
    max_numbers = int(float(remat) * numbers_beyond_input)
    # If no choice keeps so little, the first one keeps least.
    return cheapest_within(choices, max_numbers) or choices[0]


def _rounded_numbers(work: Work) -> int:
    """Return how many numbers of a block's weights the forward pass keeps rounded to the compute
    dtype, in addition to the weights themselves.
    """
    already_in_compute_dtype = work.precision == "fp32" or not work.optim.master_weights
    # Only captured blocks keep them. With adapters, frozen weights are not rounded again. If products
    # add gradients (`fused`), all rounded weights are part of `static`.
    if work.compile == "none" or already_in_compute_dtype or work.lora or work.fused:
        return 0
    layers = range(work.config.num_hidden_layers)
    return max(_count_numbers(block_matrix_shapes(work.config, layer)) for layer in layers)


class _AdaptedSizes(NamedTuple):
    """The sizes of a model with adapters.

    Attributes:
        adapters: the adapters' parameters.
        base_bytes: the bytes of the frozen weights.
        multiplied: the adapters' parameters that one token is multiplied with; of a mixture's
            experts, those that compute the token.
    """

    adapters: int
    base_bytes: int
    multiplied: float


@functools.lru_cache(maxsize=64)
def _adapted_sizes(config: LlamaConfig, lora: Lora, precision: str) -> _AdaptedSizes:
    """Return the sizes of a model with adapters.

    If all periods of blocks (see `layer_period`) get the same adapters, two shallow models are
    built instead of the whole one. The difference of their sizes is what each period adds.
    """
    layers = config.num_hidden_layers
    period = layer_period(config)
    shallow = period + layers % period
    # A pattern of module names may select adapters in some blocks only, and so may the names of dense layers.
    has_pattern = isinstance(lora.targets, str) and lora.targets != ALL_LINEAR
    may_differ = has_pattern or bool(lora.dense)
    if may_differ or layers <= shallow + period:
        return _count_sizes(config, lora, precision)
    low = _count_sizes(config.shortened(shallow), lora, precision)
    high = _count_sizes(config.shortened(shallow + period), lora, precision)
    periods = (layers - shallow) // period
    return _AdaptedSizes(
        low.adapters + periods * (high.adapters - low.adapters),
        low.base_bytes + periods * (high.base_bytes - low.base_bytes),
        low.multiplied + periods * (high.multiplied - low.multiplied),
    )


def _count_sizes(config: LlamaConfig, lora: Lora, precision: str) -> _AdaptedSizes:
    """Build a model with adapters on the meta device, and return its sizes."""
    with torch.device("meta"):
        model = Llama(config)
        install_adapters(model, lora, precision=Precision(precision))
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    frozen = [tensor for tensor in model.parameters() if not tensor.requires_grad]
    feed_forward = feed_forward_of_family(config)

    def active_share(name: str, tensor: Tensor) -> float:
        """Return the share of a parameter that one token is multiplied with."""
        if tensor.ndim < 3:
            return 1
        # A parameter with three dimensions has the matrices of several experts.
        return feed_forward.active_matrices(config, name, len(tensor)) / len(tensor)

    multiplied = sum(
        tensor.numel() * active_share(name, tensor) for name, tensor in trained.items()
    )
    return _AdaptedSizes(
        adapters=sum(tensor.numel() for tensor in trained.values()),
        base_bytes=sum(tensor.nbytes for tensor in frozen),
        multiplied=multiplied,
    )


def trained_numbers(config: LlamaConfig, lora: Lora | None, precision: str) -> int:
    """Return the number of trained parameters: the adapters' if there are adapters, else all."""
    if lora:
        return _adapted_sizes(config, lora, precision).adapters
    return config.parameter_count()


def gathered_copy_bytes(
    config: LlamaConfig, lora: Lora | None, precision: str, gathers_bf16: bool
) -> int:
    """Return the bytes of the complete copy that each rank makes of a sharded model, to sample answers
    from it; see `Parameters.gathered`.

    Args:
        config: the model's shape.
        lora: the adapters; None: all weights are trained.
        precision: the compute precision. Below fp32, the blocks' matrices are kept in its 16 bits.
        gathers_bf16: whether all weights of the blocks are kept in 16 bits, not only matrices.
    """
    if lora:
        sizes = _adapted_sizes(config, lora, precision)
        return sizes.base_bytes + 4 * sizes.adapters
    narrow: int  # how many numbers are in 16 bits
    if precision == "fp32":
        narrow = 0
    elif gathers_bf16:
        layers = range(config.num_hidden_layers)
        narrow = _count_numbers(
            [shape for layer in layers for shape in block_shapes(config, layer).values()]
        )
    else:
        narrow = _matrix_numbers(config)
    return 4 * config.parameter_count() - 2 * narrow


def active_adapter_parameters(work: Work) -> int:
    """Return how many of the adapters' parameters one token is multiplied with; 0 if the model itself
    is trained.
    """
    if not work.lora:
        return 0
    return round(_adapted_sizes(work.config, work.lora, work.precision).multiplied)


def dequantising_bytes(work: Work) -> float:
    """Return the bytes that one pass over all blocks reads and writes to dequantise linear weights;
    0 if no weights are quantised.
    """
    if work.lora is None or work.lora.base not in FROZEN_BYTES:
        return 0.0
    return _matrix_numbers(work.config) * (FROZEN_BYTES[work.lora.base] + work.number_bytes)


def dequantised_weight_bytes(work: Work) -> int:
    """Return the bytes of a block's largest weight while it is dequantised, in fp32 and in the compute
    dtype; 0 if no weights are quantised.
    """
    is_quantised = work.lora is not None and work.lora.base != "auto"
    return (4 + work.number_bytes) * _largest_weight(work.config) if is_quantised else 0


def estimate_bytes(work: Work) -> int:
    """Return the peak bytes by the closed form at the top of this file, on a device of
    `work.device_type`.

    With adapters, the head has no gradient, and each adapter's inner values `A x` are kept.
    """
    config = work.config
    lora = work.lora
    number_bytes = work.number_bytes
    tokens = work.tokens
    optim = work.optim
    captured = work.compile != "none"

    # static
    weight_bytes = 4 if optim.master_weights else 2
    moments: float  # of each trained parameter
    if lora:
        trained, frozen_bytes, _ = _adapted_sizes(config, lora, work.precision)
        moments = optim.moments_per_block_matrix
    else:
        trained = config.parameter_count()
        frozen_bytes = 0
        moments = optim.moments_per_parameter
    keeps_rounded = work.fused and work.remat == "none" and weight_bytes == 4
    rounded_bytes = 2 if keeps_rounded else 0
    gradient_bytes = 4
    moment_bytes = moments * FORMATS[optim.state].bytes_each
    average_bytes = 0 if optim.ema is None else weight_bytes
    static = frozen_bytes + trained * (
        weight_bytes + rounded_bytes + gradient_bytes + moment_bytes + average_bytes
    )
    if work.quantize != "none":
        static += 4 * _numbers_in_blocks(config)

    # stored
    adapter_inner = 0
    if lora and work.remat not in ("full", "offload"):
        shapes = block_active_matrix_shapes(config, config.num_hidden_layers - 1)
        # With DoRA a number for each output is kept, too.
        adapter_inner = sum(lora.rank + (shape[0] if lora.dora else 0) for shape in shapes)
    kept_numbers = (stored_numbers(work, work.remat) + adapter_inner) * tokens
    if work.remat == "none":
        kept_numbers += _rounded_numbers(work)
    stored: float
    if work.remat == "offload":
        stored = INPUTS_ON_DEVICE * work.input_bytes
    else:
        stored = config.num_hidden_layers * kept_numbers * number_bytes

    # block: all its values and their gradients, without the values that are counted in `stored`. With
    # "offload" the block's input has come back to the device, as if it had stayed there ("full").
    dense_weight_bytes = dequantised_weight_bytes(work)
    value_bytes = stored_numbers(work, "none") * number_bytes * tokens
    remat = "full" if work.remat == "offload" else work.remat
    stored_value_bytes = stored_numbers(work, remat) * number_bytes * tokens
    block = 2 * (value_bytes + dense_weight_bytes) - stored_value_bytes

    # head (`head_numbers` is 0 if the head is frozen)
    head_numbers = 0 if lora else config.vocab_size * config.hidden_size
    chunk_tokens = tokens / chunk_count(tokens, config.vocab_size, work.device_type)
    logits = chunk_tokens * config.vocab_size
    # The branches are those of `head` at the top of this file, the third for a captured step on a GPU.
    if work.fused:
        # In an eager step, a chunk's logits are in fp32 twice while they become their gradient.
        logit_bytes = number_bytes if captured else 8 + number_bytes
        head = max(logits * logit_bytes, logits * number_bytes + 4 * head_numbers)
    elif not head_numbers and captured and work.device_type == "cpu":
        head = 4 * logits
    elif captured and work.device_type == "cuda":
        head = max(logits * number_bytes + head_numbers * (4 + number_bytes), 8 * head_numbers)
    else:
        head = max((logits + head_numbers) * (4 + number_bytes), 8 * head_numbers)
    if work.precision == "fp8_head":
        # The head's weights in fp8, in two layouts, and the gradient of a chunk's logits.
        head += 2 * head_numbers + logits
    head += 2 * work.input_bytes

    # returned gradients and update
    largest_stack = _largest_stack(config) if optim.updates_matrices and not lora else 0
    if captured:
        # One graph of both passes returns the gradients of all parameters in new memory. Where
        # products add gradients to the planes, or with a graph for each block, only the gradient of
        # the head is new. The gradients of adapters are new with a graph for each block, too.
        returns_all = (work.compile == "whole" or lora) and not work.fused
        returned_gradients = trained if returns_all else head_numbers
        after_passes = max(
            4 * returned_gradients, ORTHOGONAL_NUMBERS * number_bytes * largest_stack
        )
    else:
        update_bytes = FORMATS[optim.state].eager_update_bytes
        if not optim.master_weights:
            update_bytes += ROUNDED_WEIGHTS_BYTES
        largest_plane = trained
        if largest_stack:
            # An optimizer that updates matrices has a plane for the matrices of each shape, and a
            # plane for all other parameters.
            largest_plane = max(largest_stack, trained - _matrix_numbers(config))
        after_passes = update_bytes * largest_plane
    return int(static + max(stored + max(head, block), after_passes))


@functools.lru_cache(maxsize=64)
def _largest_stack(config: LlamaConfig) -> int:
    """Return how many numbers the largest stack has. A stack is all block matrices of one shape, which
    Muon updates together.
    """
    return max(count * math.prod(shape) for shape, count in Counter(matrix_shapes(config)).items())


@functools.lru_cache(maxsize=64)
def _matrix_numbers(config: LlamaConfig) -> int:
    """Return how many numbers the matrices of all blocks have."""
    return _count_numbers(matrix_shapes(config))


def _numbers_in_blocks(config: LlamaConfig) -> int:
    """Return how many numbers `train.quantize` rounds, of each of which there is an unrounded one, too."""
    tables = 1 if config.tie_word_embeddings else 2  # the embedding and the head
    return _matrix_numbers(config) + tables * config.vocab_size * config.hidden_size


@functools.lru_cache(maxsize=64)
def _largest_weight(config: LlamaConfig) -> int:
    """Return how many numbers the largest weight of a block has. All experts' matrices may be one
    weight.
    """
    layers = range(config.num_hidden_layers)
    return max(
        math.prod(shape) for layer in layers for shape in block_shapes(config, layer).values()
    )


def _count_numbers(shapes: list[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
