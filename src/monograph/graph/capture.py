"""Compile a step's functions in place; its modules, their names and checkpoints stay the same."""

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.allocator import keep_freed_memory
from monograph.compat import inductor
from monograph.errors import UsageError
from monograph.graph import convolutions, matmul, recompute
from monograph.graph.compilable import Compilable, Replaced, Scope
from monograph.graph.inspect import blocks
from monograph.graph.remat import Policy, Remat
from monograph.graph.replay import HostState, Recorder, StaticInputs
from monograph.graph.siblings import within_blocks
from monograph.ops import materialize  # noqa: F401 - its operator

Backend = Literal["inductor", "aot_eager", "eager"]
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
ONE_BY_ONE = "micro-steps are launched one by one"


class Compiles(Protocol):
    """Parameters that name the functions that a capture compiles."""

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return these functions."""


class Capturable(Protocol):
    """What a capture needs of a step; `monograph.Step` describes each attribute."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    remat: Policy
    device: torch.device
    scope: Scope | Literal["none"]
    recorder: Recorder | None
    announce: Callable[[str], None]
    micro_step: Callable[[object], None]
    replaced: list[Replaced]

    @property
    def forward(self) -> Compilable[..., Any]:
        """Return the function that a micro-step calls."""

    @property
    def parameters(self) -> Compiles:
        """Return the step's parameters."""


S = TypeVar("S", bound=Capturable)
# Stands for the former value of an attribute that the owner itself did not have, only its class;
# None may be a value.
_UNSET = object()


def capture(step: S, backend: Backend = "inductor", scope: Scope = "whole") -> S:
    """Compile a step in place, in full graphs with static shapes.

    If the step has a `recorder`, as on a GPU, its `micro_step` (including the backward pass) is
    called twice, then recorded, and replayed from then on (`monograph.graph.replay`).

    The module itself is not wrapped, so its state dict keeps its names. Each function is compiled
    at its first call; load weights and run `trial` before.

    Args:
        step: a `monograph.Step`; the functions that its parameters name are replaced.
        backend: "inductor", or "aot_eager" or "eager", which trace the same graphs without
            generating code. "eager" becomes "aot_eager" if a graph recomputes activations.
        scope: "whole": each function is one graph. "blocks": equal blocks of the model share one
            graph, the loss's `head`, if it has one, is another, and `apply` a third; the code
            between them runs eagerly. The time to compile then does not grow with the depth.

    Returns:
        The same step.

    Raises:
        UsageError: the model has no blocks but the scope is "blocks", or `step` is an engine.
        CaptureFailed: the model has a 0-d float64 buffer; or a function cannot be captured as one
            graph, which its first call raises.
    """
    if not hasattr(step, "micro_step"):
        raise UsageError(
            f"capture takes a monograph.Step, not a {type(step).__name__}; an engine has its own capture(window)"
        )
    _refuse_scalar_float64_buffers(step)
    capture_by(_compiler(step, backend, scope), step, scope)
    _start_replaying(step, scope)
    return step


def _compiler(step: Capturable, backend: Backend, scope: Scope) -> Compiler:
    # On a GPU, a kernel that computes all parts of a concatenation at once computes every part for
    # each part's elements.
    options = compat.split_cat_options() if step.device.type == "cuda" else {}
    backend = _backend_that_recomputes_alike(step, backend, scope)
    return functools.partial(compiled, backend=backend, more=options)


def _refuse_scalar_float64_buffers(step: Capturable) -> None:
    for name, buffer in step.model.named_buffers():
        # A bug of torch 2.13, see dev/log.md.
        if buffer.ndim == 0 and buffer.dtype == torch.float64:
            raise CaptureFailed(
                f"the buffer {name} is float64 and has no dimension: torch loses what is written to it; make it "
                "float32, or give it a dimension"
            )


def _backend_that_recomputes_alike(step: Capturable, backend: Backend, scope: Scope) -> Backend:
    """Return the backend, or "aot_eager" instead of "eager" if graphs recompute activations.

    A recomputation under "eager" would draw other random numbers than the forward pass.
    """
    # Under these policies, nothing is recomputed inside of a graph.
    policies = [Remat.Off(), Remat.Offload()]
    if scope == "blocks":
        policies.append(Remat.Full())
    return "aot_eager" if backend == "eager" and step.remat not in policies else backend


