"""Decide the adapters of a run from its settings."""

from collections.abc import Mapping
from typing import Any

from monograph.config import Settings
from monograph.errors import UsageError
from monograph.graph.inspect import ALL_LINEAR
from monograph.graph.lora import Lora
from monograph.model.adapter import Adapter
from monograph.optim import Group
from monograph.run.source import ModelSource
from monograph.storage.code import folder_named
from monograph.storage.reading import exists, without_links

FIXED = (
    "lora.rank",
    "lora.alpha",
    "lora.rslora",
    "lora.dora",
    "lora.targets",
    "lora.dropout",
    "lora.base",
)
# What the adapters are; new tokens are known only once the text's tokenizer is, so they are not
# fixed early.
ADAPTER_KEYS = (*FIXED, "lora.tokens")
USUAL = Lora()
RANK = f"lora.rank = {USUAL.rank}"


def lora_of(settings: Settings) -> Lora | None:
    """Return the adapters that the settings ask for, with usual values for open keys; None without
    adapters.

    The ids of tokens whose rows are trained together with them are left out.
    """
    asked = settings.lora
    if asked.rank is None:
        return None
    targets = asked.targets if asked.targets is not None else ALL_LINEAR
    return Lora(
        rank=asked.rank,
        alpha=USUAL.alpha if asked.alpha is None else asked.alpha,
        targets=targets if isinstance(targets, str) else tuple(targets),
        dropout=asked.dropout or 0.0,
        base=asked.base or USUAL.base,
        rslora=bool(asked.rslora),
        dora=bool(asked.dora),
    )


def fixed_lora(settings: Settings, source: ModelSource | None) -> dict[str, Any]:
    """Return values for all [lora] keys in FIXED and the base's full path; an empty mapping without
    adapters.

    Args:
        settings: the run's settings.
        source: the model that the run starts from; None for a new one.

    Raises:
        UsageError: there is no base or no rank, or the adapters differ from the stored ones that
            they begin from.
    """
    given = {
        key: settings.origins[key]
        for key in (*ADAPTER_KEYS, "lora.lr_ratio")
        if key in settings.origins
    }
    if source and source.adapter:
        values = settings.values()
        said = {key: settings.said(key) for key in given}
        where = f"the adapter in {source.name}"
        fixed = _as_stored(
            source.adapter, where, {key: values[key] for key in ADAPTER_KEYS}, given, said
        )
        return {**fixed, "model.init": folder_named(without_links(source.name))}
    if not given:
        return {}
    key, origin = next(iter(given.items()))
    lora = lora_of(settings)
    if lora is None:
        raise UsageError(
            f"{origin}: {key} is of adapters, and none are trained: give their rank too, such as {RANK}"
        )
    if source is None:
        raise UsageError(
            f"{origin}: {key}: adapters are added to weights that exist and stay frozen, which those of a new model "
            "would at random: name the model with model.init = FOLDER (a plan takes model.preset as its shape, too)"
        )
    values = _values(lora)
    if exists(source.name) and not source.code:
        return {**values, "model.init": folder_named(without_links(source.name))}
    return values


def rates(rate: float | str, ratio: float | None, usual: float) -> dict[str, Any]:
    """Return the optimizer's peak learning rate, and the group of adapters' parameters that have a
    multiple of it.

    These are B and, as in PEFT, the magnitudes (LoRA+, Hayou et al. 2024, arXiv 2402.12354).

    Args:
        rate: optim.lr.
        ratio: lora.lr_ratio.
        usual: the rate if optim.lr leaves it open.
    """
    groups = () if ratio is None else (Group("*.lora_[Bm]*", ratio),)
    return {"lr": usual if rate == "auto" else rate, "groups": groups}


def _values(lora: Lora) -> dict[str, Any]:
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    return {
        "lora.rank": lora.rank,
        "lora.alpha": lora.alpha,
        "lora.rslora": lora.rslora,
        "lora.dora": lora.dora,
        "lora.targets": targets,
        "lora.dropout": lora.dropout,
        "lora.base": lora.base,
    }


def _as_stored(
    adapter: Adapter,
    where: str,
    asked: Mapping[str, Any],
    given: Mapping[str, str],
    said: Mapping[str, str],
) -> dict[str, Any]:
    """Return the values of a stored adapter, of which a run may change dropout and base.

    Args:
        adapter: the stored adapter.
        where: what an error calls it.
        asked: the values of all keys in ADAPTER_KEYS.
        given: the origins of those that were given.
        said: what they say, as an error begins with it.
    """
    stored = _values(adapter.lora)
    free = {key: asked[key] for key in ("lora.dropout", "lora.base")}
    if asked["lora.tokens"] not in (None, "auto"):
        raise UsageError(
            f"{given['lora.tokens']}: lora.tokens: {where} says which it has: leave it out"
        )
    for key in given.keys() & (stored.keys() - free.keys()):
        value, own = asked[key], stored[key]
        if value != own:
            raise UsageError(f"{said[key]}, but {where} has {own}: leave it out")
    return stored | {key: value for key, value in free.items() if value is not None}
