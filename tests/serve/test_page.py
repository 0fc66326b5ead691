"""Run: pytest tests/serve/test_page.py

The page of `monograph serve` in a real headless Chromium (that of Qt's WebEngine; skipped, with the
reason, where that cannot be loaded), used as a person would. A stand-in answers with a text that is
known.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from daily import nightly
from monograph.text.tokenizer import Tokenizer
from served import Served, small
from visitor import Visitor

pytest.importorskip(
    "PyQt6.QtWebEngineCore", reason="Qt's WebEngine is not here", exc_type=ImportError
)

PAGE = resources.files("monograph.serve").joinpath("page.html")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
HOSTILE = "<img src=x onerror=alert(1)>"
# Each token: its text, its probability, and others with theirs. The emoji's bytes come as two
# tokens.
TOKENS: list[tuple[bytes, float, dict[str, float]]] = [
    (b"The", 0.62, {"A": 0.2, "It": 0.08, "<b>": 0.03, "\n": 0.01}),
    (b" fox", 0.04, {" cat": 0.41, " dog": 0.2, " man": 0.1, " sun": 0.05}),
    (b" said", 0.97, {" was": 0.01, " ran": 0.005, ",": 0.002, " is": 0.001}),
    (b" \xf0\x9f", 0.3, {" no": 0.2, " yes": 0.2, ":": 0.1, " that": 0.05}),
    (b"\xa6\x8a", 0.99, {"\x00": 0.001, "x": 0.001, "y": 0.001, "z": 0.0001}),
    (f" {HOSTILE}".encode(), 0.12, {" so": 0.3, " then": 0.2, " but": 0.1, " and": 0.02}),
    (b".\n", 0.8, {"!": 0.1, ".": 0.05, "?": 0.01, ";": 0.001}),
]
TEXT = b"".join(token for token, _, _ in TOKENS).decode()
SHOWN = TEXT.rstrip()  # in a paragraph
SEED = 2**63 - 26  # beyond what a number of JavaScript holds


class StandIn(ThreadingHTTPServer):
    """Answers as `monograph serve` does; a prompt that has "slow" goes on without end."""

    daemon_threads = True

    def __init__(self, chat: bool = True, key: str | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Answers)
        self.chat, self.key = chat, key
        self.asked: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no error."""


