"""Run: pytest tests/distributed/test_checkpoint.py (a rank that cannot write)."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.launched import ranks
from monograph import checkpointing
from monograph.checkpointing import Checkpoint

PROGRAM = Path(__file__).with_name("failing.py")


def test_a_rank_that_cannot_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    first, second = ranks(PROGRAM, 2, tmp_path)
    assert second.splitlines()[-1] == (
        f"{tmp_path}/.tmp-step-00000002/model.safetensors: rank 1 cannot save its part of the checkpoint of update 2: "
        "No space left on device; make room, then resume"
    )
    assert first.splitlines()[-1] == "lost"
    last = checkpointing.newest(tmp_path, pytest.fail)
    assert last.update == 1
    checkpointing.save(tmp_path, Checkpoint(2, last.model, last.optimizer))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000002"]
