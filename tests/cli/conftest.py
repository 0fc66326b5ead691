"""Stand-ins for the commands."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from cli.called import COMMANDS, Calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    calls = Calls()
    package = types.ModuleType("monograph.commands")
    monkeypatch.setitem(sys.modules, "monograph.commands", package)
    for name in COMMANDS:
        module = types.ModuleType(f"monograph.commands.{name}")
        for function in ("run", "show", "build"):
            setattr(module, function, calls)
        module.GenerateOptions = dict  # type: ignore[attr-defined]  # of `generate`: what was typed, by its name
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    return calls
