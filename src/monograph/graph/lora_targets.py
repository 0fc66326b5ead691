"""Choose the linear layers of a model that get an adapter.

The key lora.targets names them in one of three ways: "all-linear"; a regular expression for whole
names of layers; or a list of last parts of names, such as ["q_proj", "v_proj"].
"""

import re
from collections.abc import Collection, Iterable

from torch import nn

from monograph.errors import UsageError
from monograph.graph.experts import ExpertLinear
from monograph.graph.frozen import Int8Linear, NF4Linear
from monograph.graph.inspect import head_of, shared_parameters

ALL_LINEAR = "all-linear"
_MAX_NAMES_SHOWN = 12  # of existing layers, in a message


def targeted_layers(
    module: nn.Module, targets: str | Iterable[str]
) -> dict[str, nn.Linear | ExpertLinear]:
    """Return the layers that `targets` chooses, by name: linear layers first, then layers of experts.

    Args:
        module: the model.
        targets: "all-linear": every linear layer except the head, but no layer of experts, as in
            PEFT. Another string: a regular expression that matches whole names of layers. Otherwise:
            the last parts of names.

    Raises:
        UsageError: a target matches no layer, an expression is not valid, or a chosen layer shares a
            parameter with another layer.
    """
    layers: dict[str, nn.Linear | ExpertLinear] = dict(linear_layers(module))
    if targets == ALL_LINEAR:
        names = set(layers)
    else:
        layers |= expert_layers(module)
        names = chosen_names(layers, targets, module)
    _require_untied_weights(module, names)
    return {name: layer for name, layer in layers.items() if name in names}


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return every plain linear layer of a module except the head, by name."""
    # The head is left out, because the loss reads the head's weight and never calls the head. So an
    # adapter would have no effect.
    head = head_of(module)
    # Layers with these forward passes compute W x + b (the last two with a quantised W), so adding an
    # adapter's low-rank product to the output is the same as changing W. This need not hold for a subclass
    # of nn.Linear with another forward pass, which is therefore left out.
    plain_forwards = {nn.Linear.forward, Int8Linear.forward, NF4Linear.forward}
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and type(layer).forward in plain_forwards
        and layer is not head
    }


def expert_layers(module: nn.Module) -> dict[str, ExpertLinear]:
    """Return the linear layers of the experts in mixture-of-experts blocks, by name."""
    return {
        name: layer for name, layer in module.named_modules() if isinstance(layer, ExpertLinear)
    }


def chosen_names(
    layer_names: Collection[str], targets: str | Iterable[str], module: nn.Module | None = None
) -> set[str]:
    """Return the names of layers that a regular expression or a list of last parts chooses.

    Args:
        layer_names: the names of the layers that can have an adapter.
        targets: a regular expression, or the last parts of names.
        module: the module that has the layers, for messages; None: it has these names for no others.

    Raises:
        UsageError: a target matches no name, or an expression is not valid.
    """
    if isinstance(targets, str):
        return _names_matching(layer_names, targets)
    chosen = set[str]()
    for target in targets:
        names = _names_ending_in(target, layer_names)
        if not names:
            raise UsageError(_unknown_target_message(module, target, layer_names))
        chosen |= names
    return chosen


def _names_matching(layer_names: Iterable[str], expression: str) -> set[str]:
    """Return the names that a regular expression matches from their beginning to their end.

    Raises:
        UsageError: `expression` is not a regular expression, or matches no name.
    """
    try:
        matching = {name for name in layer_names if re.fullmatch(expression, name)}
    except re.error as error:
        raise UsageError(
            f"lora.targets = {expression!r} is not a regular expression: {error}"
        ) from None
    if matching:
        return matching
    hint = ""
    if _names_ending_in(expression, layer_names):
        hint = f'; to match the last part of a name, write a list, ["{expression}"]'
    examples = ", ".join(list(layer_names)[:2]) or "none"
    raise UsageError(
        f"lora.targets: the regular expression {expression!r} matches no whole name of a linear layer such as "
        f"{examples}{hint}"
    )


def _names_ending_in(target: str, names: Iterable[str]) -> set[str]:
    """Return the names that end in `target` as whole parts: "layers.0.q_proj" ends in "q_proj"."""
    return {name for name in names if name == target or name.endswith(f".{target}")}


def _unknown_target_message(
    module: nn.Module | None, target: str, layer_names: Iterable[str]
) -> str:
    """Return the message for a last part of a name that no layer has.

    If a submodule that cannot have an adapter has this name, the message says why it cannot.
    """
    last_parts = sorted({name.rpartition(".")[2] for name in layer_names})
    existing = f"there are {', '.join(last_parts[:_MAX_NAMES_SHOWN])}"
    submodules = {name: child for name, child in module.named_modules() if name} if module else {}
    names_with_target = _names_ending_in(target, submodules)
    if not names_with_target:
        return f"lora.targets: no linear layer is called {target!r}; {existing}"
    name = next(name for name in submodules if name in names_with_target)
    layer = submodules[name]
    if module is not None and layer is head_of(module):
        return f"lora.targets: {name} is the head, whose weight the loss reads without calling it; {existing}"
    return (
        f"lora.targets: {name} is not a plain linear layer but {type(layer).__name__}; {existing}"
    )


def _require_untied_weights(module: nn.Module, layer_names: set[str]) -> None:
    """Refuse chosen layers that share a parameter with another layer.

    If an adapter of one of them were merged into the shared parameter, the other layer would change,
    too.
    """
    # Each list has the names of one tensor, such as "embed.weight" and "layers.0.weight".
    for parameter_names in shared_parameters(module).values():
        chosen = [name for name in parameter_names if name.rpartition(".")[0] in layer_names]
        if chosen:
            other = next(name for name in parameter_names if name != chosen[0])
            raise UsageError(
                f"lora.targets: {chosen[0]} and {other} are one tensor, so an adapter on it could not be merged: "
                "leave this layer out"
            )
