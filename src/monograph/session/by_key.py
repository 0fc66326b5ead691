"""Fill the fields of a dataclass that have the value of a key of the settings as it is."""

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any


def of_key(key: str) -> Any:
    """Declare a dataclass' field that has the value of a key, such as "train.keep"; see `by_field`."""
    return field(metadata={"key": key})


def by_field(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass' fields that are declared with `of_key`, by field.

    Args:
        kind: the dataclass.
        values: the values of all keys.
    """
    return {name: values[key] for name, key in keys_of(kind).items()}


def keys_of(kind: type) -> dict[str, str]:
    """Return the keys of a dataclass' fields that are declared with `of_key`, by field."""
    return {each.name: each.metadata["key"] for each in fields(kind) if "key" in each.metadata}
