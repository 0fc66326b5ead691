"""Small checkpoints that differ in every tensor and field, and their bit-exact comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from monograph.checkpointing import Checkpoint, save


def checkpoint(update: int, seed: int = 0, tensors: int = 3) -> Checkpoint:
    random_numbers = torch.Generator().manual_seed(1000 * seed + update)
    flat = torch.randn(tensors * 100, generator=random_numbers)
    model = {f"layer.{index}": flat[100 * index :][:100].view(10, 10) for index in range(tensors)}
    moments = torch.randn(2, 300, generator=random_numbers)
    optimizer = {"first": moments[0], "second": moments[:, ::3], "count": torch.tensor(update)}
    return Checkpoint(
        update,
        model,
        optimizer,
        {"rows": 17 * update, "seed": seed, "loss": update / 3},
        run="a run",
    )


def same(one: Checkpoint, other: Checkpoint) -> bool:
    def equal(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
        return mine.keys() == theirs.keys() and all(
            torch.equal(mine[name], theirs[name]) for name in mine
        )

    labels_agree = (one.update, one.state, one.run) == (other.update, other.state, other.run)
    return labels_agree and equal(one.model, other.model) and equal(one.optimizer, other.optimizer)


def two_saves(checkpoints: Path) -> None:
    save(checkpoints, checkpoint(1))
    save(checkpoints, checkpoint(2))
