"""Run: pytest -m slow tests/test_blocks.py (every command of README.md and docs/*.md is typed, made
small)

A command that is neither run nor listed here, with the reason, fails. That each is one that the
program takes, whether it is run or not, test_readme.py says by day.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import monograph as mono
from commands.forked import CommandServer, Done
from dialogues import CONTROLS, speaking
from distributed.launched import environment
from monograph.text.tokenizer import Tokenizer
from pages import PAGES, commands, files
from reference.article import Pretraining
from scripts import ROOT

# Not run: what such a line begins with (or is), and why.
NOT_RUN = {
    r"make (train|test|test-all|nightly|gpu-less|quick|setup-dev|site)\b.*": "installs packages or is many tests",
    r"pip install .*": "needs a package index; test_readme.py looks whether such an extra is there",
    r"(pip wheel|uv|pipx|python -m build)\b.*": "needs a package index; tests/test_package.py installs the wheel",
    r"llama-cli .*": "llama.cpp's program; tests/laws/test_exported_is_original.py gives it such files",
    r"pytest .*": "the nightly run is this very command; test_readme.py looks whether the file is there",
    r"python benchmarks/.*": "minutes to hours; tests/benchmarks/test_scripts.py runs each small",
    r"(python tests/pretended_gpu|benchmarks/gpu\.sh).*": "needs torch's CUDA build or a card; make gpu-less runs it",
    r"python tests/walk\.py.*": "follows the code of a checkout; tests/test_walk.py does",
    r"python -m pretended_gpu\.reached.*": "reads what tests on a pretended card write; its test_reached.py does",
    r"(srun|export|head=).*": "SLURM on two machines; test_readme.py looks whether the program takes it",
    r"python -m monograph\.lm_eval.*": "its data come from the network; tests/test_lm_eval.py has a task of its own",
    r"monograph profile .*--ladder": "minutes of compiling; tests/commands/test_ladder.py runs it",
    r"monograph export .* --to hf://.*": "the Hub; tests/commands/test_hub.py pushes to a stand-in",
    r"monograph --(install|show)-completion": "writes into the home folder; tests/cli/test_completion.py has another",
    r"curl .*load_lora_adapter .*": "needs a server with keys; tests/serve/test_adapters.py asks one",
    r"monograph generate .* --tools .*": "needs a template that shows tools; commands/test_generate_tools.py has one",
    r"monograph .*gemma-3-4b-it.*": "a model that sees pictures; tests/commands/test_whole_folder.py has small ones",
    r"monograph check --laws": "one to three minutes; tests/commands/test_check_laws.py runs it",
}
# Refused here, on purpose, with these words: what they need is not on every machine.
REFUSED = {
    r"monograph train my_texts/ train\.precision=fp8": "no fp8 arithmetic",
    r"monograph follow .* --to (wandb|trackio|mlflow).*": "needs its library",
}
# What is changed in a command, so that it is small, and why.
SMALLER = [
    (r"--minutes \S+", "--minutes 0.01", "a second instead of minutes"),
    (r"model\.preset=(1b|124m|micro)\b", "model.preset=nano", "a small model, by a CPU"),
    (
        r"model\.preset=llama-179m",
        "model.preset=micro",
        "nano has no narrower model to take a rate from",
    ),
    (r"train\.(updates|epochs|tokens)=\w+", "train.updates=2", "seconds"),
    (r"train\.tokens_per_update=\w+", "train.tokens_per_update=128", "seconds"),
    (r"data\.sequence_length=\d{4}", "data.sequence_length=64", "few texts make few rows"),
    (r"optim\.warmup_updates=\d+", "optim.warmup_updates=1", "two updates"),
    (r"--nproc-per-node 4", "--nproc-per-node 2", "as many processes as cores"),
    (r"(last|runs/a)@\d+", r"\1@2", "a run of few updates"),
    (r"\bRUN/members", "SWEEP/members", "a sweep's folder"),
    (r"^monograph chat RUN", "monograph chat FOLDER", "it has a chat template"),
    (r"(generate .*--prompts prompts)\.jsonl", r"\1.txt", "the records of the pages have answers"),
    (r"init=RUN rl\.environment", "init=FOLDER rl.environment", "it has a chat template"),
    (r"\bBASE (?=.*--adapter )", "FOLDER ", "the base of the adapters"),
    (r"--adapter (\w+)=(FOLDER|RUN)", r"--adapter \1=adapted", "a folder of adapters"),
    (r"--port \d+", "--port 0", "a port that is free"),
    (r"^(monograph serve (?!.*--port).*)", r"\1 --port 0", "a port that is free"),
]
# What a new run takes where its command does not say otherwise: the environment loses against it.
TINY = {
    "DATA_SOURCE": "my_texts", "DATA_SEQUENCE_LENGTH": "64", "DATA_HELD_OUT": "0.2", "TRAIN_UPDATES": "2",
    "TRAIN_TOKENS_PER_UPDATE": "128", "TRAIN_COMPILE": "none",
}  # fmt: skip
NEW = {
    "DATA_TOKENIZER": "bytes", "MODEL_HIDDEN_SIZE": "16", "MODEL_NUM_HIDDEN_LAYERS": "1",
    "MODEL_NUM_ATTENTION_HEADS": "2",
}  # fmt: skip
DRAWN = {"RL_MAX_NEW_TOKENS": "4", "RL_PROMPTS": "2"}  # in the place of tokens


def variables(command: str) -> dict[str, str]:
    """The environment of a command: what goes on from something has its settings, and a folder its
    own model.
    """
    begun = re.search(r"monograph (train|plan|profile|data|sweep [^-])", command)
    if not begun or re.search("--resume|--from (?!FOLDER)", command):
        return {}
    found = dict(TINY)
    if not re.search(r"model\.(init|preset)|data\.tokenizer|FOLDER", command):
        found |= NEW
    if "rl.reward" in command or "rl.environment" in command:  # which is a reward, too
        found = {
            name: value for name, value in found.items() if name != "TRAIN_TOKENS_PER_UPDATE"
        } | DRAWN
    return {f"MONOGRAPH_{name}": value for name, value in found.items()}


def listed(command: str) -> str | None:
    return next(
        (reason for pattern, reason in NOT_RUN.items() if re.fullmatch(pattern, command)), None
    )


PAGE_OF = {command: page.stem for page in PAGES for command in commands(page)}
ALL = sorted(PAGE_OF, key=PAGE_OF.__getitem__)


def run(server: CommandServer, folder: Path, line: str, **options: str) -> Done:
    done = server.run(folder, *shlex.split(line)[1:], env=variables(line) | options, figures=0)
    assert done.code == 0, f"{line}: {done.err}"
    return done


@pytest.fixture(scope="session")
def prepared(server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages name: texts, folders of models, runs, a sweep."""
    here = tmp_path_factory.mktemp("pages")
    files(here)
    folders(here)
    for seed, name in enumerate(("RUN", "other/RUN", "third/RUN")):
        run(server, here, f"monograph train my_texts train.seed={seed} --out {name}")
    run(
        server,
        here,
        "monograph sweep my_texts optim.lr=1e-3,3e-3,1e-2 train.seed=0,1 --out SWEEP --distill",
    )
    shutil.copytree(here / "SWEEP", here / "runs" / "my_sweep", symlinks=True)
    going_on(server, here, "my_texts train.parallel=none", "runs/a")
    shutil.copytree(here / "runs" / "a", here / "runs" / "b", symlinks=True)
    shutil.copytree(here / "RUN", here / "OTHER", symlinks=True)
    going_on(server, here, "my_texts", "runs/2026-01-01-1200")
    # The newest run is of chats, so that whatever a page says of `last` can be asked of it.
    going_on(server, here, "chats.jsonl model.init=FOLDER", "runs/2026-01-02-1200")
    run(server, here, "monograph train my_texts model.init=FOLDER lora.rank=2 --out adapted")
    run(server, here, "monograph export adapted --to out")
    return here


