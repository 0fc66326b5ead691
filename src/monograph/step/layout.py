"""Say what differs between engines, as values given to a step; the defaults are for one module on one device."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused, UsageError
from monograph.graph import siblings
from monograph.graph.inspect import buffers_kept, modes_kept, parts
from monograph.graph.lora import kept_state
from monograph.graph.remat import Remat
from monograph.loss import IGNORE, SHARES, Loss, TokenLoss, counted, counts, pair
from monograph.ops.fused_gradients import fusing
from monograph.optim import Plane, planes, trainable, unlinked, vectors_at_once
from monograph.schedule import factor_at

Sums = tuple[Tensor, Tensor]  # sum of losses, and number of targets
Memory = tuple[Any, ...]  # storage, offset, shape and strides


def on_device(step: Any, fused: bool | None = None) -> list[Plane]:
    """Move the trainable parameters into planes, on the device where they are.

    With `fused` products add gradients, see `monograph.ops.fused_gradients`; None: where that saves work.
    """
    if fuses(step, any(p.is_cuda for p in step.model.parameters())) if fused is None else fused:
        fuse(step)
    # Fused siblings are read as one matrix, so their parameters must lie next to each other in a plane.
    in_order = siblings.side_by_side(step.model, trainable(step.model))
    made = planes(
        in_order,
        step.optim.kinds(step.model),
        step.optim.state,
        master_weights=step.optim.master_weights,
        parts=parts(step.model),
    )
    siblings.part_moved(step.model)
    begun = [step.begun(plane) for plane in made]
    if step.fusing is fusing:
        # Where nothing is recomputed, a backward pass needs all rounded weights anyway.
        rounds = isinstance(step.remat, Remat.Off)
        for plane in begun:
            if rounds and not plane.kind.vector and plane.param.dtype != step.precision.dtype:
                plane.rounded = torch.empty_like(plane.param, dtype=step.precision.dtype)
            plane.fuse()
        step.fusing = functools.partial(_fusing, begun)
    for family in siblings.families(step.model):
        family.look()
    return begun


@contextmanager
def _fusing(planes: Sequence[Plane]) -> Iterator[None]:
    with fusing(), vectors_at_once(planes):
        yield


def fuses(step: Any, on_cuda: bool) -> bool:
    """Return whether a step's products can add gradients, and do so in less time."""
    # A CPU computes separate siblings faster, and cannot add bf16 products to fp32 numbers. Code of others may ask for
    # gradients itself, or by hooks.
    own = type(step.loss) is TokenLoss and vars(type(step.model)).get("fuses", False)
    hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in step.model.parameters())
    return on_cuda and step.precision.name in ("bf16", "fp16") and own and not hooked


def fuse(step: Any) -> None:
    """Prepare a step, before its planes are made, for products that add gradients, those of siblings at once."""
    siblings.fuse_known(step.model)
    step.fusing = fusing


def named(step: Any, scope: str) -> list[tuple[Any, str]]:
    """Return the functions of a step that a capture of this scope compiles, as (object, attribute)."""
    # In scope "blocks" the passes are functions of the blocks, and only the update is a function of the step.
    return [(step, name) for name in (("forward", "apply", "evaluate") if scope == "whole" else ("apply",))]


def one_rate(step: Any) -> float:
    """Return the learning rate of the current update."""
    return float(step.optim.lr * factor_at(step.schedule, step.index))


def sums_of(step: Any, batch: Any) -> Sums:
    """Return the batch's summed loss and the number of its targets."""
    return pair(step.loss(step.model, batch))


def targets_of(step: Any, batch: Any) -> Tensor | None:
    """Return the number of the batch's targets, if the loss can count them without a forward pass."""
    return counted(step.loss.count(batch), step.device) if counts(step.loss) else None


def one_by_one(step: Any, batches: Sequence[Any]) -> None:
    """Add the gradient of each micro-batch to the planes."""
    # Gradients are linked in each window, as `zero_grad()` may have set `.grad` to None since the last one.
    step.link()
    for plane in step.planes:
        plane.round()
    for batch in batches:
        step.micro_step(batch)


def scored(step: Any, batches: Iterable[Any]) -> list[Sums]:
    """Return the sums of each micro-batch, without gradients."""
    with unlinked(step.planes), step.context():
        return [step.evaluate(batch) for batch in batches]


