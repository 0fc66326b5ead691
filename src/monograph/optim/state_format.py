"""The type of a format in which an optimizer keeps its moments between updates.

A plane is a flat buffer of parameters that are updated in the same way (`monograph.optim.planes`).
An optimizer keeps one or more moments for each plane, and a format says in which buffers a moment is
stored. A format may store numbers in blocks that share a scale. If ranks (the processes of distributed
training) share out the rows of a parameter, a rank may have only a part of its first block and of its
last block. `block_offset` says how many numbers at the beginning of the first block an earlier rank
has.

Shapes: N numbers of a plane.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Buffers = dict[str, Tensor]


class PackingContext(NamedTuple):
    """The second argument of a format's `pack` and `unpack`: all that they must know about the numbers.

    Attributes:
        size: N, how many numbers there are.
        signed: whether the numbers may be negative, as first moments may.
        block_offset: how many numbers of the first block another rank has.
        edge_maxima_2: the largest numbers of the first and of the last block, if other ranks have parts
            of these blocks; None: they are found among the numbers themselves.
        word_N: random words, int64 in [0, 2^32), if the format rounds stochastically; else None.
    """

    size: int
    signed: bool = True
    block_offset: int = 0
    edge_maxima_2: Tensor | None = None
    word_N: Tensor | None = None


class Moment(NamedTuple):
    """One of the tensors that a rule keeps for each parameter.

    Attributes:
        name: its name in checkpoints, as in torch.optim.
        never_negative: whether its numbers are never negative, as means of squares are. Then a format
            needs no bit for a sign.
    """

    name: str
    never_negative: bool = False


class MomentBuffer(NamedTuple):
    """One of the buffers in which a moment is stored, such as its codes or its scales.

    If ranks share out the rows of a parameter, each has the elements of the buffer that belong to the
    numbers of its rows. An element that belongs to numbers of several ranks is stored by each of them.

    Attributes:
        suffix: the end of the buffer's name, after the moment's name, such as "_scale".
        dtype: the buffer's dtype; None: the gradient's.
        nonnegative_dtype: the dtype for a moment that is never negative; None: `dtype`, as for others.
        numbers_per_element: how many consecutive numbers of the moment share one element, a power
            of two. For scales it is the size of a block, and a scale must depend on the block's
            largest number alone. For codes of 4 bits it is 2.
    """

    suffix: str
    dtype: torch.dtype | None
    nonnegative_dtype: torch.dtype | None = None
    numbers_per_element: int = 1

    def buffer_name(self, moment: Moment) -> str:
        """Return the buffer's name in a plane's state and in checkpoints."""
        return moment.name + self.suffix

    def count_elements(self, numbers: int, block_offset: int) -> int:
        """Return how many elements of the buffer a rank needs.

        Args:
            numbers: how many numbers of the moment the rank has.
            block_offset: how many numbers of the first block other ranks have.
        """
        # The rank's first element may begin with numbers of other ranks.
        occupied = block_offset % self.numbers_per_element + numbers
        return -(-occupied // self.numbers_per_element)  # rounded up


@dataclass(frozen=True)
class StateFormat:
    """A format in which moments are kept between updates.

    The update itself computes in the gradient's dtype.

    Attributes:
        parts: the buffers of a moment.
        eager_update_bytes: the bytes of temporary memory that an update takes for each number of the
            largest plane if it is not compiled: seven fp32 copies, and the tensors of `pack` and
            `unpack`. Plans count it.
        pack: returns the new values of the buffers, in the order of `parts`, given a moment's numbers
            [N]. None: the update changes the only buffer itself.
        unpack: returns a moment's numbers [N], given its buffers. Codes of zero must stand for
            numbers of zero, whatever the scales are, because new moments and the gaps between
            parameters are zeros.
        stochastic: whether `pack` rounds stochastically, for which it gets random words.
    """

    parts: tuple[MomentBuffer, ...]
    eager_update_bytes: int
    pack: Callable[[Tensor, PackingContext], Sequence[Tensor]] | None = None
    unpack: Callable[[Sequence[Tensor], PackingContext], Tensor] | None = None
    stochastic: bool = False

    @property
    def exact(self) -> bool:
        """Return whether the update computes in the buffers themselves."""
        return self.pack is None

    @property
    def bytes_each(self) -> float:
        """Return the bytes of one number of a moment, with gradients in fp32."""
        return sum(
            (part.dtype or torch.float32).itemsize / part.numbers_per_element for part in self.parts
        )

    @property
    def block(self) -> int:
        """Return the size of a block: how many consecutive numbers are packed together.

        Parameters and chunks of planes begin at multiples of it. Ranks that have parts of one block
        agree on its largest number.
        """
        return max(part.numbers_per_element for part in self.parts)

    @property
    def rows_multiple(self) -> int:
        """Return what must divide the index at which a rank's part of the numbers begins.

        Ranks must not share an element that packs several numbers, such as two codes of 4 bits. They
        may share a scale, of which each has a copy, because they agree on it.
        """
        # A buffer with an element for each block has scales. All other buffers pack numbers.
        sizes = [part.numbers_per_element for part in self.parts]
        return max((size for size in sizes if size < self.block), default=1)

    def numbers_per_element(self, moments: Sequence[Moment]) -> dict[str, int]:
        """Return {name of a buffer: how many numbers share one of its elements} for some moments."""
        return {
            part.buffer_name(moment): part.numbers_per_element
            for moment in moments
            for part in self.parts
        }

    def zeros(self, like_N: Tensor, moment: Moment, block_offset: int) -> Buffers:
        """Return the buffers of a moment that is zero, by their names in a checkpoint.

        Args:
            like_N: a tensor in the gradient's dtype.
            moment: the moment.
            block_offset: how many numbers of the first block other ranks have.
        """
        shape = like_N.shape[:-1]  # (members,) in a stack, else ()
        buffers = {}
        for part in self.parts:
            dtype = part.dtype or like_N.dtype
            if moment.never_negative and part.nonnegative_dtype is not None:
                dtype = part.nonnegative_dtype
            size = (*shape, part.count_elements(like_N.shape[-1], block_offset))
            buffers[part.buffer_name(moment)] = like_N.new_zeros(size, dtype=dtype)
        return buffers

    def read(
        self, buffers: Mapping[str, Tensor], moment: Moment, like_N: Tensor, block_offset: int
    ) -> Tensor:
        """Return a moment's numbers [N]. If the format is exact, this returns the buffer itself.

        Args:
            buffers: the plane's buffers.
            moment: the moment.
            like_N: a tensor of N numbers in the gradient's dtype.
            block_offset: how many numbers of the first block other ranks have.
        """
        tensors = [buffers[part.buffer_name(moment)] for part in self.parts]
        if self.unpack is None:
            return tensors[0].to(like_N.dtype)
        packing = PackingContext(like_N.shape[-1], not moment.never_negative, block_offset)
        return self.unpack(tensors, packing).to(like_N.dtype)

    def write_(
        self,
        buffers: Mapping[str, Tensor],
        moment: Moment,
        values_N: Tensor,
        accepted: Tensor,
        *,
        word_N: Tensor | None = None,
        block_offset: int = 0,
        edge_maxima_2: Tensor | None = None,
    ) -> None:
        """Write a moment's new numbers into its buffers; nothing changes where `accepted` is false.

        Args:
            buffers: the plane's buffers.
            moment: the moment.
            values_N: the numbers after the update.
            accepted: whether the update is made, bool.
            word_N: random words, int64; None if the format is not `stochastic`.
            block_offset: how many numbers of the first block other ranks have.
            edge_maxima_2: the largest numbers of the first and of the last block, if other ranks have
                parts of these blocks; else None.
        """
        if self.pack is None:
            return  # the update has changed the only buffer itself
        packing = PackingContext(
            len(values_N), not moment.never_negative, block_offset, edge_maxima_2, word_N
        )
        for part, new in zip(self.parts, self.pack(values_N, packing), strict=True):
            buffer = buffers[part.buffer_name(moment)]
            buffer.copy_(torch.where(accepted, new, buffer))


# The gradient's dtype, which is fp32 for all but fp64 models.
EXACT = StateFormat((MomentBuffer("", None),), eager_update_bytes=28)
