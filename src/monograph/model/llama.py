"""Compute the Llama decoder and its relatives: tokens in, final hidden states out. Parameter names
are Hugging Face's.

A row may have several documents, one after another, and then padding. The segment of a position is
the number of its document in the row: 1, 2 and so on, and 0 for padding. One rule says which
positions attend to which: position t sees position s if s <= t, both have the same segment and, with
a window of w positions, t - s < w. The distance t - s in the row is also the distance in the document,
because a document's positions are contiguous. The rule treats padding like a document. So no document
sees padding, and each position of padding sees at least itself, so that no row of a softmax is empty.

A mask is built once per forward pass, and all blocks with the same window share it.

Shape suffixes: B batch, T positions, N blocks of positions, X positions of a block, D hidden size,
F rotated pairs of a head, V vocabulary; 1 an axis of length 1.
"""

import hashlib
import math
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from monograph.errors import InputRefused
from monograph.graph.balance import Balance, balance_of
from monograph.model import layer_inputs, mixture_keys
from monograph.model.config import LlamaConfig
from monograph.model.feed_forward import FeedForward, NoFeedForward
from monograph.model.layers import MLP, Attention, Linear, make_norm, make_scale
from monograph.model.mixer import (
    Cache,
    KeysAndValues,
    LayerCache,
    Mixer,
    mixer_of,
    mixers_of_family,
)
from monograph.model.mixture import Mixture
from monograph.model.mixture_beside_mlp import MixtureBesideMLP
from monograph.model.mtp import MultiTokenPredictor
from monograph.model.rope import CosSin, cos_sin
from monograph.model.sampling_defaults import Defaults
from monograph.ops.attention import AttentionKernel, Impl, Mask
from monograph.ops.fused_gradients import takes_no_gradients
from monograph.ops.logit_cap import capped

# Positions per side of a block of a block mask. This is flex attention's own default.
BLOCK = 128
# The smallest head_dim that flex attention computes on a GPU.
MIN_FLEX_HEAD_DIM = 16
# The number that `block_mask` gives padding instead of 0. It is above every document's number. It is
# not 2^63 - 1, because F.pad converts the number to a double, and the conversion back to int64 overflows
# (torch 2.13).
_PADDING = 2**62


def attention_mask(
    segments_BT: Tensor | None,
    tokens_BT: Tensor,
    impl: Impl,
    window: int | None = None,
    captured: bool = False,
) -> Mask:
    """Return the mask of a forward pass without a cache, in the form that `impl` reads.

    Without segments, and without a window that is shorter than the row, attention is only causal,
    which needs no mask.

    Args:
        segments_BT: document number of each position in its row, 0 on padding, int64; None: each
            row is one document.
        tokens_BT: the tokens, for their shape and device.
        impl: the attention implementation. With "auto", the mask is for flex attention, a block
            mask, in compiled graphs on a GPU, because flex attention is fast only there. Elsewhere
            it is a dense boolean mask.
        window: number of positions that a query sees, up to and including its own; None: it sees all
            positions up to its own.
        captured: whether each block of the decoder is a compiled graph of its own. The mask is then
            built outside of these graphs, but read in them.

    Returns:
        A BlockMask, a boolean tensor, or None for causal attention.
    """
    if window is not None and window >= tokens_BT.shape[1]:
        window = None
    if segments_BT is None and window is None and impl != "flex":
        return None
    captured = captured or torch.compiler.is_compiling()
    if impl == "flex" or (impl == "auto" and tokens_BT.is_cuda and captured):
        if segments_BT is None:
            segments_BT = torch.ones_like(tokens_BT)
        return block_mask(segments_BT, window)
    if segments_BT is None:
        # Without segments, one mask serves all rows.
        segments_BT = torch.ones_like(tokens_BT[:1])
    return dense_mask(segments_BT, window)


def dense_mask(segments_BT: Tensor, window: int | None = None) -> Tensor:
    """Return a boolean mask [B, 1, T, T], True where a query (third axis) sees a key (last axis)."""
    seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]).tril()
    if window is not None:
        seen_BTT = seen_BTT.triu(1 - window)
    return seen_BTT[:, None]


