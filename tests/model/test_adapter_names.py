# Run: pytest tests/model/test_adapter_names.py
"""Adapters of families whose files have other names for the decoder's layers: PEFT's, both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adapted import KINDS, SMALL, peft, trained
from batches import ragged, tiny_llama
from monograph.config import Settings
from monograph.decode.adapter_bank import install, rows_with_adapters
from monograph.errors import InputRefused
from monograph.graph.lora import Lora, adapt, adapted_layers
from monograph.graph.lora_merge import plain_parameters
from monograph.graph.lora_targets import ALL_LINEAR, linear_layers
from monograph.laws.comparisons import relative_error
from monograph.model.adapter import (
    adapter_state,
    install_adapters,
    pack_adapters,
    read_adapter,
    save_adapter,
)
from monograph.model.adapter_names import name_in_decoder, name_in_files, shortest_targets
from monograph.model.hub import load_model, save_model
from monograph.model.layouts import to_file_tensors
from monograph.model.llama import Llama
from monograph.run.adapters import AdapterBase
from monograph.run.models import load
from monograph.run.source import ModelSource
from monograph.session.adapting import adapter_values
from monograph.text.tokenizer import Tokenizer

# transformers' own, when PEFT asks it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
LFM2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 3,
    "layer_types": ("conv", "full_attention", "full_attention"),
    "tie_word_embeddings": True,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "layer_types": ("full_attention",) * 2,
    "tie_word_embeddings": True,
}
EXPERTS = {
    **GRANITE,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
}
# Of a family, targets by the decoder's names, and the same by PEFT's.
BOTH_SPELLINGS: list[tuple[dict[str, Any], Any, Any]] = [
    (LFM2, ALL_LINEAR, ["in_proj", "k_proj", "out_proj", "q_proj", "v_proj", "w1", "w2", "w3"]),
    (LFM2, ("gate_proj", "up_proj"), ["w1", "w3"]),
    (LFM2, ("o_proj", "out_proj"), ["out_proj"]),
    (LFM2, ("o_proj",), ["self_attn.out_proj"]),
    (LFM2, ("out_proj", "down_proj"), ["conv.out_proj", "feed_forward.w2"]),
    (LFM2, ("layers.1.self_attn.o_proj",), r".*\.1\.self_attn\.out_proj"),
    (LFM2, r".*\.[12]\.(mlp\.up|self_attn\.[oq])_proj", r".*[12]\.(.*w3|.*attn.(q|out)_proj)"),
    (GRANITE, ("down_proj", "q_proj"), ["output_linear", "q_proj"]),
    (EXPERTS, ("shared_expert.down_proj",), ["shared_mlp.output_linear"]),
]  # fmt: skip


def base_of(sizes: dict[str, Any]) -> Llama:
    """A model in float64 with random norms."""
    model = tiny_llama(torch.float64, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return model.requires_grad_(False).eval()


def transformers_model(folder: Path) -> Any:
    """The model of a folder in transformers, in float64, whose grouped products have no float64."""
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    return library.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def require_equal_logits(ours: Llama, theirs: Any, base: Llama) -> None:
    """Both compute the same, and not what the base computes."""
    tokens = ragged(3)["tokens"]
    logits = ours.logits(ours(tokens))
    # transformers computes norms and angles in fp32 also where the weights are in float64.
    assert relative_error(theirs(input_ids=tokens).logits, logits) < 1e-6
    assert relative_error(base.logits(base(tokens)), logits) > 1e-2


def their_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of PEFT's adapters by the names of transformers' layers."""
    named = {
        name.replace(".default", "").removeprefix("base_model.model."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    return {name.replace("_vector.weight", "_vector"): value for name, value in named.items()}


def require_same_adapters(ours: Llama, theirs: Any) -> None:
    """Both have adapters on the same layers, of the same bits."""
    expected = {
        name_in_files(name, ours.config): tensor for name, tensor in adapter_state(ours).items()
        if ".lora_" in name
    }  # fmt: skip
    found = their_tensors(theirs)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def require_same_files(one: Path, other: Path) -> None:
    """Two folders have the same tensors, in bits."""
    first, second = (load_file(each / "adapter_model.safetensors") for each in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "sizes, lora",
    [
        *((sizes, replace(SMALL, targets=own)) for sizes, own, _ in BOTH_SPELLINGS),
        *((LFM2, replace(lora, targets=("o_proj", "gate_proj"))) for lora in KINDS.values()),
        (LFM2, replace(SMALL, tokens=(3, 17))),
    ],
)
def test_peft_computes_what_is_written_here(
    tmp_path: Path, sizes: dict[str, Any], lora: Lora
) -> None:
    """The same layers have an adapter, and the logits are equal."""
    library, base, ours = peft(), base_of(sizes), base_of(sizes)
    ours.load_state_dict(base.state_dict())
    save_model(base, tmp_path / "base")
    adapt(ours, lora)
    trained(ours, spread=0.3)
    save_adapter(pack_adapters(ours, lora, str(tmp_path / "base")), tmp_path / "adapter")
    theirs = library.PeftModel.from_pretrained(
        transformers_model(tmp_path / "base"), tmp_path / "adapter"
    )
    require_same_adapters(ours, theirs)
    require_equal_logits(ours, theirs, base)
    stored = read_adapter(tmp_path / "adapter")
    again = base_of(sizes)
    again.load_state_dict(base.state_dict())
    install_adapters(again, stored.lora_on(again.config), start=stored)
    assert all(map(torch.equal, adapter_state(ours).values(), adapter_state(again).values()))


@pytest.mark.parametrize(
    ("at", "kind"),
    [*((at, "lora") for at in range(len(BOTH_SPELLINGS))), (0, "dora"), (4, "rslora"), (8, "dora")],
)
def test_what_peft_writes_computes_the_same_here(tmp_path: Path, at: int, kind: str) -> None:
    library = peft()
    sizes, own, theirs_spelt = BOTH_SPELLINGS[at]
    base = base_of(sizes)
    save_model(base, tmp_path / "base")
    config = library.LoraConfig(
        r=4, lora_alpha=6, target_modules=theirs_spelt, use_rslora=kind == "rslora",
        use_dora=kind == "dora", task_type="CAUSAL_LM", trainable_token_indices=[3, 17],
    )  # fmt: skip
    theirs = library.get_peft_model(transformers_model(tmp_path / "base"), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name or "trainable_tokens_delta" in name:
            parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
        if "magnitude" in name:
            parameter.data.mul_(1.1)
    theirs.save_pretrained(tmp_path / "theirs")
    stored, ours = read_adapter(tmp_path / "theirs"), base_of(sizes)
    ours.load_state_dict(base.state_dict())
    lora = stored.lora_on(ours.config)
    install_adapters(ours, lora, start=stored)
    alone = base_of(sizes)
    adapt(alone, Lora(targets=own))
    assert adapted_layers(ours).keys() == adapted_layers(alone).keys()
    require_same_adapters(ours, theirs)
    require_equal_logits(ours, theirs, base)
    save_adapter(pack_adapters(ours, lora, stored.base), tmp_path / "again")
    require_same_files(tmp_path / "theirs", tmp_path / "again")
    assert read_adapter(tmp_path / "again").lora_on(ours.config) == lora


def test_a_folder_of_peft_goes_on_as_a_run_and_in_a_bank(tmp_path: Path) -> None:
    """Both have the decoder's names, whatever the folder's targets are."""
    model, lora = base_of(LFM2 | {"vocab_size": 259}), replace(SMALL, targets=("o_proj", "up_proj"))
    save_model(model, tmp_path / "base", Tokenizer.bytes())
    adapt(model, lora)
    trained(model)
    folder = tmp_path / "adapter"
    save_adapter(pack_adapters(model, lora, str(tmp_path / "base")), folder)
    edit(folder, target_modules=r".*\.(w3|self_attn\.out_proj)")
    values = adapter_values(Settings(), ModelSource.open(str(folder)))
    assert values["lora.targets"] == ["o_proj", "up_proj"]
    base = load_model(tmp_path / "base").double()
    stored = AdapterBase(base, Tokenizer.bytes()).read(folder)
    bank, tokens_BT = install(base, {"it": stored}), torch.tensor([[1, 70, 71, 9]])
    merged = load(folder)[0].double()
    with torch.no_grad(), rows_with_adapters(bank, torch.tensor([bank.slots["it"]])):
        expected = model(tokens_BT)
        assert relative_error(base(tokens_BT), expected) < 1e-6
        assert relative_error(merged(tokens_BT), expected) < 1e-6


def edit(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("sizes", [LFM2, GRANITE, EXPERTS])
def test_a_layer_has_the_name_of_its_weight_in_the_files(sizes: dict[str, Any]) -> None:
    model = tiny_llama(**sizes)
    in_files = {name for name, _, _ in to_file_tensors(plain_parameters(model), model.config)}
    joined = [part for parts in model.config.joined_layers.values() if parts[1:] for part in parts]
    for name in linear_layers(model):
        assert name_in_decoder(name_in_files(name, model.config), model.config) == name
        if not name.endswith(tuple(joined)):
            assert name_in_files(f"{name}.weight", model.config) in in_files
    assert "model.layers.1.mlp.down_projection" == name_in_files(
        "model.layers.1.mlp.down_projection", model.config
    ), "a layer whose name begins with that of another"


def test_a_target_is_the_end_of_no_other_layer_in_the_files() -> None:
    """Experts of a Granite 4 have an output_linear, too, where transformers has not fused them."""
    model = tiny_llama(**EXPERTS)
    lora = replace(SMALL, targets=("shared_expert.down_proj",))
    adapt(model, lora)
    assert pack_adapters(model, lora, "base").values["target_modules"] == [
        f"model.layers.{layer}.shared_mlp.output_linear" for layer in range(2)
    ]


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join).map("model.".__add__)


@given(layers=st.sets(NAMES, min_size=1), data=st.data())
def test_the_shortest_targets_select_the_chosen_layers(layers: set[str], data: Any) -> None:
    """By PEFT's rule: a target is a whole name, or ends one after a point."""
    chosen = data.draw(st.sets(st.sampled_from(sorted(layers))))
    targets = shortest_targets(chosen, layers)
    selected = {
        name
        for name in layers
        if name in targets or any(name.endswith(f".{target}") for target in targets)
    }
    assert selected == chosen


@pytest.mark.parametrize(
    "targets, words",
    [
        (["o_proj"], "lora.targets: no linear layer is called 'o_proj'; there are in_proj, k_proj, out"),
        (["w1", "gate_proj"], "no linear layer is called 'gate_proj'"),
        (r".*\.mlp\..*", r"matches no whole name of a linear layer such as model.layers.0.conv.in_proj"),
    ],
)  # fmt: skip
def test_a_folder_is_not_read_by_the_decoders_names(
    tmp_path: Path, targets: Any, words: str
) -> None:
    """PEFT would select nothing by them."""
    model = base_of(LFM2)
    adapt(model, SMALL)
    save_adapter(pack_adapters(model, SMALL, "base"), tmp_path / "adapter")
    edit(tmp_path / "adapter", target_modules=targets)
    with pytest.raises(InputRefused, match="adapter_config.json: .*" + words):
        read_adapter(tmp_path / "adapter").lora_on(model.config)


def test_tensors_by_the_decoders_names_are_refused(tmp_path: Path) -> None:
    model, lora = base_of(LFM2), replace(SMALL, targets=("gate_proj",))
    adapt(model, lora)
    save_adapter(pack_adapters(model, lora, "base"), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    assert all(".feed_forward.w1." in name for name in tensors)
    save_file(
        {name.replace("feed_forward.w1", "mlp.gate_proj"): t for name, t in tensors.items()}, path
    )
    stored = read_adapter(tmp_path / "adapter")
    with pytest.raises(
        InputRefused,
        match="6 missing tensors .*, the first is 'model.layers.0.feed_forward.w1.lora_A",
    ):
        install_adapters(base_of(LFM2), lora, start=stored)


@pytest.mark.parametrize("sizes", [GRANITE, EXPERTS])
def test_a_layer_that_files_join_with_another_is_refused_by_name(sizes: dict[str, Any]) -> None:
    model, part = tiny_llama(**sizes), "shared_expert" if "num_experts" in sizes else "mlp"
    lora = replace(SMALL, targets=(f"{part}.up_proj",))
    adapt(model, lora)
    with pytest.raises(
        InputRefused,
        match=r"up_proj has an adapter, and PEFT has one layer for it and others in a granitemoehybrid",
    ):
        pack_adapters(model, lora, "base")
