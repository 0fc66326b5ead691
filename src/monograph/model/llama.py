"""Compute the Llama decoder and its relatives: tokens in, final hidden states out. Parameter names
are Hugging Face's.

One rule says which positions a position attends to, for documents, windows and padding: position t
sees position s if s <= t, both have the same segment and, with a window of w, t - s < w. A mask is
built once per forward pass and shared by all blocks with the same window. Documents are contiguous,
so distances in a row are distances in a document. Padding is segment 0, a segment like any other:
no document sees it, and each of its positions sees at least itself, so that no row of a softmax is
empty.

Shape suffixes: B batch, T positions, N blocks of positions, S cache slots, D hidden size, H query
heads, K key-value heads, E head dimension, F = E / 2, V vocabulary; 1 broadcasts.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from monograph.errors import InputRefused
from monograph.graph.experts import Balance, balance_of
from monograph.model import mixture_keys
from monograph.model.config import LlamaConfig
from monograph.model.delta_net import GatedDeltaNet, drawn
from monograph.model.layers import (
    MLP,
    Attention,
    Cache,
    LayerCache,
    Linear,
    Mixture,
    norm_of,
    scale,
)
from monograph.model.rope import CosSin, cos_sin
from monograph.model.sampling_defaults import Defaults
from monograph.ops.attention import Impl, Kernel, Mask

BLOCK = 128  # positions per side of a block: flex attention's own default
# Above every document number; F.pad converts its value to a double, so 2^63 - 1 overflows (torch
# 2.13).
_LAST = 2**62


def attention_mask(
    segments_BT: Tensor | None,
    tokens_BT: Tensor,
    impl: Impl,
    window: int | None = None,
    captured: bool = False,
) -> Mask:
    """Return the mask of a forward pass without a cache, in the form that `impl` reads.

    "auto" gives a block mask for flex attention in compiled graphs on a GPU, the only place where
    it is fused, and a dense boolean mask elsewhere. Without segments and without a window that is
    shorter than the row, only causality is left, which needs no mask (None).

    Args:
        segments_BT: document number of each position in its row, 0 on padding, int64; None: one
            document a row.
        tokens_BT: the tokens, for shape and device.
        impl: the attention implementation.
        window: number of positions that a query sees, its own the last of them; None: all up to its
            own.
        captured: whether the blocks, which read the mask, are compiled graphs of their own.
    """
    window = None if window is None or window >= tokens_BT.shape[1] else window
    if segments_BT is None and window is None and impl != "flex":
        return None
    captured = captured or torch.compiler.is_compiling()
    if impl == "flex" or (impl == "auto" and tokens_BT.is_cuda and captured):
        return block_mask(
            torch.ones_like(tokens_BT) if segments_BT is None else segments_BT, window
        )
    # Without segments, one mask serves all rows.
    return dense_mask(
        torch.ones_like(tokens_BT[:1]) if segments_BT is None else segments_BT, window
    )


def dense_mask(segments_BT: Tensor, window: int | None = None) -> Tensor:
    """Return a boolean mask [B, 1, T, T], True where a query (third axis) sees a key (last axis)."""
    seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]).tril()
    return (seen_BTT if window is None else seen_BTT.triu(1 - window))[:, None]


def block_mask(segments_BT: Tensor, window: int | None = None) -> BlockMask:
    """Return the mask for flex attention: the blocks of keys that each block of queries needs
    partly or in full.

    Two blocks can share a document only if their ranges of segment numbers overlap, so N ranges a
    row suffice, and the [T, T] mask is never built (building it can cost more than the attention:
    lightseekorg/TorchSpec issue 86). Ranges that overlap without a shared document only cost time,
    because the rule itself is evaluated in partial blocks.
    """
    length = segments_BT.shape[1]
    blocks = -(-length // BLOCK)
    # Padding ends a row. Numbered highest instead of 0, it keeps a row's numbers ascending, and so
    # the ranges short.
    numbers_BT = torch.where(segments_BT == 0, _LAST, segments_BT)
    blocks_BNX = F.pad(numbers_BT, (0, blocks * BLOCK - length), value=_LAST).unflatten(
        1, (blocks, BLOCK)
    )
    low_BN = blocks_BNX.amin(dim=-1)
    high_BN = blocks_BNX.amax(dim=-1)
    overlap_BNN = (low_BN[:, :, None] <= high_BN[:, None, :]) & (
        low_BN[:, None, :] <= high_BN[:, :, None]
    )
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
        *_listed(partial_BNN),
        *_listed(full_BNN),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _listed(needed_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return flex attention's sparse form: the number of needed blocks, and all blocks' indices,
    needed ones first.
    """
    needed_B1NN = needed_BNN[:, None].to(torch.int32)
    order_B1NN = needed_B1NN.argsort(dim=-1, descending=True, stable=True)
    return needed_B1NN.sum(dim=-1, dtype=torch.int32), order_B1NN.to(torch.int32)


