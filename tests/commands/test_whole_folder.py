"""Run: pytest tests/commands/test_whole_folder.py (a model that sees, trained on text and put back
into its folder).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands.forked import CommandServer
from commands.inputs import OWN, over
from model.seeing import seeing
from monograph import load
from monograph.model.hub import load_model
from monograph.text.tokenizer import Tokenizer

SETTINGS = [
    setting for setting in over(OWN, "train.updates=1") if not setting.startswith("data.tokenizer")
]


def write_seeing(folder: Path, seed: int = 0) -> None:
    """Write a model that sees pictures, whose tokens are bytes, with a layer for multi-token prediction."""
    torch.manual_seed(seed)
    theirs = seeing("qwen3_5", vocab_size=259).bfloat16()
    theirs.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"mtp.norm.weight": torch.ones(32)}, path, {"format": "pt"})
    Tokenizer.bytes().save(folder / "tokenizer.json")
    (folder / "preprocessor_config.json").write_text('{"patch_size": 4}')
    (folder / "modeling.py").write_text("raise SystemExit")


def test_a_run_is_put_back_into_the_folder_that_it_was_trained_from(
    server: CommandServer, here: Path
) -> None:
    """Also a run from a run, and adapters; every weight of the text model is that of the run."""
    write_seeing(here / "seeing")
    write_seeing(here / "other", seed=1)
    for name, *settings in (
        ("tuned", "model.init=seeing"),
        ("further", "model.init=tuned"),
        ("adapted", "model.init=seeing", "lora.rank=2"),
    ):
        done = server.run(here, "train", *over(SETTINGS, *settings), "--out", name, figures=0)
        assert done.code == 0, done.err
    before = load_file(here / "seeing" / "model.safetensors")
    for name in ("tuned", "further", "adapted"):
        done = server.run(here, "export", name, "--to", f"{name}-whole", "--original", "seeing")
        assert done.code == 0, done.err
        assert "was trained from" not in done.err
        model, _ = load(here / name)
        again = load_model(here / f"{name}-whole").state_dict()
        for key, weight in model.state_dict().items():
            assert torch.equal(again[key], weight.bfloat16()), (name, key)
        after = load_file(here / f"{name}-whole" / "model.safetensors")
        assert after.keys() == before.keys()
        others = {key for key in before if key.startswith(("model.visual.", "mtp."))}
        assert all(torch.equal(after[key], before[key]) for key in others)
        assert not all(torch.equal(after[key], before[key]) for key in before.keys() - others)
        written = {path.name for path in (here / f"{name}-whole").iterdir()}
        assert written == {path.name for path in (here / "seeing").iterdir()} - {"modeling.py"}
    assert done.out.splitlines() == [
        f"adapted-whole: seeing with the trained text model ({len(before) - len(others)} tensors); "
        f"{len(others)} other tensors are unchanged (model.visual.*, mtp.*)",
        "adapted-whole: a Hugging Face folder; transformers loads it with "
        "AutoModelForImageTextToText.from_pretrained('adapted-whole')",
    ]
    assert "mtp.* (multi-token prediction) was not trained, and may predict worse" in done.err
    assert "not copied from seeing: modeling.py" in done.err

    done = server.run(here, "export", "tuned", "--to", "of-other", "--original", "other")
    assert done.code == 0 and "tuned was trained from" in done.err and "not from other" in done.err
    assert "tensors, rounded to bf16);" in done.out
    done = server.run(here, "export", "further", "--to", "text")
    assert done.code == 0
    assert "further: only the text model is written: model.visual.*, mtp.* are left out" in done.err
    assert "--original " in done.err and "seeing writes the whole model" in done.err
    done = server.run(here, "export", "seeing", "--to", "alone")
    assert (
        "seeing: only the text model is written: model.visual.*, mtp.* are left out\n" in done.err
    )
    done = server.run(here, "export", "text", "--to", "text-whole", "--original", "seeing")
    assert done.code == 0 and "was trained from" not in done.err
    one, other = (
        load_file(here / name / "model.safetensors") for name in ("further-whole", "text-whole")
    )
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("more", "code", "why"),
    [
        (["--original", "seeing", "--format", "gguf"], 2, "--original seeing: --format gguf holds"),
        (["--original", "nothere"], 3, "--original nothere: expected a Hugging Face folder with"),
        (["--original", "texts"], 3, "texts: 'config.json' is not a file in this folder"),
        (
            ["--original", "wide"],
            3,
            "wide: its text model has hidden_size = 64, and the model that",
        ),
    ],
)
def test_an_original_that_does_not_fit_is_refused_in_one_line(
    server: CommandServer, here: Path, more: list[str], code: int, why: str
) -> None:
    write_seeing(here / "seeing")
    write_seeing(here / "wide")
    wide = seeing("qwen3_5", vocab_size=259, hidden_size=64)
    wide.save_pretrained(here / "wide")
    done = server.run(here, "export", "seeing", "--to", "out", *more)
    assert done.code == code, done.err
    lines = [line for line in done.err.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1 and why in lines[0], done.err
    assert not (here / "out").exists()
