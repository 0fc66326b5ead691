"""The policies of rematerialisation (remat), which is also called activation checkpointing.

A policy says which activations a module's blocks keep for the backward pass. The backward pass computes
the others again.

A block is a module that the model repeats, such as a layer of a transformer. A product is a matrix
product, convolution or attention of a block. One run of a block, which may be with fake tensors,
records its products and the bytes that autograd stores. A policy may have a budget of bytes. Choosing
the products to keep is then a 0-1 knapsack problem: keeping a result costs bytes, and recomputing it
costs FLOPs.
`monograph.graph.recompute` makes blocks follow a policy.
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
from monograph.graph.inspect import storage_of
from monograph.ranges import between

# The number of choices on a Pareto front (`pareto_front`) may double with every group, so the front is
# thinned to about this many (`_thin_out`). This costs little. Let N be the largest number of bytes of a
# choice on the front. Within L bytes, the best choice of the thinned front needs no more FLOPs than the
# best choice of the whole front within L - N / MAX_CHOICES bytes.
MAX_CHOICES = 512


class Choice(NamedTuple):
    """A selection of results to keep, with its costs.

    Attributes:
        stored_bytes: bytes that are kept until the backward pass.
        flops: FLOPs that are computed a second time.
        selection: the names of the results that are kept.
    """

    stored_bytes: int
    flops: int
    selection: tuple[Any, ...]


def pareto_front(groups: Iterable[Iterable[Choice]]) -> tuple[Choice, ...]:
    """Return the best combinations of one choice from each group, with rising bytes.

    A combination has the sums of its choices' bytes and FLOPs, and all their selections. It is on
    the Pareto front, and returned, if no other has at most its bytes and at most its FLOPs. Groups
    are added one by one, and combinations off the front are dropped after each. Source: Nemhauser and
    Ullmann, "Discrete Dynamic Programming and Capital Allocation", Management Science 15 (1969).
    """
    front = [Choice(0, 0, ())]
    for group in groups:
        options = list(group)
        combinations = [
            (a.stored_bytes + b.stored_bytes, a.flops + b.flops, a, b)
            for a in front
            for b in options
        ]
        front = []
        # By bytes, and with equal bytes by FLOPs.
        in_order = sorted(combinations, key=lambda combination: combination[:2])
        for stored_bytes, flops, a, b in in_order:
            # All that are on the front so far have at most the bytes of this one. So it is on the front
            # only if it needs fewer FLOPs than the last of them.
            if not front or flops < front[-1].flops:
                front.append(Choice(stored_bytes, flops, a.selection + b.selection))
        front = _thin_out(front)
    return tuple(front)


def cheapest_within(choices: Iterable[Choice], limit_bytes: int) -> Choice | None:
    """Return the choice with the fewest FLOPs that keeps at most `limit_bytes`, or None."""
    fitting = [choice for choice in choices if choice.stored_bytes <= limit_bytes]
    return min(fitting, key=lambda choice: (choice.flops, choice.stored_bytes), default=None)


def _thin_out(choices: list[Choice]) -> list[Choice]:
    """Return about MAX_CHOICES of the choices of a Pareto front, in its order: with rising bytes.

    Of choices with about the same bytes, the one with the fewest FLOPs is kept.
    """
    if len(choices) <= MAX_CHOICES:
        return choices
    step = choices[-1].stored_bytes / MAX_CHOICES
    # The bytes are divided into MAX_CHOICES steps of equal width. The dict keeps the last choice of each
    # step, which has the fewest FLOPs.
    last_of_step = {int(choice.stored_bytes / step): choice for choice in choices[1:]}
    # The first choice is kept for tight limits.
    return [choices[0], *last_of_step.values()]


class Remat:
    """The policies of recomputation, for all blocks of a module or for each block.

    Every policy gives the loss and gradients of `Off`: to the bit if the step runs eagerly, within
    the compiler's rounding if it is captured. Only memory and time differ.

        Remat.Off()                every activation is kept, nothing is computed twice
        Remat.Pointwise()          matrix products and attention are kept, all operations between them are recomputed
        Remat.Budget(0.5)          the most expensive products are kept, in half of the bytes that Off keeps
        Remat.Full()               only a block's arguments are kept, the block is recomputed
        Remat.Offload()            as Full, but the block's first argument is kept in the host's memory
        Remat.PerLayer((...,))     one of the above for each block, in the order of the module's blocks
    """

    @dataclass(frozen=True)
    class Off:
        """Keep every activation."""

    @dataclass(frozen=True)
    class Pointwise:
        """Keep the results of matrix products, convolutions and attention; recompute all else."""

    @dataclass(frozen=True)
    class Full:
        """Keep only a block's arguments; its backward pass begins with a second forward pass."""

    @dataclass(frozen=True)
    class Offload:
        """Recompute as `Full` does, and keep the first argument of a block in pinned host memory.

        The argument is copied while the device computes, and comes back for the backward pass. This
        cannot be part of a graph of the whole step: capture with scope "blocks".
        """

    @dataclass(frozen=True)
    class Budget:
        """Keep the block's arguments, and at most a fraction of the bytes that `Off` keeps.

        A 0-1 knapsack chooses the products to keep, by their bytes and the FLOPs of recomputing
        them. All other operators are recomputed, so with enough bytes for all products, this is
        `Pointwise`. Only at a fraction of 1 nothing is recomputed: `recompute.apply_policy` then does
        what it does for `Off`.

        Attributes:
            fraction: from 0 (`Full`) to 1 (`Off`).

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
            policies: as many as the module has blocks; none of them is a `PerLayer`.
        """

        policies: "tuple[BlockPolicy, ...]"


