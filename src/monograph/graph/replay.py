"""Capture a function's device work once as a CUDA graph, and replay it with one launch.

`Replays` does so for a function without inputs on the device. A captured graph reads fixed addresses,
so `StaticInputs`, which replays a function of a batch, copies each batch to the addresses that the
capture read. A captured graph also repeats the decisions that the host's code made during the capture,
such as the branch of an `if`. So the values on which such decisions may depend are compared before
each replay (`HostState`).
"""

import functools
import random
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monograph import compat

# Number of calls before a capture: the first one compiles, and after the second one libraries have
# allocated all the memory that they need.
WARM_UP = 2
GraphWork = Callable[[], None]


class Graph(Protocol):
    """A captured sequence of device work."""

    def replay(self) -> None:
        """Do the work again."""


class Recorder(Protocol):
    """A device that can capture work."""

    def warm_up(self, work: GraphWork) -> str | None:
        """Do the work under the conditions of a capture.

        Returns:
            The reason why it cannot be captured, or None.
        """

    def record(self, work: GraphWork) -> Graph:
        """Capture the device work that `work` launches, without running it.

        Raises:
            RuntimeError: it cannot be captured.
        """


class NotReplayable(Exception):
    """The error of work that can be called, but not captured.

    Attributes:
        is_done: whether the work was done before the error.
    """

    def __init__(self, reason: str, is_done: bool = True) -> None:
        super().__init__(reason)
        self.is_done = is_done


class CudaGraphs:
    """A recorder of CUDA graphs, which share one memory pool and one stream."""

    def __init__(self, device: torch.device):
        """Make a stream and a pool on a device of this process."""
        self.device = device
        # Warm-ups use the same stream as captures, because autograd accumulates a gradient on the
        # stream that used the parameter first.
        self._stream = torch.cuda.Stream(device)
        # Graphs may share a pool, because a result in it is copied right after its replay (`StaticInputs`),
        # and so before the replay of another graph may overwrite it.
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: GraphWork) -> str | None:
        """Call the work on the captures' stream, and watch the host; see `Recorder.warm_up`."""
        current = torch.cuda.current_stream(self.device)
        generator_state = torch.get_rng_state()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), _host_waits() as waits:
                work()
        finally:
            # This is also needed after an error: later work must wait for the work that was launched.
            current.wait_stream(self._stream)
        if waits:
            return f"the host waits for the device at {waits[0]}"
        # A replay would use the numbers that were drawn during the capture.
        if not torch.equal(generator_state, torch.get_rng_state()):
            return "it draws random numbers on the host (torch)"
        return None

    def record(self, work: GraphWork) -> Graph:
        """Capture the work; other threads, such as one that fills pinned memory, may run meanwhile."""
        graph = torch.cuda.CUDAGraph()
        begun = False  # whether there is a capture that must be ended after an error
        current = torch.cuda.current_stream(self.device)
        try:
            # "thread_local", because the other threads may call what a capture forbids.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                begun = True
                work()
        except BaseException:
            # torch leaves the capture's stream current if the capture cannot end.
            torch.cuda.set_stream(current)
            if begun:
                compat.end_failed_capture(graph, self.device, self._pool, self._stream)
            raise
        return graph


@contextmanager
def _host_waits() -> Iterator[list[str]]:
    """Yield a list of the places (FILE:LINE) where the host waited for the device.

    The list is filled after the `with` block.
    """
    mode_before = torch.cuda.get_sync_debug_mode()
    waits = list[str]()
    with warnings.catch_warnings(record=True) as caught:
        # By default, Python shows a line's warning only once in a process.
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode_before)
    for warning in caught:
        message = str(warning.message)
        if "called a synchronizing CUDA operation" in message:
            waits.append(f"{warning.filename}:{warning.lineno}")
        # All other warnings are issued again, except torch's note on the debug mode.
        elif "Synchronization debug mode" not in message:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


