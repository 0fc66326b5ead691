# Run: pytest tests/benchmarks/test_reward_peers.py [-m slow]
"""Reinforcement learning beside TRL: both gradients are compared with the right one, and TRL's
absence is said.
"""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import save_file

from monograph.model.config import LlamaConfig
from monograph.model.hub import load_model, save_model
from monograph.model.llama import Llama
from monograph.rl.advantages import AnswerWeight
from monograph.rl.arrange import Rollout
from scripts import smoke


@pytest.fixture
def peers(script):
    return script("reward_peers")


def test_gradients_of_the_same_answers(peers, tmp_path):
    """Padded prompts and answers become the ones that were drawn; a gradient that is not theirs is
    seen.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    save_model(
        Llama(LlamaConfig(vocab_size=40, num_hidden_layers=2, **sizes), seed=3), tmp_path / "hf"
    )
    prompts, answers = [[0, 5, 6], [0, 7]], [[8, 9, 1], [11, 1]]
    advantages = [0.5, -0.25]
    first = {
        "prompt_ids": torch.tensor([prompts[0], [2, *prompts[1]]]),
        "prompt_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([answers[0], [*answers[1], 2]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "advantages": torch.tensor(advantages),
    }
    rollouts = [Rollout(*each, [0.0] * len(each[1])) for each in zip(prompts, answers, strict=True)]
    weighed = [AnswerWeight(advantage, peers.TASK.most_tokens) for advantage in advantages]
    theirs = peers.exact(load_model(tmp_path / "hf"), rollouts, weighed)
    for factor, least, most in ((1.0, 1e-9, 1e-6), (1.01, 0.0099, 0.0101)):
        gradient = {f"gradient.{name}": value.float() * factor for name, value in theirs.items()}
        save_file(first | gradient, tmp_path / "first.safetensors")
        errors = peers.gradient_errors(tmp_path)
        assert 0 < errors["monograph"] < 1e-6 and least < errors["trl"] < most
    save_file(first | {"advantages": torch.zeros(2)}, tmp_path / "first.safetensors")
    assert peers.gradient_errors(tmp_path) == {}


def test_what_is_compared(peers):
    """The first update's time counts in no rate; all are read after the seconds, and the updates,
    that all trained.
    """
    ours = peers.figures([5.0, 6.0, 10.0], [4.0, 0.5, 0.5], [0.0, 0.25, 0.75])
    assert (ours["updates_per_s"], ours["rollouts_per_s"], ours["drawing_share"]) == (
        2 / 5,
        512.0,
        0.2,
    )
    theirs = peers.figures([2.0, 4.0, 9.5, 12.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.1, 0.5, 1.0])
    theirs["gradient_error"] = {"monograph": 1e-6, "trl": 2e-6}
    found = {
        way: {"way": way, "rounds": [each]} for way, each in (("monograph", ours), ("trl", theirs))
    }
    peers.compare(
        found | {"trl, bf16": {"way": "trl, bf16", "rounds": [], "error": "not measured"}}
    )
    assert [found[way]["pass_at_1"]["median"] for way in found] == [0.75, 0.5]
    assert found["trl"]["pass_at_1_same_updates"]["median"] == pytest.approx(0.2)
    assert found["trl"]["updates_per_s_ratio"]["median"] == pytest.approx(0.4 / 0.3)
    assert found["trl"]["gradient_error"]["median"] == 2e-6


@pytest.mark.parametrize("name", ["peer_trl", "peer_trl_dpo", "peer_trl_episodes"])
def test_trl_missing(name, script, monkeypatch):
    peer = script(name)
    monkeypatch.setattr(peer, "MISSING", "trl")
    with pytest.raises(SystemExit, match="trl is not installed for .*: name another --peer-python"):
        peer.main("order.json")


@pytest.mark.slow
def test_reward_peers(peers, monkeypatch, tmp_path, capsys):
    """TRL has an environment of its own, which the tests have not."""
    found = smoke(peers, monkeypatch, tmp_path / "found.json", "--peer-python", sys.executable)
    ours, theirs = found["cases"]
    assert ours["updates_per_s"]["median"] > 0 and ours["rounds"][0]["drawn_minus_scored_max"] == 0
    assert "trl" in capsys.readouterr().out
    assert theirs["rounds"] or "is not installed" in theirs["error"]


@pytest.mark.parametrize(
    ("last", "score"),
    [
        ({"content": "It is 12"}, 1.0),
        ({"content": "It is 13"}, 0.0),
        ({"content": "12", "tool_calls": [{}]}, 0.0),
        ({"role": "tool", "content": "= 12"}, 0.0),
    ],
)
def test_trl_scores_an_episode_as_the_environment_does(last, score, script):
    messages = [[{"role": "assistant", **last}]]
    assert script("peer_trl_episodes").solved(messages, [[3, 4, 5]]) == [score]


@pytest.mark.slow
def test_episode_peers(script, monkeypatch, tmp_path):
    more = ("--peer-python", sys.executable)
    ours, theirs = smoke(script("episode_peers"), monkeypatch, tmp_path / "found.json", *more)[
        "cases"
    ]
    assert ours["updates_per_s"]["median"] > 0 and ours["rounds"][0]["drawn_minus_scored_max"] == 0
    assert theirs["rounds"] or "is not installed" in theirs["error"]


@pytest.mark.slow
def test_rewards(script, monkeypatch, tmp_path):
    [case] = smoke(script("rewards"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["task"] == "makes" and case["updates"] == 2 and case["apart"] < 1e-5


@pytest.mark.slow
def test_reward_precision(script, monkeypatch, tmp_path):
    """Scored as drawn, both have the same bits."""
    same, other = smoke(script("reward_precision"), monkeypatch, tmp_path / "found.json")["cases"]
    assert (same["way"], same["most"], other["way"]) == ("bf16 same", 0, "bf16 from fp32")
    assert other["most"] < 0.5


@pytest.mark.slow
def test_episodes(script, monkeypatch, tmp_path):
    [case] = smoke(script("episodes"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["task"] == "guess" and case["updates"] == 2 and case["apart"] < 1e-5
    assert 1 <= case["turns_before"] <= 4