class Answers(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        """A test's output is not for access logs."""

    def whole(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def object(self, status: int, content: dict[str, Any]) -> None:
        self.whole(status, "application/json", json.dumps(content).encode())

    def refused(self, status: int, message: str) -> None:
        self.object(
            status,
            {
                "error": {
                    "message": message,
                    "type": "invalid_request_error",
                    "param": None,
                    "code": None,
                }
            },
        )

    def locked(self) -> bool:
        key = self.server.key
        locked = key is not None and self.headers["Authorization"] != f"Bearer {key}"
        if locked:
            self.refused(401, "the API key is missing or wrong")
        return locked

    def do_GET(self) -> None:
        if self.path == "/":
            self.whole(200, "text/html; charset=utf-8", PAGE.read_bytes())
        elif self.path == "/v1/models" and not self.locked():
            entry = {
                "object": "model",
                "created": 0,
                "owned_by": "monograph",
                "max_model_len": 2048,
            }
            names = ("fox-tales", "fox-tales@4000", "last")
            self.object(
                200,
                {
                    "object": "list",
                    "data": [entry | {"id": name, "chat": self.server.chat} for name in names],
                },
            )
        elif self.path != "/v1/models":
            self.refused(404, f"no such path: {self.path}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.locked():
            return
        self.server.asked.append(asked)
        prompt = asked["messages"][-1]["content"] if "messages" in asked else asked["prompt"]
        if "refuse" in prompt:
            return self.refused(400, f"temperature = 9: expected 0 to 2 {HOSTILE}")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        make = chat_choices if "messages" in asked else text_choices
        _, said, words = prompt.partition("say:")
        choices = whole_choices(words) if said else make(asked.get("logprobs") not in (None, False))
        if prompt.startswith("call:"):
            choices = called_choices()
        more = {"seed": asked.get("seed", SEED), "model": asked["model"], "usage": None}
        try:
            for choice in choices:
                self.event({"choices": [choice]} | more)
                time.sleep(0.01)
            while "slow" in prompt:
                self.event({"choices": [choices[-2]]} | more)
                time.sleep(0.01)
            if "cut" in prompt:
                return
            if "broken" in prompt:
                return self.event({"error": {"message": "the model is gone"}})
            self.event(
                {"choices": []}
                | more
                | {"usage": {"prompt_tokens": 3, "completion_tokens": len(TOKENS)}}
            )
            self.wfile.write(b": ping\n\ndata: [DONE]\n\n")
        except OSError:
            self.server.hung_up.set()

    def event(self, content: dict[str, Any]) -> None:
        # Half an event at a time: what is sent together need not arrive together.
        data = f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.wfile.write(part)
            self.wfile.flush()


def pieces() -> Iterator[tuple[str, bytes, float, dict[str, float]]]:
    """Each token with the text that can be shown once it is there, whole characters only."""
    shown = ""
    for place, (token, p, top) in enumerate(TOKENS):
        now = b"".join(each for each, _, _ in TOKENS[: place + 1]).decode(errors="ignore")
        yield now[len(shown) :], token, p, top
        shown = now


def chat_choices(reported: bool) -> list[dict[str, Any]]:
    def entry(token: bytes, p: float) -> dict[str, Any]:
        return {
            "token": token.decode(errors="replace"),
            "bytes": list(token),
            "logprob": math.log(p),
        }

    begin: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    choices = [begin]
    for piece, token, p, top in pieces():
        others = [entry(each.encode(), q) for each, q in top.items()]
        content = [entry(token, p) | {"top_logprobs": [entry(token, p), *others]}]
        logprobs = {"content": content} if reported else None
        choices.append({"delta": {"content": piece}, "logprobs": logprobs, "finish_reason": None})
    return [{"index": 0} | each for each in (*choices, {"delta": {}, "finish_reason": "stop"})]


def whole_choices(words: str) -> list[dict[str, Any]]:
    """A chat's answer that has exactly these words, in pieces of seven letters."""
    parts = [
        {"delta": {"content": words[at : at + 7]}, "finish_reason": None}
        for at in range(0, len(words), 7)
    ]
    if len(words) > 5000:
        parts = [{"delta": {"content": words}, "finish_reason": None}]
    return [
        {"index": 0, "logprobs": None} | each
        for each in (*parts, {"delta": {}, "finish_reason": "stop"})
    ]


# The calls of an answer: their names and the pieces of their arguments.
CALLED = [("add", ['{"a": ', f'"{HOSTILE}"', "}"]), ("stop", ["{}"])]


def called_choices() -> list[dict[str, Any]]:
    """An answer that calls two tools after a text, in pieces."""
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "I must "},
        {"reasoning_content": f"{HOSTILE}."},
        {"content": "I call."},
    ]
    for index, (name, pieces_of_arguments) in enumerate(CALLED):
        function = {"name": name, "arguments": ""}
        begin = {"index": index, "id": f"id{index}", "type": "function", "function": function}
        deltas.append({"tool_calls": [begin]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in pieces_of_arguments
        ]
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    return [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas] + [last]


def text_choices(reported: bool) -> list[dict[str, Any]]:
    choices, offset = list[dict[str, Any]](), 0
    for piece, token, p, top in pieces():
        name = token.decode(errors="replace")
        logs = {each: math.log(q) for each, q in ({name: p} | top).items()}
        logprobs = {
            "tokens": [name],
            "token_logprobs": [math.log(p)],
            "top_logprobs": [logs],
            "text_offset": [offset],
        }
        choices.append(
            {"text": piece, "logprobs": logprobs if reported else None, "finish_reason": None}
        )
        offset += len(piece)
    return [
        {"index": 0} | each
        for each in (*choices, {"text": "", "logprobs": None, "finish_reason": "length"})
    ]


# ---- who is there --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()


@pytest.fixture(scope="module")
def base_url(stand_in: StandIn) -> str:
    return stand_in.url


@pytest.fixture(scope="module")
def light() -> Iterator[Visitor]:
    visitor = Visitor("light")
    yield visitor
    visitor.close()


@pytest.fixture
def person(light: Visitor, base_url: str) -> Visitor:
    """Somebody who has just opened the page and sees the model's name."""
    light.visit(base_url)
    light.wait("document.querySelector('#model').textContent === 'fox-tales@4000'")
    return light


IDLE = "document.querySelector('.go').textContent !== 'Stop'"
ANSWERS = "[...document.querySelectorAll('.assistant .words')].map((node) => node.textContent)"
FACTS = "[...document.querySelectorAll('.assistant .facts')].at(-1)?.textContent"
FACED = "(document.activeElement.id || document.activeElement.textContent)"
ALTERNATIVES = (
    "[...document.querySelectorAll('#alternatives div')]"
    ".map((row) => [...row.querySelectorAll('b, span')].map((each) => each.textContent))"
)


def answered(person: Visitor, message: str) -> str:
    person.type(message)
    person.press("Return")
    person.wait(f"{FACTS} && {IDLE}")
    return str(person.read(ANSWERS)[-1])


def test_it_talks_to_the_real_server_with_its_probabilities_and_its_seed(light: Visitor) -> None:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        light.visit(f"{served.url}/")
        light.wait("document.querySelector('#model').textContent === 'given@0'")
        light.click("document.querySelector('#probabilities')")
        light.click("document.querySelector('#seed')")
        light.type("7")
        light.click("document.querySelector('#story')")
        light.type("abc ")
        light.press("Ctrl+Return")
        light.wait(f"document.querySelector('#story-facts').textContent && {IDLE}")
        assert "seed 7" in light.read("document.querySelector('#story-facts').textContent")
        [text] = served.texts("abc ", seed=7, max_tokens=256)
        shown = f"abc {text}".replace("\r\n", "\n").replace("\r", "\n")
        assert light.read("document.querySelector('#story').value") == shown
        assert light.read("document.querySelectorAll('#mirror .token').length") > 20
        assert light.said() == []


# ---- the file ------------------------------------------------------------------------------------


def test_the_page_carries_its_own_policy_and_never_makes_html_of_a_text() -> None:
    source = PAGE.read_text()
    assert f'http-equiv="Content-Security-Policy"\n  content="{POLICY}"' in source
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "DOMParser",
        "eval(",
        "Function(",
    ):
        assert way not in source


# ---- chat ----------------------------------------------------------------------------------------


def test_a_message_is_answered_by_keyboard_alone_and_the_models_text_is_never_html(
    person: Visitor, stand_in: StandIn, base_url: str
) -> None:
    assert person.read("[document.title, document.querySelector('#standing').textContent]") == [
        "fox-tales@4000", "Chat template · 2,048 tokens of context"]  # fmt: skip
    assert person.read(FACED) == "message"
    assert answered(person, "hello") == SHOWN
    assert answered(person, HOSTILE) == SHOWN
    asked = stand_in.asked[-1]
    assert (
        asked["model"] == "fox-tales@4000"
        and asked["max_tokens"] == 256
        and asked["stream"] is True
    )
    assert [each["role"] for each in asked["messages"]] == ["user", "assistant", "user"]
    assert asked["messages"][1]["content"] == TEXT
    assert (
        not {"seed", "temperature", "top_p", "logprobs", "stop", "response_format"} & asked.keys()
    )
    facts = person.read(FACTS)
    assert facts.startswith(f"seed {SEED} keep7 tokens") and "first after" in facts
    assert person.read("document.querySelectorAll('img, b, .words :not(p)').length") == 0
    assert person.said() == []
    asked_for = person.asked()
    assert asked_for[0] == base_url and {url.removeprefix(base_url) for url in asked_for} == {
        "", "v1/models", "v1/chat/completions"}  # fmt: skip


def test_a_seed_is_kept_exactly_and_an_answer_is_tried_again_with_another(
    person: Visitor, stand_in: StandIn
) -> None:
    answered(person, "hello")
    person.click(
        "[...document.querySelectorAll('.facts button')].find((each) => each.textContent === 'keep')"
    )
    assert person.read("document.querySelector('#seed').value") == str(SEED)
    person.click("document.querySelector('#message')")
    answered(person, "more")
    assert stand_in.asked[-1]["seed"] == SEED and len(stand_in.asked[-1]["messages"]) == 3
    person.click(
        "[...document.querySelectorAll('.facts button')].find((each) => each.textContent === 'try again')"
    )
    person.wait(f"{FACTS} && {IDLE}")
    assert "seed" not in stand_in.asked[-1] and len(stand_in.asked[-1]["messages"]) == 3
    assert person.read(ANSWERS) == [SHOWN, SHOWN]


def test_a_message_is_edited_and_the_conversation_goes_on_from_there(
    person: Visitor, stand_in: StandIn
) -> None:
    answered(person, "one")
    answered(person, "two")
    person.click("[...document.querySelectorAll('.user .facts button')][0]")
    assert person.read(FACED) == "message" and person.read(ANSWERS) == []
    answered(person, " and a half")
    assert [each["content"] for each in stand_in.asked[-1]["messages"]] == ["one and a half"]


@pytest.mark.parametrize("mode", nightly(["chat", "text"], {"chat"}))
def test_stop_hangs_up_and_keeps_what_is_written(
    person: Visitor, stand_in: StandIn, mode: str
) -> None:
    stand_in.hung_up.clear()
    if mode == "text":
        person.click("document.querySelectorAll('.modes label')[1]")
    person.type("slow")
    person.press("Ctrl+Return")
    shown = ".assistant .words" if mode == "chat" else "#mirror"
    person.wait(f"document.querySelector('{shown}').textContent.length > 60 && !({IDLE})")
    person.press("Escape")
    person.wait(IDLE)
    assert stand_in.hung_up.wait(20)
    written = person.read(f"document.querySelector('{shown}').textContent")
    assert written.removeprefix("slow").startswith(TEXT)
    facts = person.read(
        "document.querySelector('#story-facts').textContent" if mode == "text" else FACTS
    )
    assert "stopped" in facts and str(SEED) in facts and person.said() == []


def test_options_are_sent_as_they_are_written(person: Visitor, stand_in: StandIn) -> None:
    values = {"seed": "9007199254740993", "temperature": "0.7", "top_p": "0.9", "top_k": "40", "min_p": "0.05",
              "max_tokens": "9", "stop": "\\n\\n\nEnd"}  # fmt: skip
    for name, value in values.items():
        person.read(f"document.querySelector('#{name}').value = {json.dumps(value)}")
    answered(person, "hello")
    expected = {"seed": 9007199254740993, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
                "max_tokens": 9, "stop": ["\n\n", "End"]}  # fmt: skip
    assert {key: stand_in.asked[-1].get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("form", "typed", "field", "sent"),
    [
        ("regex", "[a-z]+", "regex", "[a-z]+"),
        ("choice", "yes\nno", "choice", ["yes", "no"]),
        ("schema", '{"type": "object"}', "response_format", {"type": "json_schema", "json_schema": {
            "name": "answer", "strict": True, "schema": {"type": "object"}}}),
    ],
)  # fmt: skip
def test_an_answer_can_have_a_form(
    person: Visitor, stand_in: StandIn, form: str, typed: str, field: str, sent: Any
) -> None:
    kind = "document.querySelector('#constraint-kind')"
    person.read(f"({kind}.value = '{form}', {kind}.onchange({{target: {kind}}}))")
    person.read(f"document.querySelector('#constraint').value = {json.dumps(typed)}")
    answered(person, "hello")
    assert stand_in.asked[-1][field] == sent


def test_calls_are_shown_and_what_they_return_goes_back(person: Visitor, stand_in: StandIn) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    person.read(f"document.querySelector('#tools').value = {json.dumps(json.dumps(tools))}")
    assert answered(person, "call: now") == "I call."
    assert stand_in.asked[-1]["tools"] == tools
    thoughts = "[...document.querySelectorAll('.thoughts')].map((node) => node.textContent)"
    assert [each for each in person.read(thoughts) if each] == [f"I must {HOSTILE}."]
    shown = "[...document.querySelectorAll('.calls .code')].map((node) => node.textContent)"
    calls = [(name, "".join(pieces_of_arguments)) for name, pieces_of_arguments in CALLED]
    assert person.read(shown) == [f"{name}copy{arguments}" for name, arguments in calls]
    person.read("document.querySelector('.results input').value = '3 <b>'")
    person.click("document.querySelector('.results button')")
    person.wait(f"{ANSWERS}.length === 2 && {IDLE} && !document.querySelector('.results')")
    assert person.read(ANSWERS)[-1] == SHOWN and person.read(shown)[2:] == [
        "resultcopy3 <b>",
        "resultcopy",
    ]
    assert stand_in.asked[-1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": f"I must {HOSTILE}.",
            "tool_calls": [
                {
                    "id": f"id{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(calls)
            ],
        },
        {"role": "tool", "content": "3 <b>", "tool_call_id": "id0"},
        {"role": "tool", "content": "", "tool_call_id": "id1"},
    ]
    person.read("document.querySelector('#tools').value = '[{'")
    person.click("document.querySelector('#message')")
    person.type("hello")
    person.press("Return")
    person.wait("document.querySelector('#error').textContent.startsWith('The tools are not JSON')")
    assert person.read("document.querySelector('#message').value") == "hello"
    assert person.said() == []


# ---- probabilities -------------------------------------------------------------------------------


def test_probabilities_of_a_chat_are_told_for_the_token_under_the_mouse_or_the_focus(
    person: Visitor, stand_in: StandIn
) -> None:
    person.click("document.querySelector('#probabilities')")
    person.click("document.querySelector('#message')")
    assert answered(person, "hello") == TEXT
    assert stand_in.asked[-1]["logprobs"] is True and stand_in.asked[-1]["top_logprobs"] == 5
    spans = person.read(
        "[...document.querySelectorAll('.words .token')].map((span) => span.textContent)"
    )
    assert spans == ["The", " fox", " said", " ", "🦊", f" {HOSTILE}", ".\n"]
    person.hover("document.querySelectorAll('.words .token')[1]")
    assert person.read(ALTERNATIVES) == [
        ["␣cat", "41 %"], ["␣dog", "20 %"], ["␣man", "10 %"], ["␣sun", "5.0 %"], ["␣fox", "4.0 %"]]  # fmt: skip
    tints = person.read(
        "[...document.querySelectorAll('.token')].map((each) => getComputedStyle(each).backgroundColor)"
    )
    assert len(set(tints)) == len(tints)
    person.press("Escape")
    for _ in range(60):
        person.press("Tab")
        if person.read(FACED) == "The":
            break
    assert person.read(FACED) == "The"
    assert person.read(ALTERNATIVES)[0] == ["The", "62 %"] and ["<b>", "3.0 %"] in person.read(
        ALTERNATIVES
    )
    person.press("Right")
    assert person.read(FACED) == " fox" and person.read(
        "!document.querySelector('#alternatives').hidden"
    )
    assert person.said() == []


def test_probabilities_of_a_text_follow_the_mouse_and_the_caret_until_the_text_before_them_changes(
    person: Visitor, stand_in: StandIn
) -> None:
    person.click("document.querySelector('#probabilities')")
    person.click("document.querySelectorAll('.modes label')[1]")
    person.click("document.querySelector('#story')")
    person.type("Once: ")
    person.press("Ctrl+Return")
    person.wait(f"document.querySelector('#story-facts').textContent && {IDLE}")
    assert person.read("document.querySelector('#story').value") == f"Once: {TEXT}"
    assert stand_in.asked[-1]["prompt"] == "Once: " and stand_in.asked[-1]["logprobs"] == 5
    assert "max tokens reached" in person.read("document.querySelector('#story-facts').textContent")
    spans = person.read(
        "[...document.querySelectorAll('#mirror .token')].map((span) => span.textContent)"
    )
    assert spans == ["The", " fox", " said", " ", "🦊", f" {HOSTILE}", ".\n"]
    person.hover("document.querySelectorAll('#mirror .token')[1]")
    assert person.read(ALTERNATIVES)[0] == ["␣cat", "41 %"]
    person.press("Home")
    person.press("Ctrl+Home")
    for _ in range(6):
        person.press("Right")
    assert person.read(ALTERNATIVES)[0] == ["The", "62 %"]
    person.press("Ctrl+End")
    assert person.read("document.querySelector('#alternatives').hidden")
    for _ in range(3):
        person.press("Backspace")
    assert (
        len(person.read("[...document.querySelectorAll('#mirror .token')].map((span) => 0)")) == 5
    )
    person.press("Ctrl+Home")
    person.type("x")
    assert person.read("document.querySelectorAll('#mirror .token').length") == 0
    assert person.said() == []


def test_a_text_is_undone_and_continued_again(person: Visitor, stand_in: StandIn) -> None:
    person.click("document.querySelectorAll('.modes label')[1]")
    person.type("A")
    for _ in range(2):
        person.press("Ctrl+Return")
        person.wait(f"document.querySelector('#story-facts').textContent && {IDLE}")
    assert stand_in.asked[-1]["prompt"] == f"A{TEXT}"
    person.click("document.querySelector('#again')")
    person.wait(IDLE)
    assert stand_in.asked[-1]["prompt"] == f"A{TEXT}"
    assert person.read("document.querySelector('#story').value") == f"A{TEXT}{TEXT}"
    person.click("document.querySelector('#undo')")
    person.click("document.querySelector('#undo')")
    assert person.read(
        "[document.querySelector('#story').value, document.querySelector('#undo').disabled]"
    ) == [
        "A",
        True,
    ]


# ---- speed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "tokens", "expected"),
    [
        ([(0, 4)], 7, None),  # in one piece
        ([(0, 4), (1, 4), (2, 4)], 24, None),  # in one burst
        ([(0, 4), (200, 4)], 24, None),  # too short a time to say
        ([(0, 400), (1, 400), (1000, 400), (1001, 400)], 32, 16 / 1.0),  # two blocks
        ([(100 * place, 5) for place in range(11)], 11, 10.0),  # a token each 100 ms
        ([(10 * place, 5) for place in range(101)], 101, 100.0),
        ([], 0, None),
    ],
)
def test_a_speed_is_that_of_the_clock_between_tokens_or_is_not_said(
    person: Visitor, pieces: list[tuple[int, int]], tokens: int, expected: float | None
) -> None:
    came = json.dumps([{"at": 5000 + at, "length": length} for at, length in pieces])
    assert person.read(f"speed({came}, {tokens}) ?? null") == (
        expected and pytest.approx(expected, rel=2e-2)
    )


