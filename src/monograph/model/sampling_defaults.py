"""Read and export a model's sampling defaults, such as the temperature that its makers recommend.

Monograph keeps them for exports, and does not use them when it samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.storage.reading import file_inside, read_json, status

if TYPE_CHECKING:
    from gguf import GGUFWriter

# The values, by their keys in generation_config.json.
Defaults = Mapping[str, bool | int | float]

FILE = "generation_config.json"
_FLAGS = ("do_sample",)
_NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "presence_penalty",
    "frequency_penalty",
)
_MAX_NUMBER = 2**31 - 1  # The largest integer that a GGUF file can hold.


def read(folder: Path) -> dict[str, bool | int | float]:
    """Return the defaults in a folder's generation_config.json; {} if there is no such file.

    Raises:
        InputRefused: the file cannot be read, or a value is of another type or out of range.
    """
    if status(folder / FILE, follow=False) is None:
        return {}
    return select_defaults(read_json(file_inside(folder, FILE)), str(folder / FILE))


def select_defaults(values: Mapping[str, Any], where: str) -> dict[str, bool | int | float]:
    """Return the values of a generation_config.json that say how to sample, without nulls.

    Args:
        values: the values by their names in generation_config.json.
        where: the file, for errors.

    Raises:
        InputRefused: a value is of another type or out of range.
    """
    defaults = {key: values[key] for key in (*_FLAGS, *_NUMBERS) if values.get(key) is not None}
    for key, value in defaults.items():
        if key in _FLAGS:
            if not isinstance(value, bool):
                raise InputRefused(f"{where}: {key} is {str(value)[:60]!r}: expected true or false")
            continue
        # In Python a bool is an int.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or math.isnan(value) or abs(value) > _MAX_NUMBER:
            raise InputRefused(
                f"{where}: {key} is {str(value)[:60]!r}: expected a number up to {_MAX_NUMBER}"
            )
    return defaults


def add_to_gguf(writer: GGUFWriter, defaults: Defaults, context: int) -> None:
    """Add the values for which a GGUF file has keys.

    Args:
        writer: the file's writer.
        defaults: the model's sampling defaults.
        context: the length of the longest text, in tokens. As in transformers, the penalty for
            repetitions is computed from the whole text.
    """
    if defaults.get("do_sample") is False:
        writer.add_sampling_temp(0.0)  # always the most probable token
    else:
        if "temperature" in defaults:
            writer.add_sampling_temp(float(defaults["temperature"]))
        if "top_k" in defaults:
            writer.add_sampling_top_k(int(defaults["top_k"]))
        if "top_p" in defaults:
            writer.add_sampling_top_p(float(defaults["top_p"]))
        if "min_p" in defaults:
            writer.add_sampling_min_p(float(defaults["min_p"]))
    if "repetition_penalty" in defaults:
        writer.add_sampling_penalty_repeat(float(defaults["repetition_penalty"]))
        writer.add_sampling_penalty_last_n(context)


def modelfile_lines(defaults: Defaults) -> list[str]:
    """Return the lines of Ollama's Modelfile for the values that a GGUF file has keys for."""
    if defaults.get("do_sample") is False:
        lines = ["PARAMETER temperature 0"]
    else:
        keys = ("temperature", "top_k", "top_p", "min_p")
        lines = [f"PARAMETER {key} {defaults[key]}" for key in keys if key in defaults]
    if "repetition_penalty" in defaults:
        lines += [
            f"PARAMETER repeat_penalty {defaults['repetition_penalty']}",
            # Ollama's word for the length of the longest text.
            "PARAMETER repeat_last_n -1",
        ]
    return lines