def block_mask(segments_BT: Tensor, window: int | None = None) -> BlockMask:
    """Return the mask for flex attention, which says for blocks of positions what queries see.

    For each block of queries, the mask lists the blocks of keys that the queries see in part, and the
    blocks of keys that they see in full. The lists are made from the smallest and the largest segment
    number of each block, because two blocks can share a document only if these ranges overlap. So the
    [T, T] mask need not be built, which could cost more than the attention (lightseekorg/TorchSpec
    issue 86). Two ranges can overlap although the blocks share no document. Such a block is listed as
    seen in part, which costs only time: flex attention evaluates the rule at the top of this file for
    each position of such a block.
    """
    length = segments_BT.shape[1]
    blocks = -(-length // BLOCK)  # rounded up
    # Padding is at the end of a row. It gets the highest number instead of 0, so that the numbers of a
    # row ascend and the ranges are short.
    numbers_BT = torch.where(segments_BT == 0, _PADDING, segments_BT)
    padded_BT = F.pad(numbers_BT, (0, blocks * BLOCK - length), value=_PADDING)
    blocks_BNX = padded_BT.unflatten(1, (blocks, BLOCK))
    low_BN = blocks_BNX.amin(dim=-1)
    high_BN = blocks_BNX.amax(dim=-1)
    overlap_BNN = (low_BN[:, :, None] <= high_BN[:, None, :]) & (
        low_BN[:, None, :] <= high_BN[:, :, None]
    )
    uniform_BN = low_BN == high_BN
    # Queries see an earlier block in full if both blocks have only one document, and it is the same.
    # They see their own block in part, so `tril(-1)` leaves the diagonal out.
    full_BNN = (overlap_BNN & uniform_BN[:, :, None] & uniform_BN[:, None, :]).tril(-1)
    if window is not None:
        # A query sees keys at distances below the window. If a query and a key are in blocks that are n
        # blocks apart, their distance is from (n - 1) BLOCK + 1 to (n + 1) BLOCK - 1. So a block is seen in
        # part if the smallest of these is below the window, and in full if the largest is. The largest n
        # for which that holds are:
        most_apart_in_part = (window + BLOCK - 2) // BLOCK
        most_apart_in_full = window // BLOCK - 1
        overlap_BNN = overlap_BNN.triu(-most_apart_in_part)
        full_BNN = full_BNN.triu(-most_apart_in_full)
    partial_BNN = overlap_BNN.tril() & ~full_BNN

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether a query sees a key: the rule at the top of this file."""
        seen = (query >= key) & (segments_BT[row, query] == segments_BT[row, key])
        return seen if window is None else seen & (query - key < window)

    # The lists of blocks of queries are made here, too. `BlockMask.from_kv_blocks` would derive them by
    # sorting, which is slow to compile (`_count_and_list`).
    partial_keys = _count_and_list(partial_BNN)
    partial_queries = _count_and_list(partial_BNN.mT)
    full_keys = _count_and_list(full_BNN)
    full_queries = _count_and_list(full_BNN.mT)
    return BlockMask(
        (length, length),
        *partial_keys,
        *full_keys,
        *partial_queries,
        *full_queries,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _count_and_list(needed_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return flex attention's form of a boolean matrix: for each row, where it is True.

    Returns:
        The number of True elements in each row, [B, 1, N] int32.
        Their indices, ascending, [B, 1, N, N] int32. The places after them are filled with the last
            index, and are never read.
    """
    blocks = needed_BNN.shape[-1]
    numbers_N = torch.arange(blocks, device=needed_BNN.device)
    # The rank of index i is the number of True elements up to i, i included. These sums of comparisons
    # replace a stable sort, of which Inductor makes one long program: for rows of 16,384 positions it took
    # minutes to assemble.
    up_to_NN = numbers_N <= numbers_N[:, None]
    needed_B1NN = needed_BNN[:, None]
    rank_B1NN = (needed_B1NN[..., None, :] & up_to_NN).sum(dim=-1, dtype=torch.int32)
    # Let the True elements of a row be numbered from 0. The indices before element k are those with a rank
    # of at most k. So their number is the index of element k.
    comes_before_B1NNN = rank_B1NN[..., None, :] <= numbers_N[:, None]
    index_B1NN = comes_before_B1NNN.sum(dim=-1, dtype=torch.int32).clamp_max(blocks - 1)
    return needed_B1NN.sum(dim=-1, dtype=torch.int32), index_B1NN


def feed_forward_of(config: LlamaConfig, layer: int) -> type[FeedForward]:
    """Return the class of a layer's feed-forward layer."""
    if not config.family.has_feed_forward:
        return NoFeedForward
    return _class_of_mixture(config) if config.is_mixture(layer) else MLP


def feed_forward_of_family(config: LlamaConfig) -> type[FeedForward]:
    """Return the class of most feed-forward layers of a model. If it is a mixture, some layers may
    still be gated layers (mlp_only_layers).
    """
    if not config.family.has_feed_forward:
        return NoFeedForward
    return _class_of_mixture(config) if config.num_experts else MLP


def _class_of_mixture(config: LlamaConfig) -> type[FeedForward]:
    return MixtureBesideMLP if config.family.mixture_beside_mlp else Mixture


def kinds_of_family(config: LlamaConfig) -> list[type[Mixer] | type[FeedForward]]:
    """Return the classes of the layers that blocks of a model's family can have."""
    return [*mixers_of_family(config), feed_forward_of_family(config)]


class BlockKind(NamedTuple):
    """What decides the shapes of a block's parameters.

    Attributes:
        mixer: the class of its mixer.
        feed_forward: the class of its feed-forward layer.
        of_layer: the configuration of the layer's heads (`LlamaConfig.of_layer`).
    """

    mixer: type[Mixer]
    feed_forward: type[FeedForward]
    of_layer: LlamaConfig


def kind_of_block(config: LlamaConfig, layer: int) -> BlockKind:
    """Return the kind of a block. Two blocks of one kind have parameters of the same shapes."""
    return BlockKind(
        mixer_of(config, layer), feed_forward_of(config, layer), config.of_layer(layer)
    )


class BlockArguments(NamedTuple):
    """The arguments of a block after the hidden states; see `Block.forward`."""

    cos_sin_B1TF: CosSin | None
    mask: Mask
    cache: LayerCache | None = None
    balance: Balance | None = None
    input_BTP: Tensor | None = None
    taken: KeysAndValues | None = None


class Block(nn.Module):
    """One layer of the decoder: x += s norm(mixer(norm x)), then x += s norm(mlp(norm x)).

    The mixer is one of the kinds in `LAYER_TYPES`, and the mlp is a gated layer or a mixture of
    experts. In families without feed-forward layers (`Family.has_feed_forward`), a block is only the
    first of these sums. Each family has some of the four norms. s is config.residual_multiplier. Each
    block can be compiled by itself, or recomputed by itself in the backward pass.

    With config.hidden_size_per_layer_input a third sum follows (`monograph.model.layer_inputs`). In some
    families x is at last multiplied by `layer_scalar`, a number that is stored with the block's
    parameters. As in transformers, it is not trained: its gradient is 0.
    """

    def __init__(self, config: LlamaConfig, impl: Impl, layer: int) -> None:
        super().__init__()
        feed_forward = feed_forward_of(config, layer)
        self.norm_names = config.family.norm_names
        if feed_forward.norms_its_input:
            self.norm_names = self.norm_names._replace(before_mlp=None)
        # Modules are added in the order of the computation, so that parameters have this order, too.
        self._add_norm(config, self.norm_names.before_attention)
        mixer_class = mixer_of(config, layer)
        self.mixer_name = mixer_class.name
        of_layer = config.of_layer(layer)
        mixer = mixer_class(of_layer, impl)
        if isinstance(mixer, Attention):
            mixer.gives_keys = config.gives_keys(layer)
        self.add_module(self.mixer_name, mixer)
        self._add_norm(config, self.norm_names.after_attention)
        self._add_norm(config, self.norm_names.before_mlp)
        self.has_mlp = config.family.has_feed_forward
        self.mlp = feed_forward(of_layer)
        self._add_norm(config, self.norm_names.after_mlp)
        _, self.activation = config.family.activation
        if config.hidden_size_per_layer_input:
            layer_inputs.add_to_block(self, config)
        self.scale_branch = make_scale(config.residual_multiplier)
        # A parameter and no buffer, so that engines, checkpoints and exports keep it like any other.
        self.layer_scalar: nn.Parameter | None = None
        if config.family.layer_scalar:
            self.layer_scalar = nn.Parameter(torch.empty(1))

    @property
    def mixer(self) -> Mixer:
        """Return the module that mixes positions."""
        mixer: Mixer = getattr(self, self.mixer_name)
        return mixer

    def _add_norm(self, config: LlamaConfig, name: str | None) -> None:
        """Add a norm with this name, unless the family has no norm at this place."""
        if name is not None:
            self.add_module(name, make_norm(config, config.hidden_size))

    def _normalise(self, name: str | None, hidden_BTD: Tensor) -> Tensor:
        """Apply the norm with this name; return the input if the family has no norm at this place."""
        if name is None:
            return hidden_BTD
        return getattr(self, name)(hidden_BTD)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
        balance: Balance | None = None,
        input_BTP: Tensor | None = None,
        taken: KeysAndValues | None = None,
    ) -> Tensor | tuple[Tensor, KeysAndValues]:
        """Map [B, T, D] to [B, T, D].

        Args:
            hidden_BTD: the residual stream.
            cos_sin_B1TF: cosine and sine of the positions; None: the layer does not rotate.
            mask: what `Llama.attention_inputs` returns for the block.
            cache: the block's view of a cache; None: the pass has no cache.
            balance: each token's document and share, for the gradient of a mixture's balance loss
                (`monograph.graph.balance`). None: the block has no mixture, or that loss is not
                trained.
            input_BTP: the layer's own input, see `monograph.model.layer_inputs`; None: it has none.
            taken: the keys and values that the layer takes from another one; None: it has its own.

        Returns:
            The residual stream, [B, T, D]; if a later layer takes the keys and values of this one
            (`LlamaConfig.gives_keys`), these, too.
        """
        names = self.norm_names
        normed_BTD = self._normalise(names.before_attention, hidden_BTD)
        if taken is None:
            mixed = self.mixer(normed_BTD, cos_sin_B1TF, mask, cache)
        else:
            mixed = self.mixer(normed_BTD, cos_sin_B1TF, mask, cache, taken)
        branch_BTD, given = mixed if isinstance(mixed, tuple) else (mixed, None)
        hidden_BTD = hidden_BTD + self.scale_branch(
            self._normalise(names.after_attention, branch_BTD)
        )
        if self.has_mlp:
            normed_BTD = self._normalise(names.before_mlp, hidden_BTD)
            branch_BTD = self.mlp(normed_BTD) if balance is None else self.mlp(normed_BTD, balance)
            hidden_BTD = hidden_BTD + self.scale_branch(
                self._normalise(names.after_mlp, branch_BTD)
            )
        if input_BTP is not None:
            hidden_BTD = hidden_BTD + layer_inputs.branch(
                self, self.activation, hidden_BTD, input_BTP
            )
        if self.layer_scalar is not None:
            hidden_BTD = hidden_BTD * self.layer_scalar.detach().to(hidden_BTD.dtype)
        return hidden_BTD if given is None else (hidden_BTD, given)


