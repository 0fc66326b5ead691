"""Run: pytest tests/commands/test_runs.py (the table of runs: what it says of each, and that no run
breaks it).
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from monograph.commands.runs import _result, table
from monograph.commands.runs import run as command
from monograph.config.keys import WAYS_TO_LEARN
from monograph.errors import InputRefused
from monograph.run.listing import PIECE_BYTES, ListedRun, best_runs, list_runs

KINDS = [way.kind for way in WAYS_TO_LEARN]
TEXTS = (
    '[model]\npreset = "nano"\n[data]\nsource = "texts/"\nheld_out = 0.05\n[train]\nupdates = 8\n'
)
REWARDS = '[model]\ninit = "base"\n[data]\nsource = ["a", "b"]\n[lora]\nrank = 4\n[rl]\nreward = "exact"\n'


def made(
    root: Path,
    name: str,
    number: int,
    config: str = TEXTS,
    rows: list[dict[str, Any]] | None = None,
    saved: bool = True,
) -> Path:
    """A run's folder, as far as a table reads it."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "run.lock").write_text(json.dumps({"serial": number, "pid": 1, "host": "x"}))
    (folder / "config.toml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or []))
    if saved:
        (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    return folder


def update(number: int, **more: float) -> dict[str, Any]:
    return {"update": number, "tokens": number, "train_loss": 3.0, **more}


def ended(**results: float) -> dict[str, Any]:
    return {"update": 8, "summary": {"update": 8, **results}}


def by_name(root: Path) -> dict[str, ListedRun]:
    return {run.folder.name: run for run in list_runs(root, KINDS)}


def test_newest_first_with_kind_model_data_result_and_state(tmp_path: Path) -> None:
    made(
        tmp_path,
        "old",
        1,
        rows=[update(1), {"update": 2, "eval_bits_per_byte": 2.5}, ended(eval_bits_per_byte=2.0)],
    )
    made(
        tmp_path,
        "chats",
        2,
        rows=[{"update": 0, "eval_loss": 4.0}, update(1), ended(eval_loss=1.5)],
    )
    made(
        tmp_path,
        "drawn",
        3,
        REWARDS,
        rows=[update(1, reward=0.5), {"update": 1, "eval_reward": 0.75}, update(2)],
    )
    judged = TEXTS + '[prefer]\nloss = "dpo"\n'
    made(tmp_path, "judged", 4, judged, rows=[ended(eval_accuracy=0.9, eval_loss=0.3)])
    (tmp_path / "no run").mkdir()
    runs = list_runs(tmp_path, KINDS)
    assert [run.folder.name for run in runs] == ["judged", "drawn", "chats", "old"]
    assert [run.kind for run in runs] == ["preferences", "rewards", "conversations", "texts"]
    assert [run.value for run in runs] == [0.9, 0.75, 1.5, 2.0]
    assert [run.state for run in runs] == ["finished", "stopped", "finished", "finished"]
    assert (runs[1].model, runs[1].data, runs[1].update) == ("base, LoRA 4", "a and 1 more", 2)
    assert runs[1].resume == f"monograph train --resume {tmp_path / 'drawn'}" and not runs[3].resume
    assert runs[3].size_bytes == sum(
        path.stat().st_size for path in (tmp_path / "old").rglob("*") if path.is_file()
    )


def test_a_run_that_is_locked_runs_and_one_without_a_checkpoint_cannot_go_on(
    tmp_path: Path,
) -> None:
    folder = made(tmp_path, "a", 1, rows=[update(1)])
    made(tmp_path, "b", 2, rows=[update(1)], saved=False)
    with (folder / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert by_name(tmp_path)["a"].state == "running" and not by_name(tmp_path)["a"].resume
    assert by_name(tmp_path)["a"].state == "stopped" and by_name(tmp_path)["a"].resume
    assert by_name(tmp_path)["b"].state == "stopped" and not by_name(tmp_path)["b"].resume


def test_the_best_is_marked_among_runs_that_can_be_compared(tmp_path: Path) -> None:
    made(tmp_path, "a", 1, rows=[ended(eval_bits_per_byte=2.0)])
    made(tmp_path, "b", 2, rows=[ended(eval_bits_per_byte=1.5)])
    made(
        tmp_path,
        "other text",
        3,
        TEXTS.replace("texts/", "more/"),
        rows=[ended(eval_bits_per_byte=1.0)],
    )
    made(tmp_path, "low", 4, REWARDS, rows=[ended(eval_reward=0.1)])
    made(tmp_path, "high", 5, REWARDS, rows=[ended(eval_reward=0.9)])
    assert {folder.name for folder in best_runs(list_runs(tmp_path, KINDS))} == {"b", "high"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", b"[model\n"),
        ("config.toml", b"\xff\x00"),
        ("config.toml", b"x = [" * 5000),
        ("metrics.jsonl", b"{\n"),
        ("metrics.jsonl", b"[1]\n"),
        ("sweep.json", b"{}"),
        ("sweep.json", b'{"points": [], "result": {"best": {"member": 3}}}'),
        ("sweep.json", b'{"points": [], "result": {"members": [[1]], "best": {"member": 0}}}'),
        ("sweep.json", b"[]"),
        ("run.lock", b""),
    ],
)
def test_a_damaged_run_is_a_line_and_the_others_are_listed(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, "sound", 1, rows=[ended(eval_bits_per_byte=2.0)])
    damaged = made(tmp_path, "broken", 2)
    (damaged / name).write_bytes(content)
    command(tmp_path, json=False)
    out = capsys.readouterr().out
    assert "2.000 bits/byte" in out and "broken" in out
    # Without whose number it is only list_runs last.
    assert out.count(f"damaged: {name}") == (name != "run.lock")


def test_numbers_of_the_wrong_kind_are_no_results(tmp_path: Path) -> None:
    made(tmp_path, "a", 1, rows=[{"update": "x", "eval_bits_per_byte": "low", "summary": 3}])
    assert (by_name(tmp_path)["a"].value, by_name(tmp_path)["a"].update) == (None, 0)


def test_of_long_metrics_the_ends_are_read(tmp_path: Path) -> None:
    """With a cut line at both: a run writes while it is list_runs."""
    folder = made(
        tmp_path, "a", 1, rows=[{"update": 0, "eval_loss": 4.0}, {"update": 1, "eval_loss": 3.5}]
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps(update(number)) + "\n" for number in range(2, 3 * PIECE_BYTES // 50)
        )
        file.write(json.dumps({"update": 9, "eval_loss": 2.5}) + "\n" + '{"update": 10, "tr')
    run = by_name(tmp_path)["a"]
    assert (run.kind, run.value, run.update) == ("conversations", 2.5, 9)


def test_a_sweep_is_a_line_and_its_folder_lists_its_members(tmp_path: Path) -> None:
    folder = made(tmp_path, "s", 1)
    for number, bits in enumerate((2.0, 1.5)):
        made(folder / "members", f"{number:03d}", number, rows=[ended(eval_bits_per_byte=bits)])
    record: dict[str, Any] = {"points": [{}, {}]}
    (folder / "sweep.json").write_text(json.dumps(record))
    [sweep] = list_runs(tmp_path, KINDS)
    assert (sweep.kind, sweep.state, sweep.value) == ("sweep of 2", "stopped", None)
    assert sweep.resume == f"monograph sweep --out {folder}"
    record["result"] = {
        "members": [{"eval_bits_per_byte": 2.0}, {"eval_bits_per_byte": 1.5}],
        "best": {"member": 1},
    }
    (folder / "sweep.json").write_text(json.dumps(record))
    [sweep] = list_runs(tmp_path, KINDS)
    assert (sweep.state, sweep.value) == ("finished", 1.5)
    assert _result(sweep) == "1.500 bits/byte (best member)", (
        "the sweep's own table has means over seeds"
    )
    assert [run.folder.name for run in list_runs(folder, KINDS)] == ["001", "000"]


def test_a_sweep_of_members_that_learn_from_rewards_has_the_best_reward(tmp_path: Path) -> None:
    folder = made(tmp_path, "s", 1, REWARDS)
    record = {
        "points": [{}, {}],
        "result": {
            "members": [{"eval_reward": 0.2}, {"eval_reward": 0.7}],
            "best": {"member": 1},
        },
    }
    (folder / "sweep.json").write_text(json.dumps(record))
    [sweep] = list_runs(tmp_path, KINDS)
    assert (sweep.kind, sweep.state, sweep.value) == ("sweep of 2", "finished", 0.7)


def test_a_narrow_terminal_cuts_model_and_data_alone() -> None:
    rows = [("runs/a", "texts", "m" * 40, "d" * 30 + "end", "1.000 bits/byte", "1 MB", "finished")]
    lines = table(rows, 90).splitlines()
    assert max(map(len, lines)) == 90 and "end  1.000 bits/byte  1 MB  finished" in lines[1]
    assert "m" * 40 in table(rows, None)


def test_paths_inside_the_working_folder_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "runs", "a", 1, REWARDS.replace('"base"', f'"{tmp_path}/base"'))
    command(None, json=False)
    assert "  base, LoRA 4  " in capsys.readouterr().out


def test_a_folder_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command(None, json=False)
    assert "no run in runs/ yet" in capsys.readouterr().err
    with pytest.raises(InputRefused, match="no such folder"):
        command(Path("nowhere"), json=False)
    made(Path("runs"), "a", 1)
    with pytest.raises(InputRefused, match="runs/a is a run: `monograph runs runs`"):
        command(Path("runs/a"), json=False)
    command(None, json=True)
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == "stopped"
