"""Run: pytest tests/laws/test_damage_is_noticed.py [-s] [-m slow] (damaged files of every kind that
is written).
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from damage import damaged
from data.conftest import write_texts
from faults.examples import checkpoint, same, two_saves
from laws.resumed import SETTINGS, start, write_inputs
from monograph import checkpointing
from monograph.commands import check
from monograph.config import load
from monograph.data import store
from monograph.data.documents import ReadingPlan
from monograph.data.sources import find_sources
from monograph.data.store import CorpusRequest
from monograph.errors import InputRefused, NoValidCheckpoint
from monograph.predict.roofline import Calibration
from monograph.run.folder import Run
from monograph.sweeps.folder import Sweep
from monograph.text.tokenizer import Tokenizer

DIGESTS = re.compile(r"expected .*, found ")


@dataclass(frozen=True)
class Kind:
    """Files of one kind, and what becomes of one that is damaged; `look` fails where damage went
    unnoticed.
    """

    files: list[Path]
    look: Callable[[Path], str]
    share: int = 1  # of the files that are damaged in all


def refused(error: Exception, path: Path) -> str:
    assert path.name in str(error) and "\n" not in str(error), error
    return "refused, both digests named" if DIGESTS.search(str(error)) else "refused by name"


def checkpoints(folder: Path) -> Kind:
    two_saves(folder)
    newest = folder / "step-00000002"

    def look(path: Path) -> str:
        warnings: list[str] = []
        found = checkpointing.load_newest(folder, warnings.append)
        assert same(found, checkpoint(1)) and len(warnings) == 1 and path.name in warnings[0], (
            warnings
        )
        assert DIGESTS.search(warnings[0])
        try:
            checkpointing.load_newest(folder, pytest.fail, at=2)
        except NoValidCheckpoint as error:
            return refused(error, path) + "; the one before is taken"
        raise AssertionError("taken")

    return Kind(sorted(newest.iterdir()), look, 4)


def runs(folder: Path) -> Kind:
    """What `monograph check` says of a run's own files; it looks at their content, so another
    spelling is no damage.
    """
    run = Run(folder / "whole")
    whole = {
        path: path.read_bytes() for path in (run.config, run.tokenizer, run.metrics, run.lock_file)
    }
    _, state = checkpointing.load_state(max(run.checkpoints.iterdir()))
    sound = Tokenizer.from_file(run.tokenizer)

    def harmless(path: Path) -> str:
        """Why damage that was not refused changes nothing; fails where it does."""
        data = path.read_bytes()
        if path == run.config:
            assert load(path, {}, {}).values() == load_bytes(whole[path], folder).values()
        elif path == run.tokenizer:
            assert Tokenizer.from_file(path).to_json() == sound.to_json()
        elif path == run.metrics:
            kept = state["metrics_offset"]
            assert data[:kept] == whole[path][:kept]
            return "after the checkpoint, where a resume writes anew"
        else:
            kept = json.loads(data)["serial"] == json.loads(whole[path])["serial"]
            return (
                "another holder of the lock is named"
                if kept
                else "another place among the runs, as `last` sees it"
            )
        return "another spelling of the same"

    def look(path: Path) -> str:
        _, lines, error = check._verify_run(run)
        if error is None:
            return harmless(path)
        assert isinstance(error, InputRefused) and path.name in str(error)
        assert [name for name, line in lines.items() if line != "sound"] == [path.name]
        return "refused by name"

    return Kind(list(whole), look, 2)


def load_bytes(content: bytes, folder: Path) -> object:
    (folder / "whole.toml").write_bytes(content)
    return load(folder / "whole.toml", {}, {})


def tokens(folder: Path) -> Kind:
    texts = write_texts(folder / "texts", documents=8, longest=400)
    request = CorpusRequest(
        find_sources(texts, texts), 0.3, 300, ReadingPlan("text", skip_bad=False)
    )
    built = store.open_or_build(request, folder / "cache").folder
    manifest = json.loads((built / "manifest.json").read_bytes())

    def look(path: Path) -> str:
        try:
            store._open(built, request, None)
        except InputRefused as error:
            return refused(error, path) + "; it is made anew"
        assert path.name == "manifest.json" and json.loads(path.read_bytes()) == manifest
        return "another spelling of the same"

    return Kind(sorted(built.iterdir()), look, 4)


def sweeps(folder: Path) -> Kind:
    sweep = Sweep.create(
        folder / "sweep", load(None, {"train.updates": 5}, {}), [{"optim.lr": 1e-3}], None
    )
    sweep.record["result"] = {
        "best": {"member": 0, "knobs": {"optim.lr": 1e-3}},
        "members": [{"eval_loss": 1.25}],
    }
    sweep.write()
    whole = Sweep.open(folder / "sweep").record

    def look(path: Path) -> str:
        try:
            assert Sweep.open(folder / "sweep").record == whole
        except InputRefused as error:
            return refused(error, path)
        return "another spelling of the same"

    return Kind([folder / "sweep" / "sweep.json"], look)


def calibrations(folder: Path) -> Kind:
    path = folder / "calibration.json"
    path.write_text(
        json.dumps(
            {"schema": "monograph.calibration/1", "seen": {"cpu, fp32": [1.5]}, "beyond": {}}
        )
    )

    def look(path: Path) -> str:
        Calibration(path)  # times only, which the next run measures again
        return "ignored, or another time is believed"

    return Kind([path], look)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    folder = tmp_path_factory.mktemp("damage")
    (folder / "run").mkdir()
    before = os.getcwd()
    os.chdir(folder / "run")
    try:
        write_inputs(folder / "run")
        start("whole", SETTINGS | {"train.updates": 3, "train.keep": 2})
    finally:
        os.chdir(before)
    made = {
        "checkpoint": checkpoints,
        "tokenised text": tokens,
        "sweep.json": sweeps,
        "calibration": calibrations,
    }
    found = {"run": runs(folder / "run")}
    for name, make in made.items():
        (folder / name).mkdir()
        found[name] = make(folder / name)
    return found


@pytest.fixture(autouse=True)
def no_plug_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def outcomes(kinds: dict[str, Kind], count: int) -> Iterator[tuple[str, str]]:
    shares = sum(kind.share for kind in kinds.values())
    for name, kind in kinds.items():
        whole = {path: path.read_bytes() for path in kind.files}
        for seed in range(count * kind.share // shares):
            draws = random.Random(f"{name} {seed}")
            path = kind.files[seed % len(kind.files)]
            path.write_bytes(damaged(whole[path], draws))
            try:
                yield f"{name}: {path.name}", kind.look(path)
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}: {path}") from error
            finally:
                path.write_bytes(whole[path])


def table(kinds: dict[str, Kind], count: int) -> Counter[tuple[str, str]]:
    found = Counter(outcomes(kinds, count))
    for (file, outcome), number in sorted(found.items()):
        print(f"{number:6,}  {file:<40} {outcome}")
    print(f"{found.total():6,}  damaged files, none taken for whole")
    return found


def test_damage_is_noticed(kinds: dict[str, Kind]) -> None:
    found = table(kinds, 120)
    assert found.total() > 110
    files = {file for file, _ in found}
    assert len(files) == sum(len(kind.files) for kind in kinds.values())
    by_digest = sum(number for (_, outcome), number in found.items() if "both digests" in outcome)
    assert by_digest > 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_damaged_files(kinds: dict[str, Kind]) -> None:
    assert table(kinds, 20_020).total() >= 20_000
