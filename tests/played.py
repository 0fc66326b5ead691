"""Small runs with episodes: environments that are classes of this process, and their drawers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from batches import tiny_llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.rl.environments import OwnEnvironments
from monograph.rl.episodes import EpisodeDrawer
from monograph.rl.loss import PolicyLoss
from monograph.rl.prompts import Prompts
from monograph.rl.rewards import EnvironmentReward
from monograph.rl.rollouts import Rollouts
from rewarded import OPTIONS, prompts

PLAYED = replace(OPTIONS, turns=3, discount=0.5, max_new_tokens=4, length=47)


class Echo:
    """Says how long each answer was, with a letter of chance, and is done after a short one."""

    def reset(self, record: Mapping[str, Any]) -> str:
        self.total = 0
        return str(record["prompt"])

    def step(self, answer: str) -> tuple[str, float, bool]:
        self.total += len(answer)
        letters = sum(letter < "p" for letter in answer)
        return f"{len(answer)}{random.choice('abc')}\n", float(letters), self.total % 5 == 0


def episodes(
    options: Any = PLAYED,
    environment: Callable[[], Any] = Echo,
    dtype: torch.dtype = torch.float32,
    opened: Prompts | None = None,
    shape: Mapping[str, Any] | None = None,
    device: str = "cpu",
    **engine: Any,
) -> Rollouts:
    """Windows of episodes of a model whose distributions are far from even."""
    opened = opened or prompts("2+2=", "a", "the longest of them", "7")
    vocabulary = opened.tokenizer.vocab_size
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 512, **(shape or {})}
    model = tiny_llama(dtype, vocab_size=vocabulary, **sizes).to(device)
    if options.exact:
        model.use_attention("cached")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim > 1 else 1.0)
    engine.setdefault("optim", AdamW(lr=0.03))
    engine.setdefault("loss", PolicyLoss(options.temperature).to(device))
    trained = Resident(model, **engine)
    reward = EnvironmentReward(OwnEnvironments(environment), options.turns, options.discount)
    return Rollouts(EpisodeDrawer(trained, opened, reward, options, lambda: 0))
