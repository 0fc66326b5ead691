"""Decide the adapters of a run from its settings and, where these are open, from usual values or a stored adapter."""

from __future__ import annotations

from typing import Any

from monograph.config import Settings
from monograph.errors import UsageError
from monograph.graph.inspect import ALL_LINEAR
from monograph.graph.lora import Lora
from monograph.model.adapter import is_adapter, read_adapter
from monograph.storage.reading import exists, without_links

FIXED = ("lora.rank", "lora.alpha", "lora.targets", "lora.dropout", "lora.base")
KEYS = (*FIXED, "lora.tokens")  # new tokens are known only once the text's tokenizer is, so these are not fixed early
USUAL = Lora()
RANK = f"lora.rank = {USUAL.rank}"


def lora_of(settings: Settings, tokens: tuple[int, ...] = ()) -> Lora | None:
    """Return the adapters that the settings ask for, with usual values for open keys; None without adapters.

    Args:
        settings: the run's settings.
        tokens: ids of the tokens whose rows are trained together with the adapters.
    """
    asked = settings.lora
    if asked.rank is None:
        return None
    targets = asked.targets if asked.targets is not None else ALL_LINEAR
    return Lora(
        asked.rank,
        USUAL.alpha if asked.alpha is None else asked.alpha,
        targets if isinstance(targets, str) else tuple(targets),
        asked.dropout or 0.0,
        asked.base or USUAL.base,
        tokens,
    )


def fixed_lora(settings: Settings) -> dict[str, Any]:
    """Return values for all [lora] keys in FIXED and the base's full path; an empty mapping without adapters.

    Raises:
        UsageError: there is no base or no rank, or the adapters differ from the stored ones that they begin from.
    """
    init, given = settings.model.init, {key: settings.origins[key] for key in KEYS if key in settings.origins}
    if init and is_adapter(init):
        return {**_as_stored(settings, init, given), "model.init": str(without_links(init))}
    if not given:
        return {}
    key, origin = next(iter(given.items()))
    if (lora := lora_of(settings)) is None:
        raise UsageError(f"{origin}: {key} is of adapters, and none are trained: give their rank too, such as {RANK}")
    if init is None:
        raise UsageError(
            f"{origin}: {key}: adapters are added to weights that exist and stay frozen, which those of a new model "
            "would at random: name the model with model.init = FOLDER"
        )
    place = {"model.init": str(without_links(init))} if exists(init) else {}
    return place | _values(lora)


def _values(lora: Lora) -> dict[str, Any]:
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    values = lora.rank, lora.alpha, targets, lora.dropout, lora.base
    return dict(zip(FIXED, values, strict=True))


def _as_stored(settings: Settings, init: str, given: dict[str, str]) -> dict[str, Any]:
    stored = _values(read_adapter(init).lora)
    asked = settings.values()
    free = {key: asked[key] for key in ("lora.dropout", "lora.base")}
    if asked["lora.tokens"] not in (None, "auto"):
        raise UsageError(f"{given['lora.tokens']}: lora.tokens: the adapter in {init} says which it has: leave it out")
    for key in given.keys() & (stored.keys() - free.keys()):
        value, own = asked[key], stored[key]
        if value != own:
            raise UsageError(f"{given[key]}: {key} = {value}, but the adapter in {init} has {own}: leave it out")
    return stored | {key: value for key, value in free.items() if value is not None}
