"""`monograph sweep`: train runs that differ in a few settings, as many at once as is fastest, and
find the best.

The runs are the members of the sweep. Members that are trained at once are a round. Rounds follow one
another, or are divided among the ranks: the processes that a launcher such as torchrun starts. One of
the ranks leads (rank 0). It alone creates the sweep and writes its results.
"""

import json as jsonlib
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

from monograph.commands.train import run as train_one
from monograph.config import Settings
from monograph.device import default_device, describe
from monograph.distributed.world import World, read_place
from monograph.errors import Diverged, UsageError
from monograph.loop import train
from monograph.report.quantities import counted
from monograph.run.progress import Progress, SweepDisplay
from monograph.run.signals import StopSignal
from monograph.run.started import note_start
from monograph.session import ranks
from monograph.session.objectives import objective_of
from monograph.session.reporting import final_summary
from monograph.session.setup import make_repeatable
from monograph.session.shown_commands import command_line, show_command
from monograph.step.retries import empty_cache
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import is_file
from monograph.sweeps import results, spec
from monograph.sweeps.after_update import AfterUpdateOfRound
from monograph.sweeps.cohort import Cohort, resume_cohort
from monograph.sweeps.folder import Sweep
from monograph.sweeps.progress import Round, SweepProgress
from monograph.sweeps.pruning import require_prunable
from monograph.sweeps.results import require_teachers


def run(
    arguments: Sequence[str],
    *,
    samples: int | None,
    verify: int | None,
    out: Path | None,
    distill: bool,
    prune: float | None,
    json: bool,
) -> int:
    """Train or resume the members and compare them; see the command line's help.

    Args:
        arguments: the settings, of which some have several values; empty for an existing sweep.
        samples: number of random combinations of the values that are trained; None for all.
        verify: the index of a member that is trained again, alone, to compare the results; None if
            none is.
        out: the sweep's folder; None means a new one, or the newest one.
        distill: whether to train a model that learns from all members.
        prune: the largest probability with which the best setting may be stopped early; None: all
            members train to the end.
        json: whether to print the results as JSON.

    Returns:
        The exit code: 1 if the verified member differs, otherwise 0.
    """
    # This must come before the import of torch._dynamo, which sets its own cache path in the environment.
    keep_compiled()
    # All ranks, or this process alone if no launcher started it.
    world = World(read_place(srun=True), say=lambda line: Progress().line("note", line))
    progress = ranks.start_display(world)
    make_repeatable(default_device())
    # Rank 0 opens or creates the sweep, and tells the other ranks its folder. All ranks must call
    # `broadcast`.
    if world.leads:
        sweep = _open_or_create(world, arguments, samples, verify, out)
        world.broadcast(str(sweep.run.folder.absolute()))
    else:
        sweep = Sweep.open(Path(world.broadcast(None)))
    with (
        ExitStack() as resources,
        sweep.run.lock() if world.leads else nullcontext(),
        ranks.report_error_once(
            world,
            sweep.run,
            continue_command=lambda: command_line("sweep", "--out", str(sweep.run.folder)),
            has_not_begun=lambda: "groups" not in sweep.record,
        ),
    ):
        if world.leads:
            note_start(sweep.run)
        if world.leads and distill:
            require_teachers(sweep, world.size)
            sweep.record["distill"] = True
            sweep.write()
        if world.leads and prune is not None:
            _set_prune(sweep, prune)
        state = resources.enter_context(closing(SweepProgress(sweep, progress, world)))
        if world.leads and verify is not None and not arguments:
            _say_what_verify_waits_for(state, verify, progress)
        if not world.broadcast(state.are_over(state.members)):
            _train(state, progress)
            world.rank_0_waits_for_others()  # because it compares the members of all ranks
        exit_code = _finish(state, verify, progress, json) if world.leads else 0
        world.broadcast(None)  # the other ranks wait until rank 0 has written the results
        world.leave()
    return exit_code


def _set_prune(sweep: Sweep, probability: float) -> None:
    """Record that members are stopped early; see `monograph.sweeps.pruning`.

    Raises:
        UsageError: nothing can be compared, or the sweep was begun without --prune or with another P.
    """
    require_prunable(objective_of(sweep.settings), sweep.points, probability)
    recorded = sweep.record.get("prune")
    if "groups" in sweep.record and recorded != probability:
        begun = "without --prune" if recorded is None else f"with --prune {recorded:g}"
        raise UsageError(
            f"--prune {probability:g}: {sweep.run.folder} was begun {begun}, and goes on so: leave it out"
        )
    sweep.record["prune"] = probability
    sweep.write()


