"""The formats in which a model is written for other tools.

Each format is a subclass of `Export` and an entry in `EXPORTS`. The command line builds the choices,
the help and the errors of `--format` from this table, and must start without importing torch. So a
method that needs a writer imports it in its body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from monograph.errors import InputRefused, UsageError, Warn, did_you_mean, join_with_or
from monograph.terminal import shell_words

if TYPE_CHECKING:
    from monograph.model.adapter import PeftAdapters
    from monograph.model.config import LlamaConfig
    from monograph.model.llama import Llama
    from monograph.text.tokenizer import Tokenizer


class Export(ABC):
    """A format in which a model is written.

    Attributes:
        tools: the tools that read the format.
        noun_phrase: the name of the result in sentences, such as "a GGUF file".
        dtypes: the data types that the weights may be converted to; (): they keep their own.
        aliases: other words that people may type for this format. They are refused, and the error
            suggests the right word.
        can_be_pushed: whether the result may be uploaded to the Hugging Face Hub.
    """

    tools: ClassVar[tuple[str, ...]]
    noun_phrase: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[tuple[str, ...]] = ()
    can_be_pushed: ClassVar[bool] = False

    def require_packages(self) -> None:
        """Require the packages that the format needs. The default needs none.

        Raises:
            UsageError: a package is missing; the message says how to install it.
        """

    @abstractmethod
    def write(
        self,
        model: Llama,
        folder: Path,
        tokenizer: Tokenizer | None,
        dtype: str | None,
        warn: Warn,
        write_extras: Callable[[Path], None],
    ) -> None:
        """Write a new folder with the model, whole or not at all.

        Args:
            model: the model. Its weights may be on any device or in a mapped file. Adapters are
                merged into the weights that are written.
            folder: the folder to create; it may exist if it is empty.
            tokenizer: the model's tokenizer; None: the model has none.
            dtype: one of `dtypes`; None: the weights' own.
            warn: called with each line that the user should read.
            write_extras: called with the temporary folder, to write further files before it is
                renamed to `folder`.

        Raises:
            UsageError: the format needs a tokenizer, and there is none.
            InputRefused: the format cannot express the model, or the folder is not empty.
            DiskFull: no space left; nothing of this export remains.
        """

    @abstractmethod
    def describe(self, folder: Path) -> str:
        """Return the line that says what the folder is and how it is loaded."""

    def check_adapters(self, adapters: PeftAdapters, config: LlamaConfig) -> None:
        """Refuse adapters that cannot be written in a file of their own, without the model's weights.

        A format that can write adapters overrides this method, `write_adapters` and
        `describe_adapters`. The default refuses all adapters.

        Raises:
            InputRefused: the format has no form for these adapters.
        """
        raise InputRefused(f"{self.noun_phrase} has no form for adapters alone")

    def write_adapters(self, adapters: PeftAdapters, config: LlamaConfig, folder: Path) -> None:
        """Write adapters into an empty folder inside the folder of the merged model.

        Call `check_adapters` first.
        """
        raise NotImplementedError

    def describe_adapters(self, folder: Path) -> str:
        """Return the line that says what reads the adapters in a folder."""
        raise NotImplementedError


class HuggingFace(Export):
    """The folder that transformers loads, and that can be uploaded to the Hugging Face Hub."""

    tools = ("transformers",)
    noun_phrase = "a Hugging Face folder"
    aliases = ("safetensors",)
    can_be_pushed = True

    def write(
        self,
        model: Llama,
        folder: Path,
        tokenizer: Tokenizer | None,
        dtype: str | None,
        warn: Warn,
        write_extras: Callable[[Path], None],
    ) -> None:
        """Write the folder; see `monograph.model.hub.save_model`."""
        from monograph.model.hub import save_model
        from monograph.text.chat import end_of_turn

        if tokenizer is not None:
            # `end_of_turn` is called only for its error, so that the user hears of a chat template
            # that does not render.
            try:
                end_of_turn(tokenizer)
            except InputRefused as refused:
                warn(f"{refused}; it is copied as it is")
        save_model(model, folder, tokenizer, write_extras=write_extras)

    def describe(self, folder: Path) -> str:
        """Return how transformers loads the folder."""
        call = f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
        return f"{folder}: a Hugging Face folder; transformers loads it with {call}"

    def check_adapters(self, adapters: PeftAdapters, config: LlamaConfig) -> None:
        """Accept all adapters."""

    def write_adapters(self, adapters: PeftAdapters, config: LlamaConfig, folder: Path) -> None:
        """Write the adapters in PEFT's format."""
        from monograph.model.adapter import write_adapter

        write_adapter(adapters, folder)

    def describe_adapters(self, folder: Path) -> str:
        """Return what reads the folder of adapters."""
        return f"{folder}: the adapters alone, for PEFT and for model.init"


