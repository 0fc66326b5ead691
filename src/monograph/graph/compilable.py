"""Mark the functions that a capture may replace by compiled ones."""

from collections.abc import Callable
from typing import Generic, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Scope = Literal["whole", "blocks"]  # what one graph of a capture holds: the model, or a block of it
# An object, the name of its attribute, and its own former value.
Replaced = tuple[object, str, object]


class Compilable(Generic[P, T]):
    """A function that may be compiled in place: whoever holds this object calls what stands in it
    now.

    Attributes:
        now: the function itself, or what a capture put in its place.
    """

    def __init__(self, function: Callable[P, T]):
        self.now = function

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        """Call it."""
        return self.now(*arguments, **named)
