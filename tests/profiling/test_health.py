"""Run: pytest tests/profiling/test_health.py (what `monograph check` says of a machine)."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from monograph.profiling.health import (
    PROBE_BYTES,
    compiled_obstacle,
    disk,
    resource_limits,
    resource_limits_text,
)


def test_a_disk_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    found = disk(tmp_path / "not" / "there" / "yet")
    assert found.folder == str(tmp_path) and found.obstacle is None and not list(tmp_path.iterdir())
    assert (
        found.free_bytes > PROBE_BYTES
        and found.written_bytes_per_s
        and found.written_bytes_per_s > 0
    )


def test_a_disk_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    found = disk(tmp_path)
    assert (
        found.obstacle == "No space left on device"
        and found.written_bytes_per_s is None
        and found.free_bytes
    )


def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: 1.1 * function(x)


def broken(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: object) -> None:
        raise RuntimeError("g++: cannot execute\nmore")

    return call


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        (wrong, "gradient is off by"),
        (broken, "a compiled function fails: RuntimeError: g++: cannot execute"),
    ],
)
def test_a_compiler_that_does_not_work_is_said(
    monkeypatch: pytest.MonkeyPatch, compiler: Any, words: str
) -> None:
    monkeypatch.setattr(torch, "compile", compiler)
    found = compiled_obstacle(torch.device("cpu"))
    assert found is not None and words in found and "\n" not in found


def test_limits_are_the_process_s_own() -> None:
    given = {resource.RLIMIT_NOFILE: 100, resource.RLIMIT_FSIZE: 4096 * 1024}
    before = {each: resource.getrlimit(each) for each in given}
    try:
        for each, soft in given.items():
            resource.setrlimit(each, (soft, before[each][1]))
        found = resource_limits()
    finally:
        for each, both in before.items():
            resource.setrlimit(each, both)
    said = resource_limits_text(found)
    assert found["open_files"] == 100 and found["file_bytes"] == 4096 * 1024
    assert "100 open files" in said and "ulimit -n 256" in said and "(ulimit -f)" in said
    assert resource_limits_text(dict.fromkeys(resource_limits())) == "none"
