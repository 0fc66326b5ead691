"""Parse the command line, run one command and exit with its exit code.

The code of a command (`monograph.commands`) is imported when the command runs. Nothing here imports
torch before that, since the import takes seconds.
"""

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
from monograph.cli.typed import BadCommandLine, app, launched_processes
from monograph.storage.reading import is_file

__all__ = ["app", "main"]

# A launcher such as torchrun ends all processes as soon as one ends. So a process whose error another
# one reports waits this long: otherwise the launcher might end the other one before it has reported.
SILENT_S = 30.0
# Errors of the operating system about a file or folder that are not bugs of Monograph.
_INPUT_ERRORS = {
    errno.ENAMETOOLONG,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.EINTR,
}
# Errors of the operating system about a disk.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
# How the message of Python's tempfile begins if it can write to none of the folders that it tries.
_NO_TEMPORARY_FOLDER = "No usable temporary directory"
# Options whose value is a path or a run. An unset shell variable, as in `--out "$OUT"`, makes the
# value empty, and an empty path would be the working folder.
_PATH_OPTIONS = {
    "--from",
    "--resume",
    "--out",
    "--to",
    "--data",
    "--prompts",
    "--json-schema",
    "--api-key-file",
}
# A shell that completes a command line sets this variable, as typer's protocol says, and reads the
# possible next words from stdout.
_COMPLETION_VARIABLE = "_MONOGRAPH_COMPLETE"
# Two options of typer, each of which prints or installs a script and exits. These help texts replace
# typer's own.
_COMPLETION_OPTIONS = {
    "--install-completion": "let this shell complete commands and options",
    "--show-completion": "print the script that --install-completion installs",
}


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit with an exit code of docs/errors.md.

    Args:
        arguments: the command line without the program's name; None for this process's.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    terminal.guard()  # the streams accept any text from here on, so that messages can be printed
    if os.environ.get(_COMPLETION_VARIABLE):
        # The shell reads a word and its help from each line of the output. Typer would wrap the
        # help at the width of the terminal.
        os.environ["COLUMNS"] = "1000"
        sys.exit(command_tree().main([], "monograph", standalone_mode=False))
    # OpenMP threads that spin while they wait make a training step up to 20 times slower if
    # anything else runs on one of the cores (dev/log.md). libgomp reads the variable when torch is
    # imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    allocator.keep_freed_memory()
    # Torch would print a warning for each allocation that first fails on a GPU, even if a second
    # attempt succeeds.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        _require_usable_input(arguments)
        code = _run_command(_with_resume_value(_with_options_for_words(arguments)))
        # Flushed here, so that a full disk or a closed pipe raises its error inside this `try`.
        sys.stdout.flush()
    except BadCommandLine as error:
        message = _usage_message(error, arguments)
        code = _report_error(
            message, errors.UsageError.exit_code, reported_elsewhere=_is_not_rank_0()
        )
    except errors.Stopped as stop:
        code = stop.exit_code
        if not stop.reported_elsewhere:
            _write_to_stderr(f"{stop}\n")
    except errors.MonographError as error:
        reported_elsewhere = error.reported_elsewhere
        if reported_elsewhere is None:  # all ranks raise it, and rank 0 reports it
            reported_elsewhere = _is_not_rank_0()
        # If a peer was lost, it may have ended without a message, so this process reports it.
        reports_late = isinstance(error, errors.PeerLost)
        code = _report_error(str(error), error.exit_code, reported_elsewhere, reports_late)
    except KeyboardInterrupt as interrupt:
        interrupts.handle_while_ending()  # a second Ctrl-C must not print a traceback
        # The exit codes are those of a shell for SIGTERM and SIGINT.
        if isinstance(interrupt, interrupts.Terminated):
            reason = "terminated"
            code = 143
        else:
            reason = "interrupted"
            code = 130
        _print_error("; ".join([reason, *interrupt.args]))
    except BrokenPipeError:
        # The reader of stdout has ended (`| head`), which is not an error. 141 is the exit code
        # that a shell shows for SIGPIPE. Python flushes stdout at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except BaseException as error:  # a user's module may raise anything, even SystemExit(0)
        code = _report_unforeseen(error, arguments)
    sys.exit(code)


