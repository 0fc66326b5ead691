"""Make the blocks of any module follow a policy of recomputation, in place; names and checkpoints
stay the same.

Each block's forward pass is wrapped in `torch.utils.checkpoint`. One function of the block's
operators decides which results are kept; torch calls it while it runs eagerly, and the compiler
calls it while it traces.

Under `Offload` a block's input, the one stored tensor, waits unchanged in the host's memory. It is
copied there while the block computes, and back while the next block is recomputed, in both
directions on a separate stream.
"""

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from monograph import compat
from monograph.errors import UsageError
from monograph.graph.inspect import blocks
from monograph.graph.remat import OfBlock, Policy, Recording, Remat, record, within
from monograph.graph.siblings import within_blocks

Context = AbstractContextManager[object]
# Makes those of a forward pass and of its repetition.
Contexts = Callable[[], tuple[Context, Context]]


class Lane:
    """A separate stream for copies between a device and its host, with the parcel sent last.

    On a CPU, which has one memory and no streams, tensors are copied all the same, in order.
    """

    def __init__(self, device: torch.device):
        """Open a lane of a device."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: weakref.ref[Parcel] | None = None

    def out(self, tensor: Tensor) -> Tensor:
        """Start a copy to page-locked host memory and return it; later work on this lane sees it
        complete.
        """
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.stream is not None)
        if self.stream is None:
            return on_host.copy_(tensor)
        # The tensor may still be computed on the current stream.
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            on_host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)  # its memory is not used again before the copy is made
        return on_host

    def back(self, on_host: Tensor, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy back; return the tensor, and on a GPU the event of the copy's end."""
        if self.stream is None:
            return on_host.clone(), None
        with torch.cuda.stream(self.stream):
            return on_host.to(device, non_blocking=True), self.stream.record_event()


class Parcel:
    """A block's input and its copy on the host: the first `open` returns the input itself, later
    ones the copy.
    """

    def __init__(self, tensor: Tensor, lane: Lane):
        """Send a copy to the host; the tensor is kept until the parcel is opened."""
        self.lane = lane
        self.device = tensor.device
        self.differentiable = tensor.requires_grad
        self.tensor: Tensor | None = tensor
        self.on_host = lane.out(tensor.detach())
        self.coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.before = lane.last  # a weak reference: strong ones would keep all earlier parcels
        lane.last = weakref.ref(self)

    def call(self) -> None:
        """Start the copy back to the device, unless the tensor is there or its copy has started."""
        if self.tensor is None and self.coming is None:
            self.coming = self.lane.back(self.on_host, self.device)

    def open(self) -> Tensor:
        """Return the tensor; if it comes from the host, call the parcel sent before it, which is
        needed next.
        """
        if self.tensor is not None:
            tensor = self.tensor
            self.tensor = None
            return tensor
        self.call()
        assert self.coming is not None
        tensor, arrived = self.coming
        self.coming = None
        before = self.before() if self.before else None
        if before:
            before.call()
        # The copy is made on the lane's stream and read on the current one, which waits; the
        # allocator must know both.
        if arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            tensor.record_stream(stream)
        return tensor.requires_grad_(self.differentiable)


_lane = functools.cache(Lane)  # one for each device


def offloaded(
    forward: Callable[..., object], contexts: Contexts, *args: object, **kwargs: Any
) -> object:
    """Return `forward(*args, **kwargs)`; it is recomputed from a first argument that waits on the
    host.

    Args:
        forward: the forward pass of a block.
        contexts: makes the contexts, see `torch.utils.checkpoint`.
        args: the block's positional arguments; the first is offloaded if it is a tensor.
        kwargs: its keyword arguments, which stay on the device.
    """
    if not args or not isinstance(args[0], Tensor):
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    parcel = Parcel(args[0], _lane(args[0].device))

    def opened(*rest: object, **kwargs: object) -> object:
        return forward(parcel.open(), *rest, **kwargs)

    return checkpoint(opened, *args[1:], use_reentrant=False, context_fn=contexts, **kwargs)


Pass = Callable[[nn.Module], object]  # runs a module


@dataclass
class _Plan:
    """A block's policy, its own forward pass, and the contexts that make torch keep the policy's
    results.

    `kept` lists the results that `contexts` keep; "" for none.
    """

    policy: OfBlock
    inner: Callable[..., object]
    contexts: Contexts | None = None
    # Blocks share a captured graph unless Dynamo sees them differ. It compares functions by their
    # code alone, which is the same for all contexts (dev/log.md), so this text tells them apart.
    kept: str = ""


