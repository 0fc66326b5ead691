# Run: pytest tests/benchmarks/test_speedrun.py
"""The speedrun: its files of tokens, its windows, its rates, its validation, its log, and that a
stopped run goes on.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import monograph as mono
from clocks import HANG_S
from monograph.errors import DiskFull, InputRefused, RunInUse, UsageError
from monograph.predict.roofline import flops_per_token
from monograph.storage.writing import lock_folder
from monograph.text.tokenizer import Tokenizer
from scripts import script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = ("run", "shards", "speedrun_recipe", "public_log", "make_shards", "on_paper")
IDS, SEPARATOR = 97, 96


@pytest.fixture
def part(monkeypatch):
    """Imports a file of the speedrun by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "speedrun"))
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    """Tokens of short documents, each after the separator; low ids come often."""
    tokens = (np.random.default_rng(seed).random(count) ** 4 * SEPARATOR).astype(np.int64)
    tokens[::50] = SEPARATOR
    return tokens


@pytest.fixture
def folder(part, tmp_path):
    """A validation file, and files for training of 9, 0 and 5 updates of 1,024 tokens: the second
    lacks the last target.
    """
    shards, data = part("shards"), tmp_path / "data"
    data.mkdir()
    shards.write_vocabulary(data, shards.Vocabulary(IDS, SEPARATOR))
    for name, count in (
        ("val_000000", 4097),
        ("train_000001", 9 * 1024 + 700),
        ("train_000002", 1024),
        ("train_000003", 5 * 1024 + 1),
    ):
        shards.write_shard(data / f"texts_{name}.bin", random_tokens(count, count))
    return data


def run(part, data: Path, out: Path, *arguments: str, updates: int = 6, **changes):
    """Train the tiny model in this process; return the run and its numbers."""
    module, recipe = part("run"), part("speedrun_recipe")
    args = module.parse(
        ["--data", str(data), "--smoke", "--out", str(out), "--updates", str(updates), *arguments]
    )
    module.SMOKE = dataclasses.replace(
        recipe.SMOKE, **{"val_every": 3, "val_every_late": 3} | changes
    )
    runs = []

    class Noted(module.Run):
        def __init__(self, *given):
            super().__init__(*given)
            runs.append(self)

    original, module.Run = module.Run, Noted
    try:
        return module.run(args), runs[-1]
    finally:
        module.Run = original


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_has_the_bytes_of_the_public_format(part, tmp_path):
    path = tmp_path / "x_val_0.bin"
    part("shards").write_shard(path, [50_256, 1, 65_535])
    content = path.read_bytes()
    header = np.frombuffer(content[:1024], np.int32)
    assert header[:3].tolist() == [20240520, 1, 3] and not header[3:].any()
    assert content[1024:] == bytes([0x50, 0xC4, 1, 0, 0xFF, 0xFF])
    assert part("shards").open_shard(path).tokens.tolist() == [50_256, 1, 65_535]


def header_of(magic=20240520, version=1, count=3) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, count
    return header.tobytes()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not begin with the number 20240520"),
        (b"version https://git-lfs", "does not begin with the number 20240520"),
        (header_of(magic=20240801) + bytes(6), "does not begin with the number 20240520"),
        (header_of()[:512], "ends inside its header"),
        (header_of(version=2) + bytes(6), "is of version 2"),
        (header_of() + bytes(4), "should have 3 tokens and has 2"),
        (header_of() + bytes(5), "should have 3 tokens and has 2.5"),
        (header_of() + bytes(8), "should have 3 tokens and has 4"),
        (header_of(count=0), "has no tokens"),
        (None, "no_train_1.bin: "),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(part, tmp_path, content, says):
    path = tmp_path / "no_train_1.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputRefused) as refused:
        part("shards").open_shard(path)
    assert str(path) in str(refused.value) and says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("tokens", [[], [-1], [65_536]])
