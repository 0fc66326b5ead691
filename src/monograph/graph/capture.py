"""Compile a step's functions in place; its modules, their names and checkpoints stay the same.

A step (`monograph.Step`) computes updates of a model. Its micro-step is the forward and the backward
pass of one micro-batch, and its `apply` updates the parameters by the summed gradient. A block is a module
that the model repeats, such as a layer of a transformer.

A capture compiles both. On a GPU, a step has a `recorder`, which also records the kernels of a micro-step
as a CUDA graph. A replay runs all of them again with a single launch (`monograph.graph.replay`).
"""

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.allocator import keep_freed_memory
from monograph.compat import inductor
from monograph.errors import UsageError
from monograph.graph import convolutions, matmul, recompute
from monograph.graph.compilable import AttributeValue, Compilable, Scope, has_head
from monograph.graph.inspect import blocks
from monograph.graph.remat import Policy, Remat
from monograph.graph.replay import HostState, Recorder, StaticInputs
from monograph.graph.siblings import split_fused_linears_at_blocks
from monograph.ops import materialize  # noqa: F401 - defines the operator that `compiled` lowers
from monograph.storage.package_code import code_digest

Backend = Literal["inductor", "aot_eager", "eager"]
Compiler = Callable[
    [Callable[..., Any]], Callable[..., Any]
]  # turns a function into a compiled one
# The beginnings of the lines that say why something is not replayed.
ONE_BY_ONE = "micro-steps are launched one by one"
UPDATES_ONE_BY_ONE = "the kernels of an update are launched one by one"
# A setting for Inductor (`_configure_inductor`): on a GPU, a kernel that reduces rows, such as a norm's, keeps
# rows of up to this many elements in registers, and reads longer rows twice. In most models, no norm has
# longer rows.
MAX_ROW_LENGTH = 4096
# The parts of the package that define operators, change graphs or change what Inductor does. A hash of their
# code is in the key of Inductor's cache (`_configure_inductor`), so a change to them makes Inductor compile
# again. The rest of the package is left out, because a change there needs no new compilation.
OPERATORS = (
    "compat",
    "decode/automaton_tables.py",
    "decode/chain.py",
    "decode/fast_sampler.py",
    "ensemble/call.py",
    "graph",
    "ops",
)


class FunctionsToCompile(Protocol):
    """The part of `monograph.step.parameters.Parameters` that a capture needs.

    That object has the step's trainable parameters, and knows which functions use them.
    """

    @property
    def begins_sums(self) -> bool:
        """Return whether the next micro-step writes gradients instead of adding to them."""

    @property
    def replays_update(self) -> bool:
        """Return whether a step with a recorder replays its `apply`, too, not only its micro-step."""

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the functions that a capture of this scope compiles."""


class Capturable(Protocol):
    """What a capture needs of a step; `monograph.Step` describes each attribute.

    A `Compilable` calls a function that a capture can replace. `former_values` lists the attributes
    that the capture replaced, with their values before, so that `uncapture` can restore them.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    remat: Policy
    device: torch.device
    scope: Scope | Literal["none"]
    recorder: Recorder | None
    announce: Callable[[str], None]
    micro_step: Callable[[object], None]
    former_values: list[AttributeValue]

    @property
    def forward(self) -> Compilable[..., Any]:
        """Return the function that a micro-step calls."""

    @property
    def apply(self) -> Compilable[[], Tensor]:
        """Return the function that updates the parameters by their summed gradient."""

    @property
    def optim(self) -> object:
        """Return the optimizer."""

    @property
    def planes(self) -> Sequence[object]:
        """Return the buffers of parameters, gradients and moments."""

    @property
    def parameters(self) -> FunctionsToCompile:
        """Return the object that has the step's parameters."""


S = TypeVar("S", bound=Capturable)
# Stands for the former value of an attribute that the object itself did not have, only its class.
# None cannot stand for it, because it may be a real value.
_UNSET = object()


