"""Pad the rows of a matrix product, so that a row's bits do not depend on the number of rows.

On the CPUs that were measured, a row of a product has the same bits whenever the number of rows is a multiple
of four (dev/log.md). For other numbers, such as 5 to 7 and 9 to 11 on an AMD EPYC with AVX2, MKL may round
differently. Some products are computed twice and must have the same bits: an answer is sampled, and its
tokens are scored later. So their rows are padded with zeros to a multiple of four, and the products of the
added rows are dropped.
"""

_UNIT = 4


def padded_count(rows: int) -> int:
    """Return `rows`, rounded up to a multiple of four."""
    return -(-rows // _UNIT) * _UNIT


def unpadded_count(rows: int) -> int:
    """Return the largest number of rows, at most `rows`, that needs no padding.

    If there is none, return `rows`.
    """
    multiple_of_unit = rows - rows % _UNIT
    return multiple_of_unit if multiple_of_unit > 0 else rows