def balances(step: Any) -> bool:
    """Return whether the step's model balances its experts, which needs the share of each token.

    Raises:
        UsageError: it does, and the shares of the loss's tokens are unknown.
    """
    factors = [getattr(module, "balance_factor", 0.0) for module in step.model.modules()]
    if any(factors) and not (factors[0] and isinstance(step.loss, TokenLoss)):
        raise UsageError(
            "output_router_logits = true adds the balance of experts to the cross-entropy of texts alone, and this "
            "trains by another loss: set it to false in the config.json of the model, or of the run's export"
        )
    return any(factors)


def shared(step: Any, batch: Any) -> Any:
    """Return a batch of the window that was counted last; if the model balances its experts, with tokens' shares."""
    if not step.balances:
        return batch
    factor = step.loss_factor.view(*step.lr.shape, 1, 1)
    return {**batch, SHARES: (batch["targets"] != IGNORE) * factor}


def total(step: Any) -> None:
    """Sum loss and count over the ranks, once before the update."""
    totals = step.sum_over_ranks(torch.stack([step.loss_sum, step.count.double()]))
    step.loss_sum.copy_(totals[0])
    step.count.copy_(totals[1])


def put_(loss: Loss, device: torch.device) -> None:
    """Move a loss that has buffers to the step's device."""
    if isinstance(loss, nn.Module):
        loss.to(device)


@contextmanager
def of_the_update(step: Any, batches: Sequence[Any]) -> Iterator[None]:
    """Let the loss know in the block of which update it is a part, if it has `update_of`: see `monograph.loss`."""

    def score(some: Sequence[Any]) -> None:
        with modes_kept(step.model), torch.no_grad():
            step.model.train(False)
            step.layout.score(step, some)

    update_of = getattr(step.loss, "update_of", None)
    with update_of(step.index, batches, score, step.sum_over_ranks) if callable(update_of) else nullcontext():
        yield


def zeroed(step: Any) -> None:
    """Set the planes' gradients to zero."""
    for plane in step.planes:
        plane.grad.zero_()