def test_what_16_bits_cannot_say_is_not_written(part, tmp_path, tokens):
    with pytest.raises(InputRefused, match="expected 1 to"):
        part("shards").write_shard(tmp_path / "x_val_0.bin", tokens)
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_leaves_no_file(part, tmp_path, monkeypatch):
    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskFull, match="x_val_0.bin: cannot be written: No space left"):
        part("shards").write_shard(tmp_path / "x_val_0.bin", [1])
    assert not [*tmp_path.iterdir()]


# ---- windows -------------------------------------------------------------------------------------


def windows(part, folder, order="stream", seed=0, start=0):
    shards = part("shards")
    return shards.Windows(
        shards.open_shards(folder, "train"), shards.Vocabulary(IDS, SEPARATOR), 16, 64,
        order=order, seed=seed, start=start,
    )  # fmt: skip


def test_the_stream_is_each_files_tokens_in_order_each_once(part, folder):
    found = [*windows(part, folder)]
    assert len(found) == windows(part, folder).count == 14
    files = [
        random_tokens(9 * 1024 + 700, 9 * 1024 + 700),
        random_tokens(5 * 1024 + 1, 5 * 1024 + 1),
    ]
    expected = [
        (file, begin)
        for file, count in zip(files, (9, 5), strict=True)
        for begin in range(0, 1024 * count, 1024)
    ]
    for window, (file, begin) in zip(found, expected, strict=True):
        assert window["tokens"].shape == window["targets"].shape == (16, 64)
        assert window["tokens"].flatten().tolist() == file[begin : begin + 1024].tolist()
        assert window["targets"].flatten().tolist() == file[begin + 1 : begin + 1025].tolist()


def test_a_seed_changes_the_order_of_shuffled_rows_and_never_the_stream(part, folder):
    def rows(order, seed):
        return torch.cat([window["tokens"] for window in windows(part, folder, order, seed)])

    assert torch.equal(rows("stream", 0), rows("stream", 1))
    first, second = rows("shuffled", 0), rows("shuffled", 1)
    assert torch.equal(first, rows("shuffled", 0)) and not torch.equal(first, second)
    sets = [sorted(map(tuple, each.tolist())) for each in (first, second, rows("stream", 0))]
    assert sets[0] == sets[1] == sets[2]


@pytest.mark.parametrize("order", ["stream", "shuffled"])
def test_windows_go_on_where_they_were(part, folder, order):
    begun = windows(part, folder, order, 3)
    for _ in range(10):  # into the second file
        next(begun)
    resumed = windows(part, folder, order, 3, start=begun.index)
    for one, other in zip(begun, resumed, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])


def test_another_tokenizers_tokens_are_refused(part, folder):
    shards = part("shards")
    [train, *_] = shards.open_shards(folder, "train")
    with pytest.raises(
        InputRefused, match=r"texts_train_000001.bin: has the token 9\d, but the vocabulary has 90"
    ):
        next(shards.Windows([train], shards.Vocabulary(90, 89), 16, 64))
    [val] = shards.open_shards(folder, "val")
    with pytest.raises(
        InputRefused,
        match="texts_val_000000.bin: begins with the token 96, not with the separator 5",
    ):
        shards.Validation(val, shards.Vocabulary(IDS, 5), 4096, 64, 32)
    with pytest.raises(InputRefused, match="has 4,097 tokens; 8,193 are needed"):
        shards.Validation(val, shards.Vocabulary(IDS, SEPARATOR), 8192, 64, 32)


def test_each_validation_token_is_predicted_once_from_its_own_row(part, folder):
    shards = part("shards")
    [val] = shards.open_shards(folder, "val")
    validation = shards.Validation(val, shards.Vocabulary(IDS, SEPARATOR), 4096, 64, 24)
    batches = [*validation.batches()]
    assert [len(batch["tokens"]) for batch in batches] == [24, 24, 16]
    tokens = random_tokens(4097, 4097)
    assert (
        torch.cat([batch["tokens"].flatten() for batch in batches]).tolist() == tokens[:-1].tolist()
    )
    assert (
        torch.cat([batch["targets"].flatten() for batch in batches]).tolist() == tokens[1:].tolist()
    )


