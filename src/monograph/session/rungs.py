"""The rungs of a ladder: ways to train one model on one text, each different from another one in one thing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from monograph.engine import Engine
from monograph.evaluation import Evaluation
from monograph.loss import TokenLoss
from monograph.optim import Plane, planes, trainable
from monograph.step import Layout, Step

FEWER = 4  # times the rows of a micro-batch, where more of them are accumulated
ADAPTER_RANK = 16


@dataclass(frozen=True)
class Way:
    """One way to train; the defaults are the first rung's."""

    captured: bool = False
    fused: bool = False
    precision: str = "fp32"
    packing: str = "padded"
    replayed: bool = False
    accumulated: bool = False
    remat: str = "none"
    narrow_state: bool = False
    adapters: bool = False
    streamed: bool = False


class Rung(NamedTuple):
    """One thing that is changed.

    Attributes:
        name: of the rung.
        change: what it is, in a few words.
        fields: of the way.
        over: the rung whose way is changed; None: the last one before it that could be climbed and has None itself.
    """

    name: str
    change: str
    fields: Mapping[str, Any]
    over: str | None = None

    def after(self, way: Way) -> Way:
        """The way with the change."""
        return replace(way, **self.fields)


# The first ones make training faster, each over the one before; the others save memory, each on its own.
RUNGS = (
    Rung("eager", "fp32, dense logits, one parameter updated after another", {}),
    Rung("compiled", "train.compile, of the forward and the backward pass alone", {"captured": True}),
    Rung("fused loss and optimizer", "logits in chunks; one graph updates all parameters", {"fused": True}),
    Rung("bf16", "train.precision=bf16", {"precision": "bf16"}),
    Rung("packed", "data.packing=packed", {"packing": "packed"}),
    Rung("CUDA graphs", "micro-steps are captured once and replayed", {"replayed": True}),
    Rung("fp8", "train.precision=fp8", {"precision": "fp8"}),
    Rung("accumulation", f"train.micro_batch, {FEWER} times as many micro-steps", {"accumulated": True}, "packed"),
    Rung("recompute", "train.remat=full", {"remat": "full"}, "packed"),
    Rung("offload", "train.remat=offload, a graph per block", {"remat": "offload"}, "packed"),
    Rung("8-bit state", "optim.name=...:8bit", {"narrow_state": True}, "packed"),
    Rung("adapters", f"lora.rank={ADAPTER_RANK}", {"adapters": True}, "packed"),
    Rung("streaming", "train.memory=stream, a graph per block", {"streamed": True}, "packed"),
)


@dataclass(frozen=True)
class Climbed:
    """What was measured on a rung.

    Attributes:
        seconds: of each update that was timed; cpu_seconds: of this process on all cores, which do not count what other
            programs take.
        tokens: targets of an update on average.
        micro_batch: rows.
        micro_steps: of an update.
        peak_memory_bytes: of tensors, at the peak of an update: weights, gradients and optimizer state included.
        train_loss: nats per token, the mean over the last quarter of the updates.
        held_out: scores after all of them, the same rows on each rung; None where nothing is held out.
        compile_s: seconds that tracing and compiling took.
        notes: lines that were announced.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    tokens: float
    micro_batch: int
    micro_steps: int
    peak_memory_bytes: int
    train_loss: float
    held_out: Evaluation | None
    compile_s: float
    notes: tuple[str, ...]

    @property
    def update_s(self) -> float:
        """Seconds of an update, the median."""
        return statistics.median(self.seconds)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of an update, the median."""
        return statistics.median(self.cpu_seconds)

    @property
    def tokens_per_s(self) -> float:
        """Targets a second."""
        return self.tokens / self.update_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Targets a second of this process's CPU time."""
        return self.tokens / self.cpu_s


def _apart(step: Step) -> list[Plane]:
    """Make a plane of each parameter."""
    kinds, made = step.optim.kinds(step.model), list[Plane]()
    for name, parameter in trainable(step.model).items():
        [plane] = planes({name: parameter}, kinds, step.optim.state)
        plane.number = len(made)
        made.append(step.begun(plane))
    return made


def _but_the_update(step: Step, scope: str) -> list[tuple[Any, str]]:
    return [(step, "forward"), (step, "evaluate")] if scope == "whole" else []


# A step as it is written by hand: each parameter is updated by operators of its own, which no graph holds.
UNFUSED = Layout(planes=_apart, captured=_but_the_update)


def unfuse(engine: Engine) -> None:
    """Give an engine that is not captured yet a step whose loss makes all logits at once, and an unfused update."""
    step = engine.step
    loss = TokenLoss("reference") if isinstance(step.loss, TokenLoss) else step.loss
    engine.step = Step(
        engine.model, loss=loss, optim=step.optim, clip=step.clip, precision=step.precision, remat=step.remat,
        layout=UNFUSED,
    )  # fmt: skip
