# Run: pytest tests/laws/test_packed_is_separate.py
"""Law 9: documents packed in one row get the hidden states, and pass back the gradients, that they
get alone.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from monograph.graph.capture import compiled, uncapture
from monograph.laws.comparisons import equal_in_float64, error_within, relative_error
from monograph.model import delta_net, mamba, recurrent
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops import delta_rule, state_space
from monograph.optim import AdamW
from monograph.resident import Resident

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.3,  # far from linear, so that attention matters
)
# Windows shorter than most documents, longer than some, and longer than every row; layers that
# differ.
FAMILIES = {
    "llama": CONFIG,
    "mistral": replace(CONFIG, model_type="mistral", sliding_window=5),
    "qwen2": replace(
        CONFIG, model_type="qwen2", sliding_window=12, layer_types=("full_attention", "sliding_attention")
    ),
    "qwen3": replace(CONFIG, model_type="qwen3", sliding_window=1, layer_types=("sliding_attention", "full_attention")),
    "olmo2": replace(CONFIG, model_type="olmo2"),
    "olmoe": replace(CONFIG, model_type="olmoe", head_dim=8, num_experts=5, num_experts_per_tok=2, clip_qkv=1.0),
    "gpt_oss": replace(
        CONFIG, model_type="gpt_oss", num_experts=5, num_experts_per_tok=2, attention_bias=True, sliding_window=7,
        layer_types=("sliding_attention", "full_attention"),
    ),
    "gemma3": replace(
        CONFIG, model_type="gemma3_text", sliding_window=7, layer_types=("sliding_attention", "full_attention"),
        rope_local_theta=1e2,
    ),
    "smollm3": replace(CONFIG, model_type="smollm3", no_rope_layers=(0, 1)),
    "qwen3_5": replace(
        CONFIG, model_type="qwen3_5_text", layer_types=("linear_attention", "full_attention"), linear_num_key_heads=1,
        linear_num_value_heads=2, linear_conv_kernel_dim=4,
    ),
    "qwen3_next": replace(
        CONFIG, model_type="qwen3_next", layer_types=("linear_attention", "full_attention"), num_experts=4,
        num_experts_per_tok=2,
    ),
    "granite4": replace(
        CONFIG, model_type="granitemoehybrid", layer_types=("mamba", "full_attention"), mamba_n_groups=2,
        mamba_d_state=6, position_embedding_type="nope", num_experts=4, num_experts_per_tok=2,
    ),
    "bamba": replace(
        CONFIG, model_type="bamba", layer_types=("mamba", "full_attention"), mamba_d_state=6, partial_rotary_factor=0.5,
    ),
    "nemotron_h": replace(
        CONFIG, model_type="nemotron_h", num_hidden_layers=3, layer_types=("mamba", "mlp", "full_attention"),
        mamba_n_groups=2, mamba_d_state=6, time_step_min=0.01,
    ),
    "lfm2": replace(CONFIG, model_type="lfm2", layer_types=("conv", "full_attention"), conv_L_cache=4),
    "exaone4": replace(
        CONFIG, model_type="exaone4", sliding_window=5, layer_types=("sliding_attention", "full_attention")
    ),
    "glm4": replace(CONFIG, model_type="glm4", partial_rotary_factor=0.5, attention_bias=True),
    "gemma4": replace(
        CONFIG, model_type="gemma4_text", layer_types=("sliding_attention", "full_attention"), sliding_window=7,
        rope_local_theta=1e2, global_head_dim=12, attention_k_eq_v=True, num_global_key_value_heads=1,
        final_logit_softcapping=3.0,
    ),
    "small gemma4": replace(
        CONFIG, model_type="gemma4_text", num_hidden_layers=4, sliding_window=7, rope_local_theta=1e2,
        layer_types=("sliding_attention", "full_attention") * 2, global_head_dim=12, num_kv_shared_layers=2,
        hidden_size_per_layer_input=6,
    ),
    "gemma4 with experts": replace(
        CONFIG, model_type="gemma4_text", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    ),
    "wide": replace(CONFIG, model_type="mistral", sliding_window=100),
}  # fmt: skip
ROW = 48
FLEX_UNFUSED = "ignore:flex_attention called without torch.compile:UserWarning"


def _documents(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(CONFIG.vocab_size, (length,), generator=generator) for length in lengths]


def _pack(documents, row=ROW):
    """Documents in order, a new row where one does not fit, and a last row that is padding
    altogether.
    """
    rows, row_of = [[]], []
    for document in documents:
        if sum(map(len, rows[-1])) + len(document) > row:
            rows.append([])
        row_of.append((len(rows) - 1, sum(map(len, rows[-1]))))
        rows[-1].append(document)
    tokens, segments, positions = (
        torch.zeros(len(rows) + 1, row, dtype=torch.int64) for _ in range(3)
    )
    for document, (index, start) in zip(documents, row_of, strict=True):
        piece = slice(start, start + len(document))
        tokens[index, piece] = document
        segments[index, piece] = segments[index].max() + 1
        positions[index, piece] = torch.arange(len(document))
    pieces = [
        (index, slice(s, s + len(d))) for d, (index, s) in zip(documents, row_of, strict=True)
    ]
    return tokens, segments, positions, pieces


def _results(model, forward, documents):
    """All documents' hidden states in one tensor, and the gradients of a fixed random function of
    them.
    """
    hidden = torch.cat(forward(model, documents))
    readout = torch.randn(
        hidden.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    loss = (hidden * readout.to(hidden.dtype)).sum()
    # A layer's factor is not trained: its gradient is zero.
    gradients = torch.autograd.grad(
        loss,
        [p for name, p in model.named_parameters() if name != "lm_head.weight"],
        materialize_grads=True,
    )
    return [hidden.detach(), *gradients]


def _alone(model, documents):
    return [model(document[None])[0] for document in documents]


def _packed(model, documents):
    tokens, segments, positions, pieces = _pack(documents)
    hidden = model(tokens, segments=segments, positions=positions)
    return [hidden[index, piece] for index, piece in pieces]


def _without_mask(model, documents):
    tokens, _, positions, pieces = _pack(documents)
    hidden = model(tokens, positions=positions)
    return [hidden[index, piece] for index, piece in pieces]


def _without_rotation(model, documents):
    tokens, segments, positions, pieces = _pack(documents)
    hidden = model(tokens, segments=segments, positions=torch.zeros_like(positions))
    return [hidden[index, piece] for index, piece in pieces]


LENGTHS = [5, 17, 1, 20, 31, 9, 2]


# By day a Llama has every way to compute attention, and families that differ most the one that a
# run would choose.
BY_DAY = ("llama", "mistral", "gpt_oss", "qwen3_next")


@pytest.mark.parametrize(
    ("impl", "family"),
    [
        pytest.param(
            impl,
            family,
            marks=()
            if family == "llama" or (impl == "auto" and family in BY_DAY)
            else pytest.mark.slow,
        )
        for impl in ("reference", "sdpa", "blocks", "auto")
        for family in FAMILIES
    ],
)
@settings(max_examples=3)
@given(lengths=st.lists(st.integers(1, ROW), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_packed_is_separate_in_float64(impl, family, lengths, seed):
    documents, model = _documents(lengths, seed), Llama(FAMILIES[family], seed, impl).double()
    packed, alone = (_results(model, forward, documents) for forward in (_packed, _alone))
    assert equal_in_float64(packed[0], alone[0])
    # All gradients as one vector: those of queries and keys vanish when every document is one token
    # long.
    assert equal_in_float64(
        *(torch.cat([g.flatten() for g in result[1:]]) for result in (packed, alone))
    )


def _with_small_chunks(monkeypatch, family):
    monkeypatch.setattr(delta_rule, "CHUNK", 8)
    monkeypatch.setattr(state_space, "CHUNK", 8)
    return _documents([1, 7, 8, 9, ROW, 16, 15, 17, 1, 1]), Llama(FAMILIES[family]).double()


@pytest.mark.parametrize("family", ["qwen3_5", "granite4", "nemotron_h", "lfm2"])
def test_a_recurrent_state_ends_with_its_document(monkeypatch, family):
    """Documents of one token, of a chunk and one more or less, and one that fills a row."""
    documents, model = _with_small_chunks(monkeypatch, family)
    packed, alone = _results(model, _packed, documents), _results(model, _alone, documents)
    assert all(equal_in_float64(*pair) for pair in zip(packed, alone, strict=True))


@pytest.mark.parametrize(
    ("leak", "family"),
    [
        ("state", "qwen3_5"),
        ("state", "granite4"),
        ("state", "nemotron_h"),
        ("convolution", "qwen3_5"),
        ("convolution", "granite4"),
        ("convolution", "nemotron_h"),
        ("convolution", "lfm2"),
    ],
)
def test_the_law_notices_what_a_layer_carries_over_a_border(monkeypatch, leak, family):
    documents, model = _with_small_chunks(monkeypatch, family)
    alone = _results(model, _alone, documents)
    if leak == "state":
        for module in (delta_net, mamba):
            monkeypatch.setattr(module, "document_starts", lambda segments: None)
    else:
        whole = recurrent.CausalConv.forward
        monkeypatch.setattr(
            recurrent.CausalConv,
            "forward",
            lambda self, channels, segments: whole(self, channels, None),
        )
    packed = _results(model, _packed, documents)
    assert min(relative_error(*pair) for pair in zip(packed, alone, strict=True)) > 1e-3


@pytest.mark.filterwarnings(FLEX_UNFUSED)
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each == "gpt_oss" else pytest.mark.slow) for each in FAMILIES],
)
def test_packed_is_separate_with_flex_attention_forward(family):
    documents, model = _documents(LENGTHS), Llama(FAMILIES[family]).double()
    with torch.no_grad():
        alone = torch.cat(_alone(model, documents))
        model.use_attention("flex")
        assert equal_in_float64(torch.cat(_packed(model, documents)), alone)


# By day every two of the three meet.
@pytest.mark.parametrize(
    ("impl", "dtype", "family"),
    [
        pytest.param(
            impl, dtype, family, marks=() if (one + 2 * two + three) % 3 == 0 else pytest.mark.slow
        )
        for one, impl in enumerate(["reference", "sdpa", "blocks"])
        for two, dtype in enumerate([torch.float32, torch.bfloat16])
        for three, family in enumerate(["llama", "mistral", "qwen3"])
    ],
)
def test_packed_is_as_exact_as_separate_in_low_precision(impl, dtype, family):
    documents, model = _documents(LENGTHS), Llama(FAMILIES[family], attention=impl).to(dtype)
    packed, alone = _results(model, _packed, documents), _results(model, _alone, documents)
    exact = _results(model.double(), _alone, documents)
    for ours, naive, truth in zip(packed, alone, exact, strict=True):
        assert error_within(ours, naive, truth)


def test_in_a_long_row_positions_must_restart():
    """Rotary scores depend on differences of positions only, so dropping positions costs nothing
    but exactness.

    That loss is what shows whether they arrive: a late angle carries the rounding of a large
    number.
    """
    documents, model = _documents([23] * 44), Llama(CONFIG)
    alone = _results(model, _alone, documents)
    kept, dropped = (
        _results(model, forward, documents) for forward in (_long_row, _long_row_without_positions)
    )
    exact = _results(model.double(), _alone, documents)
    for with_positions, without, naive, truth in zip(kept, dropped, alone, exact, strict=True):
        assert error_within(with_positions, naive, truth)
        assert not error_within(without, naive, truth)


def _long_row(model, documents):
    tokens, segments, positions, pieces = _pack(documents, row=1024)
    hidden = model(tokens, segments=segments, positions=positions)
    return [hidden[index, piece] for index, piece in pieces]


def _long_row_without_positions(model, documents):
    tokens, segments, _, pieces = _pack(documents, row=1024)
    hidden = model(tokens, segments=segments)
    return [hidden[index, piece] for index, piece in pieces]


def _without_window(model, documents):
    model.config = replace(model.config, sliding_window=None, layer_types=())
    return _packed(model, documents)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocks"])
def test_the_law_notices_a_lost_window(impl):
    documents = _documents(LENGTHS)
    models = [Llama(FAMILIES["mistral"], attention=impl).double() for _ in range(2)]
    packed, alone = (
        _results(models[0], _without_window, documents),
        _results(models[1], _alone, documents),
    )
    assert min(relative_error(*pair) for pair in zip(packed, alone, strict=True)) > 1e-3


@pytest.mark.parametrize("broken", [_without_mask, _without_rotation])
@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocks"])
def test_the_law_notices_a_lost_mask_or_lost_rotation(impl, broken):
    documents, model = _documents(LENGTHS), Llama(CONFIG, attention=impl).double()
    for packed, alone in zip(
        _results(model, broken, documents), _results(model, _alone, documents), strict=True
    ):
        assert relative_error(packed, alone) > 1e-3


@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocks"])
def test_a_document_never_hears_of_its_neighbours(impl):
    documents, model = _documents(LENGTHS), Llama(CONFIG, attention=impl)
    others = [documents[0], *(CONFIG.vocab_size - 1 - document for document in documents[1:])]
    with torch.no_grad():
        assert torch.equal(_packed(model, documents)[0], _packed(model, others)[0])
        assert not torch.equal(_packed(model, documents)[1], _packed(model, others)[1])


@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocks"])
def test_rows_of_padding_alone_stay_finite(impl):
    model = Llama(CONFIG, attention=impl)
    nothing = torch.zeros(2, ROW, dtype=torch.int64)
    hidden = model(nothing, segments=nothing, positions=nothing)
    gradients = torch.autograd.grad(hidden.square().sum(), list(model.model.parameters()))
    assert all(x.isfinite().all() for x in (hidden, *gradients))


def _separate_gradients(model, batch, pieces):
    """The slow, obviously correct path: every document alone, one dense loss."""
    targets = torch.cat([batch["targets"][piece] for piece in pieces])
    logits = (
        torch.cat([model(batch["tokens"][piece][None])[0] for piece in pieces])
        @ model.lm_head.weight.T
    )
    return torch.autograd.grad(
        nn.functional.cross_entropy(logits, targets), list(model.parameters())
    )


def holds_in_a_graph(engine):
    """The law for a captured engine, with its loss and backward pass: test_compiled_is_eager.py has
    one.
    """
    tokens, segments, positions, pieces = _pack(_documents([5, 17, 1, 20, 24, 9, 2]), row=24)
    targets = torch.where(segments > 0, (3 * tokens + positions) % CONFIG.vocab_size, -100)
    batch = {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions}
    engine.step.discard()
    engine.accumulate(batch)
    ours = [parameter.grad for parameter in engine.model.parameters()]
    model = copy.deepcopy(engine.model)
    alone, exact = (
        _separate_gradients(each, batch, pieces) for each in (model, copy.deepcopy(model).double())
    )
    for each in zip(ours, alone, exact, strict=True):
        assert error_within(*each)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("impl", "family"),
    [
        ("auto", "llama"),
        ("auto", "mistral"),
        ("auto", "qwen2"),
        ("sdpa", "llama"),
        ("reference", "llama"),
        pytest.param("sdpa", "mistral", marks=pytest.mark.slow),
        pytest.param("sdpa", "qwen2", marks=pytest.mark.slow),
        pytest.param("reference", "mistral", marks=pytest.mark.slow),
        pytest.param("reference", "qwen2", marks=pytest.mark.slow),
    ],
)
def test_packed_is_separate_on_a_gpu(impl, compiled, family):
    documents, model = _documents(LENGTHS), Llama(FAMILIES[family], attention=impl).cuda()
    alone = _results(model, _alone_on_gpu, documents)
    exact = _results(Llama(FAMILIES[family]).double(), _alone, documents)
    if compiled:
        torch.compiler.reset()
        model.compile(fullgraph=True, dynamic=False)
    # A kernel has an order of sums of its own, as in ops/test_attention_kernels.py.
    k = 4 if compiled else 2
    for ours, naive, truth in zip(
        _results(model, _packed_on_gpu, documents), alone, exact, strict=True
    ):
        assert error_within(ours, naive, truth, k=k)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_blocks_that_are_graphs_have_flex_attention_on_a_gpu(family):
    documents, model = _documents(LENGTHS), Llama(FAMILIES[family]).cuda()
    alone = _results(model, _alone_on_gpu, documents)
    exact = _results(Llama(FAMILIES[family]).double(), _alone, documents)
    tokens, segments, positions, _ = _pack(documents)
    window = {"tokens": tokens, "targets": tokens, "segments": segments, "positions": positions}
    engine = Resident(model, optim=AdamW())
    assert engine.capture(window, scope="blocks") is None
    masks = [
        mask for _, mask in model.attention_inputs(tokens.cuda(), segments.cuda(), positions.cuda())
    ]
    assert all(isinstance(mask, BlockMask) for mask in masks)
    for ours, naive, truth in zip(
        _results(model, _packed_on_gpu, documents), alone, exact, strict=True
    ):
        assert error_within(ours, naive, truth, k=4)  # see above
    uncapture(engine.step)
    assert isinstance(
        model.attention_inputs(tokens.cuda(), segments.cuda(), positions.cuda())[0][1], torch.Tensor
    )


@pytest.mark.gpu
def test_packed_is_separate_without_gradients_on_a_gpu():
    """Of rows of several blocks, each has its own blocks: no backward pass fixes the layout of
    their lists.
    """
    documents, model = _documents([300, 40, 120, 200, 130, 50]), Llama(CONFIG).cuda()
    tokens, segments, positions, pieces = _pack(documents, row=384)
    forward = compiled(lambda *inputs: model(inputs[0], segments=inputs[1], positions=inputs[2]))
    with torch.no_grad():
        hidden = forward(tokens.cuda(), segments.cuda(), positions.cuda()).cpu()
        ours, alone = (
            torch.cat([hidden[piece] for piece in pieces]),
            torch.cat(_alone_on_gpu(model, documents)),
        )
        exact = torch.cat(_alone(Llama(CONFIG).double(), documents))
    assert error_within(ours, alone, exact, k=4)  # see above


def _alone_on_gpu(model, documents):
    return [model(document[None].cuda())[0].cpu() for document in documents]


def _packed_on_gpu(model, documents):
    tokens, segments, positions, pieces = _pack(documents)
    hidden = model(tokens.cuda(), segments=segments.cuda(), positions=positions.cuda()).cpu()
    return [hidden[index, piece] for index, piece in pieces]
