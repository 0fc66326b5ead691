"""Save and load a run's state so that a crash, a full disk or a flipped bit costs no more than the last save."""

from monograph.checkpointing.folder import Checkpoint, CheckpointDamaged, load, load_state, verify
from monograph.checkpointing.rotation import newest, remove_leftovers, save

__all__ = ["Checkpoint", "CheckpointDamaged", "load", "load_state", "newest", "remove_leftovers", "save", "verify"]
