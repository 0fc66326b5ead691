"""Read a profiler's Chrome trace into intervals, and find the part of a step that each operator
belongs to.

An event is an entry of the trace: an operator, a call of the CUDA runtime, a kernel, or a span. A span
is an interval that `monograph.profiling.profiler` has recorded under a name. If an operator calls another
one, the interval of its event contains that of the other's event. The loss's head is the product of
hidden states and the vocabulary's matrix, with the loss after it. The part of a kernel is given by the
first rule that applies:

1. It is inside the span of the optimizer's update: "optimizer".
2. It is inside the span of the loss's head, or in the backward pass of an operator in that span:
   "loss head".
3. It is one of torch's attention operators: "attention".
4. It is a product, and a side is as long as the vocabulary: "loss head". This is for a step that is
   one graph, in which there is no span of the head.
5. It is another product: "matmul". A batched product in a Llama is "attention".
6. torch or its compiler runs it, e.g. a reduction, a lookup or a copy: "elementwise".
7. "other".
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from monograph.profiling.intervals import Kernel, Operands, Part, Span, Timeline
from monograph.step.parts import OPTIMIZER

# The names of spans: of a whole update, of the wait for its rows, of the loss's head, and of the
# optimizer, whose name is that of `monograph.step.parts`.
STEP = "monograph.step"
DATA = "monograph.data"
HEAD = "monograph.head"
UPDATE = f"monograph.{OPTIMIZER}"
# Operators that compute a gradient by calling one of torch's matrix products. They do not count as
# kernels, since the product that they call does.
PRODUCT_CALLERS = ("monograph::add_product_", "monograph::product")
# Operators that compute the gradient of a head's weights or add to it. Their names show that they belong
# to the loss's head, even if the whole step is one graph, in which the head has no span.
HEAD_GRADIENT_OPERATORS = (*PRODUCT_CALLERS, "monograph::add_scaled_")
TraceEvent = Mapping[str, Any]
# Returns whether the operator with a name computes something itself.
HasKernel = Callable[[str], bool]

# The categories of events on the host and on the device.
_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}

# Bytes of a number, by the name of its dtype in a trace; dtypes that are not here have 1 byte.
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
# Products, with the index of their left operand among the inputs. The last three are operators of
# `monograph.graph.matmul`.
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
# Operators of `monograph.graph.grouped`: products of the rows of experts and their matrices.
_GROUPED = {"grouped_linear", "grouped_outer"}
_BATCHED = {"bmm", "baddbmm", "batched_matmul"}
_ATTENTION = re.compile(
    r"(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention|flex_attention)"
)
# The beginnings of the names of kernels that Inductor generates, and of those that it makes of its
# templates for matrix products.
_GENERATED = re.compile(r"^(triton|cpp)_")
_TEMPLATE = re.compile(r"^triton_tem_")
# Names of events in which the host waits for the device.
_WAITS = re.compile(r"Synchronize|^aten::_local_scalar_dense$")
# The beginning of the names of autograd's events around the operators of a backward pass.
_BACKWARD = "autograd::engine::evaluate_function"


class _Place(NamedTuple):
    """What an event belongs to.

    Attributes:
        span_part: the part to which the event and the spans around it belong; None: to no part.
        kernel_part: the part of the outermost operator that computes something itself, among the event
            and the events around it; None: there is no such operator.
    """

    span_part: Part | None = None
    kernel_part: Part | None = None


class _EventAround(NamedTuple):
    """An event that is around the current one.

    Attributes:
        end_us: the time at which it ends, in microseconds.
        place: its place.
        operator: the operator by which events inside it are launched; None: there is none.
    """

    end_us: float
    place: _Place
    operator: TraceEvent | None


class _Launch(NamedTuple):
    """The event of the host that launched an event of the device.

    Attributes:
        begin_s: the time of the launch; None: unknown.
        place: the place of the event around the launch.
        operator: the operator that made it; None: unknown.
    """

    begin_s: float | None = None
    place: _Place = _Place()
    operator: TraceEvent | None = None


def read_trace(
    trace: Mapping[str, Any], has_kernel: HasKernel, vocabulary: int | None, heads_are_batched: bool
) -> Timeline:
    """Read a trace, from the beginning of the first step's span to the end of the last one.

    Args:
        trace: the content that `torch.profiler.profile.export_chrome_trace` wrote, with shapes.
        has_kernel: returns whether the operator with a name computes something itself, instead of
            making a view, allocating or only calling other operators.
        vocabulary: the size of the vocabulary, if it identifies the products of the loss's head; None:
            it does not, and they are not looked for.
        heads_are_batched: whether batched products belong to attention; they do in a Llama, whose
            layers multiply matrices.

    Returns:
        The timeline, which begins at 0 s.

    Raises:
        ValueError: the trace has no step.
    """
    # "X" are the events with a duration.
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    # Only the spans of the host count. The trace lists them again for the device, with another category.
    steps = [
        event for event in events if event["name"] == STEP and event.get("cat") == "user_annotation"
    ]
    if not steps:
        raise ValueError(f"the trace has no {STEP}")
    begin_us = min(event["ts"] for event in steps)
    end_us = max(event["ts"] + event["dur"] for event in steps)
    main_thread = steps[0]["tid"]
    events = [event for event in events if begin_us <= event["ts"] <= end_us]
    reader = _Reader(has_kernel, vocabulary, heads_are_batched, origin_s=_seconds(begin_us))
    reader.head_numbers = _sequence_numbers(events)
    host_events = [event for event in events if event.get("cat") in _HOST]
    for thread in dict.fromkeys(event["tid"] for event in host_events):
        thread_events = [event for event in host_events if event["tid"] == thread]
        # Outer events come before the events inside them.
        thread_events.sort(key=lambda event: (event["ts"], -event["dur"]))
        reader.read_thread(thread_events, is_main=thread == main_thread)
    device_events = [event for event in events if event.get("cat") in _DEVICE]
    # On a GPU only the device's events compute; the host's operators launch them.
    kernels = reader.kernels
    if device_events:
        kernels = [*reader.device_kernels(device_events)]
    return Timeline(
        begin_s=0.0,
        end_s=_seconds(end_us - begin_us),
        kernels=kernels,
        spans=reader.spans,
        updates=reader.updates,
        event_counts=reader.event_counts,
        update_event_counts=reader.update_event_counts,
    )


def _seconds(microseconds: float) -> float:
    return microseconds * 1e-6


def _sequence_numbers(events: Sequence[TraceEvent]) -> set[int]:
    """Return the sequence numbers of the operators in a head's span.

    Autograd numbers operators, and each node of the backward pass has the number of the operator whose
    gradient it computes.
    """
    heads = [event for event in events if event["name"] == HEAD]
    numbers = set[int]()
    for event in events:
        number = event.get("args", {}).get("Sequence number")
        if number is None:
            continue
        heads_of_thread = [head for head in heads if head["tid"] == event["tid"]]
        if any(_is_inside(event, head) for head in heads_of_thread):
            numbers.add(number)
    return numbers


def _is_inside(event: TraceEvent, outer: TraceEvent) -> bool:
    """Return whether an event's interval lies inside that of another event."""
    return bool(
        outer["ts"] <= event["ts"] and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]
    )


