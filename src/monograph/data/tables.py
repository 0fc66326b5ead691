"""Read the rows of .parquet and .arrow files with pyarrow, and find the files of saved datasets.

Any file may be damaged, or made to exhaust memory. So the sizes in a file are checked before anything
is unpacked, and its offsets are checked before pyarrow follows them.

A *batch* is a number of consecutive rows, which pyarrow reads together. `pa` is the module pyarrow. It is
optional, so it is imported only where it is needed, by `_read_by_pyarrow`.

Shapes: N values of a column.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from monograph.data.reading import Damaged, import_library, refuse_bombs
from monograph.data.records import (
    EMPTY_VALUES,
    MAX_RECORD_BYTES,
    Fault,
    NumberedText,
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

# The largest batch that is read from a .parquet file. The batches of an .arrow file have the size
# that its writer chose.
_BATCH_ROWS = 256
_BATCH_BYTES = 1 << 24
# The largest batch of an .arrow file, which is unpacked as a whole before any of its rows can be
# read. It is the bound that Parquet's format sets for a page.
_MAX_BATCH_BYTES = (1 << 31) - 1
# Values of MessageHeader in Arrow's Message.fbs.
_DICTIONARY_BATCH = 2
_RECORD_BATCH = 3
_MAGIC = b"ARROW1\0\0"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_NAME_TEXT_COLUMN = "name the one with the text as data.text_key, or leave the file out"
# The files in the folder of a dataset that the library `datasets` has saved.
_STATE_FILE = "state.json"
_INFO_FILE = "dataset_info.json"
_SPLITS_FILE = "dataset_dict.json"
_SAVE_AGAIN = "; save the dataset again"


def table_texts(path: Path, key: str) -> Iterator[NumberedText]:
    """Yield (row number from 1, text in the column `key` or a fault) for every row.

    Raises:
        Damaged: the file is damaged, or has no column `key` of strings.
        InputRefused: the file cannot be read, or pyarrow is not installed.
    """
    read_columns = _parquet_columns if path.suffix.lower() == ".parquet" else _arrow_columns
    with _read_by_pyarrow(path) as pa:
        _require_strings(pa, path, _schema(pa, path), key)
        values = (value for column in read_columns(pa, path, key) for value in column)
        texts = (_text(value, key) for value in values)
        # A file may store a text once for many rows, so `refuse_bombs` gets the length of each row's
        # text. A `Fault` in place of a text has the length 2, which is too small to matter.
        sized_texts = ((len(text), text) for text in texts)
        yield from enumerate(refuse_bombs(path, sized_texts), 1)


def table_objects(path: Path, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """Yield (row number from 1, {column: value} or a fault) for every row.

    Values that are null are left out.

    Args:
        path: the file.
        keys: the columns to read; those that the table does not have are ignored.

    Raises:
        Damaged, InputRefused: as in `table_texts`.
    """
    number = 0
    with _read_by_pyarrow(path) as pa:
        columns = [key for key in keys if key in _schema(pa, path).names]
        read_batches = _parquet_batches if path.suffix.lower() == ".parquet" else _arrow_batches
        batches = (batch.select(columns) for batch in read_batches(pa, path, columns))
        sized_batches = ((_unshared_bytes(pa, batch), batch) for batch in batches)
        for batch in refuse_bombs(path, sized_batches):
            for row in _rows(path, batch):
                number += 1
                yield number, _json_values(pa, row, batch.schema)


def _rows(path: Path, batch: RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of an undamaged batch as Python values.

    Raises:
        Damaged: a date is outside the years 1 to 9999, the only ones that Python's dates can have.
    """
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError):
        names = batch.schema.names
        name = next((name for name in names if not _is_convertible(batch.column(name))), "")
        fault = f"column {name!r} has a date or time that is outside of the years 1 to 9999"
        raise Damaged(
            path, fault, "correct it, write the column as texts, or leave it out"
        ) from None


def _is_convertible(column: Array) -> bool:
    """Return whether all values of a column can become Python values."""
    try:
        column.to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


