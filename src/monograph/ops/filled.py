"""How many rows a product is computed for, where a row's bits shall not depend on how many there
are.

On the CPUs that were measured a row of a product has the same bits whatever the number of rows, if
that is a multiple of four (dev/log.md): with other numbers, such as 5 to 7 and 9 to 11 on an AMD
EPYC with AVX2, MKL rounds otherwise. So what is computed twice and compared bit by bit, such as an
answer that is drawn and then scored, has rows of zeros after its own, and what they give is thrown
away.
"""

_UNIT = 4


def filled_up(rows: int) -> int:
    """Return the least number of rows, from so many on, with which each has the bits that it has
    among any others.
    """
    return -(-rows // _UNIT) * _UNIT


def whole(rows: int) -> int:
    """Return the largest number of rows, up to so many, that needs no filling; where there is none,
    the number.
    """
    return rows - rows % _UNIT or rows
