"""What the tests of the benchmarks share: scripts by name, and an engine that does not compile."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from monograph.engine import Engine

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a script by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def uncompiled(monkeypatch):
    """Scripts run whole but eagerly: compiling is what takes their time, and the slow tests do it."""
    monkeypatch.setattr(Engine, "capture", lambda self, window, *_, **__: None)