def test_an_answer_that_comes_at_once_has_no_speed(person: Visitor) -> None:
    """Its tokens were written before the first of them came, so that the time between them says
    nothing.
    """
    tells(person, "word " * 1500)
    assert "tokens/s" not in person.read(FACTS) and "first after" in person.read(FACTS)


# ---- markdown ------------------------------------------------------------------------------------

MARKDOWN = """# Title
A *slanted* and **bold** word, `a*b*c`, snake_case_name and 2 * 3.
Second line with a [link](https://example.org/a?b=1) and \\*stars\\*.

- one
- two
  - inner
- three

3. third
4. fourth

> said **once**

| a | b |
|---|--:|
| 1 | <i>2</i> |

---

```python
def f(x):
    return x < 1 and "**no**"
```
"""


def tells(person: Visitor, words: str) -> None:
    """Sends a message that is answered with these words."""
    person.read(f"(document.querySelector('#message').value = {json.dumps('say:' + words)})")
    person.click("document.querySelector('#message')")
    person.press("Return")
    person.wait(f"{FACTS} && {IDLE}")


def test_markdown_is_shown_as_what_it_means_and_can_be_switched_off(person: Visitor) -> None:
    tells(person, MARKDOWN)
    seen = {
        "h3": ["Title"], "em": ["slanted"], "strong": ["bold", "once"], "blockquote": ["said once"],
        "p code": ["a*b*c"], "li": ["one", "twoinner", "inner", "three", "third", "fourth"], "th": ["a", "b"],
        "td": ["1", "<i>2</i>"], "a": ["link"],
        "pre": ['def f(x):\n    return x < 1 and "**no**"'], ".code span": ["python"],
    }  # fmt: skip
    for tag, texts in seen.items():
        found = f"[...document.querySelectorAll('.assistant .words {tag}')].map((each) => each.textContent)"
        assert person.read(found) == texts, tag
    headings = "[...document.querySelectorAll('h1, h2, h3')].map((each) => [each.tagName, each.textContent])"
    outline = [["H1", "fox-tales@4000"], ["H2", "You"], ["H2", "The model"], ["H3", "Title"]]
    assert person.read(headings) == outline
    assert person.read("document.querySelector('.words ol').start") == 3
    assert person.read("document.querySelectorAll('.words hr').length") == 1
    text = person.read(ANSWERS)[-1]
    assert "snake_case_name and 2 * 3.\nSecond line" in text and "and *stars*." in text
    link = person.read(
        "(({ href, target, rel }) => [href, target, rel])(document.querySelector('.words a'))"
    )
    assert link == ["https://example.org/a?b=1", "_blank", "noopener noreferrer"]
    person.click("document.querySelector('#markdown')")
    assert person.read(ANSWERS) == [MARKDOWN] and person.said() == []


