"""The two base classes of the ways to learn (from texts, preferences, rewards or teachers).

An `Objective` is a way to learn with the values of its keys; it is known before any record is read.
`Objective.open` reads the records of one run and returns a `Task`: the records with their loss,
windows and metrics. Other rooms call the methods of these two classes, and do not ask which way to
learn a run has. `monograph.session.objectives` has a file for each way. `WAYS_TO_LEARN` in
`monograph.config.keys` is the table of the ways. Teachers are not in it, because they add to
learning from texts.

A *record* is what a run reads: a text, a pair of answers, or a prompt. A *row* is a sequence of the
model's input, which may hold several records. A *window* is the rows of one update; a run that
samples answers may make several updates from one window. A *position* is the number of rows, or of
prompts, that come before a window. *Slots* are the entries of the cache of keys and values, one for
each token of a prompt and its answer.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from torch import Tensor, nn

from monograph.config import Settings
from monograph.config.keys import TEXTS_WAY, WayToLearn
from monograph.data.batches import Batch
from monograph.data.corpus import Corpus
from monograph.data.forms import RecordSettings
from monograph.data.piece_lengths import PieceLengths
from monograph.device import Device
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.evaluation import Evaluation
from monograph.graph.trial import Trial
from monograph.loss import Loss
from monograph.model.config import LlamaConfig
from monograph.planner import defaults
from monograph.predict.footprint import AnswerScoring
from monograph.predict.roofline import Calibration
from monograph.run.folder import Run
from monograph.run.listing import Measure
from monograph.run.progress import Progress
from monograph.session.choices import STREAMED, Condition
from monograph.session.plan import RunPlan
from monograph.session.sample_prompt import SamplePrompt
from monograph.text.tokenizer import Tokenizer


class Records(Protocol):
    """The opened records of a run, of any kind."""

    @property
    def name(self) -> str:
        """Return the source as it was given."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the records' ids."""

    @property
    def fingerprint(self) -> str:
        """Return a hex SHA-256 of everything that determines the records."""

    @property
    def vocab_size(self) -> int:
        """Return the number of the tokenizer's ids."""

    @property
    def skipped(self) -> dict[str, int]:
        """Return {reason: count} of the records that were skipped."""


class RunWindows(Protocol):
    """An iterator over the windows of a run.

    Attributes:
        rows_per_window: rows, or prompts, of a window.
        rows_consumed: the position after the last window that was returned.
        skip: the positions that are passed over, as pairs (begin, end).
    """

    rows_per_window: int
    rows_consumed: int
    skip: tuple[tuple[int, int], ...]

    def __iter__(self) -> Iterator[Batch]:
        """Return the iterator itself."""

    def __next__(self) -> Batch:
        """Return the next window."""

    def state(self) -> dict[str, Any]:
        """Return the arguments with which `Session.open_batches` continues after the last window."""

    def close(self) -> None:
        """Stop preparing the next windows in the background."""


class JointWindows(Protocol):
    """An iterator over the windows of members of a sweep that train at once."""

    @property
    def left_out(self) -> set[int]:
        """Return the indices of the members that learn from no further windows. A caller may add to
        this set.
        """

    def __iter__(self) -> Iterator[Batch]:
        """Return the iterator itself."""

    def __next__(self) -> Batch:
        """Return the members' next windows as one batch."""

    def close(self) -> None:
        """Stop preparing the next windows in the background."""


class CurveOfScores(NamedTuple):
    """What the curve of the scores of held-out records shows.

    Attributes:
        name: what the scores are called on the screen.
        row_key: the key of a score in the rows of metrics.jsonl.
    """

    name: str
    row_key: str


class HeldOutScore(NamedTuple):
    """The scores of held-out records.

    Attributes:
        tokens: the tokens of training so far, which are the x axis of the displayed curve.
        figures: entries for the row of metrics.jsonl.
        point: the value on the curve's y axis; None if the curve gets no point.
        evaluation: the loss and the bits per byte; None if sampled answers are scored, not texts.
    """

    tokens: int
    figures: Mapping[str, Any]
    point: float | None
    evaluation: Evaluation | None = None


