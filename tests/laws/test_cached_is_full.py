"""Run: pytest tests/laws/test_cached_is_full.py (law 8: with a cache, each step's logits are the
full pass's).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from batches import tiny_llama
from monograph.decode import Sampling, generate
from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.prompt_reader import PromptReader, PromptToRead
from monograph.laws.comparisons import cached_is_full, differing_draws, error_within, greedy_ids
from monograph.model.hub import save_model
from monograph.model.layer_types import (
    CONVOLUTION,
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    MAMBA,
    PLAIN_MLP,
    SLIDING_ATTENTION,
)
from monograph.model.llama import Llama
from monograph.model.scaling import LinearScaling, Llama3Scaling
from monograph.text.tokenizer import Tokenizer

LENGTH, ROWS = 14, 3
SHAPES = {
    "grouped": {},
    "many": {"num_key_value_heads": 4},
    "one": {"num_key_value_heads": 1},
    "scaled": {"rope_scaling": Llama3Scaling(original_max_position_embeddings=8)},
    "tied": {"tie_word_embeddings": True},
    "linear": {"rope_scaling": LinearScaling(2.0)},
    "biased": {"attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 4},
    "qwen2": {"model_type": "qwen2", "sliding_window": 3, "layer_types": (FULL_ATTENTION, SLIDING_ATTENTION)},
    "qwen3": {"model_type": "qwen3", "sliding_window": 6,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION), "head_dim": 16},
    "olmo2": {"model_type": "olmo2"},
    "olmoe": {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.5},
    "gpt_oss": {
        "model_type": "gpt_oss", "num_experts": 5, "num_experts_per_tok": 2, "attention_bias": True,
        "sliding_window": 5, "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "sliding_window": 5,
    },
    "gemma3": {
        "model_type": "gemma3_text", "sliding_window": 5,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION), "rope_local_theta": 1e2,
        "query_pre_attn_scalar": 9,
    },
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.75},
    "smollm3": {"model_type": "smollm3", "sliding_window": 5,
        "layer_types": (FULL_ATTENTION, SLIDING_ATTENTION), "no_rope_layers": (0, 1)},
    "qwen3_next": {
        "model_type": "qwen3_next", "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION), "linear_num_value_heads": 6,
        "linear_num_key_heads": 3, "num_experts": 4, "num_experts_per_tok": 2,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION), "linear_num_value_heads": 6,
        "linear_num_key_heads": 3, "linear_conv_kernel_dim": 3,
    },
    "granite4": {
        "model_type": "granitemoehybrid", "layer_types": (MAMBA, FULL_ATTENTION), "mamba_n_groups": 2,
        "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_proj_bias": True, "position_embedding_type": "nope",
        "num_experts": 4, "num_experts_per_tok": 2,
    },
    "bamba": {
        "model_type": "bamba", "layer_types": (MAMBA, FULL_ATTENTION), "mamba_d_state": 6, "partial_rotary_factor": 0.5,
    },
    "nemotron_h": {
        "model_type": "nemotron_h", "num_hidden_layers": 4, "layer_types": (MAMBA, PLAIN_MLP, FULL_ATTENTION, MAMBA),
        "mamba_n_groups": 2, "mamba_d_state": 6, "time_step_min": 0.3,
    },
    "lfm2": {"model_type": "lfm2", "layer_types": (CONVOLUTION, FULL_ATTENTION), "conv_bias": True},
    "exaone4": {
        "model_type": "exaone4", "sliding_window": 5, "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
    },
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": True},
    "gemma4": {
        "model_type": "gemma4_text", "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION), "sliding_window": 5,
        "rope_local_theta": 1e2, "global_head_dim": 12, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
    },
    "small gemma4": {
        "model_type": "gemma4_text", "num_hidden_layers": 4, "sliding_window": 5, "rope_local_theta": 1e2,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION), "global_head_dim": 12,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 6,
    },
    "gemma4 with experts": {
        "model_type": "gemma4_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip


def some_tokens() -> Tensor:
    return torch.randint(61, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def stepwise(model: Llama, tokens_BT: Tensor, firsts: list[int], slots: int) -> list[Tensor]:
    """Each row's logits from position firsts[row] - 1 on: prompts read in chunks of 4, then one
    token of all at a time.

    Rows that are at their end go on reading their last token, as rows that have ended do.
    """
    cache = KVCache.allocate(
        model.config, ROWS, slots, model.lm_head.weight.dtype, torch.device("cpu")
    )
    reader = PromptReader(model, CacheSizes(slots), 4, lambda function: function)
    for row, first in enumerate(firsts):
        prompt = [PromptToRead(tuple(tokens_BT[row, :first].tolist()))]
        reader.choose_prompts(prompt)
        reader.read_chunks()
        cache.copy_rows([row], reader.cache, reader.rows_of(prompt), first)
    found: list[list[Tensor]] = [[] for _ in firsts]
    for step in range(LENGTH):
        positions_B1 = torch.tensor([[min(first - 1 + step, LENGTH - 1)] for first in firsts])
        hidden_B1D = model(tokens_BT.gather(1, positions_B1), positions=positions_B1, cache=cache)
        for row, logits_V in enumerate(model.logits(hidden_B1D[:, 0])):
            if firsts[row] - 1 + step < LENGTH:
                found[row].append(logits_V)
            else:
                assert torch.equal(logits_V, found[row][-1])
    return [torch.stack(each) for each in found]


# By day a shape has one of them, in turn, and one with a window in every second layer has all.
ALL_BY_DAY = {"smollm3"}
BEGINNINGS = ([1, 1, 1], LENGTH), ([5, 1, 9], LENGTH), ([13, 8, 4], 300)
EVERY_STEP = [
    pytest.param(
        shape, *begun, marks=() if place % 3 == at or shape in ALL_BY_DAY else pytest.mark.slow
    )
    for place, shape in enumerate(SHAPES)
    for at, begun in enumerate(BEGINNINGS)
]


@pytest.mark.parametrize(("shape", "firsts", "slots"), EVERY_STEP)
def test_every_step(shape: str, firsts: list[int], slots: int) -> None:
    model, exact = (
        tiny_llama(dtype, **SHAPES[shape]).eval() for dtype in (torch.float32, torch.float64)
    )
    tokens_BT = some_tokens()
    with torch.no_grad():
        full, truth = (
            torch.cat(
                [
                    row[first - 1 :]
                    for row, first in zip(m.logits(m(tokens_BT)), firsts, strict=True)
                ]
            )
            for m in (model, exact)
        )
    assert error_within(torch.cat(stepwise(model, tokens_BT, firsts, slots)), full, truth)
    assert cached_is_full(torch.cat(stepwise(exact, tokens_BT, firsts, slots)), truth)


def test_what_lies_in_later_slots_is_not_seen() -> None:
    model, tokens_BT = tiny_llama(torch.float64).eval(), some_tokens()
    cache = KVCache.allocate(model.config, ROWS, LENGTH, torch.float64, torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(1e3)
    with torch.no_grad():
        positions_BT = torch.arange(6).expand(ROWS, -1)
        hidden_BTD = model(tokens_BT[:, :6], positions=positions_BT, cache=cache)
        torch.testing.assert_close(hidden_BTD, model(tokens_BT[:, :6]), rtol=1e-12, atol=1e-12)


GREEDY_BY_DAY = {("", "qwen3_5"), ("ab", "smollm3"), ("x" * 40, "mistral")}


@pytest.mark.parametrize(
    ("prompt", "shape"),
    [
        pytest.param(*each, marks=() if each in GREEDY_BY_DAY else pytest.mark.slow)
        for each in itertools.product(
            ["", "ab", "x" * 40], ["grouped", "mistral", "smollm3", "qwen3_5"]
        )
    ],
)
def test_greedy_text_is_that_of_full_passes(prompt: str, shape: str) -> None:
    model, tokenizer = (
        tiny_llama(torch.float64, vocab_size=259, **SHAPES[shape]).eval(),
        Tokenizer.bytes(),
    )
    [written] = generate(model, tokenizer, [prompt], Sampling(0), max_tokens=100)
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    expected = greedy_ids(model, ids, min(100, 64 - len(ids)), tokenizer.eos_id)
    assert not differing_draws(written.token_ids, expected)
    assert written.finish_reason in ("length", "stop")


AT_NIGHT = "grouped", "scaled", "qwen2", "qwen3", "olmo2", "phi3", "smollm3", "gemma3"


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5",
        # By day tests/model/test_families.py compares these with transformers, and every step with
        # a full pass.
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", *AT_NIGHT)),
    ],
)  # fmt: skip
def test_greedy_text_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokenizer = (
        tiny_llama(torch.float64, vocab_size=259, **SHAPES[family]),
        Tokenizer.bytes(),
    )
    save_model(model, tmp_path, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    for prompt in ("a", "some words", "x" * 20):
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(prompt)]])
        found = theirs.generate(
            ids, do_sample=False, max_new_tokens=40, pad_token_id=tokenizer.pad_id
        )
        [written] = generate(model, tokenizer, [prompt], Sampling(0), max_tokens=40)
        assert written.token_ids == found[0, ids.shape[1] :].tolist()
