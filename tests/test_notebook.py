"""Run: pytest tests/test_notebook.py

docs/notebook.ipynb: its outputs are those of its cells, which run one after another where nothing
else is.
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
from scripts import script

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE_CELLS = [cell for cell in CELLS if cell["cell_type"] == "code"]
CODE = ["".join(cell["source"]) for cell in CODE_CELLS]
PRINTED = [
    "".join("".join(output.get("text", [])) for output in cell["outputs"]) for cell in CODE_CELLS
]
KINDS = [
    {kind for output in cell["outputs"] for kind in output.get("data", {})} for cell in CODE_CELLS
]
# Printed between two cells, to tell their lines apart.
BETWEEN = "=== the next cell ==="
SMALL = [
    "train.tokens_per_update=128",
    "train.compile=none",
    "data.sequence_length=32",
    "data.held_out=0.2",
]
# The constants of the first cell, in seconds instead of minutes.
QUICK = {
    "TEXT": "texts",
    "TRAIN": [
        *SMALL,
        "model.preset=nano",
        "data.tokenizer=bpe",
        "data.vocab_size=300",
        "train.updates=8",
    ],
    "SWEEP": [*SMALL, "model.preset=nano", "data.tokenizer=bytes", "train.updates=3"],
    "REWARD": [
        "train.updates=2",
        "rl.prompts=2",
        "rl.group=4",
        "train.compile=none",
        "data.sequence_length=32",
    ],
}


def test_its_outputs_are_those_of_its_cells() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and NOTEBOOK.stat().st_size < 200_000
    made = script("docs/make_notebook.py")
    recorded = notebook["metadata"]["monograph"]["cells_sha256"]
    assert recorded == made.digest(notebook["cells"]), "run: python docs/make_notebook.py"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), (
        "all of them, in one pass"
    )
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error", "".join(cell["source"])
    assert str(Path.home()) not in NOTEBOOK.read_text() and "/tmp/" not in NOTEBOOK.read_text()


def test_what_it_shows_is_what_its_commands_print() -> None:
    """A command's cell shows its lines from the first to `next`, and a drawing cell its picture."""
    for source, kinds, text in zip(CODE, KINDS, PRINTED, strict=True):
        labels = labels_of(text)
        if 'monograph("train"' in source:
            assert {"plan", "done", "report", "next"} <= labels, source
        if 'monograph("sweep"' in source:
            assert {"plan", "best", "next"} <= labels, source
        assert ("image/png" in kinds) == ("figure(" in source and "def figure" not in source), (
            source
        )


def labels_of(printed: str) -> set[str]:
    """The first word of each line that has one in the column of the labels."""
    return set(re.findall(r"(?m)^([a-z]+) {2,}\S", printed))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed"
)
def test_its_cells_run_from_first_to_last(tmp_path: Path) -> None:
    """In a fresh process with an empty home, outside of the checkout."""
    program = f"\nprint({BETWEEN!r}, flush=True)\n".join(CODE)
    for name, value in QUICK.items():
        program, replaced = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value!r}", program)
        assert replaced == 1, name
    (tmp_path / "home").mkdir()
    (tmp_path / "cells.py").write_text(program)
    environment = {
        key: text for key, text in os.environ.items() if not key.startswith(("MONOGRAPH_", "XDG_"))
    }
    environment |= {
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(Path(monograph.__file__).parents[1]),
    }
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
    assert all(
        torch.equal(model.state_dict()[name], each) for name, each in rewarded.state_dict().items()
    )
    assert (here / "gguf" / "model.gguf").exists() and (here / "gguf" / "Modelfile").exists()
    for printed, kept in zip(done.stdout.split(BETWEEN), PRINTED, strict=True):
        # Nothing is compiled here, and so small a run has nothing to say of some things.
        assert labels_of(printed) <= labels_of(kept), "run: python docs/make_notebook.py"
        assert bool(printed.strip()) == bool(kept.strip())
