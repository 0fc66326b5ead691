# Run: pytest tests/model/test_adapter.py
"""Adapter folders: PEFT's, both ways, bits; what is read, and what is refused by name."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapted import KINDS, LINEAR, SMALL, adapted_llama, peft
from batches import ragged, tiny_config, tiny_llama
from monograph.errors import InputRefused
from monograph.graph.lora import Lora, adapted_layers
from monograph.model.adapter import (
    adapter_state,
    install_adapters,
    is_adapter,
    pack_adapters,
    peft_base,
    read_adapter,
    resolved_base,
    save_adapter,
)
from monograph.model.hub import save_model

# transformers' own, when PEFT asks it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture
def folder(tmp_path):
    """An adapter's folder, its base beside it."""
    save_model(tiny_llama(), tmp_path / "base")
    save_adapter(
        pack_adapters(adapted_llama(), SMALL, str(tmp_path / "base")), tmp_path / "adapter"
    )
    return tmp_path / "adapter"


def changed(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def logits(model, tokens):
    found = model(tokens)
    return found if torch.is_tensor(found) else found.logits


def test_peft_loads_what_is_written_here(folder, tmp_path):
    library, transformers = (
        peft(),
        pytest.importorskip("transformers", reason="transformers is not installed"),
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = library.PeftModel.from_pretrained(base, folder)
    ours = adapted_llama()
    found = {
        n.replace(".default", "").removeprefix("base_model.model."): p
        for n, p in theirs.named_parameters()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in adapter_state(ours).items())
    assert sum(".lora_" in name for name in found) == 28
    tokens, hidden = ragged(3)["tokens"], ours(ragged(3)["tokens"])
    torch.testing.assert_close(
        theirs(input_ids=tokens).logits, hidden @ ours.lm_head.weight.T, rtol=1e-4, atol=1e-5
    )
    plain = tiny_llama()
    assert not torch.allclose(
        theirs(input_ids=tokens).logits, plain(tokens) @ plain.lm_head.weight.T, atol=1e-3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_writes_is_loaded_here(tmp_path, kind):
    library, transformers = (
        peft(),
        pytest.importorskip("transformers", reason="transformers is not installed"),
    )
    save_model(tiny_llama(), tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = library.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_rslora=kind == "rslora",
                                use_dora=kind == "dora", task_type="CAUSAL_LM", lora_dropout=0.1)  # fmt: skip
    theirs = library.get_peft_model(base, config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
        if "magnitude" in name:
            parameter.data.mul_(1.1)
    theirs.save_pretrained(tmp_path / "theirs")
    stored = read_adapter(tmp_path / "theirs")
    assert stored.lora == replace(KINDS[kind], targets=("down_proj", "q_proj"), dropout=0.1)
    model = tiny_llama()
    install_adapters(model, stored.lora, start=stored)
    model.eval()
    found = {
        n.replace(".default", "").removeprefix("base_model.model."): p
        for n, p in theirs.named_parameters()
    }
    found |= {name.replace("_vector.weight", "_vector"): p for name, p in found.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in adapter_state(model).items())
    tokens = ragged(3)["tokens"]
    ours = model(tokens) @ model.lm_head.weight.T
    torch.testing.assert_close(theirs(input_ids=tokens).logits, ours, rtol=1e-4, atol=1e-5)
    # And back again, the same bytes of tensors.
    save_adapter(pack_adapters(model, stored.lora, stored.base), tmp_path / "again")
    one, two = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "again")
    )
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert read_adapter(tmp_path / "again").lora == stored.lora


def test_a_round_trip_is_bits(folder, tmp_path):
    assert is_adapter(folder) and not is_adapter(tmp_path / "base")
    stored = read_adapter(folder)
    assert stored.lora == Lora(SMALL.rank, SMALL.alpha, tuple(sorted(LINEAR)))
    assert resolved_base(stored) == str(tmp_path / "base")
    model, original = tiny_llama(), adapted_llama()
    stored.require_base_shape(model.config)
    install_adapters(model, stored.lora, start=stored)
    assert all(torch.equal(a, b) for a, b in zip(adapter_state(model).values(), adapter_state(original).values(),
                                                 strict=True))  # fmt: skip
    mode = (folder / "adapter_config.json").stat().st_mode
    assert (folder / "adapter_model.safetensors").stat().st_mode == mode


@pytest.mark.parametrize(
    "targets", [("up_proj",), r".*layers\.1.*_proj", ("layers.0.mlp.up_proj",)]
)
def test_targets_mean_the_same_when_they_are_read(tmp_path, targets):
    lora = Lora(4, 6.0, targets)
    save_adapter(pack_adapters(adapted_llama(lora), lora, ""), tmp_path / "adapter")
    stored, model = read_adapter(tmp_path / "adapter"), tiny_llama()
    install_adapters(model, stored.lora, start=stored)
    assert set(adapted_layers(model)) == set(adapted_layers(adapted_llama(lora)))


REFUSED = {
    "another kind": ({"peft_type": "IA3"}, "peft_type = 'IA3': only LORA is read"),
    "a number for yes": ({"use_dora": 3}, "use_dora = 3 is not read: expected one of"),
    "a pattern": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern = .* is set"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save = .* is set"),
    "a key of tomorrow": ({"use_wonder": 3}, "use_wonder = 3 is set"),
    "biases": ({"bias": "all"}, "bias = 'all' is not read"),
    "a base that was changed": (
        {"init_lora_weights": "pissa"},
        "init_lora_weights = 'pissa' is not read",
    ),
    "no rank": ({"r": 0}, "r = 0: expected a whole number"),
    "a rank that is none": ({"r": True}, "r = True: expected a whole number"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha = None"),
    "an alpha of nothing": ({"lora_alpha": 0}, "lora_alpha = 0"),
    "an infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha = inf"),
    "an alpha beyond all": ({"lora_alpha": 10**400}, "lora_alpha = 1000"),
    "a text for yes": ({"use_rslora": "no"}, "use_rslora = 'no' is not read: expected one of"),
    "no targets": ({"target_modules": None}, "target_modules = None"),
    "wrong targets": ({"target_modules": ["q_proj", 3]}, "target_modules = .*3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_is_not_understood_is_refused_by_key(folder, name):
    values, words = REFUSED[name]
    with pytest.raises(InputRefused, match=rf"adapter_config.json: {words}"):
        read_adapter(changed(folder, **values))


def test_adapters_that_are_bases_of_each_other_are_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    changed(other, base_model_name_or_path=str(folder))
    adapter = read_adapter(changed(folder, base_model_name_or_path=str(other)))
    with pytest.raises(InputRefused, match="its base is an adapter whose base leads back to it"):
        resolved_base(adapter)


def test_keys_that_are_not_set_are_nothing(folder):
    unset = {"use_dora": False, "rank_pattern": {}, "modules_to_save": None, "layers_to_transform": [],
             "init_lora_weights": True, "bias": "none", "peft_version": "9", "revision": "main"}  # fmt: skip
    assert read_adapter(changed(folder, **unset)).lora.rank == 4


@pytest.mark.parametrize(
    ("base", "values", "words"),
    [
        (
            {"num_hidden_layers": 1},
            {},
            "14 unexpected tensors for this base, the first is 'model.layers.1",
        ),
        (
            {"num_hidden_layers": 3},
            {},
            "14 missing tensors for this base, the first is 'model.layers.2",
        ),
        ({"hidden_size": 64}, {}, r"is \[.*\], not \[.*\] as by r and base"),
        ({}, {"r": 8}, r"is \[.*\], not \[.*\] as by r and base"),
        ({}, {"target_modules": ["q_proj", "nothing"]}, "no linear layer is called 'nothing'"),
        ({}, {"target_modules": ["q_proj"]}, "24 unexpected tensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(folder, base, values, words):
    stored = read_adapter(changed(folder, **values))
    with pytest.raises(InputRefused, match=words):
        install_adapters(tiny_llama(**base), stored.lora, start=stored)


def test_another_base_of_the_same_shape_is_told_by_its_configuration(folder):
    stored = read_adapter(folder)
    with pytest.raises(InputRefused, match="trained on another base"):
        stored.require_base_shape(tiny_config(rope_theta=5000.0))
    (folder / "monograph_base.json").unlink()  # PEFT writes none
    stored.require_base_shape(tiny_config(rope_theta=5000.0))


def test_ids_and_options_of_training_do_not_make_another_base(folder):
    """A run records no ids, its export has them, and other programs write them in other forms."""
    stored = read_adapter(folder)
    for same in ({"bos_token_id": 3, "eos_token_id": (0, 1)}, {"initializer_range": 0.5}):
        stored.require_base_shape(tiny_config(**same))


def test_a_folder_that_recorded_a_whole_configuration_is_still_read(folder):
    config = tiny_config(eos_token_id=0)
    values = {k: v for k, v in config.to_hf().items() if k not in ("attention_dropout", "pad_token_id")}  # fmt: skip
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    (folder / "monograph_base.json").write_text(json.dumps({"config_sha256": digest}))
    stored = read_adapter(folder)
    stored.require_base_shape(tiny_config(eos_token_id=(0,)))
    with pytest.raises(InputRefused, match="trained on another base"):
        stored.require_base_shape(tiny_config(eos_token_id=(0, 1)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused_by_file_and_tensor(folder, bad):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = max(tensors)
    tensors[name][0, 0] = bad
    save_file(tensors, path)
    stored = read_adapter(folder)
    with pytest.raises(InputRefused, match=re.escape(f"{path}: {name} is not finite")):
        install_adapters(tiny_llama(), stored.lora, start=stored)


def test_peft_is_told_the_id_of_a_base_from_the_hub(tmp_path):
    """And the folder is found here all the same, without fetching anything."""
    base = tmp_path / "hub" / "models--some--model-1b" / "snapshots" / "0a1b"
    save_model(tiny_llama(), base)
    save_adapter(pack_adapters(adapted_llama(), SMALL, str(base)), tmp_path / "adapter")
    stored = read_adapter(tmp_path / "adapter")
    assert stored.base == "some/model-1b" and resolved_base(stored) == str(base)
    assert peft_base(str(tmp_path)) == str(tmp_path)


def test_damage_is_refused_in_a_line(folder):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path)
    stored = read_adapter(folder)
    with pytest.raises(InputRefused, match="is stored as I8"):
        install_adapters(tiny_llama(), stored.lora, start=stored)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputRefused, match="damaged, or not a safetensors file"):
        install_adapters(tiny_llama(), stored.lora, start=stored)
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(InputRefused, match="expected a JSON object"):
        read_adapter(folder)
    changed_base = stored._replace(base="meta-llama/Llama-3")
    with pytest.raises(
        InputRefused, match="'meta-llama/Llama-3' is no folder here, and nothing is fetched"
    ):
        resolved_base(changed_base)


def test_an_adapter_on_a_part_of_a_joined_layer_is_refused_by_name():
    module = adapted_llama(model_type="phi3")
    with pytest.raises(
        InputRefused,
        match=r"_proj has an adapter, and PEFT has one layer for it and others in a phi3",
    ):
        pack_adapters(module, SMALL, "base")