def test_an_answer_and_a_piece_of_code_are_copied(person: Visitor) -> None:
    person.read("Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (text) => {"
                "window.copiedText = text; } } }) && 1")  # fmt: skip
    tells(person, MARKDOWN)
    person.click("document.querySelector('.code button')")
    person.wait("document.querySelector('.code button').textContent === 'copied'")
    assert person.read("window.copiedText") == 'def f(x):\n    return x < 1 and "**no**"'
    person.click(
        "[...document.querySelectorAll('.facts button')].find((each) => each.textContent === 'copy')"
    )
    person.wait(f"window.copiedText === {json.dumps(MARKDOWN)}")


ATTACKS = {
    "a script": "<script>window.hit = 1</script>",
    "an image": "<img src=x onerror='window.hit=1'> ![x](http://127.0.0.1:9/pixel) ![y](javascript:window.hit=1)",
    "a vector image": "<svg/onload=window.hit=1><a xlink:href='javascript:window.hit=1'>x</a></svg>",
    "links": "[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) [c](data:text/html,<script>window.hit=1) "
             "[d](vbscript:x) [e](https://a.b\" onmouseover=\"window.hit=1) [f](//evil.example) [g](file:///etc/passwd)",
    "code": "```html\"><script>window.hit=1</script>\n</pre></code><script>window.hit=1</script>\n```",
    "inline code": "`</code><img src=x onerror=window.hit=1>`",
    "a title": "# <iframe src='javascript:window.hit=1'></iframe>",
    "a list": "- <input autofocus onfocus=window.hit=1>\n  - <details open ontoggle=window.hit=1>",
    "a table": "| <b>a</b> | b |\n|---|---|\n| <img src=x onerror=window.hit=1> | <style>*{display:none}</style> |",
    "a quotation": "> <form action=javascript:window.hit=1><button>x",
    "entities": "&lt;script&gt; &#60;script&#62;window.hit=1",
    "names of properties": "[x](https://a.b/__proto__) **__proto__** `constructor`",
    "deep quotations": "> " * 3000 + "x",
    "deep lists": "\n".join(" " * place + "- x" for place in range(400)),
    "stars": "*" * 30_000 + "x",
    "stars and words": "*a **b " * 8000,
    "backticks": "`" * 30_001 + "\n" + "` `` ``` " * 4000,
    "brackets": "[" * 30_000 + "](" * 10_000,
    "bars": "|" * 20_000 + "\n" + "|-" * 10_000,
    "numbers": "1. " * 10_000,
    "lines": "- " * 10_000 + "x\n" + "_ " * 10_000 + "x",
    "underscores": "_" * 30_001 + "a_b" * 5000,
}  # fmt: skip
TAGS = set(
    "P CODE PRE DIV SPAN BUTTON A STRONG EM DEL UL OL LI BLOCKQUOTE H3 H4 H5 H6 HR TABLE TR TH TD".split()
)
NAMES = set("class style dir href target rel start tabindex type aria-label".split())