def capture_by(compiler: Compiler, step: Capturable, scope: Scope) -> None:
    """Replace the functions that `capture` replaces by the results of any compiler.

    Nothing is replayed.
    """
    replacements: list[Replaced] = [
        (function, "now", compiler(function.now)) for function in step.parameters.captured(scope)
    ]
    if scope == "blocks":
        replacements += _replacements_of_blocks(step, compiler)
    replacements.append((step, "scope", scope))
    step.replaced = [_replace(*replacement) for replacement in replacements]


def _start_replaying(step: Capturable, scope: Scope) -> None:
    """Replay the step's micro-step from now on, or announce why it cannot be replayed."""
    if step.recorder is None:
        return
    obstacle = obstacle_to_replay(step.remat, scope)
    if obstacle:
        step.announce(f"{ONE_BY_ONE}: {obstacle}")
    else:
        step.replaced.append(_replace(step, "micro_step", replayed(step)))


def obstacle_to_replay(remat: Policy, scope: Literal["none", "whole", "blocks"]) -> str | None:
    """Return why a step with this policy and scope can be replayed on no device, or None if it can."""
    if scope == "none":
        return "nothing is captured"
    # Eager recomputation copies the random state to the host, which has to wait for the device.
    if scope == "blocks" and remat != Remat.Off():
        return "blocks are recomputed between graphs"
    return None


def replayed(step: Capturable) -> StaticInputs:
    """Return a replacement for `step.micro_step` that records the micro-step and replays it.

    If a batch cannot be replayed, the step announces the reason.
    """
    assert step.recorder is not None
    return StaticInputs(
        step.micro_step,
        step.recorder,
        step.device,
        lambda: HostState(step.model, step.loss, loss=step, now=step.forward),
        lambda reason: step.announce(f"{ONE_BY_ONE}: {reason}"),
    )


def is_replayed(step: Capturable) -> bool:
    """Return whether the step has a recorded micro-step."""
    return isinstance(step.micro_step, StaticInputs) and step.micro_step.captured > 0


def give_back(step: Capturable) -> bool:
    """Free the memory of recorded micro-steps, and call the micro-step from now on.

    Returns:
        Whether there were any.
    """
    return isinstance(step.micro_step, StaticInputs) and step.micro_step.give_back()


def release(step: Capturable) -> None:
    """Undo a capture: the step runs eagerly again."""
    replaced = step.replaced
    step.replaced = []
    # In reverse order, so that an attribute that was replaced twice gets its first value back.
    for owner, name, former_value in reversed(replaced):
        if former_value is _UNSET:
            delattr(owner, name)
        else:
            setattr(owner, name, former_value)


@contextmanager
def set_aside(step: Capturable) -> Iterator[None]:
    """Undo a step's capture in the `with` block, and restore the same graphs afterwards.

    Sampling from the step's module needs this: the blocks' graphs were made for training and
    evaluation, and would be compiled again for each layer's cache.
    """
    # The compiled functions, so that nothing has to be compiled again.
    captured = [(owner, name, vars(owner)[name]) for owner, name, _ in step.replaced]
    release(step)
    try:
        yield
    finally:
        step.replaced = [_replace(*replacement) for replacement in captured]


def _replacements_of_blocks(step: Capturable, compiler: Compiler) -> list[Replaced]:
    """Return (owner, attribute name, replacement) of the blocks' forward passes and of the loss."""
    model_blocks = blocks(step.model)
    if not model_blocks:
        raise UsageError(
            "the module has no block, which is a module with submodules inside an nn.ModuleList or nn.Sequential: "
            "capture it as a whole"
        )
    within_blocks(step.model)
    # The shared function is compiled once for each kind of block, and torch's default limit is
    # eight.
    compat.allow_variants()
    compat.quiet_inputs_of_blocks()
    call_block = compiler(_call_block)  # one function, so that equal blocks share its graph
    replacements: list[Replaced] = [(step.model, "blocks_captured", True)]
    for block in model_blocks.values():
        owner, name = recompute.forward_to_compile(block)
        forward = getattr(owner, name)
        function = getattr(forward, "__func__", None)
        if function:
            # Dynamo shares a graph between blocks only if the block is an argument of the compiled
            # function (dev/log.md).
            captured: Callable[..., Any] = functools.partial(call_block, function, block)
        else:
            captured = compiler(forward)
        replacements.append((owner, name, captured))
    head = getattr(step.loss, "head", None)
    if head is not None:
        loss: Any = copy.copy(step.loss)  # the caller's own loss is not changed
        loss.head = compiler(head)
        replacements.append((step, "loss", loss))
    return replacements


