"""FSDP2: every rank has some rows of each parameter, its gradient and its optimizer state, and sees one block."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from monograph.device import default_device, describe
from monograph.distributed.shards import rows_planes
from monograph.distributed.step import RankStep
from monograph.errors import UsageError
from monograph.graph.inspect import blocks
from monograph.graph.lora import adapters, kept_state
from monograph.graph.remat import Remat
from monograph.graph.windows import kept_dtype, settle
from monograph.loss import pair
from monograph.optim import Muon, Plane
from monograph.step import Step

ROOM = 0.5  # of the free memory, for a model that is assembled beside its shards


class ShardedStep(RankStep):
    """A step whose planes are rows: the update is elementwise, so each rank makes its own part of it.

    Attributes:
        root: forward pass and loss as the module that FSDP2 gathers and scatters for.
        names: of the tensors of the model's state, as one process has them.
    """

    CAPTURED_BESIDE_BLOCKS: tuple[str, ...] = ("squares", "renew")

    def laid_out(self) -> list[Plane]:
        """Give each rank its rows, block by block, and make planes of them.

        Raises:
            UsageError: an optimizer that needs whole matrices or blocks of numbers, a policy of recomputation that
                needs a copy of the model, adapters, or a parameter without rows.
        """
        self._require_rows()
        kinds, self.names, self._empty = self.optim.kinds(self.model), list(kept_state(self.model)), hollow(self.model)
        mesh = init_device_mesh(default_device().type, (self.world.size,))
        # Weights that lie in a file are read a block at a time, and of each a rank keeps its rows.
        for block in blocks(self.model).values():
            fully_shard(settle(block), mesh=mesh)
        self.root: FSDPModule = fully_shard(_Summed(self), mesh=mesh)  # type: ignore[assignment]
        for module in self.root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way
        return [self.begun(plane) for plane in rows_planes(self.model, kinds)]

    def _require_rows(self) -> None:
        if isinstance(self.optim, Muon):
            raise UsageError("optim.name = muon needs whole matrices, of which fsdp has rows: take adamw, or ddp")
        if self.optim.state in ("8bit", "all-bf16"):
            raise UsageError(f"optim.name = adamw:{self.optim.state} is not for fsdp: take adamw, adamw:bf16, or ddp")
        if not isinstance(self.remat, (Remat.Off, Remat.Full)):
            raise UsageError("train.remat: with fsdp it is none or full, as what to keep is found on a whole model")
        if adapters(self.model):
            raise UsageError("fsdp is for weights that are trained: with lora.rank take train.parallel = ddp")
        if scalars := [name for name, parameter in self.model.named_parameters() if not parameter.ndim]:
            raise UsageError(f"{scalars[0]} has no rows that fsdp could share out: take train.parallel = ddp")

    def summed(self, batch: Any) -> tuple[Tensor, Tensor]:
        """See `Step.summed`; parameters are whole as long as they are needed."""
        found: tuple[Tensor, Tensor] = self.root(batch)  # type: ignore[operator]
        return found

    def add_no_gradient(self) -> None:
        """See `Step.add_no_gradient`.

        Raises:
            UsageError: always, as FSDP2 has the ranks meet in the backward pass of each block.
        """
        raise UsageError(
            "a micro-batch's loss does not depend on the parameters, and fsdp needs a backward pass through all of "
            "them: have the loss call the model for rows without targets too, or take train.parallel = ddp"
        )

    def apply_(self, grads: Sequence[Tensor]) -> Tensor:
        """See `Step.apply_`; the norm is that of all ranks' rows."""
        having = [(plane, grad) for plane, grad in zip(self.planes, grads, strict=True) if grad.numel()]
        squares = [each for plane, grad in having for each in self.squares(plane, grad)]
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        grad_norm, scale, accepted = self.decide([self.world.sum(functools.reduce(torch.add, squares, zero))])
        for plane, total in having:
            self.renew(plane, total, scale, accepted)
        return grad_norm

    def state(self) -> dict[str, Tensor]:
        """The model's tensors by the names that one process has; parameters are parts of whole tensors."""
        state = self.model.state_dict()
        return {name: state[name] for name in self.names}

    @contextmanager
    def assembled(self) -> Iterator[nn.Module]:
        """See `Step.assembled`: a copy with all weights on rank 0, and without numbers elsewhere.

        Every rank has to come here. It is on the host where the device has no room for it.
        """
        whole, own = copy.deepcopy(self._empty), self.model.state_dict()
        needed = sum(parameter.nbytes for parameter in whole.parameters())
        device = self.device if needed < ROOM * describe(self.device).free_memory_bytes else torch.device("cpu")
        for name, empty in list(whole.named_parameters()):
            full = own[name].full_tensor()
            if self.world.leads:
                _replace(whole, empty, nn.Parameter(full.to(device), empty.requires_grad))
        if self.world.leads:
            whole.to(device)
            for name, buffer in self.model.named_buffers():
                whole.get_buffer(name).copy_(buffer)
        yield whole


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
