"""Run: pytest tests/commands/test_bad_input.py (each wrong input: its exit code, one line, nothing
left behind).
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import LONG, OWN, SLOW, TINY, over, sound, with_texts
from monograph.errors import join_with_or
from monograph.model.exports import EXPORTS

MODULES = {
    "fails.py": "x = 1\ndef build():\n    raise ValueError('no')\n",
    "three.py": "def build():\n    return 3\n",
    "broken.py": "def build(:\n",
    "nohead.py": "from torch import nn\ndef build(vocab_size):\n    return nn.Embedding(vocab_size, 8)\n",
    "hungry.py": "import torch\nfrom torch import nn\ndef build(vocab_size):\n    return nn.Embedding(vocab_size, 8)\n"
    "def loss(model, batch):\n    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')\n",
}

WIDER = ["model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
FOREVER = [
    *(setting for setting in TINY if not setting.startswith("train.updates")),
    f"train.epochs={10**15}",
]
# What was typed, the exit code, and a part of the line.
CASES: list[tuple[list[str], int, str]] = [
    # text
    (["train", "nothere.txt"], 3, "nothere.txt: no such file or folder"),
    (["train", "empty.txt"], 3, "empty.txt: empty file"),
    (["train", "hollow"], 3, "hollow: no text in it"),
    (
        ["train", "blank.jsonl", *over(TINY[1:], "data.held_out=0")],
        3,
        "blank.jsonl: no text in it: give a file with",
    ),
    (["data", "show", "blank.jsonl"], 3, "blank.jsonl: no text in it: give a file with text"),
    (["train", *FOREVER], 2, "updates; give fewer, for at most 1e15"),
    (["train", "latin.txt"], 3, "latin.txt: byte 3 (line 1) is not UTF-8: 0xff"),
    (["train", "short.txt"], 3, "fewer than one row of 256"),
    (
        ["train", "bad.jsonl", *TINY[1:]],
        3,
        "bad.jsonl:2: 'text' is a number, not a string; correct or remove it, or train",
    ),
    (
        ["train", "bad.jsonl", *TINY[1:], "data.text_key=body"],
        3,
        "bad.jsonl:1: has no key 'body'; its keys are 'text'",
    ),
    (
        ["train", "bad.jsonl@0", *TINY[1:]],
        2,
        "bad.jsonl@0: a weight is how often an epoch sees the text, a number",
    ),
    (
        ["train", *TINY, "data.weights=0"],
        2,
        'data.weights = "0": expected a list of numbers from 0.001 to 1000',
    ),
    (
        ["train", *TINY, "data.weights=1,2"],
        2,
        "data.weights has 2 numbers and data.source 1: give one for each",
    ),
    (
        ["train", "bad.jsonl.gz", *TINY[1:]],
        3,
        "bad.jsonl.gz: is not gzip; get the file again or leave it out",
    ),
    (
        ["train", *TINY, "data.bad_records=keep"],
        2,
        'data.bad_records = "keep": expected refuse or skip',
    ),
    (["train", *TINY, "model.rope_theta=5"], 2, "there is no key model.rope_theta"),
    (["train", *over(TINY, "data.held_out=0.001")], 3, "held-out tokens, fewer than one row of 32"),
    (
        ["train", *over(TINY, "data.held_out=0.51"), "--print-config"],
        2,
        'data.held_out = "0.51": expected a number',
    ),
    (
        ["train", *over(TINY, "data.held_out=-0.1"), "--print-config"],
        2,
        "expected a number from 0 (none) to 0.5",
    ),
    (["train", *over(TINY, "data.tokenizer=short.txt")], 3, "short.txt"),
    (
        ["train", *over(TINY, "data.tokenizer=bpe", "data.vocab_size=10")],
        2,
        "data.vocab_size = 10: expected a whole",
    ),
    (
        ["train", *TINY, "data.vocab_size=300"],
        2,
        "data.vocab_size is of a tokenizer that is trained here",
    ),
    (
        [
            "data",
            "show",
            "texts",
            "data.sequence_length=16",
            "data.tokenizer=bytes",
            "--row",
            "99999",
        ],
        2,
        "--row 99999",
    ),
    # settings
    (["train", "optim.lrr=3"], 2, "did you mean optim.lr=3?"),
    (["train", "optim.lr=abc"], 2, 'optim.lr = "abc": expected a number above 0'),
    (["train", "bad.toml"], 2, "bad.toml:1: not TOML"),
    (["plan", "deep.toml"], 2, "deep.toml: not read: it is nested too deeply"),
    (["train", "data.source=" + "[" * 20_000], 2, "expected a path, a glob, or a list of them"),
    (["train", "nul.toml"], 2, "model.init"),
    (["train", *TINY, "--from", ""], 2, "--from has an empty value"),
    (["train", *TINY, "--resume", ""], 2, "--resume has an empty value"),
    (
        ["train", *over(TINY, "train.tokens_per_update=8")],
        2,
        "less than one row of data.sequence_length = 32",
    ),
    # model
    (
        ["train", *over(TINY, "model.num_attention_heads=3")],
        3,
        "is not a multiple of num_attention_heads = 3",
    ),
    (["train", *TINY, "model.vocab_size=100"], 3, "smaller than the tokenizer's 259"),
    (
        ["train", *TINY, "model.max_position_embeddings=16"],
        3,
        "longer than the model's max_position_embeddings = 16",
    ),
    (
        ["train", *over(TINY, "data.sequence_length=9999", "train.tokens_per_update=9999")],
        3,
        "fewer than one row of 9999",
    ),
    (["train", *OWN, "model.init=fails.py:build"], 3, "fails.py failed: ValueError: no"),
    (["train", *OWN, "model.init=fails.py:x"], 3, "fails.py has no function 'x'"),
    (
        ["train", *OWN, "model.init=fails.py:biuld"],
        3,
        "has no function 'biuld'; did you mean build?",
    ),
    (["train", *OWN, "model.init=three.py:build"], 3, "returned int, expected an nn.Module"),
    (["train", *OWN, "model.init=broken.py:build"], 3, "broken.py failed: SyntaxError"),
    (["train", *OWN, "model.init=nothere.py:build"], 3, "nothere.py cannot be read"),
    (
        ["train", *OWN, "model.init=nohead.py:build"],
        3,
        "nohead.py has no loss(model, batch) -> (sum, count)",
    ),
    (["train", *OWN, "model.init=full"], 3, "full: 'config.json' is not a file in this folder"),
    (["train", *OWN, "model.init=hungry.py:build"], 6, "one row does not fit"),
    # folders
    (["train", *TINY, "--out", "full"], 3, "full is not empty and holds no run"),
    (["train", *TINY, "--out", "short.txt"], 3, "short.txt is a file"),
    (["train", *TINY, "--out", "short.txt/run"], 3, "cannot write short.txt/run: Not a directory"),
    (["train", *TINY, "--out", "/proc/run"], 3, "cannot write /proc/run"),
    (["train", "--resume", "nothere"], 3, "nothere is not a run"),
    (["train", "--resume"], 3, "no run in runs/ yet"),
    (
        ["train", "--resume", "full", "--out", "other"],
        2,
        "--resume goes on in the run's own folder",
    ),
    (["train", "--from", "nothere@3"], 3, "nothere is not a run"),
    # the other commands
    (["generate", "nothere", "a"], 3, "nothere: no such folder"),
    (
        ["generate", "full", "a"],
        3,
        "'config.json' is not a file in this folder; expected the folder of a run or a Hugging Face model",
    ),
    (["evaluate", "full"], 3, "'config.json' is not a file"),
    (["train", *TINY, "--out", "loop"], 3, "loop"),
    (["train", "loop.toml"], 3, "loop.toml"),
    (["evaluate", "full", "--data", ""], 2, "--data has an empty value"),
    (["export", "nothere", "--to", "out"], 3, "nothere: no such folder"),
    (["export", "full", "--to", "out"], 3, "'config.json' is not a file"),
    (
        ["export", "full", "--to", "out", "--format", "onnx"],
        2,
        f"--format onnx: expected {join_with_or(EXPORTS)}",
    ),
    (["export", "full", "--to", "out", "--dtype", "f16"], 2, "--dtype f16 is for --format gguf"),
    (
        ["export", "full", "--to", "out", "--format", "gguf", "--dtype", "q4_1"],
        2,
        "--dtype q4_1: expected one of f32",
    ),
    (["check", "nothere"], 3, "nothere is not a run"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_texts(tmp_path_factory.mktemp("wrong"))
    for name in ("hollow", "full"):
        (folder / name).mkdir()
    files = {
        "full/x": "1",
        "empty.txt": "",
        "short.txt": "hi there",
        "bad.toml": "[train\n",
        **MODULES,
    }
    files |= {
        "deep.toml": "x = " + "[" * 20_000,
        "nul.toml": '[model]\ninit = "a\\u0000b.py:build"\n',
    }
    for name in ("loop", "loop.toml"):
        (folder / name).symlink_to(name)
    files |= {
        "blank.jsonl": "\n\n",
        "bad.jsonl": '{"text": "good"}\n{"text": 5}\n',
        "bad.jsonl.gz": "text",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "latin.txt").write_bytes(b"abc\xff\xfe def\n" * 50)
    return folder


def everything(folder: Path) -> set[str]:
    return {
        str(path)
        for path in folder.rglob("*")
        if path.name != "__pycache__" and path.suffix != ".pyc"
    }


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    CASES,
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_it_is_one_line_and_nothing_is_left(
    arguments: list[str], code: int, part: str, place: Path, server: CommandServer
) -> None:
    before = everything(place)
    done = server.run(place, *arguments)
    last = done.err.rstrip().splitlines()[-1]
    assert done.code == code, done.err
    assert last.startswith("error: ") and part in last and "Traceback" not in done.err
    assert everything(place) - before <= {str(place / "runs")}


def test_a_folder_that_may_not_be_written(server: CommandServer, here: Path) -> None:
    (here / "locked").mkdir(mode=0o500)
    done = server.run(here, "train", *TINY, "--out", "locked/run", modes=1)
    assert done.code == 3 and "Permission denied; name another folder with --out" in done.err


# A second record by the name of its file, and what is said of it.
RECORDS = {
    "unknown": (
        '{"prompt": "b", "temprature": 1}',
        "there is no key temprature; did you mean temperature?",
    ),
    "chat-only": ('{"prompt": "b", "messages": []}', "there is no key messages; expected one of"),
    "shared": ('{"prompt": "b", "order": "hf"}', "there is no key order; expected one of"),
    "range": ('{"prompt": "b", "top_p": 2}', "top_p = 2: expected a number from 0 to 1"),
    "kind": ('{"prompt": "b", "top_k": "5"}', "top_k = '5': expected a whole number"),
    "bias": (
        '{"prompt": "b", "logit_bias": {"9999": 1}}',
        "logit_bias has the id 9999: expected an id below",
    ),
    "bare": ('{"temperature": 1}', 'expected an object with "prompt", a text'),
}


def test_what_a_run_refuses(server: CommandServer, here: Path) -> None:
    """One run, and everything that can be wrong about it."""
    assert server.run(here, "train", *TINY, "--out", "run", figures=0).code == 0
    (here / "latin.txt").write_bytes(b"abc\xff")
    (here / "bad.gbnf").write_text("root ::= list\n# a comment\nlist ::= [a-z\n")
    (here / "empty.jsonl").write_text('{"messages": []}\n')
    (here / "both.jsonl").write_text(
        '{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}\n'
    )
    (here / "silent.jsonl").write_text(
        '{"prompt": "a"}\n{"messages": [{"role": "user", "content": null}]}\n'
    )
    for name, (record, _) in RECORDS.items():
        (here / f"{name}.jsonl").write_text(f'{{"prompt": "a", "seed": 3}}\n{record}\n')
    files = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    for arguments, code, part in (
        (["train", *TINY, "--out", "run"], 3, "already holds a run; continue it with --resume run"),
        (["train", "--resume", "run", "optim.lr=5"], 2, "(command line), but run was started with 0.001"),
        (["train", "--resume", "run", "train.updates=9"], 2, "was started with 8 updates"),
        (["train", "--from", "run@x"], 2, "a whole number after the @, not 'x'"),
        (["generate", "run", "a", "--stop", ""], 2, "an empty string would stop every text"),
        (["serve", "run", "--adapter-dir", "."], 2, "could add adapters: give --api-key-file"),
        (["serve", "run", "--adapter-slots", "3"], 2, "there are no adapters: give --adapter or --adapter-dir"),
        (["serve", "run", "--adapter", "a"], 2, "--adapter a: expected NAME=FOLDER"),
        (["generate", "run", "a", "--adapter", "a=texts"], 3, "texts: has no adapter: expected a folder with"),
        (["generate", "run", "a", "--adapter", "a=run"], 3, "run: has no adapter: it was trained without lora.rank"),
        (["train", "--resume", "run", "--minutes", "9"], 2, "was started with 8 updates"),
        (["train", "--from", "run/checkpoints/step-00000006@8"], 2, "is the checkpoint of update 6; leave one of them"),
        (["train", "--from", "run@5"], 4, "no checkpoint of update 5; there are those of 6, 8"),
        (["train", "--from", "run", *WIDER, "--out", "b"], 3, "model.embed_tokens.weight is [259, 16], not [259, 32]"),
        (["generate", "run", "a", "--regex", "a(?=b)"], 3, "the regular expression"),
        (["generate", "run", "a", "--regex", "a", "--choice", "b"], 2, "one of them at a time"),
        (["generate", "run", "a", "--grammar", "nothere"], 3, "--grammar nothere: cannot be read: No such"),
        (["generate", "run", "a", "--grammar", "bad.gbnf"], 3,
         "--grammar bad.gbnf: line 3, column 10: expected ] before the end of the line"),
        (["generate", "run", "a", "--json-schema", "nothere"], 3, "--json-schema nothere: cannot be read: No such"),
        (["generate", "run", "a", "--top-p", "2"], 2, "top_p = 2.0: expected a number from 0 to 1"),
        (["generate", "run", "a", "--sampler", "typical=1"], 2, "there is no option typical; did you mean typical_p?"),
        (["generate", "run", "a", "--sampler", "min_tokens=1.5"], 2, "min_tokens=1.5: expected a whole number"),
        (["generate", "run", "a", "--sampler", "typical_p"], 2, "expected a value, typical_p=VALUE"),
        (["generate", "run", "a", "--sampler", "stop=x"], 2, "--sampler stop=x: it has a flag of its own, --stop"),
        (["generate", "run", "a", "--sampler", "top_k=3"], 2, "--sampler top_k=3: it has a flag of its own, --top-k"),
        (["generate", "run", "a", "--sampler", "logit_bias=5:1"], 2, 'expected JSON: {"ID": BIAS, ...} or ["TEXT"'),
        (["generate", "run", "a", "--sampler", 'logit_bias={"5": 1, "5": 2}'], 2, "has the key '5' twice"),
        (["generate", "run", "a", "--sampler", 'logit_bias={"13": 1, "013": 2}'], 2, "logit_bias has the id '013'"),
        (["generate", "run", "a", "--sampler", 'logit_bias={"x": 1}'], 2, "logit_bias has the id 'x': expected"),
        (["generate", "run", "a", "--sampler", 'logit_bias={"9999": 1}'], 2, "logit_bias has the id 9999: expected an"),
        (["generate", "run", "a", "--sampler", "logprobs=999"], 2, "logprobs = 999: expected at most"),
        (["generate", "run", "a", "--sampler", "order=top_k,heat"], 2, "there is no stage 'heat'; expected hf or"),
        (["generate", "run", "a", "--sampler", "order=top_k"], 2, "order = 'top_k' leaves out temperature, which is"),
        *(
            (["generate", "run", "--prompts", f"{name}.jsonl"], 3, f"{name}.jsonl:2: {message}")
            for name, (_, message) in RECORDS.items()
        ),
        (["generate", "run", "a", *["--sampler", "typical_p=0.5"] * 2], 2, "typical_p is given twice"),
        (["generate", "run", "a", "--json-schema", "/dev/zero"], 3, "/dev/zero: cannot be read: is not a regular"),
        (["generate", "run", "--prompts", "latin.txt"], 3, "latin.txt: byte 3 (line 1) is not UTF-8; convert it"),
        (["generate", "run", "--chat", "--prompts", "empty.jsonl"], 3, "empty.jsonl:1: expected an object with"),
        (["generate", "run", "--chat", "--prompts", "silent.jsonl"], 3, "silent.jsonl:2: messages[0] has no content"),
        (["generate", "run", "--chat", "--prompts", "both.jsonl"], 3, "both.jsonl:1: has prompt and messages: give"),
        (["generate", "run", "--prompts", "nothere"], 3, "--prompts nothere: cannot be read: No such file"),
        (["generate", "run", "--chat", "a"], 3, "the model has no chat template"),
        (["generate", "run", "a" * 200], 3, "the prompt has 201 tokens, but the model's context is 32"),
        (["evaluate", "run", "--data", "nothere"], 3, "nothere: no such file or folder"),
        (["export", "run", "--to", "texts"], 3, "exists and is not an empty folder"),
        (["export", "run", "--to", "/proc/x"], 3, "/proc/x: cannot be written"),
    ):  # fmt: skip
        done = server.run(here, *arguments)
        assert done.code == code and part in done.err.splitlines()[-1], done.err
        assert not done.out and "Traceback" not in done.err
    assert not (here / "b").exists()
    again = server.run(here, "train", "--resume", "run", "--json", *TINY)
    assert again.code == 0 and "has already finished, after 8 updates" in again.err
    assert json.loads(again.out)["update"] == 8
    del files[here / "run" / "run.lock"]  # who held it last
    assert all(path.read_bytes() == content for path, content in files.items())
    for path in (here / "run" / "checkpoints").rglob("model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    for arguments in (
        ["generate", "run"],
        ["evaluate", "run"],
        ["export", "run", "--to", "e"],
        ["check", "run"],
    ):
        done = server.run(here, *arguments)
        assert done.code == 4 and "sha256" in done.err, done.err
    assert not (here / "e").exists()


RAISING = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding, self.head, self.calls = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size), 0

    def forward(self, tokens):
        self.calls += 1
        if {when}:
            raise {error}
        return self.head(self.embedding(tokens))

def build(vocab_size):
    return Own(vocab_size)

def loss(model, batch):
    targets = batch["targets"].flatten()
    logits = model(batch["tokens"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()
"""
TRIAL, UPDATE, EVALUATION = "True", "self.calls >= 6", "not self.training"


