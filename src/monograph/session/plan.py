"""The plan of a run: its settings with every "auto" decided, as plain numbers and names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from monograph.distributed.world import place
from monograph.model.config import LlamaConfig
from monograph.planner import Candidate, StreamCandidate
from monograph.planner.defaults import EVALUATIONS
from monograph.predict.footprint import Training
from monograph.run.recipe import Recipe
from monograph.schedule import Schedule, constant, warmup_cosine, warmup_stable_decay
from monograph.session.job import Job
from monograph.session.record import ConfigRecord
from monograph.stream import Placement
from monograph.transfer import WidthTransfer

OpenChoice = Literal["micro_batch", "compile", "remat", "memory"]


@dataclass(frozen=True)
class Plan:
    """The decided values of a run. `monograph.session.resolve.resolve` sets them; other code only
    reads them.

    Attributes:
        job: what the settings ask for.
        record: what config.toml says; a decided "auto" is noted there once nothing can change it.
        recipe: the checked recipe from which the model is built.
        reading: the arguments of `monograph.corpus`.
        seed: seed of the weights and of the order of rows.
        training: how the model is trained, by all devices together except for `rows`, which are one
            device's; a `Work` once the shape of a Llama is known, its optimizer with the changes of
            width transfer.
        minutes: minutes of training, used if neither updates nor epochs are given.
        wall_minutes: minutes of the whole run; None if they are not limited.
        epochs: passes over the text; None if another key gives the run's length.
        schedule_name: the learning rate's schedule; final: the share of the peak rate that it falls
            to.
        parallel: how several devices share the work.
        gather_dtype: the dtype in which shared weights are sent.
        memory: where weights live.
        open: the choices that the planner makes once the model's shape is known; until then
            `training` and `memory` have their usual values there.
        transfer: the rule by which rates are carried to this width; None without width transfer.
        expected: the planner's prediction for the step; None if the planner was not asked.
        beside: bytes that the run holds beside its step, by origin.
        updates: updates of the whole run, 0 until known; warmup_updates, eval_every and save_every
            depend on it.
    """

    job: Job
    record: ConfigRecord
    recipe: Recipe
    reading: Mapping[str, Any]
    seed: int
    training: Training
    minutes: float
    wall_minutes: float | None
    epochs: int | None
    schedule_name: str
    final: float
    parallel: str
    gather_dtype: str
    memory: Literal["device", "stream"] = "device"
    open: frozenset[OpenChoice] = frozenset()
    transfer: WidthTransfer | None = None
    expected: Candidate | None = None
    beside: Mapping[str, int] = field(default_factory=dict)
    updates: int = 0
    warmup_updates: int = 0
    eval_every: int = 1
    save_every: int = 1

    @property
    def averaged(self) -> bool:
        """Return whether an average of the weights is kept and scored."""
        return self.training.optim.ema is not None

    @property
    def choices(self) -> dict[str, Any]:
        """Return the value of each choice by its key in [train]."""
        training = self.training
        return {
            "micro_batch": training.rows,
            "compile": training.compile,
            "remat": training.remat,
            "memory": self.memory,
        }

    def training_with(self, **decided: Any) -> "Plan":
        """Return the plan with these fields of `training` decided otherwise."""
        return replace(self, training=replace(self.training, **decided))

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
        if self.schedule_name == "constant":
            return constant(self.warmup_updates)
        course = warmup_stable_decay if self.schedule_name == "wsd" else warmup_cosine
        return course(self.warmup_updates, updates, final=self.final)


FP32_BYTES = 4


def is_sharded(parallel: str) -> bool:
    """Return whether a rank holds some rows of each weight, by `train.parallel`."""
    return parallel in ("fsdp", "hsdp")


def sharing(parallel: str, ranks: int) -> int:
    """Return how many of the ranks share out the rows of each weight, by `train.parallel`."""
    own = place(srun=True) if parallel == "hsdp" else None
    return own.near if own else ranks if is_sharded(parallel) else 1


class Shape(NamedTuple):
    """The facts about a run's model that are known once the text is read.

    Attributes:
        config: the model's shape, with a row for each token; None for a module that is not a Llama.
        tokens: ids of the tokens whose rows are trained together with adapters.
        ranks: number of processes that train the model together.
        like: the plan of another run of the same shape, whose choices are taken over.
        slots: the most tokens of a prompt and its answer; 0 as long as the prompts are unknown.
        per_epoch: rows of an epoch of the text; 0 as long as it is unknown.
        minutes: how long a run by the clock trains; 0 for one whose share of the time is unknown,
            as in a sweep.
    """

    config: LlamaConfig | None
    tokens: tuple[int, ...] = ()
    ranks: int = 1
    like: Plan | None = None
    slots: int = 0
    per_epoch: int = 0
    minutes: float = 0


class Length(NamedTuple):
    """The number of updates of a run, once that is known, and the default number of its
    evaluations.
    """

    updates: int
    evaluations: int = EVALUATIONS
