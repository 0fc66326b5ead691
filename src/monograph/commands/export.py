"""`monograph export`: write a run's model as a folder that other tools load."""

from pathlib import Path

from monograph.errors import InputRefused, UsageError
from monograph.model.adapter import (
    GGUF_FILE,
    Packed,
    require_gguf_form,
    write_adapter,
    write_gguf_adapter,
)
from monograph.model.config import LlamaConfig
from monograph.run.models import check, load_to_export, save
from monograph.run.repository import push, require_account
from monograph.storage.code import HUB
from monograph.storage.writing import temporary_folder
from monograph.terminal import shell_words, warn

ADAPTER = "adapter"  # the folder of the adapters alone, inside the merged model's folder


def run(run: str, *, to: str | Path, format: str, dtype: str | None) -> None:
    """Write the newest sound checkpoint's model; see the command line's help."""
    check(format, dtype)
    if (name := str(to)).startswith(HUB):
        _pushed(run, name, format)
        return
    model, tokenizer, adapters = load_to_export(run, warn)
    to = Path(to)
    if adapters and format == "gguf":
        adapters = _with_gguf_form(adapters, model.config)

    def beside(new: Path) -> None:
        """Write the adapters alone, so that both get their names at once."""
        if adapters is None:
            return
        (new / ADAPTER).mkdir()
        if format == "gguf":
            write_gguf_adapter(adapters, model.config, new / ADAPTER)
        else:
            write_adapter(adapters, new / ADAPTER)

    save(model, to, tokenizer, format, dtype, warn, beside)
    if format == "gguf":
        if adapters:
            print(
                f"{to / ADAPTER / GGUF_FILE}: the adapters alone, for llama.cpp beside a GGUF file of the base"
            )
        modelfile = shell_words(to / "Modelfile")
        print(
            f"{to}: a GGUF file for llama.cpp, and a Modelfile: ollama create NAME -f {modelfile}"
        )
        return
    if adapters:
        print(f"{to / ADAPTER}: the adapters alone, for PEFT and for model.init")
    call = f"AutoModelForCausalLM.from_pretrained({str(to)!r})"
    print(f"{to}: a Hugging Face folder; transformers loads it with {call}")


def _with_gguf_form(adapters: Packed, config: LlamaConfig) -> Packed | None:
    """Return the adapters, or None with a warning if a GGUF file has no form for them."""
    try:
        require_gguf_form(adapters, config)
    except InputRefused as error:
        warn(f"{error}: the model is written merged, without a file of its adapters")
        return None
    return adapters


def _pushed(run: str, name: str, format: str) -> None:
    """Export into a temporary folder, and push that. Adapters stay here: they name their base's
    folder on this disk.
    """
    if format != "hf":
        raise UsageError(
            f"--to {name}: --format {format} is written to a folder; only hf is pushed"
        )
    require_account(name)
    with temporary_folder() as place:
        model, tokenizer, _ = load_to_export(run, warn)
        save(model, place / "model", tokenizer, warn=warn)
        address = push(place / "model", name)
    print(f"{address}: one commit with the whole model; model.init={name} begins from it")
