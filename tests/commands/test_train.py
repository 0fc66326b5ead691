"""Run: pytest tests/commands/test_train.py (own modules, short of memory, and what a run prints and
leaves behind).
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from commands.forked import CLI, PROGRAM, CommandServer
from commands.inputs import ONCE, OWN, SLOW, TINY, over, rows
from monograph import load
from monograph.device import compiler_obstacle
from monograph.report.quantities import memory
from monograph.run.folder import Run
from monograph.run.writing import discard


def test_a_module_of_its_own_from_end_to_end(server: CommandServer, here: Path) -> None:
    (here / "own.py").write_text(SLOW.replace("0.05", "0"))
    done = server.run(
        here, "train", *OWN, "model.init=own.py:build", "--out", "run", "--json", figures=0
    )
    assert done.code == 0, done.err
    trained = json.loads(done.out)
    scored = server.run(here, "evaluate", "run", "--json")
    assert json.loads(scored.out.splitlines()[-1])["loss"] == pytest.approx(
        trained["eval_loss"], rel=1e-6
    )
    for arguments in (["generate", "run", "a"], ["export", "run", "--to", "out"]):
        done = server.run(here, *arguments)
        assert (
            done.code == 3 and "holds a module of its own (own.py:build), not a Llama" in done.err
        )
        assert done.err.count("\n") == 1 and not done.out
    done = server.run(here, "train", "--from", "run", "--out", "b", "train.updates=1", figures=0)
    assert done.code == 0 and "evaluate b" in done.err


BY_INDUCTOR = CLI
AS_TRACED = "commands.captured:main"


@pytest.mark.skipif(compiler_obstacle() is not None, reason=compiler_obstacle() or "")
@pytest.mark.parametrize(
    ("model", "call"),
    [
        pytest.param("own module", AS_TRACED, id="own module, as traced"),
        pytest.param("own module", BY_INDUCTOR, id="own module", marks=pytest.mark.slow),
        pytest.param("llama", BY_INDUCTOR, id="llama", marks=pytest.mark.slow),
    ],
)
def test_the_default_path(model: str, call: str, server: CommandServer, here: Path) -> None:
    """bf16, the whole step in one graph: as long runs compile by default, at night through
    Inductor.

    By day the command captures a graph for which no code is generated: law 1 generates the code of
    a Llama's step.
    """
    (here / "own.py").write_text(SLOW.replace("time.sleep(0.05)", "pass").replace("8", "16"))
    graph = over(
        TINY if model == "llama" else [*OWN, "model.init=own.py:build"], "train.precision=bf16"
    )
    graph = over(graph, "train.compile=whole")  # so brief a run would not be compiled
    graph += ["optim.lr=5e-2", "optim.name=adamw"]  # the update that compiles soonest
    done = server.start(here, "train", *graph, "--out", "run", "--json", call=call).wait()
    assert done.code == 0 and "training without compiling" not in done.err, done.err
    result = json.loads(done.out)
    assert result["dtype"] == "bf16" and result["compile_s"] > 0
    assert result["graph_breaks"] == result["recompiles"] == 0
    losses = [row["train_loss"] for row in rows(here / "run")]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1, "it learned something"
    assert server.run(here, "evaluate", "run").code == 0
    assert server.run(here, "generate", "run", "alpha").code == (0 if model == "llama" else 3)


def test_a_loss_that_counts_something_else(server: CommandServer, here: Path) -> None:
    """Its sum is no likelihood of the text: there is a loss, and no bits per byte."""
    (here / "own.py").write_text(
        SLOW.replace("0.05", "0").replace("(targets != -100).sum()", "targets.new_tensor(4)")
    )
    with (here / "own.py").open("a") as file:  # it counts rows that are filled up, too
        file.write("\n\nloss.fill = None\n")
    done = server.run(
        here, "train", *OWN, "model.init=own.py:build", "--out", "run", "--json", figures=0
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["eval_bits_per_byte"] is None and result["eval_loss"] > 0


def test_a_model_with_more_entries_than_its_tokenizer_writes_only_tokens(
    server: CommandServer, here: Path
) -> None:
    done = server.run(here, "train", *ONCE, "model.vocab_size=2000", "--out", "run", figures=0)
    assert done.code == 0, done.err
    done = server.run(
        here, "generate", "run", "alpha", "--temperature", "5", "--json", "--max-tokens", "20"
    )
    assert max(json.loads(done.out)["completions"][0]["token_ids"]) < 259


@pytest.mark.parametrize("own", [False, True], ids=["llama", "own module"])
def test_nothing_held_out(own: bool, server: CommandServer, here: Path) -> None:
    """What the error about too little text advises works from end to end, and no printed command is
    a dead end.
    """
    (here / "own.py").write_text(SLOW.replace("0.05", "0"))
    model = [*OWN, "model.init=own.py:build"] if own else TINY
    done = server.run(
        here, "train", *over(model, "data.held_out=0"), "--out", "run", "--json", page=int(not own)
    )
    assert done.code == 0 and "nothing held out" in done.err and "evaluate" not in done.err, (
        done.err
    )
    result = json.loads(done.out)
    assert result["eval_loss"] is None and result["train_loss"] > 0
    assert own or "Training loss" in (here / "run/report.html").read_text()
    assert server.run(here, "train", "--resume", "run", figures=0).code == 0
    done = server.run(here, "evaluate", "run")
    assert done.code == 2 and "data.held_out is 0" in done.err and "--data" in done.err
    assert server.run(here, "evaluate", "run", "--data", "texts").code == 0


def test_a_micro_batch_of_more_rows_than_an_update_has_is_said_to_be_cut(
    server: CommandServer, here: Path
) -> None:
    done = server.run(
        here,
        "train",
        *over(TINY, "train.micro_batch=50", "train.updates=2"),
        "--out",
        "run",
        figures=0,
    )
    note = "note      train.micro_batch = 50: an update has 4 rows, so micro-batches of 4"
    assert done.code == 0 and done.err.count(note) == 1, done.err
    again = server.run(
        here,
        "train",
        *over(TINY, "train.micro_batch=4", "train.updates=2"),
        "--out",
        "same",
        figures=0,
    )
    assert again.code == 0 and "so micro-batches of" not in again.err, again.err
    cut, asked = ([row["train_loss"] for row in rows(here / name)] for name in ("run", "same"))
    assert cut == asked and len(cut) == 2


def test_the_peak_memory_of_a_run_says_what_recomputing_saves(
    server: CommandServer, here: Path
) -> None:
    """Tensors alone: the process, with its libraries, would be the same within a few percent."""
    peaks = {}
    for remat in ("none", "full"):
        more = (
            "train.compile=none",
            f"train.remat={remat}",
            "model.num_hidden_layers=6",
            "train.updates=1",
        )
        done = server.run(here, "train", *over(TINY, *more), "--json", memory=1)
        assert done.code == 0, done.err
        peaks[remat] = json.loads(done.out)["peak_memory_bytes"]
        assert f"peak memory {memory(peaks[remat])}" in done.err
    assert peaks["full"] < 0.75 * peaks["none"], peaks


def test_out_of_memory_halves_the_micro_batch(server: CommandServer, here: Path) -> None:
    hungry = SLOW.replace(
        "time.sleep(0.05)", "if len(batch['tokens']) > 1: raise torch.OutOfMemoryError('no memory')"
    )
    (here / "own.py").write_text(hungry)
    done = server.run(here, "train", *OWN, "model.init=own.py:build", "--out", "run", figures=0)
    assert done.code == 0 and "micro_batch is now 1" in done.err, done.err


# ---- what it prints ------------------------------------------------------------------------------


def test_the_last_update_is_shown_though_numbers_are_read_every_so_often(
    server: CommandServer, here: Path
) -> None:
    """A run on a GPU reads ten updates at once, and a short one has fewer."""
    rare = """