def _call_block(
    forward: Callable[..., Any], block: object, *arguments: object, **keywords: object
) -> Any:
    return forward(block, *arguments, **keywords)


def _replace(owner: object, name: str, value: object) -> Replaced:
    """Set an attribute; return the owner, the name and the owner's former value, or `_UNSET`."""
    former_value = vars(owner).get(name, _UNSET)
    setattr(owner, name, value)
    return owner, name, former_value


class CaptureFailed(UsageError):
    """The error of a function that cannot be captured as one graph.

    Its message is the line that `reason` makes of torch's error.
    """


def compiled(
    function: Callable[..., Any],
    backend: Backend = "inductor",
    more: Mapping[str, Any] = types.MappingProxyType({}),
) -> Callable[..., Any]:
    """Return the function compiled as one full graph with static shapes.

    In a mode that makes fake tensors, the function itself runs.

    Args:
        function: the function.
        backend: see `capture`.
        more: further options of Inductor.

    Raises:
        CaptureFailed: torch cannot trace or compile the function; a call raises it.
    """
    # By default, torch's cache on disk does not store graphs with an `autograd.Function` or a named
    # kernel of attention.
    compat.cache_custom_functions()
    compat.cache_attention_kernels()
    compat.differentiate_outside_autocast()
    options = None
    if backend == "inductor":
        compat.quiet_missing_tf32()
        # A process that is killed while it compiles leaves truncated libraries, on which later ones
        # would fail.
        compat.remove_truncated_libraries()
        # The key of Inductor's cache lacks the vector width, so another processor would run wrong
        # code (dev/log.md).
        compat.key_cache_by_vector_width()
        compat.build_kernels_together()
        keep_freed_memory()
        if torch.cuda.is_available():  # only a GPU's kernel has them in its source
            compat.keep_strides_of_block_masks()
        # An operator's own tensor, because an update's coefficients would otherwise be fused into
        # the loop over a plane and computed again for every 16 elements.
        compat.lower_to_memory(torch.ops.monograph.materialize.default)
        # By default, the partitioner keeps the dense copy of every frozen int8 or nf4 weight for
        # the backward pass, and recomputes values from a buffer that the forward pass has
        # overwritten.
        marks = compat.graph_pass(compat.mark_recomputed, inductor.__file__)
        first = compat.graph_pass(convolutions.rewrite, convolutions.__file__)
        options = (
            matmul.inductor_options()
            | {"joint_custom_pre_pass": first, "joint_custom_post_pass": marks}
            | {**more}
        )
    compiler = compat.aot_eager() if backend == "aot_eager" else backend
    graph = torch.compile(
        _with_own_code(function), fullgraph=True, dynamic=False, backend=compiler, options=options
    )

    @functools.wraps(function)
    def captured(*arguments: object, **keywords: object) -> Any:
        if compat.makes_fake_tensors():  # torch.compile refuses to trace in a dispatch mode
            return function(*arguments, **keywords)
        try:
            with compat.restore_saved_tensor_hooks():
                return graph(*arguments, **keywords)
        except Exception as error:
            # While it leaves a transform, torch 2.11 raises a second error, which says nothing.
            first = error if compat.is_capture_error(error) else error.__context__
            if not compat.is_capture_error(first):
                raise
            failure = CaptureFailed(reason(first or error))
        # Outside the except block, so that torch's own trace is left out: it has dozens of lines
        # that say no more. TORCH_LOGS="+dynamo" shows more.
        raise failure

    return captured


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with a copy of its code object.

    Dynamo stores compiled graphs by code object. Without the copy all captures of a process would
    share one list of graphs, search it at each call, and fail when it is full.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_own_code(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__.replace()
    scope = function.__globals__
    copied = types.FunctionType(
        code, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__module__ = function.__module__
    copied.__qualname__ = function.__qualname__
    copied.__dict__ |= function.__dict__
    return copied


def reason(error: BaseException) -> str:
    """Return one line that says why a capture failed and how to fix it, from torch's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = next((line for line in lines if "raised exception" in line), None)
    if raised:
        return raised.partition("raised exception ")[2]
    # torch says only this of a function that reached the recompile limit.
    if lines and "fullgraph=True" in lines[0]:
        return "it was compiled too often: an attribute differs from call to call; keep it in a buffer, in place"
    # A C++ compiler's or linker's own message says more than torch's first line.
    native = next((line for line in lines if ": error:" in line or "cannot find" in line), None)
    problem = native or next(
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