def _unshared_bytes(pa: ModuleType, batch: RecordBatch) -> int:
    """Return how many bytes a batch's values would take if no rows shared a value.

    A dictionary, or an array of views, stores a value once for many rows. Here the value counts once
    for each row that has it.

    Raises:
        ArrowException: the batch is damaged.
    """
    batch.validate(full=True)  # This comes first, because the code below follows the offsets.
    arrays = list(batch.columns)
    total_bytes = 0
    # The list grows in the loop: the arrays inside a nested array are appended.
    for array in arrays:
        types = pa.types
        kind = array.type
        if types.is_struct(kind):
            arrays.extend(array.flatten())
        elif types.is_list(kind) or types.is_large_list(kind):
            arrays.append(array.flatten())
        elif types.is_map(kind):
            offsets = array.offsets
            # The array may be a slice of a larger one, but `keys` and `items` have the entries of
            # the larger one.
            own_entries = slice(offsets[0].as_py(), offsets[-1].as_py())
            arrays += [array.keys[own_entries], array.items[own_entries]]
        elif types.is_dictionary(kind):
            row_indices = array.indices.drop_null().to_numpy(zero_copy_only=False)
            total_bytes += int(_value_bytes(pa, array.dictionary)[row_indices].sum())
        else:
            total_bytes += int(_value_bytes(pa, array).sum())
    return total_bytes


