"""Run: pytest tests/laws/test_nothing_lost.py [-m slow] (a save that is killed, torn, failed or cut
off from power).
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from daily import nightly
from faults.examples import checkpoint, same, two_saves
from faults.harness import EVERY_UNREAD, FaultServer, Operation, Outcome, Scenario, unavailable
from faults.power import power_cuts
from monograph.checkpointing import Checkpoint, load_newest, save, verify
from monograph.errors import NoValidCheckpoint
from monograph.storage import blocks

needs_shim = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
SMALL_BLOCK = 1024  # so that the small files of these tests have several blocks and writes


# ---- scenarios: (what is there before, what the save adds) ---------------------------------------


def save_one(folder: Path, which: Checkpoint) -> None:
    blocks.BLOCK_BYTES = SMALL_BLOCK  # in the fork only
    save(folder / "checkpoints", which)


def first_save(folder: Path) -> None:
    save_one(folder, checkpoint(1))


def later_save_with_pruning(folder: Path) -> None:
    save_one(folder, checkpoint(3))


def later_save_of_the_fourth(folder: Path) -> None:
    save_one(folder, checkpoint(4))


def save_of_the_same_update(folder: Path) -> None:
    save_one(folder, checkpoint(2, seed=1))


def save_after_a_crash(folder: Path) -> None:
    save_one(folder, checkpoint(3))


def larger_save(folder: Path) -> None:
    save_one(folder, checkpoint(3, tensors=60))


def huge_save(folder: Path) -> None:
    save_one(folder, checkpoint(3, tensors=2000))


def careless_save(folder: Path) -> None:
    os.fsync = lambda descriptor: None
    save_one(folder, checkpoint(3))


def remains_of_a_crash(checkpoints: Path) -> None:
    """Half a save, a half-replaced checkpoint and a damaged later one."""
    two_saves(checkpoints)
    shutil.copytree(checkpoints / "step-00000001", checkpoints / ".tmp-step-00000003")
    (checkpoints / ".tmp-step-00000003" / "MANIFEST.json").unlink()
    (checkpoints / "step-00000002").rename(checkpoints / "step-00000002.replaced")
    shutil.copytree(checkpoints / "step-00000001", checkpoints / "step-00000009")


def nothing(checkpoints: Path) -> None:
    """Not even the folder is there."""


SCENARIOS: dict[str, tuple[Scenario, Callable[[Path], None], Checkpoint | None, Checkpoint]] = {
    "first": (first_save, nothing, None, checkpoint(1)),
    "later": (later_save_with_pruning, two_saves, checkpoint(2), checkpoint(3)),
    "same": (save_of_the_same_update, two_saves, checkpoint(2), checkpoint(2, seed=1)),
    "crashed": (save_after_a_crash, remains_of_a_crash, checkpoint(2), checkpoint(3)),
}


@pytest.fixture(autouse=True)
def as_in_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", SMALL_BLOCK)
    # Here only time: nobody pulls this machine's plug.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# ---- the law -------------------------------------------------------------------------------------


def judge(
    outcome: Outcome, previous: Checkpoint | None, new: Checkpoint, damaged_before: bool = False
) -> str:
    """What is loaded after the fault: "previous" or "new"; anything else fails."""
    checkpoints = outcome.folder / "checkpoints"
    where = f"{outcome.mode} at {outcome.number}, {outcome.operation}: {outcome.error}"
    assert outcome.killed or outcome.signal == 0, where
    assert outcome.killed == (outcome.mode in ("kill", "torn")), where
    assert outcome.error is None or outcome.error[0] == "DiskFull", where
    returned = not outcome.killed and outcome.error is None
    warnings: list[str] = []
    try:
        found = load_newest(checkpoints, warnings.append)
    except NoValidCheckpoint:
        assert previous is None and not returned, where
        verdict = "previous"
    else:
        verdict = "new" if same(found, new) else "previous"
        assert verdict == "new" or (
            previous is not None and same(found, previous) and not returned
        ), where
    if outcome.mode == "broken-once" and outcome.operation and outcome.operation.name == "fsync":
        assert outcome.error, where
    assert not warnings or damaged_before, (where, warnings)
    # Nothing half-written or half-removed bears a checkpoint's name.
    for folder in checkpoints.glob("step-*"):
        if not damaged_before:
            verify(folder)
    if outcome.mode == "full" and outcome.error:
        assert not list(checkpoints.glob(".tmp-*")), where
    return verdict


def goes_on(outcome: Outcome, previous: Checkpoint | None) -> None:
    """The next save over the remains works and leaves nothing but checkpoints behind."""
    checkpoints = outcome.folder / "checkpoints"
    warnings: list[str] = []
    save(checkpoints, checkpoint(4))
    assert same(load_newest(checkpoints, warnings.append), checkpoint(4)) and not warnings
    names = sorted(path.name.removesuffix(".replaced") for path in checkpoints.iterdir())
    assert names[-1] == "step-00000004" and len(set(names)) == len(names) <= 2, names
    if previous is not None:
        assert len(names) == 2, names


@needs_shim
@pytest.mark.parametrize(
    ("stride", "least"), [(17, 6), pytest.param(1, 90, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", nightly(SCENARIOS, {"first", "crashed"}))
def test_a_fault_at_any_operation_leaves_the_previous_or_the_new_checkpoint(
    name: str, stride: int, least: int, faults: FaultServer, tmp_path: Path
) -> None:
    scenario, prepare, previous, new = SCENARIOS[name]
    (tmp_path / "prepared").mkdir()
    prepare(tmp_path / "prepared" / "checkpoints")
    verdicts: Counter[str] = Counter()
    for outcome in faults.every_operation(scenario, tmp_path / "prepared", tmp_path, stride=stride):
        verdicts[judge(outcome, previous, new, damaged_before=name == "crashed")] += 1
        goes_on(outcome, previous)
    print(f"{name}: {verdicts.total()} faults, {dict(verdicts)}, none lost")
    assert verdicts["previous"] and verdicts["new"] and verdicts.total() > least


@needs_shim
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("scenario", "tensors", "least"), [(larger_save, 60, 300), (huge_save, 2000, 5000)]
)
def test_a_fault_at_any_operation_of_a_larger_save(
    scenario: Scenario, tensors: int, least: int, faults: FaultServer, tmp_path: Path
) -> None:
    (tmp_path / "prepared").mkdir()
    two_saves(tmp_path / "prepared" / "checkpoints")
    count = 0
    for outcome in faults.every_operation(scenario, tmp_path / "prepared", tmp_path):
        judge(outcome, checkpoint(2), checkpoint(3, tensors=tensors))
        goes_on(outcome, checkpoint(2))
        count += 1
    print(f"{count} faults, none lost")
    assert count > least


@needs_shim
@pytest.mark.parametrize(
    ("modes", "stride", "least"),
    [
        (("EIO", "EMFILE from here on"), 9, 10),
        pytest.param(EVERY_UNREAD, 1, 80, marks=pytest.mark.slow),
    ],
)
def test_a_save_whose_reads_fail_removes_no_sound_checkpoint(
    modes: Sequence[str], stride: int, least: int, faults: FaultServer, tmp_path: Path
) -> None:
    (tmp_path / "prepared").mkdir()
    two_saves(tmp_path / "prepared" / "checkpoints")
    save(tmp_path / "prepared" / "checkpoints", checkpoint(3))
    count = 0
    prepared = tmp_path / "prepared"
    for outcome in faults.every_operation(
        later_save_of_the_fourth, prepared, tmp_path, modes, stride
    ):
        where = f"{outcome.mode} at {outcome.number}, {outcome.operation}: {outcome.error}"
        assert not outcome.signal and (
            outcome.error is None or outcome.error[0] in ("DiskFull", "Unreadable")
        ), where
        sound = [
            path for path in (outcome.folder / "checkpoints").glob("step-*") if verify(path) is None
        ]
        assert {int(path.name[5:]) for path in sound} >= ({2, 3} if outcome.error else {3, 4}), (
            where
        )
        goes_on(outcome, None)
        count += 1
    print(f"{count} reads that failed in a save, no sound checkpoint removed")
    assert count > least


# ---- power cuts ----------------------------------------------------------------------------------


@needs_shim
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", nightly(["first", "later", "same"], {"later"}))
def test_a_power_cut_at_any_moment_leaves_the_previous_or_the_new_checkpoint(
    name: str, stride: int, faults: FaultServer, tmp_path: Path
) -> None:
    scenario, prepare, previous, new = SCENARIOS[name]
    (tmp_path / "prepared").mkdir()
    prepare(tmp_path / "prepared" / "checkpoints")
    cuts = power_cuts(faults, scenario, tmp_path / "prepared", tmp_path, stride)
    verdicts = [judge(outcome, previous, new) for outcome in cuts]
    print(f"{name}: {len(verdicts)} power cuts, {dict(Counter(verdicts))}, none lost")
    assert set(verdicts) == {"previous", "new"}
    assert verdicts == sorted(verdicts, reverse=True), (
        "the new checkpoint was there, and then was not any more"
    )


@needs_shim
def test_the_power_cut_test_notices_a_save_without_fsync(
    faults: FaultServer, tmp_path: Path
) -> None:
    (tmp_path / "prepared").mkdir()
    two_saves(tmp_path / "prepared" / "checkpoints")
    with pytest.raises(AssertionError):
        for outcome in power_cuts(faults, careless_save, tmp_path / "prepared", tmp_path, 4):
            judge(outcome, checkpoint(2), checkpoint(3))


# ---- the order of the operations -----------------------------------------------------------------


def require_durable_order(journal: list[Operation], update: int) -> None:
    """Each step is durable before the next relies on it."""
    final = f"checkpoints/step-{update:08d}"
    temporary = f"checkpoints/.tmp-step-{update:08d}"

    def at(name: str, path: str, detail: str | None = None) -> list[int]:
        wanted = (name, path) if detail is None else (name, path, detail)
        return [
            n
            for n, each in enumerate(journal)
            if (each.name, each.path, each.detail)[: len(wanted)] == wanted
        ]

    [published] = at("rename", temporary, final)
    [folder_synced] = at("fsync", temporary)
    manifest_created = at("create", f"{temporary}/MANIFEST.json")[0]
    for file in ("model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"):
        path = f"{temporary}/{file}"
        [synced] = at("fsync", path)
        assert max(at("pwritev", path)) < synced < folder_synced < published, file
        assert file == "MANIFEST.json" or synced < manifest_created, file
    durable = next(n for n in at("fsync", "checkpoints") if n > published)
    removals = [
        n
        for n, each in enumerate(journal)
        if each.name in ("unlink", "rmdir") or (each.name == "rename" and "/step-" in each.path)
    ]
    assert removals and all(n > durable for n in removals), (
        "an older checkpoint was touched before the new one was durable"
    )


@needs_shim
def test_each_step_is_durable_before_the_next_relies_on_it(
    faults: FaultServer, tmp_path: Path
) -> None:
    (tmp_path / "prepared").mkdir()
    two_saves(tmp_path / "prepared" / "checkpoints")
    journal = faults.record(later_save_with_pruning, tmp_path / "prepared", tmp_path)
    require_durable_order(journal, update=3)
    syncs = [operation for operation in journal if operation.name == "fsync"]
    assert len(syncs) == 7
    for dropped in syncs[1:]:  # the check itself notices every missing fsync, and pruning too early
        with pytest.raises((AssertionError, ValueError, StopIteration)):
            require_durable_order(
                [operation for operation in journal if operation is not dropped], update=3
            )
    prune = [operation for operation in journal if operation.name == "unlink"]
    with pytest.raises(AssertionError):
        require_durable_order(
            prune + [operation for operation in journal if operation not in prune], update=3
        )
