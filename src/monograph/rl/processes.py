"""Score a model's answers in separate processes.

An answer that is a program can be scored by tests, and any answer by a user's function. Both run code
that is not trusted.

A program can neither read its tests nor cheat them. A solution runs in one process and its tests in
another, and only plain data passes between the two: None, booleans, numbers, texts, lists, tuples,
sets and dicts. So results are compared where the solution has no access. The tests do not see how a
function changes its arguments, and cannot use classes or other objects of the solution.

Both processes start without environment variables and site-packages, with standard streams of
/dev/null, and with limits (`worker.LIMITS`): 5 s of processor time, 512 MiB of address space, no
writing to files, few open files. A filter (`worker.FORBIDDEN`) refuses system calls that create
processes and threads, and calls that open sockets. It also refuses calls whose effects no limit counts,
or whose effects outlast the process: shared memory, queues and semaphores of System V and POSIX,
keyrings, files in memory, new namespaces and mounts. The processes are killed when the trainer ends. If
the trainer runs as root, they take the rights of the user nobody, unless the system forbids that, as some
containers do.

If the system allows this user to make namespaces, the processes see no other process, and only the
files of the standard library and of the system's libraries, read-only. These are in a root file
system in memory, which disappears when the process ends. `ProgramScorer.confinement` tells whether
the system allows it. If not, as in most containers, a solution can read and remove this user's files
and end this user's processes. `monograph.rl.rewards` then refuses to begin, unless the user has
allowed it.

A score is the share of passed tests. It is computed in the trainer, which reads one verdict for
each test, whatever the tests' process writes. A test passes if it runs to its end. An exception of
the solution arrives in the test as a builtin exception. StopIteration arrives as RuntimeError, since
it could end a loop of the test early, and so let the test pass.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from monograph.errors import InputRefused
from monograph.rl import worker
from monograph.storage.code import Code
from monograph.storage.reading import is_folder, without_links
from monograph.terminal import one_line

_MAX_VERDICT_BYTES = len(b"false\n")
# The time limit for all tests of one solution.
TESTS_TIMEOUT_S = 10.0
# A solution and its two tests, by which `ProgramScorer.confinement` tries out the system. The first
# test passes if solutions can run and import a module of the standard library. The second one passes
# if a solution does not see /etc, which stands for all files that it must not see.
_TRIAL = "import heapq, os\ndef least(of): return heapq.nsmallest(1, of)\ndef sees(path): return os.path.exists(path)"
_TRIAL_TESTS = ["assert least([3, 2]) == [2]", "assert not sees('/etc')"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that began a session, with its whole process group, and wait for its end."""
    # `returncode` is set once the process has been waited for. After that the system may give its number
    # to another process, which must not be killed.
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class ProgramScorer:
    """A scorer of programs. It runs one program for each core at the same time."""

    def __init__(self) -> None:
        # The parent of the standard library's folder: /usr/lib if os.py is /usr/lib/python3.x/os.py.
        python_lib = str(Path(os.__file__).parents[1])
        libraries = {python_lib, "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
        self._folders = sorted(filter(is_folder, libraries))
        # Set if `scores` is interrupted, so that its threads do not wait for their solutions.
        self._stopped = False

    def confinement(self) -> bool | None:
        """Return whether the system hides files and the network from solutions; None if no solution can run."""
        [passed_share] = self.scores([(_TRIAL, _TRIAL_TESTS)])
        # Both tests need a solution that runs: if none can run, neither test passes. If solutions run and
        # see files, only the first test passes. If files are hidden, both pass.
        if passed_share == 0:
            return None
        return passed_share == 1

    def scores(self, solutions: Sequence[tuple[str, Sequence[str]]]) -> list[float]:
        """Return the share of passed tests of each (code, tests).

        The tests of a solution run one after another. If the solution's or the tests' process dies, or
        after TESTS_TIMEOUT_S, all tests that have not passed so far have failed.
        """
        # Imported here, since `monograph.config` imports this module for the names of rewards, and must
        # not wait for torch.
        import torch

        from monograph.device import describe

        self._stopped = False
        with ThreadPoolExecutor(describe(torch.device("cpu")).cores) as pool:
            try:
                return list(pool.map(self._passed_share, solutions))
            except BaseException:
                self._stopped = True
                pool.shutdown(cancel_futures=True)
                raise

    def _passed_share(self, solution: tuple[str, Sequence[str]]) -> float:
        """Return the share of passed tests of (code, tests)."""
        code, tests = solution
        deadline = time.monotonic() + TESTS_TIMEOUT_S
        verdicts = b""  # for each test a line, "true" or "false"
        processes = []
        # Two connections, each with a socket at both ends: one from the trainer, which is this process, to
        # the tests' process, and one from there to the solution's process.
        trainer_socket, tests_socket_to_trainer = socket.socketpair()
        tests_socket_to_solution, solution_socket = socket.socketpair()
        try:
            # The processes inherit their sockets. The trainer then closes its own copies of these three
            # sockets, so that a connection breaks if the process at its end dies.
            with tests_socket_to_trainer, tests_socket_to_solution, solution_socket:
                processes.append(self._start("solution", solution_socket))
                processes.append(
                    self._start("tests", tests_socket_to_trainer, tests_socket_to_solution.fileno())
                )
            # The connection breaks if the tests' process dies. Tests without a verdict have then failed.
            with suppress(ConnectionError):
                # JSON has no bytes, so each byte of the source is sent as one character (Latin-1). The
                # solution's process decodes the bytes as Python decodes a file. With "surrogatepass" a
                # lone surrogate is no error here: Python refuses such a source there.
                source = code.encode("utf-8", "surrogatepass").decode("latin-1")
                trainer_socket.sendall(json.dumps([source, tests]).encode() + b"\n")
                # Short waits, so that `_stopped` and the deadline are looked at in between.
                trainer_socket.settimeout(0.1)
                # One verdict is read for each test, and no more, whatever the process writes.
                while verdicts.count(b"\n") < len(tests):
                    if self._stopped or time.monotonic() >= deadline:
                        break
                    with suppress(TimeoutError):
                        received = trainer_socket.recv(_MAX_VERDICT_BYTES * len(tests))
                        if not received:  # the process has closed its socket
                            break
                        verdicts += received
        finally:
            for process in processes:
                _end(process)
            trainer_socket.close()
        return verdicts.split(b"\n")[: len(tests)].count(b"true") / len(tests)

    def _start(
        self, role: str, channel: socket.socket, second_descriptor: int = 0
    ) -> subprocess.Popen[bytes]:
        """Start the program `worker` in a process.

        Args:
            role: "solution" or "tests", see `worker`.
            channel: the socket that becomes its standard input.
            second_descriptor: the file descriptor of a second socket that the process inherits, with
                the same number; 0: none.
        """
        # A new session keeps Ctrl-C from ending the process, since the run may still have to save.
        return subprocess.Popen(
            [
                sys.executable,
                "-I",  # isolated: no environment variables, no folders of the user
                "-S",  # without site-packages
                worker.__file__,
                role,
                str(second_descriptor),
                *self._folders,
            ],
            stdin=channel.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            pass_fds=[second_descriptor] if second_descriptor else [],
            start_new_session=True,
        )


# The largest absolute value of a score.
MAX_SCORE = 1e6
# The time limit for each reply of a user's code: for running the file, and then for each call.
ANSWER_TIMEOUT_S = 60.0
SCORES = f"a number from -{MAX_SCORE:g} to {MAX_SCORE:g}, or such numbers by name"
# What a function must do, for messages.
RETURNS_SCORES = f"returns {SCORES}, for every answer"


class CodeProcess:
    """A user's Python file that runs in a separate process; a subclass calls what the file defines.

    The process starts when `start` is first called. Its output goes to standard error. On Linux it ends
    at the latest with the thread that called `start`, since `worker.main` asks for a signal at that
    thread's end (PR_SET_PDEATHSIG).

    Each message to the process is a line of JSON, and so is each reply. The first message is [source,
    path, name of the function or class], and lets the process run the file. Each further message is a
    call: [function, arguments, named arguments] for a function, and as `worker._play` says for an
    environment. A reply is [null, result], or [name of the exception, its text]. Arguments and results
    that JSON cannot express, such as sets, are encoded by `worker.encoded`.

    Attributes:
        key: the configuration key that names the file, for error messages.
        role: the role of the process, "function" or "environment", see `worker`.
        expected: what the code must do, the end of the sentence "correct it, so that it ...".
    """

    key = ""
    role = ""
    expected = ""

    def __init__(self, code: Code, sha256: str) -> None:
        """Take the function or class, and the hex SHA-256 that its file must have."""
        self._code = code
        self._sha256 = sha256
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Any:
        """Start the process and run the file in it, unless that has been done.

        Returns:
            the result of the first message: None for a function, and the class's `tools` for an
            environment; None if the process has been started before.

        Raises:
            InputRefused: the file cannot be read, raises an exception, or does not define the name.
            Unreadable: the system failed to read the file.
        """
        if self._process is not None:
            return None
        # The user has allowed only the file with this digest to run. So the process runs the bytes that
        # were checked, and does not read the file again.
        source = self._code.vouched_source(self._sha256)
        self._socket, child_end = socket.socketpair()
        self._socket.settimeout(ANSWER_TIMEOUT_S)
        self._replies = self._socket.makefile("rb")
        with child_end:
            self._process = self._start_worker(child_end)
        # A finalizer also ends the process if this object is collected without `close`.
        self._end_process = weakref.finalize(self, _end, self._process)
        return self._ask(
            source.decode("latin-1"),  # a character for each byte; Python knows the file's encoding
            str(without_links(self._code.path)),
            self._code.function,
            where=self.key,
        )

    def close(self) -> None:
        """End the process and its children; a later `start` starts a new process."""
        if self._process is not None:
            self._end_process()
            self._replies.close()
            self._socket.close()
            self._process = None

    def _start_worker(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        """Start the program `worker`, with this socket as its standard input.

        A subclass whose process is confined overrides this and gives `_popen` other arguments.
        """
        return self._popen(channel, [], stdout=2)  # 2 is the trainer's standard error

    def _popen(
        self, channel: socket.socket, folders: Sequence[str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start the program `worker` in the role of this class.

        Args:
            channel: the socket that becomes its standard input.
            folders: the folders that the process may see once it is confined; empty if it is not
                confined.
            streams: further arguments of `subprocess.Popen`.
        """
        # -P keeps the folder of `worker` out of the import path, and -u prints without delay. There is
        # no second socket (0).
        command = [sys.executable, "-P", "-u", worker.__file__, self.role, "0", *folders]
        # A new session keeps Ctrl-C from ending the process, since the run may still have to save.
        return subprocess.Popen(command, stdin=channel.fileno(), start_new_session=True, **streams)

    def _ask(self, *message: object, where: str) -> Any:
        """Send a message and return the result in its reply; the class says what both look like.

        Args:
            message: the elements of the message.
            where: the beginning of the text of an error.

        Raises:
            InputRefused: the code raised an exception, took too long, or ended its process. The process
                is ended in each case.
        """
        process = self._process
        assert process  # `start` has been called
        reply = b""
        is_late = False
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            reply = self._replies.readline()
        except TimeoutError:
            is_late = True
        except ConnectionError:
            # The process is dead, so `reply` has no line. The error is raised below.
            pass
        finally:
            # A complete reply is a line. Without one the process is ended, since its late reply would be
            # read as the reply to the next message. This is in `finally`, because Ctrl-C may interrupt
            # the wait, too.
            is_complete = reply.endswith(b"\n")
            if not is_complete:
                self.close()
        if is_late:
            raise self._error(where, f"took more than {ANSWER_TIMEOUT_S:.0f} s")
        if not is_complete:
            # `close` has waited for the process's end, so the exit code is known.
            raise self._error(where, f"ended its process (exit code {process.returncode})")
        exception_name, result = json.loads(reply)
        if exception_name:
            # In this case the result is the exception's text.
            raise self._error(where, f"raised {exception_name}: {result}")
        return result

    def _error(self, where: str, problem: str) -> InputRefused:
        """End the process, since the run stops at such an error, and return the error."""
        self.close()
        return code_error(where, self._code.value, problem, self.expected)


class FunctionProcess(CodeProcess):
    """A user's function of (prompt, completion, record) in a Python file, run in a separate process.

    The function returns a number, or {name: number} of parts, whose sum is the score.
    """

    key = "rl.reward"
    role = "function"
    expected = RETURNS_SCORES

    def score(
        self, prompt: str, completion: str, record: Mapping[str, Any], where: str
    ) -> dict[str, float]:
        """Return the parts of the function's score of an answer; a plain number is the part "".

        Raises:
            InputRefused: see `start`; or the function raises an exception, returns neither a number
                within +-MAX_SCORE nor such parts, takes more than ANSWER_TIMEOUT_S, or ends its
                process. The message begins with `where`.
        """
        self.start()
        arguments = worker.encoded([prompt, completion, record])
        # A call's message also has named arguments, for tests that call a solution. Here there are none.
        named_arguments = worker.encoded({})
        result = self._ask(self._code.function, arguments, named_arguments, where=where)
        score = worker.decoded(result)
        parts = score_parts(score)
        if parts is None:
            raise self._error(where, f"returned {score!r:.60}")
        return parts


def score_parts(score: Any) -> dict[str, float] | None:
    """Return the named parts of a function's score of an answer; None if it is not a score."""
    parts: Mapping[Any, Any] = {"": score}  # a plain number is a single part with the name ""
    if isinstance(score, Mapping):
        if not score:
            return None
        parts = score
    valid_parts: dict[str, float] = {}
    for name, part in parts.items():
        # The comparison is false for NaN. Larger numbers would overflow in sums and gradients.
        if not (isinstance(part, int | float) and abs(part) <= MAX_SCORE):
            return None
        if not (isinstance(name, str) and (name == "" or name.isidentifier())):
            return None
        valid_parts[name] = float(part)
    return valid_parts


def function_error(where: str, function: str, problem: str) -> InputRefused:
    """Return the error for a user's function that has not returned a score; see `code_error`."""
    return code_error(where, function, problem, RETURNS_SCORES)


def code_error(where: str, code: str, problem: str, expected: str) -> InputRefused:
    """Return the error for a user's function or class that has not done what it must.

    Args:
        where: the place of the record, or the key that names the code.
        code: the function or class, as the user named it.
        problem: what it did instead, such as "raised KeyError: 'answer'".
        expected: what it must do, the end of the sentence "correct it, so that it ...".
    """
    return InputRefused(one_line(f"{where}: {code} {problem}: correct it, so that it {expected}"))
