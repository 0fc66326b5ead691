"""Run: pytest tests/hostile/test_hostile_inputs.py [-s] [-m slow] (each input is used, or refused
in one line).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile.inputs import CANARY, KINDS
from hostile.server import SECONDS, HostileServer

DEAR = {"chat template": 20, "compression bomb": 10}  # a process, and 256 MiB, each time


@pytest.fixture(scope="module")
def server() -> Iterator[HostileServer]:
    with HostileServer() as forks:
        yield forks


def tried(server: HostileServer, kind: str, count: int, folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    slowest, wrong = 0.0, []
    for trial in server.each(kind, range(count), folder):
        found[trial.outcome] += 1
        slowest = max(slowest, trial.seconds)
        if trial.outcome not in ("used", "refused") or trial.violations or trial.seconds > SECONDS:
            wrong.append(trial)
    print(
        f"{kind:<20} {found.total():6,} inputs   {found['refused']:6,} refused   {slowest:5.2f} s the slowest"
    )
    kinds = Counter((trial.outcome, trial.detail[-200:], *trial.violations) for trial in wrong)
    assert not wrong, "\n\n".join(
        f"{number} times, seed {wrong[0].seed}: {each}" for each, number in kinds.items()
    )
    assert not (folder / CANARY).exists()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_used_or_refused_in_one_line(
    kind: str, server: HostileServer, tmp_path: Path
) -> None:
    found = tried(server, kind, min(12, 60 // DEAR.get(kind, 1)), tmp_path)
    assert found["refused"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_hostile_inputs(kind: str, server: HostileServer, tmp_path: Path) -> None:
    tried(server, kind, 700 // DEAR.get(kind, 1) * (2 if kind in DEAR else 1), tmp_path)
