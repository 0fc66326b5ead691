"""Run: pytest tests/serve/test_agents.py -m slow (with the clients: pip install anthropic langchain
langchain-anthropic langchain-openai openai-agents)

The clients that people have, end to end: they give a tool to a model that was taught to call one, make the
calls, send the results back, and get the answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from served import Served
from taught import question, saying, taught

# What the clients' libraries warn of is not ours to fix.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
openai = pytest.importorskip("openai", reason="pip install openai")
ASKED = [(2, 7), (8, 3), (5, 5)]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
called: list[tuple[int, int]] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append((a, b))
    return a + b


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, tokenizer = taught(tmp_path_factory.mktemp("taught"))
    with Served(model, tokenizer) as served:
        yield served


# Clients are fixtures of the module, so that a test without one is skipped before it asks anything.


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    return pytest.importorskip("anthropic", reason="pip install anthropic")


@pytest.fixture(scope="module")
def openai_agents() -> ModuleType:
    return pytest.importorskip("agents", reason="pip install openai-agents")


@pytest.fixture(scope="module")
def langchain_agents() -> ModuleType:
    for library in ("langchain_openai", "langchain_anthropic"):
        pytest.importorskip(library, reason=f"pip install {library.replace('_', '-')}")
    return pytest.importorskip("langchain.agents", reason="pip install langchain")


@pytest.fixture(params=ASKED, ids=str)
def asked(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Two numbers to be added. Afterwards the tool must have been called with them, once."""
    called.clear()
    yield request.param
    assert called == [request.param]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True])
def test_openais_chat(client: Any, asked: tuple[int, int], streamed: bool) -> None:
    def message(said: list[Any]) -> Any:
        fields = {"model": "last", "messages": said, "temperature": 0}
        fields["tools"] = [{"type": "function", "function": FUNCTION}]
        if not streamed:
            return client.chat.completions.create(**fields).choices[0].message
        with client.chat.completions.stream(**fields) as stream:
            return stream.get_final_completion().choices[0].message

    said: list[Any] = [{"role": "user", "content": question(*asked)}]
    answer = message(said)
    [call] = answer.tool_calls
    result = add(**json.loads(call.function.arguments))
    said += [answer, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
    after = message(said)
    assert after.content == saying(sum(asked)) and not after.tool_calls


@pytest.mark.parametrize("streamed", [False, True])
def test_openais_responses(client: Any, asked: tuple[int, int], streamed: bool) -> None:
    def response(items: list[Any]) -> Any:
        fields = {"model": "last", "input": items, "temperature": 0}
        fields["tools"] = [{"type": "function", **FUNCTION, "strict": True}]
        if not streamed:
            return client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            return stream.get_final_response()

    items: list[Any] = [{"role": "user", "content": question(*asked)}]
    answer = response(items)
    [call] = answer.output
    result = add(**json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": str(result)}
    items += [*answer.output, output]
    assert response(items).output_text == saying(sum(asked))


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_messages(
    anthropic: ModuleType, served: Served, asked: tuple[int, int], streamed: bool
) -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS, "strict": True}

    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:

        def message(said: list[Any]) -> Any:
            fields = {"model": "last", "max_tokens": 99, "messages": said, "tools": [tool]}
            fields |= {"system": "Be brief.", "extra_body": {"temperature": 0}}
            if not streamed:
                return client.messages.create(**fields)
            with client.messages.stream(**fields) as stream:
                return stream.get_final_message()

        said: list[Any] = [{"role": "user", "content": question(*asked)}]
        answer = message(said)
        [use] = answer.content
        assert answer.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": str(add(**use.input))}
        said += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        [text] = message(said).content
        assert text.text == saying(sum(asked))
        counted = client.messages.count_tokens(model="last", messages=said[:1])
        assert counted.input_tokens > 3


def test_anthropics_own_loop_over_tools(
    anthropic: ModuleType, served: Served, asked: tuple[int, int]
) -> None:
    def add_as_text(a: int, b: int) -> str:
        """Add two numbers."""
        return str(add(a, b))

    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="last",
            max_tokens=99,
            extra_body={"temperature": 0},
            tools=[anthropic.beta_tool(add_as_text, name="add")],
            messages=[{"role": "user", "content": question(*asked)}],
        )
        assert runner.until_done().content[0].text == saying(sum(asked))


@pytest.mark.parametrize("form", ["chat", "responses", "messages"])
def test_an_agent_of_langchain(
    langchain_agents: ModuleType, served: Served, asked: tuple[int, int], form: str
) -> None:
    if form == "messages":
        from langchain_anthropic import ChatAnthropic

        model = ChatAnthropic(
            base_url=served.url, api_key="none", model="last", max_tokens=99, temperature=0
        )
    else:
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            model="last",
            temperature=0,
            use_responses_api=form == "responses",
        )
    agent = langchain_agents.create_agent(model, tools=[add])
    ended = agent.invoke({"messages": [{"role": "user", "content": question(*asked)}]})
    assert ended["messages"][-1].text == saying(sum(asked))


@pytest.mark.parametrize("form", ["chat", "responses"])
def test_an_agent_of_openai(
    openai_agents: ModuleType, served: Served, asked: tuple[int, int], form: str
) -> None:
    openai_agents.set_tracing_disabled(True)

    async def run() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0
        ) as client:
            model_type = openai_agents.OpenAIResponsesModel
            if form == "chat":
                model_type = openai_agents.OpenAIChatCompletionsModel
            agent = openai_agents.Agent(
                name="adder",
                instructions="Be brief.",
                model=model_type(model="last", openai_client=client),
                model_settings=openai_agents.ModelSettings(temperature=0),
                tools=[openai_agents.function_tool(add)],
            )
            streamed = openai_agents.Runner.run_streamed(agent, question(*asked))
            async for _ in streamed.stream_events():
                pass
            return str(streamed.final_output)

    assert asyncio.run(run()) == saying(sum(asked))
