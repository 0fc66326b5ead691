"""Run: pytest tests/serve/test_compiling.py

What strangers ask for is compiled as ever, in processes that can take neither the server's time nor
its memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automata_vocabularies import END, vocabulary
from clocks import HANG_S
from monograph.automata import Automaton, constraint, stop_strings
from monograph.automata.counting import COUNTERS, Effect
from monograph.automata.on_host import has_llguidance, lark_of
from monograph.errors import InputRefused
from monograph.serve import compiling
from monograph.serve.body import parse_body
from monograph.serve.compiling import (
    ChildResult,
    ConstraintCompiler,
    _read_automaton,
    _result_chunks,
)
from monograph.serve.fields import read
from monograph.serve.refused import Refused
from monograph.serve.requests import CompletionRequest

PIECES = [b"", b"", *(bytes([byte]) for byte in range(256)), *vocabulary('ab{}":,1', 200)[2:]]
# Its pattern alone, which no budget counts, is read for about five seconds.
BOMB = {"type": "string", "pattern": "".join(f"[^{chr(0x100 + i)}]" for i in range(4990))}


class Served:
    """A compiler and the loop that it belongs to."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.compiler = self.runner.run(self._made())
        self._numbers = itertools.count()
        self.asked: list[str] = []  # the jobs that the process was sent
        ask = self.compiler._run_in_process

        async def asked(line: bytes) -> ChildResult:
            self.asked.append(line.decode())
            return await ask(line)

        self.compiler._run_in_process = asked  # type: ignore[method-assign]

    async def _made(self) -> ConstraintCompiler:
        return ConstraintCompiler(PIECES, [END])

    def __call__(self, kind: str, value: Any, lead: bytes = b"") -> Automaton:
        return self.runner.run(self.compiler.constraint(kind, value, lead))

    def start(self) -> None:
        self("regex", f"start{next(self._numbers)}")

    @property
    def process(self) -> int:
        assert self.compiler._process is not None
        return self.compiler._process.pid


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.compiler.close()
    one.runner.close()


def assert_equal(one: Automaton, other: Automaton) -> None:
    assert one.where == other.where
    for name in ("next_SC", "class_V", "stops_S", "effect_SC"):
        mine, its = getattr(one, name), getattr(other, name)
        assert mine.dtype == its.dtype and np.array_equal(mine, its), name
    assert one.effects == other.effects


CASES: list[tuple[str, Any, bytes]] = [
    ("regex", "a*b{2,5}|é+", b""),
    ("regex", "", b""),
    ("regex", "a{50}", b" "),
    ("choices", ["yes", "no", "", "\U0001f600 \n"], b""),
    ("json_schema", {"type": "integer", "minimum": -7, "maximum": 1234}, b" "),
    (
        "json_schema",
        json.dumps({"type": "array", "maxItems": 3, "items": {"enum": [1.5, "a", None]}}),
        b"",
    ),
    ("json_schema", {"type": "string"}, b""),
    (
        "json_schema",
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "^a", "maxLength": 8}},
        },
        b"",
    ),
    # The order of the members is that of the schema.
    (
        "json_schema",
        {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "boolean"}}},
        b"",
    ),
    (
        "json_schema",
        {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}},
        b"",
    ),
]


@pytest.mark.parametrize(("kind", "value", "lead"), CASES)
def test_a_constraint_is_compiled_as_ever(
    served: Served, kind: str, value: Any, lead: bytes
) -> None:
    assert_equal(served(kind, value, lead), constraint(kind, value, PIECES, [END], lead))


@pytest.mark.parametrize("strings", [["ab", "b"], ["\n", "é", "a" * 64, "\U0001f600"]])
def test_stop_strings_are_compiled_as_ever(served: Served, strings: list[str]) -> None:
    assert_equal(
        served.runner.run(served.compiler.stop_strings(strings)), stop_strings(strings, PIECES)
    )