def test_a_document_begins_at_its_separator_and_a_row_may_begin_inside_one(part):
    shards = part("shards")
    batch = shards.batch_of(np.array([[1, 2, 9, 3, 9, 9, 4], [9, 1, 1, 1, 1, 1, 9]]), 9)
    assert batch["segments"].tolist() == [[1, 1, 2, 2, 3, 4], [2, 2, 2, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5]]
    assert batch["targets"].tolist() == [[2, 9, 3, 9, 9, 4], [1, 1, 1, 1, 1, 9]]
    assert (
        shards.pairs_of(batch, 100) == 3 + 3 + 1 + 1 + 21
        and shards.pairs_of(batch, 3) == 3 + 3 + 1 + 1 + 15
    )


# ---- the recipe ----------------------------------------------------------------------------------


def test_muons_updates_have_the_size_that_the_public_rates_give(part):
    """The public code moves a matrix by lr sqrt(max(1, rows / cols)) times an orthogonal matrix,
    and keeps 1 - lr decay of it.
    """
    recipe_file = part("speedrun_recipe")
    recipe = recipe_file.RECIPE
    with torch.device("meta"):
        model = mono.Llama(recipe.config)
    optim = recipe_file.optimizer_of(recipe)
    adam = {"embed_tokens": 0.1, "lm_head": 0.004, "norm": 0.015}
    matrices = 0
    for name, kind in optim.kinds(model).items():
        rate = optim.lr * kind.lr
        if kind.matrix_shape is None:
            [expected] = [each for part_of, each in adam.items() if part_of in name]
            assert rate == pytest.approx(expected) and kind.weight_decay == 0
            assert kind.betas == (0.8, 0.95) and kind.eps == 1e-10
        else:
            rows, cols = kind.matrix_shape
            assert rate * 0.2 * math.sqrt(max(rows, cols)) == pytest.approx(
                0.025 * math.sqrt(max(1, rows / cols))
            )
            assert rate * kind.weight_decay == pytest.approx(0.025 * 0.05)
            # The momentum goes from 0.85 to 0.95 over the first 500 updates.
            assert kind.betas == (0.95, 0.85, 500)
            matrices += 1
    assert matrices == 7 * 12


def test_the_model_is_the_124m_shape_with_a_head_of_its_own(part):
    recipe = part("speedrun_recipe").RECIPE
    config = recipe.config
    head = config.vocab_size * config.hidden_size
    assert config.vocab_size == 50_304 and recipe.tokens_per_update == 524_288
    assert [config.window(layer) for layer in range(12)] == [1024] * 12
    assert recipe.val_tokens % recipe.length == 0
    # The two norms of queries and keys are the qwen3 family's.
    assert (
        config.parameter_count() - head
        == mono.LlamaConfig.preset("124m").parameter_count() + 12 * 2 * 128
    )


def test_a_new_models_branches_and_head_are_zero_and_its_seed_counts(part):
    recipe_file = part("speedrun_recipe")
    one, other = (
        dict(recipe_file.model_of(recipe_file.SMOKE, seed).named_parameters()) for seed in (0, 1)
    )
    for name, weight in one.items():
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight"))
        assert bool((weight == 0).all()) == ends_branch, name
    assert float(one["model.embed_tokens.weight"].detach().std()) == pytest.approx(1, rel=0.02)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_rates_stay_and_then_fall_along_a_line_to_zero(part):
    recipe_file = part("speedrun_recipe")
    factor = recipe_file.schedule_of(dataclasses.replace(recipe_file.RECIPE, updates=1000))
    assert [factor(index) for index in (0, 300, 650, 1000)] == pytest.approx([1, 1, 0.5, 0])
    assert factor(999) == pytest.approx(0.001 / 0.7)


