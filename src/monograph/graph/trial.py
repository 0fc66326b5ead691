"""Run one eager trial step of any module before anything is compiled.

The trial shows whether the module runs, whether loss and gradients are finite, and if they are not,
which submodule is the cause. This file also finds the line in which an error was raised, if it is in
a user's own code, such as a loss, or a module that `model.init = "file.py:build"` names.
"""

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused, MonographError, host_is_full, text_of_error
from monograph.graph.inspect import buffers_kept, running_modules, uncompiled_module, unwrap_

# A Python file of a user, which model.init names, is imported as a module with this prefix.
USER_MODULE_PREFIX = "monograph_init_"


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial step.

    Attributes:
        loss: mean loss per target.
        count: number of targets, or the sum of their weights.
        gradient_count: number of trainable parameters that received a gradient.
        without_gradient: names of trainable parameters whose gradient stayed zero or absent.
    """

    loss: float
    count: float
    gradient_count: int
    without_gradient: tuple[str, ...]


def trial(module: nn.Module, loss: Callable[[], tuple[Tensor, Tensor]]) -> Trial:
    """Run one forward and backward pass eagerly.

    Weights and buffers do not change; gradients are zero afterwards.

    Args:
        module: the module under trial; its parameters' gradients are overwritten.
        loss: runs the module on one micro-batch and returns (sum, count).

    Returns:
        The mean loss and which parameters received gradients.

    Raises:
        InputRefused: the forward pass raised, and the message names the innermost module; or the
            loss or a gradient is not finite, and the message names the first module whose output is
            not finite, or the parameter.
    """
    module = uncompiled_module(module)
    # Calling `torch.compile`'s wrappers would compile. So `unwrap_` removes those of submodules in
    # place, and they are put back after the trial.
    children_before = [(parent._modules, parent._modules.copy()) for parent in module.modules()]
    try:
        with buffers_kept(unwrap_(module)):
            return _trial(module, loss)
    finally:
        for children, with_wrappers in children_before:
            children.update(with_wrappers)


def _trial(module: nn.Module, loss: Callable[[], tuple[Tensor, Tensor]]) -> Trial:
    """Run the trial of a module without wrappers; see `trial`."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    _zero_gradients(parameters)
    with _naming_failed_module(module):
        loss_sum, count = loss()
    # A micro-batch may have no targets; its loss is then 0 instead of 0 / 0.
    mean = float(loss_sum.detach()) / (float(count) or 1.0)
    if not math.isfinite(mean):
        raise InputRefused(f"the loss is {mean}: {first_non_finite(module, loss)}")
    if not loss_sum.requires_grad:
        raise InputRefused(
            "the loss has no gradient: expected one that depends on trainable parameters"
        )
    (loss_sum / torch.where(count == 0, 1.0, count)).backward()
    grads = {name: p.grad for name, p in parameters}
    not_finite = [
        name for name, grad in grads.items() if grad is not None and not bool(grad.isfinite().all())
    ]
    if not_finite:
        raise InputRefused(
            f"the loss is {mean:.4g}, but the gradient of {not_finite[0]} is not finite ({len(not_finite)} such)"
        )
    without_gradient = tuple(
        name for name, grad in grads.items() if grad is None or not bool(grad.any())
    )
    _zero_gradients(parameters)
    gradient_count = len(parameters) - len(without_gradient)
    return Trial(mean, float(count), gradient_count, without_gradient)


