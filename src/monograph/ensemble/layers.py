"""Tell how the members' layers run, and why where they cannot run as one."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from monograph import compat
from monograph.errors import InputRefused
from monograph.graph.inspect import running

OUTSIDE = "outside of the module"


class Layer(NamedTuple):
    """A part of the members' module.

    Attributes:
        name: its path and class.
        how: how it runs, in words: "batched", "not called", or looped over the members and why.
        looped: the operators in it that run once for each member.
    """

    name: str
    how: str
    looped: tuple[str, ...]


class Layers(list[Layer]):
    """The parts in their order; `str` gives a table with a line for each."""

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self), default=0)
        return "\n".join(f"{layer.name:{width}}  {layer.how}" for layer in self)


class Watch:
    """An observer of a forward pass.

    Attributes:
        where: the names of the parts that are running, innermost last; after an error, those that were running.
    """

    def __init__(self, module: nn.Module):
        self.module, self.where = module, list[str]()
        self._called, self._looped = set[nn.Module](), dict[str, list[str]]()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """In the block, observe what runs."""
        with (
            register_module_forward_pre_hook(lambda module, _: self._called.add(module)),
            running(self.module) as self.where,
            compat.loops_told(self._tell),
        ):
            yield

    def _tell(self, operator: str) -> None:
        operators = self._looped.setdefault(self.where[-1] if self.where else OUTSIDE, [])
        if operator not in operators:  # it is listed once, however often it runs
            operators.append(operator)

    def layers(self) -> Layers:
        """Return all parts that hold tensors, have no parts, or are looped."""
        layers = Layers()
        for path, part in self.module.named_modules():
            name = f"{path or type(part).__name__} ({type(part).__name__})"
            looped, own = self._looped.get(name, []), [*part._parameters, *part._buffers]
            if looped or own or next(part.children(), None) is None:
                how = "batched, step by step in time" if isinstance(part, nn.RNNBase) else "batched"
                how = how if part in self._called else "not called"
                layers.append(Layer(name, _looped(looped) if looped else how, tuple(looped)))
        if outside := self._looped.get(OUTSIDE):
            layers.append(Layer(OUTSIDE, _looped(outside), tuple(outside)))
        return layers

    def warn(self) -> None:
        """Warn of each looped part."""
        for name, operators in self._looped.items():
            warnings.warn(f"{name} is {_looped(operators)}; ensemble.layers(...) shows every layer", stacklevel=2)


def _looped(operators: list[str]) -> str:
    return f"looped over the members, because torch has no batched form of {', '.join(operators)}"


# A part of torch's message, and what it means.
_REASONS = {
    "data-dependent control flow": "it decides by a tensor's value, which members may differ in: use torch.where",
    ".item()": "it reads a tensor's value, which members may differ in: keep it a tensor",
    "dynamic shape": "the shape of what it computes depends on values, which members may differ in: use a mask",
    "randomness": "it draws random numbers by torch's generator: use nn.Dropout, or draw before",
    "requires_grad_()": "it takes a gradient as it runs: torch.func.grad has a batched form",
    "rrelu": "it draws random numbers by torch's generator: use nn.LeakyReLU, or nn.Dropout",
    "vmap: inplace arithmetic": "it writes members' values into a tensor that they share: make it a buffer",
    "return Tensors": "it returns something that is no tensor: ask for none (use_cache=False)",
    "setup_context staticmethod": "its autograd.Function lacks what torch.func needs: write setup_context, and set "
    "generate_vmap_rule = True",
    "Batching rule not implemented for": "torch has no batched form of an operator in it",
}


class CannotBatch(RuntimeError):
    """Raised where code that runs alone has no batched form; the message says why, and what to do."""


def refusal(failure: BaseException, where: list[str]) -> InputRefused:
    """Return the error for a forward pass that one member can run but a batch of members cannot."""
    text = str(failure) or type(failure).__name__
    reason = next((of for symptom, of in _REASONS.items() if symptom in text), "torch.vmap cannot run it")
    said = text if isinstance(failure, CannotBatch) else f"{reason} ({text.splitlines()[0][:120]})"
    return InputRefused(
        f"the members cannot be batched: {f'in {where[-1]}' if where else OUTSIDE}: {said}; or train such members one "
        "after another, each in a Resident"
    )
