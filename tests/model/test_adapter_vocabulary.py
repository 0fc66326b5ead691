# Run: pytest tests/model/test_adapter_vocabulary.py
"""Rows of tokens in adapter folders: PEFT loads what is written, what it writes is read, bits; the
rest by name.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from adapted import SMALL, adapted_llama, peft, trained
from batches import tiny_llama
from monograph.errors import InputRefused, UsageError
from monograph.graph.lora import Lora, adapt
from monograph.graph.token_rows import tables_with_rows
from monograph.model.adapter import (
    adapter_state,
    install_adapters,
    pack_adapters,
    read_adapter,
    save_adapter,
)
from monograph.model.hub import save_model
from monograph.model.vocabulary import set_new_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]
TOKENS = (3, 17, 60)
WITH_ROWS = replace(SMALL, tokens=TOKENS)


def theirs_in(tmp_path, tied):
    """transformers' model of a tiny base in a folder."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    save_model(tiny_llama(tie_word_embeddings=tied), tmp_path / "base")
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)


def named(module):
    """PEFT's parameters by our names."""
    found = {
        n.replace(".default", "").removeprefix("base_model.model."): p
        for n, p in module.named_parameters()
    }
    return {
        n.replace("token_adapter.trainable_tokens_delta", "token_rows"): p for n, p in found.items()
    }