def capture(step: S, backend: Backend = "inductor", scope: Scope = "whole") -> S:
    """Compile a step in place, in full graphs with static shapes.

    If the step has a `recorder`, as on a GPU, its `micro_step` (including the backward pass) is
    called twice, then recorded as a CUDA graph, and replayed from then on (`monograph.graph.replay`). An
    ensemble's `apply` is replayed, too: its members are small, so the host would need longer to launch
    its kernels one by one than the device needs to compute them.

    The module itself is not wrapped, so its state dict keeps its names. Each function is compiled
    at its first call. Before that call, load the weights, and run `monograph.trial`: it is one eager
    step, which finds the faults of a model much faster than a compilation.

    Args:
        step: a `monograph.Step`. Its forward pass, its evaluation and its update are replaced, or
            with the scope "blocks" the forward passes of blocks and the update.
        backend: "inductor", or "aot_eager" or "eager", which trace the same graphs without
            generating code. "eager" becomes "aot_eager" if a graph recomputes activations.
        scope: "whole": each function is one graph. "blocks": equal blocks of the model share one
            graph, the update (`apply`) has its own, and so has the loss's `head` (a function that
            computes the loss from hidden states) if it has one. The code between these graphs runs
            eagerly. The time to compile then does not grow with the number of blocks.

    Returns:
        The same step.

    Raises:
        UsageError: the model has no blocks but the scope is "blocks", or `step` is an engine,
            which contains a step and has its own `capture` (`monograph.engine`).
        CaptureFailed: the model has a 0-d float64 buffer. If a function cannot be captured as one
            graph, its first call raises this error, not `capture`.
    """
    if not hasattr(step, "micro_step"):
        raise UsageError(
            f"capture takes a monograph.Step, not a {type(step).__name__}; an engine has its own capture(window)"
        )
    _refuse_scalar_float64_buffers(step)
    capture_with(_compiler(step, backend, scope), step, scope)
    _start_replaying(step, scope)
    return step


def _compiler(step: Capturable, backend: Backend, scope: Scope) -> Compiler:
    """Return the function that compiles each of a step's functions."""
    # On a GPU, Inductor's one kernel for torch.cat of k tensors computes all k of them at every element
    # of the result. A kernel for each tensor avoids that.
    options = compat.split_cat_options() if step.device.type == "cuda" else {}
    backend = _backend_for_recomputation(step, backend, scope)
    return functools.partial(compiled, backend=backend, extra_options=options)


def _refuse_scalar_float64_buffers(step: Capturable) -> None:
    """Raise CaptureFailed if the model has a float64 buffer without dimensions."""
    for name, buffer in step.model.named_buffers():
        # torch 2.13 loses what a graph writes to such a buffer (dev/log.md).
        if buffer.ndim == 0 and buffer.dtype == torch.float64:
            raise CaptureFailed(
                f"the buffer {name} is float64 and has no dimension: torch loses what is written to it; make it "
                "float32, or give it a dimension"
            )


def _backend_for_recomputation(step: Capturable, backend: Backend, scope: Scope) -> Backend:
    """Return the backend, or "aot_eager" instead of "eager" if graphs recompute activations.

    Under "eager", a recomputation would use other random numbers than the forward pass.
    """
    # `Off` recomputes nothing. Under `Offload`, eager code recomputes a block: it calls the block's graph
    # again. If each block is a graph (scope "blocks"), this is also true of `Full`. In all other cases the
    # recomputation may be inside of a graph.
    recompute_nothing_in_graphs: list[Policy] = [Remat.Off(), Remat.Offload()]
    if scope == "blocks":
        recompute_nothing_in_graphs.append(Remat.Full())
    graphs_recompute = step.remat not in recompute_nothing_in_graphs
    return "aot_eager" if backend == "eager" and graphs_recompute else backend


def capture_with(compiler: Compiler, step: Capturable, scope: Scope) -> None:
    """Do what `capture` does, but with any compiler, and without replays."""
    replacements = [
        AttributeValue(owner=compilable, name="function", value=compiler(compilable.function))
        for compilable in step.parameters.captured(scope)
    ]
    if scope == "blocks":
        replacements += _replacements_of_blocks(step, compiler)
    replacements.append(AttributeValue(step, "scope", scope))
    step.former_values = [_replace(replacement) for replacement in replacements]


def _start_replaying(step: Capturable, scope: Scope) -> None:
    """Replay the step's micro-step from now on, or announce why it cannot be replayed."""
    if step.recorder is None:
        return
    obstacle = obstacle_to_replay(step.remat, scope)
    if obstacle:
        step.announce(f"{ONE_BY_ONE}: {obstacle}")
    else:
        step.former_values.append(_replace(AttributeValue(step, "micro_step", replayed(step))))
    if step.parameters.replays_update:
        update = AttributeValue(step.apply, "function", replayed_update(step))
        step.former_values.append(_replace(update))


