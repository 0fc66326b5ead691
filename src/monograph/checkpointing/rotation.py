"""Save a run's next checkpoint and remove the oldest; load the newest one that passes verification.

The order of a save's operations matters, since each must be durable before the next one relies on
it: the files with their fsync, the manifest, the folder, its rename, the parent folder. Only then
are older checkpoints removed. There is one writer at a time: the caller holds the run's lock.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from monograph.checkpointing import folder as stored
from monograph.checkpointing.folder import (
    Checkpoint,
    CheckpointDamaged,
    FileEntry,
    Manifest,
    load,
    read_manifest,
)
from monograph.errors import DiskFull, NoValidCheckpoint, Unreadable, UsageError, Warn
from monograph.storage import blocks, tensor_layout
from monograph.storage.reading import entries, free_bytes, is_folder
from monograph.storage.writing import sync

FEWEST_KEPT = 1
TEMPORARY = ".tmp-"

Encoded = Mapping[str, tuple[int, Iterator[memoryview]]]  # {file name: (length in bytes, pieces)}
Write = Callable[[Path, Iterator[memoryview]], list[str]]


def save(
    checkpoints: Path, checkpoint: Checkpoint, keep: int = 2, write: Write | None = None
) -> Path:
    """Write a checkpoint; at any moment, even after a crash, the newest valid checkpoint is the
    previous or this one.

    Afterwards the `keep` newest complete checkpoints up to this update remain. Later ones, which a
    resumed run must have skipped as damaged, are removed with the older ones. An existing
    checkpoint of this update is replaced.

    Args:
        checkpoints: the run's folder of checkpoints, made if it does not exist.
        checkpoint: its tensors may live on a device, be strided or share storage; they must not
            change during the call.
        keep: the number of checkpoints to keep, at least 1; with 1 there is no fallback if it is
            damaged later.
        write: a function that creates a file from its pieces, instead of `blocks.write_file`.

    Returns:
        The checkpoint's folder, which is durable.

    Raises:
        DiskFull: writing failed, for lack of room or any other reason; existing checkpoints are
            untouched.
        Unreadable: the existing checkpoints could not be read; nothing has been touched.
        UsageError: keep < 1.
        TypeError: the state is not JSON, or safetensors lacks a tensor's dtype.
    """
    if keep < FEWEST_KEPT:
        raise UsageError(f"keep = {keep}: expected at least {FEWEST_KEPT}")
    text = json.dumps(dict(checkpoint.state), indent=1).encode()
    files = {
        stored.MODEL: tensor_layout.encode(checkpoint.model),
        stored.OPTIMIZER: tensor_layout.encode(checkpoint.optimizer),
        stored.STATE: (len(text), iter([memoryview(text)])),
    }
    final = checkpoints / f"step-{checkpoint.update:08d}"
    temporary = unfinished(checkpoints, checkpoint.update)
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        # Also if the folder existed: a save that was killed right here may have made it.
        sync(checkpoints.parent)
        remove_leftovers(checkpoints)
        if free_bytes(checkpoints) < _length(files):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(checkpoints))
        _write(temporary, checkpoint, files, write or blocks.write_file)
        _publish(temporary, final)
    except OSError as error:
        _remove(temporary)
        sound = "earlier checkpoints are untouched"
        kept = sound if checkpoint.update else "nothing was trained yet, so nothing is lost"
        raise DiskFull(
            f"{error.filename or checkpoints}: cannot save the checkpoint of update {checkpoint.update}:"
            f" {error.strerror} ({_needed(checkpoints, files)}); {kept}: make room there or mend it, then resume"
        ) from error
    # The new checkpoint is durable, so a failure to remove an old one is no error: the next save
    # tries again.
    with suppress(OSError, Unreadable):
        _prune(final, checkpoint.update, keep)
    return final


def unfinished(checkpoints: Path, update: int) -> Path:
    """Return the temporary folder in which an update's checkpoint is written until it is complete."""
    return checkpoints / f"{TEMPORARY}step-{update:08d}"


