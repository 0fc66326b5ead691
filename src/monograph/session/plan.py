"""The plan of a run: its settings with every "auto" decided, as plain numbers and names.

It is made in steps (`session.resolve`), so some of its fields are known only later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from monograph.distributed.world import place
from monograph.model.config import LlamaConfig
from monograph.planner import Candidate, StreamCandidate
from monograph.planner.defaults import EVALUATIONS
from monograph.predict.footprint import Training
from monograph.schedule import SCHEDULES, Schedule
from monograph.session.job import Intervals, Job, Memory, OpenChoice
from monograph.session.record import ConfigRecord
from monograph.stream import Placement
from monograph.transfer import WidthTransfer


@dataclass(frozen=True)
class RunPlan:
    """A job with the decisions on it. `monograph.session.resolve.resolve` decides; other code only
    reads.

    Attributes:
        job: what the settings ask for.
        training: how the model is trained: by all devices together, except that `rows` is one
            device's micro-batch. Once the shape of a `Llama` is known, it is a `Work`
            (`predict.footprint`), and its optimizer has the changes of width transfer.
        memory: where weights live.
        open: the choices that the planner makes once the model's shape is known. Until then
            `training` and `memory` have defaults there.
        intervals: updates of the warm-up, between evaluations and between checkpoints; they depend
            on `updates`.
        transfer: the rule that carries learning rates to this width; None without width transfer.
        expected: the planner's prediction for the step; None if the planner was not asked.
        beside: bytes that the run holds in addition to its step, by origin.
        updates: updates of the whole run; 0 until they are known.
        noted: the decided values by their keys, as config.toml records them.
    """

    job: Job
    training: Training
    memory: Memory
    open: frozenset[OpenChoice]
    intervals: Intervals
    transfer: WidthTransfer | None = None
    expected: Candidate | None = None
    beside: Mapping[str, int] = field(default_factory=dict)
    updates: int = 0
    noted: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def record(self) -> ConfigRecord:
        """Return the content of config.toml: the job's settings with the decided values."""
        return self.job.record.noted(self.noted) if self.noted else self.job.record

    @property
    def averaged(self) -> bool:
        """Return whether an average of the weights is kept and scored."""
        return self.training.optim.ema is not None

    @property
    def choices(self) -> dict[str, Any]:
        """Return the present value of each choice by its key in [train]; it may still be open."""
        training = self.training
        return {
            "micro_batch": training.rows,
            "compile": training.compile,
            "remat": training.remat,
            "memory": self.memory,
        }

    @property
    def asked_memory(self) -> Memory | Literal["auto"]:
        """Return what the planner is asked for: where weights live, or "auto" if it chooses."""
        return "auto" if "memory" in self.open else self.memory

    def having(self, training: Training) -> "RunPlan":
        """Return the plan with another `training`."""
        return replace(self, training=training)

    def noting(self, values: Mapping[str, Any]) -> "RunPlan":
        """Return the plan with `values`, by their keys, added to `noted`."""
        return replace(self, noted={**self.noted, **values})

    @property
    def peak_memory_bytes(self) -> int | None:
        """Return the predicted bytes at the peak; None if the planner was not asked."""
        return (
            self.expected.peak_memory_bytes + sum(self.beside.values()) if self.expected else None
        )

    @property
    def placement(self) -> Placement | None:
        """Return where the buffers of a streamed model live; None for a model that is not streamed."""
        return self.expected.placement if isinstance(self.expected, StreamCandidate) else None

    def schedule(self, updates: int) -> Schedule:
        """Return the learning rate's schedule over `updates` updates."""
        named = SCHEDULES[self.job.schedule_name]
        return named.make(self.intervals.warmup_updates, updates, self.job.final)


FP32_BYTES = 4


def is_sharded(parallel: str) -> bool:
    """Return whether each rank holds only some rows of each weight with this `train.parallel`."""
    return parallel in ("fsdp", "hsdp")


def sharing(parallel: str, ranks: int) -> int:
    """Return the number of ranks among which the rows of each weight are divided.

    Args:
        parallel: `train.parallel`. "hsdp" divides the rows among the ranks of one machine.
        ranks: the number of all ranks.
    """
    own = place(srun=True) if parallel == "hsdp" else None
    if own:
        return own.machine_size
    return ranks if is_sharded(parallel) else 1


class Shape(NamedTuple):
    """The facts about a run's model that are known once the text is read.

    Attributes:
        config: the model's shape, with a row for each token; None for a module that is not a Llama.
        tokens: ids of the tokens whose rows are trained together with adapters.
        ranks: number of processes that train the model together.
        like: the plan of another run of the same shape, whose choices this run takes; None lets the
            planner choose.
        slots: the maximum number of tokens of a prompt and its answer; 0 if the prompts are unknown
            or there are none.
        per_epoch: rows of an epoch of the text; 0 if it is unknown.
        minutes: the training time of a run by the clock; 0 if it is unknown, as in a sweep, whose
            members share the time.
    """

    config: LlamaConfig | None
    tokens: tuple[int, ...] = ()
    ranks: int = 1
    like: RunPlan | None = None
    slots: int = 0
    per_epoch: int = 0
    minutes: float = 0


class Length(NamedTuple):
    """The number of updates of a run, and the default number of its evaluations."""

    updates: int
    evaluations: int = EVALUATIONS
