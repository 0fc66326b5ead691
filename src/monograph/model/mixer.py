"""Define the interface of a mixer: a layer in which positions read from earlier positions.

A block of the decoder has one mixer. The kinds of mixers are attention (`monograph.model.layers`),
gated delta nets (`monograph.model.delta_net`), layers of Mamba 2 (`monograph.model.mamba`) and gated
short convolutions (`monograph.model.short_conv`). In a family whose blocks have one layer each, a
feed-forward layer (`monograph.model.plain_mlp`) may be in a mixer's place. Everything that differs between
kinds is a method or an attribute of the kind's class, which `mixer_of` returns. The cache, the plan,
the counts of FLOPs and the exports ask the class, so that no other code has to know which kinds there
are.

Shape suffixes: B batch, T positions, D hidden size, F rotated pairs of a head, H query heads; 1
an axis of length 1.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused
from monograph.graph.lora_merge import UnreadTensor
from monograph.model.config import LlamaConfig
from monograph.model.layer_types import FULL_ATTENTION, LAYER_TYPES, LayerType
from monograph.model.rope import CosSin
from monograph.ops.attention import AttentionKernel, Heads, Impl, Mask

if TYPE_CHECKING:
    from gguf import GGUFWriter


# Returns how many positions a token may attend to on average, given an attention window or None.
VisiblePositions = Callable[[int | None], float]
# The end of errors about models that llama.cpp does not compute.
USE_HF = "; export it with --format hf"


class Recurrence(Protocol):
    """The state of a recurrent layer, which is all that the layer keeps of a row's earlier tokens.

    The layer changes the state's tensors in place.
    """

    @property
    def limit_B(self) -> Tensor:
        """The number of tokens of each row, from its beginning, that may change the state, int64."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors apart from `limit_B`, [B, ...] each. All are zero before the first token."""
        ...

    def copied(self) -> Recurrence:
        """Return a state of its own with the same numbers."""
        ...

    def limited(self, limit_B: Tensor) -> Recurrence:
        """Return the same state, with another limit."""
        ...


class Cache(Protocol):
    """The interface of a key-value cache; slot s holds the key and value of position s."""

    def attend(
        self,
        layer_index: int,
        heads: Heads,
        positions_BT: Tensor,
        window: int | None,
        sink_H: Tensor | None,
    ) -> Tensor:
        """Store new keys and values at their positions, and return the attention of the queries.

        Args:
            layer_index: the layer.
            heads: the queries, keys and values of the new tokens.
            positions_BT: the new tokens' positions.
            window: number of positions that a query sees, up to and including its own; None: it
                sees all positions up to its own.
            sink_H: the heads' sinks; None: the family has none.
        """
        ...

    def recurrence(self, layer_index: int) -> Recurrence:
        """Return the state of a layer that has a recurrence."""
        ...

    def keep_call(self, call: Callable[[Cache], object]) -> None:
        """Take a call that changes the state of a layer as this pass does, given a cache.

        A cache of a pass of which only some tokens will count makes the calls again for these
        (`monograph.decode.cache.KVCache.trial`).
        """
        ...


class KeysAndValues(NamedTuple):
    """The keys and values of a pass's tokens, which later layers may attend to, too.

    Attributes:
        key_BKTE: the keys, after norm and rotation.
        value_BKTE: the values.
    """

    key_BKTE: Tensor
    value_BKTE: Tensor


class LayerCache(NamedTuple):
    """One block's view of a cache.

    Attributes:
        cache: the cache of all layers.
        layer_index: the block's layer.
        positions_BT: the positions of the pass's tokens.
        window: the block's window; None: a query sees all positions up to its own.
    """

    cache: Cache
    layer_index: int
    positions_BT: Tensor
    window: int | None


