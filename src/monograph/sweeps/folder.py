"""Manage a sweep's folder.

It is like a run's folder, and also has sweep.json, with the sweep's task and results, a table of the
results, and a run's folder for each member. A knob is a key whose value varies between members, and a
point has a value for each knob.
"""

import csv
import hashlib
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field

from monograph.config import KEYS, Settings
from monograph.config import load as load_settings
from monograph.config.axes import SEED, Point
from monograph.config.settings import programs_in, translated_values
from monograph.errors import InputRefused, UsageError
from monograph.run.folder import DEFAULT_ROOT, Run
from monograph.run.recorded_state import Natural, Seconds, Strict
from monograph.run.run_index import SWEEP, runs_in
from monograph.run.writing import write_atomically
from monograph.session.record import write_config
from monograph.session.recorded import run_settings
from monograph.storage.reading import contents, is_file, parse_json
from monograph.sweeps.spec import ORIGIN, Member, describe_knobs, transfer_notes
from monograph.terminal import shell_words

SCHEMA = "monograph.sweep/1"
# The minimum number of tokens that a member trains on, even on a slow machine, if the sweep has no
# arguments. With fewer tokens, the best learning rate would be that of the first few updates.
DEFAULT_TOKENS = 100_000
_SettingKey: TypeAlias = Literal[tuple(KEYS)]  # type: ignore[valid-type]


class _Group(Strict):
    """A group of members in sweep.json, see `monograph.sweeps.spec.MemberGroup`.

    Attributes:
        rounds: for each round, how many members train at once.
        updates: the number of updates of each member.
        why: the reason for these rounds.
        compile: the compile scope.
        eager_updates: see `monograph.sweeps.eager_start.EagerStart.updates`.
        eager_length: see `monograph.sweeps.eager_start.EagerStart.expected_length`.
        deciding_looks: the numbers of updates after which members may be stopped early.
    """

    rounds: list[Annotated[int, Field(ge=1)]]
    updates: Natural
    why: str
    compile: str = "auto"
    eager_updates: Natural = 0
    eager_length: Natural = 0
    deciding_looks: list[Natural] = []


class _Record(Strict):
    """The entries of sweep.json that are checked before a sweep is continued, with their types.

    Other entries, such as `result`, may be there. Only the digest of the whole record protects them.

    Attributes:
        asked: the `task_digest` of the settings and points.
        points: each member's varied values.
        settings: the fingerprint of the settings, which are in config.toml.
        least_tokens: the minimum number of tokens of a member.
        target: the settings of the wide run as TOML, see `Sweep.create`.
        groups: the groups of members, once their rounds are decided.
        distill: whether a model learns from the members at the end.
        prune: the largest probability with which the best setting may be stopped early; None: no
            member is stopped.
        elapsed_s: the time spent so far.
        training_s: the time spent on training.
        tokens: the number of tokens that the members trained on.
    """

    asked: str
    points: Annotated[list[dict[_SettingKey, Any]], Field(min_length=1)]
    settings: str | None = None
    least_tokens: Natural = 0
    target: str | None = None
    groups: Annotated[list[_Group], Field(min_length=1)] | None = None
    distill: bool = False
    prune: Annotated[float, Field(gt=0, lt=1)] | None = None
    elapsed_s: Seconds = 0
    training_s: Seconds = 0
    tokens: Natural = 0


