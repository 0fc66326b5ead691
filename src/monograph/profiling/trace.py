"""Read a profiler's Chrome trace into intervals, and tell which part of a step each operator
belongs to.

The first rule that applies gives a kernel's part:

1. inside the span of the update: "optimizer";
2. inside the span of the loss's head, or in the backward pass of an operator that ran there: "loss
   head";
3. torch's attention operators: "attention";
4. products with the vocabulary as a side: "loss head", as one graph of the whole step has no spans;
5. other products: "matmul" (in a Llama, batched products: "attention");
6. all else that torch or its compiler runs, reductions, lookups and copies included: "elementwise";
7. everything else: "other".
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from monograph.profiling.intervals import Kernel, Operands, Part, Span, Timeline

STEP = "monograph.step"
DATA = "monograph.data"
HEAD = "monograph.head"
UPDATE = "monograph.update"
# Part of the head, in one graph of the step, where the head has no span.
ADDED = "monograph::add_product_"
Event = Mapping[str, Any]
HasKernel = Callable[[str], bool]  # whether the operator of a name runs a kernel of its own

_BYTES = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short": 2,
}
# Products, with the index of their left input among the inputs; the last three are
# `monograph.graph.matmul`'s.
_PRODUCTS = {
    "mm": 0,
    "addmm": 1,
    "bmm": 0,
    "baddbmm": 1,
    "_linear_pointwise": 0,
    "_scaled_mm": 0,
    "onednn_matmul": 0,
    "small_matmul": 0,
    "batched_matmul": 0,
}
# `monograph.graph.grouped`'s, rows of experts and their matrices.
_GROUPED = {"grouped_linear", "grouped_outer"}
_BATCHED = {"bmm", "baddbmm", "batched_matmul"}
_ATTENTION = re.compile(
    r"(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention|flex_attention)"
)
# Names that Inductor gives to the kernels it generates, and to those from its templates for
# products.
_GENERATED = re.compile(r"^(triton|cpp)_")
_TEMPLATE = re.compile(r"^triton_tem_")
_WAITS = re.compile(r"Synchronize|^aten::_local_scalar_dense$")
_BACKWARD = "autograd::engine::evaluate_function"


class _Place(NamedTuple):
    """Where an event lies in the step.

    Attributes:
        part: the part that the spans around it give, if any.
        inside: the part of the operator around it that counts as a whole, if there is one.
    """

    part: Part | None = None
    inside: Part | None = None


def read(
    trace: Mapping[str, Any], has_kernel: HasKernel, vocabulary: int | None, heads_are_batched: bool
) -> Timeline:
    """Return the timeline from the first step's span to the end of the last one.

    Args:
        trace: the content that `torch.profiler.profile.export_chrome_trace` wrote, with shapes.
        has_kernel: tells whether an operator of a name computes something itself, instead of making
            a view, allocating or only calling other operators.
        vocabulary: rows of the head, if no other side of a product is as long; else None.
        heads_are_batched: whether batched products belong to attention, as in a Llama, whose layers
            multiply matrices.

    Raises:
        ValueError: the trace has no step.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    # Spans are listed a second time on the device's tracks; only the host's count.
    steps = [
        event for event in events if event["name"] == STEP and event.get("cat") == "user_annotation"
    ]
    if not steps:
        raise ValueError(f"the trace has no {STEP}")
    begin = min(event["ts"] for event in steps)
    main = steps[0]["tid"]
    end = max(event["ts"] + event["dur"] for event in steps)
    events = [event for event in events if begin <= event["ts"] <= end]
    reader = _Reader(has_kernel, vocabulary, heads_are_batched, _seconds(begin))
    reader.head = _sequence_numbers(events)
    for thread in dict.fromkeys(event["tid"] for event in events if event.get("cat") in _HOST):
        mine = [event for event in events if event["tid"] == thread and event.get("cat") in _HOST]
        reader.walk(
            sorted(mine, key=lambda event: (event["ts"], -event["dur"])), is_main=thread == main
        )
    on_device = [event for event in events if event.get("cat") in _DEVICE]
    kernels = [*reader.on_device(on_device)] if on_device else reader.kernels
    noted, of_updates = reader.events[False], reader.events[True]
    return Timeline(
        0.0, _seconds(end - begin), kernels, reader.spans, reader.updates, noted, of_updates
    )