def obstacle_to_replay(remat: Policy, scope: Literal["none", "whole", "blocks"]) -> str | None:
    """Return why a step with this policy and scope cannot be replayed on any device.

    Returns:
        The reason; None if there is no such reason.
    """
    if scope == "none":
        return "nothing is captured"
    # A graph of the whole step contains its recomputations.
    if scope == "whole" or remat == Remat.Off():
        return None
    # Under `Full` and `Offload`, eager code recomputes blocks. It copies the random state to the host,
    # which has to wait for the device.
    if isinstance(remat, Remat.Full | Remat.Offload):
        return "blocks are recomputed between graphs"
    # `Pointwise` and `Budget` recompute inside of the blocks' graphs (see `recompute.forward_to_compile`).
    return "graphs of blocks that recompute are not replayed"


def replayed(step: Capturable) -> StaticInputs:
    """Return a replacement for `step.micro_step` that records the micro-step and replays it.

    If a batch cannot be replayed, the step announces the reason.
    """
    assert step.recorder is not None
    return StaticInputs(
        function=step.micro_step,
        recorder=step.recorder,
        device=step.device,
        # These are the objects by which Python code decides what a micro-step does. If one of their
        # attributes changes, the micro-step is recorded again.
        host=lambda: HostState(
            step.model, step.loss, attributes=[(step, "loss"), (step.forward, "function")]
        ),
        announce=lambda reason: step.announce(f"{ONE_BY_ONE}: {reason}"),
        # The first micro-step of an update writes gradients, and the others add to them.
        mode=lambda: step.parameters.begins_sums,
    )


def replayed_update(step: Capturable) -> StaticInputs:
    """Return a replacement for what `step.apply` calls, which records the update and replays it.

    The learning rates and all counters are on the device, where a replay reads them.
    """
    assert step.recorder is not None
    # The lambda must not look up `step.apply.function`: that is replaced by what is returned here.
    apply = step.apply.function
    return StaticInputs(
        function=lambda _: apply(),
        recorder=step.recorder,
        device=step.device,
        # Of the step itself only some attributes count. Others, such as `index`, change in every update.
        host=lambda: HostState(
            step.parameters,
            step.optim,
            *step.planes,
            attributes=[(step, name) for name in ("optim", "clip", "precision", "loss")],
        ),
        announce=lambda reason: step.announce(f"{UPDATES_ONE_BY_ONE}: {reason}"),
    )


def is_replayed(step: Capturable) -> bool:
    """Return whether the step has a recorded micro-step."""
    return isinstance(step.micro_step, StaticInputs) and step.micro_step.graph_count > 0


def stop_replaying(step: Capturable) -> bool:
    """Free the memory of recorded micro-steps and updates, and launch all one by one from now on.

    Returns:
        Whether any was recorded.
    """
    recorded = [
        function.stop_replaying()
        for function in (step.micro_step, step.apply.function)
        if isinstance(function, StaticInputs)
    ]
    return any(recorded)


def uncapture(step: Capturable) -> None:
    """Undo a capture: the step runs eagerly again."""
    former_values = step.former_values
    step.former_values = []
    # In reverse order, so that an attribute that was replaced twice gets its first value back.
    for owner, name, former_value in reversed(former_values):
        if former_value is _UNSET:
            delattr(owner, name)
        else:
            setattr(owner, name, former_value)


@contextmanager
def capture_suspended(step: Capturable) -> Iterator[None]:
    """Undo a step's capture in the `with` block, and restore the same graphs afterwards.

    Sampling from the step's module needs this: the blocks' graphs were made for training and
    evaluation, and would be compiled again for each layer's cache.
    """
    # These are the compiled functions, so nothing has to be compiled again after the `with` block.
    compiled_values = [
        AttributeValue(owner, name, vars(owner)[name]) for owner, name, _ in step.former_values
    ]
    uncapture(step)
    try:
        yield
    finally:
        step.former_values = [_replace(replacement) for replacement in compiled_values]


