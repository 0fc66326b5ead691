"""Shard a model by FSDP2: each rank has some rows of each parameter, gradient and moment.

FSDP2 gathers the parameters of one block of the model after another for the forward and the backward
pass. `monograph.distributed.rows` says which rows a rank has. The optimizer updates planes, which are flat
tensors of parameters with their gradients and moments. Here a plane has this rank's rows of one parameter.

The updates of most optimizers need no other rank's rows. There are two exceptions. Muon
orthogonalises whole matrices (`monograph.distributed.matrices`). And a format of the optimizer's
state may pack moments in blocks of consecutive numbers. A block that begins in one rank's rows and
ends in another's is called a cut block (`monograph.distributed.shared_blocks`).
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
from monograph.distributed.matrices import orthogonalise_rows
from monograph.distributed.rows import gather_rows, rank_and_size, rank_rows, shard_from_rows
from monograph.distributed.shared_blocks import (
    CutPlane,
    EndBlocks,
    find_end_blocks,
    share_largest_numbers,
)
from monograph.distributed.world import World
from monograph.errors import UsageError
from monograph.graph.compilable import Compilable, Scope
from monograph.graph.inspect import blocks
from monograph.graph.lora import checkpoint_state
from monograph.graph.mmap_weights import kept_dtype, materialize_
from monograph.graph.rounded_base import round_frozen_weights
from monograph.loss import check_result
from monograph.optim import Hyperparameters, ParameterKind, Plane, trainable
from monograph.optim.formats import FORMATS
from monograph.optim.planes import PlacedParameter
from monograph.optim.state_format import StateFormat
from monograph.step import Step
from monograph.step.parameters import Sums

# An unsharded copy of the model may take at most this share of the device's free memory.
MAX_COPY_SHARE = 0.5


class Shards(ByRank):
    """Parameters of which each rank has some rows.

    Attributes:
        root: the forward pass and loss as one module, whose parameters FSDP2 gathers and whose
            gradients it scatters.
        names: the names of the model's tensors, as in one process.
        row_ranks: the ranks that share out the rows: those of this machine if `by_machine`,
            otherwise all.
    """

    # `sums` cannot be differentiated outside of `accumulate`: after a call of `root`, FSDP2 waits for the
    # backward pass.
    differentiable = False

    root: nn.Module
    names: list[str]

    def __init__(self, world: World, gathers_bf16: bool = False, by_machine: bool = False):
        """Store the ranks; nothing is sharded until a step asks for its planes.

        Args:
            world: the ranks.
            gathers_bf16: whether the weights of the model's blocks are rounded to bf16 before they
                are gathered. Matrix products read the same bits as with autocast. The weights of
                norms and their gradients are rounded, too, unlike with autocast. Sums over ranks
                are in fp32.
            by_machine: whether the ranks of each machine share out all rows among themselves
                (HSDP). Blocks are then gathered within a machine, and only gradients are summed
                over machines.
        """
        if world.size % world.machine_size and by_machine:
            raise UsageError(
                f"hsdp: {world.size} ranks, {world.machine_size} of them here: let each machine have as many"
            )
        super().__init__(world)
        self.gathers_bf16 = gathers_bf16
        self.by_machine = by_machine
        self.row_ranks = world
        self._copy: nn.Module | None = None  # see `gathered`
        # The compiled update is only called for planes without cut blocks, because torch 2.13 compiles
        # the padding of cut blocks to code that reads beyond their end (dev/log.md).
        self.captured_update = Compilable(self._update_plane_eagerly)

    def place(self, step: Step) -> list[Plane]:
        """Shard the model block by block, and return planes of this rank's rows."""
        self.step = step
        require_shardable(step, self.gathers_bf16)
        kinds = step.optim.kinds(step.model)
        model = step.model
        self.names = list(checkpoint_state(model))
        self._without_values = without_values(model)
        device = default_device()
        mesh = init_device_mesh(device.type, (self.world.size,))
        if self.by_machine:
            machines = self.world.size // self.world.machine_size
            mesh = init_device_mesh(
                device.type,
                (machines, self.world.machine_size),
                mesh_dim_names=("machine", "rank"),
            )
            self.row_ranks = self.world.subgroup(mesh.get_group("rank"))
        # A quantised model has parameters without dimensions, which have no rows. Each rank has all of
        # them.
        scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
        for parameter in scalars:
            parameter.data = parameter.data.to(device)
        policy = MixedPrecisionPolicy()
        if self.gathers_bf16:
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        # Weights that are still in their file are read one block at a time, and a rank keeps only
        # its rows.
        with compat.integer_parameters():
            for block in blocks(model).values():
                fully_shard(
                    materialize_(block), mesh=mesh, ignored_params=scalars, mp_policy=policy
                )
            self.root = _ModelWithLoss(step)
            fully_shard(self.root, mesh=mesh, ignored_params=scalars)  # in place
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # gradients are summed, not averaged
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
        form = FORMATS[step.optim.state]
        return [step.prepare_plane(plane) for plane in make_rows_planes(model, kinds, form)]

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the functions that a capture compiles.

        In scope "blocks", the update is compiled plane by plane.
        """
        if scope == "whole":
            return super().captured(scope)
        return [self.step.squares, self.captured_update]

    def forward(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `Step.forward`."""
        return self.step.forward(batch, self.step.loss_factor)

    def handle_missing_gradient(self) -> None:
        """Refuse the loss, since every rank has to take part in the backward pass of every block."""
        raise UsageError(
            "a micro-batch's loss does not depend on the parameters, and fsdp needs a backward pass through all of "
            "them: have the loss call the model for rows without targets too, or take train.parallel = ddp"
        )

    def sums(self, batch: Any) -> Sums:
        """Return the batch's summed loss and number of targets.

        They are computed by `root`, since only its calls gather the parameters.
        """
        loss_sum, count = self.root(batch)
        return loss_sum, count

    def update_plane(self, plane: Plane, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Update a plane by its summed gradient, by the compiled function if it has no cut blocks."""
        has_cut_blocks = bool(plane.edge_maxima)  # see `with_directions`
        if has_cut_blocks:
            self.step.update_plane(plane, total, scale, accepted)
        else:
            self.captured_update(plane, total, scale, accepted)

    def _update_plane_eagerly(
        self, plane: Plane, total: Tensor, scale: Tensor, accepted: Tensor
    ) -> None:
        self.step.update_plane(plane, total, scale, accepted)

    def add_squares(self, squares: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of all rows; a collective of the ranks that share them out.

        Args:
            squares: the sum of squares of each plane of this rank.
        """
        # The sum begins with zero, because a rank may have no rows at all.
        zero = torch.zeros((), dtype=torch.float64, device=default_device())
        return self.row_ranks.sum(functools.reduce(torch.add, squares, zero))

    @contextmanager
    def with_directions(self, grads: Sequence[Tensor], scale: Tensor) -> Iterator[None]:
        """Give the planes what their updates in the `with` block need of other ranks' rows; a collective.

        These are the orthogonal directions of matrices (`Plane.orthogonal`), and the largest numbers of
        cut blocks (`Plane.edge_maxima`).

        Args:
            grads: the summed gradient of each plane.
            scale: the factor of the summed gradients, such as for clipping.
        """
        step = self.step
        self._orthogonalise(grads, scale)
        planes = zip(cast(list[RowsPlane], step.planes), grads, strict=True)
        cut_planes = [
            CutPlane(plane, total, plane.end_blocks) for plane, total in planes if plane.end_blocks
        ]
        form = FORMATS[step.optim.state]
        share_largest_numbers(self.row_ranks, cut_planes, scale, form, self._hyperparameters)
        yield
        # The orthogonal directions are as large as the parameters, so they are freed.
        for plane in step.planes:
            plane.orthogonal = None

    def _orthogonalise(self, grads: Sequence[Tensor], scale: Tensor) -> None:
        """Set `Plane.orthogonal` of the planes whose rule orthogonalises matrices; a collective."""
        step = self.step
        form = FORMATS[step.optim.state]
        by_kind: dict[ParameterKind, list[tuple[Plane, Tensor]]] = {}
        for plane, total in zip(step.planes, grads, strict=True):
            if plane.kind.matrix_shape is not None:
                by_kind.setdefault(plane.kind, []).append((plane, total))
        # The rank that computes the first matrix of the next kind, so that ranks take turns over all kinds.
        first_owner = 0
        for kind, planes in by_kind.items():
            assert kind.matrix_shape is not None and kind.rule.orthogonalise is not None
            orthogonalise = kind.rule.orthogonalise
            _, first_total = planes[0]
            hyper = self._hyperparameters(kind, first_total)
            directions = [
                _direction(plane, total * scale.to(total.dtype), form, hyper)
                for plane, total in planes
            ]
            if len(kind.matrix_shape) == 2:
                orthogonal = orthogonalise_rows(
                    self.row_ranks,
                    directions,
                    rows=kind.matrix_shape[0],
                    first_owner=first_owner,
                    compute=hyper.compute,
                    orthogonalise=orthogonalise,
                )
                # `orthogonalise_rows` takes it modulo the number of ranks.
                first_owner += len(planes)
            else:
                # The parameter is a stack of matrices, whose rows are whole matrices. A rank may have none.
                orthogonal = [
                    orthogonalise(stack, hyper.compute) if len(stack) else stack
                    for stack in directions
                ]
            for (plane, _), rows in zip(planes, orthogonal, strict=True):
                plane.orthogonal = rows.flatten()

    def _hyperparameters(self, kind: ParameterKind, total: Tensor) -> Hyperparameters:
        """Return the hyperparameters of the current update, as if it were not skipped.

        Args:
            kind: the kind of parameter that is updated.
            total: the summed gradient of one of its planes, of which only the dtype matters.
        """
        step = self.step
        return kind.hyperparameters(
            lr=step.lr,
            applied=step.applied,
            accepted=torch.ones_like(step.applied, dtype=torch.bool),
            compute=step.precision.product_dtype(total.dtype),
        )

    def score(self, batches: Iterable[Any]) -> list[Sums]:
        """Return the sums of each micro-batch, without gradients."""
        try:
            return super().score(batches)
        finally:
            # Without a backward pass the root's parameters would stay gathered.
            cast(FSDPModule, self.root).reshard()

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors by their names in one process; parameters are sharded."""
        state = self.step.model.state_dict()
        return {name: state[name] for name in self.names}

    def unsharded_module(self) -> nn.Module:
        """Return a module with tensors of full shapes, without values."""
        return self._without_values

    @contextmanager
    def assembled(self) -> Iterator[nn.Module]:
        """Yield an unsharded copy of the model, which has values on rank 0 only; a collective.

        The copy is on the host if the device has no room for it.
        """
        step = self.step
        unsharded = copy.deepcopy(self._without_values)
        sharded_tensors = step.model.state_dict()
        needed_bytes = sum(parameter.nbytes for parameter in unsharded.parameters())
        device = step.device
        if needed_bytes >= MAX_COPY_SHARE * describe(device).free_memory_bytes:
            device = torch.device("cpu")
        for name, empty in list(unsharded.named_parameters()):
            # All ranks take part in gathering, but only rank 0 keeps the result.
            values = gather_rows(sharded_tensors[name])
            if self.world.leads:
                _replace(unsharded, empty, nn.Parameter(values.to(device), empty.requires_grad))
        if self.world.leads:
            unsharded.to(device)
            for name, buffer in step.model.named_buffers():
                unsharded.get_buffer(name).copy_(buffer)
        yield unsharded

    def gathered(self) -> nn.Module:
        """Return an unsharded copy of the model on each rank, for evaluation; a collective.

        It has the current weights. Each call fills the same copy in the same memory, so that captured
        graphs can read it. Frozen weights are gathered by the first call only.

        Weights that only matrix products read are rounded to the dtype of products before they are
        gathered, which gives the bits of autocast. With `gathers_bf16` all weights of blocks are
        rounded, as in training.
        """
        sharded_tensors = self.step.model.state_dict()
        is_first_call = self._copy is None
        if self._copy is None:
            self._copy = self._unfilled_copy()
        for name, parameter in self._copy.named_parameters():
            if parameter.requires_grad or is_first_call:
                rounded = sharded_tensors[name].to(parameter.dtype)
                parameter.data.copy_(gather_rows(rounded))
        return self._copy

    def _unfilled_copy(self) -> nn.Module:
        """Return an unsharded copy of the model on the device, for `gathered` to fill."""
        step = self.step
        unsharded = copy.deepcopy(self._without_values)
        # The parameters have no values yet, so this only sets the dtypes to which `gathered` rounds.
        for block in blocks(unsharded).values():
            round_frozen_weights(block, step.precision.product_dtype(torch.float32))
            if self.gathers_bf16:
                for parameter in block.parameters():
                    parameter.data = parameter.data.bfloat16()
        for empty in list(unsharded.parameters()):
            memory = torch.empty_like(empty, device=step.device)
            _replace(unsharded, empty, nn.Parameter(memory, empty.requires_grad))
        unsharded.to(step.device).eval()
        for name, buffer in step.model.named_buffers():
            unsharded.get_buffer(name).copy_(buffer)
        return unsharded


def _direction(plane: Plane, grad: Tensor, form: StateFormat, hyper: Hyperparameters) -> Tensor:
    """Return the direction of a plane's update before it is orthogonalised, as this rank's rows.

    Args:
        plane: the plane, which holds this rank's rows of one parameter.
        grad: its gradient.
        form: the form of the optimizer's state.
        hyper: the hyperparameters of the update.
    """
    parameter = cast(DTensor, plane.placed[0].parameter)
    rule = plane.kind.rule
    assert rule.direction is not None
    moments = [form.read(plane.state, moment, grad, plane.block_offset) for moment in rule.moments]
    return rule.direction(grad, moments, hyper).view(parameter.to_local().shape)


def require_shardable(step: Step, gathers_bf16: bool = False) -> None:
    """Refuse a step whose parameters cannot be sharded by rows.

    Raises:
        UsageError: FSDP2 would sum gradients in bf16, a trained parameter has no rows, or
            `gathers_bf16` is set although products are not in bf16.
    """
    if not step.optim.master_weights:
        raise UsageError(
            "master_weights = False: gradients would be summed in the weights' dtype: leave it out"
        )
    if gathers_bf16 and step.precision.name != "bf16":
        raise UsageError(
            f"gathers_bf16 is for precision bf16, not {step.precision.name}: leave it out"
        )
    scalars = [name for name, parameter in trainable(step.model).items() if not parameter.ndim]
    if scalars:
        raise UsageError(
            f"{scalars[0]} has no rows that fsdp could share out: take train.parallel = ddp"
        )


def require_whole_elements(name: str, bounds: Sequence[tuple[int, int]], form: StateFormat) -> None:
    """Refuse rows of a parameter that begin between two numbers that the optimizer's state packs in one
    element.

    Args:
        name: the parameter's name.
        bounds: for each rank, the index of its first number in the parameter, and the index after its
            last number.
        form: the form of the optimizer's state, of which one element may hold several numbers.

    Raises:
        UsageError: a rank's rows begin between two numbers that are packed in one element.
    """
    if any(begin % form.rows_multiple for begin, end in bounds if end > begin):
        raise UsageError(
            f"{name}: the optimizer's state packs {form.rows_multiple} numbers in one, and a rank's rows would "
            "begin between them: take another optim.state, or train.parallel = ddp"
        )


class _ModelWithLoss(nn.Module):
    """A model and its loss as one module, for FSDP2."""

    def __init__(self, step: Step):
        super().__init__()
        self.model = materialize_(step.model)
        self.step = step

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        # A capture replaces `step.loss`, so it is looked up at each call.
        return check_result(self.step.loss(self.model, batch))


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter of a module in every place that shares it (tied weights)."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is old:
                owner._parameters[name] = new


def without_values(model: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters have shapes but no values."""
    # The memo of `deepcopy`: an object whose id is a key here is not copied, but replaced by the value.
    copies: dict[int, Any] = {}
    for weight in model.parameters():
        # `kept_dtype`: a weight that is still in its file may get another dtype when it is read.
        empty = torch.empty(weight.shape, dtype=kept_dtype(weight), device="meta")
        copies[id(weight)] = nn.Parameter(empty, weight.requires_grad)
    return copy.deepcopy(model, copies)


@dataclass
class RowsPlane(Plane):
    """A plane of this rank's rows of one parameter.

    It cannot hold several parameters, as other planes do, because FSDP2 owns the memory of each weight.

    Attributes:
        begin: the index of its first element in the parameter.
        end_blocks: the blocks of moments at the ends of each rank's rows; None if no block of the
            parameter is cut.
        numbers_per_element: by the name of each buffer of moments, how many of the parameter's
            numbers share one element.
    """

    begin: int = field(kw_only=True)
    end_blocks: EndBlocks | None = field(kw_only=True)
    numbers_per_element: Mapping[str, int] = field(kw_only=True)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameter's name and a buffer of the plane as a DTensor.

        The DTensor has the parameter's shape. But it is flat if each element of the buffer belongs to
        several numbers.
        """
        [(name, sharded, _)] = self.placed  # the only parameter
        parameter = cast(DTensor, sharded)
        mesh = parameter.device_mesh
        # The name of the buffer, if it is one of moments. `flat` may also be the weights or the gradient.
        buffer_names = [key for key, buffer in self.state.items() if buffer is flat]
        per_element = self.numbers_per_element.get(buffer_names[0], 1) if buffer_names else 1
        if per_element == 1:
            yield name, shard_from_rows(flat.view(parameter.to_local().shape), mesh, parameter)
            return
        # The unsharded buffer, without memory: it only says the shape.
        elements = -(-parameter.numel() // per_element)  # rounded up
        unsharded = torch.empty(elements, device="meta")
        first = self.begin // per_element
        yield name, shard_from_rows(flat, mesh, unsharded, slice(first, first + len(flat)))


def make_rows_planes(
    model: nn.Module, kinds: Mapping[str, ParameterKind], form: StateFormat
) -> list[RowsPlane]:
    """Make a plane for each trainable parameter of a sharded module.

    A single process has one plane for all parameters of a kind. Stochastic rounding must draw the same
    random numbers for an element here as there. So `Plane.number` is the number of that plane, and
    `Plane.start` is the place of these elements in it.

    Raises:
        UsageError: a rank's rows begin between two numbers that the form of the optimizer's state
            packs in one element.
    """
    block_size = form.block
    plane_numbers: dict[ParameterKind, int] = {}  # each kind's `Plane.number`
    elements_so_far = Counter[ParameterKind]()
    planes = []
    for name, parameter in trainable(model).items():
        kind = kinds[name]
        assert isinstance(parameter, DTensor)
        rank, ranks = rank_and_size(parameter.device_mesh)
        row_elements = math.prod(parameter.shape[1:])
        slices = [rank_rows(each_rank, ranks, len(parameter)) for each_rank in range(ranks)]
        # Each rank's first element in the parameter, and the one after its last.
        bounds = [(rows.start * row_elements, rows.stop * row_elements) for rows in slices]
        require_whole_elements(name, bounds, form)
        # A parameter's last block counts as cut, too, if it is not full.
        has_cut_blocks = any(end % block_size for _, end in bounds)
        begin = bounds[rank][0]
        own_elements = parameter.to_local().detach().view(-1)
        start = torch.tensor(elements_so_far[kind] + begin, device=own_elements.device)
        elements_so_far[kind] += parameter.numel()
        plane = RowsPlane(
            kind,
            [PlacedParameter(name, parameter, offset=0)],
            param=own_elements,
            grad=torch.zeros_like(own_elements),
            number=plane_numbers.setdefault(kind, len(plane_numbers)),
            section_sizes=(own_elements.numel(),),
            start=start,
            block_offset=begin % block_size if own_elements.numel() else 0,
            begin=begin,
            end_blocks=find_end_blocks(bounds, rank, block_size) if has_cut_blocks else None,
            numbers_per_element=form.numbers_per_element(kind.rule.moments),
        )
        planes.append(plane)
    return planes
