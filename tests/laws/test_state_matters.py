"""Run: pytest tests/laws/test_state_matters.py (law 10: nothing that a checkpoint holds can be
dropped or changed).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laws.resumed import OWN, cut_back, fingerprint, resume, start
from monograph import checkpointing
from monograph.errors import InputRefused, MonographError, NoValidCheckpoint, UsageError

pytestmark = pytest.mark.usefixtures("here")

MANY = 2**20
# The one checkpoint that is changed, and three updates after it, which show what was.
SETTINGS = OWN | {"train.save_every": 13, "train.updates": 16}
Change = Callable[[dict[str, Any]], None]


def items(state: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in state.items():
        yield (*prefix, key)
        if isinstance(value, dict) and key in ("engine", "data", "random", "recipe", "versions"):
            yield from items(value, (*prefix, key))


def outcome(run: str, expected: dict[str, Any]) -> str:
    try:
        resume(run)
    except (InputRefused, NoValidCheckpoint, UsageError):
        return "refused"
    except MonographError as error:
        return type(error).__name__
    return "same" if fingerprint(Path(run)) == expected else "different"


def with_changed(
    name: str, change: Callable[[checkpointing.Checkpoint], checkpointing.Checkpoint]
) -> str:
    cut_back("whole", name, 13)
    folder = Path(name) / "checkpoints"
    checkpointing.save(folder, change(checkpointing.load(folder / "step-00000013")), keep=99)
    for path in folder.glob("*.replaced"):
        shutil.rmtree(path)
    return name


def test_no_item_of_the_state_can_be_dropped() -> None:
    start("whole", SETTINGS)
    expected = fingerprint(Path("whole"))
    state = checkpointing.load(Path("whole/checkpoints/step-00000013")).state
    names = list(items(dict(state)))
    assert len(names) > 28
    for number, path in enumerate(names):

        def drop(
            checkpoint: checkpointing.Checkpoint, path: tuple[str, ...] = path
        ) -> checkpointing.Checkpoint:
            state = json.loads(json.dumps(checkpoint.state))
            place = state
            for key in path[:-1]:
                place = place[key]
            del place[path[-1]]
            return replace(checkpoint, state=state)

        # Checkpoints lack them.
        older = path in {("metrics_sha256",), ("tokenizer_files",), ("sampling",)}
        allowed = "same" if older else "refused"
        assert outcome(with_changed(f"dropped-{number}", drop), expected) == allowed, path


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "index": (lambda s: s["engine"].update(index=12), {"refused"}),
    "applied": (lambda s: s["engine"].update(applied=2), {"different"}),
    "tokens": (lambda s: s["engine"].update(tokens=0), {"different"}),
    "skipped": (lambda s: s["engine"].update(skipped=1), {"different"}),
    "rows": (lambda s: s["data"].update(rows=0), {"different"}),
    "seed": (lambda s: s["data"].update(seed=1), {"refused"}),
    "skip": (lambda s: s["data"].update(skip=[[120, 128]]), {"different"}),
    "python": (lambda s: s["random"]["python"][1].__setitem__(-1, 5), {"different"}),
    "numpy": (lambda s: s["random"]["numpy"].__setitem__(2, 7), {"different"}),
    "torch": (lambda s: s["random"].update(torch=torch.Generator().manual_seed(1).get_state().numpy().tobytes().hex()),
              {"different"}),
    "micro_batch": (lambda s: s.update(micro_batch=3), {"different"}),
    "length": (lambda s: s.update(length=15), {"different"}),
    "cooled": (lambda s: s.update(cooled=[13, 16]), {"different"}),
    "metrics_offset": (lambda s: s.update(metrics_offset=s["metrics_offset"] + MANY), {"refused"}),
    "metrics_sha256": (lambda s: s.update(metrics_sha256="0"), {"refused"}),
    "fingerprint": (lambda s: s.update(fingerprint="0"), {"refused"}),
    "tokenizer": (lambda s: s.update(tokenizer="0"), {"refused"}),
    "settings": (lambda s: s.update(settings="0"), {"refused"}),
    "recipe": (lambda s: s["recipe"].update(sha256="0"), {"refused"}),
    "model_config": (lambda s: s.update(model_config={}), {"refused"}),
    # Times only, and a warning:
    "elapsed_s": (lambda s: s.update(elapsed_s=0.0), {"same"}),
    "budget_s": (lambda s: s.update(budget_s=1e9), {"different"}),
    "versions": (lambda s: s["versions"].update(torch="1.0"), {"same"}),
}  # fmt: skip


@pytest.mark.parametrize("stride", [64, pytest.param(4, marks=pytest.mark.slow)])
def test_every_item_of_the_state_matters(stride: int, capsys: pytest.CaptureFixture[str]) -> None:
    start("whole", SETTINGS)
    expected = fingerprint(Path("whole"))
    assert outcome(with_changed("unchanged", lambda checkpoint: checkpoint), expected) == "same"
    for name, (change, allowed) in CHANGES.items():

        def changed(
            checkpoint: checkpointing.Checkpoint, change: Change = change
        ) -> checkpointing.Checkpoint:
            state = json.loads(json.dumps(checkpoint.state))
            change(state)
            return replace(checkpoint, state=state)

        assert outcome(with_changed(name, changed), expected) in allowed, name
    assert "not bit for bit: the checkpoint was written by torch 1.0" in capsys.readouterr().err
    kinds = {
        name.partition(".")[0]
        for name in checkpointing.load(Path("whole/checkpoints/step-00000013")).optimizer
    }
    assert kinds == {"exp_avg", "exp_avg_sq", "momentum_buffer", "ema"}
    for kind in ("model", "optimizer"):
        tensors = dict(getattr(checkpointing.load(Path("whole/checkpoints/step-00000013")), kind))
        for name, tensor in list(tensors.items())[::stride]:
            without = {key: value for key, value in tensors.items() if key != name}
            zeroed = without | {name: torch.zeros_like(tensor)}
            dropped = with_changed(
                f"{name}-dropped", lambda c, k=kind, w=without: replace(c, **{k: w})
            )
            assert outcome(dropped, expected) == "refused", name
            if bool(tensor.any()):
                changed_ = with_changed(
                    f"{name}-zeroed", lambda c, k=kind, z=zeroed: replace(c, **{k: z})
                )
                assert outcome(changed_, expected) == "different", name
