"""Save a run's next checkpoint and remove old ones; load the newest valid checkpoint.

A save is a sequence of steps, each of which must be durable before the next: write the files, write
the manifest, sync the temporary folder, rename it, sync the parent folder, remove old checkpoints.
Only one process may save at a time, so the caller holds the run's lock.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from monograph.checkpointing.folder import (
    FOLDER_NAME,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    REPLACED,
    STATE,
    Checkpoint,
    CheckpointDamaged,
    FileEntry,
    Manifest,
    is_gone,
    load,
    read_manifest,
)
from monograph.errors import DiskFull, NoValidCheckpoint, Unreadable, UsageError, Warn
from monograph.storage import blocks, tensor_layout
from monograph.storage.reading import entries, free_bytes, is_folder
from monograph.storage.writing import sync

MIN_KEPT = 1  # the smallest allowed number of checkpoints to keep
TEMPORARY = ".tmp-"  # a folder whose name begins with this is never loaded

# The files of a checkpoint: the length in bytes and the pieces of the content, by the file's name.
EncodedFiles = Mapping[str, tuple[int, Iterator[memoryview]]]
# A function like `blocks.write_file`, which creates a file and returns the digests of its blocks.
WriteFile = Callable[[Path, Iterator[memoryview]], list[str]]


def save(
    checkpoints: Path, checkpoint: Checkpoint, keep: int = 2, write: WriteFile | None = None
) -> Path:
    """Write a checkpoint, and remove old ones.

    After a crash at any moment, the newest valid checkpoint is the previous one or this one. An
    existing checkpoint of this update is replaced. Of the complete checkpoints up to this update,
    the `keep` newest remain. Checkpoints of later updates are removed, because the run has gone back
    to an update before them, for example because they were damaged.

    Args:
        checkpoints: the run's folder of checkpoints; it is made if it does not exist.
        checkpoint: the checkpoint. Its tensors may be on a device, be strided or share storage, but
            must not change during the call.
        keep: number of checkpoints to keep, at least 1. If it is 1, damage to the one checkpoint loses the whole
            run.
        write: a function that creates a file; None for `blocks.write_file`.

    Returns:
        The checkpoint's folder, which is durable.

    Raises:
        DiskFull: a write failed, for lack of space or any other reason. Existing checkpoints are
            untouched.
        Unreadable: the existing checkpoints could not be read; nothing is changed.
        UsageError: keep < 1.
        TypeError: the state is not JSON, or safetensors lacks a tensor's dtype.
    """
    if keep < MIN_KEPT:
        raise UsageError(f"keep = {keep}: expected at least {MIN_KEPT}")
    state = json.dumps(dict(checkpoint.state), indent=1).encode()
    files = {
        MODEL: tensor_layout.encode(checkpoint.model),
        OPTIMIZER: tensor_layout.encode(checkpoint.optimizer),
        STATE: (len(state), iter([memoryview(state)])),
    }
    final = checkpoints / f"step-{checkpoint.update:08d}"
    temporary = unfinished_folder(checkpoints, checkpoint.update)
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        # This is needed even if the folder existed, because it may have been made by a save that was
        # killed before this line.
        sync(checkpoints.parent)
        remove_leftovers(checkpoints)
        # A disk that is too full is refused before anything is written.
        if free_bytes(checkpoints) < _total_bytes(files):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(checkpoints))
        _write(temporary, checkpoint, files, write or blocks.write_file)
        _publish(temporary, final)
    except OSError as error:
        _remove(temporary)
        if checkpoint.update:
            consequence = "earlier checkpoints are untouched"
        else:
            consequence = "nothing was trained yet, so nothing is lost"
        raise DiskFull(
            f"{error.filename or checkpoints}: cannot save the checkpoint of update {checkpoint.update}: "
            f"{error.strerror} ({_space_needed(checkpoints, files)}); {consequence}: make room there, or correct "
            "what prevents writing, then resume"
        ) from error
    # The new checkpoint is durable. If an old one cannot be removed, that is not an error, because the
    # next save tries again.
    with suppress(OSError, Unreadable):
        _remove_old(final, checkpoint.update, keep)
    return final


def unfinished_folder(checkpoints: Path, update: int) -> Path:
    """Return the path of the temporary folder in which an update's checkpoint is written."""
    return checkpoints / f"{TEMPORARY}step-{update:08d}"


