"""Run: pytest tests/serve/test_smolagents.py -m slow (with the client: pip install "smolagents[openai]")

An agent that has each answer be a call, gives stop texts with it, and ends by a call of `final_answer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from served import Served
from taught import dialogue_of_texts, question, saying, taught

# What its libraries warn of is not ours to fix.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
called: list[tuple[int, int]] = []


@pytest.fixture(scope="module")
def smolagents() -> ModuleType:
    pytest.importorskip("openai", reason="pip install openai")
    return pytest.importorskip("smolagents", reason="pip install smolagents")


@pytest.fixture(scope="module")
def served(smolagents: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, tokenizer = taught(tmp_path_factory.mktemp("taught"), dialogue_of_texts, length=512)
    with Served(model, tokenizer) as served:
        yield served


def agent_of(smolagents: Any, served: Served, *, streamed: bool) -> Any:
    """An agent with a tool that adds."""

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: a number
            b: a number
        """
        called.append((a, b))
        return a + b

    model = smolagents.OpenAIServerModel(
        "last", api_base=f"{served.url}/v1", api_key="none", temperature=0
    )
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(add)], model=model, stream_outputs=streamed, max_steps=3
    )
    # The agent's own prompt is longer than the context of so small a model.
    agent.prompt_templates["system_prompt"] = "Be brief."
    return agent


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_smolagents(smolagents: ModuleType, served: Served, streamed: bool) -> None:
    for numbers in [(2, 7), (8, 3), (5, 5)]:
        called.clear()
        agent = agent_of(smolagents, served, streamed=streamed)
        assert agent.run(question(*numbers)) == saying(sum(numbers))
        assert called == [numbers], "the tool must have been called with them, once"