def _replacements_of_blocks(step: Capturable, compiler: Compiler) -> list[AttributeValue]:
    """Return the attributes that get compiled functions: blocks' forward passes, and the loss."""
    model_blocks = blocks(step.model)
    if not model_blocks:
        raise UsageError(
            "the module has no block, which is a module with submodules inside an nn.ModuleList or nn.Sequential: "
            "capture it as a whole"
        )
    # Linear layers of several blocks may have been fused into one product. A graph of one block must
    # not contain the layers of others.
    split_fused_linears_at_blocks(step.model)
    # Dynamo reads `grad` of a block's input, which is not a leaf.
    compat.ignore_warning_of_block_input_grad()
    # All blocks call one compiled function, so that equal blocks share a graph. The function gets a graph
    # for each kind of block, and torch's default limit is eight graphs of a function.
    compat.allow_variants()
    call_block = compiler(_call_block)
    # `Llama` reads this attribute when it makes its attention masks.
    replacements = [AttributeValue(step.model, "blocks_captured", True)]
    for block in model_blocks.values():
        # In most cases, the forward pass to compile is `block.forward`. But under `Full` and `Offload`,
        # `block.forward` is eager code that recomputes the block, and the forward pass to compile is
        # `block.remat.own_forward`.
        owner, name = recompute.forward_to_compile(block)
        forward = getattr(owner, name)
        method_function = getattr(forward, "__func__", None)
        if method_function:
            # Dynamo shares a graph between blocks only if the block is an argument of the compiled
            # function (dev/log.md).
            compiled_forward: Callable[..., Any] = functools.partial(
                call_block, method_function, block
            )
        else:  # the forward is not a method, but a function that was set on the block
            compiled_forward = compiler(forward)
        replacements.append(AttributeValue(owner, name, compiled_forward))
    if has_head(step.loss):
        loss = copy.copy(step.loss)  # the caller's own loss is not changed
        loss.head = compiler(loss.head)
        replacements.append(AttributeValue(step, "loss", loss))
    return replacements


def _call_block(
    forward: Callable[..., Any], block: object, *arguments: object, **keywords: object
) -> Any:
    """Call the forward pass of a block. Equal blocks share a graph only if the block is an argument."""
    return forward(block, *arguments, **keywords)


def _replace(replacement: AttributeValue) -> AttributeValue:
    """Set an attribute, and return its former value; `_UNSET` if only the class had the attribute."""
    owner, name, value = replacement
    former_value = vars(owner).get(name, _UNSET)
    setattr(owner, name, value)
    return AttributeValue(owner, name, former_value)


class CaptureFailed(UsageError):
    """The error of a function that cannot be captured as one graph; its message is one line."""


def compiled(
    function: Callable[..., Any],
    backend: Backend = "inductor",
    extra_options: Mapping[str, Any] = types.MappingProxyType({}),
) -> Callable[..., Any]:
    """Return the function compiled as one full graph with static shapes.

    With fake tensors, which have no numbers, a call runs the function itself.

    Args:
        function: the function.
        backend: see `capture`.
        extra_options: options of Inductor in addition to those that every function gets.

    Raises:
        CaptureFailed: torch cannot trace or compile the function; a call raises it.
    """
    # By default, torch's cache on disk does not store graphs with an `autograd.Function` or a named
    # kernel of attention.
    compat.cache_custom_functions()
    compat.cache_attention_kernels()
    # By default, torch compiles a backward pass inside of the autocast context of the forward pass. For
    # example, if a part of the forward pass disables autocast and computes a product in fp32, autocast
    # would round the products of its backward pass.
    compat.differentiate_outside_autocast()
    options = None
    if backend == "inductor":
        _configure_inductor()
        options = _inductor_options() | {**extra_options}
    compiler = compat.aot_eager() if backend == "aot_eager" else backend
    graph = torch.compile(
        _with_own_code(function), fullgraph=True, dynamic=False, backend=compiler, options=options
    )

    @functools.wraps(function)
    def call_graph(*arguments: object, **keywords: object) -> Any:
        if compat.makes_fake_tensors():  # torch.compile refuses to trace in a dispatch mode
            return function(*arguments, **keywords)
        try:
            # An error inside a torch.func transform leaves saved-tensor hooks disabled.
            with compat.restore_saved_tensor_hooks():
                return graph(*arguments, **keywords)
        except Exception as error:
            capture_error = _capture_error(error)
            if capture_error is None:
                raise
            failure = CaptureFailed(failure_reason(capture_error))
        # This is outside of the except block, so that Python does not print torch's own error, too. Its
        # dozens of lines say no more than the reason. TORCH_LOGS="+dynamo" shows more.
        raise failure

    return call_graph


