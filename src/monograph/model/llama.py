"""Compute the Llama decoder and its relatives: tokens in, final hidden states out. Parameter names are Hugging Face's.

One rule says which positions a position attends to, for documents, windows and padding: position t sees position s if
s <= t, both have the same segment and, with a window of w, t - s < w. A mask is built once per forward pass and shared
by all blocks with the same window. Documents are contiguous, so distances in a row are distances in a document. Padding
is segment 0, a segment like any other: no document sees it, and each of its positions sees at least itself, so that no
row of a softmax is empty.

Shape suffixes: B batch, T positions, S cache slots, D hidden size, H query heads, K key-value heads, E head dimension,
F = E / 2, V vocabulary, N blocks of positions; 1 broadcasts.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.rope import CosSin, cos_sin, rotate
from monograph.ops.attention import Impl, Kernel, Mask, attention
from monograph.ops.rms_norm import rms_norm

BLOCK = 128  # positions per side of a block: flex attention's own default
FLEX_HEAD = 16  # the smallest head_dim that flex attention computes on a GPU
_LAST = 2**62  # above every document number; F.pad converts its value to a double, so 2^63 - 1 overflows (torch 2.13)


def attention_mask(
    segments_BT: Tensor | None, tokens_BT: Tensor, impl: Impl, window: int | None = None, captured: bool = False
) -> Mask:
    """Return the mask of a forward pass without a cache, in the form that `impl` reads.

    "auto" gives a block mask for flex attention in compiled graphs on a GPU, the only place where it is fused, and a
    dense boolean mask elsewhere. Without segments and without a window that is shorter than the row, only causality is
    left, which needs no mask (None).

    Args:
        segments_BT: document number of each position in its row, 0 on padding, int64; None: one document a row.
        tokens_BT: the tokens, for shape and device.
        impl: the attention implementation.
        window: number of positions that a query sees, its own the last of them; None: all up to its own.
        captured: whether the blocks, which read the mask, are compiled graphs of their own.
    """
    window = None if window is None or window >= tokens_BT.shape[1] else window
    if segments_BT is None and window is None and impl != "flex":
        return None
    captured = captured or torch.compiler.is_compiling()
    if impl == "flex" or (impl == "auto" and tokens_BT.is_cuda and captured):
        return block_mask(torch.ones_like(tokens_BT) if segments_BT is None else segments_BT, window)
    # Without segments, one mask serves all rows.
    return dense_mask(torch.ones_like(tokens_BT[:1]) if segments_BT is None else segments_BT, window)


def dense_mask(segments_BT: Tensor, window: int | None = None) -> Tensor:
    """Return a boolean mask [B, 1, T, T], True where a query (third axis) sees a key (last axis)."""
    seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]).tril()
    return (seen_BTT if window is None else seen_BTT.triu(1 - window))[:, None]


def block_mask(segments_BT: Tensor, window: int | None = None) -> BlockMask:
    """Return the mask for flex attention: the blocks of keys that each block of queries needs partly or in full.

    Two blocks can share a document only if their ranges of segment numbers overlap, so N ranges a row suffice, and the
    [T, T] mask is never built (building it can cost more than the attention: lightseekorg/TorchSpec issue 86). Ranges
    that overlap without a shared document only cost time, because the rule itself is evaluated in partial blocks.
    """
    length = segments_BT.shape[1]
    blocks = -(-length // BLOCK)
    # Padding ends a row. Numbered highest instead of 0, it keeps a row's numbers ascending, and so the ranges short.
    numbers_BT = torch.where(segments_BT == 0, _LAST, segments_BT)
    blocks_BNX = F.pad(numbers_BT, (0, blocks * BLOCK - length), value=_LAST)
    blocks_BNX = blocks_BNX.unflatten(1, (blocks, BLOCK))
    low_BN, high_BN = blocks_BNX.amin(dim=-1), blocks_BNX.amax(dim=-1)
    overlap_BNN = (low_BN[:, :, None] <= high_BN[:, None, :]) & (low_BN[:, None, :] <= high_BN[:, :, None])
    uniform_BN = low_BN == high_BN
    full_BNN = (overlap_BNN & uniform_BN[:, :, None] & uniform_BN[:, None, :]).tril(-1)
    if window is not None:
        # Between two blocks n apart, distances go from (n - 1) BLOCK + 1 to (n + 1) BLOCK - 1.
        overlap_BNN = overlap_BNN.triu(-((window + BLOCK - 2) // BLOCK))
        full_BNN = full_BNN.triu(1 - window // BLOCK)
    partial_BNN = overlap_BNN.tril() & ~full_BNN

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (segments_BT[row, query] == segments_BT[row, key])
        return seen if window is None else seen & (query - key < window)

    return BlockMask.from_kv_blocks(
        *_listed(partial_BNN), *_listed(full_BNN), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def _listed(needed_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return flex attention's sparse form: the number of needed blocks, and all blocks' indices, needed ones first."""
    needed_B1NN = needed_BNN[:, None].to(torch.int32)
    order_B1NN = needed_B1NN.argsort(dim=-1, descending=True, stable=True)
    return needed_B1NN.sum(dim=-1, dtype=torch.int32), order_B1NN.to(torch.int32)


