"""Check numbers that come from a configuration or a file. The module needs no torch."""

from monograph.errors import InputRefused

LARGEST_SIZE = 2**31 - 1


def check_positive_integer(name: str, value: object) -> None:
    """Raise InputRefused unless the value is an integer from 1 to 2^31 - 1.

    The upper limit is the largest number that GGUF files can hold.
    """
    _check_integer(name, value, 1, "")


def check_token_id(name: str, value: object) -> None:
    """Raise InputRefused unless the value is an integer from 0 to 2^31 - 1."""
    _check_integer(name, value, 0, "a token id, ")


def _check_integer(name: str, value: object, minimum: int, meaning: str) -> None:
    """Raise InputRefused unless the value is an integer from the minimum to 2^31 - 1.

    `meaning` is put into the message before what was expected, such as "a token id, ".
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputRefused(
            f"{name} = {value!r}: expected {meaning}a whole number of at least {minimum}"
        )
    if value > LARGEST_SIZE:
        raise InputRefused(f"{name} = {value}: expected {meaning}at most {LARGEST_SIZE}")


def check_positive_number(name: str, value: object) -> None:
    """Raise InputRefused unless the value is a positive number that torch accepts.

    torch accepts an int64 or a finite float.
    """
    limit = 2**63 if isinstance(value, int) else 1e300
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < limit:
        raise InputRefused(f"{name} = {value!r}: expected a positive number below {limit:g}")
