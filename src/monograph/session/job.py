"""What a run is to do, as its settings say it: what is trained, on what, from which weights,
recorded where.

`monograph.session.door` reads the settings and makes a `Job`; below it no settings are seen, no
path that might be `last`, and no "auto" but those that the text, the model's shape or the device
decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from monograph.data.options import ReadingOptions
from monograph.errors import UsageError
from monograph.graph.lora import Lora
from monograph.model.config import LlamaConfig
from monograph.planner import defaults
from monograph.predict.footprint import Training
from monograph.run.recipe import Recipe
from monograph.run.source import ModelSource
from monograph.session.by_key import of_key
from monograph.session.new_tokens import TokenSource
from monograph.session.record import ConfigRecord
from monograph.transfer import WidthTransfer, narrowed

if TYPE_CHECKING:
    from monograph.session.objective import Objective


OpenChoice = Literal["micro_batch", "precision", "compile", "remat", "memory"]
Memory = Literal["device", "stream"]


class AskedTransfer(NamedTuple):
    """The width transfer that is asked for.

    Attributes:
        base: the width at which the learning rate was found; None: a usual one.
        said: `optim.transfer`, as an error begins with it.
        init: `model.init`.
    """

    base: int | None
    said: str
    init: str | None

    def of(self, config: LlamaConfig | None) -> WidthTransfer:
        """Return the rule that carries rates to a model of this shape.

        Args:
            config: the model's shape; None if it is not a Llama whose weights are drawn here.

        Raises:
            UsageError: this is another kind of model, or the width does not keep the shape's
                ratios.
        """
        if config is None:
            raise UsageError(
                f"{self.said} is a rule for a model whose weights are drawn here, by preset or sizes, not for "
                f"model.init = {self.init}; leave it at none"
            )
        try:
            return WidthTransfer(config, narrowed(config, self.base))
        except UsageError as error:
            raise UsageError(f"{self.said}: {error}") from None


class AskedLength(NamedTuple):
    """How long a run lasts.

    Attributes:
        updates: its updates; 0 if other values, or the clock, give them. tokens: its tokens; 0,
            too.
        epochs: passes over the text; None if another value gives the length.
        minutes: minutes of training, used if neither updates nor epochs are given.
        wall_minutes: minutes of the whole run; None if they are not limited.
        is_timed: whether the user gave the minutes of training.
    """

    updates: int
    tokens: int
    epochs: int | None
    minutes: float
    wall_minutes: float | None
    is_timed: bool


class Intervals(NamedTuple):
    """Updates of the warm-up, between evaluations and between checkpoints."""

    warmup_updates: int
    eval_every: int
    save_every: int


class AskedIntervals(NamedTuple):
    """`Intervals` as they are asked for; None where the run's length decides."""

    warmup_updates: int | None
    eval_every: int | None
    save_every: int | None

    def of(self, updates: int, evaluations: int = defaults.EVALUATIONS) -> Intervals:
        """Return the intervals of a run of so many updates, which is evaluated so often where
        nothing else is asked.
        """
        usual = (
            defaults.warmup(updates),
            defaults.interval(updates, evaluations),
            defaults.interval(updates, defaults.CHECKPOINTS),
        )
        return Intervals(
            *(given if other is None else other for other, given in zip(self, usual, strict=True))
        )


@dataclass(frozen=True)
class Job:
    """What a run is to do, by its settings alone. A `monograph.session.plan.Plan` holds it, and
    decides what is open.

    Attributes:
        record: what config.toml says of it.
        objective: the way to learn, with the values of its own keys.
        source: the model that the run starts from, opened; None for a new one.
        recipe: the checked recipe from which the model is built.
        sizes_said: the keys that shape the model, with their values, as an error shows them.
        reading: how the records are read, with copies in the place of files that are gone.
        tokens: what decides which tokens are new to the model.
        transfer: the width transfer that is asked for; None without.
        training: how the model is trained, by all devices together. Its optimizer is without the
            changes of width transfer, and its adapters without the tokens whose rows are trained
            with them.
        memory: where weights live.
        open: the choices that the device or the planner makes; `training` and `memory` have their
            usual values there.
        is_rate_open: whether the optimizer's rate is a usual one; is_decay_open: whether its weight
            decay is.
        final: the share of the peak rate that the schedule falls to.
        asked_tokens: tokens of an update, as they were asked for; those of `training` are in whole
            rows.
        updates: its updates, if they or its tokens are given; else 0.
        span: how long the run lasts.
        intervals: how often something is done.
        schedule_name: the learning rate's schedule.
        keep: the number of checkpoints that stay.
        parallel: how several devices share the work; gather_dtype: the dtype in which shared
            weights are sent.
    """

    record: ConfigRecord
    objective: Objective
    source: ModelSource | None
    recipe: Recipe
    sizes_said: str
    reading: ReadingOptions
    tokens: TokenSource
    transfer: AskedTransfer | None
    training: Training
    memory: Memory
    open: frozenset[OpenChoice]
    is_rate_open: bool
    is_decay_open: bool
    final: float
    asked_tokens: int
    updates: int
    span: AskedLength
    intervals: AskedIntervals
    schedule_name: str = of_key("optim.schedule")
    keep: int = of_key("train.keep")
    parallel: str = of_key("train.parallel")
    gather_dtype: str = of_key("train.gather_dtype")

    @property
    def seed(self) -> int:
        """Return the seed of the weights and of the order of records."""
        return self.recipe.seed

    def adapters(self, tokens: tuple[int, ...] = ()) -> Lora | None:
        """Return the options of adapters with the ids of tokens whose rows are trained with them;
        None without.
        """
        lora = self.training.lora
        return replace(lora, tokens=tokens) if lora else None

    def transfer_to(self, config: LlamaConfig | None) -> WidthTransfer | None:
        """Return the rule that carries rates to a model of this shape; None without width transfer.

        Raises:
            UsageError: see `AskedTransfer.of`.
        """
        return self.transfer.of(config) if self.transfer else None
