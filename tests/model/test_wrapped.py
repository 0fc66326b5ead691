# Run: pytest tests/model/test_wrapped.py
"""The text model in the folder of a model that sees: its logits, its own export, and what is
refused.
"""

from __future__ import annotations

import json

import pytest
import torch

from model.seeing import HYBRID, MODELS, SMALL, seeing
from monograph.errors import InputRefused
from monograph.laws.comparisons import relative_error
from monograph.model.hub import load_model, prefixes_left_out, read_config, save_model


@pytest.mark.parametrize("kind", MODELS)
def test_its_text_model_is_loaded_and_exported_alone(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    theirs = seeing(kind)
    theirs.save_pretrained(tmp_path / "seeing")
    ours = load_model(tmp_path / "seeing")
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
        assert relative_error(ours.logits(ours(tokens)), expected) < 1e-5
        save_model(ours, tmp_path / "text")
        alone = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
        assert relative_error(alone(tokens).logits, expected) < 1e-5
    assert (
        prefixes_left_out(tmp_path / "seeing") == MODELS[kind][2]
        and prefixes_left_out(tmp_path / "text") == []
    )


@pytest.mark.parametrize("text", ["mistral", "ministral3"])
def test_a_mistral_that_sees_has_one_of_two_text_models(tmp_path, text):
    theirs = seeing("mistral3", model_type=text)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
        assert relative_error(ours.logits(ours(tokens)), expected) < 1e-5
    assert ours.config.model_type == text


@pytest.mark.parametrize("text", [None, "words", {"model_type": "qwen3"}])
def test_a_folder_without_its_text_model_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text})
    )
    with pytest.raises(
        InputRefused, match=r"text_config = .*: expected a table with model_type = 'qwen3_5_text'"
    ):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("outer", "inner", "why"),
    [
        (
            {"quantization_config": {"quant_method": "gptq"}},
            {},
            "quantization_config: quant_method = 'gptq' is not read",
        ),
        ({"tie_word_embeddings": None}, {}, "tie_word_embeddings = null: expected true or false"),
        (
            {},
            {"linear_key_head_dim": 0},
            "text_config: linear_key_head_dim = 0: expected a whole number of at least 1",
        ),
        (
            {},
            {"layer_types": []},
            "text_config: layer_types has 0 entries, but num_hidden_layers = 2",
        ),
    ],
)
def test_what_the_two_halves_of_its_file_say_is_checked(tmp_path, outer, inner, why):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": HYBRID | inner} | outer)
    )
    with pytest.raises(InputRefused, match=why):
        read_config(tmp_path)


def test_the_head_is_tied_as_the_outer_half_says(tmp_path):
    text = SMALL | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert read_config(tmp_path).tie_word_embeddings


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_tensor_that_is_there_twice_is_refused(tmp_path, kind):
    from safetensors.torch import load_file, save_file

    seeing(kind).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, begin = load_file(path), "model.language_model.layers.0.mlp."
    if kind == "qwen3_5":
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors[f"{begin}up_proj.weight"].clone()
        why = r"layers.0.mlp.up_proj.weight and model.*layers.0.mlp.up_proj.weight are one tensor"
    else:
        tensors[f"{begin}experts.gate_up_proj"] = torch.zeros(4, 32, 32)
        why = f"{begin}experts.gate_up_proj is there, and tensors of each expert, too"
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputRefused, match=why):
        load_model(tmp_path)
