"""Call a user's function that scores answers, in a process of its own."""

import json
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monograph.errors import InputRefused
from monograph.rl import worker
from monograph.rl.solutions import end
from monograph.storage.reading import read_input, refusing, without_links
from monograph.terminal import one_line

LARGEST = 1e6
SECONDS = 60.0  # for one answer, and for the imports of the file
MOST_CODE_BYTES = 1 << 24


class Function:
    """A function `score(prompt, completion, record)` of a Python file, whose process starts at the first call.

    It returns a number, or {name: number} of the parts whose sum the answer is worth.

    What the function prints goes to standard error. The process ends with the thread that made the first call.
    """

    def __init__(self, file: Path, name: str) -> None:
        self._file, self._name = file, name
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and run the file in it, if that has not been done.

        Raises:
            InputRefused: the file cannot be read, raises an exception, or has no such function.
            Unreadable: the system failed to read the file.
        """
        if self._process is not None:
            return
        with refusing(self._file):
            source = read_input(self._file, MOST_CODE_BYTES)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(SECONDS)
        self._replies = self._socket.makefile("rb")
        with theirs:
            # In a session of its own, so that Ctrl-C does not end it: a run may still have to save.
            command = [sys.executable, "-P", "-u", worker.__file__, "function"]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=2, start_new_session=True)
        self._ended = weakref.finalize(self, end, self._process)
        self._asked("rl.reward", source.decode("latin-1"), str(without_links(self._file)), self._name)

    def score(self, prompt: str, completion: str, record: Mapping[str, Any], where: str) -> dict[str, float]:
        """Return the function's score of an answer by part; a plain number is the part "".

        Raises:
            InputRefused: see `start`; or the function raises, returns neither a finite number nor parts, takes more
                than SECONDS, or ends its process. The message begins with `where`.
        """
        self.start()
        reply = self._asked(where, self._name, worker.encoded([prompt, completion, record]), worker.encoded({}))
        score = worker.decoded(reply)
        if (parts := parts_of(score)) is None:
            raise self._refused(where, f"returned {score!r:.60}")
        return parts

    def close(self) -> None:
        """End the process and its children; a later call starts a new one."""
        if self._process is not None:
            self._ended()
            self._replies.close()
            self._socket.close()
            self._process = None

    def _asked(self, where: str, *message: Any) -> Any:
        process, line, fault = self._process, b"", None
        assert process
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            line = self._replies.readline()
        except TimeoutError:
            fault = f"took more than {SECONDS:.0f} s"
        except ConnectionError:
            pass  # the process is dead
        finally:
            if not line.endswith(b"\n"):
                self.close()  # a late reply must not be taken for that to the next call
        if not line.endswith(b"\n"):
            raise self._refused(where, fault or f"ended its process (exit code {process.returncode})")
        raised, result = json.loads(line)
        if raised:
            raise self._refused(where, f"raised {raised}: {result}")
        return result

    def _refused(self, where: str, fault: str) -> InputRefused:
        self.close()
        return refused(where, f"{self._file}:{self._name}", fault)


def parts_of(score: Any) -> dict[str, float] | None:
    """Return the parts of what a function returned for an answer; None if it is no score."""
    parts = score if isinstance(score, Mapping) and score else {"": score}
    for name, part in parts.items():
        # NaN is in no range. Larger numbers would overflow in sums and gradients.
        fine = isinstance(part, int | float) and abs(part) <= LARGEST
        if not fine or not (isinstance(name, str) and (name == "" or name.isidentifier())):
            return None
    return {name: float(part) for name, part in parts.items()}


def refused(where: str, function: str, fault: str) -> InputRefused:
    """Return the error of a function that scores no answer."""
    number = f"a number from -{LARGEST:g} to {LARGEST:g}"
    advice = f"correct it, so that it returns {number}, or such numbers by name, for every answer"
    return InputRefused(one_line(f"{where}: {function} {fault}: {advice}"))
