"""Saves and loads a run's state so that no crash, full disk or flipped bit can cost more than the last save."""

from __future__ import annotations

from monograph.checkpointing.folder import Checkpoint, CheckpointDamaged, load, load_state, verify
from monograph.checkpointing.rotation import newest, remove_leftovers, save

__all__ = ["Checkpoint", "CheckpointDamaged", "load", "load_state", "newest", "remove_leftovers", "save", "verify"]
