"""Environments: what a model in training talks to, for several turns.

An *episode* is one conversation. The environment opens it with a prompt. Then, turn by turn, the model
answers, and the environment says what it observes and how good the answer was, until the environment is
done. An environment is a class:

    class Game:
        tools = [...]                  # optional: the tools that the chat template shows

        def reset(self, record):       # the opening: a text, or a list of messages
            ...
        def step(self, answer):        # (observation, reward, done)
            ...

Each episode has an object of its own. An answer is a text. If there are tools, it is a message with the
calls as objects: {"role": "assistant", "content": "...", "tool_calls": [{"name": "add",
"arguments": {"a": 1}}]}. Arguments that are no JSON are a text. An observation is a text, a message, or
a list of messages of users or tools. The observation None counts as an empty text. In a chat, only the
last observation may be empty. A reward is a number, or a dict of numbers by name.

A user's file runs in a few separate processes, each of which has many episodes. A process first runs
the file with the user's rights. Then it gives them up, since the answers that it will read are written by
a model. It is confined like a process that runs a model's program (`monograph.rl.processes`), with other
limits: 4 GiB of memory, any amount of processor time, and ANSWER_TIMEOUT_S for each call.
"""

from __future__ import annotations

import copy
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from monograph.errors import InputRefused
from monograph.rl import worker
from monograph.rl.processes import SCORES, CodeProcess, code_error, score_parts
from monograph.storage.code import Code
from monograph.storage.reading import is_folder

KEY = "rl.environment"
# What opens an episode, or what an environment observes: a text, or messages of a chat.
Said: TypeAlias = str | list[dict[str, Any]]
# An answer as an environment gets it: a text, or a message with calls of tools.
PlayedAnswer: TypeAlias = str | dict[str, Any]
EXPECTED_OPENING = "returns a text or a list of messages from reset(record)"
TOOLS_NEED_A_CHAT = (
    f"{KEY} has tools, which need a chat: return a list of messages from reset(record)"
)
EXPECTED_STEP = f"returns (observation, reward, done) from step(answer): a text or messages, {SCORES}, and a bool"
# The maximum number of processes of an environment. Decoding takes longer than the environment, so even one
# process is rarely busy.
MAX_PROCESSES = 4
# The maximum number of bytes of an environment's output that are read in one step.
MAX_PRINTED_BYTES = 1 << 16
# How long `close` waits for the rest of an environment's output. The output may never end, since a child of
# the environment may hold the pipe open.
FORWARDING_TIMEOUT_S = 1.0


class Observation(NamedTuple):
    """What an environment says after an answer.

    Attributes:
        said: the observation.
        parts: the parts of the reward by name; a plain number is the part "".
        done: whether the episode has ended.
    """

    said: Said
    parts: Mapping[str, float]
    done: bool


class Environments(Protocol):
    """The environments of many episodes at once.

    Calls for one episode must not overlap. `where` is the place of the episode's record, with which the
    text of an error begins.

    Attributes:
        tools: the tools of the environment, for the chat template; None if it has none.
    """

    @property
    def tools(self) -> Any:
        """Return the tools; this may start the environment."""

    def reset(self, episode: int, seed: int, record: Mapping[str, Any], where: str) -> Future[Said]:
        """Begin an episode; the future has its opening, or an `InputRefused`."""

    def step(self, episode: int, answer: PlayedAnswer, where: str) -> Future[Observation]:
        """Give the episode an answer; the future has what it observes, or an `InputRefused`."""

    def end(self, episode: int) -> None:
        """Forget an episode."""

    def close(self) -> None:
        """End all episodes and processes."""


