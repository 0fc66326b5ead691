"""Count the bytes that code would have alive, by origin, on tensors that have a shape but no data.

Code inside a `FakeMemory` runs unchanged, on a CPU and in almost no memory. Eager operations are
counted when they are dispatched. A captured graph is counted by a walk over its kernels, which
`monograph.predict.kernels` lists.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monograph import compat
from monograph.predict.kernels import add_product_workspace_bytes, planned_kernels
from monograph.predict.lifetimes import BufferName, PlannedKernel

ORIGINS = ("weights", "gradients", "moments", "activations", "loss head", "workspace")
TRANSIENT = ORIGINS[3:]  # the origins whose memory a micro-step allocates and frees again
MemorySample = tuple[int, ...]  # bytes alive, in the order of ORIGINS
UNIT_BYTES = {"cpu": 64, "cuda": 512}  # allocations are rounded up to a multiple of this


class Allocation(NamedTuple):
    """A storage, or a buffer of a graph, that is counted.

    Attributes:
        origin: one of ORIGINS.
        size_bytes: its bytes, rounded up as the allocator does.
    """

    origin: str
    size_bytes: int


class Graphs:
    """Compiled graphs that one `FakeMemory` after another uses. So code that several models have in
    common is traced only once.

    Attributes:
        mode: the mode in which tensors have no data.
        memory: the `FakeMemory` that is counting.
    """

    memory: "FakeMemory"

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)  # random generators have real state
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def compiled(self, function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
        """Return `function`, compiled so that `memory` counts the kernels that a compiler for
        `device_type` would make of its graphs.
        """

        def make_runner(graph: torch.fx.GraphModule, backward: bool) -> Callable[..., Any]:
            planned = planned_kernels(graph, device_type, backward)

            def run(arguments: list[Any]) -> Any:
                return self.memory._run(graph, planned, arguments, backward)

            # With this attribute torch passes the arguments as one list. `_run` clears the list, so
            # that arguments can be freed while the graph's results are alive.
            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        if function not in self._compiled:
            backend = compat.partitioning_backend(
                lambda graph: make_runner(graph, False), lambda graph: make_runner(graph, True)
            )
            self._compiled[function] = torch.compile(
                function, fullgraph=True, dynamic=False, backend=backend
            )
        return self._compiled[function]


class FakeMemory:
    """A count of the bytes of all storages. A storage counts from the operation that makes it until
    the last tensor that uses it is gone.

        with FakeMemory(vocabulary=4096) as memory:
            ...
        memory.curve

    Attributes:
        vocabulary: the size of the vocabulary, by which the loss head is recognised.
        device_type: the type of the device whose memory is counted.
        origin: the origin of new storages; set it before the code that makes them. In a micro-step,
            storages with an axis as long as the vocabulary belong to the loss head instead.
        curve: samples of the bytes alive. One is taken after each eager operation and each kernel
            of a graph, while its inputs are still alive. A sample that equals the previous one is
            left out.
        graph_ends: the length of `curve` at the end of each graph.
    """

    def __init__(self, vocabulary: int, device_type: str = "cpu", graphs: Graphs | None = None):
        """Begin with no storage.

        Args:
            vocabulary: the size of the vocabulary, which no other axis may have.
            device_type: "cpu" or "cuda", which round sizes up differently.
            graphs: the graphs of an earlier count, to use them again; None: new ones.
        """
        self.vocabulary = vocabulary
        self.device_type = device_type
        self._graphs = graphs or Graphs()
        self.origin = "weights"
        self.curve: list[MemorySample] = []
        self.graph_ends: list[int] = []
        self._alive_bytes = dict.fromkeys(ORIGINS, 0)  # in the order of ORIGINS
        self._storages: dict[int, Allocation] = {}  # by id
        self._modes = ExitStack()

    def __enter__(self) -> "FakeMemory":
        self._graphs.memory = self
        self._modes.enter_context(self._graphs.mode)
        self._modes.enter_context(_Listener(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    def assign(self, origin: str, tensors: Iterable[Tensor]) -> None:
        """Move the storages of these tensors, which are already counted, to this origin."""
        for tensor in tensors:
            key = id(tensor.untyped_storage())
            old_origin, size_bytes = self._storages[key]
            self._alive_bytes[old_origin] -= size_bytes
            self._alive_bytes[origin] += size_bytes
            self._storages[key] = Allocation(origin, size_bytes)

    def captured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` as one graph, as `graph.capture.compiled` does. Its kernels are counted
        but not built.
        """
        compat.allow_variants()  # a search traces one function for many shapes
        compat.ignore_warning_of_block_input_grad()
        compat.differentiate_outside_autocast()
        graph = self._graphs.compiled(function, self.device_type)

        def run(*arguments: object, **keywords: object) -> Any:
            # `Step.choose_kept_results` traces a copy of the model, which must not be counted.
            if torch.compiler.is_compiling():
                return function(*arguments, **keywords)
            with compat.without_modes():
                return graph(*arguments, **keywords)

        return run

    # ── what the modes and the graphs report ──────────────────────────────────────────────────────

    def _count_results(self, results: object) -> None:
        """Count the storages of tensors that are not counted yet, until they are freed."""
        for tensor in tree_leaves(results):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._storages:
                continue
            origin = self._origin_of(tensor.shape)
            size_bytes = self._allocated_bytes(storage.nbytes())
            self._storages[key] = Allocation(origin, size_bytes)
            self._alive_bytes[origin] += size_bytes
            weakref.finalize(storage, self._remove_storage, key)

    def _remove_storage(self, key: int) -> None:
        origin, size_bytes = self._storages.pop(key)
        self._alive_bytes[origin] -= size_bytes

    def _origin_of(self, shape: Iterable[int]) -> str:
        if self.origin in TRANSIENT and self.vocabulary in shape:
            return "loss head"
        return self.origin

    def _allocated_bytes(self, size_bytes: int) -> int:
        unit = UNIT_BYTES[self.device_type]
        units = -(-size_bytes // unit)  # rounded up
        return units * unit

    def _add_sample(self, workspace_bytes: int = 0) -> None:
        """Add the bytes alive to the curve, unless they equal the last sample.

        Args:
            workspace_bytes: bytes of workspace that are alive now and have no storage.
        """
        # The workspace is the last of ORIGINS.
        *others, workspace = self._alive_bytes.values()
        sample = (*others, workspace + workspace_bytes)
        if self.curve[-1:] != [sample]:
            self.curve.append(sample)

    def _run(
        self,
        graph: torch.fx.GraphModule,
        planned: list[PlannedKernel],
        arguments: list[Any],
        backward: bool,
    ) -> Any:
        """Run a graph on tensors without data, and count its kernels.

        Args:
            graph: the graph.
            planned: its kernels.
            arguments: its arguments; the list is cleared.
            backward: whether it is a backward graph.
        """
        self._walk_kernels(planned, arguments, backward)
        self.graph_ends.append(len(self.curve))
        # The listener is off, as the kernels are already counted.
        with compat.without_modes(), self._graphs.mode:
            results = graph(*arguments)
        arguments.clear()
        self._count_results(results)
        return results

    def _walk_kernels(
        self, planned: list[PlannedKernel], arguments: list[Any], backward: bool
    ) -> None:
        """Add a sample for each kernel of a graph.

        A backward graph frees the tensors that the forward pass saved, once it has read them.
        """
        before = dict(self._alive_bytes)
        buffers = self._freeable_arguments(planned, arguments) if backward else {}
        for kernel in planned:
            origin = self._origin_of(kernel.output.shape)
            size_bytes = self._allocated_bytes(kernel.size_bytes)
            buffers[kernel.name] = Allocation(origin, size_bytes)
            self._alive_bytes[origin] += size_bytes
            if kernel.written_over in buffers:
                old_origin, _ = buffers.pop(kernel.written_over)
                self._alive_bytes[old_origin] -= size_bytes
            self._add_sample()
            for name in kernel.freed_after:
                if name in buffers:
                    origin, size_bytes = buffers.pop(name)
                    self._alive_bytes[origin] -= size_bytes
        # The buffers of the walk are gone. From here on storages are counted again: arguments until they
        # are freed, and results as soon as `_run` adds them.
        self._alive_bytes = before

    def _freeable_arguments(
        self, planned: list[PlannedKernel], arguments: list[Any]
    ) -> dict[BufferName, Allocation]:
        """Return the arguments that the graph may free, by index.

        Of arguments that share a storage, only the one that is freed last is listed.
        """
        freed_at = {
            name: index for index, kernel in enumerate(planned) for name in kernel.freed_after
        }

        def freeing_kernel(argument: int) -> int:
            """Return the index of the kernel that frees an argument; the end if none does."""
            return freed_at.get(argument, len(planned))

        freed_last: dict[int, int] = {}  # by storage, the argument that is freed last
        for argument, value in enumerate(arguments):
            if isinstance(value, Tensor):
                key = id(value.untyped_storage())
                sharing_storage = argument, freed_last.get(key, argument)
                freed_last[key] = max(sharing_storage, key=freeing_kernel)
        freeable: dict[BufferName, Allocation] = {}
        for key, argument in freed_last.items():
            allocation = self._storages.get(key)
            if allocation is not None and allocation.origin in TRANSIENT:
                freeable[argument] = allocation
        return freeable


class _Listener(TorchDispatchMode):
    """A mode that counts the results of every eager operation."""

    def __init__(self, memory: FakeMemory):
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = function(*args, **(kwargs or {}))
        self.memory._count_results(result)
        workspace_bytes = 0
        if "add_product_" in str(function):
            total, left, right = args[:3]
            workspace_bytes = add_product_workspace_bytes(
                total, left, right, self.memory.device_type
            )
        elif function is torch.ops.aten.add.Tensor and compat.is_accumulating_gradients():
            # Autograd writes the sum of two gradients over one of them. For tensors without data it
            # allocates the sum, whose bytes are taken off again.
            sum_bytes = self.memory._allocated_bytes(result.untyped_storage().nbytes())
            workspace_bytes = -sum_bytes
        self.memory._add_sample(workspace_bytes)
        return result
