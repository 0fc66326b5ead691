"""List runs with what helps a person choose one: kind, model, data, result, size and state.

All of it is read from small files, and from the beginning and the end of metrics.jsonl.
"""

import fcntl
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from monograph.errors import MonographError
from monograph.run.run_index import CONFIG, SWEEP, folders_with_lock, json_object
from monograph.storage.reading import contents, entries, exists, is_file, open_input, parse_json
from monograph.terminal import shell_words

# A run's metrics may be long, so only this many bytes are read at their beginning and at their end.
PIECE_BYTES = 1 << 16
# The states of a run.
FINISHED = "finished"
RUNNING = "running"
STOPPED = "stopped"
DAMAGED = "damaged"


class Measure(NamedTuple):
    """What is measured of a model, such as bits per byte.

    Attributes:
        key: its key in the rows of metrics.
        unit: its unit.
        higher_is_better: whether a higher value is better.
        is_share: whether it is a share of all answers.
    """

    key: str
    unit: str
    higher_is_better: bool = False
    is_share: bool = False


class RunKind(NamedTuple):
    """A kind of run.

    Attributes:
        name: its name.
        measures: what is measured of such a run, the most informative first.
        key: the key of config.toml, SECTION.KEY, that makes a run one of this kind; "" if none does.
        result_keys: keys of config.toml on which the result depends. Only runs with equal values of
            them are compared.
    """

    name: str
    measures: tuple[Measure, ...]
    key: str = ""
    result_keys: tuple[str, ...] = ()


TEXTS = RunKind(
    "texts", (Measure("eval_bits_per_byte", "bits/byte"), Measure("eval_loss", "nats/token"))
)
CONVERSATIONS = RunKind("conversations", (Measure("eval_loss", "nats/token"),))


