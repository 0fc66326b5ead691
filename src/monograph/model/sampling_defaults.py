"""Read the values by which a model's makers want its texts drawn. Exports keep them; nothing here
draws by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.storage.reading import inside, read_json, status

if TYPE_CHECKING:
    from gguf import GGUFWriter

Defaults = Mapping[str, bool | int | float]  # by their names in generation_config.json

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
_LARGEST = 2**31 - 1  # of the numbers that a GGUF file can hold


def read(folder: Path) -> dict[str, bool | int | float]:
    """Return the values in a folder's generation_config.json; an empty mapping if there is no such
    file.

    Raises:
        InputRefused: the file cannot be read, or a value is of another type or out of range.
    """
    if status(folder / FILE, follow=False) is None:
        return {}
    return checked(read_json(inside(folder, FILE)), str(folder / FILE))


def checked(values: Mapping[str, Any], where: str) -> dict[str, bool | int | float]:
    """Return those of a file's values that say how to draw, without any null.

    Raises:
        InputRefused: a value is of another type or out of range; the message begins with `where`.
    """
    found = {key: values[key] for key in (*_FLAGS, *_NUMBERS) if values.get(key) is not None}
    for key, value in found.items():
        if key in _FLAGS:
            if not isinstance(value, bool):
                raise InputRefused(f"{where}: {key} is {str(value)[:60]!r}: expected true or false")
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or math.isnan(value) or abs(value) > _LARGEST:
            raise InputRefused(
                f"{where}: {key} is {str(value)[:60]!r}: expected a number up to {_LARGEST}"
            )
    return found


def add_to_gguf(writer: GGUFWriter, defaults: Defaults, context: int) -> None:
    """Write the values that a GGUF file has keys for.

    Args:
        writer: a GGUFWriter.
        defaults: the model's.
        context: the longest text, all of which a penalty for repetitions looks back on, as in
            transformers.
    """
    if defaults.get("do_sample") is False:
        writer.add_sampling_temp(0.0)  # the most probable token
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
    """Return the same as lines of Ollama's Modelfile."""
    if defaults.get("do_sample") is False:
        lines = ["PARAMETER temperature 0"]
    else:
        drawn = ("temperature", "top_k", "top_p", "min_p")
        lines = [f"PARAMETER {key} {defaults[key]}" for key in drawn if key in defaults]
    if "repetition_penalty" in defaults:
        lines += [
            f"PARAMETER repeat_penalty {defaults['repetition_penalty']}",
            "PARAMETER repeat_last_n -1",
        ]
    return lines
