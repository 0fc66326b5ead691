"""Which linear layers of a module read one tensor, seen by watching calls of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from monograph.graph.family import mode_of, version_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Call(NamedTuple):
    """One call of a layer. The tensors are kept, so that no other one gets their identity."""

    name: str
    input: Tensor
    version: int
    mode: tuple[Any, ...]
    output: Tensor
    output_version: int


def watched(module: nn.Module, run: Callable[[], object]) -> list[Call]:
    """All calls of linear layers with one tensor, in the module's mode and in evaluation mode."""
    calls: list[Call] = []

    def watch(name: str) -> Callable[..., None]:
        def seen(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            values = [*args, *kwargs.values()]
            if len(values) == 1 and isinstance(values[0], Tensor):
                (given,) = values
                calls.append(Call(name, given, version_of(given), mode_of(given), output, version_of(output)))

        return seen

    linear = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_hook(watch(name), with_kwargs=True) for name, layer in linear]
    flags = [(part, part.training) for part in module.modules()]
    try:
        run()
        if any(flag for _, flag in flags):
            module.eval()
            run()
    finally:
        for handle in handles:
            handle.remove()
        for part, flag in flags:
            part.training = flag
    return calls


def grouped(module: nn.Module, calls: list[Call]) -> tuple[list[list[str]], dict[str, str]]:
    """Names of layers that can be fused, and of those that read one tensor with another and cannot, with the reason."""
    read: dict[str, list[tuple[Any, ...]]] = {}
    changed = set()
    for call in calls:
        read.setdefault(call.name, []).append((id(call.input), call.version, call.mode))
        if version_of(call.output) != call.output_version:
            changed.add(call.name)
    readers: dict[Any, list[str]] = {}
    for name, tensors in read.items():
        readers.setdefault(tuple(tensors), []).append(name)
    obstacles = _obstacles(module) | dict.fromkeys(changed, "its output is changed in place")
    groups, separate = list[list[str]](), dict[str, str]()
    for names in readers.values():
        alike: dict[Any, list[str]] = {}
        for name in names if len(names) > 1 else ():
            if name in obstacles:
                separate[name] = obstacles[name]
            else:
                layer: Any = module.get_submodule(name)
                alike.setdefault(_kind(layer), []).append(name)
        for those in alike.values():
            sequence = [call.name for call in calls if call.name in those]
            if len(those) == 1:
                separate[those[0]] = "none of the others is like it in dtype, bias and requires_grad"
            elif sequence != those * (len(sequence) // len(those)):
                separate |= dict.fromkeys(those, "they are called in changing order")
            else:
                groups.append(those)
    return groups, separate


def _kind(layer: nn.Linear) -> tuple[Any, ...]:
    weight, bias = layer.weight, layer.bias
    return weight.dtype, weight.device, weight.requires_grad, None if bias is None else (bias.dtype, bias.requires_grad)


def _obstacles(module: nn.Module) -> dict[str, str]:
    """Why a linear layer must stay as it is, by name."""
    holders: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            own = [p for p in (layer._parameters.get("weight"), layer._parameters.get("bias")) if p is not None]
            tied = [n for p in own for n in holders[id(p)] if n.rpartition(".")[0] != name]
            if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
                found[name] = "its forward pass is not nn.Linear's"
            elif any(getattr(layer, hooks) for hooks in HOOKS):
                found[name] = "it has hooks"
            elif type(layer._parameters.get("weight")) is not nn.Parameter:
                found[name] = "its weight is no plain parameter"
            elif tied:
                found[name] = f"it shares its weight with {tied[0]}"
    return found
