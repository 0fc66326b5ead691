"""Write the knobs of a sweep's members as text. A knob is a key that the sweep varies, such as "optim.lr"."""

from collections.abc import Mapping


def short_key(key: str) -> str:
    """Return a key without its section, as people say it."""
    return key.rpartition(".")[2]


def value_text(value: object) -> str:
    """Return a value as tables show it, a number with at most four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple | list):  # a list if it was read from JSON
        return ",".join(map(value_text, value))
    if isinstance(value, bool):
        return str(value).lower()  # as in TOML
    return str(value)


def knobs_text(knobs: Mapping[str, object], without: str = "") -> str:
    """Return knobs as "lr=0.01 seed=1".

    Args:
        knobs: the values, by their keys.
        without: the short key of a knob to leave out.
    """
    return " ".join(
        f"{short_key(key)}={value_text(value)}"
        for key, value in knobs.items()
        if short_key(key) != without
    )
