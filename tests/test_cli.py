"""Run: pytest tests/test_cli.py"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import monograph
from monograph import cli, errors

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(monograph.__file__).parents[1])}
COMMANDS = ("train", "sweep", "plan", "profile", "generate", "evaluate", "compare", "export", "data", "check")


class Calls(list[tuple[tuple[Any, ...], dict[str, Any]]]):
    """Stands in for the commands: records what they are called with, and raises or returns what the test says."""

    outcome: BaseException | int = 0

    def __call__(self, *arguments: Any, **options: Any) -> int:
        self.append((arguments, options))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    calls = Calls()
    package = types.ModuleType("monograph.commands")
    monkeypatch.setitem(sys.modules, "monograph.commands", package)
    for name in COMMANDS:
        module = types.ModuleType(f"monograph.commands.{name}")
        for function in ("run", "show", "build"):
            setattr(module, function, calls)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    return calls


def monograph_(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    return int(str(exit_.value.code or 0))


def test_help_is_quick_and_imports_no_torch() -> None:
    program = "import sys, monograph.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    program += "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\nassert not heavy, heavy"
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Processor time: what this machine does besides is no matter.
    assert min(seconds) < 0.5


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), *((name, "--help") for name in COMMANDS), ("data",)])
def test_help_goes_to_stdout(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert monograph_(*arguments) == 0
    out, err = capsys.readouterr()
    assert "Usage: monograph" in out and not err
    assert max(map(len, out.splitlines())) <= 100


def test_help_lists_the_built_commands_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    monograph_()
    listed = capsys.readouterr().out.partition("Commands:")[2].partition("\n\n")[0].splitlines()
    assert {line.split()[0] for line in listed if line} == set(COMMANDS)


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert monograph_("--version") == 0
    assert capsys.readouterr().out == f"monograph {monograph.__version__}\n"


def test_train_hands_on_settings_and_options(calls: Calls) -> None:
    Path("run.toml").write_text("[optim]\nlr = 1e-3\n")
    Path("texts").mkdir()
    assert monograph_("train", "texts", "--out", "here", "train.seed=7", "run.toml", "--minutes", "2", "--json") == 0
    ((settings,), options) = calls[0]
    assert options == {"out": Path("here"), "resume": None, "from_": None, "json": True}
    assert (settings.optim.lr, settings.train.seed, settings.train.minutes) == (1e-3, 7, 2.0)
    assert settings.data.source == "texts"


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [
        (["--resume"], "last"),
        (["--resume", "--json"], "last"),
        (["--resume", "train.keep=3"], "last"),
        (["--resume", "run.toml"], "last"),
        (["--resume", "runs/a"], "runs/a"),
        (["--resume=runs/a"], "runs/a"),
        ([], None),
    ],
)
def test_resume_takes_a_run_or_none(calls: Calls, arguments: list[str], resume: str | None) -> None:
    Path("run.toml").write_text("")
    assert monograph_("train", *arguments) == 0
    assert calls[0][1]["resume"] == resume


def test_the_other_commands_hand_on_what_was_typed(calls: Calls) -> None:
    assert monograph_("generate", "last", "a", "b", "--top-k", "5", "--stop", "x", "--stop", "y", "-n", "2") == 0
    assert monograph_("evaluate", "last", "--data", "a", "--data", "b", "--json") == 0
    assert monograph_("compare", "last", "m", "--data", "q", "--chat") == 0
    assert monograph_("export", "last", "--to", "there", "--format", "gguf", "--dtype", "q8_0") == 0
    assert monograph_("data", "show", "train.seed=1", "--row", "3") == 0
    assert monograph_("data", "build") == 0
    assert monograph_("check") == 0
    assert monograph_("profile", "train.seed=2", "--out", "there") == 0
    generated, evaluated, compared, exported, shown, built, checked, profiled = calls
    how = {"n": 2, "max_tokens": 128, "stop": ["x", "y"], "file": None, "pairs": [], "chat": False, "json": False}
    how["numbers"] = {"temperature": 0.8, "top_k": 5, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    how["constraints"] = {"choices": None, "regex": None, "json_schema": None}
    assert generated == (("last", ["a", "b"]), how)
    assert evaluated == (("last",), {"data": ["a", "b"], "chat": False, "json": True})
    assert compared == ((["last", "m"],), {"data": ["q"], "chat": True, "json": False})
    assert exported == (("last",), {"to": Path("there"), "format": "gguf", "dtype": "q8_0"})
    assert shown[0][0].train.seed == 1 and shown[1] == {"row": 3}
    assert built[0][0].train.seed == 0 and built[1] == {}
    assert checked == ((None,), {"json": False})
    assert profiled[0][0].train.seed == 2 and profiled[1] == {"out": Path("there"), "json": False}


def test_print_config_is_a_file_that_loads(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert monograph_("train", "train.seed=7", "--print-config") == 0
    Path("printed.toml").write_text(capsys.readouterr().out)
    assert "seed = 7                                        # command line\n" in Path("printed.toml").read_text()
    assert monograph_("train", "printed.toml") == 0
    assert calls[0][0][0].train.seed == 7


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
    assert capsys.readouterr().err == "saved at update 412; continue: monograph train --resume last\n"


def test_a_commands_own_exit_code_is_kept(calls: Calls) -> None:
    calls.outcome = 4
    assert monograph_("check") == 4


def test_interrupted_while_it_starts_or_ends_is_no_traceback() -> None:
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    starting = f"import os, signal, monograph.__main__\n{interrupt}"
    ending = (
        "import os, signal, monograph.cli as c\n"
        "def _run(_): raise KeyboardInterrupt\n"
        f"c._run = _run\ntry: c.main(['check'])\nfinally: {interrupt}"
    )
    for program in (starting, ending):
        done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (130, "") and done.stderr.splitlines() == ["error: interrupted"]


def test_interrupted_is_130(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    calls.outcome = KeyboardInterrupt()
    assert monograph_("check") == 130
    assert capsys.readouterr().err == "error: interrupted\n"


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
        (OSError(errno.ENOSPC, "No space left on device", "a/file"), 7, "cannot write a/file: No space left on device"),
        (OSError(errno.EROFS, "Read-only file system", "a/file"), 7, "cannot write a/file: Read-only file system"),
        (OSError(errno.EIO, "Input/output error", "a/file"), 7, "cannot read or write a/file: Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied", "a/file"), 3, "no permission for a/file"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a/file"), 3, "a/file: File name too long"),
        (errors.InputRefused("\x1b[31mred\x1b]0;owned\x07 \udcff é"), 3, r"\x1b[31mred\x1b]0;owned\x07 \udcff é"),
    ],
)
def test_what_the_machine_refuses_is_no_bug(
    calls: Calls, error: OSError, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.outcome = error
    assert monograph_("check") == code
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_outputs_change_no_exit_code(closed: str, tmp_path: Path) -> None:
    for arguments, code in (("--version", 0), ("check nothing", 3)):
        command = f"{sys.executable} -m monograph {arguments} {closed}"
        assert subprocess.run(command, shell=True, env=ENVIRONMENT, cwd=tmp_path, check=False).returncode == code


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_is_one_line_and_a_file_with_the_traceback(
    calls: Calls, debug: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    folder: str, calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    arguments = [sys.executable, "-m", "monograph", "train", "--print-config"]
    with subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["data", "shwo"], "Did you mean 'show'?"),
        (["train", "--resme"], "did you mean --resume?"),
        (["generate", "last", "--temprature", "1"], "did you mean --temperature?"),
        (["generate"], "RUN|FOLDER"),
        (["export", "last"], "--to"),
        (["generate", "last", "--top-k", "-1"], "--top-k"),
        (["train", "--minutes", "ten"], "--minutes"),
        (["train", "train.minutes=3", "--minutes", "4"], "train.minutes is given twice, as 3 and as 4"),
        (["train", "--resume", "a", "--from", "b"], "give one of them"),
        (["train", "optim.lrr=3"], "did you mean optim.lr?"),
        (["swep"], "No such command 'swep'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    arguments: list[str], message: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_(*arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not calls


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_red_only_on_a_terminal_that_takes_it(
    variable: str, value: str, calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("prompt", ["--- title", "-title", "--title"])
def test_text_that_begins_with_a_dash(prompt: str, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert monograph_("generate", "last", prompt) == 2
    assert "text that begins with a dash goes after --" in capsys.readouterr().err
    assert monograph_("generate", "last", "--", prompt) == 0 and calls[0][0] == ("last", [prompt])
