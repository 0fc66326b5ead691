"""Run: pytest tests/laws/test_gone_back.py (a run that is not finite any more passes those rows
over, or ends).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from laws.resumed import OWN, OWN_MODULE, cut_back, fingerprint, resume, start
from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.errors import Diverged
from monograph.run.folder import Run
from monograph.run.metrics_log import PATIENCE
from monograph.session.rewind import IN_A_ROW_UPDATES, MAX_REWINDS, rewinds_in_a_row

pytestmark = pytest.mark.usefixtures("here")

UPDATES, SAVED_EVERY, BAD_FROM, ROWS = 60, 7, 25, 8
SETTINGS = OWN | {
    "train.updates": UPDATES,
    "train.save_every": SAVED_EVERY,
    "train.micro_batch": ROWS,
}
# Its bits hang on random numbers and a running mean; what is not finite, on how often it was
# called.
PROBED = """
import os

calls = []

def loss(model, batch):
    targets = batch["targets"].flatten()
    learns = torch.is_grad_enabled() and (targets != -100).any()  # rows without targets are tried once, before all
    calls.append(1) if learns else None
    bad = {begin} < len(calls) - 1 <= {end} and not os.path.exists("mended")  # the first call is the trial's
    if bad and {weight}:
        model.head.weight.data[3, 3] = float("inf")
    logits = model(batch["tokens"])
    sums = nn.functional.cross_entropy(logits, targets, reduction="sum")
    return sums * (float("nan") if bad else 1), (targets != -100).sum()
"""
FOR_GOOD = (BAD_FROM, 10**9)


def write_module(calls: tuple[int, int], weight: bool = False) -> None:
    """The module whose loss is not finite in calls begin + 1 to end; there a weight may become
    infinite, too.
    """
    probe = PROBED.format(begin=calls[0], end=calls[1], weight=weight)
    Path("own.py").write_text(OWN_MODULE[: OWN_MODULE.index("def loss")] + probe)


def gone_back(folder: str) -> list[dict[str, Any]]:
    return [row for row in Run(Path(folder)).rows() if "rewound_from" in row]


def passing_over(folder: str, update: int, rows: list[int]) -> None:
    """What is left of a run that was killed after `update`, but for the rows that it will pass
    over.
    """
    cut_back(folder, "other", update)
    saved = checkpointing.load_newest(Path("other/checkpoints"), print)
    state = {**saved.state, "data": {**saved.state["data"], "skip": [rows]}}
    shutil.rmtree("other/checkpoints")
    checkpointing.save(
        Path("other/checkpoints"),
        Checkpoint(update, saved.model, saved.optimizer, state, run="whole"),
    )


@pytest.mark.parametrize("place", [pytest.param("loss", marks=pytest.mark.slow), "weight"])
def test_gone_back_is_never_having_seen_them(place: str) -> None:
    write_module(
        (BAD_FROM, BAD_FROM + (PATIENCE if place == "loss" else 1)), weight=place == "weight"
    )
    start("run", SETTINGS)
    [row] = gone_back("run")
    sound = BAD_FROM // SAVED_EVERY * SAVED_EVERY
    end = BAD_FROM + PATIENCE
    assert (row["update"], row["rewound_from"]) == (sound, end)
    assert row["passed_over_rows"] == [sound * ROWS, end * ROWS]
    found = fingerprint(Path("run"))
    assert [each["update"] for each in found["rows"] if "train_loss" in each] == list(
        range(1, UPDATES + 1)
    )
    assert not any(each.get("skipped") for each in found["rows"])

    Path("mended").touch()
    start("whole", SETTINGS)
    passing_over("whole", sound, row["passed_over_rows"])
    resume("other")
    expected = fingerprint(Path("other"))
    found["rows"].remove(row)
    assert {key: found[key] for key in found if key != "state"} == {
        key: expected[key] for key in found if key != "state"
    }
    assert found["state"]["data"] == expected["state"]["data"]


@pytest.mark.slow
def test_killed_after_it_went_back_it_goes_on_there() -> None:
    write_module((BAD_FROM, BAD_FROM + PATIENCE))
    start("run", SETTINGS)
    expected, [row] = fingerprint(Path("run")), gone_back("run")
    Path("mended").touch()
    cut_back("run", "cut", row["update"])
    resume("cut")
    assert {**fingerprint(Path("cut")), "state": 0} == {**expected, "state": 0}


@pytest.mark.parametrize("weight", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_never_finite_again_is_an_end_that_says_where(weight: bool) -> None:
    write_module(FOR_GOOD, weight)
    sound = BAD_FROM // SAVED_EVERY * SAVED_EVERY
    last = sound + PATIENCE
    where = (
        "parameter head.weight holds non-finite values"
        if weight
        else "every module's output is finite; look at"
    )
    passed_over = f"although rows were passed over {MAX_REWINDS} times"
    said = f"{PATIENCE} updates in a row, up to {last}, skipped as not finite {passed_over}: "
    with pytest.raises(Diverged, match=f"{said}the loss is nan: {where}"):
        start("run", SETTINGS)
    checkpoint = checkpointing.load_newest(Path("run/checkpoints"), print)
    assert all(bool(tensor.isfinite().all()) for tensor in checkpoint.model.values())
    assert len(checkpoint.state["data"]["skip"]) == MAX_REWINDS


def test_what_it_goes_back_to_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Updates that are skipped are not saved: their checkpoints would take the place of the one
    before them.
    """
    write_module((BAD_FROM, BAD_FROM + PATIENCE))
    start("run", SETTINGS | {"train.save_every": 3, "train.keep": 2})
    [row] = gone_back("run")
    assert row["update"] == BAD_FROM // 3 * 3
    said = f"updates 26 to 45 were skipped: back to update {row['update']}, passing over 168 rows of data"
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_is_in_a_row() -> None:
    far = IN_A_ROW_UPDATES * ROWS
    assert rewinds_in_a_row([(0, 80)], ROWS) == 1
    assert rewinds_in_a_row([(0, 80), (80, 160), (160, 240)], ROWS) == 3
    assert rewinds_in_a_row([(0, 80), (80, 160), (160 + far, 240 + far)], ROWS) == 1
    assert (
        rewinds_in_a_row([(0, 80), (80 + far, 160 + far), (159 + 2 * far, 240 + 2 * far)], ROWS)
        == 2
    )


def test_a_run_that_is_too_short_to_go_back_ends_with_a_reason() -> None:
    write_module((3, 10**9))
    with pytest.raises(
        Diverged,
        match="7 updates in a row, up to 10, skipped as not finite: the loss is nan: every",
    ):
        start("run", SETTINGS | {"train.updates": 10})


def test_one_bad_update_at_the_very_end_is_no_end() -> None:
    write_module((9, 10))
    start("run", SETTINGS | {"train.updates": 10})
    assert [row["skipped"] for row in Run(Path("run")).rows() if "skipped" in row] == [
        False
    ] * 9 + [True]