def test_equal_requests_have_one_automaton_that_is_compiled_once(served: Served) -> None:
    async def together() -> list[Automaton]:
        asked = ("regex", "same+", b""), ("regex", "same+", b" "), ("choices", ["same+"], b"")
        return await asyncio.gather(*(served.compiler.constraint(*each) for each in asked * 3))

    served.asked.clear()
    first, spaced, choice, *more = served.runner.run(together())
    assert len(served.asked) == 3 and len({id(first), id(spaced), id(choice)}) == 3
    assert all(one is other for one, other in zip(more, [first, spaced, choice] * 2, strict=True))
    assert served("regex", "same+") is first and len(served.asked) == 3


def test_a_cancelled_request_does_not_disturb_who_waits_for_the_same(served: Served) -> None:
    async def both() -> Automaton:
        first = asyncio.create_task(served.compiler.constraint("regex", "cancelled"))
        second = asyncio.create_task(served.compiler.constraint("regex", "cancelled"))
        queued = asyncio.create_task(served.compiler.constraint("regex", "never wanted"))
        while not served.asked:
            await asyncio.sleep(0)
        first.cancel()
        queued.cancel()
        return await second

    served.asked.clear()
    assert_equal(served.runner.run(both()), constraint("regex", "cancelled", PIECES, [END]))
    assert served("regex", "after").where and len(served.asked) == 2


def test_a_bomb_is_refused_while_the_server_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within its limit of processor time; a request that waits is served after it, and the loop
    runs on meanwhile.
    """

    async def go() -> tuple[str, Automaton, int, float]:
        bomb = asyncio.create_task(served.compiler.constraint("json_schema", BOMB))
        await asyncio.sleep(0)
        small = asyncio.create_task(served.compiler.constraint("regex", "small"))
        ticks, began = 0, time.monotonic()
        while not bomb.done():
            await asyncio.sleep(0.01)
            ticks += 1
        taken = time.monotonic() - began
        with pytest.raises(InputRefused) as refused:
            await bomb
        return str(refused.value), await small, ticks, taken

    monkeypatch.setattr(compiling, "PROCESSOR_S", 1)
    served.start()
    spent = time.process_time()
    message, small, ticks, taken = served.runner.run(go())
    assert (
        message
        == "the JSON schema took more than 1 s of processor time to compile: make it simpler"
    )
    assert_equal(small, constraint("regex", "small", PIECES, [END]))
    assert taken > 0.9 and ticks > 20 and time.process_time() - spent < taken / 2
    served.asked.clear()
    with pytest.raises(InputRefused, match="more than 1 s"):
        served("json_schema", BOMB)
    assert not served.asked  # a refusal is kept, too


def test_stop_strings_wait_for_few_constraints_of_which_not_too_many_wait(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_WAITING", 5)
    served.start()
    served.asked.clear()

    async def storm() -> tuple[list[Any], list[Any]]:
        first = [
            asyncio.create_task(served.compiler.constraint("regex", f"{number}+"))
            for number in (0, 1, 2, 3)
        ]
        await asyncio.sleep(0)
        stopping = asyncio.create_task(served.compiler.stop_strings(["halt"]))
        more = [
            asyncio.create_task(served.compiler.constraint("regex", f"{number}+"))
            for number in (4, 5, 6, 1, 7)
        ]
        await stopping
        done = [each.done() for each in first]
        return done, await asyncio.gather(*first, *more, return_exceptions=True)

    done, found = served.runner.run(storm())
    assert (
        done == [True, True, False, False]
        and ["halt" in line for line in served.asked].index(True) == 2
    )
    busy = [isinstance(each, compiling.Busy) for each in found]
    # One that another waits for is no further one.
    assert busy == [*[False] * 4, False, False, True, False, True]
    assert not served.compiler._waiting


def test_a_bomb_of_memory_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own budget keeps it just below the limit in force, so this limit is lower."""
    monkeypatch.setattr(compiling, "MEMORY_BYTES", 1 << 22)
    with pytest.raises(
        InputRefused,
        match="^the regular expression took more than 4 MiB of memory to compile: make",
    ):
        served("regex", "a{9000}")
    monkeypatch.undo()
    assert len(served("regex", "a{8000}").next_SC) == 8002


