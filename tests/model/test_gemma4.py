# Run: pytest tests/model/test_gemma4.py
"""What only a Gemma 4 has: layers with heads of their own, values that are keys, a factor of each layer
that is not trained, and a cap of the logits that losses read from the head.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batches import ragged, tiny_config, tiny_llama
from monograph.decode.cache import KVCache
from monograph.errors import InputRefused, UsageError
from monograph.graph.token_rows import add_trained_rows, merge_rows
from monograph.laws.comparisons import relative_error
from monograph.loop import train
from monograph.loss import IGNORE, target_log_probabilities, token_loss
from monograph.model.config import LlamaConfig
from monograph.model.hub import load_model, save_model
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION
from monograph.model.llama import Llama, kind_of_block
from monograph.model.parameters import block_shapes
from monograph.model.vocabulary import set_new_rows
from monograph.optim import AdamW
from monograph.predict.roofline import flops_per_token
from monograph.resident import Resident
from monograph.session.requirements import require_stages
from monograph.stream.store import as_staged

SIZES: dict[str, Any] = {
    "model_type": "gemma4_text",
    "sliding_window": 5,
    "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
    "global_head_dim": 12,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 0.5,
}
FILE = {
    "model_type": "gemma4_text", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size_per_layer_input": 0,
    "layer_types": [SLIDING_ATTENTION, FULL_ATTENTION, FULL_ATTENTION],
}  # fmt: skip
MIXTURE = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 8,
}
OWN = {"head_dim": 16, "num_key_value_heads": 1}


def test_a_layer_without_a_window_has_its_own_heads() -> None:
    config = tiny_config(**SIZES)
    sliding, full = config.of_layer(0), config.of_layer(1)
    assert (sliding.head_dim, sliding.num_key_value_heads, sliding.attention_k_eq_v) == (
        8,
        2,
        False,
    )
    assert (full.head_dim, full.num_key_value_heads, full.attention_k_eq_v) == (12, 1, True)
    assert full.of_layer(1) == full and kind_of_block(config, 0) != kind_of_block(config, 1)
    shapes = block_shapes(config, 0), block_shapes(config, 1)
    assert shapes[0]["self_attn.v_proj.weight"] == (16, 32)
    assert "self_attn.v_proj.weight" not in shapes[1]
    assert shapes[1]["self_attn.k_proj.weight"] == (12, 32)
    # A query sees 5 positions at most in the first layer: on average (1 + 2 + 3 + 4 + 5 * 12) / 16.
    without_attention = (
        6
        * sum(shape[0] * shape[1] for each in shapes for shape in each.values() if len(shape) == 2)
        + 6 * config.vocab_size * 32
    )
    attention = 12 * 4 * (8 * 70 / 16 + 12 * 17 / 2)
    assert flops_per_token(config, 16) == pytest.approx(without_attention + attention)


def test_a_cache_keeps_each_layers_own_heads() -> None:
    config = tiny_config(**SIZES)
    cache = KVCache.allocate(config, 3, 16, torch.float32, torch.device("cpu"), block=8)
    assert [tuple(keys.shape) for keys in cache.keys] == [(2, 3, 2, 8, 8), (2, 3, 1, 8, 12)]
    assert KVCache.bytes_per_row(config, 16, torch.float32, 8) == 4 * 2 * 16 * (2 * 8 + 12)


def test_the_last_layer_has_no_window_but_a_planned_part_of_a_model_may_end_anywhere() -> None:
    config = tiny_config(**SIZES)
    with pytest.raises(InputRefused, match="the last layer of a gemma4_text must be 'full_att"):
        replace(config, layer_types=(FULL_ATTENTION, SLIDING_ATTENTION))
    with pytest.raises(InputRefused, match="the last layer of a gemma4_text must be 'full_att"):
        replace(config, layer_types=())
    assert config.shortened(1).layer_types == (SLIDING_ATTENTION,)
    assert LlamaConfig.preset("micro", family="gemma4_text").window(3) is None
    listed = {**FILE, "layer_types": [SLIDING_ATTENTION] * 3}
    assert LlamaConfig.from_hf(listed).window(2) is None  # as in transformers


@pytest.mark.parametrize(
    ("values", "heads"),
    [
        ({}, (512, 2)),
        ({"global_head_dim": 16}, (16, 2)),
        ({"global_head_dim": 16, "num_global_key_value_heads": 1}, (16, 2)),
        ({"num_global_key_value_heads": 1, "attention_k_eq_v": True}, (512, 1)),
        ({"per_layer_config": {"1": OWN, "2": OWN}, "attention_k_eq_v": True}, (16, 1)),
        ({"per_layer_config": {"1": {"head_dim": 16}, "2": {"head_dim": 16}}}, (16, 2)),
        ({"per_layer_config": {}, "global_head_dim": 16}, (8, 2)),
    ],
)
def test_files_say_in_two_ways_what_heads_a_layer_has(
    values: dict[str, Any], heads: tuple[int, int]
) -> None:
    from transformers import Gemma4TextConfig

    ours = LlamaConfig.from_hf({**FILE, **values}).of_layer(2)
    theirs = Gemma4TextConfig(**{**FILE, **values}).per_layer_config[2]
    assert (ours.head_dim, ours.num_key_value_heads) == heads
    assert (theirs.head_dim, theirs.num_key_value_heads) == heads


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60}, "60 is less than vocab_size"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input = -1"),
        ({"num_kv_shared_layers": 2}, "layer 1 has 'full_attention', and none of the first 1 layers"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3: expected fewer than"),
        ({"enable_moe_block": 1}, "enable_moe_block = 1: expected true or false"),
        ({"enable_moe_block": True, "num_experts": 4}, "enable_moe_block = true needs the key top_k_exp"),
        ({**MIXTURE, "top_k_experts": 5}, "top_k_experts = 5: expected at most"),
        ({**MIXTURE, "moe_intermediate_size": 0}, "moe_intermediate_size = 0: expected a whole"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supp"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling is not read in this family"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = .*: expected a table with a r"),
        ({"per_layer_config": {"1": OWN}}, "per_layer_config: expected the same values for each"),
        ({"per_layer_config": {"0": OWN, "1": OWN, "2": OWN}}, "per_layer_config: expected the same"),
        ({"per_layer_config": {"1": OWN, "2": OWN}}, "per_layer_config has another num_key_value_h"),
        ({"per_layer_config": dict.fromkeys("12", {"eps": 1})}, "per_layer_config has 'eps': only"),
        ({"per_layer_config": [1]}, r"per_layer_config = \[1\]: expected a table"),
        ({"global_head_dim": 7}, "global_head_dim = 7 is odd"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_the_name_of_its_key(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputRefused, match=said):
        LlamaConfig.from_hf({**FILE, **values})
    with pytest.raises(InputRefused, match="num_global_key_value_heads = 1 needs attention_k_eq_v"):
        tiny_config(**SIZES | {"attention_k_eq_v": False})


SMALL_SIZES: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "sliding_window": 5,
    "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION) * 3,
    "rope_local_theta": 1e2,
    "global_head_dim": 12,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
}


def test_layers_at_the_end_take_keys_of_the_last_layer_of_their_kind() -> None:
    config = tiny_config(**SMALL_SIZES)
    assert [config.keys_layer(layer) for layer in range(6)] == [0, 1, 2, 1, 2, 1]
    assert [config.gives_keys(layer) for layer in range(6)] == [False, True, True, *[False] * 3]
    own, taking = block_shapes(config, 1), block_shapes(config, 3)
    assert own["self_attn.k_proj.weight"] and "self_attn.k_proj.weight" not in taking
    assert taking["mlp.up_proj.weight"][0] == 2 * own["mlp.up_proj.weight"][0]
    # A cache has the keys of three layers.
    cache = KVCache.allocate(config, 1, 16, torch.float32, torch.device("cpu"))
    assert cache.keys[3] is cache.keys[5] is cache.keys[1] and len(cache.position_tensors()) == 6
    alone = replace(config, num_kv_shared_layers=0)
    # Layers with a window have 16 numbers for a position's keys, the others 24.
    shared_bytes = KVCache.bytes_per_row(config, 16, torch.float32)
    assert shared_bytes * 120 == KVCache.bytes_per_row(alone, 16, torch.float32) * 56


def test_thousands_of_layers_find_their_keys_at_once() -> None:
    """A file of a few bytes may say so many, and its weights are compared with it before it is refused."""
    layers = 10_000
    sizes = SMALL_SIZES | {"num_hidden_layers": layers, "num_kv_shared_layers": layers // 2}
    config = tiny_config(**sizes | {"layer_types": (SLIDING_ATTENTION, FULL_ATTENTION) * 5_000})
    start = time.process_time()
    assert config.keys_layer(layers - 1) == layers // 2 - 1
    assert sum(config.gives_keys(layer) for layer in range(layers)) == 2
    assert time.process_time() - start < 1


def test_files_may_have_keys_that_no_layer_reads(tmp_path: Path) -> None:
    model = tiny_llama(**SMALL_SIZES)
    save_model(model, tmp_path / "folder")
    [path] = (tmp_path / "folder").glob("*.safetensors")
    tensors = load_file(path)
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.5.self_attn.{name}.weight"] = torch.ones(3, 3)
    save_file(tensors, path)
    loaded = load_model(tmp_path / "folder").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    tensors["model.layers.2.self_attn.o_norm.weight"] = torch.ones(3)
    save_file(tensors, path)
    with pytest.raises(InputRefused, match="o_norm"):
        load_model(tmp_path / "folder")


def test_new_tokens_have_rows_in_the_table_of_layers_inputs() -> None:
    for rows in (0, 70):
        model = tiny_llama(**SMALL_SIZES, vocab_size_per_layer_input=rows)
        known = model.config.vocab_size
        table = model.model.embed_tokens_per_layer.weight.detach().clone()
        set_new_rows(model, known, 75)
        grown = model.model.embed_tokens_per_layer
        assert grown.weight.shape[0] == grown.num_embeddings == 75
        assert torch.equal(grown.weight[:known], table[:known])
        torch.testing.assert_close(grown.weight[known], table[:known].mean(0))
        assert model.config.to_hf()["vocab_size_per_layer_input"] == 75


def test_experts_are_chosen_where_only_matrices_are_in_16_bits() -> None:
    """As a run with a frozen base draws its samples."""
    model = tiny_llama(
        model_type="gemma4_text", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    assert model(torch.arange(9)[None]).dtype == torch.bfloat16


def test_it_is_not_streamed() -> None:
    config = tiny_config(**SMALL_SIZES)
    with pytest.raises(InputRefused, match="num_kv_shared_layers = 3.*take device"):
        require_stages("stream", config)
    require_stages("stream", tiny_config())
    require_stages("device", config)
    with pytest.raises(UsageError, match="blocks of this model read what others computed"):
        as_staged(Llama(config))


def test_a_layers_factor_counts_and_is_not_trained() -> None:
    model = tiny_llama(torch.float64, **SIZES)
    batch = ragged(4, 0)
    before = token_loss(model, batch)[0].item()
    with torch.no_grad():
        for block in model.model.layers:
            block.layer_scalar.fill_(0.7)
    assert token_loss(model, batch)[0].item() != before
    engine = Resident(model, optim=AdamW(lr=0.1, weight_decay=0.5))
    list(train(engine, [batch]))
    for block in model.model.layers:
        assert block.layer_scalar.item() == 0.7


def with_trained_rows(model: Llama) -> None:
    model.requires_grad_(False)
    add_trained_rows(model, [3, 5])
    with torch.no_grad():
        model.lm_head.token_rows.add_(0.3)


def with_merged_rows(model: Llama) -> None:
    with_trained_rows(model)
    merge_rows(model)


@pytest.mark.parametrize("change", [lambda model: None, with_trained_rows, with_merged_rows])
def test_losses_and_scores_have_the_cap_of_the_models_logits(change: Any) -> None:
    model = tiny_llama(torch.float64, initializer_range=0.1, **SIZES)
    change(model)
    batch = ragged(4, 0)
    hidden = model(batch["tokens"], batch.get("segments"), batch.get("positions"))
    logits = model.logits(hidden)
    assert 0.3 < logits.abs().max() < 0.5  # so that the cap matters
    targets = batch["targets"]
    logs = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    kept = targets != IGNORE
    assert relative_error(token_loss(model, batch)[0], -logs[kept].sum()) < 1e-12
    assert (
        relative_error(target_log_probabilities(model, batch).view_as(logs)[kept], logs[kept])
        < 1e-12
    )