class Sweep:
    """A sweep on disk; lock its `run` before writing anything.

    Attributes:
        run: the folder. Like a run's it has a lock and a config.toml, and `last` can name it.
        record: the content of sweep.json: the entries of `_Record`, the schema's version, and the
            result once there is one.
    """

    def __init__(self, run: Run, record: dict[str, Any]):
        self.run = run
        self.record = record

    @classmethod
    def create(
        cls, out: Path | None, settings: Settings, points: Sequence[Point], target: Settings | None
    ) -> Self:
        """Create a sweep, or return the one in `out` if it has the same settings and points.

        Args:
            out: the folder; None: a new one in runs/.
            settings: the settings that all members share.
            points: each member's varied values.
            target: the settings of the run of a wide model. The members then train a narrow model, its
                proxy, to find the learning rate of the wide one. None: the members are not proxies.

        Raises:
            UsageError: `out` holds another sweep.
            InputRefused: `out` cannot be used, or its sweep.json is damaged.
        """
        if out is not None and is_file(out / SWEEP):
            existing = cls.open(out)
            if existing.record["asked"] != task_digest(settings, points):
                raise UsageError(
                    f"--out {out} holds another sweep (settings, axes or text differ): continue it by "
                    f"`monograph sweep --out {shell_words(out)}`, or name a new folder"
                )
            return existing
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "asked": task_digest(settings, points),
            "points": [dict(point) for point in points],
            "settings": settings.fingerprint,
        }
        # The sweep itself has set the minutes if it was begun without arguments.
        if settings.origins.get("train.minutes") == ORIGIN:
            record["least_tokens"] = DEFAULT_TOKENS
        record["target"] = target.to_toml() if target else None
        sweep = cls(Run.create(out), record)
        with sweep.run.lock(new=True):
            sweep.write()
            write_config(sweep.run, settings, sweep.programs)
        return sweep

    @classmethod
    def open(cls, folder: Path | None = None) -> Self:
        """Return a sweep.

        Args:
            folder: its folder; None: the newest sweep in runs/.

        Raises:
            InputRefused: there is no sweep, or its record is damaged.
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
            if groups is not None:
                member_count = sum(sum(group.rounds) for group in groups)
                if member_count != len(record["points"]):
                    raise ValueError("other members")
            record["points"] = [_restored_point(point) for point in record["points"]]
        except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
            raise InputRefused(
                f"{path}: damaged; put it back, or start the sweep anew in another folder"
            ) from None
        return cls(Run(folder), record)

    @property
    def settings(self) -> Settings:
        """Return the settings that all members share, as they were given.

        Raises:
            InputRefused: see `run_settings`.
        """
        fingerprint = self.record.get("settings")
        return run_settings(self.run, sweep_programs=self.programs, fingerprint=fingerprint)

    @property
    def programs(self) -> list[str]:
        """The values of knobs that name a function in a Python file.

        config.toml has only the shared settings, not the knobs. So this list is also given to
        `write_config`, which marks the code as trusted, and to `run_settings`, which checks it.
        """
        return sorted({value for point in self.points for value in programs_in(point)})

    @property
    def wide(self) -> Path:
        """The path of the wide run's settings with the best knobs, once these are known."""
        return self.run.folder / "wide.toml"

    def write_wide(self, best: Point) -> list[str]:
        """Write the settings of the wide run with the best knobs of its proxy.

        If there is no wide run, nothing is written.

        Returns:
            Lines for the user; empty if there is no wide run.
        """
        if not self.record.get("target"):
            return []
        # `load_settings` reads only files, so the settings are first written without the best knobs.
        write_atomically(self.wide, self.record["target"])
        # These settings are complete, so the environment's variables must not change them.
        target_without_best = load_settings(self.wide, overrides={}, environment={}, recorded=True)
        target = target_without_best.resolve(best, ORIGIN)
        write_atomically(self.wide, target.to_toml())
        # The first group's number of updates stands for that of all groups. The numbers may differ:
        # if the settings give a time, all members train on about the same number of tokens, so a
        # group whose updates have more tokens makes fewer updates.
        proxy_updates = self.record["groups"][0]["updates"]
        return transfer_notes(
            target,
            proxy=self.settings,
            updates=target.train.updates or proxy_updates,
            proxy_updates=proxy_updates,
        )

    @property
    def points(self) -> list[Point]:
        """Return the values that each member varies."""
        points: list[Point] = self.record["points"]
        return points

    def member(self, index: int) -> Run:
        """Return a member's run folder, which may not exist yet."""
        return Run(self.run.folder / "members" / f"{index:03d}")

    def forget_members(self) -> None:
        """Remove the members' folders.

        Members may make their first updates before their number of updates is decided
        (`monograph.sweeps.eager_start`). A process that was stopped in between has left such
        folders.
        """
        shutil.rmtree(self.run.folder / "members", ignore_errors=True)

    @contextmanager
    def lock_members(self, members: Sequence[Member]) -> Iterator[list[Run]]:
        """Yield the members' runs, which are created if they do not exist and locked in the block."""
        with ExitStack() as locks:
            runs = []
            for member in members:
                run = self.member(member.index)
                is_new = not run.has_begun
                if is_new:
                    run = Run.create(run.folder)
                locks.enter_context(run.lock(new=is_new))
                runs.append(run)
            yield runs

    def write(self) -> None:
        """Write sweep.json, whole or not at all.

        Raises:
            DiskFull: the disk is full or fails.
        """
        content = {**self.record, "sha256": _digest(self.record)}
        write_atomically(self.run.folder / SWEEP, json.dumps(content, indent=1) + "\n")

    def write_table(self, member_results: Sequence[dict[str, Any]]) -> Path:
        """Write sweep.csv, with a line for each member and a column for each knob and result.

        Args:
            member_results: each member's results by name, and its varied values under "knobs".

        Returns:
            The path of the file.
        """
        text = io.StringIO()
        path = self.run.folder / "sweep.csv"
        knobs = list(dict.fromkeys(key for member in member_results for key in member["knobs"]))
        results = [key for key in member_results[0] if key != "knobs"]
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["member", *knobs, *results])
        for index, member in enumerate(member_results):
            cells = []
            for key in knobs:
                value = member["knobs"].get(key)
                is_sequence = isinstance(value, list | tuple)
                cells.append(" ".join(map(str, value)) if is_sequence else value)
            table.writerow([index, *cells, *(member[key] for key in results)])
        write_atomically(path, text.getvalue())
        return path

    def link_best(self, index: int) -> None:
        """Make the link `best` point to a member. On a file system without links, do nothing."""
        link = self.run.folder / "best"
        with suppress(OSError):
            temporary = link.with_name(".best")
            temporary.unlink(missing_ok=True)  # a killed process may have left one
            temporary.symlink_to(self.member(index).folder.relative_to(self.run.folder))
            temporary.replace(link)