def nested(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = {"type": "array", "maxItems": 1, "items": value}
    return value


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (
            "regex",
            "(a|b)*a(a|b){40}",
            "the regular expression '.*' needs more than|: its automaton needs more than",
        ),
        ("regex", "(", "a '\\(' that is not closed at position 0"),
        ("json_schema", "[" * 60_000, "cannot be read as JSON"),
        (
            "json_schema",
            {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            "is recursive",
        ),
        ("json_schema", nested(40, {"type": "null"}), "more than 32 deep"),
        (
            "json_schema",
            {"type": "string", "pattern": "^.{9000}$"},
            "needs more than 20,000 positions",
        ),
        ("json_schema", '{"const": "\\ud800"}', "the JSON schema"),
    ],
)
def test_refusals_of_the_compiler_are_passed_on(
    served: Served, kind: str, value: Any, words: str
) -> None:
    with pytest.raises(InputRefused, match=words):
        served(kind, value)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "a" * 65_537, "65,537 bytes; at most 65,536"),
        ("choices", ["a"] * 1025, "1,025 texts; from 1 to 1,024"),
        ("choices", ["é" * 20_000, "é" * 20_000], "80,000 bytes"),
        ("json_schema", {"const": "é" * 40_000}, "80,013 bytes"),
    ],
    ids=range(4),
)
def test_what_is_too_long_is_never_sent(kind: str, value: Any, words: str) -> None:
    async def go() -> None:
        await ConstraintCompiler(PIECES, [END]).constraint(kind, value)

    with pytest.raises(InputRefused, match=words):
        asyncio.run(go())


