"""`monograph sweep`: many runs that differ in a few settings, as many at once as pays, and which of them is best."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from monograph import __version__
from monograph.device import clock, default_device, describe
from monograph.distributed.world import World, place
from monograph.errors import Diverged, Stopped, UsageError
from monograph.loop import train
from monograph.run.crowd import CrowdBlock
from monograph.run.journal import Journals
from monograph.run.progress import Progress
from monograph.run.signals import StopSignal
from monograph.session import ranks
from monograph.session.invocation import command, show
from monograph.session.setup import repeatable
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import is_file
from monograph.sweeps import asked
from monograph.sweeps.board import Board
from monograph.sweeps.crew import Crew, go_on
from monograph.sweeps.folder import Sweep
from monograph.sweeps.verify import verify as verified

EVERY = 10  # updates whose numbers are read together


def run(arguments: Sequence[str], *, samples: int | None, verify: int | None, out: Path | None, json: bool) -> int:
    """Train the members, or go on; compare them; see the command line's help."""
    world = World(place(srun=True), lambda line: Progress().line("note", line))
    progress = ranks.progress_of(world)
    progress.header(f"monograph {__version__}   {describe().summary}{ranks.said(world)}")
    repeatable(default_device())
    keep_compiled()
    if world.leads:
        sweep = _sweep_of(world, arguments, samples, verify, out)
    folder = world.agreed(str(sweep.run.folder.absolute()) if world.leads else None)
    if not world.leads:
        sweep = Sweep.open(Path(folder))
    with (
        sweep.run.lock() if world.leads else nullcontext(),
        ranks.one_end(world, sweep.run, lambda: "groups" not in sweep.record),
    ):
        board = Board(sweep, progress, world)
        if not world.agreed(board.over):
            _train(board, progress)
            world.gather()
        code = _told(board, verify, progress, json) if world.leads else 0
        world.agreed(None)
        world.leave()
    return code


def _sweep_of(
    world: World, arguments: Sequence[str], samples: int | None, verify: int | None, out: Path | None
) -> Sweep:
    """The sweep that is asked for, new or to go on with; also where the launcher started its ranks again."""
    known = world.recall("sweep") if world.again else None
    out = Path(known) if known else out
    if asked.continued(out, arguments, samples) or (verify is not None and not arguments):
        sweep = Sweep.open(out)
        _require_member(verify, len(sweep.points))
    else:
        found = asked.asked(arguments, samples)
        _require_member(verify, len(found.points))
        sweep = Sweep.create(out, *found)
    world.remember("sweep", str(sweep.run.folder.absolute()))
    return sweep


def _told(board: Board, verify: int | None, progress: Progress, json: bool) -> int:
    """Compare the members and say what came of it; the exit code."""
    board.outcomes = board.read()
    result = board.finish()
    if verify is not None:
        result["verify"] = verified(board.outcomes[verify], progress)
    _next(board.sweep, result, verify, progress)
    if json:
        print(jsonlib.dumps(result))
    if result["best"] is None:
        raise Diverged(f"every member of {board.sweep.run.folder} diverged: lower optim.lr")
    return 0 if verify is None or result["verify"]["equal"] else 1


def _require_member(verify: int | None, members: int) -> None:
    if verify is not None and not 0 <= verify < members:
        raise UsageError(f"--verify {verify}: the sweep has members 0 to {members - 1}")


def _train(board: Board, progress: Progress) -> None:
    with board.world.first():
        if not board.world.leads:  # which has decided who trains with whom
            board.sweep.record |= Sweep.open(board.sweep.run.folder).record
        board.prepare(default_device(), describe())
    with board.block() as block, StopSignal(lambda name: block.note(f"{name}: saving after this update")) as stop:
        try:
            for timing, updates, members in board.crews:
                if board.all_over(members):
                    continue
                with board.sweep.holding(members) as runs:
                    crew = timing.crew(members, runs, updates, progress)
                    _round(crew, updates, board, block, stop, progress)
        finally:
            board.keep_time()


def _round(crew: Crew, updates: int, board: Board, block: CrowdBlock, stop: StopSignal, progress: Progress) -> None:
    """Train members that train at once, from where they stand to their end."""
    engine, settings = crew.engine, crew.sessions[0].settings
    stood = any(session.run.metrics_offset for session in crew.sessions)
    if not go_on(crew, board.ended(crew.members), progress):
        if stood:
            progress.line("warning", "no update of which every member has a sound checkpoint: they begin anew")
        crew.save()
    journals = Journals([session.run for session in crew.sessions], EVERY)
    began, since = clock(), engine.index
    for update in train(engine, crew.windows, updates):
        done = update.index + 1
        last = done == updates
        if (
            journals.add(update, {"tokens_per_s": board.rate / len(crew.members) or None, "wall_s": board.spent_s})
            or last
        ):
            journals.flush()
            board.trained(crew, done - since, clock() - began)
            block.update(board.done, board.figures)
            since, began = done, clock()
            lost = journals.diverged(updates if last else None)
            crew.freeze({place: journals.ended[place] for place in lost})
        paused, all_lost = clock(), len(crew.ended) == len(crew.members)
        if done % int(settings.train.eval_every) == 0 or last or all_lost:
            journals.flush()
            board.evaluate(crew, done, last=last)
            block.retell()
        if done % int(settings.train.save_every) == 0 or stop.requested or stop.save_requested or last:
            journals.flush()
            stop.save_requested = False
            crew.save()
        began += clock() - paused
        if stop.requested and not (last or all_lost):
            again = command("sweep", "--out", str(board.sweep.run.folder))
            raise Stopped(f"saved at update {done} of {updates}; continue: {again}")
        if all_lost:
            break
    board.ends(crew)
    crew.close()


def _next(sweep: Sweep, result: dict[str, Any], verify: int | None, progress: Progress) -> None:
    progress.gap()
    best = result["best"]
    if best is not None:
        name = f"{sweep.run.handle}/best"
        wide = is_file(sweep.wide)
        if wide:
            show(progress, "next", "train", str(sweep.wide))
        show(progress, "" if wide else "next", "train", "--from", name, "--minutes", "5")
        if verify is None:
            show(progress, "", "sweep", "--out", str(sweep.run.folder), "--verify", str(best["member"]))