def test_no_answer_is_read_as_html_or_takes_the_page_with_it(
    person: Visitor, base_url: str
) -> None:
    """Only elements, attributes and addresses that the page itself makes are there, whatever the
    model writes.
    """
    for name, attack in ATTACKS.items():
        tells(person, attack)
        assert person.read("document.querySelectorAll('.assistant').length") == 1, name
        words = "[...document.querySelectorAll('.assistant .words *')]"
        tags = set(person.read(f"[...new Set({words}.map((each) => each.tagName))]"))
        attributes = set(
            person.read(f"[...new Set({words}.flatMap((each) => each.getAttributeNames()))]")
        )
        assert tags <= TAGS and attributes <= NAMES, (name, tags - TAGS, attributes - NAMES)
        links = set(
            person.read("[...document.querySelectorAll('.words a')].map(({ href }) => href)")
        )
        assert links <= {"https://a.b/__proto__", "http://127.0.0.1:9/pixel"}, (
            "followed only by whoever clicks"
        )
        assert (
            person.read("window.hit ?? null") is None
            and person.read("({}).polluted ?? null") is None
        ), name
        person.click("document.querySelector('#new')")
        person.wait(IDLE)
    assert {url.removeprefix(base_url) for url in person.asked()} <= {
        "",
        "v1/models",
        "v1/chat/completions",
    }
    assert person.said() == []


