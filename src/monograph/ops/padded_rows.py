"""Pad the rows of a matrix product, so that a row's bits do not depend on the number of rows.

MKL chooses the order in which a product is summed by the number of rows. On the CPUs with AVX-512 that were
measured, a row has the same bits in fp32 and on one thread for every number of rows that four divides, if there
are enough of them (dev/log.md). An Intel Xeon needs 16 rows: with 4, 8 and 12 it sums otherwise from 96, 256 and
384 terms on. On an AMD EPYC four rows are enough, but it rounds differently with 5 to 7 and 9 to 11.

No library promises such bits. On the Intel Xeon they also differ if two threads share a sum of 1,024 terms or more,
if AMX multiplies numbers in bf16 and a sum has 512 terms or more, and if MKL is limited to AVX2.

Some products are computed twice and should have the same bits: an answer is sampled, and its tokens are scored
later. So their rows are padded with zeros, and the products of the added rows are dropped. The products of a mixture's
experts are padded to four rows only (`monograph.graph.grouped`).
"""

# The number of rows that are enough for sums of any length, and for short ones.
LEAST_ROWS = 16
LEAST_ROWS_OF_SHORT_SUMS = 4
_TERMS_OF_LONG_SUM = 96
_UNIT = 4


def least_rows(terms: int) -> int:
    """Return the number of rows that are enough for sums of `terms` terms."""
    return LEAST_ROWS if terms >= _TERMS_OF_LONG_SUM else LEAST_ROWS_OF_SHORT_SUMS


def padded_count(rows: int, least: int = LEAST_ROWS) -> int:
    """Return `rows`, rounded up to a multiple of four, and at least `least`."""
    return max(least, -(-rows // _UNIT) * _UNIT)


def unpadded_count(rows: int) -> int:
    """Return the largest number of rows, at most `rows`, that needs no padding.

    If there is none, return `rows`.
    """
    return rows - rows % _UNIT if rows >= LEAST_ROWS else rows