class Cache(Protocol):
    """The interface of a key-value cache; slot s holds the key and value of position s."""

    def attend(
        self,
        layer_index: int,
        query_BHTE: Tensor,
        key_BKTE: Tensor,
        value_BKTE: Tensor,
        positions_BT: Tensor,
        window: int | None,
    ) -> Tensor:
        """Store new keys and values at their positions; return the queries' attention to the slots that they see."""
        ...


class LayerCache(NamedTuple):
    """One block's view of a cache: its layer, the positions of the pass's tokens, and the block's window."""

    cache: Cache
    layer_index: int
    positions_BT: Tensor
    window: int | None


class Linear(nn.Linear):
    """A linear layer without initial weights, which `Llama` draws."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is: nn.Linear's own method would advance the global random state."""


class RMSNorm(nn.Module):
    """A layer that applies `rms_norm` with a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last axis."""
        return rms_norm(hidden, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions, and biases and norms of heads if the family has them."""

    siblings = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__()
        query, key_value = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        bias = config.attention_bias or config.family.qkv_bias
        self.q_proj = Linear(config.hidden_size, query, bias=bias)
        self.k_proj = Linear(config.hidden_size, key_value, bias=bias)
        self.v_proj = Linear(config.hidden_size, key_value, bias=bias)
        self.o_proj = Linear(query, config.hidden_size, bias=config.attention_bias)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps) if config.family.qk_norm else nn.Identity() for _ in range(2)
        )
        self.head_dim = config.head_dim
        self.impl = impl
        self.kernel: Kernel = "torch"
        self.device_type = ""

    def forward(self, hidden_BTD: Tensor, cos_sin_B1TF: CosSin, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """Return o_proj(attention(rotate(q_norm(q_proj x)), rotate(k_norm(k_proj x)), v_proj x)), norms per head."""
        query_BHTE, key_BKTE, value_BKTE = (
            projection(hidden_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query_BHTE = rotate(self.q_norm(query_BHTE), cos_sin_B1TF, self.device_type)
        key_BKTE = rotate(self.k_norm(key_BKTE), cos_sin_B1TF, self.device_type)
        if cache is None:
            mixed_BHTE = attention(query_BHTE, key_BKTE, value_BKTE, mask, self.impl, self.kernel)
        else:
            mixed_BHTE = cache.cache.attend(
                cache.layer_index, query_BHTE, key_BKTE, value_BKTE, cache.positions_BT, cache.window
            )
        return self.o_proj(mixed_BHTE.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A SwiGLU layer, down(silu(gate x) * up x) (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202)."""

    siblings = ("gate_proj", "up_proj")

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return self.down_proj(F.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))


class Block(nn.Module):
    """One layer: x += attention(norm x), then x += mlp(norm x). It can be compiled or recomputed alone."""

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, impl)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden_BTD: Tensor, cos_sin_B1TF: CosSin, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        attended_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), cos_sin_B1TF, mask, cache)
        return attended_BTD + self.mlp(self.post_attention_layernorm(attended_BTD))


