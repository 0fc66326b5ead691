# Run: pytest tests/laws/test_exported_is_original.py
"""Law 11: what is exported computes, tokenises, renders and stops as the original: in transformers,
in llama.cpp.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from adapted import KINDS, adapted_llama, trained
from chats import CHATS, speaking
from daily import nightly
from llama_cpp import LlamaCpp
from monograph.errors import InputRefused
from monograph.graph.experts import ExpertLinear
from monograph.graph.lora import Lora, adapt, adapted_layers
from monograph.graph.lora_merge import merge
from monograph.laws.comparisons import relative_error
from monograph.model.adapter import pack_adapters, save_gguf_adapter
from monograph.model.config import LlamaConfig
from monograph.model.gguf import FILE, save_gguf
from monograph.model.hub import load_model, save_model
from monograph.model.layer_types import (
    CONVOLUTION,
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    MAMBA,
    PLAIN_MLP,
    SLIDING_ATTENTION,
)
from monograph.model.llama import Llama
from monograph.model.scaling import (
    GrowingYarnScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    YarnScaling,
)
from monograph.ops.logit_cap import capped
from monograph.ops.weight_blocks import BLOCK
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.tokenizer import BOS, EOS, PAD, Tokenizer
from monograph.text.tokenizer_file import KNOWN_PATTERNS
from probes import probes
from reference import pieces

NO_GGUF = "the package gguf is not installed: pip install -e '.[gguf]'"
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason=NO_GGUF)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
# Of every key that llama.cpp computes, in a family that has it.
SHAPES = {
    "llama": {"attention_bias": True, "rope_scaling": Llama3Scaling(4.0, 1.0, 4.0, 32), "rope_theta": 5e5},
    "mistral": {"head_dim": 32, "tie_word_embeddings": True, "sliding_window": 256},
    "ministral3": {
        "head_dim": 32, "rope_theta": 1e6,
        "rope_scaling": GrowingYarnScaling(
            4.0, 1.0, 256, 16.0, 2.0, llama_4_scaling_beta=0.1, max_position_embeddings=1024
        ),
    },
    "exaone4": {"rope_scaling": Llama3Scaling(4.0, 1.0, 4.0, 32), "tie_word_embeddings": True},
    "helium": {"attention_bias": True, "rope_theta": 1e5, "rope_scaling": Llama3Scaling(4.0, 1.0, 4.0, 32)},
    "qwen2": {"rope_scaling": LinearScaling(2.0), "rms_norm_eps": 1e-6},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "olmo2": {"rope_theta": 5e5, "rope_scaling": LinearScaling(2.0)},
    "olmo3": {
        "num_hidden_layers": 4, "sliding_window": 8,
        "layer_types": (SLIDING_ATTENTION, SLIDING_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION),
        "tie_word_embeddings": True, "rope_scaling": YarnScaling(4.0, YarnScaling.default_attention_factor(4.0), 16),
    },
    "phi3": {
        "partial_rotary_factor": 0.75, "sliding_window": 1024, "rms_norm_eps": 1e-6,
        "rope_scaling": LongScaling((1.0, 1.5, 2.0, 2.5, 3.0, 3.5), (2.0,) * 6, 1.19, 256, 1024),
    },
    "gemma3_text": {
        "num_hidden_layers": 6, "sliding_window": 8,
        "layer_types": (*(SLIDING_ATTENTION,) * 5, FULL_ATTENTION), "rope_theta": 1e6,
        "rope_local_theta": 1e4, "rope_scaling": LinearScaling(2.0), "tie_word_embeddings": True,
    },
    "gemma4_text": {
        "num_hidden_layers": 4, "sliding_window": 8, "rope_theta": 1e6, "rope_local_theta": 1e4,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION), "head_dim": 16,
        "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "rope_scaling": ProportionalScaling(0.25), "final_logit_softcapping": 5.0, "tie_word_embeddings": True,
    },
    "gemma4_text with experts": {
        "model_type": "gemma4_text", "num_hidden_layers": 2, "sliding_window": 8, "rope_theta": 1e6,
        "rope_local_theta": 1e4, "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION), "global_head_dim": 32,
        "rope_scaling": ProportionalScaling(0.25), "tie_word_embeddings": True, "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "granite": {
        "attention_bias": True, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1,
        "logits_scaling": 2.0, "rope_scaling": Llama3Scaling(4.0, 1.0, 4.0, 32),
    },
    "qwen3_5_moe_text": {
        "rms_norm_eps": 1e-6, "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION),
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "partial_rotary_factor": 0.5, "head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    },
    "qwen3_next": {
        "rms_norm_eps": 1e-6, "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION), "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "partial_rotary_factor": 0.5, "head_dim": 32, "num_experts": 5,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_5_text": {
        "num_hidden_layers": 3, "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION, LINEAR_ATTENTION),
        "rms_norm_eps": 1e-6, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "partial_rotary_factor": 0.5, "head_dim": 32, "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "moe_intermediate_size": 32, "head_dim": 32,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "gpt_oss": {
        "sliding_window": 8, "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
        "attention_bias": True, "num_experts": 5,
        "num_experts_per_tok": 2, "head_dim": 32, "tie_word_embeddings": True,
        "rope_scaling": YarnScaling(4.0, YarnScaling.default_attention_factor(4.0), 16),
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3, "layer_types": (MAMBA, FULL_ATTENTION, MAMBA), "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16,
        "position_embedding_type": "nope", "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
        "attention_multiplier": 0.1, "logits_scaling": 2.0,
    },
    "granitemoehybrid without experts": {
        "model_type": "granitemoehybrid", "layer_types": (MAMBA, FULL_ATTENTION), "mamba_n_heads": 2,
        "mamba_d_head": 64, "mamba_d_state": 32, "head_dim": 32, "attention_bias": True, "mamba_conv_bias": False,
        "rope_theta": 1e2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    },
    "granitemoehybrid of attention": {
        "model_type": "granitemoehybrid", "head_dim": 32, "position_embedding_type": "nope",
    },
    "bamba": {
        "num_hidden_layers": 3, "layer_types": (MAMBA, FULL_ATTENTION, MAMBA), "mamba_n_heads": 4, "mamba_d_head": 32,
        "mamba_n_groups": 2, "mamba_d_state": 16, "attention_bias": True, "partial_rotary_factor": 0.5,
        "rope_scaling": Llama3Scaling(4.0, 1.0, 4.0, 32),
    },
    "lfm2": {
        "num_hidden_layers": 3, "layer_types": (CONVOLUTION, FULL_ATTENTION, CONVOLUTION),
        "tie_word_embeddings": True,
    },
    "gemma": {"head_dim": 32, "tie_word_embeddings": True, "rope_scaling": LinearScaling(2.0)},
    "glm": {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 5e5},
    "glm4": {"head_dim": 32, "partial_rotary_factor": 0.5, "rope_scaling": LinearScaling(2.0)},
    "ernie4_5": {"head_dim": 32, "tie_word_embeddings": True, "rope_theta": 5e5},
    "nemotron_h": {
        "num_hidden_layers": 5, "layer_types": (MAMBA, PLAIN_MLP, FULL_ATTENTION, MAMBA, PLAIN_MLP), "head_dim": 32,
        "mamba_n_heads": 5, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_conv_bias": False,
    },
    "smollm3": {
        "num_hidden_layers": 4, "no_rope_layers": (1, 1, 1, 0), "head_dim": 32, "rope_theta": 2e6,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
PROMPT = "the user said that the answer is"


def model_of(family: str, tokenizer: Tokenizer, seed: int = 0) -> Llama:
    """With random biases and norms, and seven rows more than there are tokens, as published models
    have.
    """
    config = LlamaConfig(
        **{
            "model_type": family,
            "vocab_size": tokenizer.vocab_size + 7,
            **SIZES,
            **SHAPES[family],
        }
    )
    model, generator = Llama(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(".bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False)


@torch.no_grad()
def logits_of(model: Llama, ids: list[int]) -> torch.Tensor:
    return model.logits(model(torch.tensor([ids])))[0]


def read_back(path: Path) -> dict[str, torch.Tensor]:
    """The file's tensors by name, as the numbers that they stand for."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return {
        t.name: torch.tensor(read_values(t)).reshape([int(n) for n in reversed(t.shape)])
        for t in tensors
    }


