"""Run: pytest tests/commands/test_preferences.py (`train` on pairs: what it shows, refuses and
keeps).
"""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import over
from commands.test_lora import write_base
from laws.resumed import cut_back, write_inputs
from monograph.run.folder import Run

RUN = [
    "pairs.jsonl", "model.init=base", "data.sequence_length=32", "data.held_out=0.3", "train.updates=6",
    "train.compile=none", "train.precision=fp32", "train.save_every=3", "train.tokens_per_update=128", "optim.lr=1e-2",
]  # fmt: skip
CASES: list[tuple[list[str], int, str]] = [
    (["train", *[each for each in RUN if "init" not in each]], 2, "prefer.loss: a new model answers nothing: name one"),
    (["train", *RUN, "prefer.loss=ppo"], 2, 'prefer.loss = "ppo": expected dpo, robust, ipo, simpo, orpo or kto'),
    (["train", *RUN, "prefer.loss=dpo", "prefer.beta=0"], 2, 'prefer.beta = "0": expected a number above 0'),
    (
        ["train", *RUN, "prefer.loss=robust", "prefer.label_smoothing=0.5"],
        2,
        'prefer.label_smoothing = "0.5": expected a number from 0 and below 0.5',
    ),
    (["train", *RUN, "prefer.loss=dpo:0.1:0.2"], 2, 'prefer.loss = "dpo:0.1:0.2": expected dpo, robust'),
    (
        ["train", *RUN, "prefer.loss=dpo", "prefer.gamma=0.2"],
        2,
        "prefer.gamma does not go with prefer.loss = dpo, which has beta",
    ),
    (
        ["train", "texts", "prefer.beta=0.2"],
        2,
        "prefer.beta = 0.2 is of preferences: give prefer.loss, too, such as dpo",
    ),
    (["train", *RUN, "prefer.loss=dpo", "rl.reward=exact"], 2, "prefer.loss does not go with rl.reward"),
    (["train", *RUN, "data.packing=padded"], 2, "prefer.loss does not go with data.packing = padded"),
    (["train", *RUN, "train.memory=stream"], 2, "prefer.loss does not go with train.memory = stream"),
    (["train", *over(RUN[:4], "train.tokens=99")], 2, "prefer.loss does not go with train.tokens"),
    (["train", *over(RUN, "model.init=own.py:build")], 2, "prefer.loss does not go with model.init = own.py:build"),
    (["train", *over(RUN[1:], "data.source=texts", "prefer.loss=dpo")], 3, "needs records with 'chosen' and"),
    (["train", *over(RUN[1:], "data.source=odd.jsonl")], 3, "odd.jsonl:2: 'chosen' and 'rejected' are equal"),
    (["sweep", "texts", "prefer.loss=dpo,ipo"], 2, "prefer.loss cannot be an axis"),
    (["sweep", "pairs.jsonl", "optim.lr=1e-3,1e-2"], 2, "prefer.loss: a new model answers nothing: name one"),
    (["sweep", *RUN, "train.seed=0,1", "--distill"], 2, "on all members: leave out prefer.loss"),
    (["profile", *RUN], 2, "`monograph profile` knows texts alone"),
    (["data", "show", *RUN], 2, "`monograph data` knows texts alone: its records are pairs of answers"),
    (["data", "show", "labelled.jsonl"], 2, "`monograph data` knows texts alone: its records are labelled answers"),
]  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_inputs(folder)
    good = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})
    (folder / "odd.jsonl").write_text(good + "\n" + good.replace('"c"', '"b"'))
    return folder


@pytest.fixture(scope="module")
def monograph(server: CommandServer) -> CommandServer:
    return server


@pytest.mark.parametrize(("typed", "code", "part"), CASES, ids=lambda value: None)
def test_what_is_refused(
    typed: list[str], code: int, part: str, here: Path, monograph: CommandServer
) -> None:
    done = monograph.run(here, *typed, *(["--out", "refused"] if typed[0] == "train" else []))
    [line] = [each for each in done.err.splitlines() if each.startswith(("error", "bug"))]
    assert done.code == code and part in line, done.err
    assert not list((here / "refused").glob("checkpoints/*"))


