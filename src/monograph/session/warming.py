"""What comes before the first update: one eager trial step, the choice of a kernel, the capture."""

from __future__ import annotations

import math

from torch import nn

from monograph.device import clock, compiler_obstacle
from monograph.graph import capture as graph
from monograph.graph.lora import starts_still
from monograph.measure.quantities import counted
from monograph.run.progress import Progress
from monograph.session.attention import choose_kernel
from monograph.session.session import Session

BATCH_STATISTICS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def mixing_rows(model: nn.Module) -> list[str]:
    """Names of the layers that normalise over the rows of a micro-batch."""
    return [name for name, module in model.named_modules() if isinstance(module, BATCH_STATISTICS)]


def prepare(session: Session, progress: Progress) -> None:
    """One eager trial step, then capture; what cannot be captured trains eagerly, and the reason is said once."""
    with session.undisturbed():
        _prepare(session, progress)


def _prepare(session: Session, progress: Progress) -> None:
    engine, train = session.engine, session.settings.train
    window = next(session.open_batches(0))
    with progress.stage("trial", "one eager step") as stage:
        trial = engine.trial(window)
        expected = math.log(session.corpus.vocab_size)
        stage.result = f"loss {trial.loss:.2f}, ln V = {expected:.2f}, {counted(trial.gradients, 'finite gradient')}"
    if without := [name for name in trial.without_gradient if not starts_still(name)]:
        progress.line("warning", f"no gradient reaches {', '.join(without[:3])}: its weights will not change")
    if left := engine.step.left_in_bf16:
        layers = counted(len(left), "linear layer")
        progress.line("note", f"{layers} of the blocks in bf16, not fp8: no multiple of 16 is a side of {left[0]}")
    rows = session.batches.rows_per_window
    mixing = mixing_rows(engine.model)
    if mixing and (engine.micro_batch or rows) < rows:
        progress.line(
            "note",
            f"{mixing[0]} normalises over micro-batches of {engine.micro_batch} rows, not over the update's {rows}: "
            "its statistics, and so the gradient, depend on train.micro_batch",
        )
    choose_kernel(session, window, progress)
    if train.compile == "none":
        session.eager_reason = "train.compile = none"
    elif engine.step.device.type == "cpu" and (obstacle := compiler_obstacle()):
        session.eager_reason = obstacle
    else:
        scope: graph.Scope = "blocks" if train.compile == "blocks" else "whole"
        with progress.stage("compile", "one block for all" if scope == "blocks" else "whole step") as stage:
            began = clock()
            session.eager_reason = engine.capture(window, scope=scope)
            session.compile_s = clock() - began
            replayed = ", micro-steps replayed" if graph.is_replayed(engine.step) else ""
            stage.result = "not possible" if session.eager_reason else f"0 graph breaks{replayed}"
    if session.eager_reason:
        progress.line("eager", f"training without a graph: {session.eager_reason}")
