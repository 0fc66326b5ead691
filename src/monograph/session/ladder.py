"""Measure a ladder: variants of training one model on one text (`monograph profile --ladder`).

A *variant* (`TrainingVariant`) says how the model is trained. A *rung* is one change to a variant,
such as bf16 instead of fp32. The changed variant is measured, and compared with the one without the
change.
"""

import copy
import gc
import math
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
from monograph.session.plan import Length, RunPlan
from monograph.session.requirements import require_compatible
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.session.setup import build_run, open_session
from monograph.session.warmup import measure_peak_bytes, prepare, time_update
from monograph.step import OnDevice, Step

MICRO_BATCH_DIVISOR = 4  # the rung "accumulation" divides the rows of a micro-batch by this
ADAPTER_RANK = 16


@dataclass(frozen=True)
class TrainingVariant:
    """One variant of training; the defaults are the variant of the first rung.

    Attributes:
        captured: whether forward and backward pass are compiled.
        fused: whether the loss computes logits in chunks, and one graph updates all parameters.
        precision: train.precision.
        packing: data.packing.
        replayed: whether micro-steps are captured as CUDA graphs and replayed.
        accumulated: whether micro-batches have `MICRO_BATCH_DIVISOR` times fewer rows.
        remat: train.remat, the recomputation of activations.
        narrow_state: whether the optimizer's state has 8 bits.
        adapters: whether adapters are trained instead of the model's weights.
        streamed: whether weights live on the host.
    """

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
    """One change to a variant of training.

    Attributes:
        name: the rung's name.
        change: the change in a few words.
        fields: the fields of `TrainingVariant` that the change sets, with their values.
        base: the name of the rung whose variant is changed. None means the last rung before this
            one that was measured and whose `base` is also None.
    """

    name: str
    change: str
    fields: Mapping[str, Any]
    base: str | None = None

    def applied_to(self, variant: TrainingVariant) -> TrainingVariant:
        """Return the variant with this rung's change."""
        return replace(variant, **self.fields)


# The rungs down to "fp8" make training faster; each changes the variant of the rung before it. The
# others save memory; each changes the variant of "packed".
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
        f"train.micro_batch, {MICRO_BATCH_DIVISOR} times as many micro-steps",
        {"accumulated": True},
        base="packed",
    ),
    Rung("recompute", "train.remat=full", {"remat": "full"}, base="packed"),
    Rung("offload", "train.remat=offload, a graph per block", {"remat": "offload"}, base="packed"),
    Rung("8-bit state", "optim.state=8bit", {"narrow_state": True}, base="packed"),
    Rung("adapters", f"lora.rank={ADAPTER_RANK}", {"adapters": True}, base="packed"),
    Rung("streaming", "train.memory=stream, a graph per block", {"streamed": True}, base="packed"),
)


