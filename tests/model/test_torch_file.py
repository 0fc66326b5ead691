# Run: pytest tests/model/test_torch_file.py
"""A checkpoint of torch.save: its model computes here what it computed there, or it is refused by
name.
"""

from __future__ import annotations

import os
import zipfile

import pytest
import torch

from clocks import least_s
from monograph.errors import InputRefused
from monograph.laws.comparisons import relative_error
from monograph.model import torch_file
from monograph.model.config import LlamaConfig
from monograph.model.hub import assemble
from monograph.run.models import load, load_with_tokenizer, save
from monograph.text.tokenizer import Tokenizer
from reference.article import Pretraining


def _state(**sizes):
    torch.manual_seed(0)
    return Pretraining(**sizes).state_dict()


def _saved(path, content):
    torch.save(content, path)
    return path


def _without(state, *parts):
    return {
        name: tensor for name, tensor in state.items() if not any(part in name for part in parts)
    }


WRAPPINGS = {
    "alone": lambda state: state,
    "beside the optimizer": lambda state: {
        "model": state,
        "optimizer": {"state": {}, "lr": 1e-3},
        "epoch": 3,
    },
    "compiled": lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
    "parallel": lambda state: {
        "model_state_dict": {f"module._orig_mod.{name}": t for name, t in state.items()}
    },
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_articles_model_computes_the_same_here(tmp_path, wrapping):
    torch.manual_seed(0)
    theirs = Pretraining()
    path = _saved(tmp_path / "model.pth", WRAPPINGS[wrapping](theirs.state_dict()))
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    ours, tokenizer = load(path)
    assert ours.config == LlamaConfig(
        vocab_size=70,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=40,
    )
    assert tokenizer.vocab_size == 259
    tokens = torch.randint(70, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative_error(ours.logits(ours(tokens)), theirs(tokens)) < 1e-6
        # In float64 what is left is the tables, which the file holds in fp32.
        assert relative_error(ours.double().logits(ours(tokens)), theirs.double()(tokens)) < 1e-6


def test_it_goes_on_to_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = Pretraining()
    config, tensors = torch_file.read(_saved(tmp_path / "model.pth", theirs.state_dict()), {})
    save(assemble(config, tensors, tmp_path), tmp_path / "out")
    exported, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert relative_error(exported(tokens).logits, theirs(tokens)) < 1e-6


def test_loaded_weights_do_not_follow_the_file(tmp_path):
    path = _saved(tmp_path / "model.pth", _state())
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    model, _ = load(path)
    before = model.lm_head.weight.clone()
    path.write_bytes(b"\1" * path.stat().st_size)
    assert torch.equal(model.lm_head.weight, before)


def test_without_tables_heads_and_positions_come_from_the_keys_or_the_preset(tmp_path):
    path = _saved(tmp_path / "model.pth", _without(_state(), "rotary_emb"))
    config, _ = torch_file.read(
        path, {"num_attention_heads": 6, "max_position_embeddings": 100, "rope_theta": 5e5}
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 8)
    assert (config.max_position_embeddings, config.rope_theta) == (100, 5e5)
    # The article's own shape; all tensors are views of the same zeros, which the file then holds
    # once.
    with torch.device("meta"):
        empty = Pretraining(50_000, 1, 768, 3072, 12, 12, 3).state_dict()
    zeros = torch.zeros(50_000 * 768, dtype=torch.float16)
    state = {
        name: zeros[: t.numel()].view(t.shape) for name, t in _without(empty, "rotary_emb").items()
    }
    assert torch_file.read(_saved(path, state), {})[0] == LlamaConfig.preset("llama-179m")


def test_the_rotary_base_is_read_off_the_tables(tmp_path):
    state = Pretraining().state_dict()
    angles = torch.arange(40)[:, None] * 5e5 ** (-torch.arange(0, 8, 2) / 8)
    state |= {
        f"base_model.rotary_emb.{name}": torch.cat([getattr(angles, name)()] * 2, -1)
        for name in ("cos", "sin")
    }
    config, _ = torch_file.read(_saved(tmp_path / "model.pth", state), {})
    assert config.rope_theta == 5e5


def test_a_head_that_is_not_stored_can_be_said_to_be_the_embedding(tmp_path):
    path = _saved(tmp_path / "base.pth", _without(_state(), "lm_head"))
    config, tensors = torch_file.read(path, {"tie_word_embeddings": True})
    model = assemble(config, tensors, path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


class _Harm:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def _huge(state):
    return state | {"lm_head.weight": torch.zeros(1).expand(10**6, 10**6)}


def _bomb(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**8))
        archive.writestr("archive/version", "3")


BAD = {
    "a bomb": (
        lambda p, s: _bomb(p),
        {},
        r"'archive/data.pkl' is compressed or larger than the file",
    ),
    "empty": (lambda p, s: p.write_bytes(b""), {}, r"not weights that torch.save wrote"),
    "text": (lambda p, s: p.write_text("weights"), {}, r"not weights that torch.save wrote"),
    "cut": (
        lambda p, s: (_saved(p, s), p.write_bytes(p.read_bytes()[:-200])),
        {},
        r"not weights that torch.save wrote",
    ),
    "code": (lambda p, s: _saved(p, {"model": _Harm()}), {}, r"not weights that torch.save wrote"),
    "a module": (
        lambda p, s: _saved(p, Pretraining()),
        {},
        r"not weights .* save model.state_dict\(\) alone",
    ),
    "a tensor": (lambda p, s: _saved(p, torch.ones(3)), {}, r"holds no state dict"),
    "an optimizer": (
        lambda p, s: _saved(p, {"state": {}, "lr": 1.0}),
        {},
        r"state is not a plain tensor",
    ),
    "another model": (
        lambda p, s: _saved(p, {"weight": torch.ones(2, 2)}),
        {},
        r"no matrix model.embed_tokens.weight",
    ),
    "huge": (
        lambda p, s: _saved(p, _huge(s)),
        {},
        r"lm_head.weight is not a plain tensor, all of whose elements are in the file",
    ),
    "the base model": (
        lambda p, s: _saved(p, _without(s, "lm_head")),
        {},
        r"there is no lm_head.weight",
    ),
    "no heads": (
        lambda p, s: _saved(p, _without(s, "rotary")),
        {},
        r"do not show how many heads .* model.num_attention_h",
    ),
    "wrong heads": (
        lambda p, s: _saved(p, s),
        {"num_attention_heads": 3},
        r"num_attention_heads = 3, but .* have 6",
    ),
    "wrong width": (
        lambda p, s: _saved(p, s),
        {"hidden_size": 64},
        r"model.hidden_size = 64, but the weights in .* have 48",
    ),
    "other heads": (
        lambda p, s: _saved(p, _without(s, "rotary")),
        {"num_attention_heads": 5},
        r"hidden_size = 48 is not a multiple of num_attention_heads = 5",
    ),
    "another base": (
        lambda p, s: _saved(p, s),
        {"rope_theta": 5e5},
        r"rotary_emb.cos is not that of rope_theta = 500000",
    ),
    "tables never filled": (
        lambda p, s: _saved(p, s | {"base_model.rotary_emb.sin": torch.full((40, 8), torch.nan)}),
        {},
        r"rotary_emb.sin is not that of rope_theta = 10000",
    ),
    "empty tables": (
        lambda p, s: _saved(p, s | {"base_model.rotary_emb.cos": torch.ones(40, 0)}),
        {},
        r"no matrix .*cos",
    ),
    "a layer missing": (
        lambda p, s: _saved(p, _without(s, "layers.1.mlp")),
        {},
        r"3 missing in the weights",
    ),
    "a bias": (
        lambda p, s: _saved(p, s | {"lm_head.bias": torch.ones(70)}),
        {},
        r"1 unexpected .* 'lm_head.bias'",
    ),
    "a wrong shape": (
        lambda p, s: _saved(p, s | {"base_model.layers.1.mlp.up_proj.weight": torch.ones(81, 48)}),
        {},
        r"up_proj.weight has shape \[81, 48\], expected \[80, 48\] by the other tensors \(intermediate_size, hidden",
    ),
    "whole numbers": (
        lambda p, s: _saved(p, s | {"lm_head.weight": s["lm_head.weight"].long()}),
        {},
        r"stored as .*int64",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_what_is_no_such_checkpoint_is_refused_by_name(tmp_path, monkeypatch, fault):
    write, sizes, said = BAD[fault]
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model.pth", _state())

    def refused() -> None:
        with pytest.raises(InputRefused, match=said) as refusal:
            torch_file.read(tmp_path / "model.pth", sizes)
        assert "\n" not in str(refusal.value)

    assert least_s(refused, 1) < 1
    assert not (tmp_path / "harmed").exists()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputRefused, match=r"nothing.pth: no such file; it is looked for from"):
        torch_file.read(tmp_path / "nothing.pth", {})


def test_without_a_tokenizer_beside_it_the_model_is_loaded_and_what_writes_text_is_refused(
    tmp_path,
):
    path = _saved(tmp_path / "model.pth", _state())
    assert load(path)[1] is None
    said = r"model.pth: there is no tokenizer.json: copy the model's own there"
    with pytest.raises(InputRefused, match=said):
        load_with_tokenizer(path)


def test_an_archive_of_many_entries_is_not_listed(tmp_path, monkeypatch):
    torch.save({f"tensor {index}": torch.zeros(1) for index in range(9)}, tmp_path / "a.pth")
    monkeypatch.setattr(torch_file, "MAX_LISTED_BYTES", 500)
    monkeypatch.setattr(torch_file.zipfile, "ZipFile", lambda *_: pytest.fail("it was listed"))
    with pytest.raises(InputRefused, match="an archive, or one of more entries than a model has"):
        torch_file.read(tmp_path / "a.pth", {})
