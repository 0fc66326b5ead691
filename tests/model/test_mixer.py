"""Run: pytest tests/model/test_mixer.py

A mixer that is written in one file (tests/mean_mixer.py), with its row of `LAYER_TYPES` and a family
that has it, trains, samples, is planned, saved and loaded: no other code asks which kind a layer is.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import monograph as mono
from batches import captured_to_train, packed, tiny_config, tiny_llama
from mean_mixer import Mean
from monograph.decode.cache import KVCache
from monograph.decode.completion import generate
from monograph.decode.sampling import Sampling
from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES, PRESETS
from monograph.model.gguf import save_gguf
from monograph.model.hub import load_model, save_model
from monograph.model.layer_types import FULL_ATTENTION, LAYER_TYPES, LayerType
from monograph.model.llama import Llama
from monograph.model.mixer import mixer_of
from monograph.optim import AdamW
from monograph.predict.estimate import stored_numbers
from monograph.predict.footprint import Work, footprint, layer_period
from monograph.predict.roofline import flops_per_token
from monograph.resident import Resident
from monograph.text.tokenizer import Tokenizer

TYPES = ("mean", FULL_ATTENTION)
SOURCES = Path(mono.__file__).parent


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_TYPES, "mean", LayerType("mean_mixer:Mean"))
    row = FAMILIES["llama"]._replace(
        optional_keys=("attention_bias", "layer_types"),
        other_layer_type="mean",
        full_attention_every=2,
        llama_cpp=None,
    )
    monkeypatch.setitem(FAMILIES, "meanformer", row)


def tiny(dtype: torch.dtype = torch.float64, **sizes: int) -> Llama:
    return tiny_llama(dtype, model_type="meanformer", layer_types=TYPES, **sizes)


def test_a_new_mixer_is_in_the_layers_that_name_it(tmp_path: Path) -> None:
    model = tiny(torch.float32, vocab_size=259)
    assert [mixer_of(model.config, layer) for layer in (0, 1)][0] is Mean
    assert model.get_submodule("model.layers.0.mean").in_proj.weight.std() < 0.1, "initialised"
    assert model.config.parameter_count() == sum(p.numel() for p in model.parameters())
    assert LlamaConfig.from_hf(model.config.to_hf()) == model.config
    new = LlamaConfig.preset(next(iter(PRESETS)), family="meanformer")
    assert new.layer_types[-1] == FULL_ATTENTION and "mean" in new.layer_types
    save_model(model, tmp_path / "saved", Tokenizer.bytes())
    loaded = load_model(tmp_path / "saved")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_new_mixer_packs_documents_as_separate_rows() -> None:
    model, batch = tiny().eval(), packed(2)
    with torch.no_grad():
        hidden_BTD = model(batch["tokens"], batch["segments"], batch["positions"])
        for row, segments_T in enumerate(batch["segments"]):
            for document in set(segments_T.tolist()) - {0}:
                tokens_1T = batch["tokens"][row, segments_T == document][None]
                alone_TD = model(tokens_1T)[0]
                torch.testing.assert_close(
                    hidden_BTD[row, segments_T == document], alone_TD, rtol=0, atol=1e-12
                )


def test_a_new_mixer_samples_from_its_cache() -> None:
    model, tokenizer = tiny(vocab_size=259).eval(), Tokenizer.bytes()
    prompts = ["", "some words", "x" * 20]
    for prompt, written in zip(
        prompts, generate(model, tokenizer, prompts, Sampling(0), max_tokens=12), strict=True
    ):
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        for drawn in written.token_ids:
            with torch.no_grad():
                logits_V = model.logits(model(torch.tensor([ids]))[0, -1])
            assert drawn == int(logits_V.argmax())
            ids.append(drawn)


def test_a_new_mixer_trains_streamed_as_resident_and_captured_as_eager() -> None:
    window = packed(2)
    engines = [
        Resident(tiny(torch.float32), optim=AdamW(lr=1e-2)),
        mono.Streamed(tiny(torch.float32), optim=AdamW(lr=1e-2)),
        Resident(tiny(torch.float32), optim=AdamW(lr=1e-2)),
    ]
    captured_to_train(engines[2], window, "eager")
    for engine in engines:
        for _ in range(2):
            engine.accumulate(window)
            engine.update()
    resident, streamed, captured = (engine.state().model for engine in engines)
    assert "model.layers.0.mean.in_proj.weight" in resident
    for name, weight in resident.items():
        assert torch.equal(weight, streamed[name]), name
        torch.testing.assert_close(weight, captured[name], rtol=0, atol=1e-4)


def test_plans_know_what_a_new_mixer_costs() -> None:
    config = tiny(num_hidden_layers=2).config
    plain = tiny_config(num_hidden_layers=2)
    assert layer_period(config) == 2
    length = 16
    assert flops_per_token(config, length) == (
        6 * config_matrices(config)
        + 3 * config.hidden_size
        + 12 * config.num_attention_heads * config.head_dim * (length + 1) / 2
    )
    slots, dtype = 64, torch.float32
    attention_bytes = KVCache.bytes_per_row(plain, slots, dtype) // 2
    own_bytes = 4 * config.hidden_size + 8
    assert KVCache.bytes_per_row(config, slots, dtype) == attention_bytes + own_bytes
    work = Work(config, rows=2, length=length, optim=AdamW(), compile="none")
    assert footprint(work).peak_bytes > 16 * config.parameter_count() - 1
    assert stored_numbers(work, "none") > 0


def config_matrices(config: LlamaConfig) -> int:
    """The numbers of the matrices by which a token is multiplied."""
    model = Llama(config)
    in_blocks = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    return in_blocks + model.lm_head.weight.numel()


def test_llama_cpp_has_no_form_for_a_new_mixer(tmp_path: Path) -> None:
    model = tiny(torch.float32, vocab_size=259)
    with pytest.raises(InputRefused, match="meanformer"):
        save_gguf(model, tmp_path / "out", Tokenizer.bytes(), "f32", warn=print)


def test_only_the_table_and_a_kinds_own_file_know_which_kinds_there_are() -> None:
    """A family's row names the kind of its layers, and a scaling of rotary positions its attention. The
    kernels of decode steps are written for one kind; other kinds take the model's own forward pass.
    """
    named = re.compile(
        r"\bLINEAR_ATTENTION\b|\bGatedDeltaNet\b|linear_attn|is_delta_net|\bMAMBA\b|\bMamba2\b|\bCONVOLUTION\b|\bShortConv\b"
    )
    files = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if named.search(path.read_text())
    }
    kinds = {f"model/{name}.py" for name in ("layer_types", "delta_net", "mamba", "short_conv")}
    of_families = ("families", "bamba_keys", "granite_keys", "lfm2_keys", "nemotron_keys")
    declared = kinds | {f"model/{name}.py" for name in of_families}
    kernels = {"decode/fast_delta_net.py", "decode/fast_forward.py", "ops/delta_net_kernels.py"}
    assert files == declared | kernels
