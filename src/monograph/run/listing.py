"""List runs with what a person chooses one by: kind, model, data, result, size and state, read from
small files.
"""

import fcntl
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from monograph.errors import MonographError
from monograph.run.run_index import CONFIG, SWEEP, locked_in, parsed
from monograph.storage.reading import contents, entries, exists, is_file, open_input, parse_json
from monograph.terminal import shell_words

# What is read of the beginning and the end of a run's metrics, which may be long.
PIECE_BYTES = 1 << 16
FINISHED = "finished"
RUNNING = "running"
STOPPED = "stopped"
DAMAGED = "damaged"


class Measure(NamedTuple):
    """What a run's result is.

    Attributes:
        key: the key of a row of metrics that has it.
        unit: its unit.
        higher: whether higher is better.
        is_share: whether it is a share of all answers.
    """

    key: str
    unit: str
    higher: bool = False
    is_share: bool = False


class RunKind(NamedTuple):
    """A kind of run.

    Attributes:
        name: what it is called.
        measures: its results, in the order in which they say most.
        key: the key of config.toml, SECTION.KEY, that makes a run one of this kind; "" if none does.
        alike: keys of config.toml on which the result depends; only runs in which they are equal
            are compared.
    """

    name: str
    measures: tuple[Measure, ...]
    key: str = ""
    alike: tuple[str, ...] = ()


TEXTS = RunKind(
    "texts", (Measure("eval_bits_per_byte", "bits/byte"), Measure("eval_loss", "nats/token"))
)
CONVERSATIONS = RunKind("conversations", (Measure("eval_loss", "nats/token"),))


class Listed(NamedTuple):
    """A run or a sweep.

    Attributes:
        folder: its folder.
        kind: its kind's name or, of a sweep, "sweep of N"; "" if that cannot be read.
        model: what the model is or begins from.
        data: what it is trained on.
        value: its newest result; None before the first.
        measure: what that is.
        size_bytes: the bytes of its files.
        state: one of FINISHED, RUNNING, STOPPED and DAMAGED.
        update: the updates that its metrics have.
        updates: the updates that it is to have; None if that is not known yet.
        resume: the command that goes on with it; "" if none does.
        fault: what is damaged.
        compared_on: runs in which this is equal have comparable results.
    """

    folder: Path
    kind: str = ""
    model: str = ""
    data: str = ""
    value: float | None = None
    measure: Measure | None = None
    size_bytes: int = 0
    state: str = DAMAGED
    update: int = 0
    updates: int | None = None
    resume: str = ""
    fault: str = ""
    compared_on: tuple[str, ...] = ()


class _Damaged(Exception):
    """A file of a run cannot be read; the text says which and why."""


def listed(root: Path, kinds: Sequence[RunKind]) -> list[Listed]:
    """Return the runs and sweeps of a folder, or the members of a sweep, newest first.

    Args:
        root: the folder.
        kinds: the kinds of runs that a key makes; all others are on texts or conversations.

    Raises:
        Unreadable: the system failed to read the folder.
    """
    inner = root / "members" if is_file(root / SWEEP) else root
    begun = [
        folder
        for folder in locked_in(inner)
        if exists(folder / CONFIG) or exists(folder / "checkpoints")
    ]
    return [_listed(folder, kinds) for folder in reversed(begun)]


def best_of(runs: Sequence[Listed]) -> set[Path]:
    """Return the folders of the best run of each set of at least two that can be compared."""
    groups: dict[tuple[Any, ...], list[Listed]] = {}
    for run in runs:
        if run.value is not None and run.measure is not None:
            groups.setdefault((run.measure, *run.compared_on), []).append(run)
    return {_best(group).folder for group in groups.values() if len(group) > 1}


def _best(runs: Sequence[Listed]) -> Listed:
    sign = -1 if runs[0].measure and runs[0].measure.higher else 1
    return min(runs, key=lambda run: sign * (run.value or 0.0))


def _listed(folder: Path, kinds: Sequence[RunKind]) -> Listed:
    size = _size_bytes(folder)
    try:
        found = _sweep(folder) if is_file(folder / SWEEP) else _run(folder, kinds)
        return found._replace(size_bytes=size)
    except _Damaged as damaged:
        return Listed(folder, size_bytes=size, fault=str(damaged))
    except (MonographError, OSError) as error:
        return Listed(folder, size_bytes=size, fault=str(error))


def _run(folder: Path, kinds: Sequence[RunKind]) -> Listed:
    config = _config(folder)
    first, lines = _metrics(folder)
    kind = _kind(config, first, kinds)
    value, measure = _result(kind, lines)
    last = _row(lines[-1]) if lines else {}
    update = last.get("update")
    state = FINISHED
    resume = ""
    if not isinstance(last.get("summary"), dict):
        state = RUNNING if _in_use(folder) else STOPPED
    if state == STOPPED and entries(folder / "checkpoints", "step-"):
        resume = f"monograph train --resume {shell_words(folder)}"
    updates = config.get("train", {}).get("updates")
    return Listed(
        folder,
        kind.name,
        _model(config),
        _data(config),
        value,
        measure,
        state=state,
        update=update if isinstance(update, int) else 0,
        updates=updates if isinstance(updates, int) else None,
        resume=resume,
        compared_on=_compared_on(kind, config, measure),
    )