def test_scores_come_more_often_near_the_end(part):
    recipe_file = part("speedrun_recipe")
    recipe = dataclasses.replace(recipe_file.RECIPE, updates=1010)
    scored = [index for index in range(1011) if recipe.scores_at(index)]
    assert scored == [0, 125, 250, 375, 500, 625, 750, 875, 925, 950, 975, 1000, 1010]


# ---- a run ---------------------------------------------------------------------------------------


def test_the_validation_loss_is_plain_cross_entropy_in_float64(part, folder, tmp_path):
    found, this = run(part, folder, tmp_path / "a.json")
    [case] = found["cases"]
    assert case["updates"] == 6 and case["tokens"] == 6 * 1024 and case["val_tokens"] == 4096
    content = (folder / "texts_val_000000.bin").read_bytes()[1024:]
    assert found["settings"]["val_sha256"] == hashlib.sha256(content).hexdigest()
    seen = [part("shards").pairs_of(window, 24) for window in windows(part, folder)]
    assert case["pairs"] == sum(seen[:6])
    tokens = torch.from_numpy(random_tokens(4097, 4097).astype(np.int64))
    model = this.engine.model.double()
    total = 0.0
    for row in range(0, 4096, 64):  # one row after another, and in it one document after another
        begins = [
            place for place in range(row, row + 64) if place == row or tokens[place] == SEPARATOR
        ]
        for begin, end in zip(begins, [*begins[1:], row + 64], strict=True):
            with torch.no_grad():
                logits = model.logits(model(tokens[None, begin:end]))[0]
            for place in range(end - begin):
                target = tokens[begin + place + 1]
                total += float(torch.logsumexp(logits[place], 0) - logits[place, target])
    assert case["val_loss"] == pytest.approx(total / 4096, rel=1e-6)
    first = case["scores"][0]
    assert first[1] == pytest.approx(math.log(IDS), rel=1e-6), "a head of zeros knows nothing"
    assert case["val_loss"] < first[1]


def test_a_log_begins_with_the_code_and_is_read_as_the_public_ones_are(part, folder, tmp_path):
    found, _ = run(part, folder, tmp_path / "a.json")
    public, log = part("public_log"), (tmp_path / "a.txt").read_text()
    code, card, steps = log.split(f"\n{public.RULER}\n")
    assert code.startswith(public.RULER) and "def schedule_of" in code and "nvidia-smi" in card
    read = [*public.steps_of(log)]
    for each, line in zip(read, steps.splitlines(), strict=True):
        assert line.rpartition(" step_avg:")[0] == each.line.rpartition(" step_avg:")[0]
    scores = [[each.step, each.val_loss] for each in read if each.val_loss is not None]
    assert scores == [
        [index, pytest.approx(loss, abs=5e-5)] for index, loss, _ in found["cases"][0]["scores"]
    ]
    assert [each.step for each in read if each.train_loss is not None] == [1, 2, 3, 4, 5, 6]
    assert sorted(read, key=lambda each: each.train_ms) == read


def test_lines_of_public_logs_are_read(part):
    public = part("public_log")
    lines = [
        "step:0/4578 val_loss:10.8258 train_time:471ms step_avg:nanms",
        "step:4577/4578 train_loss:3.3235 train_time:647869ms step_avg:141.86ms",
        "step:4578/4578 val_loss:3.2762 train_time:648063ms step_avg:141.87ms",
        "step:1390/1390 train_time:79448ms step_avg:57.16ms",
    ]
    text = "\n".join(
        [
            public.RULER,
            "step:1/1 val_loss:9 train_time:1ms step_avg:1ms",
            public.RULER,
            *lines,
            "peak memory",
        ]
    )
    found = [*public.steps_of(text)]
    assert [each.step for each in found] == [0, 4577, 4578, 1390]
    assert [each.val_loss for each in found] == [10.8258, None, 3.2762, None]
    assert found[1].train_loss == 3.3235 and found[3].train_ms == 79448