# ---- chats ---------------------------------------------------------------------------------------


def test_a_system_prompt_is_told_first(person: Visitor, stand_in: StandIn) -> None:
    person.click("document.querySelector('#system')")
    person.type("Be brief.")
    person.click("document.querySelector('#message')")
    answered(person, "hello")
    assert stand_in.asked[-1]["messages"] == [{"role": "system", "content": "Be brief."},
                                              {"role": "user", "content": "hello"}]  # fmt: skip


def test_a_new_chat_begins_even_while_an_answer_is_written(
    person: Visitor, stand_in: StandIn
) -> None:
    stand_in.hung_up.clear()
    person.type("slow")
    person.press("Return")
    person.wait("document.querySelector('.assistant .words')?.textContent.length > 60")
    person.click("document.querySelector('#new')")
    person.wait(IDLE)
    assert stand_in.hung_up.wait(20)
    assert person.read(
        "[document.querySelectorAll('.turn').length, document.activeElement.id]"
    ) == [0, "message"]
    assert answered(person, "hello") == SHOWN
    assert [each["content"] for each in stand_in.asked[-1]["messages"]] == ["hello"]


def test_a_chat_is_exported_as_a_record_of_messages(person: Visitor) -> None:
    assert person.read("document.querySelector('#export').disabled")
    answered(person, "hello")
    person.read("(URL.createObjectURL = (blob) => { blob.text().then((text) => { window.exported = text; }); "
                "return '#'; }) && 1")  # fmt: skip
    person.click("document.querySelector('#export')")
    [line] = person.wait("window.exported").splitlines()  # a file whose name ends in .jsonl
    record = json.loads(line)
    assert record["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": TEXT},
    ]
    assert record["metadata"]["model"] == "fox-tales@4000" and record["metadata"]["seeds"] == [
        str(SEED)
    ]


KEPT = "[...document.querySelectorAll('#kept option')].map((each) => each.textContent)"


def again(person: Visitor) -> None:
    """Loads the page anew in the same browser."""
    person.read("(window.isOld = true)")
    person.read("setTimeout(() => location.reload(), 0)")
    person.wait(
        "!window.isOld && document.querySelector('#model')?.textContent === 'fox-tales@4000'"
    )