def _capture_error(error: BaseException) -> BaseException | None:
    """Return the error that says why a capture failed, or None if the error has another cause.

    When a capture error leaves a torch.func transform, torch 2.11 raises a second error, which says
    nothing of the first. The first one is then the second one's context.
    """
    for candidate in (error, error.__context__):
        if candidate is not None and compat.is_capture_error(candidate):
            return candidate
    return None


def _configure_inductor() -> None:
    """Change what Inductor does by default in this process."""
    compat.quiet_missing_tf32()
    # A process that is killed while it compiles leaves truncated libraries, on which later ones
    # would fail.
    compat.remove_truncated_libraries()
    # torch's key of Inductor's cache does not depend on the vector width, so a processor of another width
    # would find and run wrong code (dev/log.md).
    compat.key_cache_by_vector_width()
    # torch's key does not depend on the code of custom operators either, so a later version of the package
    # would run graphs that an earlier version compiled.
    compat.key_cache_by_code(code_digest(*OPERATORS))
    # By default, Inductor builds a library for each kernel on a CPU.
    compat.build_kernels_together()
    # By default, glibc returns freed blocks to the system, and each page of the next block costs a
    # page fault.
    keep_freed_memory()
    if torch.cuda.is_available():
        # A GPU's kernel of attention has the strides of a block mask as constants. By default, torch may
        # change the strides after it generated the kernel, which then reads wrong elements of the mask.
        compat.keep_strides_of_block_masks()
        compat.read_wide_rows_once(MAX_ROW_LENGTH)
    # `materialize` must write its result to memory. Otherwise Inductor fuses an update's coefficients
    # into the loop over the parameters, and computes them again for every 16 elements.
    compat.lower_to_memory(torch.ops.monograph.materialize.default)


def _inductor_options() -> dict[str, Any]:
    """Return the options of Inductor that have Monograph's passes, which change graphs.

    Inductor's cache needs a key for each pass, which is the hash of its source file.
    """
    # The partitioner splits a graph into a forward and a backward graph. By default, it has two faults.
    # It keeps the dense copy of every frozen int8 or nf4 weight for the backward pass. And it may
    # recompute a value from a buffer that the forward pass has overwritten in the meantime. The marks
    # of `mark_recomputed` tell it to recompute these copies, and to keep these values.
    mark_recomputed = compat.graph_pass(inductor.mark_recomputed, inductor.__file__)
    rewrite_convolutions = compat.graph_pass(convolutions.rewrite, convolutions.__file__)
    return matmul.inductor_options() | {
        "joint_custom_pre_pass": rewrite_convolutions,
        "joint_custom_post_pass": mark_recomputed,
    }


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with a copy of its code object.

    Dynamo stores compiled graphs by code object. Without the copy all captures of a process would
    share one list of graphs, search it at each call, and fail when it is full.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_own_code(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__module__ = function.__module__
    copied.__qualname__ = function.__qualname__
    copied.__dict__ |= function.__dict__
    return copied


def failure_reason(error: BaseException) -> str:
    """Return one line that says why a capture failed and how to fix it, from torch's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Dynamo quotes an exception that the function itself raised.
    raised = next((line for line in lines if "raised exception" in line), None)
    if raised:
        return raised.partition("raised exception ")[2]
    # If a function reached the recompile limit, torch's message is only "Hard failure due to
    # fullgraph=True".
    if lines and "fullgraph=True" in lines[0]:
        return (
            "it was compiled too often: an attribute of the module changes between calls; store it in a buffer, and "
            "write the buffer in place"
        )
    # A C++ compiler's or linker's own message says more than torch's first line.
    compiler_error = next(
        (line for line in lines if ": error:" in line or "cannot find" in line), None
    )
    # torch's first line may be a heading without the problem, such as "backend='inductor' raised:".
    problem = compiler_error or next(
        (line for line in lines if not line.endswith("raised:")), type(error).__name__
    )
    # The innermost frame outside of torch is the line that the user can change.
    where = next(
        (line for line in reversed(lines) if line.startswith("File ") and "/torch/" not in line), ""
    )
    detail = next(
        (line.partition(": ")[2] for line in lines if line.startswith("Explanation:")), ""
    )
    hint = next(
        (line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")), ""
    )
    return "; ".join(part for part in (problem, where, detail or hint) if part)