@pytest.mark.parametrize(
    "error",
    [
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("RuntimeError('no')", "StopIteration", "BaseException('no')")
        ),
        "SystemExit(0)",
    ],
)
def test_whatever_a_module_raises_is_a_line_that_names_it(
    error: str, server: CommandServer, here: Path
) -> None:
    kind = error.partition("(")[0]
    for number, when in enumerate((TRIAL, UPDATE, EVALUATION)):
        source = RAISING.format(when=when, error=error)
        if when == TRIAL:  # whatever it calls itself
            source = re.sub(r"\bself\b", "s", source)
        (here / "own.py").write_text(source)
        run = here / f"run{number}"
        done = server.run(
            here, "train", *OWN, "model.init=own.py:build", "--out", run.name, figures=0
        )
        last = done.err.splitlines()[-1]
        assert done.code == 3 and "Traceback" not in done.err, done.err
        assert (
            last.startswith("error: ") and "Own" in last and kind in last and "own.py:13" in last
        ), last
        assert run.exists() == (when != TRIAL) and (when == TRIAL or sound(run) >= 0)
    done = server.run(
        here,
        "sweep",
        *OWN,
        "model.init=own.py:build",
        "train.seed=0,1",
        "--out",
        "sweep",
        figures=0,
    )
    assert done.code == 3 and "own.py:13" in done.err.splitlines()[-1], done.err


