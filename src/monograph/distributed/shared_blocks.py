"""Let ranks agree on the largest numbers of 8-bit blocks: one of 256 numbers may lie in the rows of
several ranks.

Shapes: P planes with such blocks, M moments of each, W ranks, E = 2 ends of a rank's rows, their
first and last block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.distributed.world import World
from monograph.optim import Optimizer, Rule
from monograph.optim.narrow import BLOCK, dequantised
from monograph.optim.planes import Plane


class Ends(NamedTuple):
    """The blocks at which each rank's elements of one parameter begin and end.

    Attributes:
        numbers_WE: the blocks' numbers in the parameter; -1 for a rank without elements.
        places: this rank's elements in its first and in its last block.
    """

    numbers_WE: Tensor
    places: tuple[slice, slice]


def ends(bounds: Sequence[tuple[int, int]], rank: int) -> Ends:
    """Return the ends of a parameter of which rank r has the elements `bounds[r]`, from the first
    to below the last.
    """
    numbers = [
        (begin // BLOCK, (end - 1) // BLOCK) if end > begin else (-1, -1) for begin, end in bounds
    ]
    (begin, end), (first, last) = bounds[rank], numbers[rank]
    size = end - begin
    places = (
        slice(0, min(size, (first + 1) * BLOCK - begin)),
        slice(max(0, last * BLOCK - begin), size),
    )
    return Ends(torch.tensor(numbers), places if size else (slice(0, 0), slice(0, 0)))


def agree(
    sharing: World, members: Sequence[tuple[Plane, Tensor, Ends]], scale: Tensor, optim: Optimizer
) -> None:
    """Tell planes the largest numbers that their first and last blocks will have after the update;
    a collective.

    Args:
        sharing: the ranks that share out rows.
        members: the planes, their summed gradients and ends.
        scale: the factor of the summed gradients.
        optim: the optimizer.
    """
    rest = list(members)
    while rest:  # planes with the same rule, all at once
        rule = rest[0][0].kind.rule
        alike = [member for member in rest if member[0].kind.rule is rule]
        rest = [member for member in rest if member[0].kind.rule is not rule]
        own_MPE = _largest(alike, rule, scale, optim)
        each_WMPE = own_MPE.new_zeros(sharing.size, *own_MPE.shape)
        each_WMPE[sharing.rank] = own_MPE
        each_MPWE = sharing.sum(each_WMPE).permute(1, 2, 0, 3)
        numbers_PWE = torch.stack([ends.numbers_WE for _, _, ends in alike]).to(scale.device)
        same_PEWE = numbers_PWE[:, sharing.rank, :, None, None] == numbers_PWE[:, None]
        ends_MPE = torch.where(same_PEWE, each_MPWE.unsqueeze(2), 0.0).amax((-1, -2))
        for number, (plane, _, _) in enumerate(alike):
            plane.ends = dict(zip(rule.moments, ends_MPE[:, number], strict=True))


def _largest(
    members: Sequence[tuple[Plane, Tensor, Ends]], rule: Rule, scale: Tensor, optim: Optimizer
) -> Tensor:
    """Return the largest numbers [M, P, E] of this rank's next moments at its ends, fp32; 0 without
    elements.
    """
    slices = [(plane, total, place) for plane, total, ends in members for place in ends.places]
    grads = _stacked([total[place] for _, total, place in slices], BLOCK)
    grads = grads * scale.to(grads.dtype)
    old = []
    for name in rule.moments:
        codes = _stacked([plane.state[name][place] for plane, _, place in slices], BLOCK)
        scales = [plane.state[f"{name}_scale"] for plane, _, _ in members]
        ends = _stacked([part for each in scales for part in (each[:1], each[-1:])], 1)
        old.append(dequantised(codes.view(-1), ends.view(-1)).view_as(grads).to(grads.dtype))
    new = rule.next_moments(grads, old, members[0][0].kind, optim)
    return torch.stack(
        [each.to(torch.float32).abs().amax(-1).view(len(members), 2) for each in new]
    )


def _stacked(parts: Sequence[Tensor], width: int) -> Tensor:
    """Return parts of at most `width` numbers as rows, with zeros after them."""
    rows = parts[0].new_zeros(len(parts), width)
    torch._foreach_copy_(
        [row[: len(part)] for row, part in zip(rows, parts, strict=True)], list(parts)
    )
    return rows
