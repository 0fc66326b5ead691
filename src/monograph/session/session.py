"""A training run in memory: its data, engine and schedule, saved to disk and restored bit for bit.

A *window* is the rows of one update.
"""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from monograph import __version__, checkpointing
from monograph.checkpointing import Checkpoint
from monograph.config.sources import written_fingerprint
from monograph.data.corpus import Corpus
from monograph.device import clock
from monograph.distributed.checkpoint import find_not_finite, save
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.errors import Diverged, InputRefused
from monograph.graph.frozen import parameter_count
from monograph.graph.inspect import buffers_kept
from monograph.loop import EngineState
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import AttentionKernel
from monograph.planner import defaults
from monograph.profiling.memory import peak_memory_bytes
from monograph.run import recorded_state
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.run.recipe import ModelRecipe, require_base_of_run, require_same_file
from monograph.schedule import Schedule, cool_down
from monograph.session.objective import Records, RunWindows, Task
from monograph.session.plan import RunPlan
from monograph.session.random_state import random_state, restore_random


@dataclass
class Session:
    """One training run, ready for its loop.

    Attributes:
        run: the run's folder.
        plan: the decided values of the run.
        recipe: what the model was built from.
        task: what the run learns from, and how.
        engine: model and optimizer on the device.
        compile_s: seconds spent on tracing and compiling.
        elapsed_s: seconds of training before `training_since_s`, in earlier processes or before the
            step was compiled.
        budget_s: seconds of training that the settings allow; None if they give only updates,
            tokens or epochs.
        deadline_s: the time of `clock` by which a new run must be over, including its report; None
            without train.wall_minutes.
        reserved_s: the seconds before `deadline_s` that are reserved for saving and the report.
        early_cool_down: [first update, last update] of a cool-down that replaced the schedule
            because updates took longer than measured at the start; None without one. It is a list,
            not a tuple, because checkpoints record it as JSON.
        initial_fingerprint: in a resumed run, the fingerprint that the settings had when the run
            was begun, perhaps in an earlier version; None in a new run.
        eager_reason: why the step was not compiled; None if it was.
        kernel: the attention kernel; None if kernels were not measured.
        peak_bytes: bytes of tensors at the peak of an update, measured on a CPU after the last
            update; None before that. It is always None on a GPU, whose allocator counts the bytes
            all the time. The property `peak_memory_bytes` is right on both.
        world: the ranks that train the run together.
        started_s: the time of `clock` at which this process began with the run.
        training_since_s: the time of `clock` at which this process began to train.
        batches: the windows from the current position on.
    """

    run: Run
    plan: RunPlan
    recipe: ModelRecipe
    task: Task
    engine: Engine
    compile_s: float = 0.0
    elapsed_s: float = 0.0
    budget_s: float | None = None
    deadline_s: float | None = None
    reserved_s: float = defaults.END_S
    early_cool_down: list[int] | None = None
    initial_fingerprint: str | None = None
    eager_reason: str | None = None
    kernel: AttentionKernel | None = None
    peak_bytes: int | None = None
    world: World = field(default_factory=World)
    started_s: float = field(default_factory=clock)
    training_since_s: float = field(default_factory=clock)
    batches: RunWindows = field(init=False)

    def __post_init__(self) -> None:
        """Give the task its engine, and open the windows at the run's beginning."""
        # The task asks for the plan each time, because `set_plan` may replace it.
        self.task.begin(self.run, self.engine, self.world, lambda: self.plan)
        self.batches = self.open_batches(0)

    @property
    def records(self) -> Records:
        """Return the run's text, pairs or prompts."""
        return self.task.data

    @property
    def text(self) -> Corpus:
        """Return the text of a run that learns from text."""
        assert isinstance(self.task.data, Corpus)
        return self.task.data

    @property
    def updates(self) -> int:
        """Return the number of updates of the whole run; 0 until it is known."""
        return self.early_cool_down[1] if self.early_cool_down else self.plan.updates

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
        if self.deadline_s is None:
            return math.inf
        return max(0.0, self.deadline_s - clock() - self.reserved_s)

    def scoring_s(self, rows: int, update_s: float) -> float:
        """Estimate the seconds of scoring held-out rows.

        A forward pass is taken to need a third of the time of an update.

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
        """Flush metrics.jsonl to disk, and write a checkpoint of the current state.

        The newest checkpoints stay, as many as train.keep says. Older ones are removed.

        Args:
            keep: the minimum number of checkpoints that stay, even if train.keep is smaller.

        Raises:
            Diverged: a parameter is not finite; nothing is written, and existing checkpoints stay.
            DiskFull: there is no room; existing checkpoints stay.
        """
        state = self.engine.state()
        update = self.engine.index
        model = self.engine.model
        if names := self.non_finite_parameters():
            raise Diverged(
                f"{names[0]} is not finite after update {update} ({len(names)} such): lower optim.lr; "
                f"the checkpoints in {self.run.checkpoints} are sound"
            )
        # A checkpoint has no entry for a kernel if none was chosen, as on a CPU, none for integers if
        # weights are not rounded, and none for files if the task keeps none in the run's folder.
        optional_entries: dict[str, Any] = {}
        if self.kernel:
            optional_entries["attention"] = self.kernel
        if self.plan.training.quantize != "none":
            optional_entries["quantize"] = self.plan.training.quantize
        if self.task.file_digests:
            optional_entries["files"] = self.task.file_digests
        # The part of the checkpoint that is not tensors; `recorded_state` checks its types.
        record = {
            "engine": state.scalars,
            "data": self.batches.state(),
            "random": random_state(self.engine.step.device),
            "micro_batch": self.engine.micro_batch,
            "length": self.plan.updates,
            "cooled": self.early_cool_down,
            "budget_s": self.budget_s,
            "elapsed_s": self.spent_s,
            "metrics_offset": self.run.sync_metrics(),
            "metrics_sha256": self.run.metrics_digest(),
            "fingerprint": self.records.fingerprint,
            "tokenizer": self.records.tokenizer.digest,
            "tokenizer_files": self.records.tokenizer.config.digests,
            "settings": self.initial_fingerprint or self.plan.record.fingerprint,
            "recipe": self.recipe.entries(),
            **optional_entries,
            "model_config": self.model_config.to_hf() if self.model_config else None,
            "sampling": dict(model.sampling) if isinstance(model, Llama) else None,
            "versions": _versions(),
        }
        checkpoint = Checkpoint(
            update, state.model, state.optimizer, record, run=self.run.folder.name
        )
        save(self.world, self.run.checkpoints, checkpoint, max(keep, self.plan.job.keep))

    def non_finite_parameters(self) -> list[str]:
        """Return the names of the parameters with a NaN or an infinity on any rank.

        The step skips an update with a loss or a gradient that is not finite, so such numbers have
        another cause, such as a fault of the memory.
        """
        state = self.engine.state().model
        # With adapters, the state does not have the frozen parameters.
        parameters = {
            name: state[name] for name, _ in self.engine.model.named_parameters() if name in state
        }
        return find_not_finite(self.world, parameters)

    def restore(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Restore a checkpoint of this run: weights, optimizer, counters, random generators,
        position in the records, metrics.

        Args:
            checkpoint: the checkpoint.
            progress: the display, which prints a warning if versions have changed.

        Raises:
            InputRefused: the data, the settings or the model differs from those that the run was
                begun with, or the state is not one that a run records.
        """
        state = checkpoint.state
        recorded_state.require_valid(state, checkpoint.update, self.run)
        self._require_same(state)
        self.initial_fingerprint = state["settings"]
        self._load_weights_and_optimizer(checkpoint)
        self.engine.step.index = state["engine"]["index"]
        self.batches.close()
        position = state["data"]
        # Checkpoints of earlier versions have no "skip".
        self.batches = self.open_batches(
            position["rows"], position["seed"], position.get("skip", ())
        )
        self.elapsed_s = state["elapsed_s"]
        self.budget_s = state["budget_s"]
        self.early_cool_down = state["cooled"]
        self.set_plan(replace(self.plan, updates=state["length"]))
        # The saved micro-batch is smaller than the planned one if memory ran out, or if more ranks
        # than now shared the rows of an update. It is None if the engine did not cut windows.
        planned_rows = self.plan.training.rows
        saved_rows = state["micro_batch"]
        self.engine.micro_batch = min(saved_rows, planned_rows) if saved_rows else planned_rows
        self.kernel = state.get("attention")
        restore_random(state["random"], self.engine.step.device)
        self.run.truncate_metrics(state["metrics_offset"], state.get("metrics_sha256"))
        self.task.resume(self.run.rows())
        if self.world.leads:
            checkpointing.remove_leftovers(self.run.checkpoints)
        saved = state["versions"]
        present = _versions()
        changed = [
            f"{name} {saved[name]}, now {version}"
            for name, version in present.items()
            if saved[name] != version
        ]
        if changed:
            progress.line(
                "warning", f"not bit for bit: the checkpoint was written by {', '.join(changed)}"
            )

    def _require_same(self, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint's state if the settings, the records or the model have changed since
        the run was begun.

        Raises:
            InputRefused: something has changed; the message names the file.
        """
        remedy = "put it back, or start a new run from this one with --from"
        fingerprint = self.plan.record.fingerprint
        # `state["settings"]` is a fingerprint, too. An earlier version computed it from the keys
        # and the spellings that it wrote into config.toml.
        if state["settings"] not in (fingerprint, written_fingerprint(self.run.config)):
            raise InputRefused(
                f"{self.run.config}: not what the run was begun with (expected settings of sha256 {state['settings']}, "
                f"found {fingerprint}): {remedy}"
            )
        records = self.records
        if (state["fingerprint"], state["tokenizer"]) != (
            records.fingerprint,
            records.tokenizer.digest,
        ):
            raise InputRefused(
                f"{records.name}: not what {self.run.folder} was trained on ({self.task.depends_on} changed): {remedy}"
            )
        recorded_digests = recorded_state.recorded_file_digests(state)
        digests = self.task.file_digests
        for file in sorted({*recorded_digests, *digests}):
            if recorded_digests.get(file) != digests.get(file):
                raise InputRefused(
                    f"{self.run.folder / file}: not what the run was begun with: {remedy}"
                )
        recipe = ModelRecipe.recorded(state["recipe"])
        require_same_file(recipe, self.run)
        require_base_of_run(
            self.recipe.base_sha256, recipe.base_sha256, recipe.init, self.run.folder
        )
        # Shapes are compared, not their entries: an older checkpoint lacks entries that were added
        # later, for which a shape has defaults.
        entries = state["model_config"]
        shape = LlamaConfig.from_hf(entries) if entries else None
        if recipe.entries() != self.recipe.entries() or shape != self.model_config:
            raise InputRefused(
                f"{self.run.config}: its model is not what the run was begun with: {remedy}"
            )

    def _load_weights_and_optimizer(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint's weights, optimizer state and defaults of sampling, but not its number
        of updates, which becomes 0.

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

    def begin_from(self, checkpoint: Checkpoint, parent: Run) -> None:
        """Load another run's weights and optimizer state into a new run, whose counters are 0.

        Args:
            checkpoint: the other run's checkpoint.
            parent: the other run.

        Raises:
            InputRefused: the state is not one that a run records, or its tensors do not fit this
                model.
        """
        recorded_state.require_valid(checkpoint.state, checkpoint.update, parent)
        # A parent in another precision may have no loss scale. Then this run's initial one stays.
        scalars = self.engine.state().scalars | checkpoint.state["engine"]
        completed = replace(checkpoint, state={**checkpoint.state, "engine": scalars})
        self._load_weights_and_optimizer(completed)
        self.engine.step.tokens.zero_()
        self.engine.step.skipped.zero_()

    def open_batches(
        self, rows: int, seed: int | None = None, skip: Sequence[Sequence[int]] = ()
    ) -> RunWindows:
        """Return an iterator over the run's windows.

        Args:
            rows: the number of rows, or prompts, before the first window.
            seed: the seed of the order of rows; None means the run's seed.
            skip: the rows that are passed over, as pairs (begin, end).
        """
        return self.task.windows(rows, seed, skip)

    @property
    def can_save(self) -> bool:
        """Return whether the run could be resumed from a checkpoint of the present state."""
        return self.task.can_save(self.batches)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore the buffers of the model and the loss, such as running means, and the random
        generators after the `with` block.
        """
        device = self.engine.step.device
        generators = random_state(device)
        try:
            with buffers_kept(self.engine.model, self.engine.step.loss):
                yield
        finally:
            restore_random(generators, device)

    def set_plan(self, plan: RunPlan) -> None:
        """Replace the plan by one in which more is decided. If that has the number of updates, also
        set the schedule of the learning rate.
        """
        self.plan = plan
        if plan.updates:
            self.engine.step.schedule = self.schedule()

    def schedule(self) -> Schedule:
        """Return the learning rate's schedule, with the cool-down if one has begun."""
        planned = self.plan.schedule(self.plan.updates)
        if not self.early_cool_down:
            return planned
        begin, end = self.early_cool_down
        return cool_down(planned, begin, end, self.plan.job.final_lr_share)

    def cool_down_until(self, updates: int) -> None:
        """Begin the cool-down now, and end the run after `updates` updates in all.

        If an early cool-down has begun already, only its end changes. Checkpoints record
        `early_cool_down`.
        """
        begin = self.early_cool_down[0] if self.early_cool_down else self.engine.index
        self.early_cool_down = [begin, updates]
        self.engine.step.schedule = self.schedule()


def _versions() -> dict[str, str]:
    """Return the versions on which the bits of a run depend."""
    return {
        "monograph": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
