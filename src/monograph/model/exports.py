"""The formats in which a model is written for other tools: each is a class and its line in
`EXPORTS`.

The command line makes the words of `--format`, their help and their refusals from this table, and
it starts without torch. So a method imports what it writes with when it is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from monograph.errors import InputRefused, UsageError, Warn, did_you_mean, join_with_or
from monograph.terminal import shell_words

if TYPE_CHECKING:
    from monograph.model.adapter import Packed
    from monograph.model.config import LlamaConfig
    from monograph.model.llama import Llama
    from monograph.text.tokenizer import Tokenizer


class Export(ABC):
    """A format in which a model is written.

    Attributes:
        tools: the tools that read it.
        what: what is written, as a sentence names it.
        dtypes: the data types that the weights may be converted to; () if they keep their own.
        also: other words for the format that people may type; they are told its name.
        is_pushed: whether it is what a repository of the Hugging Face Hub holds.
    """

    tools: ClassVar[tuple[str, ...]]
    what: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ()
    also: ClassVar[tuple[str, ...]] = ()
    is_pushed: ClassVar[bool] = False

    def require_packages(self) -> None:
        """Refuse the format if a package is missing.

        Raises:
            UsageError: one is; the message says how to install it.
        """

    @abstractmethod
    def write(
        self,
        model: Llama,
        folder: Path,
        tokenizer: Tokenizer | None,
        dtype: str | None,
        warn: Warn,
        beside: Callable[[Path], None],
    ) -> None:
        """Write a new folder with the model, whole or not at all.

        Args:
            model: its weights may be on any device or in a mapped file; adapters are merged.
            folder: the folder to create; it may exist if it is empty.
            tokenizer: the model's; None: it has none.
            dtype: one of `dtypes`; None: the weights' own.
            warn: called with each line that the user should read.
            beside: writes what belongs beside the model into the folder before it gets its name.

        Raises:
            UsageError: the format needs a tokenizer, and there is none.
            InputRefused: the format cannot express the model, or the folder is not empty.
            DiskFull: no space left; nothing of this export remains.
        """

    @abstractmethod
    def describe(self, folder: Path) -> str:
        """Return the line that says what the folder is and how it is loaded."""

    def require_adapters(self, adapters: Packed, config: LlamaConfig) -> None:
        """Refuse adapters that cannot be written alone.

        A format that can write some overrides this, `write_adapters` and `describe_adapters`.

        Raises:
            InputRefused: the format has no form for them.
        """
        raise InputRefused(f"{self.what} has no form for adapters alone")

    def write_adapters(self, adapters: Packed, config: LlamaConfig, new: Path) -> None:
        """Write adapters that `require_adapters` takes into a new folder, beside the merged model."""
        raise NotImplementedError

    def describe_adapters(self, folder: Path) -> str:
        """Return the line that says what reads the adapters in a folder."""
        raise NotImplementedError


class HuggingFace(Export):
    """The folder that transformers loads, and the Hub keeps."""

    tools = ("transformers",)
    what = "a Hugging Face folder"
    also = ("safetensors",)
    is_pushed = True

    def write(
        self,
        model: Llama,
        folder: Path,
        tokenizer: Tokenizer | None,
        dtype: str | None,
        warn: Warn,
        beside: Callable[[Path], None],
    ) -> None:
        """Write the folder; see `monograph.model.hub.save_model`."""
        from monograph.model.hub import save_model
        from monograph.text.chat import end_of_turn

        if tokenizer is not None:
            try:
                end_of_turn(tokenizer)
            except InputRefused as refused:
                warn(f"{refused}; it is copied as it is")
        save_model(model, folder, tokenizer, beside=beside)

    def describe(self, folder: Path) -> str:
        """Return how transformers loads the folder."""
        call = f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
        return f"{folder}: a Hugging Face folder; transformers loads it with {call}"

    def require_adapters(self, adapters: Packed, config: LlamaConfig) -> None:
        """Take all adapters."""

    def write_adapters(self, adapters: Packed, config: LlamaConfig, new: Path) -> None:
        """Write them in PEFT's format."""
        from monograph.model.adapter import write_adapter

        write_adapter(adapters, new)

    def describe_adapters(self, folder: Path) -> str:
        """Return what reads the folder of adapters."""
        return f"{folder}: the adapters alone, for PEFT and for model.init"


class Gguf(Export):
    """The file that llama.cpp loads, with a Modelfile for Ollama."""

    tools = ("llama.cpp", "Ollama")
    what = "a GGUF file"
    dtypes = ("f32", "f16", "bf16", "q8_0", "q4_k_m", "q5_k_m", "q6_k")

    def require_packages(self) -> None:
        """Refuse the format without the package `gguf`."""
        from monograph.model.gguf import package

        package()

    def write(
        self,
        model: Llama,
        folder: Path,
        tokenizer: Tokenizer | None,
        dtype: str | None,
        warn: Warn,
        beside: Callable[[Path], None],
    ) -> None:
        """Write the folder; see `monograph.model.gguf.save_gguf`."""
        from monograph.model.gguf import save_gguf

        if tokenizer is None:
            raise UsageError("a GGUF file holds the model's tokenizer: give it to save")
        save_gguf(model, folder, tokenizer, dtype, warn, beside)

    def describe(self, folder: Path) -> str:
        """Return how Ollama takes the file."""
        create = f"ollama create NAME -f {shell_words(folder / 'Modelfile')}"
        return f"{folder}: a GGUF file for llama.cpp, and a Modelfile: {create}"

    def require_adapters(self, adapters: Packed, config: LlamaConfig) -> None:
        """Refuse adapters with parts for which a GGUF file has no form."""
        from monograph.model.adapter import require_gguf_form

        require_gguf_form(adapters, config)

    def write_adapters(self, adapters: Packed, config: LlamaConfig, new: Path) -> None:
        """Write them as llama.cpp loads them."""
        from monograph.model.adapter import write_gguf_adapter

        write_gguf_adapter(adapters, config, new)

    def describe_adapters(self, folder: Path) -> str:
        """Return what reads the file of adapters."""
        from monograph.model.adapter import GGUF_FILE

        return f"{folder / GGUF_FILE}: the adapters alone, for llama.cpp beside a GGUF file of the base"


# By the word on the command line. The first is the default.
EXPORTS: dict[str, Export] = {"hf": HuggingFace(), "gguf": Gguf()}


def require_export(name: str, dtype: str | None) -> Export:
    """Return a format by its name, if a model can be written in it, before anything is loaded.

    Args:
        name: the word on the command line.
        dtype: the data type that the weights are to be converted to; None: their own.

    Raises:
        UsageError: an unknown format, a dtype that it does not have, or a missing package.
    """
    if name not in EXPORTS:
        meant = [word for word, export in EXPORTS.items() if name in export.also]
        near = f"; did you mean {meant[0]}?" if meant else did_you_mean(name, EXPORTS)
        raise UsageError(f"--format {name}: expected {join_with_or(EXPORTS)}{near}")
    export = EXPORTS[name]
    if dtype is not None and not export.dtypes:
        converting = join_with_or([word for word, other in EXPORTS.items() if other.dtypes])
        raise UsageError(
            f"--dtype {dtype} is for --format {converting}; {export.what} keeps the weights' dtype"
        )
    if dtype is not None and dtype not in export.dtypes:
        choices = ", ".join(export.dtypes)
        raise UsageError(
            f"--dtype {dtype}: expected one of {choices}{did_you_mean(dtype, export.dtypes)}"
        )
    export.require_packages()
    return export
