"""Check the keys about layers of Mamba 2 that the config.json of several families has.

The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer
from monograph.model.layer_types import MAMBA_SIZES


def head_dim_from_hf(values: Mapping[str, Any]) -> int:
    """Return mamba_d_head of a config.json, whose other sizes of Mamba 2 it also checks.

    Args:
        values: the content of the config.json, with its family's defaults filled in.

    Raises:
        InputRefused: a size is wrong, or the heads are not as wide as mamba_expand says.
    """
    for key in ("hidden_size", "num_hidden_layers", "mamba_expand"):
        check_positive_integer(key, values[key])
    for key in MAMBA_SIZES:
        if not (key == "mamba_d_head" and values[key] == "auto"):
            check_positive_integer(key, values[key])
    width = values["mamba_expand"] * values["hidden_size"]
    heads = values["mamba_n_heads"]
    head_dim = values["mamba_d_head"]
    if head_dim == "auto":
        head_dim = width // heads
    if heads * head_dim != width:
        raise InputRefused(
            f"mamba_n_heads * mamba_d_head = {heads * head_dim}: expected mamba_expand * hidden_size = {width}"
        )
    return int(head_dim)


def require_unlimited_time_steps(values: Mapping[str, Any]) -> None:
    """Refuse a config.json whose time_step_limit clamps time steps, which the decoder does not."""
    low, high = _time_step_limit(values)
    if low > 0 or high != float("inf"):
        raise InputRefused(
            f"time_step_limit = {[low, high]} is not supported: only from 0 to infinity is"
        )


def _time_step_limit(values: Mapping[str, Any]) -> tuple[float, float]:
    """Return the limits between which time steps are clamped."""
    limit = values.get("time_step_limit")
    if limit is None:
        return 0.0, float("inf")
    if not isinstance(limit, list) or len(limit) != 2:
        raise InputRefused(f"time_step_limit = {limit!r}: expected two numbers")
    # transformers writes infinity as this object, because JSON has no number for it.
    infinity = {"__float__": "Infinity"}
    low, high = (float("inf") if value == infinity else value for value in limit)
    for value in (low, high):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputRefused(f"time_step_limit = {limit!r}: expected two numbers")
    return low, high
