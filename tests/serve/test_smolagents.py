"""Run: pytest tests/serve/test_smolagents.py -m slow (with the client: pip install "smolagents[openai]")

An agent that gives stop texts with its tools, and sends calls and results back as texts. The model is a random
one, of which the agent wants a certain call.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batches import tiny_llama
from calling import speaking
from served import Served

openai = pytest.importorskip("openai", reason="pip install openai")
smolagents = pytest.importorskip("smolagents", reason="pip install smolagents")
# What its libraries warn of is not ours to fix.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_smolagents_calls_its_tool_in_each_step(tmp_path: Path, streamed: bool) -> None:
    called: list[tuple[bool, bool]] = []

    def choose(high: bool, sure: bool = True) -> str:
        """Choose one of two.

        Args:
            high: the higher one
            sure: whether it is certain
        """
        called.append((high, sure))
        return "chosen"

    tokenizer = speaking(tmp_path, "tags")
    model = tiny_llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=4096)
    with Served(model, tokenizer) as served:
        asked = smolagents.OpenAIServerModel(
            "last",
            api_base=f"{served.url}/v1",
            api_key="none",
            client_kwargs={"max_retries": 0},
            tool_choice={"type": "function", "function": {"name": "choose"}},
            max_tokens=100,
            seed=1,
        )
        agent = smolagents.ToolCallingAgent(
            tools=[smolagents.tool(choose)], model=asked, stream_outputs=streamed, max_steps=2
        )
        # The agent's own prompt is longer than the context of so small a model.
        agent.prompt_templates["system_prompt"] = "Be brief."
        agent.run("Which one?")
        steps = [step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)]
        assert [step.error for step in steps[:2]] == [None, None]
        assert len(called) == 2 and served.service.request_counts.by_status[200] >= 2
