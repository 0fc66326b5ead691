"""`monograph runs`: a table of the runs in a folder, newest first, with the best of each kind
marked.
"""

import json as jsonlib
import shutil
import sys
from pathlib import Path
from typing import Any

from monograph.config.keys import WAYS_TO_LEARN
from monograph.errors import InputRefused
from monograph.report.quantities import megabytes
from monograph.run.folder import DEFAULT_ROOT
from monograph.run.listing import DAMAGED, FINISHED, STOPPED, Listed, best_of, listed
from monograph.run.run_index import SWEEP
from monograph.storage.reading import is_file, is_folder
from monograph.terminal import is_terminal, one_line, shell_words

HEAD = ("run", "kind", "model", "data", "result", "size", "state")
SHORTENED = ("model", "data")  # the columns that give way on a narrow terminal
LEAST_WIDTH = 12


def run(folder: Path | None, *, json: bool) -> None:
    """Print the runs of a folder, or the members of a sweep; see the command line's help."""
    root = DEFAULT_ROOT if folder is None else folder
    if folder is not None and not is_folder(folder):
        raise InputRefused(
            f"{folder}: there is no such folder; `monograph runs` alone lists those in {DEFAULT_ROOT}/"
        )
    if is_file(root / "run.lock") and not is_file(root / SWEEP):
        above = shell_words("monograph", "runs", root.parent)
        raise InputRefused(f"{root} is a run: `{above}` lists it with those beside it")
    found = listed(root, [way.kind for way in WAYS_TO_LEARN]) if is_folder(root) else []
    best = best_of(found)
    if json:
        print(
            jsonlib.dumps(
                {"schema": "monograph.runs/1", "runs": [_entry(each, best) for each in found]}
            )
        )
        return
    if not found:
        print(f"no run in {root}/ yet: start one with `monograph train`", file=sys.stderr)
        return
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    print(table([_cells(each, best) for each in found], width))
    if best:
        print("\n* the best of the runs with the same data and the same measure")
    if again := next((each for each in found if each.resume), None):
        print(f"{'' if best else chr(10)}go on with the newest that stopped: {again.resume}")


def table(rows: list[tuple[str, ...]], width: int | None) -> str:
    """Return rows under their heads as aligned text; on a terminal of `width` columns model and
    data may be cut.
    """
    rows = [HEAD, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    if width is not None:
        for column in sorted(map(HEAD.index, SHORTENED), key=lambda each: -widths[each]):
            over = sum(widths) + 2 * (len(HEAD) - 1) - width
            widths[column] -= max(0, min(over, widths[column] - LEAST_WIDTH))
    lines = (
        "  ".join(_fitted(cell, size) for cell, size in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _fitted(text: str, width: int) -> str:
    """Return a text in so many columns; of a longer one its end is kept, which tells paths apart."""
    return text.ljust(width) if len(text) <= width else "…" + text[len(text) - width + 1 :]


def _cells(run: Listed, best: set[Path]) -> tuple[str, ...]:
    mark = " *" if run.folder in best else ""
    cells = (
        str(run.folder),
        run.kind,
        _near(run.model),
        _near(run.data),
        _result(run) + mark,
        megabytes(run.size_bytes),
        _state(run),
    )
    return tuple(one_line(cell) for cell in cells)


def _near(text: str) -> str:
    """Return a text in which a path inside the working folder is short."""
    return text.removeprefix(f"{Path.cwd()}/")


def _result(run: Listed) -> str:
    if run.value is None or run.measure is None:
        return "none yet"
    if run.measure.is_share:
        return f"{run.value:.1%} {run.measure.unit.removeprefix('share ')}"
    of = " (best member)" if run.kind.startswith("sweep") else ""
    return f"{run.value:.3f} {run.measure.unit}{of}"


def _state(run: Listed) -> str:
    if run.state == DAMAGED:
        return f"damaged: {run.fault}"
    if run.state == FINISHED or run.kind.startswith("sweep"):
        return run.state
    of = "" if run.updates is None else f" of {run.updates:,}"
    lost = ", nothing saved" if run.state == STOPPED and not run.resume else ""
    return f"{run.state} at update {run.update:,}{of}{lost}"


def _entry(run: Listed, best: set[Path]) -> dict[str, Any]:
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
