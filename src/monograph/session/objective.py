"""The two base classes of the ways to learn (from texts, preferences, rewards or teachers).

An `Objective` is what the settings say, and is known before any record is read. A `Task` is what an
objective opens: the records of one run, with their loss, windows and figures. Other rooms call
these two classes, and do not ask which kind of run they have. `monograph.session.objectives` has a
file for each kind. `WAYS_TO_LEARN` in `monograph.config.keys` is the table of all but teachers, which
add to learning from texts.

A *record* is what a run reads: a text, a pair of answers, or a prompt. A *window* is the batch of
one update, or of several in a run on answers; a *position* in the records counts those before it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from monograph.config import Settings
from monograph.config.keys import TEXTS_WAY, WayToLearn
from monograph.data.batches import Batch
from monograph.data.corpus import Corpus
from monograph.data.forms import RecordSettings
from monograph.device import Device
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.evaluation import Evaluation
from monograph.graph.trial import Trial
from monograph.loss import Loss
from monograph.model.config import LlamaConfig
from monograph.planner import defaults
from monograph.predict.footprint import Judged
from monograph.predict.roofline import Calibration
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.session.choices import STREAMED, Condition
from monograph.session.opening import Opening
from monograph.session.plan import RunPlan
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
        rows_per_window: records of a window.
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
        """Return the arguments of `Session.open_batches` for the windows that come next."""

    def close(self) -> None:
        """Stop preparing windows ahead."""


class HeldOutScore(NamedTuple):
    """The scores of held-out records.

    Attributes:
        tokens: the tokens of training so far, the point's place on the curve's axis.
        figures: entries for the row of metrics.jsonl.
        point: the number that the curve shows; None without a curve.
        evaluation: the loss and the bits per byte; None if answers are scored, not texts.
    """

    tokens: int
    figures: Mapping[str, Any]
    point: float | None
    evaluation: Evaluation | None = None


def held_out_said(count: int, share: float) -> str:
    """Return a text on how many records are held out, and why none are if the settings ask for some.

    Args:
        count: the number of records that are held out.
        share: data.held_out, the share of all records.
    """
    if count:
        return f"{count:,} held out"
    if not share:
        return "none held out"
    return f"none held out: of so few, data.held_out = {share:g} took none by chance; raise it to see how good it gets"


class Opened(NamedTuple):
    """An objective whose own keys are decided.

    Attributes:
        objective: the objective.
        values: the decided values by their dotted keys, which config.toml records.
    """

    objective: "Objective"
    values: Mapping[str, Any]


class Objective(ABC):
    """A way to learn, with the values of its own keys.

    Attributes:
        way: the row of this way in `WAYS_TO_LEARN`, with its keys.
        by_records: whether records alone, without a key, can choose this way; see `of_records`.
        excluded: the choices that do not go with this way, each with what to do instead.
        needs_model: whether only a model that was trained before can learn this way.
        is_of_texts: whether the records are texts, which any model can be scored on.
        rate_share: the default peak learning rate, as a share of the one for texts.
        is_own_length: whether other keys than `train.tokens_per_update` decide how much an update
            learns from.
        answers_on_device: whether the run samples answers, for which weights and a cache are on the
            device beside the step; weights then cannot be streamed.
        finds_spikes: whether gradient norms are even enough that a much larger one is a spike,
            which is skipped by default.
    """

    way: ClassVar[WayToLearn] = TEXTS_WAY
    by_records: ClassVar[bool] = False
    excluded: ClassVar[tuple[tuple[Condition, str], ...]] = ()
    needs_model: ClassVar[bool] = False
    is_of_texts: ClassVar[bool] = True
    rate_share: ClassVar[float] = 1.0
    is_own_length: ClassVar[bool] = False
    answers_on_device: ClassVar[bool] = False
    finds_spikes: ClassVar[bool] = True

    @property
    def key(self) -> str:
        """Return the key that chooses this way; "" for texts, the way without a key."""
        return self.way.key

    @property
    def section(self) -> str:
        """Return the section of the keys that only this way has; "" without one."""
        return self.way.section

    @property
    def is_named(self) -> bool:
        """Return whether a key chooses this way. If none does, a new run may take its parent's way."""
        return bool(self.key)

    @property
    def can_stream(self) -> bool:
        """Return whether weights may live on the host."""
        return not self.answers_on_device and all(
            condition is not STREAMED for condition, _ in self.excluded
        )

    def of_records(
        self, source: str | Sequence[str], asked: RecordSettings, skip_bad: bool
    ) -> str | None:
        """Return the value that this way's key gets if the records themselves choose the way; None
        if they do not.

        This is called if no key in the settings chooses a way.

        Args:
            source: data.source.
            asked: what the settings say of the records' keys.
            skip_bad: whether bad records are skipped.
        """
        return None

    def learns_alike(self, one: str | None, other: str | None) -> bool:
        """Return whether two values of this way's key need the same kind of records."""
        return None not in (one, other)

    def is_chosen(self, settings: Settings) -> bool:
        """Return whether the settings choose this way."""
        return not self.key or settings.values()[self.key] is not None

    def records(self, settings: Settings) -> str:
        """Return what messages call the records."""
        return "texts"

    def unused(self, origin: str, key: str, written: str) -> str:
        """Return the message that refuses a key of this way, which another way does not use.

        Args:
            origin: where the key was given.
            key: the key.
            written: its value.
        """
        return f"{origin}: {key} is of {self.key}: give it, too"

    def require_keys(self, settings: Settings) -> None:
        """Refuse values of this way's own keys that do not go together.

        Raises:
            UsageError: two values exclude one another; the message names them.
        """

    def opened(self, settings: Settings, length: int) -> Opened:
        """Return this way with its own keys decided.

        Args:
            settings: the run's settings.
            length: positions of a row.

        Raises:
            UsageError: given keys do not fit one another.
        """
        return Opened(self, {})

    def judged(self, plan: RunPlan) -> Judged:
        """Return how answers are judged, as the planner needs to know it; "" without answers."""
        return ""

    def bytes_beside(
        self, plan: RunPlan, config: LlamaConfig, machine: Device, slots: int = 0, ranks: int = 1
    ) -> dict[str, int]:
        """Return the bytes that a run holds in addition to its step, by origin.

        Args:
            plan: the run's plan so far.
            config: the model's shape.
            machine: the device.
            slots: the maximum number of tokens of a prompt and its answer; 0 if the prompts are
                unknown.
            ranks: the number of ranks that train together; the bytes are those of one rank.
        """
        return {}

    def largest_window(self, plan: RunPlan, config: LlamaConfig, slots: int) -> tuple[int, int]:
        """Return the maximum number of rows of an update, and of tokens of a row, as far as the
        records are known to need less than the settings allow.

        Args:
            plan: the run's plan.
            config: the model's shape.
            slots: the maximum number of tokens of a prompt and its answer.
        """
        return plan.training.window_rows, plan.training.length

    def seconds_beside(
        self, plan: RunPlan, config: LlamaConfig, machine: Device, known: Calibration
    ) -> tuple[float, bool] | None:
        """Return the seconds that an update takes in addition to its step, e.g. to sample answers.

        Args:
            plan: the run's plan.
            config: the model's shape.
            machine: the device.
            known: what earlier runs measured.

        Returns:
            The seconds, and whether measurements corrected them; None if an update is only a step.
        """
        return None

    @abstractmethod
    def open(self, plan: RunPlan, progress: Progress) -> "Task":
        """Read the records of a run, and print how many there are; the caller closes the task.

        Raises:
            InputRefused: the records cannot be used.
        """

    def open_unjudged(self, plan: RunPlan, progress: Progress) -> "Task":
        """Read the records as `open` does, for a process that judges no answers: it starts no
        process that judges them.
        """
        return self.open(plan, progress)


