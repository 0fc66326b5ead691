"""What a run is to do, as its settings say it: which model is trained, on which records, from which
weights, and how long.

`monograph.session.door` reads the settings and makes a `Job`. Code that gets the job sees no
settings, and no path such as `last` that has to be looked up. A value that the settings leave at
"auto" is decided in the job, unless it depends on the text, the model's shape or the device.
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
from monograph.run.recipe import ModelRecipe
from monograph.run.source import ModelSource
from monograph.session.by_key import of_key
from monograph.session.new_tokens import TokenSource
from monograph.session.record import ConfigRecord
from monograph.transfer import WidthTransfer, narrowed

if TYPE_CHECKING:
    from monograph.session.objective import Objective


OpenChoice = Literal["micro_batch", "precision", "compile", "remat", "memory"]
Memory = Literal["device", "stream"]


class RequestedTransfer(NamedTuple):
    """The width transfer (`monograph.transfer`) that the settings ask for.

    Attributes:
        base: the width at which the learning rate was found; None means the default width.
        said: the text with which errors begin: the key `optim.transfer`, its value, and the place
            where the user set it.
        init: `model.init`.
    """

    base: int | None
    said: str
    init: str | None

    def of(self, config: LlamaConfig | None) -> WidthTransfer:
        """Return the rule that scales learning rates found at the width `base` for a model of this shape.

        Args:
            config: the model's shape; None if it is not a `Llama` with new random weights.

        Raises:
            UsageError: `config` is None, or this shape cannot be narrowed to the width `base` with the
                same proportions.
        """
        if config is None:
            raise UsageError(
                f"{self.said} is a rule for a new model, made by preset or sizes, not for "
                f"model.init = {self.init}; leave it at none"
            )
        try:
            return WidthTransfer(config, narrowed(config, self.base))
        except UsageError as error:
            raise UsageError(f"{self.said}: {error}") from None


class RequestedLength(NamedTuple):
    """How long a run lasts, as the settings say it.

    Attributes:
        updates: train.updates; 0 if another value gives the length.
        tokens: train.tokens; 0 if another value gives the length.
        epochs: train.epochs; None if another value gives the length.
        minutes: minutes of training, used if no other value gives the length.
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
    """Numbers of updates: of the warm-up, from one evaluation to the next, and from one checkpoint to
    the next.
    """

    warmup_updates: int
    eval_every: int
    save_every: int


class RequestedIntervals(NamedTuple):
    """`Intervals` as the settings give them; None means that the run's length decides."""

    warmup_updates: int | None
    eval_every: int | None
    save_every: int | None

    def of(self, updates: int, evaluations: int = defaults.EVALUATIONS) -> Intervals:
        """Return the intervals of a run, with defaults for those that the settings do not give.

        Args:
            updates: the number of updates of the run.
            evaluations: the default number of evaluations.
        """
        default = Intervals(
            warmup_updates=defaults.warmup(updates),
            eval_every=defaults.interval(updates, evaluations),
            save_every=defaults.interval(updates, defaults.CHECKPOINTS),
        )
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return default._replace(**given)


@dataclass(frozen=True)
class Job:
    """What a run is to do, by its settings alone.

    A `monograph.session.plan.RunPlan` has the job, and the values that are still open in it.

    Attributes:
        record: the content of config.toml.
        objective: what the model learns from (texts, rewards, pairs or teachers), with the values
            of that objective's own keys.
        source: the opened model that the run starts from; None for a new one.
        recipe: the checked recipe from which the model is built.
        sizes_text: the keys that shape the model, with their values, as an error shows them.
        reading: how the records are read. Where the user's files no longer exist, those of a resumed run
            are read from the copies in its folder.
        tokens: the model and the settings that decide which tokens are new to the model.
        transfer: the width transfer that the settings ask for; None without.
        training: how the model is trained, by all devices together. It does not have the tokens of the
            adapters yet, nor what width transfer changes in the optimizer.
        memory: where weights live.
        open_choices: the choices that the device or the planner makes later. Until then `training`
            and `memory` have defaults for them.
        is_lr_open: whether the optimizer's peak rate is a default, not the user's.
        is_decay_open: whether the optimizer's weight decay is a default, not the user's.
        final_lr_share: the share of the peak rate at which the schedule ends.
        given_tokens_per_update: tokens of an update as the settings give them; `training` rounds them to whole
            rows.
        updates: updates of the run, from train.updates or train.tokens; 0 if neither is given.
        span: how long the run lasts, as the settings say it.
        intervals: the updates of the warm-up, from one evaluation to the next, and from one checkpoint
            to the next.
        schedule_name: the learning rate's schedule.
        keep: the number of checkpoints that stay.
        parallel: how several devices share the work.
        gather_dtype: the dtype in which ranks send each other their rows of weights.
        mtp_weight: the factor of the loss of a head for multi-token prediction; None: the default.
    """

    record: ConfigRecord
    objective: Objective
    source: ModelSource | None
    recipe: ModelRecipe
    sizes_text: str
    reading: ReadingOptions
    tokens: TokenSource
    transfer: RequestedTransfer | None
    training: Training
    memory: Memory
    open_choices: frozenset[OpenChoice]
    is_lr_open: bool
    is_decay_open: bool
    final_lr_share: float
    given_tokens_per_update: int
    updates: int
    span: RequestedLength
    intervals: RequestedIntervals
    # `of_key` names the key of config.toml whose value the field gets.
    schedule_name: str = of_key("optim.schedule")
    keep: int = of_key("train.keep")
    parallel: str = of_key("train.parallel")
    gather_dtype: str = of_key("train.gather_dtype")
    mtp_weight: float | None = of_key("train.mtp_weight")

    @property
    def seed(self) -> int:
        """Return the seed of the weights and of the order of records."""
        return self.recipe.seed

    def adapters(self, tokens: tuple[int, ...] = ()) -> Lora | None:
        """Return the options of the adapters; None without adapters.

        Args:
            tokens: ids of the tokens whose rows are trained together with the adapters.
        """
        lora = self.training.lora
        if lora is None:
            return None
        lora = replace(lora, tokens=tokens)
        few_bits = self.source.few_bits if self.source else None
        if few_bits is None or few_bits.base != lora.base:
            return lora
        # The folder's codes are kept, and the layers that it does not quantise stay as they are.
        return replace(lora, dense=few_bits.dense, exact_scales=lora.base == "nf4")

    def transfer_to(self, config: LlamaConfig | None) -> WidthTransfer | None:
        """Return the rule that scales learning rates for a model of this shape; None without width
        transfer.

        Raises:
            UsageError: see `RequestedTransfer.of`.
        """
        return self.transfer.of(config) if self.transfer else None