@dataclass(frozen=True)
class RungMeasurement:
    """The measurements of a rung.

    Attributes:
        seconds: the seconds of each timed update.
        cpu_seconds: this process's CPU time on all cores in each timed update. Unlike `seconds`, it
            hardly changes when other programs run.
        tokens: mean number of targets of an update.
        micro_batch: rows of a micro-batch.
        micro_steps: micro-batches of an update.
        peak_memory_bytes: bytes of tensors at the peak of an update, including weights, gradients
            and optimizer state.
        train_loss: nats per token, averaged over the last quarter of the updates.
        held_out: the evaluation after the last update, on the same held-out rows for every rung;
            None if no text is held out.
        compile_s: seconds spent on tracing and compiling.
        notes: the lines that the engine and its step announced, which are not printed.
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
    """Parameters that are updated one after another, by separate operators, outside of graphs.

    An optimizer updates a *plane* (a flat buffer) at once. `OnDevice` puts many parameters into each
    plane, but this class only one.
    """

    def place(self, step: Step) -> list[Plane]:
        """Make a plane of each parameter."""
        self.step = step
        kinds = step.optim.kinds(step.model)
        all_planes = list[Plane]()
        for name, parameter in trainable(step.model).items():
            # One parameter gives one plane.
            [plane] = planes(
                {name: parameter}, kinds, step.optim.state, master_weights=step.optim.master_weights
            )
            plane.number = len(all_planes)
            all_planes.append(step.prepare_plane(plane))
        return all_planes

    def captured(self, scope: Scope) -> list[Compilable[..., Any]]:
        """Return what is compiled as a whole: the forward and the backward pass, but not the
        update. With another scope, each block is compiled by itself, and nothing else.
        """
        return [self.step.forward, self.step.evaluate] if scope == "whole" else []


def unfuse(engine: Engine) -> None:
    """Replace an engine's step by one that computes all logits at once and updates each parameter
    separately.

    The engine must not be captured yet. A loss that is no `TokenLoss` stays.
    """
    step = engine.step
    loss = step.loss
    if isinstance(loss, TokenLoss):
        loss = copy.copy(loss)  # the caller's own loss is not changed
        loss.impl = "reference"
    engine.step = Step(
        engine.model,
        loss=loss,
        optim=step.optim,
        clip=step.clip,
        precision=step.precision,
        remat=step.remat,
        parameters=Unfused(),
    )


# The first rung trains for about this time. The others make the same number of updates.
FIRST_RUNG_S = 20.0
# Limits of the number of updates of a rung.
MIN_UPDATES = 8
MAX_UPDATES = 1000
WARM_UPDATES = 2  # the first updates of a rung, which are not timed
HELD_OUT_ROWS = 64  # rows on which each rung is scored
COMPILED_SCOPES = ("whole", "blocks")  # the values of train.compile that compile something
# The settings that rungs change, with the values with which the ladder's plan is made.
CHANGED_KEYS = {
    "train.compile": "auto",
    "train.precision": "auto",
    "train.remat": "auto",
    "data.packing": "packed",
}


@dataclass
class Ladder:
    """The measurement of all rungs for one model on one text.

    Attributes:
        plan: the plan that all rungs share. Every value is decided, except those that rungs change
            and the number of updates.
        texts: the corpus by its packing: "packed" puts several documents into a row, "padded" only
            one.
        params: the number of the model's parameters.
        folder: the ladder's folder; no rung writes into it.
        max_updates: the number of updates that the settings give, which no rung exceeds; None if
            they give none.
        updates: the number of updates of each rung. The speed of the first rung decides it; 0
            before that.
        machine: the device.
    """

    plan: RunPlan
    texts: Mapping[str, Corpus]
    params: int
    folder: Path
    max_updates: int | None
    updates: int = 0
    machine: Device = field(default_factory=describe)

    @classmethod
    def of(cls, plan: RunPlan, folder: Path, progress: Progress) -> Self:
        """Read the text with both packings, build the model once, and return the ladder for it.

        Args:
            plan: the plan of the user's settings.
            folder: the ladder's folder.
            progress: the display.

        Raises:
            UsageError: no ladder can be measured with these settings.
        """
        if not plan.training.optim.master_weights:
            raise UsageError(
                "optim.master_weights = false keeps no fp32 weights, and a ladder begins in fp32"
            )
        if plan.training.quantize != "none":
            raise UsageError(
                f"train.quantize = {plan.training.quantize}: the rungs do not round weights: leave it out"
            )
        set_values = plan.record.settings.given_values()
        # Only a value that asks for something is worth a note. train.compile = whole or blocks is
        # not ignored: all compiled rungs have that scope.
        unremarkable_values = ("auto", *COMPILED_SCOPES)
        ignored = [
            key for key in CHANGED_KEYS if set_values.get(key, "auto") not in unremarkable_values
        ]
        if ignored:
            progress.line(
                "note", f"{', '.join(ignored)}: ignored, since the rungs set this themselves"
            )
        machine = describe()
        scope = plan.training.compile
        settings = plan.record.settings.resolve(
            CHANGED_KEYS | {"train.minutes": FIRST_RUNG_S / 60}, "ladder"
        )
        texts = {
            packing: open_corpus(replace(plan.job.reading, packing=packing), progress)
            for packing in ("packed", "padded")
        }
        built = build_run(resolve(settings, machine), TextTask(texts["packed"]), machine)
        if built.plan.memory == "stream":
            raise UsageError(
                "train.memory = stream: a ladder measures a model that lives on the device"
            )
        # Without a scope in the settings, all ladders of one model should have the same. The
        # planner's choice may depend on the measured speed of earlier runs, so it is replaced by a
        # choice that depends only on the number of blocks.
        if scope not in COMPILED_SCOPES:
            scope = defaults.scopes(len(blocks(built.model)))[0]
        return cls(
            plan=built.plan.with_training(replace(built.plan.training, compile=scope)),
            texts=texts,
            params=parameter_count(built.model),
            folder=folder,
            max_updates=plan.updates or None,
            machine=machine,
        )

    def plan_of(self, variant: TrainingVariant) -> RunPlan:
        """Return the plan of a variant.

        With padding, updates have more rows, so that they have as many tokens as with packing.
        """
        training = self.plan.training
        window_rows = training.window_rows
        micro_batch = min(training.rows, window_rows)
        if variant.packing == "padded":
            # The shares of a row's positions that have tokens, with packing and with padding.
            packed_share = self.texts["packed"].stats.packed_share
            padded_share = self.texts["padded"].stats.packed_share
            window_rows = round(window_rows * packed_share / padded_share)
        if variant.accumulated:
            micro_batch = max(1, micro_batch // MICRO_BATCH_DIVISOR)
        if not variant.captured:
            scope = "none"
        elif variant.streamed or variant.remat == "offload":
            scope = "blocks"  # since both copy tensors between two blocks, outside of a graph
        else:
            scope = training.compile
        values: dict[str, Any] = {
            "train.compile": scope,
            "train.precision": variant.precision,
            "train.remat": variant.remat,
            "train.micro_batch": micro_batch,
            "train.tokens_per_update": window_rows * training.length,
            "train.memory": "stream" if variant.streamed else "device",
            "data.packing": variant.packing,
        }
        if variant.narrow_state:
            values["optim.state"] = "8bit"
        if variant.adapters:
            values["lora.rank"] = ADAPTER_RANK
        settings = self.plan.record.settings.resolve(values, "ladder")
        require_compatible(settings)
        return resolve(settings, self.machine)

    def obstacle(self, variant: TrainingVariant, rung: Rung) -> str | None:
        """Return why a rung cannot be measured on this machine or text; None if no reason is known.

        Args:
            variant: the variant with the rung's change.
            rung: the rung.
        """
        job = self.plan.job
        training = self.plan.training
        on_cpu = self.machine.type == "cpu"
        match rung.name:
            case "compiled":
                return compiler_obstacle() if on_cpu else None
            case "bf16":
                return None if self.machine.has_bf16 else "this device has no bf16 arithmetic"
            case "CUDA graphs":
                if on_cpu:
                    return "no CUDA device"
                return None if variant.captured else "nothing is compiled"
            case "fp8":
                return Precision(variant.precision).obstacle(self.machine)
            case "accumulation":
                return "a micro-batch has one row already" if training.rows == 1 else None
            case "offload" | "streaming":
                return "a CPU's memory is the host's" if on_cpu else None
            case "8-bit state":
                return "all rungs have it: optim.state" if training.optim.state == "8bit" else None
            case "adapters":
                if training.lora:
                    return "all rungs have them: lora.rank"
                if not job.recipe.init:
                    return "model.init names no weights that could be frozen"
        return None

    def measure(
        self, rung: Rung, base: TrainingVariant, progress: Progress
    ) -> RungMeasurement | str:
        """Train and measure one rung.

        Args:
            rung: the rung.
            base: the variant that the rung changes.
            progress: the display.

        Returns:
            The measurements, or the reason why there are none.

        Raises:
            UsageError, InputRefused, OutOfDeviceMemory: the first rung cannot be measured.
        """
        variant = rung.applied_to(base)
        if obstacle := self.obstacle(variant, rung):
            return obstacle
        try:
            outcome = self._measure_variant(variant, rung, progress)
        except (InputRefused, OutOfDeviceMemory, UsageError) as error:
            # The first rung changes nothing. If even that fails, so would all others.
            if not rung.fields:
                raise
            outcome = str(error)
        # Free the memory for the next rung. An engine and its graphs refer to one another, so only
        # the collector frees them.
        gc.collect()
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return outcome

    def _measure_variant(
        self, variant: TrainingVariant, rung: Rung, progress: Progress
    ) -> RungMeasurement | str:
        """Train a new model in one variant; return the measurements, or why there are none."""
        device = default_device()
        notes = list[str]()
        run = Run(self.folder)
        task = TextTask(self.texts[variant.packing])
        session = open_session(run, self.plan_of(variant), task, device, progress)
        engine = session.engine
        try:
            if not variant.fused:
                unfuse(engine)
            engine.announce = notes.append
            engine.step.announce = notes.append
            if not variant.replayed:
                engine.step.recorder = None  # it would capture CUDA graphs
            prepare(session, progress)
            # If the step could not be compiled, or not be recorded in a CUDA graph, the session
            # would train without that, which is not what the rung measures.
            if variant.captured and session.eager_reason:
                return session.eager_reason
            if rung.name == "CUDA graphs" and not graph.is_replayed(engine.step):
                return notes[-1] if notes else "nothing was captured"
            if not self.updates:
                # This is the first rung.
                affordable_updates = int(FIRST_RUNG_S / time_update(session))
                max_updates = self.max_updates or MAX_UPDATES
                self.updates = max(MIN_UPDATES, min(affordable_updates, max_updates))
            session.set_plan(resolve(session.plan, self.machine, Length(self.updates)))
            reset_peak_memory(device)
            return self._train(session, notes, progress)
        finally:
            session.batches.close()

    def _train(self, session: Session, notes: list[str], progress: Progress) -> RungMeasurement:
        """Make a rung's updates, and return their measurements.

        Args:
            session: the prepared session of the rung.
            notes: the lines of the engine and its step, which become part of the result.
            progress: the display.
        """
        engine = session.engine
        device = engine.step.device
        seconds = list[float]()
        cpu_seconds = list[float]()
        losses = list[float]()
        tokens = 0
        with progress.stage("train", f"{self.updates} updates") as stage:
            began = clock()
            cpu_began = process_time()
            for update in train(engine, session.batches, self.updates):
                synchronize(device)  # an update's work on a GPU is part of its time
                seconds.append(clock() - began)
                cpu_seconds.append(process_time() - cpu_began)
                losses.append(float(update.loss))
                tokens += int(update.count)
                stage.report("update", len(seconds), self.updates)
                began = clock()
                cpu_began = process_time()
            rows = session.batches.rows_per_window
            micro_batch = engine.micro_batch or rows
            last_quarter = losses[-max(1, len(losses) // 4) :]
            measurement = RungMeasurement(
                seconds=tuple(seconds[WARM_UPDATES:]),
                cpu_seconds=tuple(cpu_seconds[WARM_UPDATES:]),
                tokens=tokens / len(seconds),
                micro_batch=micro_batch,
                micro_steps=math.ceil(rows / micro_batch),
                peak_memory_bytes=measure_peak_bytes(session),
                train_loss=statistics.fmean(last_quarter),
                held_out=self._score(engine),
                compile_s=session.compile_s,
                notes=tuple(notes),
            )
            stage.result = f"{measurement.tokens_per_s:,.0f} tok/s"
        return measurement

    def _score(self, engine: Engine) -> Evaluation | None:
        """Evaluate the model on packed held-out rows; None if no text is held out.

        No graphs are used, so that all rungs are scored by the same arithmetic.
        """
        rows = self.texts["packed"].held_out
        if not len(rows):
            return None
        with graph.capture_suspended(engine.step):
            return evaluate(engine, rows, batch_rows=engine.micro_batch or 1, limit=HELD_OUT_ROWS)
