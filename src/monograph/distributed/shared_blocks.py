"""Let ranks agree on the scales of blocks of moments of which each rank has a part.

Some formats of the optimizer's state pack a moment in blocks of consecutive numbers, and scale each
block by its largest number. Where a parameter is sharded by rows, a block may be cut: it begins in
the rows of one rank and ends in those of another. Each of them needs the largest number of the
whole block.

Shapes: P planes with cut blocks, M moments of each, W ranks, E = 2 ends of a rank's rows, their
first and last block.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.distributed.world import World
from monograph.optim import Hyperparameters, ParameterKind, Plane
from monograph.optim.state_format import MomentBuffer, StateFormat


class EndBlocks(NamedTuple):
    """The blocks at which each rank's elements of one parameter begin and end.

    Attributes:
        block_numbers_WE: for each rank the numbers, in the parameter, of its first and of its last
            block; -1 for a rank without elements.
        slices: this rank's elements in its first and in its last block.
    """

    block_numbers_WE: Tensor
    slices: tuple[slice, slice]


class CutPlane(NamedTuple):
    """A plane with cut blocks.

    Attributes:
        plane: the plane.
        total: its summed gradient.
        end_blocks: its end blocks.
    """

    plane: Plane
    total: Tensor
    end_blocks: EndBlocks


def find_end_blocks(bounds: Sequence[tuple[int, int]], rank: int, block: int) -> EndBlocks:
    """Return the end blocks of a parameter.

    Args:
        bounds: for each rank, its first element in the parameter, and the one after its last.
        rank: this rank.
        block: the numbers of a block.
    """
    block_numbers = [
        (begin // block, (end - 1) // block) if end > begin else (-1, -1) for begin, end in bounds
    ]
    begin, end = bounds[rank]
    size = end - begin
    slices = (slice(0, 0), slice(0, 0))
    if size:
        first_block, last_block = block_numbers[rank]
        in_first = slice(0, min(size, (first_block + 1) * block - begin))
        in_last = slice(max(0, last_block * block - begin), size)
        slices = (in_first, in_last)
    return EndBlocks(torch.tensor(block_numbers), slices)


def share_largest_numbers(
    row_ranks: World,
    planes: Sequence[CutPlane],
    scale: Tensor,
    form: StateFormat,
    hyperparameters: Callable[[ParameterKind, Tensor], Hyperparameters],
) -> None:
    """Set `Plane.ends`: the largest numbers that the first and last blocks of each plane will have
    after the update, over all ranks that have a part of them; a collective.

    Args:
        row_ranks: the ranks that share out rows.
        planes: the planes.
        scale: the factor of the summed gradients.
        form: the form of the optimizer's state.
        hyperparameters: returns the numbers of the update for a kind and its summed gradient.
    """
    # Planes that the same formula updates are computed at once.
    by_formula: dict[tuple[object, ...], list[CutPlane]] = {}
    for plane in planes:
        kind = plane.plane.kind
        by_formula.setdefault((kind.rule, kind.betas), []).append(plane)
    for alike in by_formula.values():
        kind = alike[0].plane.kind
        hyper = hyperparameters(kind, alike[0].total)
        own_MPE = _own_largest_numbers(alike, scale, form, hyper)
        # The sum over ranks of tensors that are 0 except at the rank's own place.
        all_WMPE = own_MPE.new_zeros(row_ranks.size, *own_MPE.shape)
        all_WMPE[row_ranks.rank] = own_MPE
        all_MPWE = row_ranks.sum(all_WMPE).permute(1, 2, 0, 3)
        # Of these, the largest counts that comes from a part of the same block.
        blocks_PWE = torch.stack([plane.end_blocks.block_numbers_WE for plane in alike])
        blocks_PWE = blocks_PWE.to(scale.device)
        own_blocks_PE = blocks_PWE[:, row_ranks.rank]
        is_same_PEWE = own_blocks_PE[:, :, None, None] == blocks_PWE[:, None]
        largest_MPE = torch.where(is_same_PEWE, all_MPWE.unsqueeze(2), 0.0).amax((-1, -2))
        names = [moment.name for moment in kind.rule.moments]
        for number, plane in enumerate(alike):
            plane.plane.edge_maxima = dict(zip(names, largest_MPE[:, number], strict=True))


def _own_largest_numbers(
    planes: Sequence[CutPlane], scale: Tensor, form: StateFormat, hyper: Hyperparameters
) -> Tensor:
    """Return the largest absolute values [M, P, E] of the next moments in this rank's parts of its
    first and last blocks, in fp32; 0 where it has no elements.

    The arguments are those of `share_largest_numbers`, for planes that the same formula updates.
    """
    block = form.block
    rule = planes[0].plane.kind.rule
    # Below, each part of a block is a row [block], filled up with zeros; there are P E rows.
    parts = [(plane, part) for plane in planes for part in plane.end_blocks.slices]
    grads = _padded_rows([plane.total[part] for plane, part in parts], block)
    grads = grads * scale.to(grads.dtype)
    moments = []
    for moment in rule.moments:
        buffers = {}
        for buffer in form.parts:
            name = buffer.buffer_name(moment)
            rows = [
                plane.plane.state[name][_buffer_slice(buffer, part, plane.plane.block_offset)]
                for plane, part in parts
            ]
            buffers[name] = _padded_rows(rows, block // buffer.numbers_per_element).view(-1)
        moments.append(form.read(buffers, moment, grads.view(-1), block_offset=0).view_as(grads))
    next_moments = rule.next_moments(grads, moments, hyper)
    return torch.stack(
        [each.to(torch.float32).abs().amax(-1).view(len(planes), 2) for each in next_moments]
    )


def _buffer_slice(buffer: MomentBuffer, numbers: slice, before: int) -> slice:
    """Return the elements of a buffer of moments that belong to some of the plane's numbers.

    Args:
        buffer: the buffer; an element may belong to several numbers, such as a block's scale.
        numbers: the numbers.
        before: how many numbers of the plane's first block other ranks have.
    """
    if numbers.stop == numbers.start:
        return slice(0, 0)
    per_element = buffer.numbers_per_element
    first_of_rank = before // per_element
    begin = (before + numbers.start) // per_element
    end = -(-(before + numbers.stop) // per_element)  # rounded up
    return slice(begin - first_of_rank, end - first_of_rank)


def _padded_rows(parts: Sequence[Tensor], width: int) -> Tensor:
    """Return parts of at most `width` numbers as rows [parts, width], with zeros after them."""
    rows = parts[0].new_zeros(len(parts), width)
    torch._foreach_copy_(
        [row[: len(part)] for row, part in zip(rows, parts, strict=True)], list(parts)
    )
    return rows
