"""Run: make gpu-less ARGS=tests/pretended_gpu/test_commands.py

Every command on a pretended card whose kernels compute: how it ends, what it writes to the
terminal, and that its numbers are those of a CPU, or those of another way to compute them where a
law says so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clocks import HANG_S
from commands.forked import Command, CommandServer, Done
from commands.inputs import newest, over, rows, with_texts
from commands.test_finetune import folder_that_chats
from commands.test_questions import QUIZ
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.run.folder import Run
from monograph.text.tokenizer import Tokenizer

OWN = [
    "texts", "data.tokenizer=bytes", "data.sequence_length=32", "data.held_out=0.2",
    "train.updates=4", "train.tokens_per_update=128", "train.compile=none", "train.save_every=2",
]  # fmt: skip
TINY = [*OWN, "model.hidden_size=64", "model.num_hidden_layers=1", "model.num_attention_heads=4"]
MODULE = "pretended_gpu.test_commands"


# ── what a fork of the server becomes ───────────────────────────────────────────────────────────


def on_the_card() -> None:
    # Not in the server: torch refuses a card that was used before a fork.
    import pretended_gpu.numbers
    from monograph.cli import main
    from pretended_gpu import order

    assert pretended_gpu.numbers
    np.seterr(all="ignore")  # interpreted kernels compute with numpy
    if seed := os.environ.get("ORDER"):
        with order.deferred(int(seed)):
            main()
    main()


def signalled() -> None:
    """On the card, with a signal to itself in the call whose number is AT, of those that capture
    steps of decoding.
    """
    import pretended_gpu.numbers
    from monograph.decode.step import Steps

    assert pretended_gpu.numbers
    calls, call = 0, Steps._call

    def counted(self: Steps, *variant: Any) -> None:
        nonlocal calls
        if calls == int(os.environ["AT"]):
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
        calls += 1
        call(self, *variant)

    Steps._call = counted  # type: ignore[method-assign]
    on_the_card()


def on_the_cpu() -> None:
    from monograph.cli import main

    torch.cuda.is_available = lambda: False
    main()


# A module whose memory no plan knows: three tensors of 8,192 numbers a token, in bf16.
WIDE = """
from torch import nn

def build(vocab_size):
    wide = [nn.Linear(16, 8192), nn.ReLU(), nn.Linear(8192, 16)]
    return nn.Sequential(nn.Embedding(vocab_size, 16), *wide, nn.Linear(16, vocab_size))

