"""Mark the functions that a capture (`monograph.graph.capture`) may replace by compiled ones."""

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeGuard, TypeVar

from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")
Scope = Literal["whole", "blocks"]  # what one graph of a capture holds: the model, or one block


class AttributeValue(NamedTuple):
    """A value that an attribute of an object has had, or will get.

    Attributes:
        owner: the object.
        name: the attribute's name.
        value: the value.
    """

    owner: object
    name: str
    value: object


class Compilable(Generic[P, T]):
    """A function that may be compiled in place: a call of this object calls `function`.

    Attributes:
        function: the given function, or the compiled one that a capture put in its place.
    """

    def __init__(self, function: Callable[P, T]):
        self.function = function

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        """Call the function."""
        return self.function(*arguments, **named)


class LossWithHead(Protocol):
    """A loss whose last part, from hidden states to the loss, is a function of its own.

    Attributes:
        head: this function, which is compiled on its own if the scope is "blocks".
    """

    head: Callable[..., Any]

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the number of targets."""


def has_head(loss: object) -> TypeGuard[LossWithHead]:
    """Return whether a loss has a `head`."""
    return callable(getattr(loss, "head", None))
