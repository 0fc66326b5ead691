"""Run device work many times with little work on the host: on a GPU it is captured once and
replayed.

A function of a batch is replayed by copying every batch to the addresses that the capture read
(`StaticInputs`). A captured graph keeps the decisions that the host made, so the values behind them
are compared before each replay (`HostState`).
"""

import functools
import random
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from monograph import compat

# Calls before a capture: the first one compiles, and after both, libraries have allocated all they
# need.
WARM_UP = 2
Work = Callable[[], None]


class Graph(Protocol):
    """A captured sequence of device work."""

    def replay(self) -> None:
        """Do the work again."""


class Recorder(Protocol):
    """A device that can capture work."""

    def warm_up(self, work: Work) -> str | None:
        """Do the work under the conditions of a capture; return why it cannot be captured, or None."""

    def record(self, work: Work) -> Graph:
        """Capture the device work that `work` launches, without running it.

        Raises:
            RuntimeError: it cannot be captured.
        """


class NotReplayable(Exception):
    """The error of work that can be called but not captured; the calls that were made before it are
    done.
    """


class CudaGraphs:
    """A recorder of CUDA graphs, which share one memory pool and one stream."""

    def __init__(self, device: torch.device):
        """Make a stream and a pool on a device of this process."""
        self.device = device
        # Warm-ups use the captures' stream: autograd accumulates a gradient on the parameter's
        # first stream.
        self._stream = torch.cuda.Stream(device)
        # Graphs may share a pool, because no result in it is read after a replay.
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> str | None:
        """Call the work on the captures' stream while watching the host; see `Recorder.warm_up`."""
        current = torch.cuda.current_stream(self.device)
        drawn = torch.get_rng_state()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), _host_waits() as waits:
                work()
        finally:  # also after an error, later work must wait for the work that was launched
            current.wait_stream(self._stream)
        if waits:
            return f"the host waits for the device at {waits[0]}"
        # A replay would use the numbers that were drawn during the capture.
        return (
            None
            if torch.equal(drawn, torch.get_rng_state())
            else "it draws random numbers on the host (torch)"
        )

    def record(self, work: Work) -> Graph:
        """Capture the work; other threads, such as one that fills page-locked memory, may go on
        meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        begun = False
        current = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                begun = True
                work()
        except BaseException:
            torch.cuda.set_stream(current)  # torch leaves its own one if the capture cannot end
            if begun:
                compat.end_failed_capture(graph, self.device, self._pool, self._stream)
            raise
        return graph


@contextmanager
def _host_waits() -> Iterator[list[str]]:
    """Yield a list of the places (FILE:LINE) where the host waited for the device, which is filled
    after the block.
    """
    before = torch.cuda.get_sync_debug_mode()
    waits = list[str]()
    with warnings.catch_warnings(record=True) as seen:
        # By default, Python shows a line's warning once in a process.
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in seen:
        if "called a synchronizing CUDA operation" in str(warning.message):
            waits.append(f"{warning.filename}:{warning.lineno}")
        # All other warnings are passed on, except torch's note on the debug mode.
        elif "Synchronization debug mode" not in str(warning.message):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


class Replays:
    """A function whose only effect is on device memory, with a captured graph for each variant of
    its arguments.

    The first calls of a variant are ordinary ones, so that the function never runs more often than
    it is asked to.
    """

    def __init__(self, function: Callable[..., None], recorder: Recorder | None) -> None:
        """Take a function and the recorder that captures it; without one it is called every time."""
        self._function, self._recorder = function, recorder
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Graph] = {}

    @property
    def variants(self) -> int:
        """Return how many variants ran."""
        return len(self._calls)

    @property
    def captures(self) -> bool:
        """Return whether variants are captured."""
        return self._recorder is not None

    @property
    def captured(self) -> int:
        """Return how many variants are captured."""
        return len(self._graphs)

    def forget(self) -> None:
        """Free the graphs; later calls are warmed up again."""
        self._calls.clear()
        self._graphs.clear()

    def run(self, times: int, *variant: Hashable) -> None:
        """Run the function `times` times with the arguments `variant`.

        Raises:
            NotReplayable: the function ran, and cannot be captured; the message says why.
        """
        for _ in range(times):
            if (graph := self._graphs.get(variant)) is not None:
                graph.replay()
                continue
            calls = self._calls[variant] = self._calls.get(variant, 0) + 1
            work = functools.partial(self._function, *variant)
            if self._recorder is None:
                work()
            elif calls < WARM_UP:
                self._recorder.warm_up(work)
            else:
                self._graphs[variant] = _captured(work, self._recorder)


def _captured(work: Work, recorder: Recorder) -> Graph:
    """Call the work a last time, then capture it."""
    drawn = _host_random_numbers()
    obstacle = recorder.warm_up(work)
    if obstacle is None and drawn != _host_random_numbers():
        obstacle = "it draws random numbers on the host (Python's or NumPy's)"
    if obstacle is not None:
        raise NotReplayable(obstacle)
    try:
        return recorder.record(work)
    except RuntimeError as error:  # such as out of memory
        message = str(error).splitlines()[0]
    # Outside the except block, whose traceback would keep the failed capture's tensors alive.
    raise NotReplayable(f"the capture failed: {message}")


def _host_random_numbers() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's generators."""
    # The global generator, which users' code may draw from.
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), bytes(np.asarray(keys)), position


PLAIN = (bool, int, float, str, type(None))


