"""Keep the parameters of a module in planes, a few flat buffers.

A plane is one contiguous buffer of all parameters that are updated in the same way; the module's
parameters and their gradients are views of it. So an update is a handful of large operations for
any number of parameters (measured on a
CPU: compiling AdamW over 110 separate tensors took 48 s, over two flat buffers 3.6 s).
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
from monograph.graph.mmap_weights import keep, kept_dtype
from monograph.ops.fused_gradients import Fused
from monograph.optim.formats import FORMATS
from monograph.optim.optimizer import Kind


class Slot(NamedTuple):
    """The place of one parameter in its plane."""

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
        number: its number among the module's planes.
        parts: the elements of each part of the module in it, one part after another: see `planes`.
        start: the index of its first element in the module's plane of this number, if it is only a
            part of that.
        before: elements of other ranks in its first block of 256.
        state: the optimizer's buffers by name, each [size], or [size / 256] with one number for
            each block of 256.
        rounded: the parameters in the dtype of products, which `round` writes; None if products
            read them themselves.
        orthogonal: Muon's directions [size] of this update, where ranks have only rows of the
            matrices; else None.
        ends: by buffer, the largest number of its first and last block [2] after this update, where
            other ranks have parts of these blocks.
    """

    kind: Kind
    slots: list[Slot]
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
        """Yield each parameter's name and its part of `flat`, in its shape unless `flat` has one
        number per block.
        """
        block, lead = self.param.shape[-1] // flat.shape[-1], flat.ndim - 1
        for name, parameter, offset in self.slots:
            size = math.prod(parameter.shape[lead:])
            part = flat[..., offset // block : -(-(offset + size) // block)]
            yield name, part.view(parameter.shape) if block == 1 else part

    def hold(self, flat: Tensor) -> None:
        """Make the parameters views of `flat`; they have no gradient until the next `link`."""
        # By `.data` the parameter stays the same object, so that ties, hooks and other holders see
        # the new memory.
        for (_, parameter, _), (_, view) in zip(self.slots, self.views(flat), strict=True):
            parameter.grad = None
            parameter.data = view
            if flat.dtype != self.grad.dtype:
                parameter.grad_dtype = self.grad.dtype

    def link(self) -> None:
        """Point every parameter's `.grad` at the plane, even if it was set to something else."""
        if self._linked is None or self._linked[0] is not self.grad:
            # For autograd these are no views, or Dynamo would trace their base with symbols.
            self._linked = self.grad, [view.data for _, view in self.views(self.grad)]
        for slot, view in zip(self.slots, self._linked[1], strict=True):
            if slot.parameter.grad is not view:
                slot.parameter.grad = view

    def fuse(self) -> None:
        """Let products add the gradients of matrices; see `monograph.ops.fused_gradients`."""
        if self.kind.vector or self.grad.dtype == torch.float64:
            return
        weights = self.views(self.param if self.rounded is None else self.rounded)
        for (_, parameter, _), (_, weight), (_, total) in zip(
            self.slots, weights, self.views(self.grad), strict=True
        ):
            parameter.fused = Fused(weight.data, total.data)  # type: ignore[attr-defined]

    def round(self) -> None:
        """Bring `rounded` up to date."""
        if self.rounded is not None:
            self.rounded.copy_(self.param)


@contextmanager
def holding(planes: Sequence[Plane], params: Sequence[Tensor]) -> Iterator[None]:
    """Let the planes hold these numbers in the block, a tensor for each plane, in place of their
    own.
    """
    own = [plane.param.clone() for plane in planes]
    try:
        for plane, param in zip(planes, params, strict=True):
            plane.param.copy_(param)
        yield
    finally:
        for plane, param in zip(planes, own, strict=True):
            plane.param.copy_(param)


@contextmanager
def unlinked(planes: Iterable[Plane]) -> Iterator[None]:
    """In the block no parameter has a gradient of another dtype, as torch cannot trace a graph with
    such parameters.
    """
    # Only bf16 weights with fp32 gradients are unlinked, as removing gradients and setting them
    # again takes time. Where weights are on the host and gradients are not, as in streaming,
    # parameters never have a gradient.
    there = [plane for plane in planes if plane.grad.device == plane.param.device]
    narrow = [plane for plane in there if plane.param.dtype != plane.grad.dtype]
    for slot in (slot for plane in narrow for slot in plane.slots):
        slot.parameter.grad = None
    try:
        yield
    finally:
        for plane in narrow:
            plane.link()


@contextmanager
def vectors_at_once(planes: Iterable[Plane]) -> Iterator[None]:
    """Add the gradients of vectors that the block computes in one kernel, at its end, instead of in
    one for each.
    """
    parameters = [slot.parameter for plane in planes if plane.kind.vector for slot in plane.slots]
    totals = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
        if found := [
            (total, p.grad)
            for total, p in zip(totals, parameters, strict=True)
            if p.grad is not None
        ]:
            torch._foreach_add_(*map(list, zip(*found, strict=True)))
    finally:
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total


def require_movable(module: nn.Module) -> None:
    """Require that a module's parameters can be moved without a change to its results and its state
    dict.

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
    if pair := overlapping_tensors(module):
        raise UsageError(
            f"{pair[0]} and {pair[1]} lie in the same memory, and would come apart when parameters move: register one "
            "Parameter under both names, or compute one from the other where it is read"
        )
    loadable_state(module)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name; tied ones once, under their first name.

    Raises:
        UsageError: there is none, they have different dtypes or devices, or `require_movable`
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
    kinds: Mapping[str, Kind],
    state: str = "fp32",
    lead: int = 0,
    master_weights: bool = True,
    parts: Mapping[str, Any] | None = None,
) -> list[Plane]:
    """Move parameters into planes, one for each kind.

    Values, names, dtypes and devices stay; tied parameters stay tied. Afterwards the parameters are
    views, so load weights and move the module to its device before.

    Args:
        parameters: the parameters by name.
        kinds: each one's kind, by the same names.
        state: the optimizer's `state`; parameters begin at blocks of its format, with zeros between
            them.
        lead: 1 for stacked parameters [N, ...], for which planes are stacked as well; else 0.
        master_weights: whether parameters keep their dtype; if not, they are rounded to bf16, and
            only their gradients keep it.
        parts: for each parameter, by name, any value that stands for its part of the module;
            consecutive parameters of one part make one of the plane's `parts`. None: the module is
            one part.
    """
    # Parameters of a kind are in the module's order, which is the same in checkpoints of other
    # ranks or engines.
    members: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        members.setdefault(kinds[name], []).append((name, parameter))
    made = [
        _plane(number, kind, own, state, lead, master_weights)
        for number, (kind, own) in enumerate(members.items())
    ]
    for plane in made:
        ends = [*(slot.offset for slot in plane.slots[1:]), plane.param.shape[-1]]
        slots_and_ends = zip(plane.slots, ends, strict=True)
        of_part = itertools.groupby(
            slots_and_ends, lambda slot_and_end: (parts or {}).get(slot_and_end[0].name)
        )
        reached = [0, *(list(group)[-1][1] for _, group in of_part)]
        plane.parts = tuple(end - begin for begin, end in itertools.pairwise(reached))
    return made


def _plane(
    number: int,
    kind: Kind,
    members: list[tuple[str, nn.Parameter]],
    state: str,
    lead: int,
    master_weights: bool,
) -> Plane:
    block = FORMATS[state].block
    sizes = [math.prod(p.shape[lead:]) for _, p in members]
    offsets = [0, *itertools.accumulate(-(-size // block) * block for size in sizes)]
    first = members[0][1]
    whole = (*first.shape[:lead], offsets[-1])
    dtype = kept_dtype(first)
    # If parameters begin at blocks, the gaps between them are zeros, as they are quantised together
    # with parameters.
    made = torch.empty if block == 1 else torch.zeros
    param = made(whole, dtype=dtype if master_weights else torch.bfloat16, device=first.device)
    slots = [Slot(n, p, o) for (n, p), o in zip(members, offsets, strict=False)]
    for (_, parameter, offset), size in zip(slots, sizes, strict=True):
        # The old memory is freed one by one, and gradients are made last, so that no second copy of
        # all weights exists.
        part = param[..., offset : offset + size].view(parameter.shape)
        part.copy_(parameter.detach())
        parameter.grad = None
        keep(parameter, part)
    plane = Plane(kind, slots, param, torch.zeros(whole, dtype=dtype, device=first.device), number)
    plane.hold(param)
    plane.link()
    return plane
