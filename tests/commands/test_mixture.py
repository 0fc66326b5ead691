"""Run: pytest tests/commands/test_mixture.py (SWEEP/mixture, as typed, and the model that learns
from it).
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from commands.forked import CommandServer
from commands.inputs import SLOW, TINY, newest, over, rows, sound, with_texts
from monograph.config import load

SHORT = over(
    TINY,
    "train.updates=40",
    "train.save_every=10",
    "optim.name=adamw",
    "optim.lr=1e-2",
    "train.seed=0,1",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with a sweep over two seeds and the model that learned from its members."""
    folder = with_texts(tmp_path_factory.mktemp("mixture"))
    (folder / "own.py").write_text(SLOW)
    done = server.run(folder, "sweep", *SHORT, "--out", "s", "--distill", "--json", figures=0)
    assert done.code == 0, done.err
    (folder / "out").write_text(done.out)
    return folder


@pytest.fixture
def unfinished(place: Path, tmp_path: Path) -> Path:
    """The same, with the last checkpoint of the model that learned taken away."""
    shutil.copytree(place / "s", tmp_path / "s")
    shutil.copytree(place / "texts", tmp_path / "texts")
    shutil.rmtree(newest(tmp_path / "s/distilled"))
    return tmp_path


def last(text: str) -> Any:
    return json.loads(text.splitlines()[-1])


def test_members_are_scored_together(place: Path, server: CommandServer) -> None:
    alone = [
        member["eval_bits_per_byte"] for member in last((place / "out").read_text())["members"]
    ]
    done = server.run(place, "evaluate", "s/mixture", "--json")
    assert done.code == 0 and "2 members together" in done.out, done.err
    together = last(done.out)["bits_per_byte"]
    assert together < sum(alone) / 2, "an average of probabilities is better than the average score"
    given = server.run(place, "evaluate", "s/mixture", "--data", "texts", "--json")
    assert given.code == 0 and last(given.out)["tokens"] > last(done.out)["tokens"]
    done = server.run(place, "compare", "s/mixture", "s/best", "--json")
    assert done.code == 0 and "2 documents" in done.out and "-50 % parameters" in done.out, done.err
    first, second = last(done.out)["runs"]
    assert first["bits_per_byte"] == pytest.approx(together, rel=1e-6)
    assert second["bits_per_byte"] == pytest.approx(min(alone), rel=1e-5)
    [gap] = last(done.out)["differences"]
    assert gap["paired_by"] == "document" and gap["standard_error"] > 0


def test_members_that_did_not_finish_are_left_out(
    place: Path, server: CommandServer, tmp_path: Path
) -> None:
    shutil.copytree(place / "s", tmp_path / "s")
    shutil.copytree(place / "texts", tmp_path / "texts")
    shutil.rmtree(tmp_path / "s/members/000/checkpoints")
    member = last((place / "out").read_text())["members"][1]["eval_bits_per_byte"]
    done = server.run(tmp_path, "evaluate", "s/mixture", "--json")
    assert (
        last(done.out)["bits_per_byte"] == pytest.approx(member, rel=1e-6)
        and "1 member together" in done.out
    )
    shutil.rmtree(tmp_path / "s/members/001/checkpoints")
    done = server.run(tmp_path, "compare", "s/mixture", "s/mixture")
    assert (
        done.code == 3
        and "s/mixture: no member has finished: `monograph sweep --out s` continues the sweep"
        in done.err
    )


def test_one_model_learns_from_the_members_and_is_an_ordinary_run(
    place: Path, server: CommandServer
) -> None:
    found = last((place / "out").read_text())["distilled"]
    assert found["run"] == "s/distilled" and found["eval_bits_per_byte"] > 0
    own, best = (load(place / run / "config.toml", {}, {}) for run in ("s/distilled", "s/best"))
    differing = {key for key, value in own.values().items() if value != best.values()[key]}
    assert differing == {"train.seed"} and own.train.seed == 2
    record = json.loads((place / "s/distilled/teachers.json").read_text())
    assert [(each["member"], each["update"]) for each in record["teachers"]] == [
        ("members/000", 40), ("members/001", 40),
    ]  # fmt: skip
    done = server.run(place, "evaluate", "s/distilled", "--json")
    assert last(done.out)["bits_per_byte"] == pytest.approx(found["eval_bits_per_byte"], rel=1e-6)
    assert server.run(place, "generate", "s/distilled", "alpha ", "--max-tokens", "4").code == 0
    assert server.run(place, "export", "s/distilled", "--to", "hf").code == 0
    again = server.run(place, "train", "--resume", "s/distilled", figures=0)
    assert again.code == 0 and "has already finished, after 40 updates" in again.err
    alone = server.run(
        place, "train", "--from", "s/distilled", "train.updates=3", "--out", "b", figures=0
    )
    assert alone.code == 0 and sound(place / "b") == 3, "without teachers"
    same = server.run(place, "sweep", "--out", "s", "--json", figures=0)
    assert same.code == 0 and last(same.out)["distilled"] == found and "data  " not in same.err


