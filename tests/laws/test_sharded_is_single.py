# Run: pytest tests/laws/test_sharded_is_single.py      (-m slow for all cases, four ranks and compiled steps)
"""Law 13: what DDP and FSDP2 compute on several ranks is what one process computes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.forked import CommandServer
from distributed.launched import ranks
from laws import sharded
from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.checkpointing.folder import read_manifest
from monograph.loop import EngineState
from monograph.resident import Resident
from monograph.storage import blocks

BOUND = {"torch.float32": 1e-6, "torch.float64": 1e-12}


def run(
    server: CommandServer,
    program: str,
    size: int,
    folder: Path,
    *more: object,
    call: str = "laws.sharded:main",
    **variables: str,
) -> dict[str, Any]:
    out = folder / "results.json"
    done = ranks(server, folder, size, program, out, *more, call=call, **variables)
    assert not any(each.code for each in done), done
    found: dict[str, Any] = json.loads(out.read_text())
    return found


WHEN = [pytest.param(" by day", id="by day"), pytest.param("", marks=pytest.mark.slow, id="all")]
SIZES = [(2, " by day"), *(pytest.param((size, ""), marks=pytest.mark.slow) for size in (2, 4))]


@pytest.fixture(scope="module", params=SIZES, ids="{0[0]} ranks{0[1]}".format)
def found(
    request: pytest.FixtureRequest, server: CommandServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    size, when = request.param
    return {"when": when} | run(server, f"equations{when}", size, tmp_path_factory.mktemp("ranks"))


def test_gradients_are_those_of_one_process(found: dict[str, Any]) -> None:
    """Ragged rows, windows that are not shared out evenly, tied and untied, summed once and with
    every part.
    """
    assert len(found["gradients"]) == ((1 + 2 + 2) * 2 if found["when"] else (1 + 2) * 2 * 2 * 4)
    for case, result in found["gradients"].items():
        bound = BOUND[case.split()[1]]
        assert result["error"] <= bound, case
        assert abs(result["norm"] - 1) <= bound, case  # an average for a sum would be 1 / W


def test_the_wrong_ways_fail(found: dict[str, Any]) -> None:
    assert len(found["wrong_ways"]) == (3 if found["when"] else 5)
    assert min(found["wrong_ways"].values()) > 0.1


def test_thirty_updates_are_those_of_one_process(found: dict[str, Any]) -> None:
    """Losses, norms, counts, evaluations, weights, moments and averages; a window without a target
    is refused alike.
    """
    for case, errors in found["trajectories"].items():
        assert max(errors.values()) <= 1e-12, (case, errors)


def test_each_matrix_is_orthogonalised_once_in_the_world_by_ranks_with_equal_shares(
    found: dict[str, Any],
) -> None:
    owned = found["owners"]
    assert owned["iterated"] == owned["matrices"] > 0 and owned["most"] - owned["least"] <= 1
    assert owned["sent"] < 2, "to the owner and back, but for the owner's own rows"


def test_the_assembled_model_is_that_of_one_process(found: dict[str, Any]) -> None:
    assert max(found["assembled"].values()) <= 1e-12


def test_the_copy_that_draws_answers_has_the_bits_that_are_trained(found: dict[str, Any]) -> None:
    """Matrices of blocks are gathered in 16 bits in bf16, all weights of blocks if halved, and
    frozen ones once.
    """
    for case, of in found["gathered"].items():
        assert of["same"] and of["planned"], (case, of)
    sent = {case: (of["in 16 bits"], of["in all"]) for case, of in found["gathered"].items()}
    expected = {"halved": (9, 11)}
    if not found["when"]:
        expected = {
            "halved": (18, 20),
            "fp32": (0, 20),
            "bf16": (14, 20),
            "adapters in nf4": (0, 43),
            "experts": (16, 26),
        }
    assert sent == expected


def test_what_stands_beside_it_is_that_of_one_process(found: dict[str, Any]) -> None:
    """Precisions, recomputation, optimizers, packed rows, adapters, streams: each cell of
    docs/support.md.
    """
    for case, errors in (found["combinations"] | found["streamed"]).items():
        assert max(errors.values()) <= BOUND[case.split()[-1]], (case, errors)
    halved = found["halved_weights"]
    assert (halved["blocks"], halved["norm"]) == (2, 4)
    assert halved["matrices"] <= 1e-6 and halved["all"] <= 2**-8, halved


@pytest.mark.parametrize("when", WHEN)
def test_replicated_ranks_halve_the_micro_batch_together(
    when: str, server: CommandServer, tmp_path: Path
) -> None:
    """One runs out of memory before or in the middle of the sums; the gradient is that of one
    process afterwards.
    """
    for where, found in run(server, f"halved{when}", 2, tmp_path)["halved"].items():
        assert found["alike"] and found["rows"] == 1 and found["buckets"] > 3, (where, found)
        if where == "one row":
            assert found["ended"].startswith("one row does not fit the device's memory"), found
            assert len(found["lines"]) == 2, found
        else:
            assert found["error"] <= 1e-12 and not found["ended"], (where, found)
            assert found["lines"] == [
                "out of memory at 2 rows: micro_batch is now 1, the update stays the same"
            ], where


@pytest.mark.parametrize("when", WHEN)
def test_checkpoints_are_the_same_bytes_for_any_number_of_ranks(
    when: str, server: CommandServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained and saved by four ranks, loaded and saved by one, by two, and by the engine of one
    process.

    The manifests vouch for each byte.
    """
    four, one, two = (run(server, f"saved{when}", size, tmp_path, tmp_path) for size in (4, 1, 2))
    assert four == one == two
    monkeypatch.setattr(blocks, "BLOCK_BYTES", sharded.SMALL_BLOCK)
    for name, digest in four.items():
        engine = Resident(sharded.model(torch.float32, False), optim=sharded.SAVED[name.split()[1]])
        last = checkpointing.load_newest(tmp_path / "2 ranks" / name, pytest.fail)
        engine.load_state(EngineState(last.model, last.optimizer, last.state["engine"]))
        state = engine.state()
        checkpoint = Checkpoint(3, state.model, state.optimizer, {"engine": state.scalars})
        folder = checkpointing.save(tmp_path / "alone" / name, checkpoint)
        assert hashlib.sha256((folder / "MANIFEST.json").read_bytes()).hexdigest() == digest, name
        assert len(read_manifest(folder).files["optimizer.safetensors"].sha256) >= 5


