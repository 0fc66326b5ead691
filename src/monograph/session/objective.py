"""What the ways to learn have in common: texts, preferences and rewards each fill in an `Objective`
and a `Task`.

An objective is what the settings say: it is known before anything is read. A task is what it opens:
the records of one run, with the loss, the windows and the figures that belong to them. The rooms
around ask the two; none of them asks which kind it has. `monograph.session.objectives` has a file
for each kind; the table of all is `WAYS_TO_LEARN` in `monograph.config.keys`.
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
from monograph.session.plan import Plan
from monograph.text.tokenizer import Tokenizer


class Records(Protocol):
    """What every kind of records has."""

    @property
    def name(self) -> str:
        """Return the source as it was given."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of their ids."""

    @property
    def fingerprint(self) -> str:
        """Return a hex sha256 of all that they depend on."""

    @property
    def vocab_size(self) -> int:
        """Return the number of the tokenizer's ids."""

    @property
    def skipped(self) -> dict[str, int]:
        """Return {reason: count} of the records that were skipped."""


class Windows(Protocol):
    """An iterator over the windows of a run, each with all records of one update or of several.

    Attributes:
        rows_per_window: records of a window.
        rows_consumed: the position after the last record that was returned.
        skip: (begin, end) of positions that are passed over.
    """

    rows_per_window: int
    rows_consumed: int
    skip: tuple[tuple[int, int], ...]

    def __iter__(self) -> Iterator[Batch]:
        """Return the iterator itself."""

    def __next__(self) -> Batch:
        """Return the next window."""

    def state(self) -> dict[str, Any]:
        """Return the arguments of `Task.windows` for what follows."""

    def close(self) -> None:
        """Stop making windows ahead."""


class HeldOutScore(NamedTuple):
    """What scoring held-out records gave.

    Attributes:
        tokens: the tokens of training so far, at which the score is drawn.
        figures: entries for the row of the metrics.
        point: the number that the curve shows; None if there is none.
        evaluation: the loss; None where no loss says how good answers are.
    """

    tokens: int
    figures: Mapping[str, Any]
    point: float | None
    evaluation: Evaluation | None = None


def held_out_said(count: int, share: float) -> str:
    """Return how many records are held out, and why none are if the settings ask for some.

    Args:
        count: the records that are held out.
        share: data.held_out.
    """
    if count or not share:
        return f"{count:,} held out" if count else "none held out"
    return f"none held out: of so few, data.held_out = {share:g} took none by chance; raise it to see how good it gets"


class Opened(NamedTuple):
    """An objective with its own keys decided, and the values to record for them, by dotted key."""

    objective: "Objective"
    values: Mapping[str, Any]


