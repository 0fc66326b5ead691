"""Decide what the records of a source are trained as, from a sample of every file.

The decision never depends on a single record, or on how the user names a file: by its own path, by a
folder, by a pattern or with a weight. Records that could be of two kinds are refused, unless a setting
chooses one. Records after the sample are checked when they are read
(`monograph.data.forms.RecordKeys`).
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
    RecordForm,
    RecordKind,
    RecordSettings,
    describe_choices,
    forms_of,
)
from monograph.data.reading import Damaged, decompressed_blocks
from monograph.data.records import Fault, json_objects
from monograph.data.sources import LINE_SUFFIXES, STDIN, TABLE_SUFFIXES, place_of, suffix_of
from monograph.data.tables import table_columns, table_objects
from monograph.errors import InputRefused, UsageError

SAMPLE_RECORDS = 100  # the size of the sample of each file
# This many bytes at the beginning of a text file are searched for a record.
_BEGINNING_BYTES = 1 << 16


def sample_records(
    path: Path, record_settings: RecordSettings
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (record number from 1, record) of the first `SAMPLE_RECORDS` records without a fault.

    The records of a table have only the columns by which a form is recognised.
    """
    if suffix_of(path) in LINE_SUFFIXES:
        records = json_objects(path)
    else:
        records = table_objects(path, _form_columns(path, record_settings))
    without_fault = (
        (number, record) for number, record in records if not isinstance(record, Fault)
    )
    return islice(without_fault, SAMPLE_RECORDS)


def _form_columns(path: Path, record_settings: RecordSettings) -> list[str]:
    """Return the names of a table's columns that can show the form of its records."""
    form_keys = {record_settings.text_key or TEXT}
    for form in FORMS:
        form_keys.update(form.needs)
    return [name for name in table_columns(path) if name in form_keys]


def kind_of_records(
    paths: Sequence[Path], record_settings: RecordSettings, skip_bad: bool
) -> RecordKind | None:
    """Return the kind of the records of some files: what they are trained as.

    Text files count as records of texts. None: no record of the samples has a form.

    Args:
        paths: text files and files of records.
        record_settings: what the settings say about the keys of records.
        skip_bad: whether a damaged file is skipped; otherwise it is an error.

    Raises:
        InputRefused: a record could be of two kinds, a file has records of two kinds, a file is
            damaged, or the text files have records.
        UsageError: two files have records of different kinds.
    """
    first_kind: RecordKind | None = None
    first_path: Path | None = None
    text_files = [path for path in paths if suffix_of(path) not in LINE_SUFFIXES | TABLE_SUFFIXES]
    _refuse_hidden_records(text_files, record_settings)
    for path in paths:
        if path in text_files:
            kind: RecordKind | None = RecordKind.TEXTS
        else:
            kind = _kind_in(path, record_settings, skip_bad)
        if kind is None:
            continue
        if first_kind is None:
            first_kind = kind
            first_path = path
        elif kind is not first_kind:
            both = f"{first_path} holds {first_kind.value} and {path} holds {kind.value}"
            raise UsageError(f"data.source: {both}; give one kind")
    return first_kind


def are_completions(paths: Sequence[Path], record_settings: RecordSettings, skip_bad: bool) -> bool:
    """Return whether the sampled records are prompts with completions, all of them texts.

    Raises:
        Damaged: a file is damaged, and `skip_bad` is false.
    """
    has_completion = False
    for path in paths:
        if suffix_of(path) not in LINE_SUFFIXES | TABLE_SUFFIXES:
            continue
        try:
            for _, record in sample_records(path, record_settings):
                kept = record_settings.drop_ignored(record)
                forms = forms_of(kept, record_settings)
                if COMPLETED_FORM in forms:
                    has_completion = True
                    if not are_texts(kept):
                        return False
                elif forms:
                    return False
        except Damaged:
            if not skip_bad:
                raise
    return has_completion


def _kind_in(path: Path, record_settings: RecordSettings, skip_bad: bool) -> RecordKind | None:
    """Return the kind of a file's records, or None if no record of the sample has a form."""
    form_places: dict[RecordForm, str] = {}  # the place of the first record of each form
    try:
        for number, record in sample_records(path, record_settings):
            forms = forms_of(record_settings.drop_ignored(record), record_settings)
            if len(forms) > 1:
                raise InputRefused(
                    f"{place_of(path, number)}: could be read in two ways: {describe_choices(forms)}"
                )
            for form in forms:
                form_places.setdefault(form, place_of(path, number))
        if not form_places and suffix_of(path) in TABLE_SUFFIXES:
            # No sampled row has a form. The names of the columns say which form good rows would have.
            row = dict.fromkeys(_form_columns(path, record_settings), "")
            forms = forms_of(record_settings.drop_ignored(row), record_settings)
            form_places = dict.fromkeys(forms, str(path))
    except Damaged:
        if not skip_bad:
            raise
    if LABELLED_FORM in form_places:
        # Among labelled answers, an answer without its label is a bad record, not a conversation.
        form_places.pop(COMPLETED_FORM, None)
    kind_places: dict[RecordKind, str] = {}  # the place of the first record of each kind
    for form, place in form_places.items():
        kind_places.setdefault(form.kind, place)
    if len(kind_places) > 1:
        (first, first_place), (second, second_place) = list(kind_places.items())[:2]
        settings_to_choose = " or ".join(dict.fromkeys(form.setting for form in form_places))
        raise InputRefused(
            f"{first_place}: is one of {first.value}, and {second_place} is one of {second.value}; give one kind, or "
            f"choose by {settings_to_choose}, which makes the others bad records"
        )
    return next(iter(kind_places), None)


def _refuse_hidden_records(text_files: Sequence[Path], record_settings: RecordSettings) -> None:
    """Refuse text files that all begin with a record in JSON: its syntax would be trained on.

    If only some of the files begin with a record, they may be meant as text like the others, and no file is
    refused.
    """
    if not text_files or not all(_begins_with_record(path, record_settings) for path in text_files):
        return
    first = "standard input" if text_files[0].name == STDIN else str(text_files[0])
    raise InputRefused(
        f"{first}: holds records in JSON, which would be trained on as a text, with its syntax; write each on a line "
        "of a file whose name ends in .jsonl, and give that"
    )


def _begins_with_record(path: Path, record_settings: RecordSettings) -> bool:
    """Return whether a text file begins with a JSON object that has the keys of a form."""
    block = next(decompressed_blocks(path), b"")[:_BEGINNING_BYTES]
    text = block.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if text.startswith("["):  # an array of records
        text = text[1:].lstrip()
    if not text.startswith("{"):
        return False
    try:
        record, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return bool(forms_of(record_settings.drop_ignored(record), record_settings))