def schema(value: str) -> str:
    return f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {value}}}}}'


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (r'"regex": "\ud800"', "half of a surrogate pair"),
        ('"regex": 1', "regex = 1: expected a text"),
        ('"choice": []', "choice: expected a list of texts"),
        (r'"choice": ["a", "\udfff"]', "half of a surrogate pair"),
        ('"choice": "yes"', "choice: expected a list of texts"),
        ('"choice": ["yes", null]', "choice: expected a list of texts"),
        (schema(r'{"const": "\ud800"}'), "half of a surrogate pair"),
        (schema('{"const": 1e999}'), "a number is not finite"),
        (schema("[" * 70 + "]" * 70), "more than 64 deep"),
        ('"stop": ["a", "a", "a", "a", "a"]', "stop: expected up to 4 texts of 1 to 64 bytes"),
        ('"stop": ["a", ""]', "stop: expected up to 4 texts of 1 to 64 bytes"),
        ('"stop": ["a", "' + "é" * 33 + '"]', "stop: expected up to 4 texts of 1 to 64 bytes"),
        (r'"stop": ["\ud800"]', "half of a surrogate pair"),
    ],
    ids=range(13),
)
def test_what_no_compiler_expects_is_refused_in_the_request(field: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        read(
            CompletionRequest,
            parse_body(f'{{"model": "m", "prompt": "a", {field}}}'.encode()),
            rows=8,
        )


def answered(value: str) -> bytearray:
    return bytearray(b"".join(map(bytes, _result_chunks("regex", value, b"", PIECES, [END]))))


@pytest.mark.parametrize("limit", ["MAX_CACHED", "MAX_CACHED_BYTES"])
def test_the_last_used_automata_are_kept(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        compiler, asked = ConstraintCompiler(PIECES, [END]), []

        async def ask(line: bytes) -> ChildResult:
            asked.append(json.loads(line)[0][1])
            return ChildResult(0, answered(asked[-1]))

        compiler._run_in_process = ask  # type: ignore[method-assign]
        for value in "abaacab":
            await compiler.constraint("regex", value)
        assert asked == ["a", "b", "c", "b"]

    monkeypatch.setattr(compiling, limit, 2 if limit == "MAX_CACHED" else 2 * len(answered("a")))
    asyncio.run(go())


def test_a_child_that_lies_is_not_believed() -> None:
    """Its numbers would be indices on the device."""
    good = answered("ab")
    automaton = _read_automaton(good, len(PIECES))
    states, classes = automaton.next_SC.shape
    following, acting = 16, 16 + 2 * states * classes
    classing, stopping = 16 + 4 * states * classes, 16 + 4 * states * classes + 2 * len(PIECES)
    effects = stopping + states
    lies: Sequence[tuple[int, bytes]] = [
        (following, states.to_bytes(2, "little")), (following, (-2).to_bytes(2, "little", signed=True)),
        (classing, classes.to_bytes(2, "little")), (classing, b"\xff\xff"), (stopping, b"\x02"),
        (0, b"\xff\xff\xff\xff"), (4, b"\0\0\0\0"), (8, b"\xff\xff\xff\xff"), (0, b"\0\0\0\0"),
        (12, b"\xff\xff\xff\xff"), (8, b"\0\0\0\0"), (acting, b"\x01\0"), (acting, b"\xff\xff"),
        (effects, b"\x01"), (effects + 3 * 4 * COUNTERS, b"\x01"),  # the first changes nothing
    ]  # fmt: skip
    for at, lie in lies:
        with pytest.raises(ValueError):
            _read_automaton(good[:at] + lie + good[at + len(lie) :], len(PIECES))
    for wrong in (good[:-1], good + b"\0"):
        with pytest.raises(ValueError):
            _read_automaton(wrong, len(PIECES))
    with pytest.raises(ValueError):
        _read_automaton(good, len(PIECES) + 1)


def test_effects_that_would_leave_the_counters_are_not_believed() -> None:
    """They would carry into the number of the state."""
    (*head, text) = _result_chunks(
        "json_schema", {"type": "string", "maxLength": 9}, b"", PIECES, [END]
    )
    effects = head[-1]
    assert len(effects) > 2
    for part, value in (
        ("add", 1 << 15),
        ("add", -2),
        ("keep", 2),
        ("high", 1 << 15),
        ("low", -1),
    ):
        lie = effects.copy()
        lie[1, Effect._fields.index(part), 0] = value
        with pytest.raises(ValueError):
            _read_automaton(
                bytearray(b"".join(bytes(each) for each in (*head[:-1], lie, text))), len(PIECES)
            )


def test_an_answer_that_is_none_refuses_the_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        compiler = ConstraintCompiler(PIECES, [END])
        for code, written in ((0, b""), (0, b"x" * 100), (1, b""), (-11, b"")):

            async def ask(line: bytes, code: int = code, written: bytes = written) -> ChildResult:
                return ChildResult(code, bytearray(written))

            compiler._run_in_process = ask  # type: ignore[method-assign]
            with pytest.raises(
                InputRefused, match=rf"made its compiler fail \({code}\): make it simpler"
            ):
                await compiler.constraint("regex", f"{code}{len(written)}")

    asyncio.run(go())


def gone(process: int) -> bool:
    """Whether a process has ended; it may wait for a parent that never asks."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def await_end(process: int) -> None:
    end = time.monotonic() + HANG_S
    while not gone(process):
        assert time.monotonic() < end
        time.sleep(0.01)


async def child_of(process: int) -> int:
    """Its child, once all limits are set."""
    wanted = {
        "cpu time": "2",
        "core file size": "0",
        "file size": "0",
        "open files": "0",
        "processes": "0",
    }
    while not (children := Path(f"/proc/{process}/task/{process}/children").read_text().split()):
        await asyncio.sleep(0.01)
    limits: dict[str, str] = {}
    while not wanted.items() <= limits.items():
        await asyncio.sleep(0.01)
        limits = dict(
            re.findall(r"Max (.+?)  +(\S+)", Path(f"/proc/{children[0]}/limits").read_text())
        )
    return int(children[0])


def test_a_dead_process_is_replaced(served: Served) -> None:
    """Also in the middle of a job, which is done again; its child ends with it."""

    async def go() -> tuple[Automaton, int, int]:
        before = served.process
        os.kill(before, signal.SIGSTOP)
        job = asyncio.create_task(served.compiler.constraint("regex", "killed"))
        while not served.asked:
            await asyncio.sleep(0)
        os.kill(before, signal.SIGKILL)
        return await job, before, served.process

    served.start()
    served.asked.clear()
    automaton, before, after = served.runner.run(go())
    assert_equal(automaton, constraint("regex", "killed", PIECES, [END]))
    assert gone(before) and before != after


def test_ctrl_c_does_not_end_the_process(served: Served) -> None:
    """It goes to the whole group of processes, and the server still answers the requests that it
    has.
    """
    served.start()
    before = served.process
    os.kill(before, signal.SIGINT)
    served.start()
    assert served.process == before


def test_a_job_that_takes_too_long_by_the_clock_is_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.start()
    monkeypatch.setattr(compiling, "WALL_CLOCK_S", 0.3)
    monkeypatch.setattr(compiling, "PROCESSOR_S", 60)
    process = served.process
    with pytest.raises(
        InputRefused, match="^the JSON schema took more than 0.3 s to compile: make it simpler$"
    ):
        served("json_schema", BOMB | {"title": "another"})
    assert gone(process)


def test_a_child_may_use_nothing_but_its_pipe(served: Served) -> None:
    async def go() -> None:
        bomb = asyncio.create_task(
            served.compiler.constraint("json_schema", BOMB | {"title": "a third"})
        )
        child = await child_of(served.process)
        assert not any(
            os.readlink(link).startswith("socket") for link in Path(f"/proc/{child}/fd").iterdir()
        )
        os.kill(child, signal.SIGKILL)
        with pytest.raises(InputRefused, match=r"made its compiler fail \(-9\)"):
            await bomb

    served.start()
    served.runner.run(go())


@pytest.mark.skipif(not has_llguidance(), reason="llguidance is missing")
def test_a_grammar_that_kills_llguidance_kills_a_child_alone(served: Served) -> None:
    def tried(lark: str) -> str:
        return served.runner.run(served.compiler.try_on_host(lark))

    chain = "\n".join(f'r{number}: "x" r{number + 1}' for number in range(5000))
    assert "made its compiler fail (-11)" in tried(f'start: r0\n{chain}\nr5000: "x"\n')
    assert "Undefined" in tried("start: nothing\n") or "nothing" in tried("start: nothing\n")
    assert tried(lark_of("grammar", 'root ::= "(" root ")" | ""')) == ""


def test_the_process_ends_with_its_server(served: Served) -> None:
    served("regex", "after the clock")
    assert served.compiler._streams is not None
    served.compiler._streams[1].close()  # what the kernel does to a dead server's socket
    served.runner.run(asyncio.sleep(0))
    await_end(served.process)


def test_nothing_is_left_after_close(served: Served) -> None:
    async def go() -> tuple[int, int]:
        await served.compiler.constraint("regex", "after the server")
        bomb = asyncio.create_task(
            served.compiler.constraint("json_schema", BOMB | {"title": "the last"})
        )
        waiting = asyncio.create_task(served.compiler.constraint("regex", "waiting"))
        process = served.process
        child = await child_of(process)
        os.kill(child, signal.SIGSTOP)  # it does not end by itself
        served.compiler.close()
        for task in (bomb, waiting):
            with pytest.raises(RuntimeError, match="the compiler is closed"):
                await task
        return process, child

    for process in served.runner.run(go()):
        await_end(process)
    assert served.compiler._process is None
