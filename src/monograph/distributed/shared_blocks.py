"""Let ranks agree on the largest numbers of the blocks in which moments are packed: a block may lie
in the rows of several ranks.

Shapes: P planes with such blocks, M moments of each, W ranks, E = 2 ends of a rank's rows, their
first and last block.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.distributed.world import World
from monograph.optim import Hyperparameters, ParameterKind, Plane
from monograph.optim.state_format import MomentBuffer, StateFormat


class Ends(NamedTuple):
    """The blocks at which each rank's elements of one parameter begin and end.

    Attributes:
        numbers_WE: the blocks' numbers in the parameter; -1 for a rank without elements.
        places: this rank's elements in its first and in its last block.
    """

    numbers_WE: Tensor
    places: tuple[slice, slice]


class Cut(NamedTuple):
    """A plane with blocks that are cut, its summed gradient, and its ends."""

    plane: Plane
    total: Tensor
    ends: Ends


def ends(bounds: Sequence[tuple[int, int]], rank: int, block: int) -> Ends:
    """Return the ends of a parameter of which rank r has the elements `bounds[r]`, from the first
    to below the last.
    """
    numbers = [
        (begin // block, (end - 1) // block) if end > begin else (-1, -1) for begin, end in bounds
    ]
    (begin, end), (first, last) = bounds[rank], numbers[rank]
    size = end - begin
    places = (
        slice(0, min(size, (first + 1) * block - begin)),
        slice(max(0, last * block - begin), size),
    )
    return Ends(torch.tensor(numbers), places if size else (slice(0, 0), slice(0, 0)))


def agree(
    sharing: World,
    members: Sequence[Cut],
    scale: Tensor,
    form: StateFormat,
    hyperparameters: Callable[[ParameterKind, Tensor], Hyperparameters],
) -> None:
    """Tell planes the largest numbers that their first and last blocks will have after the update;
    a collective.

    Args:
        sharing: the ranks that share out rows.
        members: the planes.
        scale: the factor of the summed gradients.
        form: the form of the optimizer's state.
        hyperparameters: returns the numbers of the update for a kind and its summed gradient.
    """
    by_formula: dict[tuple[object, ...], list[Cut]] = {}
    for member in members:
        kind = member.plane.kind
        by_formula.setdefault((kind.rule, kind.betas), []).append(member)
    for alike in by_formula.values():  # all at once
        kind = alike[0].plane.kind
        hyper = hyperparameters(kind, alike[0].total)
        own_MPE = _largest(alike, scale, form, hyper)
        each_WMPE = own_MPE.new_zeros(sharing.size, *own_MPE.shape)
        each_WMPE[sharing.rank] = own_MPE
        each_MPWE = sharing.sum(each_WMPE).permute(1, 2, 0, 3)
        numbers_PWE = torch.stack([member.ends.numbers_WE for member in alike]).to(scale.device)
        same_PEWE = numbers_PWE[:, sharing.rank, :, None, None] == numbers_PWE[:, None]
        ends_MPE = torch.where(same_PEWE, each_MPWE.unsqueeze(2), 0.0).amax((-1, -2))
        names = [moment.name for moment in kind.rule.moments]
        for number, member in enumerate(alike):
            member.plane.edge_maxima = dict(zip(names, ends_MPE[:, number], strict=True))


def _largest(
    members: Sequence[Cut], scale: Tensor, form: StateFormat, hyper: Hyperparameters
) -> Tensor:
    """Return the largest numbers [M, P, E] of this rank's next moments at its ends, fp32; 0 without
    elements.
    """
    block = form.block
    rule = members[0].plane.kind.rule
    slices = [(member, place) for member in members for place in member.ends.places]
    grads = _stacked([member.total[place] for member, place in slices], block)
    grads = grads * scale.to(grads.dtype)
    old = []
    for moment in rule.moments:
        buffers = {}
        for part in form.parts:
            name = part.buffer_name(moment)
            rows = [
                member.plane.state[name][_elements(part, place, member.plane.block_offset)]
                for member, place in slices
            ]
            buffers[name] = _stacked(rows, block // part.numbers_per_element).view(-1)
        old.append(form.read(buffers, moment, grads.view(-1), block_offset=0).view_as(grads))
    new = rule.next_moments(grads, old, hyper)
    return torch.stack(
        [each.to(torch.float32).abs().amax(-1).view(len(members), 2) for each in new]
    )


def _elements(part: MomentBuffer, place: slice, before: int) -> slice:
    """Return the elements of a buffer that hold the numbers of a rank's `place`."""
    if place.stop == place.start:
        return slice(0, 0)
    first = before // part.numbers_per_element
    end = -(-(before + place.stop) // part.numbers_per_element)  # rounded up
    return slice((before + place.start) // part.numbers_per_element - first, end - first)


def _stacked(parts: Sequence[Tensor], width: int) -> Tensor:
    """Return parts of at most `width` numbers as rows, with zeros after them."""
    rows = parts[0].new_zeros(len(parts), width)
    torch._foreach_copy_(
        [row[: len(part)] for row, part in zip(rows, parts, strict=True)], list(parts)
    )
    return rows
