# Run: pytest tests/model/test_hub.py
"""Model folders: to transformers and back, sharded and tied, with the tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from batches import tiny_llama
from monograph.errors import InputRefused
from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.hub import load_model, read_config, save_model, tokenizer_file
from monograph.model.llama import Llama
from monograph.model.scaling import Llama3Scaling
from monograph.text.tokenizer import Tokenizer as OurTokenizer
from monograph.text.tokenizer_config import TokenizerConfig
from reference import article

TIED = LlamaConfig.preset("nano", vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=16)
UNTIED = replace(
    TIED, tie_word_embeddings=False, rope_scaling=Llama3Scaling(4.0, 1.0, 4.0, 16), rope_theta=5e5
)
SHARD_BYTES = 20_000


class _Tokenizer:
    """Byte-level, with a beginning and an end of document."""

    bos_id, eos_id = 0, 1
    config, inserts_space = TokenizerConfig(), False

    def save(self, path):
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace

        tokenizer = Tokenizer(
            WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?")
        )
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.save(str(path))


@torch.no_grad()
def _logits(model):
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    return model.logits(model(tokens)) if isinstance(model, Llama) else model(tokens).logits


def _equal(one, other):
    return one.state_dict().keys() == other.state_dict().keys() and all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


@pytest.fixture
def saved(tmp_path):
    save_model(Llama(TIED), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("max_shard_bytes", [SHARD_BYTES, 10**9])
@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_what_is_saved_is_what_is_loaded(tmp_path, config, max_shard_bytes):
    model = Llama(config, seed=3)
    save_model(model, tmp_path / "model", max_shard_bytes=max_shard_bytes)
    back = load_model(tmp_path / "model")
    assert back.config == config
    assert _equal(model, back)
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == config.tie_word_embeddings
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in back.parameters())
    assert (tmp_path / "model" / "model.safetensors").exists() == (max_shard_bytes > SHARD_BYTES)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    sizes = [sum(tensor.nbytes for tensor in load_file(shard).values()) for shard in shards]
    assert max(sizes) <= max_shard_bytes
    assert all(one + following > max_shard_bytes for one, following in pairwise(sizes))


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_a_compiled_model_is_saved_by_its_own_names(tmp_path, config):
    whole, in_parts = Llama(config, seed=3), Llama(config, seed=3)
    compiled = in_parts.model.layers[0] = torch.compile(in_parts.model.layers[0], backend="eager")
    for name, model in (("whole", torch.compile(whole, backend="eager")), ("parts", in_parts)):
        save_model(model, tmp_path / name)
        assert _equal(whole, load_model(tmp_path / name))
    assert in_parts.model.layers[0] is compiled, "saving changes nothing of the model"


@pytest.mark.parametrize("max_shard_bytes", [SHARD_BYTES, 10**9])
@pytest.mark.parametrize("config", [TIED, UNTIED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_is_saved(tmp_path, config, max_shard_bytes, dtype):
    from transformers import AutoModelForCausalLM

    model = Llama(replace(config, eos_token_id=(1, 5))).to(dtype)
    save_model(model, tmp_path / "model", max_shard_bytes=max_shard_bytes)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, dtype="auto"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == dtype
    assert theirs.generation_config.eos_token_id == [1, 5]
    exact = Llama(config).to(dtype).double()
    ours, expected = _logits(model), _logits(theirs)
    assert relative_error(ours, expected) < (
        1e-6 if dtype == torch.float32 else 2 * relative_error(expected, _logits(exact))
    )


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_what_transformers_saved_is_loaded(tmp_path, config, shard):
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM(TheirConfig(**config.to_hf()))
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard != "1GB")
    model = load_model(tmp_path)
    assert model.config == config
    assert relative_error(_logits(model), _logits(theirs)) < 1e-6


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoints_read_what_is_saved(tmp_path):
    """So larger trainers begin from it."""
    from torch.distributed import checkpoint

    model = Llama(UNTIED, seed=3)
    save_model(model, tmp_path / "model", max_shard_bytes=SHARD_BYTES)
    back = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    checkpoint.load(
        back, storage_reader=checkpoint.HuggingFaceStorageReader(str(tmp_path / "model"))
    )
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_the_tokenizer_travels_with_the_model(tmp_path):
    from transformers import AutoTokenizer

    save_model(Llama(TIED), tmp_path / "model", _Tokenizer())
    assert tokenizer_file(tmp_path / "model") == tmp_path / "model" / "tokenizer.json"
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.eos_token) == (0, 1, "</s>")
    assert theirs("a b", add_special_tokens=False)["input_ids"] == [2, 3]
    assert (
        read_config(tmp_path / "model").bos_token_id,
        read_config(tmp_path / "model").eos_token_id,
    ) == (0, 1)
    assert (
        json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == 1
    )


def test_a_tokenizer_from_elsewhere_reads_the_same_after_it_was_exported(tmp_path):
    from transformers import AutoTokenizer

    theirs = article.tokenizer(["the cat sat on the mat"] * 9)
    ours = OurTokenizer(json.loads(theirs.to_str()), "x")
    save_model(Llama(replace(TIED, vocab_size=ours.vocab_size)), tmp_path / "model", ours)
    back = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in ("the cat", " sat", "\u2460 the caf\u00e9"):  # it can write neither
        wanted = theirs.encode(text, add_special_tokens=False)
        assert back(text, add_special_tokens=False)["input_ids"] == wanted.ids
        assert back.decode(wanted.ids, skip_special_tokens=True) == theirs.decode(wanted.ids)
    again = OurTokenizer.from_file(tmp_path / "model")
    assert again.hash == ours.hash and again.encode("the cat") == ours.encode("the cat")
    assert (
        json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["add_prefix_space"]
        is True
    )


def test_without_a_tokenizer_there_is_none(saved):
    assert tokenizer_file(saved) is None


def test_a_tied_head_that_is_stored_too_is_accepted_if_it_is_the_embedding(saved):
    state = load_file(saved / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    save_file({**state, "lm_head.weight": embedding.clone()}, saved / "model.safetensors")
    assert load_model(saved).lm_head.weight.shape == embedding.shape
    save_file({**state, "lm_head.weight": embedding + 1}, saved / "model.safetensors")
    with pytest.raises(
        InputRefused, match=r"lm_head.weight differs from model.embed_tokens.weight"
    ):
        load_model(saved)


def test_stored_rotary_frequencies_are_left_aside(saved):
    state = load_file(saved / "model.safetensors")
    save_file(
        {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        saved / "model.safetensors",
    )
    assert _equal(load_model(saved), Llama(TIED))


def test_weights_are_loaded_in_the_dtype_that_is_asked_for(saved):
    assert load_model(saved, dtype=torch.float64).lm_head.weight.dtype == torch.float64
    state = load_file(saved / "model.safetensors")
    save_file(
        {**state, "model.norm.weight": state["model.norm.weight"].bfloat16()},
        saved / "model.safetensors",
    )
    with pytest.raises(InputRefused, match="stored as BF16 and F32; say which dtype"):
        load_model(saved)
    assert load_model(saved, dtype=torch.float32).model.norm.weight.dtype == torch.float32


def test_loaded_weights_do_not_follow_the_file(saved):
    model, path = load_model(saved), saved / "model.safetensors"
    before = model.lm_head.weight.clone()
    path.write_bytes(path.read_bytes()[:1000] + b"\1" * (path.stat().st_size - 1000))
    assert torch.equal(model.lm_head.weight, before)


def test_a_joined_tensor_of_other_rows_than_its_parts_is_refused_by_name(tmp_path):
    save_model(tiny_llama(model_type="phi3"), tmp_path / "phi3")
    stored = load_file(tmp_path / "phi3" / "model.safetensors")
    stored["model.layers.1.mlp.gate_up_proj.weight"] = stored[
        "model.layers.1.mlp.gate_up_proj.weight"
    ][1:].clone()
    save_file(stored, tmp_path / "phi3" / "model.safetensors")
    with pytest.raises(
        InputRefused, match=r"mlp\.gate_up_proj\.weight has shape .*, expected (\d+) \+ \1 rows"
    ):
        load_model(tmp_path / "phi3")


def test_a_joined_tensor_that_the_family_has_not_is_refused_by_name(tmp_path):
    save_model(tiny_llama(model_type="phi3"), tmp_path / "phi3")
    stored = load_file(tmp_path / "phi3" / "model.safetensors")
    stored["model.layers.1.self_attn.qkv_proj.bias"] = torch.zeros(8)
    save_file(stored, tmp_path / "phi3" / "model.safetensors")
    with pytest.raises(
        InputRefused, match=r"1 unexpected in the weights of a phi3, .*1.self_attn.qkv_proj.bias"
    ):
        load_model(tmp_path / "phi3")


def test_a_folder_that_holds_something_is_not_overwritten(saved):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(InputRefused, match="not an empty folder"):
        save_model(Llama(TIED, seed=1), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    (saved.parent / "empty").mkdir()
    save_model(Llama(TIED, seed=1), saved.parent / "empty")
    assert _equal(load_model(saved.parent / "empty"), Llama(TIED, seed=1))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputRefused, match="nothing: no such folder"):
        load_model(tmp_path / "nothing")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(
        InputRefused, match="model.safetensors: a file; expected a Hugging Face model folder"
    ):
        load_model(tmp_path / "model.safetensors")