class _Reader:
    """Reads the events of the host's threads, and collects what they say.

    Attributes:
        has_kernel: see `read_trace`.
        vocabulary: see `read_trace`.
        heads_are_batched: see `read_trace`.
        origin_s: the time on the trace's clock that becomes 0 s.
        head_numbers: the sequence numbers of the operators of the loss's head.
        kernels: the intervals of operators that compute; on a CPU these are the kernels.
        spans: the host's waits.
        updates: the intervals of the optimizer's updates.
        event_counts: the number of the main thread's events outside updates, by part.
        update_event_counts: the number of the main thread's events inside updates, by part.
        launches: the launches by their correlation numbers. An event on the device has the same
            number as its launch.
    """

    def __init__(
        self,
        has_kernel: HasKernel,
        vocabulary: int | None,
        heads_are_batched: bool,
        origin_s: float,
    ) -> None:
        self.has_kernel = has_kernel
        self.vocabulary = vocabulary
        self.heads_are_batched = heads_are_batched
        self.origin_s = origin_s
        self.head_numbers: set[int] = set()
        self.kernels: list[Kernel] = []
        self.spans: list[Span] = []
        self.updates: list[tuple[float, float]] = []
        self.event_counts = Counter[Part]()
        self.update_event_counts = Counter[Part]()
        self.launches: dict[int, _Launch] = {}

    def read_thread(self, events: Sequence[TraceEvent], is_main: bool) -> None:
        """Read the events of a thread, in order of time, each before the events inside it."""
        stack: list[_EventAround] = []  # the events around the current one, the outermost first
        for event in events:
            while stack and event["ts"] >= stack[-1].end_us:
                stack.pop()
            outer_place = stack[-1].place if stack else _Place()
            operator = stack[-1].operator if stack else None
            place = self._place(event, outer_place)
            if "correlation" in event.get("args", {}):
                launch = _Launch(self._begin_s(event), outer_place, operator)
                self.launches[event["args"]["correlation"]] = launch
            if is_main:
                # Recording an event takes the profiler some time. So the events are counted, by the part in
                # which this time was spent.
                in_update = outer_place.span_part == "optimizer"
                counts = self.update_event_counts if in_update else self.event_counts
                counts[outer_place.kernel_part or "host gaps"] += 1
            # Events inside an operator that computes are parts of it, and are not counted again.
            is_outermost = not outer_place.kernel_part
            if is_main and is_outermost:
                self._add(event, place)
            if event.get("cat") == "cpu_op" and is_outermost:
                operator = event
            stack.append(_EventAround(event["ts"] + event["dur"], place, operator))

    def _begin_s(self, event: TraceEvent) -> float:
        """Return the time at which an event begins, counted from `origin_s`."""
        return _seconds(event["ts"]) - self.origin_s

    def _add(self, event: TraceEvent, place: _Place) -> None:
        """Add an event of the main thread to the waits, updates or kernels."""
        begin_s = self._begin_s(event)
        end_s = begin_s + _seconds(event["dur"])
        if event["name"] == DATA:
            self.spans.append(Span("data", begin_s, end_s))
        elif event["name"] == UPDATE:
            self.updates.append((begin_s, end_s))
        elif _WAITS.search(event["name"]):
            self.spans.append(Span("sync", begin_s, end_s))
        elif place.kernel_part:
            flops, moved_bytes = operator_work(event)
            kernel = Kernel(
                part=place.kernel_part,
                begin_s=begin_s,
                end_s=end_s,
                flops=flops,
                moved_bytes=moved_bytes,
                launched_s=begin_s,
                name=event["name"],
                operands=_operands(event),
            )
            self.kernels.append(kernel)

    def _place(self, event: TraceEvent, outer: _Place) -> _Place:
        """Return the place of an event, given the place of the event around it."""
        name = event["name"]
        span_part = outer.span_part
        if span_part is None:
            number = event.get("args", {}).get("Sequence number")
            is_backward_of_head = name.startswith(_BACKWARD) and number in self.head_numbers
            if name == UPDATE:
                span_part = "optimizer"
            elif name in (HEAD, *HEAD_GRADIENT_OPERATORS) or is_backward_of_head:
                span_part = "loss head"
        kernel_part = outer.kernel_part
        is_operator = event.get("cat") == "cpu_op" and not _WAITS.search(name)
        if kernel_part is None and is_operator:
            if _GENERATED.search(name) or self.has_kernel(name):
                kernel_part = self._part(event, span_part)
        return _Place(span_part, kernel_part)

    def _part(self, event: TraceEvent, span_part: Part | None) -> Part:
        """Return the part of an operator that computes, by the rules in this file's docstring.

        Args:
            event: the operator's event.
            span_part: the part to which the spans around it belong; None: to no part.
        """
        name = event["name"].rpartition("::")[2]
        if span_part is not None:
            return span_part
        if _ATTENTION.search(name):
            return "attention"
        if name in _PRODUCTS:
            sides = [side for shape in _shapes(event) for side in shape]
            if self.vocabulary is not None and self.vocabulary in sides:
                return "loss head"
            return "attention" if self.heads_are_batched and name in _BATCHED else "matmul"
        if name in _GROUPED:
            return "matmul"
        if event["name"].startswith("aten::") or _GENERATED.search(event["name"]):
            return "elementwise"
        return "other"

    def device_kernels(self, events: Sequence[TraceEvent]) -> Iterator[Kernel]:
        """Yield the kernels of a device, each with the work of the operator that launched it."""
        # Only the first kernel of an operator gets the operator's work, so that the work counts once. The
        # set has the `id` of each operator with a kernel.
        operators_with_kernel: set[int] = set()
        for event in events:
            begin_s = self._begin_s(event)
            end_s = begin_s + _seconds(event["dur"])
            launch = self.launches.get(event["args"].get("correlation"), _Launch())
            # A copy between host and device is a transfer. Any other copy belongs to the operator that
            # made it.
            if event["cat"] == "gpu_memcpy" and re.search("HtoD|DtoH", event["name"]):
                yield Kernel(
                    part="transfers",
                    begin_s=begin_s,
                    end_s=end_s,
                    moved_bytes=event["args"].get("bytes"),
                    launched_s=launch.begin_s,
                    name=event["name"],
                )
                continue
            part: Part = launch.place.span_part or "other"
            flops = moved_bytes = operands = None
            if launch.operator is not None:
                part = self._part(launch.operator, launch.place.span_part)
                if id(launch.operator) not in operators_with_kernel:
                    operators_with_kernel.add(id(launch.operator))
                    flops, moved_bytes = operator_work(launch.operator)
                    operands = _operands(launch.operator)
            elif launch.place.span_part is None and _GENERATED.search(event["name"]):
                part = "elementwise"
            yield Kernel(
                part=part,
                begin_s=begin_s,
                end_s=end_s,
                flops=flops,
                moved_bytes=moved_bytes,
                launched_s=launch.begin_s,
                name=event["name"],
                operands=operands,
            )


