"""Run: pytest tests/commands/test_branched.py (a run that begins from another, or whose inputs
changed since).
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from commands.forked import CommandServer
from commands.inputs import ONCE, OWN, POISON, SLOW, TINY, newest, over, rows
from monograph import checkpointing
from monograph.model import hub


def test_from_a_run(server: CommandServer, here: Path) -> None:
    root = over(TINY, "optim.lr=3e-3", "data.tokenizer=bpe", "data.vocab_size=300")
    assert server.run(here, "train", *root, figures=0).code == 0
    parent = next((here / "runs").iterdir())
    at_6 = checkpointing.load(parent / "checkpoints/step-00000006")
    done = server.run(
        here,
        "train",
        "--from",
        "last@6",
        "train.updates=4",
        "train.save_every=1",
        "--out",
        "b",
        figures=0,
    )
    assert done.code == 0 and "after update 6" in done.err, done.err
    first = json.loads((here / "b/metrics.jsonl").read_text().splitlines()[0])
    begun = checkpointing.load(sorted((here / "b/checkpoints").glob("step-*"))[0])
    assert first["update"] == 1 and first["tokens"] < 130 and not first["skipped"]
    assert begun.state["engine"]["applied"] > at_6.state["engine"]["applied"], (
        "Adam's bias correction goes on"
    )
    config = (here / "b/config.toml").read_text()
    assert "lr = 0.003" in config and "hidden_size = 16" in config and "updates = 4" in config
    assert (here / "b/tokenizer.json").read_bytes() == (parent / "tokenizer.json").read_bytes()
    shutil.rmtree(max((here / "b/checkpoints").iterdir()))
    parent.rename(here / "elsewhere")  # a branch has a tokenizer of its own
    assert server.run(here, "train", "--resume", "b", figures=0).code == 0
    (here / "more").mkdir()
    (here / "more/x.txt").write_text("delta gamma " * 80)
    done = server.run(
        here, "train", "--from", "b", "more", "train.updates=2", "--out", "c", figures=0
    )
    assert (
        done.code == 0
        and (here / "c/tokenizer.json").read_bytes() == (here / "b/tokenizer.json").read_bytes()
    )


def test_weights_are_those_of_their_sources(server: CommandServer, here: Path) -> None:
    (here / "more.txt").write_text("delta gamma " * 80)
    typed = ["texts@0.5", "more.txt@2", *over(TINY[1:], "train.updates=2")]
    assert server.run(here, "train", *typed, "--out", "a", figures=0).code == 0
    config = (here / "a/config.toml").read_text()
    assert 'source = ["texts", "more.txt"]\nweights = [0.5, 2.0]\n' in config
    for command in (["evaluate", "a"], ["compare", "a", "a"]):
        done = server.run(here, *command)
        assert done.code == 0 and "changed since" not in done.err, done.err
    for out, source, weights in (("b", [], "weights = [0.5, 2.0]"), ("c", ["texts"], "")):
        done = server.run(
            here, "train", "--from", "a", *source, "train.updates=1", "--out", out, figures=0
        )
        assert done.code == 0, done.err
        written = re.findall(
            r"^weights = .*$", (here / out / "config.toml").read_text(), re.MULTILINE
        )
        assert written == ([weights] if weights else [])


def test_a_new_run_whose_model_is_that_of_the_last_one(server: CommandServer, here: Path) -> None:
    assert server.run(here, "train", *ONCE, figures=0).code == 0
    parent = next((here / "runs").iterdir())
    text = ["texts", *(setting for setting in OWN[2:] if "updates" not in setting)]
    done = server.run(
        here, "train", *text, "model.init=last", "train.updates=1", "--json", figures=0
    )
    assert done.code == 0, done.err
    run = here / json.loads(done.out)["run"]
    assert run != parent and f'init = "runs/{parent.name}"' in (run / "config.toml").read_text()
    (begun,) = (checkpointing.load(path) for path in (run / "checkpoints").glob("step-00000000"))
    weights = checkpointing.load(newest(parent)).model
    assert all(torch.equal(begun.model[name], tensor) for name, tensor in weights.items())


def test_a_branch_counts_its_own_skipped_updates(server: CommandServer, here: Path) -> None:
    (here / "own.py").write_text(POISON.replace("len(calls) < 14", "len(calls) != 7"))
    assert (
        server.run(here, "train", *OWN, "model.init=own.py:build", "--out", "a", figures=0).code
        == 0
    )
    assert sum(row["skipped"] for row in rows(here / "a")) == 1
    (here / "own.py").write_text(SLOW.replace("0.05", "0"))
    branch = ["train", "--from", "a", "train.updates=3", "--out", "b"]
    done = server.run(here, *branch)
    assert (
        done.code == 3
        and "own.py: not the file that a was trained with" in done.err
        and not (here / "b").exists()
    )
    assert server.run(here, *branch, "model.init=own.py:build", figures=0).code == 0, (
        "named by the person again"
    )
    assert [row["skipped"] for row in rows(here / "b")] == [False] * 3


@pytest.mark.slow
def test_a_run_of_a_preset_that_has_changed_since_goes_on_with_its_own_number(
    server: CommandServer, here: Path
) -> None:
    """Presets of hybrids once had an rms_norm_eps of 1e-5; a new model has 1e-6, which llama.cpp
    needs.
    """

    def number(folder: Path) -> float:
        return checkpointing.load(newest(folder)).state["model_config"]["rms_norm_eps"]

    hybrid = over(
        OWN,
        "model.family=qwen3_5_text",
        "model.preset=nano",
        "train.updates=4",
        "train.save_every=2",
    )
    assert server.run(here, "train", *hybrid, "--out", "a", figures=0).code == 0
    assert number(here / "a") == 1e-6
    older = checkpointing.load(here / "a/checkpoints/step-00000002")
    older.state["model_config"]["rms_norm_eps"] = 1e-5
    shutil.rmtree(here / "a/checkpoints")
    checkpointing.save(here / "a/checkpoints", older)
    assert (
        server.run(here, "train", "--from", "a", "train.updates=2", "--out", "b", figures=0).code
        == 0
    )
    assert number(here / "b") == 1e-5
    resumed = server.run(here, "train", "--resume", "a", figures=0)
    assert resumed.code == 0, resumed.err
    assert newest(here / "a").name == "step-00000004" and number(here / "a") == 1e-5
    refused = server.run(here, "export", "a", "--to", "out", "--format", "gguf")
    assert refused.code == 3 and "rms_norm_eps = 1e-05" in refused.err


@pytest.mark.slow
def test_a_branch_that_was_killed_before_its_first_checkpoint(
    server: CommandServer, here: Path
) -> None:
    assert server.run(here, "train", *TINY, "--out", "a", figures=0).code == 0
    arguments = ["train", "--from", "a", "train.updates=3", "--out", "b"]
    assert server.run(here, *arguments, figures=0).code == 0
    expected = checkpointing.load(newest(here / "b"))
    for name in ("checkpoints", "metrics.jsonl"):
        path = here / "b" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = server.run(here, "train", "--resume", "b", figures=0)
    assert done.code == 0 and "weights and optimizer of" in done.err
    again = checkpointing.load(newest(here / "b"))
    assert all(torch.equal(again.model[name], tensor) for name, tensor in expected.model.items())


def test_changed_data_changed_settings_changed_module(server: CommandServer, here: Path) -> None:
    (here / "own.py").write_text(SLOW.replace("0.05", "0"))
    brief = over(OWN, "train.updates=4")
    assert (
        server.run(here, "train", *brief, "model.init=own.py:build", "--out", "run", figures=0).code
        == 0
    )
    shutil.rmtree(newest(here / "run"))
    metrics = (here / "run/metrics.jsonl").read_text()
    metrics = "".join(line for line in metrics.splitlines(keepends=True) if "summary" not in line)
    (here / "run/metrics.jsonl").write_text(metrics)

    def refused(path: Path, text: str, part: str) -> None:
        before = path.read_text()
        path.write_text(text)
        done = server.run(here, "train", "--resume", "run")
        assert done.code == 3 and part in done.err.splitlines()[-1], done.err
        path.write_text(before)

    refused(here / "texts/3.txt", "something else " * 9, "texts: not what run was trained on")
    refused(here / "own.py", SLOW, "own.py: not the file that run was trained with")
    config = (here / "run/config.toml").read_text()
    refused(
        here / "run/config.toml",
        config.replace("lr = 0.001", "lr = 0.002"),
        "config.toml: not what the run was begun",
    )
    refused(here / "run/metrics.jsonl", metrics[:100], "rows are missing")
    assert server.run(here, "train", "--resume", "run", figures=0).code == 0


def test_from_a_hugging_face_folder(server: CommandServer, here: Path) -> None:
    """Its tokenizer, its shape; weights that are stored in bf16 are trained as fp32."""
    assert (
        server.run(
            here,
            "train",
            *over(ONCE, "data.tokenizer=bpe", "data.vocab_size=270"),
            "--out",
            "a",
            figures=0,
        ).code
        == 0
    )
    assert server.run(here, "export", "a", "--to", "hf").code == 0
    model = hub.load_model(here / "hf", torch.bfloat16)
    shutil.copy(here / "hf/tokenizer.json", here / "tokenizer.json")
    shutil.rmtree(here / "hf")
    hub.save_model(model, here / "hf")
    shutil.move(here / "tokenizer.json", here / "hf/tokenizer.json")
    shown = server.run(here, "data", "show", *OWN[:1], *OWN[2:], "model.init=hf")
    assert "tokens of 270 kinds" in shown.out, "what `data show` decodes is what is trained on"
    done = server.run(
        here,
        "train",
        *OWN[:1],
        *over(OWN[2:], "train.updates=4"),
        "model.init=hf",
        "--out",
        "b",
        figures=0,
    )
    assert done.code == 0, done.err
    assert (here / "b/tokenizer.json").read_bytes() == (here / "hf/tokenizer.json").read_bytes()
    assert {tensor.dtype for tensor in checkpointing.load(newest(here / "b")).model.values()} == {
        torch.float32
    }
    cut = newest(here / "b")
    shutil.rmtree(cut)
    (here / "b/metrics.jsonl").write_text(
        "".join(
            x
            for x in (here / "b/metrics.jsonl").read_text().splitlines(keepends=True)
            if "summary" not in x
        )
    )
    assert (
        server.run(here, "train", "--resume", "b", figures=0).code == 0
        and newest(here / "b") == cut
    )
