"""Run: pytest tests/serve/test_langchain.py -m slow (with LangChain's client: pip install
langchain-openai)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import calling
from batches import tiny_llama
from chats import speaking
from served import Served, small

langchain = pytest.importorskip("langchain_openai", reason="LangChain's client is not installed")
messages = pytest.importorskip("langchain_core.messages")
# What its libraries warn of is not ours to fix.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


class Weather(BaseModel):
    """A form."""

    rains: bool
    degrees: int


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    tokenizer = speaking(tmp_path_factory.mktemp("speaking"), "chatml")
    with Served(small(tokenizer), tokenizer) as served:
        yield langchain.ChatOpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            model="last",
            max_tokens=100,
            seed=3,
            max_retries=0,
        )


def test_it_answers_streams_and_counts(chat: Any) -> None:
    asked = [("system", "Be brief."), ("human", "Does it rain?")]
    whole = chat.invoke(asked)
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(asked)) == whole.content


def test_a_form_is_kept(chat: Any) -> None:
    found = chat.with_structured_output(Weather, method="json_schema", strict=True).invoke(
        "Does it rain?"
    )
    assert isinstance(found, Weather)


def test_tools_that_a_template_does_not_show_are_refused_and_not_ignored(chat: Any) -> None:
    with pytest.raises(Exception, match="does not show tools to the model"):
        chat.bind_tools([Weather]).invoke("Does it rain?")


def test_a_tool_is_called_and_its_result_goes_back(tmp_path: Path) -> None:
    tokenizer = calling.speaking(tmp_path, "tags")
    model = tiny_llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=1024)
    with Served(model, tokenizer) as served:
        chat = langchain.ChatOpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            model="last",
            max_tokens=200,
            seed=3,
            max_retries=0,
        )
        bound = chat.bind_tools([Weather], tool_choice="required", strict=True)
        said: list[Any] = [("human", "Does it rain?")]
        answer = bound.invoke(said)
        [call] = answer.tool_calls
        assert call["name"] == "Weather" and Weather(**call["args"])
        chunks = list(bound.stream(said))
        whole = functools.reduce(lambda one, other: one + other, chunks)
        assert [each["args"] for each in whole.tool_calls] == [call["args"]]
        result = messages.ToolMessage("It rains.", tool_call_id=call["id"])
        after = chat.bind_tools([Weather]).invoke([*said, answer, result])
        assert after.content or after.tool_calls