def require_nothing_added(step: Any, empty: Mapping[str, Tensor], fill: Mapping[str, float]) -> None:
    """Check that rows made of the loss's `fill` add nothing, before such rows are added to any micro-batch.

    Raises:
        InputRefused: the loss counts targets in them, or adds something, so that results would depend on the
            micro-batch.
    """
    count = step.layout.targets(step, empty)
    loss_sum = torch.zeros(())
    grads = tuple[Tensor | None, ...]()
    if not isinstance(step.loss, TokenLoss) and step.layout.device is None:  # a streamed model is not whole
        devices = [step.device] if step.device.type == "cuda" else []
        graphed = torch.set_grad_enabled(step.layout.sums is sums_of)  # FSDP2 would wait for a backward pass
        with graphed, buffers_kept(step.model), torch.random.fork_rng(devices), step.context():
            loss_sum, own = step.layout.sums(step, empty)
            if loss_sum.requires_grad:
                learned = [p for p in step.model.parameters() if p.requires_grad]
                grads = torch.autograd.grad(loss_sum.sum(), learned, allow_unused=True)
        loss_sum = loss_sum.detach()
        own = own.detach()
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
    """Where an engine's parameters are, and how its step differs because of it.

    Each field is a value, or a function whose first argument is the step.

    Attributes:
        device: the device that computes; None: that of the planes.
        planes: moves the trainable parameters into planes.
        captured: returns the functions that a capture of a scope replaces by compiled ones.
        context: returns the context in which the loss is called, in addition to the precision's own context.
        rates: returns the learning rate of the current update, or one for each member.
        sums: returns a batch's sum of losses and its number of targets.
        targets: returns the number of targets alone; None where only a forward pass can tell.
        accumulate: adds the gradients of a window's micro-batches.
        complete: is called when a window is complete, before its update.
        add_squares: adds up the squares of all parts.
        directed: returns a context in which Muon's directions are known where no rank has whole matrices; it gets the
            planes' gradients and their common factor.
        discard: forgets the gradients.
        score: returns the sums of micro-batches in evaluation.
        at_rest: waits until the planes may be read, and if `written` also written.
        weights: returns the model's tensors that training changes, by name, tied ones once.
        take_weights: is called after other values were copied into these tensors.
        whole: returns a module of the same shapes, perhaps without values, if the step's own is sharded.
        assembled: returns a context with a module that can be called on its own, all of its weights in one place.
        gathered: returns a module with all weights as they are now, to be called on every rank; the same each time.
        counters: tensors of a state in addition to the step's own counters, by name.
        frozen: which members are never updated again, bool [N].
    """

    # These are values instead of methods to override, so that an engine's differences stand where the engine is made.
    device: torch.device | None = None
    planes: Callable[[Any], list[Plane]] = on_device
    captured: Callable[[Any, str], list[tuple[Any, str]]] = named
    context: Callable[[Any], AbstractContextManager[None]] = lambda step: nullcontext()
    rates: Callable[[Any], float | tuple[float, ...]] = one_rate
    sums: Callable[[Any, Any], Sums] = sums_of
    targets: Callable[[Any, Any], Tensor | None] = targets_of
    accumulate: Callable[[Any, Sequence[Any]], None] = one_by_one
    complete: Callable[[Any], None] = lambda step: None
    # Squares are added one by one, as the bits of a sum of many depend on the code that computes it.
    add_squares: Callable[[Sequence[Tensor]], Tensor] = functools.partial(functools.reduce, torch.add)
    directed: Callable[[Any, Sequence[Tensor], Tensor], AbstractContextManager[None]] = lambda *of_step: nullcontext()
    discard: Callable[[Any], None] = zeroed
    score: Callable[[Any, Iterable[Any]], list[Sums]] = scored
    at_rest: Callable[[Any, bool], None] = lambda step, written: None
    weights: Callable[[Any], dict[str, Tensor]] = lambda step: kept_state(step.model)
    take_weights: Callable[[Any, Mapping[str, Tensor]], None] = lambda step, taken: None
    whole: Callable[[Any], nn.Module | None] = lambda step: None
    assembled: Callable[[Any], AbstractContextManager[nn.Module]] = lambda step: nullcontext(step.model)
    gathered: Callable[[Any], nn.Module] = lambda step: step.model
    counters: Mapping[str, Tensor] = field(default_factory=dict)
    frozen: Tensor | None = None


class Held:
    """The trainable parameters of a module when a step moved them into its planes.

    If they were replaced, frozen, moved or cast afterwards, the step would silently train memory that the module no
    longer reads, or change weights that should stay.
    """

    def __init__(self, module: nn.Module, planes: Sequence[Plane]):
        self.module = module
        self.parameters = {slot.name: slot.parameter for plane in planes for slot in plane.slots}
        self._before = trained_memory(module)

    def require(self) -> None:
        """Check that the module's parameters are still the same.

        Raises:
            UsageError: they are not; the message names the first one that changed, and says what to do.
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
        # Parameters are compared by identity, as a name may belong to another parameter by now.
        known = {id(parameter) for parameter in self.parameters.values()}
        for name, parameter in now.items():
            if parameter.requires_grad and id(parameter) not in known:
                return f"{name} became trainable"
        moved = [name for name, p in self.parameters.items() if (id(p), memory(p)) not in self._before]
        if not moved:  # the parameters are the same, in other places
            return "a parameter was put in another place, tied or untied"
        return f"{moved[0]} was moved, cast or given other memory (.to(), .float(), .data = ...)"


def trained_memory(module: nn.Module) -> list[tuple[int, Memory]]:
    """Return the identities and memories of the trainable parameters, to compare with an earlier result."""
    held, waiting = [], [module]
    while waiting:  # module.parameters() would take six times as long, in every update
        part = waiting.pop()
        waiting += (child for child in part._modules.values() if child is not None)
        held += [(id(p), memory(p)) for p in part._parameters.values() if p is not None and p.requires_grad]
    return held


def memory(parameter: Tensor) -> Memory:
    """Return a parameter's storage and its place there; for a sharded parameter, those of this rank's shard."""
    own = getattr(parameter, "_local_tensor", parameter)
    return own.untyped_storage()._cdata, own.storage_offset(), own.shape, own.stride()
