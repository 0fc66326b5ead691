"""Measure a ladder of ways to train one model on one text, each of which changes one thing in
another.
"""

import gc
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple, Self

import torch

from monograph.data.corpus import Corpus
from monograph.device import Device, clock, compiler_obstacle, default_device, describe, synchronize
from monograph.engine import Engine
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.evaluation import Evaluation, evaluate
from monograph.graph import capture as graph
from monograph.graph.compilable import Compilable, Scope
from monograph.graph.frozen import parameter_count
from monograph.graph.inspect import blocks
from monograph.graph.precision import Precision
from monograph.loop import train
from monograph.loss import TokenLoss
from monograph.optim import Plane, planes, trainable
from monograph.planner import defaults
from monograph.profiling.memory import reset_peak_memory
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.session.objectives.texts import TextTask, open_corpus
from monograph.session.plan import Length, Plan
from monograph.session.requirements import require_together
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.session.setup import build_run, open_session
from monograph.session.warmup import calibrate, peak_bytes, prepare
from monograph.step import OnDevice, Step

FEWER = 4  # the rung "accumulation" divides the rows of a micro-batch by this
ADAPTER_RANK = 16


@dataclass(frozen=True)
class RungWay:
    """One way to train; the defaults are the first rung's way."""

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
    """One change to a way of training.

    Attributes:
        name: the rung's name.
        change: the change in a few words.
        fields: the fields of `RungWay` that the change sets.
        over: the rung whose way is changed; None: the last measured rung before this one whose
            `over` is also None.
    """

    name: str
    change: str
    fields: Mapping[str, Any]
    over: str | None = None

    def after(self, way: RungWay) -> RungWay:
        """Return the way with this rung's change."""
        return replace(way, **self.fields)


# The first rungs make training faster, each on top of the one before; the others save memory, each
# by itself.
RUNGS = (
    Rung("eager", "fp32, dense logits, one parameter updated after another", {}),
    Rung(
        "compiled", "train.compile, of the forward and the backward pass alone", {"captured": True}
    ),
    Rung(
        "fused loss and optimizer",
        "logits in chunks; one graph updates all parameters",
        {"fused": True},
    ),
    Rung("bf16", "train.precision=bf16", {"precision": "bf16"}),
    Rung("packed", "data.packing=packed", {"packing": "packed"}),
    Rung("CUDA graphs", "micro-steps are captured once and replayed", {"replayed": True}),
    Rung("fp8", "train.precision=fp8", {"precision": "fp8"}),
    Rung(
        "accumulation",
        f"train.micro_batch, {FEWER} times as many micro-steps",
        {"accumulated": True},
        "packed",
    ),
    Rung("recompute", "train.remat=full", {"remat": "full"}, "packed"),
    Rung("offload", "train.remat=offload, a graph per block", {"remat": "offload"}, "packed"),
    Rung("8-bit state", "optim.state=8bit", {"narrow_state": True}, "packed"),
    Rung("adapters", f"lora.rank={ADAPTER_RANK}", {"adapters": True}, "packed"),
    Rung("streaming", "train.memory=stream, a graph per block", {"streamed": True}, "packed"),
)


@dataclass(frozen=True)
class Climbed:
    """The measurements of a rung.

    Attributes:
        seconds: the seconds of each timed update; cpu_seconds: this process's CPU time on all
            cores, which does not count other programs.
        tokens: mean number of targets of an update.
        micro_batch: rows of a micro-batch.
        micro_steps: micro-batches of an update.
        peak_memory_bytes: bytes of tensors at the peak of an update, with weights, gradients and
            optimizer state.
        train_loss: nats per token, averaged over the last quarter of the updates.
        held_out: scores after the last update, on the same rows for every rung; None if no text is
            held out.
        compile_s: seconds spent on tracing and compiling.
        notes: lines that the engine and its step announced.
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
        """Return the median seconds of an update."""
        return statistics.median(self.seconds)

    @property
    def cpu_s(self) -> float:
        """Return the median CPU seconds of an update."""
        return statistics.median(self.cpu_seconds)

    @property
    def tokens_per_s(self) -> float:
        """Return the targets per second."""
        return self.tokens / self.update_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Return the targets per second of this process's CPU time."""
        return self.tokens / self.cpu_s


