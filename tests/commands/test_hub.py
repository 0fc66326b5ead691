"""Run: pytest tests/commands/test_hub.py (models of the Hugging Face Hub, pushed to and fetched
from a stand-in).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from commands.forked import CommandServer, Done
from commands.inputs import OWN, over
from hub_stand_in import STRANGER, TOKEN, Hub, commit_of, stand_in
from monograph import load
from monograph.errors import UsageError
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.run.repository import push
from monograph.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason="not installed"
)
NAME, AT = "hf://owner/name", "owner/name"
Run = Callable[..., Done]
# What is in other repositories, too, and stays there: no file of a model that is read here.
OTHERS = {
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "README.md": b"words",
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with stand_in() as hub:
        yield hub


@pytest.fixture
def run(server: CommandServer, here: Path, hub: Hub) -> Run:
    """A command in a folder with a small model `out`, asking the stand-in, which is empty."""
    hub.models.clear(), hub.made.clear(), hub.asked.clear(), hub.gated.clear()
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(here / "hf"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
    }
    environment |= {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TMPDIR": str(here / "tmp"),
        "TRANSFORMERS_OFFLINE": "0",
    }
    (here / "tmp").mkdir()
    write(here / "out", seed=1)
    return lambda *words, **env: server.run(here, *words, env={**environment, **env}, figures=0)


def write(folder: Path, seed: int, shard: int = 10**9) -> None:
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    save_model(Llama(config, seed=seed), folder, Tokenizer.bytes(), shard)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_pushed_model_comes_back_in_equal_bytes(run: Run, here: Path, hub: Hub) -> None:
    done = run("export", "out", "--to", NAME)
    assert done.code == 0 and done.out.startswith(f"{hub.url}/{AT}: ") and not done.err, done
    [made] = hub.made  # huggingface_hub 1 says it in the first way, 2 in the second
    assert made.get("private") or made["visibility"] == "private"
    assert run("export", "out", "--to", "here").code == 0
    assert hub.models[AT] == [{}, files(here / "here")] and not list((here / "tmp").iterdir())

    hub.models[AT][-1] |= OTHERS  # as other repositories have them
    printed = run("train", *OWN, f"model.init={NAME}", "--print-config")
    init = tomllib.loads(printed.out)["model"]["init"]
    assert Path(init).name == commit_of(1), "a run records which commit it began from"
    assert files(Path(init)) == files(here / "here") and not [
        path for path in hub.asked if "evil" in path
    ]
    (own, _), (pulled, tokenizer) = load(here / "out"), load(init)
    tokens = torch.tensor([tokenizer.encode("alpha beta")])
    assert torch.equal(own.logits(own(tokens)), pulled.logits(pulled(tokens)))

    # What is in the cache needs no Hub, and every command with a model takes the name.
    offline = run("generate", NAME, "alpha", "--max-tokens", "3", "--json", HF_HUB_OFFLINE="1")
    local = run("generate", "out", "alpha", "--max-tokens", "3", "--json")
    assert offline.code == 0, offline.err
    written = [
        json.loads(done.out.splitlines()[-1])["completions"][0]["token_ids"]
        for done in (offline, local)
    ]
    assert written[0] == written[1]


def test_a_model_is_put_back_into_one_of_the_hub(run: Run, here: Path, hub: Hub) -> None:
    """With its processor's files, which no other command fetches, and without its code."""
    hub.models[AT] = [files(here / "out") | OTHERS | {"preprocessor_config.json": b"{}"}]
    done = run("export", "out", "--to", "whole", "--original", NAME)
    assert done.code == 0 and f"whole: {NAME} with the trained text model" in done.out, done
    copied = {"README.md": OTHERS["README.md"], "preprocessor_config.json": b"{}"}
    assert files(here / "whole") == files(here / "out") | copied
    assert not [path for path in hub.asked if "evil" in path or "pytorch" in path]


@pytest.mark.slow
def test_a_run_begins_from_a_model_of_the_hub_and_goes_there(
    run: Run, here: Path, hub: Hub
) -> None:
    hub.models[AT] = [files(here / "out")]
    for name, more in (("whole", []), ("lora", ["lora.rank=2"])):
        words = over(OWN, f"model.init={NAME}", "data.tokenizer=auto", "train.updates=2", *more)
        assert (trained := run("train", *words, "--out", name)).code == 0, trained.err
        # The run needs the Hub no more.
        resumed = run("train", "--resume", name, HF_ENDPOINT="http://127.0.0.1:9")
        assert resumed.code == 0 and "has already finished" in resumed.err, resumed
        assert (pushed := run("export", name, "--to", f"hf://owner/{name}")).code == 0, pushed.err
        assert run("export", name, "--to", f"{name}-here").code == 0
        # Merged, and without the folder of the adapters, which names the folder of its base.
        assert hub.models[f"owner/{name}"][-1] == files(here / f"{name}-here")


