"""Which linear layers of a module adapters are for, by name; what is meant and is not there is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from monograph.errors import UsageError
from monograph.graph.frozen import Int8Linear, NF4Linear

ALL_LINEAR = "all-linear"
MOST_NAMES = 12  # of what exists, in a message


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Every plain linear layer of a module but the head, by name."""
    head = head_of(module)
    plain = {nn.Linear.forward, Int8Linear.forward, NF4Linear.forward}
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and type(layer).forward in plain and layer is not head
    }


def head_of(module: nn.Module) -> Any:
    """What gives the scores over the vocabulary, where the module says so as ours and transformers' do."""
    found = getattr(module, "get_output_embeddings", lambda: None)()
    return found if found is not None else getattr(module, "lm_head", None)


def targeted(module: nn.Module, targets: str | Iterable[str]) -> dict[str, nn.Linear]:
    """The layers that targets mean; see `monograph.graph.lora.Lora.targets`.

    Raises:
        UsageError: as `monograph.graph.lora.adapt`.
    """
    linear = linear_layers(module)
    if targets == ALL_LINEAR:
        chosen = set(linear)
    elif isinstance(targets, str):
        chosen = {name for name in linear if _matches(targets, name)}
        if not chosen:
            hint = f'; for the last part of a name write a list, ["{targets}"]' if _ends(linear, targets) else ""
            raise UsageError(
                f"lora.targets: the regular expression {targets!r} matches no whole name of a linear layer such as "
                f"{_some(linear)}{hint}"
            )
    else:
        by_target = {target: _ends(linear, target) for target in targets}
        for target in (target for target, found in by_target.items() if not found):
            raise UsageError(_idle(module, target, linear))
        chosen = set().union(*by_target.values())
    _require_own_weights(module, chosen)
    return {name: linear[name] for name in linear if name in chosen}


def _matches(expression: str, name: str) -> bool:
    try:
        return re.fullmatch(expression, name) is not None
    except re.error as error:
        raise UsageError(f"lora.targets = {expression!r} is no regular expression: {error}") from None


def _ends(names: Iterable[str], target: str) -> set[str]:
    return {name for name in names if name == target or name.endswith(f".{target}")}


def _idle(module: nn.Module, target: str, linear: Mapping[str, nn.Module]) -> str:
    found = {name: layer for name, layer in module.named_modules() if name and _ends([name], target)}
    there = f"there are {', '.join(sorted({name.rpartition('.')[2] for name in linear})[:MOST_NAMES])}"
    if not found:
        return f"lora.targets: no linear layer is called {target!r}; {there}"
    name, layer = next(iter(found.items()))
    if layer is head_of(module):
        return f"lora.targets: {name} is the head, whose weight the loss reads without calling it; {there}"
    return f"lora.targets: {name} is no plain linear layer but {type(layer).__name__}; {there}"


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:2]) or "none"


def shared_parameters(module: nn.Module) -> dict[int, list[str]]:
    """Parameters that have more than one name."""
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}


def _require_own_weights(module: nn.Module, chosen: set[str]) -> None:
    for names in shared_parameters(module).values():
        if tied := [name for name in names if name.rpartition(".")[0] in chosen]:
            other = next(name for name in names if name != tied[0])
            raise UsageError(f"lora.targets: {tied[0]} is {other} too, so an adapter beside it could not be merged")
