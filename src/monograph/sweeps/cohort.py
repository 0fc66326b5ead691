"""A cohort: the members of a round of a sweep while they train at once.

It has one engine for all, a session for each member, and the windows that they read; a window is the
rows of one update. The engine of several members is an `Ensemble`, which trains them in one graph. A
member's place is its position in the round. A captured engine is one whose step is compiled.

Shapes: N members, R rows of a window.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.device import Device, describe
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.ensemble.member import MemberEngine
from monograph.errors import InputRefused, NoValidCheckpoint, UsageError
from monograph.graph.lora import adapted_layers
from monograph.graph.mmap_weights import kept_dtype, materialize_
from monograph.graph.precision import Precision
from monograph.graph.shared_base import frozen_parameters
from monograph.loss import Batch
from monograph.model.gguf import block_formats
from monograph.optim.formats import FORMATS
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.run.writing import write_tokenizer
from monograph.schedule import Schedule
from monograph.session.objective import JointWindows, RunWindows, SweptTask
from monograph.session.plan import Length, RunPlan
from monograph.session.random_state import seed_all
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.session.setup import (
    BuiltRun,
    build_on_base_of,
    build_run,
    make_engine,
    stop_balancing_,
)
from monograph.storage.reading import exists
from monograph.sweeps.spec import Member

EVALUATIONS = 6  # how often each member is evaluated, if the settings give no interval


class MemberWindows(Iterator[Batch]):
    """The windows of a round's members, one for each update.

    They are [R, ...] if all members train on the same rows, and otherwise the windows of all members,
    stacked to [N, R, ...].

    Attributes:
        left_out: see `JointWindows`. These members still get windows, since the windows are read
            anyway.
    """

    def __init__(self, sessions: Sequence[Session], own_rows: bool):
        """Take over the sessions' readers of windows; members of the same seed share one.

        Args:
            sessions: the members' sessions.
            own_rows: whether the engine takes the rows of each member. If not, all have the same seed.
        """
        reader_of_seed: dict[int, RunWindows] = {}
        for session in sessions:
            shared = reader_of_seed.setdefault(session.plan.job.seed, session.batches)
            if shared is not session.batches:
                session.batches.close()
                session.batches = shared
        self.left_out = set[int]()
        self._own_rows = own_rows
        self._readers = list(reader_of_seed.values())
        seeds = list(reader_of_seed)
        self._reader_indices = [seeds.index(session.plan.job.seed) for session in sessions]

    def __next__(self) -> Batch:
        windows = [next(reader) for reader in self._readers]
        if not self._own_rows:
            return windows[0]
        return stack_windows(windows, self._reader_indices)

    def close(self) -> None:
        """Stop reading ahead."""
        for reader in self._readers:
            reader.close()


def stack_windows(windows: Sequence[Batch], indices: Sequence[int]) -> Batch:
    """Stack the members' windows to [N, R, ...].

    Args:
        windows: the different windows.
        indices: for each member, the index of its window.
    """
    stacked = {}
    for name in windows[0]:
        stacked[name] = torch.stack([windows[index][name] for index in indices])
    return stacked


@dataclass
class Cohort:
    """The members of a round with their engine, sessions and windows.

    Attributes:
        members: the round's members, in order.
        engine: the engine of all members; an ordinary engine for a single member.
        sessions: a session for each member, which saves and logs it like any run.
        windows: the windows that the members train on.
        tasks: what each member learns from.
        divergences: for each diverged member, by its place, the update after which it diverged.
    """

    members: list[Member]
    engine: Engine
    sessions: list[Session]
    windows: JointWindows
    tasks: list[SweptTask]
    divergences: dict[int, int] = field(default_factory=dict)

    @property
    def can_save(self) -> bool:
        """Return whether all members that still learn could be resumed from checkpoints of the
        present state.
        """
        return all(
            session.can_save
            for place, session in enumerate(self.sessions)
            if place not in self.divergences
        )

    def save(self) -> None:
        """Write a checkpoint of every member that still learns."""
        # All members resume at the same update. After a crash between the checkpoints of two members,
        # that is the update of the previous checkpoints, so these are kept, too.
        keep = 1 if len(self.sessions) == 1 else 2
        for place, session in enumerate(self.sessions):
            if place in self.divergences:
                continue
            # A checkpoint has the states of torch's generators. They are set, so that they do not depend
            # on what this process did before. An ensemble samples by its own seeds and counters, so this
            # changes no number that follows.
            if isinstance(self.engine, Ensemble):
                seed_all(session.plan.job.seed)
            session.save(keep=keep)

    def prepare_references(self, resumed: bool, progress: Progress) -> None:
        """Keep the initial weights, or score the records with them, if the loss needs that; see
        `SweptTask.prepare_references`.
        """
        rows_per_window = self.sessions[0].batches.rows_per_window
        self.tasks[0].prepare_references(
            self.tasks, self.engine, resumed, rows_per_window, progress
        )

    def figures(self) -> list[dict[str, Any]]:
        """Return what the tasks log of the last update, for each member."""
        return [
            task.figures(session.batches)
            for task, session in zip(self.tasks, self.sessions, strict=True)
        ]

    def score(self, update: int, limit: int | None, **entries_of_row: object) -> list[int]:
        """Score the first `limit` held-out rows, or all of them, and write the scores as metrics.

        Args:
            update: the number of updates so far.
            limit: the maximum number of rows; None: all.
            **entries_of_row: further entries of the rows in metrics.jsonl.

        Returns:
            The places of the members that have no score, since their logits are not finite.
        """
        scores = self.tasks[0].evaluate_members(
            self.tasks, self.engine, batch_rows=self.engine.micro_batch or 16, limit=limit
        )
        unscored = []
        for place, (session, score) in enumerate(zip(self.sessions, scores, strict=True)):
            if place in self.divergences:
                continue
            if score is None:
                unscored.append(place)
            else:
                row = {"update": update, "tokens": score.tokens, **score.figures, **entries_of_row}
                session.run.log(row)
        return unscored

    def freeze(self, divergences: dict[int, int]) -> None:
        """Stop training members that diverged, and add them to the attribute `divergences`."""
        self.divergences |= divergences
        self.windows.left_out.update(divergences)
        if divergences and isinstance(self.engine, Ensemble):
            self.engine.freeze(list(divergences))

    def close(self) -> None:
        """Stop reading ahead."""
        self.windows.close()


def open_swept(plan: RunPlan, progress: Progress) -> SweptTask:
    """Read what the members of a sweep learn from, and print how much that is.

    Args:
        plan: the plan of a member. Its objective is one that a sweep can train.
        progress: the display.

    Raises:
        InputRefused: the records cannot be used, or none is held out.
    """
    task = plan.job.objective.open(plan, progress)
    assert isinstance(task, SweptTask), f"{plan.job.objective.key} cannot be swept"
    if not task.has_held_out:
        task.close()
        raise InputRefused(
            f"{task.data.name}: nothing is held out, and members are compared on that: raise data.held_out = "
            f"{plan.job.reading.held_out:g}"
        )
    return task


def build_models(
    members: Sequence[Member], task: SweptTask, machine: Device, base: BuiltRun | None = None
) -> list[BuiltRun]:
    """Build the members' models and resolve their plans.

    Only the values that depend on the run's length stay open, see `with_length`. The planner makes its
    choices once, for the first member, and the other members take them over. Members with adapters
    share one base.

    Args:
        members: members with plans.
        task: what they learn from.
        machine: the device that trains them.
        base: the run of `build_base`, on whose base the members' adapters are; None: it is built if
            the members have adapters.

    Raises:
        OutOfDeviceMemory: not even one member fits.
    """
    plans = [member.plan for member in members if member.plan]  # all have one by now
    if base is None:
        base = build_base(members[0], task, machine)
    if base is not None:
        return [build_on_base_of(base, plan, task, machine) for plan in plans]
    first = build_run(plans[0], task, machine)
    others = [build_run(plan, task, machine, like=first.plan) for plan in plans[1:]]
    return [first, *others]


def build_base(member: Member, task: SweptTask, machine: Device) -> BuiltRun | None:
    """Build a run with adapters, whose base all members share; None: they have no adapters.

    The run's own adapters are never trained. Members that continue stored adapters get copies of them.

    Args:
        member: one of the members, with a plan.
        task: what they learn from.
        machine: the device that trains them.

    Raises:
        OutOfDeviceMemory: not even one member fits.
        UsageError: the settings stream the base.
    """
    plan = member.plan
    if plan is None or plan.job.adapters() is None:
        return None
    if plan.requested_memory == "stream":
        raise UsageError(
            "train.memory = stream: adapters of a sweep share a base on the device: leave it out, or train one run"
        )
    # If a member does not fit, the planner may not stream it, either.
    plan = replace(plan, memory="device", open_choices=plan.open_choices - {"memory"})
    return build_run(plan, task, machine)


def base_bytes(built: BuiltRun) -> int:
    """Return the bytes of the frozen weights that members with adapters share; 0 without adapters."""
    if built.recipe.lora is None:
        return 0
    frozen = frozen_parameters(built.model)
    return sum(weight.numel() * kept_dtype(weight).itemsize for weight in frozen)


def with_length(built_runs: Sequence[BuiltRun], updates: int) -> list[BuiltRun]:
    """Return the same models with plans for `updates` updates."""
    length = Length(updates, EVALUATIONS)
    return [built._replace(plan=resolve(built.plan, describe(), length)) for built in built_runs]


def make_members_engine(
    built_runs: Sequence[BuiltRun], own_rows: bool, device: torch.device
) -> Engine:
    """Return the engine of these models: an ordinary engine for one model, an ensemble for more.

    Args:
        built_runs: one model for each member.
        own_rows: whether a window has the rows of each member.
        device: the device that trains them.

    Raises:
        UsageError, InputRefused: the models cannot share one graph.
    """
    if len(built_runs) == 1:
        return make_engine(built_runs[0], device)
    plan = built_runs[0].plan
    for built in built_runs:
        stop_balancing_(built.model, built.loss)
    return Ensemble(
        [materialize_(built.model, device).to(device) for built in built_runs],
        [{"seed": built.plan.job.seed} for built in built_runs],
        loss=built_runs[0].loss,
        # The optimizer's seed is for stochastic rounding, which an ensemble does not do.
        optim=[replace(built.plan.training.optim, seed=0) for built in built_runs],
        clip=plan.training.clip,
        precision=Precision(plan.training.precision),
        micro_batch=plan.training.rows,
        each=own_rows,
        block_formats=block_formats(built_runs[0].model, plan.training.quantize),
    )


def set_planned_schedules(engine: Engine, built_runs: Sequence[BuiltRun]) -> None:
    """Give each member the schedule of its plan, which must have a number of updates."""
    set_schedules(engine, [built.plan.schedule(built.plan.updates) for built in built_runs])


def set_schedules(engine: Engine, schedules: list[Schedule]) -> None:
    """Give each member its schedule."""
    if isinstance(engine, Ensemble):
        engine.stacked_parameters.schedules = schedules
    else:
        engine.step.schedule = schedules[0]


def reuse_engine(engine: Engine, fresh: Engine) -> bool:
    """Make a captured engine train another model of the same shape from its beginning.

    Args:
        engine: the captured engine.
        fresh: a new engine of the other model, whose state is copied.

    Returns:
        Whether the engine can train the other model. It cannot if more than weights and learning
        rate differ, as the graph fixes everything else, such as the rank, scale and dropout of
        adapters.
    """
    if _adapter_options(engine.model) != _adapter_options(fresh.model):
        return False
    old = engine.step.optim
    new = fresh.step.optim
    # The graph does not fix the learning rate. It fixes the seed only if the format of the optimizer's
    # state rounds stochastically, since nothing else reads the seed.
    old_as_new = replace(old, lr=new.lr)
    if not FORMATS[old.state].stochastic:
        old_as_new = replace(old_as_new, seed=new.seed)
    old_kinds = [plane.kind for plane in engine.step.planes]
    new_kinds = [plane.kind for plane in fresh.step.planes]
    if old_kinds != new_kinds or old_as_new != new:
        return False
    engine.load_state(fresh.state())
    engine.step.optim = new
    return True


def _adapter_options(model: nn.Module) -> dict[str, tuple[int, float, float]]:
    """Return rank, scale and dropout of each layer with an adapter, by the layer's name."""
    return {
        name: (layer.lora_A.weight.shape[-2], layer.scale, layer.lora_dropout.p)
        for name, layer in adapted_layers(model).items()
    }


