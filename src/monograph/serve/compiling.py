"""Compiles the stop strings and constraints of requests in processes of their own, under limits.

A stranger's schema may take the compiler more time or memory than its own budget counts. So this
program, the maker, imports what compiling needs, is given the vocabulary once, and forks a child
for each job. The kernel ends a child that uses too much. The server checks every number that a
child sends, and unpickles nothing.

The maker's standard input is a socket to the server. It reads a line of JSON, [end ids, the length
of each piece], and the pieces; then a line for each job, [[kind, value, lead in hexadecimal],
seconds, bytes]. A reply (`_REPLY`) is how the child ended and what it wrote: `_HEAD`, the
automaton's arrays and a text, which is a refusal if there is no state.
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
from typing import Any, NoReturn

import numpy as np

from monograph.automata import Automaton, constraint, stop_strings
from monograph.automata.counting import ALWAYS, COUNTERS, Effect, is_sound
from monograph.automata.tokens import MAX_EFFECTS
from monograph.errors import InputRefused
from monograph.storage.reading import parse_json

# of a request
MAX_CONSTRAINT_BYTES = 1 << 16
MAX_CHOICES = 1_024
# of a child, by the clock at last
PROCESSOR_S = 2
MEMORY_BYTES = 1 << 29
LONGEST_S = 10.0
# of the automata that are kept for further requests
KEPT = 64
MAX_CACHED_BYTES = 1 << 28

MAX_WAITING = 32  # different constraints that wait to be compiled

_START_S = 120.0  # the maker starts in a fraction of a second, on a busy machine in many
_STOP = "stop"  # the kind of stop strings
_NAMES = {
    "choices": "the choices",
    "regex": "the regular expression",
    "json_schema": "the JSON schema",
}
_NAMES |= {_STOP: "the stop strings"}
# A child's exit code, or a signal's number below 0; how many bytes it wrote.
_REPLY = struct.Struct("<iQ")
_MAX_REPLY_BYTES = 1 << 27  # no automaton of the compiler is that large
_HEAD = struct.Struct("<4I")  # states, classes, effects, bytes of the text
# Next states, effects, classes, stops, all effects.
_ARRAYS = (np.int16, np.int16, np.int16, np.uint8, np.int32)
_NO_MEMORY, _TOO_LONG = 100, 101  # in place of exit codes
_END_WITH_PARENT = 1  # Linux's number, which Python does not name


class Busy(Exception):
    """As many constraints as may wait to be compiled do so."""


class Compiler:
    """Compiles stop strings and constraints in processes of their own, under limits.

    Equal requests are given the same object, by which the decoder knows an automaton, as long as it
    is kept (`KEPT`, `MAX_CACHED_BYTES`, the last used ones). Jobs run one after another. The first job
    starts the maker, which takes seconds, and a job that finds it dead starts it again. A compiler
    belongs to one event loop.
    """

    def __init__(self, pieces: Sequence[bytes], ends: Sequence[int]) -> None:
        """Remember the vocabulary.

        Args:
            pieces: the bytes of each token, empty for special tokens (`Tokenizer.pieces`).
            ends: the tokens that end a text.
        """
        head = json.dumps([[int(token) for token in ends], [len(piece) for piece in pieces]])
        self._greeting = head.encode() + b"\n" + b"".join(pieces)
        self._vocabulary = len(pieces)
        self._kept: OrderedDict[str, Automaton | str] = OrderedDict()  # a text is a refusal
        self._turn = asyncio.Lock()
        self._constraint = asyncio.Lock()
        self._waiting: Counter[str] = Counter()  # constraints that are to be compiled
        self._closed = False
        self._maker: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def constraint(self, kind: str, value: Any, lead: bytes = b"") -> Automaton:
        """Return the automaton of a constraint; see `monograph.automata.constraint`.

        Args:
            kind: one of `monograph.automata.KINDS`.
            value: the choices, the regular expression, or the schema as JSON text or as an object,
                all of UTF-8 and of finite numbers, as `monograph.serve.body` lets through.
            lead: bytes that come before the text and do not belong to it.

        Raises:
            InputRefused: the value is too long, its compiler refuses it, or it needs more than a
                child may use.
            Busy: too many others wait.
            RuntimeError: the maker died twice, or the compiler is closed.
        """
        if isinstance(value, dict):
            value = json.dumps(value, ensure_ascii=False)
        texts = value if kind == "choices" else [value]
        if len(texts) > MAX_CHOICES:
            raise InputRefused(
                f"{_NAMES[kind]}: {len(texts):,} texts; from 1 to {MAX_CHOICES:,} are compiled"
            )
        if (count := len("".join(texts).encode())) > MAX_CONSTRAINT_BYTES:
            raise InputRefused(
                f"{_NAMES[kind]}: {count:,} bytes; at most {MAX_CONSTRAINT_BYTES:,} are compiled"
            )
        return await self._shared(kind, value, lead)

    async def stop_strings(self, strings: Sequence[str]) -> Automaton:
        """Return the automaton of stop strings; see `monograph.automata.stop_strings`.

        Raises:
            RuntimeError: the maker died twice, or the compiler is closed.
        """
        return await self._shared(_STOP, strings, b"")

    def close(self) -> None:
        """End the maker, and with it its child; who waits for a job is given a RuntimeError."""
        self._closed = True
        self._end()

    async def _shared(self, kind: str, value: str | Sequence[str], lead: bytes) -> Automaton:
        """Return the cached automaton, or compile in turn."""
        key = json.dumps([kind, value, lead.hex()])
        if key in self._kept:
            self._kept.move_to_end(key)
            known = self._kept[key]
        else:
            await self._take_turn(kind, key)
            # A job goes on if its request is cancelled now: whoever waits for the same takes what
            # it made.
            job = asyncio.create_task(self._compiled(kind, key))
            job.add_done_callback(lambda _: self._turn.release())
            known = await asyncio.shield(job)
        if isinstance(known, str):
            raise InputRefused(known)
        return known

    async def _take_turn(self, kind: str, key: str) -> None:
        """Wait until no job runs; of constraints one alone, so that stop strings, which take no
        time, wait for few.
        """
        if kind == _STOP:
            await self._turn.acquire()
            return
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            raise Busy
        self._waiting[key] += 1
        try:
            async with self._constraint:
                await self._turn.acquire()
        finally:
            self._waiting -= Counter([key])

    async def _compiled(self, kind: str, key: str) -> Automaton | str:
        if key in self._kept:  # by an equal request, which had its turn before
            return self._kept[key]
        code, written = await self._asked(f"[{key}, {PROCESSOR_S}, {MEMORY_BYTES}]\n".encode())
        try:
            made: Automaton | str = (
                _refusal(kind, code) if code else _automaton(written, self._vocabulary)
            )
        except InputRefused as error:
            made = str(error)
        except (ValueError, struct.error):
            made = _refusal(kind, code)
        self._kept[key] = made
        while len(self._kept) > KEPT or sum(map(_bytes, self._kept.values())) > MAX_CACHED_BYTES:
            self._kept.popitem(last=False)
        return made

    async def _asked(self, line: bytes) -> tuple[int, bytearray]:
        """Return the maker's reply to a job. If the maker is dead or dies, try once more with a new
        one.
        """
        for _ in range(2):
            try:
                reader, writer = self._streams or await self._start()
                writer.write(line)
                return await _reply(reader, LONGEST_S)
            except BaseException as error:
                self._end()  # a reply that comes later must not be taken for that to another job
                if isinstance(error, TimeoutError):
                    return _TOO_LONG, bytearray()
                if not isinstance(error, OSError | EOFError):
                    raise
        raise RuntimeError("the process that compiles constraints died twice")

    async def _start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._closed:
            raise RuntimeError("the compiler is closed")
        ours, theirs = socket.socketpair()
        with theirs:
            self._streams = reader, writer = await asyncio.open_unix_connection(sock=ours)
            # A process that forks should have one thread.
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            environment["PYTHONPATH"] = (
                f"{Path(__file__).parents[2]}:{environment.get('PYTHONPATH', '')}"
            )
            command = [sys.executable, "-P", "-m", "monograph.serve.compiling"]
            self._maker = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        writer.write(self._greeting)
        await _reply(reader, _START_S)
        return reader, writer

    def _end(self) -> None:
        if self._maker is not None:
            self._maker.kill()
            self._maker.wait()
        if self._streams is not None:
            self._streams[1].close()
        self._maker = self._streams = None


def _refusal(kind: str, code: int) -> str:
    limits = {
        -signal.SIGXCPU: f"took more than {PROCESSOR_S} s of processor time to compile",
        _NO_MEMORY: f"took more than {MEMORY_BYTES >> 20} MiB of memory to compile",
        _TOO_LONG: f"took more than {LONGEST_S:g} s to compile",
    }
    return f"{_NAMES[kind]} {limits.get(code, f'made its compiler fail ({code})')}: make it simpler"


async def _reply(reader: asyncio.StreamReader, most_s: float) -> tuple[int, bytearray]:
    async with asyncio.timeout(most_s):
        code, length = _REPLY.unpack(await reader.readexactly(_REPLY.size))
        written = bytearray()
        while len(written) < length:  # in parts, between which the server does other things
            if not (part := await reader.read(min(1 << 18, length - len(written)))):
                raise EOFError
            written += part
        return code, written


def _automaton(written: bytearray, vocabulary: int) -> Automaton:
    """Return the automaton that a child wrote; raise InputRefused if it wrote a refusal, ValueError
    if neither.
    """
    states, classes, effects, length = _HEAD.unpack_from(written)
    shapes = (
        (states, classes),
        (states, classes),
        (vocabulary,),
        (states,),
        (effects, 4, COUNTERS),
    )
    arrays: list[Any] = []
    at = _HEAD.size
    for shape, kind in zip(shapes, _ARRAYS, strict=True):
        count = math.prod(shape) if states else 0
        arrays.append(np.frombuffer(written, kind, count, at).reshape(shape if states else (0,)))
        at += arrays[-1].nbytes
    if len(written) != at + length:
        raise ValueError
    text = written[len(written) - length :].decode(errors="replace")
    if not states:
        raise InputRefused(text)
    next_SC, effect_SC, class_V, stops_S, effects_E4R = arrays
    # The device takes these numbers for indices.
    inside = (
        -1 <= next_SC.min()
        and next_SC.max() < states
        and 0 <= class_V.min()
        and class_V.max() < classes
    )
    inside = inside and 0 <= effect_SC.min() and effect_SC.max() < effects <= MAX_EFFECTS
    # Counters that leave their bits would change the state; effects that are allowed nowhere are
    # harmless.
    if not inside or stops_S.max() > 1 or not all(map(is_sound, effects_E4R.tolist())):
        raise ValueError
    known = tuple(Effect(*map(tuple, numbers)) for numbers in effects_E4R.tolist())
    if known[0] != ALWAYS:
        raise ValueError
    return Automaton(text, next_SC, class_V, stops_S.view(np.bool_), effect_SC, known)


def _bytes(kept: Automaton | str) -> int:
    if isinstance(kept, str):
        return len(kept)
    return sum(array.nbytes for array in (kept.next_SC, kept.effect_SC, kept.class_V, kept.stops_S))


def main() -> None:
    """Answer jobs until the server closes the socket."""
    # The server's last requests are answered after a Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        suppress(ConnectionError),
        socket.socket(fileno=0) as channel,
        channel.makefile("rb") as reader,
    ):
        ends, lengths = parse_json(reader.readline())
        pieces = [reader.read(length) for length in lengths]
        _import_everything()
        channel.sendall(_REPLY.pack(0, 0))
        while line := reader.readline():
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                _run(parse_json(line), pieces, ends, writing)
            os.close(writing)
            with open(reading, "rb") as pipe:
                written = pipe.read(_MAX_REPLY_BYTES)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            channel.sendall(_REPLY.pack(code, len(written)))
            channel.sendall(written)


def _import_everything() -> None:
    """Compile one of each kind: numpy imports parts of itself at their first use, and a child may
    open no file.
    """
    end = 0
    parts = [b"", *(bytes([byte]) for byte in range(256)), b"ab", b'a"', b'{"', b'":']
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}
    for kind, value in (("json_schema", schema), ("regex", "a{2,3}|b"), ("choices", ["a", "b"])):
        constraint(kind, value, parts, [end])
    stop_strings(["a", "ba"], parts)


def _run(job: Any, pieces: Sequence[bytes], ends: Sequence[int], writing: int) -> NoReturn:
    """Do a job under its limits, and end."""
    code = 1
    try:
        (kind, value, lead), processor_s, memory_bytes = job
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
        os.close(0)  # the socket
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory_bytes,) * 2)
        # SIGXCPU, a second later SIGKILL.
        resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s + 1))
        for nothing in (
            resource.RLIMIT_CORE,
            resource.RLIMIT_FSIZE,
            resource.RLIMIT_NOFILE,
            resource.RLIMIT_NPROC,
        ):
            resource.setrlimit(nothing, (0, 0))
        with open(writing, "wb", closefd=False) as pipe:
            pipe.writelines(_written(kind, value, bytes.fromhex(lead), pieces, ends))
        code = 0
    except MemoryError:
        code = _NO_MEMORY
    except BaseException:
        traceback.print_exc()  # a fault of the compiler's: the server's log has it
    finally:
        os._exit(code)


def _written(
    kind: str, value: Any, lead: bytes, pieces: Sequence[bytes], ends: Sequence[int]
) -> list[Any]:
    """Return what a child writes: the parts of an automaton, or a refusal."""
    try:
        automaton = (
            stop_strings(value, pieces)
            if kind == _STOP
            else constraint(kind, value, pieces, ends, lead)
        )
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
