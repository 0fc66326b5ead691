"""`monograph export`: write a run's model as a folder that other tools load."""

from __future__ import annotations

from pathlib import Path

from monograph.model.adapter import save_adapter
from monograph.run.models import check, load_to_export, save
from monograph.terminal import shell_words, warn

ADAPTER = "adapter"  # the folder of the adapters alone, inside the merged model's folder
_NEXT = {
    "hf": "a Hugging Face folder; transformers loads it with AutoModelForCausalLM.from_pretrained({folder!r})",
    "gguf": "a GGUF file for llama.cpp, and a Modelfile: ollama create NAME -f {modelfile}",
}


def run(run: str, *, to: Path, format: str, dtype: str | None) -> int:
    """Write the newest sound checkpoint's model; see the command line's help."""
    check(format, dtype)
    model, tokenizer, adapters = load_to_export(run, warn)
    save(model, to, tokenizer, format, dtype, warn)
    if adapters and format == "hf":
        save_adapter(adapters, to / ADAPTER)
        print(f"{to / ADAPTER}: the adapters alone, for PEFT and for model.init")
    print(f"{to}: {_NEXT[format].format(folder=str(to), modelfile=shell_words(to / 'Modelfile'))}")
    return 0
