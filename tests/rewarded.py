"""Small runs with rewards: prompts of bytes, an engine, and rewards that are plain functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from batches import tiny_llama
from monograph.graph.lora import Lora
from monograph.model.adapter import install_adapters
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.rl.arrange import RolloutOptions
from monograph.rl.loss import PolicyLoss
from monograph.rl.prompts import Prompt, Prompts
from monograph.rl.rewards import Answer, Reward
from monograph.rl.rollouts import Drawer, Rollouts
from monograph.text.tokenizer import Tokenizer

OPTIONS = RolloutOptions(
    prompts=3,
    group=4,
    max_new_tokens=7,
    temperature=1.0,
    advantage="dr_grpo",
    draws=1,
    length=32,
    packed=False,
    exact=True,
    seed=5,
)


class Scored(Reward):
    """A reward that is a function of an answer's text."""

    def __init__(self, function: Callable[[str], float]):
        self.function = function

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [self.function(answer.completion) for answer in answers]


@functools.cache
def prompts(*texts: str) -> Prompts:
    tokenizer = Tokenizer.bytes()
    made = [
        Prompt(
            text,
            (tokenizer.bos_id, *tokenizer.encode(text)),
            {"prompt": text},
            f"prompts.jsonl:{number}",
        )
        for number, text in enumerate(texts, 1)
    ]
    longest = max(len(prompt.ids) for prompt in made)
    return Prompts("prompts.jsonl", tokenizer, made, made[:2], "of a test", False, longest, {})


def spaces(text: str) -> float:
    """About half of the bytes' answers have some, and few have many."""
    return float(sum(letter < "p" for letter in text))


def drawer(
    options: RolloutOptions = OPTIONS,
    dtype: torch.dtype = torch.float32,
    reward: Callable[[str], float] = spaces,
    device: str = "cpu",
    layers: int = 2,
    shape: dict[str, Any] | None = None,
    texts: Sequence[str] = ("2+2=", "a", "the longest of them", "7"),
    lora: Lora | None = None,
    **engine: Any,
) -> Drawer:
    """An engine of a model whose distributions are far from even, with a drawer of its answers."""
    model = tiny_llama(dtype, vocab_size=259, num_hidden_layers=layers, **shape or {}).to(device)
    if options.exact:
        model.use_attention("cached")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim > 1 else 1.0)
    if lora:
        install_adapters(model, lora, precision=engine.get("precision"))
    engine.setdefault("optim", AdamW(lr=0.03))
    engine.setdefault("loss", PolicyLoss(options.temperature))
    engine["loss"] = engine["loss"].to(device)
    made = Resident(model, **engine)
    return Drawer(made, prompts(*texts), Scored(reward), options, lambda: 0)  # type: ignore[arg-type]


def windows(options: RolloutOptions = OPTIONS, **more: Any) -> Rollouts:
    return Rollouts(drawer(options, **more))


def apart(rollouts: Rollouts) -> tuple[float, float]:
    """The largest difference of scored and drawn log-probabilities since the last call, and their
    number.
    """
    totals = rollouts.drawer.engine.step.loss.totals  # type: ignore[attr-defined]
    _, largest, number = totals.tolist()[:3]
    totals.zero_()
    return largest, number


def products_have_rows_of_their_own(
    model: Llama, dtype: torch.dtype = torch.float32, least: int = 16
) -> bool:
    """Whether this machine's products with a model's weights give a row the same bits for every
    number of rows from `least` on that four divides.

    No library promises it. It is so in fp32, on one thread of an AMD EPYC or of an Intel Xeon with
    AVX-512, and not where an Intel processor has AVX2 only (dev/log.md).
    """
    generator = torch.Generator().manual_seed(0)
    for outer, inner in {weight.shape for weight in model.parameters() if weight.ndim == 2}:
        left = torch.randn(300, inner, generator=generator).to(dtype)
        right = torch.randn(outer, inner, generator=generator).to(dtype)
        whole = F.linear(left, right)
        if any(
            not torch.equal(F.linear(left[:rows], right), whole[:rows])
            for rows in (*range(least, 36, 4), 132)
        ):
            return False
    return True