class Gguf(Export):
    """The file that llama.cpp loads, with a Modelfile for Ollama."""

    tools = ("llama.cpp", "Ollama")
    noun_phrase = "a GGUF file"
    dtypes = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k")

    def require_packages(self) -> None:
        """Require the package `gguf`."""
        from monograph.model.gguf import import_gguf

        import_gguf()

    def write(
        self,
        model: Llama,
        folder: Path,
        tokenizer: Tokenizer | None,
        dtype: str | None,
        warn: Warn,
        write_extras: Callable[[Path], None],
    ) -> None:
        """Write the folder; see `monograph.model.gguf.save_gguf`."""
        from monograph.model.gguf import save_gguf

        if tokenizer is None:
            raise UsageError(
                "a GGUF file holds the model's tokenizer, and the model has none; "
                "in Python, pass tokenizer=... to save()"
            )
        save_gguf(model, folder, tokenizer, dtype, warn, write_extras)

    def describe(self, folder: Path) -> str:
        """Return the command that makes an Ollama model of the file."""
        create = f"ollama create NAME -f {shell_words(folder / 'Modelfile')}"
        return f"{folder}: a GGUF file for llama.cpp, and a Modelfile: {create}"

    def check_adapters(self, adapters: PeftAdapters, config: LlamaConfig) -> None:
        """Refuse adapters that have parts for which a GGUF file has no form."""
        from monograph.model.adapter import require_gguf_form

        require_gguf_form(adapters, config)

    def write_adapters(self, adapters: PeftAdapters, config: LlamaConfig, folder: Path) -> None:
        """Write the adapters as the file that llama.cpp loads."""
        from monograph.model.adapter import write_gguf_adapter

        write_gguf_adapter(adapters, config, folder)

    def describe_adapters(self, folder: Path) -> str:
        """Return what reads the file of adapters."""
        from monograph.model.adapter import GGUF_FILE

        return f"{folder / GGUF_FILE}: the adapters alone, for llama.cpp beside a GGUF file of the base"


# The formats by their words on the command line. The first is the default.
EXPORTS: dict[str, Export] = {"hf": HuggingFace(), "gguf": Gguf()}


def find_export(name: str, dtype: str | None) -> Export:
    """Return the format with this name.

    The dtype and the packages are checked here, so that errors come before the model is loaded.

    Args:
        name: the format's word on the command line.
        dtype: the data type that the weights are to be converted to; None: their own.

    Raises:
        UsageError: an unknown format, a dtype that it does not have, or a missing package.
    """
    if name not in EXPORTS:
        words_meant = [word for word, export in EXPORTS.items() if name in export.aliases]
        if words_meant:
            suggestion = f"; did you mean {words_meant[0]}?"
        else:
            suggestion = did_you_mean(name, EXPORTS)
        raise UsageError(f"--format {name}: expected {join_with_or(EXPORTS)}{suggestion}")
    export = EXPORTS[name]
    if dtype is not None and not export.dtypes:
        converting = join_with_or([word for word, other in EXPORTS.items() if other.dtypes])
        raise UsageError(
            f"--dtype {dtype} is for --format {converting}; {export.noun_phrase} keeps the weights' dtype"
        )
    if dtype is not None and dtype not in export.dtypes:
        choices = ", ".join(export.dtypes)
        raise UsageError(
            f"--dtype {dtype}: expected one of {choices}{did_you_mean(dtype, export.dtypes)}"
        )
    export.require_packages()
    return export
