"""Run: pytest tests/cli/test_completion.py (what a shell completes, and how it comes to do so)"""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from cli.called import ENVIRONMENT, Calls, monograph_


def asked(
    shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """What the program answers to a shell that asks how a line may go on."""
    monkeypatch.setenv("_MONOGRAPH_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COLUMNS", "40")  # of a narrow terminal
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    return monograph_(), *capsys.readouterr()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("monograph tr", "train"),
        ("monograph data sh", "show"),
        ("monograph train --pr", "--print-config"),
        ("monograph export last --dt", "--dtype"),
    ],
)
def test_a_shell_completes_commands_and_options(
    shell: str,
    line: str,
    word: str,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = asked(shell, line, monkeypatch, capsys)
    assert code == 0 and not err and not calls
    assert len(out.splitlines()) == 1 and word in out
    assert shell != "bash" or out == f"{word}\n"


@pytest.mark.parametrize("command", ["train", "generate last", "export last"])
def test_each_line_that_fish_gets_is_an_option(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long its help is and however narrow the terminal: fish would offer the rest of a help
    as a word.
    """
    _, out, _ = asked("fish", f"monograph {command} --", monkeypatch, capsys)
    assert len(out.splitlines()) >= 4 and all(line.startswith("--") for line in out.splitlines())


def test_completing_a_line_fetches_no_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = types.ModuleType("monograph.run.repository")
    fetched: list[str] = []
    repository.fetch_if_on_hub = fetched.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, repository.__name__, repository)
    for line in ("monograph generate hf://a/b --te", "monograph compare hf://a/b last --da"):
        assert asked("bash", line, monkeypatch, capsys)[1].startswith("--")
    assert not fetched


def test_bash_completes_with_the_script_that_it_is_given(tmp_path: Path) -> None:
    program = tmp_path / "monograph"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m monograph "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(_MONOGRAPH_COMPLETE=source_bash monograph)"
        COMP_WORDS=(monograph tr); COMP_CWORD=1; _monograph_completion monograph
        echo "${COMPREPLY[@]}"; complete -p monograph
    """
    environment = ENVIRONMENT | {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "train",
        "complete -o default -F _monograph_completion monograph",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_is_printed_or_installed_for_the_shell_that_asks(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert monograph_("--show-completion") == 0
    script, err = capsys.readouterr()
    assert f"_MONOGRAPH_COMPLETE=complete_{shell}" in script and not err
    assert not list(tmp_path.iterdir())
    assert monograph_("--install-completion") == 0
    assert f"{shell} completion installed in {tmp_path}" in capsys.readouterr().out
    assert script.strip() in [
        path.read_text().strip() for path in tmp_path.rglob("*monograph*") if path.is_file()
    ]


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_a_shell_without_a_script_is_refused_in_one_line(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("dash", "/bin/dash"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert monograph_(option) == 2
    message = f"error: {option} is for bash, zsh, fish and PowerShell, and this shell is another\n"
    assert capsys.readouterr() == ("", message)
    assert not list(tmp_path.iterdir())
