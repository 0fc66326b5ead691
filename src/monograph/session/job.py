"""What a run is to do, as its settings say it: what is trained, on what, from which weights,
recorded where.

`monograph.session.door` reads the settings and makes a `Job`; below it no settings are seen, no
path that might be `last`, and no "auto" but those that the text, the model's shape or the device
decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from monograph.errors import UsageError
from monograph.graph.lora import Lora
from monograph.model.config import LlamaConfig
from monograph.optim import Optimizer
from monograph.predict.footprint import Compile
from monograph.run.recipe import Recipe
from monograph.run.source import ModelSource
from monograph.session.new_tokens import TokenSource
from monograph.session.record import ConfigRecord
from monograph.step import Clip
from monograph.transfer import WidthTransfer, narrowed

if TYPE_CHECKING:
    from monograph.session.objective import Objective


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
    """Updates of the warm-up, between evaluations and between checkpoints; None where the run's
    length decides.
    """

    warmup_updates: int | None
    eval_every: int | None
    save_every: int | None


@dataclass(frozen=True)
class Job:
    """What a run is to do. Nothing here changes any more; what is still open is a field of
    `monograph.session.plan`.

    Attributes:
        record: what config.toml says.
        objective: the way to learn, with the values of its own keys.
        source: the model that the run starts from, opened; None for a new one.
        recipe: the checked recipe from which the model is built.
        sizes_said: the keys that shape the model, with their values, as an error shows them.
        reading: the arguments of `monograph.corpus`, with copies in the place of files that are
            gone.
        tokens: what decides which tokens are new to the model.
        lora: the options of adapters, without the tokens whose rows are trained with them; None
            without adapters.
        transfer: the width transfer that is asked for; None without.
        optim: the optimizer, without the changes of width transfer; its rate and weight decay are
            usual ones where `is_rate_open` and `is_decay_open` say so.
        clip: the clipping of the gradient norm; None without clipping.
        schedule_name: the learning rate's schedule; final: the share of the peak rate that it falls
            to.
        asked_tokens: tokens of an update, as they were asked for; tokens_per_update: in whole rows.
        updates: its updates, if they or its tokens are given; else 0.
        span: how long the run lasts.
        intervals: how often something is done.
        keep: the number of checkpoints that stay.
        precision: the precision of the arithmetic, or "auto".
        parallel: how several devices share the work; gather_dtype: the dtype in which shared
            weights are sent.
        micro_batch: rows that one device computes at once.
        compile: the scope of a graph.
        remat: what is recomputed.
        memory: where weights live. Each of these four may be "auto", the planner's choice.
    """

    record: ConfigRecord
    objective: Objective
    source: ModelSource | None
    recipe: Recipe
    sizes_said: str
    reading: Mapping[str, Any]
    tokens: TokenSource
    lora: Lora | None
    transfer: AskedTransfer | None
    optim: Optimizer
    is_rate_open: bool
    is_decay_open: bool
    clip: Clip | None
    schedule_name: str
    final: float
    asked_tokens: int
    tokens_per_update: int
    updates: int
    span: AskedLength
    intervals: Intervals
    keep: int
    precision: str
    parallel: str
    gather_dtype: str
    micro_batch: int | Literal["auto"]
    compile: Compile | Literal["auto"]
    remat: str | float
    memory: Literal["auto", "device", "stream"]

    def adapters(self, tokens: tuple[int, ...] = ()) -> Lora | None:
        """Return the options of adapters with the ids of tokens whose rows are trained with them;
        None without.
        """
        return replace(self.lora, tokens=tokens) if self.lora else None

    def transfer_to(self, config: LlamaConfig | None) -> WidthTransfer | None:
        """Return the rule that carries rates to a model of this shape; None without width transfer.

        Raises:
            UsageError: see `AskedTransfer.of`.
        """
        return self.transfer.of(config) if self.transfer else None