import monograph.session.after_update as command
every_update = command.MetricsLog
command.MetricsLog = lambda run, every: every_update(run, 100)
"""
    (here / "own.py").write_text(SLOW.replace("time.sleep(0.05)", "pass") + rare)
    done = server.run(
        here, "train", *OWN, "model.init=own.py:build", "--out", "run", "--json", figures=0
    )
    assert done.code == 0 and "update 8/8 100 %   loss" in done.err, done.err
    assert json.loads(done.out)["tokens_per_s"] > 0


def test_the_last_lines_work_as_printed(server: CommandServer, here: Path) -> None:
    """For a run in runs/, and without `monograph` on the PATH."""
    folders = (
        each
        for each in os.environ["PATH"].split(os.pathsep)
        if not Path(each, "monograph").exists()
    )
    environment = {"PATH": os.pathsep.join(folders)}
    tiny = server.run(here, "train", *TINY, env=environment, figures=0)
    assert tiny.code == 0, tiny.err
    lines = [
        line[10:].strip() if line.startswith(("next", " " * 10)) else line
        for line in tiny.err.replace("\\\n", "").splitlines()
    ]
    commands = [line for line in lines if " -m monograph " in line]
    assert re.search(r"^done +[\d.]+ s of training ", tiny.err, re.MULTILINE), (
        "what the time counts"
    )
    assert re.search(r"^data .* 10 files, 1\.\d kB$", tiny.err, re.MULTILINE), tiny.err
    assert commands.pop().endswith(" train --from last --minutes 30"), (
        "more of the text that it was given"
    )
    assert commands.pop(1).endswith(" monograph sweep"), "of the run that was trained just now"
    assert len(commands) == 2 and all(" last " in line for line in commands), tiny.err
    for line in commands:
        program, *arguments = shlex.split(line.replace(f"{sys.executable} -m monograph", PROGRAM))
        done = server.run(here, *arguments, env=environment)
        assert program == PROGRAM and done.code == 0, (line, done.err)
    assert (here / "out/config.json").is_file()


def test_a_prompt_that_begins_with_a_dash_is_no_option(server: CommandServer, here: Path) -> None:
    """Text with front matter: its first words are the prompt of the command that is printed."""
    for path in (here / "texts").iterdir():
        path.write_text(f"--- title: {path.name}\n" + path.read_text())
    done = server.run(here, "train", *ONCE, figures=0)
    [line] = [line for line in done.err.splitlines() if " generate " in line]
    arguments = shlex.split(line)
    arguments = arguments[arguments.index("generate") :]
    assert arguments[:3] == ["generate", "last", "--"] and arguments[3].startswith("--- title:")
    assert server.run(here, *arguments).code == 0


def test_a_run_is_evaluated_at_its_own_precision(server: CommandServer, here: Path) -> None:
    settings = over(TINY, "train.precision=bf16", "train.updates=2", "optim.lr=1e-2")
    trained = server.run(here, "train", *settings, "--out", "run", "--json", figures=0)
    scored = server.run(here, "evaluate", "run", "--json")
    found = json.loads(scored.out.splitlines()[-1])["bits_per_byte"]
    assert found == pytest.approx(json.loads(trained.out)["eval_bits_per_byte"], rel=1e-6)


def test_less_text_than_a_row_is_scored(server: CommandServer, here: Path) -> None:
    """By hand: the loss of its tokens in a row of their own, without padding."""
    assert server.run(here, "train", *ONCE, "--out", "run", figures=0).code == 0
    (here / "small.txt").write_text("alpha beta gamma")
    done = server.run(here, "evaluate", "run", "--data", "small.txt", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    model, tokenizer = load(here / "run")
    ids = torch.tensor(
        [[tokenizer.bos_id, *tokenizer.encode("alpha beta gamma"), tokenizer.eos_id]]
    )
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(
            model.eval().logits(model(ids[:, :-1]))[0], ids[0, 1:], reduction="sum"
        )
    assert found["tokens"] == 17
    assert found["bits_per_byte"] == pytest.approx(float(nats) / math.log(2) / 16, rel=1e-5)
    done = server.run(
        here, "train", "--from", "run", "small.txt", "data.held_out=0.2", "--out", "b"
    )
    assert done.code == 3 and "fewer than one row of 32" in done.err.splitlines()[-1]


def test_a_run_that_fails_is_not_the_last_one(server: CommandServer, here: Path) -> None:
    assert server.run(here, "train", *ONCE, figures=0).code == 0
    assert server.run(here, "train", *TINY, "model.vocab_size=20").code == 3
    assert server.run(here, "generate", "last", "alpha", "--max-tokens", "2").code == 0


def test_a_run_that_was_killed_before_it_began_is_started_in_its_folder(
    server: CommandServer, here: Path
) -> None:
    (here / "run").mkdir()
    (here / "run/run.lock").write_text('{"serial": 1}')
    (here / "run/from.json").write_text(json.dumps({"run": str(here / "gone"), "update": None}))
    done = server.run(here, "train", "--resume", "run")
    assert done.code == 3 and "start it with `monograph train --out run`" in done.err
    done = server.run(here, "train", *ONCE, "--out", "run", figures=0)
    assert done.code == 0 and not (here / "run/from.json").exists(), done.err


def test_one_of_anything_is_singular(server: CommandServer, here: Path) -> None:
    one = over(
        TINY[1:],
        "texts/0.txt",
        "train.updates=1",
        "train.tokens_per_update=32",
        "train.micro_batch=1",
    )
    said = ""
    for arguments in (
        ["train", *one, "--out", "run"],
        ["train", "--resume", "run"],
        ["data", "show", *one],
        ["evaluate", "run"],
        ["generate", "run", "a", "--max-tokens", "1"],
    ):
        done = server.run(here, *arguments, figures=0)
        assert done.code == 0, done.err
        said += done.out + done.err
    found = set(re.findall(r"(?<![\d.,:])1 ((?:\w+ )?\w+)", said))
    assert {"file", "update", "row", "token"} <= {each.split()[0] for each in found}
    assert not [
        each for each in found if re.match(r"\w\w+s\b", each) or each.endswith("updates")
    ], found


def test_discard_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    (run.folder / "mine.txt").write_text("1")
    discard(run)
    assert [path.name for path in run.folder.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("length", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_of_a_token_or_two(length: int, server: CommandServer, here: Path) -> None:
    """A prompt, the token before it and one to write need three positions; a shorter model says
    what it can.
    """
    settings = over(ONCE, f"data.sequence_length={length}")
    done = server.run(here, "train", *settings, "--out", "run", figures=0)
    assert done.code == 0 and f"{'generate' if length > 1 else 'evaluate'} run" in done.err, (
        done.err
    )
    assert server.run(here, "evaluate", "run").code == 0
    prompt = (
        shlex.split(done.err.partition("generate run ")[2].splitlines()[0]) if length > 1 else []
    )
    assert server.run(here, "generate", "run", *prompt).code == (0 if length > 1 else 3)


def test_a_held_out_loss_that_is_no_number_is_said_and_not_ranked(
    server: CommandServer, here: Path
) -> None:
    lost = 'reduction="sum") * (1 if torch.is_grad_enabled() else float("nan"))'
    (here / "own.py").write_text(SLOW.replace("0.05", "0").replace('reduction="sum")', lost))
    done = server.run(
        here, "train", *OWN, "model.init=own.py:build", "--out", "run", "--json", page=1
    )
    assert done.code == 0 and "held-out nan bits/byte" in done.err, done.err
    assert (here / "run" / "report.html").is_file()
    assert json.loads(done.out)["eval_bits_per_byte"] is None
    for command in (["evaluate", "run", "--json"], ["compare", "run", "run"]):
        done = server.run(here, *command)
        assert (
            done.code == 3 and not done.out and "run: its loss on this text is nan" in done.err
        ), done.err


def test_a_file_whose_name_begins_with_a_tilde(server: CommandServer, here: Path) -> None:
    (here / "~root.txt").write_text("alpha beta gamma " * 200)
    assert server.run(here, "data", "show", "~root.txt", *TINY[1:]).code == 0
    done = server.run(here, "data", "show", "texts", "data.tokenizer=~nobody.json")
    assert done.code == 3 and "~nobody.json" in done.err.splitlines()[-1], done.err
