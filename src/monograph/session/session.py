"""A training run in memory: its data, engine and schedule, saved to disk and restored bit for bit."""

import math
import platform
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from monograph import __version__, checkpointing
from monograph.checkpointing import Checkpoint
from monograph.config.sources import written_fingerprint
from monograph.data.corpus import Corpus
from monograph.device import clock, describe
from monograph.distributed.checkpoint import not_finite, save
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.errors import Diverged, InputRefused
from monograph.graph.capture import is_replayed
from monograph.graph.frozen import parameter_count
from monograph.graph.inspect import buffers_kept
from monograph.graph.remat import named
from monograph.loop import EngineState
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import AttentionKernel
from monograph.planner import defaults
from monograph.predict.roofline import Calibration
from monograph.profiling.memory import ledger, peak_memory_bytes
from monograph.run import recorded_state
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.run.recipe import ModelRecipe, require_base, require_same_file
from monograph.schedule import Schedule, cool_down
from monograph.session.objective import Records, RunWindows, Task
from monograph.session.plan import RunPlan
from monograph.storage.cache_dir import calibration_file
from monograph.stream import Streamed


@dataclass
class Session:
    """One training run, ready for its loop.

    Attributes:
        run: the run's folder.
        plan: the decided values of the run.
        recipe: what the model was built from.
        task: what the run learns from, and how.
        engine: model and optimizer on the device.
        batches: the windows from the current position on.
        eager_reason: why nothing was compiled; None if the step was.
        kernel: the attention kernel; None if kernels were not measured.
        world: the ranks that train the run together.
        started_s: the time of `clock` at which this process began with the run.
        training_since_s: the time of `clock` at which this process began to train.
        compile_s: seconds spent on tracing and compiling.
        peak_bytes: bytes of tensors at the peak of an update, measured on a CPU after the last
            update. None before, and on a GPU, whose allocator counts them all the time.
        elapsed_s: seconds of training before `training_since_s`, in earlier processes or before the
            step was compiled.
        budget_s: seconds of training that the settings allow; None if they give only updates,
            tokens or epochs.
        ends_s: the time of `clock` by which a new run must be over, including its report; None
            without train.wall_minutes.
        end_s: the seconds before `ends_s` that are reserved for saving and the report.
        cooled: [first update, last update] of a cool-down that replaced the schedule because
            updates took longer than measured at the start; None without one.
        begun_with: the fingerprint of the settings that a resumed run was begun with, perhaps by an
            earlier version; None for a new run.
    """

    run: Run
    plan: RunPlan
    recipe: ModelRecipe
    task: Task
    engine: Engine
    compile_s: float = 0.0
    elapsed_s: float = 0.0
    budget_s: float | None = None
    ends_s: float | None = None
    end_s: float = defaults.END_S
    cooled: list[int] | None = None
    begun_with: str | None = None
    eager_reason: str | None = None
    kernel: AttentionKernel | None = None
    peak_bytes: int | None = None
    world: World = field(default_factory=World)
    started_s: float = field(default_factory=clock)
    training_since_s: float = field(default_factory=clock)
    batches: RunWindows = field(init=False)

    def __post_init__(self) -> None:
        """Open the windows at the run's beginning."""
        self.task.begin(self.run, self.engine, self.world, lambda: self.plan)
        self.batches = self.open_batches(0)

    @property
    def corpus(self) -> Records:
        """Return the run's text, pairs or prompts."""
        return self.task.data

    @property
    def text(self) -> Corpus:
        """Return the text of a run on text; for callers that open no other kind of run, such as a
        sweep.
        """
        assert isinstance(self.task.data, Corpus)
        return self.task.data

    @property
    def updates(self) -> int:
        """Return the number of updates of the whole run."""
        return self.cooled[1] if self.cooled else self.plan.updates

    @property
    def params(self) -> int:
        """Return the number of parameters; tied ones count once."""
        return parameter_count(self.engine.model)

    @property
    def adapter_params(self) -> int:
        """Return the number of trained parameters of a run with adapters; 0 for a run without."""
        if self.recipe.lora is None:
            return 0
        return sum(plane.param.numel() for plane in self.engine.step.planes)

    @property
    def model_config(self) -> LlamaConfig | None:
        """Return the model's shape if it is a Llama, else None."""
        return self.engine.model.config if isinstance(self.engine.model, Llama) else None

    @property
    def spent_s(self) -> float:
        """Return the seconds of training so far, over all processes of the run."""
        return self.elapsed_s + clock() - self.training_since_s

    @property
    def left_s(self) -> float:
        """Return the seconds that are left for training, evaluation and samples; infinite without
        train.wall_minutes.
        """
        return math.inf if self.ends_s is None else max(0.0, self.ends_s - clock() - self.end_s)

    def scoring_s(self, rows: int, update_s: float) -> float:
        """Return the estimated seconds of scoring held-out rows: a forward pass takes a third of an
        update.

        Args:
            rows: the number of rows.
            update_s: seconds of an update.
        """
        return rows / self.batches.rows_per_window * update_s / 3

    @property
    def peak_memory_bytes(self) -> int | None:
        """Return the bytes of tensors at the peak; None if that was not measured."""
        device = self.engine.step.device
        return peak_memory_bytes(device) if device.type == "cuda" else self.peak_bytes

    def save(self, keep: int = 0) -> None:
        """Write a checkpoint of the current state; metrics are flushed to disk first.

        Args:
            keep: the minimum number of checkpoints that stay, even if the settings keep fewer.

        Raises:
            Diverged: a parameter is not finite; nothing is written, and existing checkpoints stay.
            DiskFull: there is no room; existing checkpoints stay.
        """
        state = self.engine.state()
        update = self.engine.index
        model = self.engine.model
        if bad := self.non_finite():
            raise Diverged(
                f"{bad[0]} is not finite after update {update} ({len(bad)} such): lower optim.lr; "
                f"the checkpoints in {self.run.checkpoints} are sound"
            )
        record = {
            "engine": state.scalars,
            "data": self.batches.state(),
            "random": random_state(self.engine.step.device),
            "micro_batch": self.engine.micro_batch,
            "length": self.plan.updates,
            "cooled": self.cooled,
            "budget_s": self.budget_s,
            "elapsed_s": self.spent_s,
            "metrics_offset": self.run.sync_metrics(),
            "metrics_sha256": self.run.metrics_digest(),
            "fingerprint": self.corpus.fingerprint,
            "tokenizer": self.corpus.tokenizer.digest,
            "tokenizer_files": self.corpus.tokenizer.config.digests,
            "settings": self.begun_with or self.plan.record.fingerprint,
            "recipe": self.recipe.entries(),
            # Runs from before kernels were measured lack it.
            **({"attention": self.kernel} if self.kernel else {}),
            **({"files": self.task.digests} if self.task.digests else {}),
            "model_config": self.model_config.to_hf() if self.model_config else None,
            "sampling": dict(model.sampling) if isinstance(model, Llama) else None,
            "versions": _versions(),
        }
        checkpoint = Checkpoint(
            update, state.model, state.optimizer, record, run=self.run.folder.name
        )
        save(self.world, self.run.checkpoints, checkpoint, max(keep, self.plan.job.keep))

    def non_finite(self) -> list[str]:
        """Return the names of parameters that are not finite on some rank.

        An update alone never makes a parameter non-finite.
        """
        state = self.engine.state().model
        names = dict(self.engine.model.named_parameters())
        return not_finite(self.world, {name: state[name] for name in names if name in state})

    def restore(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Restore a checkpoint of this run: weights, optimizer, counters, random numbers, data
        position, metrics.

        Raises:
            InputRefused: the data, the settings or the model differs from those that the run was
                begun with, or the state is not one that a run records.
        """
        state = checkpoint.state
        recorded_state.require(state, checkpoint.update, self.run)
        self._require_same(state)
        self.begun_with = state["settings"]
        self.adopt(checkpoint)
        self.engine.step.index = state["engine"]["index"]
        self.batches.close()
        data = state["data"]
        self.batches = self.open_batches(data["rows"], data["seed"], data.get("skip", ()))
        self.elapsed_s = state["elapsed_s"]
        self.budget_s = state["budget_s"]
        self.cooled = state["cooled"]
        self.complete(replace(self.plan, updates=state["length"]))
        # The saved micro-batch is smaller than the planned one if memory ran out, or if more ranks
        # than now shared the rows.
        planned_rows = self.plan.training.rows
        self.engine.micro_batch = min(state["micro_batch"] or planned_rows, planned_rows)
        self.kernel = state.get("attention")
        restore_random(state["random"], self.engine.step.device)
        self.run.truncate_metrics(state["metrics_offset"], state.get("metrics_sha256"))
        self.task.resume(self.run.rows())
        if self.world.leads:
            checkpointing.remove_leftovers(self.run.checkpoints)
        then = state["versions"]
        now = _versions()
        changed = [
            f"{name} {then[name]}, now {now[name]}" for name in now if then[name] != now[name]
        ]
        if changed:
            progress.line(
                "warning", f"not bit for bit: the checkpoint was written by {', '.join(changed)}"
            )

    def _require_same(self, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint's state if the settings, the text or the model have changed since the
        run was begun.
        """
        instead = "put it back, or start a new run from this one with --from"
        if state["settings"] not in (
            self.plan.record.fingerprint,
            written_fingerprint(self.run.config),
        ):
            raise InputRefused(
                f"{self.run.config}: not what the run was begun with (expected settings of sha256 {state['settings']}, "
                f"found {self.plan.record.fingerprint}): {instead}"
            )
        tokenizer = self.corpus.tokenizer.digest
        if (state["fingerprint"], state["tokenizer"]) != (self.corpus.fingerprint, tokenizer):
            what = f"{self.corpus.name}: not what {self.run.folder} was trained on"
            raise InputRefused(f"{what} ({self.task.depends_on} changed): {instead}")
        recorded = recorded_state.recorded_files(state)
        for file in sorted({*recorded, *self.task.digests}):
            if recorded.get(file) != self.task.digests.get(file):
                raise InputRefused(
                    f"{self.run.folder / file}: not what the run was begun with: {instead}"
                )
        saved = ModelRecipe.recorded(state["recipe"])
        require_same_file(saved, self.run)
        require_base(self.recipe.base_sha256, saved.base_sha256, saved.init, self.run.folder)
        # Shapes are compared rather than entries: an older checkpoint lacks keys that were added
        # later, and a shape has their defaults.
        shape = LlamaConfig.from_hf(state["model_config"]) if state["model_config"] else None
        if saved.entries() != self.recipe.entries() or shape != self.model_config:
            raise InputRefused(
                f"{self.run.config}: its model is not what the run was begun with: {instead}"
            )

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint's weights and optimizer state, and count updates from 0.

        Raises:
            InputRefused: the tensors do not fit this model.
        """
        self.engine.load_state(
            EngineState(checkpoint.model, checkpoint.optimizer, dict(checkpoint.state["engine"]))
        )
        self.engine.step.index = 0
        model = self.engine.model
        # Checkpoints of earlier versions do not have this entry.
        if isinstance(model, Llama) and "sampling" in checkpoint.state:
            model.sampling = checkpoint.state["sampling"] or {}

    def branch(self, checkpoint: Checkpoint, parent: Run) -> None:
        """Begin from another run's weights and optimizer state, with zero tokens and zero skipped
        updates.

        Args:
            checkpoint: the other run's checkpoint.
            parent: the other run.

        Raises:
            InputRefused: the state is not one that a run records.
        """
        recorded_state.require(checkpoint.state, checkpoint.update, parent)
        # A parent in another precision has no loss scale; this run's own then stays.
        scalars = self.engine.state().scalars | checkpoint.state["engine"]
        self.adopt(replace(checkpoint, state={**checkpoint.state, "engine": scalars}))
        self.engine.step.tokens.zero_()
        self.engine.step.skipped.zero_()

    def open_batches(
        self, rows: int, seed: int | None = None, skip: Sequence[Sequence[int]] = ()
    ) -> RunWindows:
        """Return an iterator over the run's windows.

        Args:
            rows: the number of rows, or prompts, that were consumed before.
            seed: the seed of the order of rows; None for the run's own.
            skip: the rows that are passed over, as pairs (begin, end).
        """
        return self.task.windows(rows, seed, skip)

    @property
    def can_save(self) -> bool:
        """Return whether a checkpoint of the present state could be resumed."""
        return self.task.can_save(self.batches)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore the module's buffers, such as running means, and the random generators after the
        `with` block.
        """
        device = self.engine.step.device
        before = random_state(device)
        try:
            with buffers_kept(self.engine.model, self.engine.step.loss):
                yield
        finally:
            restore_random(before, device)

    def complete(self, plan: RunPlan) -> None:
        """Take a plan in which more is decided; set the schedule if the number of updates is known."""
        self.plan = plan
        if plan.updates:
            self.engine.step.schedule = self.schedule()

    def schedule(self) -> Schedule:
        """Return the learning rate's schedule, with the cool-down if one has begun."""
        planned = self.plan.schedule(self.plan.updates)
        if not self.cooled:
            return planned
        begin, end = self.cooled
        return cool_down(planned, begin, end, self.plan.job.final)

    def account(self, update: int, **mark: object) -> None:
        """Log the peak memory by origin, planned and measured, after the second update; later ones
        need no more.

        Args:
            update: the number of updates done.
            mark: further entries of the row in metrics.jsonl.
        """
        # After the first update, the peak is that of an update: nothing was evaluated or sampled.
        if update == 1:
            self._store_memory()
        if update == 2:
            planned = self.plan.expected.by_origin if self.plan.expected else None
            if isinstance(self.engine, Streamed):
                entries: dict[str, Any] = self.engine.ledger()
            else:
                entries = ledger(self.engine.step.planes, planned, self.engine.step.device)
            self.run.log({"update": update, "memory": entries, **mark})

    def _store_memory(self) -> None:
        """Store a GPU's measured peak, and the peak that its plan traced, in the calibration for
        later plans.

        Nothing is stored if another step ran than was planned, or if micro-steps are replayed: a
        CUDA graph has a memory pool that the plan does not count.
        """
        step, planned = self.engine.step, self.plan.expected
        if (
            planned is None
            or planned.traced is None
            or step.device.type != "cuda"
            or is_replayed(step)
        ):
            return
        # DDP adds buffers that the plan does not count.
        if not (self.world.alone and self.task.is_foreseen):
            return
        work = planned.work
        ran = (self.engine.micro_batch, step.scope, step.remat)
        if ran == (work.rows, work.compile, named(work.remat)):
            measured = peak_memory_bytes(step.device)
            Calibration(calibration_file()).note_memory(
                describe(step.device), work, planned.traced, measured
            )

    def shorten(self, updates: int) -> None:
        """Begin the cool-down now, and end the run after `updates` updates in all.

        If a cool-down has begun already, only its end changes. Checkpoints record it for a resume.
        """
        begin = self.cooled[0] if self.cooled else self.engine.index
        self.cooled = [begin, updates]
        self.engine.step.schedule = self.schedule()


def _versions() -> dict[str, str]:
    return {
        "monograph": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# A run's state includes the global random generators, from which a module may sample, e.g. for
# dropout. The order of rows, a Llama's weights and samples come from other generators, which are
# seeded for each use.


def seed_all(number: int) -> None:
    """Seed Python's, NumPy's and torch's global generators with one number."""
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - other people's code uses the legacy generator
    torch.manual_seed(number)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators (on the host and on `device`) as
    JSON values.

    Raises:
        InputRefused: the model's code has replaced NumPy's bit generator.
    """
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    kind, state = numpy["bit_generator"], numpy["state"]
    if kind != "MT19937":
        raise InputRefused(
            f"numpy.random uses {kind}, whose state cannot be saved: remove set_bit_generator from the model's file"
        )
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, state["key"].tolist(), state["pos"], numpy["has_gauss"], numpy["gauss"]],
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore_random(saved: dict[str, Any], device: torch.device) -> None:
    """Set the generators back to a saved state."""
    recorded_state.set_generators(saved, random, np.random, torch.default_generator)
    if saved["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(recorded_state.tensor_of(saved["cuda"]), device)


def _hex(tensor: torch.Tensor) -> str:
    return bytes(tensor.tolist()).hex()