def seeds_of_best(folder: Path) -> dict[int, Run]:
    """Return the runs of a sweep's best setting, by seed, without those that diverged.

    Args:
        folder: the sweep's folder.

    Raises:
        InputRefused: the sweep did not finish, or every run diverged.
    """
    sweep = Sweep.open(folder)
    result = sweep.record.get("result") or {}
    best = result.get("best")
    member_results = result.get("members", [])
    if not best:
        raise InputRefused(
            f"{folder}: a sweep without a best setting yet: `monograph sweep --out {shell_words(folder)}` continues it"
        )
    runs = {}
    for index, member in enumerate(member_results):
        knobs = dict(member["knobs"])
        seed = knobs.pop(SEED, index)
        if member["diverged"] is None and knobs == best["knobs"]:
            runs[seed] = sweep.member(index)
    return runs


def task_digest(settings: Settings, points: Sequence[Point]) -> str:
    """Return the SHA-256 of a sweep's settings and points, by which a sweep is recognised.

    It does not depend on whether a value comes from a file, an argument or the defaults. Unlike
    `Settings.fingerprint`, it includes the values that may change when a run is resumed, so a sweep
    with another such value is another sweep.
    """
    # The first text of a point has the knobs in the order of the axes, and the second has exact values.
    # Both must stay as they are, since existing sweeps have recorded digests of them.
    point_texts = [describe_knobs(point) + repr(sorted(point.items())) for point in points]
    text = settings.to_toml() + "\n".join(point_texts)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _restored_point(point: dict[str, Any]) -> Point:
    """Return a point as it was before it was written to sweep.json.

    JSON has turned its tuples into lists. An older version of Monograph may have written keys and
    values that are spelled differently today; they are translated.
    """
    restored = Point()
    for key, value in point.items():
        if isinstance(value, list):
            value = tuple(value)
        translated = translated_values(key, value)
        restored |= translated if translated else {key: value}
    return restored
