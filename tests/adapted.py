"""Small models with adapters, and the same by PEFT."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

from batches import tiny_llama
from monograph.decode.adapter_bank import StoredAdapter, stored_adapter
from monograph.graph.lora import Lora, adapted_layers
from monograph.graph.precision import Precision
from monograph.graph.token_rows import tables_with_rows
from monograph.model.adapter import install_adapters
from monograph.model.llama import Llama

SMALL = Lora(rank=4, alpha=6.0)
KINDS = {"lora": SMALL, "rslora": replace(SMALL, rslora=True), "dora": replace(SMALL, dora=True)}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft():
    """The library, or the test is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's kernels, which it looks for
        return pytest.importorskip("peft", reason="peft is not installed: the extra `dev` has it")


@torch.no_grad()
def trained(module: nn.Module, seed: int = 1, spread: float = 0.05) -> nn.Module:
    """The module with B, magnitudes and rows of tokens, as if they had been trained."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted_layers(module).values():
        layer.lora_B.weight.copy_(
            torch.randn(layer.lora_B.weight.shape, generator=generator) * spread
        )
        if (lengths := layer.lora_magnitude_vector) is not None:
            lengths.mul_(1 + torch.randn(lengths.shape, generator=generator) * spread)
    for table in tables_with_rows(module).values():
        table.token_rows.add_(torch.randn(table.token_rows.shape, generator=generator) * spread)
    return module


def many_stored(
    base: Llama, loras: Iterable[Lora], spread: float = 0.05
) -> tuple[dict[str, Llama], dict[str, StoredAdapter]]:
    """For each of several adapters of a base, "a0", "a1", ...: the base with it, unmerged, and the
    adapter as a bank takes it.
    """
    alone, stored = dict[str, Llama](), dict[str, StoredAdapter]()
    for number, lora in enumerate(loras):
        name = f"a{number}"
        alone[name] = copy.deepcopy(base)
        install_adapters(alone[name], lora, seed=number)
        trained(alone[name], seed=number, spread=spread)
        stored[name] = stored_adapter(alone[name], lora, name)
    return alone, stored


def adapted_llama(
    lora: Lora = SMALL, precision: str = "fp32", dtype: torch.dtype = torch.float32, **sizes
) -> Llama:
    """A tiny Llama with trained adapters, as a run has it."""
    model = tiny_llama(dtype, **sizes)
    install_adapters(model, lora, precision=Precision(precision))
    trained(model)
    return model