class HostState:
    """A record of plain values, identities of tensors and `requires_grad` flags in objects at one
    moment.

    Numbers in tensors may change, because a graph reads them where they are. State outside of the
    objects, in a global variable or on a class, is not recorded.
    """

    def __init__(self, *owners: object, **named: object):
        """Record the attributes of objects; of a module also those of its submodules.

        Args:
            owners: the objects.
            named: further attributes that must stay the same objects, as attribute=owner.
        """
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._names: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._gradients: list[tuple[nn.Parameter, bool]] = []
        for owner in owners:
            for part in owner.modules() if isinstance(owner, nn.Module) else (owner,):
                self._look(part)
        self._values += [
            (vars(owner), name, vars(owner).get(name)) for name, owner in named.items()
        ]

    def _look(self, part: object) -> None:
        attributes = getattr(part, "__dict__", {})
        tensors = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in attributes.items() if isinstance(value, PLAIN)}
        self._values += [(attributes, name, value) for name, value in (tensors | plain).items()]
        self._names.append((attributes, frozenset(attributes)))
        if isinstance(part, nn.Module):
            for registered in (part._parameters, part._buffers):
                self._values += [(registered, name, value) for name, value in registered.items()]
            self._gradients += [
                (p, p.requires_grad) for p in part._parameters.values() if p is not None
            ]

    def changed(self) -> str | None:
        """Return the name of an attribute that has changed, is new or is gone, or None."""
        for attributes, name, value in self._values:
            # Types are compared as well: a graph for 1 may differ from one for 1.0 or True.
            now = attributes.get(name)
            if now is not value and (
                isinstance(value, Tensor) or type(now) is not type(value) or now != value
            ):
                return name
        for attributes, names in self._names:
            if len(attributes) != len(names):
                return min(attributes.keys() ^ names)
        return (
            "requires_grad"
            if any(p.requires_grad is not flag for p, flag in self._gradients)
            else None
        )


MOST = 4  # captured shapes of a batch, and times that a change on the host may void the captures


class StaticInputs:
    """A replacement for `function(batch)`, whose only effect is on device memory: called at first,
    then replayed.

        copy the batch's tensors to the buffers of its shapes;  replay the work of function(buffers)

    A batch may be any pytree of tensors on the device and plain values. If it cannot be replayed,
    the function is called, and `announce` gets the reason in one line.
    """

    def __init__(
        self,
        function: Callable[[object], None],
        recorder: Recorder,
        device: torch.device,
        host: Callable[[], HostState],
        announce: Callable[[str], None],
    ):
        """Take a function; nothing is allocated before the first batch.

        Args:
            function: runs on a batch.
            recorder: captures the function.
            device: where a batch's tensors are.
            host: records the host's state that the function reads; when it changes, the function is
                captured again.
            announce: gets each reason for calling instead of replaying, once.
        """
        self.function = function
        self._device = device
        self._host = host
        self._announce = announce
        self._replays = Replays(lambda variant: self.function(self._inputs[variant][0]), recorder)
        self._inputs: dict[Hashable, tuple[object, list[Tensor]]] = {}
        self._seen: HostState | None = None
        self._changed, self._voided = "", 0
        self._stopped = False
        self._said = set[str]()

    @property
    def captured(self) -> int:
        """Return how many shapes of a batch are replayed."""
        return self._replays.captured

    def give_back(self) -> bool:
        """Free all memory; return whether there was a graph. If so, the function is called from now
        on.
        """
        had_graphs = self.captured > 0
        self._stopped |= had_graphs
        self._forget()
        return had_graphs

    def __call__(self, batch: object) -> None:
        """Run the function on a batch."""
        if self._stopped or compat.without_numbers():
            self.function(batch)
            return
        self._void_if_changed()
        leaves, form = tree_flatten(batch)
        variant = (str(form), *(_bound(leaf) for leaf in leaves))
        if obstacle := self._obstacle(variant, leaves):
            self._say(obstacle)
            self.function(batch)
            return
        if variant not in self._inputs:
            # Replays read the addresses of the capture, and the caller frees its batch.
            buffers = [
                torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]
            self._inputs[variant] = tree_unflatten(buffers, form), buffers
        for buffer, leaf in zip(self._inputs[variant][1], leaves, strict=True):
            if isinstance(leaf, Tensor):
                buffer.copy_(leaf)
        try:
            self._replays.run(1, variant)
        except NotReplayable as reason:  # this batch is done; the next ones will be called
            self._stopped = True
            self._forget()
            self._say(str(reason))

    def _obstacle(self, variant: Hashable, leaves: list[Any]) -> str | None:
        """Return why the function must be called with this batch, or None if it can be replayed."""
        # A value that changes with every batch would need a capture for every batch.
        if self._voided > MOST:
            self._stopped = True
            return f"{self._changed} is another from batch to batch: keep it in a tensor"
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *PLAIN)):
                return f"a batch holds a {type(leaf).__name__}"
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                return f"a batch holds a tensor on {leaf.device}, where the host may read it"
            # A replay would add the gradient to the buffer instead of the caller's tensor.
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                return "a batch holds a tensor that wants a gradient"
        full = variant not in self._inputs and len(self._inputs) == MOST
        return f"batches have more than {MOST} shapes, the others" if full else None

    def _void_if_changed(self) -> None:
        """Forget all captures if the host's state that the function reads has changed."""
        if changed := self._seen and self._seen.changed():
            self._forget()
            self._changed, self._voided = changed, self._voided + 1
        self._seen = self._seen or self._host()

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._announce(reason)

    def _forget(self) -> None:
        self._replays.forget()
        self._inputs.clear()
        self._seen = None


def _bound(leaf: object) -> Hashable:
    """Return the properties of a batch's leaf that a graph depends on: a tensor's shape and dtype,
    or a plain value.
    """
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
