"""Keep the parameters of a module in planes, a few flat buffers.

A plane has one contiguous buffer with all parameters that are updated in the same way, and one with
their gradients. The module's parameters and their `.grad` are views of these buffers. So an update
consists of a few large operations, however many parameters there are. On a CPU, compiling AdamW took
48 s for 110 separate tensors, and 3.6 s for two flat buffers.

An optimizer may keep its moments in blocks of consecutive elements that share a scale
(`monograph.optim.state_format`). Then each parameter begins at the beginning of a block, and the rest
of its last block is a gap of zeros before the next parameter.

Shapes: N modules of an ensemble (models that are trained together as one graph), size elements of a
plane.
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
from monograph.ops.fused_gradients import FusedGradient
from monograph.optim.formats import FORMATS
from monograph.optim.optimizer import ParameterKind


class PlacedParameter(NamedTuple):
    """The place of one parameter in its plane.

    Attributes:
        name: the parameter's name in the module.
        parameter: the parameter.
        offset: the index of its first element in the plane.
    """

    name: str
    parameter: nn.Parameter
    offset: int


@dataclass
class Plane:
    """The parameters of one kind as flat buffers of `size` elements.

    If the parameters are those of an ensemble of N modules, every shape below has a leading N.

    A `Plane` may also be a piece of one of the module's planes. This is so if ranks (the processes of
    distributed training) share out the rows of parameters, or if a plane is streamed from the host in
    stages and chunks. `number` then says to which plane of the module the piece belongs, and `start`
    says where it begins.

    Attributes:
        kind: how the parameters are updated.
        placed: the parameters and their places in the plane, in the module's order.
        param: [size] in the parameters' dtype. The module's parameters are views of it.
        grad: [size] in the parameters' original dtype, even if they are now kept in bf16. The
            parameters' `.grad` are views of it.
        number: the plane's number among the module's planes.
        section_sizes: the number of elements of each section, in the order of `placed`. A section has
            the parameters of one layer; see `planes`.
        start: the index of this piece's first element in the module's plane; 0 if this is the whole
            plane.
        block_offset: a piece may begin inside a block, which is consecutive elements with one scale.
            This is then the number of the block's elements before the piece, which other ranks have;
            else 0.
        state: the optimizer's buffers by name. Each is [size], or smaller if several elements share
            one number, such as the scale of their block. If `kind.block_format` is not None, one of them
            has the weights before they were rounded to `param`.
        rounded: the parameters in the dtype of matrix products, which `round` writes; None: products
            read the parameters themselves.
        orthogonal: [size], the orthogonalised directions of Muon's update if ranks have only rows of
            the matrices; else None.
        adds_by_products: whether matrix products add to `grad` themselves, see `fuse_gradients`.
        edge_maxima: {name of a moment: [largest magnitude in the first block, in the last block]}, after
            this update. Ranks may share these two blocks, and a rank needs the maximum over all elements
            of a block, because a block is quantised with one scale. {} if ranks share no block.
    """

    kind: ParameterKind
    placed: list[PlacedParameter]
    param: Tensor
    grad: Tensor
    number: int
    section_sizes: tuple[int, ...] = ()
    start: int | Tensor = 0
    block_offset: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    rounded: Tensor | None = None
    orthogonal: Tensor | None = None
    adds_by_products: bool = False
    edge_maxima: dict[str, Tensor] = field(default_factory=dict)
    # The `grad` of the last `link`, and the views of it that `link` made.
    _linked: tuple[Tensor, list[Tensor]] | None = field(default=None, init=False)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its view of a buffer of the plane.

        The view has the parameter's shape. If several elements share one number of the buffer, as in
        a buffer of scales, the view is flat.
        """
        block = self.param.shape[-1] // flat.shape[-1]  # elements that share one number
        leading_axes = flat.ndim - 1
        for name, parameter, offset in self.placed:
            end = offset + math.prod(parameter.shape[leading_axes:])
            end_block = -(-end // block)  # rounded up
            view = flat[..., offset // block : end_block]
            yield name, view.view(parameter.shape) if block == 1 else view

    def rebind_parameters(self, flat: Tensor) -> None:
        """Make the parameters views of `flat`. They have no gradient until the next `link`."""
        # `.data` is set, so that each parameter stays the same object, and modules that share it and
        # hooks see the new memory.
        for placed, (_, view) in zip(self.placed, self.views(flat), strict=True):
            placed.parameter.grad = None
            placed.parameter.data = view
            if flat.dtype != self.grad.dtype:
                # torch refuses a `.grad` of another dtype unless the parameter's `grad_dtype` allows it.
                placed.parameter.grad_dtype = self.grad.dtype

    def link(self) -> None:
        """Point every parameter's `.grad` at the plane, even if it was set to something else."""
        if self._linked is None or self._linked[0] is not self.grad:
            # With `.data` autograd sees no view. Otherwise Dynamo would trace the view's base with
            # symbolic shapes.
            self._linked = self.grad, [view.data for _, view in self.views(self.grad)]
        for placed, view in zip(self.placed, self._linked[1], strict=True):
            if placed.parameter.grad is not view:
                placed.parameter.grad = view

    def fuse_gradients(self) -> None:
        """Make matrix products of the backward pass add directly to the gradients in the plane.

        See `monograph.ops.fused_gradients`.
        """
        # Vectors are not factors of matrix products. Gradients in fp64 are added by autograd: the products
        # of fp64 parameters may be computed in bf16, and a GPU cannot add these to a sum in fp64.
        if self.kind.is_vector or self.grad.dtype == torch.float64:
            return
        weights = self.views(self.param if self.rounded is None else self.rounded)
        totals = self.views(self.grad)
        for placed, (_, weight), (_, total) in zip(self.placed, weights, totals, strict=True):
            gradient = FusedGradient(weight.data, total.data)
            placed.parameter.fused_gradient = gradient  # type: ignore[attr-defined]
        self.adds_by_products = True

    def round(self) -> None:
        """Copy `param` to `rounded`, which has a narrower dtype. Without `rounded`, do nothing."""
        if self.rounded is not None:
            self.rounded.copy_(self.param)


@contextmanager
def temporary_params(planes: Sequence[Plane], params: Sequence[Tensor]) -> Iterator[None]:
    """Replace the parameters' values in the `with` block, and restore them after it.

    Args:
        planes: the planes.
        params: the values, one tensor for each plane.
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
    """Remove the parameters' `.grad` in the `with` block, if it has another dtype than the parameter.

    Such parameters are bf16 weights with fp32 gradients. torch cannot trace a graph in which they have
    a `.grad`.
    """
    # The `.grad` of other parameters stays, because removing it and setting it again takes time.
    # Streamed planes have weights on the host and gradients on the device. They are left out, because
    # their parameters never have a `.grad`.
    planes_of_two_dtypes = [
        plane
        for plane in planes
        if plane.grad.device == plane.param.device and plane.param.dtype != plane.grad.dtype
    ]
    of_two_dtypes = [placed.parameter for plane in planes_of_two_dtypes for placed in plane.placed]
    # They are put back one by one, not by `Plane.link`: a caller such as `added_at_once` may have removed
    # some of them before, and these must stay away.
    grads = [parameter.grad for parameter in of_two_dtypes]
    for parameter in of_two_dtypes:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(of_two_dtypes, grads, strict=True):
            parameter.grad = grad


@contextmanager
def added_at_once(planes: Iterable[Plane]) -> Iterator[None]:
    """At the end of the `with` block, add the gradients that autograd has computed, all by one kernel.

    Without this, a backward pass in the block would launch one kernel for each vector. Besides, autograd may
    not add to a total that is still unwritten, and at the end none is (see `monograph.ops.unwritten`).
    """
    parameters = [placed.parameter for plane in planes for placed in plane.placed]
    totals = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
        totals_and_new: list[tuple[Any, Any]] = [
            (total, parameter.grad)
            for total, parameter in zip(totals, parameters, strict=True)
            if parameter.grad is not None
        ]
        if totals_and_new:
            torch._foreach_add_(
                [total for total, _ in totals_and_new], [new for _, new in totals_and_new]
            )
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
        # In fp16 an optimizer's eps and the squares of gradients round to 0, and the first update would
        # be NaN. A weight in a mapped file may have another dtype until it is read, so `kept_dtype`
        # returns the one that it will have in memory.
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
    # Called only because it refuses state dicts that cannot be saved and loaded.
    loadable_state(module)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name.

    A tied parameter, which the module has under several names, is returned under the first of them.

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
    layers: Mapping[str, Any] | None = None,
) -> list[Plane]:
    """Move parameters into planes, one for each kind.

    Values, names and devices do not change, and tied parameters stay tied. Afterwards the parameters
    are views, so weights must be loaded, and the module moved to its device, before.

    Args:
        parameters: the parameters by name.
        kinds: the parameters' kinds, by the same names.
        state: the optimizer's `state`. Each parameter begins at a block of its format.
        lead: the number of axes that stand before those of the module's parameters: 1 for the
            parameters [N, ...] of an ensemble, whose planes are [N, size]; else 0.
        master_weights: whether parameters keep their dtype. If not, they are rounded to bf16, and
            only their gradients keep the dtype.
        layers: for each parameter, by name, any value that stands for its layer, such as the layer's
            index. Consecutive parameters with the same value are a section of the plane; see
            `Plane.section_sizes`. None: each plane is one section.
    """
    # Parameters of a kind are in the module's order, so that all ranks and engines have the same
    # planes.
    named_by_kind: dict[ParameterKind, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        named_by_kind.setdefault(kinds[name], []).append((name, parameter))
    new_planes = [
        _plane(number, kind, named_parameters, state, lead, master_weights)
        for number, (kind, named_parameters) in enumerate(named_by_kind.items())
    ]
    for plane in new_planes:
        plane.section_sizes = _section_sizes(plane, layers or {})
    return new_planes


def _section_sizes(plane: Plane, layers: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of elements of each section of a plane.

    The gap after a parameter belongs to the parameter's section.

    Args:
        plane: the plane.
        layers: see `planes`.
    """
    # A section ends where the next one begins, or at the plane's end.
    bounds = [0]
    for placed, following in itertools.pairwise(plane.placed):
        if layers.get(placed.name) != layers.get(following.name):
            bounds.append(following.offset)
    bounds.append(plane.param.shape[-1])
    return tuple(end - begin for begin, end in itertools.pairwise(bounds))


def _plane(
    number: int,
    kind: ParameterKind,
    named_parameters: list[tuple[str, nn.Parameter]],
    state: str,
    lead: int,
    master_weights: bool,
) -> Plane:
    """Move parameters of one kind into a new plane.

    Args:
        number: the plane's number.
        kind: the kind.
        named_parameters: the names and the parameters.
        state: see `planes`.
        lead: see `planes`.
        master_weights: see `planes`.
    """
    block = FORMATS[state].block
    sizes = [math.prod(p.shape[lead:]) for _, p in named_parameters]
    padded_sizes = [-(-size // block) * block for size in sizes]  # rounded up to blocks
    offsets = [0, *itertools.accumulate(padded_sizes)]  # the last one is the plane's size
    _, first = named_parameters[0]
    plane_shape = (*first.shape[:lead], offsets[-1])
    grad_dtype = kept_dtype(first)
    param_dtype = grad_dtype if master_weights else torch.bfloat16
    param = torch.empty(plane_shape, dtype=param_dtype, device=first.device)
    placed = [
        PlacedParameter(name, parameter, offset)
        for (name, parameter), offset in zip(named_parameters, offsets, strict=False)
    ]
    # To save memory, each parameter's old memory is freed as soon as it is copied, and gradients are
    # allocated last. On a CPU, `torch.empty` takes no memory until it is written to, so at most one
    # parameter is in memory twice. On a GPU it takes all memory immediately, so all parameters of this kind
    # are in memory twice.
    for (_, parameter, offset), size, padded_size in zip(placed, sizes, padded_sizes, strict=True):
        values = param[..., offset : offset + size].view(parameter.shape)
        values.copy_(parameter.detach())
        if padded_size > size:
            # The gap must be zeros, because it is quantised together with the parameter's last elements.
            param[..., offset + size : offset + padded_size].zero_()
        parameter.grad = None
        # `rebind_parameters` below points the parameters at the same memory again, and sets the dtype of
        # their gradients. `replace_data` is called before, because only it turns a parameter that is
        # still in a mapped file into an ordinary one.
        replace_data(parameter, values)
    grad = torch.zeros(plane_shape, dtype=grad_dtype, device=first.device)
    plane = Plane(kind, placed, param, grad, number)
    plane.rebind_parameters(param)
    plane.link()
    return plane
