"""The training loop: windows in, updates out. The caller owns the loop's body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from monograph.step import Update


@dataclass
class EngineState:
    """Everything of an engine that a run needs to go on, bit for bit.

    Attributes:
        model: the module's state dict, by its own names.
        optimizer: the optimizer's buffers, `<buffer>.<parameter>`, in the parameters' shapes.
        scalars: counters, JSON-serialisable.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    scalars: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """What trains: weights on the device, on the host, or many models at once."""

    @property
    def model(self) -> nn.Module:
        """The original module, never a compiled wrapper."""
        ...

    @property
    def index(self) -> int:
        """Updates done so far, skipped ones included."""
        ...

    def accumulate(self, window: Any) -> None:
        """Add the exact gradient of one update's window."""
        ...

    def update(self) -> Update:
        """Apply it."""
        ...

    def state(self) -> EngineState:
        """Views of the present state (copy them to keep them)."""
        ...

    def load_state(self, state: EngineState) -> None:
        """Continue from a state."""
        ...


def train(engine: Engine, batches: Iterable[Any], updates: int | None = None) -> Iterator[Update]:
    """Train, one window an update, yielding after each.

    Args:
        engine: a `Resident` or another engine.
        batches: windows, each all of one update's rows; a partial last one counts as what it is.
        updates: stop when the engine has done this many in all (a resumed engine has done some already); None: when
            `batches` ends.

    Yields:
        The update's numbers as device tensors; reading one waits for the device.
    """
    windows = iter(batches)
    while updates is None or engine.index < updates:
        window = next(windows, None)
        if window is None:
            return
        engine.accumulate(window)
        yield engine.update()
