"""Choose which activations a module's blocks keep for the backward pass, and which they recompute.

What there is to choose from, the products and stored bytes of a block, is recorded by running it;
fake tensors do. Under a budget the choice is a 0-1 knapsack: keeping a result costs bytes,
computing it again costs FLOPs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monograph import compat
from monograph.errors import UsageError
from monograph.ranges import between

# A front may double with every group, so it is thinned to about this many choices, which can cost a
# choice 1 / MOST of the bytes.
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
    """Return the Pareto front of taking one choice of every group: the fewest FLOPs for the bytes,
    in rising bytes.

    Bytes, FLOPs and `what` of the choices taken add up. The method is Nemhauser and Ullmann's,
    "Discrete Dynamic Programming and Capital Allocation", Management Science 15 (1969): groups are
    joined one by one, and dominated choices are dropped at once.
    """
    best = [Choice(0, 0, ())]
    for group in groups:
        options = list(group)
        pairs = [
            (a.stored_bytes + b.stored_bytes, a.flops + b.flops, a, b)
            for a in best
            for b in options
        ]
        # In the order of bytes, a pair is dominated unless it takes fewer FLOPs than the last one
        # that was kept.
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
    """Return at most MOST + 1 choices in rising bytes: of those of almost one size the one with the
    fewest FLOPs.
    """
    if len(choices) <= MOST:
        return choices
    # The dict keeps the last choice of each step, which has the fewest FLOPs. The very first stays
    # for tight limits.
    step = choices[-1].stored_bytes / MOST
    return [
        choices[0],
        *{int(choice.stored_bytes / step): choice for choice in choices[1:]}.values(),
    ]


class Remat:
    """The policies of recomputation, for all blocks of a module or for each.

    Every policy gives the loss and gradients of `Off`: to the bit if the step runs eagerly, within
    the compiler's rounding if it is captured. Only memory and time differ.

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
        """Keep the results of matrix products, convolutions and attention; recompute everything
        between them.
        """

    @dataclass(frozen=True)
    class Full:
        """Keep only a block's input; its backward pass begins with a second forward pass."""

    @dataclass(frozen=True)
    class Offload:
        """Recompute as `Full` does, and keep a block's first input in page-locked host memory until
        its backward pass.

        The input is copied while the device computes. This cannot be part of a graph of the whole
        step: capture with scope "blocks".
        """

    @dataclass(frozen=True)
    class Budget:
        """Keep the block's input, and at most a share of the bytes that `Off` keeps.

        A 0-1 knapsack chooses the products to keep: their bytes against the FLOPs of computing them
        again.

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
    """Return the policy that a configuration names: "none", "pointwise", "full", "offload" or a
    share.
    """
    if isinstance(value, float):
        return Remat.Budget(value)
    by_name: dict[str, Policy] = {
        "pointwise": Remat.Pointwise(),
        "full": Remat.Full(),
        "offload": Remat.Offload(),
    }
    return by_name.get(value, Remat.Off())


class Product(NamedTuple):
    """A matrix product, convolution or attention of a block, which is expensive to compute again.

    Attributes:
        name: the operator's name, and the number of this call among the block's calls of it, from
            0.
        stored_bytes: size of its results.
        flops: cost of computing them; a multiplication and an addition are two FLOPs.
    """

    name: tuple[str, int]
    stored_bytes: int
    flops: int


class Recording(NamedTuple):
    """The costs of one forward pass of a block.

    Attributes:
        input_bytes: size of the block's input tensors, which every policy keeps.
        stored_bytes: size of all other tensors that autograd keeps if nothing is recomputed,
            without parameters.
        rest_flops: cost of all operators that are no products, one FLOP for each number written;
            every policy recomputes them. 0 if the block is compiled.
        products: products whose results the backward pass or a recomputation needs, in the order of
            their calls.
    """

    input_bytes: int
    stored_bytes: int
    rest_flops: int
    products: tuple[Product, ...]

    def curve(self) -> tuple[Choice, ...]:
        """Return choices of products to keep, by name, from none (`Remat.Full`) to all
        (`Remat.Pointwise`).
        """
        groups = [
            (Choice(0, p.flops, ()), Choice(p.stored_bytes, 0, (p.name,))) for p in self.products
        ]
        return tuple(
            choice._replace(flops=choice.flops + self.rest_flops) for choice in front(groups)
        )


def record(
    block: Callable[..., Any], held: list[Tensor], *args: object, **kwargs: object
) -> tuple[Any, Recording]:
    """Run a block once, with gradients enabled; `held` are its parameters and buffers.

    Returns:
        The block's output and the recording.
    """
    inputs = {storage_of(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    calls = _Calls()
    # The hooks see the tensors that autograd saves, the mode sees the operators that run; neither
    # sees both.
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), calls:
        output = block(*args, **kwargs)
    # Saving a tensor costs nothing if it is alive anyway.
    alive_anyway = inputs.keys() | {storage_of(t) for t in held}
    stored = {storage_of(t): t for t in saved if storage_of(t) not in alive_anyway}
    products, rest = calls.needed(set(stored))
    return output, Recording(_bytes(inputs.values()), _bytes(stored.values()), rest, products)


def storage_of(tensor: Tensor) -> int:
    """Return a key of a tensor's storage, which views share; it is unique among living tensors."""
    return tensor.untyped_storage()._cdata


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class _Call(NamedTuple):
    """One call of an operator; `read`, `made` and `changed` (in place) are keys of storages."""

    name: tuple[str, int]
    read: set[int]
    made: set[int]
    changed: set[int]
    stored_bytes: int
    flops: int
    numbers: int


class _Calls(TorchDispatchMode):
    """Record every operator that runs, in order."""

    supports_higher_order_operators = True  # such as flex attention

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.counts: Counter[str] = Counter()
        # Keeps all tensors, so that no key of a storage is used twice.
        self.alive: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), out)
        )
        self.alive += inputs + outputs
        read = {storage_of(t) for t in inputs}
        made = {storage_of(t): t for t in outputs if storage_of(t) not in read}
        changed = set[int]()
        if compat.writes_in_place(func):
            # An operator that returns nothing is assumed to change all its arguments.
            changed = {storage_of(t) for t in outputs} & read or read
        name = str(func)
        flops = compat.flops_of(func, args, kwargs or {}, out)
        numbers = sum(t.numel() for t in made.values())
        self.calls.append(
            _Call(
                (name, self.counts[name]),
                read,
                set(made),
                changed,
                _bytes(made.values()),
                flops,
                numbers,
            )
        )
        self.counts[name] += 1
        return out

    def needed(self, stored: set[int]) -> tuple[tuple[Product, ...], int]:
        """Return the products that are needed to compute `stored` again, and the FLOPs of the other
        operators.

        A product that is overwritten later cannot be kept; its FLOPs count among the others.
        """
        products = list[Product]()
        rest = 0
        needed = set(stored)
        changed = set[int]()
        # In reverse order, because the inputs of a needed result are needed as well.
        for call in reversed(self.calls):
            if needed & (call.made | call.changed):
                needed |= call.read
                if call.flops and not call.made & changed:
                    products.append(Product(call.name, call.stored_bytes, call.flops))
                else:
                    rest += call.flops or call.numbers
            changed |= call.changed
        return tuple(reversed(products)), rest
