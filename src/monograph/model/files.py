"""Read and write the files of a model folder: JSON and safetensors, verified when read, written
whole or not at all.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from monograph.errors import DiskFull, InputRefused, Unreadable
from monograph.graph.lora import Plain
from monograph.graph.mmap_weights import Pieces
from monograph.storage import tensor_layout
from monograph.storage.reading import (
    entries,
    error_number,
    exists,
    inside,
    is_folder,
    open_input,
    read_json,
    unreadable,
    without_links,
)
from monograph.storage.writing import FULL, held, sync, sync_below

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored(NamedTuple):
    """The description of a tensor in a file's header.

    Attributes:
        path: the file.
        shape: its shape.
        dtype: safetensors' name.
        known_as: its name in the file if that is another.
        part: it is the places from the first number to the second, each so many-th by the third, of
            an axis, the fourth, of the file's tensor.
        transposed: the file's tensor, or the part of it, has its last two axes in the other order.
        pieces: it is made of these tensors, by their names.
        join: makes it of them.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    known_as: str = ""
    part: tuple[int, int, int, int] | None = None
    transposed: bool = False
    pieces: "Mapping[str, Stored]" = MappingProxyType({})
    join: Callable[[list[Tensor]], Tensor] = torch.stack


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def has_weights(folder: Path) -> bool:
    """Return whether a folder has files of weights, which may be damaged."""
    return any(exists(folder / name) for name in (_SINGLE, _INDEX))