class Decoder(nn.Module):
    """A container that gives the embedding, the blocks and the final norm their Hugging Face names."""

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__()
        empty_VD = torch.empty(config.vocab_size, config.hidden_size)
        # As in transformers, looking up the padding row gives it no gradient; a tied head still does.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id, _weight=empty_VD)
        self.layers = nn.ModuleList(Block(config, impl) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """A language model of one of the families in `monograph.model.families`: Llama, Mistral, Qwen 2 or Qwen 3.

    Initial weights: every matrix ~ N(0, initializer_range^2), the two that end a residual branch (o_proj, down_proj)
    divided by sqrt(2 * num_hidden_layers), norm weights 1, biases 0 (Radford et al. 2019, "Language Models are
    Unsupervised Multitask Learners", section 2.3). Each matrix has its own random stream, keyed by seed and name and
    drawn in fp32 on the CPU, so that its weights depend neither on the device nor on other parameters; the global
    random state is not used. On the meta device nothing is drawn.

    Args:
        config: the shape.
        seed: seeds the initial weights.
        attention: the attention implementation, see `attention_mask`; others than "auto" are for comparisons.
    """

    fuses = True  # it takes no gradients itself, so products may add those of weights (`monograph.ops.fused_gradients`)
    blocks_captured = False  # whether each block is a compiled graph of its own (`monograph.graph.capture`)

    def __init__(self, config: LlamaConfig, seed: int = 0, attention: Impl = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.model = Decoder(config, attention)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        self._initialise(seed)

    def forward(
        self,
        tokens_BT: Tensor,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the final hidden states, after the last norm.

        Args:
            tokens_BT: ids, int64.
            segments: [B, T] int64, document number in the row, 0 on padding; None: one document a row, causal.
            positions: [B, T] int64, position in the document; None: 0 .. T - 1. With a cache, the caller must keep them
                below max_position_embeddings, because their values are not read here.
            cache: keys and values of earlier tokens; a query at position p then sees slots s <= p in its window.

        Returns:
            [B, T, D] in the dtype of the weights.

        Raises:
            InputRefused: T exceeds max_position_embeddings.
            ValueError: segments and a cache at once.
        """
        if cache is not None and segments is not None:
            raise ValueError("a cache holds one document per row: give positions, not segments")
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        hidden_BTD, of_blocks = self.begin(tokens_BT, segments, positions)
        for index, (block, further) in enumerate(zip(self.model.layers, of_blocks, strict=True)):
            layer_cache = None
            if cache is not None:
                layer_cache = LayerCache(cache, index, positions.expand_as(tokens_BT), self.config.window(index))
            hidden_BTD = block(hidden_BTD, *further, layer_cache)
        return self.end(hidden_BTD)

    def begin(
        self, tokens_BT: Tensor, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, list[tuple[CosSin, Mask]]]:
        """Return the embedded tokens, and each block's further arguments.

        The arguments are those of `forward`, and `forward(x) = end(blocks(begin(x)))`. A caller that runs the blocks
        itself, as streaming does, needs only `parts_before` here, and only `parts_after` in `end` and the loss.
        """
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        cos_sin_B1TF, layer_masks = self.attention_inputs(tokens_BT, segments, positions)
        hidden_BTD = self.model.embed_tokens(tokens_BT)
        if torch.is_autocast_enabled(hidden_BTD.device.type):
            # Autocast leaves the embedding in fp32, and so the residual stream, the largest memory traffic of the pass.
            hidden_BTD = hidden_BTD.to(torch.get_autocast_dtype(hidden_BTD.device.type))
        return hidden_BTD, [(cos_sin_B1TF, mask) for mask in layer_masks]

    def end(self, hidden_BTD: Tensor) -> Tensor:
        """Return the output of the last norm for the blocks' output."""
        return self.model.norm(hidden_BTD)

    @property
    def parts_before(self) -> list[nn.Module]:
        """Return the modules whose parameters `begin` reads."""
        return [self.model.embed_tokens]

    @property
    def parts_after(self) -> list[nn.Module]:
        """Return the modules whose parameters `end` and the head read."""
        return [self.model.norm, self.lm_head]

    def attention_inputs(
        self, tokens_BT: Tensor, segments: Tensor | None, positions: Tensor
    ) -> tuple[CosSin, list[Mask]]:
        """Return the blocks' further arguments: cosine and sine of the positions, and each layer's mask.

        Layers with the same window share one mask.

        Raises:
            InputRefused: the sequence is longer than max_position_embeddings.
        """
        length, longest = tokens_BT.shape[1], self.config.max_position_embeddings
        if length > longest:
            raise InputRefused(
                f"a sequence of {length} tokens is longer than the model's max_position_embeddings = {longest}; "
                "shorten the sequence or choose a model with more positions"
            )
        dtype = torch.float64 if self.model.embed_tokens.weight.dtype == torch.float64 else torch.float32
        # A window longer than the row counts as the row's length, so that such layers share one mask.
        windows = [min(self.config.window(layer) or length, length) for layer in range(self.config.num_hidden_layers)]
        small = self.config.head_dim < FLEX_HEAD
        impl: Impl = "sdpa" if self.attention == "auto" and small else self.attention
        captured = self.blocks_captured
        by_window = {w: attention_mask(segments, tokens_BT, impl, w, captured) for w in dict.fromkeys(windows)}
        return cos_sin(positions, self.config, dtype), [by_window[window] for window in windows]

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits over the vocabulary, hidden @ lm_head.weight^T: [..., D] to [..., V]."""
        return self.lm_head(hidden_BTD)

    def use_attention(self, impl: Impl, kernel: Kernel = "torch", device_type: str = "") -> None:
        """Set the attention implementation, as the argument `attention` does, its torch kernel, `rotate`'s device."""
        self.attention = impl
        for block in self.model.layers:
            attention = cast(Block, block).self_attn
            attention.impl, attention.kernel, attention.device_type = impl, kernel, device_type

    def tie_weights(self) -> None:
        """Share the embedding matrix with the head if the configuration ties them; repeat it after replacing either."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        spread = self.config.initializer_range
        residual_spread = spread / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.copy_(noise.mul_(residual_spread if ends_branch else spread))