class Replays:
    """A function that is replayed. Each variant, a tuple of its arguments, has a graph of its own.

    The function's only effect must be on device memory. The first WARM_UP runs of a variant are
    ordinary calls. The capture follows the last of them. A capture records the function's work without
    doing it, so the work is done exactly as often as the caller asks.

    Variants of the same kind need the same memory, which their graphs share. An ordinary call would
    need as much memory again. So once one variant of a kind is captured, the last of the WARM_UP runs of
    another one is not a call: the variant is captured, and the graph is replayed.
    """

    def __init__(
        self,
        function: Callable[..., None],
        recorder: Recorder | None,
        kind_of: Callable[[tuple[Hashable, ...]], Hashable] = lambda variant: variant,
    ) -> None:
        """Take a function and the recorder that captures it.

        Args:
            function: the function.
            recorder: captures it; None: the function is called every time.
            kind_of: returns the kind of a variant; by default each is a kind of its own.
        """
        self._kind_of = kind_of
        self._function = function
        self._recorder = recorder
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[tuple[Hashable, ...], Graph] = {}

    @property
    def variant_count(self) -> int:
        """Return how many variants were called since the last `forget`."""
        return len(self._calls)

    @property
    def is_capturing(self) -> bool:
        """Return whether variants are captured, which needs a recorder."""
        return self._recorder is not None

    @property
    def graph_count(self) -> int:
        """Return how many variants are captured so far."""
        return len(self._graphs)

    def forget(self) -> None:
        """Free the graphs; later calls are warmed up again."""
        self._calls.clear()
        self._graphs.clear()

    def run(self, times: int, *variant: Hashable) -> None:
        """Run the function `times` times with the arguments `variant`.

        Raises:
            NotReplayable: the function cannot be captured; the message says why, and `is_done`
                whether the function ran before the error.
        """
        for _ in range(times):
            graph = self._graphs.get(variant)
            if graph is not None:
                graph.replay()
                continue
            calls = self._calls.get(variant, 0) + 1
            self._calls[variant] = calls
            work = functools.partial(self._function, *variant)
            if self._recorder is None:
                work()
            elif calls < WARM_UP:
                # The reason that `warm_up` may return is ignored: in the first call, it may be that of a
                # compilation.
                self._recorder.warm_up(work)
            elif self._has_graph_of_kind(self._kind_of(variant)):
                self._graphs[variant] = _capture(work, self._recorder, is_done=False)
                self._graphs[variant].replay()
            else:
                self._graphs[variant] = _call_and_capture(work, self._recorder)

    def _has_graph_of_kind(self, kind: Hashable) -> bool:
        """Return whether a variant of this kind is captured."""
        return any(self._kind_of(captured) == kind for captured in self._graphs)


def _call_and_capture(work: GraphWork, recorder: Recorder) -> Graph:
    """Call the work a last time, then capture it.

    Raises:
        NotReplayable: see `Replays.run`.
    """
    generator_states = _host_generator_states()
    obstacle = recorder.warm_up(work)
    if obstacle is None and generator_states != _host_generator_states():
        obstacle = "it draws random numbers on the host (Python's or NumPy's)"
    if obstacle is not None:
        raise NotReplayable(obstacle)
    return _capture(work, recorder, is_done=True)


def _capture(work: GraphWork, recorder: Recorder, is_done: bool) -> Graph:
    """Capture the work, without doing it.

    Raises:
        NotReplayable: it cannot be captured; `is_done` is then in the error.
    """
    try:
        return recorder.record(work)
    except RuntimeError as error:  # such as out of memory
        message = str(error).splitlines()[0]
    # This is outside of the except block, whose traceback would keep the failed capture's tensors
    # alive.
    raise NotReplayable(f"the capture failed: {message}", is_done)