def read_values(tensor):
    import gguf

    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return (tensor.data.view("uint16").astype("uint32") << 16).view("float32")
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Rounded to Q8_0 and back, as llama.cpp does with what goes into a product with Q8_0 weights."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    rows = values.reshape(-1, values.shape[-1]).float().numpy()
    return torch.from_numpy(gguf.dequantize(gguf.quantize(rows, kind), kind)).reshape(values.shape)


@needs_gguf
# By day every second family, and rounded numbers of every sixth, as the names of tensors are the
# same for both.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(
            pytest.param(each, "f32", marks=pytest.mark.slow if at % 2 else ())
            for at, each in enumerate(SHAPES)
        ),
        *(
            pytest.param(each, "q8_0", marks=pytest.mark.slow if at % 6 else ())
            for at, each in enumerate(SHAPES)
        ),
    ],
)
def test_llama_cpp_goes_on_alike(tmp_path: Path, family: str, dtype: str) -> None:
    """Greedily, wherever the best two of the original are further apart than both may be off.

    The original is asked after llama.cpp's own tokens, so one near tie does not end the comparison.
    Each logit may be off by twice the naive path's own error (laws/comparisons.py): the naive path is this
    model in fp32, and for q8_0 with the file's weights and what goes into each matrix rounded to
    Q8_0.
    """
    tokenizer = speaking(tmp_path / "words", "chatml")
    model = model_of(family, tokenizer)
    save_gguf(model, tmp_path / "out", tokenizer, dtype, lambda line: None)
    prompt = [tokenizer.bos_id, *tokenizer.encode(PROMPT)]
    answer = LlamaCpp(tmp_path / "out" / FILE).greedy(prompt, 24)
    drawn = answer["tokens"]
    assert answer["tokens_evaluated"] == len(prompt) and drawn
    if dtype == "q8_0":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and not any(
                    part in name
                    for part in ("mlp.gate.", "mlp.router.", "conv1d", "conv.conv", ".bias")
                ):
                    parameter.copy_(in_blocks(parameter))
    exact = logits_of(model.double(), prompt + drawn)[len(prompt) - 1 : -1]
    naive = model.float()
    if dtype == "q8_0":
        for module in naive.modules():
            if isinstance(module, torch.nn.Linear | ExpertLinear):
                module.register_forward_pre_hook(
                    lambda module, values: (in_blocks(values[0]), *values[1:])
                )
        head = naive.lm_head.weight
        cap = model.config.final_logit_softcapping
        naive.logits = lambda hidden: capped(in_blocks(hidden) @ head.T, cap)
    error = (logits_of(naive, prompt + drawn)[len(prompt) - 1 : -1] - exact).abs().amax(-1)
    best = exact.topk(2, dim=-1)
    clear = (best.values[:, 0] - best.values[:, 1]) > 4 * error
    assert clear.sum() >= (20 if dtype == "f32" else 6) or answer["stop_type"] == "eos", (
        best.values,
        error,
    )
    assert torch.equal(torch.tensor(drawn)[clear], best.indices[:, 0][clear])