def folders(here: Path) -> None:
    """FOLDER speaks a chat template; BASE has its tokens but those of the template; and a file of
    torch.save.
    """
    tokenizer = speaking(here / "FOLDER", "chatml")
    content = json.loads(tokenizer.to_json())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in CONTROLS
    ]
    torch.manual_seed(0)
    for name, own in (("FOLDER", tokenizer), ("BASE", Tokenizer(content, "base"))):
        config = mono.LlamaConfig.preset(
            "nano", vocab_size=own.vocab_size, max_position_embeddings=256
        )
        mono.save(mono.Llama(config), here / f"{name}-saved", own)
        for file in (here / name).glob("*"):
            shutil.copy(file, here / f"{name}-saved")
        shutil.rmtree(here / name, ignore_errors=True)
        (here / f"{name}-saved").rename(here / name)
    own = Tokenizer.bytes()
    torch.save(Pretraining(own.vocab_size, positions=256).state_dict(), here / "model.pth")
    for name in ("tokenizer.json", "bpe_50K.json"):
        own.save(here / name)


def going_on(server: CommandServer, here: Path, settings: str, name: str) -> None:
    """A run that was killed after its second update."""
    words = shlex.split(
        f"train {settings} train.updates=40 train.save_every=1 train.keep=99 --out {name}"
    )
    environment = variables("monograph train " + settings) | {"MONOGRAPH_TRAIN_UPDATES": "40"}
    command = server.start(here, *words, env=environment, figures=0)
    command.until(lambda: any((here / name / "checkpoints").glob("step-00000002")))
    command.signal(signal.SIGKILL)
    command.wait()