def _open_or_create(
    world: World,
    arguments: Sequence[str],
    samples: int | None,
    verify: int | None,
    out: Path | None,
) -> Sweep:
    """Create the sweep that the command line describes, or open the existing one that it names.

    After a failure, a launcher may start the ranks again with the same command line. Then the sweep of
    the first attempt is opened, so that it is resumed and no second one is created.
    """
    folder_of_first_attempt = world.recall("sweep") if world.was_restarted else None
    if folder_of_first_attempt:
        out = Path(folder_of_first_attempt)
    # --verify without arguments is for an existing sweep: that of --out, or else the newest one.
    verifies_existing = verify is not None and not arguments
    if verifies_existing or spec.names_existing_sweep(out, arguments, samples):
        sweep = Sweep.open(out)
        _require_member(verify, len(sweep.points))
    else:
        specified = spec.spec_of(arguments, samples)
        _require_member(verify, len(specified.points))
        sweep = Sweep.create(out, *specified)
    world.remember("sweep", str(sweep.run.folder.absolute()))
    return sweep


def _finish(state: SweepProgress, verify: int | None, progress: Progress, json: bool) -> int:
    """Compare the members, print the result and return the exit code.

    Args:
        state: the sweep, with all members trained.
        verify: the index of a member that is trained again, alone; None: none is.
        progress: the display.
        json: whether to print the results as JSON.
    """
    state.outcomes = state.read_outcomes()
    # This object is also in the sweep's record, so `Sweep.write` writes what is added to it below.
    result = state.finish()
    if verify is not None:
        eager_updates = state.eager_updates_of(state.members[verify])
        result["verify"] = results.verify_member(state.outcomes[verify], progress, eager_updates)
        state.sweep.write()
    if state.sweep.record.get("distill") and result["best"]:
        result["distilled"] = _distill(state, result["best"]["member"], progress)
        state.sweep.write()
    _print_next_commands(state.sweep, result, verify, progress)
    if json:
        print(jsonlib.dumps(result))
    if result["best"] is None:
        raise Diverged(f"every member of {state.sweep.run.folder} diverged: lower optim.lr")
    differs = verify is not None and not result["verify"]["equal"]
    return 1 if differs else 0


def _distill(state: SweepProgress, best: int, progress: Progress) -> dict[str, Any]:
    """Train the model that learns from the members, and return its results.

    A training that was stopped is resumed, and a finished one is not repeated.

    Args:
        state: the sweep.
        best: the best member's index.
        progress: the display.
    """
    student = results.open_student(state.sweep, state.outcomes, best)
    if not final_summary(student):
        progress.gap()
        progress.line(
            "distill",
            f"{student.folder} learns from the text and from the members' averaged probabilities",
        )
        train_one(Settings(), out=None, resume=str(student.folder), from_=None, json=False)
    summary = final_summary(student) or {}
    return {
        "run": str(student.folder),
        **{key: summary.get(key) for key in (results.NATS, results.BITS)},
    }


def _require_member(verify: int | None, members: int) -> None:
    """Refuse a --verify that names no member of the sweep.

    Args:
        verify: the index of a member; None if --verify was not given.
        members: the number of members.
    """
    if verify is not None and not 0 <= verify < members:
        raise UsageError(f"--verify {verify}: the sweep has members 0 to {members - 1}")


def _say_what_verify_waits_for(state: SweepProgress, verify: int, progress: Progress) -> None:
    """Say that an existing sweep has members to be trained before one of them is verified."""
    waiting = [member for member in state.members if not state.are_over([member])]
    if waiting:
        progress.line(
            "verify",
            f"{len(waiting)} of {counted(len(state.members), 'member')} are not trained to the end: the sweep "
            f"goes on first, and member {verify} is verified after that",
        )


def _train(state: SweepProgress, progress: Progress) -> None:
    """Train this rank's rounds, one after another."""
    with state.world.rank_0_first():
        # Rank 0 runs this block first: `prepare` decides which members train at once, and writes that into
        # the sweep's record. The other ranks run it afterwards: they read the record, which `prepare` then
        # follows.
        if not state.world.leads:
            state.sweep.record |= Sweep.open(state.sweep.run.folder).record
        state.prepare(default_device(), describe())
    with (
        state.live_display() as block,
        StopSignal(lambda name: block.note(f"{name}: saving after this update")) as stop,
    ):
        try:
            for round_ in state.rounds:
                if not state.are_over(round_.members):
                    _train_round(round_, state, block, stop, progress)
        finally:
            state.record_time()