@needs_gguf
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_the_files_weights_are_the_models(tmp_path: Path, dtype: str) -> None:
    """Bits where the dtype holds them, else its rounding; of q8_0 half a step and the rounding of
    the step.
    """
    tokenizer = Tokenizer.bytes()
    model = model_of("qwen3", tokenizer)
    save_gguf(model, tmp_path / "out", tokenizer, dtype, lambda line: None)
    stored = read_back(tmp_path / "out" / FILE)
    ours = dict(model.named_parameters())
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.1.attn_q_norm.weight": "model.layers.1.self_attn.q_norm.weight",
        "output_norm.weight": "model.norm.weight",
    }
    assert len(stored) == len(ours)
    for theirs, name in pairs.items():
        weight, read = ours[name].detach(), stored[theirs]
        if weight.ndim == 1 or dtype == "f32":
            assert torch.equal(weight, read)
        elif dtype != "q8_0":
            assert torch.equal(
                weight.to({"f16": torch.float16, "bf16": torch.bfloat16}[dtype]).float(), read
            )
        else:
            blocks, error = (
                weight.reshape(-1, BLOCK).double(),
                (weight - read).reshape(-1, BLOCK).abs().double(),
            )
            step = blocks.abs().amax(1, keepdim=True) / 127
            assert bool((error <= step / 2 + 127 * step * 2**-11 + 1e-12).all()) and bool(
                error.any()
            )


def splitting(pattern: str | None, whole_words: bool) -> Tokenizer:
    """A tokenizer with that split pattern, trained on the probes so that its merges cross all kinds
    of text.
    """
    engine = Engine(models.BPE(ignore_merges=whole_words))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    engine.pre_tokenizer = pre_tokenizers.Sequence([*split, letters]) if split else letters
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    engine.train_from_iterator(probes(3000, seed=1), trainer)
    return Tokenizer(json.loads(engine.to_str()), "x")


SPLITS = {
    "gpt-2": (None, False),
    "qwen2": (KNOWN_PATTERNS["qwen2"], False),
    "qwen35": (KNOWN_PATTERNS["qwen3.5"], False),
    "llama-bpe": (KNOWN_PATTERNS["llama3"], True),
    "smaug-bpe": (KNOWN_PATTERNS["llama3"], False),
}


