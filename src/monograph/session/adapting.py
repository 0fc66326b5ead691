"""Decide the adapters of a run from its settings."""

from collections.abc import Mapping
from typing import Any

from monograph.config import Settings
from monograph.errors import UsageError
from monograph.graph.lora import Lora
from monograph.graph.lora_targets import ALL_LINEAR
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
# All keys that define adapters. lora.tokens is not in FIXED, because new tokens are known only once
# the text's tokenizer is.
ADAPTER_KEYS = (*FIXED, "lora.tokens")
USUAL = Lora()
RANK = f"lora.rank = {USUAL.rank}"


def lora_of(settings: Settings) -> Lora | None:
    """Return the options of the adapters that the settings ask for, with defaults for open keys;
    None without adapters.

    `tokens`, the ids of tokens whose rows are trained together with adapters, is left empty.
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
    """Return the values of all keys in FIXED, and of model.init with the base's full path; {}
    without adapters.

    Args:
        settings: the run's settings.
        source: the model that the run starts from; None for a new one.

    Raises:
        UsageError: keys of adapters are given without a base or a rank, or with other values than
            the stored adapter has that the run starts from.
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
            f"{origin}: {key} is for adapters, and none are trained: give their rank too, such as {RANK}"
        )
    if source is None:
        raise UsageError(
            f"{origin}: {key}: adapters are added to frozen weights, and those of a new model would stay random: "
            "name the model with model.init = FOLDER (`monograph plan` takes model.preset, too)"
        )
    values = _values(lora)
    if exists(source.name) and not source.code:
        return {**values, "model.init": folder_named(without_links(source.name))}
    return values


def rates(rate: float | str, ratio: float | None, usual: float) -> dict[str, Any]:
    """Return the optimizer's peak learning rate ("lr"), and its groups of parameters with another
    rate ("groups").

    With `ratio`, the matrices B of adapters and, as in PEFT, the magnitudes of DoRA have `ratio`
    times the rate (LoRA+, Hayou et al. 2024, arXiv 2402.12354).

    Args:
        rate: optim.lr.
        ratio: lora.lr_ratio; None for one rate.
        usual: the rate if optim.lr is "auto".
    """
    groups = () if ratio is None else (Group("*.lora_[Bm]*", ratio),)
    return {"lr": usual if rate == "auto" else rate, "groups": groups}


def _values(lora: Lora) -> dict[str, Any]:
    """Return the values of the keys in FIXED for these options."""
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
    """Return the values of a stored adapter, except that the settings may change dropout and base.

    Args:
        adapter: the stored adapter.
        where: what an error calls the adapter.
        asked: the values of all keys in ADAPTER_KEYS.
        given: the origins of the keys that were given.
        said: these keys with their values, as an error begins.

    Raises:
        UsageError: a given value differs from the stored adapter's.
    """
    stored = _values(adapter.lora)
    changeable = {key: asked[key] for key in ("lora.dropout", "lora.base")}
    if asked["lora.tokens"] not in (None, "auto"):
        raise UsageError(
            f"{given['lora.tokens']}: lora.tokens: {where} has its own tokens: leave the key out"
        )
    for key in given.keys() & (stored.keys() - changeable.keys()):
        if asked[key] != stored[key]:
            raise UsageError(f"{said[key]}, but {where} has {stored[key]}: leave the key out")
    return stored | {key: value for key, value in changeable.items() if value is not None}
