"""Run: pytest tests/commands/test_follow.py (a run's metrics in a tracker: the file's numbers, each
once).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.called import ENVIRONMENT, monograph_
from monograph.commands import follow
from monograph.report.trackers import LIBRARIES, SettingsByKey, TrackedPoint, Tracker
from monograph.run.folder import Run

CONFIG = '[optim]\nlr = 0.001\nbetas = [0.9, 0.95]\n\n[train]\ncompile = "none"\n'


def update(number: int, loss: float, wall_s: float = 1.0) -> dict[str, Any]:
    return {
        "update": number,
        "tokens": 32 * number,
        "train_loss": loss,
        "skipped": False,
        "wall_s": wall_s,
    }


ROWS = [
    update(1, 3.5),
    {"update": 2, "memory": {"planned": {"weights": 64}}},
    update(2, float("nan")),
    {"update": 2, "eval_loss": 3.25, "eval_rows": 4},
    {"update": 2, "share": 0.5, "sample": "text"},
    {"update": 2, "summary": {"eval_loss": 3.25, "device": "CPU", "mfu": None}},
]
POINTS: list[TrackedPoint] = [
    (1, {"tokens": 32, "train_loss": 3.5, "skipped": 0, "wall_s": 1}),
    (2, {"memory/planned/weights": 64}),
    (2, {"tokens": 64, "skipped": 0, "wall_s": 1}),
    (2, {"eval_loss": 3.25, "eval_rows": 4}),
    (2, {"share": 0.5}),
    (2, {"summary/eval_loss": 3.25}),
]


def begun(folder: Path) -> Run:
    run = Run.create(folder)
    run.config.write_text(CONFIG)
    return run


class Fake:
    """Stands in for a tracker: what was opened there with which points, and which were closed."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str, SettingsByKey, list[TrackedPoint]]] = []
        self.closed: list[int] = []

    def __call__(self, name: str, key: str, settings: SettingsByKey, out: Path | None) -> Tracker:
        index, points = len(self.opened), list[TrackedPoint]()
        self.opened.append((name, key, settings, points))
        return Tracker(points.extend, lambda: self.closed.append(index), "look")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    tracker = Fake()
    monkeypatch.setattr(follow, "tracker_named", lambda name: tracker)
    return tracker


def script(monkeypatch: pytest.MonkeyPatch, *events: Callable[[], object]) -> None:
    """Let one event happen before each look, and the run end after the last."""
    left = list(events)

    def wait(folder: Path, limit_s: float) -> bool:
        left.pop(0)()
        return not left

    monkeypatch.setattr(follow, "wait_until_free", wait)


def test_a_run_that_has_ended_is_sent_as_it_is_and_not_touched(
    fake: Fake, tmp_path: Path, capsys: Any
) -> None:
    run = begun(tmp_path / "one")
    run.log(*ROWS)
    before = {path.name: path.read_bytes() for path in run.folder.iterdir()}
    assert monograph_("follow", str(run.folder), "--to", "wandb") == 0
    ((name, _, settings, points),) = fake.opened
    assert points == POINTS and fake.closed == [0]
    assert name == "one"
    assert settings == {"optim.lr": 0.001, "optim.betas": [0.9, 0.95], "train.compile": "none"}
    assert {path.name: path.read_bytes() for path in run.folder.iterdir()} == before
    assert capsys.readouterr().out == "one: 6 rows, up to update 2; look\n"


def test_a_row_is_sent_once_and_only_when_it_is_whole(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path / "run")
    half = json.dumps(update(3, 3.0))

    def append(text: str) -> Callable[[], object]:
        return lambda: run.metrics.write_text(run.metrics.read_text() + text)

    script(
        monkeypatch,
        lambda: None,  # no metrics.jsonl yet
        lambda: run.log(update(1, 3.5), update(2, 3.25)),
        append(half[:20]),
        append(half[20:] + "\n"),
        lambda: run.log(update(4, 2.5)),
        lambda: None,
    )
    assert monograph_("follow", str(run.folder), "--to", "wandb") == 0
    ((*_, points),) = fake.opened
    assert [(number, numbers["train_loss"]) for number, numbers in points] == [
        (1, 3.5),
        (2, 3.25),
        (3, 3.0),
        (4, 2.5),
    ]