def load_newest(
    checkpoints: Path, warn: Warn, at: int | None = None, until: int | None = None
) -> Checkpoint:
    """Load the newest valid checkpoint, or the checkpoint of one update.

    Args:
        checkpoints: the run's folder of checkpoints.
        warn: called with one line that names the newer checkpoints that are damaged, if there are
            any.
        at: the update whose checkpoint is loaded; None: the newest.
        until: the last update whose checkpoint may be loaded; None: no limit.

    Raises:
        NoValidCheckpoint: no checkpoint is valid. The message names each with its fault.
        Unreadable: the system failed to read a checkpoint, which may still be valid. An older one
            is not loaded in its place, because the next save of the resumed run would remove it.
    """
    updates_and_folders = list_checkpoints(checkpoints)
    faults: list[str] = []
    for update, folder in updates_and_folders:
        is_other_update = at is not None and update != at
        is_too_late = until is not None and update > until
        if is_other_update or is_too_late:
            continue
        try:
            checkpoint = load(folder)
        except CheckpointDamaged as error:
            # A run that still trains may have removed this checkpoint, and then has a newer one.
            if is_gone(folder):
                return load_newest(checkpoints, warn, at, until)
            faults.append(str(error))
            continue
        except Unreadable as error:
            remedy = (
                f"if it never can, move {folder} elsewhere, and the checkpoint before it is taken"
            )
            raise Unreadable(f"{error}; {remedy}", error.errno) from error
        if faults:
            warn(f"skipped damaged checkpoints ({'; '.join(faults)}); going on from {folder.name}")
        return checkpoint
    if faults:
        raise NoValidCheckpoint(f"{checkpoints}: no valid checkpoint: {'; '.join(faults)}")
    if at is not None and updates_and_folders:
        updates = sorted({update for update, _ in updates_and_folders})
        raise NoValidCheckpoint(
            f"{checkpoints}: no checkpoint of update {at}; there are those of {', '.join(map(str, updates))}"
        )
    raise NoValidCheckpoint(
        f"{checkpoints}: no checkpoint to load; expected a folder such as step-00001000"
    )


def remove_leftovers(checkpoints: Path) -> None:
    """Remove the temporary folders of a process that was killed while it saved.

    The caller holds the run's lock.
    """
    for path in entries(checkpoints, TEMPORARY):
        _remove(path)


def _write(temporary: Path, checkpoint: Checkpoint, files: EncodedFiles, write: WriteFile) -> None:
    """Write the files and the manifest of a checkpoint into a new folder, and sync the folder."""
    temporary.mkdir()
    entries_by_name = {}
    for name, (length, pieces) in files.items():
        digests = write(temporary / name, pieces)
        entries_by_name[name] = FileEntry(length, digests)
    manifest = Manifest(run=checkpoint.run, update=checkpoint.update, files=entries_by_name)
    blocks.write_file(temporary / MANIFEST, [memoryview(manifest.encode())])
    sync(temporary)


def _publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its final name, and make the name durable."""
    if not is_gone(final):
        # A folder cannot be renamed onto another one, so the old folder is renamed first. With the
        # suffix REPLACED it can still be loaded, should the process be killed before the new folder has
        # its name.
        replaced = final.with_name(final.name + REPLACED)
        if not is_gone(replaced):
            # An earlier save was killed and left this folder. It stays as the fallback, and the old
            # folder gets a name that is never loaded.
            replaced = final.with_name(TEMPORARY + replaced.name)
        final.rename(replaced)
    temporary.rename(final)
    sync(final.parent)


def _remove_old(saved: Path, saved_update: int, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest complete ones up to the one just saved.

    A checkpoint that the system failed to read may be valid. It stays, and is not counted.

    Args:
        saved: the folder of the checkpoint just saved.
        saved_update: its update.
        keep: number of checkpoints to keep, including this one.
    """
    remove_leftovers(saved.parent)
    kept_updates = {saved_update}
    for update, folder in list_checkpoints(saved.parent):
        if folder == saved:
            continue
        is_earlier = update < saved_update and update not in kept_updates
        if is_earlier and len(kept_updates) < keep:
            try:
                read_manifest(folder)
            except Unreadable:
                continue
            except CheckpointDamaged:
                pass  # It is removed below.
            else:
                kept_updates.add(update)
                continue
        # The folder first gets a name that is never loaded, so that a folder whose removal was
        # interrupted is not taken for a checkpoint.
        removed = folder.with_name(TEMPORARY + folder.name)
        folder.rename(removed)
        _remove(removed)


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return the update and the path of all entries with a checkpoint's name, newest first.

    An entry may be damaged, or may not even be a folder. If an update has two folders, the one with
    the suffix REPLACED comes second.
    """
    updates_and_paths = []
    for path in entries(checkpoints):
        match = FOLDER_NAME.fullmatch(path.name)
        if match:
            updates_and_paths.append((int(match[1]), path))
    return sorted(updates_and_paths, key=lambda pair: (-pair[0], pair[1].name))


def _remove(path: Path) -> None:
    """Remove a folder with a temporary name, or a file or link with such a name.

    A failure is ignored: the folder is never loaded, and the next save tries again.
    """
    with suppress(OSError, Unreadable):
        if is_folder(path) and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _total_bytes(files: EncodedFiles) -> int:
    """Return the sum of the lengths of all files."""
    return sum(length for length, _ in files.values())


def _space_needed(checkpoints: Path, files: EncodedFiles) -> str:
    """Return a text that says how many bytes a checkpoint needs and, if known, how many are free."""
    needed = f"it needs {_total_bytes(files):,} bytes"
    # An error here must not hide the one that is being reported.
    with suppress(OSError, Unreadable):
        needed += f", {free_bytes(checkpoints):,} are free"
    return needed
