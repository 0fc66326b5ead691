"""Run: pytest tests/commands/test_compare.py (before and after: a folder beside the run that began
from it).
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from commands.forked import CommandServer
from commands.inputs import over
from commands.test_finetune import SHORT, WORDS, folder_that_chats
from dialogues import said, write_chats


@pytest.fixture(scope="module")
def taught(server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, a run that taught it to repeat a word, and a quiz about that; the run's name ends
    with an "a".

    The verdict of a comparison is first about sides "a" and "b".
    """
    here = tmp_path_factory.mktemp("taught")
    folder_that_chats(here, "chatml")
    write_chats(
        here / "chats.jsonl", [said(f"{word} {n}", word) for n in range(16) for word in WORDS]
    )
    done = server.run(here, "train", *SHORT, "train.updates=40", "--out", "delta", figures=0)
    assert done.code == 0, done.err
    records = [
        {"query": f"{word} {n}", "choices": list(WORDS), "answer": WORDS.index(word)}
        for n in range(3)
        for word in WORDS
    ]
    (here / "quiz.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return here


def last(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


def test_before_and_after_on_questions(server: CommandServer, taught: Path) -> None:
    done = server.run(
        taught, "compare", "chatty", "delta", "--data", "quiz.jsonl", "--chat", "--json"
    )
    assert done.code == 0, done.err
    found = last(done.out)
    before, after = found["runs"]
    [difference] = found["differences"]
    assert after["acc"] == 1.0 > before["acc"] and before["bits_per_byte"] is None
    assert (
        difference["difference"] == pytest.approx(1.0 - before["acc"])
        and difference["unit"] == "acc"
    )
    assert difference["paired_by"] == "question" and difference["pairs"] == 12
    # The paired differences are 0 where the base was right, 1 where it was wrong.
    wrong = 1 - before["acc"]
    assert difference["standard_error"] == pytest.approx(math.sqrt(wrong * before["acc"] / 11))
    assert "acc (12 questions) · delta is better" in done.out
    for name, each in (("chatty", before), ("delta", after)):
        alone = server.run(taught, "evaluate", name, "--data", "quiz.jsonl", "--chat", "--json")
        assert (
            last(alone.out)["acc"] == each["acc"]
            and last(alone.out)["acc_norm"] == each["acc_norm"]
        )
    back = server.run(taught, "compare", "delta", "chatty", "--data", "quiz.jsonl", "--chat")
    assert back.code == 0 and "delta is better" in back.out and "chatty - delta = -" in back.out


@pytest.mark.slow  # by day on questions
def test_before_and_after_on_answers(server: CommandServer, taught: Path) -> None:
    done = server.run(taught, "compare", "delta", "chatty", "--json")
    assert done.code == 0, done.err
    assert (
        "warning: chatty does not say what it was trained on: what delta held out may be"
        in done.err
    )
    after, before = (each["bits_per_byte"] for each in last(done.out)["runs"])
    assert after < before and "bits/byte" in done.out and "delta is better" in done.out
    own = server.run(taught, "evaluate", "delta", "--json")
    assert last(own.out)["bits_per_byte"] == pytest.approx(after, rel=1e-6)
    given = server.run(taught, "compare", "chatty", "delta", "--data", "chats.jsonl", "--json")
    assert given.code == 0 and last(given.out)["runs"][0]["bits_per_byte"] > after, given.err
    assert "held out" not in given.err


def test_what_cannot_be_compared_is_said_in_one_line(server: CommandServer, taught: Path) -> None:
    done = server.run(taught, "compare", "chatty", "delta")
    assert done.code == 2 and "chatty is not a run, so it has no held-out text" in done.err
    done = server.run(taught, "compare", "delta", "chatty", "--chat")
    assert done.code == 2 and "--chat is how questions are asked" in done.err
    done = server.run(taught, "evaluate", "delta", "--chat")
    assert done.code == 2 and "--chat is how questions are asked" in done.err
    shutil.copytree(taught / "chatty", taught / "silent")
    (taught / "silent" / "chat_template.jinja").unlink()
    done = server.run(taught, "compare", "silent", "delta", "--data", "quiz.jsonl", "--chat")
    assert done.code == 3 and "the model has no chat template" in done.err.splitlines()[-1]


def test_a_page_lays_the_curves_of_runs_over_each_other(
    server: CommandServer, taught: Path
) -> None:
    """A folder has no curves; settings that differ are in a table, and a page in its place is
    replaced.
    """
    done = server.run(
        taught,
        "train",
        *over(SHORT, "optim.lr=1e-4"),
        "train.updates=4",
        "--out",
        "other",
        figures=0,
    )
    assert done.code == 0, done.err
    (taught / "page.html").write_text("an older page")
    quiz = ("--data", "quiz.jsonl", "--chat")
    done = server.run(taught, "compare", "delta", "other", "chatty", *quiz, "--report", "page.html")
    assert done.code == 0 and "report    page.html" in done.err, done.err
    page = (taught / "page.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [table["update"][-1] for table in data["tables"]] == [40, 4]
    loss = next(chart for chart in data["charts"] if chart["name"] == "loss")
    assert [
        (line["label"], line["table"]) for line in loss["lines"] if line["key"] == "train_loss"
    ] == [
        ("delta", 0),
        ("other", 1),
    ]
    settings = page.split("Settings that differ</h2>")[1]
    assert "optim.lr" in settings and "train.updates" in settings and "train.seed" not in settings
    assert "other is better" in page or "delta is better" in page or "may be chance" in page


@pytest.mark.parametrize("place, code, words", [
    ("page.txt", 2, "ends in .html"), ("nowhere/page.html", 3, "no folder nowhere"), ("folder.html", 3, "is a folder"),
])  # fmt: skip
def test_a_page_that_cannot_be_written_is_refused_first(
    place: str, code: int, words: str, server: CommandServer, taught: Path
) -> None:
    (taught / "folder.html").mkdir(exist_ok=True)
    done = server.run(
        taught, "compare", "delta", "delta", "--data", "quiz.jsonl", "--report", place
    )
    assert done.code == code and f"--report {place}" in done.err and words in done.err, done.err
    assert not done.out, "before anything was measured"