def test_a_loss_that_raises_is_named_by_its_line(server: CommandServer, here: Path) -> None:
    source = RAISING.format(when="False", error="None").replace(
        "    targets =", "    raise SystemExit\n    targets ="
    )
    (here / "own.py").write_text(source)
    done = server.run(here, "train", *OWN, "model.init=own.py:build", "--out", "run")
    assert (
        done.code == 3 and "error: loss failed" in done.err and "own.py:20): SystemExit" in done.err
    ), done.err


@pytest.mark.parametrize("how", [pytest.param("moved", marks=pytest.mark.slow), "deleted"])
def test_a_run_folder_that_goes_away_while_it_trains_is_one_line(
    how: str, server: CommandServer, here: Path
) -> None:
    (here / "slow.py").write_text(SLOW)
    for arguments in (["train", *LONG], ["sweep", *LONG, "train.seed=0,1"]):
        command = server.start(here, *arguments, figures=0)
        command.until(lambda: any((here / "run").rglob("metrics.jsonl")))
        if how == "moved":
            (here / "run").rename(here / f"elsewhere-{arguments[0]}")
        else:
            shutil.rmtree(here / "run", ignore_errors=True)
            shutil.rmtree(here / "run", ignore_errors=True)  # what was written in between
        done = command.wait()
        last = done.err.splitlines()[-1]
        assert done.code == 3 and "run: was moved or deleted while it was in use" in last, done.err
        assert not (here / "run").exists()
    if how == "moved":
        goes_on = server.run(here, "train", "--resume", "elsewhere-train", "--print-config")
        assert goes_on.code == 0
