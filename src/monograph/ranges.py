"""Ranges of numbers, so that settings, optimizers and the sampler refuse the same values with the
same messages.
"""

import math
import sys
from numbers import Integral, Rational, Real
from typing import Any, NamedTuple, SupportsInt

from monograph.errors import UsageError

LARGEST_FLOAT = sys.float_info.max


class Range(NamedTuple):
    """The numbers that an argument may be; booleans and NaN are in no range.

    Attributes:
        expected: the range in words, to complete the sentence "expected ...".
        low: the smallest number.
        high: the largest number.
        excludes_low: whether `low` itself is not in the range.
        excludes_high: whether `high` itself is not in the range.
        whole: whether only integers, of Python's or numpy's types, are in the range.
    """

    expected: str
    low: float
    high: float
    excludes_low: bool = False
    excludes_high: bool = False
    whole: bool = False

    def holds(self, value: object) -> bool:
        """Return whether the value is a number in this range."""
        number_type = Integral if self.whole else Real
        if isinstance(value, bool) or not isinstance(value, number_type):
            return False
        # Any `Real` can be compared with a float. It is not converted, which would round a large integer.
        number: Any = value
        # An integer or a fraction may be larger than any float.
        exceeds_floats = isinstance(value, Rational) and abs(number) > LARGEST_FLOAT
        if exceeds_floats and not self.whole:
            return False
        is_high_enough = number > self.low if self.excludes_low else number >= self.low
        is_low_enough = number < self.high if self.excludes_high else number <= self.high
        return bool(is_high_enough and is_low_enough)

    def require(self, name: str, value: object) -> None:
        """Refuse a value outside the range.

        Raises:
            UsageError: with the name, the value and what was expected.
        """
        if not self.holds(value):
            raise UsageError(f"{name} = {value!r}: expected {self.expected}")

    def integer(self, name: str, value: SupportsInt) -> int:
        """Return a value of any integer type, such as numpy's, as a Python int.

        Raises:
            UsageError: the value is outside the range.
        """
        self.require(name, value)
        return int(value)

    def checked(self, value: float) -> float:
        """Return a value in the range. This is a validator for pydantic.

        Raises:
            ValueError: the value is outside the range. pydantic adds the key's name.
        """
        if not self.holds(value):
            raise ValueError(self.expected)
        return value


def between(low: float, high: float) -> Range:
    """Return the range of numbers from `low` to `high`, both included."""
    return Range(expected=f"a number from {low:g} to {high:g}", low=low, high=high)


def whole(least: int, most: int) -> Range:
    """Return the range of whole numbers from `least` to `most`, both included."""
    return Range(
        expected=f"a whole number from {least} to {most}", low=least, high=most, whole=True
    )


ABOVE_0 = Range(
    expected="a number above 0", low=0, high=math.inf, excludes_low=True, excludes_high=True
)
NOT_NEGATIVE = Range(expected="a number, 0 or more", low=0, high=math.inf, excludes_high=True)
# For decay rates and the probabilities of dropout: 0 is allowed, and 1 is not.
DECAY = Range(expected="a number, 0 or more and below 1", low=0, high=1, excludes_high=True)
FRACTION = Range(
    expected="a number between 0 and 1", low=0, high=1, excludes_low=True, excludes_high=True
)
WHOLE = Range(expected="a whole number, 0 or more", low=0, high=math.inf, whole=True)
COUNT = Range(expected="a whole number above 0", low=1, high=math.inf, whole=True)
