"""Read the records of a run on judged answers, in two parts: one to learn from, and one held out to measure on."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from monograph.data.progress import Progress
from monograph.data.records import Fault, json_objects
from monograph.data.sources import LINES, Sources, find
from monograph.data.tables import table_columns, table_objects
from monograph.errors import InputRefused, UsageError
from monograph.storage.writing import temporary_folder
from monograph.text.tokenizer import Tokenizer, parse

Record = Mapping[str, Any]  # a record as it was read


class Parts(NamedTuple):
    """The items of all records.

    Attributes:
        sources: the files.
        train: the items to learn from, at least one.
        held_out: the items to measure on.
        skipped: {reason: count} of the records that were skipped.
    """

    sources: Sources
    train: list[Any]
    held_out: list[Any]
    skipped: dict[str, int]


def own_tokenizer(reading: Mapping[str, Any], key: str) -> Tokenizer:
    """Return the tokenizer that a run's model has.

    Raises:
        UsageError: it would have to be trained; the message names `key`, which needs it.
    """
    own = parse(reading["tokenizer"])
    if not isinstance(own, Tokenizer):
        raise UsageError(
            f"data.tokenizer = {reading['tokenizer']}: {key} needs a model's tokenizer: name one by model.init"
        )
    return own


def read_parts(
    reading: Mapping[str, Any], item: Callable[[str, Record], Any | Fault], needs: str, progress: Progress | None = None
) -> Parts:
    """Read records from JSON lines or tables.

    Args:
        reading: `source`, `held_out` and `bad_records`, as `monograph.corpus` takes them.
        item: makes an item of (file and line, record), or says what is wrong with it.
        needs: says what a record must have, for messages.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: a record is bad, and the message names its file and line; or nothing is left to learn from.
        UsageError: a source has a weight.
    """
    sides: tuple[list[Any], list[Any]] = ([], [])
    skipped: Counter[str] = Counter()
    with temporary_folder() as spool:
        sources = find(reading["source"], spool, progress)
        for where, record in _records(sources, needs):
            found = record if isinstance(record, Fault) else item(where, record)
            if not isinstance(found, Fault):
                sides[_is_held(found.text, reading["held_out"])].append(found)
            elif reading["bad_records"] == "refuse":
                raise InputRefused(f"{where}: {found.detail}; or set data.bad_records = skip")
            else:
                skipped[found.reason] += 1
    if not sides[0]:
        raise InputRefused(f"{sources.name}: no record is left to train on; give more of them, or lower data.held_out")
    return Parts(sources, *sides, dict(skipped))


def _records(sources: Sources, needs: str) -> Iterator[tuple[str, dict[str, Any] | Fault]]:
    """Yield (file and line, record or its fault)."""
    for file in sources.files:
        if file.weight != 1:
            raise UsageError(f"data.source: {file.path} has a weight, which texts alone may have: leave it out")
        if not file.has_records:
            raise InputRefused(f"{file.path}: {needs}: expected a file .jsonl, .ndjson, .parquet or .arrow")
        lines = file.suffix in LINES
        records = json_objects(file.path, exact=True) if lines else table_objects(file.path, table_columns(file.path))
        yield from ((f"{file.path}:{number}", record) for number, record in records)


def _is_held(text: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") < share * 2**48