def _require_usable_input(arguments: list[str]) -> None:
    """Refuse a system, a working folder, arguments and variables that the libraries cannot handle.

    Raises:
        InputRefused: the system is Windows; the working folder was deleted; or its name, an
            argument or a MONOGRAPH_ variable is not UTF-8.
        UsageError: an option of `_PATH_OPTIONS` has an empty value.
    """
    if sys.platform == "win32":
        raise errors.InputRefused(
            "monograph needs Linux, whose locks and limits it uses: on Windows, run it in WSL"
        )
    try:
        texts = {"the working folder": os.getcwd()}
    except FileNotFoundError:
        raise errors.InputRefused(
            "the working folder was deleted: change to a folder that exists"
        ) from None
    # An option and its value are two arguments, or one with an equals sign.
    options_and_values = [
        *itertools.pairwise(arguments),
        *(argument.split("=", 1) for argument in arguments if "=" in argument),
    ]
    for option, value in options_and_values:
        if option in _PATH_OPTIONS and not value:
            raise errors.UsageError(f"{option} has an empty value: give a value, or leave it out")
    texts |= {f"argument {i}": argument for i, argument in enumerate(arguments, 1)}
    texts |= {name: value for name, value in os.environ.items() if name.startswith("MONOGRAPH_")}
    for origin, text in texts.items():
        # Python decodes a byte that is not UTF-8 as a surrogate.
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise errors.InputRefused(
                f"{origin}, {text}, is not UTF-8: rename the file, or write the text in UTF-8"
            )


def _is_not_rank_0() -> bool:
    """Return whether a launcher has started several processes, and this process is not rank 0."""
    return launched_processes() > 1 and os.environ.get("RANK", "0") != "0"


@cache
def command_tree() -> TyperGroup:
    """Return the group of all commands; typer derives their options from the functions."""
    tree = typer.main.get_command(app)
    assert isinstance(tree, TyperGroup)
    for option in tree.params:
        if option.opts[0] in _COMPLETION_OPTIONS:
            option.help = _COMPLETION_OPTIONS[option.opts[0]]  # type: ignore[attr-defined]
    return tree


def _run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    options_before_command = itertools.takewhile(lambda word: word.startswith("-"), arguments)
    for option in options_before_command:
        if option in _COMPLETION_OPTIONS:
            return _set_up_completion(option)
    try:
        # Not typer's own `main`, which turns some exceptions into exit codes of its own.
        with command_tree().make_context("monograph", list(arguments)) as context:
            return context.command.invoke(context) or 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except errors.MonographError as error:
        # If a user's module raised it, the message must name that module.
        module_error = _error_of_user_module(error)
        if module_error:
            raise module_error from error
        raise


def _set_up_completion(option: str) -> int:
    """Install or print the script that lets a shell complete command lines.

    Raises:
        UsageError: typer has no script for the shell that started this process.
    """
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            command_tree().make_context("monograph", [option])
    except SystemExit:
        # Typer ends with SystemExit if it succeeds, and with typer.Exit if it does not.
        print(output.getvalue(), end="")
    except typer.Exit:
        raise errors.UsageError(
            f"{option} is for bash, zsh, fish and PowerShell, and this shell is another"
        ) from None
    return 0


def _error_of_user_module(error: BaseException) -> errors.InputRefused | None:
    """Return the error to report if a user's module raised `error`; None if no such module did."""
    # Without torch, no user's module has run. The import below would load torch, for seconds.
    if "torch" not in sys.modules:
        return None
    from monograph.graph.trial import refusal_of_user_error

    return refusal_of_user_error(error)


def _with_options_for_words(arguments: list[str]) -> list[str]:
    """Return `--help` for `help`, and `--version` for `version`; other arguments stay the same.

    Many programs have `help`, `help COMMAND` and `version` as commands.
    """
    if arguments == ["version"]:
        return ["--version"]
    if arguments[:1] == ["help"]:
        return [*arguments[1:], "--help"]
    return arguments


