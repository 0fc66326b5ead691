"""Fill those fields of a dataclass that have the value of a key of the settings, unchanged.

@dataclass
class Saving:
    keep: int = of_key("train.keep")

Saving(**values_by_field(Saving, settings.values()))
"""

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any


def of_key(key: str) -> Any:
    """Return a dataclass field with the value of a key, such as "train.keep".

    A type checker takes the call for a default, so such fields come after those without one.
    """
    return field(metadata={"key": key})


def values_by_field(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the fields that are declared with `of_key`, by the fields' names.

    Args:
        kind: the dataclass that has the fields.
        values: the values of all keys.
    """
    return {name: values[key] for name, key in keys_by_field(kind).items()}


def keys_by_field(kind: type) -> dict[str, str]:
    """Return the keys of the fields that are declared with `of_key`, by the fields' names."""
    return {each.name: each.metadata["key"] for each in fields(kind) if "key" in each.metadata}
