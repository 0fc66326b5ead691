"""Width transfer in the form in which the theory states it: one learning rate, and multipliers in
the forward pass.

A weight of the wide model is W = A theta (Tensor Programs V, arXiv 2203.03466, definition 4.1):
theta is what the optimizer sees, A is a constant of its tensor. Written down by hand from that
paper's table 8 and its lemma on (A, B, C), and without anything from `monograph.transfer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from monograph.model.llama import Llama
from monograph.optim import AdamW, Group, Muon

MATRICES = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "_proj.weight")
Loss = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


def multiplier(name: str, m: float, tied: bool, muon: bool) -> float:
    """A: 1/m in front of all that sums over the width and is updated by Adam, m^-1/2 by Muon at
    Adam's size; else 1.
    """
    if name.endswith(MATRICES):
        return m**-0.5 if muon else 1 / m
    return 1 / m if name == ("model.norm.weight" if tied else "lm_head.weight") else 1.0


def spread(name: str, m: float, muon: bool) -> float:
    """Of theta at the start, over the base's; with A it makes m^-1/2 for what sums over the width."""
    if name.endswith(MATRICES):
        return 1.0 if muon else m**0.5
    return m**0.5 if name == "lm_head.weight" else 1.0


def eps(name: str, m: float) -> float:
    """In proportion to theta's gradient: that of W falls as 1/m, but for the head's, and A comes on
    top of it.
    """
    return m**-2 if name.endswith(MATRICES) else 1 / m


def theta(model: Llama, m: float, base_spread: float, muon: bool) -> None:
    """Turn a model as it was drawn into one that holds theta."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(base_spread * spread(name, m, muon) / model.config.initializer_range)


def loss_with_multipliers(model: Llama, m: float, muon: bool) -> Loss:
    """`dense_loss` of the model whose weights are A theta."""
    tied = model.config.tie_word_embeddings

    def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        named = dict(module.named_parameters())
        weights = {
            name: multiplier(name, m, tied, muon) * parameter for name, parameter in named.items()
        }
        if tied:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        hidden = functional_call(module, weights, (batch["tokens"],), tie_weights=False)
        return cross_entropy(hidden @ weights["lm_head.weight"].mT, batch)

    return loss


def dense_loss(module: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same of a plain model."""
    return cross_entropy(module(batch["tokens"]) @ module.lm_head.weight.mT, batch)


def cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["targets"].flatten()
    losses = nn.functional.cross_entropy(
        logits.flatten(0, -2), targets, reduction="sum", ignore_index=-100
    )
    return losses, (targets != -100).sum()


def optimizer(optim: AdamW | Muon, model: Llama, m: float) -> AdamW | Muon:
    """The base's, with one rate and one decay for all tensors; eps alone knows the width."""
    return replace(
        optim, groups=[Group(name, eps=eps(name, m)) for name, _ in model.named_parameters()]
    )
