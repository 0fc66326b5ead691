"""A training run in memory: its data, engine and schedule, made from settings or from a checkpoint."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from monograph import __version__, checkpointing, planner
from monograph.checkpointing import Checkpoint
from monograph.config import Settings
from monograph.data.batches import Batches
from monograph.data.corpus import Corpus
from monograph.device import Device, clock, compiler_obstacle, synchronize
from monograph.errors import InputRefused
from monograph.graph.precision import Precision
from monograph.loop import EngineState
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.run.folder import Run
from monograph.run.models import build, unique_state
from monograph.run.progress import Progress
from monograph.schedule import Schedule, constant, cool_down, warmup_cosine


@dataclass
class Session:
    """One training run, ready for its loop.

    Attributes:
        run: its folder.
        settings: every value fixed; `settings.train.updates` is the run's length.
        corpus: its text.
        engine: model and optimizer on the device.
        batches: the windows from where the run stands.
        length: updates of the run as it was planned.
        eager_reason: why nothing was compiled, None if it was.
        started_s: when this process began with the run; training_since_s: when it began to train.
        compile_s: seconds that tracing and compiling took.
        elapsed_s: seconds spent in earlier processes of the same run.
        budget_s: seconds that the training was given, None if it was given updates, tokens or epochs.
        cooled: [first update, last update] of a cool-down that replaced the schedule because the machine was slower
            than
            calibrated; None while the schedule stands.
    """

    run: Run
    settings: Settings
    corpus: Corpus
    engine: Resident
    batches: Batches
    length: int = 0
    compile_s: float = 0.0
    elapsed_s: float = 0.0
    budget_s: float | None = None
    cooled: list[int] | None = None
    eager_reason: str | None = None
    started_s: float = field(default_factory=clock)
    training_since_s: float = field(default_factory=clock)

    @property
    def updates(self) -> int:
        """Updates of the whole run."""
        return self.cooled[1] if self.cooled else self.length

    @property
    def params(self) -> int:
        """Parameters, tied ones once."""
        return sum(p.numel() for p in self.engine.model.parameters())

    @property
    def model_config(self) -> LlamaConfig | None:
        """The shape, of a Llama."""
        return self.engine.model.config if isinstance(self.engine.model, Llama) else None

    @property
    def spent_s(self) -> float:
        """Seconds of training so far, over all processes of the run."""
        return self.elapsed_s + clock() - self.training_since_s

    def save(self) -> None:
        """Write a checkpoint of this moment; metrics are made durable first."""
        state = self.engine.state()
        config = self.model_config
        record = {
            "engine": state.scalars,
            "data": self.batches.state(),
            "fingerprint": self.corpus.fingerprint,
            "model_init": self.settings.model.init,
            "model_config": config.to_hf() if config else None,
            "metrics_offset": self.run.sync_metrics(),
            "elapsed_s": self.spent_s,
            "budget_s": self.budget_s,
            "length": self.length,
            "cooled": self.cooled,
            "micro_batch": self.engine.micro_batch,
            "versions": {"monograph": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        update = self.engine.index
        checkpoint = Checkpoint(
            update, unique_state(self.engine.model), state.optimizer, record, run=self.run.folder.name
        )
        checkpointing.save(self.run.checkpoints, checkpoint, keep=self.settings.train.keep)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint of this run: weights, optimizer, counters, data position, metrics.

        Raises:
            InputRefused: the data or the model is not what the run was trained with.
        """
        state = checkpoint.state
        if state["fingerprint"] != self.corpus.fingerprint:
            raise InputRefused(
                f"{self.corpus.name}: not what {self.run.folder} was trained on (text, tokenizer or form changed): "
                "put it back, or start a new run from this one with --from"
            )
        self.adopt(checkpoint)
        self.engine.step.index = state["engine"]["index"]
        self.batches.close()
        self.batches = self.open_batches(state["data"]["rows"])
        self.elapsed_s, self.budget_s, self.cooled = state["elapsed_s"], state["budget_s"], state["cooled"]
        self.length, self.engine.micro_batch = state["length"], state["micro_batch"]
        self.engine.step.schedule = self.schedule()
        self.run.truncate_metrics(state["metrics_offset"])

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint's weights and optimizer state for the beginning of this run."""
        own = self.engine.model.state_dict()
        model = {name: checkpoint.model.get(name, tensor) for name, tensor in own.items()}
        if left := sorted(checkpoint.model.keys() - own.keys()):
            raise InputRefused(f"the saved model does not fit: {left[0]} is unknown")
        scalars = dict(checkpoint.state["engine"])
        self.engine.load_state(EngineState(model, dict(checkpoint.optimizer), scalars))
        self.engine.step.index = 0

    def open_batches(self, start: int) -> Batches:
        """The run's windows from row `start` on."""
        train = self.settings.train
        size = _number(train.tokens_per_update)
        pin = self.engine.step.device.type == "cuda"
        return self.corpus.batches(size, seed=train.seed, start=start, epochs=train.epochs, pin=pin)

    def schedule(self) -> Schedule:
        """The learning rate's course, with the cool-down if one was begun."""
        schedule = make_schedule(self.settings, self.length)
        return cool_down(schedule, self.cooled[0], self.cooled[1], FINAL) if self.cooled else schedule

    def shorten(self, updates: int) -> None:
        """Begin the cool-down now and end after `updates` updates in all; recorded, so that a resume repeats it."""
        self.cooled = [self.engine.index, updates]
        self.engine.step.schedule = self.schedule()