def _with_resume_value(arguments: list[str]) -> list[str]:
    """Insert "last" after a `--resume` without a run, since a value in typer is never optional."""
    if "--resume" not in arguments:
        return arguments
    position = arguments.index("--resume") + 1
    # A `--resume` at the end has no run either, so it is treated like one before an option.
    following = arguments[position] if position < len(arguments) else "-"
    is_option = following.startswith("-")
    is_key_or_config = "=" in following or following.endswith(".toml")
    # The name of a run's folder may look like an option, a key or a configuration.
    is_run = is_file(Path(following, "run.lock"))
    if is_run or not (is_option or is_key_or_config):
        return arguments
    return [*arguments[:position], "last", *arguments[position:]]


def _usage_message(error: BadCommandLine, arguments: list[str]) -> str:
    """Return the message for a wrong command line."""
    # Imported here, as only a wrong command line needs it.
    from monograph.cli.answers import usage_message

    return usage_message(error, command_tree(), arguments)


def _report_error(
    message: str, exit_code: int, reported_elsewhere: bool, reports_late: bool = False
) -> int:
    """Print an error and return its exit code.

    Args:
        message: the error's text.
        exit_code: the exit code.
        reported_elsewhere: whether another process reports this error. This process then waits for
            `SILENT_S` seconds, in which the launcher usually ends it.
        reports_late: whether this process prints the error after the wait, since the other process
            may not have printed it.
    """
    if reported_elsewhere:
        time.sleep(SILENT_S)
    if reports_late or not reported_elsewhere:
        _print_error(message)
    return exit_code


def _print_error(message: str) -> None:
    """Print an error as one line on stderr; on a terminal the word "error:" is red."""
    label = "\033[31merror:\033[0m" if terminal.takes_colour(sys.stderr) else "error:"
    _write_to_stderr(f"{label} {terminal.one_line(message)}\n")


def _write_to_stderr(text: str) -> None:
    """Write a text that may have escape sequences; a failed write is ignored."""
    try:
        terminal.write_as_is(sys.stderr, text)
        sys.stderr.flush()
    except OSError:
        # The disk to which stderr is redirected is full. Python flushes stderr again at exit, and
        # would change the exit code if that failed.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _report_unforeseen(error: BaseException, arguments: list[str]) -> int:
    """Print an exception that no other code has turned into a `MonographError`.

    It is an error of a user's module, of the operating system or of memory. Any other exception is
    reported as a bug of Monograph.

    Args:
        error: the exception.
        arguments: the command line, for the report of a bug.

    Returns:
        The exit code.
    """
    if os.environ.get("MONOGRAPH_DEBUG"):
        traceback.print_exc()
    module_error = _error_of_user_module(error)
    if module_error:
        return _report_error(
            str(module_error), module_error.exit_code, reported_elsewhere=_is_not_rank_0()
        )
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        verb = "read or write" if error.errno == errno.EIO else "write"
        # The error of a stream has no file name, and commands write to no stream but stdout.
        place = error.filename or "standard output"
        _print_error(f"cannot {verb} {place}: {error.strerror}")
        return errors.DiskFull.exit_code
    if isinstance(error, FileNotFoundError) and str(error.strerror).startswith(
        _NO_TEMPORARY_FOLDER
    ):
        _print_error(
            "no folder for temporary files can be written to: make room in /tmp, or set TMPDIR to another folder"
        )
        return errors.DiskFull.exit_code
    if isinstance(error, PermissionError):
        _print_error(f"no permission for {error.filename or 'a file'}")
        return errors.InputRefused.exit_code
    if isinstance(error, OSError) and error.errno in _INPUT_ERRORS:
        _print_error(f"{error.filename or 'a file'}: {error.strerror}")
        return errors.InputRefused.exit_code
    if errors.host_is_full(error):
        _print_error(
            f"the machine's memory, or the limit on this process, is too small{_module_of(error)}: "
            "use a smaller model, train.micro_batch or data.sequence_length"
        )
        return errors.OutOfDeviceMemory.exit_code
    summary = terminal.one_line(f"{type(error).__name__}: {errors.text_of_error(error)}")[:200]
    _write_to_stderr(f"bug: {summary}; please report it with {errors.bug_report(arguments)}\n")
    return 1


def _module_of(error: BaseException) -> str:
    """Return " for NAME (FILE:LINE)" of the user's module that raised the error; "" if none did."""
    if "torch" not in sys.modules:
        return ""
    from monograph.graph.trial import user_frame_of

    frame = user_frame_of(error)
    return f" for {frame.owner} ({frame.place})" if frame else ""
