"""Save and load a run's state.

After a crash, a full disk or a flipped bit, a run goes on from its newest valid checkpoint, so only the
progress since that checkpoint is lost.
"""

from monograph.checkpointing.folder import (
    Checkpoint,
    CheckpointDamaged,
    is_gone,
    load,
    load_state,
    verify,
)
from monograph.checkpointing.rotation import list_checkpoints, load_newest, remove_leftovers, save

__all__ = [
    "Checkpoint",
    "CheckpointDamaged",
    "list_checkpoints",
    "is_gone",
    "load",
    "load_state",
    "load_newest",
    "remove_leftovers",
    "save",
    "verify",
]