def interrupt_when_logged(public, step, monkeypatch):
    """Send Ctrl-C once a step's loss is logged, which is while the device makes the next update."""
    add = public.Log.add

    def adding(log, line):
        add(log, line)
        if line.step == step and line.train_loss is not None:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(public.Log, "add", adding)


def weights(this):
    return {name: weight.clone() for name, weight in this.engine.state().model.items()}


@pytest.mark.parametrize("order", [pytest.param("stream", marks=pytest.mark.slow), "shuffled"])
def test_a_resumed_run_is_an_uninterrupted_run(part, folder, tmp_path, monkeypatch, order):
    whole, one = run(part, folder, tmp_path / "whole.json", "--order", order, "--seed", "5")
    module, out = part("run"), tmp_path / "cut.json"
    with monkeypatch.context() as patched:
        interrupt_when_logged(part("public_log"), 4, patched)
        with pytest.raises(
            module.Stopped, match="saved at update 5; to continue: the same command with --resume"
        ):
            run(part, folder, out, "--order", order, "--seed", "5")
    with (tmp_path / "cut.txt").open("a") as log:  # as if the process had died later
        log.write("step:6/6 train_loss:9.0000 train_time:9ms step_avg:9ms\n")
    resumed, other = run(part, folder, out, "--order", order, "--seed", "5", "--resume")
    first, second = weights(one), weights(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert whole["cases"][0]["pairs"] == resumed["cases"][0]["pairs"]
    assert [each[:2] for each in whole["cases"][0]["scores"]] == [
        each[:2] for each in resumed["cases"][0]["scores"]
    ]
    read = part("public_log").steps_of
    lines = [
        [each._replace(train_ms=0) for each in read((tmp_path / name).read_text())]
        for name in ("whole.txt", "cut.txt")
    ]
    assert lines[0] == lines[1]
    assert resumed["cases"][0]["end"] == "schedule"


def test_a_run_is_resumed_with_its_own_settings_only(part, folder, tmp_path):
    out = tmp_path / "a.json"
    run(part, folder, out)
    with pytest.raises(UsageError, match="another seed"):
        run(part, folder, out, "--seed", "1", "--resume")
    with pytest.raises(UsageError, match="another recipe"):
        run(part, folder, out, "--resume", updates=5)
    with pytest.raises(UsageError, match="a.txt: exists already; --resume goes on"):
        run(part, folder, out)
    with (
        lock_folder(tmp_path / "a-checkpoints"),
        pytest.raises(RunInUse, match="another run writes there"),
    ):
        run(part, folder, out, "--resume")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InputRefused, match="a.txt: is missing or cut off"):
        run(part, folder, out, "--resume")


def test_a_run_stops_at_the_target_or_goes_on_when_it_is_told(part, folder, tmp_path):
    found, _ = run(part, folder, tmp_path / "a.json", target=4.5)
    [case] = found["cases"]
    assert case["end"] == "target" and case["updates"] == case["reached"]["updates"] == 3
    assert case["reached"]["val_loss"] <= 4.5 and "<= 4.5 after" in part("run").told(found)
    assert part("run").table_row(found).count("|") == 9
    whole, _ = run(part, folder, tmp_path / "b.json", "--whole", target=4.5)
    assert whole["cases"][0]["reached"]["updates"] == 3 and whole["cases"][0]["end"] == "schedule"
    missed, _ = run(part, folder, tmp_path / "c.json", updates=2)
    assert "the schedule ended at a validation loss of" in part("run").told(missed)