def _value_bytes(pa: ModuleType, array: Array) -> NDArray[np.int64]:
    """Return the bytes of each value of an array, int64 [N].

    The sizes of texts and bytes are exact. A value of another type gets an equal share of the
    array's bytes.
    """
    import numpy as np  # It is imported here, because a configuration is read without numpy.

    if array.type in (pa.string_view(), pa.binary_view()):
        # Each value has a view of 16 bytes, and the first four bytes of a view are the value's length.
        # This array may be cut from a larger one, and the buffer is then that of the larger one.
        views_4 = np.frombuffer(array.buffers()[1], dtype=np.int32).reshape(-1, 4)
        return views_4[array.offset : array.offset + len(array), 0].astype(np.int64)
    if array.type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        from pyarrow import compute

        bytes_N = compute.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        return np.asarray(bytes_N, dtype=np.int64)
    share_bytes = -(-array.nbytes // max(1, len(array)))  # rounded up
    return np.full(len(array), share_bytes, dtype=np.int64)


def table_columns(path: Path) -> list[str]:
    """Return the names of a table's columns.

    Raises:
        Damaged, InputRefused: as in `table_texts`.
    """
    with _read_by_pyarrow(path) as pa:
        return list(_schema(pa, path).names)


def first_row_with_value(path: Path, column: str) -> int | None:
    """Return the first row, from 1, whose value in a column is not empty; None if there is none.

    Raises:
        Damaged, InputRefused: as in `table_texts`.
    """
    number = 0
    with _read_by_pyarrow(path) as pa:
        read_batches = _parquet_batches if path.suffix.lower() == ".parquet" else _arrow_batches
        sized_batches = ((batch.nbytes, batch) for batch in read_batches(pa, path, [column]))
        for batch in refuse_bombs(path, sized_batches):
            for value in batch.column(batch.schema.get_field_index(column)):
                number += 1
                if value.is_valid and value.as_py() not in EMPTY_VALUES:
                    return number
    return None


@contextmanager
def _read_by_pyarrow(path: Path) -> Iterator[ModuleType]:
    """Yield the module pyarrow, and turn errors in the block into errors that name the file."""
    pa = import_library("pyarrow", path, "parquet")
    try:
        open_input(path).close()  # `open_input` refuses a FIFO; pyarrow would wait for a writer.
        yield pa
    # Pyarrow may raise any of these errors if a file is damaged, e.g. MemoryError for a wrong size.
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        # An OSError with a number is from the operating system, not about the file's content.
        if isinstance(error, OSError) and error_number(error):
            raise unreadable(path, error) from None
        raise Damaged(path, f"is damaged ({' '.join(str(error).split())[:120]})") from None


def _json_values(pa: ModuleType, row: dict[str, Any], schema: Schema) -> dict[str, Any] | Fault:
    """Return a row as JSON values, or its fault.

    Nulls are left out, because a table has a null where a row has no value.

    Args:
        pa: the module pyarrow.
        row: {column: value}, as pyarrow has read them.
        schema: the types of the columns.
    """
    try:
        values = {
            name: _with_objects(pa, value, schema.field(name).type)
            for name, value in row.items()
            if value is not None
        }
        # `dumps` refuses values that JSON does not have, such as NaN. All other values are written and
        # read again, so that they equal those of a record in a line of JSON: tuples become lists, for
        # example.
        json_values: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    except KeyTwice as error:
        return Fault("a key twice", f"has the key {quote(str(error))} twice in one map")
    except (TypeError, ValueError) as error:
        return Fault("not JSON", f"is not JSON: {error}")
    return json_values


def _with_objects(pa: ModuleType, value: Any, kind: DataType) -> Any:
    """Return a value in which all structs and maps are dicts.

    Nulls in structs are left out, because a struct has a null where its writer gave no value.

    Args:
        pa: the module pyarrow.
        value: the value that pyarrow has read.
        kind: the value's type.
    """
    if value is None:
        return None
    if pa.types.is_dictionary(kind):
        return _with_objects(pa, value, kind.value_type)
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return {
            field.name: _with_objects(pa, value[field.name], field.type)
            for field in fields
            if value[field.name] is not None
        }
    if pa.types.is_map(kind):
        # Pyarrow returns a map as a list of (key, value). A null in a map is kept: a map has only
        # keys that its writer gave.
        return object_once(
            [(key, _with_objects(pa, inner, kind.item_type)) for key, inner in value]
        )
    if isinstance(value, list):
        return [_with_objects(pa, inner, kind.value_type) for inner in value]
    return value


def _text(value: Scalar, key: str) -> str | Fault:
    """Return the text of a pyarrow scalar, or its fault."""
    if hasattr(value, "dictionary"):  # The scalar is an index into a dictionary of texts.
        value = value.value
    if value is None or not value.is_valid:
        return text_or_fault(None, key)
    content = value.as_buffer()
    if content.size > MAX_RECORD_BYTES:
        return Fault("too long", f"is longer than {MAX_RECORD_BYTES >> 20} MiB")
    try:
        return text_or_fault(content.to_pybytes().decode(), key)
    except UnicodeDecodeError as error:
        return utf8_fault(error)


def _parquet_columns(pa: ModuleType, path: Path, key: str) -> Iterator[Array]:
    """Yield the column `key` of each batch of a .parquet file."""
    # With `read_dictionary`, a text that the file repeats a million times is in memory once.
    for batch in _parquet_batches(pa, path, [key], read_dictionary=[key]):
        yield batch.column(batch.schema.get_field_index(key))


def _parquet_batches(
    pa: ModuleType, path: Path, keys: Sequence[str], read_dictionary: Sequence[str] | None = None
) -> Iterator[RecordBatch]:
    """Yield the columns `keys` of a .parquet file in batches.

    Raises:
        Damaged: the file is a compression bomb, or its number of rows is not that in its metadata.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(
        path,
        page_checksum_verification=True,
        pre_buffer=False,
        buffer_size=1 << 20,
        read_dictionary=read_dictionary,
    ) as file:
        # The sizes are those of row groups, not of columns, because pyarrow ends the process if it
        # reads the metadata of a damaged column.
        sizes = [
            file.metadata.row_group(group).total_byte_size
            for group in range(file.metadata.num_row_groups)
        ]
        # Here the items that `refuse_bombs` checks and yields are the sizes themselves.
        total_bytes = sum(refuse_bombs(path, zip(sizes, sizes, strict=True)))
        rows = file.metadata.num_rows
        rows_in_batch_bytes = _BATCH_BYTES * rows // max(1, total_bytes)
        batch_rows = max(1, min(_BATCH_ROWS, rows_in_batch_bytes))
        read_rows = 0
        for batch in file.iter_batches(batch_rows, columns=list(keys), use_threads=False):
            read_rows += batch.num_rows
            yield batch
        if read_rows != rows:
            raise Damaged(path, f"has {read_rows:,} rows, not the {rows:,} that it says")


def _schema(pa: ModuleType, path: Path) -> Schema:
    """Return the names and types of a table's columns."""
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return parquet.read_schema(path)
    with _arrow_reader(pa, path) as reader:
        return reader.schema


def _arrow_columns(pa: ModuleType, path: Path, key: str) -> Iterator[Array]:
    """Yield the column `key` of each batch of an .arrow file.

    A column of texts is yielded as a column of bytes. A column that stores its texts in a
    dictionary is yielded unchanged.
    """
    for batch in _arrow_batches(pa, path, [key]):
        column = batch.column(batch.schema.get_field_index(key))
        if not pa.types.is_dictionary(column.type):
            # The column is viewed as bytes, so that `validate` checks only the offsets, which
            # pyarrow trusts. In a column of texts, `validate` would refuse the whole file for one
            # text that is not UTF-8; `_text` checks the UTF-8 of each row instead.
            binary_types = {
                pa.large_string(): pa.large_binary(),
                pa.string_view(): pa.binary_view(),
            }
            column = column.view(binary_types.get(column.type, pa.binary()))
        column.validate(full=True)
        yield column


def _arrow_batches(pa: ModuleType, path: Path, keys: Sequence[str]) -> Iterator[RecordBatch]:
    """Yield the batches of an .arrow file, with all of its columns.

    The argument `keys` is not used: it is there so that this function can be called in the same way
    as `_parquet_batches`.

    Raises:
        Damaged: the file is a compression bomb, or has a batch that is too large.
    """
    with _arrow_reader(pa, path) as reader:
        batch_count = getattr(reader, "num_record_batches", None)  # None for a stream
        with open_input(path) as file:
            if batch_count is None:
                sizes = _stream_sizes(path, file)
            else:
                sizes = _file_sizes(path, file)
            # The loop has no body: `refuse_bombs` checks all sizes, before the first batch is unpacked.
            for _ in refuse_bombs(path, ((size, None) for size in sizes)):
                pass
        batches = reader if batch_count is None else map(reader.get_batch, range(batch_count))
        for batch in batches:
            batch.validate()
            yield batch


# The functions from here to `_read_number` check the sizes in an .arrow file without unpacking
# anything. The format is described at https://arrow.apache.org/docs/format/Columnar.html (IPC): a
# file or a stream is a sequence of messages. A message has metadata, which are FlatBuffers tables,
# and a body, which has the buffers of a batch. A message says how large its buffers become when
# they are unpacked: these are the bytes that it *claims*.


def _stream_sizes(path: Path, file: BinaryIO) -> Iterator[int]:
    """Check a stream, and yield the bytes that each of its messages claims.

    A stream is messages, one after the other, and then an end mark.
    """
    file_bytes = path.stat().st_size
    begin = 0
    while True:
        file.seek(begin)
        if file.read(8) == _END_OF_STREAM:
            return
        claimed_bytes, begin = _check_message(path, file, begin, file_bytes)
        yield claimed_bytes


def _file_sizes(path: Path, file: BinaryIO) -> Iterator[int]:
    """Check a file that has a footer, and yield the bytes that each of its messages claims.

    The footer of a file lists blocks. Each block has one message. The blocks may be in any order:
    polars, for example, writes dictionaries last. A hostile footer may point anywhere, so blocks are
    refused if they overlap, or if their size is not the one in the footer.
    """
    file_bytes = path.stat().st_size
    ending_bytes = 4 + len(_MAGIC.rstrip(b"\0"))  # the footer's length, and the magic again
    file.seek(file_bytes - ending_bytes)
    footer_bytes = int.from_bytes(file.read(4), "little")
    footer_begin = file_bytes - ending_bytes - footer_bytes
    if footer_begin < len(_MAGIC):
        raise ValueError("its footer is longer than the file")
    file.seek(footer_begin)
    blocks = sorted(_footer_blocks(file.read(footer_bytes)))
    previous_end = len(_MAGIC)
    for block in blocks:
        block_end = block.begin + block.metadata_bytes + block.body_bytes
        if block.begin < previous_end or block_end > footer_begin:
            raise ValueError("its footer lists a block that lies over another or beyond the file")
        claimed_bytes, message_end = _check_message(path, file, block.begin, footer_begin)
        if message_end != block_end:
            raise ValueError("its footer lists a block of another size than it has")
        yield claimed_bytes
        previous_end = message_end


class _Block(NamedTuple):
    """An entry of a footer: where a message begins in the file, and how long its two parts are."""

    begin: int
    metadata_bytes: int
    body_bytes: int


def _footer_blocks(footer: bytes) -> Iterator[_Block]:
    """Yield the blocks of dictionaries and batches that a footer lists."""
    offset_of = _field_offsets(footer, _read_number(footer, 0, 4))
    for field in (2, 3):  # `dictionaries` and `recordBatches` of Footer in Arrow's File.fbs
        if offset_of(field):
            # A list begins with its length, in 4 bytes.
            blocks_offset = _follow_reference(footer, offset_of(field))
            count = _read_number(footer, blocks_offset, 4)
            for index in range(count):
                # A block has 24 bytes: 8 for the first number, 4 for the second and 4 of padding,
                # and 8 for the third.
                offset = blocks_offset + 4 + 24 * index
                yield _Block(
                    begin=_read_number(footer, offset, 8),
                    metadata_bytes=_read_number(footer, offset + 8, 4),
                    body_bytes=_read_number(footer, offset + 16, 8),
                )


def _check_message(path: Path, file: BinaryIO, begin: int, limit: int) -> tuple[int, int]:
    """Check a message, and return (the bytes that it claims, the position in the file at its end).

    Args:
        path: the file, for errors.
        file: the opened file.
        begin: the position at which the message begins.
        limit: the last position at which the message may end.

    Raises:
        Damaged: the message claims too many bytes, or it is cut short.
        ValueError: the message refers to a position beyond `limit`.
    """

    def checked(position: int) -> int:
        if position > limit:
            raise ValueError("a message refers to what is beyond the file")
        return position

    file.seek(checked(begin))
    head = file.read(8)  # the 4 bytes that begin every message, and the length of the metadata
    if head[:4] != _END_OF_STREAM[:4]:
        raise Damaged(path, "is cut short, or of a format before Arrow 0.15", "write it again")
    metadata_bytes = int.from_bytes(head[4:], "little")
    body_begin = checked(begin + 8 + metadata_bytes)
    metadata = file.read(metadata_bytes)
    # Fields of Message: 1 is the type of the content, 2 the content, 3 the length of the body.
    message_field = _field_offsets(metadata, _read_number(metadata, 0, 4))
    kind = _read_number(metadata, message_field(1), 1)
    content_offset = _follow_reference(metadata, message_field(2))
    if kind == _DICTIONARY_BATCH:
        # The content is a DictionaryBatch, whose field 1 is a RecordBatch.
        dictionary_field = _field_offsets(metadata, content_offset)
        content_offset = _follow_reference(metadata, dictionary_field(1))
    # Fields of RecordBatch: 2 is the list of buffers, 3 the compression. For a batch that is not
    # compressed the number of claimed bytes stays 0, because its buffers do not become larger.
    batch_field = _field_offsets(metadata, content_offset)
    claimed_bytes = 0
    if kind in (_DICTIONARY_BATCH, _RECORD_BATCH) and batch_field(3):
        buffers_offset = _follow_reference(metadata, batch_field(2))
        count = _read_number(metadata, buffers_offset, 4)
        for index in range(count):
            # The list begins with its length, in 4 bytes. Each entry has 16 bytes, and the first 8 are
            # the buffer's position in the body. A buffer begins with its unpacked length, in 8 bytes, or
            # with -1 if it is not compressed.
            buffer_begin = body_begin + _read_number(metadata, buffers_offset + 4 + 16 * index, 8)
            file.seek(checked(buffer_begin))
            claimed_bytes += max(0, int.from_bytes(file.read(8), "little", signed=True))
    if claimed_bytes > _MAX_BATCH_BYTES:
        raise Damaged(
            path,
            f"has a batch that becomes {claimed_bytes:,} bytes",
            "write it again in smaller batches",
        )
    body_bytes = _read_number(metadata, message_field(3), 8) if message_field(3) else 0
    return claimed_bytes, checked(body_begin + body_bytes)


def _field_offsets(data: bytes, table: int) -> Callable[[int], int]:
    """Return a function from the number of a field of a FlatBuffers table to its offset in `data`.

    The offset is 0 if the table does not have the field.

    Args:
        data: the FlatBuffers message or footer.
        table: the offset of the table in `data`. The table begins with the distance back to its
            vtable, a list of the offsets of the table's fields.
    """
    vtable = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    vtable_bytes = _read_number(data, vtable, 2)

    def offset_of(field: int) -> int:
        # The vtable begins with two lengths of 2 bytes, and has 2 bytes for each field.
        entry = 4 + 2 * field
        if entry >= vtable_bytes:
            return 0
        offset_in_table = _read_number(data, vtable + entry, 2)
        return table + offset_in_table if offset_in_table else 0

    return offset_of


def _follow_reference(data: bytes, offset: int) -> int:
    """Return the offset to which the field at `offset` refers.

    The field contains the distance, in 4 bytes, from itself to that offset.
    """
    return offset + _read_number(data, offset, 4)


def _read_number(data: bytes, offset: int, size: int) -> int:
    """Return the unsigned integer of `size` bytes at an offset."""
    if not 0 <= offset <= len(data) - size:
        raise ValueError("a message refers to what is beyond it")
    return int.from_bytes(data[offset : offset + size], "little")


@contextmanager
def _arrow_reader(pa: ModuleType, path: Path) -> Iterator[Any]:
    """Yield pyarrow's reader of an .arrow file, which either has a footer or is a stream."""
    with open_input(path) as file:
        has_footer = file.read(6) == _MAGIC[:6]
        # The last 8 bytes, or all of a smaller file.
        file.seek(-min(len(_END_OF_STREAM), path.stat().st_size), os.SEEK_END)
        if not has_footer and file.read() != _END_OF_STREAM:
            raise Damaged(
                path, "is cut short or added to: it does not end with Arrow's end-of-stream mark"
            )
    open_reader = pa.ipc.open_file if has_footer else pa.ipc.open_stream
    with pa.OSFile(str(path)) as file, open_reader(file) as reader:
        yield reader


def _require_strings(pa: ModuleType, path: Path, schema: Schema, key: str) -> None:
    """Require that a table has exactly one column named `key`, and that its values are texts."""
    columns = schema.get_all_field_indices(key)
    if len(columns) != 1:
        number = "several columns" if columns else "no column"
        raise Damaged(
            path,
            f"has {number} {key!r}; its columns are {list_names(schema.names)}",
            _NAME_TEXT_COLUMN,
        )
    kind = schema.field(key).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (pa.string(), pa.large_string(), pa.string_view()):
        raise Damaged(
            path,
            f"column {key!r} holds {kind}, not string, large_string or string_view",
            _NAME_TEXT_COLUMN,
        )


def saved_tables(folder: Path) -> list[Path] | None:
    """Return the .arrow files, in order, of a dataset that the library `datasets` saved to a folder.

    None: the folder has no saved dataset.

    Raises:
        InputRefused: the saved dataset has several splits, or damaged or missing parts.
    """
    # A dataset with splits, such as "train" and "test", has a list of them, and a folder for each.
    if is_file(folder / _SPLITS_FILE) and not is_file(folder / _STATE_FILE):
        splits = read_json(folder / _SPLITS_FILE, _SAVE_AGAIN).get("splits")
        if isinstance(splits, list) and splits and all(isinstance(split, str) for split in splits):
            if len(splits) > 1:
                choice = f"give one of them, such as {folder / splits[0]}"
                raise InputRefused(
                    f"{folder}: a saved dataset with the splits {', '.join(splits)}; {choice}"
                )
            return saved_tables(folder / splits[0])
    if not (is_file(folder / _STATE_FILE) and is_file(folder / _INFO_FILE)):
        return None
    state = read_json(folder / _STATE_FILE, _SAVE_AGAIN)
    try:
        paths = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise InputRefused(
            f"{folder / _STATE_FILE}: is not what save_to_disk writes{_SAVE_AGAIN}"
        ) from None
    if state.get("_indices_data_files"):
        raise InputRefused(
            f"{folder}: saved with an order of its own; call flatten_indices() and save it again"
        )
    for path in paths:
        if path.parent != folder or path.suffix != ".arrow" or not is_file(path):
            raise InputRefused(
                f"{folder / _STATE_FILE}: lists {path.name}, which is not there{_SAVE_AGAIN}"
            )
    return paths


def hub_tables(name: str) -> list[Path]:
    """Return the .arrow files of the training split of a dataset of the Hugging Face hub.

    The library `datasets` downloads them, unless it has them in its cache.

    Args:
        name: hf://OWNER/NAME or hf://OWNER/NAME/CONFIGURATION.

    Raises:
        InputRefused: the library `datasets` is not installed, or it reports an error, for example
            that there is no network or no such dataset.
    """
    owner, _, rest = name.removeprefix("hf://").partition("/")
    dataset, _, configuration = rest.partition("/")
    datasets = import_library("datasets", name, "hub")
    try:
        loaded = datasets.load_dataset(f"{owner}/{dataset}", configuration or None, split="train")
        return [Path(file["filename"]) for file in loaded.cache_files]
    except Exception as error:  # The library and the network may raise anything.
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        remedy = (
            "try again, or save the dataset to a folder on another machine and give that folder"
        )
        raise InputRefused(f"{name}: cannot be fetched: {reason}; {remedy}") from None
