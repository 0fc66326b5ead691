"""Run: pytest tests/test_setup.py (what `make train` says while it installs, and when it cannot)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from scripts import script


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, its .venv in a folder of its own."""
    module: ModuleType = script("setup_venv.py")
    venv = tmp_path / ".venv"
    for name, value in {
        "VENV": venv,
        "PYTHON": venv / "bin/python",
        "LOG": venv / module.LOG.name,
    }.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("said", "guess"), [("no space left", False), ("Connection refused", True)]
)
def test_a_step_that_fails_leaves_the_log_it_names(
    said: str,
    guess: bool,
    setup: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
) -> None:
    """Also the first one, which begins with an empty .venv; an older one is emptied before, links
    are not followed.
    """
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("")
    (setup.VENV / "lib").mkdir(parents=True)
    (setup.VENV / "link").symlink_to(tmp_path / "kept")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@"; echo {said}; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(setup.sys, "executable", str(python))
    with pytest.raises(SystemExit):
        setup.install("")
    shown = capsys.readouterr().err
    assert setup.LOG.read_text() == f"-m venv {setup.VENV}\n{said}\n" and said in shown
    assert f".venv/{setup.LOG.name}" in shown and ("Is there a network?" in shown) == guess
    assert [path.name for path in setup.VENV.iterdir()] == [setup.LOG.name] and (
        tmp_path / "kept/file"
    ).exists()


def test_what_is_installed_has_its_size(setup: ModuleType) -> None:
    step = setup.Step("torch")
    for line in (
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)",
        "Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (899.7 MB)",
        "Progress 89970000 of 899700000",
    ):
        step.read(line)
    assert step.doing == "downloading torch-2.13.0, 899.7 MB, 10 %"
    step.read("Using cached nvidia_cublas-13.1.0.3-py3-none-manylinux_2_27_x86_64.whl (423.1 MB)")
    step.read("Installing collected packages: nvidia-cublas, torch")
    assert step.doing == "installing 2 packages, 1.3 GB to unpack"


PYTHON = """#!/bin/sh
echo "$@" >> {calls}
case "$2" in
venv) mkdir -p $3/bin $3/lib/python3/site-packages; cp $0 $3/bin/python;;
compileall) exit 1;;
esac
"""


@pytest.mark.parametrize(("extra", "compiles"), [("", 2), ("dev", 1)])
def test_pip_compiles_nothing_and_a_file_that_cannot_be_compiled_is_no_failure(
    extra: str, compiles: int, setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the set-up compiles itself is what torch brought, and, without `dev`, the rest."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PYTHON.format(calls=calls))
    python.chmod(0o755)
    monkeypatch.setattr(setup.sys, "executable", str(python))
    setup.install(extra)
    said = calls.read_text().splitlines()
    installs = [line for line in said if line.startswith("-m pip install ")]
    assert len(installs) == 3 and all("--no-compile" in line for line in installs)
    compiled = [line for line in said if line.startswith("-m compileall ")]
    assert len(compiled) == compiles
    assert all(line.endswith(str(setup.VENV / "lib/python3/site-packages")) for line in compiled)
    # It begins beside the last installation: after torch's.
    assert min(map(said.index, compiled)) > said.index(installs[1])


def test_a_set_up_that_fails_leaves_no_compiler_behind(setup: ModuleType) -> None:
    (setup.VENV / "lib/python3/site-packages").mkdir(parents=True)
    setup.PYTHON.parent.mkdir()
    setup.PYTHON.write_text("#!/bin/sh\nexec sleep 600\n")
    setup.PYTHON.chmod(0o755)
    with pytest.raises(SystemExit), setup.compiling(cores=1) as process:
        raise SystemExit(1)
    assert process.returncode is not None
