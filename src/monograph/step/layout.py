"""What differs between engines, as values that a step is given; the defaults are one module, whole, on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused, UsageError
from monograph.graph import siblings
from monograph.graph.inspect import buffers_kept, parts
from monograph.graph.lora import kept_state
from monograph.loss import TokenLoss, counted, counts, pair
from monograph.optim import Plane, planes, trainable, unlinked
from monograph.schedule import factor_at

Sums = tuple[Tensor, Tensor]  # sum of losses, and number of targets
Memory = tuple[Any, ...]  # storage, offset, shape and strides


def on_device(step: Any) -> list[Plane]:
    """Move the trainable parameters into planes, on the device where they are."""
    # Fused siblings are read as one matrix, so their parameters have to lie next to each other in a plane.
    in_order = siblings.side_by_side(step.model, trainable(step.model))
    made = planes(in_order, step.optim.kinds(step.model), step.optim.state, parts=parts(step.model))
    siblings.part_moved(step.model)
    return [step.begun(plane) for plane in made]


def named(step: Any, scope: str) -> list[tuple[Any, str]]:
    """Name the functions of a step that a capture of this scope compiles, each with the object that has it."""
    # By blocks, the passes are functions of the blocks themselves, and only the update is one of the step.
    return [(step, name) for name in (("forward", "apply", "evaluate") if scope == "whole" else ("apply",))]


def one_rate(step: Any) -> float:
    """Return the learning rate of the present update."""
    return float(step.optim.lr * factor_at(step.schedule, step.index))


def sums_of(step: Any, batch: Any) -> Sums:
    """Return the batch's summed loss and the number of its targets."""
    return pair(step.loss(step.model, batch))


def targets_of(step: Any, batch: Any) -> Tensor | None:
    """Return the number of the batch's targets, if the loss can count them without a forward pass."""
    return counted(step.loss.count(batch), step.device) if counts(step.loss) else None


def one_by_one(step: Any, batches: Sequence[Any]) -> None:
    """Add the gradient of each micro-batch to the planes."""
    # Again in each window: `zero_grad()` and whoever else sets `.grad` to None would have gradients added elsewhere.
    step.link()
    for batch in batches:
        step.micro_step(batch)


def scored(step: Any, batches: Iterable[Any]) -> list[Sums]:
    """Return the sums of each micro-batch, without gradients."""
    with unlinked(step.planes), step.context():
        return [step.evaluate(batch) for batch in batches]


def zeroed(step: Any) -> None:
    """Set the planes' gradients to zero."""
    for plane in step.planes:
        plane.grad.zero_()


def require_nothing_added(step: Any, empty: Mapping[str, Tensor], fill: Mapping[str, float]) -> None:
    """Score rows without targets, as the loss's fill makes them, before such rows are added to any micro-batch.

    Raises:
        InputRefused: the loss counts targets in them, or adds something, which would change with the micro-batch.
    """
    count, loss_sum, grads = step.layout.targets(step, empty), torch.zeros(()), tuple[Tensor | None, ...]()
    if not isinstance(step.loss, TokenLoss) and step.layout.device is None:  # a streamed model is not whole
        devices = [step.device] if step.device.type == "cuda" else []
        graphed = torch.set_grad_enabled(step.layout.sums is sums_of)  # FSDP2 would wait for a backward pass
        with graphed, buffers_kept(step.model), torch.random.fork_rng(devices), step.context():
            loss_sum, own = step.layout.sums(step, empty)
            if loss_sum.requires_grad:
                learned = [p for p in step.model.parameters() if p.requires_grad]
                grads = torch.autograd.grad(loss_sum.sum(), learned, allow_unused=True)
        loss_sum, own = loss_sum.detach(), own.detach()
        count = own if count is None else torch.maximum(count, own)
    if count is None:
        return
    if bool(count.any()):
        odd = f"counts {float(count.max()):g} targets in rows that have none"
    elif bool((loss_sum != 0).any()):
        odd = f"is {float(loss_sum[loss_sum != 0].flatten()[0]):g} for rows that have no targets"
    elif any(grad is not None and not bool(grad.isfinite().all()) for grad in grads):
        odd = "has a gradient that is not finite for rows that have no targets"
    else:
        return
    remedy = "leave such rows out of sum and count, or set `fill = None` on it and none are added"
    raise InputRefused(f"the loss {odd}, by its fill {dict(fill)}: {remedy}")