BlockPolicy = Remat.Off | Remat.Pointwise | Remat.Full | Remat.Offload | Remat.Budget
Policy = BlockPolicy | Remat.PerLayer


def policy_named(value: str | float) -> Policy:
    """Return the policy that the value of `train.remat` names.

    Args:
        value: "none", "pointwise", "full" or "offload"; or the fraction of a `Remat.Budget`, a float.
            The configuration has refused all other values.
    """
    if isinstance(value, float):
        return Remat.Budget(value)
    by_name: dict[str, Policy] = {
        "pointwise": Remat.Pointwise(),
        "full": Remat.Full(),
        "offload": Remat.Offload(),
    }
    return by_name.get(value, Remat.Off())  # "none"


class Product(NamedTuple):
    """A matrix product, convolution or attention of a block, which is expensive to recompute.

    Attributes:
        name: the operator's name, and which of the block's calls of this operator it is, counted from
            0.
        stored_bytes: size of the results.
        flops: cost of computing the results; a multiplication and an addition are two FLOPs.
    """

    name: tuple[str, int]
    stored_bytes: int
    flops: int


class Recording(NamedTuple):
    """The costs of one forward pass of a block.

    Attributes:
        input_bytes: size of the block's input tensors, which every policy keeps.
        stored_bytes: size of the tensors that autograd keeps if nothing is recomputed, without the
            inputs and parameters.
        rest_flops: cost of all operators that are not products, counted as one FLOP for each number
            that they write. Every policy except `Off` recomputes these operators. If the block is
            compiled, `recompute.record_blocks` sets this to 0, because the compiler fuses these
            operators into kernels that run anyway.
        products: the products whose results the backward pass or a recomputation needs, in the order
            of their calls.
    """

    input_bytes: int
    stored_bytes: int
    rest_flops: int
    products: tuple[Product, ...]

    def choices(self) -> tuple[Choice, ...]:
        """Return choices of products to keep, from none (`Remat.Full`) to all (`Remat.Pointwise`).

        Each choice recomputes the operators that are not products, so `Remat.Off` is none of them.
        The `selection` of a choice has the products' names.
        """
        recompute_or_keep = [
            (Choice(0, p.flops, ()), Choice(p.stored_bytes, 0, (p.name,))) for p in self.products
        ]
        return tuple(
            choice._replace(flops=choice.flops + self.rest_flops)
            for choice in pareto_front(recompute_or_keep)
        )