def is_never_trained(name: str) -> bool:
    """Return whether no model trains a parameter of this name, because its gradient is always 0."""
    return name.endswith(".layer_scalar")


class Decoder(nn.Module):
    """A container that gives the embedding, the blocks and the final norm their Hugging Face names."""

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__()
        # Given a weight, nn.Embedding does not sample one. `Llama._initialise` does that.
        empty_VD = torch.empty(config.vocab_size, config.hidden_size)
        # As in transformers, the row of pad_token_id gets no gradient from look-ups of the embedding in most
        # families. If the head is tied to the embedding, the row still gets a gradient from the head.
        padding = None if config.family.trains_padding else config.pad_token_id
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding, _weight=empty_VD
        )
        self.layers = nn.ModuleList(
            Block(config, impl, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config, config.hidden_size)
        if config.hidden_size_per_layer_input:
            layer_inputs.add_to_decoder(self, config)


# `takes_no_gradients` declares that the forward pass does not call autograd itself. So matrix products of the
# backward pass may add the weights' gradients directly to the buffers that sum them.
@takes_no_gradients
class Llama(nn.Module):
    """A language model of one of the families in `monograph.model.families`, such as Llama, Qwen or
    Gemma.

    Initial weights: every matrix ~ N(0, initializer_range^2). The matrices that end a residual
    branch (o_proj, out_proj, down_proj) are then divided by sqrt(2 * num_hidden_layers). Norms
    multiply by 1 at first, and biases and sinks are 0. A mixer may give its own parameters other
    values (`Mixer.initial_values`). Source: Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners", section 2.3.

    Each parameter has its own random stream, which is keyed by the seed and the parameter's name and
    sampled in fp32 on the CPU. So initial weights depend neither on the device nor on other
    parameters, and the global random state is not used. Weights on the meta device are not
    initialised.

    Args:
        config: the shape.
        seed: seeds the initial weights.
        attention: the attention implementation, see `attention_mask`. Values other than "auto" are
            for comparisons.

    Attributes:
        sampling: the defaults for sampling that the model's makers recommend, by the names in
            generation_config.json; empty for a new model. Exports keep them, but `Llama` itself does
            not read them.
    """

    # Whether each block is a compiled graph of its own (`monograph.graph.capture`).
    blocks_captured = False

    def __init__(self, config: LlamaConfig, seed: int = 0, attention: Impl = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.model = Decoder(config, attention)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        # The losses, which read the head's weight, ask the head for the cap (`cap_of`).
        self.lm_head.logit_cap = config.final_logit_softcapping  # type: ignore[assignment]
        # transformers keeps the factor in fp32, so it is rounded to fp32 here. The tensor is on the CPU even
        # if the model is built on the meta device, whose tensors have no numbers.
        self.scale_embedded = make_scale(torch.tensor(config.embedding_scale, device="cpu").item())
        self.scale_last = make_scale(1 / config.logits_scaling)
        self.sampling: Defaults = {}
        self.balance_factor = mixture_keys.balance_factor(config)
        # The layer from which each layer has its keys and values.
        self.keys_layers = [config.keys_layer(layer) for layer in range(config.num_hidden_layers)]
        self.mtp: MultiTokenPredictor | None = None
        if config.mtp_num_hidden_layers:
            own_config = config.of_mtp_layer()
            self.mtp = MultiTokenPredictor(own_config, Block(own_config, attention, 0))
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
            segments: [B, T] int64, document number in the row, 0 on padding; None: each row is one
                document.
            positions: [B, T] int64, position in the document; None: 0 .. T - 1. With a cache, the
                caller must keep positions below max_position_embeddings, because this method does
                not read their values.
            cache: keys and values of earlier tokens, that of position s in slot s. A query at
                position p sees the slots s <= p in its window.
            shares: [B, T] floating, the factor by which each position's loss is multiplied before all
                are added; 0 where there is no target. Mixtures of experts need it for their balance
                loss, whose gradient the backward pass adds, with the factors shares * balance_factor
                (`monograph.graph.balance`). It does not change the result of this method. None: the
                gradient of the balance loss is not added. It must be None if there is a cache.

        Returns:
            [B, T, D] in the dtype of the weights.

        Raises:
            InputRefused: T exceeds max_position_embeddings.
            ValueError: both segments and a cache are given.
        """
        if cache is not None and segments is not None:
            raise ValueError("a cache holds one document per row: give positions, not segments")
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        hidden_BTD, block_arguments = self.begin(tokens_BT, segments, positions, shares)
        given: dict[int, KeysAndValues] = {}  # by the index of the layer that gives them
        for index, (block, arguments) in enumerate(
            zip(self.model.layers, block_arguments, strict=True)
        ):
            layer_cache = None
            if cache is not None:
                layer_cache = LayerCache(
                    cache, index, positions.expand_as(tokens_BT), self.config.window(index)
                )
            arguments = arguments._replace(
                cache=layer_cache, taken=given.get(self.keys_layers[index])
            )
            result = block(hidden_BTD, *arguments)
            if isinstance(result, tuple):
                hidden_BTD, given[index] = result
            else:
                hidden_BTD = result
        return self.end(hidden_BTD)

    def begin(
        self,
        tokens_BT: Tensor,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        shares: Tensor | None = None,
    ) -> tuple[Tensor, list[BlockArguments]]:
        """Return the embedded tokens, and for each block its arguments after the hidden states.

        `forward` is `begin`, then all blocks, then `end`. A caller can run the blocks itself, as
        streaming does, where only some blocks are on the device at once. `begin` reads only the
        parameters of `parts_before`, and `end` and the head only those of `parts_after`. The arguments
        are those of `forward`.
        """
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        arguments = [
            BlockArguments(layer_cos_sin, mask)
            for layer_cos_sin, mask in self.attention_inputs(tokens_BT, segments, positions)
        ]
        if shares is not None:
            balance = balance_of(segments, shares * self.balance_factor)
            for layer in range(self.config.num_hidden_layers):
                if cast(Block, self.model.layers[layer]).mlp.has_balance:
                    arguments[layer] = arguments[layer]._replace(balance=balance)
        embedded_BTD = self._embedded(tokens_BT)
        if self.config.hidden_size_per_layer_input:
            inputs = layer_inputs.inputs_of_layers(self.model, self.config, tokens_BT, embedded_BTD)
            arguments = [
                each._replace(input_BTP=input_BTP)
                for each, input_BTP in zip(arguments, inputs, strict=True)
            ]
        return embedded_BTD, arguments

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        """Return the embedded tokens, [B, T, D]."""
        hidden_BTD = self.scale_embedded(self.model.embed_tokens(tokens_BT))
        if torch.is_autocast_enabled(hidden_BTD.device.type):
            # Autocast would leave the embedded tokens, and so the residual stream, in fp32. Reading
            # and writing this stream is most of the memory traffic of a pass.
            hidden_BTD = hidden_BTD.to(torch.get_autocast_dtype(hidden_BTD.device.type))
        return hidden_BTD

    def predict_ahead(
        self,
        hidden_BTD: Tensor,
        next_tokens_BT: Tensor,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the hidden states of which `logits` makes the logits of the tokens after the next ones.

        The model must have a head for them (`monograph.model.mtp`).

        Args:
            hidden_BTD: what `forward` returns for the positions, or, to predict further tokens, what
                this method has returned for the positions before.
            next_tokens_BT: the token after each position, int64. At the last position of a document it
                may be any token, since no other position sees it.
            segments: as in `forward`.
            positions: as in `forward`.
            cache: keys and values of the head's block, as layer 0 of a cache; otherwise as in
                `forward`.

        Returns:
            [B, T, D] in the dtype of the weights.
        """
        assert self.mtp is not None
        if positions is None:
            length = next_tokens_BT.shape[1]
            positions = torch.arange(length, device=next_tokens_BT.device)[None]
        config = self.mtp.config
        [(layer_cos_sin, mask)] = self._inputs_of_layers(
            config, self.mtp.layers, next_tokens_BT, segments, positions
        )
        layer_cache = None
        if cache is not None:
            layer_cache = LayerCache(
                cache, 0, positions.expand_as(next_tokens_BT), config.window(0)
            )
        embedded_BTD = self._embedded(next_tokens_BT)
        return self.scale_last(self.mtp(embedded_BTD, hidden_BTD, layer_cos_sin, mask, layer_cache))

    def end(self, hidden_BTD: Tensor) -> Tensor:
        """Return the last norm of the blocks' output, divided by config.logits_scaling."""
        return self.scale_last(self.model.norm(hidden_BTD))

    @property
    def is_chain(self) -> bool:
        """Return whether blocks can run one by one (`LlamaConfig.is_chain`)."""
        return self.config.is_chain

    @property
    def parts_before(self) -> list[nn.Module]:
        """Return the modules whose parameters `begin` reads."""
        if not self.config.hidden_size_per_layer_input:
            return [self.model.embed_tokens]
        return [self.model.embed_tokens, *layer_inputs.modules_of_decoder(self.model)]

    @property
    def parts_after(self) -> list[nn.Module]:
        """Return the modules whose parameters `end` and the head read."""
        return [self.model.norm, self.lm_head]

    def attention_inputs(
        self, tokens_BT: Tensor, segments: Tensor | None, positions: Tensor
    ) -> list[tuple[CosSin | None, Mask]]:
        """Return for each block the cosine and sine of the positions, and the mask.

        A block that does not rotate gets None instead of cosine and sine. Blocks with the same window
        get the same mask. A block whose mixer reads segments gets the segments instead of a mask.

        Raises:
            InputRefused: the sequence is longer than max_position_embeddings.
        """
        return self._inputs_of_layers(
            self.config, self.model.layers, tokens_BT, segments, positions
        )

    def _inputs_of_layers(
        self,
        config: LlamaConfig,
        blocks: nn.ModuleList,
        tokens_BT: Tensor,
        segments: Tensor | None,
        positions: Tensor,
    ) -> list[tuple[CosSin | None, Mask]]:
        """Return what `attention_inputs` does, for blocks of any configuration."""
        length = tokens_BT.shape[1]
        longest = config.max_position_embeddings
        if length > longest:
            raise InputRefused(
                f"a sequence of {length} tokens is longer than the model's max_position_embeddings = {longest}; "
                "shorten the sequence or choose a model with more positions"
            )
        is_double = self.model.embed_tokens.weight.dtype == torch.float64
        dtype = torch.float64 if is_double else torch.float32
        impl = self.attention
        if impl == "auto" and config.head_dim < MIN_FLEX_HEAD_DIM:
            impl = "sdpa"
        # Layers without a window, and layers whose window is longer than the rows, share one mask.
        windows = [min(config.window(layer) or length, length) for layer in range(len(blocks))]
        mask_by_window: dict[int, Mask] = {}
        reads_segments = [cast(Block, block).mixer.reads_segments for block in blocks]
        for layer, window in enumerate(windows):
            if not reads_segments[layer] and window not in mask_by_window:
                mask_by_window[window] = attention_mask(
                    segments, tokens_BT, impl, window, self.blocks_captured
                )
        # Layers with a window may have another base of the rotary positions (`has_local_theta`), and layers
        # without one another width of a head.
        cos_sin_by_kind: dict[tuple[bool, int], CosSin] = {}
        of_layers: list[tuple[CosSin | None, Mask]] = []
        for layer, window in enumerate(windows):
            layer_cos_sin = None
            if config.rotates(layer):
                is_local = config.has_local_theta(layer)
                of_layer = config.of_layer(layer)
                kind = (is_local, of_layer.head_dim)
                if kind not in cos_sin_by_kind:
                    cos_sin_by_kind[kind] = cos_sin(positions, of_layer, dtype, is_local)
                layer_cos_sin = cos_sin_by_kind[kind]
            mask: Mask = segments
            if not reads_segments[layer]:
                mask = mask_by_window[window]
            of_layers.append((layer_cos_sin, mask))
        return of_layers

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits over the vocabulary, hidden @ lm_head.weight^T: [..., D] to [..., V].

        With config.final_logit_softcapping they are capped (`monograph.ops.logit_cap`).
        """
        return capped(self.lm_head(hidden_BTD), self.config.final_logit_softcapping)

    def remove_mtp_(self) -> None:
        """Remove the head for multi-token prediction if there is one."""
        self.mtp = None
        self.config = replace(self.config, mtp_num_hidden_layers=0)

    def use_attention(
        self, impl: Impl, kernel: AttentionKernel = "torch", device_type: str = ""
    ) -> None:
        """Set how attention is computed.

        Args:
            impl: the attention implementation, as the argument `attention` of `Llama`.
            kernel: the kernel of torch's implementation, see `monograph.ops.attention`.
            device_type: the type of the device for which `rotate` chooses operators; "": the device
                of the input.
        """
        self.attention = impl
        for block in self._all_blocks:
            cast(Block, block).mixer.use_attention(impl, kernel, device_type)

    @property
    def _all_blocks(self) -> list[nn.Module]:
        """Return the blocks of the decoder and of the head for multi-token prediction."""
        of_head = [] if self.mtp is None else [*self.mtp.layers]
        return [*self.model.layers, *of_head]

    def tie_weights(self) -> None:
        """Share the embedding matrix with the head if the configuration ties them.

        Call this again after replacing either weight.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Set the initial weights, which the class describes."""
        std = self.config.initializer_range
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        # The matrices that end a residual branch: their products are added to the residual stream.
        residual_matrices = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        mixers = {type(cast(Block, block).mixer) for block in self._all_blocks}
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
            mixer = next((mixer for mixer in mixers if f".{mixer.name}." in name), None)
            own_values = None
            if mixer is not None:
                own_values = mixer.initial_values(name, parameter.shape, generator)
            if own_values is not None:
                parameter.copy_(own_values)
            elif name.endswith((".bias", ".sinks")):
                parameter.zero_()
            elif parameter.ndim == 1:  # a norm
                parameter.fill_(0.0 if self.config.family.centred_norms else 1.0)
            else:
                noise = torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float32, device="cpu"
                )
                own_std = residual_std if name.endswith(residual_matrices) else std
                parameter.copy_(noise.mul_(own_std))
