"""The speedrun's model, optimizer and schedule, made of what Monograph has; docs/speedrun.md says
where each number comes from and what the public records have besides.

Rates are in the public code's units. There Muon's update of a matrix [rows, cols] is
lr sqrt(max(1, rows / cols)) times an orthogonal matrix; here it is lr 0.2 sqrt(max(rows, cols))
times one. So the rate that is given to `monograph.Muon` is the public one / (0.2 sqrt(cols)), and
the wide input of `down_proj` has a group of its own.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

import monograph as mono
from monograph.model.layer_types import SLIDING_ATTENTION
from monograph.optim.muon import ADAMW_RMS
from monograph.predict.roofline import matmul_parameters
from monograph.schedule import Schedule


@dataclass(frozen=True)
class Recipe:
    """Everything of a run that changes what it computes, except the seed and the tokens.

    Attributes:
        config: the model's shape.
        length: tokens of a row, T; its documents do not see each other.
        rows: rows of an update.
        updates: updates of the schedule.
        decay_share: share of the updates over which rates fall linearly to 0.
        target: validation loss to reach, nats per token.
        val_tokens: first tokens of the validation file that are scored.
        val_every: updates between two scores.
        val_every_late: the same in the last tenth of the updates.
        muon_lr: rate of the blocks' matrices, in the public code's units.
        muon_decay: their decay; an update multiplies them by 1 - lr decay.
        momentum: their Nesterov momentum.
        first_momentum: that of the first update.
        momentum_warmup: updates over which it goes along a line from one to the other.
        embedding_lr: AdamW's rate of the embedding.
        head_lr: the same of the head.
        gain_lr: the same of the norms' gains.
        betas: AdamW's.
        eps: AdamW's.
        embedding_std: spread of the embedding's initial weights.
        score_scale: initial factor of attention's scores, which the queries' norm has as its gain.
    """

    config: mono.LlamaConfig
    length: int = 8192
    rows: int = 64
    updates: int = 2875
    decay_share: float = 0.7
    target: float = 3.28
    val_tokens: int = 10_485_760
    val_every: int = 125
    val_every_late: int = 25
    muon_lr: float = 0.025
    muon_decay: float = 0.05
    momentum: float = 0.95
    first_momentum: float = 0.85
    momentum_warmup: int = 500
    embedding_lr: float = 0.1
    head_lr: float = 0.004
    gain_lr: float = 0.015
    betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-10
    embedding_std: float = 1.0
    score_scale: float = 0.12

    @property
    def window(self) -> int:
        """Return the positions that a query sees, its own the last of them."""
        return self.config.sliding_window or self.length

    @property
    def tokens_per_update(self) -> int:
        """Return the tokens of an update."""
        return self.rows * self.length

    def scores_at(self, index: int) -> bool:
        """Return whether the model is scored after `index` updates."""
        late = index >= 0.9 * self.updates
        every = self.val_every_late if late else self.val_every
        return index % every == 0 or index == self.updates

    def record(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        return dataclasses.asdict(self)


def config_of(preset: str, length: int, window: int, **sizes: int) -> mono.LlamaConfig:
    """Return a preset's shape with normed queries and keys, a head of its own, and windows."""
    layers = mono.LlamaConfig.preset(preset).num_hidden_layers
    return mono.LlamaConfig.preset(
        preset,
        family="qwen3",
        tie_word_embeddings=False,
        max_position_embeddings=length,
        sliding_window=window,
        layer_types=(SLIDING_ATTENTION,) * layers,
        **sizes,
    )


# The vocabulary of 50,304 is GPT-2's 50,257, filled up to a multiple of 128.
RECIPE = Recipe(config_of("124m", length=8192, window=1024))
# Rows of a micro-batch, for the memory of on_paper.py; gradients do not depend on it.
MICRO_BATCH = 4
# Seconds on a CPU. The vocabulary is the folder's.
SMOKE = Recipe(
    config_of("nano", length=64, window=24),
    length=64,
    rows=16,
    updates=30,
    val_tokens=4096,
    val_every=10,
    val_every_late=5,
)


def model_of(recipe: Recipe, seed: int) -> mono.Llama:
    """Return a new model.

    As in the public code a block's last matrices and the head begin at 0, and the embedding at the
    size of a normalised activation.
    """
    model = mono.Llama(recipe.config, seed=seed)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(recipe.embedding_std / recipe.config.initializer_range)
        if not recipe.config.tie_word_embeddings:
            model.lm_head.weight.zero_()
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            if name.endswith("q_norm.weight"):
                parameter.fill_(recipe.score_scale * math.sqrt(recipe.config.head_dim))
    return model


def optimizer_of(recipe: Recipe) -> mono.Muon:
    """Return Muon for the blocks' matrices and AdamW for the rest, at the recipe's rates."""
    config = recipe.config
    rate = recipe.muon_lr / (ADAMW_RMS * math.sqrt(config.hidden_size))
    # The matrices lose lr decay of the public units, whatever the rate that is given here.
    lost = recipe.muon_lr * recipe.muon_decay
    down = math.sqrt(config.hidden_size / config.intermediate_size)
    groups = [
        mono.Group("*.embed_tokens.weight", lr=recipe.embedding_lr / rate, weight_decay=0.0),
        mono.Group("*norm.weight", lr=recipe.gain_lr / rate),
        mono.Group("*.down_proj.weight", lr=down, weight_decay=lost / (rate * down)),
    ]
    if not config.tie_word_embeddings:
        groups.append(mono.Group("lm_head.weight", lr=recipe.head_lr / rate, weight_decay=0.0))
    return mono.Muon(
        lr=rate,
        betas=recipe.betas,
        eps=recipe.eps,
        weight_decay=lost / rate,
        momentum=recipe.momentum,
        first_momentum=recipe.first_momentum,
        momentum_warmup=recipe.momentum_warmup,
        groups=tuple(groups),
    )


def schedule_of(recipe: Recipe) -> Schedule:
    """Return the factor of all rates: 1, then a line to 0 over the last `decay_share`.

    factor(i) = min(1, (1 - i / updates) / decay_share)
    """

    def factor(index: int) -> float:
        left = max(0.0, 1 - index / recipe.updates)
        return min(1.0, left / recipe.decay_share)

    return factor


def training_flops(recipe: Recipe, tokens: float, pairs: float) -> float:
    """Return the FLOPs of training on tokens with so many pairs of a query and a key in one head.

    6 N_matmul tokens + 12 L d_attn pairs: a pair costs 2 d_attn for its score and 2 d_attn for its
    value, and the backward pass twice as much.
    """
    config = recipe.config
    width = config.num_attention_heads * config.head_dim
    return 6 * matmul_parameters(config) * tokens + 12 * config.num_hidden_layers * width * pairs


def engine_of(
    recipe: Recipe, seed: int, device: torch.device, precision: str, micro_batch: int | None
) -> mono.Resident:
    """Return the engine that trains a new model."""
    return mono.Resident(
        model_of(recipe, seed).to(device),
        optim=optimizer_of(recipe),
        schedule=schedule_of(recipe),
        precision=mono.Precision(precision),
        micro_batch=micro_batch,
        rounds_in_update=True,
    )
