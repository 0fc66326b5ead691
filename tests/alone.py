"""A member trained by itself, with the dropout that it has in an ensemble: the slow path of law 5."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from monograph import compat
from monograph.ensemble.dropout import Dropout
from monograph.resident import Resident


def stacked(batches):
    """Batches of members as one, each its own."""
    return {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}


class Alone:
    """A member trained by itself, its dropout counted as the ensemble counts it."""

    def __init__(self, model: nn.Module, loss, seed: int, **options):
        self.counter = SimpleNamespace(seed=torch.tensor(seed), draw=torch.tensor(0))
        self.loss, self.functions = loss, Dropout(self.counter)
        self.engine = Resident(model, loss=self._loss, **options)

    def _loss(self, model, batch):
        self.functions.site = 0
        with compat.replace_functional(
            self.functions.functions() | {"scaled_dot_product_attention": self._attention}
        ):
            result = self.loss(model, batch)
        self.counter.draw += 1
        return result

    def _attention(
        self,
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        if not dropout_p:
            return PLAIN(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            float_mask = attn_mask.dtype != torch.bool
            scores = (
                scores + attn_mask if float_mask else scores.masked_fill(~attn_mask, -torch.inf)
            )
        return self.functions.apply(scores.softmax(-1), dropout_p, tuple(scores.shape)) @ value


PLAIN = nn.functional.scaled_dot_product_attention
