"""The formats in which an optimizer keeps its moments.

To add a format, write its class here, enter it in `FORMATS`, and name it in the key `optim.state`.

Shapes: N elements of a plane, K blocks of 256.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from monograph.optim.narrow import BLOCK, block_count, dequantised, quantised, stochastic

Buffers = dict[str, Tensor]
# Second moments are never negative, so a format may use the sign's bit for the value.
NEVER_NEGATIVE = ("exp_avg_sq",)


class StateFormat(ABC):
    """A format in which moments are kept between updates.

    The update itself computes in the gradient's dtype.

    Attributes:
        bytes_each: bytes of one number of a moment.
        eager_update_bytes: bytes of temporary memory that an eager update takes for each number of
            the largest plane: seven fp32 copies, and the tensors that read and write this format.
        block: how many consecutive numbers share a scale. Parameters begin at multiples of this,
            and ranks that hold parts of one block agree on its scale.
        stochastic: whether the format rounds stochastically, which needs random words.
        exact: whether the update computes in the buffers themselves.
    """

    bytes_each: float
    eager_update_bytes: int
    block = 1
    stochastic = False
    exact = False

    @abstractmethod
    def zeros(self, like_N: Tensor, name: str, before: int) -> Buffers:
        """Return the buffers of a moment that is zero, by their names in a checkpoint.

        Args:
            like_N: a tensor in the gradient's dtype.
            name: the moment's name.
            before: the number of elements of other ranks in the first block.
        """

    @abstractmethod
    def unpack(self, buffers: Buffers, name: str, dtype: torch.dtype, before: int) -> Tensor:
        """Return a moment's numbers [N] in `dtype`; the buffer itself if the format is exact.

        Args:
            buffers: the plane's buffers.
            name: the moment's name.
            dtype: the gradient's dtype.
            before: the number of elements of other ranks in the first block.
        """

    @abstractmethod
    def pack_(
        self,
        buffers: Buffers,
        name: str,
        values_N: Tensor,
        accepted: Tensor,
        word_N: Tensor | None,
        before: int,
        ends_2: Tensor | None,
    ) -> None:
        """Write a moment's new numbers into its buffers; nothing changes where `accepted` is false.

        Args:
            buffers: the plane's buffers.
            name: the moment's name.
            values_N: the numbers after the update.
            accepted: whether the update is made, bool.
            word_N: random words, int64; None if the format is not `stochastic`.
            before: the number of elements of other ranks in the first block.
            ends_2: the largest numbers of the first and of the last block, if other ranks have
                parts of these blocks; else None.
        """


class Exact(StateFormat):
    """The gradient's dtype, which is fp32 for all but fp64 models: 4 bytes."""

    bytes_each = 4
    eager_update_bytes = 28
    exact = True

    def zeros(self, like_N: Tensor, name: str, before: int) -> Buffers:
        """See StateFormat."""
        return {name: torch.zeros_like(like_N)}

    def unpack(self, buffers: Buffers, name: str, dtype: torch.dtype, before: int) -> Tensor:
        """See StateFormat."""
        return buffers[name].to(dtype)

    def pack_(
        self,
        buffers: Buffers,
        name: str,
        values_N: Tensor,
        accepted: Tensor,
        word_N: Tensor | None,
        before: int,
        ends_2: Tensor | None,
    ) -> None:
        """Do nothing, because the update was made in the buffer itself."""


class Bf16(StateFormat):
    """bf16, stochastically rounded: 2 bytes, and right on average."""

    bytes_each = 2
    eager_update_bytes = 116  # this many because random words are 8-byte integers
    stochastic = True

    def zeros(self, like_N: Tensor, name: str, before: int) -> Buffers:
        """See StateFormat."""
        return {name: torch.zeros_like(like_N, dtype=torch.bfloat16)}

    def unpack(self, buffers: Buffers, name: str, dtype: torch.dtype, before: int) -> Tensor:
        """See StateFormat."""
        return buffers[name].to(dtype)

    def pack_(
        self,
        buffers: Buffers,
        name: str,
        values_N: Tensor,
        accepted: Tensor,
        word_N: Tensor | None,
        before: int,
        ends_2: Tensor | None,
    ) -> None:
        """See StateFormat."""
        assert word_N is not None
        new = stochastic(values_N, word_N)
        buffers[name].copy_(torch.where(accepted, new, buffers[name]))


class EightBit(StateFormat):
    """Codes of 8 bits, and the largest number of each block of 256; see `quantised`.

    The largest numbers are the buffer `<name>_scale`, [K] fp32.
    """

    bytes_each = 1 + 4 / BLOCK
    eager_update_bytes = 36
    block = BLOCK

    def zeros(self, like_N: Tensor, name: str, before: int) -> Buffers:
        """See StateFormat."""
        dtype = torch.uint8 if name in NEVER_NEGATIVE else torch.int8
        scale_K = like_N.new_zeros(block_count(like_N, before), dtype=torch.float32)
        return {name: torch.zeros_like(like_N, dtype=dtype), f"{name}_scale": scale_K}

    def unpack(self, buffers: Buffers, name: str, dtype: torch.dtype, before: int) -> Tensor:
        """See StateFormat."""
        return dequantised(buffers[name], buffers[f"{name}_scale"], before).to(dtype)

    def pack_(
        self,
        buffers: Buffers,
        name: str,
        values_N: Tensor,
        accepted: Tensor,
        word_N: Tensor | None,
        before: int,
        ends_2: Tensor | None,
    ) -> None:
        """See StateFormat."""
        signed = name not in NEVER_NEGATIVE
        codes_N, scale_K = quantised(values_N, signed, before, ends_2)
        for key, new in ((name, codes_N), (f"{name}_scale", scale_K)):
            buffers[key].copy_(torch.where(accepted, new, buffers[key]))


# By their names in the key `optim.state`; the exact format comes first.
FORMATS: dict[str, StateFormat] = {"fp32": Exact(), "bf16": Bf16(), "8bit": EightBit()}


def narrower(state: str) -> Iterable[str]:
    """Return the formats that take fewer bytes than this one, the largest first."""
    limit = FORMATS[state].bytes_each
    smaller = [name for name, state_format in FORMATS.items() if state_format.bytes_each < limit]
    return sorted(smaller, key=lambda name: -FORMATS[name].bytes_each)
