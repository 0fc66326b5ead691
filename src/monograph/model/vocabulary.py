"""Rows of an embedding and of a head for tokens that a model has none for.

Shapes: V rows, D hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from monograph.graph.windows import Window, keep, kept_dtype
from monograph.model.llama import Llama

ROWS_AT_ONCE = 4096  # that are summed in float64, of a table that would not fit the memory in it


@torch.no_grad()
def extend(model: Llama, known: int, tokens: int) -> None:
    """Give the tokens from `known` to `tokens` - 1 a row each, in place.

        W[i] = mean of W[0] ... W[known - 1],   known <= i < tokens

    Spare rows are used first, missing ones are added and none is taken away. Rows below `known` keep their bits, an
    untied head gets rows of its own mean, a tied one stays tied. A draw around the mean would be no better
    (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"). The sum is in float64 and rounded
    once, so that it is the same bits wherever it is made and in whichever dtype the folder was read.

    Args:
        model: on any device.
        known: tokens that the model was trained with, at most V.
        tokens: entries of the tokenizer.
    """
    layers: list[nn.Module] = [model.model.embed_tokens]
    if not model.config.tie_word_embeddings:
        layers.append(model.lm_head)
    for layer in layers:
        weight: Any = layer.weight
        keep(weight, weight.detach().to(kept_dtype(weight), copy=isinstance(weight, Window)))
        layer.weight = _extended(weight, known, tokens)
    model.config = replace(model.config, vocab_size=max(model.config.vocab_size, tokens))
    model.tie_weights()
    model.model.embed_tokens.num_embeddings = model.lm_head.out_features = model.config.vocab_size


def _extended(weight_VD: nn.Parameter, known: int, tokens: int) -> nn.Parameter:
    missing = max(0, tokens - weight_VD.shape[0])
    extended_VD = torch.cat([weight_VD, weight_VD.new_empty(missing, weight_VD.shape[1])]) if missing else weight_VD
    extended_VD[known:tokens] = _mean(weight_VD[:known]).to(weight_VD.dtype)
    return nn.Parameter(extended_VD, requires_grad=weight_VD.requires_grad) if missing else weight_VD


def _mean(rows_VD: Tensor) -> Tensor:
    """In fp32, or fp64 of fp64."""
    total_D = torch.stack([part.double().sum(0) for part in rows_VD.split(ROWS_AT_ONCE)]).sum(0)
    return (total_D / len(rows_VD)).to(torch.promote_types(rows_VD.dtype, torch.float32))