def test_chats_are_kept_in_the_browser_if_that_is_wanted_and_only_then(person: Visitor) -> None:
    answered(person, "first")
    assert person.read("localStorage.length") == 0
    again(person)
    assert person.read(ANSWERS) == []
    person.click("document.querySelector('#keep')")
    person.click("document.querySelector('#message')")
    answered(person, "second")
    person.click("document.querySelector('#new')")
    answered(person, f"third {HOSTILE}")
    assert person.read(KEPT) == [f"third {HOSTILE}", "second"]
    again(person)
    assert person.read("document.querySelector('#keep').checked")
    assert person.read(KEPT) == [f"third {HOSTILE}", "second"]
    assert person.read(ANSWERS) == [SHOWN] and str(SEED) in person.read(FACTS)
    person.read("(({ value }, select) => { select.value = value; select.onchange({ target: select }); })"
                "(document.querySelectorAll('#kept option')[1], document.querySelector('#kept')) ?? 1")  # fmt: skip
    assert person.read("document.querySelector('.user .words').textContent") == "second"
    person.click("document.querySelector('#forget')")
    assert person.read(KEPT) == ["Kept chats", f"third {HOSTILE}"] and person.read(ANSWERS) == []
    person.click("document.querySelector('#keep')")
    assert person.read("[localStorage.length, document.querySelector('#kept').hidden]") == [0, True]
    assert person.said() == []


@pytest.mark.parametrize(
    "kept",
    nightly(
        ["", "{", "3", '[{"id": 1}]', '[{"id": "a", "turns": [{"role": "<b>", "content": 3}]}]'],
        ["{", '[{"id": "a", "turns": [{"role": "<b>", "content": 3}]}]'],
    ),
)
def test_what_is_no_kept_chat_is_passed_over(person: Visitor, kept: str) -> None:
    person.read(f"localStorage.setItem('monograph chats', {json.dumps(kept)}) ?? 1")
    again(person)
    assert person.read("document.querySelectorAll('.turn').length") == 0
    assert (
        answered(person, "hello") == SHOWN
        and person.read(KEPT) == ["hello"]
        and person.said() == []
    )


# ---- what goes wrong -----------------------------------------------------------------------------


def test_a_refusal_is_one_line_of_text_and_the_message_comes_back(person: Visitor) -> None:
    person.type("refuse")
    person.press("Return")
    person.wait("document.querySelector('#error').textContent")
    assert (
        person.read("document.querySelector('#error').textContent")
        == f"temperature = 9: expected 0 to 2 {HOSTILE}"
    )
    assert person.read("[document.querySelector('#message').value, document.querySelectorAll('.turn').length]") == [
        "refuse", 0]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("broken", "the model is gone"), ("cut", "The server closed the connection before the end.")],
)
def test_an_answer_that_breaks_off_keeps_its_text_and_says_why(
    person: Visitor, prompt: str, said: str
) -> None:
    person.type(prompt)
    person.press("Return")
    assert person.wait("document.querySelector('#error').textContent") == said
    assert person.read(ANSWERS) == [SHOWN] and "broken off" in person.read(FACTS)


def test_a_number_that_is_none_is_not_sent(person: Visitor, stand_in: StandIn) -> None:
    before = len(stand_in.asked)
    person.read("document.querySelector('#seed').value = '1.5'")
    person.type("hello")
    person.press("Return")
    assert (
        person.wait("document.querySelector('#error').textContent")
        == "seed: a whole number is expected."
    )
    assert len(stand_in.asked) == before


def test_a_key_is_asked_for_kept_in_the_session_alone_and_sent(light: Visitor) -> None:
    server = StandIn(key="open sesame")
    light.visit(server.url)
    light.wait("!document.querySelector('#key').hidden")
    assert (
        light.read(FACED) == "secret"
        and light.read("document.querySelector('#model').textContent") == "…"
    )
    light.type("wrong")
    light.press("Return")
    light.wait(
        "document.querySelector('#secret').value === '' && !document.querySelector('#key').hidden"
    )
    light.type("open sesame")
    light.press("Return")
    light.wait("document.querySelector('#model').textContent === 'fox-tales@4000'")
    assert light.read("[document.querySelector('#key').hidden, document.activeElement.id]") == [
        True,
        "message",
    ]
    assert answered(light, "hello") == SHOWN
    kept = "[sessionStorage.length, sessionStorage.getItem('key'), localStorage.length, document.cookie]"
    assert light.read(kept) == [1, "open sesame", 0, ""]
    server.close()


@pytest.mark.slow
def test_a_server_that_went_away_is_said_and_found_again(light: Visitor) -> None:
    server = StandIn(chat=False)
    light.visit(server.url)
    light.wait("document.querySelector('#model').textContent === 'fox-tales@4000'")
    assert light.read("document.querySelector('[name=mode]:checked').value") == "text"
    assert light.read("document.querySelector('#standing').textContent").startswith(
        "No chat template"
    )
    server.close()
    light.type("A")
    light.press("Ctrl+Return")
    light.wait("document.querySelector('#standing').textContent === 'The server does not answer.'")
    assert (
        light.read("document.querySelector('#error').textContent") == "The server does not answer."
    )
    again = StandIn(port=server.server_address[1])
    light.wait("document.querySelector('#standing').textContent.startsWith('Chat template')")
    again.close()


# ---- by keyboard ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tabulator_reaches_everything_and_shows_where_it_is(person: Visitor) -> None:
    answered(person, "hello")
    outlined = "getComputedStyle(document.activeElement.matches('[type=radio]') ? document.activeElement.parentNode : "\
               "document.activeElement).outlineStyle"  # fmt: skip
    framed = "getComputedStyle(document.activeElement.closest('.box') ?? document.body).boxShadow"
    reached = {}
    for _ in range(40):
        person.press("Tab")
        name, outline, frame = person.read(f"[{FACED}, {outlined}, {framed}]")
        reached[name] = (outline, frame) != ("none", "none")
    options = {
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "stop",
        "constraint-kind",
        "probabilities",
    }
    assert reached.keys() >= options | {
        "chat",
        "message",
        "Send",
        "edit",
        "keep",
        "try again",
        "Options",
    }
    # The page itself, between its end and its begin.
    del reached[next(name for name in reached if "fox-tales" in name)]
    assert all(reached.values()), reached


