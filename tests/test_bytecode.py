"""Run: pytest tests/test_bytecode.py (what is compiled before workers begin is what they read)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc

import bytecode


def test_workers_find_all_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """A test with its assertions rewritten, a helper as Python compiles it; a file that cannot be
    compiled stops nothing.
    """
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text("def test_it():\n    assert 1 == 2\n")
    (tests / "helper.py").write_text("NUMBER = 1\n")
    (tests / "test_broken.py").write_text("def\n")
    monkeypatch.setattr(bytecode, "ROOT", tmp_path)
    monkeypatch.setattr(bytecode.sys, "dont_write_bytecode", False)
    bytecode.compile_all(pytestconfig)
    rewritten = tests / "__pycache__" / f"test_it{PYC_TAIL}"
    code = _read_pyc(tests / "test_it.py", rewritten)
    assert code is not None and "@pytest_ar" in code.co_names
    assert os.path.exists(importlib.util.cache_from_source(tests / "helper.py"))
    written = rewritten.stat().st_mtime_ns
    bytecode.compile_all(pytestconfig)
    assert rewritten.stat().st_mtime_ns == written