@pytest.mark.parametrize("tied", [True, False])
def test_peft_loads_what_is_written_here(tmp_path, tied):
    library, base = peft(), theirs_in(tmp_path, tied)
    ours = adapted_llama(WITH_ROWS, tie_word_embeddings=tied)
    save_adapter(pack_adapters(ours, WITH_ROWS, str(tmp_path / "base")), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    ids = list(TOKENS)
    assert config["trainable_token_indices"] == (
        ids if tied else {"embed_tokens": ids, "lm_head": ids}
    )
    theirs = library.PeftModel.from_pretrained(base, tmp_path / "adapter")
    found = named(theirs)
    assert all(torch.equal(found[name], tensor) for name, tensor in adapter_state(ours).items())
    assert sum(name.endswith("token_rows") for name in adapter_state(ours)) == (1 if tied else 2)
    tokens = torch.tensor([[*TOKENS, 5, *TOKENS]])
    torch.testing.assert_close(
        theirs(input_ids=tokens).logits, ours.logits(ours(tokens)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("tied", [True, False])
def test_peft_loads_rows_of_new_tokens_onto_a_resized_base(tmp_path, tied):
    library, base = peft(), theirs_in(tmp_path, tied)
    ours = tiny_llama(tie_word_embeddings=tied)
    config = ours.config
    set_new_rows(ours, 61, 63)
    lora = replace(SMALL, tokens=(61, 62))
    adapt(ours, lora)
    trained(ours)
    save_adapter(pack_adapters(ours, lora, str(tmp_path / "base"), config), tmp_path / "adapter")
    base.resize_token_embeddings(63)
    theirs = library.PeftModel.from_pretrained(base, tmp_path / "adapter")
    tokens = torch.tensor([[61, 5, 62, 61]])
    torch.testing.assert_close(
        theirs(input_ids=tokens).logits, ours.logits(ours(tokens)), rtol=1e-4, atol=1e-5
    )
    # What PEFT saves then has the whole table in it; what of it is the base's is compared with it.
    theirs.save_pretrained(tmp_path / "again")
    again = tiny_llama(tie_word_embeddings=tied)
    stored = read_adapter(tmp_path / "again")
    with pytest.raises(InputRefused, match="id 61 has no row in a table of 61"):
        install_adapters(tiny_llama(tie_word_embeddings=tied), stored.lora, start=stored)
    set_new_rows(again, 61, 63)
    install_adapters(again, stored.lora, start=stored)
    state = adapter_state(ours)
    assert state.keys() == adapter_state(again).keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in adapter_state(again).items())
    other = tiny_llama(seed=1, tie_word_embeddings=tied)
    set_new_rows(other, 61, 63)
    with pytest.raises(
        InputRefused, match="is a whole table, whose row 0 is not the base's: merge it with PEFT"
    ):
        install_adapters(other, stored.lora, start=stored)
    longer = tiny_llama(tie_word_embeddings=tied)
    set_new_rows(longer, 61, 64)
    with pytest.raises(
        InputRefused, match=r"is a table of \[63, 32\], and the base's is \[64, 32\]"
    ):
        install_adapters(longer, stored.lora, start=stored)


@pytest.mark.parametrize("layers", ["list", "both", "embed_tokens", "lm_head"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_peft_writes_is_loaded_here(tmp_path, tied, layers):
    if tied and layers == "lm_head":
        pytest.skip("PEFT then trains a head that the next loading ties again")
    library, base, ids = peft(), theirs_in(tmp_path, tied), [17, 3, 60]
    indices = {"list": ids, "both": {"embed_tokens": ids, "lm_head": ids}}.get(
        layers, {layers: ids}
    )
    config = library.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj"],
        task_type="CAUSAL_LM",
        trainable_token_indices=indices,
    )
    theirs = library.get_peft_model(base, config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name or "tokens_delta" in name:
            parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    theirs.save_pretrained(tmp_path / "theirs")
    stored, model = read_adapter(tmp_path / "theirs"), tiny_llama(tie_word_embeddings=tied)
    assert stored.lora == Lora(4, 6.0, ("q_proj",), tokens=(17, 3, 60))
    install_adapters(model, stored.lora, start=stored)
    found, state = named(theirs), adapter_state(model)
    assert all(torch.equal(found[name], state[name]) for name in state.keys() & found.keys())
    left = {name for name in state if name not in found}
    for name in left:  # a head's rows that PEFT left alone are the base's
        table = tables_with_rows(model)[name.removesuffix(".token_rows")]
        assert torch.equal(table.token_rows, table.weight[[17, 3, 60]])
    assert len(left) == (not tied and layers != "both")
    tokens = torch.tensor([[3, 17, 60, 5]])
    torch.testing.assert_close(
        theirs(input_ids=tokens).logits, model.logits(model(tokens)), rtol=1e-4, atol=1e-5
    )


def test_a_round_trip_is_bits(tmp_path):
    for tied in (True, False):
        model, original = (tiny_llama(tie_word_embeddings=tied) for _ in range(2))
        adapt(original, WITH_ROWS)
        trained(original)
        save_adapter(pack_adapters(original, WITH_ROWS, "base"), tmp_path / str(tied))
        stored = read_adapter(tmp_path / str(tied))
        assert stored.lora.tokens == TOKENS
        install_adapters(model, stored.lora, start=stored)
        pairs = zip(adapter_state(model).items(), adapter_state(original).items(), strict=True)
        assert all(one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in pairs)
        save_adapter(pack_adapters(model, stored.lora, "base"), tmp_path / f"{tied} again")
        files = [
            load_file(tmp_path / name / "adapter_model.safetensors")
            for name in (str(tied), f"{tied} again")
        ]
        assert all(torch.equal(files[0][name], files[1][name]) for name in files[0]) and len(
            files[0]
        ) == len(files[1])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"embed_tokens": [1], "lm_head": [2]},
            "lists other tokens for one layer than for another",
        ),
        ("all", "= all: expected ids of tokens"),
        ([1, 1], "each once"),
        ([-1], "expected ids"),
        ([True], "expected ids"),
        ({"embed_tokens": 3}, "expected ids"),
    ],
)
def test_indices_that_are_none_are_refused(tmp_path, value, words):
    save_adapter(pack_adapters(adapted_llama(), SMALL, "base"), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trainable_token_indices": value}))
    with pytest.raises(InputRefused, match=words):
        read_adapter(tmp_path / "adapter")


def test_rows_that_do_not_fit_are_refused(tmp_path):
    save_adapter(pack_adapters(adapted_llama(WITH_ROWS), WITH_ROWS, "base"), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    values = json.loads(path.read_text())
    for indices, words in (
        (None, "2 unexpected tensors"),
        ([1, 2, 3], "1 unexpected tensors"),
        ({"embed_tokens": [1, 2], "lm_head": [1, 2]}, r"is \[3, 32\], not \[2, 32\]"),
        ({"embed": [1, 2, 3]}, "2 unexpected tensors"),
    ):
        path.write_text(json.dumps(values | {"trainable_token_indices": indices}))
        stored = read_adapter(tmp_path / "adapter")
        with pytest.raises(InputRefused, match=words):
            install_adapters(tiny_llama(), stored.lora, start=stored)


def test_a_module_whose_tables_cannot_be_told_is_refused():
    for module, words in (
        (
            nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)),
            "the head is an nn.Linear, but .* has none that can be found",
        ),
        (nn.Sequential(nn.Linear(4, 4)), "the embedding .* has none that can be found"),
        (
            nn.Sequential(nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 4)),
            "the embedding .* has none that can be found",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            adapt(module, Lora(2, tokens=(1,)))
        assert all(p.requires_grad for p in module.parameters()), "nothing was changed"
    with pytest.raises(UsageError, match="id 61 has no row in a table of 61"):
        adapt(tiny_llama(), Lora(2, tokens=(1, 61)))