def begin_cohort(
    members: Sequence[Member],
    runs: Sequence[Run],
    built_runs: Sequence[BuiltRun],
    task: SweptTask,
    engine: Engine,
) -> Cohort:
    """Return a cohort that trains from the beginning, by the schedules of its members' plans.

    Settings and tokenizer are written into runs that do not have them yet. The arguments are
    explained in `open_cohort`.
    """
    set_planned_schedules(engine, built_runs)
    cohort = open_cohort(members, runs, built_runs, task, engine)
    for session in cohort.sessions:
        begin_run(session)
    return cohort


def open_cohort(
    members: Sequence[Member],
    runs: Sequence[Run],
    built_runs: Sequence[BuiltRun],
    task: SweptTask,
    engine: Engine,
) -> Cohort:
    """Return a cohort with its sessions at their beginning, without writing anything.

    Args:
        members: the round's members.
        runs: their runs.
        built_runs: their models.
        task: what they learn from.
        engine: the engine of these models.
    """
    sessions = []
    tasks = []
    for place, (run, built) in enumerate(zip(runs, built_runs, strict=True)):
        member_engine = MemberEngine(engine, place) if isinstance(engine, Ensemble) else engine
        tasks.append(task.for_member())
        sessions.append(Session(run, built.plan, built.recipe, tasks[-1], member_engine))
    windows = _windows_of(sessions, tasks, engine)
    return Cohort(list(members), engine, sessions, windows, tasks)


