"""Read the columns of a .parquet or .arrow file row by row with pyarrow, and locate folders of
saved datasets.

Shapes: N values of a column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from monograph.data.reading import Damaged, import_library, refuse_bombs
from monograph.data.records import (
    EMPTY_VALUES,
    LONGEST_BYTES,
    Fault,
    Record,
    list_names,
    quote,
    text_or_fault,
    utf8_fault,
)
from monograph.errors import InputRefused
from monograph.storage.reading import (
    KeyTwice,
    error_number,
    is_file,
    object_once,
    open_input,
    read_json,
    unreadable,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pyarrow import Array, DataType, RecordBatch, Scalar, Schema

_BATCH_ROWS = 256
_BATCH_BYTES = 1 << 24
# A compressed batch is unpacked whole before any of its rows can be read. Parquet's format sets
# this bound for a page.
_MOST_BATCH_BYTES = (1 << 31) - 1
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3  # values of MessageHeader in Arrow's Message.fbs
_MAGIC = b"ARROW1\0\0"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_NAME_ANOTHER = "name the one with the text as data.text_key, or leave the file out"
_STATE = "state.json"
_INFO = "dataset_info.json"
_DICTIONARY = "dataset_dict.json"
_AGAIN = "; save the dataset again"


def table_rows(path: Path, key: str) -> Iterator[Record]:
    """Yield (row number from 1, text in column `key`, or its fault) for every row.

    Raises:
        Damaged: the file is damaged, or has no column `key` of strings.
        InputRefused: the file cannot be read, or pyarrow is not installed.
    """
    columns = _parquet_columns if path.suffix.lower() == ".parquet" else _arrow_columns
    with _read_by_pyarrow(path) as pa:
        _require_strings(pa, path, _schema(pa, path), key)
        values = (value for column in columns(pa, path, key) for value in column)
        # A dictionary stores a text once for all of its rows, so count the length of each row's
        # text against bombs.
        sized = ((len(text), text) for text in (_text(value, key) for value in values))
        yield from enumerate(refuse_bombs(path, sized), 1)


def table_objects(path: Path, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """Yield (row number from 1, {column: value} of those `keys` that exist, without nulls, or a
    fault) for every row.

    Raises:
        Damaged, InputRefused: as in `table_rows`.
    """
    number = 0
    with _read_by_pyarrow(path) as pa:
        there = [key for key in keys if key in _schema(pa, path).names]
        parts = _parquet_parts if path.suffix.lower() == ".parquet" else _arrow_parts
        chosen = (part.select(there) for part in parts(pa, path, there))
        for part in refuse_bombs(path, ((_unshared_bytes(pa, part), part) for part in chosen)):
            for row in _rows(path, part):
                number += 1
                yield number, _plain(pa, row, part.schema)


def _rows(path: Path, part: RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a sound batch as values of Python, whose dates have the years 1 to 9999."""
    try:
        return part.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError):
        name = next((name for name in part.schema.names if not _is_held(part.column(name))), "")
        fault = f"column {name!r} has a date or time that is outside of the years 1 to 9999"
        raise Damaged(
            path, fault, "correct it, write the column as texts, or leave it out"
        ) from None


def _is_held(column: Array) -> bool:
    """Return whether Python's types hold all values of a column."""
    try:
        column.to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


def _unshared_bytes(pa: ModuleType, part: RecordBatch) -> int:
    """Return how much the values of a batch are once no text is stored for many rows, as
    dictionaries and views do.

    Raises:
        ArrowException: the batch is damaged.
    """
    part.validate(full=True)  # before anything follows its offsets
    waiting = list(part.columns)
    total = 0
    for array in waiting:
        types, kind = pa.types, array.type
        if types.is_struct(kind):
            waiting.extend(array.flatten())
        elif types.is_list(kind) or types.is_large_list(kind):
            waiting.append(array.flatten())
        elif types.is_map(kind):
            offsets = array.offsets
            own = slice(offsets[0].as_py(), offsets[-1].as_py())
            waiting += [array.keys[own], array.items[own]]
        elif types.is_dictionary(kind):
            used = array.indices.drop_null().to_numpy(zero_copy_only=False)
            total += int(_lengths(pa, array.dictionary)[used].sum())
        else:
            total += int(_lengths(pa, array).sum())
    return total


