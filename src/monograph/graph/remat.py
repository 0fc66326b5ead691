"""Which activations a module's blocks keep for the backward pass, and which they compute a second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monograph.errors import UsageError
from monograph.graph.knapsack import Choice, front, within
from monograph.ranges import between


class Remat:
    """The policies of recomputation, one for each block of a module or one for all of them.

    Whatever the policy, loss and gradients are those of `Off`: to the bit where the step runs eagerly, within the
    compiler's own rounding where it is captured. What differs is memory and time.

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

        What crosses does so beside computation. Not inside a graph of the whole step: capture with scope "blocks".
        """

    @dataclass(frozen=True)
    class Budget:
        """Keep, beside the block's input, at most a share of the bytes that `Off` keeps.

        Which products are kept is a 0-1 knapsack: their bytes against the FLOPs of computing them again.

        Attributes:
            fraction: the share, 0 (`Full`) to 1 (`Off`).

        Raises:
            UsageError: a fraction that is not from 0 to 1.
        """

        fraction: float

        def __post_init__(self) -> None:
            """Refuse what is no share."""
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
    """The policy that a configuration names: "none", "pointwise", "full", "offload" or a share."""
    if isinstance(value, float):
        return Remat.Budget(value)
    by_name: dict[str, Policy] = {"pointwise": Remat.Pointwise(), "full": Remat.Full(), "offload": Remat.Offload()}
    return by_name.get(value, Remat.Off())


def spread(curve: Sequence[Choice], off_bytes: int, layers: int, limit_bytes: int) -> Remat.PerLayer | None:
    """The policies of equal blocks that together keep at most so many bytes and compute the fewest FLOPs twice.

    It is a knapsack over the blocks: each keeps everything, or one of the choices of the one curve they share. Of those
    with equally few FLOPs it is the one that keeps the least, except that nothing is recomputed where everything fits.

    Args:
        curve: what a block can keep, `monograph.graph.recording.Recording.curve`.
        off_bytes: what a block keeps if nothing is recomputed.
        layers: how many blocks.
        limit_bytes: of all blocks together, their inputs not counted.

    Returns:
        Blocks that recompute the most come first, as their backward passes are the last; None if even `Remat.Full` is
        too much, which is a limit below 0.
    """
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
