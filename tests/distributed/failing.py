"""What each rank of a test runs: a save that succeeds, and one that rank 1 cannot write its part
of.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from batches import tiny_llama
from monograph.checkpointing import Checkpoint
from monograph.distributed.checkpoint import save
from monograph.distributed.engine import Sharded
from monograph.distributed.world import World, is_rank_lost, read_place
from monograph.errors import DiskFull
from monograph.storage import blocks


def refused(descriptor: int, piece: memoryview, start: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main() -> None:
    world, folder = World(read_place()), Path(sys.argv[1])
    state = Sharded(tiny_llama(), world=world).state()
    save(world, folder, Checkpoint(1, state.model, state.optimizer), keep=2)
    if world.rank == 1:
        blocks.write_at = refused
    try:
        save(world, folder, Checkpoint(2, state.model, state.optimizer), keep=2)
    except DiskFull as error:
        print(error)
    except RuntimeError as error:
        print("lost" if is_rank_lost(error) else repr(error))
