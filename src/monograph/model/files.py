"""Read and write the files of a model folder, which are JSON and safetensors.

Files are checked when they are read. A folder is written completely or not at all.
"""

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from monograph.errors import DiskFull, InputRefused, Unreadable
from monograph.graph.lora_merge import UnreadTensor
from monograph.graph.mmap_weights import Pieces
from monograph.graph.stored_codes import StoredCodes, stack
from monograph.storage import tensor_layout
from monograph.storage.reading import (
    entries,
    error_number,
    exists,
    file_inside,
    is_folder,
    open_input,
    read_json,
    refusing,
    unreadable,
    without_links,
)
from monograph.storage.writing import DISK_FULL_ERRORS, lock_folder, sync, sync_below

# The dtypes that weights may have, by their names in safetensors.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Weights are in one file, or in several files, the shards. With shards there is an index, a table of the
# file of each tensor.
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

COPIED_AT_ONCE = 1 << 24  # bytes of a file that are in memory while it is copied


class AxisSlice(NamedTuple):
    """The slice begin:end:step of one axis of a tensor."""

    begin: int
    end: int
    step: int
    axis: int


class StoredTensor(NamedTuple):
    """The description of a tensor that can be read from files.

    The tensor is one of a file, or a slice of one, or it is made of several others (its pieces). The
    functions of this module keep descriptions in a dictionary, by the names of the tensors.

    Attributes:
        path: the file. For a tensor that is made of pieces, this is the path of the first piece, and is
            only for messages: each piece has its own path.
        shape: the shape of the tensor, after slicing, transposing or joining.
        dtype: safetensors' name of the dtype.
        name_in_file: the tensor's name in the file; "": the same name as in the dictionary.
        slice: which part of the file's tensor this tensor is; None: all of it.
        transposed: whether the file has the tensor's last two axes in the other order.
        pieces: the tensors of which this one is made, by name; {}: it is not made of others.
        join: a function that takes the pieces, in the order of `pieces`, and returns this tensor, or the
            one of which it is a slice.
        codes_form: the form in which the codes of the pieces are those of this tensor, "int8" or "nf4",
            see `monograph.graph.stored_codes`; "": in none.
        read_codes: a function that takes the pieces and returns the codes of this tensor, or of the one of
            which it is a slice; None for a tensor of all experts, whose pieces have codes.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    name_in_file: str = ""
    slice: AxisSlice | None = None
    transposed: bool = False
    pieces: "Mapping[str, StoredTensor]" = MappingProxyType({})
    join: Callable[[list[Tensor]], Tensor] = torch.stack
    codes_form: str = ""
    read_codes: Callable[[list[Tensor]], StoredCodes] | None = None


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON object to a file."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def has_weights(folder: Path) -> bool:
    """Return whether a folder has files of weights. They are not checked."""
    return any(exists(folder / name) for name in (_SINGLE, _INDEX))


def index_file(folder: Path) -> Path | None:
    """Return the path of the index of a folder's weights; None if the weights are in one file."""
    return None if exists(folder / _SINGLE) else file_inside(folder, _INDEX)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return the descriptions of all tensors of a folder, by name, without reading weights.

    Raises:
        InputRefused: there are no weights, a file is damaged, or the index does not fit the files.
    """
    if exists(folder / _SINGLE):
        return read_header(file_inside(folder, _SINGLE))
    if not exists(folder / _INDEX):
        raise InputRefused(
            f"{folder}: holds neither {_SINGLE} nor {_INDEX}; no other kind of weights is read"
        )
    weight_map = read_json(file_inside(folder, _INDEX)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise InputRefused(
            f"{folder / _INDEX}: expected a table weight_map from tensor names to file names"
        )
    headers = {
        file: read_header(file_inside(folder, file)) for file in sorted(set(weight_map.values()))
    }
    # A tensor that is in a file but not in the index is returned, too. `check_headers` of `model.hub` refuses
    # it if the model has no such tensor.
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise InputRefused(
                f"{folder / _INDEX}: says that {name!r} is in {file}, which does not hold it"
            )
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the descriptions of all tensors of a safetensors file, by name.

    Raises:
        InputRefused: the file is damaged.
    """
    with open_tensors(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        return {
            name: StoredTensor(path, tuple(view.get_shape()), view.get_dtype())
            for name, view in slices.items()
        }


def read_tensors(stored: dict[str, StoredTensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU.

    Besides the result, one tensor at a time is in memory.

    Args:
        stored: the descriptions of the tensors, none of which has pieces.
        dtype: the dtype of the copies; None: that of the files.

    Raises:
        InputRefused: a file is damaged.
    """
    # The files are not mapped into memory. safetensors keeps some bytes for each tensor that it has ever
    # mapped, and they add up in a server that reads many adapters. Also, the bytes of a mapped file may
    # change.
    tensors = dict[str, Tensor]()
    for path in sorted({tensor.path for tensor in stored.values()}):
        headers = {name: header for name, header in stored.items() if header.path == path}
        with _reading(path), open_input(path) as file:
            places = {entry.name: entry for entry in _tensor_entries(file)}
            for name, header in headers.items():
                name_in_file = header.name_in_file or name
                if name_in_file not in places:
                    raise tensor_layout.LayoutError(f"no tensor {name_in_file}")
                tensor = _read_tensor(file, places[name_in_file])
                # The view is copied, so that a slice does not keep the whole tensor in memory.
                tensors[name] = _as_described(tensor, header).to(dtype, copy=True)
    return tensors


def _tensor_entries(file: BinaryIO) -> list[tensor_layout.TensorEntry]:
    """Return where the tensors of a safetensors file are, counted in bytes from the file's beginning.

    Raises:
        LayoutError: the file is damaged.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    length_field = file.read(tensor_layout.LENGTH_BYTES)
    prefix_bytes = tensor_layout.prefix_bytes(length_field, file_bytes)
    prefix = length_field + file.read(prefix_bytes - len(length_field))
    return [
        entry._replace(begin=prefix_bytes + entry.begin, end=prefix_bytes + entry.end)
        for entry in tensor_layout.tensor_entries(prefix, file_bytes)
    ]


def tensor_entries(path: Path) -> dict[str, tensor_layout.TensorEntry]:
    """Return where the tensors of a safetensors file are, by name, counted from the file's beginning.

    Raises:
        InputRefused: the file is damaged.
    """
    with _reading(path), open_input(path) as file:
        return {entry.name: entry for entry in _tensor_entries(file)}


def overwrite_tensor(
    path: Path, entry: tensor_layout.TensorEntry, header: StoredTensor, tensor: Tensor
) -> Tensor:
    """Write a tensor over the one that a description names, in place, and return the file's tensor.

    This is the inverse of reading a described tensor. If the description is a slice of the file's
    tensor, the rest of the file's tensor keeps its bits.

    Args:
        path: the file.
        entry: where the file's tensor is.
        header: the description.
        tensor: the new numbers, which are rounded to the dtype of the file's tensor.
    """
    with open(path, "r+b") as file:
        whole = _read_tensor(file, entry)
        _as_described(whole, header).copy_(tensor)
        file.seek(entry.begin)
        file.write(tensor_layout.bytes_of(whole))
    return whole


def copy_file(source: Path, target: Path) -> None:
    """Copy a user's file to a new file, whose permissions are those that the umask gives.

    Raises:
        InputRefused, Unreadable: the source cannot be read.
        OSError: the target cannot be written.
    """
    with open(target, "xb") as file:
        file.writelines(_pieces_of_file(source))


def _pieces_of_file(path: Path) -> Iterator[bytes]:
    """Yield the content of a user's file in pieces."""
    with refusing(path), open_input(path) as file:
        while piece := file.read(COPIED_AT_ONCE):
            yield piece


def _read_tensor(file: BinaryIO, entry: tensor_layout.TensorEntry) -> Tensor:
    """Return a tensor of a file.

    Raises:
        LayoutError: the file has become shorter.
    """
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    file.seek(entry.begin)
    content = file.read(entry.end - entry.begin)
    if len(content) != entry.end - entry.begin:
        raise tensor_layout.LayoutError(f"tensor {entry.name} is not complete")
    tensor_layout.bytes_of(tensor)[:] = content
    return tensor


def mapped_tensors(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that are mapped to their files, by name.

    Their numbers are read from the file at the first access.

    Args:
        stored: the descriptions of the tensors, none of which has pieces.

    Raises:
        InputRefused: a file is damaged.
    """
    for path in sorted({tensor.path for tensor in stored.values()}):
        with open_tensors(path) as file:
            for name, header in stored.items():
                if header.path != path:
                    continue
                yield name, _as_described(file.get_tensor(header.name_in_file or name), header)


def _as_described(tensor: Tensor, header: StoredTensor) -> Tensor:
    """Return a file's tensor sliced and transposed as its description says, as a view."""
    if header.slice is not None:
        tensor = _take_slice(tensor, header.slice)
    return tensor.mT if header.transposed else tensor


def _take_slice(tensor: Tensor, part: AxisSlice) -> Tensor:
    """Return a slice of a tensor, as a view."""
    earlier_axes = [slice(None)] * part.axis
    return tensor[(*earlier_axes, slice(part.begin, part.end, part.step))]


def mapped_weights(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor | Pieces]]:
    """Yield tensors by name: mapped to their files, or as `Pieces` for a tensor made of several.

    `Pieces` has the mapped tensors, and joins them when the numbers are needed.
    """
    mapped_leaves = dict(mapped_tensors(_leaves(stored)))
    for name, tensor in stored.items():
        yield name, _mapped_weight(name, tensor, mapped_leaves)


def _leaves(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors without pieces among some tensors and their pieces, by name."""
    leaves = dict[str, StoredTensor]()
    for name, tensor in stored.items():
        leaves |= _leaves(tensor.pieces) if tensor.pieces else {name: tensor}
    return leaves


def _mapped_weight(
    name: str, header: StoredTensor, mapped_leaves: Mapping[str, Tensor]
) -> Tensor | Pieces:
    """Return a described tensor, given the mapped tensors of which it is made, by name."""
    if not header.pieces:
        return mapped_leaves[name]
    parts = [_mapped_weight(*piece, mapped_leaves) for piece in header.pieces.items()]
    join = header.join
    if header.slice is not None or header.transposed:
        join = functools.partial(_joined_as_described, header)
    read_codes = functools.partial(_codes_as_described, header, parts)
    return Pieces(parts, join, header.shape, DTYPES[header.dtype], header.codes_form, read_codes)


def _joined_as_described(header: StoredTensor, parts: list[Tensor]) -> Tensor:
    """Return a tensor that is a part of one that is made of pieces."""
    return _as_described(header.join(parts), header)


def _codes_as_described(header: StoredTensor, parts: list[Tensor | Pieces]) -> StoredCodes:
    """Return the codes of a tensor whose description has a `codes_form`.

    Args:
        header: the description, whose slice has rows.
        parts: the mapped pieces.
    """
    if header.read_codes is None:
        experts = [part for part in parts if isinstance(part, Pieces) and part.read_codes]
        return stack([expert.read_codes() for expert in experts])  # type: ignore[misc]
    codes = header.read_codes([part for part in parts if isinstance(part, Tensor)])
    if header.slice is None:
        return codes
    return codes.rows(header.slice.begin, header.slice.end, header.shape[-1])


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for reading in the block; the errors are those of `_reading`."""
    with _reading(path):
        # safetensors takes a second per 100,000 tensors in a header, so a hostile header could take very
        # long. `prefix_bytes` is called only for its error: it refuses a header that is too long.
        with open_input(path) as file:
            first_bytes = file.read(tensor_layout.LENGTH_BYTES)
            file_bytes = os.fstat(file.fileno()).st_size
            tensor_layout.prefix_bytes(first_bytes, file_bytes)
        with safe_open(path, framework="pt") as file:
            yield file


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a safetensors file in the block into errors that name the file.

    Raises:
        InputRefused: the file is missing or damaged, or is not a safetensors file.
        Unreadable: the system failed to read the file.
    """
    try:
        yield
    # These are the errors of a file that cannot be opened, mapped or parsed. There are several classes,
    # because torch and safetensors raise different ones when a file cannot be mapped into memory.
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        MemoryError,
        tensor_layout.LayoutError,
    ) as error:
        # An error with a number comes from the system and not from the file's content. `error_number`
        # takes the number from `errno`, or from the message as safetensors writes it.
        if error_number(error):
            raise unreadable(path, error) from None
        if isinstance(error, MemoryError):
            raise
        # safetensors raises a FileNotFoundError without a number for every failure to open a file, even
        # if the file exists. This file exists, because `open_input` has found it.
        if isinstance(error, FileNotFoundError):
            raise Unreadable(
                f"{path}: cannot be read: the system failed to open it; run again when it can"
            ) from None
        raise InputRefused(f"{path}: damaged, or not a safetensors file: {error}") from None


def write_tensors(folder: Path, named: Iterable[UnreadTensor], max_shard_bytes: int) -> None:
    """Write tensors to model.safetensors, or to several shards and their index.

    The tensors are first divided into shards by their sizes. Then each tensor is read when it is
    written, so that one at a time is in memory.

    Args:
        folder: an existing folder.
        named: the tensors. An `UnreadTensor` has a name, a tensor `like` on the meta device with the shape
            and the dtype, and a function `read`, which returns the tensor with its numbers.
        max_shard_bytes: largest number of bytes of tensors in one file. A larger tensor has a file
            of its own.
    """
    shards: list[dict[str, UnreadTensor]] = [{}]
    shard_bytes = 0
    total_bytes = 0
    for tensor in named:
        if shards[-1] and shard_bytes + tensor.like.nbytes > max_shard_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][tensor.name] = tensor
        shard_bytes += tensor.like.nbytes
        total_bytes += tensor.like.nbytes
    files = [_SINGLE]
    if len(shards) > 1:
        files = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        weight_map = {
            name: file for file, shard in zip(files, shards, strict=True) for name in shard
        }
        write_json(
            folder / _INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        )
    for file, shard in zip(files, shards, strict=True):
        write_shard(folder / file, shard)


def write_shard(path: Path, tensors: Mapping[str, UnreadTensor]) -> None:
    """Write tensors to one new safetensors file.

    Each tensor is read when its turn comes, so that one at a time is in memory.
    """
    meta_tensors = {name: tensor.like for name, tensor in tensors.items()}
    _, chunks = tensor_layout.encode(meta_tensors, lambda name: tensors[name].read())
    with open(path, "xb") as file:
        file.writelines(chunks)


def write_no_extras(new: Path) -> None:
    """Write nothing into a new model folder.

    Functions that write a model folder have a parameter `write_extras`, a function that adds further
    files to the folder before it gets its final name. This is its default value.
    """


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder next to `target`, which becomes `target` at the end of the block.

    At the end of the block the hidden folder is synced and then renamed. So after a crash, the target
    is complete, or it is as it was before: absent or an empty folder.

    Raises:
        InputRefused: the target is not an empty folder, or cannot be written.
        DiskFull: there is no space left, or the disk fails. Nothing is kept then, with one exception,
            which the message names: if only the sync of the parent folder failed, the target is kept.
            It is complete, but a power cut may still take it away.
    """
    target = without_links(target)
    if exists(target) and (not is_folder(target) or entries(target)):
        raise InputRefused(
            f"{target}: exists and is not an empty folder; choose a new name or remove it first"
        )
    partial = target.with_name(f".{target.name}.partial")
    try:
        with _claimed(partial):
            yield partial
            # The sync comes before the rename, so that a power cut cannot leave a target with
            # missing bytes.
            sync_below(partial)
            partial.rename(target)
    except (OSError, SafetensorError) as error:
        number = error_number(error)
        if number in DISK_FULL_ERRORS:
            raise DiskFull(
                f"{target}: no space left to write the model ({os.strerror(number)}); nothing was kept"
            ) from error
        reason: object = error
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        if number == errno.EIO:
            raise DiskFull(
                f"{target}: cannot be written: {reason}; look at the disk; nothing was kept"
            ) from error
        if number == errno.EEXIST:
            # `mkdir` in `_claimed` found the folder there, locked by another process.
            reason = f"another process writes it, in {partial}"
        raise InputRefused(f"{target}: cannot be written: {reason}") from error
    try:
        sync(target.parent)
    except OSError as error:
        raise DiskFull(
            f"{target}: is written whole, but {target.parent} cannot be synced ({error.strerror}): "
            "a power cut may still take it away: look at the disk"
        ) from error


@contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Make a folder and hold its lock in the block; remove it at the end if it is still there.

    Raises:
        FileExistsError: another process holds the folder.
    """
    # There are three cases:
    # - No folder: `lock_folder` raises an OSError, and `mkdir` makes the folder.
    # - A folder that a killed process left: its lock is free, so it is locked and removed, and made again.
    # - A folder that another process is writing: `lock_folder` raises an OSError, and `mkdir` fails.
    with suppress(OSError), lock_folder(partial):
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        with lock_folder(partial):
            yield
    finally:
        shutil.rmtree(partial, ignore_errors=True)
