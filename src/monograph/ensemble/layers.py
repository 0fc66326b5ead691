"""Report how each part of the members' module runs, and why a part cannot run for all members at
once.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from monograph import compat
from monograph.errors import InputRefused
from monograph.graph.inspect import running_modules

OUTSIDE = "outside of the module"


class LayerReport(NamedTuple):
    """How a part of the members' module runs.

    Attributes:
        name: its path and class.
        how: how it runs, in words: "batched", "not called", or "looped over the members" and why.
        looped: the operators in it that run once for each member.
    """

    name: str
    how: str
    looped: tuple[str, ...]


class Layers(list[LayerReport]):
    """The parts in the module's order. `str(layers)` is a table with one line for each part."""

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self), default=0)
        return "\n".join(f"{layer.name:{width}}  {layer.how}" for layer in self)


class PassObserver:
    """An observer of one forward pass of a module.

    Attributes:
        module: the observed module.
        running: the names of the parts that are running, innermost last. After an error they are
            those that were running when it was raised.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.running = list[str]()
        self._called = set[nn.Module]()
        self._looped_operators = dict[str, list[str]]()  # by the name of a part, or OUTSIDE

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Observe what runs in the block."""
        with (
            register_module_forward_pre_hook(lambda module, _: self._called.add(module)),
            running_modules(self.module) as self.running,
            compat.report_vmap_loops(self._note_loop),
        ):
            yield

    def _note_loop(self, operator: str) -> None:
        part = self.running[-1] if self.running else OUTSIDE
        operators = self._looped_operators.setdefault(part, [])
        if operator not in operators:  # it is listed once, however often it runs
            operators.append(operator)

    def layers(self) -> Layers:
        """Return the parts that have tensors of their own or no submodules, or are looped."""
        layers = Layers()
        for path, part in self.module.named_modules():
            name = f"{path or type(part).__name__} ({type(part).__name__})"
            looped = self._looped_operators.get(name, [])
            has_tensors = bool(part._parameters or part._buffers)
            has_submodules = next(part.children(), None) is not None
            if not looped and not has_tensors and has_submodules:
                continue
            if looped:
                how = _looped_text(looped)
            elif part not in self._called:
                how = "not called"
            elif isinstance(part, nn.RNNBase):
                how = "batched, step by step in time"
            else:
                how = "batched"
            layers.append(LayerReport(name, how, tuple(looped)))
        looped_outside = self._looped_operators.get(OUTSIDE)
        if looped_outside:
            layers.append(LayerReport(OUTSIDE, _looped_text(looped_outside), tuple(looped_outside)))
        return layers

    def warn(self) -> None:
        """Warn of each looped part."""
        for name, operators in self._looped_operators.items():
            warnings.warn(
                f"{name} is {_looped_text(operators)}; ensemble.layers(...) shows every layer",
                stacklevel=2,
            )


def _looped_text(operators: list[str]) -> str:
    return f"looped over the members, because torch has no batched form of {', '.join(operators)}"


# {a part of the text of torch's error: what is wrong, and what to do}.
_REASONS = {
    "data-dependent control flow": "it decides by a tensor's value, which members may differ in: use torch.where",
    ".item()": "it reads a tensor's value, which members may differ in: keep it a tensor",
    "dynamic shape": "the shape of what it computes depends on values, which members may differ in: use a mask",
    "randomness": "it draws random numbers by torch's generator: use nn.Dropout, or draw before",
    "requires_grad_()": "it takes a gradient as it runs: torch.func.grad has a batched form",
    "rrelu": "it draws random numbers by torch's generator: use nn.LeakyReLU, or nn.Dropout",
    "vmap: inplace arithmetic": "it writes members' values into a tensor that they share: make it a buffer",
    "return Tensors": "it returns something that is not a tensor: ask for tensors only (use_cache=False)",
    "setup_context staticmethod": "its autograd.Function lacks what torch.func needs: write setup_context, and set "
    "generate_vmap_rule = True",
    "Batching rule not implemented for": "torch has no batched form of an operator in it",
}


class CannotBatch(RuntimeError):
    """A module that runs alone cannot be batched; the message says why, and what to do."""


def refusal(failure: BaseException, running: list[str]) -> InputRefused:
    """Return the error for a forward pass that one member can run but a batch of members cannot.

    Args:
        failure: what the batched forward pass raised.
        running: the parts of the module that were running, innermost last.
    """
    text = str(failure) or type(failure).__name__
    part = f"in {running[-1]}" if running else OUTSIDE
    if isinstance(failure, CannotBatch):
        reason = text
    else:
        meanings = (meaning for symptom, meaning in _REASONS.items() if symptom in text)
        meaning = next(meanings, "torch.vmap cannot run it")
        reason = f"{meaning} ({text.splitlines()[0][:120]})"
    return InputRefused(
        f"the members cannot be batched: {part}: {reason}; or train such members one after another, each in a Resident"
    )
