"""Decide the adapters of a run from its settings."""

from collections.abc import Collection
from typing import Any

from monograph.config import Settings
from monograph.errors import UsageError
from monograph.graph.lora import Lora
from monograph.graph.lora_targets import ALL_LINEAR
from monograph.optim import Group
from monograph.run.source import ModelSource
from monograph.storage.code import folder_named
from monograph.storage.reading import exists, without_links

OPTION_KEYS = (
    "lora.rank",
    "lora.alpha",
    "lora.rslora",
    "lora.dora",
    "lora.targets",
    "lora.dropout",
    "lora.base",
)
# All keys that define adapters. The value of lora.tokens is not decided here with the others,
# because new tokens are known only once the tokenizer of the text is known.
ADAPTER_KEYS = (*OPTION_KEYS, "lora.tokens")
DEFAULT_LORA = Lora()
RANK_EXAMPLE = f"lora.rank = {DEFAULT_LORA.rank}"


def lora_of(settings: Settings) -> Lora | None:
    """Return the options of the adapters that the settings ask for, with defaults for open keys;
    None without adapters.

    `tokens`, the ids of tokens whose rows are trained together with adapters, is left empty.
    """
    lora = settings.lora
    if lora.rank is None:
        return None
    targets = lora.targets if lora.targets is not None else ALL_LINEAR
    return Lora(
        rank=lora.rank,
        alpha=DEFAULT_LORA.alpha if lora.alpha is None else lora.alpha,
        targets=targets if isinstance(targets, str) else tuple(targets),
        dropout=lora.dropout or 0.0,
        base=lora.base or DEFAULT_LORA.base,
        rslora=bool(lora.rslora),
        dora=bool(lora.dora),
    )


def adapter_values(settings: Settings, source: ModelSource | None) -> dict[str, Any]:
    """Return the values of `OPTION_KEYS`, and of model.init with the full path of the base; {}
    without adapters.

    Args:
        settings: the run's settings.
        source: the model that the run starts from; None for a new one.

    Raises:
        UsageError: keys of adapters are given without a base or a rank; or the run starts from a
            stored adapter, and a given value differs from the adapter's.
    """
    given_keys = [key for key in (*ADAPTER_KEYS, "lora.lr_ratio") if key in settings.origins]
    if source and source.adapter:
        values = _values_of_stored_adapter(
            source.adapter.lora_on(source.config),
            f"the adapter in {source.name}",
            settings,
            given_keys,
        )
        return {**values, "model.init": folder_named(without_links(source.name))}
    if not given_keys:
        return {}
    key = given_keys[0]
    origin = settings.origins[key]
    lora = lora_of(settings)
    if lora is None:
        raise UsageError(
            f"{origin}: {key} is for adapters, and none are trained: give their rank too, such as {RANK_EXAMPLE}"
        )
    if source is None:
        raise UsageError(
            f"{origin}: {key}: adapters are added to frozen weights, and those of a new model would stay random: "
            "name the model with model.init = FOLDER (`monograph plan` takes model.preset, too)"
        )
    values = _values_by_key(lora)
    if exists(source.name) and not source.code:
        return {**values, "model.init": folder_named(without_links(source.name))}
    return values


def rate_fields(rate: float | str, ratio: float | None, default: float) -> dict[str, Any]:
    """Return two fields of the optimizer: its peak learning rate, and its groups of parameters with
    another rate.

    With `ratio`, the matrices B of adapters and, as in PEFT, the magnitudes of DoRA have `ratio`
    times the rate (LoRA+, Hayou et al. 2024, arXiv 2402.12354).

    Args:
        rate: optim.lr.
        ratio: lora.lr_ratio; None for one rate.
        default: the rate if optim.lr is "auto".
    """
    # The names of these parameters contain "lora_B" and "lora_magnitude".
    groups = () if ratio is None else (Group("*.lora_[Bm]*", ratio),)
    return {"lr": default if rate == "auto" else rate, "groups": groups}


def _values_by_key(lora: Lora) -> dict[str, Any]:
    """Return the values of `OPTION_KEYS` for these options."""
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


def _values_of_stored_adapter(
    lora: Lora, adapter_text: str, settings: Settings, given_keys: Collection[str]
) -> dict[str, Any]:
    """Return the values of `OPTION_KEYS` of a stored adapter. Settings may change only its dropout
    and its base.

    Args:
        lora: the options of the stored adapter.
        adapter_text: what an error calls the adapter.
        settings: the run's settings.
        given_keys: the keys of adapters that are given.

    Raises:
        UsageError: a given value differs from the stored adapter's.
    """
    stored = _values_by_key(lora)
    values = settings.values()
    changeable = {key: values[key] for key in ("lora.dropout", "lora.base")}
    if values["lora.tokens"] not in (None, "auto"):
        origin = settings.origins["lora.tokens"]
        raise UsageError(
            f"{origin}: lora.tokens: {adapter_text} has its own tokens: leave the key out"
        )
    for key in given_keys:
        if key in stored and key not in changeable and values[key] != stored[key]:
            raise UsageError(
                f"{settings.quoted(key)}, but {adapter_text} has {stored[key]}: leave the key out"
            )
    changes = {key: value for key, value in changeable.items() if value is not None}
    return stored | changes