@pytest.mark.parametrize("more", [0, 1, 40], ids=["shorter", "as long", "longer"])
def test_after_a_rewind_the_tracker_has_the_file_s_rows_alone(
    more: int, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path / "run")
    run.log(update(1, 3.5))
    kept = run.metrics_offset

    def rewind() -> None:
        run.truncate_metrics(kept)
        run.log(*(update(number, 1.25, wall_s=2.0) for number in range(2, 2 + more)))

    script(monkeypatch, lambda: run.log(update(2, 3.25)), rewind, lambda: run.log(update(50, 1.0)))
    assert monograph_("follow", str(run.folder), "--to", "wandb") == 0
    first, second = fake.opened
    assert first[:3] == second[:3] and fake.closed == [0, 1]  # the same place in the tracker
    losses = [row["train_loss"] for row in run.rows()]
    assert (
        [numbers["train_loss"] for _, numbers in second[3]] == losses == [3.5, *more * [1.25], 1.0]
    )


def test_settings_that_change_once_the_length_is_known_are_sent_anew(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path / "run")
    script(
        monkeypatch,
        lambda: run.log(update(1, 3.5)),
        lambda: run.config.write_text(CONFIG + "updates = 9\n"),
        lambda: run.log(update(2, 3.25)),
    )
    assert monograph_("follow", str(run.folder), "--to", "wandb") == 0
    *_, settings, points = fake.opened[-1]
    assert settings["train.updates"] == 9 and len(points) == 2


