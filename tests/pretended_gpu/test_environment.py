"""Run: pytest tests/pretended_gpu/test_environment.py (what the making of the environment says and
does).

Nothing is downloaded or compiled: an interpreter and a compiler that only write down what they are
asked stand in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pretended_gpu import environment

PYTHON = """#!/bin/sh
echo python "$@" >> {folder}/asked
case "$1" in -c) echo {folder}/site ;; esac
"""
GCC = """#!/bin/sh
echo gcc "$@" >> {folder}/asked
while [ $# -gt 1 ]; do shift; done
: > "$1"
"""


def program(path: Path, text: str, folder: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(folder=folder))
    path.chmod(0o755)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return what was asked of pip and gcc since the last time, in a home with stand-ins and CUDA's
    headers.
    """
    program(tmp_path / "venv" / "bin" / "python", PYTHON, tmp_path)
    program(tmp_path / "tools" / "gcc", GCC, tmp_path)
    for folder in ("nvidia/cu13/include", "triton/backends/nvidia/include"):
        (tmp_path / "site" / folder).mkdir(parents=True)
        (tmp_path / "site" / folder / "cuda.h").write_text("")
    monkeypatch.setenv("PRETENDED_GPU", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/tools:/usr/bin:/bin")

    def read() -> list[str]:
        path = tmp_path / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return [line for line in lines if "-m pip" in line or line.startswith("gcc")]

    return read


def test_it_says_what_it_downloads_and_is_made_once(
    asked: Callable[[], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment.make()
    assert "downloads about 5 GB" in capsys.readouterr().err.splitlines()[0]
    torch, project, driver = asked()
    assert "torch===2." in torch and "--editable" in project and "[dev] coverage" in project
    assert (
        f"-I{tmp_path}/site/nvidia/cu13/include" in driver and str(environment.compiled()) in driver
    )
    pins = (tmp_path / "constraints.txt").read_text()
    assert "torch==" not in pins and "numpy==" in pins
    environment.make()
    assert asked() == [] and "downloads" not in capsys.readouterr().err
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "card.h").write_text("")
    monkeypatch.setattr(environment, "DRIVER", sources)
    environment.make()
    assert [line.split()[0] for line in asked()] == ["gcc"]
    monkeypatch.setattr(environment.sys, "version", "another")
    environment.make()
    assert [line.split()[0] for line in asked()] == ["python", "python"]


def test_without_a_compiler_nothing_is_downloaded(
    asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(environment.Stopped, match="^gcc is missing: .*$"):
        environment.make()
    assert asked() == []


def test_where_torch_is_a_cpu_build_the_rest_is_not_downloaded(
    asked: Callable[[], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "site/nvidia/cu13/include/cuda.h").unlink()
    with pytest.raises(
        environment.Stopped, match="^torch came without CUDA's headers: .* CPU build only$"
    ):
        environment.make()
    assert len(asked()) == 1


def test_a_command_runs_on_a_card_that_is_pretended(
    asked: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "own")
    monkeypatch.setenv("PRETENDED_CARDS", "2")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    settings = environment.environment("89")
    # The driver is compiled where it is not there.
    assert [line.split()[0] for line in asked()] == ["gcc"]
    assert settings["PRETENDED_SM"] == "89" and settings["PRETENDED_CARDS"] == "2"
    assert settings["PYTHONPATH"].endswith(f"/src:{environment.ROOT}/tests:own")
    assert (
        settings["LD_PRELOAD"] == f"{environment.compiled()}/libcuda.so.1"
        and Path(settings["LD_PRELOAD"]).exists()
    )
    assert settings["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/cache/sm89"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    assert environment.environment("90")["TRITON_CACHE_DIR"] == "mine/triton" and asked() == []
    with pytest.raises(environment.Stopped, match="^sm_91 is no card that is pretended"):
        environment.environment("91")
    (tmp_path / "venv/bin/python").unlink()
    with pytest.raises(environment.Stopped, match="^not made yet: .* make$"):
        environment.environment("90")
