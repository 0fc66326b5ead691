"""Mark the functions that a capture (`monograph.graph.capture`) may replace by compiled ones."""

from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, ParamSpec, TypeVar

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