@needs_gguf
@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt-2", 400), *(pytest.param(name, 12_000, marks=pytest.mark.slow) for name in SPLITS)],
)
def test_llama_cpp_tokenises_alike(tmp_path: Path, name: str, count: int) -> None:
    tokenizer = splitting(*SPLITS[name])
    save_gguf(tiny(tokenizer), tmp_path / "out", tokenizer, "f32", lambda line: None)
    texts = probes(count)
    theirs = LlamaCpp(tmp_path / "out" / FILE).tokenize(texts, separator=tokenizer.eos_id)
    assert theirs == tokenizer.encode_batch(texts)


@needs_gguf
@pytest.mark.parametrize("shape", ["tinyllama", "gemma"])
@pytest.mark.parametrize("count", [400, pytest.param(12_000, marks=pytest.mark.slow)])
def test_llama_cpp_tokenises_sentence_pieces_alike(tmp_path: Path, shape: str, count: int) -> None:
    engine = pieces.engine(shape, texts=probes(3000, seed=1), vocabulary=1200)
    tokenizer = Tokenizer(json.loads(engine.to_str()), "x")
    save_gguf(tiny(tokenizer), tmp_path / "out", tokenizer, "f32", lambda line: None)
    texts = probes(count)
    client = LlamaCpp(tmp_path / "out" / FILE)
    assert client.tokenize(texts, separator=tokenizer.eos_id) == tokenizer.encode_batch(texts)
    begin = "<s>" if shape == "tinyllama" else "<bos>"
    rendered = [f"{begin}user\nthe{begin} cat {begin}\n"]
    assert client.tokenize(rendered, tokenizer.eos_id, special=True) == [
        tokenizer.encode_rendered(rendered[0])
    ]


@needs_gguf
def test_bytes_and_added_tokens_are_tokenised_alike(tmp_path: Path) -> None:
    for name, tokenizer in (
        ("bytes", Tokenizer.bytes()),
        ("added", speaking(tmp_path / "words", "chatml")),
    ):
        save_gguf(tiny(tokenizer), tmp_path / name, tokenizer, "f16", lambda line: None)
        texts = [*probes(200), "a<think>b</think>", "<|im_start|>"]
        client = LlamaCpp(tmp_path / name / FILE)
        assert client.tokenize(texts, separator=tokenizer.eos_id) == tokenizer.encode_batch(texts)
    rendered = ["<|im_start|>user\nthe <|eot|><|im_end|>\n<think>"]
    assert client.tokenize(rendered, 1, special=True) == [
        tokenizer.encode_rendered(text) for text in rendered
    ]


def tiny(tokenizer: Tokenizer, answer: int | None = None) -> Llama:
    """A model for its tokenizer's sake; with `answer` it writes that token whatever it is given."""
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=256,
    )
    model = Llama(config).requires_grad_(False)
    if answer is not None:
        # Every embedding points one way, layers add nothing, and one row of the head points that
        # way, too.
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[answer] = 1.0
    return model


@needs_gguf
@pytest.mark.parametrize(
    "name",
    [
        "thinking",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("chatml", "headers", "plain")),
    ],
)
def test_a_rendered_chat_is_the_same_and_stops_at_the_same_place(tmp_path: Path, name: str) -> None:
    tokenizer = speaking(tmp_path / "words", name, stops=[1])
    end = stop_ids(tokenizer)[-1]
    save_gguf(tiny(tokenizer, answer=end), tmp_path / "out", tokenizer, "f32", lambda line: None)
    client = LlamaCpp(tmp_path / "out" / FILE)
    for chat in (chat for chat in CHATS if chat[-1]["role"] == "user"):
        ids = chat_ids(tokenizer, chat, add_generation_prompt=True)
        # It takes the text's beginning off and puts the token before the ids.
        rendered = tokenizer.encode_rendered(client.rendered(chat))
        assert rendered == ids[ids[0] == tokenizer.bos_id :]
        answer = client.answered(chat, 8)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert (
            answer["choices"][0]["finish_reason"] == "stop"
            and answer["usage"]["completion_tokens"] == 1
        )


@needs_gguf
def test_a_token_that_is_no_stop_does_not_stop(tmp_path: Path) -> None:
    """What the test above shows is the stop token's doing: another one goes on to the limit."""
    tokenizer = speaking(tmp_path / "words", "chatml")
    model = tiny(tokenizer, answer=tokenizer.special["<|header|>"])
    save_gguf(model, tmp_path / "out", tokenizer, "f32", lambda line: None)
    answer = LlamaCpp(tmp_path / "out" / FILE).answered(CHATS[0], 8)
    assert answer["choices"][0]["finish_reason"] == "length"


