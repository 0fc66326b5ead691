"""Run: pytest tests/test_notebook.py

docs/notebook.ipynb: it has no outputs, and its cells run one after another where nothing else is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import monograph
from clocks import HANG_S
from commands.inputs import with_texts
from monograph import load

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
SMALL = ["train.tokens_per_update=128", "train.compile=none", "data.sequence_length=32", "data.held_out=0.2"]
# The constants of the first cell, in seconds instead of minutes.
QUICK = {
    "TEXT": "texts",
    "TRAIN": [*SMALL, "model.preset=nano", "data.tokenizer=bpe", "data.vocab_size=300", "train.updates=8"],
    "SWEEP": [*SMALL, "model.preset=nano", "data.tokenizer=bytes", "train.updates=3"],
    "REWARD": ["train.updates=2", "rl.prompts=2", "rl.group=4", "train.compile=none", "data.sequence_length=32"],
}


def test_it_has_no_outputs_and_every_cell_is_python() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and NOTEBOOK.stat().st_size < 10_000
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("code", "markdown") and isinstance(cell["source"], list)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            compile("".join(cell["source"]), "cell", "exec")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed")
def test_its_cells_run_from_first_to_last(tmp_path: Path) -> None:
    """In a fresh process with an empty home, outside of the checkout."""
    program = "\n".join(CODE)
    for name, value in QUICK.items():
        program, replaced = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value!r}", program)
        assert replaced == 1, name
    (tmp_path / "home").mkdir()
    (tmp_path / "cells.py").write_text(program)
    environment = {key: text for key, text in os.environ.items() if not key.startswith(("MONOGRAPH_", "XDG_"))}
    environment |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(Path(monograph.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=with_texts(tmp_path),
        env=environment | {"MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    here = tmp_path / "notebook"
    for name in ("held_out", "sweep", "reward"):
        assert (here / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    model, tokenizer = load(here / "hf")
    rewarded, _ = load(here / "rewarded")
    assert tokenizer.vocab_size == model.config.vocab_size
    assert all(torch.equal(model.state_dict()[name], each) for name, each in rewarded.state_dict().items())
    assert (here / "gguf" / "model.gguf").exists() and (here / "gguf" / "Modelfile").exists()
    assert "best" in done.stdout, "the table of the sweep"
