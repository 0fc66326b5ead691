"""Shard a model by FSDP2: a rank holds some rows of each parameter, gradient and moment, and
gathers block by block.

Shapes: a parameter [n, ...] has rows 0 .. n - 1; each of W ranks has ceil(n / W), in order, the
last ones fewer or none.
"""

import copy
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from monograph import compat
from monograph.device import default_device, describe
from monograph.distributed.by_rank import ByRank
from monograph.distributed.matrices import orthogonalised
from monograph.distributed.rows import among, of_rows, rows_of, whole_rows
from monograph.distributed.shared_blocks import Cut, Ends, agree, ends
from monograph.distributed.world import World
from monograph.errors import UsageError
from monograph.graph.compilable import Compilable, Scope
from monograph.graph.inspect import blocks
from monograph.graph.lora import kept_state, narrow
from monograph.graph.mmap_weights import kept_dtype, materialize_
from monograph.loss import check_result
from monograph.optim import Hyperparameters, ParameterKind, Plane, trainable
from monograph.optim.formats import FORMATS
from monograph.optim.planes import PlacedParameter
from monograph.optim.state_format import StateFormat
from monograph.step import Step
from monograph.step.parameters import Sums

# Share of the device's free memory that a whole copy of the model may take in addition to the
# shards.
ROOM = 0.5