def first_non_finite(module: nn.Module, run: Callable[[], object]) -> str:
    """Repeat `run` and return a sentence that names the cause of a number that is not finite.

    The cause is a parameter, or the first submodule with finite inputs and a non-finite output.
    """
    first: list[str] = []
    # The module itself, whose name is "", is called by its class.
    names = {child: name or type(module).__name__ for name, child in module.named_modules()}

    def check(child: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if not first and not _finite(output) and _finite(inputs):
            first.append(f"{names[child]} ({type(child).__name__})")

    # Only modules without submodules: if the output of another module is not finite, one of these
    # is the cause.
    with ExitStack() as hooks, torch.no_grad():
        for child in module.modules():
            if not list(child.children()):
                hooks.enter_context(child.register_forward_hook(check))
        run()
    # A parameter is reported before modules, because it explains every output that is not finite.
    not_finite = [name for name, p in module.named_parameters() if not bool(p.isfinite().all())]
    if not_finite:
        return (
            f"parameter {not_finite[0]} holds non-finite values ({len(not_finite)} such parameters)"
        )
    if first:
        return f"{first[0]} is the first module with a non-finite output"
    return "every module's output is finite; look at the loss function"


def _finite(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    return not isinstance(value, (tuple, list)) or all(_finite(item) for item in value)


def _zero_gradients(parameters: list[tuple[str, nn.Parameter]]) -> None:
    for _, parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


@contextmanager
def _naming_failed_module(module: nn.Module) -> Iterator[None]:
    """Turn an exception of the forward pass into one line that names the module that raised it."""
    with running_modules(module) as running:
        try:
            yield
        except (MonographError, torch.OutOfMemoryError):
            # Their messages are clear, and no module is the cause.
            raise
        except Exception as error:
            where = f"in {running[-1]}" if running else "in the loss function"
            raise InputRefused(
                f"the trial step failed {where}{place_and_message(error)}"
            ) from error


def place_and_message(error: BaseException) -> str:
    """Describe an exception, to be appended to a sentence: " (FILE:LINE): TYPE: FIRST LINE".

    The place is a line of the user's code. It is left out if the user's code did not raise the error.
    """
    first_lines = text_of_error(error).splitlines()[:1]
    frame = user_frame_of(error)
    place = f" ({frame.place})" if frame else ""
    return ": ".join([place, type(error).__name__, *first_lines])


def refusal_of_user_error(error: BaseException) -> InputRefused | None:
    """Return an error with a message of one line, to raise instead of an error of a user's module or loss.

    Return None for errors that are not the user's, such as interrupts and a lack of memory. A
    SystemExit is the user's error, and so is a MonographError that the user's code raised.
    """
    if isinstance(error, KeyboardInterrupt | torch.OutOfMemoryError) or host_is_full(error):
        return None
    packages = [_top_package(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    was_raised_here = not packages or packages[-1] == "monograph"
    if isinstance(error, MonographError) and was_raised_here:
        return None
    # Python turns a StopIteration that leaves a generator into a RuntimeError.
    cause = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
    frame = user_frame_of(cause)
    return InputRefused(f"{frame.owner} failed{place_and_message(cause)}") if frame else None


def _top_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


class UserFrame(NamedTuple):
    """Where a user's code raised an error.

    Attributes:
        place: "FILE:LINE".
        owner: the name of the module's class, or of the function, that has this line.
    """

    place: str
    owner: str


def user_frame_of(error: BaseException) -> UserFrame | None:
    """Return the innermost frame of the user's code that an error passed, or None.

    If a module calls a helper function in another file, this is the module's line with the call.
    """
    innermost = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = _top_package(frame)
        first_argument = next(iter(frame.f_code.co_varnames), "")
        owner = frame.f_locals.get(first_argument)
        # The frame is a method of `owner` only if the class has this code: `self` may have another
        # name, and the first argument of a loss is a module too.
        method = getattr(type(owner), frame.f_code.co_name, None)
        is_method = first_argument == "self" or getattr(method, "__code__", None) is frame.f_code
        in_users_module = (
            is_method and isinstance(owner, nn.Module) and package not in ("torch", "monograph")
        )
        if in_users_module or package.startswith(USER_MODULE_PREFIX):
            name = type(owner).__name__ if in_users_module else frame.f_code.co_name
            innermost = UserFrame(f"{frame.f_code.co_filename}:{line}", name)
    return innermost
