"""Make the blocks of any module follow a policy of recomputation, in place: names and checkpoints stay the same.

Each block's forward pass becomes `torch.utils.checkpoint` around its own. Which results are kept is one function of the
block's operators, which torch asks while it runs eagerly, and the compiler while it traces.

Offloaded, the one stored tensor, a block's input, waits in the host's memory. It leaves the device while the block
computes and comes back while the block after it is recomputed, on a separate stream in both directions. The numbers
that come back are the numbers that left.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from monograph import compat
from monograph.errors import UsageError
from monograph.graph.inspect import blocks
from monograph.graph.recording import Recording, record
from monograph.graph.remat import OfBlock, Policy, Remat, within
from monograph.graph.siblings import within_blocks


class Lane:
    """The way between a device and its host: a separate stream, and the tensor that left last.

    On a CPU, which has one memory and no streams, everything is copied all the same, in order.
    """

    def __init__(self, device: torch.device):
        """Open a lane of a device."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: weakref.ref[Parcel] | None = None

    def out(self, tensor: Tensor) -> Tensor:
        """Start a copy to page-locked memory of the host; it is complete for whatever follows on this lane."""
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.stream is not None)
        if self.stream is None:
            return on_host.copy_(tensor)
        # The tensor may still be computed on the current stream.
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            on_host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)  # its memory, whoever frees it, is not used again before the copy is made
        return on_host

    def back(self, on_host: Tensor, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy back; return it, and on a GPU the event of its end."""
        if self.stream is None:
            return on_host.clone(), None
        with torch.cuda.stream(self.stream):
            tensor = on_host.to(device, non_blocking=True)
            return tensor, self.stream.record_event()


class Parcel:
    """A block's input on its way to the host: the first opening gives it back, later ones its copy."""

    def __init__(self, tensor: Tensor, lane: Lane):
        """Send a copy to the host; the tensor is kept until the parcel is opened."""
        self.lane, self.device, self.differentiable = lane, tensor.device, tensor.requires_grad
        self.tensor: Tensor | None = tensor
        self.on_host = lane.out(tensor.detach())
        self.coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.before = lane.last  # a weak reference, or each parcel would keep all earlier ones
        lane.last = weakref.ref(self)

    def call(self) -> None:
        """Start the way back, if the tensor is away and not on its way yet."""
        if self.tensor is None and self.coming is None:
            self.coming = self.lane.back(self.on_host, self.device)

    def open(self) -> Tensor:
        """Return the tensor; if it comes from the host, call the one that left before it, which is needed next."""
        if self.tensor is not None:
            tensor, self.tensor = self.tensor, None
            return tensor
        self.call()
        assert self.coming is not None
        (tensor, arrived), self.coming = self.coming, None
        if before := self.before and self.before():
            before.call()
        # Made on the lane's stream, read on this one: this one waits, and the allocator has to know of both.
        if arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            tensor.record_stream(stream)
        return tensor.requires_grad_(self.differentiable)


@functools.cache
def _lane(device: torch.device) -> Lane:
    return Lane(device)


def offloaded(forward: Callable[..., Any], contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Return `forward(*args, **kwargs)`, to be recomputed from a first argument that waits on the host.

    Args:
        forward: the forward pass of a block.
        contexts: makes the contexts of the forward pass and its repetition, see `torch.utils.checkpoint`.
        args: the block's positional arguments; the first leaves the device if it is a tensor.
        kwargs: its other arguments, which stay where they are.
    """
    if not args or not isinstance(args[0], Tensor):
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    parcel = Parcel(args[0], _lane(args[0].device))

    def opened(*rest: Any, **kwargs: Any) -> Any:
        return forward(parcel.open(), *rest, **kwargs)

    return checkpoint(opened, *args[1:], use_reentrant=False, context_fn=contexts, **kwargs)


Contexts = Callable[[], tuple[Any, Any]]


@dataclass
class _Plan:
    """A block's policy, its own forward pass, and the contexts by which torch keeps what the policy keeps.

    `kept` spells out what `contexts` keep, "" for nothing.
    """

    # Blocks share a captured graph unless Dynamo sees them differ, and of a function it compares the code alone, which
    # is the same for all contexts (docs/log.md): hence `kept`.

    policy: OfBlock
    inner: Callable[..., Any]
    contexts: Contexts | None = None
    kept: str = ""


def follow(module: nn.Module, policy: Policy) -> None:
    """Let every block of a module follow the policy from now on; `Remat.Off` undoes an earlier one.

    Raises:
        UsageError: the module has no blocks, not as many as the policy has parts, or a block without a forward pass.
    """
    of_module = blocks(module)
    policies = _for_each(policy, len(of_module))
    if policy != Remat.Off() and (idle := [n for n, b in of_module.items() if type(b).forward is nn.Module.forward]):
        raise UsageError(
            f"{idle[0]} ({type(of_module[idle[0]]).__name__}) has no forward pass to recompute: use Remat.Off()"
        )
    if policy != Remat.Off():
        within_blocks(module)  # a block is repeated alone, without siblings in another one
    for block, of_block in zip(of_module.values(), policies, strict=True):
        plan = block.__dict__.pop("remat", None)
        if isinstance(plan, _Plan):
            del block.forward
            # The class's method needs no attribute; what somebody else had put there comes back.
            if not isinstance(plan.inner, MethodType) or plan.inner.__func__ is not type(block).forward:
                block.forward = plan.inner  # type: ignore[method-assign]
        if of_block in (Remat.Off(), Remat.Budget(1.0)):
            continue
        block.remat = _Plan(of_block, block.forward)  # type: ignore[assignment]
        block.forward = MethodType(_forward, block)  # type: ignore[method-assign]


def _for_each(policy: Policy, count: int) -> tuple[OfBlock, ...]:
    if not isinstance(policy, Policy):
        raise UsageError(f"remat = {policy!r}: expected a policy such as Remat.Full() or Remat.Budget(0.5)")
    if not isinstance(policy, Remat.PerLayer):
        if not count and policy != Remat.Off():
            raise UsageError(
                "nothing to recompute: the module has no block, which is a module with parts inside an nn.ModuleList "
                "or nn.Sequential; use Remat.Off()"
            )
        return (policy,) * count
    if len(policy.policies) != count:
        raise UsageError(f"Remat.PerLayer has {len(policy.policies)} policies and the module {count} blocks")
    if odd := [entry for entry in policy.policies if not isinstance(entry, OfBlock)]:
        raise UsageError(f"Remat.PerLayer holds {odd[0]!r}: expected the policy of one block")
    return policy.policies


def innermost(block: nn.Module) -> tuple[Any, str]:
    """Return (owner, name) of the forward pass to compile for a block: what `Full` and `Offload` repeat, else all."""
    plan = block.__dict__.get("remat")
    if isinstance(plan, _Plan) and plan.policy in (Remat.Full(), Remat.Offload()):
        return plan, "inner"
    return block, "forward"


def _forward(block: Any, *args: Any, **kwargs: Any) -> Any:
    plan: _Plan = block.remat
    if not torch.is_grad_enabled():  # no backward pass, so nothing to repeat
        return plan.inner(*args, **kwargs)
    if not torch.compiler.is_compiling():
        contexts = functools.partial(_eager_contexts, block, plan.contexts)
        if isinstance(plan.policy, Remat.Offload):
            return offloaded(plan.inner, contexts, *args, **kwargs)
        return checkpoint(plan.inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    if isinstance(plan.policy, Remat.Offload):
        raise UsageError("Remat.Offload() moves tensors between graphs: capture the step with scope blocks, or not")
    if plan.contexts is None or not plan.kept:
        return checkpoint(plan.inner, *args, use_reentrant=False, **kwargs)
    return checkpoint(plan.inner, *args, use_reentrant=False, context_fn=plan.contexts, **kwargs)


# ---- results to keep ------------------------------------------------------------------------------------------------


@functools.cache  # one function for equal blocks, so that they share one compiled graph
def _keeping(names: frozenset[tuple[str, int]]) -> Contexts:
    def choose() -> Callable[..., CheckpointPolicy]:
        # torch tells the operator and no more, so calls of it are told apart by their number, which begins again in the
        # repetition.
        counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name, seen = str(operator), counts[context.is_recompute]
            seen[name] += 1
            kept = (name, seen[name] - 1) in names
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

        return policy

    def contexts() -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(choose())

    return contexts


def _eager_contexts(block: nn.Module, contexts: Contexts | None) -> tuple[Any, Any]:
    """Return the contexts of the forward pass and of its repetition, to which the block's buffers are as they were."""
    # A module that changes its buffers as it runs (running means, power iterations) would change them twice.
    first, again = contexts() if contexts else (nullcontext(), nullcontext())
    before = _buffers(block)
    return first, _replayed(block, before, again) if before else again


@contextmanager
def _replayed(block: nn.Module, before: list[_Buffer], again: Any) -> Iterator[None]:
    now = _buffers(block)
    _put(before)
    try:
        with again:
            yield
    finally:
        _put(now)


class _Buffer(NamedTuple):
    owner: nn.Module
    name: str
    tensor: Tensor
    value: Tensor


def _buffers(block: nn.Module) -> list[_Buffer]:
    return [
        _Buffer(owner, name, tensor, tensor.clone())
        for owner in block.modules()
        for name, tensor in owner.named_buffers(recurse=False)
    ]


def _put(buffers: list[_Buffer]) -> None:
    for owner, name, tensor, value in buffers:
        # Another block may have saved the tensor for its backward pass, where torch looks whether it has changed.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
            tensor.copy_(value)
        owner._buffers[name] = tensor  # a module may have put another one in its place


# ---- budgets --------------------------------------------------------------------------------------------------------


def choose_kept(module: nn.Module, run: Callable[[nn.Module], object], *, captured: bool) -> None:
    """Choose what blocks with a `Pointwise` or `Budget` policy keep, from one pass without numbers.

    Args:
        module: a module whose blocks follow a policy.
        run: runs a module on a batch; it is given a copy whose tensors hold no numbers.
        captured: whether the blocks will run in a compiled graph, where they may compute and keep other things.

    Raises:
        UsageError: the pass does not reach every block.
    """
    plans = {name: block.__dict__.get("remat") for name, block in blocks(module).items()}
    choosing = {
        name: plan
        for name, plan in plans.items()
        if isinstance(plan, _Plan) and isinstance(plan.policy, (Remat.Pointwise, Remat.Budget))
    }
    if not choosing:
        return
    if captured:
        compat.quiet_selective_recompute()
    budgeted = any(isinstance(plan.policy, Remat.Budget) for plan in choosing.values())
    recordings = recorded(module, run, captured=captured, stored=budgeted)
    for name, plan in choosing.items():
        names = _kept_of(plan.policy, recordings[name])
        plan.contexts, plan.kept = (_keeping(names), str(sorted(names))) if names else (None, "")


def _kept_of(policy: OfBlock, recording: Recording) -> frozenset[tuple[str, int]]:
    curve = recording.curve()
    limit = (
        round(policy.fraction * recording.stored_bytes) if isinstance(policy, Remat.Budget) else curve[-1].stored_bytes
    )
    chosen = within(curve, limit)
    return frozenset(chosen.what) if chosen else frozenset()


def recorded(
    module: nn.Module, run: Callable[[nn.Module], object], *, captured: bool, stored: bool = True
) -> dict[str, Recording]:
    """Return what each block of a module computes and keeps, by name.

    Nothing is allocated, and neither the module nor the random numbers are touched.

    Args:
        module: see `choose_kept`.
        run: see `choose_kept`.
        captured: see `choose_kept`.
        stored: whether to find `stored_bytes` of captured blocks, which a budget needs: one block of each kind is
            traced as a graph.

    Raises:
        UsageError: the pass does not reach every block.
    """
    recordings, compiled = dict[str, Recording](), dict[Recording, int]() if captured and stored else None
    held = (*module.parameters(), *module.buffers())
    # A plan's module has fake tensors already, and they work with their own mode only.
    mode = next((t.fake_mode for t in held if isinstance(t, FakeTensor)), FakeTensorMode(allow_non_fake_inputs=True))
    empty = {id(t): t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in held}
    reason = "they did not run"
    with mode, torch.enable_grad(), compat.as_if_compiling() if captured else nullcontext():
        try:
            twin = copy.deepcopy(module, dict(empty))
            for name, block in blocks(twin).items():
                plan = block.__dict__.pop("remat", None)
                inner = plan.inner if isinstance(plan, _Plan) else block.forward
                block.forward = functools.partial(_recording, recordings, name, block, inner, compiled)  # type: ignore[method-assign]
            run(twin)
        except Exception as error:  # a module of the user's may raise anything
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if missing := [name for name in blocks(module) if name not in recordings]:
        raise UsageError(
            f"a budget needs to know what {missing[0]} computes, and a pass without numbers did not get there "
            f"({reason}): use Remat.Full() or Remat.Off()"
        )
    return recordings


def _recording(
    recordings: dict[str, Recording],
    name: str,
    block: nn.Module,
    inner: Callable[..., Any],
    compiled: dict[Recording, int] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    output, recording = record(inner, [*block.parameters(), *block.buffers()], *args, **kwargs)
    if compiled is not None:
        if recording not in compiled:  # asked once for blocks that are alike
            compiled[recording] = compat.stored_by_graph(inner, block, args, kwargs)
        # Operators between products run again inside the kernels that read them, in no measurable time (docs/log.md).
        recording = replace(recording, stored_bytes=compiled[recording], rest_flops=0)
    recordings.setdefault(name, recording)
    return output