def _shapes(event: TraceEvent) -> list[list[int]]:
    """Return the shapes of the tensors among an operator's inputs."""
    # An input that is not a tensor has [], and a list of tensors has a list of shapes.
    return [
        shape
        for shape in event.get("args", {}).get("Input Dims", [])
        if shape and isinstance(shape[0], int)
    ]


def _operands(event: TraceEvent) -> Operands | None:
    """Return the operands of a product of two matrices, or of two batches of them.

    None: the event is not such a product.
    """
    name = event["name"].rpartition("::")[2]
    if name not in _PRODUCTS or name.startswith("_"):
        return None
    arguments = event.get("args", {})
    shapes = arguments.get("Input Dims", [])
    strides = arguments.get("Input Strides", [])
    inputs = [(tuple(shape), tuple(stride)) for shape, stride in zip(shapes, strides, strict=False)]
    left = _PRODUCTS[name]  # the right operand is the next input
    operands = tuple(inputs[left : left + 2])
    return operands if len(operands) == 2 else None


def operator_work(event: TraceEvent) -> tuple[float | None, float | None]:
    """Return (FLOPs, bytes) of an operator's call, from the shapes of its inputs.

        product of [N, K] and [K, M]                      2 N K M FLOPs
        grouped product of [P, K] and [E, N, K]           2 P K N FLOPs
        causal attention of queries [B, H, T, E]
            to keys [B, H, S, E]                          2 B H T S E FLOPs
            backward                                      2.5 times as many
        other                                             0 FLOPs

    Bytes are counted for all inputs, which are read once, and for the output, which is written once.
    The shape of a product's output is known. The output of any other operator is taken to be as large as
    its largest input. A kernel that Inductor generates has its outputs among its inputs.

    (None, None): the shapes are not in the trace, or the operator is one of Inductor's templates
    for products, whose shapes are unknown.
    """
    name = event["name"].rpartition("::")[2]
    shapes = _shapes(event)
    type_names = event.get("args", {}).get("Input type", [])
    input_bytes = []
    for shape, type_name in zip(
        event.get("args", {}).get("Input Dims", []), type_names, strict=False
    ):
        if shape:
            is_tensor = isinstance(shape[0], int)  # a list of tensors has a list of shapes
        else:
            # Both a 0-d tensor and a number of Python have the shape [].
            is_tensor = type_name in _BYTES
        if is_tensor:
            input_bytes.append(math.prod(shape) * _BYTES.get(type_name, 1))
    if not input_bytes or _TEMPLATE.search(name):
        return None, None
    if _GENERATED.search(name):
        return 0.0, float(sum(input_bytes))
    moved_bytes = float(sum(input_bytes) + max(input_bytes))
    if name in _PRODUCTS and len(shapes) > _PRODUCTS[name] + 1:
        left = shapes[_PRODUCTS[name]]
        right = shapes[_PRODUCTS[name] + 1]
        # If the right operand has more than two dimensions, both operands are batches of this number of
        # matrices.
        matrices = math.prod(left[:-2]) if len(right) > 2 else 1
        columns = math.prod(right) // max(1, left[-1] * matrices)
        element_bytes = max(_BYTES.get(type_name, 1) for type_name in type_names)
        output_bytes = math.prod(left[:-1]) * columns * element_bytes
        return 2.0 * math.prod(left) * columns, float(sum(input_bytes) + output_bytes)
    if name in _GROUPED:
        return 2.0 * math.prod(shapes[0]) * shapes[1][1], moved_bytes
    if _ATTENTION.search(name) and len(shapes) >= 3:
        is_backward = "backward" in name
        # The first input of a backward operator is the gradient of the output.
        query, key = shapes[1:3] if is_backward else shapes[0:2]
        forward_flops = 2.0 * math.prod(query) * key[-2]
        return forward_flops * (2.5 if is_backward else 1.0), moved_bytes
    return 0.0, moved_bytes
