"""Small models and ragged batches that many tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import monograph as mono
from monograph.loop import EngineState
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama

VOCABULARY, LENGTH = 61, 24


def tiny_llama(dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any) -> Llama:
    """A two-layer Llama of about 20,000 parameters."""
    return Llama(tiny_config(**sizes), seed=seed).to(dtype)


def tiny_config(**sizes: Any) -> LlamaConfig:
    """The shape of `tiny_llama`."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**(shape | sizes))


def captured_to_train(
    engine: Any, window: Any, backend: str = "aot_eager", scope: str = "whole"
) -> None:
    """Capture an engine's step but for its evaluation, a third of the graphs, where nothing is
    evaluated.
    """
    with patch.object(engine, "_score", lambda batch: None):
        assert engine.capture(window, backend, scope) is None


def ragged(rows: int, seed: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    """Right-padded rows of random lengths, from one token to the whole row, the lengths very
    uneven.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    targets = torch.randint(VOCABULARY, (rows, length), generator=generator)
    lengths = (length * torch.rand(rows, generator=generator) ** 3).long() + 1
    targets[torch.arange(length) >= lengths[:, None]] = -100
    return {"tokens": tokens, "targets": targets}


def packed(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """The same rows as two documents each, the first of 10 tokens."""
    batch, at = ragged(rows, seed), torch.arange(LENGTH)
    batch["segments"] = torch.where(at < 10, 1, 2).expand(rows, -1).contiguous()
    batch["positions"] = torch.where(at < 10, at, at - 10).expand(rows, -1).contiguous()
    return batch


def rows_of(batch: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Rows start to stop of a batch."""
    return {name: tensor[start:stop] for name, tensor in batch.items()}


def large_batch_gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The slow, obviously correct path: mean cross-entropy of the whole batch on dense logits, one
    backward, one flat vector.
    """
    hidden = model(
        batch["tokens"], segments=batch.get("segments"), positions=batch.get("positions")
    )
    logits = hidden @ model.lm_head.weight.T
    loss = nn.functional.cross_entropy(
        logits.flatten(0, -2), batch["targets"].flatten(), ignore_index=-100
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def flat_gradient(model: nn.Module) -> Tensor:
    """The gradients that are on the module, as one flat vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def copied(state: EngineState) -> EngineState:
    """A state that stays what it is while the engine goes on."""
    return EngineState(
        {name: tensor.clone() for name, tensor in state.model.items()},
        {name: tensor.clone() for name, tensor in state.optimizer.items()},
        dict(state.scalars),
    )


def of_rows(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["x"]).square().sum(), len(batch["x"])


ENGINES: dict[str, Callable[..., Any]] = {
    "resident": mono.Resident,
    "ensemble": lambda model, **options: mono.Ensemble([model], **options),
}