@pytest.mark.slow
def test_killed_and_gone_on_with_is_uninterrupted(
    place: Path, server: CommandServer, tmp_path: Path
) -> None:
    """Law 10, by the sweep's command and by the run's own."""
    shutil.copytree(place / "texts", tmp_path / "texts")
    shutil.copytree(place / "s", tmp_path / "s", ignore=shutil.ignore_patterns("distilled"))
    for again in (["sweep", "--out", "s"], ["train", "--resume", "s/distilled"]):
        shutil.rmtree(tmp_path / "s/distilled", ignore_errors=True)
        command = server.start(tmp_path, "sweep", "--out", "s", figures=0)
        command.until(lambda: any((tmp_path / "s/distilled/checkpoints").glob("step-000000[1-9]*")))
        command.signal(signal.SIGKILL)
        assert command.wait().signal == signal.SIGKILL
        done = server.run(tmp_path, *again, figures=0)
        assert done.code == 0 and "resume    s/distilled from update" in done.err, done.err
        ours, whole = tmp_path / "s/distilled", place / "s/distilled"
        assert newest(ours).name == "step-00000040"
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (newest(ours) / name).read_bytes() == (newest(whole) / name).read_bytes()
        kept = [
            [(row["update"], row["train_loss"], row["grad_norm"]) for row in rows(run)]
            for run in (ours, whole)
        ]
        assert kept[0] == kept[1] and len(kept[0]) == 40


def test_a_teacher_that_is_gone_or_another_is_refused(
    unfinished: Path, server: CommandServer
) -> None:
    record = unfinished / "s/distilled/teachers.json"
    teacher = unfinished / "s/members/001/checkpoints"
    written = record.read_text()

    def refused() -> str:
        done = server.run(unfinished, "train", "--resume", "s/distilled", figures=0)
        assert done.code == 3, done.err
        return done.err.splitlines()[-1]

    shutil.move(teacher, unfinished / "kept")
    way_out = "put it back, or go on without teachers in a new run, with --from s/distilled"
    said = refused()
    assert (
        "s/members/001/checkpoints/step-00000040, a teacher of s/distilled: " in said
        and said.endswith(way_out)
    )
    shutil.copytree(unfinished / "s/members/000/checkpoints", teacher)
    assert refused().endswith(
        f"s/members/001/checkpoints/step-00000040, a teacher of s/distilled, has changed: {way_out}"
    )
    shutil.rmtree(teacher)
    shutil.move(unfinished / "kept", teacher)
    record.write_text(written.replace("0.5", "0.25"))
    assert "s/distilled/teachers.json: not what the run was begun with" in refused()
    checked = server.run(unfinished, "check", "s/distilled")
    assert checked.code == 3 and "damaged: teachers.json" in checked.err, checked.err
    record.write_text(re.sub("members/00", "../../00", written))
    assert "s/distilled/teachers.json: damaged; put it back, or" in refused()
    record.unlink()
    assert "s/distilled/teachers.json: not what the run was begun with" in refused()
    record.write_text(written)
    streamed = server.run(
        unfinished, "train", "--resume", "s/distilled", "train.memory=stream", figures=0
    )
    assert (
        streamed.code == 2
        and "members, on one device: leave out train.memory = stream" in streamed.err
    )
    done = server.run(unfinished, "train", "--resume", "s/distilled", figures=0)
    assert done.code == 0 and sound(unfinished / "s/distilled") == 40, done.err


@pytest.mark.parametrize(
    "typed",
    [["generate", "s/mixture", "a"], ["export", "s/mixture", "--to", "x"], ["train", "--from", "s/mixture"],
     ["check", "s/mixture"], ["train", "texts", "model.init=s/mixture"]],
    ids=["generate", "export", "from", "check", "init"],
)  # fmt: skip
def test_what_takes_one_model_names_the_way_to_one(
    place: Path, server: CommandServer, typed: list[str]
) -> None:
    done = server.run(place, *typed)
    way = "`monograph sweep --out s --distill` trains one model on them, s/distilled"
    assert done.code == 3 and done.err.splitlines()[-1].endswith(way), done.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["data.sequence_length=16,32"], "leave out data.sequence_length as an axis"),
        (["data.tokenizer=bytes,bpe"], "leave out data.tokenizer as an axis"),
        (["data.tokenizer=bpe", "data.vocab_size=280,300"], "leave out data.vocab_size as an axis"),
        (["train.memory=stream"], "leave out train.memory = stream"),
        (["model.init=own.py:build"], "leave out a model.init that is a Python file"),
    ],
)
def test_what_cannot_teach_is_refused_before_it_is_trained(
    place: Path, server: CommandServer, more: list[str], words: str
) -> None:
    ours = [each for each in SHORT if not (each.startswith("model.") and "model.init" in more[0])]
    done = server.run(place, "sweep", *over(ours, *more), "--out", "other", "--distill")
    assert done.code == 2 and done.err.splitlines()[-1].endswith(words), done.err
    assert not (place / "other").exists()


def test_questions_are_asked_of_one_model(place: Path, server: CommandServer) -> None:
    (place / "quiz.jsonl").write_text(
        '{"query": "alpha", "choices": ["beta", "gamma"], "gold": 1}\n'
    )
    done = server.run(place, "evaluate", "s/mixture", "--data", "quiz.jsonl")
    assert done.code == 3 and "a mixture cannot answer questions: give a text" in done.err
