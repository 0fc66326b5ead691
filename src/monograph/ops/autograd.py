"""The types of the objects that torch passes to custom backward passes and to rules for vmap."""

from typing import Protocol

from torch import Tensor


class Context(Protocol):
    """The object in which a forward pass stores what its backward pass needs.

    A forward pass that stores more than tensors declares a subclass.

    Attributes:
        saved_tensors: the tensors of `save_for_backward`, for the backward pass.
        needs_input_grad: whether each argument of the forward pass needs a gradient.
    """

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, which must not change until the backward pass reads them."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Declare outputs that have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether the backward pass gets zeros, instead of None, for outputs that nothing uses."""


class VmapInfo(Protocol):
    """The first argument of a rule for vmap."""

    @property
    def batch_size(self) -> int:
        """The length of the axis that is mapped over."""
