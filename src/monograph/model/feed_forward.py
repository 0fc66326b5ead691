"""Define what a kind of feed-forward layer says about itself, as `monograph.model.mixer` does for
mixers.

A block of the decoder has one such layer after its mixer: a gated layer (`monograph.model.layers`)
or a mixture of experts (`monograph.model.mixture`). `monograph.model.llama` says which layer has
which, and no other code asks.

Shape suffixes: B batch, T positions, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from monograph.graph.balance import Balance
from monograph.model.config import LlamaConfig
from monograph.model.families import LlamaCppSupport

if TYPE_CHECKING:
    from gguf import GGUFWriter


class FeedForward(nn.Module, ABC):
    """A layer that computes each position alone.

    The class methods implemented here are those of a layer whose matrices multiply each token.

    Attributes:
        has_balance: whether `forward` takes the tokens of a balance (`monograph.graph.balance`).
        gguf_adapters: whether a GGUF file can have adapters of its projections.
        llama_cpp_names: llama.cpp's names of its modules in a block, by their names in a block.
        llama_cpp_vectors: those of llama.cpp's names whose matrix of one row is a vector there.
        llama_cpp_fp32: the ends of llama.cpp's names of its matrices that are always stored in fp32.
    """

    has_balance: ClassVar[bool] = False
    gguf_adapters: ClassVar[bool] = False
    llama_cpp_names: ClassVar[Mapping[str, str]]
    llama_cpp_vectors: ClassVar[tuple[str, ...]] = ()
    llama_cpp_fp32: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def forward(self, hidden_BTD: Tensor, balance: Balance | None = None) -> Tensor:
        """Map [B, T, D] to [B, T, D].

        Args:
            hidden_BTD: the input.
            balance: with `has_balance`, the tokens whose balance gets a gradient; None: it gets none.
        """

    @classmethod
    @abstractmethod
    def inner_numbers(cls, config: LlamaConfig) -> int:
        """Return how many inner channels compute a token."""

    @classmethod
    def routed_numbers(cls, config: LlamaConfig, number_bytes: int) -> int:
        """Return the numbers per token that the layer keeps in addition to its inner ones.

        Args:
            config: the model's configuration.
            number_bytes: the bytes of a number of the compute dtype.
        """
        return 0

    @classmethod
    def active_matrices(cls, config: LlamaConfig, name: str, matrices: int) -> int:
        """Return by how many of the matrices in one parameter a token is multiplied.

        Args:
            config: the model's configuration.
            name: the parameter's name.
            matrices: the length of its first axis of three.
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
        """Return the lengths of rows of the layer's matrices, by their keys."""

    @classmethod
    def add_llama_cpp_sizes(cls, writer: GGUFWriter, config: LlamaConfig) -> None:
        """Add the sizes that only such layers have to a file."""