def _train_round(
    round_: Round,
    state: SweepProgress,
    block: SweepDisplay,
    stop: StopSignal,
    progress: Progress,
) -> None:
    """Train the members of a round together.

    If members are stopped early, the others go on from their checkpoints in a graph without them, exactly
    as in a sweep that is resumed.

    Args:
        round_: the round.
        state: the sweep.
        block: the live display.
        stop: the user's signals.
        progress: the display's lines.
    """
    timed_group = round_.timed_group
    is_over = False
    # At first, the updates before the newest checkpoint were done by earlier processes. They are added to
    # those that are done. Later they were done here, and are counted already.
    counts_resumed = True
    while not is_over:
        learning = state.learning(round_.members)
        with state.sweep.lock_members(learning) as runs:
            # No variable has the cohort, so that its memory is free before the next one is made.
            is_over = _train_cohort(
                timed_group.cohort_of_round(learning, runs, round_.updates, progress),
                round_,
                state,
                block,
                stop,
                progress,
                counts_resumed=counts_resumed,
            )
        counts_resumed = False
        empty_cache(timed_group.device)


def _train_cohort(
    cohort: Cohort,
    round_: Round,
    state: SweepProgress,
    block: SweepDisplay,
    stop: StopSignal,
    progress: Progress,
    *,
    counts_resumed: bool,
) -> bool:
    """Train members of a round together, until some are stopped early or the round is over.

    Training begins at the newest update of which all members have a checkpoint, or else at the start.

    Args:
        cohort: those members of the round that were not stopped early, and what trains them.
        round_: the round.
        state: the sweep.
        block: the live display.
        stop: the user's signals.
        progress: the display's lines.
        counts_resumed: whether the updates before the checkpoint are added to those that are done.

    Returns:
        Whether the round is over. Otherwise members were stopped, and the others go on without them.
    """
    updates = round_.updates
    looks = state.looks_of(round_)
    # A member that was trained before has rows in its metrics.
    were_trained_before = any(session.run.metrics_offset for session in cohort.sessions)
    divergences = state.divergences_in_round(cohort.members)
    resumed_at = resume_cohort(cohort, divergences, progress)
    if resumed_at == 0 and were_trained_before:
        progress.line(
            "warning", "no update of which every member has a sound checkpoint: they begin anew"
        )
    cohort.prepare_references(resumed_at > 0, progress)
    if resumed_at == 0:
        cohort.save()  # every run has a checkpoint of its beginning
    if counts_resumed:
        block.resume(state.count_resumed(cohort))
    # `looks.deciding` has the updates after which members that can hardly win are stopped. An earlier process
    # may have saved the checkpoints of such an update, and ended before it decided which to stop.
    if resumed_at in looks.deciding and state.stop_hopeless(round_, resumed_at):
        _leave(cohort, state, block, updates - resumed_at)
        return False
    after = AfterUpdateOfRound(cohort, updates, looks, state, block, stop)
    for update in train(cohort.engine, after.windows(), updates):
        round_state = after.note(update)
        with after.since_shown.paused():
            after.evaluate(round_state)
            after.save(round_state)
        after.raise_if_stopped(round_state)
        if round_state.all_diverged:
            after.shorten_bar(round_state)
            break
        done = round_state.updates_done
        if done in looks.deciding and state.stop_hopeless(round_, done):
            _leave(cohort, state, block, updates - done)
            return False
    state.write_summaries(cohort)
    cohort.close()
    return True


def _leave(cohort: Cohort, state: SweepProgress, block: SweepDisplay, remaining: int) -> None:
    """End a cohort of which members were stopped early.

    Args:
        cohort: the cohort.
        state: the sweep.
        block: the live display, whose bar is shortened by the updates that stopped members will not do.
        remaining: the number of these updates for each of them.
    """
    stopped = len(cohort.members) - len(state.learning(cohort.members))
    block.shorten_bar(stopped * remaining)
    block.refresh_table()
    cohort.close()


def _print_next_commands(
    sweep: Sweep, result: dict[str, Any], verify: int | None, progress: Progress
) -> None:
    """Print commands that go on from the best member; nothing if there is none."""
    progress.gap()
    best = result["best"]
    if best is None:
        return
    # Only the first command has the label.
    label = "next"
    # Members may be narrow models that stand for a wide one (width transfer). Then the file `sweep.wide`
    # has the settings of the wide run, with the best values.
    if is_file(sweep.wide):
        show_command(progress, label, "train", str(sweep.wide))
        label = ""
    show_command(progress, label, "train", "--from", f"{sweep.run.handle}/best", "--minutes", "5")
    if verify is None:
        show_command(
            progress, "", "sweep", "--out", str(sweep.run.folder), "--verify", str(best["member"])
        )
