"""Let ranks agree on the scales of blocks of moments that several ranks share.

Some formats of the optimizer's state pack a moment in blocks of consecutive numbers, and scale each
block by its largest number. If a parameter is sharded by rows, a block may be cut: it begins in the
rows of one rank and ends in those of another. Each rank that has a part of it needs the largest number
of the whole block. Only the first and the last block of a rank's rows, its end blocks, may be cut.

A plane is a flat tensor with this rank's rows of one parameter, and its gradient and moments.

Shapes: P planes with cut blocks, M moments of each, W ranks, E = 2 end blocks of a rank's rows.
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
        block_indices_WE: for each rank the indices, in the parameter, of its first and of its last
            block; -1 for a rank without elements.
        slices: this rank's elements in its first and in its last block.
    """

    block_indices_WE: Tensor
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


def find_end_blocks(bounds: Sequence[tuple[int, int]], rank: int, block_size: int) -> EndBlocks:
    """Return the end blocks of a parameter.

    Args:
        bounds: for each rank, the index of its first element in the parameter, and the index after its
            last element.
        rank: this rank.
        block_size: how many elements a block has.
    """
    block_indices = []
    for begin, end in bounds:
        first_and_last = (-1, -1)
        if end > begin:
            first_and_last = (begin // block_size, (end - 1) // block_size)
        block_indices.append(first_and_last)
    begin, end = bounds[rank]
    size = end - begin
    slices = (slice(0, 0), slice(0, 0))
    if size:
        first_block, last_block = block_indices[rank]
        in_first = slice(0, min(size, (first_block + 1) * block_size - begin))
        in_last = slice(max(0, last_block * block_size - begin), size)
        slices = (in_first, in_last)
    return EndBlocks(torch.tensor(block_indices), slices)


def share_largest_numbers(
    row_ranks: World,
    planes: Sequence[CutPlane],
    scale: Tensor,
    form: StateFormat,
    hyperparameters: Callable[[ParameterKind, Tensor], Hyperparameters],
) -> None:
    """Set `Plane.edge_maxima` of planes with cut blocks; a collective.

    These are the largest magnitudes that the moments in a plane's first and last block will have after
    the update, over all ranks that have a part of the block.

    Args:
        row_ranks: the ranks that share out rows.
        planes: the planes.
        scale: the factor of the summed gradients.
        form: the form of the optimizer's state.
        hyperparameters: returns the hyperparameters of the update for a kind and its summed gradient.
    """
    # Planes that are updated by the same formula are computed together.
    by_formula: dict[tuple[object, ...], list[CutPlane]] = {}
    for cut_plane in planes:
        kind = cut_plane.plane.kind
        by_formula.setdefault((kind.rule, kind.betas), []).append(cut_plane)
    for same_formula in by_formula.values():
        kind = same_formula[0].plane.kind
        hyper = hyperparameters(kind, same_formula[0].total)
        own_MPE = _own_largest_numbers(same_formula, scale, form, hyper)
        # All ranks' numbers are gathered by a sum of tensors that are 0 except at the rank's own place.
        all_WMPE = own_MPE.new_zeros(row_ranks.size, *own_MPE.shape)
        all_WMPE[row_ranks.rank] = own_MPE
        all_MPWE = row_ranks.sum(all_WMPE).permute(1, 2, 0, 3)
        # The largest number of a block is the largest of those that ranks have found in parts of this
        # block. In `is_same_PEWE`, the first E is for this rank's end blocks, and WE for those of all
        # ranks.
        blocks_PWE = torch.stack(
            [cut_plane.end_blocks.block_indices_WE for cut_plane in same_formula]
        )
        blocks_PWE = blocks_PWE.to(scale.device)
        own_blocks_PE = blocks_PWE[:, row_ranks.rank]
        is_same_PEWE = own_blocks_PE[:, :, None, None] == blocks_PWE[:, None]
        largest_MPE = torch.where(is_same_PEWE, all_MPWE.unsqueeze(2), 0.0).amax((-1, -2))
        names = [moment.name for moment in kind.rule.moments]
        for index, cut_plane in enumerate(same_formula):
            cut_plane.plane.edge_maxima = dict(zip(names, largest_MPE[:, index], strict=True))


def _own_largest_numbers(
    planes: Sequence[CutPlane], scale: Tensor, form: StateFormat, hyper: Hyperparameters
) -> Tensor:
    """Return the largest magnitudes [M, P, E], fp32, of the next moments in this rank's end blocks.

    Only this rank's elements count; if there are none, the magnitude is 0. The arguments are those of
    `share_largest_numbers`, for planes that are updated by the same formula.
    """
    block_size = form.block
    rule = planes[0].plane.kind.rule
    # Each end block of each plane becomes a row [block_size] of this rank's elements and then zeros. So
    # there are P · E rows.
    ends = [
        (cut_plane, elements) for cut_plane in planes for elements in cut_plane.end_blocks.slices
    ]
    grads = _padded_rows([cut_plane.total[elements] for cut_plane, elements in ends], block_size)
    grads = grads * scale.to(grads.dtype)
    moments = []
    for moment in rule.moments:
        buffers = {}
        for buffer in form.parts:
            name = buffer.buffer_name(moment)
            rows = [
                cut_plane.plane.state[name][
                    _buffer_slice(buffer, elements, cut_plane.plane.block_offset)
                ]
                for cut_plane, elements in ends
            ]
            row_elements = block_size // buffer.numbers_per_element
            buffers[name] = _padded_rows(rows, row_elements).view(-1)
        moments.append(form.read(buffers, moment, grads.view(-1), block_offset=0).view_as(grads))
    next_moments = rule.next_moments(grads, moments, hyper)
    # Each of `next_moments` is [P · E, block_size].
    return torch.stack(
        [
            next_moment.to(torch.float32).abs().amax(-1).view(len(planes), 2)
            for next_moment in next_moments
        ]
    )


def _buffer_slice(buffer: MomentBuffer, numbers: slice, before: int) -> slice:
    """Return the elements of a buffer of moments that belong to some of a plane's numbers.

    Args:
        buffer: the buffer. Several numbers may share an element, such as a block's scale.
        numbers: the numbers, as a slice of the plane.
        before: how many numbers of the plane's first block are in the rows of earlier ranks.
    """
    if numbers.stop == numbers.start:
        return slice(0, 0)
    per_element = buffer.numbers_per_element
    # Elements are counted from the beginning of the first block, of which the buffer may lack some.
    missing = before // per_element
    begin = (before + numbers.start) // per_element
    end = -(-(before + numbers.stop) // per_element)  # rounded up
    return slice(begin - missing, end - missing)


def _padded_rows(parts: Sequence[Tensor], width: int) -> Tensor:
    """Return parts of at most `width` numbers as rows [parts, width], with zeros after them."""
    rows = parts[0].new_zeros(len(parts), width)
    torch._foreach_copy_(
        [row[: len(part)] for row, part in zip(rows, parts, strict=True)], list(parts)
    )
    return rows
