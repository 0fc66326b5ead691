"""Run: pytest tests/commands/test_adapters.py (texts by adapters that stay unmerged)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapted import many_stored, trained
from batches import tiny_llama
from commands.forked import CommandServer
from commands.inputs import ONCE, OWN, newest, over, with_texts
from commands.test_lora import train_on_base, write_base
from monograph import checkpointing
from monograph.decode import Sampling, generate
from monograph.decode.adapter_bank import install, rows_with_adapters
from monograph.errors import InputRefused, UsageError
from monograph.graph.lora import Lora
from monograph.model.adapter import (
    install_adapters,
    pack_adapters,
    read_adapter,
    save_adapter,
)
from monograph.model.hub import load_model
from monograph.run.adapters import AdapterBase, named_folders
from monograph.run.models import load, load_with_tokenizer
from monograph.text.tokenizer import Tokenizer

MANY = ["--adapter", "own=run", "--adapter", "peft=peft"]


def write_peft(folder: Path, base: Path, lora: Lora, seed: int = 1) -> None:
    model = load_model(base)
    install_adapters(model, lora)
    save_adapter(pack_adapters(trained(model, seed, 0.5), lora, str(base)), folder)


@pytest.fixture(scope="module")
def here(tmp_path_factory, server: CommandServer) -> Path:
    """A base, a run with adapters on it, its export, and a folder of PEFT of another rank."""
    here = with_texts(tmp_path_factory.mktemp("adapters"))
    train_on_base(here, server, "optim.lr=0.1")
    done = server.run(here, "export", "run", "--to", "out", figures=0)
    assert done.code == 0, done.err
    write_peft(
        here / "peft", here / "base", Lora(rank=20, alpha=200.0, targets=("v_proj", "down_proj"))
    )
    return here


def texts(done: Any) -> list[str]:
    assert done.code == 0, done.err
    return [each["text"] for each in json.loads(done.out.splitlines()[-1])["completions"]]


def test_each_text_is_that_of_its_adapter(here: Path, server: CommandServer) -> None:
    """As by `mono.generate` with its adapter alone, and other than that of the base."""
    model, tokenizer = load_with_tokenizer(here / "base")
    base = AdapterBase(model, tokenizer)
    stored = {name: base.read(here / folder) for name, folder in (("own", "run"), ("peft", "peft"))}
    expected = {}
    for name, adapter in stored.items():
        alone = load(here / "base")[0]
        install(alone, {name: adapter})
        [found] = generate(alone, tokenizer, ["alpha"], Sampling(0.8), max_tokens=20, adapters=name)
        expected[name] = found.text
    [found] = generate(model, tokenizer, ["alpha"], Sampling(0.8), max_tokens=20)
    expected["base"] = found.text
    assert len(set(expected.values())) == 3
    asked = ["generate", "base", "alpha", *MANY, "--max-tokens", "20", "--json"]
    assert texts(server.run(here, *asked, figures=0)) == [expected["own"]]
    for name, text in expected.items():
        assert texts(server.run(here, *asked, "--use", name, figures=0)) == [text]
    (here / "many.jsonl").write_text(
        "".join(json.dumps({"prompt": "alpha", "adapter": name}) + "\n" for name in expected)
    )
    with_file = [
        "generate",
        "base",
        "--prompts",
        "many.jsonl",
        *MANY,
        "--max-tokens",
        "20",
        "--json",
    ]
    assert texts(server.run(here, *with_file, figures=0)) == list(expected.values())


def test_a_run_and_its_export_are_the_same_adapter(here: Path) -> None:
    model, tokenizer = load_with_tokenizer(here / "base")
    base = AdapterBase(model, tokenizer)
    run, export = base.read(here / "run"), base.read(here / "out" / "adapter")
    assert run.digest == export.digest and run.factors.keys() == export.factors.keys()
    assert (run.rank, run.scale) == (4, 8.0)


def test_an_adapter_on_a_run_is_one_on_its_export_and_the_reverse(
    here: Path, server: CommandServer, tmp_path: Path
) -> None:
    """Their config.json differs, in the ids of tokens, and their weights do not."""
    shutil.copytree(here / "texts", tmp_path / "texts")
    assert server.run(tmp_path, "train", *ONCE, "--out", "whole", figures=0).code == 0
    assert server.run(tmp_path, "export", "whole", "--to", "hf", figures=0).code == 0
    for base in ("whole", "hf"):
        typed = [*over(OWN, "train.updates=1", f"model.init={base}", "lora.rank=2")]
        typed = [each for each in typed if not each.startswith("data.tokenizer")]
        done = server.run(tmp_path, "train", *typed, "--out", f"on_{base}", figures=0)
        assert done.code == 0, done.err
        done = server.run(tmp_path, "export", f"on_{base}", "--to", f"of_{base}", figures=0)
        assert done.code == 0, done.err
    for base, other in (("whole", "hf"), ("hf", "whole")):
        adapter = f"x=of_{other}/adapter"
        done = server.run(
            tmp_path, "generate", base, "alpha", "--adapter", adapter, "--max-tokens", "2"
        )
        assert done.code == 0, done.err


def test_a_run_whose_adapter_is_not_finite_is_refused_by_tensor(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "run", tmp_path / "run", symlinks=True)
    saved = checkpointing.load(newest(tmp_path / "run"))
    name = max(name for name in saved.model if ".lora_A" in name)
    model = {**saved.model, name: saved.model[name] * float("nan")}
    shutil.rmtree(newest(tmp_path / "run"))
    checkpointing.save(tmp_path / "run" / "checkpoints", replace(saved, model=model))
    base = AdapterBase(*load_with_tokenizer(here / "base"))
    with pytest.raises(InputRefused, match=f"run: {name} .* is not finite"):
        base.read(tmp_path / "run")


def test_unmerged_is_merged_but_for_rounding(here: Path) -> None:
    """The other way to use an adapter: its folder in the place of the model."""
    model, tokenizer = load_with_tokenizer(here / "base")
    adapter = AdapterBase(model, tokenizer).read(here / "peft")
    install(model.float(), {"peft": adapter})
    merged = load(here / "peft")[0].float()
    [own] = generate(model, tokenizer, ["al"], Sampling(0), max_tokens=1, adapters="peft")
    [other] = generate(merged, tokenizer, ["al"], Sampling(0), max_tokens=1)
    assert own.token_ids == other.token_ids


def copied(here: Path, folder: Path, **values: Any) -> Path:
    """The folder of PEFT with other values in its configuration."""
    shutil.copytree(here / "peft", folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_adapters_that_do_not_fit_are_refused_by_folder_and_key(here: Path, tmp_path: Path) -> None:
    model, tokenizer = load_with_tokenizer(here / "base")
    base = AdapterBase(model, tokenizer)
    other = tmp_path / "other"
    write_base(other, seed=1)
    elsewhere = AdapterBase(*load_with_tokenizer(other))
    wide = tmp_path / "wide"
    write_base(wide, rope_theta=5.0)
    refused: list[tuple[Any, Path, str]] = [
        (base, here / "base", "has no adapter: expected a folder with adapter_config.json, or a run"),
        (base, here / "texts", "has no adapter"),
        (elsewhere, here / "run", "model.init: this adapter was trained on other weights"),
        (elsewhere, here / "out" / "adapter", "weights_sha256 of monograph_base.json: this adapter"),
        (AdapterBase(*load_with_tokenizer(wide)), here / "peft", "another base: monograph_base.json"),
        (base, copied(here, tmp_path / "a", rank_pattern={"x": 3}), "rank_pattern = "),
        (base, copied(here, tmp_path / "b", r=5), "is .*, not .* as by r and base"),
        (base, copied(here, tmp_path / "c", target_modules=["nothing"]), "no linear layer is called"),
        (base, copied(here, tmp_path / "d", peft_type="IA3"), "peft_type = 'IA3'"),
    ]  # fmt: skip
    for asked, folder, words in refused:
        with pytest.raises(InputRefused, match=words) as error:
            asked.read(folder)
        assert str(folder) in str(error.value) and "\n" not in str(error.value)
    tokenizer.save(here / "peft" / "tokenizer.json")  # as some trainers do
    assert base.read(here / "peft").rank == 20


@pytest.mark.parametrize(
    "lora",
    [Lora(rank=2, dora=True), Lora(rank=2, tokens=(70, 71)), Lora(rank=2, dora=True, tokens=(70,))],
    ids=["dora", "rows", "both"],
)
def test_magnitudes_and_rows_of_tokens_are_read_unmerged(
    here: Path, tmp_path: Path, lora: Lora
) -> None:
    """As by a model that has this adapter alone, and other than the base."""
    write_peft(tmp_path / "peft", here / "base", lora)
    model, tokenizer = load_with_tokenizer(here / "base")
    adapter = AdapterBase(model, tokenizer).read(tmp_path / "peft")
    bank = install(model.double(), {"peft": adapter})
    alone = load(here / "base")[0].double()
    start = read_adapter(tmp_path / "peft")
    install_adapters(alone, start.lora, start=start)
    tokens_BT = torch.tensor([[1, 70, 71, 9]])
    with torch.no_grad():
        expected = alone.logits(alone(tokens_BT))
        plain = model.logits(model(tokens_BT))
        with rows_with_adapters(bank, torch.tensor([bank.slots["peft"]])):
            found = model.logits(model(tokens_BT))
    assert (found - expected).norm() <= 1e-6 * expected.norm() < 1e-2 * (found - plain).norm()


def test_what_the_command_line_says_wrong(here: Path, server: CommandServer) -> None:
    for given, code, words in (
        (["--adapter", "run"], 2, "--adapter run: expected NAME=FOLDER"),
        (["--adapter", "base=run"], 2, "--adapter base: this name means the model without an"),
        (["--adapter", "a=run", "--adapter", "a=peft"], 2, "the name a is given twice"),
        (["--adapter", "a=run", "--use", "b"], 2, "--use b: expected a, base"),
        (["--adapter", "a=texts"], 3, "texts: has no adapter"),
    ):
        done = server.run(here, "generate", "base", "x", *given, figures=0)
        assert done.code == code and words in done.err, done.err


def test_names_of_adapters() -> None:
    assert named_folders("--adapter", ["a=b=c", "d=e"]) == {"a": "b=c", "d": "e"}
    assert named_folders("--adapter", ["gpt-4.1_b=x"]) == {"gpt-4.1_b": "x"}
    for text in ("a=", "a"):
        with pytest.raises(UsageError, match="expected NAME=FOLDER"):
            named_folders("--adapter", [text])
    for name in ("", "\n", "a b", "a/b", "-a", "..", "gedicht\u00e4", "last@7+a", "x" * 201):
        with pytest.raises(UsageError, match="--adapter .*expected a name such as poet-2"):
            named_folders("--adapter", [f"{name}=x"])


def test_prompts_with_their_own_adapters_need_one_name_each() -> None:
    tokenizer = Tokenizer.bytes()
    base = tiny_llama(vocab_size=259)
    with pytest.raises(UsageError, match="no adapter 'x': the model has none"):
        generate(base, tokenizer, ["a"], adapters="x")
    install(base, many_stored(tiny_llama(vocab_size=259), [Lora(rank=2)])[1])
    with pytest.raises(UsageError, match="adapters: 1 names for 2 prompts"):
        generate(base, tokenizer, ["a", "b"], adapters=["a0"])
    with pytest.raises(UsageError, match="no adapter 'x': expected a0, base"):
        generate(base, tokenizer, ["a"], adapters=["x"])
