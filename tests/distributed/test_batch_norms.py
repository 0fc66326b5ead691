"""Run: pytest tests/distributed/test_batch_norms.py (torch's SyncBatchNorm, with the operators that
CPUs lack)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commands.forked import CommandServer
from distributed.launched import ranks
from monograph.distributed.engine import Replicated
from monograph.distributed.world import World, read_place
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.optim import AdamW
from monograph.predict.footprint import Training
from monograph.resident import Resident
from monograph.session import setup

ROWS = 3  # of a rank's micro-batch


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    counted = batch["y"] != 0
    return ((model(batch["x"]).squeeze(-1) - batch["y"]).square() * counted).sum(), counted.sum()


loss.fill = {"x": 0, "y": 0}  # type: ignore[attr-defined]


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)
    ).double()


def plan(parallel: str, rows: int, device: str) -> Any:
    training = Training(rows=rows, length=1, optim=AdamW(lr=1e-2), clip=0.5)
    made = SimpleNamespace(
        training=training, memory="device", job=SimpleNamespace(parallel=parallel)
    )
    return SimpleNamespace(model=normed(), loss=loss, plan=made), SimpleNamespace(type=device)


def on_a_cpu() -> torch.library.Library:
    """The operators of SyncBatchNorm, which torch has for GPUs alone, by their equations; x is
    [rows, C].
    """
    library = torch.library.Library("aten", "IMPL", "CPU")

    def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x.mean(0), (x.var(0, correction=0) + eps).rsqrt()

    def gathered(
        x: Tensor,
        means: Tensor,
        scales: Tensor,
        mean: Tensor,
        var: Tensor,
        momentum: float,
        eps: float,
        n: Tensor,
    ) -> tuple[Tensor, Tensor]:
        share = (n / n.sum())[:, None]
        middle = (share * means).sum(0)
        spread = (share * (scales**-2 - eps + means.square())).sum(0) - middle.square()
        mean.lerp_(middle, momentum)
        var.lerp_(spread * n.sum() / (n.sum() - 1), momentum)
        return middle, (spread + eps).rsqrt()

    def reduced(
        dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, *of_gradients: Any
    ) -> tuple[Tensor, ...]:
        centred = (dy * (x - mean)).sum(0)
        return dy.sum(0), centred, centred * scale, dy.sum(0)

    def back(
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        scale: Tensor,
        w: Tensor,
        sums: Tensor,
        centred: Tensor,
        n: Tensor,
    ) -> Tensor:
        return (dy - sums / n.sum() - (x - mean) * scale.square() * centred / n.sum()) * scale * w

    library.impl("batch_norm_stats", stats)
    library.impl("batch_norm_gather_stats_with_counts", gathered)
    library.impl("batch_norm_elemt", lambda x, w, b, mean, scale, eps: (x - mean) * scale * w + b)
    library.impl("batch_norm_backward_reduce", reduced)
    library.impl("batch_norm_backward_elemt", back)
    return library


def main() -> None:
    world, library = World(read_place()), on_a_cpu()
    of_gpus = patch.object(
        DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *of: None
    )
    with patch.object(torch._C, "_get_privateuse1_backend_name", lambda: "cpu"), of_gpus:
        one = setup.make_engine(plan("none", ROWS * world.size, "cpu")[0], torch.device("cpu"))
        built, device = plan("ddp", ROWS, "cuda")
        with (
            patch.object(nn.Module, "to", lambda module, *of: module),
            patch.object(setup, "materialize_", lambda m, *of: m),
        ):
            many = setup.make_engine(built, device, world)
        assert isinstance(one, Resident) and isinstance(many, Replicated)
        worst = []
        for index in range(4):
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(
                ROWS * world.size * 2 - 2 * (index % 2), 5, generator=generator, dtype=torch.float64
            )
            window = {"x": x, "y": x.sum(-1)}
            for engine in (one, many):
                engine.accumulate(window)
            a, b = one.update(), many.update()
            worst += [abs(float(a.loss / b.loss) - 1), abs(float(a.grad_norm / b.grad_norm) - 1)]
        ours, exact = many.state().model, one.state().model
        assert ours.keys() == exact.keys()
        worst += [float((ours[name] - exact[name]).abs().max()) for name in exact]
        ended = 0
        try:
            many._with_retries(window, run_out)
        except OutOfDeviceMemory as error:
            ended = error.retry_rows
    if world.leads:
        Path(sys.argv[1]).write_text(json.dumps({"worst": max(worst), "retry_rows": ended}))
    world.leave()
    del library


def run_out() -> None:
    raise torch.OutOfMemoryError("no room")


def test_two_ranks_are_one_process_with_their_rows_together(
    server: CommandServer, tmp_path: Path
) -> None:
    """Law 13: losses, norms, weights and running statistics, with windows that are not shared out
    evenly.
    """
    done = ranks(
        server, tmp_path, 2, tmp_path / "found.json", call="distributed.test_batch_norms:main"
    )
    assert not any(each.code for each in done), done
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["worst"] <= 1e-12 and found["retry_rows"] == 2, found


def test_without_gpus_it_is_refused() -> None:
    two: Any = SimpleNamespace(alone=False, size=2, rank=1)
    with pytest.raises(
        UsageError,
        match="^1 normalises over the rows of all ranks, which torch supports only on GPUs",
    ):
        setup.make_engine(plan("ddp", ROWS, "cpu")[0], torch.device("cpu"), two)
