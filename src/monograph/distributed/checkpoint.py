"""Write one checkpoint from all ranks, in the files that one process would write.

Each rank writes its rows of a sharded tensor to their place in the file. The rows of a tensor
follow one another in a safetensors file, so rows `first` to `end` of a tensor whose data begin at
`begin` are the bytes

    [begin + first * bytes of a row, begin + end * bytes of a row)

So no rank gathers an unsharded tensor, and the files do not depend on the number of ranks. All ranks
must see the same folder.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.checkpointing.folder import MODEL, OPTIMIZER
from monograph.checkpointing.rotation import unfinished_folder
from monograph.distributed.rows import own_slice
from monograph.distributed.world import World
from monograph.errors import DiskFull, NoValidCheckpoint, Warn
from monograph.storage import blocks, tensor_layout


def save(world: World, checkpoints: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Save the state, of which each rank has a part; a collective.

    If a rank cannot write, there is no new checkpoint.

    Args:
        world: the ranks.
        checkpoints: the folder of checkpoints.
        checkpoint: this rank's part of the state.
        keep: how many checkpoints are kept; see `monograph.checkpointing.save`.

    Raises:
        DiskFull: this rank could not write.
    """
    # The files with sharded tensors, which all ranks write. Rank 0 writes the other files.
    tensors_by_file = {MODEL: checkpoint.model, OPTIMIZER: checkpoint.optimizer}
    sharded_files = {
        name: tensors
        for name, tensors in tensors_by_file.items()
        if any(isinstance(tensor, DTensor) for tensor in tensors.values())
    }

    def write_file(path: Path, pieces: Iterator[memoryview]) -> list[str]:
        if path.name in sharded_files:
            return _write_together(world, path, sharded_files[path.name])
        return blocks.write_file(path, pieces)

    if world.leads:
        checkpointing.save(checkpoints, checkpoint, keep, write_file)
    else:
        # These calls are the other ranks' part in the collectives of rank 0's `write_file`, which come
        # in the same order.
        folder = unfinished_folder(checkpoints, checkpoint.update)
        for name, tensors in sharded_files.items():
            try:
                _write_together(world, folder / name, tensors)
            except OSError as error:
                raise DiskFull(
                    f"{error.filename}: rank {world.rank} cannot save its part of the checkpoint of update "
                    f"{checkpoint.update}: {error.strerror}; make room, then resume"
                ) from error
    world.barrier()  # no rank goes on before the checkpoint is complete


def load_newest(
    world: World, checkpoints: Path, warn: Warn, at: int | None = None, until: int | None = None
) -> Checkpoint:
    """Load the checkpoint that rank 0 chooses, on all ranks; a collective.

    Args:
        world: the ranks.
        checkpoints: the folder of checkpoints.
        warn: see `monograph.checkpointing.load_newest`.
        at: see `monograph.checkpointing.load_newest`.
        until: see `monograph.checkpointing.load_newest`.

    Raises:
        NoValidCheckpoint: rank 0 finds none; raised on all ranks.
    """
    checkpoint = None
    fault = ""
    if world.leads:
        try:
            checkpoint = checkpointing.load_newest(checkpoints, warn, at, until)
        except NoValidCheckpoint as error:
            fault = str(error)
    chosen_update = checkpoint.update if checkpoint else None
    update, fault = world.broadcast([chosen_update, fault])
    if update is None:
        raise NoValidCheckpoint(fault)
    if checkpoint is None:  # on ranks other than 0
        checkpoint = checkpointing.load_newest(checkpoints, warn, update)
    return checkpoint


def find_not_finite(world: World, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are not finite on any rank; a collective."""
    own_parts = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()
    ]
    # The flags are moved to one device, because a streamed model has tensors on the device and on
    # the host.
    device = own_parts[0].device
    flags = torch.stack([(~part.isfinite().all()).long().to(device) for part in own_parts])
    counts = world.sum(flags).tolist()
    return [name for name, count in zip(tensors, counts, strict=True) if count]


def _write_together(world: World, path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write a file together with the other ranks; a collective.

    Args:
        world: the ranks.
        path: the file, in a folder that rank 0 has made.
        tensors: the file's tensors by name.

    Returns:
        The hex digest of each of the file's blocks.

    Raises:
        OSError: writing failed; its `filename` is the path.
    """
    length, pieces = tensor_layout.encode(tensors)
    header = next(pieces)
    try:
        if world.leads:
            with open(path, "xb", buffering=0) as file:
                file.truncate(length)
        world.barrier()  # the other ranks must not open the file before it exists
        with open(path, "r+b", buffering=0) as file:
            for offset, piece in _own_pieces(world, header, length, tensors):
                blocks.write_at(file.fileno(), piece, offset)
            os.fsync(file.fileno())
            # Several ranks may write into a block of the file. So blocks are read back to be hashed, after
            # all ranks have written.
            world.barrier()
            block_count = math.ceil(length / blocks.BLOCK_BYTES)
            # Each rank computes some of the digests, which are SHA-256 of 32 bytes, and has zeros in place
            # of the others. So the sum over ranks has all digests.
            digests = torch.zeros(block_count, 32, dtype=torch.uint8)
            for index in range(world.rank, block_count, world.size):
                digest = blocks.digest_at(file.fileno(), index, length)
                digests[index] = torch.tensor(list(digest), dtype=torch.uint8)
    except OSError as error:
        error.filename = str(path)
        raise
    return [bytes(digest).hex() for digest in world.sum(digests).tolist()]


def _own_pieces(
    world: World, header: memoryview, length: int, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[int, memoryview]]:
    """Yield the pieces of a file that this rank writes, as (offset, bytes)."""
    if world.leads:
        yield 0, header
    for entry in tensor_layout.tensor_entries(bytes(header), length):
        tensor = tensors[entry.name]
        offset = len(header) + entry.begin
        if isinstance(tensor, DTensor):
            # The last coordinate of a rank in the mesh says which rows it has. Ranks that differ only in
            # the other one, the machine, have the same rows, and the first machine writes them.
            if any(tensor.device_mesh.get_coordinate()[:-1]):  # type: ignore[index]
                continue
            first_row = own_slice(tensor).start
            tensor_bytes = entry.end - entry.begin  # 0 if the tensor has no rows
            offset += first_row * tensor_bytes // max(1, len(tensor))
            yield offset, tensor_layout.bytes_of(tensor.to_local())
        elif world.leads:
            yield offset, tensor_layout.bytes_of(tensor)
