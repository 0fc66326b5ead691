# Run: pytest tests/model/test_sampling_defaults.py
"""How a model's makers want its texts drawn stays with the model, in exports of both formats."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from llama_cpp import LlamaCpp
from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.gguf import FILE, save_gguf
from monograph.model.hub import load_model, save_model
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed"
)
TOKENIZER = Tokenizer.bytes()
SMALL = LlamaConfig(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=1,
    max_position_embeddings=256,
)
DEFAULTS = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05,
    "no_repeat_ngram_size": 3,
}  # fmt: skip


def folder_with(folder: Path, **values: object) -> Path:
    """A folder of a model, with these values in its generation_config.json beside those that were
    there.
    """
    save_model(Llama(SMALL), folder, TOKENIZER)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_an_exported_folder_has_them(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    base = folder_with(
        tmp_path / "base", **DEFAULTS, temperature_of_others=3.0, max_new_tokens=None
    )
    save_model(load_model(base), tmp_path / "out", TOKENIZER)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == DEFAULTS | {"bos_token_id": 0, "eos_token_id": 1}
    read = GenerationConfig.from_pretrained(tmp_path / "out")
    assert {key: getattr(read, key) for key in DEFAULTS} == DEFAULTS and read.eos_token_id == 1


def test_without_any_the_file_is_as_before(tmp_path: Path) -> None:
    base = folder_with(tmp_path / "base", temperature=None)
    save_model(load_model(base), tmp_path / "out", TOKENIZER)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1}
    (base / "generation_config.json").unlink()
    assert load_model(base).sampling == {}


@needs_gguf
def test_llama_cpp_draws_by_them(tmp_path: Path) -> None:
    model = load_model(folder_with(tmp_path / "base", **DEFAULTS))
    save_gguf(model, tmp_path / "out", TOKENIZER, None, lambda line: None)
    used = LlamaCpp(tmp_path / "out" / FILE).defaults()
    shown = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repeat_penalty": 1.05,
        "repeat_last_n": 256,
    }
    assert {key: used[key] for key in shown} == pytest.approx(shown)
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    for line in (
        "temperature 0.6",
        "top_k 20",
        "top_p 0.95",
        "min_p 0.01",
        "repeat_penalty 1.05",
        "repeat_last_n -1",
    ):
        assert f"PARAMETER {line}" in lines


@needs_gguf
def test_a_model_that_is_not_to_be_drawn_from_is_greedy(tmp_path: Path) -> None:
    """In transformers the temperature then counts for nothing."""
    model = load_model(folder_with(tmp_path / "base", do_sample=False, temperature=0.6, top_k=20))
    save_gguf(model, tmp_path / "out", TOKENIZER, None, lambda line: None)
    assert LlamaCpp(tmp_path / "out" / FILE).defaults()["temperature"] == 0.0
    assert "PARAMETER temperature 0\n" in (tmp_path / "out" / "Modelfile").read_text()
    model.sampling = {}
    save_gguf(model, tmp_path / "plain", TOKENIZER, None, lambda line: None)
    assert LlamaCpp(tmp_path / "plain" / FILE).defaults()["temperature"] > 0
    assert "PARAMETER temperature" not in (tmp_path / "plain" / "Modelfile").read_text()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": "hot"}, "temperature is 'hot': expected a number"),
        ({"top_k": True}, "top_k is 'True': expected a number"),
        ({"top_p": 1e300}, r"top_p is '1e\+300': expected a number up to 2147483647"),
        ({"do_sample": 1}, "do_sample is '1': expected true or false"),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, values: dict, said: str) -> None:
    base = folder_with(tmp_path / "base", **values)
    with pytest.raises(InputRefused, match=f"generation_config.json: {said}"):
        load_model(base)
