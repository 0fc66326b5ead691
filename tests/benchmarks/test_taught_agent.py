"""Run: pytest tests/benchmarks/test_taught_agent.py -m slow (with the agent: pip install openai-agents)

An agent solves questions with a model that was taught a tool in minutes, and that decides itself when to
call it.
"""

from __future__ import annotations

import pytest

from scripts import smoke

pytest.importorskip("agents", reason="pip install openai-agents")
# What its libraries warn of is not ours to fix.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_it_runs_small(script, monkeypatch, tmp_path):
    """Two updates teach nothing. The calls are well-formed even so, since its tool is strict."""
    taught_agent = script("taught_agent")
    [case] = smoke(taught_agent, monkeypatch, tmp_path / "found.json")["cases"]
    assert case["chats"] == 40 and len(case["replies"]) == case["asked"] + case["remarks"] == 6
    assert case["recorded_cpu_s"] > 0 and case["trained_cpu_s"] > 0
    assert all("JSON" not in said for _, said in case["replies"])
    assert taught_agent.table([case]).count("\n") == 2


def test_questions_that_no_chat_had_are_solved_with_the_tool(script, tmp_path):
    """Three minutes of two cores are enough to teach it."""
    taught_agent = script("taught_agent")
    case = taught_agent.measured(tmp_path, 0, taught_agent.CHATS, taught_agent.UPDATES, 20)
    assert case["right"] >= 18 and case["remarks_right"] == case["remarks"], case["replies"]
    assert case["recorded_cpu_s"] + case["trained_cpu_s"] < 2 * 180
