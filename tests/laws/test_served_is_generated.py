"""Run: pytest tests/laws/test_served_is_generated.py (law 20; who may ask:
tests/serve/test_guard.py).

What the endpoint sends is what `generate` writes: for each prompt, options and seed, alone or in a
crowd.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from chats import speaking
from clocks import HANG_S
from daily import nightly, pairwise
from far_sighted import far_sighted, log_probabilities, seen_at
from monograph.automata import constraint
from monograph.decode import completion, generate
from monograph.decode.completion import prompt_ids
from monograph.decode.sampling import Sampling
from monograph.evaluation.choices import TextContinuation, score
from monograph.graph.precision import Precision
from monograph.laws.comparisons import LOG_PROBABILITY_BOUND, log_probabilities_agree
from monograph.ops.attention import BLOCK
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.tokenizer import Tokenizer
from served import ROWS, Served, small

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
}
CALM = {"temperature": 0.8, "max_tokens": 24}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    CALM,
    CALM | {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    CALM | {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.2},
    CALM | {"logit_bias": {"70": 5, "71": -100}, "min_tokens": 4, "stop": ["a", "FF"]},
    CALM | {"typical_p": 0.9, "dry_multiplier": 0.5, "mirostat_tau": 4.0},
    CALM | {"regex": "[a-f]{2,9}"},
    CALM | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    CALM | {"choice": ["yes", "no"]},
    CALM | {"logprobs": 3, "stop": "e"},
]  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        yield served


def prompts(seed: int) -> str:
    draw = random.Random(seed)
    shared = (
        "every third prompt begins with the same letters, of which there are more than a prompt's chunk has; "
        * 2
    )
    return (shared[:140] if seed % 3 == 0 else "") + "".join(
        draw.choice("abc de") for _ in range(draw.choice([1, 9, 70]))
    )


def written(
    served: Served, prompt: Any, options: dict[str, Any], n: int = 1, ends: Any = None
) -> list[str]:
    """What `generate` writes in as many rows as the server has."""
    rest, tokenizer = dict(options), served.tokenizer
    stop, most, limit = rest.pop("stop", []), rest.pop("max_tokens", 16), None
    ends = ends or [tokenizer.eos_id]
    form = rest.pop("response_format", None)
    given = {"regex": rest.pop("regex", None), "choices": rest.pop("choice", None)}
    given["json_schema"] = form and form["json_schema"]["schema"]
    for kind, value in given.items():
        limit = constraint(kind, value, tokenizer.pieces, ends) if value else limit
    if "logit_bias" in rest:
        rest["logit_bias"] = {
            int(k): -torch.inf if v == -100 else v for k, v in rest["logit_bias"].items()
        }
    stop = [stop] if isinstance(stop, str) else stop
    found = generate(
        served.model, tokenizer, [prompt] * ROWS, Sampling(**rest), max_tokens=most, stop=[*stop, *ends], n=n,
        constraint=limit,
    )  # fmt: skip
    assert found.generator.rows == ROWS
    return [each.text for each in found][:n]


@pytest.fixture(autouse=True)
def _four_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "MAX_ROWS", {"cpu": ROWS, "cuda": ROWS})


@pytest.mark.parametrize("options", nightly(KINDS, KINDS[:1]), ids=lambda kind: ",".join(kind))
def test_a_request_alone_is_generated(served: Served, options: dict[str, Any]) -> None:
    options = options | {"seed": 5}
    assert served.texts("abc ", **options) == written(served, "abc ", options)


@pytest.mark.parametrize("requests", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_a_request_in_a_crowd_is_generated(served: Served, requests: int) -> None:
    asked = [(prompts(seed), KINDS[seed % len(KINDS)] | {"seed": seed}) for seed in range(requests)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda each: served.texts(each[0], **each[1]), asked))
    assert found == [written(served, *each) for each in asked]
    assert served.service.owner.counts.reused_tokens > 0
    assert len({text for [text] in found}) > 0.6 * requests


# By day test_cached_over_blocks.py has crowds of such prompts, and a crowd is served below.
@pytest.mark.slow
def test_texts_of_one_to_five_blocks_in_a_crowd_are_those_of_generate_and_of_full_passes() -> None:
    """With a model that sees every token of them, and prompts that begin alike."""
    tokenizer, longest = Tokenizer.bytes(), 5 * BLOCK
    model = far_sighted(vocab_size=tokenizer.vocab_size, max_position_embeddings=longest)
    whole = [at % tokenizer.vocab_size for at in range(longest)]
    assert min(seen_at(model, whole, range(0, longest - 1, 71))) > 100 * LOG_PROBABILITY_BOUND
    draw = random.Random(0)
    shared = "".join(draw.choices("abcdefgh ", k=350))
    alike = [1, 100, 126, 127, 128, 250, 262, 350, 380, 505, 514, 610]
    asked = [
        shared[: length // 2] + "".join(draw.choices("abcdefgh ", k=length - length // 2))
        for length in alike
    ]
    options = {"temperature": 1.0, "logprobs": 2}
    samplings = [Sampling(**options, seed=seed) for seed in range(len(asked))]
    expected = list(generate(model, tokenizer, asked, samplings, max_tokens=20))
    for prompt, written in zip(asked, expected, strict=True):
        assert written.logprobs is not None and len(written.token_ids) > 1
        ids = [*prompt_ids(model, tokenizer, prompt), *written.token_ids]
        full_N = log_probabilities(model, ids[:-1])[-len(written.token_ids) :].gather(
            1, torch.tensor(written.token_ids)[:, None]
        )
        reported_N1 = torch.tensor([[each.drawn] for each in written.logprobs])
        assert log_probabilities_agree(reported_N1, full_N)

    def answer(number: int) -> Any:
        body = {"prompt": asked[number], "seed": number, "max_tokens": 20} | options
        return served.post("/v1/completions", body).body["choices"][0]

    with Served(model, tokenizer) as served, ThreadPoolExecutor(8) as pool:
        for choice, written in zip(pool.map(answer, range(len(asked))), expected, strict=True):
            assert choice["text"] == written.text and written.logprobs is not None
            kept = [each.drawn for each in written.logprobs][
                : len(choice["logprobs"]["token_logprobs"])
            ]
            assert (
                choice["logprobs"]["token_logprobs"] == kept
                and len(kept) >= len(written.token_ids) - 1
            )
        assert served.service.owner.counts.reused_tokens > BLOCK


def test_texts_of_a_request_are_those_of_generate_n(served: Served) -> None:
    """Several prompts with n texts each, in the order of the prompts."""
    options = CALM | {"seed": 11}
    expected = [text for prompt in ("ab", "cd e") for text in written(served, prompt, options, n=3)]
    assert served.texts(["ab", "cd e"], n=3, **options) == expected
    assert len(set(expected)) == 6


@pytest.mark.parametrize(("kind", "chat"), pairwise([0, 1, 4, 6, 9], [False, True]))
def test_pieces_of_a_stream_make_the_whole(served: Served, kind: int, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": "abc "}]} if chat else {"prompt": "abc "}
    body = asked | KINDS[kind] | {"seed": 3, "n": 2}
    body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    whole = served.post(path, body).body
    *chunks, last = served.events(path, body | {"stream_options": {"include_usage": True}})
    assert (
        last["choices"] == []
        and last["usage"] == whole["usage"]
        and not any(each["usage"] for each in chunks)
    )
    assert len({each["id"] for each in chunks}) == 1
    for choice in whole["choices"]:
        deltas = [c for each in chunks for c in each["choices"] if c["index"] == choice["index"]]
        assert [each["finish_reason"] for each in deltas][-1] == choice["finish_reason"]
        if chat:
            assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
            # Nor while all new characters are held back.
            assert not any("role" in each["delta"] for each in deltas[1:])
            assert (
                "".join(each["delta"].get("content", "") for each in deltas)
                == choice["message"]["content"]
            )
            entries = [entry for each in deltas for entry in each["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
            said = b"".join(bytes(entry["bytes"]) for entry in entries)
            # No token of a stop string.
            assert said.decode(errors="replace") == choice["message"]["content"]
        else:
            assert "".join(each["text"] for each in deltas) == choice["text"]
            for key, values in choice["logprobs"].items():
                assert sum((each["logprobs"][key] for each in deltas), []) == values
            for token, at in zip(
                choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True
            ):
                has_text = not token.startswith("bytes:") and token not in served.tokenizer.special
                assert not has_text or choice["text"][at:].startswith(
                    token[: len(choice["text"]) - at]
                )


def test_a_chat_is_generated_by_its_template(tmp_path: Path) -> None:
    tokenizer = speaking(tmp_path, "chatml")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why? <|im_end|>"},
    ]
    with Served(small(tokenizer), tokenizer) as served:
        ids = chat_ids(tokenizer, messages, add_generation_prompt=True)
        expected = written(served, ids, CALM | {"seed": 4}, ends=stop_ids(tokenizer))
        answer = served.post("/v1/chat/completions", {"messages": messages, "seed": 4, **CALM}).body
        assert [answer["choices"][0]["message"]["content"]] == expected
        assert answer["usage"]["prompt_tokens"] == len(ids)
        # In a crowd each has its own chat rendered, and nobody another's.
        asked = [[{"role": "user", "content": f"{number} " * number}] for number in range(20)]
        body = {"logprobs": True, "seed": 4, "max_tokens": 1}
        with ThreadPoolExecutor(20) as pool:
            answers = list(
                pool.map(
                    lambda each: served.post("/v1/chat/completions", body | {"messages": each}),
                    asked,
                )
            )
        tokens = [len(chat_ids(tokenizer, each, add_generation_prompt=True)) for each in asked]
    assert [answer.body["usage"]["prompt_tokens"] for answer in answers] == tokens


def test_an_echo_is_scored_as_evaluate_scores() -> None:
    """In fp64, where passes of other shapes differ by less than any mistake."""
    tokenizer, context, ids = Tokenizer.bytes(), [5, 6, 7], [70, 80, 90, 100]
    body = {
        "prompt": [context + ids],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
    }
    with Served(small(tokenizer).double(), tokenizer) as served:
        choice = served.post("/v1/completions", body).body["choices"][0]["logprobs"]
        alone = served.post("/v1/completions", body | {"max_tokens": 0}).body
        [text] = served.texts([context + ids], max_tokens=1, temperature=0)
        [expected] = score(
            served.model,
            [TextContinuation(context, ids), TextContinuation([9], [8])],
            Precision("fp32"),
        )[:1]
    assert (
        len(choice["tokens"]) == 8
        and choice["token_logprobs"][0] is choice["top_logprobs"][0] is None
    )
    found = choice["token_logprobs"][len(context) : -1]
    assert sum(found) == pytest.approx(expected.log_probability, rel=1e-12)
    greedy = [
        value == max(top.values())
        for value, top in zip(found, choice["top_logprobs"][3:-1], strict=True)
    ]
    assert all(greedy) == expected.greedy
    # What follows is scored by the decode step.
    assert choice["tokens"][-1].startswith("bytes:") or choice["tokens"][-1] == text
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == choice["token_logprobs"][:-1]
    assert alone["usage"] == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}


# ── a closed socket ───────────────────────────────────────────────────────────────────────────────


def sent(served: Served, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A socket on which a request was sent, and nothing was read."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=HANG_S)
    content = json.dumps({"model": "last", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + content)
    return connection


def until(condition: Any) -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


LONG = {"prompt": "abc", "max_tokens": 200, "temperature": 1.0, "seed": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_socket_frees_its_row_within_two_blocks(served: Served, stream: bool) -> None:
    until(served.idle)
    owner = served.service.owner
    generator = next(iter(owner._decoders.values())).generator
    blocks: list[int] = []
    cancel = generator.cancel
    pause, step = threading.Event(), generator.advance

    def slow() -> Any:
        pause.wait(0.01)
        return step()

    def noted(number: int) -> None:
        blocks.append(owner.counts.blocks)
        cancel(number)

    generator.cancel, generator.advance = noted, slow  # type: ignore[method-assign]
    try:
        connection = sent(served, LONG | {"stream": stream})
        until(lambda: generator.running == 1)
        closed = owner.counts.blocks
        connection.close()
        until(lambda: generator.running == 0)
    finally:
        generator.cancel, generator.advance = cancel, step  # type: ignore[method-assign]
    assert len(blocks) == 1 and blocks[0] - closed <= 2
    until(served.idle)


def test_the_queue_is_bounded_and_a_storm_leaves_nothing(served: Served) -> None:
    until(served.idle)
    answer, before = served.texts("abc", seed=9, **CALM), served.service.gate.cancelled
    generator = next(iter(served.service.owner._decoders.values())).generator
    step, released = generator.advance, threading.Event()

    def held() -> Any:
        assert released.wait(HANG_S)
        return step()

    generator.advance = held  # type: ignore[method-assign]  # or the queue might be empty before all have come
    try:
        storm = [sent(served, LONG | {"seed": seed, "stream": seed % 2 == 0}) for seed in range(60)]
        until(lambda: served.service.gate.refused == 60 - ROWS - served.service.gate.max_waiting)
        assert served.service.gate.waiting == served.service.gate.max_waiting
        refused = served.post("/v1/completions", LONG)
    finally:
        generator.advance = step  # type: ignore[method-assign]
        released.set()
    assert refused.status == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.body["error"]["code"] == "rate_limit_exceeded"
    for connection in storm:
        connection.close()
    until(served.idle)
    assert served.service.gate.cancelled > before
    assert served.texts("abc", seed=9, **CALM) == answer


def test_requests_end_on_the_weights_on_which_they_began() -> None:
    tokenizer = Tokenizer.bytes()
    old, new = small(tokenizer), small(tokenizer, seed=1)
    body = LONG | {"seed": 2, "max_tokens": 30}
    with Served(old, tokenizer) as served, ThreadPoolExecutor(1) as pool:
        expected = served.texts(**body)
        generator = next(iter(served.service.owner._decoders.values())).generator
        step = generator.advance
        gate = threading.Event()

        def held() -> Any:
            gate.wait(HANG_S if generator.running else 0)
            return step()

        generator.advance = held  # type: ignore[method-assign]
        running = pool.submit(served.texts, **body)
        until(lambda: generator.running == 1)
        served.source.give(new, tokenizer)
        gate.set()
        until(lambda: served.service.newest.id == "given@1")
        assert running.result(HANG_S) == expected
        served.model = new
        rest = {name: value for name, value in body.items() if name != "prompt"}
        assert served.texts(**body) == written(served, "abc", rest)
        assert served.post("/v1/completions", body | {"model": "given@0"}).status == 404
        until(lambda: len(served.service.owner._decoders) == 1)
