"""Count the bytes that code would have alive, by origin, on tensors that have a shape but no data.

Code inside a `FakeMemory` runs unchanged, on a CPU and in almost no memory. Eager operations are
counted as they are dispatched; captured graphs are counted by walking their kernels
(`monograph.predict.kernels`).
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monograph import compat
from monograph.predict.kernels import inner_bytes, kernels
from monograph.predict.lifetimes import Name, PlannedKernel

ORIGINS = ("weights", "gradients", "moments", "activations", "loss head", "workspace")
PASSING = ORIGINS[3:]  # the origins whose memory a micro-step allocates and frees again
Sample = tuple[int, ...]  # bytes alive, in the order of ORIGINS
UNIT_BYTES = {"cpu": 64, "cuda": 512}  # allocations are rounded up to a multiple of this


class Graphs:
    """Compiled graphs that several `FakeMemory` use in turn, so that code common to two models is
    traced once.

    Attributes:
        mode: the mode in which tensors have no data.
        memory: the `FakeMemory` that is counting.
    """

    memory: "FakeMemory"

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)  # random generators have real state
        self._known: dict[Callable[..., Any], Callable[..., Any]] = {}

    def of(self, function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
        """Return `function` compiled so that `memory` counts its graphs as a compiler for
        `device_type` makes them.
        """

        def runner(graph: torch.fx.GraphModule, backward: bool) -> Callable[..., Any]:
            plan = kernels(graph, device_type, backward)

            def run(arguments: list[Any]) -> Any:
                return self.memory._run(graph, plan, arguments, backward)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        if function not in self._known:
            backend = compat.partitioned(
                lambda graph: runner(graph, False), lambda graph: runner(graph, True)
            )
            self._known[function] = torch.compile(
                function, fullgraph=True, dynamic=False, backend=backend
            )
        return self._known[function]


class FakeMemory:
    """A count of all storages, from the operation that makes one until the last tensor that uses it
    is gone.

        with FakeMemory(vocabulary=4096) as memory:
            ...
        memory.curve

    Attributes:
        origin: the origin of new storages; set it before the code that makes them. In a micro-step,
            storages with an axis as long as the vocabulary belong to the loss head instead.
        curve: samples, one after each operation and each kernel of a graph after which the bytes
            differ. Its inputs are still alive in the sample.
        walked: the length of `curve` at the end of each graph.
    """

    def __init__(self, vocabulary: int, device_type: str = "cpu", graphs: Graphs | None = None):
        """Count as for "cpu" or "cuda", which round sizes up differently; `graphs` may come from an
        earlier count.
        """
        self.vocabulary, self.device_type = vocabulary, device_type
        self._graphs = graphs or Graphs()
        self.origin = "weights"
        self.curve: list[Sample] = []
        self.walked: list[int] = []
        self._live = dict.fromkeys(ORIGINS, 0)
        self._known: dict[int, tuple[str, int]] = {}
        self._modes = ExitStack()

    def __enter__(self) -> "FakeMemory":
        self._graphs.memory = self
        self._modes.enter_context(self._graphs.mode)
        self._modes.enter_context(_Listener(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    def assign(self, origin: str, tensors: Iterable[Tensor]) -> None:
        """Move these tensors' storages, which are counted already, to this origin."""
        for tensor in tensors:
            before, size_bytes = self._known[id(tensor.untyped_storage())]
            self._live[before] -= size_bytes
            self._live[origin] += size_bytes
            self._known[id(tensor.untyped_storage())] = origin, size_bytes

    def captured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` as one graph, as `graph.capture.compiled` does, whose kernels are
        counted but not built.
        """
        compat.allow_variants()  # a search traces one function for many shapes
        compat.ignore_warning_of_block_input_grad()
        compat.differentiate_outside_autocast()
        graph = self._graphs.of(function, self.device_type)

        def run(*arguments: object, **keywords: object) -> Any:
            # `Step.choose_kept` runs a copy of the model, which is not to be counted.
            if torch.compiler.is_compiling():
                return function(*arguments, **keywords)
            with compat.without_modes():
                return graph(*arguments, **keywords)

        return run

    # ── what the modes and the graphs report ──────────────────────────────────────────────────────

    def _note(self, results: object) -> None:
        for tensor in tree_leaves(results):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._known:
                continue
            origin = self._origin(tensor.shape)
            size_bytes = self._rounded(storage.nbytes())
            self._known[key] = origin, size_bytes
            self._live[origin] += size_bytes
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        origin, size_bytes = self._known.pop(key)
        self._live[origin] -= size_bytes

    def _origin(self, shape: Iterable[int]) -> str:
        return "loss head" if self.origin in PASSING and self.vocabulary in shape else self.origin

    def _rounded(self, size_bytes: int) -> int:
        unit = UNIT_BYTES[self.device_type]
        return -(-size_bytes // unit) * unit

    def _sample(self, inside_bytes: int = 0) -> None:
        *others, workspace = self._live.values()
        sample = (*others, workspace + inside_bytes)
        if self.curve[-1:] != [sample]:
            self.curve.append(sample)

    def _run(
        self,
        graph: torch.fx.GraphModule,
        plan: list[PlannedKernel],
        arguments: list[Any],
        backward: bool,
    ) -> Any:
        self._walk(plan, arguments, backward)
        self.walked.append(len(self.curve))
        # Without the listener, as the kernels are counted already.
        with compat.without_modes(), self._graphs.mode:
            results = graph(*arguments)
        arguments.clear()
        self._note(results)
        return results

    def _walk(self, plan: list[PlannedKernel], arguments: list[Any], backward: bool) -> None:
        """Add a sample for each kernel of a graph; a backward graph frees saved tensors once it has
        read them.
        """
        kept = dict(self._live)
        alive = self._passing(plan, arguments) if backward else {}
        for kernel in plan:
            origin = self._origin(kernel.output.shape)
            size_bytes = self._rounded(kernel.size_bytes)
            alive[kernel.name] = origin, size_bytes
            self._live[origin] += size_bytes
            if kernel.over in alive:
                self._live[alive.pop(kernel.over)[0]] -= size_bytes
            self._sample()
            for name in kernel.last_reads:
                if name in alive:
                    origin, size_bytes = alive.pop(name)
                    self._live[origin] -= size_bytes
        self._live = kept

    def _passing(
        self, plan: list[PlannedKernel], arguments: list[Any]
    ) -> dict[Name, tuple[str, int]]:
        """Return (origin, bytes) of the arguments that the graph may free.

        Of arguments that share a storage, only the one that is read last is listed.
        """
        read_at = {name: at for at, kernel in enumerate(plan) for name in kernel.last_reads}
        latest: dict[int, int] = {}
        for index, value in enumerate(arguments):
            if isinstance(value, Tensor):
                key = id(value.untyped_storage())
                latest[key] = max(
                    index, latest.get(key, index), key=lambda place: read_at.get(place, len(plan))
                )
        passed = {index: self._known[key] for key, index in latest.items() if key in self._known}
        return {index: entry for index, entry in passed.items() if entry[0] in PASSING}


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
        self.memory._note(result)
        inside_bytes = 0
        if "add_product_" in str(function):
            total, left, right = args
            inside_bytes = inner_bytes(total, left, right, self.memory.device_type)
        elif function is torch.ops.aten.add.Tensor and compat.sums_gradients():
            # Autograd writes the sum of two gradients over one of them, except for tensors without
            # data.
            inside_bytes = -self.memory._rounded(result.untyped_storage().nbytes())
        self.memory._sample(inside_bytes)
        return result