def newest(
    checkpoints: Path, warn: Warn, at: int | None = None, until: int | None = None
) -> Checkpoint:
    """Load the newest checkpoint that passes verification, or the one of update `at`.

    Args:
        checkpoints: the run's folder of checkpoints.
        warn: called with one line if newer checkpoints were skipped as damaged: which ones and why.
        at: if given, consider only the checkpoint of this update.
        until: if given, ignore checkpoints of later updates.

    Raises:
        NoValidCheckpoint: no checkpoint is valid; the message names each candidate with its fault.
        Unreadable: a checkpoint could not be read. It may be sound, and resuming from an older one
            would remove it.
    """
    listed = candidates(checkpoints)
    refused: list[str] = []
    for update, folder in listed:
        if at not in (None, update) or (until is not None and update > until):
            continue
        try:
            checkpoint = load(folder)
        except CheckpointDamaged as error:
            # The run is still training: it has just removed this one and has newer ones.
            if stored.is_gone(folder):
                return newest(checkpoints, warn, at, until)
            refused.append(str(error))
            continue
        except Unreadable as error:
            way_out = (
                f"if it never can, move {folder} elsewhere, and the checkpoint before it is taken"
            )
            raise Unreadable(f"{error}; {way_out}", error.errno) from error
        if refused:
            warn(f"skipped damaged checkpoints ({'; '.join(refused)}); going on from {folder.name}")
        return checkpoint
    if refused:
        raise NoValidCheckpoint(f"{checkpoints}: no valid checkpoint: {'; '.join(refused)}")
    if at is not None and listed:
        there = ", ".join(str(update) for update in sorted({update for update, _ in listed}))
        raise NoValidCheckpoint(
            f"{checkpoints}: no checkpoint of update {at}; there are those of {there}"
        )
    raise NoValidCheckpoint(
        f"{checkpoints}: no checkpoint to load; expected a folder such as step-00001000"
    )


def remove_leftovers(checkpoints: Path) -> None:
    """Remove the temporary folders of a process killed while it saved or pruned; the caller holds
    the run's lock.
    """
    for path in entries(checkpoints, TEMPORARY):
        _remove(path)


def _write(temporary: Path, checkpoint: Checkpoint, files: Encoded, write: Write) -> None:
    temporary.mkdir()
    entries = {
        name: FileEntry(length, write(temporary / name, pieces))
        for name, (length, pieces) in files.items()
    }
    manifest = Manifest(checkpoint.run, checkpoint.update, entries)
    blocks.write_file(temporary / stored.MANIFEST, [memoryview(manifest.encode())])
    sync(temporary)


def _publish(temporary: Path, final: Path) -> None:
    if not stored.is_gone(final):
        # A folder cannot be renamed onto another one, so the old one is renamed first, and stays
        # valid as `.replaced`.
        replaced = final.with_name(final.name + stored.REPLACED)
        final.rename(
            replaced if stored.is_gone(replaced) else final.with_name(TEMPORARY + replaced.name)
        )
    temporary.rename(final)
    sync(final.parent)


def _prune(saved: Path, head: int, keep: int) -> None:
    """Remove checkpoints that are incomplete, or not among the `keep` newest up to the one just
    saved.

    A checkpoint that cannot be read now may be sound: it stays and does not count towards `keep`.
    """
    remove_leftovers(saved.parent)
    kept = {head}
    for update, folder in candidates(saved.parent):
        if folder == saved:
            continue
        if update < head and update not in kept and len(kept) < keep:
            try:
                read_manifest(folder)
                kept.add(update)
                continue
            except Unreadable:
                continue
            except CheckpointDamaged:
                pass
        # Rename the folder first to a name that is never loaded, so that a half-removed one is not
        # a candidate.
        doomed = folder.with_name(TEMPORARY + folder.name)
        folder.rename(doomed)
        _remove(doomed)


def candidates(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return (update, folder) of all that has a checkpoint's name, newest first.

    It may be damaged, or no folder at all. The current folder of an update precedes a replaced one.
    """
    named = [(stored.FOLDER_NAME.fullmatch(path.name), path) for path in entries(checkpoints)]
    return sorted(
        ((int(match[1]), path) for match, path in named if match),
        key=lambda one: (-one[0], one[1].name),
    )


def _remove(path: Path) -> None:
    """Remove a temporary folder, or what else had a checkpoint's name.

    What cannot be removed now is harmless: it is never loaded, and the next save tries again.
    """
    with suppress(OSError, Unreadable):
        if is_folder(path) and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _length(files: Encoded) -> int:
    return sum(length for length, _ in files.values())


def _needed(checkpoints: Path, files: Encoded) -> str:
    needed = f"it needs {_length(files):,} bytes"
    # An error here must not hide the one that is being reported.
    with suppress(OSError, Unreadable):
        needed += f", {free_bytes(checkpoints):,} are free"
    return needed
