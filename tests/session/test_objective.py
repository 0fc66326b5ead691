"""Run: pytest tests/session/test_objective.py

A way to learn that the package does not have, in one file and one row: nothing else has to know of
it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import monograph
from clocks import HANG_S
from laws.resumed import cut_back, fingerprint, resume, start
from monograph.config import Settings
from monograph.errors import InputRefused, UsageError
from monograph.report.run_report import write_run_page
from monograph.run.folder import TEACHERS, Run
from monograph.run.progress import Progress
from monograph.session import objectives, reporting
from monograph.session.objective import Objective, held_out_text
from monograph.session.objectives.teachers import with_teachers
from monograph.session.objectives.texts import TextTask
from monograph.session.plan import RunPlan
from monograph.text.tokenizer import Tokenizer
from session.logits import ROWS, Logits, LogitTask

LENGTH, ALIKE = 8, (3.0, 1.0)  # the teacher's logits of the next token, and of all others


@pytest.mark.parametrize("count, share, said", [
    (1234, 0.05, "1,234 held out"), (0, 0.0, "none held out"), (0, 0.05, "data.held_out = 0.05 took none by chance"),
])  # fmt: skip
def test_where_nothing_is_held_out_it_is_said_whether_that_was_asked_for(
    count: int, share: float, said: str
) -> None:
    found = held_out_text(count, share)
    assert said in found and (count == share == 0) == (found == "none held out")


class LogitObjective(Objective):
    def is_chosen(self, settings: Settings) -> bool:
        return str(settings.data.source).endswith(".logits")

    def open(self, plan: RunPlan, progress: Progress) -> LogitTask:
        return LogitTask(Logits(Path(str(plan.job.reading.source))))


def write_logits(path: Path) -> None:
    tokens = torch.randint(97, 123, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    logits = torch.full((ROWS, LENGTH, Tokenizer.bytes().vocab_size), ALIKE[1])
    logits.scatter_(2, tokens.unsqueeze(2), ALIKE[0])
    torch.save({"tokens": tokens, "logits": logits}, path)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(objectives, "OBJECTIVES", (LogitObjective(), *objectives.OBJECTIVES))
    monkeypatch.setattr(reporting, "write_report", lambda *given: write_run_page(*given, ""))
    monkeypatch.chdir(tmp_path)
    write_logits(tmp_path / "teacher.logits")
    return tmp_path / "teacher.logits"


SETTINGS: dict[str, Any] = {
    "data.source": "teacher.logits", "data.tokenizer": "bytes", "data.sequence_length": LENGTH,
    "model.hidden_size": 16, "model.num_hidden_layers": 1, "model.num_attention_heads": 2, "optim.lr": 0.02,
    "train.tokens_per_update": 5 * LENGTH, "train.micro_batch": 2, "train.compile": "none", "train.updates": 30,
    "train.save_every": 10, "train.keep": 9,
}  # fmt: skip


def test_a_new_way_to_learn_is_an_objective_and_a_task(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start("run", SETTINGS)
    said = capsys.readouterr().err
    before, *_, after = [row["eval_kl"] for row in Run(Path("run")).rows() if "eval_kl" in row]
    assert after < 0.5 * before
    for line in (
        "30 updates of 5 rows of logits",
        f"{after:.3f} nats from the teacher ({before:.3f} before)",
    ):
        assert line in said, said
    cut_back("run", "resumed", 20)
    resume("resumed")
    assert fingerprint(Path("resumed")) == fingerprint(Path("run"))
    cut_back("run", "changed", 20)
    torch.save(torch.load(source) | {"more": torch.zeros(1)}, source)
    with pytest.raises(InputRefused, match="teacher.logits: not what .* was trained on"):
        resume("changed")


# What somebody writes who adds a way to learn with keys of its own: a file, and a row of keys.py.
NEW_FILE = '''"""Learn from the logits of a teacher."""

from dataclasses import dataclass
from pathlib import Path

from monograph.config import Settings
from monograph.config.keys import LOGITS_WAY, LogitsSection
from monograph.run.progress import Progress
from monograph.session.objective import Objective, DecidedObjective, Task
from monograph.session.plan import RunPlan
from session.logits import Logits, LogitTask


@dataclass(frozen=True)
class LogitObjective(Objective):
    way = LOGITS_WAY
    file: str = ""
    temperature: float = 0.0

    def decide(self, settings: Settings, length: int) -> DecidedObjective:
        asked = settings.section(LogitsSection)
        temperature = 1.0 if asked.temperature is None else asked.temperature
        decided = LogitObjective(str(asked.file), temperature)
        return DecidedObjective(decided, {"logits.temperature": temperature})

    def open(self, plan: RunPlan, progress: Progress) -> Task:
        return LogitTask(Logits(Path(self.file)), self.temperature)


OBJECTIVE = LogitObjective()
'''
NEW_ROW = '''
class LogitsSection(Section):
    """The logits of a teacher, which are imitated. To use them, set file."""

    fixed = _OTHER_LOSS

    file: Text | None = _key(None, "a file", "Logits to learn from.", example="FILE")
    temperature: PositiveFloat | None = _key(
        None, ABOVE_0.expected, "Temperature of the teacher.", implied=1.0, belongs_to="logits.file"
    )


LOGITS_WAY = WayToLearn(
    RunKind("logits", (Measure("eval_kl", "nats from the teacher"),), "logits.file", ("logits.file",)),
    LogitsSection,
)
WAYS_TO_LEARN = (LOGITS_WAY, REWARDS_WAY, PREFERENCES_WAY, TEXTS_WAY)
'''


@pytest.mark.slow
def test_a_new_way_to_learn_with_its_own_keys_is_a_file_and_a_row(tmp_path: Path) -> None:
    """In a copy of the package, by the command line."""
    package = tmp_path / "src" / "monograph"
    shutil.copytree(
        Path(monograph.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "session" / "objectives" / "logits.py").write_text(NEW_FILE)
    keys = package / "config" / "keys.py"
    table = re.compile(r"^WAYS_TO_LEARN[^=]*= \([^)]*\)\n", re.MULTILINE)
    written, replaced = table.subn(lambda _: NEW_ROW, keys.read_text())
    assert replaced == 1
    keys.write_text(written)
    write_logits(tmp_path / "teacher.logits")
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{package.parent}:{tests}"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "monograph", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    said = run("keys", "logits").stdout
    assert "logits.file" in said and "Temperature of the teacher." in said
    given = [f"{key}={value}" for key, value in SETTINGS.items() if key != "data.source"]
    refused = run("train", *given, "logits.temperature=2")
    assert refused.returncode == 2 and "logits.temperature is of logits.file" in refused.stderr
    varied = run("sweep", *given, "logits.temperature=1,2")
    assert varied.returncode == 2 and "logits.temperature cannot be an axis" in varied.stderr
    trained = run(
        "train", *given, "logits.file=teacher.logits", "logits.temperature=2", "--out", "run"
    )
    assert trained.returncode == 0, trained.stderr
    assert "nats from the teacher" in trained.stderr
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["logits"] == {
        "file": "teacher.logits",
        "temperature": 2.0,
    }
    [listed] = json.loads(run("runs", ".", "--json").stdout)["runs"]
    assert (listed["kind"], listed["unit"]) == ("logits", "nats from the teacher")
    assert 0 < listed["value"] < 1


def test_a_run_with_teachers_is_a_task_of_its_own_and_they_teach_texts_alone(
    tmp_path: Path,
) -> None:
    text: Any = SimpleNamespace()
    run = Run(tmp_path / "distilled")
    run.folder.mkdir()
    plain = TextTask(text)
    assert with_teachers(plain, run, 1) is plain and not plain.file_digests
    (run.folder / "teachers.json").write_text("{}")
    task = with_teachers(plain, run, 1)
    assert task.data is text and task.file_digests == {TEACHERS: hashlib.sha256(b"{}").hexdigest()}
    assert not task.is_fully_planned, "no plan and no other process has the teachers"
    with pytest.raises(
        UsageError,
        match=r"teach texts alone: go on without teachers in a new run, with --from \S+led$",
    ):
        with_teachers(LogitTask(text), run, 1)


def test_no_other_room_knows_an_objective_that_a_key_chooses() -> None:
    """Such a room would ask which one a run has; what differs between them is something that an
    `Objective` says.
    """
    source = Path(objectives.__file__).parents[2]
    named = {type(each).__name__ for each in objectives.OBJECTIVES if each.has_key}
    own = {
        path
        for path in source.rglob("*.py")
        if path.is_relative_to(source / "session" / "objectives")
    }
    texts = {path: path.read_text() for path in source.rglob("*.py") if path not in own}
    imported = {
        f"{path.relative_to(source)}: {alias.name}"
        for path, text in texts.items()
        if "session.objectives" in text  # parsing all files takes a second
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and "session.objectives" in (node.module or "")
        for alias in node.names
    }
    assert any(each.endswith(": OBJECTIVES") for each in imported)
    assert {each for each in imported if each.rpartition(": ")[2] in named} == set()