def test_minutes_end_a_run_and_project_the_schedule(part, folder, tmp_path):
    found, this = run(
        part, folder, tmp_path / "a.json", "--minutes", "1e-9", "--checkpoints", "none", updates=40
    )  # fmt: skip
    [case] = found["cases"]
    assert case["end"] == "minutes" and case["updates"] == 1
    assert case["whole_schedule_s"] == pytest.approx(40 * case["train_s"])
    assert "whether they reach 3.28 is not measured" in part("run").told(found)
    assert not (tmp_path / "a-checkpoints").exists()


def test_a_schedule_that_the_files_cannot_feed_is_refused(part, folder, tmp_path):
    with pytest.raises(
        InputRefused, match="its files have 14 updates of 1,024 tokens; the schedule has 15"
    ):
        run(part, folder, tmp_path / "a.json", updates=15)
    found, _ = run(part, folder, tmp_path / "b.json", "--minutes", "60", updates=15)
    assert found["cases"][0]["end"] == "tokens" and found["cases"][0]["updates"] == 14


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ["--data", "DATA"],
            3,
            "has tokens of a vocabulary of 97; 3.28 is a loss over GPT-2's 50,257",
        ),
        (
            ["--data", "DATA", "--smoke", "--updates", "0"],
            2,
            "--updates 0: expected a number above 0",
        ),
        (["--data", "nowhere", "--smoke"], 3, "nowhere: is not a folder"),
        (
            ["--data", "empty", "--smoke"],
            3,
            "has no file *_train_*.bin, such as fineweb_train_000001.bin",
        ),
        (["--data", "DATA", "--smoke", "--updates", "2", "--resume"], 4, "checkpoint"),
    ],
)
def test_bad_input_is_one_line(part, folder, tmp_path, monkeypatch, capsys, arguments, code, says):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        part("run").main([str(folder) if word == "DATA" else word for word in arguments])
    error = capsys.readouterr().err
    assert (
        ended.value.code == code
        and says in error
        and error.startswith("error: ")
        and error.count("\n") == 1
    )


