"""Run: pytest tests/commands/test_adapter_sweep.py (a sweep of adapters on one base, as typed: its
results, the best member for PEFT, all members together, and one that learns from them)
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapted import peft
from batches import ragged
from commands.forked import CommandServer
from commands.inputs import OWN, newest, over, with_texts
from commands.test_lora import write_base
from monograph import checkpointing
from monograph.graph.shared_base import frozen_parameters
from monograph.run.folder import Run
from monograph.session.evaluated_model import load_from_run, load_mixture, mixture_of
from monograph.step.guard import memory_of

SETTINGS = over(OWN, "train.updates=6", "model.init=base", "lora.base=int8", "optim.lr=0.02")
SETTINGS += ["lora.rank=2,4", "train.seed=0,1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with a base, a sweep of four adapters on it, and the one that learned from them."""
    folder = with_texts(tmp_path_factory.mktemp("adapters"))
    write_base(folder / "base")
    done = server.run(
        folder, "sweep", *SETTINGS, "--out", "s", "--distill", "--json", figures=0, at_once=1
    )
    assert done.code == 0, done.err
    (folder / "out").write_text(done.out)
    (folder / "err").write_text(done.err)
    return folder


def result(place: Path) -> Any:
    return json.loads((place / "out").read_text().splitlines()[-1])


def nothing(line: str) -> None:
    """Warn of nothing."""


def test_memory_and_time_are_said_before_it_trains(place: Path) -> None:
    """Of all at once, and of one after another, without a ratio that could say something else."""
    before_training = (place / "err").read_text().partition("100 %")[0]
    assert re.search(
        r"4 members, all at once \([\d.]+ [KMG]iB; one alone [\d.]+ [KMG]iB\) \(measured at 1, 4\),"
        r" about [\d.]+ \w+ instead of [\d.]+ \w+ one after another",
        " ".join(before_training.split()),
    ), before_training


def test_results_have_error_bars(place: Path) -> None:
    best = result(place)["best"]
    assert best["standard_error"] > 0 and set(best["knobs"]) == {"lora.rank"}
    assert len(re.findall(r"^ +[24] +\d\.\d+ ± \d", (place / "err").read_text(), re.M)) == 2


def test_the_best_member_is_a_folder_that_peft_loads(place: Path) -> None:
    library = peft()
    transformers = pytest.importorskip("transformers")
    best = result(place)["best"]
    assert best["adapter"] == "s/adapter"
    checkpoint = load_file(newest(place / best["run"]) / "model.safetensors")
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    theirs = library.PeftModel.from_pretrained(base, place / "s/adapter")
    assert theirs.peft_config["default"].r == best["knobs"]["lora.rank"]
    loaded = {
        name.removeprefix("base_model.model.").replace(".default", ""): tensor
        for name, tensor in theirs.state_dict().items()
        if "lora_" in name
    }
    assert loaded.keys() == checkpoint.keys()
    assert all(torch.equal(loaded[name], checkpoint[name]) for name in loaded)


def test_all_members_are_scored_by_one_pass_over_one_base(
    place: Path, server: CommandServer
) -> None:
    """As if each had a base of its own."""
    runs = [Run(place / member["run"]) for member in result(place)["members"]]
    together = load_mixture(runs, "s/mixture", nothing)
    members = list(together.module.children())
    assert len(members) == 4
    bases = [[memory_of(p) for p in frozen_parameters(member)] for member in members]
    assert bases[0] and all(base == bases[0] for base in bases)
    alone = mixture_of([load_from_run(run, nothing) for run in runs], "s/mixture")
    batch = ragged(5)
    for model in (together, alone):
        model.module.eval()
    expected, count = alone.evaluate(batch)
    found, same_count = together.evaluate(batch)
    assert count == same_count and float(found) == pytest.approx(float(expected), rel=1e-6)
    done = server.run(place, "evaluate", "s/mixture", "--json")
    assert done.code == 0 and "4 members together" in done.out, done.err
    scores = [member["eval_bits_per_byte"] for member in result(place)["members"]]
    assert json.loads(done.out.splitlines()[-1])["bits_per_byte"] < sum(scores) / 4
    assert server.run(place, "compare", "s/mixture", "s/best").code == 0


def test_one_set_of_adapters_learns_from_all(place: Path, server: CommandServer) -> None:
    found = result(place)["distilled"]
    assert found["run"] == "s/distilled" and found["eval_bits_per_byte"] > 0
    saved = load_file(newest(place / "s/distilled") / "model.safetensors")
    assert saved and all(".lora_" in name for name in saved)
    teachers = json.loads((place / "s/distilled/teachers.json").read_text())["teachers"]
    assert [teacher["member"] for teacher in teachers] == [f"members/00{i}" for i in range(4)]
    assert server.run(place, "generate", "s/distilled", "alpha ", "--max-tokens", "3").code == 0
    done = server.run(place, "export", "s/distilled", "--to", "hf")
    assert done.code == 0 and (place / "hf/adapter").exists(), done.err


def test_adapters_that_have_changed_do_not_teach(
    place: Path, server: CommandServer, tmp_path: Path
) -> None:
    for name in ("s", "texts", "base"):
        shutil.copytree(place / name, tmp_path / name, symlinks=True)
    shutil.rmtree(newest(tmp_path / "s/distilled"))
    teacher = checkpointing.load(newest(tmp_path / "s/members/001"))
    changed = {name: tensor + 1 for name, tensor in teacher.model.items()}
    folder = tmp_path / "s/members/001/checkpoints"
    shutil.rmtree(newest(tmp_path / "s/members/001"))
    checkpointing.save(folder, replace(teacher, model=changed))
    done = server.run(tmp_path, "train", "--resume", "s/distilled", figures=0)
    assert done.code == 3, done.err
    assert "a teacher of s/distilled, has changed: put it back, or" in done.err.splitlines()[-1]


@pytest.mark.parametrize("axis", ["lora.base=int8,nf4", "lora.dora=true,false"])
def test_adapters_on_several_bases_do_not_teach(
    place: Path, server: CommandServer, axis: str
) -> None:
    done = server.run(place, "sweep", *over(SETTINGS, axis), "--out", "other", "--distill")
    key = axis.partition("=")[0]
    assert done.code == 2, done.err
    assert done.err.splitlines()[-1].endswith(f"leave out {key} as an axis")