class Mixer(nn.Module, ABC):
    """A layer in which positions read from earlier positions.

    Methods that are not abstract are written for a layer that keeps no keys and values.

    Attributes:
        name: the mixer's name in a block, as in Hugging Face's files.
        reads_segments: whether `forward` gets the documents' numbers as its `mask`, instead of a mask
            of attention.
        gguf_adapters: whether a GGUF file can have adapters of its projections.
        llama_cpp_fp32: ends of names, as llama.cpp has them, of the matrices that a GGUF file always
            stores in fp32.
        siblings: the names of projections that have the same input. `monograph.graph.siblings` can
            compute them in one product.
        impl: the implementation, as the argument `attention` of `Llama`.
    """

    name: ClassVar[str]
    reads_segments: ClassVar[bool] = False
    gguf_adapters: ClassVar[bool] = False
    llama_cpp_fp32: ClassVar[tuple[str, ...]] = ()
    siblings: tuple[str, ...]
    impl: Impl

    @abstractmethod
    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        """Add the parameters, in the order of the computation and without values."""
        super().__init__()
        self.impl = impl

    # ── what it computes ────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D].

        Args:
            hidden_BTD: the input.
            cos_sin_B1TF: cosine and sine of the positions; None: the layer does not rotate.
            mask: the result of `monograph.model.llama.attention_mask`. With `reads_segments` it is
                instead the document number of each position, [B, T], or None if each row is one
                document. It is not read if there is a cache.
            cache: the block's view of a cache; None: the pass has no cache.
        """

    def use_attention(self, impl: Impl, kernel: AttentionKernel, device_type: str) -> None:
        """Set the implementation; see `Llama.use_attention`."""
        self.impl = impl

    @classmethod
    def initial_values(
        cls, name: str, shape: torch.Size, generator: torch.Generator
    ) -> Tensor | None:
        """Return the initial values of a parameter, in fp32 on the CPU.

        Args:
            name: the parameter's name.
            shape: its shape.
            generator: the parameter's own random stream. If the result is None, no number may have
                been taken from it, because `Llama` then uses the stream from its beginning.

        Returns:
            The values; None: `Llama` initialises the parameter as it does by default.
        """
        return None

    # ── what it keeps of earlier tokens ─────────────────────────────────────────────────────────

    @classmethod
    def key_value_heads(cls, config: LlamaConfig) -> int:
        """Return the number of heads whose keys and values a cache keeps for each position."""
        return 0

    @classmethod
    def recurrence(
        cls, config: LlamaConfig, rows: int, dtype: torch.dtype, device: torch.device
    ) -> Recurrence | None:
        """Return the state before the first token, without a limit; None: the layer is not recurrent.

        Args:
            config: the model's configuration.
            rows: the number of rows.
            dtype: the dtype of the model's weights.
            device: the device of the state.
        """
        return None

    # ── what it costs ───────────────────────────────────────────────────────────────────────────

    @classmethod
    @abstractmethod
    def training_flops(
        cls, config: LlamaConfig, layer: int, visible_positions: VisiblePositions
    ) -> float:
        """Return the FLOPs per token of a layer's forward and backward pass, without its matrices.

        Args:
            config: the model's configuration.
            layer: the layer.
            visible_positions: a function of an attention window, or of None for no window. It returns
                how many positions a token may attend to on average, itself included.
        """

    @classmethod
    def decode_flops(cls, config: LlamaConfig, context: float) -> float:
        """Return the FLOPs of a layer for a token after `context` others, without its matrices."""
        return 0.0

    @classmethod
    def kept_numbers(cls, config: LlamaConfig, *, captured: bool, in_fp32: bool) -> float | None:
        """Return how many numbers a block keeps per token for the backward pass, if nothing is
        recomputed. What its feed-forward layer keeps is not counted.

        Args:
            config: the model's configuration.
            captured: whether the block is captured, which means that it is a compiled graph.
            in_fp32: whether it computes in fp32.

        Returns:
            The count, in numbers of the compute dtype. None: a block of this kind keeps as many as a
            block with attention (`monograph.predict.estimate.stored_numbers`).
        """
        return None

    # ── its form in llama.cpp ───────────────────────────────────────────────────────────────────

    @classmethod
    def require_llama_cpp(cls, config: LlamaConfig) -> None:
        """Refuse layers that llama.cpp computes differently or does not load.

        Raises:
            InputRefused: the configuration has such layers.
        """

    @classmethod
    def llama_cpp_row_lengths(cls, config: LlamaConfig) -> Mapping[str, int]:
        """Return the row lengths of the layer's matrices, by the keys of config.json that say them.
        Lengths that matrices of attention also have need not be in the result.
        """
        return {}

    @classmethod
    def inner_width(cls, config: LlamaConfig) -> int:
        """Return the width between the matrices of a feed-forward layer in a mixer's place, or 0."""
        return 0

    @classmethod
    def add_llama_cpp_sizes(
        cls, writer: GGUFWriter, config: LlamaConfig, architecture: str
    ) -> None:
        """Write into a GGUF file the sizes that only layers of this kind have.

        Args:
            writer: the file's writer.
            config: the model's configuration.
            architecture: llama.cpp's name of the family. The keys of the sizes begin with it.
        """

    @classmethod
    def llama_cpp_tensor(
        cls, name: str, like: Tensor, read: Callable[[], Tensor], config: LlamaConfig
    ) -> UnreadTensor | None:
        """Return one of the layer's tensors as llama.cpp reads it: with its name in a block, its order
        of rows and its values.

        Args:
            name: the tensor's name in the layer.
            like: a meta tensor of the tensor's shape and dtype.
            read: returns the tensor.
            config: the model's configuration.

        Returns:
            The tensor; None: `monograph.model.gguf` converts it as it converts attention's tensors.
        """
        return None

    @classmethod
    def keeps_blocks(cls, config: LlamaConfig, size: int) -> bool:
        """Return whether each `size` consecutive columns of the layer's matrices, from a multiple of
        `size` on, are also consecutive in a GGUF file. It is so unless `llama_cpp_tensor` reorders columns.
        """
        return True

    @classmethod
    def more_llama_cpp_tensors(cls, config: LlamaConfig) -> list[UnreadTensor]:
        """Return tensors that llama.cpp needs and the layer does not have, by their names in a block."""
        return []


@functools.cache
def _load(layer_type: LayerType) -> type[Mixer]:
    """Import and return the class of a kind of layer."""
    module, _, name = layer_type.home.partition(":")
    mixer: type[Mixer] = getattr(importlib.import_module(module), name)
    return mixer


def mixer_of(config: LlamaConfig, layer: int) -> type[Mixer]:
    """Return the class of a layer's mixer."""
    return _load(config.layer_type(layer))


def require_both_kinds(config: LlamaConfig) -> None:
    """Refuse, for llama.cpp, a hybrid without attention or without the family's other kind of layers.

    Raises:
        InputRefused: one of these kinds is missing.
    """
    kinds = sorted({*config.layer_types} or {FULL_ATTENTION})
    if not {FULL_ATTENTION, config.family.other_layer_type} <= {*kinds}:
        raise InputRefused(
            f"layer_types: llama.cpp loads a {config.model_type} only with layers of both kinds, not with "
            f"{' and '.join(map(repr, kinds))} alone{USE_HF}"
        )


def mixers_of_family(config: LlamaConfig) -> list[type[Mixer]]:
    """Return the classes of the mixers that layers of a model's family can have, each class once."""
    layer_types = [LAYER_TYPES[FULL_ATTENTION], config.family.other_layers]
    layer_types += [LAYER_TYPES[each] for each in config.family.more_layer_types]
    return list(dict.fromkeys(map(_load, layer_types)))