def _lengths(pa: ModuleType, array: Array) -> NDArray[np.int64]:
    """Return the bytes of each value of an array, int64 [N]; where they are no texts, each has its
    share of all.
    """
    import numpy as np  # a configuration is read without it

    if array.type in (pa.string_view(), pa.binary_view()):
        # A view is 16 bytes, of which the first four are the length.
        views_N4 = np.frombuffer(array.buffers()[1], dtype=np.int32).reshape(-1, 4)
        return views_N4[array.offset : array.offset + len(array), 0].astype(np.int64)
    if array.type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        from pyarrow import compute

        bytes_N = compute.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        return np.asarray(bytes_N, dtype=np.int64)
    return np.full(len(array), -(-array.nbytes // max(1, len(array))), dtype=np.int64)


def table_columns(path: Path) -> list[str]:
    """Return the names of a table's columns; raise the errors of `table_rows`."""
    with _read_by_pyarrow(path) as pa:
        return list(_schema(pa, path).names)


def first_filled(path: Path, column: str) -> int | None:
    """Return the first row, from 1, with more than an empty value in a column, or None; see
    `table_rows` for errors.
    """
    number = 0
    with _read_by_pyarrow(path) as pa:
        parts = _parquet_parts if path.suffix.lower() == ".parquet" else _arrow_parts
        for part in refuse_bombs(path, ((part.nbytes, part) for part in parts(pa, path, [column]))):
            for value in part.column(part.schema.get_field_index(column)):
                number += 1
                if value.is_valid and value.as_py() not in EMPTY_VALUES:
                    return number
    return None


@contextmanager
def _read_by_pyarrow(path: Path) -> Iterator[ModuleType]:
    """Yield the module pyarrow, and turn errors in the block into errors that name the file."""
    pa = import_library("pyarrow", path, "parquet")
    try:
        open_input(path).close()  # pyarrow would wait for a FIFO
        yield pa
    # Pyarrow raises any of these for damage; its own exceptions derive from them or from
    # ArrowException.
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error_number(error):
            raise unreadable(path, error) from None
        raise Damaged(path, f"is damaged ({' '.join(str(error).split())[:120]})") from None


def _plain(pa: ModuleType, row: dict[str, Any], schema: Schema) -> dict[str, Any] | Fault:
    """Return a row as values of JSON, without the nulls that tables hold where a row has no value."""
    try:
        there = {name: value for name, value in row.items() if value is not None}
        plain = {
            name: _of_type(pa, value, schema.field(name).type) for name, value in there.items()
        }
        values: dict[str, Any] = json.loads(json.dumps(plain, allow_nan=False))
    except KeyTwice as error:
        return Fault("a key twice", f"has the key {quote(str(error))} twice in one map")
    except (TypeError, ValueError) as error:
        return Fault("not JSON", f"is not JSON: {error}")
    return values


def _of_type(pa: ModuleType, value: Any, kind: DataType) -> Any:
    """Return a value that pyarrow read from a type: structs without their nulls, and maps, too, as
    objects.
    """
    if value is None:
        return None
    if pa.types.is_dictionary(kind):
        return _of_type(pa, value, kind.value_type)
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return {
            field.name: _of_type(pa, value[field.name], field.type)
            for field in fields
            if value[field.name] is not None
        }
    if pa.types.is_map(kind):  # pairs of a key and a value, whose null was written
        return object_once([(key, _of_type(pa, inner, kind.item_type)) for key, inner in value])
    if isinstance(value, list):
        return [_of_type(pa, inner, kind.value_type) for inner in value]
    return value


def _text(value: Scalar, key: str) -> str | Fault:
    """Return the text of a pyarrow scalar, or its fault."""
    value = value.value if hasattr(value, "dictionary") else value
    if value is None or not value.is_valid:
        return text_or_fault(None, key)
    content = value.as_buffer()
    if content.size > LONGEST_BYTES:
        return Fault("too long", f"is longer than {LONGEST_BYTES >> 20} MiB")
    try:
        return text_or_fault(content.to_pybytes().decode(), key)
    except UnicodeDecodeError as error:
        return utf8_fault(error)


def _parquet_columns(pa: ModuleType, path: Path, key: str) -> Iterator[Array]:
    # Read as a dictionary, a text that a file repeats a million times is in memory once.
    for part in _parquet_parts(pa, path, [key], read_dictionary=[key]):
        yield part.column(part.schema.get_field_index(key))


def _parquet_parts(
    pa: ModuleType, path: Path, keys: Sequence[str], read_dictionary: Sequence[str] | None = None
) -> Iterator[RecordBatch]:
    from pyarrow import parquet

    with parquet.ParquetFile(
        path,
        page_checksum_verification=True,
        pre_buffer=False,
        buffer_size=1 << 20,
        read_dictionary=read_dictionary,
    ) as file:
        # Use the metadata of row groups only: reading that of a damaged column makes pyarrow end
        # the process.
        sizes = [
            file.metadata.row_group(group).total_byte_size
            for group in range(file.metadata.num_row_groups)
        ]
        stored = sum(refuse_bombs(path, zip(sizes, sizes, strict=True)))
        rows = file.metadata.num_rows
        batch = max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, stored)))
        seen = 0
        for part in file.iter_batches(batch, columns=list(keys), use_threads=False):
            seen += part.num_rows
            yield part
        if seen != rows:
            raise Damaged(path, f"has {seen:,} rows, not the {rows:,} that it says")