class Unfused(OnDevice):
    """Parameters as one updates them by hand: each by separate operators, outside of graphs."""

    def place(self, step: Step) -> list[Plane]:
        """Make a plane of each parameter."""
        self.step = step
        kinds = step.optim.kinds(step.model)
        made = list[Plane]()
        for name, parameter in trainable(step.model).items():
            [plane] = planes(
                {name: parameter}, kinds, step.optim.state, master_weights=step.optim.master_weights
            )
            plane.number = len(made)
            made.append(step.prepare_plane(plane))
        return made

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return the passes alone."""
        return [self.step.forward, self.step.evaluate] if scope == "whole" else []


def unfuse(engine: Engine) -> None:
    """Give an engine that is not captured yet a loss that computes all logits at once, and an
    unfused update.
    """
    step = engine.step
    loss = TokenLoss("reference") if isinstance(step.loss, TokenLoss) else step.loss
    engine.step = Step(
        engine.model,
        loss=loss,
        optim=step.optim,
        clip=step.clip,
        precision=step.precision,
        remat=step.remat,
        parameters=Unfused(),
    )


RUNG_S = 20.0  # training time of the first rung; the others train on as many tokens
# bounds of a rung's updates, and how many of the first are not timed
LEAST = 8
MOST = 1000
WARM = 2
HELD_OUT_ROWS = 64
GRAPHS = ("whole", "blocks")
# The settings that rungs change, with the values from which the ladder's plan is made.
OWN = {
    "train.compile": "auto",
    "train.precision": "auto",
    "train.remat": "auto",
    "data.packing": "packed",
}


@dataclass
class Ladder:
    """The measurement of all rungs for one model on one text.

    Attributes:
        plan: the plan that all rungs share, with every value decided except those that rungs change
            and the length.
        texts: the corpus with documents "packed" into rows, and "padded", with a row for each
            document.
        params: the number of the model's parameters.
        folder: the ladder's folder; no rung writes into it.
        most: the most updates of a rung; None if the settings give none.
        updates: the number of updates of each rung, set by the time that the first measured rung
            takes.
        machine: the device.
    """

    plan: Plan
    texts: Mapping[str, Corpus]
    params: int
    folder: Path
    most: int | None
    updates: int = 0
    machine: Device = field(default_factory=describe)

    @classmethod
    def of(cls, plan: Plan, folder: Path, progress: Progress) -> Self:
        """Read the text in both forms and let the planner decide the open values.

        Raises:
            UsageError: the settings have values that no rung can have.
        """
        if not plan.training.optim.master_weights:
            raise UsageError(
                "optim.master_weights = false keeps no fp32 weights, and a ladder begins in fp32"
            )
        given = [
            key
            for key in OWN
            if plan.record.settings.pinned().get(key, "auto") not in ("auto", *GRAPHS)
        ]
        if given:
            progress.line(
                "note", f"{', '.join(given)}: the rungs differ in this, whatever was given"
            )
        machine = describe()
        scope = plan.training.compile
        settings = plan.record.settings.resolve(OWN | {"train.minutes": RUNG_S / 60}, "ladder")
        texts = {
            form: open_corpus(replace(plan.job.reading, packing=form), progress)
            for form in ("packed", "padded")
        }
        built = build_run(resolve(settings, machine), TextTask(texts["packed"]), machine)
        if built.plan.memory == "stream":
            raise UsageError(
                "train.memory = stream: a ladder is of a model that lives on the device"
            )
        # The scope is not the plan's, which depends on how fast earlier runs were.
        scope = scope if scope in GRAPHS else defaults.scopes(len(blocks(built.model)))[0]
        fixed = built.plan.having(replace(built.plan.training, compile=scope))
        return cls(
            fixed,
            texts,
            parameter_count(built.model),
            folder,
            plan.updates or None,
            machine=machine,
        )

    def plan_of(self, way: RungWay) -> Plan:
        """Return the plan of a way; padded updates have more rows, so that they have as many tokens
        as packed ones.
        """
        rows, scope = self.plan.training.window_rows, self.plan.training.compile
        micro = min(self.plan.training.rows, rows)
        if way.packing == "padded":
            rows = round(
                rows
                * self.texts["packed"].stats.packed_share
                / self.texts["padded"].stats.packed_share
            )
        by_block = way.streamed or way.remat == "offload"
        fixed: dict[str, Any] = {
            "train.compile": "none" if not way.captured else "blocks" if by_block else scope,
            "train.precision": way.precision,
            "train.remat": way.remat,
            "train.micro_batch": max(1, micro // FEWER) if way.accumulated else micro,
            "train.tokens_per_update": rows * self.plan.training.length,
            "train.memory": "stream" if way.streamed else "device",
            "data.packing": way.packing,
        }
        if way.narrow_state:
            fixed["optim.state"] = "8bit"
        if way.adapters:
            fixed["lora.rank"] = ADAPTER_RANK
        settings = self.plan.record.settings.resolve(fixed, "ladder")
        require_together(settings)
        return resolve(settings, self.machine)

    def obstacle(self, way: RungWay, rung: Rung) -> str | None:
        """Return why the rung cannot be measured on this machine or text; None if no reason is
        known.
        """
        plan = self.plan
        on_cpu = self.machine.type == "cpu"
        no_adapters = (
            None if plan.job.recipe.init else "model.init names no weights that could be frozen"
        )
        obstacles = {
            "compiled": compiler_obstacle() if on_cpu else None,
            "bf16": None if self.machine.has_bf16 else "this device has no bf16 arithmetic",
            "CUDA graphs": "no CUDA device"
            if on_cpu
            else None
            if way.captured
            else "nothing is compiled",
            "fp8": Precision(way.precision).obstacle(self.machine),
            "accumulation": "a micro-batch has one row already"
            if plan.training.rows == 1
            else None,
            "offload": "a CPU's memory is the host's" if on_cpu else None,
            "8-bit state": "all rungs have it: optim.state"
            if plan.training.optim.state == "8bit"
            else None,
            "adapters": "all rungs have them: lora.rank" if plan.training.lora else no_adapters,
            "streaming": "a CPU's memory is the host's" if on_cpu else None,
        }
        return obstacles.get(rung.name)

    def climb(
        self, rung: Rung, before: RungWay, progress: Progress
    ) -> tuple[RungWay, Climbed | str]:
        """Train and measure one rung.

        Returns:
            The way that the next rung starts from, and the measurements or the reason why there are
            none.

        Raises:
            UsageError, InputRefused, OutOfDeviceMemory: the first rung cannot be measured.
        """
        way = rung.after(before)
        if obstacle := self.obstacle(way, rung):
            return before, obstacle
        try:
            outcome = self._climbed(way, rung, progress)
        except (InputRefused, OutOfDeviceMemory, UsageError) as error:
            if not rung.fields:
                raise
            outcome = str(error)
        gc.collect()  # an engine and its graphs refer to one another
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return (before if isinstance(outcome, str) else way), outcome

    def _climbed(self, way: RungWay, rung: Rung, progress: Progress) -> Climbed | str:
        device = default_device()
        notes = list[str]()
        run = Run(self.folder)
        text = self.texts[way.packing]
        session = open_session(run, self.plan_of(way), TextTask(text), device, progress)
        engine = session.engine
        try:
            if not way.fused:
                unfuse(engine)
            engine.announce = engine.step.announce = notes.append
            if not way.replayed:
                engine.step.recorder = None
            prepare(session, progress)
            if way.captured and session.eager_reason:
                return session.eager_reason
            if rung.name == "CUDA graphs" and not graph.is_replayed(engine.step):
                return notes[-1] if notes else "nothing was captured"
            if not self.updates:
                self.updates = max(LEAST, min(int(RUNG_S / calibrate(session)), self.most or MOST))
            session.complete(resolve(session.plan, self.machine, Length(self.updates)))
            reset_peak_memory(device)
            return self._trained(session, notes, progress)
        finally:
            session.batches.close()

    def _trained(self, session: Session, notes: list[str], progress: Progress) -> Climbed:
        engine, device = session.engine, session.engine.step.device
        seconds = list[float]()
        cpu = list[float]()
        losses = list[float]()
        tokens = 0
        with progress.stage("train", f"{self.updates} updates") as stage:
            began = clock()
            cpu_began = process_time()
            for update in train(engine, session.batches, self.updates):
                synchronize(device)
                seconds.append(clock() - began)
                cpu.append(process_time() - cpu_began)
                losses.append(float(update.loss))
                tokens += int(update.count)
                stage.report("update", len(seconds), self.updates)
                began = clock()
                cpu_began = process_time()
            micro = engine.micro_batch or 0
            rows = session.batches.rows_per_window
            climbed = Climbed(
                seconds=tuple(seconds[WARM:]),
                cpu_seconds=tuple(cpu[WARM:]),
                tokens=tokens / len(seconds),
                micro_batch=micro,
                micro_steps=-(-rows // micro),
                peak_memory_bytes=peak_bytes(session),
                train_loss=statistics.fmean(losses[-max(1, len(losses) // 4) :]),
                held_out=self._scored(engine),
                compile_s=session.compile_s,
                notes=tuple(notes),
            )
            stage.result = f"{climbed.tokens_per_s:,.0f} tok/s"
        return climbed

    def _scored(self, engine: Engine) -> Evaluation | None:
        """Return the scores of the held-out rows that all rungs score, computed without graphs."""
        rows = self.texts["packed"].held_out
        if not len(rows):
            return None
        with graph.set_aside(engine.step):
            return evaluate(engine, rows, batch_rows=engine.micro_batch or 1, limit=HELD_OUT_ROWS)
