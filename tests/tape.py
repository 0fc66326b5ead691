"""A CPU that captures as a GPU does: the operators that work launches are written down, and
replayed where they lie.

As on a GPU a capture runs nothing, a replay runs no Python: it reads and writes the memory that the
capture saw, and goes on with the numbers that the host had then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero")


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def alone(value: Any) -> Any:
    """A tensor as it lies in memory, without what autograd knows of it."""
    return value.detach() if isinstance(value, Tensor) else value


class Watched(TorchDispatchMode):
    """Every operator that runs; what torch compiled is looked into."""

    supports_higher_order_operators = True

    def __init__(
        self,
        seen: Callable[[Any, Any, Any, Any], None],
        before: Callable[[Any], None] = lambda _: None,
    ):
        super().__init__()
        self.seen, self.before = seen, before

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.before((args, kwargs))
        out = func(*args, **kwargs)
        self.seen(func, args, kwargs, out)
        return out


class Written:
    """Captured work."""

    def __init__(self, entries: list[tuple[Any, Any, Any, Any]]):
        self.entries, self.replays = entries, 0

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.entries:
            again = func(*args, **kwargs)
            for then, now in zip(tensors(out), tensors(again), strict=True):
                if memory(then) != memory(now):
                    then.copy_(now)


class Tape:
    """Captures on a CPU (`monograph.graph.replay.Recorder`).

    Attributes:
        graphs: all that were captured.
        called: how often work was called, and not replayed.
    """

    def __init__(self) -> None:
        self.graphs: list[Written] = []
        self.called = 0

    def warm_up(self, work: Callable[[], None]) -> str | None:
        waits = list[str]()

        def seen(func: Any, *_: Any) -> None:
            waits.extend(name for name in WAITS if name in str(func))

        self.called += 1
        if self.called == 1:  # the first call may compile
            work()
            return None
        with Watched(seen):
            work()
        return f"the host waits for the device at {waits[0]}" if waits else None

    def record(self, work: Callable[[], None]) -> Written:
        entries = list[tuple[Any, Any, Any, Any]]()
        kept = dict[int, tuple[Tensor, Tensor]]()
        made = set[int]()

        def before(inputs: Any) -> None:
            for tensor in tensors(inputs):
                if memory(tensor) not in made | kept.keys():
                    whole = alone(tensor).new_empty(0).set_(tensor.untyped_storage())
                    kept[memory(tensor)] = whole, whole.clone()

        def seen(func: Any, args: Any, kwargs: Any, out: Any) -> None:
            made.update(memory(tensor) for tensor in tensors(out) if memory(tensor) not in kept)
            entries.append((func, *(tree_map(alone, each) for each in (args, kwargs, out))))

        drawn = torch.get_rng_state()
        with Watched(seen, before):
            work()
        torch.set_rng_state(drawn)
        with torch.no_grad():
            for whole, value in kept.values():
                whole.copy_(value)
        self.graphs.append(Written(entries))
        return self.graphs[-1]

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)
