"""Compiles the stop strings, constraints and tools of requests in processes of their own, under limits.

A constraint says which texts are allowed. It is compiled to an automaton over tokens, which the decoder
follows on the device. The compiler (`monograph.automata`) limits its own work, but a hostile schema may
still need much time or memory. So this module is also a program, the compiling process. It imports what
compiling needs, gets the vocabulary once, and forks a child for each job. The operating system's kernel
ends a child that uses too much. The server checks every number that a child sends, and unpickles nothing.

The process's standard input is a socket to the server. The process reads:

- first a line of JSON, [stop ids, the length of each piece], and then the bytes of the pieces (a piece
  is the bytes of a token);
- then a line of JSON for each job, [[kind, value, lead in hexadecimal], CPU seconds, bytes of memory].

When the process is ready, it sends a `_REPLY` without output. For each job it sends a `_REPLY` and the
child's output: a `_HEAD`, the automaton's arrays, and a text. If the compiler has refused the job, the
output is an automaton without states, and the text is the reason.

Some constraints cannot be compiled to an automaton. The library llguidance then follows them in the server
(`monograph.automata.on_host`). Since a hostile grammar could make it end the process, a job first tries the
grammar in a child. The output of such a job is an automaton without states, too. Its text is empty if
llguidance has not refused the grammar.

Axes of the arrays: S the automaton's states, C its classes of tokens, E its effects, V the vocabulary,
4 the fields of an effect, R the counters. An effect says what a token does to the automaton's counters.
`monograph.automata.Automaton` says what the arrays are.
"""

import asyncio
import ctypes
import json
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from monograph.automata import Automaton, Calls, call_constraint, constraint, stop_strings
from monograph.automata.counting import ALWAYS, COUNTERS, Effect, is_sound
from monograph.automata.on_host import has_llguidance, lark_of, try_lark
from monograph.automata.tokens import MAX_EFFECTS
from monograph.errors import InputRefused
from monograph.storage.reading import parse_json

# Limits on the constraint of a request.
MAX_CONSTRAINT_BYTES = 1 << 16
MAX_CHOICES = 1_024
MAX_CALLS_BYTES = 1 << 18  # of all tools of a request
# Limits on a child. The kernel enforces the first two, and the server the last one.
PROCESSOR_S = 2
MEMORY_BYTES = 1 << 29
WALL_CLOCK_S = 10.0
_STACK_BYTES = 1 << 22
# Limits on the automata that are cached for further requests.
MAX_CACHED = 64
MAX_CACHED_BYTES = 1 << 28

# The maximum number of different constraints that wait to be compiled.
MAX_WAITING = 32

# The process starts quickly, but on a busy machine it may take many seconds.
_START_TIMEOUT_S = 120.0
# The kinds of jobs, in addition to the kinds of constraints that `monograph.automata` has.
_STOP = "stop"  # compiles stop strings
_CALLS = "calls"  # compiles which calls of tools an answer may have
_HOST = "host"  # tries a grammar that the host is to follow
# How messages name what is compiled, by the kind of job.
_NAMES = {
    "choices": "the choices",
    "regex": "the regular expression",
    "json_schema": "the JSON schema",
    "grammar": "the grammar",
    _STOP: "the stop strings",
    _CALLS: "the schemas of the tools",
    _HOST: "the grammar for llguidance",
}
# The head of a reply has two numbers: the child's exit code, or minus the number of the signal that ended
# it; and the number of bytes of its output.
_REPLY = struct.Struct("<iQ")
_MAX_REPLY_BYTES = 1 << 27  # more than any automaton of the compiler has
# The head of a child's output: the numbers of states, classes, effects, and bytes of the text.
_HEAD = struct.Struct("<4I")
# The types of next_SC, effect_SC, class_V, stops_S and effects_E4R.
_ARRAY_TYPES = (np.int16, np.int16, np.int16, np.uint8, np.int32)
_NO_MEMORY = 100  # the exit code of a child that needed more than MEMORY_BYTES
_TOO_LONG = 101  # stands for the exit code of a child that needed more than WALL_CLOCK_S
_PR_SET_PDEATHSIG = 1  # Linux's option of prctl, which Python does not name


class NotCompiled(InputRefused):
    """A constraint could not be compiled: the compiler refuses it, or needs too much time or memory."""


class Busy(Exception):
    """Too many constraints wait to be compiled."""


