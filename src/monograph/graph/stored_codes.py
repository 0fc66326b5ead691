"""A weight whose codes were chosen by another program, in the form of an `Int8Weight` or an `NF4Weight`.

A file of weights in few bits has such codes. A frozen layer takes them as they are, so that the weight is not
rounded a second time.

Shapes: N outputs, K inputs, E experts, C blocks of 64 numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64  # numbers that share a scale


class StoredCodes(NamedTuple):
    """A weight, [N, K] or [E, N, K], in few bits.

        int8:  W[n, k] = codes[n, k] scales[n]
        nf4:   W[i] = table[code[i]] scales[c],   where block c is 64 consecutive numbers i

    Attributes:
        codes: int8 of the weight's shape; or for nf4 uint8 [N K / 2], two codes each, the first of them in
            the upper bits.
        scales: fp32, [N] or [E, N]; or for nf4 [C].
        table: the 16 numbers of nf4's codes, fp32; None for int8.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor | None = None

    def rows(self, begin: int, end: int, width: int) -> "StoredCodes":
        """Return the rows begin to end of a matrix of this width; `can_take_rows` says if that is possible."""
        if self.table is None:
            return StoredCodes(self.codes[begin:end], self.scales[begin:end])
        first, last = begin * width, end * width
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        codes = self.codes[first // 2 : -(-last // 2)]
        return StoredCodes(codes, self.scales[blocks], self.table)


def can_take_rows(form: str, begin: int, width: int) -> bool:
    """Return whether the rows of a weight from `begin` on have codes of their own.

    In nf4 they do if a block begins with the first of these rows.
    """
    return form != "nf4" or begin * width % BLOCK == 0


def can_stack(form: str, numbers: int) -> bool:
    """Return whether matrices of this many numbers have codes together as one weight [E, N, K].

    In nf4 they do if no block has numbers of two matrices.
    """
    return form != "nf4" or numbers % BLOCK == 0


def stack(experts: Sequence[StoredCodes]) -> StoredCodes:
    """Return the codes of one weight, [E, N, K], from those of each expert's matrix."""
    codes = [expert.codes for expert in experts]
    scales = [expert.scales for expert in experts]
    table = experts[0].table
    if table is None:
        return StoredCodes(torch.stack(codes), torch.stack(scales))
    return StoredCodes(torch.cat(codes), torch.cat(scales), table)
