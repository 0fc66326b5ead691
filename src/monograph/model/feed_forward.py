"""Define the interface of a feed-forward layer: a layer that computes each position alone.

A block of the decoder has a mixer, in which positions read from earlier ones, and then a feed-forward
layer. The latter has three kinds: a gated layer (`monograph.model.layers`), a mixture of experts
(`monograph.model.mixture`), and both beside each other (`monograph.model.mixture_beside_mlp`).
`NoFeedForward` stands for it in families whose blocks have none. Everything that differs between kinds
is a method or an attribute of the kind's class. Only `monograph.model.llama` knows which layer has which
kind.

Shape suffixes: B batch, T positions, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from monograph.graph.balance import Balance
from monograph.model.config import LlamaConfig
from monograph.model.families import LlamaCppSupport

if TYPE_CHECKING:
    from gguf import GGUFWriter


class FeedForward(nn.Module, ABC):
    """A layer that computes each position alone.

    Methods that are not abstract are written for a layer whose matrices all multiply every token. A mixture
    overrides them, since only the matrices of a token's experts multiply it.

    Attributes:
        has_balance: whether `forward` takes a `balance`, which is for a loss that grows as experts
            are used unevenly (`monograph.graph.balance`).
        norms_its_input: whether `forward` takes the residual stream, which the layer norms itself. If not,
            its block norms it before.
        gguf_adapters: whether a GGUF file can have adapters of its projections.
        llama_cpp_names: llama.cpp's names of the layer's modules, by their names in a block.
        llama_cpp_vectors: the names in llama.cpp of matrices with one row, which llama.cpp reads as
            vectors.
        llama_cpp_fp32: ends of names, as llama.cpp has them, of the matrices that a GGUF file always
            stores in fp32.
    """

    has_balance: ClassVar[bool] = False
    norms_its_input: ClassVar[bool] = False
    gguf_adapters: ClassVar[bool] = False
    llama_cpp_names: ClassVar[Mapping[str, str]]
    llama_cpp_vectors: ClassVar[tuple[str, ...]] = ()
    llama_cpp_fp32: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def forward(self, hidden_BTD: Tensor, balance: Balance | None = None) -> Tensor:
        """Map [B, T, D] to [B, T, D].

        Args:
            hidden_BTD: the input.
            balance: each token's document and share, for the gradient of the balance loss. None: the
                loss has no balance, or the layer has no experts.
        """

    @classmethod
    @abstractmethod
    def inner_numbers(cls, config: LlamaConfig) -> int:
        """Return the number of a token's inner channels, those between the layer's matrices."""

    @classmethod
    def routed_numbers(cls, config: LlamaConfig, number_bytes: int) -> int:
        """Return how many numbers per token the layer keeps for the backward pass, apart from its inner
        channels.

        Args:
            config: the model's configuration.
            number_bytes: the bytes of a number of the compute dtype.
        """
        return 0

    @classmethod
    def active_matrices(cls, config: LlamaConfig, name: str, matrices: int) -> int:
        """Return how many matrices of one parameter multiply a token.

        Args:
            config: the model's configuration.
            name: the name of a parameter with three axes.
            matrices: the number of matrices in the parameter, which is the length of its first axis.
        """
        return matrices

    @classmethod
    def require_llama_cpp(cls, config: LlamaConfig, support: LlamaCppSupport) -> None:
        """Refuse layers that llama.cpp computes differently or does not load.

        Raises:
            InputRefused: the configuration has such layers.
        """

    @classmethod
    @abstractmethod
    def llama_cpp_row_lengths(cls, config: LlamaConfig) -> Mapping[str, int]:
        """Return the row lengths of the layer's matrices, by the keys of config.json that say them."""

    @classmethod
    def add_llama_cpp_sizes(cls, writer: GGUFWriter, config: LlamaConfig) -> None:
        """Write into a GGUF file the sizes that only layers of this kind have."""


class NoFeedForward(FeedForward):
    """What blocks without a feed-forward layer have in its place. It is never called."""

    llama_cpp_names: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()

    def forward(self, hidden_BTD: Tensor, balance: Balance | None = None) -> Tensor:
        """Raise an error, because the block adds nothing here."""
        raise NotImplementedError

    @classmethod
    def inner_numbers(cls, config: LlamaConfig) -> int:
        """Return 0."""
        return 0

    @classmethod
    def llama_cpp_row_lengths(cls, config: LlamaConfig) -> Mapping[str, int]:
        """Return {}, because there are no matrices."""
        return {}
