"""Ranges of numbers, so that settings, optimizers and the sampler refuse the same values with the
same messages.
"""

import math
import sys
from numbers import Integral, Rational, Real
from typing import Any, NamedTuple, SupportsInt

from monograph.errors import UsageError

LARGEST = sys.float_info.max


class Range(NamedTuple):
    """The numbers that an argument may be; booleans and NaN are in no range.

    Attributes:
        expected: the range in words, to complete the sentence "expected ...".
        low: the smallest number.
        high: the largest number.
        above: whether the range excludes `low` itself.
        below: whether the range excludes `high` itself.
        whole: whether the type must be an integer type, Python's or numpy's.
    """

    expected: str
    low: float
    high: float
    above: bool = False
    below: bool = False
    whole: bool = False

    def holds(self, value: object) -> bool:
        """Return whether the value is a number in this range."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        # numbers.Real compares with a float; it is not made one, which would round a large number.
        number: Any = value
        if not self.whole and isinstance(value, Rational) and not -LARGEST <= number <= LARGEST:
            return False  # no float is that large
        low_holds = number > self.low if self.above else number >= self.low
        return bool(low_holds and (number < self.high if self.below else number <= self.high))

    def require(self, name: str, value: object) -> None:
        """Refuse a value outside the range.

        Raises:
            UsageError: with the name, the value and what was expected.
        """
        if not self.holds(value):
            raise UsageError(f"{name} = {value!r}: expected {self.expected}")

    def integer(self, name: str, value: SupportsInt) -> int:
        """Return a value of any integer type, such as numpy's, as a Python int; raise UsageError
        like `require`.
        """
        self.require(name, value)
        return int(value)

    def checked(self, value: float) -> float:
        """Return the value, or raise ValueError, which pydantic turns into an error that names the
        key.
        """
        if not self.holds(value):
            raise ValueError(self.expected)
        return value


def between(low: float, high: float) -> Range:
    """Return the range of numbers from `low` to `high`, both included."""
    return Range(f"a number from {low:g} to {high:g}", low, high)


def whole(least: int, most: int) -> Range:
    """Return the range of whole numbers from `least` to `most`, both included."""
    return Range(f"a whole number from {least} to {most}", least, most, whole=True)


ABOVE_0 = Range("a number above 0", 0, math.inf, above=True, below=True)
NOT_NEGATIVE = Range("a number, 0 or more", 0, math.inf, below=True)
DECAY = Range("a number, 0 or more and below 1", 0, 1, below=True)
FRACTION = Range("a number between 0 and 1", 0, 1, above=True, below=True)
COUNT = Range("a whole number above 0", 1, math.inf, whole=True)