def record(
    block: Callable[..., Any], state: list[Tensor], *args: object, **kwargs: object
) -> tuple[Any, Recording]:
    """Run a block once, with gradients enabled, and record its costs.

    Args:
        block: the block's forward pass.
        state: the block's parameters and buffers.
        args: the block's positional arguments.
        kwargs: the block's keyword arguments.

    Returns:
        The block's output and the recording.
    """
    # `storage_of` returns a key of a tensor's storage, so that views of one storage count once.
    inputs = {storage_of(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
    saved: list[Tensor] = []

    def note_saved(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    calls = _Calls()
    # The hooks see the tensors that autograd saves. The mode `calls` sees the operators that run.
    with torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor), calls:
        output = block(*args, **kwargs)
    # A saved tensor that is alive anyway takes no additional memory.
    alive_anyway = inputs.keys() | {storage_of(t) for t in state}
    stored = {storage_of(t): t for t in saved if storage_of(t) not in alive_anyway}
    products, rest_flops = calls.needed_for(set(stored))
    return output, Recording(_bytes(inputs.values()), _bytes(stored.values()), rest_flops, products)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class _Call(NamedTuple):
    """One call of an operator.

    Attributes:
        name: see `Product.name`.
        read: keys of the storages of its inputs.
        created: keys of the storages that it allocates.
        changed: keys of storages that it changes in place.
        created_bytes: size of the storages that it allocates.
        flops: FLOPs of a product; 0 for other operators.
        created_elements: number of elements of the tensors in new storages.
    """

    name: tuple[str, int]
    read: set[int]
    created: set[int]
    changed: set[int]
    created_bytes: int
    flops: int
    created_elements: int


class _Calls(TorchDispatchMode):
    """Record every operator that runs, in order."""

    supports_higher_order_operators = True  # such as flex attention

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.counts: Counter[str] = Counter()
        # Keeps all tensors alive, so that no key of a storage is used twice.
        self.kept_alive: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.kept_alive += inputs + outputs
        read = {storage_of(t) for t in inputs}
        created = {storage_of(t): t for t in outputs if storage_of(t) not in read}
        changed = set[int]()
        if compat.writes_in_place(func):
            changed = {storage_of(t) for t in outputs} & read
            if not changed:
                # The operator does not return what it changed. It may have changed any argument.
                changed = read
        name = str(func)
        self.calls.append(
            _Call(
                name=(name, self.counts[name]),
                read=read,
                created=set(created),
                changed=changed,
                created_bytes=_bytes(created.values()),
                flops=compat.flops_of(func, args, kwargs or {}, out),
                created_elements=sum(t.numel() for t in created.values()),
            )
        )
        self.counts[name] += 1
        return out

    def needed_for(self, stored: set[int]) -> tuple[tuple[Product, ...], int]:
        """Return what has to be recomputed to make the storages `stored` again.

        A product whose result is overwritten later cannot be kept, so it counts among the other
        operators.

        Returns:
            The products, in the order of their calls, and the FLOPs of all other operators.
        """
        products = list[Product]()
        rest_flops = 0
        needed = set(stored)
        changed_later = set[int]()  # the storages that later calls change in place
        # In reverse order, because the inputs of a needed call are needed as well.
        for call in reversed(self.calls):
            if needed & (call.created | call.changed):
                needed |= call.read
                is_product = call.flops > 0
                is_overwritten_later = not call.created.isdisjoint(changed_later)
                if is_product and not is_overwritten_later:
                    products.append(Product(call.name, call.created_bytes, call.flops))
                else:
                    # An operator that is not a product counts as one FLOP for each element.
                    rest_flops += call.flops or call.created_elements
            changed_later |= call.changed
        return tuple(reversed(products)), rest_flops