def test_one_follows_until_the_run_is_let_go_of(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    run, held, sent = begun(tmp_path / "run"), threading.Event(), threading.Event()

    def train() -> None:
        with run.lock():
            held.set()
            run.log(update(1, 3.5))
            assert sent.wait(60)
            run.log(update(2, 3.25))

    monkeypatch.setattr(
        follow, "tracker_named", lambda name: lambda *shown: (sent.set(), fake(*shown))[1]
    )
    thread = threading.Thread(target=train)
    thread.start()
    held.wait(60)
    assert monograph_("follow", str(run.folder), "--to", "wandb") == 0
    thread.join()
    assert [number for number, _ in fake.opened[0][3]] == [1, 2]


def test_each_member_of_a_sweep_and_what_learned_from_them_is_a_run(
    fake: Fake, tmp_path: Path
) -> None:
    sweep = begun(tmp_path / "sweep")
    (sweep.folder / "sweep.json").write_text("{}")
    for name in ("members/000", "members/001", "distilled"):
        begun(sweep.folder / name).log(update(1, 3.5))
    (sweep.folder / "best").symlink_to("members/001")
    assert monograph_("follow", str(sweep.folder), "--to", "wandb") == 0
    assert [name for name, *_ in fake.opened] == ["sweep/000", "sweep/001", "sweep/distilled"]
    assert monograph_("follow", str(sweep.folder / "best"), "--to", "wandb") == 0
    assert fake.opened[-1] == fake.opened[1]


def test_a_second_call_is_refused_for_the_same_tracker_alone(
    fake: Fake, tmp_path: Path, capsys: Any
) -> None:
    run = begun(tmp_path / "run")
    run.log(update(1, 3.5))
    with follow._lock_following(run.folder, "wandb"):
        assert monograph_("follow", str(run.folder), "--to", "wandb") == 8
        assert "run: another process sends this run to wandb" in capsys.readouterr().err
        assert monograph_("follow", str(run.folder), "--to", "mlflow") == 0
    assert monograph_("follow", str(run.folder), "--to", "wandb") == 0
    assert len(fake.opened) == 2


FULL = RuntimeError("(sqlite3.OperationalError) database or disk is full")


@pytest.mark.parametrize(
    ("interrupt", "code"),
    [(KeyboardInterrupt, 130), (OSError(28, "full"), 7), (FULL, 7), (ValueError, 3)],
)
def test_what_was_sent_is_kept_however_it_ends(
    interrupt: Any,
    code: int,
    fake: Fake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    def fail() -> None:
        raise interrupt

    run = begun(tmp_path / "run")
    script(monkeypatch, lambda: run.log(update(1, 3.5)), fail)
    assert monograph_("follow", str(run.folder), "--to", "wandb") == code
    assert len(fake.opened[0][3]) == 1 and fake.closed == [0]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("files", "to", "code", "said"),
    [
        ({}, "neptune", 2, f"--to neptune: expected one of {', '.join(LIBRARIES)}"),
        ({}, "wandb", 2, "--to wandb needs its library: "),
        ({}, None, 3, "has no metrics yet"),
        (
            {"metrics.jsonl": '{"update": 1}\n{"update": -1}\n'},
            None,
            3,
            "metrics.jsonl:2: not a row of metrics",
        ),
        ({"metrics.jsonl": '{"update": true}\n'}, None, 3, "metrics.jsonl:1: not a row of metrics"),
        ({"metrics.jsonl": "[" * 99_999 + "\n"}, None, 3, "metrics.jsonl:1: not a row of metrics"),
        (
            {"metrics.jsonl": '{"update": 1}\n', "config.toml": "x = 1"},
            None,
            3,
            "config.toml: not the settings",
        ),
    ],
)
def test_what_cannot_be_followed_is_one_line(
    files: dict[str, str],
    to: str | None,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    run = begun(tmp_path / "run")
    for name, text in files.items():
        (run.folder / name).write_text(text)
    if to is None:
        monkeypatch.setattr(follow, "tracker_named", lambda name: Fake())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert monograph_("follow", str(run.folder), "--to", to or "wandb") == code
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


def test_numbers_that_no_tracker_takes_are_left_out() -> None:
    row = {"a": 10**400, "b": float("inf"), "c": None, "d": "1", "e": [1], "f": {"g": True}}
    assert dict(follow._finite_numbers(row)) == {"f/g": 1}
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"x": deep}
    assert dict(follow._finite_numbers(deep)) == {}


def test_following_needs_no_torch_and_no_tracker_but_its_own() -> None:
    heavy = {"torch", "numpy", "matplotlib", "tensorboard", "wandb", "trackio", "mlflow"}
    program = f"import sys, monograph.commands.follow; print({heavy!r} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("out/run", size_guidance={"scalars": 0})
events.Reload()
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
settings = HParamsPluginData.FromString(content).session_start_info.hparams
rate = settings["optim.lr"].number_value
points = [(tag, each.step, each.value) for tag in events.Tags()["scalars"] for each in events.Scalars(tag)]
""",
    "wandb": """
import json, subprocess, sys
from pathlib import Path
(file,) = Path("out/wandb").glob("offline-run-*/*.wandb")
command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", file]
records = [*map(json.loads, subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines())]
(rate,) = [each["run"]["config"]["update"]["optim.lr"] for each in records if each["type"] == "run"]
rows = [each["history"]["item"] for each in records if each["type"] == "history"]
points = [(key, row["_step"], value) for row in rows for key, value in row.items() if key[0] != "_"]
""",
    "trackio": """
import os
os.environ["TRACKIO_DIR"] = os.path.abspath("out")
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("monograph")
rate = run.config["optim.lr"]
rows = SQLiteStorage.get_logs("monograph", run.name, run_id=run.id)
points = [(k, row["step"], v) for row in rows for k, v in row.items() if k not in ("step", "timestamp")]
""",
    "mlflow": """
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///out/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("monograph").experiment_id])
rate = float(run.data.params["optim.lr"])
history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
points = [(key, each.step, each.value) for key, several in history.items() for each in several]
""",
}


def library(to: str) -> None:
    if importlib.util.find_spec(to) is None:
        pytest.skip(f"{to} is not installed")


def call(folder: Path, *arguments: str, python: str = sys.executable) -> str:
    environment = {
        name: value
        for name, value in ENVIRONMENT.items()
        if not name.startswith(("WANDB_", "MLFLOW_"))
    }
    environment["WANDB_ERROR_REPORTING"] = "false"  # of wandb's reader
    done = subprocess.run(
        [python, "-W", "ignore", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("to", READERS)
def test_the_tracker_s_own_reader_finds_each_number_once(to: str, tmp_path: Path) -> None:
    """After two calls, the second of which has more rows and other losses."""
    library(to)
    run = begun(tmp_path / "run")
    for rows in ([update(1, 9.0), update(2, 9.0)], [*ROWS, update(3, 3.0)]):
        run.truncate_metrics(0)
        run.log(*rows)
        said = call(tmp_path, "-m", "monograph", "follow", "run", "--to", to, "--out", "out")
        assert said.startswith("run: ") and said.count("\n") == 1  # and nothing of the library's
    printed = call(
        tmp_path, "-c", READERS[to] + "\nimport json\nprint(json.dumps([rate, points]))"
    ).splitlines()[-1]
    rate, points = json.loads(printed)
    assert rate == 0.001
    expected = [*POINTS, (3, {"tokens": 96, "train_loss": 3.0, "skipped": 0, "wall_s": 1})]
    sent = sorted(
        [name, number, value] for number, numbers in expected for name, value in numbers.items()
    )
    assert sorted(points) == sent
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.slow
def test_a_tensorboard_that_runs_forgets_what_it_has_read_of_an_earlier_call(
    tmp_path: Path,
) -> None:
    library("tensorboard")
    begun(tmp_path / "run")
    program = """
import json, os, time
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from monograph.commands.follow import run
board = EventAccumulator("out/run")
for loss in (3.0, 2.0, 1.0):
    Path("run/metrics.jsonl").write_text(json.dumps({"update": 1, "train_loss": loss}) + "\\n")
    run("run", to="tensorboard", out=Path("out"))
    board.Reload()
    assert [each.value for each in board.Scalars("train_loss")] == [loss]
    assert len(os.listdir("out/run")) <= 2
    time.sleep(1.1)  # files are told apart by seconds
Path("out/run/events.out.tfevents.1.other").touch()
try:
    run("run", to="tensorboard", out=Path("out"))
except Exception as refused:
    print(refused)
"""
    assert "events.out.tfevents.1.other is a file of another run" in call(tmp_path, "-c", program)


def test_a_thread_of_the_library_that_falls_is_one_line_and_no_success(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Also one that falls while the tracker is closed, after which nothing is asked of it."""

    def close() -> None:
        def fall() -> None:
            raise OSError(5, "Input/output error", "events")

        thread = threading.Thread(target=fall)
        thread.start()
        thread.join()

    monkeypatch.setattr(
        follow,
        "tracker_named",
        lambda name: lambda *opened: Tracker(lambda points: None, close, ""),
    )
    run = begun(tmp_path / "run")
    run.log(update(1, 3.5))
    hook = threading.excepthook
    assert monograph_("follow", str(run.folder), "--to", "wandb") == 7
    printed = capsys.readouterr()
    assert (
        printed.err.startswith("error: wandb: its files cannot be written")
        and printed.err.count("\n") == 1
    )
    assert not printed.out and threading.excepthook is hook


def test_a_disk_that_fills_up_under_tensorboard_is_one_line(tmp_path: Path) -> None:
    """Whichever write is the first that does not fit: that of the first row, or the last one, or
    that at the end.
    """
    sizes = (10, 200, 500)
    library("tensorboard")
    begun(tmp_path / "run").log(*ROWS)
    program = f"""
import os, resource, signal, sys
import monograph.commands.follow
import tensorboard.plugins.hparams.summary_v2, tensorboard.summary.writer.record_writer
from monograph.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for most_bytes in {sizes}:
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        sys.argv = ["monograph", "follow", "run", "--to", "tensorboard", "--out", f"out{{most_bytes}}"]
        main()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["7"] * len(sizes), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(sizes)
    assert all(line.startswith("error: tensorboard: its files cannot be written") for line in lines)