def held_out_text(count: int, share: float) -> str:
    """Return a text on how many records are held out, and why none are if the settings ask for some.

    Each record is held out with the probability `share`, so a small source may have none.

    Args:
        count: the number of records that are held out.
        share: data.held_out, the share of all records.
    """
    if count:
        return f"{count:,} held out"
    if not share:
        return "none held out"
    return f"none held out: of so few, data.held_out = {share:g} took none by chance; raise it to see how good it gets"


class DecidedObjective(NamedTuple):
    """An objective with a value for each of its keys.

    Attributes:
        objective: the objective.
        values: the values of its keys, by key, for config.toml.
    """

    objective: "Objective"
    values: Mapping[str, Any]


class WindowSize(NamedTuple):
    """The size of a window: its rows, and the tokens of each row."""

    rows: int
    length: int


class ExtraTime(NamedTuple):
    """The predicted time of an update in addition to its step.

    Attributes:
        seconds: the seconds.
        is_calibrated: whether a measurement of earlier runs has corrected them.
    """

    seconds: float
    is_calibrated: bool


class Objective(ABC):
    """A way to learn, with the values of its own keys.

    Attributes:
        way: the row of this way in `WAYS_TO_LEARN`, with its keys.
        records_can_choose: whether the form of the records chooses this way if no key chooses one;
            see `value_for_records`.
        excluded: the conditions on the settings that do not go with this way, each with the remedy
            (see `choices.excludes`).
        needs_model: whether only a model that was trained before can learn this way.
        is_of_texts: whether the records are texts, on which any model can be scored.
        lr_share: the default peak learning rate, divided by the default for texts.
        has_own_update_size: whether other keys than `train.tokens_per_update` decide how many
            records an update learns from.
        samples_answers: whether the run samples answers. The weights and a cache for this stay on
            the device, so weights cannot be streamed.
        skips_spikes: whether an update whose gradient norm is a spike is skipped by default. A way
            to learn whose gradient norms vary widely anyway says False.
        sweeps: whether a sweep can train runs that learn this way. If so, `open` returns a
            `SweptTask`.
        members_have_own_rows: whether the members of a sweep that train at once each have their own
            rows in a window, even if all have the same seed.
        compared_by: the measures on held-out records by which the members of a sweep can be
            compared. The first one that all members have is taken.
        not_prunable: why members of a sweep cannot be stopped early (`--prune`); "" if they can.
    """

    way: ClassVar[WayToLearn] = TEXTS_WAY
    records_can_choose: ClassVar[bool] = False
    excluded: ClassVar[tuple[tuple[Condition, str], ...]] = ()
    needs_model: ClassVar[bool] = False
    is_of_texts: ClassVar[bool] = True
    lr_share: ClassVar[float] = 1.0
    has_own_update_size: ClassVar[bool] = False
    samples_answers: ClassVar[bool] = False
    skips_spikes: ClassVar[bool] = True
    sweeps: ClassVar[bool] = False
    members_have_own_rows: ClassVar[bool] = False
    compared_by: ClassVar[tuple[Measure, ...]] = (
        Measure("eval_bits_per_byte", "bits/byte"),
        Measure("eval_loss", "nats"),
    )
    not_prunable: ClassVar[str] = ""

    @property
    def key(self) -> str:
        """Return the key that chooses this way; "" for texts, the way without a key."""
        return self.way.key

    @property
    def section(self) -> str:
        """Return the section of the keys that only this way has; "" without one."""
        return self.way.section

    @property
    def has_key(self) -> bool:
        """Return whether a key chooses this way. Only learning from texts needs no key."""
        return bool(self.key)

    @property
    def can_stream(self) -> bool:
        """Return whether weights may live on the host and be streamed to the device."""
        excludes_streaming = any(condition is STREAMED for condition, _ in self.excluded)
        return not self.samples_answers and not excludes_streaming

    def value_for_records(
        self, source: str | Sequence[str], record_settings: RecordSettings, skip_bad: bool
    ) -> str | None:
        """Return the value of this way's key with which it can learn from these records; None if
        the records do not have the form that it needs.

        This is called if no key in the settings chooses a way.

        Args:
            source: data.source.
            record_settings: which keys of the records are read or ignored.
            skip_bad: whether bad records are skipped.
        """
        return None

    def needs_same_records(self, value: str | None, other: str | None) -> bool:
        """Return whether two values of this way's key need the same kind of records.

        If the key is not set (None), the run learns in another way, from other records.
        """
        return value is not None and other is not None

    def is_chosen(self, settings: Settings) -> bool:
        """Return whether the settings choose this way.

        Learning from texts has no key, and so is always chosen. `WAYS_TO_LEARN` has it last,
        because the first chosen way is the one that a run takes.
        """
        return not self.has_key or settings.values()[self.key] is not None

    def records_noun(self, settings: Settings) -> str:
        """Return what messages call the records."""
        return "texts"

    def unused_key_error(self, origin: str, key: str, written: str) -> str:
        """Return the error message for a key of this way if the settings choose another way.

        Args:
            origin: where the key was given.
            key: the key.
            written: its value as it was written.
        """
        return f"{origin}: {key} is of {self.key}: give it, too"

    def require_keys(self, settings: Settings) -> None:
        """Refuse values of this way's own keys that do not go together.

        Raises:
            UsageError: two values exclude one another; the message names them.
        """

    def decide(self, settings: Settings, length: int) -> DecidedObjective:
        """Return this way with the values of its keys, after deciding those that are not given.

        Args:
            settings: the run's settings.
            length: tokens of a row.

        Raises:
            UsageError: given keys do not fit one another.
        """
        return DecidedObjective(self, {})

    def answer_scoring(self, plan: RunPlan) -> AnswerScoring:
        """Return how the loss gets the log-probabilities of answers (`Training.answer_scoring`); ""
        if there are no answers.
        """
        return ""

    def plan_of_member(self, plan: RunPlan) -> RunPlan:
        """Return the plan of a run that is a member of a sweep.

        Args:
            plan: the plan of the same run alone, before its model's shape is known.
        """
        return plan

    def require_at_once(self, plan: RunPlan) -> None:
        """Refuse to train several members of a sweep at once if that is not possible.

        Args:
            plan: the plan of one of them.

        Raises:
            UsageError: the message says why.
        """

    def extra_bytes(
        self,
        plan: RunPlan,
        config: LlamaConfig,
        machine: Device,
        slots: int = 0,
        ranks: int = 1,
        members: int = 1,
    ) -> dict[str, int]:
        """Return the bytes on the device that the run needs in addition to those of its step.

        Args:
            plan: the run's plan so far.
            config: the model's shape.
            machine: the device.
            slots: the maximum number of tokens of a prompt and its answer; 0 if the prompts are
                unknown.
            ranks: the number of ranks that train together.
            members: the number of members of a sweep that train at once.

        Returns:
            The bytes of one rank, by what they are for, such as "answers".
        """
        return {}

    def largest_window(self, plan: RunPlan, config: LlamaConfig, slots: int) -> WindowSize:
        """Return the maximum size of a window.

        It may be less than the settings allow if the prompts are known to be short.

        Args:
            plan: the run's plan.
            config: the model's shape.
            slots: the maximum number of tokens of a prompt and its answer.
        """
        return WindowSize(plan.training.window_rows, plan.training.length)

    def extra_time(
        self, plan: RunPlan, config: LlamaConfig, machine: Device, calibration: Calibration
    ) -> ExtraTime | None:
        """Predict the time that an update takes in addition to its step, e.g. to sample answers;
        None if an update is only a step.

        Args:
            plan: the run's plan.
            config: the model's shape.
            machine: the device.
            calibration: what earlier runs measured.
        """
        return None

    @abstractmethod
    def open(self, plan: RunPlan, progress: Progress) -> "Task":
        """Read the records of a run, and print how many there are; the caller closes the task.

        Raises:
            InputRefused: the records cannot be used.
        """

    def open_without_judging(self, plan: RunPlan, progress: Progress) -> "Task":
        """Read the records as `open` does, without starting the programs of a reward.

        A process that only compiles the step uses this, since it judges no answers.
        """
        return self.open(plan, progress)


