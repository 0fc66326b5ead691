"""FSDP2: every rank has some rows of each parameter, its gradient and its optimizer state, and sees one block."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from monograph.device import default_device, describe
from monograph.distributed.shards import rows_planes
from monograph.distributed.world import World
from monograph.errors import UsageError
from monograph.graph.inspect import blocks
from monograph.graph.lora import adapters, kept_state
from monograph.graph.remat import Remat
from monograph.graph.windows import kept_dtype, settle
from monograph.loss import pair
from monograph.optim import Muon, Plane
from monograph.step import Layout, Step

ROOM = 0.5  # of the free memory, for a model that is assembled beside its shards


class Shards:
    """A layout whose planes are rows: the update is elementwise, so each rank makes its own part of it.

    Attributes:
        root: forward pass and loss as the module that FSDP2 gathers and scatters for.
        names: of the tensors of the model's state, as one process has them.
    """

    root: FSDPModule
    names: list[str]

    def __init__(self, world: World):
        """Nothing is shared out until a step asks for its planes."""
        self.world = world

    def layout(self, **others: Any) -> Layout:
        """Return the layout; `others` are those of its fields that are not about rows."""
        return Layout(
            planes=self._planes,
            captured=lambda step, scope: (
                [(step, "squares"), (step, "update_plane")] if scope == "blocks" else Layout().captured(step, scope)
            ),
            sums=lambda step, batch: self.root(batch),  # type: ignore[operator]
            add_squares=self._of_all_ranks,
            score=self._score,
            weights=self._weights,
            assembled=self._assembled,
            **others,
        )

    def _planes(self, step: Step) -> list[Plane]:
        """Give each rank its rows, block by block, and make planes of them."""
        require_rows(step)
        kinds, model = step.optim.kinds(step.model), step.model
        self.names, self._empty = list(kept_state(model)), hollow(model)
        mesh = init_device_mesh(default_device().type, (self.world.size,))
        # Weights that lie in a file are read a block at a time, and of each a rank keeps its rows.
        for block in blocks(model).values():
            fully_shard(settle(block), mesh=mesh)
        self.root = fully_shard(_Summed(step), mesh=mesh)  # type: ignore[assignment]
        for module in self.root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way
        return [step.begun(plane) for plane in rows_planes(model, kinds)]

    def _of_all_ranks(self, squares: Sequence[Tensor]) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=default_device())  # a rank may have no rows at all
        return self.world.sum(functools.reduce(torch.add, squares, zero))

    def _score(self, step: Step, batches: Iterable[Any]) -> list[tuple[Tensor, Tensor]]:
        try:
            return Layout().score(step, batches)
        finally:
            self.root.reshard()  # without a backward pass the root's parameters stay whole

    def _weights(self, step: Step) -> dict[str, Tensor]:
        """Return the model's tensors by the names that one process has; parameters are parts of whole tensors."""
        state = step.model.state_dict()
        return {name: state[name] for name in self.names}

    @contextmanager
    def _assembled(self, step: Step) -> Iterator[nn.Module]:
        """A copy with all weights on rank 0, and without numbers elsewhere.

        Every rank has to come here. It is on the host where the device has no room for it.
        """
        whole, own = copy.deepcopy(self._empty), step.model.state_dict()
        needed = sum(parameter.nbytes for parameter in whole.parameters())
        device = step.device if needed < ROOM * describe(step.device).free_memory_bytes else torch.device("cpu")
        for name, empty in list(whole.named_parameters()):
            full = own[name].full_tensor()
            if self.world.leads:
                _replace(whole, empty, nn.Parameter(full.to(device), empty.requires_grad))
        if self.world.leads:
            whole.to(device)
            for name, buffer in step.model.named_buffers():
                whole.get_buffer(name).copy_(buffer)
        yield whole


def require_rows(step: Any) -> None:
    """Refuse what rows cannot do.

    Raises:
        UsageError: an optimizer that needs whole matrices or blocks of numbers, a policy of recomputation that needs a
            copy of the model, adapters, or a parameter without rows.
    """
    if isinstance(step.optim, Muon):
        raise UsageError("optim.name = muon needs whole matrices, of which fsdp has rows: take adamw, or ddp")
    if step.optim.state in ("8bit", "all-bf16"):
        raise UsageError(f"optim.name = adamw:{step.optim.state} is not for fsdp: take adamw, adamw:bf16, or ddp")
    if not isinstance(step.remat, (Remat.Off, Remat.Full)):
        raise UsageError("train.remat: with fsdp it is none or full, as what to keep is found on a whole model")
    if adapters(step.model):
        raise UsageError("fsdp is for weights that are trained: with lora.rank take train.parallel = ddp")
    if scalars := [name for name, parameter in step.model.named_parameters() if not parameter.ndim]:
        raise UsageError(f"{scalars[0]} has no rows that fsdp could share out: take train.parallel = ddp")


class _Summed(nn.Module):
    """A model and its loss as one module."""

    def __init__(self, step: Step):
        super().__init__()
        self.model = settle(step.model)
        self.__dict__["step"] = step

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        step: Step = self.__dict__["step"]
        return pair(step.loss(self.model, batch))  # captured, it is another one


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in the place of another, wherever it is tied to."""
    for owner in module.modules():
        for name, held in owner._parameters.items():
            if held is old:
                owner._parameters[name] = new


def hollow(model: nn.Module) -> nn.Module:
    """A copy of a module whose parameters have shapes and no numbers."""
    empty = {id(p): nn.Parameter(_without_numbers(p), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, dict(empty))


def _without_numbers(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=kept_dtype(parameter), device="meta")
