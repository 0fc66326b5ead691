"""Run: pytest tests/distributed/test_refused.py (what several ranks cannot do, said before any of
it is done).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from batches import ragged, tiny_llama
from four_bits import FOUR_BITS
from monograph.distributed.by_rank import seed_micro_batch
from monograph.distributed.engine import Replicated, streamed_replica
from monograph.distributed.retries import RestartAll
from monograph.distributed.rows import rank_rows
from monograph.distributed.sharded import require_shardable, require_whole_elements
from monograph.distributed.world import World
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.graph.precision import Precision
from monograph.loss import token_loss
from monograph.ops.philox import LOW32
from monograph.optim import AdamW
from monograph.optim.formats import FORMATS
from monograph.step import Step

TWO: Any = SimpleNamespace(alone=False, size=2, rank=1)


class Scaled(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))


REFUSED: dict[str, dict[str, Any]] = {
    "gradients would be summed in the weights' dtype": {
        "optim": AdamW(state="bf16", master_weights=False)
    },
    "gathers_bf16 is for precision bf16, not fp32": {"gathers_bf16": True},
    "gain has no rows": {"model": Scaled()},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_rows_cannot_do(sentence: str) -> None:
    fields = {"optim": AdamW(), "model": tiny_llama(), "precision": Precision()} | REFUSED[sentence]
    gathers_bf16 = bool(fields.pop("gathers_bf16", False))
    with pytest.raises(UsageError, match=sentence):
        require_shardable(SimpleNamespace(**fields), gathers_bf16)


def test_a_window_whose_loss_cannot_be_filled_up_must_be_shared_out_evenly() -> None:
    engine: Any = object.__new__(Replicated)
    engine.retries, engine._row_dim, engine._members = RestartAll(2, TWO), 0, None
    engine.step = SimpleNamespace(device=torch.device("cpu"), loss=lambda model, batch: None)
    window = ragged(8)
    seven = {name: tensor[:7] for name, tensor in window.items()}
    assert [len(part["tokens"]) for part in engine._micro_batches(window)] == [2, 2]
    with pytest.raises(
        UsageError, match="a window of 7 rows .* multiple of 4 rows, or a `fill` to the loss"
    ):
        next(engine._micro_batches(seven))
    engine.micro_batch = 3
    assert [
        len(part["tokens"])
        for part in engine._micro_batches({name: seven[name][:6] for name in seven})
    ] == [3]
    engine.micro_batch = 2
    engine.step.loss = token_loss
    assert [len(part["tokens"]) for part in engine._micro_batches(seven)] == [2, 2]


def test_ranks_that_stream_take_one_window_an_update() -> None:
    engine = streamed_replica(tiny_llama(), world=World())
    engine.accumulate(ragged(2))
    with pytest.raises(UsageError, match="several ranks take one window an update"):
        engine.accumulate(ragged(2))


def test_without_a_micro_batch_the_rows_are_shared_out_evenly() -> None:
    engine: Any = object.__new__(Replicated)
    engine.retries, engine._row_dim, engine._members = RestartAll(None, TWO), 0, None
    engine.step = SimpleNamespace(device=torch.device("cpu"), loss=token_loss)
    for rows, own in ((1, 1), (2, 1), (5, 3), (8, 4)):
        assert [len(part["tokens"]) for part in engine._micro_batches(ragged(rows))] == [own]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_micro_batch_is_seeded_by_its_number_in_the_window(size: int) -> None:
    step: Any = SimpleNamespace(optim=AdamW(seed=3), index=7)
    seeds = []
    for micro_batch in range(12):
        seed_micro_batch(
            SimpleNamespace(size=size, rank=micro_batch % size), step, micro_batch // size
        )  # type: ignore[arg-type]
        seeds.append(torch.initial_seed())
    assert seeds == [hash((3, 7, micro_batch)) & LOW32 for micro_batch in range(12)]


def test_memory_that_ran_out_names_the_rank_and_other_errors_stay() -> None:
    def fails(error: Exception) -> None:
        raise error

    for rows, remedy in (
        (3, "let torchrun restart it .--max-restarts 3., or use a smaller"),
        (1, "use a smaller"),
    ):
        retries = RestartAll(rows, TWO)
        said = f"^rank 1: out of memory at micro_batch = {rows}: no more; {remedy} train.micro_batch, model or"
        with pytest.raises(OutOfDeviceMemory, match=said) as raised:
            retries.run(
                cast(Step, None), lambda: 4, lambda: fails(torch.OutOfMemoryError("no more\nof it"))
            )
        assert raised.value.retry_rows == (2 if rows == 3 else 0)
    with pytest.raises(RuntimeError, match="^another$"):
        retries.run(cast(Step, None), lambda: 4, lambda: fails(RuntimeError("another")))


def test_rows_are_shared_out_as_torch_chunks_them() -> None:
    for rows in (0, 1, 2, 3, 7, 8, 257):
        for size in (1, 2, 3, 4, 8):
            own = [torch.arange(rows)[rank_rows(rank, size, rows)] for rank in range(size)]
            chunks = [part for part in torch.arange(rows).chunk(size) if len(part)] if rows else []
            assert [part.tolist() for part in own if len(part)] == [
                part.tolist() for part in chunks
            ]


def test_codes_that_share_a_byte_are_not_cut() -> None:
    require_whole_elements("gain", [(0, 4), (4, 7), (7, 7)], FOUR_BITS)
    with pytest.raises(UsageError, match="gain: the optimizer's state packs 2 numbers in one"):
        require_whole_elements("gain", [(0, 3), (3, 6)], FOUR_BITS)
    require_whole_elements("gain", [(0, 3), (3, 6)], FORMATS["8bit"])
