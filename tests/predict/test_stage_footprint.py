# Run: pytest tests/predict/test_stage_footprint.py
"""Law 12 for streaming: what passes and updates allocate beside planes, slots and staging buffers is
what a trace of one stage says, here by the CPU's allocator.

tests/pretended_gpu/test_planned.py does the same with a GPU's allocator.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batches import tiny_config
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.graph.remat import policy_named
from monograph.model.adapter import install_adapters
from monograph.model.llama import Llama
from monograph.optim import AdamW, Muon
from monograph.planner.placement_bytes import StreamWay, stages_of
from monograph.predict.footprint import Work
from monograph.profiling.memory import LiveBytes
from monograph.stream import Streamed

WORST = 0.05
SHAPE = tiny_config(hidden_size=64, intermediate_size=160, num_hidden_layers=8, vocab_size=500)
USUAL = Work(SHAPE, rows=8, length=48, optim=AdamW(), compile="none", window_rows=16, packed=False)
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}


def way(work, when="sweep", per_stage=2, *, offload=False):
    stages = stages_of(work.config, work.optim, work.precision, per_stage, work.lora)
    return StreamWay(work, stages, per_stage, when, offload)


WAYS = {
    "as usual": way(USUAL),
    "a block a stage, many micro-batches": way(
        replace(USUAL, rows=2, window_rows=16), "next forward", 1
    ),
    "blocks recomputed": way(replace(USUAL, remat="full")),
    "blocks recomputed in part, packed": way(replace(USUAL, remat=0.5, packed=True)),
    "a large vocabulary, bf16": way(
        replace(USUAL, config=replace(SHAPE, vocab_size=4000), precision="bf16"), "next forward"
    ),
    "a hybrid, Mamba in three of four blocks": way(
        replace(
            USUAL,
            config=tiny_config(
                model_type="granitemoehybrid",
                layer_types=("full_attention", "mamba", "mamba", "mamba"),
                mamba_d_state=8,
                hidden_size=64,
                intermediate_size=160,
                num_hidden_layers=4,
                vocab_size=500,
            ),
            rows=4,
        ),
        per_stage=1,
    ),
    "heads of two widths": way(
        replace(
            USUAL,
            config=tiny_config(
                model_type="gemma4_text",
                layer_types=("sliding_attention", "full_attention") * 4,
                sliding_window=16,
                rope_local_theta=1e2,
                global_head_dim=64,
                hidden_size=64,
                intermediate_size=160,
                num_hidden_layers=8,
                vocab_size=500,
            ),
        ),
        per_stage=1,
    ),
    "adapters, 4 bits": way(replace(USUAL, lora=Lora(rank=4, base="nf4"), precision="bf16")),
    "adapters of a mixture, 4 bits": way(
        replace(
            USUAL,
            config=tiny_config(**MIXTURE, hidden_size=64, num_hidden_layers=2, vocab_size=500),
            lora=Lora(rank=4, base="nf4"),
            precision="bf16",
            rows=2,
            remat="full",
        ),
        per_stage=1,
        offload=True,
    ),
    "muon, few tokens, so the update": way(replace(USUAL, optim=Muon(), rows=1, window_rows=1)),
}


def measured(case):
    """Return the peak of what an update allocates; all that stays is allocated before."""
    work = case.work
    model = Llama(work.config)
    if work.lora:
        install_adapters(model, work.lora, precision=Precision(work.precision))
    engine = Streamed(
        model,
        optim=work.optim,
        clip=work.clip,
        precision=Precision(work.precision),
        remat=policy_named(work.remat),
        micro_batch=work.rows,
        placement=case.placement(case.first_resident(0)),
    )
    shape = work.window_rows, work.length
    window = {name: torch.randint(500, shape) for name in ("tokens", "targets")}
    if work.packed:
        window["segments"] = torch.ones(shape, dtype=torch.int64)
        window["positions"] = torch.arange(work.length).expand(shape).contiguous()
    engine.accumulate(window)
    engine.update()
    with LiveBytes() as live:
        engine.accumulate(window)
        engine.update()
    return live.peak_bytes + sum(tensor.nbytes for tensor in window.values())


BY_DAY = (
    "a hybrid, Mamba in three of four blocks",
    "adapters of a mixture, 4 bits",
    "blocks recomputed in part, packed",
    "a large vocabulary, bf16",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.slow) for name in WAYS]
)
def test_a_stage_s_passes(name):
    case = WAYS[name]
    assert sum(case.traced_pass_bytes.values()) == pytest.approx(measured(case), rel=WORST)
