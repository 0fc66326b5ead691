"""Store a run's *reference*: the model before the first update, with which the loss compares the
model in training.

For preferences the file has the initial model's log-probabilities of all answers. For a KL term,
whose answers are sampled later, it has the initial weights. The file is in the run's folder, where
a resumed run reads it.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save

from monograph.distributed.rows import gather_rows, shard_like
from monograph.distributed.world import World
from monograph.errors import InputRefused
from monograph.model.files import open_tensors
from monograph.run.folder import Run
from monograph.run.writing import write_atomically
from monograph.storage.reading import exists
from monograph.storage.writing import sync

REFERENCE = "reference.safetensors"  # in the run's folder
UNUSABLE = "{}: the reference of this run is {}: put the file back, or begin a new run"
DAMAGED = "damaged, of another run, or of an earlier version"


def verify_reference(run: Run) -> None:
    """Verify a run's stored reference, if it has one.

    Raises:
        InputRefused: it is damaged.
    """
    path = run.folder / REFERENCE
    if exists(path):
        _read_verified(path)


def write_reference(
    run: Run, fingerprint: str, tensors: Mapping[str, torch.Tensor], world: World
) -> None:
    """Write a reference into the run's folder. This is called before the run's first checkpoint.

    Args:
        run: the run's folder.
        fingerprint: the fingerprint of the records that the reference belongs to.
        tensors: the reference by name; each tensor has the rows of this rank.
        world: the ranks, which must all call this.

    Raises:
        DiskFull: there is no room for it.
    """
    whole_tensors = dict[str, torch.Tensor]()
    # Tensors are gathered one after another, so that the device needs memory for only one.
    for name, tensor in tensors.items():
        whole = gather_rows(tensor)  # all ranks take part
        if world.leads:
            # The tensor of one of several members of a sweep may be a view of a larger tensor.
            whole_tensors[name] = whole.cpu().contiguous()
    if not world.leads:
        return
    # The fingerprint and the digest are in one entry of the metadata, because safetensors writes
    # several entries in any order, and equal references should be equal files.
    content = save(whole_tensors, {"whose": f"{fingerprint} {_digest(whole_tensors)}"})
    write_atomically(
        run.folder / REFERENCE, content, "nothing was trained yet: make room there, and start again"
    )
    sync(run.folder)


def read_reference(run: Run, fingerprint: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read the reference in the run's folder into tensors.

    Args:
        run: the run's folder.
        fingerprint: the fingerprint that the records of the reference must have.
        tensors: by name, the tensors that get the values; each has the rows of this rank.

    Raises:
        InputRefused: the file is missing or damaged, or belongs to other records.
    """
    path = run.folder / REFERENCE
    if not exists(path):
        raise InputRefused(UNUSABLE.format(path, "missing"))
    stored, stored_fingerprint = _read_verified(path)
    has_same_shapes = all(
        name in stored and stored[name].shape == tensor.shape for name, tensor in tensors.items()
    )
    if not has_same_shapes or stored_fingerprint != fingerprint:
        raise InputRefused(UNUSABLE.format(path, DAMAGED))
    for name, tensor in tensors.items():
        tensor.copy_(shard_like(stored[name], tensor))


def _read_verified(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a reference, and the fingerprint of its records, after verifying the
    file's digest.

    Raises:
        InputRefused: the file is damaged.
        Unreadable: the system failed to read the file.
    """
    # The error of `open_tensors` does not say what to do, so it is replaced.
    with suppress(InputRefused), open_tensors(path) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        metadata = file.metadata() or {}
        fingerprint, _, digest = metadata.get("whose", "").rpartition(" ")
        if digest == _digest(stored):
            return stored, fingerprint
    raise InputRefused(UNUSABLE.format(path, DAMAGED))


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the bytes of all tensors, by which any damage is noticed."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