class OwnEnvironments:
    """The environments of a class of this process; see `Environments`."""

    def __init__(self, environment: Callable[[], Any]) -> None:
        """Take the class."""
        self._class = environment
        self._name = getattr(environment, "__name__", "the environment")
        self._episodes: dict[int, tuple[Any, Any]] = {}

    @property
    def tools(self) -> Any:
        """Return the tools of the class."""
        return _tools(getattr(self._class, "tools", None), self._name)

    def reset(self, episode: int, seed: int, record: Mapping[str, Any], where: str) -> Future[Said]:
        """Begin an episode; see `Environments`."""

        def begin() -> Said:
            state = random.Random(seed).getstate()
            # The class may change its record, so it gets a copy: other episodes read the same record.
            opening = self._called(episode, state, self._class, "reset", copy.deepcopy(record))
            return _opening(opening, where, self._name)

        return _done(begin)

    def step(self, episode: int, answer: PlayedAnswer, where: str) -> Future[Observation]:
        """Give the episode an answer; see `Environments`."""
        played, state = self._episodes[episode]

        def go_on() -> Observation:
            result = self._called(episode, state, lambda: played, "step", answer)
            return _observation(result, where, self._name)

        return _done(go_on)

    def end(self, episode: int) -> None:
        """Forget an episode."""
        del self._episodes[episode]

    def close(self) -> None:
        """Forget all episodes."""
        self._episodes.clear()

    def _called(
        self,
        episode: int,
        state: Any,
        object_of_episode: Callable[[], Any],
        method: str,
        argument: object,
    ) -> Any:
        """Call a method with the episode's own state of `random`, and return its result.

        The episode's object and its new state of `random` are stored in `_episodes`. The caller's state
        of `random` is put back.

        Args:
            episode: the number of the episode.
            state: the episode's state of `random`.
            object_of_episode: returns the episode's object; for a new episode, it makes the object.
            method: the name of the method.
            argument: the method's argument.
        """
        callers_state = random.getstate()
        random.setstate(state)
        try:
            played = object_of_episode()
            result = getattr(played, method)(argument)
            self._episodes[episode] = played, random.getstate()
        finally:
            random.setstate(callers_state)
        return result


class FileEnvironments:
    """The environments of a class in a user's file; see `Environments`.

    Episode e is in process e mod N, which makes the calls of its episodes in order. The processes start
    at the first use.
    """

    def __init__(self, code: Code, sha256: str, processes: int = 0) -> None:
        """Take the class, and the digest that the file must have.

        Args:
            code: the class in the file.
            sha256: the digest.
            processes: N; 0: one for each core, at most MAX_PROCESSES.
        """
        count = processes or min(os.cpu_count() or 1, MAX_PROCESSES)
        self._processes = [_EnvironmentProcess(code, sha256) for _ in range(count)]
        self._code = code
        # A process asks Linux to end it when the thread that started it ends (`worker.main`). So each
        # process has a thread of its own, which lives as long as these environments.
        self._threads: list[ThreadPoolExecutor] = []
        self._tools: Any = None

    @property
    def tools(self) -> Any:
        """Return the tools of the class. A process is started for this, if none runs yet."""
        self._start()
        return self._tools

    def reset(self, episode: int, seed: int, record: Mapping[str, Any], where: str) -> Future[Said]:
        """Begin an episode; see `Environments`."""
        return self._submit(episode, lambda process: process.reset(episode, seed, record, where))

    def step(self, episode: int, answer: PlayedAnswer, where: str) -> Future[Observation]:
        """Give the episode an answer; see `Environments`."""
        return self._submit(episode, lambda process: process.step(episode, answer, where))

    def end(self, episode: int) -> None:
        """Forget an episode."""
        self._submit(episode, lambda process: process.end(episode))

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        # The processes are ended first, which also ends calls that hang in a thread.
        for process in self._processes:
            process.close()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        self._threads = []

    def _start(self) -> None:
        """Start the threads, and one process, which gives the tools; the other processes start later."""
        if self._threads:
            return
        self._threads = [ThreadPoolExecutor(1, "environment") for _ in self._processes]
        try:
            tools = self._threads[0].submit(self._processes[0].start).result()
            self._tools = _tools(worker.decoded(tools), self._code.value)
        except BaseException:
            self.close()
            raise

    def _submit(self, episode: int, call: Callable[[_EnvironmentProcess], Any]) -> Future[Any]:
        """Let the thread of an episode's process make a call; return the future of its result."""
        self._start()
        number = episode % len(self._processes)
        return self._threads[number].submit(call, self._processes[number])