FINAL = 0.05  # of the peak learning rate, at the last update


def make_schedule(settings: Settings, updates: int) -> Schedule:
    """The schedule that the settings name."""
    warmup = int(settings.optim.warmup_updates) if settings.optim.warmup_updates != "auto" else planner.warmup(updates)
    return constant(warmup) if settings.optim.schedule == "constant" else warmup_cosine(warmup, updates, FINAL)


def open_session(run: Run, settings: Settings, corpus: Corpus, device: torch.device, machine: Device) -> Session:
    """Build model and engine on the device and fix every remaining automatic value but the number of updates."""
    train, optim = settings.train, settings.optim
    preset = settings.model.preset
    sizes = {"vocab_size": corpus.vocab_size, "max_position_embeddings": settings.data.sequence_length}
    model, loss = build(settings.model.init, preset, sizes | settings.model.sizes(), train.seed)
    _require_fit(model, corpus, settings)
    lr = optim.lr if optim.lr != "auto" else planner.known_learning_rate(preset) if preset != "auto" else 1e-3
    tokens = _number(train.tokens_per_update)
    rows = tokens // settings.data.sequence_length
    fixed: dict[str, Any] = {
        "optim.lr": lr,
        "train.tokens_per_update": tokens,
        "train.precision": planner.precision(machine) if train.precision == "auto" else train.precision,
        "train.micro_batch": _micro_batch(model, rows, settings, machine)
        if train.micro_batch == "auto"
        else train.micro_batch,
    }
    settings = settings.resolve(fixed, "plan")
    engine = Resident(
        model.to(device),
        loss=loss,
        optim=AdamW(lr=float(lr), betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay),
        clip=None if optim.grad_clip == "none" else optim.grad_clip,
        precision=Precision(settings.train.precision),
        micro_batch=int(settings.train.micro_batch),
    )
    batches = corpus.batches(tokens, seed=train.seed, epochs=train.epochs, pin=device.type == "cuda")
    return Session(run, settings, corpus, engine, batches)


def prepare(session: Session, progress: Progress) -> None:
    """One eager trial step, then capture; what cannot be captured trains eagerly, and the reason is said once."""
    engine, train = session.engine, session.settings.train
    window = next(session.open_batches(0))
    with progress.stage("trial", "one eager step") as stage:
        trial = engine.trial(window)
        expected = math.log(session.corpus.vocab_size)
        stage.result = f"loss {trial.loss:.2f}, ln V = {expected:.2f}, {trial.gradients} finite gradients"
    if trial.without_gradient:
        progress.line(
            "warning", f"no gradient reaches {', '.join(trial.without_gradient[:3])}: its weights will not change"
        )
    if train.compile == "none":
        session.eager_reason = "train.compile = none"
    elif engine.step.device.type == "cpu" and (obstacle := compiler_obstacle()):
        session.eager_reason = obstacle
    else:
        with progress.stage("compile", "whole step") as stage:
            began = clock()
            session.eager_reason = engine.capture(window)
            session.compile_s = clock() - began
            stage.result = "not possible" if session.eager_reason else "0 graph breaks"
    if session.eager_reason:
        progress.line("eager", f"training without a graph: {session.eager_reason}")


def calibrate(session: Session) -> float:
    """Seconds that an update takes: the median of a few accumulations whose gradients are thrown away."""
    engine = session.engine
    window = next(session.open_batches(0))
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 1.0 and len(times) < 50):
        synchronize(engine.step.device)
        began = clock()
        engine.accumulate(window)
        synchronize(engine.step.device)
        times.append(clock() - began)
        engine.step.discard()
    return sorted(times)[len(times) // 2]


def _number(value: Any) -> int:
    return int(value)


def _micro_batch(model: nn.Module, rows: int, settings: Settings, machine: Device) -> int:
    if not isinstance(model, Llama):
        return rows
    config, params = model.config, sum(p.numel() for p in model.parameters())
    length = settings.data.sequence_length
    return planner.micro_batch(
        rows, params, config.hidden_size, config.num_hidden_layers, length, machine.free_memory_bytes
    )


def _require_fit(model: nn.Module, corpus: Corpus, settings: Settings) -> None:
    if not isinstance(model, Llama):
        return
    config, length = model.config, settings.data.sequence_length
    if config.vocab_size < corpus.vocab_size:
        raise InputRefused(
            f"model.vocab_size = {config.vocab_size} is smaller than the tokenizer's {corpus.vocab_size}: raise it"
        )
    if config.max_position_embeddings < length:
        raise InputRefused(
            f"data.sequence_length = {length} is longer than the model's "
            f"max_position_embeddings = {config.max_position_embeddings}: shorten the rows"
        )