class Shards(ByRank):
    """The parameters of which each rank has some rows; an elementwise update needs no others.

    Attributes:
        root: the forward pass and loss as one module, whose parameters FSDP2 gathers and whose
            gradients it scatters.
        names: the names of the model's tensors, as in one process.
        sharing: the ranks that share out the rows.
    """

    differentiable = False  # FSDP2 would wait for a backward pass

    root: nn.Module
    names: list[str]

    def __init__(self, world: World, halved: bool = False, by_machine: bool = False):
        """Store the ranks; nothing is sharded until a step asks for its planes.

        Args:
            world: the ranks.
            halved: whether the weights of blocks are rounded to bf16 before they are gathered.
                Products read the bits that autocast would give them. Norms have rounded weights and
                gradients. Sums over ranks are in fp32.
            by_machine: whether the ranks of each machine share out the rows among them (HSDP):
                blocks are gathered within a machine, and only gradients are summed between
                machines, each of which has all rows.
        """
        if world.size % world.machine_size and by_machine:
            raise UsageError(
                f"hsdp: {world.size} ranks, {world.machine_size} of them here: let each machine have as many"
            )
        super().__init__(world)
        self.halved = halved
        self.by_machine = by_machine
        self.sharing = world
        self._copy: nn.Module | None = None  # see `gathered`
        # torch 2.13 compiles the padding of cut blocks to code that reads beyond their end
        # (dev/log.md).
        self.update_uncut = Compilable(self._update_uncut)

    def place(self, step: Step) -> list[Plane]:
        """Shard the model block by block and return planes of this rank's rows."""
        self.step = step
        require_rows(step, self.halved)
        kinds = step.optim.kinds(step.model)
        model = step.model
        self.names = list(kept_state(model))
        self._empty = hollow(model)
        mesh = init_device_mesh(default_device().type, (self.world.size,))
        if self.by_machine:
            shape = (self.world.size // self.world.machine_size, self.world.machine_size)
            mesh = init_device_mesh(
                default_device().type, shape, mesh_dim_names=("machine", "rank")
            )
            self.sharing = self.world.within(mesh.get_group("rank"))
        # Of a quantised base.
        single = {parameter for parameter in model.parameters() if not parameter.ndim}
        for parameter in single:
            parameter.data = parameter.data.to(default_device())
        policy = MixedPrecisionPolicy()
        if self.halved:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        # Mapped weights are read from their file one block at a time, and a rank keeps only its
        # rows.
        with compat.integer_parameters():
            for block in blocks(model).values():
                fully_shard(materialize_(block), mesh=mesh, ignored_params=single, mp_policy=policy)
            self.root = _Summed(step)
            fully_shard(self.root, mesh=mesh, ignored_params=single)  # in place
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
        form = FORMATS[step.optim.state]
        return [step.prepare_plane(plane) for plane in rows_planes(model, kinds, form)]

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the functions of the step; between blocks, those of one plane."""
        return (
            super().captured(scope) if scope == "whole" else [self.step.squares, self.update_uncut]
        )

    def forward(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `Step.forward` returns."""
        return self.step.forward(batch, self.step.loss_factor)

    def without_gradient(self) -> None:
        """Refuse the loss, as every rank has to pass backward through every block."""
        raise UsageError(
            "a micro-batch's loss does not depend on the parameters, and fsdp needs a backward pass through all of "
            "them: have the loss call the model for rows without targets too, or take train.parallel = ddp"
        )

    def sums(self, batch: Any) -> Sums:
        """Return the batch's sums, by the module that gathers the parameters."""
        loss_sum, count = self.root(batch)
        return loss_sum, count

    def update_plane(self, plane: Plane, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Update a plane by its summed gradient, by the captured function unless its blocks are
        cut.
        """
        if plane.edge_maxima:
            self.step.update_plane(plane, total, scale, accepted)
        else:
            self.update_uncut(plane, total, scale, accepted)

    def _update_uncut(self, plane: Plane, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        self.step.update_plane(plane, total, scale, accepted)

    def add_squares(self, squares: Sequence[Tensor]) -> Tensor:
        """Add up the squares of all parts of all ranks."""
        # A rank may have no rows at all.
        zero = torch.zeros((), dtype=torch.float64, device=default_device())
        return self.sharing.sum(functools.reduce(torch.add, squares, zero))

    @contextmanager
    def directed(self, grads: Sequence[Tensor], scale: Tensor) -> Iterator[None]:
        """Let planes hold in the block what takes other ranks' rows: orthogonal directions, and the
        largest numbers of blocks that are cut.
        """
        step = self.step
        form = FORMATS[step.optim.state]
        of_kind: dict[ParameterKind, list[tuple[Plane, Tensor]]] = {}
        for plane, total in zip(step.planes, grads, strict=True):
            if plane.kind.matrix_shape is not None:
                of_kind.setdefault(plane.kind, []).append((plane, total))
        first = 0
        for kind, members in of_kind.items():
            assert kind.matrix_shape is not None and kind.rule.orthogonalise is not None
            orthogonalise = kind.rule.orthogonalise
            hyper = self._hyperparameters(kind, members[0][1])
            directions = [
                _direction(plane, total * scale.to(total.dtype), form, hyper)
                for plane, total in members
            ]
            compute = hyper.compute
            if len(kind.matrix_shape) == 2:
                found = orthogonalised(
                    self.sharing, directions, kind.matrix_shape[0], first, compute, orthogonalise
                )
                first += len(members)
            else:  # a rank has whole matrices of a stack
                found = [orthogonalise(each, compute) if len(each) else each for each in directions]
            for (plane, _), each in zip(members, found, strict=True):
                plane.orthogonal = each.flatten()
        planes = zip(cast(list[RowsPlane], step.planes), grads, strict=True)
        cut = [Cut(plane, total, plane.cut) for plane, total in planes if plane.cut]
        agree(self.sharing, cut, scale, form, self._hyperparameters)
        yield
        for plane in step.planes:
            plane.orthogonal = None

    def _hyperparameters(self, kind: ParameterKind, total: Tensor) -> Hyperparameters:
        """Return the numbers of the update that was decided, as if it were made, for a kind's summed
        gradient.
        """
        step = self.step
        return kind.hyperparameters(
            lr=step.lr,
            applied=step.applied,
            accepted=torch.ones_like(step.applied, dtype=torch.bool),
            compute=step.precision.products(total.dtype),
        )

    def score(self, batches: Iterable[Any]) -> list[Sums]:
        """Return the sums of each micro-batch, without gradients."""
        try:
            return super().score(batches)
        finally:
            # Without a backward pass the root's parameters would stay gathered.
            cast(FSDPModule, self.root).reshard()

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors by the names that they have in one process; parameters are
        sharded.
        """
        state = self.step.model.state_dict()
        return {name: state[name] for name in self.names}

    def whole(self) -> nn.Module:
        """Return a module of the same shapes, without values."""
        return self._empty

    @contextmanager
    def assembled(self) -> Iterator[nn.Module]:
        """Yield a copy of the model, with all weights on rank 0 and without values on the others; a
        collective.

        The copy is on the host if the device has no room for it.
        """
        step = self.step
        whole = copy.deepcopy(self._empty)
        own = step.model.state_dict()
        needed = sum(parameter.nbytes for parameter in whole.parameters())
        device = (
            step.device
            if needed < ROOM * describe(step.device).free_memory_bytes
            else torch.device("cpu")
        )
        for name, empty in list(whole.named_parameters()):
            full = whole_rows(own[name])
            if self.world.leads:
                _replace(whole, empty, nn.Parameter(full.to(device), empty.requires_grad))
        if self.world.leads:
            whole.to(device)
            for name, buffer in step.model.named_buffers():
                whole.get_buffer(name).copy_(buffer)
        yield whole

    def gathered(self) -> nn.Module:
        """Return the model with the weights of this moment, whole on each rank, for evaluation; a
        collective.

        It is one copy, filled anew in the same memory each time, so graphs that read it stay right.
        Weights that products alone read are rounded to the dtype of products before they are
        gathered, to autocast's bits; so are all weights of blocks where they are `halved`, as in
        training. Frozen weights are gathered the first time only.
        """
        step = self.step
        own = step.model.state_dict()
        whole = self._copy
        if whole is None:
            whole = copy.deepcopy(self._empty)
            for block in blocks(whole).values():
                narrow(block, step.precision.products(torch.float32))
                for parameter in block.parameters() if self.halved else ():
                    parameter.data = parameter.data.bfloat16()
            for empty in list(whole.parameters()):
                _replace(
                    whole,
                    empty,
                    nn.Parameter(torch.empty_like(empty, device=step.device), empty.requires_grad),
                )
            whole.to(step.device).eval()
            for name, buffer in step.model.named_buffers():
                whole.get_buffer(name).copy_(buffer)
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad or self._copy is None:
                parameter.data.copy_(whole_rows(own[name].to(parameter.dtype)))
        self._copy = whole
        return whole


def _direction(plane: Plane, grad: Tensor, form: StateFormat, hyper: Hyperparameters) -> Tensor:
    """Return this rank's rows of the matrices that the rule orthogonalises."""
    local = cast(DTensor, plane.slots[0].parameter)
    rule = plane.kind.rule
    assert rule.direction is not None
    moments = [form.read(plane.state, moment, grad, plane.block_offset) for moment in rule.moments]
    return rule.direction(grad, moments, hyper).view(local.to_local().shape)


def require_rows(step: Step, halved: bool = False) -> None:
    """Refuse a step that cannot be trained by rows.

    Raises:
        UsageError: FSDP2 would sum gradients in bf16, a trained parameter has no rows, or weights
            are `halved` for other products than those in bf16.
    """
    if not step.optim.master_weights:
        raise UsageError(
            "master_weights = False: gradients would be summed in the weights' dtype: leave it out"
        )
    if halved and step.precision.name != "bf16":
        raise UsageError(f"halved is for precision bf16, not {step.precision.name}: leave it out")
    if scalars := [name for name, parameter in trainable(step.model).items() if not parameter.ndim]:
        raise UsageError(
            f"{scalars[0]} has no rows that fsdp could share out: take train.parallel = ddp"
        )


def require_whole_elements(name: str, bounds: Sequence[tuple[int, int]], form: StateFormat) -> None:
    """Refuse rows of a parameter that begin inside of an element of the optimizer's state.

    Args:
        name: the parameter's name.
        bounds: the first number of each rank, and the one after its last.
        form: the form of the optimizer's state.

    Raises:
        UsageError: a rank's rows begin between two numbers that are packed in one element.
    """
    if any(begin % form.rows_multiple for begin, end in bounds if end > begin):
        raise UsageError(
            f"{name}: the optimizer's state packs {form.rows_multiple} numbers in one, and a rank's rows would "
            "begin between them: take another optim.state, or train.parallel = ddp"
        )


class _Summed(nn.Module):
    """A model and its loss as one module."""

    def __init__(self, step: Step):
        super().__init__()
        self.model = materialize_(step.model)
        self.__dict__["step"] = step

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        step: Step = self.__dict__["step"]
        # Capture replaces `step.loss`, so it is looked up here.
        return check_result(step.loss(self.model, batch))


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter of a module in every place that shares it (tied weights)."""
    for owner in module.modules():
        for name, held in owner._parameters.items():
            if held is old:
                owner._parameters[name] = new


def hollow(model: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters have shapes but no values."""
    empty: dict[int, Any] = {}
    for weight in model.parameters():
        numbers = torch.empty(weight.shape, dtype=kept_dtype(weight), device="meta")
        empty[id(weight)] = nn.Parameter(numbers, weight.requires_grad)
    return copy.deepcopy(model, empty)


@dataclass
class RowsPlane(Plane):
    """A plane of this rank's rows of one parameter. It holds one parameter because FSDP2 owns the
    weights' memory.

    Attributes:
        begin: the index of its first element in the parameter.
        cut: the blocks at the ends of each rank's rows, if some of these blocks are not whole.
        numbers_per_element: for the name of each of the moments' buffers how many of the
            parameter's numbers share one element.
    """

    begin: int = field(kw_only=True)
    cut: Ends | None = field(kw_only=True)
    numbers_per_element: Mapping[str, int] = field(kw_only=True)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield views as `Plane.views` does, as DTensors in the parameter's shape."""
        [(name, parameter, _)] = self.slots
        local = cast(DTensor, parameter)
        names = [key for key, buffer in self.state.items() if buffer is flat]
        shared = self.numbers_per_element.get(names[0], 1) if names else 1
        if shared > 1:
            whole = torch.empty(-(-parameter.numel() // shared), device="meta")
            first = self.begin // shared
            yield name, of_rows(flat, local.device_mesh, whole, slice(first, first + len(flat)))
        else:
            yield name, of_rows(flat.view(local.to_local().shape), local.device_mesh, parameter)


def rows_planes(
    model: nn.Module, kinds: Mapping[str, ParameterKind], form: StateFormat
) -> list[RowsPlane]:
    """Make a plane for each trainable parameter of a sharded module.

    Its `number` and `start` say which plane of a single process holds these elements, and where
    they begin in it.

    Raises:
        UsageError: a rank's rows begin between two numbers that the form of the optimizer's state
            packs in one element.
    """
    block = form.block
    numbers: dict[ParameterKind, int] = {}
    reached = Counter[ParameterKind]()  # elements so far of each kind
    made = []
    for name, parameter in trainable(model).items():
        sharded = parameter
        kind = kinds[name]
        assert isinstance(sharded, DTensor)
        rank, size = among(sharded.device_mesh)
        width = math.prod(parameter.shape[1:])
        places = [rows_of(r, size, len(parameter)) for r in range(size)]
        bounds = [(place.start * width, place.stop * width) for place in places]
        local = sharded.to_local().detach().view(-1)
        begin = bounds[rank][0]
        require_whole_elements(name, bounds, form)
        start = torch.tensor(reached[kind] + begin, device=local.device)
        reached[kind] += parameter.numel()
        number = numbers.setdefault(kind, len(numbers))
        plane = RowsPlane(
            kind,
            [PlacedParameter(name, parameter, 0)],
            local,
            torch.zeros_like(local),
            number,
            (local.numel(),),
            start,
            block_offset=begin % block if local.numel() else 0,
            begin=begin,
            cut=ends(bounds, rank, block) if any(end % block for _, end in bounds) else None,
            numbers_per_element=form.numbers_per_element(kind.rule.moments),
        )
        made.append(plane)
    return made
