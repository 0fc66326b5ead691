"""The types of what torch gives to a backward pass, or to a rule for vmap, that is written here."""

from typing import Protocol

from torch import Tensor


class Context(Protocol):
    """What a forward pass keeps for its backward pass; one that keeps more than tensors declares a
    class below this.

    Attributes:
        saved_tensors: what was saved; it can be read in the backward pass.
        needs_input_grad: whether each argument of the forward pass needs a gradient.
    """

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, which must not change until the backward pass reads them."""


class Batched(Protocol):
    """What a rule for vmap is told."""

    @property
    def batch_size(self) -> int:
        """The length of the axis that is mapped over."""
