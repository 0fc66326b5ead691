"""A model for other tools, in the format that they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from monograph.errors import InputRefused, UsageError
from monograph.graph.inspect import unwrapped
from monograph.model import hub
from monograph.model.gguf import DTYPES, package, save_gguf
from monograph.model.llama import Llama
from monograph.text.chat import end_of_turn
from monograph.text.tokenizer import Tokenizer


def save(
    model: Llama,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    format: str = "hf",
    dtype: str | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> None:
    """Write a model for other tools: `hub.save_model` for "hf", `gguf.save_gguf` for "gguf".

    Raises:
        UsageError: another format or dtype, or a package that is missing.
        InputRefused: the folder exists and holds something, or the model is none that the format can express.
        DiskFull: no space left; nothing of this export remains.
    """
    check(format, dtype)
    model = unwrapped(model)
    if not isinstance(model, Llama):
        raise UsageError(f"save writes a language model of this package, not a {type(model).__name__}")
    if format == "hf":
        if tokenizer is not None:
            try:
                end_of_turn(tokenizer)
            except InputRefused as refused:
                warn(f"{refused}; it is copied as it is")
        hub.save_model(model, folder, tokenizer)
    elif tokenizer is None:
        raise UsageError("a GGUF file holds the model's tokenizer: give it to save")
    else:
        save_gguf(model, folder, tokenizer, dtype, warn)


def check(format: str, dtype: str | None) -> None:
    """Refuse, before anything is loaded, what no model can be written as.

    Raises:
        UsageError: another format or dtype, or a package that is missing.
    """
    if format not in ("hf", "gguf"):
        raise UsageError(f"--format {format}: expected hf or gguf")
    if format == "hf" and dtype is not None:
        raise UsageError(f"--dtype {dtype} is for --format gguf; a Hugging Face folder keeps the weights' dtype")
    if dtype not in (None, *DTYPES):
        raise UsageError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if format == "gguf":
        package()