class ChildResult(NamedTuple):
    """How a child ended, and what it wrote.

    Attributes:
        exit_code: its exit code, or minus the number of the signal that ended it; or _TOO_LONG.
        output: the bytes that it wrote, see the module's docstring.
    """

    exit_code: int
    output: bytearray


class ConstraintCompiler:
    """Compiles stop strings and constraints in processes of their own, under limits.

    The results that were used last are cached. So equal requests get the same automaton object, by whose
    identity the decoder sees that it is on the device already. Jobs run one after another. The
    first job starts the compiling process, which takes seconds. A job that finds the process dead starts it
    again. All methods are called in one event loop.
    """

    def __init__(self, pieces: Sequence[bytes], stop_ids: Sequence[int]) -> None:
        """Remember the vocabulary.

        Args:
            pieces: the bytes of each token, empty for special tokens (`Tokenizer.pieces`).
            stop_ids: the tokens that end a text.
        """
        piece_sizes = [len(piece) for piece in pieces]
        head = json.dumps([[int(token) for token in stop_ids], piece_sizes])
        self._vocabulary_message = head.encode() + b"\n" + b"".join(pieces)
        self._vocabulary_size = len(pieces)
        # The result of each job, by the job's JSON: an automaton, or the reason why it was refused.
        self._cache: OrderedDict[str, Automaton | str] = OrderedDict()
        self._job_lock = asyncio.Lock()  # is locked while a job runs
        self._constraint_lock = asyncio.Lock()  # see `_acquire_job_lock`
        # How many requests wait for each constraint, by the job's JSON.
        self._waiting: Counter[str] = Counter()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def constraint(
        self, kind: str, value: str | Sequence[str] | dict[str, Any], lead: bytes = b""
    ) -> Automaton:
        """Return the automaton of a constraint; see `monograph.automata.constraint`.

        Args:
            kind: one of `monograph.automata.KINDS`.
            value: the choices, the regular expression, the grammar, or the schema as JSON text or as an object.
                Texts are valid Unicode and numbers finite, as `monograph.serve.body` ensures.
            lead: bytes that come before the text and are not part of it.

        Raises:
            InputRefused: the value is too long.
            NotCompiled: its compiler refuses it, or it needs more time or memory than a child may use.
            Busy: too many other constraints wait.
            RuntimeError: the compiling process died twice, or the compiler is closed.
        """
        if isinstance(value, dict):
            value = json.dumps(value, ensure_ascii=False)
        texts = [value] if isinstance(value, str) else value
        if len(texts) > MAX_CHOICES:
            raise InputRefused(
                f"{_NAMES[kind]}: {len(texts):,} texts; from 1 to {MAX_CHOICES:,} are compiled"
            )
        size = len("".join(texts).encode())
        if size > MAX_CONSTRAINT_BYTES:
            raise InputRefused(
                f"{_NAMES[kind]}: {size:,} bytes; at most {MAX_CONSTRAINT_BYTES:,} are compiled"
            )
        return await self._cached_automaton(kind, value, lead)

    async def stop_strings(self, strings: Sequence[str]) -> Automaton:
        """Return the automaton of stop strings; see `monograph.automata.stop_strings`.

        Raises:
            RuntimeError: the compiling process died twice, or the compiler is closed.
        """
        return await self._cached_automaton(_STOP, strings, b"")

    async def calls(self, calls: Calls) -> Automaton:
        """Return the automaton of answers with calls; see `monograph.automata.call_constraint`.

        Raises:
            InputRefused, Busy, RuntimeError: see `constraint`.
        """
        value = calls._asdict()
        size = len(json.dumps(value))
        if size > MAX_CALLS_BYTES:
            raise InputRefused(
                f"{_NAMES[_CALLS]}: {size:,} bytes; at most {MAX_CALLS_BYTES:,} are compiled"
            )
        return await self._cached_automaton(_CALLS, value, b"")

    async def try_on_host(self, lark: str) -> str:
        """Return why llguidance refuses a grammar, or an empty text; see `monograph.automata.on_host`.

        Raises:
            Busy, RuntimeError: see `constraint`.
        """
        result = await self._cached_result(_HOST, lark, b"")
        assert isinstance(result, str)
        return result

    def close(self) -> None:
        """End the compiling process and its child. Callers that wait get a RuntimeError."""
        self._is_closed = True
        self._end_process()

    async def _cached_automaton(
        self, kind: str, value: str | Sequence[str] | dict[str, Any], lead: bytes
    ) -> Automaton:
        """Return an automaton from the cache, or compile it as soon as no other job runs."""
        result = await self._cached_result(kind, value, lead)
        if isinstance(result, str):
            raise NotCompiled(result)
        return result

    async def _cached_result(
        self, kind: str, value: str | Sequence[str] | dict[str, Any], lead: bytes
    ) -> Automaton | str:
        """Return the result of a job from the cache, or run it as soon as no other job runs."""
        key = json.dumps([kind, value, lead.hex()])
        if key in self._cache:
            self._cache.move_to_end(key)
            result = self._cache[key]
        else:
            await self._acquire_job_lock(kind, key)
            # Equal requests may wait for the job's result, so it must run to its end even if this request is
            # cancelled. Therefore the job is a task of its own, which is shielded, and which releases the
            # lock itself when it is done.
            job = asyncio.create_task(self._compile(kind, key))
            job.add_done_callback(lambda _: self._job_lock.release())
            result = await asyncio.shield(job)
        return result

    async def _acquire_job_lock(self, kind: str, key: str) -> None:
        """Wait until no job runs, and lock `_job_lock`.

        Stop strings are compiled quickly, so they must not wait for all constraints that came before.
        Therefore constraints first wait for `_constraint_lock`, so that only one of them at a time waits for
        the job lock. Stop strings wait only for the job lock: for the constraint that is being compiled, and
        for at most one more.

        Raises:
            Busy: too many constraints wait.
        """
        if kind == _STOP:
            await self._job_lock.acquire()
            return
        # A request needs no further place if an equal constraint waits already.
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            raise Busy
        self._waiting[key] += 1
        try:
            async with self._constraint_lock:
                await self._job_lock.acquire()
        finally:
            self._waiting -= Counter([key])  # unlike `-= 1`, removes a key whose count is 0

    async def _compile(self, kind: str, key: str) -> Automaton | str:
        """Compile and cache an automaton; return it, or the reason of a refusal."""
        if key in self._cache:  # an equal request has compiled it in the meantime
            return self._cache[key]
        job = f"[{key}, {PROCESSOR_S}, {MEMORY_BYTES}]\n".encode()
        child = await self._run_in_process(job)
        result: Automaton | str
        try:
            if child.exit_code:
                result = _failure_reason(kind, child.exit_code)
            else:
                result = _read_automaton(child.output, self._vocabulary_size)
        except InputRefused as error:
            result = str(error)
        except (ValueError, struct.error):
            # The child has written something that is not an automaton, perhaps because of a hostile value.
            result = _failure_reason(kind, child.exit_code)
        self._cache[key] = result
        while self._is_cache_too_large():
            self._cache.popitem(last=False)
        return result

    def _is_cache_too_large(self) -> bool:
        cached_bytes = sum(map(_size_bytes, self._cache.values()))
        return len(self._cache) > MAX_CACHED or cached_bytes > MAX_CACHED_BYTES

    async def _run_in_process(self, job: bytes) -> ChildResult:
        """Let the compiling process run a job in a child.

        If the process is dead or dies, the job is tried a second time, in a new one.
        """
        for _ in range(2):
            try:
                streams = self._streams
                if streams is None:
                    streams = await self._start_process()
                reader, writer = streams
                writer.write(job)
                return await _read_reply(reader, WALL_CLOCK_S)
            except BaseException as error:  # also a cancellation
                # The process is ended, because its late reply could be mistaken for the reply to the next job.
                self._end_process()
                if isinstance(error, TimeoutError):
                    return ChildResult(_TOO_LONG, bytearray())
                # Other errors of the socket mean that the process is dead.
                is_dead = isinstance(error, OSError | EOFError)
                if not is_dead:
                    raise
        raise RuntimeError("the process that compiles constraints died twice")

    async def _start_process(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start the compiling process, send it the vocabulary, and return the streams to it."""
        if self._is_closed:
            raise RuntimeError("the compiler is closed")
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            self._streams = reader, writer  # so that `_end_process` closes them if the start fails
            # A process that forks should have one thread.
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            # The process must import the same package as the server.
            package_parent = Path(__file__).parents[2]
            environment["PYTHONPATH"] = f"{package_parent}:{environment.get('PYTHONPATH', '')}"
            # -P keeps it from importing files of the present directory.
            command = [sys.executable, "-P", "-m", "monograph.serve.compiling"]
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        writer.write(self._vocabulary_message)
        await _read_reply(reader, _START_TIMEOUT_S)  # the process says that it has started
        return reader, writer

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._streams is not None:
            _, writer = self._streams
            writer.close()
        self._process = None
        self._streams = None


def _failure_reason(kind: str, code: int) -> str:
    """Return why a child failed, for the client."""
    reasons = {
        -signal.SIGXCPU: f"took more than {PROCESSOR_S} s of processor time to compile",
        _NO_MEMORY: f"took more than {MEMORY_BYTES >> 20} MiB of memory to compile",
        _TOO_LONG: f"took more than {WALL_CLOCK_S:g} s to compile",
    }
    reason = reasons.get(code, f"made its compiler fail ({code})")
    return f"{_NAMES[kind]} {reason}: make it simpler"


async def _read_reply(reader: asyncio.StreamReader, timeout_s: float) -> ChildResult:
    """Read a reply of the compiling process: the result of a child."""
    async with asyncio.timeout(timeout_s):
        code, size = _REPLY.unpack(await reader.readexactly(_REPLY.size))
        output = bytearray()
        # The output is read in chunks, so that the server can do other things in between.
        while len(output) < size:
            chunk = await reader.read(min(1 << 18, size - len(output)))
            if not chunk:
                raise EOFError
            output += chunk
        return ChildResult(code, output)


def _read_automaton(output: bytearray, vocabulary_size: int) -> Automaton:
    """Return the automaton in a child's output, after checking every number in it.

    Raises:
        InputRefused: the child wrote a refusal.
        ValueError: the bytes are neither an automaton nor a refusal.
        struct.error: there are too few bytes.
    """
    state_count, class_count, effect_count, text_bytes = _HEAD.unpack_from(output)
    is_refusal = state_count == 0
    # A refusal has no arrays, so its text follows the head.
    shapes: list[tuple[int, ...]] = [(0,)] * len(_ARRAY_TYPES)
    if not is_refusal:
        shapes = [
            (state_count, class_count),
            (state_count, class_count),
            (vocabulary_size,),
            (state_count,),
            (effect_count, len(Effect._fields), COUNTERS),
        ]
    arrays: list[NDArray[Any]] = []
    offset = _HEAD.size
    for shape, dtype in zip(shapes, _ARRAY_TYPES, strict=True):
        array = np.frombuffer(output, dtype, math.prod(shape), offset).reshape(shape)
        arrays.append(array)
        offset += array.nbytes
    if len(output) != offset + text_bytes:
        raise ValueError
    # The reason of a refusal, or the automaton's name in an error.
    text = output[offset:].decode(errors="replace")
    if is_refusal:
        raise InputRefused(text)
    next_SC, effect_SC, class_V, stops_S, effects_E4R = arrays
    # The device uses the numbers of these arrays as indices, and would not notice a wrong one. The next
    # state -1 means that the tokens are forbidden.
    _require_within(next_SC, -1, state_count - 1)
    _require_within(class_V, 0, class_count - 1)
    _require_within(effect_SC, 0, effect_count - 1)
    _require_within(stops_S, 0, 1)
    if effect_count > MAX_EFFECTS:
        raise ValueError
    # The decoder packs a state and its counts into the bits of one number. If an effect let a count grow too
    # large, it would change the state.
    effect_fields = effects_E4R.tolist()
    if not all(map(is_sound, effect_fields)):
        raise ValueError
    checked_effects = tuple(Effect(*map(tuple, fields)) for fields in effect_fields)
    if checked_effects[0] != ALWAYS:  # effect 0 is that of tokens which change no counter
        raise ValueError
    return Automaton(text, next_SC, class_V, stops_S.view(np.bool_), effect_SC, checked_effects)


def _require_within(array: Any, low: int, high: int) -> None:
    if array.min() < low or array.max() > high:
        raise ValueError


def _size_bytes(result: Automaton | str) -> int:
    """Return about how much memory a cached result takes."""
    if isinstance(result, str):
        return len(result)
    arrays = (result.next_SC, result.effect_SC, result.class_V, result.stops_S)
    return sum(array.nbytes for array in arrays)


def main() -> None:
    """Run jobs in the compiling process, until the server closes the socket."""
    # A Ctrl-C reaches this process, too, while the server still answers its last requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        suppress(ConnectionError),
        socket.socket(fileno=0) as channel,
        channel.makefile("rb") as reader,
    ):
        stop_ids, piece_sizes = parse_json(reader.readline())
        pieces = [reader.read(size) for size in piece_sizes]
        _import_everything()
        channel.sendall(_REPLY.pack(0, 0))  # tells the server that the process is ready
        while line := reader.readline():
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:  # this is the child; it ends in `_run_job`, which does not return
                _run_job(parse_json(line), pieces, stop_ids, write_end)
            os.close(write_end)  # the child has its own; the output ends when that one is closed
            with open(read_end, "rb") as pipe:
                output = pipe.read(_MAX_REPLY_BYTES)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            channel.sendall(_REPLY.pack(code, len(output)))
            channel.sendall(output)


def _import_everything() -> None:
    """Compile a constraint of each kind, so that all that compiling needs is imported.

    numpy imports parts of itself at their first use, and a child is not allowed to open a file. The
    vocabulary is a small one: a stop id, all bytes, and a few tokens of several bytes.
    """
    stop_id = 0
    pieces = [b"", *(bytes([byte]) for byte in range(256)), b"ab", b'a"', b'{"', b'":']
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}
    constraint("json_schema", schema, pieces, [stop_id])
    for kind, text in (("regex", "a{2,3}|b"), ("grammar", 'root ::= [a-b]{2} | "\\x61"')):
        constraint(kind, text, pieces, [stop_id])
    constraint("choices", ["a", "b"], pieces, [stop_id])
    stop_strings(["a", "ba"], pieces)
    if has_llguidance():
        try_lark(lark_of("json_schema", schema), len(pieces))


def _run_job(
    job: Sequence[Any], pieces: Sequence[bytes], stop_ids: Sequence[int], write_end: int
) -> NoReturn:
    """Run a job in the child under its limits, write the result to a pipe, and end the child."""
    code = 1  # of a child that has failed, by a bug or by what the client sent
    try:
        (kind, value, lead), processor_s, memory_bytes = job
        # The kernel kills the child if the compiling process ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(0)  # the socket to the server
        _limit_child(processor_s, memory_bytes)
        with open(write_end, "wb", closefd=False) as pipe:
            pipe.writelines(_result_chunks(kind, value, bytes.fromhex(lead), pieces, stop_ids))
        code = 0
    except MemoryError:
        code = _NO_MEMORY
    except BaseException:
        traceback.print_exc()  # a bug of the compiler; the server's log shows it
    finally:
        os._exit(code)


def _limit_child(processor_s: int, memory_bytes: int) -> None:
    """Let the kernel limit what this process may use from now on."""
    # RLIMIT_AS also counts the memory that the child shares with its parent. The first number in statm is
    # the size of all of it now, in pages.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_bytes = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    # The kernel sends SIGXCPU at the first number of seconds, and SIGKILL at the second.
    resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s + 1))
    # The stack is smaller than those of the server's threads, so that what fits here fits there as well.
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    # The child may write no core and no file, open no file, and start no process.
    forbidden = (
        resource.RLIMIT_CORE,
        resource.RLIMIT_FSIZE,
        resource.RLIMIT_NOFILE,
        resource.RLIMIT_NPROC,
    )
    for limit in forbidden:
        resource.setrlimit(limit, (0, 0))


def _result_chunks(
    kind: str, value: Any, lead: bytes, pieces: Sequence[bytes], stop_ids: Sequence[int]
) -> list[Any]:
    """Return the buffers that a child writes: those of an automaton, or of a refusal."""
    try:
        if kind == _HOST:
            # The output has no automaton in either case, which is the form of a refusal. If llguidance has
            # not refused the grammar, the reason is empty.
            raise InputRefused(try_lark(value, len(pieces)))
        if kind == _STOP:
            automaton = stop_strings(value, pieces)
        elif kind == _CALLS:
            automaton = call_constraint(Calls(**value), pieces, stop_ids)
        else:
            automaton = constraint(kind, value, pieces, stop_ids, lead)
    except InputRefused as error:
        text = str(error).encode(errors="replace")
        return [_HEAD.pack(0, 0, 0, len(text)), text]
    text = automaton.where.encode(errors="replace")
    effects = np.array(automaton.effects, dtype=np.int32)
    arrays = automaton.next_SC, automaton.effect_SC, automaton.class_V, automaton.stops_S, effects
    head = _HEAD.pack(*automaton.next_SC.shape, len(effects), len(text))
    return [head, *map(np.ascontiguousarray, arrays), text]


if __name__ == "__main__":
    main()
