# Run: pytest tests/laws/test_planned_is_measured.py
"""Law 12: the peak memory that is predicted without running a step is the one that the CPU's
allocator then sees.

The instrument is `LiveBytes`; benchmarks/plan.py does the same for random configurations.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batches import packed, ragged, tiny_config
from monograph.graph.capture import capture
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.loss import token_loss
from monograph.model.llama import Llama
from monograph.optim import AdamW, Muon
from monograph.planner.defaults import MAX_ESTIMATE_ERROR
from monograph.predict.estimate import active_adapter_parameters, estimate_bytes
from monograph.predict.footprint import Work, footprint
from monograph.resident import Resident
from monograph.rl.loss import PolicyLoss
from monograph.step import Step
from monograph.step.on_device import can_fuse_gradients

WORST = 0.05


def only_the_step(engine, window, scope):
    """The engine's own method would compile evaluation, too, which no update needs."""
    capture(engine.step, "inductor", scope)


def plan(monkeypatch):
    """The benchmark that measures what is predicted."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("plan")


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(Resident, "capture", only_the_step)
    return plan(monkeypatch).measured


def shape(**sizes):
    return tiny_config(hidden_size=64, intermediate_size=160, **sizes)


EAGER = {
    "more layers than the trace": Work(
        shape(num_hidden_layers=6), rows=8, length=48, optim=AdamW(), compile="none", window_rows=16,
    ),
    "a step of few tokens, so the update": Work(
        shape(num_hidden_layers=4), rows=1, length=8, optim=AdamW(), compile="none",
    ),
    "a large vocabulary": Work(
        shape(vocab_size=3000, num_hidden_layers=4), rows=4, length=48, optim=AdamW(), compile="none",
    ),
    "bf16, muon, dense rows": Work(
        shape(num_hidden_layers=5), rows=8, length=48, optim=Muon(), precision="bf16", compile="none", packed=False
    ),
    "a Gemma 3, whose first layers are of one kind": Work(
        shape(
            model_type="gemma3_text", num_hidden_layers=6, sliding_window=8, layer_types=(*("sliding_attention",) * 5,
            "full_attention"), rope_local_theta=1e2,
        ),
        rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "a mixture of experts": Work(
        shape(model_type="olmoe", num_experts=6, num_experts_per_tok=2, num_hidden_layers=5, output_router_logits=True),
        rows=8, length=48, optim=AdamW(), compile="none", window_rows=16,
    ),
    "a gpt-oss": Work(
        shape(model_type="gpt_oss", num_experts=6, num_experts_per_tok=2, num_hidden_layers=5, attention_bias=True,
              sliding_window=9, layer_types=("sliding_attention", "full_attention") * 2 + ("sliding_attention",)),
        rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "a mixture in every second layer, bf16, muon": Work(
        shape(model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, num_hidden_layers=5,
              mlp_only_layers=(0, 2, 4)), rows=8, length=48, optim=Muon(), precision="bf16", compile="none",
    ),
    "layers that do not rotate": Work(
        shape(model_type="smollm3", num_hidden_layers=5, no_rope_layers=(1, 1, 1, 0, 1)),
        rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "a Qwen 3.5": Work(
        shape(model_type="qwen3_5_text", num_hidden_layers=7, layer_types=("full_attention", *("linear_attention",
        "full_attention") * 3)), rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "a Granite 4": Work(
        shape(model_type="granitemoehybrid", num_hidden_layers=7, layer_types=("full_attention", *("mamba",
        "full_attention") * 3)), rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "a Nemotron-H": Work(
        shape(model_type="nemotron_h", num_hidden_layers=8, tie_word_embeddings=False,
              layer_types=("full_attention", "mlp", *("mamba", "mlp") * 3)),
        rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "an LFM2": Work(
        shape(model_type="lfm2", num_hidden_layers=7, layer_types=("full_attention", *("conv", "full_attention") * 3)),
        rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "a Gemma 4": Work(
        shape(
            model_type="gemma4_text", num_hidden_layers=6, sliding_window=8, layer_types=("sliding_attention",
            "full_attention") * 3, rope_local_theta=1e2, global_head_dim=64, attention_k_eq_v=True,
            num_global_key_value_heads=1, final_logit_softcapping=30.0,
        ),
        rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "a small Gemma 4": Work(
        shape(
            model_type="gemma4_text", num_hidden_layers=6, sliding_window=8, layer_types=("sliding_attention",
            "full_attention") * 3, rope_local_theta=1e2, global_head_dim=64, num_kv_shared_layers=3,
            use_double_wide_mlp=True, hidden_size_per_layer_input=32,
        ),
        rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "a Gemma 4 with experts": Work(
        shape(
            model_type="gemma4_text", num_hidden_layers=6, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64,
        ),
        rows=8, length=48, optim=AdamW(), compile="none",
    ),
    "a GLM-4": Work(
        shape(model_type="glm4", num_hidden_layers=7, partial_rotary_factor=0.5), rows=8, length=48, optim=AdamW(),
        compile="none",
    ),
    "weights rounded to 4 bits, muon, bf16": Work(
        shape(num_hidden_layers=5, tie_word_embeddings=False), rows=4, length=16, optim=Muon(), precision="bf16",
        compile="none", quantize="int4",
    ),
    "a head for multi-token prediction, a large vocabulary": Work(
        shape(vocab_size=1000, num_hidden_layers=6, mtp_num_hidden_layers=1), rows=8, length=48, optim=AdamW(),
        compile="none", window_rows=16,
    ),
    "adapters": Work(shape(num_hidden_layers=5), rows=8, length=48, optim=AdamW(), compile="none", lora=Lora(8)),
    "adapters in a step of few tokens, bf16": Work(
        shape(num_hidden_layers=4),
        rows=1, length=8, optim=AdamW(), precision="bf16", compile="none",
        lora=Lora(32, targets=("q_proj", "down_proj")),
    ),
    "adapters beside whole numbers, bf16": Work(
        shape(num_hidden_layers=5),
        rows=8, length=48, optim=AdamW(), precision="bf16", compile="none", window_rows=16, lora=Lora(8, base="int8"),
    ),
    "adapters beside 4 bits": Work(
        shape(num_hidden_layers=5),
        rows=8, length=48, optim=AdamW(), compile="none", packed=False, lora=Lora(8, base="nf4"),
    ),
    "adapters of experts beside 4 bits": Work(
        shape(model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, num_hidden_layers=5),
        rows=8, length=48, optim=AdamW(),
        compile="none", lora=Lora(8, targets=("q_proj", "up_proj", "down_proj"), base="nf4"),
    ),
    "adapters and rows of tokens, a large vocabulary": Work(
        shape(vocab_size=3000, num_hidden_layers=3), rows=4, length=48, optim=AdamW(), compile="none",
        lora=Lora(4, tokens=(3, 2999), dora=True),
    ),
}  # fmt: skip


# By day a mixture in every second layer stands for mixtures, bf16, Muon and kinds of layers that
# take turns, and a step of few tokens for more layers than the trace. Adapters are traced for the
# search, beside its estimate, see below.
BY_DAY = {
    "a mixture in every second layer, bf16, muon",
    "a step of few tokens, so the update",
    "weights rounded to 4 bits, muon, bf16",
}
SEARCHED_BY_DAY = {"adapters and rows of tokens, a large vocabulary"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.slow) for name in EAGER]
)
def test_an_eager_step(name, measured):
    assert footprint(EAGER[name]).peak_bytes == pytest.approx(measured(EAGER[name]), rel=WORST)


SLOW = pytest.mark.slow
REWARDED = [
    ("exact", "none"),
    pytest.param("rows", "none", marks=SLOW),
    pytest.param("rows", "blocks", marks=SLOW(reason="compiles for half a minute")),
]


@pytest.mark.parametrize(("judged", "scope"), REWARDED)
def test_a_step_of_rewarded_answers(judged, scope, monkeypatch):
    config = shape(num_hidden_layers=4, vocab_size=61 if judged == "exact" else 2000)
    model = Llama(config)
    if judged == "exact":
        model.use_attention("cached")
    window = packed(96) if judged == "rows" else ragged(96)
    length = window["tokens"].shape[1]
    window |= {
        name: torch.ones(96, length, dtype=torch.float64) for name in ("factors", "shares", "drawn")
    }
    engine = Resident(model, loss=PolicyLoss(), optim=AdamW(), clip=1.0, micro_batch=48)
    if scope != "none":
        only_the_step(engine, window, scope)
    engine.accumulate(window)
    engine.update()
    measured_bytes = plan(monkeypatch).peak_bytes(engine, window)
    work = Work(
        config,
        rows=48,
        length=length,
        optim=AdamW(),
        precision="fp32",
        compile=scope,
        window_rows=96,
        packed=judged == "rows",
        answer_scoring=judged,
    )
    assert footprint(work).peak_bytes == pytest.approx(measured_bytes, rel=WORST)
    assert footprint(replace(work, answer_scoring="")).peak_bytes < 0.9 * measured_bytes, (
        "the loss of texts takes less"
    )


@pytest.mark.parametrize(("loss", "judged"), [(token_loss, ""), (PolicyLoss(), "rows")])
def test_a_plan_for_a_gpu_knows_whether_products_add_gradients(loss, judged):
    config = shape(num_hidden_layers=1)
    step = Step(Llama(config), loss=loss, optim=AdamW(), precision=Precision("bf16"))
    work = Work(
        config,
        rows=1,
        length=8,
        optim=AdamW(),
        precision="bf16",
        device_type="cuda",
        answer_scoring=judged,
    )
    assert work.fused == can_fuse_gradients(step, on_cuda=True)


CAPTURED = {
    "one graph": Work(
        shape(vocab_size=2000, num_hidden_layers=1), rows=8, length=48, optim=AdamW(), packed=False
    ),
    "a graph per block, recomputed in part": Work(
        shape(num_hidden_layers=6),
        rows=8,
        length=48,
        optim=AdamW(),
        compile="blocks",
        remat=0.5,
        packed=False,
    ),
    "one graph, bf16, gradients of a tied embedding that are larger than all that is stored": Work(
        shape(vocab_size=4000, num_hidden_layers=2),
        rows=3,
        length=32,
        optim=AdamW(),
        precision="bf16",
        packed=False,
    ),
    "bf16, a loss in four chunks": Work(
        shape(vocab_size=8000, num_hidden_layers=1),
        rows=32,
        length=48,
        optim=AdamW(),
        precision="bf16",
        compile="blocks",
        packed=False,
    ),
    "adapters, one graph": Work(
        shape(num_hidden_layers=2), rows=8, length=48, optim=AdamW(), packed=False, lora=Lora(8)
    ),
    "adapters with magnitudes, a graph per block": Work(
        shape(num_hidden_layers=2),
        rows=8,
        length=48,
        optim=AdamW(),
        compile="blocks",
        packed=False,
        lora=Lora(8, dora=True),
    ),
    "adapters and rows of tokens, a tied table, bf16": Work(
        shape(vocab_size=3000, num_hidden_layers=2, tie_word_embeddings=True),
        rows=4,
        length=48,
        optim=AdamW(),
        precision="bf16",
        packed=False,
        lora=Lora(4, tokens=(3, 2999)),
    ),
    "adapters beside 4 bits, a graph per block": Work(
        shape(num_hidden_layers=4),
        rows=8,
        length=48,
        optim=AdamW(),
        precision="bf16",
        compile="blocks",
        packed=False,
        lora=Lora(8, base="nf4"),
    ),
}


ALL = EAGER | CAPTURED


def holds_in_a_graph(engine):
    """The law for a captured engine, most of whose bytes are activations; test_compiled_is_eager.py
    has one.
    """
    window = packed(16)
    work = Work(
        engine.model.config,
        rows=engine.micro_batch,
        length=window["tokens"].shape[1],
        optim=AdamW(),
        window_rows=16,
    )
    engine.accumulate(window)
    engine.update()
    with pytest.MonkeyPatch.context() as patched:
        peak_bytes = plan(patched).peak_bytes(engine, window)
    assert footprint(work).peak_bytes == pytest.approx(peak_bytes, rel=WORST)
    assert 4 * 4 * work.config.parameter_count() < peak_bytes / 2


@pytest.mark.slow(reason="each compiles for half a minute or more")
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step(name, measured):
    predicted = footprint(CAPTURED[name]).peak_bytes
    torch.compiler.reset()
    assert predicted == pytest.approx(measured(CAPTURED[name]), rel=WORST)


def on_a_gpu(layers, optim, precision, **more):
    config = shape(num_hidden_layers=layers, head_dim=16, max_position_embeddings=256)
    return Work(
        config,
        rows=8,
        length=256,
        optim=optim,
        precision=precision,
        compile="none",
        device_type="cuda",
        **more,
    )


ON_A_GPU = {
    "fp32, grouped heads, no borders": on_a_gpu(6, AdamW(), "fp32", packed=False),
    "fp16, packed": on_a_gpu(4, AdamW(), "fp16", window_rows=16),
    "bf16, muon, a share recomputed": on_a_gpu(6, Muon(), "bf16", remat=0.5, packed=False),
    "bf16, 8-bit state": on_a_gpu(4, AdamW(state="8bit"), "bf16"),
    "bf16, adapters beside 4 bits, packed": on_a_gpu(6, AdamW(), "bf16", lora=Lora(8, base="nf4")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_step_on_a_gpu(name, measured):
    assert footprint(ON_A_GPU[name]).peak_bytes == pytest.approx(
        measured(ON_A_GPU[name]), rel=WORST
    )


@pytest.mark.slow(
    reason="traces five steps; by day the adapters of test_an_eager_step are beside frozen weights"
)
def test_frozen_weights_have_neither_gradient_nor_moments():
    """2 bytes a number of the base in bf16, and 16 a number of the adapters: 4 of each of 4 kinds."""
    plain, whole_numbers, four_bits = (
        replace(EAGER[name], config=shape(num_hidden_layers=3))  # which are traced as they are
        for name in ("adapters", "adapters beside whole numbers, bf16", "adapters beside 4 bits")
    )
    work = replace(plain, precision="bf16")
    found, adapters = footprint(work).by_origin, active_adapter_parameters(work)
    # Keys and values are half as wide.
    assert adapters == 3 * 8 * (4 * 2 * 64 + 3 * (64 + 160) - 2 * 32)
    assert found["gradients"] == pytest.approx(4 * adapters, rel=0.01)
    assert found["moments"] == pytest.approx(8 * adapters, rel=0.01)
    norms = 2 * (2 * 3 + 1) * 64  # which stay in fp32: 2 bytes more each
    assert found["weights"] == pytest.approx(
        2 * work.config.parameter_count() + norms + 4 * adapters, rel=0.01
    )
    blocks, outputs = (
        3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160),
        3 * (3 * 64 + 2 * 32 + 2 * 160),
    )
    for narrow, dense, number, kept in (
        (whole_numbers, work, 2, blocks + 4 * outputs),
        (four_bits, plain, 4, blocks * (0.5 + 1 / 64 + 4 / 16384)),
    ):
        saved = footprint(dense).by_origin["weights"] - footprint(narrow).by_origin["weights"]
        assert saved == pytest.approx(number * blocks - kept, rel=0.03)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SEARCHED_BY_DAY else pytest.mark.slow)
        for name, work in ALL.items()
        if work.lora
    ],
)
def test_the_search_is_near_the_trace(name):
    """It ranks; the one that it chooses is traced where that may matter (`planner.defaults.MAX_ESTIMATE_ERROR`)."""
    assert 0.5 <= estimate_bytes(ALL[name]) / footprint(ALL[name]).peak_bytes <= MAX_ESTIMATE_ERROR


def test_the_parts_are_what_they_are_called():
    work = EAGER["a step of few tokens, so the update"]
    found, parameters = footprint(work), work.config.parameter_count()
    static = {
        name: found.by_origin[name] / (4 * parameters)
        for name in ("weights", "gradients", "moments")
    }
    assert static == pytest.approx({"weights": 1, "gradients": 1, "moments": 2}, rel=0.01)


@pytest.mark.slow(
    reason="traces a model of each depth; by day test_footprint.py has a step of any depth"
)
def test_a_block_more_is_so_many_bytes_more_of_activations_whatever_the_depth():
    work = EAGER["more layers than the trace"]
    found = [
        footprint(replace(work, config=shape(num_hidden_layers=n))).by_origin["activations"]
        for n in (6, 7, 8)
    ]
    assert found[2] - found[1] == found[1] - found[0] > 0