@dataclass(frozen=True)
class Layout:
    """How the parameters of an engine lie, and what is done otherwise because of it.

    Each field is a value, or a function whose first argument is the step.

    Attributes:
        device: that computes; None: the planes'.
        planes: moves the trainable parameters into planes.
        captured: the functions that a capture replaces by compiled ones, by its scope.
        context: what the loss is called in, in addition to the precision's own context.
        rates: the learning rate of the present update, or one for each member.
        sums: the loss of a batch and its targets.
        targets: the targets alone, None where only a forward pass can tell.
        accumulate: adds the gradients of a window's micro-batches.
        complete: is called when a window is complete, before its update.
        add_squares: one sum of all parts' squares.
        discard: forgets the gradients.
        score: sums of micro-batches in evaluation.
        at_rest: returns when the planes may be read where they are; `written`: they may also be written afterwards.
        weights: the model's tensors that training changes, by name, tied ones once.
        take_weights: is called when others were copied into these.
        assembled: the module as it can be called on its own, all of its weights in one place.
        counters: tensors in addition to the step's own counters that a state holds, by name.
        frozen: members that are never updated again, bool [N].
    """

    # Values and not methods to override: all that an engine does otherwise stands where the engine is made.
    device: torch.device | None = None
    planes: Callable[[Any], list[Plane]] = on_device
    captured: Callable[[Any, str], list[tuple[Any, str]]] = named
    context: Callable[[Any], AbstractContextManager[None]] = lambda step: nullcontext()
    rates: Callable[[Any], float | tuple[float, ...]] = one_rate
    sums: Callable[[Any, Any], Sums] = sums_of
    targets: Callable[[Any, Any], Tensor | None] = targets_of
    accumulate: Callable[[Any, Sequence[Any]], None] = one_by_one
    complete: Callable[[Any], None] = lambda step: None
    # One by one: the bits of a sum of many depend on who computes it.
    add_squares: Callable[[Sequence[Tensor]], Tensor] = functools.partial(functools.reduce, torch.add)
    discard: Callable[[Any], None] = zeroed
    score: Callable[[Any, Iterable[Any]], list[Sums]] = scored
    at_rest: Callable[[Any, bool], None] = lambda step, written: None
    weights: Callable[[Any], dict[str, Tensor]] = lambda step: kept_state(step.model)
    take_weights: Callable[[Any, Mapping[str, Tensor]], None] = lambda step, taken: None
    assembled: Callable[[Any], AbstractContextManager[nn.Module]] = lambda step: nullcontext(step.model)
    counters: Mapping[str, Tensor] = field(default_factory=dict)
    frozen: Tensor | None = None


class Held:
    """The trainable parameters of a module at the time when a step moved them into its planes.

    A step that went on after they were replaced, frozen, moved or cast would train memory that the module no longer
    reads, or change what should stay, and say nothing.
    """

    def __init__(self, module: nn.Module, planes: Sequence[Plane]):
        self.module = module
        self.parameters = {slot.name: slot.parameter for plane in planes for slot in plane.slots}
        self._before = trained_memory(module)

    def require(self) -> None:
        """Compare the module with what it was.

        Raises:
            UsageError: with the name of the first parameter that changed, and what to do.
        """
        if trained_memory(self.module) != self._before:
            raise UsageError(
                f"{self._change()} after the step was made: change the module first, and make a new step or engine of "
                "it afterwards"
            )

    def _change(self) -> str:
        now = dict(self.module.named_parameters())
        for name, parameter in self.parameters.items():
            if name not in now:
                return f"{name} was taken out of the module"
            if now[name] is not parameter:
                return f"{name} was replaced by another parameter"
            if not parameter.requires_grad:
                return f"{name} was frozen (requires_grad = False)"
        # By identity: a name may be another parameter's by now.
        known = {id(parameter) for parameter in self.parameters.values()}
        for name, parameter in now.items():
            if parameter.requires_grad and id(parameter) not in known:
                return f"{name} became trainable"
        moved = [name for name, p in self.parameters.items() if (id(p), memory(p)) not in self._before]
        if not moved:  # the parameters are the same, in other places
            return "a parameter was put in another place, tied or untied"
        return f"{moved[0]} was moved, cast or given other memory (.to(), .float(), .data = ...)"


def trained_memory(module: nn.Module) -> list[tuple[int, Memory]]:
    """Return which parameters are trainable and in which memory each lies; equal as long as nobody changed that."""
    held, waiting = [], [module]
    while waiting:  # not module.parameters(), which takes six times as long, in every update
        part = waiting.pop()
        waiting += (child for child in part._modules.values() if child is not None)
        held += [(id(p), memory(p)) for p in part._parameters.values() if p is not None and p.requires_grad]
    return held


def memory(parameter: Tensor) -> Memory:
    """Return which numbers of which memory the parameter is; one in shards has its own shard's."""
    own = getattr(parameter, "_local_tensor", parameter)
    return own.untyped_storage()._cdata, own.storage_offset(), own.shape, own.stride()