_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def _seconds(microseconds: float) -> float:
    return microseconds * 1e-6


def _sequence_numbers(events: Sequence[Event]) -> set[int]:
    """Return the sequence numbers of the operators in a head's span; their nodes of the backward
    pass have the same.
    """
    heads = [event for event in events if event["name"] == HEAD]
    return {
        event["args"]["Sequence number"]
        for event in events
        if "Sequence number" in event.get("args", {})
        and any(head["tid"] == event["tid"] and _inside(event, head) for head in heads)
    }


def _inside(event: Event, other: Event) -> bool:
    return bool(
        other["ts"] <= event["ts"] and event["ts"] + event["dur"] <= other["ts"] + other["dur"]
    )


class _Reader:
    """A walk over the events of the host's threads, each nested in the events that called it.

    Attributes:
        head: sequence numbers of the head's operators.
        kernels: intervals of operators that compute, which are the kernels on a CPU.
        spans: the host's waits.
        updates: the intervals of updates.
        events: counts of events by part, outside and inside updates.
        launches: for each correlation number: the time of the launch, its place, and the operator
            that launched it.
    """

    def __init__(
        self, has_kernel: HasKernel, vocabulary: int | None, heads_are_batched: bool, begin_s: float
    ) -> None:
        self.has_kernel = has_kernel
        self.vocabulary = vocabulary
        self.heads_are_batched = heads_are_batched
        self.begin_s = begin_s
        self.head: set[int] = set()
        self.kernels: list[Kernel] = []
        self.spans: list[Span] = []
        self.updates: list[tuple[float, float]] = []
        self.events: dict[bool, Counter[Part]] = {False: Counter(), True: Counter()}
        self.launches: dict[int, tuple[float, _Place, Event | None]] = {}

    def walk(self, events: Sequence[Event], is_main: bool) -> None:
        stack: list[tuple[float, _Place, Event | None]] = []
        for event in events:
            while stack and event["ts"] >= stack[-1][0]:
                stack.pop()
            _, place, operator = stack[-1] if stack else (math.inf, _Place(), None)
            inner = self._placed(event, place)
            if "correlation" in event.get("args", {}):
                self.launches[event["args"]["correlation"]] = (self._at(event), place, operator)
            if is_main:
                self.events[place.part == "optimizer"][place.inside or "host gaps"] += 1
            if is_main and not place.inside:
                self._note(event, inner)
            is_operator = event.get("cat") == "cpu_op" and not place.inside
            stack.append((event["ts"] + event["dur"], inner, event if is_operator else operator))

    def _at(self, event: Event) -> float:
        return _seconds(event["ts"]) - self.begin_s

    def _note(self, event: Event, place: _Place) -> None:
        begin = self._at(event)
        end = begin + _seconds(event["dur"])
        if event["name"] == DATA:
            self.spans.append(Span("data", begin, end))
        elif event["name"] == UPDATE:
            self.updates.append((begin, end))
        elif _WAITS.search(event["name"]):
            self.spans.append(Span("sync", begin, end))
        elif place.inside:
            self.kernels.append(
                Kernel(
                    place.inside, begin, end, *work(event), begin, event["name"], _operands(event)
                )
            )

    def _placed(self, event: Event, place: _Place) -> _Place:
        name = event["name"]
        part = place.part
        number = event.get("args", {}).get("Sequence number")
        if part is None:
            if name == UPDATE:
                part = "optimizer"
            elif name in (HEAD, ADDED) or (name.startswith(_BACKWARD) and number in self.head):
                part = "loss head"
        inside = place.inside
        if inside is None and event.get("cat") == "cpu_op" and not _WAITS.search(name):
            inside = (
                self._part(event, part)
                if _GENERATED.search(name) or self.has_kernel(name)
                else None
            )
        return _Place(part, inside)

    def _part(self, event: Event, said: Part | None) -> Part:
        name = event["name"].rpartition("::")[2]
        if said is not None:
            return said
        if _ATTENTION.search(name):
            return "attention"
        if name in _PRODUCTS:
            sides = [side for shape in _shapes(event) for side in shape]
            if self.vocabulary is not None and self.vocabulary in sides:
                return "loss head"
            return "attention" if self.heads_are_batched and name in _BATCHED else "matmul"
        if name in _GROUPED:
            return "matmul"
        return (
            "elementwise"
            if event["name"].startswith("aten::") or _GENERATED.search(event["name"])
            else "other"
        )

    def on_device(self, events: Sequence[Event]) -> Iterator[Kernel]:
        """Yield the device's kernels, with the work of the operators that launched them; without
        one it is "other".
        """
        seen: set[int] = set()
        for event in events:
            begin = self._at(event)
            end = begin + _seconds(event["dur"])
            launched, place, operator = self.launches.get(
                event["args"].get("correlation"), (None, _Place(), None)
            )
            if event["cat"] == "gpu_memcpy" and re.search("HtoD|DtoH", event["name"]):
                yield Kernel(
                    "transfers",
                    begin,
                    end,
                    None,
                    event["args"].get("bytes"),
                    launched,
                    event["name"],
                )
                continue
            part: Part = place.part or "other"
            flops = moved = operands = None
            if operator is not None:
                part = self._part(operator, place.part)
                if id(operator) not in seen:  # the first of an operator's kernels gets its work
                    flops, moved = work(operator)
                    operands = _operands(operator)
                    seen.add(id(operator))
            elif place.part is None and _GENERATED.search(event["name"]):
                part = "elementwise"
            yield Kernel(part, begin, end, flops, moved, launched, event["name"], operands)


