"""Manage a sweep's folder: a run's folder with sweep.json (task and results), a table, and a run
for each member.
"""

import csv
import hashlib
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from monograph.config import KEYS, Settings
from monograph.config import load as load_settings
from monograph.config.axes import SEED, Point
from monograph.config.settings import programs_in, translated_values
from monograph.errors import InputRefused, UsageError
from monograph.run.folder import DEFAULT_ROOT, Run
from monograph.run.recorded_state import Natural, Seconds, Strict
from monograph.run.run_index import SWEEP, runs_in
from monograph.run.writing import write_whole
from monograph.session.record import write_config
from monograph.session.recorded import run_settings
from monograph.storage.reading import contents, is_file, parse_json
from monograph.sweeps.spec import ORIGIN, Member, describe_knobs, transfer_notes
from monograph.terminal import shell_words

SCHEMA = "monograph.sweep/1"
# The least number of tokens that a member of a sweep without arguments trains on, however slow the
# machine. With fewer, the best rate would be that of the first few updates.
DEFAULT_TOKENS = 100_000


class _Group(Strict):
    rounds: list[Annotated[int, Field(ge=1)]]
    updates: Natural
    why: str
    compile: str = "auto"
    eager_updates: Natural = 0
    eager_length: Natural = 0


class _Record(Strict):
    """The entries of sweep.json that commands rely on, with their types."""

    asked: str
    points: Annotated[list[dict[Literal[tuple(KEYS)], Any]], Field(min_length=1)]  # type: ignore[valid-type]
    settings: str | None = None
    least_tokens: Natural = 0
    target: str | None = None
    groups: Annotated[list[_Group], Field(min_length=1)] | None = None
    distill: bool = False
    elapsed_s: Seconds = 0
    training_s: Seconds = 0
    tokens: Natural = 0