class Task(ABC):
    """The opened records of one run, with their loss, windows and metrics.

    A session calls `begin` once it has an engine. Until then, only the members above `begin` can be
    used.

    Attributes:
        data: the text, pairs or prompts.
        run: the run's folder.
        engine: model and optimizer.
        world: the ranks that train together.
        current_plan: returns the session's plan, which is replaced as more is decided.
        answer_tokens: tokens of all answers so far; 0 in a run on texts.
        depends_on: what `data` is made from, for the error message if `data` has changed.
        score: the name and the key of the scores of held-out records.
        has_plain_updates: whether an update is only a step on text, so that the planner can predict
            its time.
        has_steady_updates: whether all updates take equally long, so that a slow update means that
            the machine has become slow.
        prepares_windows: whether windows are prepared in the background, so that an update does not
            wait for its window.
        is_fully_planned: whether the planner knows everything that a step computes and stores.
        saves_if_window_fails: whether a run saves a checkpoint if making a window fails.
        reaches_all_parameters: whether a trial step should give each trained parameter a gradient;
            if so, there is a warning about a parameter without one.
    """

    depends_on: ClassVar[str] = "text, tokenizer or form"
    score: ClassVar[CurveOfScores]
    has_plain_updates: ClassVar[bool] = False
    has_steady_updates: ClassVar[bool] = True
    prepares_windows: ClassVar[bool] = True
    is_fully_planned: ClassVar[bool] = True
    saves_if_window_fails: ClassVar[bool] = False
    reaches_all_parameters: ClassVar[bool] = True

    data: Records
    run: Run
    engine: Engine
    world: World
    current_plan: Callable[[], RunPlan]
    answer_tokens: int

    # ── before there is an engine ───────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Close files and end processes that the task has opened."""

    def loss(self, plan: RunPlan, model: nn.Module) -> Loss | None:
        """Return the loss of these records; None means the loss that belongs to the model.

        Raises:
            InputRefused: the model cannot learn from these records.
        """
        return None

    def slots(self, plan: RunPlan) -> int:
        """Return the maximum number of tokens of a prompt and its answer; 0 without answers."""
        return 0

    @property
    @abstractmethod
    def records_per_epoch(self) -> int:
        """Return the number of rows or prompts of an epoch."""

    @property
    def piece_lengths(self) -> PieceLengths | None:
        """Return the lengths of the documents in the rows, for the FLOPs of a token; None if rows
        are made anew for each update.
        """
        return None

    @property
    def epochs_repeat(self) -> bool:
        """Return whether a second epoch has the same content as the first."""
        return True

    def max_updates(self, rows_per_window: int, weight_decay: float) -> int | None:
        """Return the maximum number of updates of a run whose length is a time; None without a
        maximum.

        After these updates the model has seen each record as often as is useful.

        Args:
            rows_per_window: rows, or prompts, of a window.
            weight_decay: with a stronger weight decay, more epochs are useful.
        """
        if not self.epochs_repeat:
            return None
        return defaults.most_updates(self.records_per_epoch, rows_per_window, weight_decay)

    @property
    def file_digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file in the run's folder that the run learns from, by its name.

        Checkpoints record these digests. If such a file has changed, the run cannot be resumed, and
        `monograph check` names the file.
        """
        return {}

    # ── while a session trains ──────────────────────────────────────────────────────────────────

    def begin(
        self, run: Run, engine: Engine, world: World, current_plan: Callable[[], RunPlan]
    ) -> None:
        """Store these parts of the session as attributes, which the class describes."""
        self.run = run
        self.engine = engine
        self.world = world
        self.current_plan = current_plan
        self.answer_tokens = 0

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Restore `answer_tokens` in a resumed run from the rows of metrics.jsonl."""
        self.answer_tokens = next((row["tokens"] for row in reversed(rows) if "tokens" in row), 0)

    @abstractmethod
    def windows(self, position: int, seed: int | None, skip: Sequence[Sequence[int]]) -> RunWindows:
        """Return the windows from a position on.

        Args:
            position: the number of rows, or of prompts, before the first window.
            seed: the seed of the order of records; None means the run's seed.
            skip: the positions that are passed over, as pairs (begin, end).
        """

    @property
    def updates_per_window(self) -> int:
        """Return the number of updates that are made from one window."""
        return 1

    def can_save(self, windows: RunWindows) -> bool:
        """Return whether a run could be resumed from a checkpoint of the present state."""
        return True

    def prepare_reference_weights(self, resumed: bool) -> None:
        """Write the weights that the run begins from to a file if the loss needs them later; in a
        resumed run, read that file instead.

        Args:
            resumed: whether the run is resumed.

        Raises:
            InputRefused: the stored weights are lost or damaged.
            DiskFull: there is no room for them.
        """

    def prepare_reference_scores(
        self, resumed: bool, rows_per_window: int, progress: Progress
    ) -> None:
        """Score all records with the weights that the run begins from, and write the scores to a
        file, if the loss needs them; in a resumed run, read that file instead.

        Args:
            resumed: whether the run is resumed.
            rows_per_window: rows of a window.
            progress: the display.

        Raises:
            InputRefused: the stored scores are lost or damaged.
            DiskFull: there is no room for them.
        """

    def score_reference(self, rows_per_window: int, progress: Progress) -> None:
        """Score all records with the present weights if the loss needs such scores. This is called
        before the first update.

        Unlike `prepare_reference_scores`, it writes no file.

        Args:
            rows_per_window: rows of a window.
            progress: the display.
        """

    def stop_compiling(self) -> None:
        """Run eagerly what the task itself runs, such as sampling.

        This is called if compiling has failed, after the session's plan has been set to eager mode.
        """

    @property
    def extra_tensors(self) -> list[Tensor]:
        """Return the tensors that are on the device in addition to those of the step."""
        return []

    def store_measurements(self) -> None:
        """Store what this run measured about the machine, for later plans."""

    # ── what is shown and logged ────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def description(self) -> str:
        """Return a text with the source of the records and their number."""

    @abstractmethod
    def describe_trial(self, trial: Trial) -> str:
        """Return a text on the result of an eager trial step."""

    @abstractmethod
    def describe_amount(self, rows_per_window: int, updates: int) -> str:
        """Return a text on how many rows, prompts or tokens an update learns from. The text may
        also say how many that is in all `updates` updates.
        """

    @abstractmethod
    def max_tokens(self, updates: int) -> int:
        """Return the maximum number of tokens of `updates` updates, the end of the curve's x axis."""

    @abstractmethod
    def tokens_of_last_update(self, windows: RunWindows) -> float:
        """Return the number of tokens of the last update, without padding."""

    def figures(self, windows: RunWindows) -> dict[str, Any]:
        """Return entries on the answers of the last update for its row of metrics.jsonl; none for
        texts.

        The caller must call this once after each update, as it may reset counters.
        """
        return {}

    @property
    def held_out_rows(self) -> int:
        """Return the number of held-out rows; 0 if the score is of answers that are sampled to
        held-out prompts.
        """
        return 0

    @property
    @abstractmethod
    def scores_initial_weights(self) -> bool:
        """Return whether the model is scored before its first update."""

    @abstractmethod
    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore | None:
        """Score held-out records; return None if there are none.

        Args:
            rows_per_window: rows of a batch.
            limit: the maximum number of rows to score; None means all.
        """

    @abstractmethod
    def sample_prompt(self, config: LlamaConfig | None) -> SamplePrompt:
        """Return the prompt of the samples that the run shows.

        Args:
            config: the model's shape; None if it is not a Llama.
        """

    def sample(self, prompt: SamplePrompt, write: Callable[[], str | None]) -> str | None:
        """Return the prompt with what the model writes after it; None if it cannot write text.

        Args:
            prompt: the prompt.
            write: a function that returns the model's continuation of the prompt; None if it cannot
                write text.
        """
        continuation = write()
        return None if continuation is None else prompt.shown + continuation

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return entries for the run's summary, from the rows of metrics.jsonl."""
        return {}

    def doubt(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return a warning if the rows show that the model has learned nothing so far; else "".

        Args:
            rows: the rows of metrics.jsonl.
        """
        return ""

    @abstractmethod
    def describe_result(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Evaluation | None,
        yardsticks: Mapping[str, float],
    ) -> str:
        """Return a text on how good the model has become, for the end of the run's last line.

        Args:
            rows: the rows of metrics.jsonl.
            held_out: the last evaluation on held-out text; None without one.
            yardsticks: by name, the bits per byte of other models and compressors on the same text.
        """

    @property
    def text_for_compressors(self) -> Corpus | None:
        """Return the text on which compressors can be compared with the model; None if none can."""
        return None


class SweptTask(Task):
    """A task whose runs a sweep can train, several at once, and compare by held-out records.

    The members of a sweep are its runs. Each has a task of its own, with the same records. The methods
    that take `members` are called on the first of these tasks.
    """

    def for_member(self) -> Self:
        """Return a task of the same records for a member of a sweep."""
        return copy.copy(self)

    @property
    @abstractmethod
    def has_held_out(self) -> bool:
        """Return whether there are held-out records, by which members are compared."""

    @abstractmethod
    def describe_updates(self, plan: RunPlan, updates: int) -> str:
        """Return a text on what a member learns from in all its updates, for a sweep's plan.

        Args:
            plan: the member's plan.
            updates: the number of its updates.
        """

    def updates_in_epochs(self, plan: RunPlan, epochs: int) -> int:
        """Return the number of updates in which a run learns from each record `epochs` times."""
        return math.ceil(epochs * self.records_per_epoch / plan.training.window_rows)

    def first_window(self, plan: RunPlan) -> Batch:
        """Return the first window of a run, which has no session yet. This is called only if windows
        are prepared in the background.

        Args:
            plan: the run's plan.
        """
        raise NotImplementedError

    def joint_windows(
        self, members: Sequence[Self], readers: Sequence[RunWindows], engine: Engine
    ) -> JointWindows | None:
        """Return the windows of members that train at once, if they can only be made together.

        Args:
            members: the tasks of the members.
            readers: the windows of each member, as its task returns them.
            engine: the engine of all members.

        Returns:
            The windows; None if each member's windows can be read by its own iterator.

        Raises:
            UsageError: the windows of these members cannot be made together.
        """
        return None

    def copy_reference_weights(self, members: Sequence[Self], engine: Engine) -> None:
        """Copy the present weights of members that train at once if the loss needs the initial weights
        later.

        Args:
            members: the tasks of the members.
            engine: the engine of all of them, whose weights are the initial ones.
        """

    def prepare_references(
        self,
        members: Sequence[Self],
        engine: Engine,
        resumed: bool,
        rows_per_window: int,
        progress: Progress,
    ) -> None:
        """Do what `prepare_reference_weights` and `prepare_reference_scores` do, for members that train
        at once.

        Args:
            members: the tasks of the members.
            engine: the engine of all of them.
            resumed: whether they are resumed.
            rows_per_window: rows of a window of one member.
            progress: the display.
        """

    @abstractmethod
    def evaluate_members(
        self, members: Sequence[Self], engine: Engine, batch_rows: int, limit: int | None
    ) -> list[HeldOutScore | None]:
        """Score held-out records by each member of an engine.

        Args:
            members: the tasks of the members.
            engine: the engine of all of them.
            batch_rows: rows of a batch.
            limit: the maximum number of rows to score; None means all.

        Returns:
            The score of each member; None for a member that has no finite logits.
        """