def test_a_push_replaces_the_whole_model_and_nothing_else(
    run: Run, here: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model.safetensors that stayed would be read in place of the new shards, and nothing would
    say so.
    """
    here_and_now = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(here / "hf")}
    here_and_now |= {
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    }
    for constant, value in here_and_now.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{constant}", value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    write(here / "shards", seed=2, shard=5000)
    kept = {**OTHERS, "model_of_others/x.safetensors": b"theirs"}
    hub.models[AT] = [{**files(here / "out"), **kept, "adapter_config.json": b"{}"}]
    assert push(here / "shards", NAME) == f"{hub.url}/{AT}" and not hub.made
    assert hub.models[AT][1:] == [files(here / "shards") | kept], "one commit"
    assert {"model-00001-of-00004.safetensors", "model.safetensors.index.json"} <= hub.models[AT][
        1
    ].keys()
    first, second = (load(here / name)[0].state_dict() for name in ("out", "shards"))
    for name, weights in (
        (f"{NAME}@{commit_of(0)}", first),
        (f"{NAME}@{commit_of(1)}", second),
        (NAME, second),
    ):
        pulled = load(name)[0].state_dict()
        assert all(torch.equal(pulled[each], weights[each]) for each in weights), name


@pytest.mark.parametrize(
    ("typed", "env", "code", "said"),
    [
        ("hf://owner", {}, 2, "hf://owner: expected hf://OWNER/NAME, or hf://OWNER/NAME@REVISION"),
        (
            "hf://owner/gone",
            {},
            3,
            "hf://owner/gone: there is no such model, or only others may see it",
        ),
        ("hf://owner/name@v9", {}, 3, "hf://owner/name@v9: there is no such revision of it"),
        ("hf://owner/gated", {}, 3, "hf://owner/gated: is gated: accept its terms"),
        ("hf://owner/empty", {}, 3, "hf://owner/empty: has no config.json"),
        (NAME, {"HF_HUB_OFFLINE": "1"}, 3, "the Hub cannot be reached; is HF_HUB_OFFLINE set?"),
        pytest.param(
            NAME,
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            3,
            "the Hub cannot be reached; is HF_HUB_OFFLINE set?",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    run: Run, here: Path, hub: Hub, typed: str, env: dict[str, str], code: int, said: str
) -> None:
    hub.models |= {AT: [{}], "owner/empty": [dict(OTHERS)]}
    hub.gated.add("owner/gated")
    done = run("train", *OWN, f"model.init={typed}", **env)
    *before, error = done.err.splitlines()
    assert done.code == code and said in error and (not before or "empty" in typed), done
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("typed", "env", "code", "said"),
    [
        (["hf://name"], {}, 2, "expected hf://OWNER/NAME"),
        ([NAME, "--format", "gguf"], {}, 2, "only hf is pushed"),
        (
            [NAME],
            {"HF_TOKEN": ""},
            3,
            "there is no token: log in with `hf auth login`, or set HF_TOKEN",
        ),
        ([NAME], {"HF_TOKEN": "hf_wrong"}, 3, "the Hub answers 401: "),
        ([NAME], {"HF_TOKEN": STRANGER}, 3, "the Hub answers 403: you must use a write token"),
        (["hf://owner/name@v9"], {}, 3, "there is no such revision"),
        pytest.param(
            [NAME],
            {"HF_HUB_OFFLINE": "1"},
            3,
            "the Hub cannot be reached; is HF_HUB_OFFLINE set?",
            marks=pytest.mark.slow,
        ),
        ([NAME], {"HF_ENDPOINT": "http://127.0.0.1:9"}, 3, "the Hub cannot be reached"),
    ],
)
def test_what_cannot_be_pushed_is_one_line_and_leaves_nothing(
    run: Run, here: Path, hub: Hub, typed: list[str], env: dict[str, str], code: int, said: str
) -> None:
    before = {AT: [dict(OTHERS)]}
    hub.models |= before
    done = run("export", "out", "--to", *typed, **env)
    assert done.code == code and said in done.err and done.err.count("\n") == 1, done
    assert hub.models == before and not list((here / "tmp").iterdir())


def test_without_the_library_a_line_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        UsageError,
        match=r"hf://owner/name: this needs huggingface_hub: .* install .*'huggingface_hub>=",
    ):
        load(NAME)


def test_a_plan_fetches_the_shape_alone(run: Run, here: Path, hub: Hub) -> None:
    """Not the weights, of which a plan reads nothing; what it calls the model is the name that was
    typed.
    """
    hub.models[AT] = [files(here / "out") | OTHERS]
    done = run("plan", f"model.init={NAME}", "data.tokenizer=bytes", "--device", "4090")
    assert done.code == 0, done
    assert "owner/name, vocabulary 259" in done.out
    fetched = {
        path.partition("?")[0].rpartition("/")[2] for path in hub.asked if "/resolve/" in path
    }
    assert fetched == {"config.json"}