@needs_gguf
# By night also the families whose tensors have the names of one of these.
@pytest.mark.parametrize(
    "family",
    nightly(
        [
            family
            for family, shape in SHAPES.items()
            if family not in ("phi3", "glm", "glm4")
            and shape.get("model_type") != "granitemoehybrid"
            and "num_experts" not in shape
            and not {LINEAR_ATTENTION, MAMBA} & {*shape.get("layer_types", ())}
        ],
        ["llama", "gemma3_text", "lfm2", "olmo3"],
    ),
)
def test_llama_cpp_adds_adapters_to_the_base(tmp_path: Path, family: str) -> None:
    """A base's file and one of adapters go on as the merged model does, and not as the base."""
    import gguf

    tokenizer = speaking(tmp_path / "words", "chatml")
    model, lora = model_of(family, tokenizer), Lora(4, 8.0, rslora=True)
    save_gguf(model, tmp_path / "base", tokenizer, "f32", lambda line: None)
    layers = len(adapt(model, lora))
    trained(model, spread=0.3)
    layer = adapted_layers(model)["model.layers.1.mlp.down_proj"]
    save_gguf_adapter(pack_adapters(model, lora, "base"), model.config, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter.gguf"
    read, fields = read_back(path), gguf.GGUFReader(path).fields
    assert len(read) == 2 * layers
    assert torch.equal(read["blk.1.ffn_down.weight.lora_a"], layer.lora_A.weight)
    assert torch.equal(read["blk.1.ffn_down.weight.lora_b"], layer.lora_B.weight)
    assert fields["adapter.lora.alpha"].contents() == 16.0, (
        "divided by the rank it is alpha / sqrt(rank)"
    )
    prompt = [tokenizer.bos_id, *tokenizer.encode(PROMPT)]
    plain, drawn = (
        LlamaCpp(tmp_path / "base" / FILE, adapter=each).greedy(prompt, 16)["tokens"]
        for each in (None, path)
    )
    assert plain != drawn
    merge(model)
    assert drawn == logits_of(model, prompt + drawn)[len(prompt) - 1 : -1].argmax(-1).tolist()


@needs_gguf
def test_adapters_without_a_form_in_a_gguf_file_are_refused_by_name(tmp_path: Path) -> None:
    for lora, sizes, words in (
        (KINDS["dora"], {}, r"magnitudes \(lora.dora\)"),
        (Lora(4, tokens=(3,)), {}, "rows of tokens"),
        (
            Lora(4, targets=("q_proj",)),
            {"model_type": "olmoe", "num_experts": 2, "num_experts_per_tok": 1},
            "family olmoe",
        ),
    ):
        model = adapted_llama(lora, **sizes)
        with pytest.raises(
            InputRefused, match=f"^a GGUF file of adapters has no form for .*{words}"
        ):
            save_gguf_adapter(pack_adapters(model, lora, "base"), model.config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# By day tests/model/test_families.py compares the others with transformers, in one direction.
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.slow if at % 6 else ())
        for at, each in enumerate(SHAPES)
    ],
)
def test_transformers_computes_alike_in_both_directions(tmp_path: Path, family: str) -> None:
    """A folder of ours there, what it saves of it here: no key missing or left over, the same
    chats, equal logits.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = speaking(tmp_path / "words", "chatml", stops=[1, 2])
    model = model_of(family, tokenizer)
    save_model(model, tmp_path / "ours", tokenizer)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    words = AutoTokenizer.from_pretrained(tmp_path / "ours")
    chat = words.apply_chat_template(CHATS[1], add_generation_prompt=True, return_dict=False)
    assert chat == chat_ids(tokenizer, CHATS[1], add_generation_prompt=True)
    assert theirs.generation_config.eos_token_id == [1, 2]
    theirs.save_pretrained(tmp_path / "theirs")
    words.save_pretrained(tmp_path / "theirs")
    back, again = load_model(tmp_path / "theirs"), Tokenizer.from_file(tmp_path / "theirs")
    assert chat_ids(again, CHATS[1], add_generation_prompt=True) == chat and stop_ids(
        again
    ) == stop_ids(tokenizer)
    with torch.no_grad():
        expected = theirs(torch.tensor([chat])).logits[0]
    for mine in (model, back):
        assert relative_error(logits_of(mine, chat), expected) < 1e-5
    assert back.config == replace(
        model.config, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id
    )
