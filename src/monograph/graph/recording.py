"""Record the products and stored bytes of a block by running it; fake tensors do."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monograph import compat
from monograph.graph.remat import Choice, front


class Product(NamedTuple):
    """A matrix product, convolution or attention of a block, which is expensive to compute again.

    Attributes:
        name: the operator's name, and the number of this call among the block's calls of it, from 0.
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
        stored_bytes: size of all other tensors that autograd keeps if nothing is recomputed, without parameters.
        rest_flops: cost of all operators that are no products, one FLOP for each number written; every policy
            recomputes them. 0 if the block is compiled.
        products: products whose results the backward pass or a recomputation needs, in the order of their calls.
    """

    input_bytes: int
    stored_bytes: int
    rest_flops: int
    products: tuple[Product, ...]

    def curve(self) -> tuple[Choice, ...]:
        """Return choices of products to keep, by name, from none (`Remat.Full`) to all (`Remat.Pointwise`)."""
        groups = [(Choice(0, p.flops, ()), Choice(p.stored_bytes, 0, (p.name,))) for p in self.products]
        return tuple(choice._replace(flops=choice.flops + self.rest_flops) for choice in front(groups))


def record(block: Callable[..., Any], held: list[Tensor], *args: Any, **kwargs: Any) -> tuple[Any, Recording]:
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
    # The hooks see the tensors that autograd saves, the mode sees the operators that run; neither sees both.
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


def _bytes(tensors: Any) -> int:
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
        self.alive: list[Tensor] = []  # keeps all tensors, so that no key of a storage is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs, outputs = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), out))
        self.alive += inputs + outputs
        read = {storage_of(t) for t in inputs}
        made = {storage_of(t): t for t in outputs if storage_of(t) not in read}
        changed = set[int]()
        if compat.writes_in_place(func):
            # An operator that returns nothing is assumed to change all its arguments.
            changed = {storage_of(t) for t in outputs} & read or read
        name = str(func)
        flops, numbers = compat.flops_of(func, args, kwargs or {}, out), sum(t.numel() for t in made.values())
        self.calls.append(
            _Call((name, self.counts[name]), read, set(made), changed, _bytes(made.values()), flops, numbers)
        )
        self.counts[name] += 1
        return out

    def needed(self, stored: set[int]) -> tuple[tuple[Product, ...], int]:
        """Return the products that are needed to compute `stored` again, and the FLOPs of the other operators.

        A product that is overwritten later cannot be kept; its FLOPs count among the others.
        """
        products, rest, needed, changed = list[Product](), 0, set(stored), set[int]()
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