def _host_generator_states() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's global generators, which users' code may use."""
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), bytes(np.asarray(keys)), position


# The types of plain values: values that are compared by `==`.
PLAIN = (bool, int, float, str, type(None))


class HostState:
    """A record of the attributes on which Python code may have based a decision during a capture.

    It has the attributes that are plain values, the identity of each attribute that is a tensor, and
    `requires_grad` of each parameter. The numbers in tensors may change, because a graph reads them at
    their addresses. State outside of the recorded objects, in a global variable or on a class, is not
    recorded.
    """

    def __init__(self, *owners: object, attributes: Iterable[tuple[object, str]] = ()):
        """Record the attributes of objects, and those of a module's submodules.

        Args:
            owners: the objects.
            attributes: further attributes, (object, name) each; their values must stay the same
                objects.
        """
        # (the dict of an object's attributes, an attribute's name, its value)
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        # (the dict of an object's attributes, the names of all of them)
        self._names: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._requires_grad: list[tuple[nn.Parameter, bool]] = []
        for owner in owners:
            objects = owner.modules() if isinstance(owner, nn.Module) else (owner,)
            for each in objects:
                self._record(each)
        for owner, name in attributes:
            self._values.append((vars(owner), name, vars(owner).get(name)))

    def _record(self, owner: object) -> None:
        """Record the attributes of one object, without its submodules."""
        attributes = getattr(owner, "__dict__", {})
        tensors = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in attributes.items() if isinstance(value, PLAIN)}
        self._values += [(attributes, name, value) for name, value in (tensors | plain).items()]
        self._names.append((attributes, frozenset(attributes)))
        if isinstance(owner, nn.Module):
            for registered in (owner._parameters, owner._buffers):
                self._values += [(registered, name, value) for name, value in registered.items()]
            self._requires_grad += [
                (p, p.requires_grad) for p in owner._parameters.values() if p is not None
            ]

    def changed_attribute(self) -> str | None:
        """Return the name of an attribute that has changed, is new or is gone, or None."""
        for attributes, name, recorded in self._values:
            if not _is_unchanged(attributes.get(name), recorded):
                return name
        for attributes, names in self._names:
            # Only the numbers of names are compared: that is fast, which matters before each replay.
            if len(attributes) != len(names):
                return min(attributes.keys() ^ names)
        for parameter, flag in self._requires_grad:
            if parameter.requires_grad is not flag:
                return "requires_grad"
        return None


def _is_unchanged(value: Any, recorded: Any) -> bool:
    """Return whether a value is the recorded object or an equal plain value."""
    if value is recorded:
        return True
    # Types are compared as well: a graph for 1 may differ from one for 1.0 or True.
    if isinstance(recorded, Tensor) or type(value) is not type(recorded):
        return False
    return bool(value == recorded)


# The maximum number of kinds of batches that are captured. Each needs memory for its buffers.
MAX_SHAPES = 4
# How many times all captures may be discarded because the host's state has changed. After that, nothing
# is captured any more.
MAX_DISCARDED = 4


class _BatchBuffers(NamedTuple):
    """The buffers that captures read.

    Attributes:
        batch: a batch whose tensors are the buffers.
        leaves: the leaves of this batch, in the order of `tree_flatten`.
    """

    batch: Any
    leaves: list[Any]


class StaticInputs:
    """A replacement for `function(batch)` that calls the function at first and then replays it.

        copy the batch's tensors to the buffers of its shapes;  replay the work of function(buffers);
        return copies of the tensors that function(buffers) returned when it was captured

    The function's only effect must be on device memory. A batch and a result may be any pytree of tensors
    on the device and plain values. If a batch cannot be replayed, the function is
    called, and `announce` gets the reason in one line.
    """

    def __init__(
        self,
        function: Callable[[object], Any],
        recorder: Recorder,
        device: torch.device,
        host: Callable[[], HostState],
        announce: Callable[[str], None],
        mode: Callable[[], Hashable] = lambda: None,
    ):
        """Take a function; nothing is allocated before the first batch.

        Args:
            function: runs on a batch.
            recorder: captures the function.
            device: where a batch's tensors are.
            host: records the host's state that the function reads; when it changes, the function is
                captured again.
            announce: gets each reason for calling instead of replaying, once.
            mode: returns a value on which the function's work depends besides the batch. Each value has
                captures of its own. If the value were part of `host`, each change of it would discard
                all captures.
        """
        self.function = function
        self._device = device
        self._record_host = host
        self._announce = announce
        self._mode = mode
        # A variant is a kind of batch and a mode.
        self._replays = Replays(self._run, recorder, kind_of=lambda variant: variant[0])
        # A kind is the key of batches with the same structure, shapes, dtypes and plain values.
        self._inputs: dict[Hashable, _BatchBuffers] = {}
        # What the function returned for each kind and mode. After a capture, only what it returned during
        # the capture is kept: replays write to these tensors.
        self._results: dict[tuple[Hashable, Hashable], list[Any]] = {}
        self._host_state: HostState | None = None
        self._changed_attribute = ""
        self._times_discarded = 0
        self._stopped = False  # whether the function is called from now on
        self._announced = set[str]()

    @property
    def graph_count(self) -> int:
        """Return how many shapes of a batch are captured."""
        return self._replays.graph_count

    def stop_replaying(self) -> bool:
        """Free all memory, and replay nothing from now on if there was a graph.

        Returns:
            Whether there was a graph.
        """
        had_graphs = self.graph_count > 0
        self._stopped |= had_graphs
        self._forget()
        return had_graphs

    def __call__(self, batch: object = None) -> Any:
        """Run the function on a batch, and return its result.

        Args:
            batch: the batch; None for a function that reads no batch.
        """
        if self._stopped or compat.makes_fake_tensors():
            return self.function(batch)
        self._discard_if_changed()
        leaves, structure = tree_flatten(batch)
        kind = (str(structure), *(_leaf_key(leaf) for leaf in leaves))
        obstacle = self._obstacle(kind, leaves)
        if obstacle:
            self._announce_once(obstacle)
            return self.function(batch)
        if kind not in self._inputs:
            # Replays read the addresses that the capture read. The caller frees its batch, so the capture
            # must read buffers that belong to this object.
            buffers = [
                torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]
            self._inputs[kind] = _BatchBuffers(tree_unflatten(buffers, structure), buffers)
        for buffer, leaf in zip(self._inputs[kind].leaves, leaves, strict=True):
            if isinstance(leaf, Tensor):
                buffer.copy_(leaf)
        mode = self._mode()
        results = self._results.setdefault((kind, mode), [])
        earlier_result_count = len(results)
        try:
            self._replays.run(1, kind, mode)
        except NotReplayable as reason:
            # For later batches the function is called without a capture.
            self._stopped = True
            self._forget()
            self._announce_once(str(reason))
            if not reason.is_done:
                return self.function(batch)
        # The result of this batch is the first new one, or the last one if there is no new one:
        #   a call                      adds its result
        #   a call, then a capture      adds two, of which only the call's has values
        #   a capture, then a replay    adds one, whose tensors the replay writes
        #   a replay                    adds none, and writes to the tensors of the last one
        new_results = results[earlier_result_count:]
        result = new_results[0] if new_results else results[-1]
        del results[:-1]
        # The result is copied, because the caller may keep it, and the next replay overwrites it.
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, result)

    def _run(self, kind: Hashable, mode: Hashable) -> None:
        """Call the function on the buffers of a kind of batch, and keep its result."""
        self._results[kind, mode].append(self.function(self._inputs[kind].batch))

    def _obstacle(self, kind: Hashable, leaves: list[Any]) -> str | None:
        """Return why the function must be called with this batch, or None if it can be replayed."""
        # A value that changes with every batch would need a capture for every batch.
        if self._times_discarded > MAX_DISCARDED:
            self._stopped = True
            return f"{self._changed_attribute} changes from batch to batch: keep it in a tensor"
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *PLAIN)):
                return f"a batch holds a {type(leaf).__name__}"
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                return f"a batch holds a tensor on {leaf.device}, where the host may read it"
            # A replay would add the gradient to the buffer instead of the caller's tensor.
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                return "a batch holds a tensor that wants a gradient"
        if kind not in self._inputs and len(self._inputs) == MAX_SHAPES:
            return f"batches have more than {MAX_SHAPES} shapes, of which only the first {MAX_SHAPES} are replayed"
        return None

    def _discard_if_changed(self) -> None:
        """Forget all captures if the host's state that the function reads has changed."""
        if self._host_state is not None:
            changed = self._host_state.changed_attribute()
            if changed:
                self._forget()
                self._changed_attribute = changed
                self._times_discarded += 1
        if self._host_state is None:
            self._host_state = self._record_host()

    def _announce_once(self, reason: str) -> None:
        if reason not in self._announced:
            self._announced.add(reason)
            self._announce(reason)

    def _forget(self) -> None:
        """Free the graphs and their buffers; the next batch records the host's state again."""
        self._replays.forget()
        self._inputs.clear()
        self._results.clear()
        self._host_state = None


def _leaf_key(leaf: object) -> Hashable:
    """Return the properties of one value in a batch on which a graph depends.

    A tensor has its shape and dtype, and a plain value its type and itself.
    """
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
