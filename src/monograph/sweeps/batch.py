"""Train several members at once: one engine, a session for each member, and the windows that they
read.

Shapes: N members, R rows of a window.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.data.corpus import Corpus
from monograph.device import Device, describe
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.ensemble.member import MemberEngine
from monograph.errors import NoValidCheckpoint
from monograph.graph.mmap_weights import materialize_
from monograph.graph.precision import Precision
from monograph.loss import Batch
from monograph.optim.formats import FORMATS
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.run.writing import write_tokenizer
from monograph.schedule import Schedule
from monograph.session import objective
from monograph.session.objectives.texts import TextTask
from monograph.session.plan import Length
from monograph.session.record import write_config
from monograph.session.resolve import resolve
from monograph.session.session import Session, seed_all
from monograph.session.setup import BuiltRun, build_run, make_engine
from monograph.sweeps.spec import Member

EVALUATIONS = 6  # evaluations of each member, if the settings give no interval


class MemberWindows(Iterator[Batch]):
    """The members' windows: [R, ...] shared by all members if they have one seed, else [N, R, ...],
    one for each.
    """

    def __init__(self, sessions: Sequence[Session]):
        """Make members of the same seed share one reader of rows."""
        by_seed: dict[int, objective.Windows] = {}
        for session in sessions:
            shared = by_seed.setdefault(session.plan.job.seed, session.batches)
            if shared is not session.batches:
                session.batches.close()
                session.batches = shared
        self._sources = list(by_seed.values())
        self._which = [list(by_seed).index(session.plan.job.seed) for session in sessions]

    def __next__(self) -> Batch:
        windows = [next(source) for source in self._sources]
        return windows[0] if len(windows) == 1 else stacked(windows, self._which)

    def close(self) -> None:
        """Stop reading ahead."""
        for source in self._sources:
            source.close()


def stacked(windows: Sequence[Batch], which: Sequence[int]) -> Batch:
    """Stack the members' windows to [N, R, ...]; `which` has the index of each member's window in
    `windows`.
    """
    return {name: torch.stack([windows[index][name] for index in which]) for name in windows[0]}


@dataclass
class MemberBatch:
    """The members of a round with their engine, sessions and windows.

    Attributes:
        members: the round's members, in order.
        engine: the engine of all members; an ordinary one for a single member.
        sessions: a session for each member, which saves and logs it like any run.
        windows: the windows that the members train on.
        ended: the update after which each diverged member did so, by its place in the round.
    """

    members: list[Member]
    engine: Engine
    sessions: list[Session]
    windows: MemberWindows
    ended: dict[int, int] = field(default_factory=dict)

    def save(self) -> None:
        """Write a checkpoint of every member that still learns; the random numbers that follow stay
        the same.
        """
        # Each member keeps its previous checkpoint too, or a crash between two of them would leave
        # no common update.
        for place, session in enumerate(self.sessions):
            if place not in self.ended:
                # It draws by its own seeds and counters, not from generators.
                if isinstance(self.engine, Ensemble):
                    seed_all(session.plan.job.seed)
                session.save(keep=min(2, len(self.sessions)))

    def freeze(self, ended: dict[int, int]) -> None:
        """Stop training members that diverged."""
        self.ended |= ended
        if ended and isinstance(self.engine, Ensemble):
            self.engine.freeze(list(ended))

    def close(self) -> None:
        """Stop reading ahead."""
        self.windows.close()


def models_of(members: Sequence[Member], text: Corpus, machine: Device) -> list[BuiltRun]:
    """Build the members' models, with plans in which only the values that depend on the run's
    length are open.

    The planner is asked once, for the first member; the others take over its choices.

    Raises:
        OutOfDeviceMemory: not even one member fits.
    """
    plans = [member.plan for member in members if member.plan]
    first = build_run(plans[0], TextTask(text), machine)
    return [
        first,
        *(build_run(plan, TextTask(text), machine, like=first.plan) for plan in plans[1:]),
    ]


def of_length(built_runs: Sequence[BuiltRun], updates: int) -> list[BuiltRun]:
    """Return the same models with plans for `updates` updates."""
    length = Length(updates, EVALUATIONS)
    return [built._replace(plan=resolve(built.plan, describe(), length)) for built in built_runs]


def engine_of(built_runs: Sequence[BuiltRun], each: bool, device: torch.device) -> Engine:
    """Return the engine of these models: an ordinary one for one model, an ensemble for more.

    Args:
        built_runs: one model for each member.
        each: whether the members' windows differ.
        device: the device that trains them.

    Raises:
        UsageError, InputRefused: the models cannot share one graph.
    """
    if len(built_runs) == 1:
        return make_engine(built_runs[0], device)
    plan = built_runs[0].plan
    return Ensemble(
        [materialize_(built.model, device).to(device) for built in built_runs],
        [{"seed": built.plan.job.seed} for built in built_runs],
        loss=built_runs[0].loss,
        # The optimizer's seed is for stochastic rounding, which an ensemble does not do.
        optim=[replace(built.plan.training.optim, seed=0) for built in built_runs],
        clip=plan.training.clip,
        precision=Precision(plan.training.precision),
        micro_batch=plan.training.rows,
        each=each,
    )


def schedule(engine: Engine, built_runs: Sequence[BuiltRun]) -> None:
    """Give each member the schedule of its plan, whose number of updates is known."""
    set_schedules(engine, [built.plan.schedule(built.plan.updates) for built in built_runs])


def set_schedules(engine: Engine, schedules: list[Schedule]) -> None:
    """Give each member its schedule."""
    if isinstance(engine, Ensemble):
        engine.stacked.schedules = schedules
    else:
        engine.step.schedule = schedules[0]


def refill(engine: Engine, fresh: Engine) -> bool:
    """Make a captured engine train another model of the same shape from its beginning, as the
    engine `fresh` would.

    Returns:
        Whether it was done. It is not if more than weights and learning rate differ, as the graph
        fixes all the rest.
    """
    old, new = engine.step.optim, fresh.step.optim
    # Only a form that rounds stochastically reads the seed.
    seed = new.seed if FORMATS[old.state].stochastic else old.seed
    in_graph = [plane.kind for plane in engine.step.planes], replace(old, lr=new.lr)
    if in_graph != ([plane.kind for plane in fresh.step.planes], replace(new, seed=seed)):
        return False
    engine.load_state(fresh.state())
    engine.step.optim = new
    return True


def batch_of(
    members: Sequence[Member],
    runs: Sequence[Run],
    built_runs: Sequence[BuiltRun],
    text: Corpus,
    engine: Engine,
) -> MemberBatch:
    """Return a round with its sessions at their beginning; write settings and tokenizer of runs
    that lack them.
    """
    schedule(engine, built_runs)
    batch = opened(members, runs, built_runs, text, engine)
    for session in batch.sessions:
        if not session.run.begun:
            begin_run(session)
    return batch


def opened(
    members: Sequence[Member],
    runs: Sequence[Run],
    built_runs: Sequence[BuiltRun],
    text: Corpus,
    engine: Engine,
) -> MemberBatch:
    """Return a round with its sessions at their beginning, of which nothing is written."""
    sessions = []
    for number, (run, built) in enumerate(zip(runs, built_runs, strict=True)):
        own = MemberEngine(engine, number) if isinstance(engine, Ensemble) else engine
        sessions.append(Session(run, built.plan, built.recipe, TextTask(text), own))
    return MemberBatch(list(members), engine, sessions, MemberWindows(sessions))


def begin_run(session: Session) -> None:
    """Write what makes a member's folder a run: its tokenizer and its settings."""
    write_tokenizer(session.run, session.corpus.tokenizer)
    write_config(session.run, session.plan.record.settings)


