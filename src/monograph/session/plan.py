"""The plan of a run: its settings with every "auto" replaced by a number or a name.

`session.resolve` decides these values step by step, so some fields of a plan are set only later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from monograph.distributed.world import read_place
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
    """A job with the values that were decided for it.

    Only `monograph.session.resolve.resolve` decides values; other code reads them.

    Attributes:
        job: what the settings ask for.
        training: how all devices together train the model. Only `rows` is about one device: it is
            the device's micro-batch. Once the shape of a `Llama` is known, `training` is a `Work`
            (`predict.footprint`), and its optimizer has the changes of width transfer.
        memory: where weights live.
        open_choices: the choices that the planner still has to make once the model's shape is
            known. Until then `training` and `memory` have defaults for them.
        intervals: updates of the warm-up, between evaluations and between checkpoints; they depend
            on `updates`.
        transfer: the rule that carries learning rates to this width; None without width transfer.
        expected: the planner's prediction for the step; None if the planner was not asked.
        extra_bytes: the bytes on the device that the run needs in addition to those of its step, by
            what they are for (`Objective.extra_bytes`).
        updates: updates of the whole run; 0 until they are known.
        decided_values: the decided values by their keys, as config.toml records them.
    """

    job: Job
    training: Training
    memory: Memory
    open_choices: frozenset[OpenChoice]
    intervals: Intervals
    transfer: WidthTransfer | None = None
    expected: Candidate | None = None
    extra_bytes: Mapping[str, int] = field(default_factory=dict)
    updates: int = 0
    decided_values: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def record(self) -> ConfigRecord:
        """Return the content of config.toml: the job's settings with the decided values."""
        if not self.decided_values:
            return self.job.record
        return self.job.record.with_decided_values(self.decided_values)

    @property
    def averaged(self) -> bool:
        """Return whether an average of the weights is kept and scored."""
        return self.training.optim.ema is not None

    @property
    def choices(self) -> dict[str, Any]:
        """Return the present values of the choices, which may still be open, by their keys in
        [train].
        """
        training = self.training
        return {
            "micro_batch": training.rows,
            "compile": training.compile,
            "remat": training.remat,
            "memory": self.memory,
        }

    @property
    def requested_memory(self) -> Memory | Literal["auto"]:
        """Return where weights live, or "auto" if the planner chooses."""
        return "auto" if "memory" in self.open_choices else self.memory

    def with_training(self, training: Training) -> "RunPlan":
        """Return the plan with another `training`."""
        return replace(self, training=training)

    def with_decided_values(self, values: Mapping[str, Any]) -> "RunPlan":
        """Return the plan with more decided values, by their keys."""
        return replace(self, decided_values={**self.decided_values, **values})

    @property
    def peak_memory_bytes(self) -> int | None:
        """Return the predicted bytes at the peak; None if the planner was not asked."""
        if self.expected is None:
            return None
        return self.expected.peak_memory_bytes + sum(self.extra_bytes.values())

    @property
    def placement(self) -> Placement | None:
        """Return where the buffers of a streamed model live; None for a model that is not streamed."""
        return self.expected.placement if isinstance(self.expected, StreamCandidate) else None

    def schedule(self, updates: int) -> Schedule:
        """Return the learning rate's schedule over `updates` updates."""
        named = SCHEDULES[self.job.schedule_name]
        return named.make(self.intervals.warmup_updates, updates, self.job.final_lr_share)


FP32_BYTES = 4


def is_sharded(parallel: str) -> bool:
    """Return whether each rank holds only some rows of each weight with this `train.parallel`."""
    return parallel in ("fsdp", "hsdp")


def ranks_that_share(parallel: str, ranks: int) -> int:
    """Return the number of ranks among which the rows of each weight are divided.

    Args:
        parallel: `train.parallel`. "hsdp" divides the rows among the ranks of one machine.
        ranks: the number of all ranks.
    """
    # The place of this process among those that torchrun or srun has started; None if it is alone.
    own_place = read_place(srun=True) if parallel == "hsdp" else None
    if own_place:
        return own_place.machine_size
    return ranks if is_sharded(parallel) else 1


class Shape(NamedTuple):
    """The facts about a run's model that are known once the text is read.

    Attributes:
        config: the model's shape, with an embedding row for each token; None for a module that is
            not a Llama.
        tokens: ids of the tokens whose embedding rows are trained together with adapters.
        ranks: number of processes that train the model together.
        like: the plan of another run with the same shape, whose choices this run takes; None lets
            the planner choose.
        slots: the maximum number of tokens of a prompt and its answer; 0 if the prompts are unknown
            or there are none.
        records_per_epoch: rows or prompts of an epoch; 0 if their number is unknown, or if epochs
            do not repeat (`Task.epochs_repeat`).
        minutes: the training time of a run whose length is a time; 0 if it is unknown, as in a
            sweep, whose members share the time.
    """

    config: LlamaConfig | None
    tokens: tuple[int, ...] = ()
    ranks: int = 1
    like: RunPlan | None = None
    slots: int = 0
    records_per_epoch: int = 0
    minutes: float = 0


class Length(NamedTuple):
    """The number of updates of a run, and the default number of its evaluations."""

    updates: int
    evaluations: int = EVALUATIONS