def _windows_of(
    sessions: Sequence[Session], tasks: Sequence[SweptTask], engine: Engine
) -> JointWindows:
    """Return the windows of a round's members from their sessions' positions on.

    Raises:
        UsageError: they cannot be made together.
    """
    readers = [session.batches for session in sessions]
    joint_windows = tasks[0].joint_windows(tasks, readers, engine)
    return joint_windows or MemberWindows(sessions, _takes_own_rows(engine))


def _takes_own_rows(engine: Engine) -> bool:
    """Return whether a window of the engine has the rows of each member."""
    return isinstance(engine, Ensemble) and engine.stacked_parameters.each


def begin_run(session: Session) -> None:
    """Write settings and tokenizer into a member's folder if it does not have them yet.

    The settings come first, since a run has begun once it has them. `Run.create` refuses a folder
    with other files of a run but no settings. So if the tokenizer came first, and the process was
    killed after it, the sweep could not be continued.
    """
    if not session.run.has_begun:
        session.plan.record.write(session.run)
    if not exists(session.run.tokenizer):
        write_tokenizer(session.run, session.records.tokenizer)


def resume_cohort(cohort: Cohort, divergences: dict[int, int], progress: Progress) -> int:
    """Resume the members at the last update that all of them saved, and return it.

    A member that had diverged by that update keeps its last checkpoint. If there is no such update,
    the members' metrics are removed and 0 is returned.

    Args:
        cohort: the members of a round, and what trains them.
        divergences: for each member that diverged, by its place, the update after which it
            diverged.
        progress: the display.

    Raises:
        InputRefused: a run is not what it was begun with, or its metrics are damaged.
    """
    update = _last_common_update(cohort, divergences)
    if not update:
        for session in cohort.sessions:
            session.run.truncate_metrics(0)
        return 0
    # Members that had diverged by this update.
    diverged = {
        place: last_update for place, last_update in divergences.items() if last_update <= update
    }
    for place, session in enumerate(cohort.sessions):
        at_update = None if place in diverged else update
        session.restore(_checkpoint(session, at_update), progress)
        if place in diverged:
            # The member's last checkpoint may be older than `update`. To restore it may have
            # removed the row of metrics that says that the member diverged, so the row is written
            # again. The windows are opened again at the position of the round: they are stacked
            # with those of the other members, although this member no longer trains on them.
            session.run.log({"update": update, "diverged": diverged[place]})
            session.batches.close()
            session.batches = session.open_batches(update * session.batches.rows_per_window)
    cohort.engine.step.index = update
    if isinstance(cohort.engine, Ensemble):
        # Dropout draws by the number of micro-batches so far, which checkpoints do not have.
        rows = cohort.sessions[0].batches.rows_per_window
        micro_batches = math.ceil(rows / (cohort.engine.micro_batch or rows))
        cohort.engine.stacked_parameters.caller.draw.fill_(update * micro_batches)
    cohort.windows = _windows_of(cohort.sessions, cohort.tasks, cohort.engine)
    cohort.freeze(diverged)
    return update


def _last_common_update(cohort: Cohort, divergences: dict[int, int]) -> int:
    """Return the newest update for which every member has a sound checkpoint; 0: there is none.

    A member that had diverged by that update does not need one.
    """
    saved_updates = [
        {update for update, _ in checkpointing.list_checkpoints(session.run.checkpoints)}
        for session in cohort.sessions
    ]
    for update in sorted(set().union(*saved_updates), reverse=True):
        learning = [
            place
            for place in range(len(cohort.sessions))
            if place not in divergences or divergences[place] > update
        ]
        all_saved = all(update in saved_updates[place] for place in learning)
        if not learning or not all_saved:
            continue
        # This comes last, because a checkpoint must be read as a whole to know whether it is sound.
        if all(_is_sound(cohort.sessions[place], update) for place in learning):
            return update
    return 0


def _is_sound(session: Session, update: int) -> bool:
    try:
        _checkpoint(session, update)
    except NoValidCheckpoint:
        return False
    return True


def _checkpoint(session: Session, update: int | None) -> Checkpoint:
    """Return the run's checkpoint of an update; None: the newest one."""
    return checkpointing.load_newest(session.run.checkpoints, lambda line: None, at=update)
