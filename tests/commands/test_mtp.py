"""Run: pytest tests/commands/test_mtp.py (a head for multi-token prediction is trained, continued, put
back and refused by the command line).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands.forked import CommandServer
from commands.inputs import OWN, TINY, over
from model.seeing import seeing
from monograph import load
from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.hub import load_model, prefixes_left_out
from monograph.model.llama import Llama
from monograph.run.adapters import AdapterBase
from monograph.run.folder import Run
from monograph.text.tokenizer import Tokenizer

HEAD = "model.mtp_num_hidden_layers=1"


def losses(folder: Path, key: str) -> list[float]:
    return [row[key] for row in Run.open(folder).rows() if key in row]


def test_a_new_model_trains_it_and_the_next_run_goes_on_with_it(
    server: CommandServer, here: Path
) -> None:
    # The weight is so large that a run that forgot the head would not lower its loss.
    first = over(TINY, HEAD, "train.updates=8", "train.mtp_weight=2", "optim.lr=0.01")
    assert server.run(here, "train", *first, "--out", "first", figures=0).code == 0
    ahead = losses(here / "first", "mtp_loss")
    assert len(ahead) == 8
    assert ahead[-1] < ahead[0] - 0.3
    # The loss of the next tokens is that of an update, without that of the head.
    assert losses(here / "first", "train_loss")[0] == pytest.approx(ahead[0], abs=0.3)
    done = server.run(here, "export", "first", "--to", "folder")
    assert done.code == 0, done.err
    again = over(OWN, "train.updates=1", "optim.lr=1e-9")
    sources = {"run": "model.init=first", "folder": "model.init=folder"}
    for name, source in sources.items():
        settings = over(again, source, HEAD)
        done = server.run(here, "train", *settings, "--out", f"on-{name}", figures=0)
        assert done.code == 0, done.err
        assert losses(here / f"on-{name}", "mtp_loss")[0] < ahead[0] - 0.3
        # An export has the trained head, and says so.
        done = server.run(here, "export", f"on-{name}", "--to", f"on-{name}-folder")
        assert done.code == 0 and done.err == ""
        assert prefixes_left_out(here / f"on-{name}-folder") == ["mtp."]
        done = server.run(
            here, "train", *over(again, source), "--out", f"without-{name}", figures=0
        )
        assert done.code == 0, done.err
        assert "only the text model is trained: mtp.* are left out" in done.err
        assert losses(here / f"without-{name}", "mtp_loss") == []
        assert load(here / f"without-{name}")[0].mtp is None
    done = server.run(here, "export", "without-folder", "--to", "without-head")
    assert "only the text model is written: mtp.* are left out; --original" in done.err
    branch = ["--from", "first", "model.mtp_num_hidden_layers=0", "--out", "branch"]
    done = server.run(here, "train", *branch, figures=0)
    assert done.code == 3
    assert "'mtp.fc.weight' is unknown: it was saved with another model.init, size of" in done.err
    done = server.run(
        here, "train", *over(again, "model.init=without-run", HEAD), "--out", "none", figures=0
    )
    assert done.code == 3
    assert "without-run was trained without a head for multi-token prediction" in done.err


def test_adapters_are_trained_and_loaded_on_a_run_that_has_one(
    server: CommandServer, here: Path
) -> None:
    """Their base is the text model alone: training, evaluation, exports and the next run read the same one."""
    assert server.run(here, "train", *over(TINY, HEAD), "--out", "base", figures=0).code == 0
    adapters = over(OWN, "model.init=base", "lora.rank=2", "train.updates=2")
    for command in (
        ["train", *adapters, "--out", "adapted"],
        ["evaluate", "adapted"],
        ["export", "adapted", "--to", "folder"],
        ["generate", "folder/adapter", "a b", "--max-tokens", "2"],
        ["train", *over(OWN, "model.init=adapted", "train.updates=1"), "--out", "next"],
    ):
        done = server.run(here, *command, figures=0)
        assert done.code == 0, done.err
    model, tokenizer = load(here / "base")
    assert model.mtp is not None
    base = AdapterBase(model, tokenizer)
    for adapter in ("adapted", "folder/adapter"):
        assert base.read(here / adapter).factors
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    with pytest.raises(InputRefused, match="other weights"):
        AdapterBase(model, tokenizer).read(here / "adapted")


@pytest.mark.slow(reason="laws/test_mtp_is_its_equation.py has members by day")
def test_members_of_a_sweep_train_it_as_they_do_alone(server: CommandServer, here: Path) -> None:
    settings = over(TINY, HEAD, "train.updates=3")
    done = server.run(here, "sweep", *settings, "optim.lr=0.01,0.001", "--out", "swept", figures=0)
    assert done.code == 0, done.err
    for member, rate in enumerate(("0.01", "0.001")):
        alone = over(settings, f"optim.lr={rate}")
        done = server.run(here, "train", *alone, "--out", f"alone-{member}", figures=0)
        assert done.code == 0, done.err
        swept = losses(here / "swept" / "members" / f"{member:03}", "mtp_loss")
        assert swept == pytest.approx(losses(here / f"alone-{member}", "mtp_loss"), rel=1e-4)


def test_it_is_put_back_into_the_folder_of_a_model_that_sees(
    server: CommandServer, here: Path
) -> None:
    torch.manual_seed(0)
    seeing("qwen3_5", vocab_size=259).bfloat16().save_pretrained(here / "seeing")
    Tokenizer.bytes().save(here / "seeing/tokenizer.json")
    path = here / "seeing/config.json"
    values = json.loads(path.read_text())
    values["text_config"]["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(values))
    config = LlamaConfig.from_hf(values["text_config"])
    head = {
        name: tensor.bfloat16()
        for name, tensor in Llama(config).state_dict().items()
        if name.startswith("mtp.")
    }
    weights = here / "seeing/model.safetensors"
    save_file(load_file(weights) | head, weights, {"format": "pt"})
    own = [each for each in OWN if not each.startswith("data.tokenizer")]
    settings = over(own, "model.init=seeing", HEAD, "train.updates=1")
    done = server.run(here, "train", *settings, "--out", "tuned", figures=0)
    assert done.code == 0, done.err
    done = server.run(here, "export", "tuned", "--to", "whole", "--original", "seeing")
    assert done.code == 0, done.err
    assert "other tensors are unchanged (model.visual.*)" in done.out
    assert "not trained" not in done.err
    trained = load(here / "tuned")[0].state_dict()
    again = load_model(here / "whole", mtp=True).state_dict()
    before = load_model(here / "seeing", mtp=True).state_dict()
    assert trained.keys() == again.keys()
    for name, tensor in again.items():
        assert torch.equal(tensor, trained[name].bfloat16()), name
    assert any(not torch.equal(again[name], before[name]) for name in head)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["train.mtp_weight=1"], "train.mtp_weight is for a head that is trained: give model.mtp_"),
        (
            [HEAD, "train.memory=stream"],
            "does not go with train.memory = stream: its head is in no",
        ),
        ([HEAD, "lora.rank=2"], "does not go with lora.rank: the head is trained with all weights"),
        (
            [HEAD, "optim.transfer=width"],
            "does not go with optim.transfer = width: no rule carries",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    settings: list[str], refusal: str, server: CommandServer, here: Path
) -> None:
    done = server.run(here, "train", *over(TINY, *settings), "--out", "none", figures=0)
    assert done.code == 2
    assert refusal in done.err
    assert done.err.count("\n") == 1


def test_the_own_head_proposes_tokens_of_the_same_text(server: CommandServer, here: Path) -> None:
    """Also that of a folder, which is loaded for it; a model without a head is refused."""
    settings = over(TINY, HEAD, "train.updates=2")
    assert server.run(here, "train", *settings, "--out", "run", figures=0).code == 0
    assert server.run(here, "export", "run", "--to", "folder").code == 0
    asked = ["a b", "--max-tokens", "12", "--json"]
    for model in ("run", "folder"):
        plain = json.loads(server.run(here, "generate", model, *asked).out.splitlines()[-1])
        done = server.run(here, "generate", model, *asked, "--draft", "mtp")
        assert done.code == 0, done.err
        drafted = json.loads(done.out.splitlines()[-1])
        assert drafted["completions"] == plain["completions"]
        assert plain["drafted_passes"] == 0
        assert 1 <= drafted["drafted_tokens"] / drafted["drafted_passes"] <= 2
    settings = over(TINY, "train.updates=1")
    assert server.run(here, "train", *settings, "--out", "none", figures=0).code == 0
    done = server.run(here, "generate", "none", *asked, "--draft", "mtp")
    assert done.code == 2
    assert "draft = mtp: the model has no head for multi-token prediction" in done.err
    assert server.run(here, "export", "none", "--to", "bare").code == 0
    done = server.run(here, "generate", "bare", *asked, "--draft", "mtp")
    assert done.code == 3
    assert "bare: it has no mtp.* tensors" in done.err
