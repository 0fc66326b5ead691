"""`monograph export`: a run's model as a folder that other tools load."""

from __future__ import annotations

import sys
from pathlib import Path

from monograph.errors import UsageError
from monograph.run.models import load, save


def run(run: str, *, to: Path, format: str) -> int:
    """Write the newest sound checkpoint's model; see the command line's help."""
    if format != "hf":
        raise UsageError(f"--format {format}: not built yet; hf is")
    model, tokenizer = load(run, lambda line: print(f"warning: {line}", file=sys.stderr))
    save(model, to, tokenizer)
    print(f"{to}: a Hugging Face folder; transformers loads it with AutoModelForCausalLM.from_pretrained({str(to)!r})")
    return 0