FLEX_HEAD = 16  # the smallest head_dim that flex attention computes on a GPU


class Block(nn.Module):
    """One layer: x += norm(mixer(norm x)), then x += norm(mlp(norm x)), with the norms that its
    family has.

    The mixer is attention or a gated delta net.

    It can be compiled or recomputed alone.
    """

    def __init__(self, config: LlamaConfig, impl: Impl, layer: int) -> None:
        super().__init__()
        self.norms = config.family.norms
        # The order of parameters is that of the computation.
        self._add_norms(config, self.norms[:1])
        kind, self.mixes_by = (
            (GatedDeltaNet, "linear_attn") if config.is_linear(layer) else (Attention, "self_attn")
        )
        self.add_module(self.mixes_by, kind(config, impl))
        self._add_norms(config, self.norms[1:3])
        self.mlp = Mixture(config) if config.is_mixture(layer) else MLP(config)
        self._add_norms(config, self.norms[3:])
        self.scale = scale(config.residual_multiplier)

    def _add_norms(self, config: LlamaConfig, names: Iterable[str | None]) -> None:
        for name in filter(None, names):
            self.add_module(name, norm_of(config, config.hidden_size))

    def _normed(self, name: str | None, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD if name is None else getattr(self, name)(hidden_BTD)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
        balance: Balance | None = None,
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D]; only a mixture has a `balance`."""
        norms = self.norms
        normed_BTD = self._normed(norms.before_attention, hidden_BTD)
        branch_BTD = getattr(self, self.mixes_by)(normed_BTD, cos_sin_B1TF, mask, cache)
        hidden_BTD = hidden_BTD + self.scale(self._normed(norms.after_attention, branch_BTD))
        normed_BTD = self._normed(norms.before_mlp, hidden_BTD)
        branch_BTD = self.mlp(normed_BTD) if balance is None else self.mlp(normed_BTD, balance)
        return hidden_BTD + self.scale(self._normed(norms.after_mlp, branch_BTD))


class Decoder(nn.Module):
    """A container that gives the embedding, the blocks and the final norm their Hugging Face names."""

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__()
        empty_VD = torch.empty(config.vocab_size, config.hidden_size)
        # As in transformers, looking up the padding row gives it no gradient; a tied head still
        # does.
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, _weight=empty_VD
        )
        self.layers = nn.ModuleList(
            Block(config, impl, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = norm_of(config, config.hidden_size)


class Llama(nn.Module):
    """A language model of one of the families in `monograph.model.families`, such as Llama, Qwen or
    Gemma.

    Initial weights: every matrix ~ N(0, initializer_range^2), the two that end a residual branch
    (o_proj, down_proj) divided by sqrt(2 * num_hidden_layers), norms' factors 1, biases and sinks 0
    (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3). Each
    matrix has its own random stream, keyed by seed and name and drawn in fp32 on the CPU, so that
    its weights depend neither on the device nor on other parameters; the global random state is not
    used. On the meta device nothing is drawn.

    Args:
        config: the shape.
        seed: seeds the initial weights.
        attention: the attention implementation, see `attention_mask`; others than "auto" are for
            comparisons.

    Attributes:
        sampling: how its makers want its texts drawn, by the names in generation_config.json, which
            exports keep; empty for a new model. Nothing here draws by it.
    """

    # It takes no gradients itself, so products may add those of weights
    # (`monograph.ops.fused_gradients`).
    fuses = True
    # Whether each block is a compiled graph of its own (`monograph.graph.capture`).
    blocks_captured = False

    def __init__(self, config: LlamaConfig, seed: int = 0, attention: Impl = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.model = Decoder(config, attention)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        # transformers keeps the factor in fp32.
        self.scale_embedded = scale(torch.tensor(config.embedding_scale, device="cpu").item())
        self.scale_last = scale(1 / config.logits_scaling)
        self.sampling: Defaults = {}
        self.balance_factor = mixture_keys.balance_factor(config)
        self.tie_weights()
        self._initialise(seed)

    def forward(
        self,
        tokens_BT: Tensor,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        shares: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states, after the last norm.

        Args:
            tokens_BT: ids, int64.
            segments: [B, T] int64, document number in the row, 0 on padding; None: one document a
                row, causal.
            positions: [B, T] int64, position in the document; None: 0 .. T - 1. With a cache, the
                caller must keep them below max_position_embeddings, because their values are not
                read here.
            cache: keys and values of earlier tokens; a query at position p then sees slots s <= p
                in its window.
            shares: [B, T] floating, each position's factor in the number that is differentiated, 0
                where there is no target. It changes no value: a backward pass adds the gradient of
                each mixture's balance with the shares shares * balance_factor, see
                `monograph.graph.experts`. Not with a cache.

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
        hidden_BTD, of_blocks = self.begin(tokens_BT, segments, positions, shares)
        for index, (block, further) in enumerate(zip(self.model.layers, of_blocks, strict=True)):
            if cache is not None:
                further += (
                    LayerCache(
                        cache, index, positions.expand_as(tokens_BT), self.config.window(index)
                    ),
                )
            hidden_BTD = block(hidden_BTD, *further)
        return self.end(hidden_BTD)

    def begin(
        self,
        tokens_BT: Tensor,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        shares: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[object, ...]]]:
        """Return the embedded tokens, and each block's further arguments.

        The arguments are those of `forward`, and `forward(x) = end(blocks(begin(x)))`. A caller
        that runs the blocks itself, as streaming does, needs only `parts_before` here, and only
        `parts_after` in `end` and the loss.
        """
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        layer_inputs: list[tuple[object, ...]] = [
            *self.attention_inputs(tokens_BT, segments, positions)
        ]
        if shares is not None:
            balance = balance_of(segments, shares * self.balance_factor)
            layers = enumerate(layer_inputs)
            layer_inputs = [
                (*each, None, balance) if self.config.is_mixture(at) else each
                for at, each in layers
            ]
        hidden_BTD = self.scale_embedded(self.model.embed_tokens(tokens_BT))
        if torch.is_autocast_enabled(hidden_BTD.device.type):
            # Autocast leaves the embedding in fp32, and so the residual stream, the largest memory
            # traffic of the pass.
            hidden_BTD = hidden_BTD.to(torch.get_autocast_dtype(hidden_BTD.device.type))
        return hidden_BTD, layer_inputs

    def end(self, hidden_BTD: Tensor) -> Tensor:
        """Return the output of the last norm for the blocks' output, divided as the logits are."""
        return self.scale_last(self.model.norm(hidden_BTD))

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
    ) -> list[tuple[CosSin | None, Mask]]:
        """Return each block's further arguments: cosine and sine of the positions if it rotates,
        and its mask.

        Layers with the same window share one mask. A delta net has the segments instead.

        Raises:
            InputRefused: the sequence is longer than max_position_embeddings.
        """
        length = tokens_BT.shape[1]
        longest = self.config.max_position_embeddings
        if length > longest:
            raise InputRefused(
                f"a sequence of {length} tokens is longer than the model's max_position_embeddings = {longest}; "
                "shorten the sequence or choose a model with more positions"
            )
        dtype = (
            torch.float64
            if self.model.embed_tokens.weight.dtype == torch.float64
            else torch.float32
        )
        # A window longer than the row counts as the row's length, so that such layers share one
        # mask.
        layers = range(self.config.num_hidden_layers)
        windows = [min(self.config.window(layer) or length, length) for layer in layers]
        impl: Impl = (
            "sdpa"
            if self.attention == "auto" and self.config.head_dim < FLEX_HEAD
            else self.attention
        )
        seen = dict.fromkeys(windows[layer] for layer in layers if not self.config.is_linear(layer))
        by_window = {
            w: attention_mask(segments, tokens_BT, impl, w, self.blocks_captured) for w in seen
        }
        kinds = dict.fromkeys(
            self.config.is_local(layer) for layer in layers if self.config.rotates(layer)
        )
        turns = {kind: cos_sin(positions, self.config, dtype, kind) for kind in kinds}
        turned = [
            turns[self.config.is_local(layer)] if self.config.rotates(layer) else None
            for layer in layers
        ]
        masks = [
            segments if self.config.is_linear(layer) else by_window[windows[layer]]
            for layer in layers
        ]
        return list(zip(turned, masks, strict=True))

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits over the vocabulary, hidden @ lm_head.weight^T: [..., D] to [..., V]."""
        return self.lm_head(hidden_BTD)

    def use_attention(self, impl: Impl, kernel: Kernel = "torch", device_type: str = "") -> None:
        """Set the attention implementation, as the argument `attention` does, its torch kernel,
        `rotate`'s device.
        """
        self.attention = impl
        for block in self.model.layers:
            mixer = getattr(block, cast(Block, block).mixes_by)
            mixer.impl = impl
            if isinstance(mixer, Attention):
                mixer.kernel, mixer.device_type = kernel, device_type

    def tie_weights(self) -> None:
        """Share the embedding matrix with the head if the configuration ties them; repeat it after
        replacing either.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        spread = self.config.initializer_range
        residual_spread = spread / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
            if ".linear_attn." in name and parameter.ndim != 2:
                parameter.copy_(
                    drawn(name, torch.rand(parameter.shape, generator=generator, device="cpu"))
                )
            elif name.endswith((".bias", ".sinks")):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(0.0 if self.config.family.centred else 1.0)
            else:
                noise = torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float32, device="cpu"
                )
                ends_branch = name.endswith(
                    ("o_proj.weight", "out_proj.weight", "down_proj.weight")
                )
                parameter.copy_(noise.mul_(residual_spread if ends_branch else spread))