def _schema(pa: ModuleType, path: Path) -> Schema:
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return parquet.read_schema(path)
    with _arrow_reader(pa, path) as reader:
        return reader.schema


def _arrow_columns(pa: ModuleType, path: Path, key: str) -> Iterator[Array]:
    for batch in _arrow_parts(pa, path, [key]):
        column = batch.column(batch.schema.get_field_index(key))
        if not pa.types.is_dictionary(column.type):
            # `_text` checks each row's UTF-8. Viewed as binary, only the offsets are validated,
            # which pyarrow trusts.
            binary = {pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
            column = column.view(binary.get(column.type, pa.binary()))
        column.validate(full=True)
        yield column


def _arrow_parts(pa: ModuleType, path: Path, keys: Sequence[str]) -> Iterator[RecordBatch]:
    with _arrow_reader(pa, path) as reader:
        count = getattr(reader, "num_record_batches", None)  # a stream states none
        with open_input(path) as file:
            claims = _stream_claims(path, file) if count is None else _file_claims(path, file)
            for _ in refuse_bombs(path, claims):
                pass
        batches = reader if count is None else map(reader.get_batch, range(count))
        for batch in batches:
            batch.validate()
            yield batch


# What the checks below read is described at https://arrow.apache.org/docs/format/Columnar.html
# (IPC). The metadata are FlatBuffers tables. Each check yields (bytes that a batch claims to
# become, None), and unpacks nothing.


def _stream_claims(path: Path, file: BinaryIO) -> Iterator[tuple[int, None]]:
    """Check a stream: messages one after the other, and an end mark."""
    size = path.stat().st_size
    begin = 0
    while file.seek(begin) == begin and file.read(8) != _END_OF_STREAM:
        claimed, begin = _claim(path, file, begin, size)
        yield claimed, None


def _file_claims(path: Path, file: BinaryIO) -> Iterator[tuple[int, None]]:
    """Check a file: its footer lists blocks, each with one message, in any order, as polars writes
    dictionaries last.

    A footer may point anywhere, so blocks that share bytes, or are not what they say, are refused.
    """
    size = path.stat().st_size
    ending = 4 + len(_MAGIC.rstrip(b"\0"))  # the footer's length and the magic once more
    file.seek(size - ending)
    footer_begin = size - ending - int.from_bytes(file.read(4), "little")
    if footer_begin < len(_MAGIC):
        raise ValueError("its footer is longer than the file")
    file.seek(footer_begin)
    blocks = sorted(_blocks(file.read(size - ending - footer_begin)))
    end = len(_MAGIC)
    for begin, metadata_bytes, body_bytes in blocks:
        if begin < end or begin + metadata_bytes + body_bytes > footer_begin:
            raise ValueError("its footer lists a block that lies over another or beyond the file")
        claimed, end = _claim(path, file, begin, footer_begin)
        if end != begin + metadata_bytes + body_bytes:
            raise ValueError("its footer lists a block of another size than it has")
        yield claimed, None


def _blocks(footer: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (where it begins, bytes of its metadata, of its body) of each dictionary and batch that
    a footer lists.
    """
    fields = _fields(footer, _number(footer, 0, 4))
    for field in (2, 3):
        if fields(field):
            listed = _linked(footer, fields(field))
            for index in range(_number(footer, listed, 4)):
                place = listed + 4 + 24 * index
                yield (
                    _number(footer, place, 8),
                    _number(footer, place + 8, 4),
                    _number(footer, place + 16, 8),
                )


def _claim(path: Path, file: BinaryIO, begin: int, end: int) -> tuple[int, int]:
    """Return the bytes that a message claims to become, and where it ends, which is not beyond
    `end`.
    """

    def go(place: int) -> int:
        if place > end:
            raise ValueError("a message refers to what is beyond the file")
        return file.seek(place)

    go(begin)
    head = file.read(8)
    if head[:4] != _END_OF_STREAM[:4]:
        raise Damaged(path, "is cut short, or of a format before Arrow 0.15", "write it again")
    begin += 8
    body_begin = go(begin + int.from_bytes(head[4:], "little"))
    metadata = file.read(body_begin - go(begin))
    message = _fields(metadata, _number(metadata, 0, 4))
    kind = _number(metadata, message(1), 1)
    content = _linked(metadata, message(2))
    content = (
        _linked(metadata, _fields(metadata, content)(1)) if kind == _DICTIONARY_BATCH else content
    )
    batch = _fields(metadata, content)
    claimed = 0
    if kind in (_DICTIONARY_BATCH, _RECORD_BATCH) and batch(3):
        buffers = _linked(metadata, batch(2))
        for index in range(_number(metadata, buffers, 4)):
            go(body_begin + _number(metadata, buffers + 4 + 16 * index, 8))
            # -1: stored as it is.
            claimed += max(0, int.from_bytes(file.read(8), "little", signed=True))
    if claimed > _MOST_BATCH_BYTES:
        raise Damaged(
            path, f"has a batch that becomes {claimed:,} bytes", "write it again in smaller batches"
        )
    return claimed, go(body_begin + (_number(metadata, message(3), 8) if message(3) else 0))


def _fields(data: bytes, table: int) -> Callable[[int], int]:
    """Return a function from a field's number to its offset in a FlatBuffers table, or to 0 if the
    field is missing.
    """
    names = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    size = _number(data, names, 2)

    def place(field: int) -> int:
        offset = _number(data, names + 4 + 2 * field, 2) if 4 + 2 * field < size else 0
        return table + offset if offset else 0

    return place


def _linked(data: bytes, place: int) -> int:
    return place + _number(data, place, 4)


def _number(data: bytes, place: int, size: int) -> int:
    if not 0 <= place <= len(data) - size:
        raise ValueError("a message refers to what is beyond it")
    return int.from_bytes(data[place : place + size], "little")


@contextmanager
def _arrow_reader(pa: ModuleType, path: Path) -> Iterator[Any]:
    with open_input(path) as file:
        indexed = file.read(6) == _MAGIC[:6]
        file.seek(-min(8, path.stat().st_size), 2)
        if not indexed and file.read() != _END_OF_STREAM:
            raise Damaged(
                path, "is cut short or added to: it does not end with Arrow's end-of-stream mark"
            )
    with (
        pa.OSFile(str(path)) as file,
        pa.ipc.open_file(file) if indexed else pa.ipc.open_stream(file) as reader,
    ):
        yield reader


def _require_strings(pa: ModuleType, path: Path, schema: Schema, key: str) -> None:
    columns = schema.get_all_field_indices(key)
    if len(columns) != 1:
        many = "several columns" if columns else "no column"
        raise Damaged(
            path, f"has {many} {key!r}; its columns are {list_names(schema.names)}", _NAME_ANOTHER
        )
    kind = schema.field(key).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if kind not in (pa.string(), pa.large_string(), pa.string_view()):
        raise Damaged(
            path,
            f"column {key!r} holds {kind}, not string, large_string or string_view",
            _NAME_ANOTHER,
        )


def saved_tables(folder: Path) -> list[Path] | None:
    """Return the .arrow files, in order, of a folder that `save_to_disk` wrote; None if it is not
    such a folder.

    Raises:
        InputRefused: the saved dataset has several splits, or damaged or missing parts.
    """
    if is_file(folder / _DICTIONARY) and not is_file(folder / _STATE):
        splits = read_json(folder / _DICTIONARY, _AGAIN).get("splits")
        if isinstance(splits, list) and splits and all(isinstance(split, str) for split in splits):
            if len(splits) > 1:
                choice = f"give one of them, such as {folder / splits[0]}"
                raise InputRefused(
                    f"{folder}: a saved dataset with the splits {', '.join(splits)}; {choice}"
                )
            return saved_tables(folder / splits[0])
    if not (is_file(folder / _STATE) and is_file(folder / _INFO)):
        return None
    state = read_json(folder / _STATE, _AGAIN)
    try:
        paths = [folder / file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise InputRefused(f"{folder / _STATE}: is not what save_to_disk writes{_AGAIN}") from None
    if state.get("_indices_data_files"):
        raise InputRefused(
            f"{folder}: saved with an order of its own; call flatten_indices() and save it again"
        )
    for path in paths:
        if path.parent != folder or path.suffix != ".arrow" or not is_file(path):
            raise InputRefused(f"{folder / _STATE}: lists {path.name}, which is not there{_AGAIN}")
    return paths


def hub_tables(name: str) -> list[Path]:
    """Return the .arrow files of the training split of a Hugging Face hub dataset, fetched by
    `datasets` if need be.

    Args:
        name: hf://OWNER/NAME or hf://OWNER/NAME/CONFIGURATION.

    Raises:
        InputRefused: the library `datasets` is not installed, or reports an error (no network, no
            such dataset).
    """
    owner, _, rest = name.removeprefix("hf://").partition("/")
    dataset, _, configuration = rest.partition("/")
    datasets = import_library("datasets", name, "hub")
    try:
        loaded = datasets.load_dataset(f"{owner}/{dataset}", configuration or None, split="train")
        return [Path(file["filename"]) for file in loaded.cache_files]
    except Exception as error:  # the library and the network may raise anything
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        remedy = "or save it to a folder elsewhere, and give that"
        raise InputRefused(f"{name}: cannot be fetched: {reason}; {remedy}") from None
