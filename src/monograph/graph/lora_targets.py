"""Choose the linear layers that get an adapter, by `monograph.graph.lora.Lora.targets`."""

import re
from collections.abc import Iterable, Mapping

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
    """Return the layers that `targets` chooses, by name; see `monograph.graph.lora.Lora.targets`.

    Raises:
        UsageError: see `monograph.graph.lora.adapt`.
    """
    candidates: dict[str, nn.Linear | ExpertLinear] = {**linear_layers(module)}
    if targets != ALL_LINEAR:
        candidates |= expert_layers(module)
    if targets == ALL_LINEAR:
        chosen = set(candidates)
    elif isinstance(targets, str):
        chosen = _names_matching(candidates, targets)
    else:
        chosen = set()
        for target in targets:
            names = _names_ending_in(target, candidates)
            if not names:
                raise UsageError(_unknown_target_message(module, target, candidates))
            chosen |= names
    _require_untied_weights(module, chosen)
    return {name: candidates[name] for name in candidates if name in chosen}


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return every plain linear layer of a module except the head, by name."""
    head = head_of(module)  # excluded, because the loss reads its weight without calling it
    # An adapter's output is added to the layer's, which needs to be a plain product for that.
    plain_forwards = {nn.Linear.forward, Int8Linear.forward, NF4Linear.forward}
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and type(layer).forward in plain_forwards
        and layer is not head
    }


def expert_layers(module: nn.Module) -> dict[str, ExpertLinear]:
    """Return the layers of experts of a module's mixtures, by name."""
    return {
        name: layer for name, layer in module.named_modules() if isinstance(layer, ExpertLinear)
    }


def _names_matching(candidates: Iterable[str], expression: str) -> set[str]:
    """Return the names that a regular expression matches as a whole.

    Raises:
        UsageError: `expression` is not a regular expression, or matches no name.
    """
    try:
        names = {name for name in candidates if re.fullmatch(expression, name)}
    except re.error as error:
        raise UsageError(
            f"lora.targets = {expression!r} is not a regular expression: {error}"
        ) from None
    if names:
        return names
    hint = ""
    if _names_ending_in(expression, candidates):
        hint = f'; to match the last part of a name, write a list, ["{expression}"]'
    examples = ", ".join(list(candidates)[:2]) or "none"
    raise UsageError(
        f"lora.targets: the regular expression {expression!r} matches no whole name of a linear layer such as "
        f"{examples}{hint}"
    )


def _names_ending_in(target: str, names: Iterable[str]) -> set[str]:
    """Return the names whose last parts, separated by dots, are `target`."""
    return {name for name in names if name == target or name.endswith(f".{target}")}


def _unknown_target_message(
    module: nn.Module, target: str, candidates: Mapping[str, nn.Module]
) -> str:
    last_parts = sorted({name.rpartition(".")[2] for name in candidates})
    existing = f"there are {', '.join(last_parts[:_MAX_NAMES_SHOWN])}"
    called_so = [
        (name, layer)
        for name, layer in module.named_modules()
        if name and _names_ending_in(target, [name])
    ]
    if not called_so:
        return f"lora.targets: no linear layer is called {target!r}; {existing}"
    name, layer = called_so[0]
    if layer is head_of(module):
        return f"lora.targets: {name} is the head, whose weight the loss reads without calling it; {existing}"
    return (
        f"lora.targets: {name} is not a plain linear layer but {type(layer).__name__}; {existing}"
    )


def _require_untied_weights(module: nn.Module, layer_names: set[str]) -> None:
    """Refuse layers that share a parameter: merging an adapter would change the other layer too."""
    for names in shared_parameters(module).values():
        chosen = [name for name in names if name.rpartition(".")[0] in layer_names]
        if chosen:
            other = next(name for name in names if name != chosen[0])
            raise UsageError(
                f"lora.targets: {chosen[0]} and {other} are one tensor, so an adapter on it could not be merged: "
                "leave this layer out"
            )
