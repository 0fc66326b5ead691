"""Mark the functions that a capture may replace by compiled ones."""

from collections.abc import Callable
from typing import Generic, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Scope = Literal["whole", "blocks"]  # what one graph of a capture holds: the model, or one block
Replaced = tuple[object, str, object]  # an object, the name of its attribute, and the former value


class Compilable(Generic[P, T]):
    """A function that may be compiled in place: a call of this object calls `now`.

    Attributes:
        now: the function itself, or the compiled one that a capture put in its place.
    """

    def __init__(self, function: Callable[P, T]):
        self.now = function

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        """Call `now`."""
        return self.now(*arguments, **named)
