"""Write one checkpoint from all ranks: each writes its rows to their place in the files that one
process would write.

    bytes [begin + first row x row bytes, begin + end row x row bytes) of each sharded tensor

The rows of a tensor follow one another in a safetensors file, so no rank assembles a whole tensor,
and nothing is converted afterwards. All ranks must see the same folder.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.checkpointing.folder import MODEL, OPTIMIZER
from monograph.checkpointing.rotation import unfinished
from monograph.distributed.rows import place_of
from monograph.distributed.world import World
from monograph.errors import DiskFull, NoValidCheckpoint, Warn
from monograph.storage import blocks, tensor_layout


def save(world: World, checkpoints: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Save the state that all ranks hold together; a collective. See
    `monograph.checkpointing.save`.

    Rank 0 writes the tensors that are not sharded. If a rank cannot write, no checkpoint appears.

    Raises:
        DiskFull: on the rank that could not write.
    """
    shared = {
        name: tensors
        for name, tensors in ((MODEL, checkpoint.model), (OPTIMIZER, checkpoint.optimizer))
        if any(isinstance(tensor, DTensor) for tensor in tensors.values())
    }

    def write(path: Path, pieces: Iterator[memoryview]) -> list[str]:
        tensors = shared.get(path.name)
        return blocks.write_file(path, pieces) if tensors is None else _write(world, path, tensors)

    if world.leads:
        checkpointing.save(checkpoints, checkpoint, keep, write)
    else:
        for name, tensors in shared.items():
            try:
                _write(world, unfinished(checkpoints, checkpoint.update) / name, tensors)
            except OSError as error:
                part = f"rank {world.rank} cannot save its part of the checkpoint of update {checkpoint.update}"
                raise DiskFull(
                    f"{error.filename}: {part}: {error.strerror}; make room, then resume"
                ) from error
    world.wait()


def newest(
    world: World, checkpoints: Path, warn: Warn, at: int | None = None, until: int | None = None
) -> Checkpoint:
    """Load on every rank the checkpoint that `monograph.checkpointing.newest` chooses on rank 0; a
    collective.

    Raises:
        NoValidCheckpoint: rank 0 finds none; raised on every rank.
    """
    own, fault = None, ""
    if world.leads:
        try:
            own = checkpointing.newest(checkpoints, warn, at, until)
        except NoValidCheckpoint as error:
            fault = str(error)
    update, fault = world.agreed([own.update if own else None, fault])
    if update is None:
        raise NoValidCheckpoint(fault)
    return own or checkpointing.newest(checkpoints, warn, update)


def not_finite(world: World, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are not finite on some rank; a collective."""
    own = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()
    ]
    # A streamed model has tensors on the device and on the host.
    counts = world.sum(
        torch.stack([(~each.isfinite().all()).long().to(own[0].device) for each in own])
    ).tolist()
    return [name for name, bad in zip(tensors, counts, strict=True) if bad]


def _write(world: World, path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write a file together with the other ranks; return the hex digest of each of its blocks.

    Args:
        world: the ranks.
        path: the file, in a folder that rank 0 has made.
        tensors: the file's tensors by name.

    Raises:
        OSError: writing failed; its `filename` is the path.
    """
    length, pieces = tensor_layout.encode(tensors)
    prefix = next(pieces)
    try:
        if world.leads:
            with open(path, "xb", buffering=0) as file:
                file.truncate(length)
        world.wait()
        with open(path, "r+b", buffering=0) as file:
            for start, piece in _own(world, prefix, length, tensors):
                blocks.write_at(file.fileno(), piece, start)
            os.fsync(file.fileno())
            world.wait()
            # Several ranks may have written parts of a block, so it is hashed from the file once
            # all have written.
            count = -(-length // blocks.BLOCK_BYTES)
            digests = torch.zeros(count, 32, dtype=torch.uint8)
            for index in range(world.rank, count, world.size):
                digests[index] = torch.tensor(
                    list(blocks.digest_at(file.fileno(), index, length)), dtype=torch.uint8
                )
    except OSError as error:
        error.filename = str(path)
        raise
    return [bytes(digest).hex() for digest in world.sum(digests).tolist()]


def _own(
    world: World, prefix: memoryview, length: int, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[int, memoryview]]:
    """Yield this rank's pieces of a file as (offset, bytes)."""
    if world.leads:
        yield 0, prefix
    for entry in tensor_layout.entries(bytes(prefix), length):
        tensor = tensors[entry.name]
        start = len(prefix) + entry.begin
        if isinstance(tensor, DTensor):
            if any(tensor.device_mesh.get_coordinate()[:-1]):  # type: ignore[index]
                continue  # another machine has the same rows
            start += place_of(tensor).start * (entry.end - entry.begin) // max(1, len(tensor))
            yield start, tensor_layout.bytes_of(tensor.to_local())
        elif world.leads:
            yield start, tensor_layout.bytes_of(tensor)