def _sweep(folder: Path) -> Listed:
    config = _config(folder)
    try:
        record = parse_json(contents(folder / SWEEP) or b"")
        points = record["points"]
        result = record.get("result") or {}
        members = result.get("members", [])
        best = result.get("best")
        numbers = members[best["member"]] if best else {}
        count = len(points)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise _Damaged(f"{SWEEP} cannot be read") from None
    value, measure = _newest(TEXTS, [numbers])
    state = FINISHED if result else RUNNING if _in_use(folder) else STOPPED
    return Listed(
        folder,
        f"sweep of {count}",
        _model(config),
        _data(config),
        value,
        measure,
        state=state,
        resume=f"monograph sweep --out {shell_words(folder)}" if state == STOPPED else "",
        compared_on=_compared_on(TEXTS, config, measure),
    )


def _config(folder: Path) -> dict[str, dict[str, Any]]:
    text = contents(folder / CONFIG)
    if text is None:
        raise _Damaged(f"there is no {CONFIG}")
    try:
        tables = tomllib.loads(text.decode())
    except (ValueError, RecursionError):
        raise _Damaged(f"{CONFIG} is not TOML") from None
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def _metrics(folder: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Return the first row of a run's metrics, and the last lines, as many as a piece of the file
    has.
    """
    path = folder / "metrics.jsonl"
    if not exists(path):
        return {}, []
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(PIECE_BYTES)
        file.seek(max(0, size - PIECE_BYTES))
        end = file.read(PIECE_BYTES)
    # The last line may be cut off while it is written, and the first one of the last piece begins
    # in the middle.
    lines = end[: end.rfind(b"\n") + 1].splitlines()
    if size > PIECE_BYTES:
        lines = lines[1:]
    first, newline, _ = begin.partition(b"\n")
    return _row(first) if newline else {}, lines


def _row(line: bytes) -> dict[str, Any]:
    row = parsed(line)
    if not row:
        raise _Damaged("metrics.jsonl has a line that is no row")
    return row


def _kind(
    config: Mapping[str, Mapping[str, Any]], first: Mapping[str, Any], kinds: Sequence[RunKind]
) -> RunKind:
    for kind in kinds:
        if kind.key and _value(config, kind.key) is not None:
            return kind
    # Only a run on conversations measures the model before the first update.
    return CONVERSATIONS if first.get("update") == 0 and "eval_loss" in first else TEXTS


def _value(config: Mapping[str, Mapping[str, Any]], key: str) -> object:
    """Return the value of SECTION.KEY in config.toml; None if it is not there."""
    section, _, name = key.partition(".")
    return config.get(section, {}).get(name)


def _result(kind: RunKind, lines: Sequence[bytes]) -> tuple[float | None, Measure | None]:
    """Return the newest result in lines of metrics, and what it is; only lines that may have one
    are parsed.
    """
    keys = [measure.key.encode() for measure in kind.measures]
    rows = (_row(line) for line in reversed(lines) if any(key in line for key in keys))
    return _newest(kind, rows)


def _newest(
    kind: RunKind, rows: Iterable[Mapping[str, Any]]
) -> tuple[float | None, Measure | None]:
    """Return the first result in rows, the newest of which comes first, of the measure that says
    most.
    """
    found: dict[str, float] = {}
    best, *_ = kind.measures
    for row in rows:
        numbers = row["summary"] if isinstance(row.get("summary"), dict) else row
        for measure in kind.measures:
            value = numbers.get(measure.key)
            if isinstance(value, int | float):
                found.setdefault(measure.key, float(value))
        if best.key in found:
            break
    return next(
        ((found[measure.key], measure) for measure in kind.measures if measure.key in found),
        (None, None),
    )


def _model(config: Mapping[str, Mapping[str, Any]]) -> str:
    model = config.get("model", {})
    lora = config.get("lora", {})
    if "init" in model:
        name = str(model["init"])
    elif model.get("preset", "auto") == "auto" and "hidden_size" in model:
        name = f"{model.get('num_hidden_layers')} layers of {model['hidden_size']}"
    else:
        name = str(model.get("preset", "auto"))
    if "family" in model:
        name = f"{model['family']} {name}"
    return f"{name}, LoRA {lora['rank']}" if "rank" in lora else name


def _data(config: Mapping[str, Mapping[str, Any]]) -> str:
    source = config.get("data", {}).get("source", "stdlib")
    first, *more = source if isinstance(source, list) and source else [source]
    return f"{first} and {len(more)} more" if more else str(first)


def _compared_on(
    kind: RunKind, config: Mapping[str, Mapping[str, Any]], measure: Measure | None
) -> tuple[str, ...]:
    """Return what results of this kind depend on besides the model: the text, and for tokens the
    tokenizer.
    """
    data = config.get("data", {})
    parts = [kind.name, str(data.get("source")), str(data.get("held_out"))]
    if measure is not None and measure.unit == "nats/token":
        parts += [str(data.get("tokenizer")), str(data.get("vocab_size"))]
    return (*parts, *(str(_value(config, key)) for key in kind.alike))


def _in_use(folder: Path) -> bool:
    """Return whether a process holds the run's lock."""
    with suppress(OSError, MonographError), open_input(folder / "run.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _size_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files, without following links; what cannot be read counts as
    nothing.
    """
    return sum(_sizes(str(folder)))


def _sizes(folder: str) -> Iterator[int]:
    with suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(entry.path)
                else:
                    yield entry.stat(follow_symlinks=False).st_size
