"""`monograph runs`: a table of the runs in a folder, newest first, with the best of each kind
marked.
"""

import json as jsonlib
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from monograph.config.keys import WAYS_TO_LEARN
from monograph.errors import InputRefused
from monograph.report.quantities import megabytes
from monograph.run.folder import DEFAULT_ROOT
from monograph.run.listing import (
    DAMAGED,
    FINISHED,
    STOPPED,
    ListedRun,
    best_runs,
    list_runs,
)
from monograph.run.run_index import SWEEP
from monograph.storage.reading import is_file, is_folder
from monograph.terminal import is_terminal, one_line, shell_words

HEAD = ("run", "kind", "model", "data", "result", "size", "state")
# On a narrow terminal these columns are cut, but not below MIN_WIDTH.
CUT_COLUMNS = ("model", "data")
MIN_WIDTH = 12


def run(folder: Path | None, *, json: bool) -> None:
    """Print the runs of a folder, or the members of a sweep; see the command line's help."""
    root = DEFAULT_ROOT if folder is None else folder
    if folder is not None and not is_folder(folder):
        raise InputRefused(
            f"{folder}: there is no such folder; `monograph runs` alone lists those in {DEFAULT_ROOT}/"
        )
    is_single_run = is_file(root / "run.lock") and not is_file(root / SWEEP)
    if is_single_run:
        command = shell_words("monograph", "runs", root.parent)
        raise InputRefused(f"{root} is a run: `{command}` lists it with those beside it")
    runs = list_runs(root, [way.kind for way in WAYS_TO_LEARN]) if is_folder(root) else []
    best = best_runs(runs)
    if json:
        entries = [_json_entry(each, best) for each in runs]
        print(jsonlib.dumps({"schema": "monograph.runs/1", "runs": entries}))
        return
    if not runs:
        print(f"no run in {root}/ yet: start one with `monograph train`", file=sys.stderr)
        return
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    print(table([_cells(each, best) for each in runs], width))
    _print_notes(runs, best)


def _print_notes(runs: Sequence[ListedRun], best: Collection[Path]) -> None:
    """Print what the mark of the best runs means, and how to resume the newest stopped run."""
    resumable = [each for each in runs if each.resume]
    if best or resumable:
        print()
    if best:
        print("* the best of the runs with the same data and the same measure")
    if resumable:
        print(f"go on with the newest that stopped: {resumable[0].resume}")


def table(rows: list[tuple[str, ...]], width: int | None) -> str:
    """Return rows under the heads as aligned text.

    Args:
        rows: the cells of each row.
        width: the columns of the terminal. `CUT_COLUMNS` are cut so that rows fit into it. None means
            that nothing is cut.
    """
    rows = [HEAD, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        # The widest column is cut first; the other one only if that is not enough.
        cut_columns = sorted(map(HEAD.index, CUT_COLUMNS), key=lambda column: -widths[column])
        for column in cut_columns:
            gaps = 2 * (len(HEAD) - 1)
            excess = sum(widths) + gaps - width
            widths[column] -= max(0, min(excess, widths[column] - MIN_WIDTH))
    lines = []
    for row in rows:
        cells = map(_fit, row, widths)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _fit(text: str, width: int) -> str:
    """Return a text that fills `width` columns. A longer one loses its beginning, since paths differ
    at their ends.
    """
    if len(text) <= width:
        return text.ljust(width)
    kept_characters = width - 1
    return "…" + text[len(text) - kept_characters :]


def _cells(run: ListedRun, best: Collection[Path]) -> tuple[str, ...]:
    """Return the cells of a run, in the order of `HEAD`."""
    mark = " *" if run.folder in best else ""
    cells = (
        str(run.folder),
        run.kind,
        _relative(run.model),
        _relative(run.data),
        _result(run) + mark,
        megabytes(run.size_bytes),
        _state(run),
    )
    return tuple(one_line(cell) for cell in cells)


def _relative(text: str) -> str:
    """Return a text that may begin with a path. A path inside the working folder becomes relative."""
    return text.removeprefix(f"{Path.cwd()}/")


def _result(run: ListedRun) -> str:
    """Return a run's result with its unit, such as "1.234 bits/byte"."""
    if run.value is None or run.measure is None:
        return "none yet"
    if run.measure.is_share:
        return f"{run.value:.1%} {run.measure.unit.removeprefix('share ')}"  # such as 81.2% right
    of_member = " (best member)" if run.kind.startswith("sweep") else ""
    return f"{run.value:.3f} {run.measure.unit}{of_member}"


def _state(run: ListedRun) -> str:
    """Return whether a run is finished, stopped or damaged, and how far it is."""
    if run.state == DAMAGED:
        return f"damaged: {run.fault}"
    if run.state == FINISHED or run.kind.startswith("sweep"):
        return run.state
    total = "" if run.updates is None else f" of {run.updates:,}"
    has_nothing_saved = run.state == STOPPED and not run.resume
    unsaved = ", nothing saved" if has_nothing_saved else ""
    return f"{run.state} at update {run.update:,}{total}{unsaved}"


def _json_entry(run: ListedRun, best: Collection[Path]) -> dict[str, Any]:
    """Return a run as a JSON object; `best` has the folders of the best runs."""
    return {
        "run": str(run.folder),
        "kind": run.kind or None,
        "model": run.model or None,
        "data": run.data or None,
        "value": run.value,
        "unit": run.measure.unit if run.measure else None,
        "best": run.folder in best,
        "size_bytes": run.size_bytes,
        "state": run.state,
        "update": run.update,
        "updates": run.updates,
        "resume": run.resume or None,
        "fault": run.fault or None,
    }
