"""Run: pytest tests/serve/test_ends.py

How a server ends: by a signal at any time, or because the thread that owns the model has raised.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from clocks import HANG_S
from monograph.decode.generator import Generator
from monograph.serve import command, service
from monograph.serve.owner import Owner, OwnerEnded
from monograph.serve.versions import Version
from monograph.text.tokenizer import Tokenizer
from served import Given, Served, small

# 1 would end the text.
ENDLESS = {"prompt": "abc", "max_tokens": 250, "seed": 1, "logit_bias": {"1": -100}}


def until(condition: Any) -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def raising() -> Any:
    raise RuntimeError("of /secret/path")


def test_if_the_models_thread_raises_all_are_told_at_once() -> None:
    """Those that run, those that wait, and those whose prompt is scored."""
    tokenizer = Tokenizer.bytes()
    asked = [ENDLESS | {"stream": stream} for stream in (False, True)] * 4
    asked.append(ENDLESS | {"prompt": ["ab"] * 1000, "max_tokens": 0, "echo": True, "logprobs": 1})
    with Served(small(tokenizer), tokenizer) as served, ThreadPoolExecutor(len(asked)) as pool:
        generator = next(iter(served.service.owner._decoders.values())).generator
        step, goes_on = generator.advance, threading.Event()

        def held() -> Any:
            goes_on.wait(0.01)
            return raising() if goes_on.is_set() else step()

        generator.advance = held  # type: ignore[method-assign]
        answers = [pool.submit(served.post, "/v1/completions", body) for body in asked]
        until(
            lambda: (
                generator.running == 4
                and served.service.gate.waiting == 4
                and served.service._version_users.total() == 9
            )
        )
        began = time.monotonic()
        goes_on.set()
        for answer in answers:
            found = answer.result(HANG_S)
            last = (
                found.body["error"]
                if found.status == 500
                else json.loads(found.body.split("data: ")[-1])["error"]
            )
            assert last["message"] == "the model's thread has ended: the server is going down"
        assert time.monotonic() - began < 10
        assert str(served.service.crash_error) == "of /secret/path" and served.server.should_exit


def test_who_is_refused_by_an_owner_that_has_raised_finds_why() -> None:
    """What it raised is known to the loop before the loop sees that it has ended."""

    async def crash() -> None:
        why = list[Exception]()
        owner = Owner(1, why.append)
        owner._call_in_thread(raising)
        owner._thread.join()  # the loop has not heard of it
        owner._call_in_thread(lambda: None)
        assert not why
        await asyncio.sleep(0)
        assert why
        with pytest.raises(OwnerEnded):
            owner._call_in_thread(lambda: None)

    asyncio.run(crash())


class Slow(Given):
    """A source whose model takes a while to load."""

    def load(self) -> Version:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        return super().load()


def test_a_signal_while_the_model_is_loaded_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.bytes()
    with command._listening_socket("127.0.0.1", 0) as listening:
        code = asyncio.run(
            command._serve(
                service.Service(Slow(small(tokenizer), tokenizer, 4), print, print),
                "127.0.0.1",
                [],
                listening,
            )
        )
    assert code is None
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "serve     ended; 0 requests answered, 0 tokens written"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_steps_are_captured_leaves_no_thread_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """A thread that is inside of CUDA when Python ends makes it abort, with 134; a capture is not
    begun any more.
    """
    begun, tokenizer = list[None](), Tokenizer.bytes()

    def warm_up(self: Generator, go_on: Callable[[], None] = lambda: None) -> None:
        os.kill(os.getpid(), number)
        for _ in range(1000):
            go_on()
            begun.append(None)
            time.sleep(0.01)

    monkeypatch.setattr(Generator, "warm_up", warm_up)
    with command._listening_socket("127.0.0.1", 0) as listening:
        asyncio.run(
            command._serve(
                service.Service(Given(small(tokenizer), tokenizer, 4), print, print),
                "127.0.0.1",
                [],
                listening,
            )
        )
    assert (
        not [thread for thread in threading.enumerate() if thread.name == "owner"]
        and len(begun) < 1000
    )
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "serve     ended; 0 requests answered, 0 tokens written"
    )


def test_a_text_that_is_not_done_when_the_server_ends_has_an_error_as_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "DRAIN_S", 0.3)
    tokenizer = Tokenizer.bytes()
    said = {"seed": 1, "logit_bias": {"1": -100}, "stream": True}
    message = [{"role": "user", "content": "abc"}]
    with Served(small(tokenizer), tokenizer) as served, ThreadPoolExecutor(4) as pool:
        generator = next(iter(served.service.owner._decoders.values())).generator
        step = generator.advance

        def slow() -> Any:
            time.sleep(0.05)
            return step()

        generator.advance = slow  # type: ignore[method-assign]
        answers = [
            pool.submit(served.post, "/v1/completions", ENDLESS | {"stream": each})
            for each in (True, False)
        ]
        answers.append(pool.submit(served.post, "/v1/responses", said | {"input": message}))
        in_blocks = said | {"messages": message, "max_tokens": 250}
        answers.append(pool.submit(served.post, "/v1/messages", in_blocks))
        until(lambda: generator.running == 4)
        served.loop.call_soon_threadsafe(setattr, served.server, "should_exit", True)
        stream, whole, *others = (answer.result(HANG_S) for answer in answers)
        assert whole.status == 503 and whole.body["error"]["message"] == "the server is going down"
        assert (
            json.loads(stream.body.split("data: ")[-1])["error"]["message"]
            == "the server is going down"
        )
        for other in others:
            kind, last = other.body.rstrip().split("\n")[-2:]
            error = json.loads(last.removeprefix("data: "))
            assert kind == "event: error" and error["type"] == "error"
            assert error["error"]["message"] == "the server is going down"


def test_a_version_that_cannot_be_loaded_ends_nothing_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "POLL_S", 0.01)
    tokenizer, looks = Tokenizer.bytes(), list[None]()
    with Served(small(tokenizer), tokenizer) as served:
        has_newer = served.source.has_newer

        def failing() -> bool:
            looks.append(None)
            raise OSError(5, "Input/output error")

        served.source.has_newer = failing  # type: ignore[method-assign]
        until(lambda: len(looks) > 5)
        assert served.said == ["still given@0: [Errno 5] Input/output error"]
        served.source.give(small(tokenizer, seed=1), tokenizer)
        served.source.has_newer = has_newer  # type: ignore[method-assign]
        until(lambda: served.service.newest.id == "given@1")
        assert served.texts("a", max_tokens=1)
        served.source.has_newer = raising  # type: ignore[method-assign]
        until(lambda: served.bugs)
        assert [str(bug) for bug in served.bugs] == ["of /secret/path"]
        assert served.texts("a", max_tokens=1)
        served.bugs.clear()