def _shapes(event: Event) -> list[list[int]]:
    """Return the shapes of the tensors among an operator's inputs."""
    return [
        shape
        for shape in event.get("args", {}).get("Input Dims", [])
        if shape and isinstance(shape[0], int)
    ]


def _operands(event: Event) -> Operands | None:
    """Return the operands of a product of two matrices or two batches of them; None for anything
    else.
    """
    name = event["name"].rpartition("::")[2]
    given = event.get("args", {})
    if name not in _PRODUCTS or name.startswith("_"):
        return None
    first = _PRODUCTS[name]
    pairs = zip(given.get("Input Dims", []), given.get("Input Strides", []), strict=False)
    operands = tuple((tuple(shape), tuple(strides)) for shape, strides in pairs)[first : first + 2]
    return operands if len(operands) == 2 else None


def work(event: Event) -> tuple[float | None, float | None]:
    """Return (FLOPs, bytes) of an operator's call, from its inputs' shapes; None where the shapes
    do not tell.

        product of [N, K] and [K, M]                            2 N K M FLOPs
        grouped product of [P, K] and [E, N, K]                 2 P K N FLOPs
        causal attention, T queries and S keys of E numbers     2 B H T S E FLOPs; backward 2.5 times as many

    Bytes are those of each input, read once, and of the output, written once: as many as a
    product's result has, or else the largest input. A generated kernel has its outputs among its
    inputs. The shapes of the products in Inductor's templates are not known.
    """
    name = event["name"].rpartition("::")[2]
    shapes = _shapes(event)
    types = event.get("args", {}).get("Input type", [])
    sizes = [
        math.prod(shape) * _BYTES.get(kind, 1)
        for shape, kind in zip(event.get("args", {}).get("Input Dims", []), types, strict=False)
        if (isinstance(shape[0], int) if shape else kind in _BYTES)
    ]
    if not sizes or _TEMPLATE.search(name):
        return None, None
    if _GENERATED.search(name):
        return 0.0, float(sum(sizes))
    moved = float(sum(sizes) + max(sizes))
    if name in _PRODUCTS and len(shapes) > _PRODUCTS[name] + 1:
        left, right = shapes[_PRODUCTS[name]], shapes[_PRODUCTS[name] + 1]
        columns = math.prod(right) // max(
            1, left[-1] * (math.prod(left[:-2]) if len(right) > 2 else 1)
        )
        number = max(_BYTES.get(kind, 1) for kind in types)
        return 2.0 * math.prod(left) * columns, float(
            sum(sizes) + math.prod(left[:-1]) * columns * number
        )
    if name in _GROUPED:
        return 2.0 * math.prod(shapes[0]) * shapes[1][1], moved
    if _ATTENTION.search(name) and len(shapes) >= 3:
        backward = "backward" in name
        query, key = shapes[1 if backward else 0], shapes[2 if backward else 1]
        forward = 2.0 * math.prod(query) * key[-2]
        return forward * (2.5 if backward else 1.0), moved
    return 0.0, moved
