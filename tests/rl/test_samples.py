"""Run: pytest tests/rl/test_samples.py (the answer that a run with rewards shows as it trains)."""

from __future__ import annotations

from rewarded import drawer, spaces


def test_a_sample_is_an_answer_to_the_first_prompt_with_its_reward() -> None:
    made = drawer()
    prompt, answer, reward = made.sample()
    assert prompt == "2+2=" and answer
    assert reward == spaces(answer)
    assert made.sample() == (prompt, answer, reward), "always by the same seed"