class Task(ABC):
    """The opened records of one run, with what belongs to them.

    Until a session calls `begin`, only the records themselves, `loss`, `slots` and the epoch's size
    can be used.

    Attributes:
        data: the text, pairs or prompts.
        run: the run's folder.
        engine: model and optimizer.
        world: the ranks that train together.
        plan: returns the session's present plan.
        answer_tokens: tokens of all answers so far; 0 in a run on texts.
        depends_on: what `data` is made from, for the message that it has changed.
        score: the name of the curve's figure on held-out records, and its entry in metrics.jsonl.
        is_plain: whether an update is only a step on text, so that the planner can predict its time.
        is_steady: whether all updates take equally long, so that slow ones mean a slow machine.
        is_ready: whether windows are prepared ahead, so that an update does not wait for them.
        is_foreseen: whether the planner knows everything that a step computes and holds.
        saves_if_refused: whether a run saves a checkpoint if making a window fails.
        reaches_all: whether a trial step should give each trained parameter a gradient.
    """

    depends_on: ClassVar[str] = "text, tokenizer or form"
    score: ClassVar[tuple[str, str]]
    is_plain: ClassVar[bool] = False
    is_steady: ClassVar[bool] = True
    is_ready: ClassVar[bool] = True
    is_foreseen: ClassVar[bool] = True
    saves_if_refused: ClassVar[bool] = False
    reaches_all: ClassVar[bool] = True

    data: Records
    run: Run
    engine: Engine
    world: World
    plan: Callable[[], RunPlan]
    answer_tokens: int

    # ── before there is an engine ───────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Close files and end processes that the task has opened."""

    def loss(self, plan: RunPlan, model: nn.Module) -> Loss | None:
        """Return the loss of these records; None means the model's own.

        Raises:
            InputRefused: the model cannot learn from them.
        """
        return None

    def slots(self, plan: RunPlan) -> int:
        """Return the maximum number of tokens of a prompt and its answer; 0 without answers."""
        return 0

    @property
    @abstractmethod
    def per_epoch(self) -> int:
        """Return the number of records, rows or prompts, of an epoch."""

    @property
    def repeats(self) -> bool:
        """Return whether a second epoch has the same content as the first."""
        return True

    def most_updates(self, rows_per_window: int, weight_decay: float) -> int | None:
        """Return the maximum number of updates of a run by the clock, after which the model has
        seen the records often enough; None without a maximum.
        """
        if not self.repeats:
            return None
        return defaults.most_updates(self.per_epoch, rows_per_window, weight_decay)

    @property
    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file in the run's folder that the run learns from, by name.

        Checkpoints record these. If such a file has changed, the run is not resumed, and `monograph
        check` names the file.
        """
        return {}

    # ── while a session trains ──────────────────────────────────────────────────────────────────

    def begin(self, run: Run, engine: Engine, world: World, plan: Callable[[], RunPlan]) -> None:
        """Store the parts of the session in this object; see the class."""
        self.run = run
        self.engine = engine
        self.world = world
        self.plan = plan
        self.answer_tokens = 0

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Restore counters from the rows of the metrics of a resumed run."""
        self.answer_tokens = next((row["tokens"] for row in reversed(rows) if "tokens" in row), 0)

    @abstractmethod
    def windows(self, position: int, seed: int | None, skip: Sequence[Sequence[int]]) -> RunWindows:
        """Return the windows from a position on.

        Args:
            position: the number of records before the first window.
            seed: the seed of the order of records; None for the run's.
            skip: the positions that are passed over, as pairs (begin, end).
        """

    @property
    def updates_per_window(self) -> int:
        """Return the number of updates that are made of one window."""
        return 1

    def can_save(self, windows: RunWindows) -> bool:
        """Return whether a checkpoint of the present state could be resumed."""
        return True

    def keep_reference(self, resumed: bool) -> None:
        """Store the weights that the run begins from, if the loss needs them later; in a resumed
        run, read them.

        Raises:
            InputRefused: the stored weights are lost or damaged.
            DiskFull: there is no room for them.
        """

    def score_reference(self, resumed: bool, rows_per_window: int, progress: Progress) -> None:
        """Score all records with the weights that the run begins from, and store the scores, if the
        loss needs them; in a resumed run, read them.

        Raises:
            InputRefused: the stored scores are lost or damaged.
            DiskFull: there is no room for them.
        """

    def leave_uncompiled(self) -> None:
        """Stop compiling anything from now on, because the session's plan does not compile any
        more.
        """

    @property
    def held(self) -> list[Tensor]:
        """Return the tensors that are on the device in addition to the step's."""
        return []

    def remember(self) -> None:
        """Store what this run measured about the machine, for later plans."""

    # ── for people ──────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def described(self) -> str:
        """Return a text with the source of the records and their number."""

    @abstractmethod
    def trial_result(self, trial: Trial) -> str:
        """Return a text on the result of an eager trial step."""

    @abstractmethod
    def amount(self, rows_per_window: int, updates: int) -> str:
        """Return a text on how much an update learns from, and how much `updates` updates do."""

    @abstractmethod
    def tokens_in_all(self, updates: int) -> int:
        """Return the maximum number of tokens of `updates` updates, the width of the curve."""

    @abstractmethod
    def tokens_of(self, windows: RunWindows) -> float:
        """Return the tokens of the last update, without padding."""

    def figures(self, windows: RunWindows) -> dict[str, Any]:
        """Return figures on the answers of the last update, for its row of the metrics; {} for
        texts.
        """
        return {}

    @property
    def held_out_rows(self) -> int:
        """Return the number of held-out rows that an evaluation passes through the model."""
        return 0

    @property
    @abstractmethod
    def scores_untrained(self) -> bool:
        """Return whether the model is scored before its first update."""

    @abstractmethod
    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore | None:
        """Score held-out records; return None if there are none.

        Args:
            rows_per_window: rows that pass the model at once.
            limit: the maximum number of rows to score; None for all.
        """

    @abstractmethod
    def opening(self, config: LlamaConfig | None) -> Opening:
        """Return the prompt of the samples that the run shows; `config` is the model's shape if it
        is a Llama.
        """

    def sample(self, opening: Opening, write: Callable[[], str | None]) -> str | None:
        """Return a sample with its prompt; None if the model writes nothing.

        Args:
            opening: the prompt.
            write: returns what the model continues the prompt with.
        """
        text = write()
        return None if text is None else opening.text + text

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return entries for the run's summary, from the rows of its metrics."""
        return {}

    def doubt(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return why the updates so far taught the model nothing, and what would help; "" if they
        did, as far as the rows show.
        """
        return ""

    @abstractmethod
    def standing(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Evaluation | None,
        yardsticks: Mapping[str, float],
    ) -> str:
        """Return a text on how good the model has become, for the end of the run's last line.

        Args:
            rows: the rows of the metrics.
            held_out: the last evaluation.
            yardsticks: bits per byte of other models of the same text, by name.
        """

    @property
    def compressible(self) -> Corpus | None:
        """Return the text on which compressors can be compared with the model; None without one."""
        return None
