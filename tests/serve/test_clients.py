"""Run: pytest tests/serve/test_clients.py

The client that everybody has, openai's, and what it makes of answers, streams and errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from monograph.text.tokenizer import Tokenizer
from served import CONTEXT, ROWS, Served, small

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
SAID = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]


@pytest.fixture(scope="module")
def client(openai: Any, served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_lists_and_finds_models(openai: Any, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["given@0", "given", "last"]
    assert client.models.retrieve("given@0").owned_by == "monograph"
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'other': expected given@0, given, last"
    ):
        client.models.retrieve("other")


def test_a_model_is_asked_for_by_its_aliases_or_by_any_name_if_that_is_wanted(openai: Any) -> None:
    tokenizer = Tokenizer.bytes()
    asked = {"messages": SAID, "max_tokens": 3, "seed": 1}
    with (
        Served(small(tokenizer), tokenizer, aliases=["gpt-4o", "my/model", "last"]) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == [
            "given@0",
            "given",
            "last",
            "gpt-4o",
            "my/model",
        ]
        assert client.models.retrieve("my/model").id == "my/model"
        answers = {client.chat.completions.create(model=name, **asked).choices[0].message.content
                   for name in ("last", "gpt-4o", "my/model")}  # fmt: skip
        assert len(answers) == 1
        assert client.chat.completions.create(model="gpt-4o", **asked).model == "given@0", (
            "what it really is"
        )
        with pytest.raises(
            openai.NotFoundError,
            match="expected given@0, given, last, gpt-4o, my/model .*--any-name",
        ):
            client.chat.completions.create(model="gpt-5", **asked)
    with (
        Served(small(tokenizer), tokenizer, any_name=True) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert {client.chat.completions.create(model=name, **asked).choices[0].message.content
                for name in ("last", "gpt-5", "anything at all")} == answers  # fmt: skip
        assert client.models.retrieve("gpt-5").id == "gpt-5"
        assert [model.id for model in client.models.list()] == ["given@0", "given", "last"]


def test_it_completes_texts_whole_and_in_pieces(client: Any) -> None:
    asked = {
        "model": "last",
        "prompt": ["ab", "cd"],
        "max_tokens": 9,
        "n": 2,
        "seed": 1,
        "logprobs": 2,
        "stop": ["Z"],
    }
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [
        0,
        1,
        2,
        3,
    ] and whole.usage.total_tokens == 36 + 6
    assert whole.choices[0].logprobs is not None and whole.system_fingerprint.startswith("fp_")
    pieces = ["", "", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [choice.text for choice in whole.choices]


def test_it_chats_whole_and_in_pieces(client: Any) -> None:
    asked = {"model": "last", "messages": SAID, "max_completion_tokens": 9, "seed": 1}
    whole = client.chat.completions.create(
        **asked, logprobs=True, top_logprobs=2, extra_body={"top_k": 5}
    )
    assert (
        len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
        and whole.choices[0].message.refusal is None
    )
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage == whole.usage and chunks[0].choices[0].delta.role == "assistant"
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == client.chat.completions.create(**asked).choices[0].message.content


def test_without_a_limit_a_chat_has_the_rest_of_the_context(client: Any) -> None:
    usage = client.chat.completions.create(
        model="last", messages=SAID, logit_bias={"1": -100}
    ).usage
    assert usage.total_tokens == CONTEXT and usage.prompt_tokens == 4


def test_a_form_is_kept(client: Any) -> None:
    answer = client.chat.completions.create(
        model="last", messages=SAID, response_format=FORM, max_tokens=40
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"temperature": -1}, "temperature", "temperature = -1: expected a number from 0"),
        ({"temperature": "warm"}, "temperature", "expected a number"),
        ({"top_p": 2}, "top_p", "a number from 0 to 1"),
        ({"n": ROWS + 1}, "n", f"n = {ROWS + 1}: expected a whole number from 1 to {ROWS}"),
        ({"n": True}, "n", "n = True"),
        ({"max_tokens": 0}, "max_tokens", "expected a whole number from 1"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "give one of them"),
        ({"seed": -1}, "seed", "a whole number from 0"),
        ({"stop": ["a"] * 5}, "stop", "up to 4 texts"),
        ({"stop": "a" * 65}, "stop", "1 to 64 bytes"),
        ({"stop": [""]}, "stop", "1 to 64 bytes"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "expected a token id"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "below 259, the vocabulary"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "no chat template"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
        ({"extra_body": {"temperture": 1}}, "temperture", "did you mean temperature?"),
        ({"extra_body": {"regex": "("}}, "regex", "regex"),
        ({"extra_body": {"regex": "a", "choice": ["b"]}}, "choice", "give one of them"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://x"}}}},
         "response_format", "ref"),
        ({"messages": []}, "messages", "1 to 1,024 messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "messages[0].role is 'robot': expected system"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
         "messages", "alone"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages", "301 tokens, and the model's context"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", "no chat template"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "is for a stream"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(
    openai: Any, client: Any, change: dict, param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**{"model": "last", "messages": SAID} | change)
    assert said in found.value.body["message"] and found.value.param == param


def test_other_errors_have_classes_of_their_own(openai: Any, client: Any, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.NotFoundError, match="there is nothing at '/v1/embeddings'"):
        client.embeddings.create(model="last", input="a")
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="last", prompt=[[1] * 300])
    assert found.value.code == "context_length_exceeded"
    # A client that is not closed warns of its socket when it is collected, in some later test.
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x") as unnamed:
        assert unnamed.with_options(max_retries=0).models.list().data


def test_bodies_that_are_no_request_are_refused(served: Served) -> None:
    json_header = {"Content-Type": "application/json"}
    deep = b'{"model": "last", "prompt": ' + b"[" * 100 + b"]" * 100 + b"}"
    for body, said in (
        (b"", "not JSON"), (b"{", "not JSON"), (b"[]", "not a JSON object"), (b'{"a": 1, "a": 2}', "twice"),
        (b'{"prompt": "\xff"}', "UTF-8"), (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"temperature": 1e999}', "finite"), (b'{"temperature": NaN}', "finite"),
        (deep, "64 deep"), (b"[" * 10**5, "nested"),
    ):  # fmt: skip
        answer = served.ask("POST", "/v1/completions", body, json_header)
        assert answer.status == 400 and said in answer.body["error"]["message"], (body[:40], answer)
    large = served.ask("POST", "/v1/completions", b" " * ((1 << 20) + 1), json_header)
    assert large.status == 413


def test_tokens_and_texts_are_each_other(served: Served) -> None:
    tokens = served.post("/tokenize", {"prompt": "abc ü"}).body
    assert tokens["count"] == len(tokens["tokens"]) == 7 and tokens["max_model_len"] == CONTEXT
    assert served.post("/detokenize", {"tokens": tokens["tokens"]}).body == {"prompt": "abc ü"}
    assert served.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).body["count"] == 1
    assert served.post("/detokenize", {"tokens": [999]}).status == 400
    info = served.ask("GET", "/tokenizer_info").body
    assert info["bos_token"] and info["chat_template"] is None
