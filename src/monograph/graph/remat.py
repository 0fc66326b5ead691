"""Policies of recomputation: the activations that a module's blocks keep, and those that the backward pass recomputes.

Under a budget the choice is a 0-1 knapsack: to keep a result costs bytes, to compute it again costs FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from monograph.errors import UsageError
from monograph.ranges import between

# A front may double with every group, so no more choices than this are carried on; thinning can cost a choice
# 1 / MOST of the bytes.
MOST = 512


class Choice(NamedTuple):
    """Something that can be chosen.

    Attributes:
        stored_bytes: bytes that it keeps until the backward pass.
        flops: FLOPs that it computes a second time.
        what: names of what was chosen.
    """

    stored_bytes: int
    flops: int
    what: tuple[Any, ...]


def front(groups: Iterable[Iterable[Choice]]) -> tuple[Choice, ...]:
    """Return each way to take one choice of every group that no other beats in bytes and FLOPs, fewest bytes first.

    Bytes, FLOPs and names of the choices taken add up. The method is Nemhauser and Ullmann's, "Discrete Dynamic
    Programming and Capital Allocation", Management Science 15 (1969): groups are joined one by one, and beaten choices
    are dropped at once.
    """
    best = [Choice(0, 0, ())]
    for group in groups:
        options = list(group)
        pairs = [
            (one.stored_bytes + other.stored_bytes, one.flops + other.flops, one, other)
            for one in best
            for other in options
        ]
        # Sorted by bytes, a pair is beaten unless it takes fewer FLOPs than the last one that was kept.
        best = []
        for stored_bytes, flops, one, other in sorted(pairs, key=lambda pair: pair[:2]):
            if not best or flops < best[-1].flops:
                best.append(Choice(stored_bytes, flops, one.what + other.what))
        best = _thinned(best)
    return tuple(best)


def within(choices: Iterable[Choice], limit_bytes: int) -> Choice | None:
    """Return the choice with the fewest FLOPs that keeps at most `limit_bytes`, if there is one."""
    fitting = [choice for choice in choices if choice.stored_bytes <= limit_bytes]
    return min(fitting, key=lambda choice: (choice.flops, choice.stored_bytes), default=None)


def _thinned(choices: list[Choice]) -> list[Choice]:
    """Return at most MOST + 1 choices, ascending: of those of almost one size the one with the fewest FLOPs."""
    if len(choices) <= MOST:
        return choices
    # The dict keeps the last choice of each step, which has its fewest FLOPs. The first of all stays for tight limits.
    step = choices[-1].stored_bytes / MOST
    return [choices[0], *{int(choice.stored_bytes / step): choice for choice in choices[1:]}.values()]


class Remat:
    """The policies of recomputation, one for each block of a module or one for all of them.

    Whatever the policy, loss and gradients are those of `Off`: to the bit where the step runs eagerly, within the
    compiler's own rounding where it is captured. Only memory and time differ.

        Remat.Off()                every activation is kept, nothing is computed twice
        Remat.Pointwise()          products of matrices and attention are kept, what lies between them is recomputed
        Remat.Budget(0.5)          of the products, those worth it, in half of the bytes that Off keeps
        Remat.Full()               only a block's input is kept, the block is recomputed
        Remat.Offload()            likewise, and the input waits in the host's memory
        Remat.PerLayer((...,))     one of the above for each block, in the order of the module's blocks
    """

    @dataclass(frozen=True)
    class Off:
        """Keep every activation."""

    @dataclass(frozen=True)
    class Pointwise:
        """Keep the results of matrix products, convolutions and attention; recompute everything between them."""

    @dataclass(frozen=True)
    class Full:
        """Keep a block's input alone; its backward pass begins with its forward pass."""

    @dataclass(frozen=True)
    class Offload:
        """`Full`, and a block's first input waits in page-locked memory of the host for its backward pass.

        It crosses while the device computes. A graph of the whole step cannot hold that: capture with scope "blocks".
        """

    @dataclass(frozen=True)
    class Budget:
        """Keep the block's input, and at most a share of the bytes that `Off` keeps.

        Which products are kept is a 0-1 knapsack: their bytes against the FLOPs of computing them again.

        Attributes:
            fraction: the share, 0 (`Full`) to 1 (`Off`).

        Raises:
            UsageError: the fraction is not from 0 to 1.
        """

        fraction: float

        def __post_init__(self) -> None:
            """Refuse a fraction that is no share."""
            if not between(0, 1).holds(self.fraction):
                raise UsageError(
                    f"Remat.Budget({self.fraction}): expected a share of the stored bytes, from 0 (recompute all) to 1"
                )

    @dataclass(frozen=True)
    class PerLayer:
        """A policy for each block, first block first.

        Attributes:
            policies: as many as the module has blocks; none of them a `PerLayer`.
        """

        policies: tuple[Remat.Off | Remat.Pointwise | Remat.Full | Remat.Offload | Remat.Budget, ...]


OfBlock = Remat.Off | Remat.Pointwise | Remat.Full | Remat.Offload | Remat.Budget
Policy = OfBlock | Remat.PerLayer


def named(value: str | float) -> Policy:
    """Return the policy that a configuration names: "none", "pointwise", "full", "offload" or a share."""
    if isinstance(value, float):
        return Remat.Budget(value)
    by_name: dict[str, Policy] = {"pointwise": Remat.Pointwise(), "full": Remat.Full(), "offload": Remat.Offload()}
    return by_name.get(value, Remat.Off())


def spread(curve: Sequence[Choice], off_bytes: int, layers: int, limit_bytes: int) -> Remat.PerLayer | None:
    """Return policies of equal blocks that together keep at most so many bytes and compute the fewest FLOPs twice.

    It is a knapsack over the blocks: each keeps everything, or one of the choices of the one curve they share. Of those
    with equally few FLOPs it is the one that keeps the least, except that nothing is recomputed where everything fits.

    Args:
        curve: the choices of one block, `monograph.graph.recording.Recording.curve`.
        off_bytes: bytes that a block keeps if nothing is recomputed.
        layers: how many blocks.
        limit_bytes: bytes that all blocks together may keep, their inputs not counted.

    Returns:
        Blocks that recompute the most come first, as their backward passes are the last; None if even `Remat.Full` is
        too much, which is a limit below 0.
    """
    # Captured, all products kept cost no FLOPs either and fewer bytes: the knapsack would recompute what has room.
    if layers * off_bytes <= limit_bytes:
        return Remat.PerLayer((Remat.Off(),) * layers)
    off = Choice(off_bytes, 0, (Remat.Off(),))
    options = [_as_budget(choice, off_bytes) for choice in curve if choice.stored_bytes < off_bytes] + [off]
    best = within(front([options] * layers), limit_bytes)
    if best is None:
        return None
    return Remat.PerLayer(tuple(sorted(best.what, key=lambda policy: getattr(policy, "fraction", 1.0))))


def _as_budget(choice: Choice, off_bytes: int) -> Choice:
    return choice._replace(what=(Remat.Budget(choice.stored_bytes / off_bytes),))
