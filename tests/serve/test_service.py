"""Run: pytest tests/serve/test_service.py"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from batches import tiny_llama
from clocks import HANG_S
from monograph.decode import completion
from monograph.decode.cache import KVCache
from monograph.errors import OutOfDeviceMemory
from monograph.serve import owner, service
from monograph.serve.versions import Version
from monograph.text.tokenizer import Tokenizer
from served import ROWS, Given, Served, small

MESSAGES = [{"role": "user", "content": "a"}]
ASKED = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/tokenize": {"prompt": "a"},
}


class Slow(Given):
    """A source that takes its time."""

    may_load = threading.Event()

    def load(self) -> Version:
        assert self.may_load.wait(HANG_S)
        return super().load()


def test_while_the_model_is_loaded_all_is_unavailable_but_the_page() -> None:
    tokenizer = Tokenizer.bytes()
    served = Served(small(tokenizer), tokenizer)
    served.source = source = Slow(served.model, tokenizer, ROWS)
    served._thread.start()
    while not (hasattr(served, "port") and served.server.started):
        time.sleep(0.01)
    answers = [served.post(path, body) for path, body in ASKED.items()]
    answers += [
        served.ask("GET", path)
        for path in ("/health", "/metrics", "/v1/models", "/v1/models/x", "/tokenizer_info")
    ]
    assert {answer.status for answer in answers} == {503}
    assert {answer.headers["retry-after"] for answer in answers} == {"2"}
    assert {served.ask("GET", path).status for path in ("/", "/openapi.json")} == {200}
    source.may_load.set()
    assert served._ready.wait(HANG_S) and served.ask("GET", "/health").status == 200
    served.__exit__(None, None, None)


def test_a_context_that_does_not_fit_the_memory_is_halved_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer.bytes()
    model = tiny_llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=1024)
    room = 2 * ROWS * KVCache.bytes_per_row(model.config, 256, torch.float32)
    monkeypatch.setattr(owner, "MIN_POSITIONS", 128)
    monkeypatch.setattr(owner, "describe", lambda: SimpleNamespace(free_memory_bytes=room))
    with Served(model, tokenizer) as served:
        assert served.ask("GET", "/v1/models/last").body["max_model_len"] == 256
        answer = served.post("/v1/completions", {"prompt": [5] * 256})
        assert answer.status == 400 and "context is 256" in answer.body["error"]["message"]
        assert served.service.rows == ROWS and served.texts([5] * 255, max_tokens=9, seed=1)


def test_where_fewer_rows_fit_the_memory_the_fingerprint_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another number of rows has other bits."""
    tokenizer, found = Tokenizer.bytes(), set[str]()
    model = small(tokenizer)
    row_bytes = KVCache.bytes_per_row(
        model.config, model.config.max_position_embeddings, torch.float32
    )
    for rows in (2, ROWS):
        memory = SimpleNamespace(free_memory_bytes=2 * rows * row_bytes)
        monkeypatch.setattr(completion, "describe", lambda memory=memory: memory)
        with Served(model, tokenizer) as served:
            assert served.service.rows == rows
            found.add(served.service.newest.fingerprint(0))
    assert len(found) == 2


def test_a_version_that_did_not_fit_is_tried_again_once_another_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "POLL_S", 0.01)
    tokenizer, tried = Tokenizer.bytes(), list[str]()

    def until(identity: str) -> None:
        end = time.monotonic() + HANG_S
        while served.service.newest.id != identity:
            assert time.monotonic() < end
            time.sleep(0.01)

    with Served(small(tokenizer), tokenizer) as served:
        first, add = served.service.newest, served.service.owner.add
        served.service._version_users[first] += 1  # as if a request wrote with it
        served.source.give(small(tokenizer, seed=1), tokenizer)
        until("given@1")

        async def adds(version: Version) -> None:
            tried.append(version.id)
            if len(tried) == 1:
                raise OutOfDeviceMemory("no room")
            await add(version)

        served.service.owner.add = adds
        served.source.give(small(tokenizer, seed=2), tokenizer)
        end = time.monotonic() + HANG_S
        while "still given@1: no room" not in served.said:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.05)
        assert tried == ["given@2"]
        served.loop.call_soon_threadsafe(served.service._drop, first)
        until("given@2")
    assert len(tried) == 2


def test_counts_are_those_of_what_happened() -> None:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        for _ in range(2):
            # Which would end the text.
            served.texts("abc" * 40, max_tokens=5, logit_bias={"1": -100})
        served.post("/v1/completions", {})
        counts = served.ask("GET", "/metrics").body
    lines = dict(line.rsplit(" ", 1) for line in counts.splitlines() if not line.startswith("#"))
    assert (
        lines['monograph_requests_total{status="200"}'] == "2"
        and lines['monograph_requests_total{status="400"}'] == "1"
    )
    assert lines["monograph_tokens_drawn_total"] == "10" and lines["monograph_rows"] == str(ROWS)
    assert lines["monograph_texts_waiting"] == lines["monograph_rows_running"] == "0"
    assert (
        lines['monograph_request_seconds_bucket{le="+Inf"}']
        == lines["monograph_first_token_seconds_count"]
        == "2"
    )


def test_the_block_of_a_request_that_comes_to_an_idle_server_counts() -> None:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        for requests in range(1, 4):
            served.texts("a", max_tokens=1)
            assert served.service.owner.counts.blocks == requests


def test_counts_never_fall_when_a_version_goes() -> None:
    """Prometheus takes a count that falls for one of a new process."""
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        for prompt in ("abc" * 40, "b", "abc" * 40):
            served.texts(prompt, max_tokens=5, logit_bias={"1": -100})
        before = served.service.owner.counts
        assert before.reused_tokens > 0
        served.source.give(small(tokenizer, seed=1), tokenizer)
        end = time.monotonic() + HANG_S
        while len(served.service.owner._decoders) != 1 or served.service.newest.id != "given@1":
            assert time.monotonic() < end
            time.sleep(0.01)
        served.texts("b", max_tokens=5, logit_bias={"1": -100})
        after = served.service.owner.counts
    assert (
        after.sampled_tokens == before.sampled_tokens + 5
        and after.reused_tokens == before.reused_tokens
    )
