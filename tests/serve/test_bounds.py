"""Run: pytest tests/serve/test_bounds.py

What one request may take: no client keeps the event loop from the others, and none asks for more
than there is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monograph.serve import answers, body, compiling, gate, texts, versions
from monograph.text.tokenizer import Tokenizer
from served import ROWS, Served, small


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        yield served


DRY = {"dry_multiplier": 0.5, "dry_sequence_breakers": ["a", "b"]}


@pytest.mark.parametrize(
    ("where", "name", "path", "body"),
    [
        (body, "parse_json", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
        (body, "parse_json", "/tokenize", {"prompt": "a"}),
        (Tokenizer, "encode", "/tokenize", {"prompt": "a"}),
        (Tokenizer, "encode", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
        (Tokenizer, "decode", "/detokenize", {"tokens": [5]}),
        (answers, "token_text", "/v1/completions", {"prompt": "a", "max_tokens": 1, "logprobs": 1}),
        (
            answers,
            "token_text",
            "/v1/completions",
            {"prompt": "ab", "max_tokens": 0, "logprobs": 1, "echo": True},
        ),
        (versions, "breakers", "/v1/completions", {"prompt": "a", "max_tokens": 1} | DRY),
    ],
)
def test_what_may_take_long_is_done_beside_the_loop(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    path: str,
    body: dict[str, Any],
) -> None:
    threads = list[int]()
    plain = getattr(where, name)

    def noted(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return plain(*arguments, **options)

    monkeypatch.setattr(where, name, noted)
    assert served.post(path, body).status == 200
    assert threads and served._thread.ident not in threads


@pytest.mark.parametrize("breakers", [["a"] * 65, ["a" * 65], "a", ["a", 1], [""], {"a": "b"}])
def test_breakers_are_few_and_short(served: Served, breakers: Any) -> None:
    """Each is looked for in every token: tens of thousands took minutes."""
    answer = served.post("/v1/completions", {"prompt": "a", "dry_sequence_breakers": breakers})
    assert answer.status == 400 and answer.body["error"]["param"] == "dry_sequence_breakers"


def test_more_texts_than_ever_have_room_are_refused_for_good(served: Served) -> None:
    """A client would ask again after a 429, for ever."""
    most = served.service.gate.max_texts
    assert len(served.texts(["a"] * (most // ROWS), n=ROWS, max_tokens=1)) == most == 5 * ROWS
    answer = served.post(
        "/v1/completions", {"prompt": ["a"] * (most // ROWS + 1), "n": ROWS, "max_tokens": 1}
    )
    assert answer.status == 400 and answer.body["error"]["param"] == "prompt"
    assert (
        answer.body["error"]["message"]
        == "prompt: 4 for each of 6 are 24 texts; a request may ask for 20 in all"
    )
    assert (
        served.post(
            "/v1/completions", {"prompt": ["a"] * 1024, "max_tokens": 0, "echo": True}
        ).status
        == 200
    )


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"max_tokens": 0, "echo": True, "logprobs": 4}, 4 * 3 * 5), ({"max_tokens": 9, "logprobs": 0}, 4 * 9),
        ({"max_tokens": 9, "echo": True, "logprobs": 1}, 4 * 12 * 2), ({"max_tokens": 300, "logprobs": 0}, 4 * 253),
    ],
)  # fmt: skip
def test_log_probabilities_that_would_take_gigabytes_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], numbers: int
) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9, 10]], "n": 2} | options
    monkeypatch.setattr(texts, "MAX_REQUEST_LOGPROBS", numbers)
    assert served.post("/v1/completions", body).status == 200
    monkeypatch.setattr(texts, "MAX_REQUEST_LOGPROBS", numbers - 1)
    answer = served.post("/v1/completions", body)
    assert answer.status == 400 and answer.body["error"]["message"].startswith(
        f"logprobs: {numbers:,} of up to "
    )


def test_prompts_that_are_scored_take_so_much_memory_and_no_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1}
    monkeypatch.setattr(gate, "MAX_SCORED_LOGPROBS", 9)
    with served.service.gate.reserve_logprobs(4):
        answer = served.post("/v1/completions", body)
        assert answer.status == 429 and answer.headers["retry-after"] == "10"
        assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
    with served.service.gate.reserve_logprobs(3):
        assert served.post("/v1/completions", body).status == 200
    while served.service.gate._reserved_logprobs:  # it is given back after the answer
        time.sleep(0.01)


@pytest.mark.parametrize(
    "name", ["temperature_range", "temperature_exponent", "temperature", "top_p"]
)
def test_the_field_that_is_wrong_is_named(served: Served, name: str) -> None:
    answer = served.post("/v1/completions", {"prompt": "a", name: -1})
    assert answer.status == 400 and answer.body["error"]["param"] == name


def test_where_too_many_constraints_wait_one_more_is_to_come_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_WAITING", 0)
    answer = served.post("/v1/completions", {"prompt": "a", "regex": "[ab]+"})
    assert answer.status == 429 and answer.headers["retry-after"] == "10"
    assert served.post("/v1/completions", {"prompt": "a", "stop": "b"}).status == 200