class ListedRun(NamedTuple):
    """A run or a sweep, as a list shows it.

    Attributes:
        folder: its folder.
        kind: its kind's name or, of a sweep, "sweep of N"; "" if that cannot be read.
        model: what the model is, or what it begins from.
        data: what it is trained on.
        value: its newest result; None before the first.
        measure: what `value` measures.
        size_bytes: the bytes of its files.
        state: one of FINISHED, RUNNING, STOPPED and DAMAGED.
        update: the last update in its metrics.
        updates: the number of updates after which it ends; None if that is not known yet.
        resume: the command that continues it; "" if it cannot be continued.
        fault: what is damaged.
        result_conditions: the conditions of its result, such as the data that it was measured on. Two
            runs can be compared if their conditions are equal.
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
    result_conditions: tuple[str, ...] = ()


class _Damaged(Exception):
    """A file of a run cannot be read; the text says which and why."""


def list_runs(root: Path, kinds: Sequence[RunKind]) -> list[ListedRun]:
    """Return the runs and sweeps of a folder, or the members of a sweep, newest first.

    Args:
        root: the folder.
        kinds: the kinds of runs that config.toml shows by a key of their own (`RunKind.key`). A run
            without any of these keys is on texts or conversations.

    Raises:
        Unreadable: the system failed to read the folder.
    """
    parent = root / "members" if is_file(root / SWEEP) else root
    # From oldest to newest. A folder with checkpoints but without config.toml is listed as damaged.
    begun_folders = [
        folder
        for folder in folders_with_lock(parent)
        if exists(folder / CONFIG) or exists(folder / "checkpoints")
    ]
    return [_read_folder(folder, kinds) for folder in reversed(begun_folders)]


def best_runs(runs: Sequence[ListedRun]) -> set[Path]:
    """Return the folders of the best runs: one of each group of comparable runs.

    A group of a single run has no best one.
    """
    groups: dict[tuple[Any, ...], list[ListedRun]] = {}
    for run in runs:
        if run.value is not None and run.measure is not None:
            groups.setdefault((run.measure, *run.result_conditions), []).append(run)
    return {_best(group).folder for group in groups.values() if len(group) > 1}


def _best(group: Sequence[ListedRun]) -> ListedRun:
    """Return the best of comparable runs, each of which has a result."""
    measure = group[0].measure
    sign = -1 if measure and measure.higher_is_better else 1
    # A result is never None here; `or 0.0` is for the type checker.
    return min(group, key=lambda run: sign * (run.value or 0.0))


def _read_folder(folder: Path, kinds: Sequence[RunKind]) -> ListedRun:
    """Return the run or sweep in a folder; if it cannot be read, with the fault."""
    size_bytes = _size_bytes(folder)
    try:
        is_sweep = is_file(folder / SWEEP)
        run = _read_sweep(folder, kinds) if is_sweep else _read_run(folder, kinds)
        return run._replace(size_bytes=size_bytes)
    except (_Damaged, MonographError, OSError) as error:
        return ListedRun(folder, state=DAMAGED, size_bytes=size_bytes, fault=str(error))


def _read_run(folder: Path, kinds: Sequence[RunKind]) -> ListedRun:
    """Return the run in a folder; raises _Damaged."""
    config = _read_config(folder)
    first_row, last_lines = _read_metrics(folder)
    kind = _kind(config, first_row, kinds)
    value, measure = _newest_result_in_lines(kind, last_lines)
    last_row = _row(last_lines[-1]) if last_lines else {}
    update = last_row.get("update")
    if isinstance(last_row.get("summary"), dict):  # the last row of a run that ended
        state = FINISHED
    elif _is_in_use(folder):
        state = RUNNING
    else:
        state = STOPPED
    resume = ""
    if state == STOPPED and entries(folder / "checkpoints", "step-"):
        resume = f"monograph train --resume {shell_words(folder)}"
    updates = config.get("train", {}).get("updates")
    return ListedRun(
        folder,
        kind=kind.name,
        model=_model(config),
        data=_data(config),
        value=value,
        measure=measure,
        state=state,
        update=update if isinstance(update, int) else 0,
        updates=updates if isinstance(updates, int) else None,
        resume=resume,
        result_conditions=_result_conditions(kind, config, measure),
    )


def _read_sweep(folder: Path, kinds: Sequence[RunKind]) -> ListedRun:
    """Return the sweep in a folder, with the result of its best member; raises _Damaged."""
    config = _read_config(folder)
    # The kind of its members. Only the first row of metrics tells conversations from texts, and a sweep has
    # no rows of its own. So a sweep on conversations counts as one on texts. Its result is found all the
    # same, since the measures of texts include that of conversations.
    kind = _kind(config, {}, kinds)
    try:
        record = parse_json(contents(folder / SWEEP) or b"")
        count = len(record["points"])
        result = record.get("result") or {}
        members = result.get("members", [])
        best = result.get("best")
        best_scores = dict(members[best["member"]]) if best else {}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise _Damaged(f"{SWEEP} cannot be read") from None
    value, measure = _newest_result(kind, [best_scores])
    resume = ""
    if result:
        state = FINISHED
    elif _is_in_use(folder):
        state = RUNNING
    else:
        state = STOPPED
        resume = f"monograph sweep --out {shell_words(folder)}"
    return ListedRun(
        folder,
        kind=f"sweep of {count}",
        model=_model(config),
        data=_data(config),
        value=value,
        measure=measure,
        state=state,
        resume=resume,
        result_conditions=_result_conditions(kind, config, measure),
    )


def _read_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of config.toml by name; raises _Damaged."""
    text = contents(folder / CONFIG)
    if text is None:
        raise _Damaged(f"there is no {CONFIG}")
    try:
        tables = tomllib.loads(text.decode())
    except (ValueError, RecursionError):
        raise _Damaged(f"{CONFIG} is not TOML") from None
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def _read_metrics(folder: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Return the first row of a run's metrics, and the lines in the last PIECE_BYTES of them."""
    path = folder / "metrics.jsonl"
    if not exists(path):
        return {}, []
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        first_piece = file.read(PIECE_BYTES)
        file.seek(max(0, size - PIECE_BYTES))
        last_piece = file.read(PIECE_BYTES)
    # The last line may be half written.
    lines = last_piece[: last_piece.rfind(b"\n") + 1].splitlines()
    if size > PIECE_BYTES:
        lines = lines[1:]  # the first one is usually cut, since the piece begins anywhere in a line
    first_line, line_end, _ = first_piece.partition(b"\n")
    first_row = _row(first_line) if line_end else {}
    return first_row, lines


def _row(line: bytes) -> dict[str, Any]:
    """Return the row in a line of metrics.jsonl; raises _Damaged."""
    row = json_object(line)
    if not row:
        raise _Damaged("metrics.jsonl has a line that is no row")
    return row


def _kind(
    config: Mapping[str, Mapping[str, Any]], first_row: Mapping[str, Any], kinds: Sequence[RunKind]
) -> RunKind:
    """Return a run's kind: the one of `kinds` whose key is in config.toml, or CONVERSATIONS or TEXTS."""
    for kind in kinds:
        if kind.key and _config_value(config, kind.key) is not None:
            return kind
    # Of the other runs, only those on conversations measure the model before the first update.
    is_measured_at_0 = first_row.get("update") == 0 and "eval_loss" in first_row
    return CONVERSATIONS if is_measured_at_0 else TEXTS


def _config_value(config: Mapping[str, Mapping[str, Any]], key: str) -> object:
    """Return the value of SECTION.KEY in config.toml; None if it is not there."""
    section, _, name = key.partition(".")
    return config.get(section, {}).get(name)


def _newest_result_in_lines(
    kind: RunKind, lines: Sequence[bytes]
) -> tuple[float | None, Measure | None]:
    """Return the newest result in lines of metrics, and its measure; None, None if there is none."""
    keys = [measure.key.encode() for measure in kind.measures]
    # Only lines that may have a result are parsed. `map` parses each when it is needed.
    possible_lines = [line for line in reversed(lines) if any(key in line for key in keys)]
    return _newest_result(kind, map(_row, possible_lines))


def _newest_result(
    kind: RunKind, rows: Iterable[Mapping[str, Any]]
) -> tuple[float | None, Measure | None]:
    """Return a result and its measure: the first measure of the kind that any row has, with its newest
    value. If no row has one, return None, None.

    Args:
        kind: the kind of the run.
        rows: rows of metrics, the newest first.
    """
    newest: dict[str, float] = {}  # by the measure's key
    for row in rows:
        # The last row of a run that ended has its numbers in a summary.
        numbers = row["summary"] if isinstance(row.get("summary"), dict) else row
        for measure in kind.measures:
            value = numbers.get(measure.key)
            if isinstance(value, int | float):
                newest.setdefault(measure.key, float(value))
        if kind.measures[0].key in newest:
            break  # no older row can change the answer
    for measure in kind.measures:
        if measure.key in newest:
            return newest[measure.key], measure
    return None, None


def _model(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the model in a few words, such as "olmo2 4 layers of 64, LoRA 8"."""
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
    """Return the source of the data, or the first of several and the number of the others."""
    source = config.get("data", {}).get("source", "stdlib")
    if not isinstance(source, list) or not source:
        return str(source)
    first, *others = source
    return f"{first} and {len(others)} more" if others else str(first)


def _result_conditions(
    kind: RunKind, config: Mapping[str, Mapping[str, Any]], measure: Measure | None
) -> tuple[str, ...]:
    """Return the conditions of a result; see `ListedRun.result_conditions`.

    They are the kind of run, its data, and its values of the kind's `result_keys`. If the unit is nats per
    token, the tokenizer is one of them, too.
    """
    data = config.get("data", {})
    conditions = [kind.name, str(data.get("source")), str(data.get("held_out"))]
    if measure is not None and measure.unit == "nats/token":
        conditions += [str(data.get("tokenizer")), str(data.get("vocab_size"))]
    conditions += [str(_config_value(config, key)) for key in kind.result_keys]
    return tuple(conditions)


def _is_in_use(folder: Path) -> bool:
    """Return whether a process holds the run's lock; False if run.lock cannot be read."""
    with suppress(OSError, MonographError), open_input(folder / "run.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _size_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder and in the folders in it.

    Links are not followed, and what cannot be read counts as nothing.
    """
    return sum(_file_sizes(str(folder)))


def _file_sizes(folder: str) -> Iterator[int]:
    with suppress(OSError), os.scandir(folder) as folder_entries:
        for entry in folder_entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _file_sizes(entry.path)
                else:
                    yield entry.stat(follow_symlinks=False).st_size