class Sweep:
    """A sweep on disk; `lock` it before writing anything.

    Attributes:
        run: the folder, which counts as a run's for `last`, its lock and its config.toml.
        record: the content of sweep.json: `asked` (a digest of settings and points), `points`,
            `least_tokens` if the sweep has no arguments, `distill` if a model learns from the
            members at the end, later `rounds` and `updates` of the groups, the time spent so far,
            and the result.
    """

    def __init__(self, run: Run, record: dict[str, Any]):
        self.run, self.record = run, record

    @classmethod
    def create(
        cls, out: Path | None, settings: Settings, points: Sequence[Point], target: Settings | None
    ) -> Self:
        """Create a sweep, or return the one in `out` if it has the same settings and points.

        Args:
            out: the folder; None for a new one in runs/.
            settings: the settings that all members share.
            points: the values that each member varies.
            target: the settings of the wide run, if the members are its narrow proxy.

        Raises:
            UsageError: `out` holds another sweep.
            InputRefused: `out` cannot be used, or its sweep.json is damaged.
        """
        if out is not None and is_file(out / SWEEP):
            existing = cls.open(out)
            if existing.record["asked"] != task_digest(settings, points):
                raise UsageError(
                    f"--out {out} holds another sweep (settings, axes or text differ): go on with it by "
                    f"`monograph sweep --out {shell_words(out)}`, or name a new folder"
                )
            return existing
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "asked": task_digest(settings, points),
            "points": [dict(point) for point in points],
            "settings": settings.fingerprint,
        }
        if settings.origins.get("train.minutes") == ORIGIN:
            record["least_tokens"] = DEFAULT_TOKENS
        sweep = cls(Run.create(out), record)
        with sweep.run.lock(new=True):
            record["target"] = target.to_toml() if target else None
            sweep.write()
            write_config(sweep.run, settings, sweep.programs)
        return sweep

    @classmethod
    def open(cls, folder: Path | None = None) -> Self:
        """Return the sweep in a folder, or the newest one in runs/.

        Raises:
            InputRefused: there is none, or its record is damaged.
        """
        if folder is None:
            sweeps = [run for run in runs_in(DEFAULT_ROOT) if is_file(run / SWEEP)]
            if not sweeps:
                raise InputRefused(
                    f"no sweep in {DEFAULT_ROOT}/ yet: start one with `monograph sweep`"
                )
            folder = sweeps[-1]
        path = folder / SWEEP
        content = contents(path)
        if content is None:
            raise InputRefused(f"{folder} is not a sweep: it has no {SWEEP}")
        try:
            record = parse_json(content)
            if record.pop("sha256") != _digest(record):
                raise ValueError("not what was written")
            groups = _Record.model_validate(record).groups
            if groups is not None and sum(sum(group.rounds) for group in groups) != len(
                record["points"]
            ):
                raise ValueError("other members")
            record["points"] = [_point(point) for point in record["points"]]
        except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
            raise InputRefused(
                f"{path}: damaged; put it back, or start the sweep anew in another folder"
            ) from None
        return cls(Run(folder), record)

    @property
    def settings(self) -> Settings:
        """Return the settings that all members share, as given; raises InputRefused like
        `run_settings`.
        """
        return run_settings(self.run, programs=self.programs, recorded=self.record.get("settings"))

    @property
    def programs(self) -> list[str]:
        """Return the values that members vary and that name a function in a Python file."""
        return sorted({value for point in self.points for value in programs_in(point)})

    @property
    def wide(self) -> Path:
        """Return the path of the wide run's settings with the best knobs, written once these are
        known.
        """
        return self.run.folder / "wide.toml"

    def write_wide(self, best: Point) -> list[str]:
        """Write the settings of the wide run with the best knobs of its proxy; return lines for the
        user.
        """
        if not self.record.get("target"):
            return []
        write_whole(self.wide, self.record["target"])
        target = load_settings(self.wide, {}, {}, recorded=True).resolve(best, "sweep")
        write_whole(self.wide, target.to_toml())
        updates = self.record["groups"][0]["updates"]
        return transfer_notes(target, self.settings, target.train.updates or updates, updates)

    @property
    def points(self) -> list[Point]:
        """Return the values that each member varies."""
        points: list[Point] = self.record["points"]
        return points

    def member(self, index: int) -> Run:
        """Return a member's run folder, which may not exist yet."""
        return Run(self.run.folder / "members" / f"{index:03d}")

    def forget_members(self) -> None:
        """Remove what members of a sweep left that was stopped before it was known how long they
        train.
        """
        shutil.rmtree(self.run.folder / "members", ignore_errors=True)

    @contextmanager
    def lock_members(self, members: Sequence[Member]) -> Iterator[list[Run]]:
        """Yield the members' runs, created if missing and locked for the `with` block."""
        with ExitStack() as locks:
            runs = []
            for member in members:
                run = self.member(member.index)
                run = run if run.begun else Run.create(run.folder)
                locks.enter_context(run.lock(new=not run.begun))
                runs.append(run)
            yield runs

    def write(self) -> None:
        """Write sweep.json, whole or not at all; raises DiskFull."""
        content = {**self.record, "sha256": _digest(self.record)}
        write_whole(self.run.folder / SWEEP, json.dumps(content, indent=1) + "\n")

    def write_table(self, members: Sequence[dict[str, Any]]) -> Path:
        """Write sweep.csv: a line for each member, a column for each knob and result."""
        text = io.StringIO()
        path = self.run.folder / "sweep.csv"
        knobs = list(dict.fromkeys(key for member in members for key in member["knobs"]))
        results = [key for key in members[0] if key != "knobs"]
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["member", *knobs, *results])
        for index, member in enumerate(members):
            values = [member["knobs"].get(key) for key in knobs]
            cells = [
                " ".join(map(str, value)) if isinstance(value, list | tuple) else value
                for value in values
            ]
            table.writerow([index, *cells, *(member[key] for key in results)])
        write_whole(path, text.getvalue())
        return path

    def link_best(self, index: int) -> None:
        """Make the link `best` point to the best member; on a file system without links, do
        nothing.
        """
        link = self.run.folder / "best"
        with suppress(OSError):
            temporary = link.with_name(".best")  # only a killed process can have left one
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.member(index).folder.relative_to(self.run.folder))
            temporary.replace(link)


def seeds_of_best(folder: Path) -> dict[int, Run]:
    """Return the runs of a sweep's best setting, by seed, without those that diverged.

    Raises:
        InputRefused: the sweep did not finish, or every run diverged.
    """
    sweep = Sweep.open(folder)
    result = sweep.record.get("result") or {}
    best = result.get("best")
    members = result.get("members", [])
    if not best:
        raise InputRefused(
            f"{folder}: a sweep without a best setting yet: `monograph sweep --out {shell_words(folder)}` goes on"
        )
    return {
        member["knobs"].get(SEED, index): sweep.member(index)
        for index, member in enumerate(members)
        if member["diverged"] is None
        and {k: v for k, v in member["knobs"].items() if k != SEED} == best["knobs"]
    }


def task_digest(settings: Settings, points: Sequence[Point]) -> str:
    """Return the SHA-256 of a sweep's settings and points, which does not depend on the settings'
    origins.
    """
    text = settings.to_toml() + "\n".join(
        describe_knobs(point) + repr(sorted(point.items())) for point in points
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _point(point: dict[str, Any]) -> Point:
    """Return a point with its tuples restored, which JSON turns into lists, and in today's
    spellings.
    """
    found = Point()
    for key, value in point.items():
        restored = tuple(value) if isinstance(value, list) else value
        found |= translated_values(key, restored) or {key: restored}
    return found
