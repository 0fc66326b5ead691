"""Make the blocks of any module follow a recomputation policy, in place.

A block is a module that the model repeats, such as a layer of a transformer. A policy
(`monograph.graph.remat`) says which results of a block are kept for the backward pass; all others
are recomputed in the backward pass. The names of the module's parameters stay the same, and so do
checkpoints.

Each block's forward pass is wrapped in `torch.utils.checkpoint`. A function decides for each of the
block's operators whether its result is kept. torch calls this function while it runs a block
eagerly, and the compiler calls it while it traces a block.

Under the policy `Offload`, a block keeps only its input, in the host's memory. The input is copied
there while the block computes, and back while the following block is recomputed. Both copies run on
a separate stream.
"""

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

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
from monograph.graph.remat import BlockPolicy, Policy, Recording, Remat, cheapest_within, record
from monograph.graph.siblings import split_fused_linears_at_blocks

ContextManager = AbstractContextManager[object]
# A function that makes the two contexts in which a forward pass and its recomputation run.
Contexts = Callable[[], tuple[ContextManager, ContextManager]]

# ---- inputs in the host's memory -----------------------------------------------------------------


class CopyStream:
    """A separate stream for copies between a device and its host.

    A CPU has one memory and no streams; there a copy is made before the method returns.

    Attributes:
        stream: the CUDA stream; None on a CPU.
        last_sent: a weak reference to the input that was offloaded last; None before the first.
    """

    def __init__(self, device: torch.device):
        """Open a stream of a device."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last_sent: weakref.ref[OffloadedInput] | None = None

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start a copy to pinned host memory and return the copy.

        Work that is queued later on this stream begins after the copy has ended.
        """
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.stream is not None)
        if self.stream is None:
            return on_host.copy_(tensor)
        # The current stream may still be computing the tensor.
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            on_host.copy_(tensor, non_blocking=True)
        # The allocator must not reuse the tensor's memory before it is copied.
        tensor.record_stream(self.stream)
        return on_host

    def to_device(
        self, on_host: Tensor, device: torch.device
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy back to the device.

        Returns:
            The tensor on the device, and the event of the copy's end; the event is None on a CPU.
        """
        if self.stream is None:
            return on_host.clone(), None
        with torch.cuda.stream(self.stream):
            return on_host.to(device, non_blocking=True), self.stream.record_event()


class OffloadedInput:
    """A block's input and its copy on the host.

    `take` returns the input. Its first call is in the forward pass, and returns the tensor itself. Later
    calls are in recomputations, and return copies that come back from the host.

    Attributes:
        copy_stream: the stream of the copies.
        device: the device of the input.
        differentiable: whether the input needs a gradient.
        tensor: the input itself, until the first `take`; then None, so that its memory is freed.
        on_host: the copy on the host.
        prefetched: the copy that comes back and the event of its end, from `prefetch` until `take`.
        sent_before: a weak reference to the input that was offloaded before this one; None: this is
            the first.
    """

    def __init__(self, tensor: Tensor, copy_stream: CopyStream):
        """Start the copy to the host; the tensor itself is held until the first `take`."""
        self.copy_stream = copy_stream
        self.device = tensor.device
        self.differentiable = tensor.requires_grad
        self.tensor: Tensor | None = tensor
        self.on_host = copy_stream.to_host(tensor.detach())
        self.prefetched: tuple[Tensor, torch.cuda.Event | None] | None = None
        # The reference is weak, because strong references would keep all earlier inputs alive.
        self.sent_before = copy_stream.last_sent
        copy_stream.last_sent = weakref.ref(self)

    def prefetch(self) -> None:
        """Start the copy back to the device, unless the tensor is there or its copy has started."""
        if self.tensor is None and self.prefetched is None:
            self.prefetched = self.copy_stream.to_device(self.on_host, self.device)

    def take(self) -> Tensor:
        """Return the input on the device; see the class.

        If it comes from the host, also start to copy back the input that was offloaded before this one:
        the backward pass goes through the blocks in reverse, and so needs that input next.
        """
        if self.tensor is not None:
            tensor = self.tensor
            self.tensor = None
            return tensor
        self.prefetch()
        assert self.prefetched is not None
        tensor, arrived = self.prefetched
        self.prefetched = None
        needed_next = self.sent_before() if self.sent_before else None  # None also if it is gone
        if needed_next:
            needed_next.prefetch()
        if arrived is not None:
            # The copy is written on the copy stream and read on the current one: the current stream
            # must wait for it, and the allocator must know that both use its memory.
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            tensor.record_stream(stream)
        return tensor.requires_grad_(self.differentiable)


_copy_stream = functools.cache(CopyStream)  # one for each device


def checkpoint_offloaded(
    forward: Callable[..., object], contexts: Contexts, *args: object, **kwargs: Any
) -> object:
    """Return `forward(*args, **kwargs)`; for the backward pass, its first argument is kept on the host
    and all else is recomputed from it.

    Args:
        forward: the forward pass of a block.
        contexts: makes the contexts of the forward pass and of its recomputation, see
            `torch.utils.checkpoint`.
        args: the block's positional arguments; the first is offloaded if it is a tensor.
        kwargs: its keyword arguments, which stay on the device.
    """
    if not args or not isinstance(args[0], Tensor):
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    offloaded_input = OffloadedInput(args[0], _copy_stream(args[0].device))

    def forward_from_offloaded(*further_args: object, **kwargs: object) -> object:
        return forward(offloaded_input.take(), *further_args, **kwargs)

    return checkpoint(
        forward_from_offloaded, *args[1:], use_reentrant=False, context_fn=contexts, **kwargs
    )


# ---- policies ------------------------------------------------------------------------------------

RunModule = Callable[[nn.Module], object]  # runs a module on a batch


@dataclass
class _Plan:
    """How a block follows its policy. It is stored as the block's attribute `remat`.

    Attributes:
        policy: the block's policy.
        own_forward: the forward pass that the block had before it followed a policy.
        contexts: makes the contexts in which torch keeps the results that the policy chose; None if no
            result is kept.
        kept_names: the names of these results, as text; "" if no result is kept.
    """

    policy: BlockPolicy
    own_forward: Callable[..., object]
    contexts: Contexts | None = None
    # Blocks share a captured graph unless Dynamo sees them differ. It compares functions by their
    # code alone, which is the same for all contexts (dev/log.md). It compares this text by value.
    kept_names: str = ""


def apply_policy(module: nn.Module, policy: Policy) -> None:
    """Make every block of a module follow the policy instead of an earlier one.

    `Remat.Off()` gives the blocks their own forward passes back.

    Raises:
        UsageError: the module has no blocks, the number of policies in a `PerLayer` is not the number
            of blocks, or a block has no forward pass.
    """
    blocks_by_name = blocks(module)
    policies = _policies_of_blocks(policy, len(blocks_by_name))
    if policy != Remat.Off():
        for name, block in blocks_by_name.items():
            if type(block).forward is nn.Module.forward:
                raise UsageError(
                    f"{name} ({type(block).__name__}) has no forward pass to recompute: use Remat.Off()"
                )
        # A block is recomputed alone, so it must not need fused siblings in another block.
        split_fused_linears_at_blocks(module)
    for block, block_policy in zip(blocks_by_name.values(), policies, strict=True):
        plan = block.__dict__.pop("remat", None)
        if isinstance(plan, _Plan):
            # Without the attribute of the object, the method of its class is visible again.
            del block.forward
            # If its own forward pass was not that method, a user had assigned it to the block.
            if not _is_method_of_class(plan.own_forward, block):
                block.forward = plan.own_forward
        if block_policy in (Remat.Off(), Remat.Budget(1.0)):  # everything is kept
            continue
        block.remat = _Plan(block_policy, block.forward)  # type: ignore[assignment]
        block.forward = MethodType(_forward_with_policy, block)


def _is_method_of_class(forward: Callable[..., Any], block: nn.Module) -> bool:
    """Return whether a forward pass is the method that the block's class defines."""
    return isinstance(forward, MethodType) and forward.__func__ is type(block).forward


def _policies_of_blocks(policy: Policy, block_count: int) -> tuple[BlockPolicy, ...]:
    """Return the policy of each block.

    Raises:
        UsageError: see `apply_policy`.
    """
    if not isinstance(policy, Policy):
        raise UsageError(
            f"remat = {policy!r}: expected a policy such as Remat.Full() or Remat.Budget(0.5)"
        )
    if not isinstance(policy, Remat.PerLayer):
        if not block_count and policy != Remat.Off():
            raise UsageError(
                "nothing to recompute: the module has no block, which is a module with submodules inside an "
                "nn.ModuleList or nn.Sequential; use Remat.Off()"
            )
        return (policy,) * block_count
    if len(policy.policies) != block_count:
        raise UsageError(
            f"Remat.PerLayer has {len(policy.policies)} policies, but the module has {block_count} blocks: "
            "give one policy for each block"
        )
    for block_policy in policy.policies:
        if not isinstance(block_policy, BlockPolicy):
            raise UsageError(
                f"Remat.PerLayer holds {block_policy!r}: expected the policy of one block"
            )
    return policy.policies


def forward_to_compile(block: nn.Module) -> tuple[object, str]:
    """Return where a capture finds the forward pass of a block: an object, and the attribute's name.

    Under `Full` and `Offload` the block's own forward pass is compiled, and recomputation stays
    outside of the graph. Under all other policies the graph includes recomputation.
    """
    plan = block.__dict__.get("remat")
    if isinstance(plan, _Plan) and plan.policy in (Remat.Full(), Remat.Offload()):
        return plan, "own_forward"
    return block, "forward"


class _BlockWithPolicy(nn.Module):
    """The type of a block that follows a policy, for type checkers. No object has this class."""

    remat: _Plan


def _forward_with_policy(block: _BlockWithPolicy, *args: object, **kwargs: Any) -> object:
    """Run a block's own forward pass, so that the backward pass recomputes what its policy says."""
    plan = block.remat
    if not torch.is_grad_enabled():  # there is no backward pass, so nothing is recomputed
        return plan.own_forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        contexts = functools.partial(_eager_contexts, block, plan.contexts)
        if isinstance(plan.policy, Remat.Offload):
            return checkpoint_offloaded(plan.own_forward, contexts, *args, **kwargs)
        return checkpoint(
            plan.own_forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
        )
    if isinstance(plan.policy, Remat.Offload):
        raise UsageError(
            "Remat.Offload() moves tensors to the host between graphs, so it cannot be inside one: capture the step "
            "with scope blocks, or do not capture it"
        )
    # Dynamo guards on `kept_names` because it is read here; see `_Plan`.
    if plan.contexts is None or not plan.kept_names:
        return checkpoint(plan.own_forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(
        plan.own_forward, *args, use_reentrant=False, context_fn=plan.contexts, **kwargs
    )


# ---- results to keep -----------------------------------------------------------------------------


@functools.cache  # one function for equal sets of names, so that equal blocks share a captured graph
def _contexts_keeping(names: frozenset[tuple[str, int]]) -> Contexts:
    """Return contexts that keep the named results.

    A name has two parts: the operator's name, and which of the block's calls of this operator it is,
    counted from 0.
    """

    def contexts() -> tuple[ContextManager, ContextManager]:
        # torch passes only the operator, so its calls are counted here: in the forward pass, and
        # separately in the recomputation.
        call_counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

        def keep_or_recompute(
            context: SelectiveCheckpointContext, operator: object, *args: object, **kwargs: object
        ) -> CheckpointPolicy:
            name = str(operator)
            counts = call_counts[context.is_recompute]
            is_kept = (name, counts[name]) in names
            counts[name] += 1
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.MUST_RECOMPUTE

        return create_selective_checkpoint_contexts(keep_or_recompute)

    return contexts


def _eager_contexts(
    block: nn.Module, contexts: Contexts | None
) -> tuple[ContextManager, ContextManager]:
    """Return the contexts of the forward pass and of its recomputation.

    A module may change buffers, such as running means, in its forward pass. So the recomputation must
    read the values that the buffers had before the forward pass, and must not change the buffers a
    second time: after it, they get the values back that they had before it.
    """
    forward_context, recomputation_context = (
        contexts() if contexts else (nullcontext(), nullcontext())
    )
    buffers_before = _copy_buffers(block)
    if not buffers_before:
        return forward_context, recomputation_context
    return forward_context, _with_buffers(block, buffers_before, recomputation_context)


class _BufferCopy(NamedTuple):
    """A buffer of a module, with a copy of its numbers."""

    owner: nn.Module
    name: str
    tensor: Tensor  # the buffer
    value: Tensor  # the copy


@contextmanager
def _with_buffers(
    block: nn.Module, buffers: list[_BufferCopy], context: ContextManager
) -> Iterator[None]:
    """Enter a context with earlier values in a block's buffers; restore the current ones after it."""
    current = _copy_buffers(block)
    _restore_buffers(buffers)
    try:
        with context:
            yield
    finally:
        _restore_buffers(current)


def _copy_buffers(block: nn.Module) -> list[_BufferCopy]:
    return [
        _BufferCopy(owner, name, tensor, tensor.clone())
        for owner in block.modules()
        for name, tensor in owner.named_buffers(recurse=False)
    ]


def _restore_buffers(buffers: list[_BufferCopy]) -> None:
    for buffer in buffers:
        # Another block may have saved the tensor for its backward pass. torch refuses a saved tensor
        # whose version has changed, so the version is preserved.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffer.tensor):
            buffer.tensor.copy_(buffer.value)
        buffer.owner._buffers[buffer.name] = buffer.tensor  # the module may have replaced it


# ---- budgets -------------------------------------------------------------------------------------


def choose_kept_results(
    module: nn.Module,
    run: RunModule,
    *,
    captured: bool,
    device: torch.device | None = None,
    unsharded: nn.Module | None = None,
) -> None:
    """Set in each block with a `Pointwise` or `Budget` policy which results it keeps.

    The choice needs one pass with fake tensors, which have shapes but no numbers.

    Args:
        module: a module whose blocks follow a policy.
        run: runs a module on a batch; it is given a copy with fake tensors.
        captured: whether the blocks will run in a compiled graph, which may compute and keep other
            tensors than an eager pass.
        device: where the blocks will compute, if the module's tensors are on another device, such as
            those of a streamed module; None: the device of the tensors.
        unsharded: the module with tensors of full shapes, if those of `module` are sharded; None
            otherwise.

    Raises:
        UsageError: the pass does not reach every block.
    """
    plans = dict[str, _Plan]()
    for name, block in blocks(module).items():
        plan = block.__dict__.get("remat")
        if isinstance(plan, _Plan) and isinstance(plan.policy, (Remat.Pointwise, Remat.Budget)):
            plans[name] = plan
    if not plans:
        return
    if captured:
        compat.quiet_selective_recompute()
    recordings = record_blocks(
        unsharded or module,
        run,
        device,
        captured=captured,
        with_stored_bytes=any(isinstance(plan.policy, Remat.Budget) for plan in plans.values()),
    )
    for name, plan in plans.items():
        kept_results = _results_to_keep(plan.policy, recordings[name])
        plan.contexts = _contexts_keeping(kept_results) if kept_results else None
        plan.kept_names = str(sorted(kept_results)) if kept_results else ""


def _results_to_keep(policy: BlockPolicy, recording: Recording) -> frozenset[tuple[str, int]]:
    """Return the names of the products that a `Pointwise` or `Budget` policy keeps."""
    choices = recording.choices()
    if isinstance(policy, Remat.Budget):
        limit_bytes = round(policy.fraction * recording.stored_bytes)
    else:
        limit_bytes = choices[-1].stored_bytes  # all products
    choice = cheapest_within(choices, limit_bytes)
    return frozenset(choice.selection) if choice else frozenset()


def record_blocks(
    module: nn.Module,
    run: RunModule,
    device: torch.device | None = None,
    *,
    captured: bool,
    with_stored_bytes: bool = True,
) -> dict[str, Recording]:
    """Return a recording of each block of a module, by name.

    Tensors are fake, so no memory is allocated for them. Neither the module nor the random state is
    changed.

    Args:
        module: see `choose_kept_results`.
        run: see `choose_kept_results`.
        device: see `choose_kept_results`.
        captured: see `choose_kept_results`.
        with_stored_bytes: whether to compute `stored_bytes` of captured blocks, which a budget
            needs. One block of each kind is traced as a graph for this.

    Raises:
        UsageError: the pass does not reach every block.
    """
    recordings = dict[str, Recording]()
    bytes_stored_by_graph = dict[Recording, int]()

    def forward_and_record(
        name: str,
        block: nn.Module,
        own_forward: Callable[..., object],
        *args: object,
        **kwargs: object,
    ) -> object:
        """Run a block's own forward pass, as the fake module's blocks do, and record its costs."""
        state = [*block.parameters(), *block.buffers()]
        output, recording = record(own_forward, state, *args, **kwargs)
        if captured and with_stored_bytes:
            if recording not in bytes_stored_by_graph:  # equal blocks are traced once
                bytes_stored_by_graph[recording] = compat.bytes_saved_for_backward(
                    own_forward, block, args, kwargs
                )
            # `rest_flops` is 0, because the recomputed operators between products are fused into the
            # kernels that read them, and take no measurable time (dev/log.md).
            recording = recording._replace(
                stored_bytes=bytes_stored_by_graph[recording], rest_flops=0
            )
        # If a block is called several times, its first call counts.
        recordings.setdefault(name, recording)
        return output

    module_state = (*module.parameters(), *module.buffers())
    # The planner's module has fake tensors already, which work only in the mode that made them.
    fake_mode = next(
        (tensor.fake_mode for tensor in module_state if isinstance(tensor, FakeTensor)),
        FakeTensorMode(allow_non_fake_inputs=True),
    )
    fake_by_id = {id(tensor): _fake(tensor, fake_mode, device) for tensor in module_state}
    compiling = compat.as_if_compiling() if captured else nullcontext()
    reason = "they did not run"  # unless the pass fails with an error
    with fake_mode, torch.enable_grad(), compiling:
        try:
            # For an object whose id is in this dict, `deepcopy` takes the dict's value as the copy.
            fake_module = copy.deepcopy(module, dict(fake_by_id))
            for name, block in blocks(fake_module).items():
                plan = block.__dict__.pop("remat", None)
                own_forward = plan.own_forward if isinstance(plan, _Plan) else block.forward
                block.forward = functools.partial(forward_and_record, name, block, own_forward)
            run(fake_module)
        except Exception as error:  # a user's module may raise anything
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    missing = [name for name in blocks(module) if name not in recordings]
    if missing:
        raise UsageError(
            f"a budget needs to know what {missing[0]} computes, but a pass with fake tensors did not reach it "
            f"({reason}): use Remat.Full() or Remat.Off()"
        )
    return recordings


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device | None) -> Tensor:
    """Return a fake tensor or parameter of the tensor's shape and dtype, on `device` if given.

    A tensor that is fake already is returned itself.
    """
    if isinstance(tensor, FakeTensor):
        return tensor
    moved = mode.from_tensor(tensor).detach().to(device or tensor.device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
