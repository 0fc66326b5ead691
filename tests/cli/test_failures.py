"""Run: pytest tests/cli/test_failures.py (how each failure ends: one line, one exit code)."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import monograph
from cli.called import COMMANDS, ENVIRONMENT, Calls, monograph_
from monograph import cli, errors
from monograph.interrupts import Terminated

KINDS = [errors.MonographError, *errors.MonographError.__subclasses__()]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not errors.Stopped])
def test_each_error_is_one_line_and_its_own_exit_code(
    calls: Calls, kind: type[errors.MonographError], capsys: pytest.CaptureFixture[str]
) -> None:
    calls.outcome = kind("what is wrong,\nand what to do")
    assert monograph_("check") == kind.exit_code
    assert capsys.readouterr() == ("", "error: what is wrong, and what to do\n")


def test_a_run_that_was_stopped_says_so_and_not_that_it_failed(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.outcome = errors.Stopped("saved at update 412; continue: monograph train --resume last")
    assert monograph_("train") == 75
    assert (
        capsys.readouterr().err == "saved at update 412; continue: monograph train --resume last\n"
    )


@pytest.mark.parametrize(
    ("kind", "said"), [(errors.InputRefused, ""), (errors.PeerLost, "error: no\n")]
)
def test_what_another_rank_says_is_silent_unless_that_one_is_gone(
    kind: type[errors.MonographError],
    said: str,
    calls: Calls,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "SILENT_S", 0.0)
    calls.outcome = kind("no")
    calls.outcome.reported_elsewhere = True
    assert monograph_("check") == kind.exit_code
    assert capsys.readouterr().err == said


def test_a_commands_own_exit_code_is_kept(calls: Calls) -> None:
    calls.outcome = 4
    assert monograph_("sweep") == 4  # the only one that has one


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_though_nobody_reads_what_it_says(
    number: signal.Signals, code: int
) -> None:
    """The work below takes no notice of errors of the system, of which a closed pipe is one."""
    program = f"""
import signal
from contextlib import suppress
from monograph import interrupts
interrupts.handle_while_starting()
with suppress(OSError):
    signal.raise_signal({int(number)})
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, stderr=writer)
    os.close(writer)
    assert done.returncode == code


def test_interrupted_while_it_starts_or_ends_is_no_traceback() -> None:
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    starting = f"import os, signal, monograph.__main__\n{interrupt}"
    ending = (
        "import os, signal, monograph.cli as c\n"
        "def _run_command(_): raise KeyboardInterrupt\n"
        f"c._run_command = _run_command\ntry: c.main(['check'])\nfinally: {interrupt}"
    )
    for program in (starting, ending):
        done = subprocess.run(
            [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (130, "") and done.stderr.splitlines() == [
            "error: interrupted"
        ]


@pytest.mark.parametrize(
    ("interrupt", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted"), (Terminated(), 143, "terminated")],
)
def test_interrupted_is_130(
    interrupt: KeyboardInterrupt,
    code: int,
    said: str,
    calls: Calls,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls.outcome = interrupt
    assert monograph_("check") == code
    assert capsys.readouterr().err == f"error: {said}\n"


TOO_SMALL = (
    "the machine's memory, or the limit on this process, is too small: use a smaller model, train.micro_batch or "
    "data.sequence_length"
)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (MemoryError(), 6, TOO_SMALL),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 6, TOO_SMALL),
        (RuntimeError("can't start new thread"), 6, TOO_SMALL),
        (
            OSError(errno.ENOSPC, "No space left on device", "a/file"),
            7,
            "cannot write a/file: No space left on device",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            7,
            "cannot write standard output: No space left on device",
        ),
        (OSError(errno.EFBIG, "File too large"), 7, "cannot write standard output: File too large"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            7,
            "no folder for temporary files can be written to: make room in /tmp, or set TMPDIR to another folder",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "a/file"),
            7,
            "cannot write a/file: Read-only file system",
        ),
        (
            OSError(errno.EIO, "Input/output error", "a/file"),
            7,
            "cannot read or write a/file: Input/output error",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "a/file"),
            3,
            "no permission for a/file",
        ),
        (OSError(errno.EMFILE, "Too many open files", "a/file"), 3, "a/file: Too many open files"),
        (OSError(errno.ESTALE, "Stale file handle", "a/file"), 3, "a/file: Stale file handle"),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "a/file"),
            3,
            "a/file: File name too long",
        ),
        (
            errors.InputRefused("\x1b[31mred\x1b]0;owned\x07 \udcff é"),
            3,
            r"\x1b[31mred\x1b]0;owned\x07 \udcff é",
        ),
    ],
)
def test_what_the_machine_refuses_is_no_bug(
    calls: Calls, error: OSError, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.outcome = error
    assert monograph_("check") == code
    assert capsys.readouterr().err == f"error: {message}\n"


VERSION, UNKNOWN, NO_RUN = ("--version", 0), ("chek", 2), ("check nothing", 3)


# By day what writes to the stream that is closed.
@pytest.mark.parametrize(("closed", "command"), [
    (">&-", VERSION), ("2>&-", UNKNOWN), ("2>/dev/full", UNKNOWN),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (">&-", UNKNOWN), ("2>&-", VERSION), ("2>/dev/full", VERSION), (">&- 2>&-", VERSION), (">&- 2>&-", NO_RUN),
    )),
])  # fmt: skip
def test_closed_outputs_change_no_exit_code(
    closed: str, command: tuple[str, int], tmp_path: Path
) -> None:
    arguments, code = command
    shell = f"{sys.executable} -m monograph {arguments} {closed}"
    assert (
        subprocess.run(shell, shell=True, env=ENVIRONMENT, cwd=tmp_path, check=False).returncode
        == code
    )


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_is_one_line_and_a_file_with_the_traceback(
    calls: Calls,
    debug: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if debug:
        monkeypatch.setenv("MONOGRAPH_DEBUG", "1")
    calls.outcome = ZeroDivisionError("a\nb")
    assert monograph_("check", "--json") == 1
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1].startswith("bug: ZeroDivisionError: a b; please report it with ")
    assert (shown.count("\n") > 1) == debug and ("Traceback" in shown) == debug
    written = Path(shown.split()[-1]).read_text()
    assert "Traceback" in written and "'--json'" in written and monograph.__version__ in written


