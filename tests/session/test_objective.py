"""Run: pytest tests/session/test_objective.py

A way to learn that the package does not have, in one file: nothing else has to know of it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from laws.resumed import cut_back, fingerprint, resume, start
from monograph.config import Settings
from monograph.data.batches import Batch
from monograph.errors import InputRefused, UsageError
from monograph.graph.trial import Trial
from monograph.loss import hidden_of
from monograph.model.config import LlamaConfig
from monograph.report.run_report import write_run_page
from monograph.run.folder import TEACHERS, Run
from monograph.run.progress import Progress
from monograph.session import objectives, reporting
from monograph.session.objective import HeldOutScore, Objective, Task, held_out_said
from monograph.session.objectives.teachers import taught
from monograph.session.objectives.texts import TextTask
from monograph.session.opening import Opening
from monograph.session.plan import Plan
from monograph.text.tokenizer import Tokenizer

ROWS, LENGTH, ALIKE = 12, 8, (3.0, 1.0)  # the teacher's logits of the next token, and of all others


@pytest.mark.parametrize("count, share, said", [
    (1234, 0.05, "1,234 held out"), (0, 0.0, "none held out"), (0, 0.05, "data.held_out = 0.05 took none by chance"),
])  # fmt: skip
def test_where_nothing_is_held_out_it_is_said_whether_that_was_asked_for(
    count: int, share: float, said: str
) -> None:
    found = held_out_said(count, share)
    assert said in found and (count == share == 0) == (found == "none held out")


class LogitLoss:
    """The sum over positions of KL(teacher || model), from the teacher's logits in a file."""

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_ND, head = hidden_of(model, batch)
        teacher_NV = batch["logits"].flatten(0, 1).log_softmax(-1)
        own_NV = (hidden_ND @ head.weight.T).log_softmax(-1)
        return nn.functional.kl_div(
            own_NV, teacher_NV, reduction="sum", log_target=True
        ), self.count(batch)

    def count(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(batch["tokens"].numel())


class Logits:
    """Rows of tokens with a teacher's logits, [R, T] and [R, T, V], from a file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.tokenizer = Tokenizer.bytes()
        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
        self.vocab_size = self.tokenizer.vocab_size
        self.skipped: dict[str, int] = {}
        self.rows: Batch = torch.load(path)


class LogitWindows(Iterator[Batch]):
    skip: tuple[tuple[int, int], ...] = ()

    def __init__(self, rows: Batch, per_window: int, position: int) -> None:
        self.rows, self.rows_per_window, self.rows_consumed = rows, per_window, position

    def __next__(self) -> Batch:
        chosen = torch.arange(self.rows_consumed, self.rows_consumed + self.rows_per_window) % ROWS
        self.rows_consumed += self.rows_per_window
        return {name: tensor[chosen] for name, tensor in self.rows.items()}

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows_consumed, "seed": 0}

    def close(self) -> None:
        pass


class LogitObjective(Objective):
    def is_chosen(self, settings: Settings) -> bool:
        return str(settings.data.source).endswith(".logits")

    def open(self, plan: Plan, progress: Progress) -> LogitTask:
        return LogitTask(Logits(Path(str(plan.job.reading.source))))


class LogitTask(Task):
    score = "kl", "eval_kl"
    data: Logits

    def __init__(self, data: Logits) -> None:
        self.data = data

    def loss(self, plan: Plan, model: nn.Module) -> LogitLoss:
        return LogitLoss()

    @property
    def per_epoch(self) -> int:
        return ROWS

    def windows(
        self, position: int, seed: int | None, skip: Sequence[Sequence[int]]
    ) -> LogitWindows:
        return LogitWindows(self.data.rows, self.plan().training.window_rows, position)

    @property
    def described(self) -> str:
        return f"{self.data.name}: {ROWS} rows of logits"

    def trial_result(self, trial: Trial) -> str:
        return f"{trial.loss:.2f} nats from the teacher"

    def amount(self, rows_per_window: int, updates: int) -> str:
        return f"{rows_per_window} rows of logits"

    def tokens_in_all(self, updates: int) -> int:
        return updates * self.plan().training.tokens_per_update

    def tokens_of(self, windows: Any) -> float:
        return float(self.plan().training.tokens_per_update)

    @property
    def scores_untrained(self) -> bool:
        return True

    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore:
        total, count = self.engine.evaluate(self.data.rows)  # all of them
        kl = float(total / count)
        return HeldOutScore(int(self.engine.step.tokens), {"eval_kl": kl}, kl)

    def opening(self, config: LlamaConfig | None) -> Opening:
        return Opening("a", "a", (), ("a",))

    def sample(self, opening: Opening, write: Callable[[], str | None]) -> str | None:
        return None

    def standing(
        self, rows: Sequence[Mapping[str, Any]], held_out: Any, yardsticks: Mapping[str, float]
    ) -> str:
        first, *_, last = [row["eval_kl"] for row in rows if "eval_kl" in row]
        return f"   {last:.3f} nats from the teacher ({first:.3f} before)"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(objectives, "OBJECTIVES", (LogitObjective(), *objectives.OBJECTIVES))
    monkeypatch.setattr(reporting, "write_report", lambda *given: write_run_page(*given, ""))
    monkeypatch.chdir(tmp_path)
    tokens = torch.randint(97, 123, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    logits = torch.full((ROWS, LENGTH, Tokenizer.bytes().vocab_size), ALIKE[1])
    logits.scatter_(2, tokens.unsqueeze(2), ALIKE[0])
    torch.save({"tokens": tokens, "logits": logits}, tmp_path / "teacher.logits")
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


def test_a_run_with_teachers_is_a_task_of_its_own_and_they_teach_texts_alone(
    tmp_path: Path,
) -> None:
    text: Any = SimpleNamespace()
    run = Run(tmp_path / "distilled")
    run.folder.mkdir()
    plain = TextTask(text)
    assert taught(plain, run, 1) is plain and not plain.digests
    (run.folder / "teachers.json").write_text("{}")
    task = taught(plain, run, 1)
    assert task.data is text and task.digests == {TEACHERS: hashlib.sha256(b"{}").hexdigest()}
    assert not task.is_foreseen, "no plan and no other process has the teachers"
    with pytest.raises(
        UsageError,
        match=r"teach texts alone: go on without teachers in a new run, with --from \S+led$",
    ):
        taught(LogitTask(text), run, 1)


def test_no_other_room_knows_an_objective_that_a_key_chooses() -> None:
    """Such a room would ask which one a run has; what differs between them is something that an
    `Objective` says.
    """
    source = Path(objectives.__file__).parents[2]
    named = {type(each).__name__ for each in objectives.OBJECTIVES if each.is_named}
    own = {
        path
        for path in source.rglob("*.py")
        if path.is_relative_to(source / "session" / "objectives")
    }
    files = {path: ast.parse(path.read_text()) for path in source.rglob("*.py") if path not in own}
    imported = {
        f"{path.relative_to(source)}: {alias.name}"
        for path, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "session.objectives" in (node.module or "")
        for alias in node.names
    }
    assert any(each.endswith(": OBJECTIVES") for each in imported)
    assert {each for each in imported if each.rpartition(": ")[2] in named} == set()