def loss(model, batch):
    targets = batch["targets"].flatten()
    logits = model(batch["tokens"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()
"""


# ── running commands ────────────────────────────────────────────────────────────────────────────

# What Python and torch write to the terminal, and Monograph does not.
FOREIGN = re.compile(
    r"Traceback|Warning|site-packages|^\[[A-Z]\d{4} |^[EIW]\d{4} |\bbug:", re.MULTILINE
)


class Commands:
    """Commands in one folder, on a card or on the CPU."""

    def __init__(self, server: CommandServer, folder: Path) -> None:
        self.server, self.folder = server, folder

    def start(self, *arguments: str, on: str = "card", order: str = "") -> Command:
        env = {"MONOGRAPH_HOME": str(self.folder / "home")} | ({"ORDER": order} if order else {})
        return self.server.start(
            self.folder, *arguments, env=env, call=f"{MODULE}:on_the_{on}", figures=0
        )

    def __call__(self, *arguments: str, on: str = "card", code: int = 0, order: str = "") -> Done:
        """Run a command and check how it ends, and that nothing on the terminal is torch's or
        Python's.
        """
        done = self.start(*arguments, on=on, order=order).wait()
        assert done.code == code, done.err
        assert not FOREIGN.search(done.out + done.err), done.out + done.err
        return done

    def found(self, *arguments: str, on: str = "card", order: str = "") -> Any:
        """Return the object that a command with --json ends with."""
        return json.loads(self(*arguments, "--json", on=on, order=order).out.splitlines()[-1])

    def trained(self, name: str, *settings: str, on: str = "card", order: str = "") -> Any:
        """Train a run of that name; return its object."""
        return self.found("train", *over(TINY, *settings), "--out", name, on=on, order=order)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, conversations, questions, and models to begin from."""
    folder = with_texts(tmp_path_factory.mktemp("card"))
    folder_that_chats(folder, "chatml")
    (folder / "quiz.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUIZ))
    config = LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    save_model(Llama(config, seed=0).bfloat16(), folder / "base", Tokenizer.bytes())
    (folder / "wide.py").write_text(WIDE)
    return folder


@pytest.fixture(scope="module")
def monograph(folder: Path) -> Iterator[Commands]:
    with CommandServer() as server:
        yield Commands(server, folder)


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Commands]:
    """The same on a card that has 614 MiB next to its context, of which plans leave 600 to others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRETENDED_GIB", "1.1")
        with CommandServer() as server:
            yield Commands(server, folder)


def weights(run: Path) -> list[bytes]:
    """Return what the newest checkpoint holds, byte by byte."""
    return [
        (newest(run) / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")
    ]


def losses(run: Path) -> list[float]:
    return [row["train_loss"] for row in rows(run)]


# ── train ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def run(monograph: Commands) -> Any:
    """What a run in bf16 says of itself; it is in the folder `run`."""
    return monograph.trained("run", "train.precision=bf16", "train.updates=8")


def test_a_run_says_what_it_took(monograph: Commands, run: Any) -> None:
    assert (
        run["device"] == torch.cuda.get_device_name() and run["dtype"] == "bf16" and run["mfu"] > 0
    )
    [memory] = [row["memory"] for row in Run(monograph.folder / "run").rows() if "memory" in row]
    assert (
        memory["measured"]["weights"] >= 4 * run["params"]
        and memory["measured"]["moments"] >= 4 * run["params"]
    )
    assert (
        sum(memory["measured"].values()) <= run["peak_memory_bytes"] < torch.cuda.mem_get_info()[1]
    )


# Sums of a few hundred products in another order; law 2 has the same bound in fp32. Of bf16: a
# rounding of a number.
BOUND = {"fp32": 1e-6, "bf16": 2**-8}


@pytest.mark.parametrize(
    "settings",
    [
        ["optim.name=muon"], ["optim.name=adamw", "optim.state=8bit", "data.packing=padded"], ["train.precision=bf16"],
        ["texts", "model.init=base", "lora.rank=4", "lora.base=int8"],
        ["texts", "model.init=base", "lora.rank=4", "lora.base=nf4"],
        ["chats.jsonl", "model.init=chatty", "data.sequence_length=96"],
    ],
    ids=lambda settings: settings[-1],
)  # fmt: skip
def test_a_run_on_the_card_is_that_on_the_cpu(monograph: Commands, settings: list[str]) -> None:
    usual = over(OWN[2:] if "model.init" in str(settings) else TINY, "train.precision=fp32")
    found = {}
    for on in ("card", "cpu"):
        summary = monograph.found(
            "train", *over(usual, *settings), "--out", f"{on} {settings[-1]}", on=on
        )
        found[on] = [*losses(monograph.folder / summary["run"]), summary["eval_loss"]]
    assert len(found["card"]) == 5
    assert found["card"] == pytest.approx(
        found["cpu"], rel=BOUND["bf16" if "bf16" in settings[0] else "fp32"]
    )


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_what_a_cpu_has_not(monograph: Commands, run: Any, precision: str) -> None:
    """Losses are those in bf16, up to a rounding of a number to e4m3."""
    monograph.trained(precision, f"train.precision={precision}")
    assert losses(monograph.folder / precision) == pytest.approx(
        losses(monograph.folder / "run")[:4], rel=2**-4
    )


@pytest.mark.parametrize(
    "setting",
    ["train.remat=full", "train.remat=0.5", "train.remat=offload", "train.memory=stream", "order"],
)
def test_ways_to_compute_the_same(monograph: Commands, run: Any, setting: str) -> None:
    """Laws 3 and 4: bits. So it is whenever the card gets to its work, as long as it keeps to all
    waits.
    """
    same = [] if setting == "order" else [setting]
    monograph.trained(
        setting, "train.updates=8", "train.precision=bf16", *same, order="" if same else "1"
    )
    assert weights(monograph.folder / setting) == weights(monograph.folder / "run")


def test_a_captured_run_computes_what_an_eager_one_does(monograph: Commands) -> None:
    """Law 1, with Inductor's kernels interpreted and micro-steps replayed."""
    sizes = [
        "model.hidden_size=32",
        "model.num_attention_heads=2",
        "train.tokens_per_update=64",
        "train.updates=3",
    ]
    runs = {}
    for name, scope in (("captured", "whole"), ("called", "none")):
        runs[name] = monograph.trained(
            name, *sizes, "train.precision=fp32", f"train.compile={scope}"
        )
    assert (
        runs["captured"]["graph_breaks"]
        == runs["captured"]["recompiles"]
        == 0
        < runs["captured"]["compile_s"]
    )
    captured, called = (losses(monograph.folder / name) for name in runs)
    assert captured == pytest.approx(called, rel=BOUND["fp32"])


def test_killed_resumed_and_branched(monograph: Commands, run: Any) -> None:
    settings = over(TINY, "train.precision=bf16", "train.updates=8")
    killed = monograph.folder / "killed"
    command = monograph.start("train", *settings, "--out", "killed")
    command.until(lambda: (killed / "checkpoints" / "step-00000002" / "MANIFEST.json").exists())
    command.signal(signal.SIGKILL)
    assert command.wait().signal == signal.SIGKILL
    assert "resume    killed from update " in monograph("train", "--resume", "killed").err
    assert weights(killed) == weights(monograph.folder / "run")
    assert losses(killed) == losses(monograph.folder / "run")
    branch = monograph.found("train", "--from", "run", "train.updates=2", "--out", "branch")
    assert branch["update"] == 2 and branch["train_loss"] < losses(monograph.folder / "run")[0]


# ── what comes after training ───────────────────────────────────────────────────────────────────


def texts(found: Any) -> list[str]:
    return [each["text"] for each in found["completions"]]


def test_a_row_of_64_is_that_of_one_and_that_of_the_cpu(monograph: Commands, run: Any) -> None:
    prompts, short = ["generate", "run", "alpha", "beta"], ["--max-tokens", "6", "--seed", "3"]
    found = monograph.found(*prompts, *short, "-n", "32")
    assert len(texts(found)) == 64 and found["graphs"] == 1
    assert found["host_syncs_per_token"] <= 0.02  # 64 rows at once, which only a card has
    assert len(set(texts(found))) > 32
    alone = monograph.found("generate", "run", "beta", *short, "-n", "2")
    assert texts(alone) == texts(found)[32:34]
    assert texts(monograph.found(*prompts, *short, "-n", "32", on="cpu")) == texts(found)


def test_what_is_written_keeps_to_its_grammar(monograph: Commands, run: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    (monograph.folder / "schema.json").write_text(json.dumps(schema))
    said = ["generate", "run", "alpha", "-n", "3", "--max-tokens", "60"]
    for text in texts(monograph.found(*said, "--json-schema", "schema.json")):
        value = json.loads(text)
        assert value["a"] in (True, False) and value["b"] in ("x", "yy") and len(value) == 2
    assert all(
        re.fullmatch("[ab]{3}c", text)
        for text in texts(monograph.found(*said, "--regex", "[ab]{3}c"))
    )
    assert set(texts(monograph.found(*said, "--choice", "yes", "--choice", "no"))) <= {"yes", "no"}


def test_chats_and_questions(monograph: Commands) -> None:
    asked = ["generate", "chatty", "--chat", "why 7", "--max-tokens", "8", "--temperature", "0"]
    quiz = ["evaluate", "base", "--data", "quiz.jsonl"]
    for command, keys in (
        (asked, ["completions"]),
        (quiz, ["acc", "acc_norm", "acc_bytes", "questions"]),
    ):
        ours, theirs = (monograph.found(*command, on=on) for on in ("card", "cpu"))
        assert [ours[key] for key in keys] == [theirs[key] for key in keys]


def test_runs_are_evaluated_compared_exported_and_checked(monograph: Commands, run: Any) -> None:
    other = monograph.trained("other", "train.precision=fp32")
    scored = {name: monograph.found("evaluate", name) for name in ("run", "other")}
    on_cpu = monograph.found("evaluate", "other", on="cpu")
    for key in ("bits_per_byte", "loss"):
        assert scored["other"][key] == pytest.approx(on_cpu[key], rel=BOUND["fp32"])
    assert scored["other"]["loss"] == pytest.approx(other["eval_loss"], rel=BOUND["fp32"])
    assert scored["run"]["loss"] == pytest.approx(run["eval_loss"], rel=BOUND["bf16"])
    compared = monograph.found("compare", "run", "other")
    assert [each["bits_per_byte"] for each in compared["runs"]] == pytest.approx(
        [scored[name]["bits_per_byte"] for name in ("run", "other")], rel=BOUND["bf16"]
    )
    monograph("export", "other", "--to", "exported")
    exported = monograph.found("evaluate", "exported", "--data", "texts")
    assert exported["loss"] == monograph.found("evaluate", "other", "--data", "texts")["loss"]
    assert {each["fault"] for each in monograph.found("check", "run")["checkpoints"]} == {None}


# ── sweep, plan and profile ─────────────────────────────────────────────────────────────────────


def test_members_of_a_sweep_are_runs_of_their_own(monograph: Commands) -> None:
    """Law 5, as `--verify` tests it."""
    settings = over(
        TINY, "train.precision=fp32", "optim.lr=1e-3,1e-2", "train.seed=0,1", "optim.name=adamw"
    )
    found = monograph.found("sweep", *settings, "--out", "sweep")
    assert len(found["members"]) == 4 and found["best"]["knobs"] == {"optim.lr": 1e-2}
    assert monograph.found("sweep", "--verify", "2", "--out", "sweep")["verify"]["equal"]


def test_the_plan_and_the_profile_are_of_the_card(monograph: Commands) -> None:
    planned = monograph.found("plan", *TINY)
    assert (
        planned["device"] == torch.cuda.get_device_name() and planned["chosen"]["micro_batch"] == 4
    )
    assert (
        "does not fit" in monograph("plan", *OWN, "model.preset=8b", "--device-memory", "2GiB").out
    )
    profiled = monograph.found("profile", *TINY, "--out", "profile")
    assert profiled["device"] == planned["device"] and profiled["copy_bytes_per_s"] > 1e12


# ── what does not fit ───────────────────────────────────────────────────────────────────────────


def test_what_is_too_large_for_the_card_is_refused_in_a_line(small: Commands) -> None:
    for memory in ("auto", "stream"):
        done = small(
            "train", *OWN, "model.preset=124m", f"train.memory={memory}", "--out", "large", code=6
        )
        assert done.err.splitlines()[-1].startswith("error: nothing fits 0.0")
    assert not (small.folder / "large").exists()


def test_a_run_that_outgrows_the_card_takes_smaller_micro_batches(
    monograph: Commands, small: Commands
) -> None:
    """Law 2: the update stays the same."""
    wide = [
        "model.init=wide.py:build",
        "train.tokens_per_update=16384",
        "train.updates=2",
        "train.precision=bf16",
    ]
    done = small("train", *over(OWN, *wide), "--out", "outgrown")
    assert (
        "out of memory at 512 rows: micro_batch is now 256, the update stays the same" in done.err
    )
    monograph("train", *over(OWN, *wide), "--out", "in its place")
    assert losses(small.folder / "outgrown") == pytest.approx(
        losses(small.folder / "in its place"), rel=BOUND["bf16"]
    )


def test_what_is_streamed_has_the_bits_of_what_is_not(monograph: Commands, small: Commands) -> None:
    """Law 4, through the command line: some weights stay on the card, and the others come and go."""
    settings = over(
        TINY, "model.hidden_size=128", "model.num_hidden_layers=8", "train.precision=bf16", "train.updates=2",
        "train.tokens_per_update=64", "train.save_every=1",
    )  # fmt: skip
    streamed = small.trained("streamed", *settings, "train.memory=stream")
    monograph.trained("resident", *settings, "train.memory=device")
    assert weights(small.folder / "streamed") == weights(small.folder / "resident")
    assert streamed["peak_memory_bytes"] < 12 * streamed["params"], "weights, gradients and moments"


def test_torch_s_own_line_about_memory_is_not_shown() -> None:
    """It is written where memory does not suffice at once, in a process that a command is."""
    program = (
        "from monograph.cli import main\ntry:\n    main(['--version'])\nexcept SystemExit:\n    pass\nimport torch\n"
        "try:\n    torch.empty(2**50, device='cuda')\nexcept torch.OutOfMemoryError:\n    pass"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ── serve ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("number", "at"), [(signal.SIGTERM, 5), (signal.SIGINT, 0)])
def test_a_signal_while_serve_captures_its_steps_ends_it(
    folder: Path, number: int, at: int
) -> None:
    """In a process of its own, which Python ends: it would abort with 134 beside a thread that is
    inside of CUDA.
    """
    env = os.environ | {
        "AT": str(at),
        "NUMBER": str(int(number)),
        "MONOGRAPH_HOME": str(folder / "home"),
    }
    program = f"from {MODULE} import signalled; signalled()"
    asked = [sys.executable, "-c", program, "serve", "base", "--port", "0", "--rows", "2"]
    done = subprocess.run(
        asked, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == [
        "serve     ended; 0 requests answered, 0 tokens written"
    ]
