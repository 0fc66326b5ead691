"""A way to learn that the package does not have: the logits of a teacher, from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monograph.data.batches import Batch
from monograph.graph.trial import Trial
from monograph.loss import hidden_of
from monograph.model.config import LlamaConfig
from monograph.session.objective import CurveOfScores, HeldOutScore, Task
from monograph.session.plan import RunPlan
from monograph.session.sample_prompt import SamplePrompt
from monograph.text.tokenizer import Tokenizer

ROWS = 12


class LogitLoss:
    """The sum over positions of KL(teacher || model), from the teacher's logits in a file."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_ND, head = hidden_of(model, batch)
        teacher_NV = (batch["logits"].flatten(0, 1) / self.temperature).log_softmax(-1)
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


class LogitTask(Task):
    score = CurveOfScores("kl", "eval_kl")
    data: Logits

    def __init__(self, data: Logits, temperature: float = 1.0) -> None:
        self.data = data
        self.temperature = temperature

    def loss(self, plan: RunPlan, model: nn.Module) -> LogitLoss:
        return LogitLoss(self.temperature)

    @property
    def records_per_epoch(self) -> int:
        return ROWS

    def windows(
        self, position: int, seed: int | None, skip: Sequence[Sequence[int]]
    ) -> LogitWindows:
        return LogitWindows(self.data.rows, self.current_plan().training.window_rows, position)

    @property
    def description(self) -> str:
        return f"{self.data.name}: {ROWS} rows of logits"

    def describe_trial(self, trial: Trial) -> str:
        return f"{trial.loss:.2f} nats from the teacher"

    def describe_amount(self, rows_per_window: int, updates: int) -> str:
        return f"{rows_per_window} rows of logits"

    def max_tokens(self, updates: int) -> int:
        return updates * self.current_plan().training.tokens_per_update

    def tokens_of_last_update(self, windows: Any) -> float:
        return float(self.current_plan().training.tokens_per_update)

    @property
    def scores_initial_weights(self) -> bool:
        return True

    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore:
        total, count = self.engine.evaluate(self.data.rows)  # all of them
        kl = float(total / count)
        return HeldOutScore(int(self.engine.step.tokens), {"eval_kl": kl}, kl)

    def sample_prompt(self, config: LlamaConfig | None) -> SamplePrompt:
        return SamplePrompt("a", "a", (), ("a",))

    def sample(self, prompt: SamplePrompt, write: Callable[[], str | None]) -> str | None:
        return None

    def describe_result(
        self, rows: Sequence[Mapping[str, Any]], held_out: Any, yardsticks: Mapping[str, float]
    ) -> str:
        first, *_, last = [row["eval_kl"] for row in rows if "eval_kl" in row]
        return f"   {last:.3f} nats from the teacher ({first:.3f} before)"