@pytest.mark.parametrize("folder", ["absent", "full"])
def test_a_bug_is_one_line_even_where_no_file_can_be_written(
    folder: str,
    calls: Calls,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / folder))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if folder == "full":  # a file can be made, and nothing written into it
        (tmp_path / folder).mkdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    calls.outcome = ZeroDivisionError("a\nb")
    try:
        assert monograph_("check") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = "please report it with what MONOGRAPH_DEBUG=1 prints (no file could be written)"
    assert capsys.readouterr() == ("", f"bug: ZeroDivisionError: a b; {said}\n")
    assert not list(tmp_path.rglob("*.txt"))


def test_a_reader_that_goes_away_is_no_error() -> None:
    # Others are in tests/commands/test_streams.py.
    arguments = [sys.executable, "-m", "monograph", "--help"]
    with subprocess.Popen(
        arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_red_only_on_a_terminal_that_takes_it(
    variable: str,
    value: str,
    calls: Calls,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls.outcome = errors.InputRefused("no")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monograph_("check")
    assert capsys.readouterr().err == "\033[31merror:\033[0m no\n"
    monkeypatch.setenv(variable, value)
    monograph_("check")
    assert capsys.readouterr().err == "error: no\n"


def test_a_working_folder_that_is_gone(
    calls: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in COMMANDS:
        assert monograph_(command) == 3
        assert (
            capsys.readouterr().err
            == "error: the working folder was deleted: change to a folder that exists\n"
        )
    assert not calls


def test_on_windows_one_line_says_what_it_needs() -> None:
    """All that is imported before that line does without what Windows' Python lacks."""
    lacking = "import sys; sys.modules |= dict.fromkeys(['fcntl', 'resource', 'termios'])"
    program = (
        f"{lacking}\nimport monograph.__main__ as m\nsys.platform = 'win32'\nm.main(['train'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        done.stderr
        == "error: monograph needs Linux, whose locks and limits it uses: on Windows, run it in WSL\n"
    )


@pytest.mark.parametrize("where", ["argument", "MONOGRAPH_HOME", "working folder"])
def test_names_that_are_not_utf8_are_refused_before_any_library_sees_them(
    where: str,
    calls: Calls,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    name = os.fsdecode(b"a\xff")
    if where == "MONOGRAPH_HOME":
        monkeypatch.setenv(where, name)
    if where == "working folder":
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
    for command in ("train", "generate", "export"):
        assert monograph_(command, name if where == "argument" else "a") == 3
        err = capsys.readouterr().err
        assert where in err and r"a\udcff, is not UTF-8" in err and err.count("\n") == 1
    assert not calls


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), BaseException("no")])
def test_no_exception_ends_a_command_in_silence(
    error: BaseException,
    calls: Calls,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", os.getcwd())
    calls.outcome = error
    assert monograph_("check") == 1
    assert capsys.readouterr().err.startswith(f"bug: {type(error).__name__}")
