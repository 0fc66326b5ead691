"""For how many rows a product is computed where a row's bits must not depend on their number.

On the CPUs that were measured, a row of a product has the same bits for any number of rows that is
a multiple of four (dev/log.md). For other numbers MKL may round differently, such as for 5 to 7 and
9 to 11 on an AMD EPYC with AVX2. So whatever is computed twice and compared bit by bit is padded
with rows of zeros, whose products are dropped. An example is an answer that is sampled and then
scored.
"""

_UNIT = 4


def padded_count(rows: int) -> int:
    """Return `rows`, rounded up to a number for which the bits of a row do not depend on it."""
    return -(-rows // _UNIT) * _UNIT


def unpadded_count(rows: int) -> int:
    """Return the largest number of rows, at most `rows`, that needs no padding.

    If there is none, return `rows`.
    """
    return rows - rows % _UNIT or rows
