"""Run: pytest tests/serve/test_guard.py (law 20, S7: a page that someone else wrote reaches
nothing).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from monograph.serve.app import is_local
from monograph.text.tokenizer import Tokenizer
from served import Answer, Served, small

KEY = "a-key-of-more-than-16"
ASKED = json.dumps({"model": "last", "prompt": "a", "max_tokens": 1}).encode()
JSON = {"Content-Type": "application/json"}
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer, keys=["another-key-of-16+", KEY]) as served:
        yield served


def status(
    served: Served, path: str = "/v1/completions", method: str = "POST", **headers: str | None
) -> int:
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    answer = served.ask(method, path, ASKED if method == "POST" else None, JSON | given)
    assert answer.status < 400 or set(answer.body) == {"error"}
    assert not [name for name in answer.headers if name.startswith("access-control")]
    return answer.status


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(
            (host, 200)
            for host in (
                "localhost",
                "LOCALHOST:80",
                "127.0.0.1",
                "127.0.0.1:9",
                "[::1]:8000",
                "[::1]",
            )
        ),
        *(
            (host, 403)
            for host in (
                "evil.example",
                "localhost.evil.example",
                "127.0.0.1.evil.example",
                "0.0.0.0",
                "",
            )
        ),
        *(
            (host, 403)
            for host in (
                "evil.example:8000",
                "localhost@evil.example",
                "[::1",
                "127.1",
                "192.168.0.2",
            )
        ),
        ("localhost, evil.example", 403),
        *(
            (host, 403)
            for host in (
                "evil@localhost",
                "localhost/x",
                "localhost:x",
                "localhost#",
                "localhost?",
                "[",
                ":",
            )
        ),
        *(
            (host, 403)
            for host in ("localhost\\x", "[localhost]", "localhost:80:80", "local\thost")
        ),
    ],
)
def test_only_this_machines_names_are_answered(served: Served, host: str, expected: int) -> None:
    assert status(served, Host=host) == expected
    assert status(served, "/", "GET", Host=host) == expected
    assert status(served, "/health", "GET", Host=host) == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [(None, 200), ("http://localhost:8000", 200), ("HTTP://LOCALHOST:8000", 200)]
    + [
        (each, 403)
        for each in (
            "http://evil.example",
            "null",
            "",
            "*",
            "https://localhost:8000",
            "http://localhost",
        )
    ]
    + [
        (each, 403)
        for each in ("http://localhost:3000", "http://localhost:8000.evil.example", "file://")
    ],
)
def test_pages_of_others_are_refused(served: Served, origin: str | None, expected: int) -> None:
    assert status(served, Host="localhost:8000", Origin=origin) == expected
    assert status(served, "/v1/models", "GET", Host="localhost:8000", Origin=origin) == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind",
    [
        "",
        "text/plain",
        "text/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonp",
    ],
)
def test_what_a_page_may_send_unasked_is_refused(served: Served, path: str, kind: str) -> None:
    assert status(served, path, Content_Type=kind) == 415


def test_json_may_name_its_letters_and_have_large_ones(served: Served) -> None:
    assert status(served, Content_Type="application/json; charset=utf-8") == 200
    assert status(served, Content_Type="Application/JSON") == 200


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_body_in_another_encoding_than_utf_8_is_refused_as_such(
    served: Served, path: str, encoding: str
) -> None:
    body = json.dumps({"prompt": "a", "model": "last"}).encode(encoding)
    answer = served.ask("POST", path, body, JSON)
    assert answer.status == 400 and "is in UTF-" in answer.body["error"]["message"]
    answer = served.ask(
        "POST", path, body, {"Content-Type": f"application/json; charset={encoding}"}
    )
    assert answer.status == 415 and encoding in answer.body["error"]["message"]


@pytest.mark.parametrize(
    "path", [*PATHS, "/v1/models", "/health", "/metrics", "/", "/openapi.json"]
)
@pytest.mark.parametrize(
    "method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "X"]
)
def test_each_address_has_its_method(served: Served, path: str, method: str) -> None:
    right = "POST" if path in PATHS else "GET"
    found = status(served, path, method)
    assert (found == 405) == (method != right), found


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/embeddings",
        "/v1/audio/speech",
        "/api/chat",
        "//",
        "/v1",
        "/..%2f",
        "/health/",
        "/v1/",
    ],
)
def test_elsewhere_there_is_nothing(served: Served, path: str) -> None:
    answer = served.ask("GET", path)
    assert answer.status == 404 and "GET /openapi.json" in answer.body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/tokenizer_info", "/nothing"])
@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        KEY,
        "Bearer",
        "Bearer ",
        "Bearer x",
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        "Bearer \xff",
    ],
)
def test_without_a_key_nothing_is_told(keyed: Served, path: str, given: str | None) -> None:
    assert status(keyed, path, "GET", Authorization=given) == 401
    assert status(keyed, Authorization=given) == 401


def test_a_key_opens_and_who_needs_none_has_none(keyed: Served) -> None:
    assert (
        status(keyed, Authorization=f"Bearer {KEY}")
        == status(keyed, Authorization=f"bearer {KEY}")
        == 200
    )
    assert keyed.ask("GET", "/v1/models").headers["www-authenticate"] == "Bearer"
    assert {status(keyed, path, "GET") for path in ("/", "/health", "/openapi.json")} == {200}


def test_anthropics_clients_send_the_key_in_a_header_of_its_own(keyed: Served) -> None:
    message = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
    }

    def answered(**headers: str) -> Answer:
        return keyed.post("/v1/messages", message, **headers)

    assert answered(x_api_key=KEY).status == answered(Authorization=f"Bearer {KEY}").status == 200
    for headers in ({}, {"x_api_key": KEY + "x"}, {"x_api_key": KEY, "Authorization": "Bearer x"}):
        refused = answered(**headers)
        assert refused.status == 401 and refused.body["error"]["type"] == "authentication_error"


def test_no_key_learns_what_another_asked(keyed: Served) -> None:
    """A prompt that was read before is not read again, which is faster: for the same key alone."""
    asked = {
        "prompt": "a prompt that is longer than a chunk of sixty-four tokens, for bytes are tokens here "
        * 2
    }

    def reused(key: str) -> int:
        before = keyed.service.owner.counts.reused_tokens
        assert (
            keyed.post(
                "/v1/completions", asked | {"max_tokens": 1}, Authorization=f"Bearer {key}"
            ).status
            == 200
        )
        assert (
            keyed.post("/v1/completions", {"prompt": "b"}, Authorization=f"Bearer {key}").status
            == 200
        )
        return keyed.service.owner.counts.reused_tokens - before

    other = "another-key-of-16+"
    assert reused(KEY) == 0 < reused(KEY)
    assert reused(other) == 0 < reused(other)


def test_a_key_may_have_any_letters() -> None:
    """Its bytes are compared, not what h11 takes them for."""
    tokenizer, key = Tokenizer.bytes(), "schlüssel-字-0123456789"
    with Served(small(tokenizer), tokenizer, keys=[key]) as served:
        assert status(served, Authorization=f"Bearer {key}".encode().decode("latin-1")) == 200
        assert status(served, Authorization="Bearer schl") == 401


def test_a_server_for_all_names_takes_no_broken_one() -> None:
    """An address that is put together with it would be none: an error that nobody foresaw, for
    whoever asks.
    """
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer, host="0.0.0.0") as served:
        for host, expected in (("example.org", 404), ("[", 403), ("a b", 403), ("[::1]:8000", 404)):
            assert status(served, "/nothing", "GET", Host=host) == expected


@pytest.mark.parametrize(
    ("host", "local"),
    [(each, True) for each in ("localhost", "127.0.0.1", "127.0.0.9", "::1")]
    + [(each, False) for each in ("0.0.0.0", "::", "", "192.168.0.2", "example.org")],
)
def test_others_can_reach_all_but_the_local_addresses(host: str, local: bool) -> None:
    assert is_local(host) is local
