"""Parse the command line, run one command and exit with its code. Only a command imports torch."""

import errno
import io
import itertools
import os
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import typer
import typer.main
from typer.core import TyperGroup

from monograph import allocator, errors, interrupts, terminal
from monograph.cli.typed import BadCommandLine, app, launched
from monograph.storage.reading import is_file

__all__ = ["app", "main"]

# A launcher ends all processes as soon as one ends. A process with nothing to report waits this
# long to be ended.
SILENT_S = 30.0
# Errors of the operating system about a file or folder that are not bugs in the code.
_REFUSED = {errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EINTR}
# Options that name a place. An unset shell variable leaves their value empty, which would mean
# another place.
_NAMES_A_PLACE = {
    "--from",
    "--resume",
    "--out",
    "--to",
    "--data",
    "--prompts",
    "--json-schema",
    "--api-key-file",
}
# The variable with which a shell asks, by typer's protocol, for the words that may come next in a
# command line.
_COMPLETES = "_MONOGRAPH_COMPLETE"
# Typer's own options, which print or write a file and exit, and their help.
_COMPLETION = {
    "--install-completion": "let this shell complete commands and options",
    "--show-completion": "print the script that --install-completion installs",
}


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command that `arguments` name (default: this process's) and exit with a code of
    docs/errors.md.
    """
    given = sys.argv[1:] if arguments is None else arguments
    terminal.guard()
    if os.environ.get(_COMPLETES):
        # A shell takes each line for a word with its help, which would be broken at the width of
        # the terminal.
        os.environ["COLUMNS"] = "1000"
        sys.exit(command_tree().main([], "monograph", standalone_mode=False))
    # OpenMP threads that wait by spinning make a step up to 20 times slower as soon as anything
    # else runs on a core (dev/log.md). libgomp reads the variable when torch is imported, which
    # happens later.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    allocator.keep_freed_memory()
    # Torch would write a line of its own each time a GPU's memory does not suffice at once, even if
    # it then finds some.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        _require_surroundings(given)
        code = _run(_with_resume_value(_with_options(given)))
        sys.stdout.flush()
    except BadCommandLine as error:
        code = _end(_answered(error, given), errors.UsageError.exit_code, told=_follows())
    except errors.Stopped as stop:
        code = stop.exit_code
        if not stop.told:
            _say(f"{stop}\n")
    except errors.MonographError as error:
        told = _follows() if error.told is None else error.told
        code = _end(str(error), error.exit_code, told, at_last=isinstance(error, errors.PeerLost))
    except KeyboardInterrupt as interrupt:
        interrupts.while_ending()
        what, code = (
            ("terminated", 143)
            if isinstance(interrupt, interrupts.Terminated)
            else ("interrupted", 130)
        )
        _fail("; ".join([what, *interrupt.args]), code)
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`), which is no error. A shell shows 141 for an end
        # by SIGPIPE.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except BaseException as error:  # a user's module may raise anything, even SystemExit(0)
        code = _unforeseen(error, given)
    sys.exit(code)


def _require_surroundings(arguments: list[str]) -> None:
    """Refuse arguments and an environment that no library below could work with.

    Raises:
        InputRefused: the system is Windows; the working folder is gone, or its name, an argument or
            a MONOGRAPH_ variable is not UTF-8.
        UsageError: an option that names a place has an empty value.
    """
    if sys.platform == "win32":
        raise errors.InputRefused(
            "monograph needs Linux, whose locks and limits it uses: on Windows, run it in WSL"
        )
    try:
        told = {"the working folder": os.getcwd()} | {
            f"argument {i}": text for i, text in enumerate(arguments, 1)
        }
    except FileNotFoundError:
        raise errors.InputRefused(
            "the working folder was deleted: change to one that is there"
        ) from None
    given = [
        *itertools.pairwise(arguments),
        *(argument.split("=", 1) for argument in arguments if "=" in argument),
    ]
    if empty := [option for option, value in given if option in _NAMES_A_PLACE and not value]:
        raise errors.UsageError(f"{empty[0]} is empty: name what it is for, or leave it out")
    told |= {name: value for name, value in os.environ.items() if name.startswith("MONOGRAPH_")}
    for what, text in told.items():
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise errors.InputRefused(
                f"{what}, {text}, is not UTF-8: rename the file, or write the text in UTF-8"
            )


def _follows() -> bool:
    """Return whether a launcher started several processes and this one is not rank 0."""
    return launched() > 1 and os.environ.get("RANK", "0") != "0"


@cache
def command_tree() -> TyperGroup:
    """Return all commands with their options, which typer derives from the functions' types."""
    tree = typer.main.get_command(app)
    assert isinstance(tree, TyperGroup)
    for option in tree.params:
        if option.opts[0] in _COMPLETION:
            option.help = _COMPLETION[option.opts[0]]  # type: ignore[attr-defined]
    return tree


def _run(arguments: list[str]) -> int:
    """Run one command and return its exit code. Typer's own `main` would turn some exceptions into
    its own codes.
    """
    before_command = itertools.takewhile(lambda argument: argument.startswith("-"), arguments)
    if asked := [argument for argument in before_command if argument in _COMPLETION]:
        return _complete(asked[0])
    try:
        with command_tree().make_context("monograph", list(arguments)) as context:
            return context.command.invoke(context) or 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except errors.MonographError as error:  # a user's module may raise one, too
        if refused := _refused_by_others(error):
            raise refused from error
        raise


def _complete(option: str) -> int:
    """Install or print the script that lets a shell complete; typer exits after it.

    Raises:
        UsageError: typer has no script for the shell that started this process.
    """
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            command_tree().make_context("monograph", [option])
    except SystemExit:
        print(said.getvalue(), end="")
    except typer.Exit:
        raise errors.UsageError(
            f"{option} is for bash, zsh, fish and PowerShell, and this shell is another"
        ) from None
    return 0


def _refused_by_others(error: BaseException) -> errors.InputRefused | None:
    # No user's module can run without torch, and importing it takes seconds.
    if "torch" not in sys.modules:
        return None
    from monograph.graph.trial import refused_by_others

    return refused_by_others(error)


def _with_options(arguments: list[str]) -> list[str]:
    """Return `help`, `help COMMAND` and `version`, as many programs have them, as the options that
    say the same.
    """
    if arguments == ["version"]:
        return ["--version"]
    if arguments[:1] == ["help"]:
        return [*arguments[1:], "--help"]
    return arguments


def _with_resume_value(arguments: list[str]) -> list[str]:
    """Insert "last" after a `--resume` that names no run, since typer has no options with an
    optional value.
    """
    if "--resume" not in arguments:
        return arguments
    position = arguments.index("--resume") + 1
    following = arguments[position] if position < len(arguments) else "-"
    is_run = (
        not following.startswith("-") and "=" not in following and not following.endswith(".toml")
    )
    is_run = is_run or is_file(Path(following, "run.lock"))
    return arguments if is_run else [*arguments[:position], "last", *arguments[position:]]


def _answered(error: BadCommandLine, arguments: list[str]) -> str:
    from monograph.cli.answers import answered

    return answered(error, command_tree(), arguments)


def _end(message: str, code: int, told: bool, at_last: bool = False) -> int:
    """Print the error and return its exit code.

    Args:
        message: the error's text.
        code: the exit code.
        told: whether another process reports this error; this one then waits to be ended by the
            launcher.
        at_last: whether this process prints the error after that wait; otherwise it stays silent.
    """
    if told:
        time.sleep(SILENT_S)
    return _fail(message, code) if at_last or not told else code


def _fail(message: str, code: int) -> int:
    """Print an error as one line on stderr, its first word red on a terminal; return the exit code."""
    label = "\033[31merror:\033[0m" if terminal.takes_colour(sys.stderr) else "error:"
    _say(f"{label} {terminal.one_line(message)}\n")
    return code


def _say(text: str) -> None:
    try:
        terminal.own(sys.stderr, text)
        sys.stderr.flush()
    except OSError:
        # A full disk under stderr changes no exit code; Python's own flush at the end would, if it
        # failed again.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _unforeseen(error: BaseException, arguments: list[str]) -> int:
    """Report an exception that no room handles, and return the exit code.

    It is an error of a user's module, of the operating system or of memory; anything else is a bug
    of Monograph.
    """
    if os.environ.get("MONOGRAPH_DEBUG"):
        traceback.print_exc()
    if refused := _refused_by_others(error):
        return _end(str(refused), refused.exit_code, told=_follows())
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
    ):
        verb = "read or write" if error.errno == errno.EIO else "write"
        # An error of a stream names no file, and standard output is the only stream that is written
        # to.
        place = error.filename or "standard output"
        return _fail(f"cannot {verb} {place}: {error.strerror}", errors.DiskFull.exit_code)
    if isinstance(error, PermissionError):
        return _fail(
            f"no permission for {error.filename or 'a file'}", errors.InputRefused.exit_code
        )
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return _fail(
            f"{error.filename or 'a file'}: {error.strerror}", errors.InputRefused.exit_code
        )
    if errors.host_is_full(error):
        where = ""
        if "torch" in sys.modules:
            from monograph.graph.trial import raised_at

            at = raised_at(error)
            where = f" for {at[1]} ({at[0]})" if at else ""
        return _fail(
            f"the machine's memory, or the limit on this process, is too small{where}: use a smaller "
            "model, train.micro_batch or data.sequence_length",
            errors.OutOfDeviceMemory.exit_code,
        )
    summary = terminal.one_line(f"{type(error).__name__}: {errors.said_by(error)}")[:200]
    _say(f"bug: {summary}; please report it with {errors.bug_report(arguments)}\n")
    return 1
