"""Knobs, the named values in which an ensemble's members differ, and grids and ranges of them."""

import itertools
import math
from collections.abc import ItemsView, Iterable, KeysView, Mapping
from typing import Any

from monograph.errors import UsageError


class Knobs:
    """One member's values, which are read by name, as in `knobs.lr`, and never change.

    Two `Knobs` are equal if their names and values are equal. A `Knobs` remembers which of its values
    were read. So a value that nothing reads can be refused.
    """

    __slots__ = ("_read", "_values")
    _values: Mapping[str, Any]
    _read: set[str]  # the names whose values were read

    def __init__(self, **values: object) -> None:
        self.__setstate__(values)

    @staticmethod
    def unread(knobs: "Knobs") -> list[str]:
        """Return the names whose values were not read yet.

        This is a static method because `knobs.unread` must be free for a knob of that name.
        """
        return [name for name in knobs._values if name not in knobs._read]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying asks for these before the copy has its values
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"there is no knob {name!r}; there are {', '.join(self._values) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"knobs never change: make new ones, Knobs({name}={value!r})")

    def __getstate__(self) -> dict[str, Any]:
        return dict(self._values)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `__setattr__` refuses every assignment.
        object.__setattr__(self, "_values", state)
        object.__setattr__(self, "_read", set())

    def keys(self) -> KeysView[str]:
        """Return the names, so that `dict(knobs)` works."""
        return self._values.keys()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def items(self) -> ItemsView[str, Any]:
        """Return (name, value) pairs in the order in which they were given."""
        self._read.update(self._values)
        return self._values.items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Knobs) and dict(self._values) == dict(other._values)

    def __hash__(self) -> int:
        # Only the names are hashed, as a value may be unhashable.
        return hash(frozenset(self._values))

    def __repr__(self) -> str:
        return f"Knobs({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


def grid(**axes: Iterable[Any]) -> list[Knobs]:
    """Return every combination of the axes' values; the last axis changes fastest.

        grid(lr=[1e-3, 1e-2], seed=range(2)): lr=1e-3 seed=0, lr=1e-3 seed=1, lr=1e-2 seed=0,
        lr=1e-2 seed=1

    Raises:
        UsageError: an axis is empty, or is a single value instead of a list of values.
    """
    for name, axis in axes.items():
        if isinstance(axis, str) or not isinstance(axis, Iterable):
            raise UsageError(f"the axis {name} is {axis!r}: give its values, [{axis!r}]")
    values = {name: list(axis) for name, axis in axes.items()}
    for name, axis_values in values.items():
        if not axis_values:
            raise UsageError(f"the axis {name} has no value: give at least one")
    return [
        Knobs(**dict(zip(values, point, strict=True)))
        for point in itertools.product(*values.values())
    ]


def log_range(first: float, last: float, count: int) -> list[float]:
    """Return `count` values from `first` to `last`, with the same ratio between neighbours.

        value_i = first * (last / first)^(i / (count - 1)),  both ends exactly as given

    Raises:
        UsageError: an end is not above 0, or `require_ends` refuses the range.
    """
    for end in (first, last):
        if not (0 < end < math.inf):
            raise UsageError(
                f"log_range({first:g}, {last:g}, {count}): {end:g} is not a number above 0"
            )
    require_ends(f"log_range({first:g}, {last:g}, {count})", first, last, count)
    log_factor = math.log(last / first) / max(1, count - 1)
    inner = [first * math.exp(log_factor * i) for i in range(1, count - 1)]
    values = [float(first), *inner, float(last)]
    return values[:count]  # with one value, both ends are equal


def require_ends(what: str, first: float, last: float, count: int) -> None:
    """Refuse a range that has fewer values than ends, or whose values would be equal.

    Args:
        what: how messages name the range.
        first: its first value.
        last: its last value.
        count: its number of values.

    Raises:
        UsageError: the range is refused.
    """
    ends = 1 if first == last else 2
    if count < ends:
        raise UsageError(f"{what}: a range has both its ends: at least 2 values, not {count}")
    if first == last and count > 1:
        raise UsageError(f"{what}: both ends are {first:g}, so all its values would be equal")