class _EnvironmentProcess(CodeProcess):
    """A process with some of a file's episodes; see `worker._play`."""

    key = KEY
    role = "environment"
    expected = (
        "has a class with reset(record) and step(answer), which return plain data and raise nothing"
    )

    def reset(self, episode: int, seed: int, record: Mapping[str, Any], where: str) -> Said:
        """Begin an episode."""
        self.start()
        reply = self._ask("reset", episode, seed, worker.encoded(record), where=where)
        return _opening(worker.decoded(reply), where, self._code.value)

    def step(self, episode: int, answer: PlayedAnswer, where: str) -> Observation:
        """Give the episode an answer."""
        if self._process is None:
            # An error of another episode has ended the process, and that error ends the run.
            raise code_error(where, self._code.value, "ended its process", EXPECTED_STEP)
        reply = self._ask("step", episode, answer, where=where)
        return _observation(worker.decoded(reply), where, self._code.value)

    def end(self, episode: int) -> None:
        """Forget an episode."""
        if self._process is not None:
            self._ask("end", episode, where=self.key)

    def _start_worker(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        """Start the program `worker`, confined; see `CodeProcess._start_worker`."""
        # The process may see the folders from which Python imports, those of the system's libraries, and
        # the folder of the user's file.
        visible = {*sys.path, str(Path(os.__file__).parents[1]), "/lib", "/lib64", "/usr/lib"}
        visible |= {"/usr/lib64", str(self._code.path.absolute().parent)}
        folders = sorted(folder for folder in visible if folder and is_folder(folder))
        # Once it has given up its rights, the process cannot start threads, and a library that tries to
        # may fail.
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # The order of a set of texts depends on Python's hash seed. An episode may depend on that order,
        # so the seed is always the same.
        same_order = {"PYTHONHASHSEED": "0"}
        # The process may not write to files, and the trainer's standard error may be one. So its output
        # goes through a pipe.
        process = self._popen(
            channel,
            folders,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **single, **same_order},
        )
        self._forwarding = threading.Thread(target=_forward, args=[process], daemon=True)
        self._forwarding.start()
        return process

    def close(self) -> None:
        """End the process (see `CodeProcess.close`), and wait until its output has been forwarded."""
        is_open = self._process is not None
        super().close()
        if is_open:
            self._forwarding.join(FORWARDING_TIMEOUT_S)


def _forward(process: subprocess.Popen[bytes]) -> None:
    """Write what the process prints to standard error."""
    assert process.stdout
    with process.stdout:
        # A line may have any length, so a long one is forwarded in parts.
        while line := process.stdout.readline(MAX_PRINTED_BYTES):
            print(line.decode(errors="replace"), end="", file=sys.stderr)


def _done(call: Callable[[], Any]) -> Future[Any]:
    """Make a call now, and return a future that already has its result or its exception."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def _tools(tools: Any, code: str) -> list[Any] | None:
    """Return the tools of a class, as a chat template reads them.

    Raises:
        InputRefused: they are not a list of objects.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not _are_messages(list(tools)):
        expected = "has tools as a list of objects with the type and the function of each"
        raise code_error(KEY, code, f"has the tools {tools!r:.60}", expected)
    return list(tools)


def _opening(opening: Any, where: str, code: str) -> Said:
    """Return what opens an episode.

    Raises:
        InputRefused: it is neither a text nor messages.
    """
    if isinstance(opening, str) or (opening and _are_messages(opening)):
        return opening
    raise code_error(where, code, f"returned {opening!r:.60} from reset", EXPECTED_OPENING)


def _observation(result: Any, where: str, code: str) -> Observation:
    """Return what an environment said after an answer.

    Raises:
        InputRefused: it is not (observation, reward, done).
    """

    def error() -> InputRefused:
        return code_error(where, code, f"returned {result!r:.60} from step", EXPECTED_STEP)

    if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 3:
        raise error()
    said, reward, done = result
    if said is None:
        said = ""
    if isinstance(said, dict):
        said = [said]
    if not isinstance(said, str) and not _are_messages(said):
        raise error()
    parts = score_parts(reward)
    if parts is None or isinstance(reward, bool):
        raise error()
    if not isinstance(done, bool):
        raise error()
    return Observation(said, parts, done)


def _are_messages(value: object) -> bool:
    """Return whether this is a list of dicts; what is in them is not checked."""
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)