@pytest.mark.parametrize("full", ["log", "numbers", "checkpoint"])
def test_a_full_disk_is_one_line(part, folder, tmp_path, monkeypatch, capsys, full):
    def raising(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    module = part("run")
    if full == "log":
        monkeypatch.setattr(part("public_log"), "open", raising, raising=False)
    elif full == "numbers":
        monkeypatch.setattr(module.harness, "write", raising)
    else:
        monkeypatch.setattr("monograph.checkpointing.rotation._write", raising)
    with pytest.raises(SystemExit) as ended:
        module.main(
            ["--data", str(folder), "--smoke", "--updates", "2", "--out", str(tmp_path / "a.json")]
        )
    error = capsys.readouterr().err
    assert ended.value.code == 7 and "No space left" in error and error.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.slow
def test_a_captured_run_scores_as_an_eager_one(part, folder, tmp_path):
    """In bf16 and with flex attention, whose masks an eager step has as booleans."""
    scores = {}
    for compile_ in ("none", "whole"):
        out = tmp_path / f"{compile_}.json"
        found, _ = run(part, folder, out, "--compile", compile_, "--precision", "bf16", updates=3)
        [case] = found["cases"]
        assert case["peak_memory_bytes"] > 0 and case["skipped_updates"] == 0
        scores[compile_] = [loss for _, loss, _ in case["scores"]]
    assert scores["whole"] == pytest.approx(scores["none"], rel=5e-3)
    assert scores["whole"][-1] < scores["whole"][0]


# ---- texts, and on paper -------------------------------------------------------------------------


def test_texts_become_files_that_a_run_trains_on(part, tmp_path, capsys):
    texts, data = tmp_path / "texts", tmp_path / "data"
    texts.mkdir()
    for index in range(3):
        (texts / f"{index}.txt").write_text(f"def f{index}(x): return x + {index}\n" * 100)
    tokenizer = Tokenizer.train_bpe([path.read_text() for path in texts.iterdir()], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    make = part("make_shards").main
    arguments = [str(texts), "--tokenizer", str(tmp_path / "tokenizer.json"), "--to", str(data)]
    make([*arguments, "--val-tokens", "300", "--shard-tokens", "200"])
    shards = part("shards")
    found = np.concatenate(
        [shard.tokens for split in ("val", "train") for shard in shards.open_shards(data, split)]
    )
    expected = []
    for index in range(3):
        expected += [tokenizer.eos_id, *tokenizer.encode((texts / f"{index}.txt").read_text())]
    assert found.tolist() == expected
    assert shards.vocabulary_of(data) == (tokenizer.vocab_size, tokenizer.eos_id)
    assert f"{len(expected) - 300:,} tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        make(arguments)
    assert ended.value.code == 3 and "too few for --val-tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        make([*arguments, "--val-tokens", "300"])
    assert ended.value.code == 2 and "has files of tokens already" in capsys.readouterr().err


def test_time_on_paper_is_the_plans_and_the_plans_times_what_was_measured(
    part, monkeypatch, tmp_path, capsys
):
    paper, out = script("benchmarks/speedrun/on_paper.py"), tmp_path / "paper.json"
    monkeypatch.setattr("sys.argv", ["on_paper.py", "--out", str(out)])
    paper.main()
    found = json.loads(out.read_text())
    slowness = found["settings"]["measured_slowness"]
    assert 1 < slowness < 2
    assert [case["card"] for case in found["cases"]] == ["H100", "H200", "4090"]
    for case in found["cases"]:
        update_s = case["update_s"]
        assert update_s["as_measured"] == pytest.approx(slowness * update_s["planned"])
        assert case["train_s"]["1875"]["planned"] == pytest.approx(1875 * update_s["planned"])
        assert found["settings"]["estimated_peak_bytes"] < case["memory_budget_bytes"]
    said = capsys.readouterr().out
    assert said.count("not measured yet") == 3 and "1.51 billion tokens, 16 files" in said
    page = (BENCHMARKS.parent / "docs" / "speedrun.md").read_text()
    assert paper.table(found) in page, "python benchmarks/speedrun/on_paper.py prints the table"


def test_flops_are_those_of_the_projects_own_count(part):
    """Where a row is one document."""
    recipe_file, paper = part("speedrun_recipe"), part("on_paper")
    recipe = recipe_file.RECIPE
    flops = recipe_file.training_flops(recipe, 1, paper.pairs_per_token(recipe))
    assert flops == pytest.approx(flops_per_token(recipe.config, recipe.length), rel=1e-3)
    row = part("shards").batch_of(np.ones((1, recipe.length + 1), np.int64), SEPARATOR)
    pairs = part("shards").pairs_of(row, recipe.window)
    assert pairs / recipe.length == paper.pairs_per_token(recipe)


def test_flops_of_muon_are_those_of_its_products(part):
    paper, config = part("on_paper"), mono.LlamaConfig.preset("nano")
    flops = 0
    with torch.device("meta"):
        model = mono.Llama(config)
    for name, kind in mono.Muon().kinds(model).items():
        if kind.matrix_shape is not None:
            m, n = sorted(kind.matrix_shape)
            per_iteration = 2 * m * n * m + 2 * m * m * m + 2 * m * m * n
            flops += 5 * per_iteration
            assert "layers" in name
    assert paper.muon_flops(config) == flops


@pytest.mark.slow
def test_gpu_sh_runs_it(folder, tmp_path):
    command = [
        str(BENCHMARKS / "gpu.sh"),
        "speedrun",
        "--data",
        str(folder),
        "--smoke",
        "--updates",
        "4",
    ]
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    for _ in range(2):  # a part is measured anew
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "speedrun.json").read_text())["cases"][0]["updates"] == 4
    assert (tmp_path / "speedrun.txt").exists() and not (tmp_path / "speedrun-checkpoints").exists()
