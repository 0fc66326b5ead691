"""`monograph sweep`: train runs that differ in a few settings, as many at once as is fastest, and
find the best.
"""

import json as jsonlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from monograph.commands.train import run as train_one
from monograph.config import Settings
from monograph.device import default_device, describe
from monograph.distributed.world import World, place
from monograph.errors import Diverged, UsageError
from monograph.loop import train
from monograph.run.progress import Progress, SweepDisplay
from monograph.run.signals import StopSignal
from monograph.run.started import note_start
from monograph.session import ranks
from monograph.session.reporting import finished
from monograph.session.setup import repeatable
from monograph.session.shown_commands import show_command
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import is_file
from monograph.sweeps import results, spec
from monograph.sweeps.after_update import AfterUpdateOfRound
from monograph.sweeps.batch import MemberBatch, resume_batch
from monograph.sweeps.folder import Sweep
from monograph.sweeps.progress import SweepProgress
from monograph.sweeps.results import require_teachers


def run(
    arguments: Sequence[str],
    *,
    samples: int | None,
    verify: int | None,
    out: Path | None,
    distill: bool,
    json: bool,
) -> int:
    """Train or resume the members and compare them; see the command line's help."""
    # Before torch._dynamo is imported, which sets its own cache path in the environment.
    keep_compiled()
    world = World(place(srun=True), lambda line: Progress().line("note", line))
    progress = ranks.progress_of(world)
    repeatable(default_device())
    own = _sweep_of(world, arguments, samples, verify, out) if world.leads else None
    folder = world.agreed(str(own.run.folder.absolute()) if own else None)
    sweep = own or Sweep.open(Path(folder))
    with (
        sweep.run.lock() if world.leads else nullcontext(),
        ranks.one_end(world, sweep.run, lambda: "groups" not in sweep.record),
    ):
        if world.leads:
            note_start(sweep.run)
        if own and distill:
            require_teachers(sweep, world.size)
            sweep.record["distill"] = True
            sweep.write()
        state = SweepProgress(sweep, progress, world)
        if not world.agreed(state.are_over(state.members)):
            _train(state, progress)
            world.gather()
        code = _finish(state, verify, progress, json) if world.leads else 0
        world.agreed(None)
        world.leave()
    return code


def _sweep_of(
    world: World,
    arguments: Sequence[str],
    samples: int | None,
    verify: int | None,
    out: Path | None,
) -> Sweep:
    """Return the new or resumed sweep that the command line names, even if the launcher restarted
    the ranks.
    """
    known = world.recall("sweep") if world.again else None
    out = Path(known) if known else out
    if spec.names_existing_sweep(out, arguments, samples) or (verify is not None and not arguments):
        sweep = Sweep.open(out)
        _require_member(verify, len(sweep.points))
    else:
        specified = spec.spec_of(arguments, samples)
        _require_member(verify, len(specified.points))
        sweep = Sweep.create(out, *specified)
    world.remember("sweep", str(sweep.run.folder.absolute()))
    return sweep


def _finish(state: SweepProgress, verify: int | None, progress: Progress, json: bool) -> int:
    """Compare the members, print the result and return the exit code."""
    state.outcomes = state.read_outcomes()
    result = state.finish()
    if verify is not None:
        eager = state.eager_updates_of(state.members[verify])
        result["verify"] = results.verify(state.outcomes[verify], progress, eager)
    if state.sweep.record.get("distill") and result["best"]:
        result["distilled"] = _distilled(state, result["best"]["member"], progress)
        state.sweep.write()
    _next(state.sweep, result, verify, progress)
    if json:
        print(jsonlib.dumps(result))
    if result["best"] is None:
        raise Diverged(f"every member of {state.sweep.run.folder} diverged: lower optim.lr")
    return 0 if verify is None or result["verify"]["equal"] else 1


def _distilled(state: SweepProgress, best: int, progress: Progress) -> dict[str, Any]:
    """Train the model that learns from the members, or go on with it, and return its results."""
    student = results.open_student(state.sweep, state.outcomes, best)
    if not finished(student):
        progress.gap()
        progress.line(
            "distill",
            f"{student.folder} learns from the text and from the members' averaged probabilities",
        )
        train_one(Settings(), out=None, resume=str(student.folder), from_=None, json=False)
    summary = finished(student) or {}
    return {
        "run": str(student.folder),
        **{key: summary.get(key) for key in (results.NATS, results.BITS)},
    }


def _require_member(verify: int | None, members: int) -> None:
    if verify is not None and not 0 <= verify < members:
        raise UsageError(f"--verify {verify}: the sweep has members 0 to {members - 1}")


def _train(state: SweepProgress, progress: Progress) -> None:
    with state.world.first():
        if not state.world.leads:  # rank 0 has decided which members train at once, and written it
            state.sweep.record |= Sweep.open(state.sweep.run.folder).record
        state.prepare(default_device(), describe())
    with (
        state.block() as block,
        StopSignal(lambda name: block.note(f"{name}: saving after this update")) as stop,
    ):
        try:
            for timing, updates, members in state.rounds:
                if state.are_over(members):
                    continue
                with state.sweep.lock_members(members) as runs:
                    _round(
                        timing.batch(members, runs, updates, progress),
                        updates,
                        state,
                        block,
                        stop,
                        progress,
                    )
        finally:
            state.keep_time()


def _round(
    batch: MemberBatch,
    updates: int,
    state: SweepProgress,
    block: SweepDisplay,
    stop: StopSignal,
    progress: Progress,
) -> None:
    """Train the members of a batch together, from where they stand to their end."""
    had_metrics = any(session.run.metrics_offset for session in batch.sessions)
    if not resume_batch(batch, state.ended(batch.members), progress):
        if had_metrics:
            progress.line(
                "warning", "no update of which every member has a sound checkpoint: they begin anew"
            )
        batch.save()
    block.resume(state.count_resumed(batch))
    after = AfterUpdateOfRound(batch, updates, state, block, stop)
    for update in train(batch.engine, batch.windows, updates):
        round_state = after.note(update)
        with after.paused():
            after.evaluate(round_state)
            after.save(round_state)
        after.stop(round_state)
        if round_state.all_lost:
            after.drop_work(round_state)
            break
    state.write_summaries(batch)
    batch.close()


def _next(sweep: Sweep, result: dict[str, Any], verify: int | None, progress: Progress) -> None:
    progress.gap()
    best = result["best"]
    if best is not None:
        name = f"{sweep.run.handle}/best"
        wide = is_file(sweep.wide)
        if wide:
            show_command(progress, "next", "train", str(sweep.wide))
        show_command(progress, "" if wide else "next", "train", "--from", name, "--minutes", "5")
        if verify is None:
            show_command(
                progress,
                "",
                "sweep",
                "--out",
                str(sweep.run.folder),
                "--verify",
                str(best["member"]),
            )