@pytest.mark.parametrize("when", WHEN)
def test_rows_that_each_machine_shares_out_are_those_of_one_process(
    when: str, server: CommandServer, tmp_path: Path
) -> None:
    """HSDP: two machines with two ranks each, and one checkpoint."""
    found = run(server, f"by_machine{when}", 4, tmp_path, tmp_path, LOCAL_WORLD_SIZE="2")
    assert max(found["errors"]["hsdp Muon"].values()) <= 1e-12, found["errors"]
    assert found["same"] and found["share"] == 0.5


@pytest.mark.parametrize("when", WHEN)
def test_ranks_that_begin_anew_go_on_in_the_same_bits(
    when: str, server: CommandServer, tmp_path: Path
) -> None:
    """On four ranks: two numbers have one order of adding, whatever an engine did before."""
    found = run(server, f"restarted{when}", 4, tmp_path)["restarted"]
    assert found == dict.fromkeys(["ddp"] if when else sharded.ENGINES, [True] * 2)


@pytest.mark.slow
def test_captured_steps_are_those_of_one_process(server: CommandServer, tmp_path: Path) -> None:
    for case, result in run(server, "captured", 2, tmp_path)["captured"].items():
        assert result["error"] <= 1e-12, case
        assert (result["recompiles"], result["breaks"]) == (0, 0), case