def read_headers(folder: Path) -> dict[str, Stored]:
    """Return the headers of all tensors of a folder, by name; no weights are read.

    Raises:
        InputRefused: no weights, a damaged file, or an index that does not fit its files.
    """
    if exists(folder / _SINGLE):
        return read_header(inside(folder, _SINGLE))
    if not exists(folder / _INDEX):
        raise InputRefused(
            f"{folder}: holds neither {_SINGLE} nor {_INDEX}; no other kind of weights is read"
        )
    weight_map = read_json(inside(folder, _INDEX)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise InputRefused(
            f"{folder / _INDEX}: expected a table weight_map from tensor names to file names"
        )
    headers = {file: read_header(inside(folder, file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise InputRefused(
                f"{folder / _INDEX}: says that {name!r} is in {file}, which does not hold it"
            )
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


def read_header(path: Path) -> dict[str, Stored]:
    """Return the headers of all tensors of a safetensors file, by name; raise InputRefused if it is
    damaged.
    """
    with open_tensors(path) as file:
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        return {
            name: Stored(path, tuple(view.get_shape()), view.get_dtype())
            for name, view in views.items()
        }


def read_tensors(stored: dict[str, Stored], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors on the CPU, as stored or in a dtype; besides the result, one tensor at a
    time is in memory.

    Raises:
        InputRefused: a damaged file.
    """
    # Tensors are copied, because the bytes of a mapped file may change later.
    return {name: tensor.to(dtype, copy=True) for name, tensor in mapped_tensors(stored)}


def mapped_tensors(stored: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as stored and not copied: they are mapped, and read on first access. None
    has pieces.

    Raises:
        InputRefused: a damaged file.
    """
    for path in sorted({tensor.path for tensor in stored.values()}):
        with open_tensors(path) as file:
            for name, header in stored.items():
                if header.path != path:
                    continue
                tensor = file.get_tensor(header.known_as or name)
                if header.part:
                    begin, end, step, axis = header.part
                    tensor = tensor[(*[slice(None)] * axis, slice(begin, end, step))]
                yield name, tensor.mT if header.transposed else tensor


def mapped_weights(stored: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor | Pieces]]:
    """Yield the tensors as `mapped_tensors`, and those with pieces, too."""
    yield from mapped_tensors(
        {name: tensor for name, tensor in stored.items() if not tensor.pieces}
    )
    whole = {name: tensor for name, tensor in stored.items() if tensor.pieces}
    parts = dict(
        mapped_tensors(
            {name: part for tensor in whole.values() for name, part in tensor.pieces.items()}
        )
    )
    for name, tensor in whole.items():
        yield (
            name,
            Pieces(
                [parts[each] for each in tensor.pieces],
                tensor.join,
                tensor.shape,
                DTYPES[tensor.dtype],
            ),
        )


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file of safetensors for reading in the block, and turn errors there into one that
    names the file.

    Raises:
        InputRefused: it is damaged, or no such file; or nothing is there.
        Unreadable: the system failed to read it.
    """
    try:
        # Checked first, as the library takes a second per 100,000 tensors in a header.
        with open_input(path) as file:
            tensor_layout.header_bytes(
                file.read(tensor_layout.LENGTH_BYTES), os.fstat(file.fileno()).st_size
            )
        with safe_open(path, framework="pt") as file:
            yield file
    # If the system has no memory to map the file, torch raises one of these and safetensors
    # another.
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        MemoryError,
        tensor_layout.LayoutError,
    ) as error:
        if error_number(error):
            raise unreadable(path, error) from None
        if isinstance(error, MemoryError):
            raise
        # It was there a moment ago: the library says this of any error.
        if isinstance(error, FileNotFoundError):
            raise Unreadable(
                f"{path}: cannot be read: the system failed to open it; run again when it can"
            ) from None
        raise InputRefused(f"{path}: damaged, or no safetensors file: {error}") from None


def write_tensors(folder: Path, named: Iterable[Plain], max_shard_bytes: int) -> None:
    """Write model.safetensors, or shards of at most `max_shard_bytes` each (or one tensor) and
    their index.

    One tensor at a time is in memory.

    Args:
        folder: an existing folder.
        named: the tensors.
        max_shard_bytes: largest number of bytes of tensors in one file.
    """
    shards: list[dict[str, Plain]] = [{}]
    filled_bytes = total_bytes = 0
    for tensor in named:
        if shards[-1] and filled_bytes + tensor.like.nbytes > max_shard_bytes:
            shards.append({})
            filled_bytes = 0
        shards[-1][tensor.name] = tensor
        filled_bytes += tensor.like.nbytes
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


def write_shard(path: Path, tensors: Mapping[str, Plain]) -> None:
    """Write one safetensors file."""
    _, pieces = tensor_layout.encode(
        {name: tensor.like for name, tensor in tensors.items()}, lambda name: tensors[name].read()
    )
    with open(path, "xb") as file:
        file.writelines(pieces)


def nothing_beside(new: Path) -> None:
    """Write nothing beside a model."""


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder next to `target` to write into; at the block's end it is synced and
    renamed to `target`.

    Even after a crash, the target is either whole or absent (or, if it was an empty folder, still
    empty).

    Raises:
        InputRefused: the target exists and holds something, or cannot be written.
        DiskFull: no space left, or the disk fails. Nothing is kept, unless only the last sync
            fails, which is said.
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
            # Before the rename, so that a power cut cannot leave a target with missing bytes.
            sync_below(partial)
            partial.rename(target)
    except (OSError, SafetensorError) as error:
        number = error_number(error)
        if number in FULL:
            raise DiskFull(
                f"{target}: no space left to write the model; nothing was kept"
            ) from error
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        if number == errno.EIO:
            raise DiskFull(
                f"{target}: cannot be written: {reason}; look at the disk; nothing was kept"
            ) from error
        reason = f"another process writes it, in {partial}" if number == errno.EEXIST else reason
        raise InputRefused(f"{target}: cannot be written: {reason}") from error
    try:
        sync(target.parent)
    except OSError as error:
        risk = "a power cut may still take it away: look at the disk"
        raise DiskFull(
            f"{target}: is written whole, but {target.parent} cannot be synced ({error.strerror}): {risk}"
        ) from error


@contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Make a folder, after removing one that a killed process left, and remove it at the end if it
    is still there.
    """
    with suppress(OSError), held(partial):  # the lock is refused while another process still writes
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        with held(partial):
            yield
    finally:
        shutil.rmtree(partial, ignore_errors=True)