def test_what_a_run_leaves_and_what_follows_it(here: Path, monograph: CommandServer) -> None:
    done = monograph.run(
        here, "train", *over(RUN, "train.updates=30"), "--out", "run", "--json", page=1
    )
    assert done.code == 0, done.err
    summary = json.loads(done.out.splitlines()[-1])
    rows = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    compared, held = ([row for row in rows if key in row] for key in ("accuracy", "eval_accuracy"))
    assert (
        compared[0]["train_loss"] == held[0]["eval_loss"] == pytest.approx(math.log(2), rel=1e-15)
    )
    assert compared[0]["accuracy"] == held[0]["eval_accuracy"] == 0.5 and compared[0]["margin"] == 0
    assert compared[-1]["margin"] > 1 and summary["accuracy"] == 1.0 and "eval_margin" in held[-1]
    assert (
        summary["tokens"] == compared[-1]["tokens"] == sum(row["answer_tokens"] for row in compared)
    )
    page = (here / "run" / "report.html").read_text()
    assert (
        "The chosen answer scores higher in" in page
        and "<svg" in page
        and "nats per token" not in page
    )
    assert "'run'" not in done.err and "prefers the chosen answer in" in done.err

    for command in (["evaluate", "run"], ["compare", "run", "run"]):
        refused = monograph.run(here, *command)
        assert refused.code == 2 and "learned from answers, not from text" in refused.err

    # A run of texts from its weights is one, and none of pairs; another one of pairs begins at ln 2
    # again.
    assert (
        monograph.run(
            here,
            "train",
            "texts",
            "--from",
            "run",
            "train.updates=2",
            "--out",
            "texts-after",
            figures=0,
        ).code
        == 0
    )
    last = (here / "texts-after" / "metrics.jsonl").read_text()
    assert "accuracy" not in last and "eval_bits_per_byte" in last
    typed = [
        "pairs.jsonl",
        "--from",
        "run",
        "prefer.loss=ipo",
        "prefer.beta=0.5",
        "train.updates=2",
    ]
    assert monograph.run(here, "train", *typed, "--out", "pairs-after", figures=0).code == 0
    assert first_row(here / "pairs-after")["eval_loss"] == 1.0  # (0 - 1 / (2 x 0.5))^2
    (here / "others.jsonl").write_text((here / "pairs.jsonl").read_text())
    typed = ["others.jsonl", "--from", "pairs-after", "train.updates=2", "--out", "same-loss"]
    assert monograph.run(here, "train", *typed, figures=0).code == 0
    assert first_row(here / "same-loss")["eval_loss"] == 1.0, "the parent's loss"


def test_answers_that_are_labelled_are_learned_from_as_such(
    here: Path, monograph: CommandServer
) -> None:
    typed = [
        "train",
        *over(RUN[1:], "data.source=labelled.jsonl", "train.updates=30"),
        "--out",
        "labelled",
    ]
    done = monograph.run(here, *typed, "--json")
    assert done.code == 0 and "answers, rows" in done.err, done.err
    assert 'loss = "kto"' in (here / "labelled" / "config.toml").read_text()
    rows = [
        json.loads(line) for line in (here / "labelled" / "metrics.jsonl").read_text().splitlines()
    ]
    compared, held = ([row for row in rows if key in row] for key in ("accuracy", "eval_accuracy"))
    assert (
        compared[0]["train_loss"] == held[0]["eval_loss"] == 0.5 and compared[0]["accuracy"] == 0.5
    )
    assert (
        compared[-1]["accuracy"] > 0.9
        and compared[-1]["margin"] > 0.5
        and compared[-1]["chosen_gain"] > 0
    )
    assert sum(row["answer_tokens"] for row in compared) == compared[-1]["tokens"]


SWEPT = [
    *over(RUN, "train.updates=12", "train.save_every=4", "optim.lr=1e-3,1e-2"), "lora.rank=4", "train.seed=0,1",
]  # fmt: skip


