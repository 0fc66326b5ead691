"""Adapters of a run: what its settings say of them, what they leave open, and what does not go with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from monograph import planner
from monograph.config import Settings
from monograph.errors import UsageError
from monograph.graph.lora import Lora
from monograph.graph.targets import ALL_LINEAR, targeted
from monograph.model.adapter import is_adapter, read_adapter
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.run.recipe import Recipe, run_named
from monograph.session.session import Session
from monograph.storage.reading import exists

FIXED = ("lora.rank", "lora.alpha", "lora.targets", "lora.dropout", "lora.base")
KEYS = (*FIXED, "lora.tokens")  # which of them are new is known with the text's tokenizer
USUAL = Lora()
RANK = f"lora.rank = {USUAL.rank}"


def lora_of(settings: Settings, tokens: tuple[int, ...] = ()) -> Lora | None:
    """The adapters that the settings ask for, their open values the usual ones; None: the model itself is trained.

    Args:
        settings: of a run.
        tokens: ids whose rows are trained beside them.
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
    """The [lora] keys that the settings leave open, and where the base lies; nothing for a run without adapters.

    Raises:
        UsageError: adapters of nothing, of a rank that nobody gave, or not those of the folder they are to begin from.
    """
    init, given = settings.model.init, {key: settings.origins[key] for key in KEYS if key in settings.origins}
    if init and is_adapter(init):
        return {**_as_stored(settings, init, given), "model.init": str(Path(init).resolve())}
    if not given:
        return {}
    key, origin = next(iter(given.items()))
    if settings.lora.rank is None:
        raise UsageError(f"{origin}: {key} is of adapters, and none are trained: give their rank too, such as {RANK}")
    if init is None:
        raise UsageError(
            f"{origin}: {key}: adapters stand beside weights that exist and stay frozen, which those of a new model "
            "would at random: name the model with model.init = FOLDER"
        )
    found = lora_of(settings)
    assert found is not None
    place = {"model.init": str(Path(init).resolve())} if exists(init) else {}
    return place | _values(found)


def require_targets(settings: Settings, config: LlamaConfig | None) -> None:
    """Refuse targets that mean nothing in a model of that shape, which need not be there yet; None: nobody knows it.

    A rank above the shorter side of every target is refused, too: B A has no more of it, and more numbers than W.
    """
    lora = lora_of(settings)
    if lora is None or config is None:
        return
    with torch.device("meta"):
        found = targeted(Llama(config), lora.targets)
    most = max(min(layer.weight.shape) for layer in found.values())
    if lora.rank > most:
        raise UsageError(f"lora.rank = {lora.rank}: these layers' weights have rank {most} at most; lower it")


def _values(lora: Lora) -> dict[str, Any]:
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    values = lora.rank, lora.alpha, targets, lora.dropout, lora.base
    return dict(zip(FIXED, values, strict=True))


def _as_stored(settings: Settings, init: str, given: dict[str, str]) -> dict[str, Any]:
    stored = _values(read_adapter(init).lora)
    free = {"lora.dropout": settings.lora.dropout, "lora.base": settings.lora.base}
    if settings.lora.tokens not in (None, "auto"):
        raise UsageError(f"{given['lora.tokens']}: lora.tokens: the adapter in {init} says which it has: leave it out")
    for key in given.keys() & (stored.keys() - free.keys()):
        value, own = settings.values()[key], stored[key]
        if value != own:
            raise UsageError(f"{given[key]}: {key} = {value}, but the adapter in {init} has {own}: leave it out")
    return stored | {key: value for key, value in free.items() if value is not None}


def usual_rate(settings: Settings, rule: str) -> float:
    """The peak learning rate of a run whose settings leave it open, for the optimizer "adamw" or "muon"."""
    init, preset = settings.model.init, settings.model.preset
    if settings.lora.rank is not None:
        return planner.FINETUNING_RATES["adapters"]
    if init is not None:
        from_elsewhere = not (Recipe(init, preset, {}, 0).file or run_named(init))
        return planner.FINETUNING_RATES["all"] if from_elsewhere else planner.UNKNOWN_RATE
    return planner.known_learning_rate(preset, rule) if preset != "auto" else planner.UNKNOWN_RATE


def adapter_params(session: Session) -> int:
    """Parameters that a run trains beside frozen ones; 0 of a run without adapters."""
    return 0 if session.recipe.lora is None else sum(plane.param.numel() for plane in session.engine.step.planes)


def require_with_lora(settings: Settings) -> None:
    """Refuse what does not go with adapters.

    Raises:
        UsageError: naming both.
    """
    if settings.lora.rank is None and not (settings.model.init and is_adapter(settings.model.init)):
        return
    train = settings.train
    if train.memory == "stream":
        raise UsageError("train.memory = stream fetches weights that are trained: with lora.rank it is device")
    if train.precision == "fp8":
        raise UsageError("train.precision = fp8 is for weights that are trained: with lora.rank take bf16 or fp32")
