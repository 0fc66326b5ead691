"""Keep the parameters of a module in planes, a few flat buffers.

A plane is one contiguous buffer of all parameters that are updated in the same way. The module's
parameters and their gradients are views of it. So an update is a few large operations for any
number of parameters: on a CPU, compiling AdamW over 110 separate tensors took 48 s, over two flat
buffers 3.6 s.

Shapes: N stacked modules, size elements of a plane.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from monograph.errors import UsageError
from monograph.graph.inspect import loadable_state, overlapping_tensors
from monograph.graph.mmap_weights import kept_dtype, replace_data
from monograph.ops.fused_gradients import Fused
from monograph.optim.formats import FORMATS
from monograph.optim.optimizer import ParameterKind


class PlacedParameter(NamedTuple):
    """The place of one parameter in its plane; `offset` is that of its first element."""

    name: str
    parameter: nn.Parameter
    offset: int


@dataclass
class Plane:
    """The parameters of one kind as flat buffers of `size` elements.

    If the parameters are those of N stacked modules, every shape below has a leading N.

    Attributes:
        kind: how the parameters are updated.
        slots: the parameters, in the module's order.
        param: [size] in the parameters' dtype; the module's parameters are views of it.
        grad: [size] in the parameters' original dtype, even if they are kept in bf16 now; the
            parameters' `.grad` are views of it.
        number: the plane's number among the module's planes.
        parts: the number of elements of each part of the module, in the order of `slots`; see
            `planes`.
        start: the index of the first element in the module's plane of this number, if this is only
            a part of that plane; else 0.
        before: the number of elements of other ranks in the first block of 256.
        state: the optimizer's buffers by name, each [size], or [size / 256] with one number for
            each block of 256.
        rounded: the parameters in the dtype of products, which `round` writes; None if products
            read the parameters themselves.
        orthogonal: [size], Muon's directions of this update if ranks have only rows of the
            matrices; else None.
        ends: by buffer, the largest number of its first and of its last block after this update,
            [2], if other ranks have parts of these blocks.
    """

    kind: ParameterKind
    slots: list[PlacedParameter]
    param: Tensor
    grad: Tensor
    number: int
    parts: tuple[int, ...] = ()
    start: int | Tensor = 0
    before: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    rounded: Tensor | None = None
    orthogonal: Tensor | None = None
    ends: dict[str, Tensor] = field(default_factory=dict)
    # `grad`, and its views.
    _linked: tuple[Tensor, list[Tensor]] | None = field(default=None, init=False)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its part of a buffer of the plane.

        A part has the parameter's shape, or one number for each block if `flat` is [size / 256].
        """
        block = self.param.shape[-1] // flat.shape[-1]
        leading_axes = flat.ndim - 1
        for name, parameter, offset in self.slots:
            end = offset + math.prod(parameter.shape[leading_axes:])
            end_block = -(-end // block)  # rounded up
            part = flat[..., offset // block : end_block]
            yield name, part.view(parameter.shape) if block == 1 else part

    def hold(self, flat: Tensor) -> None:
        """Make the parameters views of `flat`; they have no gradient until the next `link`."""
        # Through `.data` the parameter stays the same object, so that ties, hooks and other owners
        # see the new memory.
        for (_, parameter, _), (_, view) in zip(self.slots, self.views(flat), strict=True):
            parameter.grad = None
            parameter.data = view
            if flat.dtype != self.grad.dtype:
                parameter.grad_dtype = self.grad.dtype

    def link(self) -> None:
        """Point every parameter's `.grad` at the plane, even if it was set to something else."""
        if self._linked is None or self._linked[0] is not self.grad:
            # `.data`, because Dynamo would trace the base of what autograd sees as a view with
            # symbols.
            self._linked = self.grad, [view.data for _, view in self.views(self.grad)]
        for slot, view in zip(self.slots, self._linked[1], strict=True):
            if slot.parameter.grad is not view:
                slot.parameter.grad = view

    def fuse(self) -> None:
        """Make products add the gradients of matrices; see `monograph.ops.fused_gradients`."""
        if self.kind.vector or self.grad.dtype == torch.float64:
            return
        weights = self.views(self.param if self.rounded is None else self.rounded)
        for (_, parameter, _), (_, weight), (_, total) in zip(
            self.slots, weights, self.views(self.grad), strict=True
        ):
            parameter.fused = Fused(weight.data, total.data)  # type: ignore[attr-defined]

    def round(self) -> None:
        """Write `param` to `rounded`, unless that is None."""
        if self.rounded is not None:
            self.rounded.copy_(self.param)


@contextmanager
def holding(planes: Sequence[Plane], params: Sequence[Tensor]) -> Iterator[None]:
    """Write other numbers to the planes, and restore their own after the `with` block.

    Args:
        planes: the planes.
        params: the numbers, one tensor for each plane.
    """
    own_params = [plane.param.clone() for plane in planes]
    try:
        for plane, param in zip(planes, params, strict=True):
            plane.param.copy_(param)
        yield
    finally:
        for plane, param in zip(planes, own_params, strict=True):
            plane.param.copy_(param)


@contextmanager
def unlinked(planes: Iterable[Plane]) -> Iterator[None]:
    """Remove gradients of another dtype than their parameters' in the `with` block.

    torch cannot trace a graph with such parameters.
    """
    # Only these planes (bf16 weights with fp32 gradients), because removing gradients and setting
    # them again takes time. If weights are on the host and gradients on the device, as in
    # streaming, parameters never have a gradient.
    of_two_dtypes = [
        plane
        for plane in planes
        if plane.grad.device == plane.param.device and plane.param.dtype != plane.grad.dtype
    ]
    for plane in of_two_dtypes:
        for slot in plane.slots:
            slot.parameter.grad = None
    try:
        yield
    finally:
        for plane in of_two_dtypes:
            plane.link()


@contextmanager
def vectors_at_once(planes: Iterable[Plane]) -> Iterator[None]:
    """Add the gradients of all vectors in one kernel, at the end of the `with` block.

    Otherwise a backward pass in the block would launch one kernel for each vector.
    """
    parameters = [slot.parameter for plane in planes if plane.kind.vector for slot in plane.slots]
    totals = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
        computed: list[tuple[Any, Any]] = [
            (total, parameter.grad)
            for total, parameter in zip(totals, parameters, strict=True)
            if parameter.grad is not None
        ]
        if computed:
            torch._foreach_add_([total for total, _ in computed], [grad for _, grad in computed])
    finally:
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total


def require_movable(module: nn.Module) -> None:
    """Refuse a module whose results or state dict would change if its parameters were moved.

    Raises:
        UsageError: a parameter has no shape yet, cannot be trained in its dtype or shares its
            memory with another tensor; or `loadable_state` refuses the module.
    """
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet: call the module once, with inputs of the size it will have"
            )
        # In fp16 an optimizer's eps rounds to 0, and so do squares of gradients: the first update
        # would be NaN.
        if tensor.requires_grad and kept_dtype(tensor) not in (
            torch.float32,
            torch.float64,
            torch.bfloat16,
        ):
            raise UsageError(
                f"{name} is {tensor.dtype}: expected float32, float64 or bfloat16, to train it in"
            )
    pair = overlapping_tensors(module)
    if pair:
        raise UsageError(
            f"{pair[0]} and {pair[1]} lie in the same memory, and would come apart when parameters move: register one "
            "Parameter under both names, or compute one from the other where it is read"
        )
    loadable_state(module)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name; tied ones once, under their first name.

    Raises:
        UsageError: there are none, they have different dtypes or devices, or `require_movable`
            refuses the module.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise UsageError("the module has no trainable parameter: every requires_grad is False")
    require_movable(module)
    # A plane is one buffer, with one dtype and on one device.
    places = {(kept_dtype(p), p.device) for p in named.values()}
    if len(places) > 1:
        raise UsageError(
            f"trainable parameters must share one dtype and device, found {sorted(map(str, places))}"
        )
    return named


def planes(
    parameters: Mapping[str, nn.Parameter],
    kinds: Mapping[str, ParameterKind],
    state: str = "fp32",
    lead: int = 0,
    master_weights: bool = True,
    parts: Mapping[str, Any] | None = None,
) -> list[Plane]:
    """Move parameters into planes, one for each kind.

    Values, names and devices do not change, and tied parameters stay tied. Afterwards the
    parameters are views, so load weights and move the module to its device before.

    Args:
        parameters: the parameters by name.
        kinds: the parameters' kinds, by the same names.
        state: the optimizer's `state`; each parameter begins at a block of its format, with zeros
            between parameters.
        lead: 1 for stacked parameters [N, ...], for which planes are stacked as well; else 0.
        master_weights: whether parameters keep their dtype; if not, they are rounded to bf16, and
            only their gradients keep it.
        parts: for each parameter, by name, any value that stands for its part of the module;
            consecutive parameters of one part make one of the plane's `parts`. None: the module is
            one part.
    """
    # Parameters of a kind are in the module's order, which is the same in checkpoints of other
    # ranks or engines.
    members_by_kind: dict[ParameterKind, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        members_by_kind.setdefault(kinds[name], []).append((name, parameter))
    new_planes = [
        _plane(number, kind, members, state, lead, master_weights)
        for number, (kind, members) in enumerate(members_by_kind.items())
    ]
    for plane in new_planes:
        plane.parts = _part_sizes(plane, parts or {})
    return new_planes


def _part_sizes(plane: Plane, parts: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of elements of each run of parameters of one part, with gaps included."""
    slot_ends = [*(slot.offset for slot in plane.slots[1:]), plane.param.shape[-1]]
    runs = itertools.groupby(
        zip(plane.slots, slot_ends, strict=True),
        lambda slot_and_end: parts.get(slot_and_end[0].name),
    )
    run_ends = [0]
    for _, run in runs:
        _, end = list(run)[-1]
        run_ends.append(end)
    return tuple(end - begin for begin, end in itertools.pairwise(run_ends))


def _plane(
    number: int,
    kind: ParameterKind,
    members: list[tuple[str, nn.Parameter]],
    state: str,
    lead: int,
    master_weights: bool,
) -> Plane:
    """Move parameters of one kind, given as (name, parameter), into a new plane."""
    block = FORMATS[state].block
    sizes = [math.prod(p.shape[lead:]) for _, p in members]
    padded_sizes = [-(-size // block) * block for size in sizes]  # rounded up to blocks
    offsets = [0, *itertools.accumulate(padded_sizes)]
    _, first = members[0]
    plane_shape = (*first.shape[:lead], offsets[-1])
    grad_dtype = kept_dtype(first)
    # The gaps between parameters are zeros, because they are quantised together with parameters.
    allocate = torch.empty if block == 1 else torch.zeros
    param_dtype = grad_dtype if master_weights else torch.bfloat16
    param = allocate(plane_shape, dtype=param_dtype, device=first.device)
    slots = [
        PlacedParameter(name, parameter, offset)
        for (name, parameter), offset in zip(members, offsets, strict=False)
    ]
    for (_, parameter, offset), size in zip(slots, sizes, strict=True):
        # Each parameter's old memory is freed at once, and gradients are allocated last, so that
        # there is never a second copy of all weights.
        part = param[..., offset : offset + size].view(parameter.shape)
        part.copy_(parameter.detach())
        parameter.grad = None
        replace_data(parameter, part)
    grad = torch.zeros(plane_shape, dtype=grad_dtype, device=first.device)
    plane = Plane(kind, slots, param, grad, number)
    plane.hold(param)
    plane.link()
    return plane