def test_a_sweep_compares_settings_by_held_out_pairs(here: Path, monograph: CommandServer) -> None:
    done = monograph.run(here, "sweep", *SWEPT, "--out", "swept", "--verify", "3", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert found["best"]["unit"] == "nats" and found["best"]["knobs"]["optim.lr"] == 1e-2
    assert found["verify"]["equal"] and "nats" in done.err
    scores = [member["eval_loss"] for member in found["members"]]
    for index, score in enumerate(scores):
        run = here / "swept" / "members" / f"{index:03d}"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        compared, held = ([row for row in rows if k in row] for k in ("accuracy", "eval_accuracy"))
        assert compared[0]["train_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert len(compared) == 12 and held[-1]["eval_loss"] == score < math.log(2)
        assert compared[-1]["tokens"] == sum(row["answer_tokens"] for row in compared)
        summary = rows[-1]["summary"]
        assert summary["accuracy"] == compared[-1]["accuracy"] and summary["eval_loss"] == score
        assert (run / "reference.safetensors").is_file()
    listed = monograph.run(here, "runs", "swept", "--json")
    assert listed.code == 0 and {each["kind"] for each in json.loads(listed.out)["runs"]} == {
        "preferences"
    }
    followed = monograph.run(
        here, "train", "--from", "swept/best", "train.updates=2", "--out", "on", figures=0
    )
    assert followed.code == 0 and first_row(here / "on")["eval_loss"] == pytest.approx(math.log(2))


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_with_the_same_bits(
    here: Path, monograph: CommandServer
) -> None:
    typed = ["sweep", *over(SWEPT, "train.updates=300", "train.save_every=10")]
    command = monograph.start(here, *typed, "--out", "killed", figures=0)
    members = here / "killed" / "members"
    command.until(lambda: any((members / "003" / "checkpoints").glob("step-000000[1-9]*")))
    command.signal(signal.SIGKILL)
    assert command.wait().signal == signal.SIGKILL
    assert monograph.run(here, *typed, "--out", "killed", figures=0).code == 0
    whole = here / "whole"
    whole.mkdir()
    for name in ("sweep.json", "config.toml", "run.lock"):  # so that as many train at once
        shutil.copy(here / "killed" / name, whole)
    assert monograph.run(here, "sweep", "--out", "whole", figures=0).code == 0
    for index in range(4):
        one, other = (here / name / "members" / f"{index:03d}" for name in ("killed", "whole"))
        for file in ("model.safetensors", "optimizer.safetensors"):
            first, second = (
                (run / "checkpoints" / "step-00000300" / file).read_bytes() for run in (one, other)
            )
            assert first == second
        names = ("update", "train_loss", "accuracy", "margin", "tokens")
        kept = [
            [{name: row.get(name) for name in names} for row in Run(run).rows() if "lr" in row]
            for run in (one, other)
        ]
        assert kept[0] == kept[1] and len(kept[0]) == 300


@pytest.mark.slow
def test_a_mixture_that_balances_its_experts_learns_from_pairs_without_it(
    here: Path, monograph: CommandServer
) -> None:
    write_base(
        here / "experts",
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    done = monograph.run(
        here, "train", *over(RUN, "model.init=experts", "train.updates=2"), "--out", "unbalanced"
    )
    assert done.code == 0 and "rewards and pairs train without it" in done.err, done.err


def test_a_run_takes_its_parent_s_loss_only_for_records_of_the_same_kind(
    here: Path, monograph: CommandServer
) -> None:
    for source, parent, loss in (
        ("labelled.jsonl", "run", "kto"),
        ("pairs.jsonl", "labelled", "dpo"),
    ):
        typed = ["train", source, "--from", parent, "train.updates=2", "--out", f"{loss}-after"]
        done = monograph.run(here, *typed, figures=0)
        assert done.code == 0, done.err
        assert f'loss = "{loss}"' in (here / f"{loss}-after" / "config.toml").read_text()


def first_row(run: Path) -> dict[str, float]:
    return dict(json.loads((run / "metrics.jsonl").read_text().splitlines()[0]))


@pytest.mark.slow
def test_pairs_after_rewards_and_texts_of_pairs(here: Path, monograph: CommandServer) -> None:
    typed = [
        "prompts.jsonl", "model.init=base", "rl.reward=regex", "rl.reward_regex=.*a.*", "rl.prompts=2", "rl.group=2",
        "data.sequence_length=32", "train.updates=2", "train.compile=none", "train.precision=fp32", "data.held_out=0",
    ]  # fmt: skip
    assert monograph.run(here, "train", *typed, "--out", "rewarded", figures=0).code == 0
    typed = ["pairs.jsonl", "--from", "rewarded", "train.updates=2", "--out", "after-rewards"]
    done = monograph.run(here, "train", *typed, figures=0)
    assert (
        done.code == 0 and "accuracy" in (here / "after-rewards" / "metrics.jsonl").read_text()
    ), done.err
    typed = [
        "train.updates=2",
        "pairs.jsonl",
        "data.text_key=chosen",
        "--from",
        "after-rewards",
        "data.held_out=0",
        "--out",
        "of-pairs",
    ]
    assert monograph.run(here, "train", *typed, figures=0).code == 0
    assert "accuracy" not in (here / "of-pairs" / "metrics.jsonl").read_text()


def test_a_lost_or_damaged_reference_is_refused_by_name(
    here: Path, monograph: CommandServer
) -> None:
    assert monograph.run(here, "train", *RUN, "--out", "whole", figures=0).code == 0
    cut_back(str(here / "whole"), str(here / "stopped"), 3)
    file = here / "stopped" / "reference.safetensors"
    content, damaged = file.read_bytes(), "damaged, of another run"
    assert "reference.safetensors sound" in " ".join(
        monograph.run(here, "check", "stopped").out.split()
    )
    changed = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]  # a number that stays finite
    for bad, said in ((content[:-3], damaged), (changed, damaged), (None, "missing")):
        file.write_bytes(bad) if bad else file.unlink()
        done = monograph.run(here, "train", "--resume", "stopped")
        [line] = [each for each in done.err.splitlines() if each.startswith("error")]
        assert done.code == 3 and said in line and "put the file back" in line
        assert not bad or f"damaged: {file.name}" in monograph.run(here, "check", "stopped").err
    file.write_bytes(content)
    assert monograph.run(here, "train", "--resume", "stopped", figures=0).code == 0


def test_losses_without_a_reference_store_none(here: Path, monograph: CommandServer) -> None:
    done = monograph.run(
        here,
        "train",
        *RUN,
        "prefer.loss=orpo",
        "prefer.beta=0.2",
        "lora.rank=2",
        "--out",
        "odds",
        "--json",
        figures=0,
    )
    assert done.code == 0 and not (here / "odds" / "reference.safetensors").exists(), done.err
    rows = [json.loads(line) for line in (here / "odds" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    assert losses[-1] < losses[0] and json.loads(done.out.splitlines()[-1])["accuracy"] > 0