def follow(module: nn.Module, policy: Policy) -> None:
    """Let every block of a module follow the policy from now on; `Remat.Off` undoes an earlier one.

    Raises:
        UsageError: the module has no blocks, another number than the policy, or a block without a
            forward pass.
    """
    by_name = blocks(module)
    policies = _for_each(policy, len(by_name))
    if policy != Remat.Off():
        for name, block in by_name.items():
            if type(block).forward is nn.Module.forward:
                raise UsageError(
                    f"{name} ({type(block).__name__}) has no forward pass to recompute: use Remat.Off()"
                )
        within_blocks(module)  # a block is repeated alone, without siblings in another one
    for block, block_policy in zip(by_name.values(), policies, strict=True):
        plan = block.__dict__.pop("remat", None)
        if isinstance(plan, _Plan):
            del block.forward
            # The class's method comes back by itself; another function that a user had assigned is
            # put back.
            if (
                not isinstance(plan.inner, MethodType)
                or plan.inner.__func__ is not type(block).forward
            ):
                block.forward = plan.inner
        if block_policy in (Remat.Off(), Remat.Budget(1.0)):
            continue
        block.remat = _Plan(block_policy, block.forward)  # type: ignore[assignment]
        block.forward = MethodType(_forward, block)


def _for_each(policy: Policy, count: int) -> tuple[OfBlock, ...]:
    if not isinstance(policy, Policy):
        raise UsageError(
            f"remat = {policy!r}: expected a policy such as Remat.Full() or Remat.Budget(0.5)"
        )
    if not isinstance(policy, Remat.PerLayer):
        if not count and policy != Remat.Off():
            raise UsageError(
                "nothing to recompute: the module has no block, which is a module with parts inside an nn.ModuleList "
                "or nn.Sequential; use Remat.Off()"
            )
        return (policy,) * count
    if len(policy.policies) != count:
        raise UsageError(
            f"Remat.PerLayer has {len(policy.policies)} policies and the module {count} blocks"
        )
    if odd := [entry for entry in policy.policies if not isinstance(entry, OfBlock)]:
        raise UsageError(f"Remat.PerLayer holds {odd[0]!r}: expected the policy of one block")
    return policy.policies


def innermost(block: nn.Module) -> tuple[object, str]:
    """Return (owner, name) of the forward pass to compile for a block: inside of `Full` and
    `Offload`, else around.
    """
    plan = block.__dict__.get("remat")
    if isinstance(plan, _Plan) and plan.policy in (Remat.Full(), Remat.Offload()):
        return plan, "inner"
    return block, "forward"


class _Following(nn.Module):
    """The type of a block that follows a policy, which keeps its class; there is no object of this
    one.
    """

    remat: _Plan


