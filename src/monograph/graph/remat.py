"""Choose which activations a module's blocks keep for the backward pass, and which they recompute.

Under a budget the choice is a 0-1 knapsack: keeping a result costs bytes, computing it again costs FLOPs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from monograph.errors import UsageError
from monograph.ranges import between

# A front may double with every group, so it is thinned to about this many choices, which can cost a choice 1 / MOST of
# the bytes.
MOST = 512


class Choice(NamedTuple):
    """A set of results to keep, or of policies for blocks.

    Attributes:
        stored_bytes: bytes that are kept until the backward pass.
        flops: FLOPs that are computed a second time.
        what: the names of the results, or the policies.
    """

    stored_bytes: int
    flops: int
    what: tuple[Any, ...]


def front(groups: Iterable[Iterable[Choice]]) -> tuple[Choice, ...]:
    """Return the Pareto front of taking one choice of every group: the fewest FLOPs for the bytes, in rising bytes.

    Bytes, FLOPs and `what` of the choices taken add up. The method is Nemhauser and Ullmann's, "Discrete Dynamic
    Programming and Capital Allocation", Management Science 15 (1969): groups are joined one by one, and dominated
    choices are dropped at once.
    """
    best = [Choice(0, 0, ())]
    for group in groups:
        options = list(group)
        pairs = [(a.stored_bytes + b.stored_bytes, a.flops + b.flops, a, b) for a in best for b in options]
        # In the order of bytes, a pair is dominated unless it takes fewer FLOPs than the last one that was kept.
        best = []
        for stored_bytes, flops, one, other in sorted(pairs, key=lambda pair: pair[:2]):
            if not best or flops < best[-1].flops:
                best.append(Choice(stored_bytes, flops, one.what + other.what))
        best = _thinned(best)
    return tuple(best)


def within(choices: Iterable[Choice], limit_bytes: int) -> Choice | None:
    """Return the choice with the fewest FLOPs that keeps at most `limit_bytes`, or None."""
    fitting = [choice for choice in choices if choice.stored_bytes <= limit_bytes]
    return min(fitting, key=lambda choice: (choice.flops, choice.stored_bytes), default=None)


def _thinned(choices: list[Choice]) -> list[Choice]:
    """Return at most MOST + 1 choices in rising bytes: of those of almost one size the one with the fewest FLOPs."""
    if len(choices) <= MOST:
        return choices
    # The dict keeps the last choice of each step, which has the fewest FLOPs. The very first stays for tight limits.
    step = choices[-1].stored_bytes / MOST
    return [choices[0], *{int(choice.stored_bytes / step): choice for choice in choices[1:]}.values()]


class Remat:
    """The policies of recomputation, for all blocks of a module or for each.

    Every policy gives the loss and gradients of `Off`: to the bit if the step runs eagerly, within the compiler's
    rounding if it is captured. Only memory and time differ.

        Remat.Off()                every activation is kept, nothing is computed twice
        Remat.Pointwise()          matrix products and attention are kept, all operations between them are recomputed
        Remat.Budget(0.5)          the most expensive products are kept, in half of the bytes that Off keeps
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
        """Keep only a block's input; its backward pass begins with a second forward pass."""

    @dataclass(frozen=True)
    class Offload:
        """Recompute as `Full` does, and keep a block's first input in page-locked host memory until its backward pass.

        The input is copied while the device computes. This cannot be part of a graph of the whole step: capture with
        scope "blocks".
        """

    @dataclass(frozen=True)
    class Budget:
        """Keep the block's input, and at most a share of the bytes that `Off` keeps.

        A 0-1 knapsack chooses the products to keep: their bytes against the FLOPs of computing them again.

        Attributes:
            fraction: the share, 0 (`Full`) to 1 (`Off`).

        Raises:
            UsageError: the fraction is not from 0 to 1.
        """

        fraction: float

        def __post_init__(self) -> None:
            """Refuse a fraction that is not between 0 and 1."""
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

        policies: "tuple[OfBlock, ...]"


OfBlock = Remat.Off | Remat.Pointwise | Remat.Full | Remat.Offload | Remat.Budget
Policy = OfBlock | Remat.PerLayer


def named(value: str | float) -> Policy:
    """Return the policy that a configuration names: "none", "pointwise", "full", "offload" or a share."""
    if isinstance(value, float):
        return Remat.Budget(value)
    by_name: dict[str, Policy] = {"pointwise": Remat.Pointwise(), "full": Remat.Full(), "offload": Remat.Offload()}
    return by_name.get(value, Remat.Off())