def test_the_mode_is_chosen_by_arrow_keys(person: Visitor) -> None:
    mode = "document.activeElement.value"
    person.press("Shift+Tab")
    while person.read(mode) != "chat":
        person.press("Shift+Tab")
    person.press("Right")
    assert person.read(f"[{mode}, document.body.dataset.mode]") == ["text", "text"]
    person.press("Left")
    assert person.read(f"[{mode}, document.body.dataset.mode]") == ["chat", "chat"]


# ---- looks ---------------------------------------------------------------------------------------

# What a person reads: each text that is shown, its size, and its contrast (WCAG 2.2) with what is
# behind it.
READ = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((each, i) => each * a + under[i] * (1 - a));
  const light = (rgb) => { const [r, g, b] = rgb.map((each) => each / 255).map((each) =>
    each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (node) =>
    node ? over(rgba(getComputedStyle(node).backgroundColor), behind(node.parentElement)) : [255, 255, 255];
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement, style = getComputedStyle(node);
    if (!walk.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    if (node.closest("script, style, .unseen, #mirror, option, :disabled")) continue;
    const back = behind(node), [a, b] = [light(back), light(over(rgba(style.color), back))];
    found.push([walk.currentNode.textContent.trim().slice(0, 40), parseFloat(style.fontSize),
      (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
})()"""


@pytest.mark.parametrize("scheme", nightly(["light", "dark"], {"light"}))
def test_every_text_is_large_and_clear_enough_and_nothing_is_cut(
    base_url: str, light: Visitor, scheme: str, tmp_path: Path
) -> None:
    visitor = light if scheme == "light" else Visitor(scheme)
    visitor.visit(base_url)
    visitor.wait("document.querySelector('#model').textContent === 'fox-tales@4000'")
    visitor.click("document.querySelector('#keep')")
    tells(visitor, MARKDOWN)
    for width in (1280, 400):
        visitor.resize(width, 800)
        visitor.read("(document.querySelector('#options').open = true)")
        texts = visitor.read(READ)
        assert len(texts) > 30
        assert [each for each in texts if each[1] < 12 or each[2] < 4.5] == []
        page = "document.documentElement"
        assert visitor.read(
            f"{page}.scrollWidth <= innerWidth && {page}.scrollHeight <= innerHeight"
        )
        boxes = "[...document.querySelectorAll('button, input, select, textarea, .words > *')].filter((each) => "\
                "each.checkVisibility()).map((each) => each.getBoundingClientRect())"  # fmt: skip
        assert (
            visitor.read(f"{boxes}.filter(({{ left, right }}) => left < 0 || right > innerWidth)")
            == []
        )
        visitor.picture(str(tmp_path / f"{scheme}-{width}-options.png"))
        visitor.read("((document.querySelector('#options').open = innerWidth > 820), 1)")
        visitor.picture(str(tmp_path / f"{scheme}-{width}.png"))
    visitor.resize(1200, 900)
    if scheme == "dark":
        visitor.close()


@pytest.mark.parametrize("mode", nightly(["chat", "text"], {"chat"}))
def test_stop_is_in_sight_while_it_writes(person: Visitor, mode: str) -> None:
    if mode == "text":
        person.click("document.querySelectorAll('.modes label')[1]")
    person.type("slow")
    person.press("Ctrl+Return")
    stop = "[...document.querySelectorAll('.go')].find((each) => each.checkVisibility())"
    person.wait(f"{stop}.textContent === 'Stop'")
    for width, height in ((1280, 800), (400, 800), (400, 560)):
        person.resize(width, height)
        person.read("(document.querySelector('#options').open = true)")
        top = "(({ x, y, width, height }) => document.elementFromPoint(x + width / 2, y + height / 2))"
        assert person.read(f"{top}({stop}.getBoundingClientRect()) === {stop}"), (width, height)
    person.click(stop)
    person.wait(IDLE)
    person.resize(1200, 900)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_the_page_is_in_its_theme_and_as_wide_as_its_window(
    base_url: str, light: Visitor, scheme: str, tmp_path: Path
) -> None:
    visitor = light if scheme == "light" else Visitor(scheme)
    visitor.visit(base_url)
    visitor.wait("document.querySelector('#model').textContent === 'fox-tales@4000'")
    visitor.click("document.querySelector('#probabilities')")
    visitor.click("document.querySelector('#message')")
    answered(visitor, "What did the fox say, and why has nobody written it down?")
    background = visitor.read(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).map(Number)"
    )
    assert (sum(background[:3]) > 3 * 200) == (scheme == "light")
    for mode in (0, 1):
        visitor.click(f"document.querySelectorAll('.modes label')[{mode}]")
        for width in (420, 1200):
            visitor.resize(width, 800)
            wide = "document.documentElement.scrollWidth"
            assert visitor.read(
                f"{wide} <= window.innerWidth && document.documentElement.scrollHeight <= innerHeight"
            )
            visitor.picture(str(tmp_path / f"{scheme}-{mode}-{width}.png"))
    if scheme == "dark":
        visitor.close()
