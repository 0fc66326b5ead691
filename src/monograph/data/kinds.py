"""Decide what the records of a source are trained as, from a sample of every file.

The decision never depends on one record, nor on how a file is named: alone, in a folder, by a
pattern or with a weight. Records that could be of two kinds are refused, unless a setting chooses.
Records after the sample are checked as they are read: see `monograph.data.forms.RecordKeys`.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from monograph.data.completions import are_texts
from monograph.data.forms import (
    COMPLETED_FORM,
    FORMS,
    LABELLED_FORM,
    TEXT,
    Form,
    Kind,
    RecordSettings,
    describe_choices,
    forms_of,
)
from monograph.data.reading import Damaged, read_blocks
from monograph.data.records import Fault, json_objects
from monograph.data.sources import LINES, STDIN, TABLES, kind_of, place_of
from monograph.data.tables import table_columns, table_objects
from monograph.errors import InputRefused, UsageError

SAMPLE = 100  # sound records of each file
_BEGINNING_BYTES = 1 << 16  # of a text file, in which a first record is looked for


def sample(path: Path, asked: RecordSettings) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (record number from 1, record) of the first sound records of a file of records.

    A table's records have only the columns that can say what they are.
    """
    records = (
        json_objects(path)
        if kind_of(path) in LINES
        else table_objects(path, _telling_columns(path, asked))
    )
    sound = ((number, record) for number, record in records if not isinstance(record, Fault))
    return islice(sound, SAMPLE)


def _telling_columns(path: Path, asked: RecordSettings) -> list[str]:
    telling = {asked.text_key or TEXT}.union(*(form.needs for form in FORMS))
    return [name for name in table_columns(path) if name in telling]


def kind_of_records(paths: Sequence[Path], asked: RecordSettings, skip_bad: bool) -> Kind | None:
    """Return what the records of these files are trained as; None if no record says.

    Args:
        paths: text files and files of records.
        asked: what the settings say about records.
        skip_bad: whether a damaged file is passed over; otherwise it is an error.

    Raises:
        InputRefused: a record could be of two kinds, a file has records of two kinds, a file is
            damaged, or text files hold records.
        UsageError: two files have records of different kinds.
    """
    first: tuple[Kind, Path] | None = None
    texts = [path for path in paths if kind_of(path) not in LINES | TABLES]
    _refuse_hidden_records(texts, asked)
    for path in paths:
        kind = Kind.TEXTS if path in texts else _kind_in(path, asked, skip_bad)
        if kind is None:
            continue
        if first is None:
            first = kind, path
        elif kind is not first[0]:
            holding = f"{first[1]} holds {first[0].value} and {path} holds {kind.value}"
            raise UsageError(f"data.source: {holding}; give one kind")
    return first[0] if first else None


def are_completions(paths: Sequence[Path], asked: RecordSettings, skip_bad: bool) -> bool:
    """Return whether the records of a sample of these files are prompts with completions, all of
    them texts.

    Raises:
        Damaged: a file is damaged, and `skip_bad` does not pass over it.
    """
    found = False
    for path in paths:
        try:
            for _, record in sample(path, asked) if kind_of(path) in LINES | TABLES else ():
                given = asked.given(record)
                if COMPLETED_FORM in forms_of(given, asked):
                    found = True
                    if not are_texts(given):
                        return False
                elif forms_of(given, asked):
                    return False
        except Damaged:
            if not skip_bad:
                raise
    return found


def _kind_in(path: Path, asked: RecordSettings, skip_bad: bool) -> Kind | None:
    places: dict[Form, str] = {}
    try:
        for number, record in sample(path, asked):
            forms = forms_of(asked.given(record), asked)
            if len(forms) > 1:
                raise InputRefused(
                    f"{place_of(path, number)}: could be read in two ways: {describe_choices(forms)}"
                )
            for form in forms:
                places.setdefault(form, place_of(path, number))
        if not places and kind_of(path) in TABLES:  # all of its first rows are bad
            columns = _telling_columns(path, asked)
            places = dict.fromkeys(
                forms_of(asked.given(dict.fromkeys(columns, "")), asked), f"{path}"
            )
    except Damaged:
        if not skip_bad:
            raise
    if LABELLED_FORM in places:  # an answer without its label is a bad record, not a conversation
        places.pop(COMPLETED_FORM, None)
    kinds: dict[Kind, str] = {}
    for form, place in places.items():
        kinds.setdefault(form.kind, place)
    if len(kinds) > 1:
        (one, where), (other, there) = list(kinds.items())[:2]
        settings = " or ".join(dict.fromkeys(form.setting for form in places))
        raise InputRefused(
            f"{where}: is one of {one.value}, and {there} is one of {other.value}; give one kind, or choose by "
            f"{settings}, which makes the others bad records"
        )
    return next(iter(kinds), None)


def _refuse_hidden_records(texts: Sequence[Path], asked: RecordSettings) -> None:
    """Refuse text files that all hold records as JSON, as their syntax would be trained on."""
    if not texts or not all(_begins_with_record(path, asked) for path in texts):
        return
    named = "standard input" if texts[0].name == STDIN else str(texts[0])
    raise InputRefused(
        f"{named}: holds records in JSON, which would be trained on as a text, with its syntax; write each on a line "
        "of a file whose name ends in .jsonl, and give that"
    )


def _begins_with_record(path: Path, asked: RecordSettings) -> bool:
    block = next(read_blocks(path), b"")[:_BEGINNING_BYTES]
    text = block.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if text.startswith("["):
        text = text[1:].lstrip()
    if not text.startswith("{"):
        return False
    try:
        record, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return bool(forms_of(asked.given(record), asked))
