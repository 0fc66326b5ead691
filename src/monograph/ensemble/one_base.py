"""Compute the hidden states of several language models on one base by one forward pass.

Shapes: N models, B rows, T positions, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from monograph.ensemble.engine import Ensemble
from monograph.graph.shared_base import frozen_parameters
from monograph.loss import Batch
from monograph.step.guard import memory_of


class OneBase:
    """Language models whose adapters are on one base, for passes without gradients.

    The base's weights are read once for the rows of all models. The models are stacked only at the
    first pass, so until then they can be moved to another device.

    Attributes:
        models: the models; see `have_one_base`.
    """

    def __init__(self, models: Sequence[nn.Module]):
        self.models = models
        self._ensemble: Ensemble | None = None

    @torch.no_grad()
    def hidden(self, batch: Batch) -> list[tuple[Tensor, Any]]:
        """Return for each model what `monograph.loss.hidden_of` returns: its hidden states at all
        positions, [B * T, D], and its head.
        """
        if self._ensemble is None:
            self._ensemble = Ensemble(self.models)
            self._ensemble.model.eval()
        hidden_NBTD = self._ensemble(
            batch["tokens"], segments=batch.get("segments"), positions=batch.get("positions")
        )
        return [
            (hidden_BTD.flatten(0, -2), model.lm_head)
            for hidden_BTD, model in zip(hidden_NBTD, self.models, strict=True)
        ]


def have_one_base(models: Sequence[nn.Module]) -> bool:
    """Return whether there are several models that share their frozen parameters, which are then the same
    memory; false if the models have none.
    """
    bases = [[memory_of(parameter) for parameter in frozen_parameters(model)] for model in models]
    return len(models) > 1 and bool(bases[0]) and all(base == bases[0] for base in bases)
