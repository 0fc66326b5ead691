"""Run: pytest tests/predict/test_fp8_head.py

A head in fp8 is planned with its copies of the weight, and with the time of its products.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from monograph.device import card_device
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW
from monograph.predict.estimate import estimate_bytes
from monograph.predict.footprint import Work, footprint
from monograph.predict.roofline import EFFICIENCIES, Efficiency, peak_flops, update_time

SHAPE = LlamaConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=True,
)
BF16 = Work(
    SHAPE, rows=4, length=1024, window_rows=4, optim=AdamW(), precision="bf16", device_type="cuda"
)
EIGHT_BITS = replace(BF16, precision="fp8_head")


@pytest.mark.parametrize("card", ["H200", "4090"])
def test_two_of_the_head_s_three_products_take_the_time_of_fp8(card: str) -> None:
    device = card_device(card)
    rates = peak_flops(device, ("bf16", "fp8_head"))
    assert rates["fp8_head"] == rates["bf16"]
    bf16, ours = (update_time(work, device, rates["bf16"]) for work in (BF16, EIGHT_BITS))
    share = EFFICIENCIES.get(device.name, Efficiency()).products
    share *= BF16.tokens / (BF16.tokens + Efficiency().saturating_tokens)
    head_flops = 4 * SHAPE.vocab_size * SHAPE.hidden_size * BF16.tokens
    saved_s = head_flops * (1 / rates["bf16"] - 1 / rates["fp8"]) / share
    assert bf16.products_s - ours.products_s == pytest.approx(saved_s)
    assert ours._replace(products_s=bf16.products_s) == bf16


@pytest.mark.parametrize(
    "scope",
    ["none", *(pytest.param(each, marks=pytest.mark.slow) for each in ("blocks", "whole"))],
)
def test_the_rounded_weight_and_a_chunk_s_gradients_are_counted(scope: str) -> None:
    """In the trace and in the closed form, beside what a head in bf16 takes."""
    weight = SHAPE.vocab_size * SHAPE.hidden_size
    logits = BF16.tokens * SHAPE.vocab_size  # one chunk
    works = [replace(work, compile=scope) for work in (BF16, EIGHT_BITS)]
    heads = [footprint(work).by_origin["loss head"] for work in works]
    # Two layouts of the weight in fp8; the gradients in fp8 may take the place of freed logits.
    assert 2 * weight <= heads[1] - heads[0] + 2 * SHAPE.hidden_size * BF16.tokens
    assert heads[1] - heads[0] <= 2 * weight + logits + 2**20
    assert estimate_bytes(works[1]) >= estimate_bytes(works[0])
