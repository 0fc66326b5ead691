"""Run the training loop as an iterator over updates, and save and load its state.

The loop's body is the caller's: `for update in train(...)`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.checkpointing.folder import LargeFile
from monograph.errors import InputRefused, UsageError
from monograph.loss import Batch
from monograph.ranges import COUNT
from monograph.step import Update

# The keys that decide which tensors a model has, and has trained.
_MODEL_KEYS = "model.init, size of [model] or key of [lora]"
# The keys that decide which tensors an optimizer keeps, and in which form.
_OPTIMIZER_STATE_KEYS = "optim.name, optim.state, optim.master_weights, optim.ema or train.quantize"


@dataclass
class EngineState:
    """All state of an engine that a run needs to continue with the same bits.

    Attributes:
        model: the module's state dict, by its own names; tied tensors once, under their first name.
        optimizer: the optimizer's buffers, `<buffer>.<parameter>`, in the parameters' shapes.
        scalars: counters, JSON-serialisable.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    scalars: dict[str, Any] = field(default_factory=dict)

    def require_fit(self, own: Self) -> None:
        """Check that an engine can load this state, without reading tensors from files.

        The names and shapes must be those of the engine's own state.

        Args:
            own: the state of the engine.

        Raises:
            InputRefused: a tensor or counter is missing, or a tensor is unknown, complex, or of
                another shape.
        """
        missing = sorted(own.scalars.keys() - self.scalars.keys())
        if missing:
            raise InputRefused(
                f"the saved state lacks {missing[0]!r}: it was saved with another train.precision, optim.grad_clip or "
                "optim.skip_spikes"
            )
        for kind, own_tensors, saved_tensors in (
            ("model", own.model, self.model),
            ("optimizer", own.optimizer, self.optimizer),
        ):
            refusal = f"the saved {kind} does not fit"
            unmatched = sorted(own_tensors.keys() ^ saved_tensors.keys())
            if unmatched:
                problem = "missing" if unmatched[0] in own_tensors else "unknown"
                keys = _OPTIMIZER_STATE_KEYS if kind == "optimizer" else _MODEL_KEYS
                raise InputRefused(
                    f"{refusal}: {unmatched[0]!r} is {problem}: it was saved with another {keys}"
                )
            for name, tensor in own_tensors.items():
                # `LargeFile.like` gives shape and dtype without reading the tensor.
                if isinstance(saved_tensors, LargeFile):
                    saved = saved_tensors.like(name)
                else:
                    saved = saved_tensors[name]
                if saved.shape != tensor.shape:
                    raise InputRefused(
                        f"{refusal}: {name} is {list(saved.shape)}, not {list(tensor.shape)}"
                    )
                if saved.is_complex():
                    raise InputRefused(f"{refusal}: {name} is {saved.dtype}, not {tensor.dtype}")

    def counter(self, name: str, own: Tensor) -> Tensor:
        """Return a saved counter as a tensor.

        Args:
            name: the counter's name in `scalars`.
            own: the engine's own counter, whose shape and dtype the result has.

        Raises:
            InputRefused: the saved value is not a number, or list of numbers, of that shape and
                dtype.
        """
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            saved = torch.as_tensor(self.scalars[name], dtype=own.dtype)
            if saved.shape == own.shape:
                return saved
        raise InputRefused(
            f"the saved state's {name!r} does not fit: expected {own.dtype} numbers of {[*own.shape]}"
        )


class AnyEngine(Protocol):
    """An object that trains a model, whose weights are on the device or on the host, or many models at
    once.
    """

    @property
    def model(self) -> nn.Module:
        """Return the original module, never a compiled wrapper."""

    @property
    def index(self) -> int:
        """Return the number of updates so far, including skipped ones."""

    def accumulate(self, window: Batch) -> None:
        """Add the exact gradient of an update's window to the accumulated gradient."""

    def update(self) -> Update:
        """Apply the accumulated gradient, and return the update's numbers."""

    def state(self) -> EngineState:
        """Return views of the current state; copy them to keep them."""

    def load_state(self, state: EngineState) -> None:
        """Continue from a state."""


def train(
    engine: AnyEngine, batches: Iterable[Batch], updates: int | None = None
) -> Iterator[Update]:
    """Do one update per window, and yield after each update.

    Args:
        engine: a `Resident` or another engine.
        batches: windows, each with all rows of one update; the last one may have fewer.
        updates: stop when the engine has done this many updates, including those before a resume;
            None: stop when `batches` ends.

    Yields:
        The update's numbers as device tensors; reading a tensor waits for the device.

    Raises:
        UsageError: `batches` is a window itself, `updates` is below 1, or the engine refuses a
            window.
    """
    if isinstance(batches, (Mapping, Tensor)):
        raise UsageError(
            f"batches is a {type(batches).__name__}, which is one window: expected an iterable of windows"
        )
    if updates is not None:
        COUNT.require("updates", updates)
    # If a resumed engine has done all updates, no window is read: a stream might block.
    if updates is not None and engine.index >= updates:
        return
    for window in batches:
        engine.accumulate(window)
        yield engine.update()
        if updates is not None and engine.index >= updates:
            return


class Windows(Protocol):
    """An iterator of windows that knows its position, such as `corpus.batches(...)`."""

    def state(self) -> dict[str, Any]:
        """Return its position, JSON-serialisable."""


def save_checkpoint(engine: AnyEngine, batches: Windows, folder: str | Path, keep: int = 2) -> Path:
    """Save an engine's whole state and the data's position; return the checkpoint's folder.

    A kill at any moment leaves the earlier checkpoints intact. See `monograph.checkpointing.save` for the protocol.

    Args:
        engine: the engine.
        batches: the iterator that its windows come from.
        folder: the folder of checkpoints, `folder/step-00001000/` and so on.
        keep: number of newest checkpoints to keep; with 1 there is no other checkpoint to load if
            that one is damaged.

    Raises:
        DiskFull: the checkpoint could not be written; earlier checkpoints are untouched.
    """
    state = engine.state()
    checkpoint = Checkpoint(
        update=engine.index,
        model=state.model,
        optimizer=state.optimizer,
        state={"engine": state.scalars, "data": batches.state()},
    )
    return checkpointing.save(Path(folder), checkpoint, keep)


def load_checkpoint(
    engine: AnyEngine, folder: str | Path, warn: Callable[[str], None] = print
) -> dict[str, Any]:
    """Continue from the newest checkpoint in `folder` that passes verification.

    Args:
        engine: an engine that was built like the one that saved the checkpoint.
        folder: the folder that `save_checkpoint` wrote to.
        warn: called with one line if damaged checkpoints were skipped.

    Returns:
        The data's position: `corpus.batches(..., seed=position["seed"], start=position["rows"])`.

    Raises:
        NoValidCheckpoint: no checkpoint passes verification.
        InputRefused: the checkpoint does not fit the engine.
    """
    checkpoint = checkpointing.load_newest(Path(folder), warn)
    state = checkpoint.state
    engine.load_state(
        EngineState(model=checkpoint.model, optimizer=checkpoint.optimizer, scalars=state["engine"])
    )
    position: dict[str, Any] = state["data"]
    return position