class Objective(ABC):
    """A way to learn, as the settings choose it.

    Attributes:
        way: its row in the table of ways to learn, with its keys.
        by_records: whether records may ask for it by themselves, see `of_records`.
        excluded: the choices that do not go with this one, each with what to do instead.
        needs_model: whether only a model that was trained before can learn so.
        is_of_texts: whether its records are texts, which every command knows, and which can be
            scored by any model.
        rate_share: the usual peak learning rate, as a share of that for texts.
        is_own_length: whether other keys than `train.tokens_per_update` decide how much an update
            learns from.
        answers_on_device: whether the run holds more than a step on the device, so that nothing can
            be streamed.
        finds_spikes: whether the norm of an early gradient tells which later one is a spike.
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
        """Return the key that chooses it; "" for texts, which are learned from where no key says
        otherwise.
        """
        return self.way.key

    @property
    def section(self) -> str:
        """Return the section of keys that only this objective has; "" without one."""
        return self.way.section

    @property
    def is_named(self) -> bool:
        """Return whether a key names it; if none does, a new run may go on as its parent learned."""
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
        """Return the value of its key for records of which no key says what is learned; None if it
        is not for them.

        Args:
            source: data.source.
            asked: what the settings say of the records' keys.
            skip_bad: whether bad records are skipped.
        """
        return None

    def learns_alike(self, one: str | None, other: str | None) -> bool:
        """Return whether both values of its key ask for the same kind of records."""
        return None not in (one, other)

    def is_chosen(self, settings: Settings) -> bool:
        """Return whether the settings choose it."""
        return not self.key or settings.values()[self.key] is not None

    def records(self, settings: Settings) -> str:
        """Return what its records are."""
        return "texts"

    def unused(self, origin: str, key: str, written: str) -> str:
        """Return the refusal of a key of this objective alone where another one is chosen.

        Args:
            origin: where the key was given.
            key: the key.
            written: its value.
        """
        return f"{origin}: {key} is of {self.key}: give it, too"

    def require_keys(self, settings: Settings) -> None:
        """Refuse values of this objective's own keys that do not go together.

        Raises:
            UsageError: there are some; the message names them.
        """

    def opened(self, settings: Settings, length: int) -> Opened:
        """Return this objective with its own keys decided.

        Args:
            settings: the run's settings.
            length: positions of a row.

        Raises:
            UsageError: given keys do not fit one another.
        """
        return Opened(self, {})

    def judged(self, plan: Plan) -> Judged:
        """Return how answers are judged, as the planner takes it; "" if none are."""
        return ""

    def bytes_beside(
        self, plan: Plan, config: LlamaConfig, machine: Device, slots: int = 0, ranks: int = 1
    ) -> dict[str, int]:
        """Return the bytes that a run holds beside its step, by origin.

        Args:
            plan: the run's plan so far.
            config: the model's shape.
            machine: the device.
            slots: the most tokens of a prompt and its answer; 0 as long as the prompts are unknown.
            ranks: the number of those that train together, of which this is one.
        """
        return {}

    def largest_window(self, plan: Plan, config: LlamaConfig, slots: int) -> tuple[int, int]:
        """Return the rows of an update and the tokens of a row, where these are fewer than the
        settings say.

        Args:
            plan: the run's plan.
            config: the model's shape.
            slots: the most tokens of a prompt and its answer.
        """
        return plan.training.window_rows, plan.training.length

    def seconds_beside(
        self, plan: Plan, config: LlamaConfig, machine: Device, known: Calibration
    ) -> tuple[float, bool] | None:
        """Return the seconds of an update beside its step, and whether earlier runs corrected them;
        None without.
        """
        return None

    @abstractmethod
    def open(self, plan: Plan, progress: Progress) -> "Task":
        """Read the records of a run, and print how many there are; the caller closes the task.

        Raises:
            InputRefused: the records cannot be used.
        """

    def open_unjudged(self, plan: Plan, progress: Progress) -> "Task":
        """Read the records as `open` does, for a process that judges no answer: nothing that judges
        them is started.
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
        plan: returns the plan as it is by now.
        answer_tokens: tokens of all answers so far; 0 in a run on texts.
        depends_on: what `data` is made from, for the message that it has changed.
        score: the name of the figure on held-out records, and its entry in the metrics.
        is_plain: whether an update is nothing but a step on text, of which the planner knows how
            long it takes.
        is_steady: whether updates take equally long, so that a slow one tells of the machine.
        is_ready: whether windows are made ahead of the update that asks for them, so that they cost
            no time.
        is_foreseen: whether a step computes and holds nothing that no plan knows.
        saves_if_refused: whether a run whose windows fail saves what it has learned first.
        reaches_all: whether a trial step is to give each trained parameter a gradient.
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
    plan: Callable[[], Plan]
    answer_tokens: int

    # ── before there is an engine ───────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Let go of what was opened."""

    def loss(self, plan: Plan, model: nn.Module) -> Loss | None:
        """Return the loss that belongs to these records; None: the model's own.

        Raises:
            InputRefused: the model cannot learn from them.
        """
        return None

    def slots(self, plan: Plan) -> int:
        """Return the most tokens of a prompt and its answer; 0 if none are drawn."""
        return 0

    @property
    @abstractmethod
    def per_epoch(self) -> int:
        """Return the number of records, rows or prompts, of an epoch."""

    @property
    def repeats(self) -> bool:
        """Return whether a second epoch shows the same again."""
        return True

    def most_updates(self, rows_per_window: int, weight_decay: float) -> int | None:
        """Return after how many updates the records have been seen often enough; None: never."""
        return (
            defaults.most_updates(self.per_epoch, rows_per_window, weight_decay)
            if self.repeats
            else None
        )

    @property
    def digests(self) -> dict[str, str]:
        """Return the sha256 of each file in the run's folder that it learns from, by name.

        Checkpoints record them: a run whose file has changed does not resume, and `monograph check`
        names it.
        """
        return {}

    # ── while a session trains ──────────────────────────────────────────────────────────────────

    def begin(self, run: Run, engine: Engine, world: World, plan: Callable[[], Plan]) -> None:
        """Take the parts of the session; see the class."""
        self.run = run
        self.engine = engine
        self.world = world
        self.plan = plan
        self.answer_tokens = 0

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Go on where the rows of the metrics end."""
        self.answer_tokens = next((row["tokens"] for row in reversed(rows) if "tokens" in row), 0)

    @abstractmethod
    def windows(self, position: int, seed: int | None, skip: Sequence[Sequence[int]]) -> Windows:
        """Return the windows from a position on, without the stretches in `skip`.

        Args:
            position: records before the first window.
            seed: of the order; None: the run's.
            skip: (begin, end) of positions that are passed over.
        """

    @property
    def updates_per_window(self) -> int:
        """Return the updates that are made of one window."""
        return 1

    def can_save(self, windows: Windows) -> bool:
        """Return whether a run could go on from its state at this moment."""
        return True

    def keep_reference(self, resumed: bool) -> None:
        """Keep the weights that the run begins from, or read them again, if answers are compared
        with theirs.

        Raises:
            InputRefused: they are lost or damaged.
            DiskFull: there is no room for them.
        """

    def score_reference(self, resumed: bool, rows_per_window: int, progress: Progress) -> None:
        """Score all records by the weights that the run begins from, or read the scores again, if
        the loss needs them.

        Raises:
            InputRefused: they are lost or damaged.
            DiskFull: there is no room for them.
        """

    def leave_uncompiled(self) -> None:
        """Go on as a run of which nothing is compiled, which the plan now is; see
        `Session.complete`.
        """

    @property
    def held(self) -> list[Tensor]:
        """Return the tensors that are held beside the step."""
        return []

    def remember(self) -> None:
        """Store what this run showed about the machine, for later plans."""

    # ── for people ──────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def described(self) -> str:
        """Return the source of the records, and how many there are."""

    @abstractmethod
    def trial_result(self, trial: Trial) -> str:
        """Return what an eager trial step showed."""

    @abstractmethod
    def amount(self, rows_per_window: int, updates: int) -> str:
        """Return what an update learns from, and all of so many updates."""

    @abstractmethod
    def tokens_in_all(self, updates: int) -> int:
        """Return the most tokens of a run of so many updates, the width of its curve."""

    @abstractmethod
    def tokens_of(self, windows: Windows) -> float:
        """Return the tokens of the last update, without padding."""

    def figures(self, windows: Windows) -> dict[str, Any]:
        """Return figures on the answers of the last update, for its row of the metrics; empty for
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
        """Return whether the run shows what the model was worth before its first update."""

    @abstractmethod
    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore | None:
        """HeldOutScore held-out records; None if there are none.

        Args:
            rows_per_window: rows that pass the model at once.
            limit: the most rows to score; None: all.
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
        """Return why what the run did so far is worth nothing, and what would help; empty if
        nothing says so.
        """
        return ""

    @abstractmethod
    def standing(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Evaluation | None,
        yardsticks: Mapping[str, float],
    ) -> str:
        """Return how good the run has become, as the end of its last line.

        Args:
            rows: the rows of the metrics.
            held_out: the last evaluation.
            yardsticks: bits per byte of other models of the same text, by name.
        """

    @property
    def compressible(self) -> Corpus | None:
        """Return the text with which compressors compare; None if they do not."""
        return None