def _forward(block: _Following, *args: object, **kwargs: Any) -> object:
    plan = block.remat
    if not torch.is_grad_enabled():  # no backward pass, so nothing to repeat
        return plan.inner(*args, **kwargs)
    if not torch.compiler.is_compiling():
        contexts = functools.partial(_eager_contexts, block, plan.contexts)
        if isinstance(plan.policy, Remat.Offload):
            return offloaded(plan.inner, contexts, *args, **kwargs)
        return checkpoint(plan.inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    if isinstance(plan.policy, Remat.Offload):
        raise UsageError(
            "Remat.Offload() moves tensors between graphs: capture the step with scope blocks, or not"
        )
    if plan.contexts is None or not plan.kept:
        return checkpoint(plan.inner, *args, use_reentrant=False, **kwargs)
    return checkpoint(plan.inner, *args, use_reentrant=False, context_fn=plan.contexts, **kwargs)


# ---- results to keep -----------------------------------------------------------------------------


@functools.cache  # one function for equal blocks, so that they share one compiled graph
def _keeping(names: frozenset[tuple[str, int]]) -> Contexts:
    """Return contexts that keep the named results, each an operator's name and the number of its
    call.
    """

    def contexts() -> tuple[Context, Context]:
        # torch passes only the operator, so its calls are counted: once in the forward pass, again
        # in the repetition.
        counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

        def policy(
            context: SelectiveCheckpointContext, operator: object, *args: object, **kwargs: object
        ) -> CheckpointPolicy:
            name = str(operator)
            seen = counts[context.is_recompute]
            seen[name] += 1
            kept = (name, seen[name] - 1) in names
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def _eager_contexts(block: nn.Module, contexts: Contexts | None) -> tuple[Context, Context]:
    """Return the contexts of the forward pass and of its repetition, which sees the buffers of the
    first run.
    """
    # Without this, a module that changes its buffers as it runs (running means, power iterations)
    # changes them twice.
    first, again = contexts() if contexts else (nullcontext(), nullcontext())
    before = _buffers(block)
    return first, _replayed(block, before, again) if before else again


_Buffer = tuple[nn.Module, str, Tensor, Tensor]  # owner, name, tensor and a copy of its value


@contextmanager
def _replayed(block: nn.Module, before: list[_Buffer], again: Context) -> Iterator[None]:
    now = _buffers(block)
    _put(before)
    try:
        with again:
            yield
    finally:
        _put(now)


def _buffers(block: nn.Module) -> list[_Buffer]:
    return [
        (m, name, t, t.clone())
        for m in block.modules()
        for name, t in m.named_buffers(recurse=False)
    ]


def _put(buffers: list[_Buffer]) -> None:
    for owner, name, tensor, value in buffers:
        # Another block may have saved the tensor for its backward pass, where torch checks that it
        # has not changed.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
            tensor.copy_(value)
        owner._buffers[name] = tensor  # the module may have replaced it


# ---- budgets -------------------------------------------------------------------------------------


def choose_kept(
    module: nn.Module,
    run: Pass,
    *,
    captured: bool,
    device: torch.device | None = None,
    whole: nn.Module | None = None,
) -> None:
    """Choose which results blocks with a `Pointwise` or `Budget` policy keep, from one pass with
    fake tensors.

    Args:
        module: a module whose blocks follow a policy.
        run: runs a module on a batch; it is given a copy with fake tensors.
        whole: the module with tensors of its own shapes, if those of `module` are sharded.
        device: where the blocks will compute, if the module's tensors are elsewhere, as those of a
            streamed one are.
        captured: whether the blocks will run in a compiled graph, where they may compute and keep
            other tensors.

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
    recordings = recorded(whole or module, run, device, captured=captured, stored=budgeted)
    for name, plan in choosing.items():
        names = _kept_of(plan.policy, recordings[name])
        plan.contexts, plan.kept = (_keeping(names), str(sorted(names))) if names else (None, "")


def _kept_of(policy: OfBlock, recording: Recording) -> frozenset[tuple[str, int]]:
    curve = recording.curve()
    limit = curve[-1].stored_bytes
    if isinstance(policy, Remat.Budget):
        limit = round(policy.fraction * recording.stored_bytes)
    chosen = within(curve, limit)
    return frozenset(chosen.what) if chosen else frozenset()


def recorded(
    module: nn.Module,
    run: Pass,
    device: torch.device | None = None,
    *,
    captured: bool,
    stored: bool = True,
) -> dict[str, Recording]:
    """Return a recording of each block of a module, by name.

    Nothing is allocated, and neither the module nor the random state is changed.

    Args:
        module: see `choose_kept`.
        run: see `choose_kept`.
        device: see `choose_kept`.
        captured: see `choose_kept`.
        stored: whether to compute `stored_bytes` of captured blocks, which a budget needs; one
            block of each kind is traced as a graph for it.

    Raises:
        UsageError: the pass does not reach every block.
    """
    recordings = dict[str, Recording]()
    compiled = dict[Recording, int]()

    def noted(
        name: str, block: nn.Module, inner: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        output, recording = record(inner, [*block.parameters(), *block.buffers()], *args, **kwargs)
        if captured and stored:
            if recording not in compiled:  # traced once for blocks that are alike
                compiled[recording] = compat.stored_by_graph(inner, block, args, kwargs)
            # Recomputed operators between products are fused into the kernels that read them and
            # cost no measurable time (dev/log.md).
            recording = recording._replace(stored_bytes=compiled[recording], rest_flops=0)
        recordings.setdefault(name, recording)
        return output

    state = (*module.parameters(), *module.buffers())
    # The planner's module has fake tensors already, which work in their own mode only.
    mode = next(
        (t.fake_mode for t in state if isinstance(t, FakeTensor)),
        FakeTensorMode(allow_non_fake_inputs=True),
    )
    empty = {id(t): t if isinstance(t, FakeTensor) else _fake(t, mode, device) for t in state}
    reason = "they did not run"
    with mode, torch.enable_grad(), compat.as_if_compiling() if captured else nullcontext():
        try:
            twin = copy.deepcopy(module, dict(empty))
            for name, block in blocks(twin).items():
                plan = block.__dict__.pop("remat", None)
                inner = plan.inner if isinstance(plan, _Plan) else block.forward
                block.forward = functools.partial(noted, name, block, inner)
            run(twin)
        except Exception as error:  # a user's module may raise anything
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    missing = [name for name in blocks(module) if name not in recordings]
    if missing:
        raise UsageError(
            f"a budget needs to know what {missing[0]} computes, and a pass without numbers did not get there "
            f"({reason}): use Remat.Full() or Remat.Off()"
        )
    return recordings


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device | None) -> Tensor:
    moved = mode.from_tensor(tensor).detach().to(device or tensor.device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