@pytest.mark.slow(reason="all commands of all pages: minutes")
@pytest.mark.parametrize("command", ALL)
def test_a_command_of_the_pages_does_what_it_says(
    command: str, server: CommandServer, prepared: Path, tmp_path: Path
) -> None:
    page = PAGE_OF[command]
    if reason := listed(command):
        pytest.skip(reason)
    if not command.startswith("monograph plan"):
        for pattern, smaller, _ in SMALLER:
            command = re.sub(pattern, smaller, command)
    here = shutil.copytree(prepared, tmp_path / "here", symlinks=True)
    for name in re.findall(r"--(?:out|to) (\S+)", command):
        if name != "SWEEP":  # which goes on
            shutil.rmtree(here / name, ignore_errors=True)
    if "last/" in command or "--verify" in command:
        sweep(server, here)
    done = carried_out(server, here, command)
    refusal = next(
        (words for pattern, words in REFUSED.items() if re.fullmatch(pattern, command)), None
    )
    refused = refusal is not None and done.code == 2 and refusal in done.err
    assert done.code == 0 or refused, f"{page}: {command}: {done.code}: {done.err[-3000:]}"


def sweep(server: CommandServer, here: Path) -> None:
    """The newest in runs/ is a sweep."""
    run(server, here, "monograph sweep my_texts train.seed=0..3 --distill")


def carried_out(server: CommandServer, here: Path, command: str) -> Done:
    words = shlex.split(command)
    if words[:2] == ["monograph", "serve"]:
        serving = server.start(here, *words[1:])
        serving.until(lambda: "ready " in serving.out)
        serving.signal(signal.SIGTERM)
        return serving.wait()
    if words[0] == "monograph":
        return server.run(here, *words[1:], env=variables(command), figures=0)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, shell=True, cwd=here, env=environment() | variables(command) | {"PATH": path}, capture_output=True,
        text=True,
    )  # fmt: skip
    return Done(done.returncode, 0, done.stdout, done.stderr)


def test_each_command_is_run_or_listed() -> None:
    """And what is listed, refused or made smaller is there."""
    programs = ("monograph ", "torchrun ", "python ")
    assert not [
        command for command in ALL if not command.startswith(programs) and not listed(command)
    ]
    named = [
        path for reason in NOT_RUN.values() for path in re.findall(r"tests/[\w/]+\.py", reason)
    ]
    assert named and all((ROOT / path).exists() for path in named)
    for pattern in (*NOT_RUN, *REFUSED):
        assert any(re.fullmatch(pattern, command) for command in ALL), pattern
    for pattern, _, _ in SMALLER:
        assert any(re.search(pattern, command) for command in ALL), pattern
