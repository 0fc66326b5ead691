"""Compiles what the tests consist of once, on all cores, before tests are collected.

In a fresh checkout the process that collects for all forks would rewrite the assertions of 400
files on one core, for eight seconds, and each worker of pytest-xdist would do so at the same time.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).resolve().parents[1]


def compile_all(config: pytest.Config) -> None:
    """Leave what pytest would have left of each file, had it imported it; nothing where it is
    there.
    """
    if sys.dont_write_bytecode:
        return
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "src").rglob("*.py")]
    files.sort(key=lambda file: -file.stat().st_size)
    cores = os.cpu_count() or 1
    children = [_forked(files[core::cores], config) for core in range(cores)]
    for child in children:
        os.waitpid(child, 0)


def _forked(files: list[Path], config: pytest.Config) -> int:
    child = os.fork()
    if child:
        return child
    try:
        for file in files:
            # A worker will compile what is missing, or say what cannot be compiled.
            with contextlib.suppress(Exception):
                _compile(file, config)
    finally:
        os._exit(0)


def _compile(file: Path, config: pytest.Config) -> None:
    if not file.name.startswith("test_"):
        compileall.compile_file(file, quiet=2)
        return
    folder = rewrite.get_cache_dir(file)
    rewritten = folder / (file.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(file, rewritten) is None and rewrite.try_makedirs(folder):
        digest, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, rewritten)