def go_on(batch: MemberBatch, ended: dict[int, int], progress: Progress) -> int:
    """Resume the members at the last update that all of them saved, and return it; 0 if there is
    none.

    A member that had diverged by that update keeps its last checkpoint.

    Raises:
        InputRefused: a run is not what it was begun with, or its metrics are damaged.
    """
    update = _common(batch, ended)
    if not update:
        for session in batch.sessions:
            session.run.truncate_metrics(0)
        return 0
    lost = {place: at for place, at in ended.items() if at <= update}
    for place, session in enumerate(batch.sessions):
        session.restore(_checkpoint(session, None if place in lost else update), progress)
        if place in lost:  # it keeps its place in the windows, though it no longer trains on them
            session.run.log({"update": update, "diverged": lost[place]})
            session.batches.close()
            session.batches = session.open_batches(update * session.batches.rows_per_window)
    batch.engine.step.index = update
    if isinstance(batch.engine, Ensemble):
        # Dropout depends on the number of micro-batches so far.
        rows = batch.sessions[0].batches.rows_per_window
        batch.engine.stacked.members.draw.fill_(
            update * -(-rows // (batch.engine.micro_batch or rows))
        )
    batch.windows = MemberWindows(batch.sessions)
    batch.freeze(lost)
    return update


def _common(batch: MemberBatch, ended: dict[int, int]) -> int:
    """Return the newest update at which every member that had not diverged by then has a sound
    checkpoint; else 0.
    """
    saved = [
        {update for update, _ in checkpointing.candidates(session.run.checkpoints)}
        for session in batch.sessions
    ]
    for update in sorted(set().union(*saved), reverse=True):
        going = [place for place in range(len(saved)) if ended.get(place, update + 1) > update]
        if going and all(
            update in saved[place] and _sound(batch.sessions[place], update) for place in going
        ):
            return update
    return 0


def _sound(session: Session, update: int) -> bool:
    with suppress(NoValidCheckpoint):
        _checkpoint(session, update)
        return True
    return False


def _checkpoint(session: Session, at: int | None) -> Checkpoint:
    return checkpointing.newest(session.run.checkpoints, lambda line: None, at=at)
