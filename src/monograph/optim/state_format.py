"""The type of a form in which an optimizer keeps its moments between updates.

A plane is a flat buffer of parameters that are updated in the same way (`monograph.optim.planes`).
An optimizer keeps one or more moments of it, and a form says in which buffers a moment lies. If
ranks have rows of a parameter each, a form's block of numbers may begin with numbers of an earlier
rank, of which there are `before`, and end with numbers of a later one.

Shapes: N numbers of a plane.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Buffers = dict[str, Tensor]


class PackingContext(NamedTuple):
    """What a form's functions get beside the numbers.

    Attributes:
        size: N, how many numbers there are.
        signed: whether the numbers may be negative, as first moments may.
        before: how many numbers of the first block another rank has.
        ends_2: the largest number of the first and of the last block, if other ranks have numbers
            of them; None: the largest of the numbers here.
        word_N: random words, int64 in [0, 2^32), if the form rounds stochastically.
    """

    size: int
    signed: bool = True
    before: int = 0
    ends_2: Tensor | None = None
    word_N: Tensor | None = None


class Moment(NamedTuple):
    """One of the tensors that a rule keeps of each parameter.

    Attributes:
        name: its name in checkpoints, as in torch.optim.
        never_negative: whether it is a mean of squares or the like, so that a form may use the
            sign's bit for the value.
    """

    name: str
    never_negative: bool = False


class MomentBuffer(NamedTuple):
    """One of the buffers that hold a moment.

    A rank with some rows of a parameter has the elements for the numbers of these rows. If an
    element is for numbers of several ranks, each of them has a copy.

    Attributes:
        suffix: what the buffer's name has after the moment's, such as "_scale".
        dtype: the buffer's dtype; None: the gradient's.
        of_squares: the dtype for a moment that is never negative, if it is another one.
        numbers_per_element: how many consecutive numbers of the moment share one element, a power
            of two. In a form with scales it is the block's size for the scales, which depend on the
            block's largest number alone. It is 2 for codes of 4 bits.
    """

    suffix: str
    dtype: torch.dtype | None
    of_squares: torch.dtype | None = None
    numbers_per_element: int = 1

    def buffer_name(self, moment: Moment) -> str:
        """Return the buffer's name in a plane's state and in checkpoints."""
        return moment.name + self.suffix

    def count_elements(self, numbers: int, before: int) -> int:
        """Return how many elements so many numbers need, if other ranks have the first `before`
        numbers of their first block.
        """
        occupied = before % self.numbers_per_element + numbers
        return -(-occupied // self.numbers_per_element)  # rounded up


@dataclass(frozen=True)
class StateFormat:
    """A form in which moments are kept between updates.

    The update itself computes in the gradient's dtype.

    Attributes:
        parts: the buffers of a moment.
        eager_update_bytes: bytes of temporary memory that an eager update takes for each number of
            the largest plane: seven fp32 copies, and the tensors that read and write this form.
        pack: returns the buffers' new values, in the order of `parts`, for a moment's numbers [N];
            None: the update computes in the only buffer itself.
        unpack: returns a moment's numbers [N] from its buffers. Buffers of zeros, whatever the
            scales, must be numbers of zero, as new moments and the gaps between parameters are.
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
        """Return how many consecutive numbers are packed together.

        Parameters and chunks of planes begin at multiples of it, and ranks that hold parts of one
        block agree on its largest number.
        """
        return max(part.numbers_per_element for part in self.parts)

    @property
    def rows_multiple(self) -> int:
        """Return the number at whose multiples a rank's rows must begin.

        Ranks can have copies of a scale, on which they agree. An element that packs several numbers
        would have other contents on each of them.
        """
        sizes = [part.numbers_per_element for part in self.parts]
        return max((size for size in sizes if size < self.block), default=1)

    def numbers_per_element(self, moments: Sequence[Moment]) -> dict[str, int]:
        """Return for the name of each of these moments' buffers how many numbers share one element."""
        return {
            part.buffer_name(moment): part.numbers_per_element
            for moment in moments
            for part in self.parts
        }

    def zeros(self, like_N: Tensor, moment: Moment, before: int) -> Buffers:
        """Return the buffers of a moment that is zero, by their names in a checkpoint.

        Args:
            like_N: a tensor in the gradient's dtype.
            moment: the moment.
            before: how many numbers of the first block other ranks have.
        """
        shape = like_N.shape[:-1]  # (members,) in a stack, else ()
        made = {}
        for part in self.parts:
            own = (moment.never_negative and part.of_squares) or part.dtype or like_N.dtype
            size = (*shape, part.count_elements(like_N.shape[-1], before))
            made[part.buffer_name(moment)] = like_N.new_zeros(size, dtype=own)
        return made

    def read(
        self, buffers: Mapping[str, Tensor], moment: Moment, like_N: Tensor, before: int
    ) -> Tensor:
        """Return a moment's numbers [N]; the buffer itself if the form is exact.

        Args:
            buffers: the plane's buffers.
            moment: the moment.
            like_N: a tensor of N numbers in the gradient's dtype.
            before: how many numbers of the first block other ranks have.
        """
        tensors = [buffers[part.buffer_name(moment)] for part in self.parts]
        if self.unpack is None:
            return tensors[0].to(like_N.dtype)
        packing = PackingContext(like_N.shape[-1], not moment.never_negative, before)
        return self.unpack(tensors, packing).to(like_N.dtype)

    def write_(
        self,
        buffers: Mapping[str, Tensor],
        moment: Moment,
        values_N: Tensor,
        accepted: Tensor,
        *,
        word_N: Tensor | None = None,
        before: int = 0,
        ends_2: Tensor | None = None,
    ) -> None:
        """Write a moment's new numbers into its buffers; nothing changes where `accepted` is false.

        Args:
            buffers: the plane's buffers.
            moment: the moment.
            values_N: the numbers after the update.
            accepted: whether the update is made, bool.
            word_N: random words, int64; None if the form is not `stochastic`.
            before: how many numbers of the first block other ranks have.
            ends_2: the largest numbers of the first and of the last block, if other ranks have
                parts of these blocks; else None.
        """
        if self.pack is None:
            return
        packing = PackingContext(len(values_N), not moment.never_negative, before, ends_2, word_N)
        for part, new in zip(self.parts, self.pack(values_N, packing), strict=True):
            buffer = buffers[part.buffer_name(moment)]
            buffer.copy_(torch.where(accepted, new, buffer))


# The gradient's dtype, which is fp32 for all but fp64 models.
EXACT = StateFormat((MomentBuffer("", None),), eager_update_bytes=28)
