"""`monograph export`: write a run's model as a folder that other tools load."""

from pathlib import Path

from monograph.errors import InputRefused
from monograph.model.adapter import save_adapter
from monograph.model.gguf_adapter import FILE, save_gguf_adapter
from monograph.run.models import check, load_to_export, save
from monograph.terminal import shell_words, warn

ADAPTER = "adapter"  # the folder of the adapters alone, inside the merged model's folder


def run(run: str, *, to: Path, format: str, dtype: str | None) -> None:
    """Write the newest sound checkpoint's model; see the command line's help."""
    check(format, dtype)
    model, tokenizer, adapters = load_to_export(run, warn)
    save(model, to, tokenizer, format, dtype, warn)
    if format == "gguf":
        if adapters:
            try:
                save_gguf_adapter(adapters, model.config, to / ADAPTER)
                print(f"{to / ADAPTER / FILE}: the adapters alone, for llama.cpp beside a GGUF file of the base")
            except InputRefused as error:
                warn(f"{error}: the model is written merged, without a file of its adapters")
        modelfile = shell_words(to / "Modelfile")
        print(f"{to}: a GGUF file for llama.cpp, and a Modelfile: ollama create NAME -f {modelfile}")
        return
    if adapters:
        save_adapter(adapters, to / ADAPTER)
        print(f"{to / ADAPTER}: the adapters alone, for PEFT and for model.init")
    call = f"AutoModelForCausalLM.from_pretrained({str(to)!r})"
    print(f"{to}: a Hugging Face folder; transformers loads it with {call}")
