"""Scripts of the repository that no package holds, as modules."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def script(path: str) -> Any:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def smoke(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str
) -> dict[str, Any]:
    """What the main() of a benchmark writes, run small."""
    monkeypatch.setattr(
        sys, "argv", [f"{module.__name__}.py", "--smoke", "--out", str(out), *arguments]
    )
    module.main()
    found: dict[str, Any] = json.loads(out.read_text())
    return found
